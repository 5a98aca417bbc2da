//! The operations of MLX that lowering uses: one method, one call of mlx-c.
//!
//! Operations build a graph; nothing is computed before [`Mlx::eval`] or [`Mlx::eval_async`].
//! Shapes and types are MLX's to check; what does not fit is an error in its words.

use std::ffi::{CStr, c_int};

use mlx_sys as sys;

use super::array::{Array, Arrays, Result, Type, check};

/// How a packed weight is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// MLX's name of the layout.
    pub mode: &'static CStr,
    /// Bits of a code.
    pub bits: i32,
    /// Weights that share a scale.
    pub group: i32,
}

fn some(value: i32) -> sys::mlx_optional_int {
    sys::mlx_optional_int { value, has_value: true }
}

/// No array, where one may be left out.
pub(super) const NONE: sys::mlx_array = sys::mlx_array { ctx: std::ptr::null_mut() };

fn or_none(a: Option<&Array>) -> sys::mlx_array {
    a.map_or(NONE, |a| a.0)
}

/// Where operations go.
pub struct Mlx {
    pub(super) stream: sys::mlx_stream,
}

// SAFETY: a stream is an index; see `Array`.
unsafe impl Send for Mlx {}

impl Drop for Mlx {
    fn drop(&mut self) {
        // SAFETY: the handle is ours alone.
        unsafe { sys::mlx_stream_free(self.stream) };
    }
}

/// A call of mlx-c that makes one array.
macro_rules! call {
    ($self:ident, $function:ident, $($arg:expr),+) => {
        // SAFETY: handles are live, and pointers belong to slices that live through the call, whose
        // lengths go with them.
        $self.op(|out| unsafe { sys::$function(out, $($arg,)+ $self.stream) })
    };
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident($($arg:ident),+) = $function:ident;)*) => {
        $($(#[$doc])* pub fn $name(&self, $($arg: &Array),+) -> Result<Array> {
            call!(self, $function, $($arg.0),+)
        })*
    };
}

#[allow(missing_docs)]
impl Mlx {
    fn op(&self, f: impl FnOnce(*mut sys::mlx_array) -> c_int) -> Result<Array> {
        // SAFETY: no preconditions.
        let mut out = Array(unsafe { sys::mlx_array_new() });
        check(f(&mut out.0))?;
        Ok(out)
    }

    operations! {
        add(a, b) = mlx_add;
        sub(a, b) = mlx_subtract;
        mul(a, b) = mlx_multiply;
        div(a, b) = mlx_divide;
        maximum(a, b) = mlx_maximum;
        matmul(a, b) = mlx_matmul;
        floor_divide(a, b) = mlx_floor_divide;
        equal(a, b) = mlx_equal;
        less(a, b) = mlx_less;
        less_equal(a, b) = mlx_less_equal;
        greater(a, b) = mlx_greater;
        greater_equal(a, b) = mlx_greater_equal;
        and(a, b) = mlx_logical_and;
        select(condition, a, b) = mlx_where;
        neg(a) = mlx_negative;
        exp(a) = mlx_exp;
        log1p(a) = mlx_log1p;
        rsqrt(a) = mlx_rsqrt;
        square(a) = mlx_square;
        sigmoid(a) = mlx_sigmoid;
    }

    pub fn astype(&self, a: &Array, kind: Type) -> Result<Array> {
        call!(self, mlx_astype, a.0, kind.raw())
    }

    /// `a` in the type of `other`.
    pub fn astype_like(&self, a: &Array, other: &Array) -> Result<Array> {
        call!(self, mlx_astype, a.0, other.raw_type())
    }

    /// `a` with its elements in order of rows, copied only if they are not.
    pub fn contiguous(&self, a: &Array) -> Result<Array> {
        call!(self, mlx_contiguous, a.0, false)
    }

    pub fn reshape(&self, a: &Array, shape: &[i32]) -> Result<Array> {
        call!(self, mlx_reshape, a.0, shape.as_ptr(), shape.len())
    }

    pub fn broadcast(&self, a: &Array, shape: &[i32]) -> Result<Array> {
        call!(self, mlx_broadcast_to, a.0, shape.as_ptr(), shape.len())
    }

    pub fn transpose(&self, a: &Array, axes: &[i32]) -> Result<Array> {
        call!(self, mlx_transpose_axes, a.0, axes.as_ptr(), axes.len())
    }

    pub fn concat(&self, arrays: &[&Array], axis: i32) -> Result<Array> {
        if let [one] = arrays {
            return Ok((*one).clone());
        }
        let all = Arrays::new(arrays.iter().copied());
        call!(self, mlx_concatenate_axis, all.0, axis)
    }

    /// `[.., start..stop, ..]` on `axis`; the array itself if that is all of it.
    pub fn slice(&self, a: &Array, axis: usize, start: i32, stop: i32) -> Result<Array> {
        let shape = a.shape();
        if start == 0 && shape.get(axis) == Some(&stop) {
            return Ok(a.clone());
        }
        let (mut from, mut to, by) = (vec![0; shape.len()], shape.clone(), vec![1; shape.len()]);
        (from[axis], to[axis]) = (start, stop);
        let n = shape.len();
        call!(self, mlx_slice, a.0, from.as_ptr(), n, to.as_ptr(), n, by.as_ptr(), n)
    }

    /// `len` indices of `axis` from `start` (an `i32` array of one element) on.
    pub fn slice_at(&self, a: &Array, start: &Array, axis: i32, len: i32) -> Result<Array> {
        let mut size = a.shape();
        size[axis as usize] = len;
        call!(self, mlx_slice_dynamic, a.0, start.0, &axis, 1, size.as_ptr(), size.len())
    }

    /// `a` with `update` written over it from `start` (an `i32` array of one element) on along
    /// `axis`.
    pub fn write_at(&self, a: &Array, update: &Array, start: &Array, axis: i32) -> Result<Array> {
        call!(self, mlx_slice_update_dynamic, a.0, update.0, start.0, &axis, 1)
    }

    pub fn sum(&self, a: &Array, axis: i32) -> Result<Array> {
        call!(self, mlx_sum_axis, a.0, axis, false)
    }

    pub fn log_sum_exp(&self, a: &Array) -> Result<Array> {
        call!(self, mlx_logsumexp_axis, a.0, -1, true)
    }

    pub fn cumsum(&self, a: &Array, axis: i32) -> Result<Array> {
        let kind = sys::mlx_optional_dtype { value: sys::mlx_dtype__MLX_FLOAT32, has_value: false };
        call!(self, mlx_cumsum_axis, a.0, axis, false, true, kind)
    }

    pub fn softmax(&self, a: &Array) -> Result<Array> {
        call!(self, mlx_softmax_axis, a.0, -1, true)
    }

    pub fn argsort(&self, a: &Array) -> Result<Array> {
        call!(self, mlx_argsort_axis, a.0, -1)
    }

    pub fn argmax(&self, a: &Array) -> Result<Array> {
        call!(self, mlx_argmax_axis, a.0, -1, true)
    }

    /// Whole slices of axis 0.
    pub fn take(&self, a: &Array, indices: &Array) -> Result<Array> {
        call!(self, mlx_take_axis, a.0, indices.0, 0)
    }

    /// One element per index, on the last axis.
    pub fn take_along(&self, a: &Array, indices: &Array) -> Result<Array> {
        call!(self, mlx_take_along_axis, a.0, indices.0, -1)
    }

    pub fn arange(&self, n: i32) -> Result<Array> {
        call!(self, mlx_arange, 0.0, f64::from(n), 1.0, sys::mlx_dtype__MLX_INT32)
    }

    pub fn zeros(&self, shape: &[i32], kind: Type) -> Result<Array> {
        call!(self, mlx_zeros, shape.as_ptr(), shape.len(), kind.raw())
    }

    pub fn rms_norm(&self, x: &Array, weight: &Array, eps: f32) -> Result<Array> {
        call!(self, mlx_fast_rms_norm, x.0, weight.0, eps)
    }

    /// Half-split rotation of the first `dims` of the last axis; axis -2 is positions from `offset`
    /// on.
    pub fn rope(&self, x: &Array, dims: i32, offset: &Array, periods: &Array) -> Result<Array> {
        let base = sys::mlx_optional_float { value: 0.0, has_value: false };
        call!(self, mlx_fast_rope_dynamic, x.0, dims, false, base, 1.0, offset.0, periods.0)
    }

    /// `q` is `[1, heads, rows, dim]`, keys and values `[1, kv_heads, positions, dim]`, the mask
    /// what is visible.
    pub fn attention(&self, q: &Array, k: &Array, v: &Array, scale: f32, mask: &Array) -> Result<Array> {
        let kind = c"array".as_ptr();
        call!(self, mlx_fast_scaled_dot_product_attention, q.0, k.0, v.0, scale, kind, mask.0, NONE, false)
    }

    /// A packed weight's numbers as `kind`.
    pub fn dequantize(
        &self,
        w: &Array,
        scales: &Array,
        biases: Option<&Array>,
        p: Packing,
        kind: Type,
    ) -> Result<Array> {
        let kind = sys::mlx_optional_dtype { value: kind.raw(), has_value: true };
        let (group, bits, mode) = (some(p.group), some(p.bits), p.mode.as_ptr());
        call!(self, mlx_dequantize, w.0, scales.0, or_none(biases), group, bits, mode, NONE, kind)
    }

    /// `x` times the transpose of a packed weight.
    pub fn quantized_matmul(
        &self,
        x: &Array,
        w: &Array,
        scales: &Array,
        biases: Option<&Array>,
        p: Packing,
    ) -> Result<Array> {
        let (group, bits, mode) = (some(p.group), some(p.bits), p.mode.as_ptr());
        call!(self, mlx_quantized_matmul, x.0, w.0, scales.0, or_none(biases), true, group, bits, mode)
    }

    /// The same with the matrix that `experts` names for each slot, times the row of `x` that
    /// `from` names (both `u32` of one shape). `sorted` is whether `experts` are; MLX makes use of
    /// it only without `from`, when slots and rows are one to one.
    pub fn gather_qmm(
        &self,
        x: &Array,
        w: &Array,
        scales: &Array,
        biases: Option<&Array>,
        from: Option<&Array>,
        experts: &Array,
        p: Packing,
        sorted: bool,
    ) -> Result<Array> {
        let (group, bits, mode) = (some(p.group), some(p.bits), p.mode.as_ptr());
        let (biases, from, experts) = (or_none(biases), or_none(from), experts.0);
        call!(self, mlx_gather_qmm, x.0, w.0, scales.0, biases, from, experts, true, group, bits, mode, sorted)
    }

    /// `x` times the matrix (already transposed) that `experts` names for each slot.
    pub fn gather_mm(&self, x: &Array, w: &Array, experts: &Array, sorted: bool) -> Result<Array> {
        call!(self, mlx_gather_mm, x.0, w.0, NONE, experts.0, sorted)
    }

    /// One draw per row from the distribution whose logits are given.
    pub fn categorical(&self, logits: &Array, key: &Array) -> Result<Array> {
        call!(self, mlx_random_categorical, logits.0, -1, key.0)
    }

    /// Two keys out of one.
    pub fn split_key(&self, key: &Array) -> Result<(Array, Array)> {
        // SAFETY: no preconditions; live handles.
        unsafe {
            let (mut a, mut b) = (Array(sys::mlx_array_new()), Array(sys::mlx_array_new()));
            check(sys::mlx_random_split(&mut a.0, &mut b.0, key.0, self.stream))?;
            Ok((a, b))
        }
    }

    /// The key of a seed.
    pub fn key(&self, seed: u64) -> Result<Array> {
        // SAFETY: an out-parameter.
        self.op(|out| unsafe { sys::mlx_random_key(out, seed) })
    }

    /// Computes arrays and waits for them.
    pub fn eval<'a>(&self, arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
        let all = Arrays::new(arrays);
        // SAFETY: a live handle.
        check(unsafe { sys::mlx_eval(all.0) })
    }

    /// Starts computing arrays.
    pub fn eval_async<'a>(&self, arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
        let all = Arrays::new(arrays);
        // SAFETY: a live handle.
        check(unsafe { sys::mlx_async_eval(all.0) })
    }
}
