//! What a graph has computed so far, found by where the plan would have put it.
//!
//! A plan's operands are views over memory; MLX has arrays and no memory. [`Values`] remembers which array stands for which bytes,
//! and turns a view into slices and reshapes of the array that holds it. Bakes write each value densely and read views of one
//! value at a time; anything else is refused, with the place.

use loaf_formats::plan::{Operand, Region};

use super::array::{Array, MlxError, Result};
use super::kernels::Place;
use super::ops::Mlx;

/// What a value was computed from, where a kernel may compute it together with what uses it. MLX computes nothing that is not
/// used, so the value itself then costs nothing.
#[derive(Clone)]
pub enum Origin {
    /// A norm over heads, of weight and epsilon.
    Norm(Place, Array, f32),
    /// A rotation by a table, after a norm if there was one; half the elements that are rotated.
    Rope(Place, Option<(Array, f32)>, Array, i32),
    /// A softmax of scores.
    Softmax(Place),
    /// Heads of unit length times a scale: epsilon, scale.
    Length(Place, f32, f32),
    /// The logarithm of the decay, of two inputs and two vectors.
    Gates([Place; 2], [Array; 2]),
    /// Slots `[rows, k, dim]` summed by weights `[rows, k]`.
    Sum(Array, Array),
    /// A sigmoid.
    Sigmoid(Place),
    /// Rows times the sigmoid of one element each.
    Scaled(Array, Place),
}

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
    origin: Option<Origin>,
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
        self.values.push(Value {
            region: operand.region,
            offset,
            elem,
            width,
            bytes: end - offset,
            array,
            origin: None,
        });
        Ok(())
    }

    /// Remembers what the value set last was computed from.
    pub fn mark(&mut self, origin: Origin) {
        if let Some(value) = self.values.last_mut() {
            value.origin = Some(origin);
        }
    }

    /// What the value was computed from, if the view is all of it.
    pub fn origin(&self, operand: Operand, dims: [u64; 3]) -> Option<&Origin> {
        let (start, end) = operand.span(dims)?;
        let [_, heads, dim] = dims;
        let dense = heads == 1 || u64::from(operand.head_stride) == dim;
        let is = |v: &&Value| v.region == operand.region && v.offset == start && v.offset + v.bytes == end && dense;
        self.values.iter().rev().find(is).and_then(|v| v.origin.as_ref())
    }

    /// Where a view lies in the array that holds it.
    pub fn place(&self, operand: Operand, dims: [u64; 3]) -> Result<Place> {
        let [rows, heads, dim] = dims;
        let (v, at) = self.find(operand, dims)?;
        let (row, at) = (at / v.width, at % v.width);
        let array = if rows == 1 { self.mlx.slice(&v.array, 0, int(row), int(row + 1))? } else { v.array.clone() };
        let stride = if heads == 1 { dim } else { u64::from(operand.head_stride) };
        let [width, at, heads, dim, stride] = [v.width, at, heads, dim, stride].map(int);
        Ok(Place { array, width, at, heads, dim, stride })
    }

    /// The value that holds a view, and the view's first element in it.
    fn find(&self, operand: Operand, dims: [u64; 3]) -> Result<(&Value, u64)> {
        let elem = operand.dtype.bytes();
        let unknown = || MlxError(format!("expected a view of one value, found {operand:?} of {dims:?}"));
        let (start, end) = operand.span(dims).ok_or_else(unknown)?;
        let holds =
            |v: &&Value| v.region == operand.region && v.elem == elem && v.offset <= start && end <= v.offset + v.bytes;
        let v = self.values.iter().rev().find(holds).ok_or_else(unknown)?;
        let at = (start - v.offset) / elem;
        let [rows, heads, dim] = dims;
        let last = at % v.width + (heads - 1) * u64::from(operand.head_stride) + dim;
        if rows > 1 && (operand.row_stride != v.width || at >= v.width) || heads > 1 && last > v.width {
            return Err(unknown());
        }
        Ok((v, at))
    }

    /// The array that stands for a view, `[rows, heads, dim]`.
    pub fn get(&self, operand: Operand, dims: [u64; 3]) -> Result<Array> {
        let [rows, heads, dim] = dims;
        let unknown = || MlxError(format!("expected a view of one value, found {operand:?} of {dims:?}"));
        let (v, at) = self.find(operand, dims)?;
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
