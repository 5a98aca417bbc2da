//! A session: one sequence, its state, and the graphs that extend it.
//!
//! All memory is reserved when the session is made; addresses never change and nothing is allocated afterwards. Results do not
//! depend on how a sequence is cut into calls, on the number of threads or on the instruction set: prefill in any
//! split and token by token give the same bits.

use std::fmt;

use loaf_formats::plan::{Phase, StateKind};

use crate::kernels::Kernels;
use crate::loaf::Loaf;
use crate::memory::Reserved;
use crate::op_times::OpTimes;
use crate::pool::Pool;
use crate::replay::{Bases, Replay, Scratch};

/// Why a session cannot do what it was asked.
#[derive(Debug)]
pub enum SessionError {
    /// The system refuses memory for this many bytes.
    Memory(u64, std::io::Error),
    /// More tokens than the context has room for.
    Full {
        /// Positions in all.
        context: u32,
        /// Positions in use.
        used: u32,
        /// Tokens that were to follow.
        wanted: usize,
    },
    /// A token the model does not have.
    Token {
        /// The token.
        id: u32,
        /// Number of tokens the model has.
        vocab: u32,
    },
    /// The state cannot go back to this position.
    Rewind {
        /// Position asked for.
        to: u32,
        /// Position the session is at.
        from: u32,
    },
}

impl fmt::Display for SessionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SessionError::Memory(bytes, e) => write!(f, "session memory of {bytes} bytes: {e}"),
            SessionError::Full { context, used, wanted } => {
                write!(f, "context: expected at most {context} tokens, found {used} and {wanted} more")
            }
            SessionError::Token { id, vocab } => write!(f, "token id: expected below {vocab}, found {id}"),
            SessionError::Rewind { to, from } => {
                write!(f, "rewind: expected the current position {from} or 0 (recurrent state), found {to}")
            }
        }
    }
}

impl std::error::Error for SessionError {}

/// How a session runs.
pub struct SessionOptions {
    /// Worker threads, the caller included.
    pub threads: usize,
    /// Kernel table.
    pub kernels: Kernels,
}

impl Default for SessionOptions {
    fn default() -> Self {
        SessionOptions { threads: crate::pool::default_threads(), kernels: Kernels::detect() }
    }
}

/// One sequence being extended.
pub struct Session<'a> {
    loaf: &'a Loaf,
    kernels: Kernels,
    pool: Pool,
    scratch: Scratch,
    state: Reserved,
    // Held for the addresses in the replays.
    _arena: Reserved,
    io: Reserved,
    decode: Replay<'a>,
    prefill: Vec<Replay<'a>>,
    head: Replay<'a>,
    pos: u32,
    /// Rows of the last prefill whose hidden state stands in IO.
    hidden_rows: u32,
    /// Gathers what ops take, if somebody watches.
    times: Option<OpTimes>,
}

// SAFETY: the addresses inside point into memory the session owns or borrows; nothing is tied to the thread that
// made it.
unsafe impl Send for Session<'_> {}

impl<'a> Session<'a> {
    /// An empty session.
    ///
    /// # Errors
    /// [`SessionError::Memory`].
    pub fn new(loaf: &'a Loaf, options: SessionOptions) -> Result<Session<'a>, SessionError> {
        let plan = loaf.plan();
        let reserve = |bytes: u64| Reserved::new(bytes).map_err(|e| SessionError::Memory(bytes, e));
        let (mut state, mut arena) = (reserve(plan.state_bytes)?, reserve(plan.arena_bytes)?);
        let mut io = reserve(plan.io.bytes)?;
        let bases = Bases {
            // Weights are only read: the verifier refuses a plan that writes them.
            weights: loaf.data().as_ptr().cast_mut(),
            state: state.ptr(),
            arena: arena.ptr(),
            io: io.ptr(),
        };
        let replay = |phase| plan.families_of(phase).map(|f| Replay::new(f, bases));
        let (mut decode, mut head) = (replay(Phase::Decode), replay(Phase::Head));
        let (Some(decode), Some(head)) = (decode.next(), head.next()) else {
            unreachable!("a verified plan has a decode and a head family")
        };
        let prefill: Vec<_> = replay(Phase::Prefill).collect();
        let pool = Pool::new(options.threads.max(1));
        let needs = prefill.iter().chain([&decode, &head]).map(Replay::scratch_bytes);
        let (per_worker, shared) = needs.fold((0, 0), |(a, b), (own, shared)| (a.max(own), b.max(shared)));
        let bytes = (per_worker * pool.threads() + shared) as u64;
        let scratch = Scratch::new(per_worker, shared, pool.threads()).map_err(|e| SessionError::Memory(bytes, e))?;
        Ok(Session {
            loaf,
            kernels: options.kernels,
            pool,
            scratch,
            state,
            _arena: arena,
            io,
            decode,
            prefill,
            head,
            pos: 0,
            hidden_rows: 0,
            times: None,
        })
    }

    /// Tokens in the sequence.
    pub fn pos(&self) -> u32 {
        self.pos
    }

    /// Tokens there is room for.
    pub fn context(&self) -> u32 {
        self.loaf.plan().context
    }

    /// The loaf this session replays.
    pub fn loaf(&self) -> &'a Loaf {
        self.loaf
    }

    /// Worker threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn check(&self, ids: &[u32]) -> Result<(), SessionError> {
        let plan = self.loaf.plan();
        if let Some(&id) = ids.iter().find(|&&id| id >= plan.vocab) {
            return Err(SessionError::Token { id, vocab: plan.vocab });
        }
        if ids.len() > (plan.context - self.pos) as usize {
            return Err(SessionError::Full { context: plan.context, used: self.pos, wanted: ids.len() });
        }
        Ok(())
    }

    fn put_ids(&mut self, ids: &[u32]) {
        let at = self.loaf.plan().io.ids as usize;
        for (slot, id) in self.io.bytes_mut()[at..].chunks_exact_mut(4).zip(ids) {
            slot.copy_from_slice(&id.to_ne_bytes());
        }
    }

    /// Extends the sequence by one token; returns the logits of what follows, `[vocab]`.
    ///
    /// # Errors
    /// An unknown token, or no room. The session is unchanged.
    pub fn decode(&mut self, id: u32) -> Result<&[f32], SessionError> {
        self.check(&[id])?;
        self.put_ids(&[id]);
        let times = self.times.as_mut();
        // SAFETY: `check` bounded position and id; `self` owns all memory and is borrowed exclusively.
        unsafe { self.decode.run(u64::from(self.pos), 1, &self.kernels, &self.pool, &mut self.scratch, times) };
        self.pos += 1;
        Ok(self.logits())
    }

    /// Extends the sequence by one chunk, at most [`Session::chunk`] tokens; their hidden rows can then be turned
    /// into logits with [`Session::logits_of`].
    ///
    /// # Errors
    /// An unknown token, no room, or more tokens than a chunk. The session is unchanged.
    pub fn prefill_chunk(&mut self, ids: &[u32]) -> Result<(), SessionError> {
        self.check(ids)?;
        let n = ids.len() as u32;
        let Some(fit) = self.prefill.iter().position(|r| r.family.max_rows >= n) else {
            return Err(SessionError::Full { context: self.chunk(), used: 0, wanted: ids.len() });
        };
        if n == 0 {
            return Ok(());
        }
        self.put_ids(ids);
        let times = self.times.as_mut();
        // SAFETY: `check` bounded position and ids, `fit` the rows; `self` owns all memory and is borrowed exclusively.
        unsafe {
            self.prefill[fit].run(
                u64::from(self.pos),
                u64::from(n),
                &self.kernels,
                &self.pool,
                &mut self.scratch,
                times,
            );
        }
        self.pos += n;
        self.hidden_rows = n;
        Ok(())
    }

    /// Most tokens of one prefill chunk.
    pub fn chunk(&self) -> u32 {
        self.prefill.last().map_or(1, |r| r.family.max_rows)
    }

    /// Logits after row `row` of the last prefill chunk, `[vocab]`; `None` if there is no such row.
    pub fn logits_of(&mut self, row: u32) -> Option<&[f32]> {
        if row >= self.hidden_rows {
            return None;
        }
        let times = self.times.as_mut();
        // SAFETY: the row is one of the chunk's, so below the family's positions; memory as in `decode`.
        unsafe { self.head.run(u64::from(row), 1, &self.kernels, &self.pool, &mut self.scratch, times) };
        Some(self.logits())
    }

    /// Extends the sequence by any number of tokens; returns the logits of what follows, `[vocab]`. `each` is told
    /// the number of tokens done after every chunk.
    ///
    /// # Errors
    /// No tokens at all gives the last logits; else as [`Session::decode`]. The session is unchanged.
    pub fn eval(&mut self, ids: &[u32], each: &mut dyn FnMut(usize)) -> Result<&[f32], SessionError> {
        self.check(ids)?;
        match ids {
            [] => {}
            [id] => {
                self.decode(*id)?;
                each(1);
            }
            _ => {
                for chunk in ids.chunks(self.chunk() as usize) {
                    self.prefill_chunk(chunk)?;
                    each(chunk.len());
                }
                self.logits_of(self.hidden_rows - 1);
            }
        }
        Ok(self.logits())
    }

    /// The logits last computed, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        let plan = self.loaf.plan();
        let bytes = &self.io.bytes()[plan.io.logits as usize..][..plan.vocab as usize * 4];
        // SAFETY: the plan verifier put the logits on a multiple of 64 within the page-aligned region; any bits are an
        // f32; the borrow of `self` keeps the session from writing them.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), plan.vocab as usize) }
    }

    /// Whether the sequence can be cut back to any prefix: true without recurrent state.
    pub fn can_rewind(&self) -> bool {
        self.loaf.plan().states.iter().all(|s| s.kind == StateKind::KvCache)
    }

    /// Cuts the sequence back to its first `to` tokens.
    ///
    /// # Errors
    /// [`SessionError::Rewind`] if the model has recurrent state and `to` is neither 0 nor the current position, or if `to` is
    /// past the position.
    pub fn rewind(&mut self, to: u32) -> Result<(), SessionError> {
        if to == self.pos {
            return Ok(());
        }
        if to > self.pos || (to > 0 && !self.can_rewind()) {
            return Err(SessionError::Rewind { to, from: self.pos });
        }
        if to == 0 {
            for s in self.loaf.plan().states.iter().filter(|s| s.kind == StateKind::Recurrent) {
                self.state.bytes_mut()[s.offset as usize..][..s.bytes as usize].fill(0);
            }
        }
        self.pos = to;
        self.hidden_rows = 0;
        Ok(())
    }

    /// Makes the session as if `tokens` tokens had been evaluated, so that what follows can be timed at that position: cache rows
    /// that were never written get one pattern, recurrent state stays as it is. What the session then says means nothing.
    ///
    /// # Errors
    /// No room for so many tokens. The session is unchanged.
    pub fn pretend(&mut self, tokens: u32) -> Result<(), SessionError> {
        let plan = self.loaf.plan();
        if tokens > plan.context {
            return Err(SessionError::Full { context: plan.context, used: 0, wanted: tokens as usize });
        }
        for s in plan.states.iter().filter(|s| s.kind == StateKind::KvCache && s.row_bytes > 0) {
            let row = s.row_bytes as usize;
            let bytes = &mut self.state.bytes_mut()[s.offset as usize..][..s.bytes as usize];
            for head in bytes.chunks_exact_mut(plan.context as usize * row) {
                // A small normal number in either element type of a cache; positions so far keep what they hold.
                head.chunks_exact_mut(row).take(tokens as usize).skip(self.pos as usize).for_each(|r| r.fill(0x2e));
            }
        }
        self.pos = tokens;
        self.hidden_rows = 0;
        Ok(())
    }

    /// Begins to gather what ops take, or ends it; returns what was gathered since the last call.
    pub fn watch_ops(&mut self, times: Option<OpTimes>) -> Option<OpTimes> {
        std::mem::replace(&mut self.times, times)
    }
}
