//! What a shell command would destroy, so that whoever prints one can say so.
//!
//! A reader of words, not a shell: it splits a command line at quotes, operators and white space and looks at each simple
//! command's name and flags. It errs on the side of a warning and runs nothing, ever. It cannot know what an alias, a variable or
//! a script does.

/// Why a command needs care, the first reason found; `None` if none of the known destructive forms is in it.
pub fn danger(line: &str) -> Option<&'static str> {
    let words = words(line);
    if words.windows(2).any(|w| w[0] == Word::Redirect && matches!(&w[1], Word::Text(t) if is_device(t))) {
        return Some("it writes to a device");
    }
    let mut commands = words.split(|w| *w == Word::Operator);
    commands.find_map(|command| {
        let texts: Vec<&str> = command.iter().filter_map(Word::text).collect();
        simple(&texts)
    })
}

#[derive(Debug, PartialEq, Eq)]
enum Word {
    Text(String),
    /// `|`, `;`, `&`, a newline, a parenthesis or brace: a new command may begin.
    Operator,
    /// `>` or `>>`.
    Redirect,
}

impl Word {
    fn text(&self) -> Option<&str> {
        match self {
            Word::Text(text) => Some(text),
            _ => None,
        }
    }
}

fn words(line: &str) -> Vec<Word> {
    let mut words = Vec::new();
    let mut text: Option<String> = None;
    let mut quote = None;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(q), _) if c == q => quote = None,
            (Some('\''), _) => text.get_or_insert_default().push(c),
            // `find -exec .. \;` ends in a word, not in an operator.
            (_, '\\') => text.get_or_insert_default().extend(chars.next()),
            (Some(_), _) => text.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                text.get_or_insert_default();
            }
            (None, '|' | ';' | '&' | '\n' | '(' | ')' | '`' | '>') => {
                words.extend(text.take().map(Word::Text));
                let next = if c == '>' { Word::Redirect } else { Word::Operator };
                if words.last() != Some(&next) {
                    words.push(next);
                }
            }
            (None, c) if c.is_whitespace() => words.extend(text.take().map(Word::Text)),
            (None, c) => text.get_or_insert_default().push(c),
        }
    }
    words.extend(text.map(Word::Text));
    words
}

fn is_device(path: &str) -> bool {
    path.starts_with("/dev/") && !matches!(path, "/dev/null" | "/dev/stdout" | "/dev/stderr" | "/dev/tty")
}

/// Commands that run the command that follows them.
const PREFIXES: [&str; 10] = ["sudo", "doas", "env", "nohup", "nice", "time", "exec", "command", "xargs", "then"];

fn simple(words: &[&str]) -> Option<&'static str> {
    let base = |w: &str| w.rsplit('/').next().unwrap_or_default().to_string();
    let name = base(words.first()?);
    let rest = &words[1..];
    if PREFIXES.contains(&name.as_str()) {
        // What follows flags and assignments is the command; a flag's own value may stand between, so try each.
        return (0..rest.len()).find_map(|i| simple(&rest[i..]));
    }
    let short = |flag: char| rest.iter().any(|w| w.starts_with('-') && !w.starts_with("--") && w[1..].contains(flag));
    let has = |word: &str| rest.iter().any(|w| *w == word || w.starts_with(&format!("{word}=")));
    let sub = rest.iter().find(|w| !w.starts_with('-')).copied().unwrap_or_default();
    match name.as_str() {
        "rm" if short('r') || short('R') || has("--recursive") => Some("it removes folders with everything in them"),
        "rm" if short('f') || has("--force") || rest.iter().any(|w| w.contains('*')) => {
            Some("it removes files without asking")
        }
        "dd" => Some("it writes raw blocks over its target"),
        "shred" | "wipefs" | "blkdiscard" => Some("it destroys what it is given"),
        "fdisk" | "parted" | "sgdisk" => Some("it changes partitions"),
        "chmod" | "chown" | "chgrp" if short('R') || has("--recursive") => {
            Some("it changes owners or permissions of a whole tree")
        }
        "find" if has("-delete") => Some("it deletes every match"),
        "find" => after(rest, &["-exec", "-execdir", "-ok", "-okdir"]),
        "git" => git(sub, rest, short('f') || has("--force"), short('d') || short('x')),
        "rsync" if has("--delete") || rest.iter().any(|w| w.starts_with("--delete-")) => {
            Some("it deletes files that the source lacks")
        }
        "mv" | "cp" if short('f') => Some("it overwrites without asking"),
        "truncate" => Some("it cuts files to a length"),
        "kill" | "pkill" | "killall" if short('9') || has("-KILL") || has("-SIGKILL") => {
            Some("it kills processes without letting them save")
        }
        "crontab" if short('r') => Some("it removes all scheduled jobs"),
        "docker" | "podman" if sub == "system" && has("prune") => Some("it removes everything that is not in use"),
        "shutdown" | "reboot" | "poweroff" | "halt" => Some("it stops the machine"),
        _ if name.starts_with("mkfs") || name == "mkswap" => Some("it erases a file system"),
        _ => None,
    }
}

/// The danger of the command that one of `flags` introduces.
fn after(words: &[&str], flags: &[&str]) -> Option<&'static str> {
    let at = words.iter().position(|w| flags.contains(w))?;
    simple(&words[at + 1..])
}

fn git(sub: &str, words: &[&str], force: bool, clean: bool) -> Option<&'static str> {
    let has = |word: &str| words.contains(&word);
    match sub {
        "push" if force || has("--force-with-lease") || has("--mirror") => Some("it rewrites history others may have"),
        "push" if has("--delete") || words.iter().any(|w| w.starts_with(':')) => Some("it deletes a remote branch"),
        "reset" if has("--hard") => Some("it throws away changes that are not committed"),
        "clean" if force || clean => Some("it removes files that git does not know"),
        "checkout" | "restore" if has(".") || has("--") => Some("it throws away changes that are not committed"),
        "branch" if has("-D") => Some("it deletes a branch, merged or not"),
        "stash" if has("clear") || has("drop") => Some("it throws away stashed changes"),
        "filter-branch" => Some("it rewrites history"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::danger;

    #[test]
    fn destructive_commands_are_named() {
        for line in [
            "rm -rf build",
            "rm -r -- old",
            "sudo rm -fr /tmp/x",
            "find . -name '*.tmp' -delete",
            "find . -type f -exec rm -f {} +",
            "find logs -name '*.gz' | xargs -0 -n 1 rm -f",
            "ls | xargs rm -rf",
            "dd if=/dev/zero of=disk.img bs=1M count=10",
            "sudo mkfs.ext4 /dev/sdb1",
            "chmod -R 777 .",
            "chown --recursive root src",
            "git push --force origin main",
            "git push -f",
            "git reset --hard HEAD~1",
            "git clean -fdx",
            "cat image > /dev/sda",
            "true && rm -r a",
            "(cd x; rm -r y)",
            "rsync -a --delete a/ b/",
            "kill -9 1234",
            "/bin/rm -r x",
        ] {
            assert!(danger(line).is_some(), "{line}");
        }
    }

    #[test]
    fn harmless_commands_are_not() {
        for line in [
            "",
            "find src -type f -printf '%s %p\\n' | sort -rn | head -n 10",
            "grep -rf patterns.txt src",
            "ls -R",
            "echo 'rm -rf /'",
            "cp -r a b",
            "chmod +x run.sh",
            "git push origin main",
            "git reset --soft HEAD~1",
            "tar -czf backup.tar.gz logs",
            "ls > /dev/null",
            "find . -name '*.rs' -exec sed -i 's/foo/bar/g' {} +",
            "kill 1234",
            "rmdir empty",
            "git checkout -b feature",
        ] {
            assert_eq!(danger(line), None, "{line}");
        }
    }
}
