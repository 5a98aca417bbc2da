//! What a graph has computed so far, found by where the plan would have put it.
//!
//! A plan's operands are views over memory; MLX has arrays and no memory. [`Values`] remembers which array stands for which bytes,
//! and turns a view into slices and reshapes of the array that holds it. Bakes write each value densely and read views of one
//! value at a time; anything else is refused, with the place.

use loaf_formats::plan::{Operand, Region};

use super::array::{Array, Mlx, MlxError, Result};

/// A value: `[rows, width]`, as written.
struct Value {
    region: Region,
    /// Bytes from the start of the region.
    offset: u64,
    /// Bytes of an element as the plan has it; the array's own may differ.
    elem: u64,
    /// Elements of a row.
    width: u64,
    /// Bytes from the first to past the last.
    bytes: u64,
    array: Array,
}

/// The values alive.
pub struct Values<'m> {
    mlx: &'m Mlx,
    values: Vec<Value>,
}

fn int(n: u64) -> i32 {
    // Extents of a verified plan are at most 2^31, and MLX's are signed; what is larger cannot be allocated anyway.
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// A shape for MLX.
pub fn shape(dims: [u64; 3]) -> [i32; 3] {
    dims.map(int)
}

impl<'m> Values<'m> {
    /// No values.
    pub fn new(mlx: &'m Mlx) -> Values<'m> {
        Values { mlx, values: Vec::new() }
    }

    /// Records that `array`, of as many elements as `dims` has, is what the plan has at `operand`.
    pub fn set(&mut self, operand: Operand, dims: [u64; 3], array: &Array) -> Result<()> {
        let [rows, heads, dim] = dims;
        let (width, elem) = (heads * dim, operand.dtype.bytes());
        let dense = (heads == 1 || u64::from(operand.head_stride) == dim) && (rows == 1 || operand.row_stride == width);
        let span = operand.span(dims).filter(|_| dense);
        let Some((offset, end)) = span else {
            return Err(MlxError(format!("expected a dense result, found strides in {operand:?}")));
        };
        self.values.retain(|v| v.region != operand.region || v.offset + v.bytes <= offset || end <= v.offset);
        let array = self.mlx.reshape(array, &[int(rows), int(width)])?;
        self.values.push(Value { region: operand.region, offset, elem, width, bytes: end - offset, array });
        Ok(())
    }

    /// The array that stands for a view, `[rows, heads, dim]`.
    pub fn get(&self, operand: Operand, dims: [u64; 3]) -> Result<Array> {
        let [rows, heads, dim] = dims;
        let elem = operand.dtype.bytes();
        let unknown = || MlxError(format!("expected a view of one value, found {operand:?} of {dims:?}"));
        let (start, end) = operand.span(dims).ok_or_else(unknown)?;
        let holds =
            |v: &&Value| v.region == operand.region && v.elem == elem && v.offset <= start && end <= v.offset + v.bytes;
        let v = self.values.iter().rev().find(holds).ok_or_else(unknown)?;
        let at = (start - v.offset) / elem;
        if rows > 1 && (operand.row_stride != v.width || at >= v.width) {
            return Err(unknown());
        }
        // A single row may be any row of the value.
        let (row, at) = (at / v.width, at % v.width);
        let held = if rows == 1 { self.mlx.slice(&v.array, 0, int(row), int(row + 1))? } else { v.array.clone() };
        let stride = if heads == 1 { dim } else { u64::from(operand.head_stride) };
        let flat = (heads - 1) * stride + dim;
        if stride == dim && at + flat <= v.width {
            let part = self.mlx.slice(&held, 1, int(at), int(at + flat))?;
            return self.mlx.reshape(&part, &shape(dims));
        }
        // Heads with something between them: whole periods that hold them, then the part of each.
        let span = heads * stride;
        let from = at.min(v.width.checked_sub(span).ok_or_else(unknown)?);
        let inner = at - from;
        if inner + dim > stride {
            return Err(unknown());
        }
        let periods = self.mlx.slice(&held, 1, int(from), int(from + span))?;
        let periods = self.mlx.reshape(&periods, &shape([rows, heads, stride]))?;
        self.mlx.slice(&periods, 2, int(inner), int(inner + dim))
    }

    /// The array set at exactly this place, in the shape it was given by [`Values::set`] flattened to rows.
    pub fn whole(&self, operand: Operand) -> Result<Array> {
        let found = self.values.iter().rev().find(|v| v.region == operand.region && v.offset == operand.offset);
        found.map(|v| v.array.clone()).ok_or_else(|| MlxError(format!("expected a value at {operand:?}, found none")))
    }
}
