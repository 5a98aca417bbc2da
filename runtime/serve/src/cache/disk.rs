//! Prefixes on disk: the tree's blocks and snapshots as files, so that sessions outlive the process.
//!
//! `FOLDER/ARTIFACT/b-POSITION-CHAIN.kv` is a block, `s-POSITION-CHAIN-TAIL.kv` a snapshot behind the blocks of CHAIN. Names are hashes over the
//! artifact id, the layout of its state and every token, so a name says what a file is good for; the tokens stand in it and are compared all
//! the same. A file is a header of fixed size, then its sections (tokens, rows, recurrent state, logits), each section and the header followed by
//! a SHA-256. What is not exactly so is a miss, never an error, and the file is removed.
//!
//! Files are written by a thread of their own, under temporary names with mode 0600, synced and renamed
//! ([`loaf_formats::output`]). What goes when the folder is full: the least recently used, and of those used together what stands on
//! others before what others stand on. What this does not do: it encrypts nothing; rows of a cache say nearly as much as the text they come from.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use loaf_formats::output::Output;
use sha2::{Digest, Sha256};

use super::account::{Account, Kept};
use super::tree::{Chain, Item, Kind, State, chain};

const MAGIC: &[u8; 8] = b"loafkept";
const VERSION: u32 = 1;
/// Magic, version, kind, seed, chain before, then five lengths: tokens, rows, recurrent, logits (bytes), position.
const HEADER: usize = 8 + 4 + 4 + 32 + 32 + 5 * 8;
/// Items that wait to be written; what does not fit stays unwritten.
const WAITING: usize = 1024;

/// What the folder holds.
#[derive(Default)]
struct Index {
    /// Names, with their lengths and when they were last of use.
    files: BTreeMap<String, (u64, u64)>,
    bytes: u64,
    clock: u64,
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
}

fn locked(index: &Mutex<Index>) -> MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
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
    format!("s-{}-{pos:08}-{}.kv", hex(before), hex(&chain(before, tail)[..16]))
}

impl Index {
    fn touch(&mut self, name: &str) -> bool {
        self.clock += 1;
        let clock = self.clock;
        self.files.get_mut(name).map(|f| f.1 = clock).is_some()
    }

    fn add(&mut self, name: String, bytes: u64) {
        self.clock += 1;
        if let Some(old) = self.files.insert(name, (bytes, self.clock)) {
            self.bytes -= old.0;
        }
        self.bytes += bytes;
    }

    fn remove(&mut self, name: &str) {
        if let Some((bytes, _)) = self.files.remove(name) {
            self.bytes -= bytes;
        }
    }

    /// The file of least use: the oldest, and of a chain's the one that stands on the others.
    fn worst(&self) -> Option<String> {
        let worst = self.files.iter().min_by_key(|(name, (_, used))| (*used, std::cmp::Reverse(depth(name))));
        worst.map(|(name, _)| name.clone())
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
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let (name, data) = (entry.file_name().to_string_lossy().into_owned(), entry.metadata()?);
            let ours = name.ends_with(".kv") && (name.starts_with("b-") || name.starts_with("s-"));
            if ours && data.is_file() {
                found.push((data.modified().ok(), name, data.len()));
            }
        }
        // Oldest first, so that the order of use outlives the process.
        found.sort();
        let mut index = Index::default();
        found.into_iter().for_each(|(_, name, bytes)| index.add(name, bytes));
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
        Ok(Disk { folder, seed, sizes, index, written, waiting, to_writer: Some(to_writer), writer: Some(writer) })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        locked(&self.index).bytes
    }

    /// Files written since it was opened.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Has an item written, unless it is there or too many wait; with `wait` it is written in any case.
    pub fn put(&self, item: Item, wait: bool) {
        if locked(&self.index).touch(&name_of(&item)) {
            return;
        }
        let Some(to_writer) = &self.to_writer else { return };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // What does not fit stays unwritten, and is evaluated again; the writer ends after the sender alone.
        let sent = if wait { to_writer.send(item).is_ok() } else { to_writer.try_send(item).is_ok() };
        if !sent {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether something waits to be written.
    pub fn is_writing(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// The longest beginning of `prompt` that lies here.
    pub fn find(&self, prompt: &[u32]) -> Stored {
        let (block, last) = (self.sizes.block as usize, prompt.len().saturating_sub(1));
        let (mut index, mut before, mut pos) = (locked(&self.index), self.seed, 0);
        let (mut best, mut blocks) = (Stored::default(), Vec::new());
        loop {
            let start = format!("s-{}-", hex(&before));
            let snaps = index.files.range(start.clone()..).take_while(|(name, _)| name.starts_with(&start));
            let ends: Vec<usize> = snaps.map(|(name, _)| depth(name).0 as usize).collect();
            for end in ends.into_iter().filter(|end| (pos..=prompt.len()).contains(end) && end - pos < block) {
                let name = snap_name(&before, end as u32, &prompt[pos..end]);
                // Whether it has the logits of what follows, its length tells.
                let bytes = index.files.get(&name).map(|f| f.0);
                let full = self.length((end - pos) as u64, true, true);
                let usable = if self.sizes.recurrent == 0 {
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
            if !index.files.contains_key(&name) {
                break;
            }
            blocks.push(name);
            (before, pos) = (after, pos + block);
            if self.sizes.recurrent == 0 && pos.min(last) > best.usable as usize {
                best = Stored { blocks: blocks.clone(), snap: None, usable: pos.min(last) as u32 };
            }
        }
        best.blocks.iter().chain(&best.snap).for_each(|name| {
            index.touch(name);
        });
        best
    }

    fn length(&self, tokens: u64, snap: bool, logits: bool) -> u64 {
        let Sizes { row, recurrent, logits: bytes, .. } = self.sizes;
        let state = if snap { recurrent + if logits { bytes } else { 0 } } else { 0 };
        HEADER as u64 + 5 * 32 + tokens * (4 + row) + state
    }

    /// Bytes of a file.
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        locked(&self.index).files.get(name).map(|f| f.0)
    }

    /// Reads a file; the bytes are charged to `account`. `None` for whatever is wrong with it, and then it is gone.
    pub fn get(&self, name: &str, account: &Arc<Account>) -> Option<Loaded> {
        let loaded = self.read(name, account);
        if loaded.is_none() {
            locked(&self.index).remove(name);
            // If it cannot be removed it is found again at the next start, and is a miss again.
            let _ = std::fs::remove_file(self.folder.join(name));
        }
        loaded
    }

    fn read(&self, name: &str, account: &Arc<Account>) -> Option<Loaded> {
        let mut file = File::open(self.folder.join(name)).ok()?;
        let bytes = file.metadata().ok().filter(|m| m.is_file())?.len();
        let mut header = [0; HEADER];
        read_section(&mut file, &mut header)?;
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
            && bytes == self.length(tokens, snap, logits > 0)
            && depth(name).0 as u64 == pos;
        let before: Chain = header[48..80].try_into().expect("a hash");
        if !fits {
            return None;
        }
        let mut ids = vec![0; tokens as usize * 4];
        read_section(&mut file, &mut ids)?;
        let ids: Vec<u32> = ids.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let expected =
            if snap { snap_name(&before, pos as u32, &ids) } else { block_name(pos as u32, &chain(&before, &ids)) };
        if expected != name {
            return None;
        }
        let mut section = |bytes: u64| -> Option<Option<Arc<Kept>>> {
            let mut kept = account.take(usize::try_from(bytes).ok()?)?;
            read_section(&mut file, &mut kept)?;
            Some((bytes > 0).then(|| Arc::new(kept)))
        };
        let (rows, recurrent, logits) = (section(rows)?, section(recurrent)?, section(logits)?);
        let kind = [Kind::Timed, Kind::Turn, Kind::Branch].get(kind as usize).copied()?;
        Some(Loaded { rows, ids, state: snap.then_some(State { recurrent, logits, kind }) })
    }

    /// Waits until everything is written that was asked for.
    pub fn finish(&mut self) {
        self.to_writer = None;
        if let Some(writer) = self.writer.take() {
            // A writer that failed has written less; that is all.
            let _ = writer.join();
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Fills `out` and compares the hash that follows.
fn read_section(file: &mut File, out: &mut [u8]) -> Option<()> {
    file.read_exact(out).ok()?;
    let mut hash = [0; 32];
    file.read_exact(&mut hash).ok()?;
    (hash[..] == Sha256::digest(&*out)[..]).then_some(())
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
        let output = Output::create(&self.folder.join(name), &[] as &[&Path]).ok()?;
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
