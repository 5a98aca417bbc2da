//! From arguments and environment to an open loaf, a session and a tokenizer.

use std::path::{Path, PathBuf};

use super::args::{BackendArg, ComputeArgs, ModelArgs};
use super::{Failure, Io};
use crate::backend::Backend;
use crate::builtin;
use crate::kernels::Kernels;
use crate::loaf::{Loaf, OpenError};
use crate::session::{Session, SessionOptions};
use crate::threads::threads_for;
use crate::tokenizer::Tokenizer;
use crate::trace::Trace;

/// Said when nobody named a model and this build has none of its own.
const NO_MODEL: &str = "no model: pass a loaf with -m FILE or in LOAF_MODEL; \
    'bake build CHECKPOINT -o model.loaf' makes one";

/// Opens and verifies the loaf that the arguments name, or that the program carries, or that the environment names, or else
/// the one built in.
pub(super) fn open_model(args: &ModelArgs, io: &Io<'_>) -> Result<Loaf, Failure> {
    let from_environment = || (io.var)("LOAF_MODEL").filter(|v| !v.is_empty()).map(PathBuf::from);
    let failure = |path: &Path, e| match e {
        // It names the file already.
        OpenError::Io(..) | OpenError::Program(..) => Failure::runtime(e),
        e => Failure::Runtime(format!("{}: {e}; is it a loaf that 'bake build' made, and whole?", path.display())),
    };
    if let (None, Some(program)) = (&args.model, &args.program) {
        let loaf = Loaf::open_embedded(program).map_err(|e| failure(program, e))?;
        return loaf.ok_or_else(|| Failure::usage(NO_MODEL));
    }
    match args.model.clone().or_else(from_environment) {
        Some(path) => Loaf::open(&path).map_err(|e| failure(&path, e)),
        None => {
            let bytes = builtin::LOAF.ok_or_else(|| Failure::usage(NO_MODEL))?;
            Loaf::from_static(bytes).map_err(|e| Failure::Runtime(format!("the built-in model: {e}")))
        }
    }
}

/// The kernels that `LOAF_ISA` names, or else the best there are.
pub(super) fn kernels(io: &Io<'_>) -> Result<Kernels, Failure> {
    let Some(name) = (io.var)("LOAF_ISA").filter(|v| !v.is_empty()) else { return Ok(Kernels::detect()) };
    Kernels::named(&name.to_string_lossy()).map_err(|e| Failure::Usage(format!("LOAF_ISA: {e}; found {name:?}")))
}

/// A session with the backend, threads and kernels asked for.
pub(super) fn session<'a>(loaf: &'a Loaf, compute: &ComputeArgs, io: &mut Io<'_>) -> Result<Session<'a>, Failure> {
    let session = match compute.backend {
        BackendArg::Cpu => {
            let mut options = SessionOptions { kernels: kernels(io)?, ..SessionOptions::default() };
            options.threads = compute.threads.map_or_else(|| threads_for(loaf.plan()), usize::from);
            Session::new(loaf, options).map_err(|e| Failure::Runtime(format!("{e}; bake with a smaller --context")))?
        }
        BackendArg::Mlx => Session::over(loaf, device(loaf, true)?),
        BackendArg::MlxCpu => Session::over(loaf, device(loaf, false)?),
    };
    if compute.verbose {
        io.note(format_args!("loaf: {}, {}", session.engine(), loaf.id()));
    }
    Ok(session)
}

/// What to do where MLX is not to be had.
const USE_CPU: &str = "--backend cpu needs none of it";

/// The MLX backend, on the GPU or on MLX's own CPU device.
#[cfg(feature = "mlx")]
fn open_mlx(loaf: &Loaf, gpu: bool, exact: bool) -> Result<crate::backend::mlx::MlxBackend<'_>, Failure> {
    use crate::backend::mlx::{MlxBackend, MlxOptions, array::Type};
    let options = MlxOptions { gpu, activations: exact.then_some(Type::F32), ..MlxOptions::default() };
    MlxBackend::open(loaf, options).map_err(|e| Failure::Runtime(format!("{e}; {USE_CPU}")))
}

#[cfg(feature = "mlx")]
fn device(loaf: &Loaf, gpu: bool) -> Result<Box<dyn Backend + '_>, Failure> {
    Ok(Box::new(open_mlx(loaf, gpu, false)?))
}

/// MLX as something to watch, with f32 activations.
#[cfg(feature = "mlx")]
pub(super) fn tracer(loaf: &Loaf, gpu: bool) -> Result<Box<dyn Trace + '_>, Failure> {
    Ok(Box::new(open_mlx(loaf, gpu, true)?))
}

#[cfg(not(feature = "mlx"))]
fn without_mlx() -> Failure {
    Failure::Runtime(format!("MLX: this loaf was built without it (feature 'mlx'; see 'make mlx'); {USE_CPU}"))
}

#[cfg(not(feature = "mlx"))]
fn device(_: &Loaf, _: bool) -> Result<Box<dyn Backend + '_>, Failure> {
    Err(without_mlx())
}

#[cfg(not(feature = "mlx"))]
pub(super) fn tracer(_: &Loaf, _: bool) -> Result<Box<dyn Trace + '_>, Failure> {
    Err(without_mlx())
}

/// The loaf's tokenizer, if it has one.
pub(super) fn tokenizer(loaf: &Loaf) -> Result<Option<Tokenizer<'_>>, Failure> {
    let open = |section| Tokenizer::open(section).map_err(|e| Failure::Runtime(format!("section tokenizer: {e}")));
    loaf.tokenizer_section().map(open).transpose()
}

/// Refuses more tokens than the context has.
pub(super) fn check_fits(tokens: usize, loaf: &Loaf) -> Result<(), Failure> {
    let context = loaf.plan().context;
    if tokens > context as usize {
        let message = format!(
            "prompt: expected at most {context} tokens (the context), found {tokens}; shorten it, or bake with a larger --context"
        );
        return Err(Failure::Runtime(message));
    }
    Ok(())
}
