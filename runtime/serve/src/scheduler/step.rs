//! Steps of the engine: rows that decode, pieces of prompts, and the tokens that follow.

use std::time::{Duration, Instant};

use loaf_runtime::Sequence;
use loaf_runtime::generate::{Need, StopReason};
use loaf_runtime::sample::LogProbs;

use super::{Scheduler, Task, Work};
use crate::cache::tree::Kind;
use crate::job::{Event, Failure, Pooling, Stop, TokenProbs, Wanted};
use crate::metrics::Metrics;

/// Rows of a step from which on a row costs what it costs in longer ones.
const TELLING_ROWS: usize = 32;

/// What a token is chosen by: logits, or the best of them where nothing else is asked.
#[derive(Clone, Copy)]
pub(super) enum By<'a> {
    Logits(&'a [f32]),
    Best(Option<u32>),
}

impl Scheduler {
    /// One token for each job that has one to feed, as many as a step takes; each in turn where
    /// there are more.
    pub(super) fn decode(&mut self, metrics: &Metrics) {
        let most = self.engine.limits().decode_rows as usize;
        let ready: Vec<usize> = (0..self.tasks.len()).filter(|i| self.tasks[*i].decodes()).collect();
        if ready.is_empty() {
            return;
        }
        let first = if ready.len() > most { self.turn % ready.len() } else { 0 };
        self.turn = first + most;
        let mut chosen: Vec<usize> = (0..ready.len().min(most)).map(|k| ready[(first + k) % ready.len()]).collect();
        chosen.sort_unstable();
        // If nobody wants more of them than the best token, logits may stay where they are.
        let bests: Option<Vec<u32>> = chosen.iter().map(|i| self.tasks[*i].wants_best()).collect();
        let best = bests.and_then(|b| b.first().copied().filter(|known| b.iter().all(|other| other == known)));
        let mut rows: Vec<(&mut Sequence, u32)> = Vec::with_capacity(chosen.len());
        for (i, task) in self.tasks.iter_mut().enumerate() {
            if chosen.binary_search(&i).is_ok() {
                let id = task.rest()[0];
                rows.push((&mut task.live.sequence, id));
            }
        }
        let start = Instant::now();
        let done = match best {
            Some(known) => self.engine.decode_best(&mut rows, known).map(Some),
            None => self.engine.decode(&mut rows).map(|()| None),
        };
        let best = match done {
            Ok(best) => best,
            Err(e) => {
                let why = Failure::broken(e);
                chosen.iter().for_each(|i| self.tasks[*i].fail(why.clone()));
                return;
            }
        };
        metrics.steps.add(1);
        metrics.step_us.add(start.elapsed().as_micros() as u64);
        metrics.decode_rows.add(chosen.len() as u64);
        for (row, i) in chosen.into_iter().enumerate() {
            self.took(i, 1);
            match &best {
                Some(best) => choose(&mut self.tasks[i], By::Best(best[row]), self.vocab, metrics),
                None => self.go_on(i, row, metrics),
            }
        }
    }

    /// Goes on with a task that was fed all it had, by a row of logits. The token is told before
    /// the prompt's end is kept, which takes a while with a large state.
    fn go_on(&mut self, i: usize, row: usize, metrics: &Metrics) {
        let is_prompt = self.tasks[i].first.is_none();
        let Scheduler { engine, tasks, vocab, .. } = self;
        choose(&mut tasks[i], By::Logits(engine.logits(row)), *vocab, metrics);
        if is_prompt {
            self.mark(i, Kind::Turn, Some(row));
        }
    }

    /// The sequence of a task took `n` tokens.
    fn took(&mut self, i: usize, n: usize) {
        let task = &mut self.tasks[i];
        task.fed = (task.fed + n).min(task.job.prompt.len());
        if let Work::Text(generation) = &mut task.work {
            generation.fed(n);
        }
    }

    /// Rows that a prefill step may have to take no longer than `limit`.
    fn rows_within(&self, limit: Duration, looks: bool) -> usize {
        let per_row = if looks { self.per_looked } else { self.per_row };
        // Before anything is known of the model's speed they are few.
        let rows = if per_row > 0.0 { (limit.as_secs_f64() / per_row) as usize } else { 0 };
        rows.max(self.least(looks)).min(self.engine.chunk())
    }

    /// Rows that it takes at least.
    fn least(&self, looks: bool) -> usize {
        if looks || self.decodes() { self.pace.least } else { 4 * self.pace.least }
    }

    /// A row of a step of so many took so many seconds. Rows of short steps cost more, and say less
    /// of what longer ones would.
    fn learn(&mut self, per_row: f64, rows: usize) {
        if rows >= TELLING_ROWS || self.per_row == 0.0 || per_row < self.per_row {
            self.per_row = per_row;
        } else {
            self.per_row += (per_row - self.per_row) / 8.0;
        }
    }

    /// Tasks with prompts to be evaluated, of which rows are looked at or not, in the order in
    /// which they get rows of a step of `rows`, and how many each may take: the oldest first. But
    /// if a step is not enough for what it has left, those with at most a quarter as much go first,
    /// the shortest first, with up to half of the step: a word after a short conversation does not
    /// wait for somebody else's book.
    fn in_turn(&self, rows: usize, looks: bool) -> Vec<(usize, usize)> {
        let rest = |i: &usize| self.tasks[*i].rest().len();
        let is_one = |i: &usize| self.tasks[*i].prefills() && self.tasks[*i].looks_at_rows() == looks;
        let all: Vec<usize> = (0..self.tasks.len()).filter(is_one).collect();
        let Some(oldest) = all.first().filter(|i| rest(i) > rows && !looks) else {
            return all.into_iter().map(|i| (i, usize::MAX)).collect();
        };
        let is_short = |i: &usize| rest(i) <= rest(oldest) / 4;
        let (mut short, long): (Vec<usize>, Vec<usize>) = all.iter().copied().partition(is_short);
        short.sort_by_key(rest);
        let mut left = rows / 2;
        let mut out = Vec::with_capacity(all.len());
        for i in short {
            let n = rest(&i).min(left);
            left -= n;
            if n > 0 {
                out.push((i, n));
            }
        }
        out.extend(long.into_iter().map(|i| (i, usize::MAX)));
        out
    }

    /// Whether the next step is one over rows that are looked at: they take longer, and come alone,
    /// so they take turns with the others.
    fn looks_next(&mut self) -> bool {
        let any = |looks: bool| self.tasks.iter().any(|t| t.prefills() && t.looks_at_rows() == looks);
        self.looked = any(true) && !(self.looked && any(false));
        self.looked
    }

    /// One step over pieces of prompts ([`Scheduler::in_turn`]).
    pub(super) fn prefill(&mut self, limit: Duration, metrics: &Metrics) {
        let looks = self.looks_next();
        let mut left = self.rows_within(limit, looks);
        // What is left of prompts is not cut for the sake of jobs that may come.
        let rest: usize =
            self.tasks.iter().filter(|t| t.prefills() && !t.looks_at_rows()).map(|t| t.rest().len()).sum();
        if !looks && !self.decodes() && rest <= 2 * left {
            left = rest.max(1);
        }
        left = left.min(self.engine.chunk());
        let slots = self.engine.limits().slots as usize;
        // At most as many prompts can end in one step as there are rows of logits.
        let most = (self.engine.limits().decode_rows as usize).min(slots);
        let mut parts: Vec<(usize, usize)> = Vec::new();
        for (i, most_rows) in self.in_turn(left, looks) {
            let task = &self.tasks[i];
            if left == 0 || parts.len() == most {
                break;
            }
            let rest = task.rest().len();
            let pos = task.live.sequence.position();
            let cut = task.cuts.iter().find(|c| **c > pos).map_or(rest, |c| (c - pos) as usize);
            let n = rest.min(cut).min(left).min(most_rows);
            parts.push((i, if n < rest { self.engine.next_chunk(n) } else { n }));
            left -= n;
            // Rows whose logits or vectors are looked at come alone, so that their numbers are
            // known.
            if looks {
                break;
            }
        }
        // Rows stand in the order of their tasks.
        parts.sort_unstable();
        if parts.is_empty() {
            return;
        }
        let start = Instant::now();
        let fed: Vec<Vec<u32>> = parts.iter().map(|(i, n)| self.tasks[*i].rest()[..*n].to_vec()).collect();
        let mut pieces: Vec<(&mut Sequence, &[u32])> = Vec::with_capacity(parts.len());
        for (i, task) in self.tasks.iter_mut().enumerate() {
            if let Some(k) = parts.iter().position(|p| p.0 == i) {
                pieces.push((&mut task.live.sequence, &fed[k]));
            }
        }
        let rows: usize = parts.iter().map(|p| p.1).sum();
        if let Err(e) = self.engine.prefill(&mut pieces) {
            let why = Failure::broken(e);
            parts.iter().for_each(|(i, _)| self.tasks[*i].fail(why.clone()));
            return;
        }
        metrics.steps.add(1);
        metrics.step_us.add(start.elapsed().as_micros() as u64);
        metrics.prefill_rows.add(rows as u64);
        if !looks {
            self.learn(start.elapsed().as_secs_f64() / rows as f64, rows);
        }
        let mut first = 0;
        let mut ended = Vec::new();
        for (i, n) in parts {
            let rows = first..first + n;
            first = rows.end;
            let looks = self.tasks[i].looks_at_rows();
            self.took(i, n);
            if looks {
                self.look_at(i, rows.clone(), metrics);
                self.per_looked = start.elapsed().as_secs_f64() / rows.len() as f64;
            }
            let task = &self.tasks[i];
            let pos = task.live.sequence.position();
            if !task.done && task.rest().is_empty() {
                ended.push((i, rows.end as u32 - 1));
            } else if task.cuts.contains(&pos) {
                self.mark(i, Kind::Branch, None);
            } else if task.kept_at.elapsed() > self.pace.replay {
                self.mark(i, Kind::Timed, None);
            }
        }
        if ended.is_empty() {
            return;
        }
        let last: Vec<u32> = ended.iter().map(|e| e.1).collect();
        let start = Instant::now();
        if let Err(e) = self.engine.logits_of(&last) {
            let why = Failure::broken(e);
            ended.iter().for_each(|(i, _)| self.tasks[*i].fail(why.clone()));
            return;
        }
        metrics.step_us.add(start.elapsed().as_micros() as u64);
        for (row, (i, _)) in ended.into_iter().enumerate() {
            self.go_on(i, row, metrics);
        }
    }

    /// Takes what is wanted of the rows of a prompt.
    fn look_at(&mut self, i: usize, rows: std::ops::Range<usize>, metrics: &Metrics) {
        let at = self.tasks[i].fed - rows.len();
        match self.tasks[i].job.wanted.clone() {
            Wanted::Embedding(pooling) => {
                for row in rows {
                    let Some(hidden) = self.engine.hidden(row) else {
                        return self.tasks[i].fail(Failure::broken("this backend does not show hidden rows"));
                    };
                    let Work::Embedding(sum) = &mut self.tasks[i].work else { return };
                    if sum.is_empty() || pooling == Pooling::Last {
                        sum.clear();
                        sum.extend(hidden.iter().map(|x| f64::from(*x)));
                    } else {
                        sum.iter_mut().zip(hidden).for_each(|(sum, x)| *sum += f64::from(*x));
                    }
                }
                if self.tasks[i].fed == self.tasks[i].job.prompt.len() {
                    self.embed(i, metrics);
                }
            }
            Wanted::Text(text) => {
                let most = self.engine.limits().decode_rows as usize;
                for part in rows.clone().collect::<Vec<_>>().chunks(most) {
                    let numbers: Vec<u32> = part.iter().map(|r| *r as u32).collect();
                    if let Err(e) = self.engine.logits_of(&numbers) {
                        return self.tasks[i].fail(Failure::broken(e));
                    }
                    for (k, row) in part.iter().enumerate() {
                        let next = at + (row - rows.start) + 1;
                        let Some(id) = self.tasks[i].job.prompt.get(next).copied() else { continue };
                        let probs = probs(self.engine.logits(k), id, text.log_probs.unwrap_or(0), self.vocab);
                        self.tasks[i].prompt_probs.push(probs);
                    }
                }
                let task = &mut self.tasks[i];
                if task.fed == task.job.prompt.len() {
                    let first = TokenProbs { id: task.job.prompt[0], log_prob: None, top: Vec::new() };
                    let all = std::iter::once(first).chain(task.prompt_probs.drain(..)).collect();
                    task.tell(Event::Prompt(all));
                }
            }
        }
    }

    fn embed(&mut self, i: usize, metrics: &Metrics) {
        let task = &mut self.tasks[i];
        let Work::Embedding(sum) = &task.work else { return };
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
        let vector = sum.iter().map(|x| (x * scale) as f32).collect();
        metrics.embeddings.add(1);
        let mut usage = task.usage(false);
        usage.answer = 0;
        task.tell(Event::Embedding(vector, usage));
        task.done = true;
    }
}

/// The next token of a task, by what follows what it was fed; texts have the first `vocab` tokens.
pub(super) fn choose(task: &mut Task, by: By<'_>, vocab: usize, metrics: &Metrics) {
    let Task { work: Work::Text(generation), job, .. } = task else { return };
    let Wanted::Text(text) = &job.wanted else { return };
    if generation.need() == Need::Choose {
        let before = generation.ids().len();
        let id = match by {
            By::Logits(logits) => generation.choose(logits),
            By::Best(best) => generation.take_best(best),
        };
        let id = match id {
            Ok(id) => id,
            Err(e) => return task.fail(Failure::broken(e)),
        };
        task.first.get_or_insert_with(Instant::now);
        metrics.answer_tokens.add(1);
        if generation.ids().len() > before {
            let probs = match by {
                By::Logits(logits) => text.log_probs.map(|n| probs(logits, id, n, vocab)),
                By::Best(_) => None,
            };
            let certain = generation.text().to_owned();
            task.told += 1;
            let event = Event::Token(id, certain, probs);
            // That nobody listens is noticed in the next turn.
            let _ = job.events.send((job.index, event));
        }
    }
    let Need::Done(reason) = generation.need() else { return };
    let tail = generation.tail().to_owned();
    let stop = match (reason, generation.stop_string()) {
        (StopReason::Length, _) => Stop::Length,
        (StopReason::Context, _) => Stop::Context,
        (_, Some(text)) => Stop::Text(text.to_owned()),
        (_, None) => Stop::End,
    };
    task.finish(tail, stop);
}

/// A token's log-probability and the most probable ones.
fn probs(logits: &[f32], id: u32, n: usize, vocab: usize) -> TokenProbs {
    let top = top(&logits[..vocab.min(logits.len())], n);
    let all = LogProbs::of(logits);
    let of = |id| all.map_or(f64::NEG_INFINITY, |all| all.of_id(logits, id));
    TokenProbs { id, log_prob: Some(of(id)), top: top.into_iter().map(|id| (id, of(id))).collect() }
}

/// The `n` best logits' ids, the lower of equals first.
fn top(logits: &[f32], n: usize) -> Vec<u32> {
    let mut best: Vec<(f32, u32)> = Vec::with_capacity(n + 1);
    if n == 0 {
        return Vec::new();
    }
    for (id, x) in (0u32..).zip(logits) {
        if x.is_nan() || best.len() == n && best.last().is_some_and(|b| *x <= b.0) {
            continue;
        }
        let at = best.partition_point(|b| b.0 >= *x);
        best.insert(at, (*x, id));
        best.truncate(n);
    }
    best.into_iter().map(|b| b.1).collect()
}

#[cfg(test)]
mod tests {
    use super::top;

    #[test]
    fn the_best_are_in_order_and_equals_by_id() {
        let logits = [1.0, 3.0, f32::NAN, 3.0, -1.0, 2.0];
        assert_eq!(top(&logits, 4), [1, 3, 5, 0]);
        assert_eq!(top(&logits, 9), [1, 3, 5, 0, 4]);
        assert_eq!(top(&logits, 0), [0; 0]);
    }
}
