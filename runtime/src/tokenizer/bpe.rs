//! Byte-pair merging: of the pairs that stand next to each other, the one with the lowest rank
//! merges first, the leftmost of equals; until none is left.
//!
//! Most pieces are one token and found by a lookup. Short pieces are merged in a small array, where
//! finding the lowest rank is a scan; long ones through a heap, so that a megabyte without a space
//! takes n·log n steps. Both give the same ids.

use core::cmp::Reverse;
use loaf_formats::tokenizer::{TokenizerTables, flag};
use std::collections::BinaryHeap;

/// Most symbols that are merged by scanning; measured, and not sensitive.
const SCAN_SYMBOLS: usize = 64;
/// Most symbols that are merged in one heap, whose positions are 32-bit; longer pieces are cut
/// there.
const HEAP_SYMBOLS: usize = 1 << 30;
/// The rank of a pair that does not merge.
const NO_RANK: u32 = u32::MAX;
/// The neighbour of a symbol at either end.
const END: u32 = u32::MAX;

/// The merge loop's buffers.
#[derive(Debug, Default)]
pub(super) struct Merging {
    symbols: Vec<u32>,
    ranks: Vec<u32>,
    links: Vec<Link>,
    heap: Vec<Reverse<u64>>,
}

/// A symbol in the heap's list.
#[derive(Clone, Copy, Debug)]
struct Link {
    id: u32,
    previous: u32,
    next: u32,
    /// Rank of the pair of this symbol and the next; tells live heap entries from stale ones.
    rank: u32,
}

fn rank_of(tables: &TokenizerTables<'_>, left: u32, right: u32) -> u32 {
    tables.merge(left, right).map_or(NO_RANK, |m| m.rank)
}

/// The token that `piece` is, where a lookup can tell.
fn whole(tables: &TokenizerTables<'_>, piece: &[u8]) -> Option<u32> {
    tables.id_of_key(piece).filter(|&id| tables.token_flags(id) & flag::WHOLE != 0)
}

impl Merging {
    /// Appends the ids of a byte-level piece.
    pub fn encode_bytes(&mut self, tables: &TokenizerTables<'_>, piece: &[u8], out: &mut Vec<u32>) {
        if let Some(id) = whole(tables, piece) {
            out.push(id);
            return;
        }
        let mut unknown = None;
        for &b in piece {
            self.push_symbol(tables, tables.byte_id(b), &mut unknown);
        }
        self.symbols.extend(unknown);
        self.merge(tables, out);
    }

    /// Appends the ids of a piece whose symbols are characters.
    pub fn encode_chars(&mut self, tables: &TokenizerTables<'_>, piece: &str, out: &mut Vec<u32>) {
        if let Some(id) = whole(tables, piece.as_bytes()) {
            out.push(id);
            return;
        }
        let fallback = tables.model().byte_fallback;
        let mut unknown = None;
        for c in piece.chars() {
            let mut utf8 = [0; 4];
            let bytes = c.encode_utf8(&mut utf8).as_bytes();
            let id = tables.id_of_key(bytes);
            // An unknown token that waits to be fused stays waiting behind byte tokens, as in the
            // reference.
            if id.is_none() && fallback && bytes.iter().all(|&b| tables.byte_id(b).is_some()) {
                self.symbols.extend(bytes.iter().filter_map(|&b| tables.byte_id(b)));
            } else {
                self.push_symbol(tables, id, &mut unknown);
            }
        }
        self.symbols.extend(unknown);
        self.merge(tables, out);
    }

    /// Adds a known symbol, or notes an unknown one in `unknown`, where the next unknown can fuse
    /// with it.
    fn push_symbol(&mut self, tables: &TokenizerTables<'_>, id: Option<u32>, unknown: &mut Option<u32>) {
        let model = tables.model();
        match id {
            Some(id) => {
                self.symbols.extend(unknown.take());
                self.symbols.push(id);
            }
            None => {
                if !model.fuse_unk {
                    self.symbols.extend(unknown.take());
                }
                *unknown = model.unk;
            }
        }
    }

    fn merge(&mut self, tables: &TokenizerTables<'_>, out: &mut Vec<u32>) {
        if self.symbols.len() <= SCAN_SYMBOLS {
            self.merge_by_scan(tables);
            out.extend_from_slice(&self.symbols);
        } else {
            let symbols = core::mem::take(&mut self.symbols);
            for part in symbols.chunks(HEAP_SYMBOLS) {
                self.merge_by_heap(tables, part, out);
            }
            self.symbols = symbols;
        }
        self.symbols.clear();
    }

    fn merge_by_scan(&mut self, tables: &TokenizerTables<'_>) {
        let Merging { symbols, ranks, .. } = self;
        ranks.clear();
        ranks.extend(symbols.windows(2).map(|pair| rank_of(tables, pair[0], pair[1])));
        while let Some((at, &rank)) = ranks.iter().enumerate().min_by_key(|&(_, &rank)| rank)
            && rank != NO_RANK
        {
            super::steps::count(ranks.len());
            symbols[at] = tables.merge_result(rank);
            symbols.remove(at + 1);
            ranks.remove(at);
            if at > 0 {
                ranks[at - 1] = rank_of(tables, symbols[at - 1], symbols[at]);
            }
            if at < ranks.len() {
                ranks[at] = rank_of(tables, symbols[at], symbols[at + 1]);
            }
        }
    }

    /// Heap keys are `rank << 32 | position`: rank first, then leftmost.
    fn merge_by_heap(&mut self, tables: &TokenizerTables<'_>, symbols: &[u32], out: &mut Vec<u32>) {
        let links = &mut self.links;
        links.clear();
        let mut keys = core::mem::take(&mut self.heap);
        keys.clear();
        let last = symbols.len() - 1;
        for (i, &id) in symbols.iter().enumerate() {
            let at = i as u32;
            let rank = if i < last { rank_of(tables, id, symbols[i + 1]) } else { NO_RANK };
            let next = if i < last { at + 1 } else { END };
            links.push(Link { id, previous: at.wrapping_sub(1), next, rank });
            if rank != NO_RANK {
                keys.push(Reverse(u64::from(rank) << 32 | u64::from(at)));
            }
        }
        let mut heap = BinaryHeap::from(keys);
        while let Some(Reverse(key)) = heap.pop() {
            super::steps::count(1);
            let (rank, at) = ((key >> 32) as u32, key as u32 as usize);
            let Link { previous, next: right, rank: current, .. } = links[at];
            // A pair that has changed since it was queued has another rank, or none.
            if current != rank {
                continue;
            }
            let next = links[right as usize].next;
            links[right as usize].rank = NO_RANK;
            links[at].id = tables.merge_result(rank);
            links[at].next = next;
            links[at].rank = NO_RANK;
            if next != END {
                links[next as usize].previous = at as u32;
            }
            for left in [previous, at as u32] {
                let Some(&Link { id, next, .. }) = links.get(left as usize).filter(|link| link.next != END) else {
                    continue;
                };
                let rank = rank_of(tables, id, links[next as usize].id);
                links[left as usize].rank = rank;
                if rank != NO_RANK {
                    heap.push(Reverse(u64::from(rank) << 32 | u64::from(left)));
                }
            }
        }
        self.heap = heap.into_vec();
        let mut at = 0;
        while let Some(link) = self.links.get(at as usize) {
            out.push(link.id);
            at = link.next;
        }
    }
}
