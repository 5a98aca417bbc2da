//! Prefixes on disk: the tree's blocks and snapshots as files, so that sessions outlive the
//! process.
//!
//! `FOLDER/ARTIFACT/b-POSITION-CHAIN.kv` is a block, `s-POSITION-CHAIN-TAIL.kv` a snapshot behind
//! the blocks of CHAIN. Names are hashes over the artifact id, the layout of its state and every
//! token, so a name says what a file is good for; the tokens stand in it and are compared all the
//! same. A file is a header of fixed size, then its sections (tokens, rows, recurrent state,
//! logits). SHA-256 follows header and tokens; behind the others stands that of the sums
//! ([`super::sum`]) of their pieces, which are the rows of a head, or a MiB. All of it is compared
//! before anything is evaluated after it. What is not exactly so is a miss, never an error, and the
//! file is removed.
//!
//! A file is read either by a thread of its own into memory that was charged ([`Disk::get`]), while
//! the engine is busy with others, or, where it is not, by all threads at once straight into the
//! slot ([`Disk::direct`]), which copies nothing twice. Pieces are summed while they are in the
//! core's cache.
//!
//! Files are written by a thread of their own, under temporary names with mode 0600, synced and
//! renamed ([`loaf_formats::output`]). What goes when the folder is full: the least recently used,
//! and of those used together what stands on others before what others stand on. What this does not
//! do: it encrypts nothing; rows of a cache say nearly as much as the text they come from.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use loaf_formats::container::hex;
use loaf_formats::output::Output;
use sha2::{Digest, Sha256};

use super::account::{Kept, Reserved};
use super::sum::{SUM, sum};
use super::tree::{Chain, Item, Kind, State, chain};

const MAGIC: &[u8; 8] = b"loafkept";
const VERSION: u32 = 2;
/// Magic, version, kind, seed, chain before, then five lengths: tokens, rows, recurrent, logits
/// (bytes), position.
const HEADER: usize = 8 + 4 + 4 + 32 + 32 + 5 * 8;
/// Items that wait to be written; what does not fit stays unwritten.
const WAITING: usize = 1024;
/// Most threads that read files.
const READERS: usize = 4;
/// Files whose beginnings are looked for at the start.
const TRIED: usize = 256;
/// Bytes of state or logits that are summed together.
const PIECE: usize = 1 << 20;

/// When a file was last of use, how deep it stands, and its name.
type Rank = (u64, Reverse<(u32, bool)>, String);

/// What the folder holds.
#[derive(Default)]
struct Index {
    /// Names, with their lengths and when they were last of use.
    files: BTreeMap<String, (u64, u64)>,
    /// The same in the order in which they go: of those used together what stands on others first.
    order: BTreeSet<Rank>,
    bytes: u64,
    /// Counts uses.
    clock: u64,
    /// What it was when the folder was opened.
    opened: u64,
}

/// Bytes that items of this model have.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Tokens of a block.
    pub block: u32,
    /// Bytes of a token's rows.
    pub row: u64,
    /// The same of each cache and head, in their order.
    pub heads: Arc<[u64]>,
    /// Bytes of the recurrent state.
    pub recurrent: u64,
    /// Bytes of logits.
    pub logits: u64,
}

/// A beginning of a prompt that lies on disk.
#[derive(Clone, Debug, Default)]
pub struct Stored {
    /// Names of its blocks.
    pub blocks: Vec<String>,
    /// Name of the snapshot behind them, and the tokens of it that are of use.
    pub snap: Option<String>,
    /// Tokens that need no evaluation.
    pub usable: u32,
}

/// What a file held.
pub struct Loaded {
    /// Rows of its tokens; none if there are no tokens.
    pub rows: Option<Arc<Kept>>,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// State, of a snapshot.
    pub state: Option<State>,
}

/// The folder; see the module's doc.
pub struct Disk {
    folder: PathBuf,
    seed: Chain,
    sizes: Sizes,
    index: Arc<Mutex<Index>>,
    written: Arc<AtomicU64>,
    /// Items that wait to be written.
    waiting: Arc<AtomicU64>,
    /// With when they were of use.
    to_writer: Option<SyncSender<(u64, Item)>>,
    writer: Option<JoinHandle<()>>,
    to_readers: Option<Sender<Wish>>,
    readers: Vec<JoinHandle<()>>,
}

fn locked(index: &Mutex<Index>) -> MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

fn name_of(item: &Item) -> String {
    match item.state {
        None => block_name(item.pos, &chain(&item.before, &item.ids)),
        Some(_) => snap_name(&item.before, item.pos, &item.ids),
    }
}

fn block_name(pos: u32, chain: &Chain) -> String {
    format!("b-{pos:08}-{}.kv", hex(chain))
}

fn snap_name(before: &Chain, pos: u32, tail: &[u32]) -> String {
    format!("s-{}-{pos:08}-{}.kv", hex(before), &hex(&chain(before, tail))[..32])
}

impl Index {
    /// Whether there is such a file; it is of use then.
    fn touch(&mut self, name: &str) -> bool {
        let Some(bytes) = self.files.get(name).map(|f| f.0) else { return false };
        self.add(name.to_owned(), bytes, self.clock);
        true
    }

    /// Adds a file that was last of use at `used`, or later if it is there already.
    fn add(&mut self, name: String, bytes: u64, used: u64) {
        let used = self.files.get(&name).map_or(used, |f| used.max(f.1));
        self.remove(&name);
        self.bytes += bytes;
        self.order.insert((used, Reverse(depth(&name)), name.clone()));
        self.files.insert(name, (bytes, used));
    }

    fn remove(&mut self, name: &str) {
        if let Some((bytes, used)) = self.files.remove(name) {
            self.bytes -= bytes;
            self.order.remove(&(used, Reverse(depth(name)), name.to_owned()));
        }
    }

    /// The file of least use, and when that was: the oldest, and of a chain's the one that stands
    /// on the others.
    fn worst(&self) -> Option<(u64, String)> {
        self.order.first().map(|(used, _, name)| (*used, name.clone()))
    }

    /// The longest beginning of `prompt` among these files of models with such sizes, after `seed`.
    fn find(&self, prompt: &[u32], seed: Chain, sizes: &Sizes) -> Stored {
        let (block, last) = (sizes.block as usize, prompt.len().saturating_sub(1));
        let (mut before, mut pos) = (seed, 0);
        let (mut best, mut blocks) = (Stored::default(), Vec::new());
        loop {
            let start = format!("s-{}-", hex(&before));
            // Names are in order of position. Of many at one position all but the one that fits
            // differ in their tokens, so a position is looked at once, and the next is looked for
            // behind all names of it.
            let mut at = pos.max(1);
            loop {
                let next = self.files.range(format!("{start}{at:08}-")..).next();
                let Some(end) =
                    next.filter(|(name, _)| name.starts_with(&start)).map(|(name, _)| depth(name).0 as usize)
                else {
                    break;
                };
                if end > prompt.len() || end < at || end - pos >= block {
                    break;
                }
                at = end + 1;
                let name = snap_name(&before, end as u32, &prompt[pos..end]);
                // Whether it has the logits of what follows, its length tells.
                let bytes = self.files.get(&name).map(|f| f.0);
                let full = sizes.length((end - pos) as u64, true, true);
                let usable = if sizes.recurrent == 0 {
                    end.min(last)
                } else if end <= last || bytes == Some(full) {
                    end
                } else {
                    0
                };
                if bytes.is_some() && usable > best.usable as usize {
                    best = Stored { blocks: blocks.clone(), snap: Some(name), usable: usable as u32 };
                }
            }
            let Some(next) = prompt.get(pos..pos + block) else { break };
            let after = chain(&before, next);
            let name = block_name((pos + block) as u32, &after);
            if !self.files.contains_key(&name) {
                break;
            }
            blocks.push(name);
            (before, pos) = (after, pos + block);
            if sizes.recurrent == 0 && pos.min(last) > best.usable as usize {
                best = Stored { blocks: blocks.clone(), snap: None, usable: pos.min(last) as u32 };
            }
        }
        best
    }
}

impl Sizes {
    /// The lengths of the pieces of so many tokens' rows: those of each head.
    fn pieces(&self, tokens: usize) -> Vec<usize> {
        let pieces = self.heads.iter().map(|row| *row as usize * tokens);
        pieces.filter(|bytes| *bytes > 0).collect()
    }

    /// Bytes of a file.
    fn length(&self, tokens: u64, snap: bool, logits: bool) -> u64 {
        let state = if snap { self.recurrent + if logits { self.logits } else { 0 } } else { 0 };
        HEADER as u64 + 5 * 32 + tokens * (4 + self.row) + state
    }
}

/// Something to be read, and who is told.
struct Wish {
    name: String,
    room: Reserved,
    reply: Sender<Option<Loaded>>,
}

/// A file that is being read.
pub struct Coming(Receiver<Option<Loaded>>);

impl Coming {
    /// What it held, once it is there and within `limit`; `Some(None)` for whatever was wrong with
    /// it.
    pub fn wait(&self, limit: std::time::Duration) -> Option<Option<Loaded>> {
        use std::sync::mpsc::RecvTimeoutError;
        match self.0.recv_timeout(limit) {
            Ok(loaded) => Some(loaded),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(None),
        }
    }
}

/// The position in a name, and whether it is a snapshot's.
fn depth(name: &str) -> (u32, bool) {
    let mut parts = name.split('-');
    let snap = parts.next() == Some("s");
    let part = if snap { parts.nth(1) } else { parts.next() };
    (part.and_then(|p| p.parse().ok()).unwrap_or(0), snap)
}

impl Disk {
    /// Opens or makes the folder of one artifact inside `folder`, for files of this seed.
    ///
    /// # Errors
    /// The system's.
    pub fn open(folder: &Path, artifact: &str, seed: Chain, sizes: Sizes, budget: u64) -> std::io::Result<Disk> {
        let folder = folder.join(artifact);
        std::fs::create_dir_all(&folder)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700))?;
        }
        // Files are many here, so what killed processes left is looked for once.
        Output::clear(&folder);
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let (name, data) = (entry.file_name().to_string_lossy().into_owned(), entry.metadata()?);
            let ours = name.ends_with(".kv") && (name.starts_with("b-") || name.starts_with("s-"));
            if ours && data.is_file() {
                let seconds = data.modified().ok().and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
                found.push((seconds.map_or(0, |t| t.as_secs()), name, data.len()));
            }
        }
        // Oldest first, so that the order of use outlives the process. What is of one second is of
        // one use.
        found.sort();
        let mut index = Index::default();
        let mut second = None;
        for (time, name, bytes) in found {
            index.clock += u64::from(second != Some(time));
            second = Some(time);
            let used = index.clock;
            index.add(name, bytes, used);
        }
        index.opened = index.clock;
        // What is written is of use, too.
        index.clock += 1;
        let index = Arc::new(Mutex::new(index));
        let (to_writer, items) = sync_channel(WAITING);
        let written = Arc::new(AtomicU64::new(0));
        let waiting = Arc::new(AtomicU64::new(0));
        let writer = Writer {
            folder: folder.clone(),
            seed,
            sizes: sizes.clone(),
            budget,
            index: index.clone(),
            written: written.clone(),
            waiting: waiting.clone(),
        };
        let writer = std::thread::Builder::new().name("loaf-cache".into()).spawn(move || writer.run(&items))?;
        let (to_readers, wishes) = channel();
        let wishes = Arc::new(Mutex::new(wishes));
        let mut threads = Vec::new();
        for _ in 0..readers() {
            let (folder, sizes, index, wishes) = (folder.clone(), sizes.clone(), index.clone(), wishes.clone());
            let reader = Reader { folder, seed, sizes, index, wishes };
            let thread = std::thread::Builder::new().name("loaf-cache-read".into());
            threads.push(thread.spawn(move || reader.run())?);
        }
        Ok(Disk {
            folder,
            seed,
            sizes,
            index,
            written,
            waiting,
            to_writer: Some(to_writer),
            writer: Some(writer),
            to_readers: Some(to_readers),
            readers: threads,
        })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        locked(&self.index).bytes
    }

    /// Files written since it was opened.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Has an item written, unless it is there or too many wait; with `wait` it is written in any
    /// case.
    pub fn put(&self, item: Item, wait: bool) {
        let used = {
            let mut index = locked(&self.index);
            if index.touch(&name_of(&item)) {
                return;
            }
            index.clock
        };
        let item = (used, item);
        let Some(to_writer) = &self.to_writer else { return };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // What does not fit stays unwritten, and is evaluated again; the writer ends after the
        // sender alone.
        let sent = if wait { to_writer.send(item).is_ok() } else { to_writer.try_send(item).is_ok() };
        if !sent {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether something waits to be written.
    pub fn is_writing(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// What is written from now on is of use together, and later than what was written before:
    /// where there is no room for all, sessions go one after the other and not the ends of each.
    pub fn next_use(&self) {
        locked(&self.index).clock += 1;
    }

    /// Whether an item is there.
    pub fn has(&self, item: &Item) -> bool {
        locked(&self.index).files.contains_key(&name_of(item))
    }

    /// Whether an item is there; it is of use then.
    pub fn touch(&self, item: &Item) -> bool {
        locked(&self.index).touch(&name_of(item))
    }

    /// The longest beginning of `prompt` that lies here.
    pub fn find(&self, prompt: &[u32]) -> Stored {
        let mut index = locked(&self.index);
        let best = index.find(prompt, self.seed, &self.sizes);
        if best.usable > 0 {
            index.clock += 1;
            for name in best.blocks.iter().chain(&best.snap) {
                index.touch(name);
            }
        }
        best
    }

    /// Bytes of a file.
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        locked(&self.index).files.get(name).map(|f| f.0)
    }

    /// Begins to read a file, into room that was made for all of it.
    pub fn get(&self, name: String, room: Reserved) -> Coming {
        let (reply, coming) = channel();
        if let Some(to) = &self.to_readers {
            // Without readers nobody answers, which is a miss.
            let _ = to.send(Wish { name, room, reply });
        }
        Coming(coming)
    }

    /// Opens a file to be read straight to where its content belongs; `None` if it is not what it
    /// should be.
    #[cfg(unix)]
    pub fn direct(&self, name: &str) -> Option<Direct> {
        let opened = Opened::open(&self.folder, name, &self.seed, &self.sizes);
        if opened.is_none() {
            self.remove(name);
        }
        opened.map(|opened| Direct { at: (HEADER + 32 + opened.ids.len() * 4 + 32) as u64, opened })
    }

    /// Removes a file with which something is wrong.
    pub fn remove(&self, name: &str) {
        remove(&self.folder, &self.index, name);
    }

    /// Has the system read a file soon.
    pub fn hint(&self, name: &str) {
        #[cfg(target_os = "linux")]
        if let Ok(file) = File::open(self.folder.join(name)) {
            use std::os::fd::AsRawFd;
            // SAFETY: advice about a file that is open; nothing depends on the answer.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_WILLNEED) };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = name;
    }

    /// The tokens of up to `most` beginnings that were last of use, the last first, none of which
    /// another one begins with, and of each what is to be read.
    pub fn recent(&self, most: usize) -> Vec<(Vec<u32>, Stored)> {
        let mut names: Vec<(u64, (u32, bool), String)> = {
            let index = locked(&self.index);
            index.files.iter().map(|(name, (_, used))| (*used, depth(name), name.clone())).collect()
        };
        names.sort_unstable_by(|a, b| b.cmp(a));
        let (mut out, mut seen, mut tried) = (Vec::<(Vec<u32>, Stored)>::new(), BTreeSet::new(), 0);
        // Files that stand alone, or that others damaged, are not looked for without end.
        for (_, (_, snap), name) in names {
            if out.len() == most || tried == TRIED {
                break;
            }
            if seen.contains(&name) || self.sizes.recurrent > 0 && !snap {
                continue;
            }
            tried += 1;
            let Some(mut ids) = self.ids_of(name, &mut seen) else { continue };
            // Snapshots of one conversation are many.
            if out.iter().any(|(other, _)| other.starts_with(&ids)) {
                continue;
            }
            // Who goes on from there asks for one token more.
            ids.push(0);
            let stored = locked(&self.index).find(&ids, self.seed, &self.sizes);
            ids.pop();
            if stored.usable as usize == ids.len() {
                out.push((ids, stored));
            }
        }
        out
    }

    /// All tokens up to the end of a file, which stands on others; `None` if one of those is not
    /// there. Adds their names to those that were `seen`.
    fn ids_of(&self, mut name: String, seen: &mut BTreeSet<String>) -> Option<Vec<u32>> {
        let mut parts = Vec::new();
        loop {
            let opened = Opened::open(&self.folder, &name, &self.seed, &self.sizes)?;
            let pos = depth(&name).0.checked_sub(opened.ids.len() as u32)?;
            seen.insert(name);
            parts.push(opened.ids);
            if pos == 0 {
                break;
            }
            name = block_name(pos, &opened.before);
        }
        Some(parts.into_iter().rev().flatten().collect())
    }

    /// Waits until everything is written that was asked for. What there is of the beginnings of
    /// `used` was last of use, in that order.
    pub fn finish(&mut self, used: &[Vec<u32>]) {
        (self.to_writer, self.to_readers) = (None, None);
        // Threads that failed have done less; that is all.
        self.readers.drain(..).for_each(|thread| drop(thread.join()));
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
            for ids in used {
                // Who goes on from there asks for one token more.
                self.find(&[&ids[..], &[0]].concat());
            }
            self.keep_order();
        }
    }

    /// Gives files that were of use the time of now, a second apart for each use, so that the order
    /// outlives the process.
    fn keep_order(&self) {
        let index = locked(&self.index);
        let used: BTreeSet<u64> = index.order.iter().map(|f| f.0).filter(|used| *used > index.opened).collect();
        let later: BTreeMap<u64, u64> = used.into_iter().rev().zip(0..).collect();
        let dated = index.order.iter().filter(|f| f.0 > index.opened);
        let dated = dated.map(|(used_at, _, name)| (&**name, later.get(used_at).copied().unwrap_or(0)));
        // What does not work makes the order worse, and nothing else.
        let _ = Output::date(&self.folder, dated);
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.finish(&[]);
    }
}

/// Reads a section and compares the hash that follows.
fn read_section(file: &mut impl Read, bytes: usize) -> Option<Vec<u8>> {
    let (mut out, mut hash) = (vec![0; bytes], [0; 32]);
    file.read_exact(&mut out).ok()?;
    file.read_exact(&mut hash).ok()?;
    (hash[..] == Sha256::digest(&out)[..]).then_some(out)
}

/// The same of one whose pieces are summed.
fn read_pieces(file: &mut impl Read, room: &mut Reserved, pieces: &[usize]) -> Option<Kept> {
    let mut hasher = Sha256::new();
    let kept = room.read(file, pieces, |piece| hasher.update(sum(piece)))?;
    let mut hash = [0; 32];
    file.read_exact(&mut hash).ok()?;
    (hash[..] == hasher.finalize()[..]).then_some(kept)
}

/// The lengths of the pieces of so many bytes of state or logits.
fn state_pieces(bytes: u64) -> Vec<usize> {
    let whole = (bytes / PIECE as u64) as usize;
    let rest = (bytes % PIECE as u64) as usize;
    std::iter::repeat_n(PIECE, whole).chain((rest > 0).then_some(rest)).collect()
}

/// A file whose header and tokens were read and found to be what its name says.
struct Opened {
    file: File,
    ids: Vec<u32>,
    before: Chain,
    kind: Kind,
    /// Bytes of rows, recurrent state and logits.
    lengths: [u64; 3],
    snap: bool,
}

impl Opened {
    /// `None` for whatever is wrong with it.
    fn open(folder: &Path, name: &str, seed: &Chain, sizes: &Sizes) -> Option<Opened> {
        let mut file = File::open(folder.join(name)).ok()?;
        let bytes = file.metadata().ok().filter(|m| m.is_file())?.len();
        let header = read_section(&mut file, HEADER)?;
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let lengths: [u64; 5] = std::array::from_fn(|i| number(80 + 8 * i));
        let [tokens, rows, recurrent, logits, pos] = lengths;
        let snap = name.starts_with("s-");
        let kind = u32::from_le_bytes(header[12..16].try_into().expect("four bytes"));
        let fits = header[..8] == *MAGIC
            && header[8..12] == VERSION.to_le_bytes()
            && header[16..48] == *seed
            && tokens <= u64::from(sizes.block)
            && rows == tokens * sizes.row
            && recurrent == if snap { sizes.recurrent } else { 0 }
            && (logits == 0 || snap && logits == sizes.logits)
            && bytes == sizes.length(tokens, snap, logits > 0)
            && depth(name).0 as u64 == pos;
        let before: Chain = header[48..80].try_into().expect("a hash");
        if !fits {
            return None;
        }
        let ids = read_section(&mut file, tokens as usize * 4)?;
        let ids: Vec<u32> = ids.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let expected =
            if snap { snap_name(&before, pos as u32, &ids) } else { block_name(pos as u32, &chain(&before, &ids)) };
        let kind = [Kind::Timed, Kind::Turn, Kind::Branch].get(kind as usize).copied()?;
        (expected == name).then_some(Opened { file, ids, before, kind, lengths: [rows, recurrent, logits], snap })
    }

    /// Its state, once the file is at the end of the rows.
    fn state(&mut self, room: &mut Reserved) -> Option<Option<State>> {
        let [_, recurrent, logits] = self.lengths;
        let mut section = |bytes: u64| -> Option<Option<Arc<Kept>>> {
            let kept = read_pieces(&mut self.file, room, &state_pieces(bytes))?;
            Some((bytes > 0).then(|| Arc::new(kept)))
        };
        let (recurrent, logits) = (section(recurrent)?, section(logits)?);
        Some(self.snap.then_some(State { recurrent, logits, kind: self.kind }))
    }

    /// Everything in it.
    fn load(mut self, room: &mut Reserved, sizes: &Sizes) -> Option<Loaded> {
        let rows = read_pieces(&mut self.file, room, &sizes.pieces(self.ids.len()))?;
        let rows = (!self.ids.is_empty()).then(|| Arc::new(rows));
        let state = self.state(room)?;
        Some(Loaded { rows, ids: self.ids, state })
    }
}

/// A file that is read straight to where its content belongs.
#[cfg(unix)]
pub struct Direct {
    opened: Opened,
    /// Where the rows begin.
    at: u64,
}

#[cfg(unix)]
impl Direct {
    /// Its tokens.
    pub fn ids(&self) -> &[u32] {
        &self.opened.ids
    }

    /// Bytes of its state.
    pub fn state_bytes(&self) -> u64 {
        self.opened.lengths[1] + self.opened.lengths[2]
    }

    /// Writes its rows to where those of each head belong, by several threads; false if they are
    /// not what was written once.
    pub fn fill(&self, places: Vec<&mut [u8]>) -> bool {
        use std::os::unix::fs::FileExt;
        let (count, threads) = (places.len(), readers());
        let mut work: Vec<(u64, &mut [u8], [u8; SUM])> = Vec::with_capacity(count);
        let mut at = self.at;
        for place in places {
            let len = place.len() as u64;
            work.push((at, place, [0; SUM]));
            at += len;
        }
        let file = &self.opened.file;
        let read = |part: &mut [(u64, &mut [u8], [u8; SUM])]| {
            part.iter_mut().all(|(at, place, found)| {
                let whole = file.read_exact_at(place, *at).is_ok();
                *found = sum(place);
                whole
            })
        };
        let size = count.div_ceil(threads).max(1);
        let parts = Mutex::new(work.chunks_mut(size));
        let take = || {
            loop {
                let part = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(part) = part else { return true };
                if !read(part) {
                    return false;
                }
            }
        };
        let whole = std::thread::scope(|scope| {
            // What a thread that the system does not have would do, the others do.
            let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, take).ok();
            let others: Vec<_> = (1..count.div_ceil(size)).filter_map(spawn).collect();
            let mine = take();
            others.into_iter().fold(mine, |all, other| other.join().unwrap_or(false) && all)
        });
        let (mut hasher, mut hash) = (Sha256::new(), [0; 32]);
        work.iter().for_each(|w| hasher.update(w.2));
        whole && file.read_exact_at(&mut hash, at).is_ok() && hash[..] == hasher.finalize()[..]
    }

    /// Its state, into room that was made for it; `None` if it is not what was written once.
    pub fn state(&mut self, room: &mut Reserved) -> Option<Option<State>> {
        use std::io::{Seek, SeekFrom};
        let behind = self.at + self.opened.lengths[0] + 32;
        self.opened.file.seek(SeekFrom::Start(behind)).ok()?;
        self.opened.state(room)
    }
}

/// Threads that read files.
fn readers() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(READERS))
}

/// One of the threads that read files, ahead of the engine.
struct Reader {
    folder: PathBuf,
    seed: Chain,
    sizes: Sizes,
    index: Arc<Mutex<Index>>,
    wishes: Arc<Mutex<Receiver<Wish>>>,
}

impl Reader {
    fn run(&self) {
        loop {
            // Whoever waits for the next one holds the lock; the others read.
            let next = self.wishes.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(Wish { name, mut room, reply }) = next else { return };
            let opened = Opened::open(&self.folder, &name, &self.seed, &self.sizes);
            let loaded = opened.and_then(|opened| opened.load(&mut room, &self.sizes));
            if loaded.is_none() {
                remove(&self.folder, &self.index, &name);
            }
            // Who wanted it may be gone.
            let _ = reply.send(loaded);
        }
    }
}

/// Removes a file with which something is wrong.
fn remove(folder: &Path, index: &Mutex<Index>, name: &str) {
    locked(index).remove(name);
    // If it cannot be removed it is found again at the next start, and is a miss again.
    let _ = std::fs::remove_file(folder.join(name));
}

/// The hash that follows a section; `None` if its pieces are not all of it.
fn hash_of(section: &[u8], pieces: Option<&[usize]>) -> Option<[u8; 32]> {
    let Some(pieces) = pieces else { return Some(Sha256::digest(section).into()) };
    let (mut hasher, mut rest) = (Sha256::new(), section);
    for len in pieces {
        let (piece, later) = rest.split_at_checked(*len)?;
        hasher.update(sum(piece));
        rest = later;
    }
    rest.is_empty().then(|| hasher.finalize().into())
}

fn content(kept: Option<&Arc<Kept>>) -> &[u8] {
    kept.map_or(&[], |kept| &kept[..])
}

struct Writer {
    folder: PathBuf,
    seed: Chain,
    sizes: Sizes,
    budget: u64,
    index: Arc<Mutex<Index>>,
    written: Arc<AtomicU64>,
    waiting: Arc<AtomicU64>,
}

impl Writer {
    fn run(&self, items: &Receiver<(u64, Item)>) {
        for (used, item) in items {
            let name = name_of(&item);
            let known = locked(&self.index).files.get(&name).map(|f| f.0);
            // A full or broken disk: the cache is smaller than it could be.
            if let Some(bytes) = known.or_else(|| self.write(&name, &item, used)) {
                locked(&self.index).add(name, bytes, used);
                self.written.fetch_add(u64::from(known.is_none()), Ordering::Relaxed);
            }
            drop(item);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Its length; `None` if it was not written, for want of room, say, which nothing makes that is
    /// of use with it or later.
    fn write(&self, name: &str, item: &Item, used: u64) -> Option<u64> {
        let ids: Vec<u8> = item.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let rows = content(item.rows.as_ref());
        let recurrent = content(item.state.as_ref().and_then(|s| s.recurrent.as_ref()));
        let logits = content(item.state.as_ref().and_then(|s| s.logits.as_ref()));
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        let kind = item.state.as_ref().map_or(0, |s| s.kind as u32);
        header.extend_from_slice(&kind.to_le_bytes());
        header.extend_from_slice(&self.seed);
        header.extend_from_slice(&item.before);
        for n in [item.ids.len(), rows.len(), recurrent.len(), logits.len(), item.pos as usize] {
            header.extend_from_slice(&(n as u64).to_le_bytes());
        }
        // Sections, and the pieces in which they are summed, of those that are.
        let sections: [(&[u8], Option<Vec<usize>>); 5] = [
            (&header, None),
            (&ids, None),
            (rows, Some(self.sizes.pieces(item.ids.len()))),
            (recurrent, Some(state_pieces(recurrent.len() as u64))),
            (logits, Some(state_pieces(logits.len() as u64))),
        ];
        let bytes = sections.iter().map(|s| s.0.len() as u64 + 32).sum::<u64>();
        loop {
            let mut index = locked(&self.index);
            if bytes > self.budget {
                return None;
            }
            if index.bytes + bytes <= self.budget {
                break;
            }
            let worst = index.worst().filter(|(last, _)| *last < used)?.1;
            index.remove(&worst);
            let _ = std::fs::remove_file(self.folder.join(&worst));
        }
        let output = Output::create_one_of_many(&self.folder.join(name)).ok()?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            output.file().set_permissions(std::fs::Permissions::from_mode(0o600)).ok()?;
        }
        output.reserve(bytes).ok()?;
        let mut at = 0;
        for (section, pieces) in sections {
            output.write_all_at(section, at).ok()?;
            at += section.len() as u64;
            output.write_all_at(&hash_of(section, pieces.as_deref())?, at).ok()?;
            at += 32;
        }
        output.finish().ok()?;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> Sizes {
        Sizes { block: 16, row: 4, heads: [4].into(), recurrent: 8, logits: 12 }
    }

    #[test]
    fn many_files_of_others_at_a_position_cost_one_look() {
        let (seed, mut index) = ([7; 32], Index::default());
        for n in 0..100_000u32 {
            index.add(format!("s-{}-{:08}-{n:032x}.kv", hex(&seed), 5 + n % 9), 100, 0);
        }
        let prompt: Vec<u32> = (0..40).collect();
        let mine = snap_name(&seed, 9, &prompt[..9]);
        index.add(mine.clone(), sizes().length(9, true, false), 0);
        let begun = std::time::Instant::now();
        let found = index.find(&prompt, seed, &sizes());
        let took = begun.elapsed();
        assert_eq!((found.snap, found.usable), (Some(mine), 9));
        // A dozen looks; a hash for each of the names would take a hundred times as long.
        assert!(took < std::time::Duration::from_millis(5), "{took:?}");
    }

    #[test]
    fn what_stands_on_others_goes_first_and_what_is_used_goes_last() {
        let mut index = Index::default();
        let block = |n: u32| block_name(n * 16, &[n as u8; 32]);
        for n in [1, 2, 3] {
            index.add(block(n), 10, 0);
        }
        index.add(block(4), 10, 1);
        index.clock = 2;
        assert!(index.touch(&block(1)) && !index.touch("b-none"));
        let mut order = Vec::new();
        while let Some((_, worst)) = index.worst() {
            index.remove(&worst);
            order.push(worst);
        }
        assert_eq!(order, [3, 2, 4, 1].map(block));
        assert_eq!((index.bytes, index.files.len()), (0, 0));
    }
}
