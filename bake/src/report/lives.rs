//! Which bytes of the arena are in use at which step of a graph, read from a verified plan's
//! records alone.
//!
//! The arena holds *values*: what one op wrote, contiguous, until something is written over it (see
//! `plan/verify.rs`). Here a value lives from the step that writes it to the last that reads it, so
//! a gap is room that nothing needed then. What this does not do: it does not ask the planner,
//! whose idea of lifetimes it can therefore be compared with.

use std::collections::BTreeMap;

use loaf_formats::op::{Mode, OpKind};
use loaf_formats::plan::{Phase, Region, Template, records};

/// One value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// First byte in the arena.
    pub start: u64,
    /// One past the last.
    pub end: u64,
    /// The step that writes it.
    pub first: u32,
    /// One past the last step that needs its bytes; a step that writes its output in place needs
    /// them as that output.
    pub until: u32,
    /// The op that writes it.
    pub kind: OpKind,
}

/// The arena of one graph.
#[derive(Clone, Debug)]
pub struct Arena {
    /// Of this phase.
    pub phase: Phase,
    /// With so many rows, the most that the template takes: places are made for them.
    pub rows: u32,
    /// Its records.
    pub steps: u32,
    /// Its values, in order of birth.
    pub lives: Vec<Life>,
    /// Most bytes that live values take at any step.
    pub peak: u64,
    /// One past the last byte that is ever used.
    pub top: u64,
}

/// The arena over the steps of the template's largest graph.
pub fn arena(template: &Template) -> Arena {
    let mut words = Vec::new();
    template.expand(template.max_rows.into(), &mut words);
    // By first byte; they never overlap.
    let mut living: BTreeMap<u64, Life> = BTreeMap::new();
    let (mut lives, mut steps) = (Vec::new(), 0);
    for (step, record) in (0u32..).zip(records(&words).flatten()) {
        steps = step + 1;
        let operands = || {
            let spec = record.kind.spec();
            (0..spec.operands.len()).filter_map(move |i| {
                let operand = record.operand(i);
                let (start, end) = operand.span(record.dims(i)?).filter(|_| operand.region == Region::Arena)?;
                Some((spec.operands[i].mode, start, end))
            })
        };
        for (_, start, _) in operands().filter(|(mode, ..)| *mode != Mode::Out) {
            if let Some((_, life)) = living.range_mut(..=start).next_back().filter(|(_, life)| life.end > start) {
                life.until = step + 1;
            }
        }
        for (_, start, end) in operands().filter(|(mode, ..)| *mode == Mode::Out) {
            while let Some((&at, &life)) = living.range(..end).next_back().filter(|(_, life)| life.end > start) {
                living.remove(&at);
                lives.push(Life { until: life.until.min(step), ..life });
            }
            living.insert(start, Life { start, end, first: step, until: step + 1, kind: record.kind });
        }
    }
    lives.extend(living.into_values());
    lives.sort_by_key(|life| (life.first, life.start));
    let top = lives.iter().map(|life| life.end).max().unwrap_or(0);
    Arena { phase: template.phase, rows: template.max_rows, steps, peak: peak(&lives, steps), lives, top }
}

fn peak(lives: &[Life], steps: u32) -> u64 {
    let (mut born, mut gone) = (vec![0; steps as usize + 1], vec![0; steps as usize + 1]);
    for life in lives {
        born[life.first as usize] += life.end - life.start;
        gone[life.until as usize] += life.end - life.start;
    }
    let alive = born.iter().zip(&gone).scan(0u64, |alive, (born, gone)| {
        *alive = *alive + born - gone;
        Some(*alive)
    });
    alive.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use loaf_formats::dtype::DType;
    use loaf_formats::plan::{Operand, record_head};

    /// `add` of a row of 16 floats: `out = a + b`, each at a byte of the arena.
    fn add(a: u64, b: u64, out: u64) -> Vec<u64> {
        let at = |offset| Operand { region: Region::Arena, dtype: DType::F32, offset, row_stride: 16, head_stride: 16 };
        let mut words = vec![record_head(OpKind::Add)];
        [a, b, out].iter().for_each(|&offset| words.extend(at(offset).words()));
        words.extend([0, 1, 16]);
        words
    }

    fn template(words: Vec<u64>) -> Template {
        Template { phase: Phase::Decode, max_rows: 1, positions: 1, step: 1, words }
    }

    #[test]
    fn a_value_lives_from_its_step_to_its_last_reader() {
        // 64 of nothing; 128 of 64; 192 of both; 128 in place, of it and 192; and 0, which nobody
        // reads.
        let words = [add(0, 0, 64), add(64, 64, 128), add(64, 128, 192), add(128, 192, 128), add(128, 128, 0)].concat();
        let arena = arena(&template(words));
        let lives: Vec<_> = arena.lives.iter().map(|l| (l.start, l.first, l.until)).collect();
        assert_eq!(lives, [(64, 0, 3), (128, 1, 3), (192, 2, 4), (128, 3, 5), (0, 4, 5)]);
        assert_eq!((arena.steps, arena.peak, arena.top), (5, 192, 256));
    }

    #[test]
    fn a_value_over_parts_of_two_ends_both() {
        let words = [add(0, 0, 64), add(0, 0, 128), add(0, 0, 96), add(96, 96, 0)].concat();
        let arena = arena(&template(words));
        let lives: Vec<_> = arena.lives.iter().map(|l| (l.start, l.first, l.until)).collect();
        assert_eq!(lives, [(64, 0, 1), (128, 1, 2), (96, 2, 4), (0, 3, 4)]);
        assert_eq!(arena.peak, 128);
    }
}
