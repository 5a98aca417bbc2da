//! Prefixes by token ids, in memory: a tree of blocks of cache rows, and snapshots that hang on
//! them.
//!
//! A node is a block of a fixed number of tokens with the cache rows of their positions; its
//! children go on from there. A snapshot stands at any position: it has the rows past the last
//! whole block, the recurrent state of models that have one, and maybe the logits of what follows.
//! A model without recurrent state can go on from any row, so its blocks and snapshots are usable
//! up to any token; a hybrid goes on from snapshots alone.
//!
//! What always holds: token ids are compared on every hit, never only hashes. Everything here was
//! charged to an account before it was allocated. What goes first when room is needed: timed
//! points, then blocks that lead nowhere, ends of turns that others went past, the least recently
//! used, and places where conversations part last. What somebody is being restored from does not
//! go.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use loaf_runtime::sequence::common_prefix;

use super::account::Kept;

/// Names a prefix: a hash over everything before it.
pub type Chain = [u8; 32];

/// The chain after more tokens.
pub fn chain(before: &Chain, ids: &[u32]) -> Chain {
    let mut hash = Sha256::new();
    hash.update(before);
    ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
    hash.finalize().into()
}

/// Why a position is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// So that no replay takes long.
    Timed,
    /// A prompt or an answer ended here.
    Turn,
    /// Conversations part here, or begin with it: the end of system and tools, or where requests
    /// were seen to diverge.
    Branch,
}

/// State at a position.
#[derive(Clone, Debug)]
pub struct State {
    /// Recurrent state; none for models without.
    pub recurrent: Option<Arc<Kept>>,
    /// Logits of what follows, as little-endian floats.
    pub logits: Option<Arc<Kept>>,
    /// Why it is kept.
    pub kind: Kind,
}

/// Rows of a cache: the first `take` of `of` rows.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The rows.
    pub bytes: Arc<Kept>,
    /// How many there are.
    pub of: u32,
    /// How many of them to use.
    pub take: u32,
}

/// How a prompt can begin.
#[derive(Clone, Debug, Default)]
pub struct Hit {
    /// Rows, in order.
    pub rows: Vec<Rows>,
    /// State to go on with, if the model has a recurrent one.
    pub state: Option<State>,
    /// Tokens that need no evaluation.
    pub usable: u32,
    /// Tokens that were seen before, though the state after them may not have been kept.
    pub common: u32,
}

struct Snap {
    tail: Box<[u32]>,
    rows: Option<Arc<Kept>>,
    state: State,
    used: u64,
}

struct Node {
    parent: usize,
    depth: u32,
    children: Vec<usize>,
    ids: Box<[u32]>,
    rows: Option<Arc<Kept>>,
    chain: Chain,
    snaps: Vec<Snap>,
    used: u64,
}

/// Something of the tree, for whoever keeps it elsewhere too.
#[derive(Clone, Debug)]
pub struct Item {
    /// The chain before it.
    pub before: Chain,
    /// Position after it.
    pub pos: u32,
    /// Its tokens: a block's, or those past the last whole block.
    pub ids: Box<[u32]>,
    /// Their rows; none if there are no tokens.
    pub rows: Option<Arc<Kept>>,
    /// A snapshot's state; none for a block.
    pub state: Option<State>,
}

/// The tree; see the module's doc.
pub struct Tree {
    block: usize,
    recurrent: bool,
    nodes: Vec<Option<Node>>,
    /// The block added last, while more are to follow it.
    growing: Option<usize>,
    clock: u64,
}

const ROOT: usize = 0;

impl Tree {
    /// An empty tree of blocks of `block` tokens, for a model with or without recurrent state.
    pub fn new(seed: Chain, block: u32, recurrent: bool) -> Tree {
        let root = Node {
            parent: ROOT,
            depth: 0,
            children: Vec::new(),
            ids: Box::default(),
            rows: None,
            chain: seed,
            snaps: Vec::new(),
            used: 0,
        };
        Tree { block: block.max(1) as usize, recurrent, nodes: vec![Some(root)], growing: None, clock: 0 }
    }

    /// The chain before the first token.
    pub fn seed(&self) -> Chain {
        self.node(ROOT).chain
    }

    /// Tokens of a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Nodes and snapshots in it.
    pub fn len(&self) -> (usize, usize) {
        let nodes = self.nodes.iter().flatten();
        nodes.fold((0, 0), |(n, s), node| (n + usize::from(node.rows.is_some()), s + node.snaps.len()))
    }

    fn node(&self, at: usize) -> &Node {
        self.nodes[at].as_ref().expect("a node that the tree refers to")
    }

    fn node_mut(&mut self, at: usize) -> &mut Node {
        self.nodes[at].as_mut().expect("a node that the tree refers to")
    }

    /// The longest known beginning of `prompt`. With the logits of what follows all of it may be
    /// known, else all but one token.
    pub fn find(&mut self, prompt: &[u32]) -> Hit {
        self.clock += 1;
        let (clock, last) = (self.clock, prompt.len().saturating_sub(1));
        let (mut at, mut pos, mut path) = (ROOT, 0, Vec::new());
        let (mut best, mut common) = (Hit::default(), 0);
        loop {
            let node = self.node(at);
            let rest = &prompt[pos..];
            let mut end: Option<(usize, usize)> = None;
            for (i, snap) in node.snaps.iter().enumerate() {
                let same = common_prefix(&snap.tail, rest);
                common = common.max(pos + same);
                let whole = same == snap.tail.len() && (pos + same <= last || snap.state.logits.is_some());
                let usable = if self.recurrent { if whole { pos + same } else { 0 } } else { (pos + same).min(last) };
                if usable > best.usable as usize {
                    end = Some((i, usable));
                    best.usable = usable as u32;
                }
            }
            if let Some((i, usable)) = end {
                let snap = &node.snaps[i];
                best.rows.clone_from(&path);
                let take = (usable - pos) as u32;
                let rows = snap.rows.clone().filter(|_| take > 0);
                best.rows.extend(rows.map(|bytes| Rows { bytes, of: snap.tail.len() as u32, take }));
                best.state = self.recurrent.then(|| snap.state.clone());
                self.node_mut(at).snaps[i].used = clock;
            }
            let node = self.node(at);
            let (next, shared) = node
                .children
                .iter()
                .map(|c| (*c, common_prefix(&self.node(*c).ids, rest)))
                .fold((ROOT, 0), |best, one| if one.1 > best.1 { one } else { best });
            if shared == 0 {
                break;
            }
            common = common.max(pos + shared);
            let rows = self.node(next).rows.clone();
            let usable = (pos + shared).min(last);
            if !self.recurrent && usable > best.usable as usize {
                best.rows.clone_from(&path);
                let take = (usable - pos) as u32;
                best.rows.extend(rows.clone().map(|bytes| Rows { bytes, of: self.block as u32, take }));
                (best.usable, best.state) = (usable as u32, None);
            }
            self.node_mut(next).used = clock;
            if shared < self.block {
                break;
            }
            path.extend(rows.map(|bytes| Rows { bytes, of: self.block as u32, take: self.block as u32 }));
            (at, pos) = (next, pos + self.block);
        }
        best.common = common as u32;
        best
    }

    /// The nodes of the whole blocks of `ids` that are there, from the first on.
    fn path(&self, ids: &[u32]) -> Vec<usize> {
        let (mut at, mut out) = (ROOT, Vec::new());
        for block in ids.chunks_exact(self.block) {
            let next = self.node(at).children.iter().find(|c| *self.node(**c).ids == *block);
            let Some(next) = next else { break };
            (at, _) = (*next, out.push(*next));
        }
        out
    }

    /// How many tokens of `ids` are there as whole blocks.
    pub fn blocks_of(&self, ids: &[u32]) -> usize {
        self.path(ids).len() * self.block
    }

    /// Adds the block after the first `blocks_of` tokens: the last `block` tokens of `ids`, with
    /// their rows.
    pub fn add_block(&mut self, ids: &[u32], rows: Kept) {
        let path = self.path(ids);
        let from = path.len() * self.block;
        if ids.len() != from + self.block {
            return;
        }
        self.clock += 1;
        let parent = path.last().copied().unwrap_or(ROOT);
        let node = Node {
            parent,
            depth: ids.len() as u32,
            children: Vec::new(),
            chain: chain(&self.node(parent).chain, &ids[from..]),
            ids: ids[from..].into(),
            rows: Some(Arc::new(rows)),
            snaps: Vec::new(),
            used: self.clock,
        };
        let at = self.nodes.iter().position(Option::is_none).unwrap_or(self.nodes.len());
        if at == self.nodes.len() {
            self.nodes.push(Some(node));
        } else {
            self.nodes[at] = Some(node);
        }
        self.node_mut(parent).children.push(at);
        self.growing = Some(at);
    }

    /// No block follows the one that was added last: it may go like any other.
    pub fn settle(&mut self) {
        self.growing = None;
    }

    /// Whether there is a snapshot of exactly these tokens; it is then as good as new.
    pub fn has_snap(&mut self, ids: &[u32]) -> bool {
        let path = self.path(ids);
        let tail = &ids[path.len() * self.block..];
        self.clock += 1;
        let clock = self.clock;
        let snaps = &mut self.node_mut(path.last().copied().unwrap_or(ROOT)).snaps;
        snaps.iter_mut().find(|s| *s.tail == *tail).map(|s| s.used = clock).is_some()
    }

    /// Adds a snapshot at the end of `ids`, all of whose whole blocks are there; `rows` are those
    /// past them.
    pub fn add_snap(&mut self, ids: &[u32], rows: Option<Kept>, state: State) {
        let path = self.path(ids);
        let tail = &ids[path.len() * self.block..];
        if tail.len() >= self.block || tail.is_empty() != rows.is_none() || self.recurrent != state.recurrent.is_some()
        {
            return;
        }
        self.clock += 1;
        let snap = Snap { tail: tail.into(), rows: rows.map(Arc::new), state, used: self.clock };
        let snaps = &mut self.node_mut(path.last().copied().unwrap_or(ROOT)).snaps;
        snaps.retain(|s| *s.tail != *tail);
        // Without recurrent state a longer tail has all that a shorter one has.
        let recurrent = snap.state.recurrent.is_some();
        if !recurrent {
            snaps.retain(|s| !snap.tail.starts_with(&s.tail));
        }
        snaps.push(snap);
    }

    /// Removes what is worth least: says at which position, and whether it was a snapshot. `None`
    /// if everything is in use.
    pub fn evict(&mut self) -> Option<(u32, bool)> {
        let free = |kept: &Option<Arc<Kept>>| kept.as_ref().is_none_or(|k| Arc::strong_count(k) == 1);
        let mut worst: Option<((u8, u64), usize, Option<usize>)> = None;
        let mut offer = |rank: (u8, u64), at, snap| {
            if worst.is_none_or(|w| rank < w.0) {
                worst = Some((rank, at, snap));
            }
        };
        for (at, node) in self.nodes.iter().enumerate().filter_map(|(at, n)| Some((at, n.as_ref()?))) {
            for (i, snap) in node.snaps.iter().enumerate() {
                if !(free(&snap.rows) && free(&snap.state.recurrent) && free(&snap.state.logits)) {
                    continue;
                }
                // Where several go on from it is no superseded end.
                let passed = node.children.len() == 1
                    || node.children.is_empty()
                        && node.snaps.iter().any(|s| s.tail.len() > snap.tail.len() && s.tail.starts_with(&snap.tail));
                let class = match snap.state.kind {
                    Kind::Timed => 0,
                    Kind::Turn if passed => 1,
                    Kind::Turn => 2,
                    Kind::Branch => 3,
                };
                offer((class, snap.used), at, Some(i));
            }
            if at != ROOT
                && self.growing != Some(at)
                && node.children.is_empty()
                && node.snaps.is_empty()
                && free(&node.rows)
            {
                offer((if self.recurrent { 0 } else { 2 }, node.used), at, None);
            }
        }
        let (_, at, snap) = worst?;
        let depth = self.node(at).depth;
        if let Some(i) = snap {
            let snap = self.node_mut(at).snaps.remove(i);
            return Some((depth + snap.tail.len() as u32, true));
        }
        let parent = self.node(at).parent;
        self.node_mut(parent).children.retain(|c| *c != at);
        self.nodes[at] = None;
        Some((depth, false))
    }

    fn snap_item(&self, at: usize, snap: &Snap) -> Item {
        let node = self.node(at);
        let pos = node.depth + snap.tail.len() as u32;
        Item {
            before: node.chain,
            pos,
            ids: snap.tail.clone(),
            rows: snap.rows.clone(),
            state: Some(snap.state.clone()),
        }
    }

    fn block_item(&self, at: usize) -> Item {
        let node = self.node(at);
        let before = self.node(node.parent).chain;
        Item { before, pos: node.depth, ids: node.ids.clone(), rows: node.rows.clone(), state: None }
    }

    /// What there is of the beginnings of `ids`, what others stand on first.
    pub fn items_of(&self, ids: &[u32]) -> Vec<Item> {
        let mut out = Vec::new();
        for at in std::iter::once(ROOT).chain(self.path(ids)) {
            out.extend((at != ROOT).then(|| self.block_item(at)));
            let node = self.node(at);
            let rest = &ids[node.depth as usize..];
            let snaps = node.snaps.iter().filter(|s| rest.starts_with(&s.tail));
            out.extend(snaps.map(|snap| self.snap_item(at, snap)));
        }
        out
    }

    /// Everything in it, what others stand on first.
    pub fn all(&self) -> Vec<Item> {
        let (mut out, mut open) = (Vec::new(), vec![ROOT]);
        while let Some(at) = open.pop() {
            out.extend((at != ROOT).then(|| self.block_item(at)));
            let node = self.node(at);
            out.extend(node.snaps.iter().map(|snap| self.snap_item(at, snap)));
            open.extend(&node.children);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::account::Account;
    use super::*;

    fn put(tree: &mut Tree, account: &Arc<Account>, ids: &[u32], kind: Kind, logits: bool) {
        let whole = ids.len() / 4 * 4;
        for end in (4..=whole).step_by(4) {
            if tree.blocks_of(&ids[..end]) < end {
                tree.add_block(&ids[..end], account.take(4).expect("room"));
            }
        }
        let keep = |n: usize| Arc::new(account.take(n).expect("room"));
        let recurrent = tree.recurrent.then(|| keep(1));
        let rows = (whole < ids.len()).then(|| account.take(ids.len() - whole).expect("room"));
        tree.settle();
        tree.add_snap(ids, rows, State { recurrent, logits: logits.then(|| keep(1)), kind });
    }

    #[test]
    fn hybrids_go_on_from_snapshots_and_others_from_any_row() {
        let account = Account::new(1 << 20);
        let (mut plain, mut hybrid) = (Tree::new([0; 32], 4, false), Tree::new([0; 32], 4, true));
        let ids: Vec<u32> = (0..11).collect();
        for tree in [&mut plain, &mut hybrid] {
            put(tree, &account, &ids, Kind::Turn, true);
            put(tree, &account, &ids[..6], Kind::Branch, false);
        }
        let mut other = ids[..7].to_vec();
        other.push(99);
        let usable = |tree: &mut Tree, ids: &[u32]| {
            let hit = tree.find(ids);
            let rows: u32 = hit.rows.iter().map(|r| r.take).sum();
            assert_eq!(rows, hit.usable);
            (hit.usable, hit.common)
        };
        assert_eq!(usable(&mut plain, &other), (7, 7));
        assert_eq!(usable(&mut hybrid, &other), (6, 7));
        // An exact repeat: the logits were kept, which only matters to the hybrid.
        assert_eq!((usable(&mut plain, &ids), usable(&mut hybrid, &ids)), ((10, 11), (11, 11)));
        assert_eq!((usable(&mut plain, &ids[..6]), usable(&mut hybrid, &ids[..6])), ((5, 6), (0, 6)));
        assert_eq!((usable(&mut plain, &[7]), usable(&mut hybrid, &[])), ((0, 0), (0, 0)));
    }

    #[test]
    fn an_end_that_several_go_on_from_is_no_superseded_one() {
        let account = Account::new(1 << 20);
        let mut tree = Tree::new([0; 32], 4, true);
        // Two ends of turns, the first of which two conversations go on from and the second one.
        let (a, b): (Vec<u32>, Vec<u32>) = ((0..4).collect(), (10..14).collect());
        for ids in [&a, &b] {
            put(&mut tree, &account, ids, Kind::Turn, false);
        }
        for (ids, next) in [(&a, 20), (&a, 30), (&b, 40)] {
            let longer: Vec<u32> = ids.iter().copied().chain(next..next + 4).collect();
            put(&mut tree, &account, &longer, Kind::Branch, false);
        }
        assert!(tree.has_snap(&b), "it is the last that was of use, and goes first all the same");
        assert_eq!(tree.evict(), Some((4, true)));
        assert!(tree.has_snap(&a) && !tree.has_snap(&b));
    }

    #[test]
    fn what_goes_first_is_worth_least_and_everything_goes() {
        let account = Account::new(1 << 20);
        let mut tree = Tree::new([0; 32], 4, true);
        let ids: Vec<u32> = (0..14).collect();
        for (n, kind) in [(3, Kind::Branch), (9, Kind::Timed), (10, Kind::Turn), (14, Kind::Turn)] {
            put(&mut tree, &account, &ids[..n], kind, false);
        }
        let held = tree.find(&ids[..12]).state;
        let mut order = Vec::new();
        order.extend(std::iter::from_fn(|| tree.evict()));
        // The one at 10 is in use.
        assert_eq!(order, [(9, true), (14, true), (12, false), (3, true)]);
        drop(held);
        order.extend(std::iter::from_fn(|| tree.evict()));
        assert_eq!(order[4..], [(10, true), (8, false), (4, false)]);
        assert_eq!((tree.len(), account.used()), ((0, 0), 0));
    }
}
