//! `loaf verify`: checks every checksum of a file.
//!
//! Opening has proved head, plan, chat and tokenizer; what is left are the hashes of everything
//! else, the agreement of header and table, the padding, and the leaves of the weights, which
//! threads share out among themselves. With `--run` this machine then replays the golden prompts,
//! in prefill and token by token, and must give the recorded ids.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use loaf_formats::container::{Leaves, SectionKind};
use loaf_formats::golden::{Golden, leader};
use serde_json::json;

use crate::args::{BackendArg, ComputeArgs, VerifyArgs};
use crate::progress::Progress;
use crate::{Bytes, Failure, Io, container, model};
use loaf_runtime::Model;

pub(crate) fn verify(args: &VerifyArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let loaf = model::open_model(&args.model, io)?;
    model::tokenizer(&loaf)?;
    let container = container(&loaf);
    let fail = |e| Failure::Runtime(format!("{e}; the file is damaged, get or bake it again"));
    let leaves = container.verify_small().map_err(fail)?;
    let tensors = container.verify_tensors().map_err(fail)?;
    let total = container.weights().len() as u64;
    verify_leaves(&leaves, total, io)?;
    let weights = tensors.iter().filter(|t| t.is_weight()).count();
    let file_bytes = container.head().file_len;
    let golden = if args.run { Some(replay_golden(&loaf, args.backend, io)?) } else { None };
    if args.json {
        let mut object = json!({ "id": loaf.id().to_string(), "file_bytes": file_bytes, "tensors": weights });
        if let Some(ids) = golden {
            object["golden_ids"] = ids.into();
        }
        io.show_json(&object)?;
    } else {
        let golden = golden.map_or_else(String::new, |ids| format!(", {ids} golden ids"));
        io.print(format_args!("ok {}, {}, {weights} tensors{golden}\n", loaf.id(), Bytes(file_bytes)))?;
    }
    Ok(0)
}

/// Replays every golden case; returns the number of ids compared.
fn replay_golden(loaf: &Model, backend: BackendArg, io: &mut Io<'_>) -> Result<usize, Failure> {
    let bytes = container(loaf).section(SectionKind::Golden).ok_or_else(|| {
        Failure::runtime("--run: this loaf has no golden prompts; bake it with --golden 16, or verify without --run")
    })?;
    let plan = loaf.plan();
    let golden = Golden::decode(bytes, plan.vocab, plan.context).map_err(Failure::runtime)?;
    let mut session = model::session(loaf, &ComputeArgs { backend, ..ComputeArgs::default() }, io)?;
    let (mut compared, mut progress) = (0, Progress::new(io));
    for (i, case) in golden.cases.iter().enumerate() {
        for by_token in [false, true] {
            session.rewind(0).map_err(Failure::runtime)?;
            if by_token {
                case.prompt.iter().try_for_each(|id| session.decode(*id).map(drop)).map_err(Failure::runtime)?;
            } else {
                session.eval(&case.prompt).map_err(Failure::runtime)?;
            }
            for (j, expected) in case.greedy.iter().enumerate() {
                let found = leader(session.logits()).map_or(0, |(id, _)| id);
                if found != *expected {
                    return Err(Failure::Runtime(format!(
                        "golden case {i}: id {j}: expected {expected}, found {found}; this machine does not replay this loaf \
                         as it was baked, please report it"
                    )));
                }
                session.decode(found).map_err(Failure::runtime)?;
            }
        }
        compared += case.greedy.len();
        let (done, all) = (i + 1, golden.cases.len());
        progress.at(done as u64, all as u64, format_args!("{done} of {all} golden prompts"), io);
    }
    progress.clear(io);
    if compared == 0 {
        return Err(Failure::runtime("--run: expected at least one golden token to compare, found none"));
    }
    Ok(compared)
}

/// Hashes every leaf; reports on a terminal as it goes.
fn verify_leaves(leaves: &Leaves<'_>, total: u64, io: &mut Io<'_>) -> Result<(), Failure> {
    let (next, done, failed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let work = |tick: &mut dyn FnMut(u64)| {
        while !failed.load(Ordering::Relaxed) {
            let ix = next.fetch_add(1, Ordering::Relaxed);
            if ix >= leaves.count() {
                break;
            }
            match leaves.check(ix) {
                Ok(bytes) => tick(done.fetch_add(bytes, Ordering::Relaxed) + bytes),
                Err(e) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err((ix, e));
                }
            }
        }
        Ok(())
    };
    let mut progress = Progress::new(io);
    let mut tick = |done: u64| {
        progress.at(done, total, format_args!("{} of {} verified", Bytes(done), Bytes(total)), io);
    };
    let first_error = std::thread::scope(|scope| {
        let helpers = loaf_runtime::pool::default_threads().clamp(1, 64) - 1;
        // A thread that the system refuses leaves its share to the others.
        let helpers: Vec<_> = (0..helpers)
            .filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, || work(&mut |_| {})).ok())
            .collect();
        let mine = work(&mut tick).err();
        let theirs = helpers.into_iter().filter_map(|h| h.join().ok().and_then(Result::err));
        theirs.chain(mine).min_by_key(|(ix, _)| *ix)
    });
    progress.clear(io);
    match first_error {
        Some((_, e)) => Err(Failure::Runtime(format!("{e}; the file is damaged, get or bake it again"))),
        None => Ok(()),
    }
}
