//! `loaf pull hf:OWNER/NAME[:FILE]`: a loaf from the Hugging Face hub, under a name that
//! `loaf list` shows.
//!
//! The one command that touches the network. What is fetched lies in the Hugging Face cache; the
//! name in the folder of models is a hard link to it, or a copy where the two are on different
//! disks.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use loaf_formats::output::Output;
use loaf_hub::{Error, Hub, Reference};
use loaf_runtime::Model;

use crate::args::PullArgs;
use crate::progress::Progress;
use crate::{Bytes, Failure, Io, models};

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        match error {
            Error::Reference(message) => Failure::Usage(message),
            other => Failure::runtime(other),
        }
    }
}

pub(crate) fn pull(args: &PullArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let Some(reference) = args.source.strip_prefix("hf:") else {
        return Err(Failure::Usage(format!("{}: expected hf:OWNER/NAME[@REVISION][:FILE]", args.source)));
    };
    let at = Reference::parse(reference)?;
    let hub = Hub::of_environment(io.var)?;
    let file = match &at.file {
        Some(file) => file.clone(),
        None => the_loaf(&hub, &at)?,
    };
    let name = match &args.name {
        Some(name) => {
            models::plain(name).map(str::to_owned).ok_or_else(|| Failure::Usage(format!("{name}: not a plain name")))?
        }
        None => Path::new(&file).file_stem().and_then(|s| s.to_str()).unwrap_or("model").to_owned(),
    };
    let is_loaf = file.ends_with(".loaf");
    let target = match (is_loaf, models::folder(io)) {
        (true, None) => return Err(Failure::usage(models::NO_HOME)),
        (true, Some(folder)) => Some(folder.join(format!("{name}.loaf"))),
        (false, _) => None,
    };
    let mut progress = Progress::new(io);
    let found = hub.file(&at, &file, &mut |p| {
        progress.at(p.done, p.total, format_args!("of {} of {}", Bytes(p.total), p.file), io);
    });
    progress.clear(io);
    let found = found?;
    let Some(target) = target else {
        // Something else than a loaf: it stays where it is, for `bake build`.
        io.print(format_args!("{}\n", found.display()))?;
        return Ok(0);
    };
    let id = |path: &Path| Model::open(path).map(|model| model.id());
    let new = id(&found).map_err(|e| Failure::Runtime(format!("{}: {e}", found.display())))?;
    if target.exists() {
        if id(&target).is_ok_and(|old| old == new) {
            io.note(format_args!("{name} is there already: {}", target.display()));
            return Ok(0);
        }
        return Err(Failure::Runtime(format!(
            "{}: another model has this name; 'loaf rm {name}' removes it, --name gives another",
            target.display()
        )));
    }
    put(&found, &target)?;
    io.note(format_args!("{name}: {}, id {new}; 'loaf run -m {name}' asks it", target.display()));
    Ok(0)
}

/// The path of a repository's one loaf.
fn the_loaf(hub: &Hub, at: &Reference) -> Result<String, Failure> {
    let names = hub.names(at)?;
    let loaves: Vec<&String> = names.iter().filter(|name| name.ends_with(".loaf")).collect();
    match loaves.as_slice() {
        [one] => Ok((*one).clone()),
        [] => Err(Failure::Runtime(format!(
            "hf:{0}: no loaf in it; 'bake build hf:{0} -o NAME.loaf' makes one of a checkpoint",
            at.repo
        ))),
        several => {
            let list: Vec<&str> = several.iter().take(20).map(|s| s.as_str()).collect();
            Err(Failure::Usage(format!(
                "hf:{0}: {1} loaves in it; hf:{0}:FILE names one of {2}",
                at.repo,
                several.len(),
                list.join(", ")
            )))
        }
    }
}

/// Gives a whole file of the cache its name in the folder of models.
fn put(found: &Path, target: &Path) -> Result<(), Failure> {
    let fail = |e: std::io::Error| Failure::Runtime(format!("{}: {e}", target.display()));
    let folder = target.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(fail)?;
    // The blob itself: a link to the snapshot's link would hang in the air when the cache is
    // cleaned.
    let blob: PathBuf = found.canonicalize().map_err(fail)?;
    if std::fs::hard_link(&blob, target).is_ok() {
        return Ok(());
    }
    let mut input = File::open(&blob).map_err(fail)?;
    let output = Output::create(target, &[&blob]).map_err(Failure::runtime)?;
    let (mut buffer, mut at) = (vec![0; 1 << 20], 0);
    loop {
        let n = input.read(&mut buffer).map_err(fail)?;
        if n == 0 {
            return output.finish().map_err(Failure::runtime);
        }
        output.write_all_at(&buffer[..n], at).map_err(fail)?;
        at += n as u64;
    }
}
