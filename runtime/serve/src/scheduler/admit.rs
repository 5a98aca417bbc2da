//! Which job begins next, and from where.

use std::collections::VecDeque;
use std::time::Instant;

use loaf_runtime::Generation;
use loaf_runtime::sequence::common_prefix;

use super::branches::Branch;
use super::restore::{Parking, Restore, Source};
use super::say::Say;
use super::{Live, Scheduler, Task, Tier, Waiting, Work};
use crate::cache::Found;
use crate::cache::tree::State;
use crate::job::{Event, Failure, Wanted};
use crate::metrics::Metrics;

/// Tokens that a job waits for, if another is about to have them evaluated.
const WORTH_WAITING: usize = 32;

/// A beginning that lies in a slot.
struct InSlot {
    id: u64,
    usable: u32,
    /// Kept state, if that is where it goes on.
    state: Option<State>,
    idle: bool,
    /// Tokens that would be lost by going on in place.
    lost: u32,
    /// Which of its other ends it is, if it is one.
    branch: Option<u64>,
}

impl Scheduler {
    /// Begins waiting jobs as far as there is room, the oldest first. One for which states have to
    /// be copied begins in a later turn, if `until` comes first.
    pub(super) fn admit(&mut self, until: Instant, metrics: &Metrics) {
        let mut i = 0;
        while i < self.waiting.len() && self.tasks.len() < self.engine.limits().slots as usize {
            if self.is_worth_waiting(i) {
                i += 1;
                continue;
            }
            let Some(waiting) = self.waiting.remove(i) else { return };
            if let Err(waiting) = self.begin_job(waiting, until, metrics) {
                // Nobody goes before it: the slot that becomes free is its.
                self.waiting.insert(i, waiting);
                return;
            }
        }
    }

    /// Whether a job that is being prefilled will soon have much of this one's prompt. A hybrid is
    /// told to keep its state there.
    fn is_worth_waiting(&mut self, at: usize) -> bool {
        let job = &self.waiting[at].job;
        if !job.cached || !self.keeps {
            return false;
        }
        let recurrent = self.recurrent;
        let soon = |t: &mut Task| {
            let shared = common_prefix(&t.job.prompt, &job.prompt);
            let (has, pos) = (t.live.sequence.common_prefix(&job.prompt), t.live.sequence.position() as usize);
            if t.done || !t.prefills() || !t.job.cached || shared < has + WORTH_WAITING || pos >= shared {
                return false;
            }
            if recurrent && shared < t.job.prompt.len() && !t.cuts.contains(&(shared as u32)) {
                t.cuts.push(shared as u32);
                t.cuts.sort_unstable();
            }
            true
        };
        self.tasks.iter_mut().any(soon)
    }

    /// Starts a job, or gives it back if there is no slot yet.
    fn begin_job(&mut self, waiting: Waiting, until: Instant, metrics: &Metrics) -> Result<(), Waiting> {
        let prompt = &waiting.job.prompt;
        let (mut found, mut common) = (Restore { source: Source::Rows(VecDeque::new()), state: None, usable: 0 }, 0);
        let mut in_slot = None;
        if waiting.job.cached {
            in_slot = self.in_slots(prompt, &mut common);
            if self.keeps {
                let (other, seen) = self.cache.find(prompt);
                common = common.max(seen);
                let other = match other {
                    Found::Memory(hit) => Restore::of(hit),
                    Found::Disk(stored) => Restore::from_disk(stored),
                };
                if in_slot.as_ref().is_none_or(|s| s.usable < other.usable) {
                    (found, in_slot) = (other, None);
                }
            }
        }
        if in_slot.is_none()
            && let Some(live) = self.take_over(prompt, &mut found)
        {
            self.start(waiting, live, Some(found), common, metrics);
            return Ok(());
        }
        let in_place = match &in_slot {
            Some(s) if s.idle => self.goes_on_in_place(s, until),
            _ => Some(false),
        };
        let Some(in_place) = in_place else { return Err(waiting) };
        let live = match in_slot {
            Some(s) if in_place => self.in_place(&s).map_err(Some),
            Some(s) => {
                found = Restore { source: Source::Live(s.id), usable: s.usable, state: s.state };
                self.fresh(Some(s.id)).and_then(|mut live| {
                    let given = self.give_held(&mut live, s.id, s.usable).map_err(Some)?;
                    let known = found.state.as_ref().is_some_and(|state| state.recurrent.is_some());
                    if self.recurrent && !known && !given {
                        // Rows are of no use without it.
                        found.usable = 0;
                    }
                    Ok(live)
                })
            }
            None => self.fresh(None),
        };
        let live = match live {
            Ok(live) => live,
            Err(Some(why)) => {
                // Nobody has to listen.
                let _ = waiting.job.events.send((waiting.job.index, Event::Failed(why)));
                return Ok(());
            }
            Err(None) => return Err(waiting),
        };
        let in_place = live.sequence.position() > 0;
        self.start(waiting, live, (!in_place && found.usable > 0).then_some(found), common, metrics);
        Ok(())
    }

    fn start(&mut self, waiting: Waiting, mut live: Live, restore: Option<Restore>, common: u32, metrics: &Metrics) {
        let Waiting { job, since } = waiting;
        live.stored = false;
        let now = Instant::now();
        let work = match &job.wanted {
            Wanted::Embedding(_) => Ok(Work::Embedding(Vec::new())),
            Wanted::Text(text) => {
                let model = self.engine.model();
                let made = Generation::new(model, self.tokenizer.clone(), &job.prompt, 0, text.options.clone());
                let say = Say::of(text, self.tokenizer.as_ref());
                made.map(|generation| match say {
                    Some(say) => Work::Text(Box::new(generation.with_constraint(Box::new(say)))),
                    None => Work::Text(Box::new(generation)),
                })
            }
        };
        let work = match work {
            Ok(work) => work,
            Err(e) => {
                let _ = job.events.send((job.index, Event::Failed(Failure::broken(e))));
                // What the sequence holds is as good as before.
                self.idle.push(live);
                return;
            }
        };
        // Where conversations part: where the front end says, and where this one parts from one
        // that was seen.
        let mut cuts = if self.recurrent { job.parts.clone() } else { Vec::new() };
        let end = job.prompt.len() as u32;
        if self.recurrent && common > 0 && common < end {
            cuts.push(common);
        }
        cuts.retain(|c| *c > 0 && *c < end);
        cuts.sort_unstable();
        cuts.dedup();
        if let Some(Restore { source: Source::Live(id), .. }) = &restore {
            let all = self.tasks.iter_mut().map(|t| &mut t.live).chain(&mut self.idle);
            all.filter(|live| live.id == *id).for_each(|live| live.pins += 1);
        }
        if let Some(restore) = &restore {
            self.engine.expect(&live.sequence, restore.usable);
        }
        metrics.started.add(1);
        let begins = restore.is_none();
        let tier = restore.as_ref().map_or(Tier::Slot, Restore::tier);
        self.tasks.push(Task {
            job,
            live,
            work,
            fed: 0,
            tier,
            restore,
            cuts,
            kept_at: now,
            cached: 0,
            since,
            admitted: now,
            first: None,
            told: 0,
            prompt_probs: Vec::new(),
            done: false,
        });
        if begins {
            self.begin(self.tasks.len() - 1, None, metrics);
        }
    }

    /// The longest beginning of a prompt that lies in a slot.
    fn in_slots(&self, prompt: &[u32], common: &mut u32) -> Option<InSlot> {
        let last = prompt.len().saturating_sub(1) as u32;
        let whole = |live: &&Live| live.sequence.position() as usize == live.sequence.ids().len();
        let busy =
            self.tasks.iter().filter(|t| t.restore.is_none() && t.job.cached && self.keeps).map(|t| (&t.live, false));
        let idle = self.idle.iter().map(|live| (live, true));
        let mut best: Option<InSlot> = None;
        for (live, idle) in idle.chain(busy).filter(|(live, _)| whole(live)) {
            let shared = live.sequence.common_prefix(prompt) as u32;
            let position = live.sequence.position();
            *common = (*common).max(shared);
            let (usable, state) = if self.recurrent {
                let fits = |pos: u32, logits: bool| pos <= shared && (pos <= last || logits);
                let mark = live.marks.iter().rfind(|m| fits(m.pos, m.state.logits.is_some()));
                let marked = mark.map_or((0, None), |m| (m.pos, Some(m.state.clone())));
                // The state it is in is lost to others as soon as it goes on.
                if idle && live.pins == 0 && fits(position, false) && position > marked.0 {
                    (position, None)
                } else {
                    marked
                }
            } else {
                (shared.min(last), None)
            };
            // What is pinned keeps its rows.
            let idle = idle && live.pins == 0;
            let better = |b: &InSlot| (usable, idle) > (b.usable, b.idle);
            if usable > 0 && best.as_ref().is_none_or(better) {
                best = Some(InSlot { id: live.id, usable, state, idle, lost: position - usable, branch: None });
            }
            // One that would take the place of much that could not be put aside is left alone.
            for branch in live.branches.iter().filter(|b| idle && self.is_small(b.from(), position)) {
                let Some(there) = branch.shared(prompt, shared) else { continue };
                *common = (*common).max(there);
                let mark = branch.marks().iter().rfind(|m| m.0 <= there && (m.0 <= last || m.1.logits.is_some()));
                let (usable, state) = match mark {
                    Some((pos, state)) if self.recurrent => (*pos, Some(state.clone())),
                    _ if self.recurrent => continue,
                    _ => (there.min(last), None),
                };
                if usable > branch.from() && best.as_ref().is_none_or(|b| (usable, idle) > (b.usable, b.idle)) {
                    let lost = position.saturating_sub(branch.from());
                    best = Some(InSlot { id: live.id, usable, state, idle, lost, branch: Some(branch.id()) });
                }
            }
        }
        best
    }

    /// Whether an idle sequence is cut back to go on, rather than copied: if little is lost, or
    /// what is lost can be put aside, or there is no slot for a copy.
    /// `None` if states have to be copied for that and `until` came first: come again.
    fn goes_on_in_place(&mut self, found: &InSlot, until: Instant) -> Option<bool> {
        let gives_up = found.branch.is_none() && (found.lost <= self.pace.give_up || !self.has_slot_besides(found.id));
        if !self.keeps || gives_up {
            return Some(true);
        }
        let Some(at) = self.idle.iter().position(|live| live.id == found.id) else { return Some(false) };
        let mut live = self.idle.swap_remove(at);
        let branch = live.branches.iter().find(|b| Some(b.id()) == found.branch).map(Branch::from);
        let from = branch.unwrap_or(found.usable);
        // A branch is in no slot, so it cannot be copied from there.
        let in_place = if branch.is_none() && !self.is_small(from, live.sequence.position()) {
            Some(false)
        } else if !self.copy_held_past(&mut live, from, until) {
            None
        } else {
            Some(branch.is_some() || self.put_aside(&mut live, from))
        };
        self.idle.push(live);
        in_place
    }

    fn has_slot_besides(&self, id: u64) -> bool {
        self.engine.free_slots() > 0
            || self.warming.is_some()
            || self.idle.iter().any(|live| live.id != id && live.pins == 0)
    }

    /// Takes an idle sequence back to what a prompt shares with it.
    fn in_place(&mut self, found: &InSlot) -> Result<Live, Failure> {
        let at = self.idle.iter().position(|live| live.id == found.id);
        let at = at.ok_or_else(|| Failure::broken("a sequence that is no longer there"))?;
        let mut live = self.idle.swap_remove(at);
        let branch = found.branch.and_then(|id| live.branches.iter().position(|b| b.id() == id));
        if let Some(branch) = branch.map(|at| live.branches.remove(at)) {
            self.put_aside(&mut live, branch.from());
            self.come_back += 1;
            live.branches.retain(|b| b.from() <= branch.from());
            let whole = self.graft(&mut live, &branch, found.usable, found.state.as_ref());
            return if whole { Ok(live) } else { Err(Failure::broken("an end that was put aside does not fit")) };
        }
        let result = match &found.state {
            Some(State { recurrent: Some(state), .. }) => {
                self.engine.load_recurrent(&mut live.sequence, found.usable, state)
            }
            _ => self.engine.rewind(&mut live.sequence, found.usable),
        };
        live.cut_marks(found.usable);
        live.branches.retain(|b| b.from() <= found.usable);
        result.map_err(Failure::broken)?;
        Ok(live)
    }

    /// An empty sequence. If every slot is taken, the idle one of least use is parked: then
    /// `Err(None)`, come again.
    fn fresh(&mut self, besides: Option<u64>) -> Result<Live, Option<Failure>> {
        if self.engine.free_slots() == 0 && !self.stop_warming() {
            if self.parking.is_some() {
                return Err(None);
            }
            let free = self.idle.iter().enumerate().filter(|(_, l)| l.pins == 0 && Some(l.id) != besides);
            let least = free.min_by_key(|(_, live)| live.used).map(|(at, _)| at);
            let least = least.or_else(|| self.idle.iter().position(|live| live.pins == 0));
            let Some(least) = least else { return Err(None) };
            let live = self.idle.swap_remove(least);
            if self.keeps && self.cache.account().budget() > 0 && !live.stored {
                self.parking = Some(Parking::new(live));
                return Err(None);
            }
            self.empty_slot(live);
        }
        self.empty().map_err(Some)
    }

    /// An empty sequence in a slot that is free.
    pub(super) fn empty(&mut self) -> Result<Live, Failure> {
        self.clock += 1;
        let id = self.clock;
        let sequence = self.engine.sequence().map_err(Failure::broken)?;
        let (marks, spare, branches) = Default::default();
        Ok(Live { id, sequence, marks, spare, branches, used: id, pins: 0, stored: false })
    }
}
