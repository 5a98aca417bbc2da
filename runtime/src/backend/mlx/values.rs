//! What a graph has computed so far.
//!
//! A plan's operands are views over memory; MLX has arrays and no memory. The schedule says which
//! value an operand is a view of; [`Values`] keeps an array for each, and turns a view into slices
//! and reshapes of it. Bakes write each value densely; a view that no slice can be is refused, with
//! the place.

use loaf_formats::plan::Operand;

use super::array::{Array, MlxError, Result};
use super::kernels::Place;
use super::ops::Mlx;
use crate::schedule::{Source, ValueId};

/// A value: `[rows, width]`, as written.
struct Held {
    /// Elements of a row.
    width: u64,
    array: Array,
}

/// The values computed.
pub struct Values<'m> {
    mlx: &'m Mlx,
    held: Vec<Option<Held>>,
}

fn int(n: u64) -> i32 {
    // Extents of a verified plan are at most 2^31, and MLX's are signed; what is larger cannot be
    // allocated anyway.
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// A shape for MLX.
pub fn shape(dims: [u64; 3]) -> [i32; 3] {
    dims.map(int)
}

/// An operand of a record: a view, the value it is of, and its extent `[rows, heads, dim]`.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// As the plan has it.
    pub operand: Operand,
    /// Where it comes from.
    pub source: Source,
    /// At the rows that the graph is lowered at.
    pub dims: [u64; 3],
}

impl View {
    fn unknown(&self) -> MlxError {
        MlxError(format!("expected a view of a value, found {self:?}"))
    }

    /// From head to head.
    fn stride(&self) -> u64 {
        if self.dims[1] == 1 { self.dims[2] } else { u64::from(self.operand.head_stride) }
    }
}

impl<'m> Values<'m> {
    /// Room for `count` values, none of them computed.
    pub fn new(mlx: &'m Mlx, count: usize) -> Values<'m> {
        Values { mlx, held: (0..count).map(|_| None).collect() }
    }

    /// Records that `array`, of as many elements as `dims` has, is a value.
    pub fn set(&mut self, id: ValueId, [rows, heads, dim]: [u64; 3], array: &Array) -> Result<()> {
        let width = heads * dim;
        let array = self.mlx.reshape(array, &[int(rows), int(width)])?;
        let slot = self.held.get_mut(id).ok_or_else(|| MlxError(format!("expected a known value, found {id}")))?;
        *slot = Some(Held { width, array });
        Ok(())
    }

    /// The value that a view is of, the row of its first element, and that element's place in the
    /// row.
    fn find(&self, view: &View) -> Result<(&Held, u64, u64)> {
        let Source::Value { id, at, .. } = view.source else { return Err(view.unknown()) };
        let held = self.held.get(id).and_then(Option::as_ref).ok_or_else(|| view.unknown())?;
        let at = at / view.operand.dtype.bytes();
        let (row, at) = (at / held.width, at % held.width);
        let [rows, heads, dim] = view.dims;
        let last = at + (heads - 1) * view.stride() + dim;
        // A single row may be any row of the value.
        if rows > 1 && (view.operand.row_stride != held.width || row > 0) || heads > 1 && last > held.width {
            return Err(view.unknown());
        }
        Ok((held, row, at))
    }

    fn rows_of(&self, held: &Held, view: &View, row: u64) -> Result<Array> {
        if view.dims[0] > 1 {
            return Ok(held.array.clone());
        }
        self.mlx.slice(&held.array, 0, int(row), int(row + 1))
    }

    /// Where a view lies in the array that holds it.
    pub fn place(&self, view: &View) -> Result<Place> {
        let (held, row, at) = self.find(view)?;
        let array = self.rows_of(held, view, row)?;
        let [_, heads, dim] = view.dims;
        let [width, at, heads, dim, stride] = [held.width, at, heads, dim, view.stride()].map(int);
        Ok(Place { array, width, at, heads, dim, stride })
    }

    /// The array that stands for a view, `[rows, heads, dim]`.
    pub fn get(&self, view: &View) -> Result<Array> {
        let (held, row, at) = self.find(view)?;
        let array = self.rows_of(held, view, row)?;
        let ([rows, heads, dim], stride) = (view.dims, view.stride());
        let flat = (heads - 1) * stride + dim;
        if stride == dim && at + flat <= held.width {
            let part = self.mlx.slice(&array, 1, int(at), int(at + flat))?;
            return self.mlx.reshape(&part, &shape(view.dims));
        }
        // Heads with something between them: whole periods that hold them, then the part of each.
        let span = heads * stride;
        let from = at.min(held.width.checked_sub(span).ok_or_else(|| view.unknown())?);
        let inner = at - from;
        if inner + dim > stride {
            return Err(view.unknown());
        }
        let periods = self.mlx.slice(&array, 1, int(from), int(from + span))?;
        let periods = self.mlx.reshape(&periods, &shape([rows, heads, stride]))?;
        self.mlx.slice(&periods, 2, int(inner), int(inner + dim))
    }

    /// A value as it was given to [`Values::set`], flattened to rows.
    pub fn whole(&self, id: ValueId) -> Result<Array> {
        let held = self.held.get(id).and_then(Option::as_ref);
        held.map(|h| h.array.clone()).ok_or_else(|| MlxError(format!("expected value {id}, found none")))
    }
}
