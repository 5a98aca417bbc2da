//! Places for values: where a device that computes step by step keeps what one step leaves for
//! another.

use loaf_formats::plan::Region;

use super::{Step, Value};

/// Places of the values that live in the arena, at the template's most rows.
///
/// Two values share a byte only if the last step that reads the one comes before the step that
/// makes the other. So nothing that a step makes lies over anything it reads, whichever of its
/// parts are computed first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arena {
    /// Per value: its byte offset, a multiple of [`Arena::ALIGN`]; `None` for values in IO.
    pub offsets: Vec<Option<u64>>,
    /// Length in bytes.
    pub bytes: u64,
}

impl Arena {
    /// What offsets are multiples of.
    pub const ALIGN: u64 = 256;

    /// The steps at which each value is made and last read; `None` for what is given, and for what
    /// is in IO.
    fn lives(steps: &[Step], values: &[Value]) -> Vec<Option<(usize, usize)>> {
        let mut lives = vec![None; values.len()];
        for (i, step) in steps.iter().enumerate() {
            for &v in step.results.iter().chain(&step.internal) {
                lives[v] = Some((i, i));
            }
            for &v in &step.reads {
                if let Some((_, last)) = &mut lives[v] {
                    *last = i;
                }
            }
        }
        for (life, _) in lives.iter_mut().zip(values).filter(|(_, v)| v.region != Region::Arena) {
            *life = None;
        }
        lives
    }

    /// Places all values, the largest first, each at the lowest offset that is free for its life.
    pub(super) fn place(steps: &[Step], values: &[Value]) -> Arena {
        let lives = Self::lives(steps, values);
        let mut order: Vec<(usize, (usize, usize))> =
            lives.iter().enumerate().filter_map(|(v, life)| Some((v, (*life)?))).collect();
        order.sort_by_key(|&(v, _)| (std::cmp::Reverse(values[v].bytes[1]), v));
        let mut arena = Arena { offsets: vec![None; values.len()], bytes: 0 };
        // By step: places taken while it runs. A value is compared with those of its own steps
        // alone.
        let mut taken: Vec<Vec<(u64, u64)>> = vec![Vec::new(); steps.len()];
        let mut nearby = Vec::new();
        for (v, (first, last)) in order {
            let bytes = values[v].bytes[1].next_multiple_of(Self::ALIGN);
            nearby.clear();
            taken[first..=last].iter().for_each(|step| nearby.extend_from_slice(step));
            nearby.sort_unstable();
            let mut at = 0;
            for &(start, end) in &nearby {
                if at + bytes <= start {
                    break;
                }
                at = at.max(end);
            }
            taken[first..=last].iter_mut().for_each(|step| step.push((at, at + bytes)));
            arena.offsets[v] = Some(at);
            arena.bytes = arena.bytes.max(at + bytes);
        }
        arena
    }
}
