//! The cache of sessions: prefixes of token ids and the state after them, in memory and on disk.
//!
//! What always holds: a request goes on from what is found here with the bits that a cold run has;
//! bytes are charged to the budget before they are allocated ([`account`]); what is damaged,
//! truncated or another model's is a miss. Sequences that still lie in an engine's slots are the
//! scheduler's, and are looked at before anything here.

pub mod account;
pub mod disk;
pub mod sum;
pub mod tree;

use std::path::PathBuf;
use std::sync::Arc;

use loaf_runtime::Engine;
use sha2::{Digest, Sha256};

use crate::error::ServeError;
use account::{Account, Kept, Reserved};
#[cfg(unix)]
use disk::Direct;
use disk::{Coming, Disk, Sizes, Stored};
use tree::{Chain, Hit, Item, Tree};

/// How much may be kept, and where.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Bytes in memory; 0 for none.
    pub memory: u64,
    /// Folder on disk.
    pub folder: Option<PathBuf>,
    /// Bytes on disk.
    pub disk: u64,
    /// Tokens of a block.
    pub block: u32,
    /// Longest time, in milliseconds, that a replay between two kept positions of a hybrid should
    /// take.
    pub replay_ms: u64,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions { memory: 2 << 30, folder: None, disk: 32 << 30, block: 256, replay_ms: 2000 }
    }
}

/// Both tiers, for one engine.
pub struct Cache {
    account: Arc<Account>,
    tree: Tree,
    disk: Option<Disk>,
    /// Things that were removed to make room.
    pub evicted: u64,
}

/// Where the longest beginning was found.
pub enum Found {
    /// In memory.
    Memory(Hit),
    /// On disk.
    Disk(Stored),
}

impl Cache {
    /// An empty cache for an engine. A folder that cannot be used is left alone, and said.
    pub fn open(engine: &Engine, options: &CacheOptions) -> (Cache, Option<ServeError>) {
        let seed = seed(engine, options.block);
        let sizes = Sizes {
            block: options.block.max(1),
            row: engine.row_bytes(),
            heads: engine.head_bytes().into(),
            recurrent: engine.recurrent_bytes(),
            logits: u64::from(engine.model().plan().vocab) * 4,
        };
        let mut problem = None;
        let disk = options.folder.as_ref().and_then(|folder| {
            let artifact = engine.model().id().to_string();
            let opened = Disk::open(folder, &artifact, seed, sizes.clone(), options.disk);
            opened.map_err(|e| problem = Some(ServeError::File(folder.clone(), e))).ok()
        });
        let tree = Tree::new(seed, options.block, sizes.recurrent > 0);
        (Cache { account: Account::new(options.memory), tree, disk, evicted: 0 }, problem)
    }

    /// What is charged, and may be.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Bytes on disk, and files written.
    pub fn on_disk(&self) -> (u64, u64) {
        self.disk.as_ref().map_or((0, 0), |d| (d.bytes(), d.written()))
    }

    /// The blocks and snapshots in memory.
    pub fn len(&self) -> (usize, usize) {
        self.tree.len()
    }

    /// Removes things until there is room for so many bytes; false if there is none all the same.
    fn make_room(&mut self, bytes: u64) -> bool {
        if bytes > self.account.budget() {
            return false;
        }
        while !self.account.has_room(bytes) {
            if self.tree.evict().is_none() {
                return false;
            }
            self.evicted += 1;
        }
        true
    }

    /// Bytes that may be filled, after as much else as that takes was removed; `None` if there is
    /// no room all the same.
    pub fn take(&mut self, bytes: u64) -> Option<Kept> {
        if self.make_room(bytes) { self.account.take(usize::try_from(bytes).ok()?) } else { None }
    }

    /// As [`Cache::take`], of bytes that are added later.
    pub fn room(&mut self, bytes: u64) -> Option<Kept> {
        if self.make_room(bytes) { self.account.room(usize::try_from(bytes).ok()?) } else { None }
    }

    /// Charges bytes that are not the cache's own, after as much else as that takes was removed.
    pub fn reserve(&mut self, bytes: u64) -> Option<Reserved> {
        if self.make_room(bytes) { self.account.reserve(bytes) } else { None }
    }

    /// Has written what there is of the beginnings of `ids`, as far as it is not on disk yet.
    pub fn persist(&mut self, ids: &[u32]) {
        if let Some(disk) = &self.disk {
            disk.next_use();
            self.tree.items_of(ids).into_iter().for_each(|item| disk.put(item, false));
        }
    }

    /// Whether something waits to be written, and holds memory until then.
    pub fn is_writing(&self) -> bool {
        self.disk.as_ref().is_some_and(Disk::is_writing)
    }

    /// The longest known beginning of a prompt, and how much of it was seen before.
    pub fn find(&mut self, prompt: &[u32]) -> (Found, u32) {
        let hit = self.tree.find(prompt);
        let (usable, common) = (hit.usable, hit.common);
        let stored = self.disk.as_ref().map(|d| d.find(prompt)).filter(|s| s.usable > usable);
        match stored {
            Some(stored) => (Found::Disk(stored), common),
            None => (Found::Memory(hit), common),
        }
    }

    /// Blocks and snapshots in memory.
    pub fn tree(&mut self) -> &mut Tree {
        &mut self.tree
    }

    /// Begins to read a file. What there is no room for is a miss, and stays. Nothing is given up
    /// for one that is only read `ahead`.
    pub fn read(&mut self, name: &str, ahead: bool) -> Option<Coming> {
        let bytes = self.disk.as_ref()?.bytes_of(name)?;
        if !ahead && !self.make_room(bytes) {
            return None;
        }
        let room = self.account.reserve(bytes)?;
        Some(self.disk.as_ref()?.get(name.to_owned(), room))
    }

    /// Bytes of a file.
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        self.disk.as_ref()?.bytes_of(name)
    }

    /// Has the system read a file soon.
    pub fn hint(&self, name: &str) {
        self.disk.iter().for_each(|disk| disk.hint(name));
    }

    /// Opens a file to be read straight to where its content belongs, with room for its state; both
    /// are `None` if they are not to be had.
    #[cfg(unix)]
    pub fn direct(&mut self, name: &str) -> Option<(Direct, Reserved)> {
        let direct = self.disk.as_ref()?.direct(name)?;
        if !self.make_room(direct.state_bytes()) {
            return None;
        }
        let room = self.account.reserve(direct.state_bytes())?;
        Some((direct, room))
    }

    /// Removes a file with which something is wrong.
    pub fn remove(&self, name: &str) {
        self.disk.iter().for_each(|disk| disk.remove(name));
    }

    /// The tokens of up to `most` sessions on disk that were last of use, and of each what is to be
    /// read.
    pub fn recent(&self, most: usize) -> Vec<(Vec<u32>, Stored)> {
        self.disk.as_ref().map(|disk| disk.recent(most)).unwrap_or_default()
    }

    /// Whether there is a folder, and the chain before the first token.
    pub fn disk_seed(&self) -> Option<Chain> {
        self.disk.as_ref().map(|_| self.tree.seed())
    }

    /// Whether an item lies on disk, rows and all; it is of use then.
    pub fn is_on_disk(&self, item: &Item) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.touch(item))
    }

    /// What is written from now on belongs together, see [`Disk::next_use`].
    pub fn next_use(&self) {
        self.disk.iter().for_each(Disk::next_use);
    }

    /// Has one item written, however many wait.
    pub fn write(&self, item: Item) {
        if let Some(disk) = &self.disk {
            disk.put(item, true);
        }
    }

    /// Has everything written that is in memory and not on disk.
    pub fn write_tree(&self) {
        let Some(disk) = &self.disk else { return };
        self.tree.all().into_iter().filter(|item| !disk.has(item)).for_each(|item| self.write(item));
    }

    /// Writes everything that is in memory and waits for it. What there is of the beginnings of
    /// `used` was last of use, in that order.
    pub fn write_all(&mut self, used: &[Vec<u32>]) {
        self.write_tree();
        if let Some(disk) = &mut self.disk {
            disk.finish(used);
        }
    }
}

/// What makes prefixes of this engine other than those of another: artifact and layout of the
/// state. Devices that can save rows have equal bits, so which one it is says nothing.
fn seed(engine: &Engine, block: u32) -> Chain {
    let plan = engine.model().plan();
    let mut hash = Sha256::new();
    // Files of another version have other names: nobody finds them, and they go first.
    hash.update(b"loaf session cache 2\0");
    hash.update(engine.model().id().to_string());
    hash.update(block.to_le_bytes());
    for s in &plan.states {
        hash.update([s.kind as u8]);
        [s.offset, s.bytes, u64::from(s.heads), u64::from(s.row_bytes)]
            .iter()
            .for_each(|n| hash.update(n.to_le_bytes()));
    }
    hash.finalize().into()
}
