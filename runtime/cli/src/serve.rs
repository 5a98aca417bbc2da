//! `loaf serve`: from arguments to a server of the crate `loaf-serve`, which does the rest.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use loaf_runtime::Model;
use loaf_serve::api::App;
use loaf_serve::audit::Audit;
use loaf_serve::cache::CacheOptions;
use loaf_serve::hub::{HubOptions, Served};
use loaf_serve::server::{Server, ServerOptions};

use crate::args::{ModelArgs, ServeArgs};
use crate::{Failure, Io, model, read_text_file};

/// A model's name, and what says where it is.
struct Named {
    name: String,
    model: ModelArgs,
}

pub(crate) fn serve(args: &ServeArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let (notes, told) = channel();
    let server = start(args, &notes, io)?;
    for address in &server.addresses {
        io.note(format_args!("loaf: listening on http://{address}"));
    }
    if let Some(socket) = &args.socket {
        io.note(format_args!("loaf: listening on {}", socket.display()));
    }
    // Standard error is this thread's, so others' notes come out here.
    while !server.is_finished() {
        if let Ok(note) = told.recv_timeout(Duration::from_millis(200)) {
            io.warn(note);
        }
    }
    server.wait().map_err(Failure::runtime)?;
    Ok(0)
}

fn start(args: &ServeArgs, notes: &Sender<String>, io: &mut Io<'_>) -> Result<Server, Failure> {
    let keys = match &args.api_key_file {
        None => Vec::new(),
        Some(path) => keys(path)?,
    };
    let audit = match &args.audit {
        None => None,
        Some(path) => Some(Audit::open(path, args.audit_texts).map_err(Failure::runtime)?.into()),
    };
    let options = HubOptions {
        parallel: args.parallel,
        queue: args.queue,
        stall: Duration::from_millis(args.max_stall),
        idle_unload: args.idle_unload.map(Duration::from_secs),
        cache: CacheOptions {
            memory: args.cache_memory,
            folder: args.cache_dir.clone(),
            disk: args.cache_disk,
            ..CacheOptions::default()
        },
        ..HubOptions::default()
    };
    let (mut models, mut threads) = (Vec::new(), Vec::new());
    for named in named(args, io)? {
        let (name, open) = (named.name, model::opener(&named.model, io)?);
        let compute = model::Compute::of(&args.compute, io)?;
        let engine = Box::new(move |loaf: &Model, slots| Ok(compute.engine(loaf, slots)?.0));
        let to = std::sync::Mutex::new(notes.clone());
        let notes = Box::new(move |note: &str| {
            // After the end nobody reads them.
            let _ = to.lock().unwrap_or_else(PoisonError::into_inner).send(note.to_owned());
        });
        let started = Served::start(&name, open, engine, options.clone(), notes);
        let (served, thread) = started.map_err(|e| Failure::Runtime(format!("{name}: {e}")))?;
        if args.compute.verbose {
            let loaded = served.loaded().map_err(Failure::runtime)?;
            io.note(format_args!("loaf: {name} is {}", loaded.model.id()));
        }
        models.push(served);
        threads.push(thread);
    }
    let app = App::new(models, audit);
    // Without addresses the socket is all there is.
    let local = ServerOptions::default().listen;
    let listen = if args.listen.is_empty() && args.socket.is_none() { local } else { args.listen.clone() };
    let options = ServerOptions {
        listen,
        socket: args.socket.clone(),
        keys,
        hosts: args.allow_host.clone(),
        body: usize::try_from(args.max_body).unwrap_or(usize::MAX),
        connections: args.max_connections,
        grace: Duration::from_secs(args.grace),
        signals: io.signals,
        ..ServerOptions::default()
    };
    Server::start(app, threads, options).map_err(Failure::runtime)
}

/// The models that the arguments name, or the one that there is.
fn named(args: &ServeArgs, io: &Io<'_>) -> Result<Vec<Named>, Failure> {
    let stem = |path: &Path| path.file_stem().map_or_else(|| "model".to_owned(), |s| s.to_string_lossy().into_owned());
    if args.models.is_empty() {
        let name = model::path(&args.model, io).map_or_else(|| "default".to_owned(), |path| stem(&path));
        return Ok(vec![Named { name, model: args.model.clone() }]);
    }
    let mut out: Vec<Named> = Vec::new();
    for given in &args.models {
        let text = given.to_string_lossy();
        // A file whose name has such a sign in it is a file.
        let (name, path) = match text.split_once('=') {
            Some((name, path)) if !given.exists() && !name.is_empty() => (name.to_owned(), PathBuf::from(path)),
            _ => (stem(given), given.clone()),
        };
        if out.iter().any(|n| n.name == name) {
            return Err(Failure::Usage(format!("--model: two models of the name {name}; say NAME=FILE")));
        }
        out.push(Named { name, model: ModelArgs { model: Some(path), ..args.model.clone() } });
    }
    Ok(out)
}

/// Keys, one a line; what begins with '#' is a comment.
fn keys(path: &Path) -> Result<Vec<String>, Failure> {
    let text = read_text_file(path)?;
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    if keys.is_empty() {
        return Err(Failure::Usage(format!("{}: expected a key a line, found none", path.display())));
    }
    if let Some(short) = keys.iter().position(|k| k.len() < 16) {
        let message = format!("{}: key {}: expected at least 16 characters, found fewer", path.display(), short + 1);
        return Err(Failure::Usage(message));
    }
    Ok(keys)
}
