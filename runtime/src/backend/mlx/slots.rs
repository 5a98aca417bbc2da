//! The state of sequences: an array for each cache and each recurrent state of a slot, and what is
//! done to all of them.
//!
//! Recurrent state is never written in place, so slots may share an array of it. Caches are, by a
//! kernel that has them as operands: every slot has its own.

use half::f16;
use loaf_formats::dtype::DType;
use loaf_formats::plan::StateKind;

use super::array::{Array, MlxError, Result, Type};
use super::{MlxDevice, capacity_for};
use crate::backend::Part;

/// The state of one sequence.
pub(super) struct Slot {
    /// In the order of the plan's table.
    pub states: Vec<Array>,
    /// Positions that the caches have room for.
    pub capacity: u32,
}

impl Slot {
    /// No state yet, for caches of `capacity`.
    pub fn new(capacity: u32) -> Slot {
        Slot { states: Vec::new(), capacity }
    }
}

fn is_cache(kind: StateKind) -> bool {
    kind == StateKind::KvCache
}

impl MlxDevice {
    /// Empty state, of the slot's present capacity.
    pub(super) fn empty(&mut self, slot: usize) -> Result<()> {
        let capacity = self.slots[slot].capacity;
        let states = self.shapes.iter().enumerate().map(|(i, s)| self.lowering.initial(i, capacity, *s));
        let states = states.collect::<Result<Vec<_>>>()?;
        self.lowering.mlx.eval(&states)?;
        self.slots[slot].states = states;
        Ok(())
    }

    /// Makes room for `positions`.
    pub(super) fn reserve(&mut self, slot: usize, positions: u32) -> Result<()> {
        let before = self.slots[slot].capacity;
        if positions <= before {
            return Ok(());
        }
        let capacity = capacity_for(positions);
        let (m, at) = (&self.lowering.mlx, &mut self.slots[slot]);
        for (i, shape) in self.shapes.iter().enumerate().filter(|(i, _)| is_cache(self.kinds[*i])) {
            let more = [shape.dims[0], (capacity - before) as i32, shape.dims[2]];
            let more = m.zeros(&more, self.lowering.cache_type(shape.dtype))?;
            at.states[i] = m.concat(&[&at.states[i], &more], 1)?;
        }
        m.eval(&at.states)?;
        at.capacity = capacity;
        // Closures for caches of a size that no slot has any more go.
        let sizes: Vec<u32> = self.slots.iter().map(|s| s.capacity).collect();
        self.compiled.retain(|key, _| key.1 == 0 || sizes.contains(&key.1));
        Ok(())
    }

    /// Makes one slot hold what another holds.
    pub(super) fn copy_slot(&mut self, from: usize, to: usize) -> Result<()> {
        let m = &self.lowering.mlx;
        let source = &self.slots[from];
        let half = (source.capacity / 2) as i32;
        let copy = |(a, kind): (&Array, &StateKind)| match kind {
            // Two parts put together are memory of their own, where a copy of MLX's would share it.
            StateKind::KvCache => {
                let parts = [m.slice(a, 1, 0, half)?, m.slice(a, 1, half, source.capacity as i32)?];
                m.concat(&[&parts[0], &parts[1]], 1)
            }
            StateKind::Recurrent => Ok(a.clone()),
        };
        let states = source.states.iter().zip(&self.kinds).map(copy).collect::<Result<Vec<_>>>()?;
        m.eval(&states)?;
        let capacity = source.capacity;
        self.slots[to] = Slot { states, capacity };
        Ok(())
    }

    /// What a snapshot holds, as the plan has it: caches `[heads, pos, dim]`, recurrent state as it
    /// is.
    pub(super) fn save_slot(&mut self, slot: usize, pos: u32, part: Part, out: &mut [u8]) -> Result<()> {
        let m = &self.lowering.mlx;
        let mut rest = out;
        for ((a, kind), shape) in self.slots[slot].states.iter().zip(&self.kinds).zip(&self.shapes) {
            let a = match kind {
                StateKind::KvCache if part == Part::Recurrent || pos == 0 => continue,
                StateKind::KvCache => m.slice(a, 1, 0, pos as i32)?,
                StateKind::Recurrent => a.clone(),
            };
            let a = m.contiguous(&m.astype(&a, Type::F32)?)?;
            m.eval([&a])?;
            let mut host = vec![0.0; a.size()];
            a.copy_to(&mut host)?;
            let (own, after) =
                rest.split_at_mut_checked(host.len() * shape.dtype.bytes() as usize).ok_or_else(short)?;
            rest = after;
            if shape.dtype == DType::F16 {
                let bytes = host.iter().map(|x| f16::from_f32(*x).to_le_bytes());
                own.chunks_exact_mut(2).zip(bytes).for_each(|(to, from)| to.copy_from_slice(&from));
            } else {
                own.chunks_exact_mut(4).zip(&host).for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
            }
        }
        Ok(())
    }

    /// The opposite.
    pub(super) fn load_slot(&mut self, slot: usize, pos: u32, part: Part, bytes: &[u8]) -> Result<()> {
        if part == Part::All {
            self.reserve(slot, pos)?;
        }
        let (m, capacity) = (&self.lowering.mlx, self.slots[slot].capacity);
        let mut rest = bytes;
        let mut states = self.slots[slot].states.clone();
        for ((state, kind), shape) in states.iter_mut().zip(&self.kinds).zip(&self.shapes) {
            let [heads, _, dim] = shape.dims;
            let dims = match kind {
                StateKind::KvCache if part == Part::Recurrent || pos == 0 => continue,
                StateKind::KvCache => [heads, pos as i32, dim],
                StateKind::Recurrent => shape.dims,
            };
            let count: usize = dims.iter().map(|d| *d as usize).product();
            let (own, after) = rest.split_at_checked(count * shape.dtype.bytes() as usize).ok_or_else(short)?;
            rest = after;
            let host: Vec<f32> = if shape.dtype == DType::F16 {
                own.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            } else {
                own.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            };
            let kept = m.astype(&Array::from_slice(&host, &dims), self.lowering.cache_type(shape.dtype))?;
            *state = match kind {
                StateKind::KvCache if capacity > pos => {
                    let more = [heads, (capacity - pos) as i32, dim];
                    m.concat(&[&kept, &m.zeros(&more, self.lowering.cache_type(shape.dtype))?], 1)?
                }
                _ => m.contiguous(&kept)?,
            };
        }
        m.eval(&states)?;
        self.slots[slot].states = states;
        Ok(())
    }

    /// Ends the choosing of tokens if it is this slot's.
    pub(super) fn forget_sampling(&mut self, slot: u32) {
        if slot as usize == self.current {
            self.sampling = None;
            self.before.clear();
        }
    }
}

fn short() -> MlxError {
    MlxError("expected as many bytes as the state has, found fewer".to_owned())
}
