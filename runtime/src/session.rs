//! A session: one sequence, its state, and the graphs that extend it.
//!
//! All memory is reserved when the session is made; addresses never change and nothing is allocated afterwards. Results do not
//! depend on how a sequence is cut into calls, on the number of threads or on the instruction set: prefill in any
//! split and token by token give the same bits.
//!
//! That is the CPU. A session over another [`Backend`] has the same interface and makes the same checks; memory and bits are that
//! backend's own.

use std::fmt;

use loaf_formats::plan::{Phase, StateKind};

use crate::backend::{Backend, Failure};
use crate::kernels::Kernels;
use crate::loaf::Loaf;
use crate::memory::{LARGE_PAGE, Reserved};
use crate::op_times::OpTimes;
use crate::pool::Pool;
use crate::replay::{Bases, Replay, Scratch};
use crate::sample::SamplerOptions;

/// Rows of the largest prefill family that the CPU uses: it gains nothing from more, and each row costs memory. (Those baked for
/// GPUs cost it nothing: memory is reserved for them, and committed when touched.)
const CPU_CHUNK: u32 = 512;

/// How many of `n` tokens to take at once with families of these rows, in ascending order. A device computes all of a family's rows, so
/// a family is used that the tokens fill by more than half, if there is a smaller one; the CPU computes the rows there are.
fn chunk_of(families: &[u32], n: usize, device: bool) -> usize {
    let rows = |r: &u32| *r as usize;
    let fits = families.iter().map(rows).find(|&rows| rows >= n);
    let below = families.iter().map(rows).rfind(|&rows| rows <= n);
    match (fits, below) {
        (Some(rows), Some(below)) if device && n * 2 <= rows => below,
        (Some(_), _) => n,
        (None, _) => families.last().map_or(1, rows),
    }
}

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
    /// The device fails. What the session holds is then unknown.
    Device(Failure),
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
            SessionError::Device(what) => f.write_str(what),
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

/// The CPU as it stands behind a session: a plan's memory and its replays.
struct Cpu<'a> {
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
    /// Gathers what ops take, if somebody watches.
    times: Option<OpTimes>,
}

// SAFETY: the addresses inside point into memory it owns or borrows; nothing is tied to the thread that made it.
unsafe impl Send for Cpu<'_> {}

enum Engine<'a> {
    Cpu(Box<Cpu<'a>>),
    Device(Box<dyn Backend + 'a>),
}

/// One sequence being extended.
pub struct Session<'a> {
    loaf: &'a Loaf,
    engine: Engine<'a>,
    /// Most tokens of the prefill families that are used, rising.
    chunks: Vec<u32>,
    pos: u32,
    /// Rows of the last prefill whose hidden state is kept.
    hidden_rows: u32,
}

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
        arena.advise_large_pages(0..plan.arena_bytes as usize);
        // A head's cache grows by what is used up to one large page, and from there on by large pages: at most twice what is used.
        for s in plan.states.iter().filter(|s| s.kind == StateKind::KvCache) {
            let (first, head) = (s.offset as usize, plan.context as usize * s.row_bytes as usize);
            if head > 2 * LARGE_PAGE {
                let heads = (0..s.heads as usize).map(|h| first + h * head);
                heads.for_each(|at| state.advise_large_pages(at + LARGE_PAGE..at + head));
            }
        }
        loaf.advise_large_pages();
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
        let kernels = options.kernels;
        let cpu = Cpu { kernels, pool, scratch, state, _arena: arena, io, decode, prefill, head, times: None };
        Ok(Session::of(loaf, Engine::Cpu(Box::new(cpu))))
    }

    /// An empty session over a backend that was opened for this loaf.
    pub fn over(loaf: &'a Loaf, backend: Box<dyn Backend + 'a>) -> Session<'a> {
        Session::of(loaf, Engine::Device(backend))
    }

    fn of(loaf: &'a Loaf, engine: Engine<'a>) -> Session<'a> {
        let mut chunks: Vec<u32> = loaf.plan().families_of(Phase::Prefill).map(|f| f.max_rows).collect();
        if matches!(engine, Engine::Cpu(_)) {
            let least = chunks.iter().copied().min();
            chunks.retain(|&rows| rows <= CPU_CHUNK || Some(rows) == least);
        }
        Session { loaf, engine, chunks, pos: 0, hidden_rows: 0 }
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

    /// Worker threads; 1 for engines that are no CPU.
    pub fn threads(&self) -> usize {
        match &self.engine {
            Engine::Cpu(cpu) => cpu.pool.threads(),
            Engine::Device(_) => 1,
        }
    }

    /// Whether tokens can be chosen where the logits are.
    pub fn can_sample(&self) -> bool {
        matches!(self.engine, Engine::Device(_))
    }

    /// What computes, for reports.
    pub fn engine(&self) -> String {
        match &self.engine {
            Engine::Cpu(cpu) => format!("{} threads, {} kernels", cpu.pool.threads(), cpu.kernels.isa().name()),
            Engine::Device(device) => device.name(),
        }
    }

    /// What the engine has to say of the steps so far, for reports.
    pub fn notes(&self) -> Option<String> {
        match &self.engine {
            Engine::Cpu(_) => None,
            Engine::Device(device) => device.notes(),
        }
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

    /// Extends the sequence by one token; returns the logits of what follows, `[vocab]`.
    ///
    /// # Errors
    /// An unknown token, or no room. The session is unchanged.
    pub fn decode(&mut self, id: u32) -> Result<&[f32], SessionError> {
        self.check(&[id])?;
        match &mut self.engine {
            Engine::Cpu(cpu) => cpu.decode(self.loaf, self.pos, id),
            Engine::Device(device) => device.decode(self.pos, id).map_err(SessionError::Device)?,
        }
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
        if n > self.chunk() {
            return Err(SessionError::Full { context: self.chunk(), used: 0, wanted: ids.len() });
        }
        if n == 0 {
            return Ok(());
        }
        match &mut self.engine {
            Engine::Cpu(cpu) => cpu.prefill(self.loaf, self.pos, ids),
            Engine::Device(device) => device.prefill(self.pos, ids).map_err(SessionError::Device)?,
        }
        self.pos += n;
        self.hidden_rows = n;
        Ok(())
    }

    /// Most tokens of one prefill chunk.
    pub fn chunk(&self) -> u32 {
        self.chunks.last().copied().unwrap_or(1)
    }

    /// How many of the next `n` tokens of a prompt to take at once.
    fn next_chunk(&self, n: usize) -> usize {
        chunk_of(&self.chunks, n, matches!(self.engine, Engine::Device(_)))
    }

    /// Logits after row `row` of the last prefill chunk, `[vocab]`; `None` if there is no such row, or the device fails.
    pub fn logits_of(&mut self, row: u32) -> Option<&[f32]> {
        if row >= self.hidden_rows {
            return None;
        }
        match &mut self.engine {
            Engine::Cpu(cpu) => cpu.head(row),
            Engine::Device(device) => device.head(row).ok()?,
        }
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
                let mut rest = ids;
                while !rest.is_empty() {
                    let (chunk, after) = rest.split_at(self.next_chunk(rest.len()));
                    self.prefill_chunk(chunk)?;
                    each(chunk.len());
                    rest = after;
                }
                let row = self.hidden_rows - 1;
                match &mut self.engine {
                    Engine::Cpu(cpu) => cpu.head(row),
                    Engine::Device(device) => device.head(row).map_err(SessionError::Device)?,
                }
            }
        }
        Ok(self.logits())
    }

    /// The logits last computed, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        let plan = self.loaf.plan();
        let cpu = match &self.engine {
            Engine::Cpu(cpu) => cpu,
            Engine::Device(device) => return device.logits(),
        };
        let bytes = &cpu.io.bytes()[plan.io.logits as usize..][..plan.vocab as usize * 4];
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
            match &mut self.engine {
                Engine::Cpu(cpu) => cpu.reset(self.loaf),
                Engine::Device(device) => device.reset().map_err(SessionError::Device)?,
            }
        }
        self.pos = to;
        self.hidden_rows = 0;
        Ok(())
    }

    /// Makes the session as if `tokens` tokens had been evaluated, so that what follows can be timed at that position: cache rows
    /// that were never written get one pattern (on the CPU; other engines' are zero), recurrent state stays as it is. What the session
    /// then says means nothing.
    ///
    /// # Errors
    /// No room for so many tokens. The session is unchanged.
    pub fn pretend(&mut self, tokens: u32) -> Result<(), SessionError> {
        let plan = self.loaf.plan();
        if tokens > plan.context {
            return Err(SessionError::Full { context: plan.context, used: 0, wanted: tokens as usize });
        }
        let caches = plan.states.iter().filter(|s| s.kind == StateKind::KvCache && s.row_bytes > 0);
        let Engine::Cpu(cpu) = &mut self.engine else {
            self.pos = tokens;
            return Ok(());
        };
        for s in caches {
            let row = s.row_bytes as usize;
            let bytes = &mut cpu.state.bytes_mut()[s.offset as usize..][..s.bytes as usize];
            for head in bytes.chunks_exact_mut(plan.context as usize * row) {
                // A small normal number in either element type of a cache; positions so far keep what they hold.
                head.chunks_exact_mut(row).take(tokens as usize).skip(self.pos as usize).for_each(|r| r.fill(0x2e));
            }
        }
        self.pos = tokens;
        self.hidden_rows = 0;
        Ok(())
    }

    /// Begins to gather what ops take, or ends it; returns what was gathered since the last call. The CPU alone can tell.
    pub fn watch_ops(&mut self, times: Option<OpTimes>) -> Option<OpTimes> {
        match &mut self.engine {
            Engine::Cpu(cpu) => std::mem::replace(&mut cpu.times, times),
            Engine::Device(_) => None,
        }
    }
}

/// Choosing tokens where the logits are, for backends that can.
impl Session<'_> {
    /// Starts it, over the logits last computed; false if tokens are for the caller to choose.
    ///
    /// # Errors
    /// [`SessionError::Device`].
    pub fn start_sampling(&mut self, o: &SamplerOptions, known: u32, prompt: &[u32]) -> Result<bool, SessionError> {
        let Engine::Device(device) = &mut self.engine else { return Ok(false) };
        device.start_sampling(o, known, prompt).map_err(SessionError::Device)?;
        Ok(true)
    }

    /// The next token and its log-probability. `follows`: a token was chosen before, and is now part of the sequence. `more`: another
    /// may be asked for, so that its step can be submitted before this token is read.
    ///
    /// # Errors
    /// No room for the token before, or [`SessionError::Device`].
    pub fn sample(&mut self, follows: bool, more: bool) -> Result<(u32, f64), SessionError> {
        let context = self.context();
        if follows && self.pos == context {
            return Err(SessionError::Full { context, used: self.pos, wanted: 1 });
        }
        self.pos += u32::from(follows);
        let Engine::Device(device) = &mut self.engine else {
            return Err(SessionError::Device("the CPU chooses no tokens itself".to_owned()));
        };
        let ahead = more && self.pos < context;
        device.sample(self.pos, ahead).map(|(id, p)| (id, f64::from(p))).map_err(SessionError::Device)
    }

    /// Ends it: what was submitted ahead is taken back.
    pub fn end_sampling(&mut self) {
        if let Engine::Device(device) = &mut self.engine {
            device.end_sampling();
        }
    }
}

impl Cpu<'_> {
    fn put_ids(&mut self, loaf: &Loaf, ids: &[u32]) {
        let at = loaf.plan().io.ids as usize;
        for (slot, id) in self.io.bytes_mut()[at..].chunks_exact_mut(4).zip(ids) {
            slot.copy_from_slice(&id.to_ne_bytes());
        }
    }

    /// The session has checked position and id.
    fn decode(&mut self, loaf: &Loaf, pos: u32, id: u32) {
        self.put_ids(loaf, &[id]);
        let times = self.times.as_mut();
        // SAFETY: the session bounded position and id; `self` owns all memory and is borrowed exclusively.
        unsafe { self.decode.run(u64::from(pos), 1, &self.kernels, &self.pool, &mut self.scratch, times) };
    }

    /// The session has checked position, ids, and that they are 1 to a chunk.
    fn prefill(&mut self, loaf: &Loaf, pos: u32, ids: &[u32]) {
        let n = ids.len() as u64;
        self.put_ids(loaf, ids);
        let times = self.times.as_mut();
        if let Some(fit) = self.prefill.iter_mut().find(|r| u64::from(r.family.max_rows) >= n) {
            // SAFETY: the session bounded position and ids, `fit` the rows; memory as in `decode`.
            unsafe { fit.run(u64::from(pos), n, &self.kernels, &self.pool, &mut self.scratch, times) };
        }
    }

    /// The session has checked that the last prefill had this row.
    fn head(&mut self, row: u32) {
        let times = self.times.as_mut();
        // SAFETY: the row is one of the chunk's, so below the family's positions; memory as in `decode`.
        unsafe { self.head.run(u64::from(row), 1, &self.kernels, &self.pool, &mut self.scratch, times) };
    }

    fn reset(&mut self, loaf: &Loaf) {
        for s in loaf.plan().states.iter().filter(|s| s.kind == StateKind::Recurrent) {
            self.state.bytes_mut()[s.offset as usize..][..s.bytes as usize].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::chunk_of;

    #[test]
    fn a_device_takes_the_family_that_is_filled_by_more_than_half() {
        let families = [128, 512, 2048];
        for (n, device, cpu) in [
            (2, 2, 2),
            (127, 127, 127),
            (129, 128, 129),
            (256, 128, 256),
            (257, 257, 257),
            (512, 512, 512),
            (1024, 512, 1024),
            (1025, 1025, 1025),
            (2048, 2048, 2048),
            (5000, 2048, 2048),
        ] {
            assert_eq!((chunk_of(&families, n, true), chunk_of(&families, n, false)), (device, cpu), "{n}");
        }
        // With one family, and with none.
        assert_eq!([40, 128, 129].map(|n| chunk_of(&[128], n, true)), [40, 128, 128]);
        assert_eq!(chunk_of(&[], 7, true), 1);
        // Whatever is taken, a prompt ends.
        for n in 1..3000 {
            let taken = chunk_of(&families, n, true);
            assert!(taken >= 1 && taken <= n && (taken * 2 > n.min(2048) / 4), "{n}: {taken}");
        }
    }
}
