//! Opening a loaf: map, verify, ready to replay.
//!
//! Nothing is parsed that replay does not need, nothing is copied out of the mapped file but the
//! plan. Everything that engines rely on is proved here, once: [`Model`] is that proof. It is
//! shared by reference count, so whoever holds one keeps the mapping alive.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use loaf_formats::chat::{Chat, ChatError};
use loaf_formats::container::{ArtifactId, Container, Error as ContainerError, Leaves, SectionKind};
use loaf_formats::plan::{Plan, PlanError, VerifiedPlan};
use loaf_formats::program::{Trailer, TrailerError};
use loaf_formats::tokenizer;
use memmap2::{Mmap, MmapOptions};

use crate::tokenizer::Tokenizer;

/// Why a loaf cannot be used.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// The file cannot be read.
    Io(PathBuf, std::io::Error),
    /// The file has no valid container.
    Container(ContainerError),
    /// The bytes do not lie on a cache line, which weights rely on.
    Misaligned,
    /// A section every loaf has is not there.
    Missing(SectionKind),
    /// The plan is unsafe or malformed.
    Plan(PlanError),
    /// The chat section is malformed.
    Chat(ChatError),
    /// The end of a program is damaged.
    Program(PathBuf, TrailerError),
    /// A program carries another loaf than its trailer names.
    OtherLoaf {
        /// What the trailer names.
        expected: ArtifactId,
        /// What the loaf is.
        found: ArtifactId,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Io(path, e) => write!(f, "{}: {e}", path.display()),
            OpenError::Container(e) => e.fmt(f),
            OpenError::Misaligned => write!(f, "expected the data area on a multiple of 64 bytes in memory"),
            OpenError::Missing(kind) => write!(f, "expected a section {kind}, found none"),
            OpenError::Plan(e) => e.fmt(f),
            OpenError::Chat(e) => e.fmt(f),
            OpenError::Program(path, e) => write!(f, "{}: {e}", path.display()),
            OpenError::OtherLoaf { expected, found } => {
                write!(f, "program trailer: artifact id: expected {expected}, found {found}")
            }
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            OpenError::Io(_, e) => Some(e),
            OpenError::Container(e) => Some(e),
            OpenError::Plan(e) => Some(e),
            OpenError::Chat(e) => Some(e),
            OpenError::Program(_, e) => Some(e),
            OpenError::Misaligned | OpenError::Missing(_) | OpenError::OtherLoaf { .. } => None,
        }
    }
}

/// The bytes a loaf lives in.
enum Bytes {
    /// Whose file it is, so that the system may say which of its pages are in memory.
    Mapped {
        map: Mmap,
        ours: bool,
    },
    Static(&'static [u8]),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Bytes::Mapped { map, .. } => map,
            Bytes::Static(bytes) => bytes,
        }
    }
}

/// Whether a file belongs to this process's user.
fn is_ours(file: &File) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        // SAFETY: it takes nothing and cannot fail.
        let user = unsafe { libc::geteuid() };
        file.metadata().is_ok_and(|m| user == 0 || m.uid() == user)
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        false
    }
}

/// Hashes a section's leaves on a few threads: a large vocabulary's tables are megabytes, and
/// hashing them is most of what opening costs.
fn check_leaves(leaves: &Leaves<'_>) -> Result<(), ContainerError> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(4) as u64;
    let share =
        |first: u64| (first..leaves.count()).step_by(threads as usize).try_for_each(|i| leaves.check(i).map(drop));
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(leaves.count())).map(|t| scope.spawn(move || share(t))).collect();
        let first = share(0);
        let results = others.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        results.fold(first, |all, one| all.and(one))
    })
}

struct Inner {
    bytes: Bytes,
    plan: VerifiedPlan,
    chat: Chat,
    id: ArtifactId,
}

/// An open loaf: bytes, verified plan, chat data. Cloning it copies a reference.
///
/// ```
/// use loaf_runtime::Model;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../artifacts/default.loaf");
/// let model = Model::open(path.as_ref())?;
/// println!("{}: {} tokens, context {}", model.id(), model.plan().vocab, model.plan().context);
/// let tokenizer = model.tokenizer()?.ok_or("a loaf without a tokenizer")?;
/// let mut ids = Vec::new();
/// tokenizer.encode("list the files", false, &mut Default::default(), &mut ids);
/// assert_eq!(tokenizer.decode(&ids, true), "list the files");
/// // What is no loaf is refused, with a line that says why.
/// let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
/// assert!(Model::open(manifest.as_ref()).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Model(Arc<Inner>);

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Model").field(&self.0.id.to_string()).finish()
    }
}

impl Model {
    /// Maps and verifies a file, or the loaf that a program carries. Head, table, plan, chat and
    /// tokenizer sections are hashed and checked; weights are not hashed (see [`Model::bytes`] for
    /// that).
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: &Path) -> Result<Model, OpenError> {
        let io = |e| OpenError::Io(path.to_path_buf(), e);
        // A pipe would wait for a writer.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(io(std::io::Error::other("expected a file, found something else")));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the mapping is read-only and private to us; a file that another process truncates
        // or rewrites while it is mapped breaks every program that maps files, and the hashes catch
        // what was there at open.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        match Model::from_bytes(Bytes::Mapped { map, ours: is_ours(&file) }) {
            // What is no loaf may be a program that carries one.
            Err(OpenError::Container(error)) => Model::open_embedded(path)?.ok_or(OpenError::Container(error)),
            opened => opened,
        }
    }

    /// Maps and verifies the loaf behind a program that `bake executable` wrote, where it lies:
    /// nothing is unpacked, nothing copied. `None` if the file at `program` is an executable
    /// without one; finding that out takes one read.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_embedded(program: &Path) -> Result<Option<Model>, OpenError> {
        let io = |e| OpenError::Io(program.to_path_buf(), e);
        let mut file = File::open(program).map_err(io)?;
        let trailer = Trailer::read(&mut file).map_err(|e| OpenError::Program(program.to_path_buf(), e))?;
        let Some(Trailer { offset, len, id }) = trailer else { return Ok(None) };
        let len = usize::try_from(len).map_err(|_| io(std::io::ErrorKind::OutOfMemory.into()))?;
        // SAFETY: as in `open`; the trailer was checked to name bytes within the file.
        let map = unsafe { MmapOptions::new().offset(offset).len(len).map(&file) }.map_err(io)?;
        let loaf = Model::from_bytes(Bytes::Mapped { map, ours: is_ours(&file) })?;
        if loaf.id() != id {
            return Err(OpenError::OtherLoaf { expected: id, found: loaf.id() });
        }
        Ok(Some(loaf))
    }

    /// Asks that weights be read from the file, and mapped, in large pages where the system can; it
    /// may refuse.
    pub(crate) fn advise_large_pages(&self) {
        #[cfg(target_os = "linux")]
        if let Bytes::Mapped { map, .. } = &self.0.bytes {
            let at = self.data().as_ptr() as usize - map.as_ptr() as usize;
            // Nothing depends on the answer.
            let _ = map.advise_range(memmap2::Advice::HugePage, at, self.data().len());
        }
    }

    /// Whether weights are a file's pages and the system says which of them are in memory: of
    /// another's file it says that all are.
    pub(crate) fn tells_pages(&self) -> bool {
        matches!(self.0.bytes, Bytes::Mapped { ours: true, .. })
    }

    /// Verifies a loaf that is part of the program.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn from_static(bytes: &'static [u8]) -> Result<Model, OpenError> {
        Model::from_bytes(Bytes::Static(bytes))
    }

    fn from_bytes(bytes: Bytes) -> Result<Model, OpenError> {
        let container = Container::open(bytes.get()).map_err(OpenError::Container)?;
        if !container.data().as_ptr().addr().is_multiple_of(64) {
            return Err(OpenError::Misaligned);
        }
        let section = |kind| match container.section(kind) {
            Some(_) => container.verify_section(kind).map(Some).map_err(OpenError::Container),
            None => Ok(None),
        };
        let required = |kind| section(kind)?.ok_or(OpenError::Missing(kind));
        let plan = Plan::decode(required(SectionKind::Plan)?).map_err(OpenError::Plan)?;
        let plan = plan.verify(container.data().len() as u64).map_err(OpenError::Plan)?;
        let chat = Chat::decode(required(SectionKind::Chat)?, plan.vocab).map_err(OpenError::Chat)?;
        if container.section(SectionKind::Tokenizer).is_some() {
            let leaves = container.leaves(SectionKind::Tokenizer).map_err(OpenError::Container)?;
            check_leaves(&leaves).map_err(OpenError::Container)?;
        }
        let id = container.artifact_id();
        Ok(Model(Arc::new(Inner { plan, chat, id, bytes })))
    }

    /// The loaf's bytes. What this type has no method for is read with [`Container::open`]: other
    /// sections, the hashes of the weights.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes.get()
    }

    /// The container.
    ///
    /// # Panics
    /// Never: the bytes were opened before and do not change.
    pub(crate) fn container(&self) -> Container<'_> {
        Container::open(self.bytes()).expect("opened before")
    }

    /// The weights region that plan operands address.
    pub(crate) fn data(&self) -> &[u8] {
        self.container().data()
    }

    /// The verified plan.
    pub fn plan(&self) -> &VerifiedPlan {
        &self.0.plan
    }

    /// Chat template, stop ids, sampling defaults.
    pub fn chat(&self) -> &Chat {
        &self.0.chat
    }

    /// The hash that names this artifact.
    pub fn id(&self) -> ArtifactId {
        self.0.id
    }

    /// The tokenizer, if the loaf has one, which keeps the model. Opening it verifies its tables.
    ///
    /// # Errors
    /// The tables do not pass verification.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, tokenizer::Error> {
        let Some(section) = self.container().section(SectionKind::Tokenizer) else { return Ok(None) };
        // SAFETY: the bytes are mapped read-only, or static, and stay while this reference to the
        // model lives.
        unsafe { Tokenizer::over(section, self.0.clone()) }.map(Some)
    }
}

/// The file of the running program, if it carries a loaf, even a damaged one: opening it says what
/// is wrong.
pub fn running_program() -> Option<PathBuf> {
    // Linux keeps this link right when the file is renamed or replaced while it runs.
    let link = Path::new("/proc/self/exe");
    let path = if link.exists() { link.to_path_buf() } else { std::env::current_exe().ok()? };
    let trailer = Trailer::read(&mut File::open(&path).ok()?);
    (!matches!(trailer, Ok(None) | Err(TrailerError::Io(_)))).then_some(path)
}
