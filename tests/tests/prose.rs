//! Prose and comments are at most 100 columns wide, where a line can be broken.

use std::fs;
use std::path::{Path, PathBuf};

const COLUMNS: usize = 100;

/// Every file of ours with this extension, fixtures and what builds leave behind not among them.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry")) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap_or_default());
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "fixtures", "checkpoint", "node_modules"].contains(&&*name) {
                files(&path, extension, found);
            }
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
}

/// Whether a line is longer than it has to be: a space stands before its last column that is in no
/// code span.
fn too_long(line: &str, columns: usize) -> bool {
    if line.chars().count() <= columns {
        return false;
    }
    let indent = line.len() - line.trim_start_matches([' ', '-', '*', '>', '1']).len();
    let mut code = false;
    line.chars().take(columns + 1).enumerate().any(|(i, c)| {
        code ^= c == '`';
        c == ' ' && !code && i > indent + 1
    })
}

/// Numbers of the lines of Markdown that are too long; tables, headings, HTML and code blocks are
/// not looked at.
fn long_lines<'a>(lines: impl Iterator<Item = (usize, &'a str, usize)>) -> Vec<usize> {
    let (mut fence, mut indented, mut blank) = (false, false, true);
    let mut found = Vec::new();
    for (number, line, columns) in lines {
        let text = line.trim_start();
        indented = line.starts_with("    ") && (blank || indented);
        blank = text.is_empty();
        if text.starts_with("```") || text.starts_with("~~~") {
            fence = !fence;
        } else if !fence && !indented && !text.starts_with(['|', '#', '<', '[']) && too_long(line, columns) {
            found.push(number);
        }
    }
    found
}

fn of_markdown(text: &str) -> Vec<usize> {
    long_lines(text.lines().enumerate().map(|(i, line)| (i + 1, line, COLUMNS)))
}

fn of_rust(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for mark in ["///", "//!", "// "] {
        let lines = text.lines().enumerate().filter_map(|(i, line)| {
            let at = line.find(mark)?;
            line[..at]
                .trim()
                .is_empty()
                .then(|| (i + 1, line[at + mark.len()..].trim_start(), at + mark.trim_end().len() + 1))
        });
        found.extend(long_lines(lines.map(|(i, text, before)| (i, text, COLUMNS - before))));
    }
    found
}

#[test]
fn prose_and_comments_wrap_at_a_hundred_columns() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let mut wrong = Vec::new();
    for (extension, look) in [("md", of_markdown as fn(&str) -> Vec<usize>), ("rs", of_rust)] {
        let mut paths = Vec::new();
        files(root, extension, &mut paths);
        assert!(paths.len() > 10, "{} files", paths.len());
        for path in paths {
            let text = fs::read_to_string(&path).expect("UTF-8");
            wrong.extend(look(&text).into_iter().map(|n| format!("{}:{n}", path.display())));
        }
    }
    assert!(wrong.is_empty(), "{} lines: {:#?}", wrong.len(), &wrong[..wrong.len().min(20)]);
}

#[test]
fn long_lines_are_found_and_what_cannot_be_broken_is_not() {
    let long = "word ".repeat(30);
    let code = format!("`{}`", "a b ".repeat(30));
    let text = format!("{long}\n| {long}|\n# {long}\n```\n{long}\n```\n- {code}\n\n    {long}\n");
    assert_eq!(of_markdown(&text), [1]);
    assert_eq!(of_rust(&format!("    /// {long}\nlet x = 1;\n    //! short\n// {long}\n")), [1, 4]);
}
