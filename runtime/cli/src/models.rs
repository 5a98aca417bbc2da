//! Models that have a name: the loaves in one folder.
//!
//! `-m NAME`, LOAF_MODEL and config.toml find them there after files of that name; `loaf list`
//! shows them, `loaf rm` removes them. A model is put there by `bake build -o` or by copying it.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use loaf_formats::container::SectionKind;
use loaf_runtime::Model;
use serde_json::{Value, json};

use crate::args::{ListArgs, RmArgs};
use crate::{Bytes, Failure, Io, config, container, printable};

/// The folder of models, if the environment says where home is.
pub(crate) fn folder(io: &Io<'_>) -> Option<PathBuf> {
    config::folder(io, "XDG_DATA_HOME", ".local/share").map(|home| home.join("models"))
}

/// The file of the model called `name`, if `name` is a plain word and there is one.
pub(crate) fn named(name: &Path, io: &Io<'_>) -> Option<PathBuf> {
    let word = plain(name.to_str()?)?;
    let folder = folder(io)?;
    [folder.join(format!("{word}.loaf")), folder.join(word)].into_iter().find(|path| path.is_file())
}

/// A name that leads to no other folder.
pub(crate) fn plain(name: &str) -> Option<&str> {
    let fine = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']);
    fine.then_some(name)
}

/// Names and files, in order of name.
fn all(folder: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Failure::Runtime(format!("{}: {e}", folder.display()))),
    };
    let files = entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.extension().is_some_and(|e| e == "loaf"));
    let named = files.filter_map(|p| Some((plain(p.file_stem()?.to_str()?)?.to_owned(), p)));
    let mut models: Vec<_> = named.filter(|(_, path)| path.is_file()).collect();
    models.sort();
    Ok(models)
}

pub(crate) const NO_HOME: &str = "no folder for models: set LOAF_HOME, or HOME";

pub(crate) fn list(args: &ListArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let folder = folder(io).ok_or_else(|| Failure::usage(NO_HOME))?;
    let models: Vec<Value> = all(&folder)?.iter().map(|(name, path)| describe(name, path)).collect();
    if args.json {
        io.print(format_args!("{}\n", json!({ "folder": folder.display().to_string(), "models": models })))?;
        return Ok(0);
    }
    if models.is_empty() {
        let folder = folder.display();
        io.print(format_args!(
            "no models in {folder}; 'bake build CHECKPOINT -o {folder}/NAME.loaf' puts one there\n"
        ))?;
        return Ok(0);
    }
    let text = |value: &Value, key: &str| printable(value[key].as_str().unwrap_or_default());
    let width = models.iter().map(|m| text(m, "name").chars().count()).max().unwrap_or(0);
    let mut lines = String::new();
    for model in &models {
        let name = text(model, "name");
        let _ = match model["error"].is_null() {
            true => writeln!(
                lines,
                "{name:width$}  {:>10}  {:>9} tokens of context  {:<12}  {:.12}",
                Bytes(model["file_bytes"].as_u64().unwrap_or(0)).to_string(),
                model["context"].as_u64().unwrap_or(0),
                text(model, "family"),
                text(model, "id"),
            ),
            false => writeln!(lines, "{name:width$}  {}", text(model, "error")),
        };
    }
    io.print(lines)?;
    Ok(0)
}

/// What `loaf list` says of one file.
fn describe(name: &str, path: &Path) -> Value {
    let loaf = match Model::open(path) {
        Ok(loaf) => loaf,
        Err(e) => return json!({ "name": name, "error": format!("cannot be used: {e}") }),
    };
    let container = container(&loaf);
    let manifest = container.section(SectionKind::Manifest).and_then(|m| serde_json::from_slice::<Value>(m).ok());
    json!({
        "name": name,
        "file_bytes": container.head().file_len,
        "context": loaf.plan().context,
        "family": manifest.as_ref().and_then(|m| m["family"].as_str()),
        "chat_template": loaf.chat().template.is_some(),
        "id": loaf.id().to_string(),
    })
}

pub(crate) fn remove(args: &RmArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let folder = folder(io).ok_or_else(|| Failure::usage(NO_HOME))?;
    let models = all(&folder)?;
    let find = |name: &String| {
        let known = models.iter().find(|(n, _)| n == name.strip_suffix(".loaf").unwrap_or(name));
        known.ok_or_else(|| Failure::Usage(format!("{name}: no model of that name; 'loaf list' shows those there are")))
    };
    // Either all of them are there or nothing is removed.
    let found: Vec<_> = args.names.iter().map(find).collect::<Result<_, _>>()?;
    for (_, path) in found {
        fs::remove_file(path).map_err(|e| Failure::Runtime(format!("{}: {e}", path.display())))?;
        io.note(format_args!("removed {}", path.display()));
    }
    Ok(0)
}
