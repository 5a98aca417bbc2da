//! From arguments and environment to an open loaf, a session and a tokenizer.

use std::path::{Path, PathBuf};

use clap::ValueEnum as _;

use crate::args::{BackendArg, ComputeArgs, ModelArgs};
use crate::{Failure, Gpu, Io, OpenGpu, models};
use loaf_runtime::Session;
use loaf_runtime::backend::{Device, Trace};
use loaf_runtime::engine::{Engine, EngineOptions};
use loaf_runtime::kernels::Kernels;
use loaf_runtime::model::{Model, OpenError};
use loaf_runtime::threads::threads_for;
use loaf_runtime::tokenizer::Tokenizer;

/// Said when nobody named a model and this build has none of its own.
const NO_MODEL: &str = "no model: pass a loaf with -m FILE or in LOAF_MODEL; \
    'bake build CHECKPOINT -o model.loaf' makes one";

/// What the arguments, the environment or the settings name; none for the model that is built in.
fn named(args: &ModelArgs, io: &Io<'_>) -> Option<PathBuf> {
    let from_environment = || (io.var)("LOAF_MODEL").filter(|v| !v.is_empty()).map(PathBuf::from);
    args.model.clone().or_else(from_environment).or_else(|| args.configured.clone())
}

/// The file that a command's model is in, so that nothing is written over it; none for the model
/// that is built in.
pub(crate) fn path(args: &ModelArgs, io: &Io<'_>) -> Option<PathBuf> {
    if let (None, Some(program)) = (&args.model, &args.program) {
        return Some(program.clone());
    }
    named(args, io).map(|path| if path.exists() { path } else { models::named(&path, io).unwrap_or(path) })
}

/// Opens and verifies the loaf that the arguments name, or that the program carries, or that the
/// environment or the settings name, or else the one built in.
pub(crate) fn open_model(args: &ModelArgs, io: &Io<'_>) -> Result<Model, Failure> {
    opener(args, io)?().map_err(Failure::runtime)
}

/// A way to open the loaf again and again that [`open_model`] opens once: what the arguments mean
/// is found out now.
pub(crate) fn opener(args: &ModelArgs, io: &Io<'_>) -> Result<loaf_serve::hub::OpenModel, Failure> {
    let failure = |path: &Path, e| match e {
        // It names the file already.
        OpenError::Io(..) | OpenError::Program(..) => e.to_string(),
        e => format!("{}: {e}; is it a loaf that 'bake build' made, and whole?", path.display()),
    };
    if let (None, Some(program)) = (&args.model, &args.program) {
        let program = program.clone();
        return Ok(Box::new(move || {
            let loaf = Model::open_embedded(&program).map_err(|e| failure(&program, e))?;
            loaf.ok_or_else(|| NO_MODEL.into())
        }));
    }
    match named(args, io) {
        Some(path) => {
            let path = find(path, io)?;
            Ok(Box::new(move || Model::open(&path).map_err(|e| failure(&path, e).into())))
        }
        None => {
            let bytes = io.builtin.ok_or_else(|| Failure::usage(NO_MODEL))?;
            Ok(Box::new(move || Model::from_static(bytes).map_err(|e| format!("the built-in model: {e}").into())))
        }
    }
}

/// The file that somebody means by `path`, before it is opened: a pipe would wait, and what is no
/// loaf but something that people pass for one gets an answer of its own.
fn find(path: PathBuf, io: &Io<'_>) -> Result<PathBuf, Failure> {
    let shown = path.display().to_string();
    let fail = |what: String| Err(Failure::Runtime(format!("{shown}: {what}")));
    let metadata = match std::fs::metadata(&path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            if let Some(path) = models::named(&path, io) {
                return Ok(path);
            }
            return fail(if is_repository(&shown) {
                format!(
                    "no such file; of a repository, 'loaf pull hf:{shown}' fetches a loaf, 'bake build hf:{shown} -o {}.loaf' bakes a \
                     checkpoint",
                    shown.rsplit('/').next().unwrap_or_default()
                )
            } else {
                format!("{e}; expected a loaf, or a name that 'loaf list' shows")
            });
        }
        Err(e) => return fail(e.to_string()),
    };
    if metadata.is_dir() {
        // A folder here may be called what a model is called.
        if let Some(path) = models::named(&path, io) {
            return Ok(path);
        }
        return fail(if path.join("config.json").is_file() {
            format!("expected a loaf, found a checkpoint; 'bake build {shown} -o model.loaf' makes one of it")
        } else {
            "expected a loaf, found a folder".to_owned()
        });
    }
    if !metadata.is_file() {
        return fail(
            "expected a file, found a pipe or a device; a loaf is mapped, so save it to a file first".to_owned(),
        );
    }
    let mut start = [0; 4];
    let read = std::fs::File::open(&path).and_then(|mut file| std::io::Read::read(&mut file, &mut start));
    if read.is_ok() && &start == b"GGUF" {
        return fail(format!("expected a loaf, found a GGUF file; 'bake build {shown} -o model.loaf' makes one of it"));
    }
    Ok(path)
}

/// Whether a name looks like `OWNER/NAME` of a place that publishes checkpoints.
fn is_repository(name: &str) -> bool {
    let part =
        |p: &str| !p.is_empty() && !p.starts_with(['.', '~']) && !p.ends_with(".loaf") && !p.contains(['\\', ' ']);
    name.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name) && !name.contains('/'))
}

/// The kernels that `LOAF_ISA` names, or else the best there are.
pub(crate) fn kernels(io: &Io<'_>) -> Result<Kernels, Failure> {
    let Some(name) = (io.var)("LOAF_ISA").filter(|v| !v.is_empty()) else { return Ok(Kernels::detect()) };
    Kernels::named(&name.to_string_lossy()).map_err(|e| Failure::Usage(format!("LOAF_ISA: {e}; found {name:?}")))
}

/// How engines are made, as the arguments and the environment say; found out once, before there is
/// any.
pub(crate) struct Compute {
    backend: BackendArg,
    fast: bool,
    threads: Option<usize>,
    kernels: Kernels,
    prefetch_pages: bool,
    gpu: Option<OpenGpu>,
}

impl Compute {
    pub(crate) fn of(args: &ComputeArgs, io: &Io<'_>) -> Result<Compute, Failure> {
        if args.fast && args.backend != BackendArg::Cuda {
            let name = args.backend.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
            return Err(Failure::Usage(format!("--fast: expected --backend cuda beside it, found --backend {name}")));
        }
        let threads = args.threads.map(usize::from);
        let (kernels, prefetch_pages) = (kernels(io)?, !args.no_prefetch);
        Ok(Compute { backend: args.backend, fast: args.fast, threads, kernels, prefetch_pages, gpu: io.gpu })
    }

    /// An engine with so many slots. Beside it stands why it is the CPU's, where a GPU would have
    /// been taken.
    pub(crate) fn engine(&self, loaf: &Model, slots: u32) -> Result<(Engine, Option<String>), String> {
        let device = match self.backend {
            BackendArg::Cpu => return Ok((self.cpu(loaf, slots)?, None)),
            BackendArg::Auto => match open_gpu(loaf, self.gpu, false) {
                Ok(gpu) => gpu.into_device(),
                Err(why) => return Ok((self.cpu(loaf, slots)?, Some(why))),
            },
            BackendArg::Cuda => open_gpu(loaf, self.gpu, self.fast)?.into_device(),
            BackendArg::Mlx => device(loaf, true)?,
            BackendArg::MlxCpu => device(loaf, false)?,
        };
        Ok((Engine::on(loaf, device), None))
    }

    fn cpu(&self, loaf: &Model, slots: u32) -> Result<Engine, String> {
        let threads = self.threads.unwrap_or_else(|| threads_for(loaf.plan()));
        let options = EngineOptions { threads, kernels: self.kernels, slots, prefetch_pages: self.prefetch_pages };
        let smaller = if slots > 1 { "serve with a smaller --parallel, or " } else { "" };
        Engine::new(loaf, options).map_err(|e| format!("{e}; {smaller}bake with a smaller --context"))
    }
}

/// A session with the backend, threads and kernels asked for.
pub(crate) fn session(loaf: &Model, compute: &ComputeArgs, io: &mut Io<'_>) -> Result<Session, Failure> {
    let (engine, why) = Compute::of(compute, io)?.engine(loaf, 1).map_err(Failure::Runtime)?;
    if compute.verbose {
        if let Some(why) = why {
            io.note(format_args!("loaf: the CPU, since: {why}"));
        }
        io.note(format_args!("loaf: {}, {}", engine.name(), loaf.id()));
    }
    Session::new(engine).map_err(Failure::runtime)
}

/// The NVIDIA GPU, with the model on it.
pub(crate) fn gpu(loaf: &Model, io: &Io<'_>) -> Result<Box<dyn Gpu>, Failure> {
    open_gpu(loaf, io.gpu, false).map_err(Failure::Runtime)
}

fn open_gpu(loaf: &Model, open: Option<OpenGpu>, fast: bool) -> Result<Box<dyn Gpu>, String> {
    let open = open.ok_or_else(|| format!("CUDA: this program was built without it; {USE_CPU}"))?;
    open(loaf, fast).map_err(|e| format!("{e}; {USE_CPU}"))
}

/// What to do where another backend is not to be had.
const USE_CPU: &str = "--backend cpu needs none of it";

/// The MLX backend, on the GPU or on MLX's own CPU device.
#[cfg(feature = "mlx")]
fn open_mlx(loaf: &Model, gpu: bool, exact: bool) -> Result<loaf_runtime::backend::mlx::MlxDevice, String> {
    use loaf_runtime::backend::mlx::{MlxDevice, MlxOptions, Type};
    let options = MlxOptions { gpu, activations: exact.then_some(Type::F32), ..MlxOptions::default() };
    MlxDevice::open(loaf, options).map_err(|e| format!("{e}; {USE_CPU}"))
}

#[cfg(feature = "mlx")]
fn device(loaf: &Model, gpu: bool) -> Result<Box<dyn Device>, String> {
    Ok(Box::new(open_mlx(loaf, gpu, false)?))
}

/// MLX as something to watch, with f32 activations.
#[cfg(feature = "mlx")]
pub(crate) fn tracer(loaf: &Model, gpu: bool) -> Result<Box<dyn Trace>, Failure> {
    Ok(Box::new(open_mlx(loaf, gpu, true).map_err(Failure::Runtime)?))
}

#[cfg(not(feature = "mlx"))]
fn without_mlx() -> String {
    format!("MLX: this loaf was built without it (feature 'mlx'; see 'make mlx'); {USE_CPU}")
}

#[cfg(not(feature = "mlx"))]
fn device(_: &Model, _: bool) -> Result<Box<dyn Device>, String> {
    Err(without_mlx())
}

#[cfg(not(feature = "mlx"))]
pub(crate) fn tracer(_: &Model, _: bool) -> Result<Box<dyn Trace>, Failure> {
    Err(Failure::Runtime(without_mlx()))
}

/// The loaf's tokenizer, if it has one.
pub(crate) fn tokenizer(loaf: &Model) -> Result<Option<Tokenizer>, Failure> {
    loaf.tokenizer().map_err(|e| Failure::Runtime(format!("section tokenizer: {e}")))
}

/// Refuses more tokens than the context has.
pub(crate) fn check_fits(tokens: usize, loaf: &Model) -> Result<(), Failure> {
    let context = loaf.plan().context;
    if tokens > context as usize {
        let message = format!(
            "prompt: expected at most {context} tokens (the context), found {tokens}; shorten it, or bake with a larger --context"
        );
        return Err(Failure::Runtime(message));
    }
    Ok(())
}
