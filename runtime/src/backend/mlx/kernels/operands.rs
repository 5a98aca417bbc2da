//! What kernels are given. Their definitions in operations (`reference`) take the same, so it
//! stands apart from both.

use super::super::array::{Array, MlxError};

/// A view of an array `[rows, width]`: row `r` has elements `at + h * stride + i` for heads `h` and
/// `i < dim`.
pub struct Place {
    /// `[rows, width]`, contiguous.
    pub array: Array,
    /// Elements of a row.
    pub width: i32,
    /// The first element.
    pub at: i32,
    /// Heads.
    pub heads: i32,
    /// Elements of a head.
    pub dim: i32,
    /// From head to head.
    pub stride: i32,
}

impl Clone for Place {
    fn clone(&self) -> Place {
        Place { array: self.array.clone(), ..*self }
    }
}

impl Place {
    /// All of a contiguous array, as rows of `heads * dim`.
    pub fn all(array: &Array, heads: i32, dim: i32) -> Place {
        Place { array: array.clone(), width: heads * dim, at: 0, heads, dim, stride: dim }
    }
}

/// What opens a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// `x * sigmoid(x)`
    Silu,
    /// `sigmoid(x)`
    Sigmoid,
}

/// A shared expert's rows, and what opens its gate.
pub struct Shared {
    /// `[rows, dim]`
    pub array: Array,
    /// One element a row.
    pub open: Place,
}

/// A layer's new heads: where they are, and what is done to them.
pub struct Heads<'a> {
    /// Rows.
    pub rows: i32,
    /// Queries, keys and values, before norm and rotation.
    pub parts: [&'a Place; 3],
    /// Norm weights of queries and keys, and epsilons.
    pub norms: Option<[(&'a Array, f32); 2]>,
    /// Cos and sin rows, `f32[rows, 2 * half]`, and half the elements that are rotated.
    pub table: (&'a Array, i32),
    /// `[kv_heads, capacity, dim]` each.
    pub caches: [&'a Array; 2],
    /// Position of the first row.
    pub pos: &'a Array,
}

/// Attention of one row over caches `[kv_heads, capacity, dim]`, up to position `last` (`i32[1]`).
pub struct Attend<'a> {
    /// `[heads, dim]`
    pub q: &'a Array,
    /// Keys and values.
    pub caches: [&'a Array; 2],
    /// The query's position.
    pub last: &'a Array,
    /// Factor of the scores.
    pub scale: f32,
    /// Positions seen, 0 for all.
    pub window: i32,
}

/// What a delta rule's queries, keys and gates are made of.
pub struct Prepare<'a> {
    /// Rows.
    pub rows: i32,
    /// Queries and keys as they come, and the epsilon and scale of their norm.
    pub keys: [(&'a Place, f32, f32); 2],
    /// Inputs of decay and strength.
    pub gates: [&'a Place; 2],
    /// `f32[v_heads]` each: the logarithm of the rate, and the offset of the step.
    pub vectors: [&'a Array; 2],
}

pub(super) fn strange() -> MlxError {
    MlxError("a kernel with other operands or results".to_owned())
}
