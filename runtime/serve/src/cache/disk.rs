//! Prefixes on disk: the tree's blocks and snapshots as files, so that sessions outlive the
//! process.
//!
//! `FOLDER/ARTIFACT/b-POSITION-CHAIN.kv` is a block, `s-POSITION-CHAIN-TAIL.kv` a snapshot behind
//! the blocks of CHAIN. Names are hashes over the artifact id, the layout of its state and every
//! token, so a name says what a file is good for; the tokens stand in it and are compared all the
//! same. A file is a header of fixed size, then its sections (tokens, rows, recurrent state,
//! logits), each section and the header followed by a SHA-256. What is not exactly so is a miss,
//! never an error, and the file is removed.
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
use super::tree::{Chain, Item, Kind, State, chain};

const MAGIC: &[u8; 8] = b"loafkept";
const VERSION: u32 = 1;
/// Magic, version, kind, seed, chain before, then five lengths: tokens, rows, recurrent, logits
/// (bytes), position.
const HEADER: usize = 8 + 4 + 4 + 32 + 32 + 5 * 8;
/// Items that wait to be written; what does not fit stays unwritten.
const WAITING: usize = 1024;
/// Most threads that read and hash files.
const READERS: usize = 4;

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
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens of a block.
    pub block: u32,
    /// Bytes of a token's rows.
    pub row: u64,
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
    to_writer: Option<SyncSender<Item>>,
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
        self.add(name.to_owned(), bytes);
        true
    }

    fn add(&mut self, name: String, bytes: u64) {
        self.remove(&name);
        self.bytes += bytes;
        self.order.insert((self.clock, Reverse(depth(&name)), name.clone()));
        self.files.insert(name, (bytes, self.clock));
    }

    fn remove(&mut self, name: &str) {
        if let Some((bytes, used)) = self.files.remove(name) {
            self.bytes -= bytes;
            self.order.remove(&(used, Reverse(depth(name)), name.to_owned()));
        }
    }

    /// The file of least use: the oldest, and of a chain's the one that stands on the others.
    fn worst(&self) -> Option<String> {
        self.order.first().map(|(_, _, name)| name.clone())
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
            index.add(name, bytes);
        }
        index.opened = index.clock;
        let index = Arc::new(Mutex::new(index));
        let (to_writer, items) = sync_channel(WAITING);
        let written = Arc::new(AtomicU64::new(0));
        let waiting = Arc::new(AtomicU64::new(0));
        let writer = Writer {
            folder: folder.clone(),
            seed,
            budget,
            index: index.clone(),
            written: written.clone(),
            waiting: waiting.clone(),
        };
        let writer = std::thread::Builder::new().name("loaf-cache".into()).spawn(move || writer.run(&items))?;
        let (to_readers, wishes) = channel();
        let wishes = Arc::new(Mutex::new(wishes));
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(READERS));
        let mut readers = Vec::new();
        for _ in 0..threads {
            let reader = Reader { folder: folder.clone(), seed, sizes, index: index.clone(), wishes: wishes.clone() };
            let thread = std::thread::Builder::new().name("loaf-cache-read".into());
            readers.push(thread.spawn(move || reader.run())?);
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
            readers,
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
        if locked(&self.index).touch(&name_of(&item)) {
            return;
        }
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

    /// Whether an item is there.
    pub fn has(&self, item: &Item) -> bool {
        locked(&self.index).files.contains_key(&name_of(item))
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

    /// Waits until everything is written that was asked for.
    pub fn finish(&mut self) {
        (self.to_writer, self.to_readers) = (None, None);
        // Threads that failed have done less; that is all.
        self.readers.drain(..).for_each(|thread| drop(thread.join()));
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
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
        self.finish();
    }
}

/// Reads a section and compares the hash that follows.
fn read_section(file: &mut File, room: &mut Reserved, bytes: u64) -> Option<Kept> {
    let kept = room.read(file, usize::try_from(bytes).ok()?)?;
    let mut hash = [0; 32];
    file.read_exact(&mut hash).ok()?;
    (hash[..] == Sha256::digest(&*kept)[..]).then_some(kept)
}

/// One of the threads that read and hash files, ahead of the engine.
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
            let loaded = self.read(&name, &mut room);
            if loaded.is_none() {
                locked(&self.index).remove(&name);
                // If it cannot be removed it is found again at the next start, and is a miss again.
                let _ = std::fs::remove_file(self.folder.join(&name));
            }
            // Who wanted it may be gone.
            let _ = reply.send(loaded);
        }
    }

    /// A file's content; `None` for whatever is wrong with it.
    fn read(&self, name: &str, room: &mut Reserved) -> Option<Loaded> {
        let mut file = File::open(self.folder.join(name)).ok()?;
        let bytes = file.metadata().ok().filter(|m| m.is_file())?.len();
        let header = read_section(&mut file, room, HEADER as u64)?;
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let lengths: [u64; 5] = std::array::from_fn(|i| number(80 + 8 * i));
        let [tokens, rows, recurrent, logits, pos] = lengths;
        let snap = name.starts_with("s-");
        let kind = u32::from_le_bytes(header[12..16].try_into().expect("four bytes"));
        let fits = header[..8] == *MAGIC
            && header[8..12] == VERSION.to_le_bytes()
            && header[16..48] == self.seed
            && tokens <= u64::from(self.sizes.block)
            && rows == tokens * self.sizes.row
            && recurrent == if snap { self.sizes.recurrent } else { 0 }
            && (logits == 0 || snap && logits == self.sizes.logits)
            && bytes == self.sizes.length(tokens, snap, logits > 0)
            && depth(name).0 as u64 == pos;
        let before: Chain = header[48..80].try_into().expect("a hash");
        if !fits {
            return None;
        }
        let ids = read_section(&mut file, room, tokens * 4)?;
        let ids: Vec<u32> = ids.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let expected =
            if snap { snap_name(&before, pos as u32, &ids) } else { block_name(pos as u32, &chain(&before, &ids)) };
        if expected != name {
            return None;
        }
        let mut section = |bytes: u64| -> Option<Option<Arc<Kept>>> {
            let kept = read_section(&mut file, room, bytes)?;
            Some((bytes > 0).then(|| Arc::new(kept)))
        };
        let (rows, recurrent, logits) = (section(rows)?, section(recurrent)?, section(logits)?);
        let kind = [Kind::Timed, Kind::Turn, Kind::Branch].get(kind as usize).copied()?;
        Some(Loaded { rows, ids, state: snap.then_some(State { recurrent, logits, kind }) })
    }
}

fn content(kept: Option<&Arc<Kept>>) -> &[u8] {
    kept.map_or(&[], |kept| &kept[..])
}

struct Writer {
    folder: PathBuf,
    seed: Chain,
    budget: u64,
    index: Arc<Mutex<Index>>,
    written: Arc<AtomicU64>,
    waiting: Arc<AtomicU64>,
}

impl Writer {
    fn run(&self, items: &Receiver<Item>) {
        for item in items {
            let name = name_of(&item);
            let known = locked(&self.index).touch(&name);
            // A full or broken disk: the cache is smaller than it could be.
            if let Some(bytes) = (!known).then(|| self.write(&name, &item)).flatten() {
                locked(&self.index).add(name, bytes);
                self.written.fetch_add(1, Ordering::Relaxed);
            }
            drop(item);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn write(&self, name: &str, item: &Item) -> Option<u64> {
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
        let sections: [&[u8]; 5] = [&header, &ids, rows, recurrent, logits];
        let bytes = sections.iter().map(|s| s.len() as u64 + 32).sum::<u64>();
        loop {
            let mut index = locked(&self.index);
            if bytes > self.budget {
                return None;
            }
            if index.bytes + bytes <= self.budget {
                break;
            }
            let worst = index.worst()?;
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
        for section in sections {
            output.write_all_at(section, at).ok()?;
            at += section.len() as u64;
            output.write_all_at(&Sha256::digest(section), at).ok()?;
            at += 32;
        }
        output.finish().ok()?;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { block: 16, row: 4, recurrent: 8, logits: 12 };

    #[test]
    fn many_files_of_others_at_a_position_cost_one_look() {
        let (seed, mut index) = ([7; 32], Index::default());
        for n in 0..100_000u32 {
            index.add(format!("s-{}-{:08}-{n:032x}.kv", hex(&seed), 5 + n % 9), 100);
        }
        let prompt: Vec<u32> = (0..40).collect();
        let mine = snap_name(&seed, 9, &prompt[..9]);
        index.add(mine.clone(), SIZES.length(9, true, false));
        let begun = std::time::Instant::now();
        let found = index.find(&prompt, seed, &SIZES);
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
            index.add(block(n), 10);
        }
        index.clock += 1;
        index.add(block(4), 10);
        index.clock += 1;
        assert!(index.touch(&block(1)) && !index.touch("b-none"));
        let mut order = Vec::new();
        while let Some(worst) = index.worst() {
            index.remove(&worst);
            order.push(worst);
        }
        assert_eq!(order, [3, 2, 4, 1].map(block));
        assert_eq!((index.bytes, index.files.len()), (0, 0));
    }
}
