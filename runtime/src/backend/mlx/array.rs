//! MLX arrays and the operations that lowering uses, as Rust values and errors.
//!
//! One struct, [`Mlx`], holds the stream that every operation goes to; each method is one call of mlx-c. Operations build a
//! graph; nothing is computed before [`Mlx::eval`] or [`Mlx::eval_async`].
//!
//! What always holds: a C++ exception is an [`MlxError`] with MLX's own words, never the end of the program.
//!
//! Bindings are `mlx-sys`, the raw half of mlx-rs, alone. mlx-rs keeps the message of an error to itself, so raw calls beside
//! it would fail without a reason; and most of what is called here (managed arrays, dynamic slices, block-float modes, compiled
//! closures that live, custom kernels) it does not wrap.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::sync::Once;

use mlx_sys as sys;

/// What MLX said when it refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlxError(pub String);

impl fmt::Display for MlxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MLX: {}", self.0)
    }
}

impl std::error::Error for MlxError {}

/// A result of MLX.
pub type Result<T> = std::result::Result<T, MlxError>;

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the first message until it is asked for: later ones only say that something under them failed.
pub(super) fn note(message: String) {
    LAST.with_borrow_mut(|last| {
        last.get_or_insert(message);
    });
}

extern "C" fn on_error(message: *const c_char, _: *mut c_void) {
    // SAFETY: mlx-c passes a terminated string that lives as long as the call.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    // mlx-c adds " at FILE:LINE" of its own sources.
    let text = text.rsplit_once(" at ").map_or(&*text, |(what, _)| what);
    note(text.replace('\n', " "));
}

/// Turns a status into a result.
pub(super) fn check(status: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(MlxError(LAST.take().unwrap_or_else(|| "failed without a reason".to_owned())))
}

/// Makes errors of MLX into results; without it they end the program.
pub(super) fn catch_errors() {
    static ONCE: Once = Once::new();
    // SAFETY: the handler is a plain function without data.
    ONCE.call_once(|| unsafe { sys::mlx_set_error_handler(Some(on_error), std::ptr::null_mut(), None) });
}

/// The element types that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// Unsigned byte.
    U8,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// IEEE binary32.
    F32,
}

impl Type {
    pub(super) fn raw(self) -> sys::mlx_dtype {
        match self {
            Type::U8 => sys::mlx_dtype__MLX_UINT8,
            Type::U32 => sys::mlx_dtype__MLX_UINT32,
            Type::I32 => sys::mlx_dtype__MLX_INT32,
            Type::F16 => sys::mlx_dtype__MLX_FLOAT16,
            Type::Bf16 => sys::mlx_dtype__MLX_BFLOAT16,
            Type::F32 => sys::mlx_dtype__MLX_FLOAT32,
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Type::U8 => 1,
            Type::F16 | Type::Bf16 => 2,
            _ => 4,
        }
    }
}

/// A counted reference to an array, or to the recipe of one that is not computed yet.
pub struct Array(pub(super) sys::mlx_array);

// SAFETY: MLX counts references atomically; what belongs to a thread are streams, and using one from another thread is an
// exception, which is a result here.
unsafe impl Send for Array {}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: the handle is ours alone.
        unsafe { sys::mlx_array_free(self.0) };
    }
}

impl Clone for Array {
    fn clone(&self) -> Self {
        // SAFETY: a new handle to the same array; copying a shared pointer cannot fail.
        unsafe {
            let mut copy = sys::mlx_array_new();
            sys::mlx_array_set(&mut copy, self.0);
            Array(copy)
        }
    }
}

impl Array {
    /// An array with a copy of `data`, which has as many elements as `shape` says.
    pub fn from_slice<T: Element>(data: &[T], shape: &[i32]) -> Array {
        assert_eq!(data.len() as i64, shape.iter().map(|&n| i64::from(n)).product::<i64>(), "elements of {shape:?}");
        // SAFETY: the length was compared; MLX copies the data before it returns.
        Array(unsafe {
            sys::mlx_array_new_data(data.as_ptr().cast(), shape.as_ptr(), shape.len() as c_int, T::TYPE.raw())
        })
    }

    /// An array over bytes that outlive it. MLX takes them as they are where its allocator can (Metal, if they begin and end on
    /// pages), and copies them at once where it cannot.
    ///
    /// # Safety
    /// `data` is as long as `shape` and `kind` say, is never written, and lives as long as the array and all that is computed
    /// from it.
    pub unsafe fn borrow(data: *const u8, shape: &[i32], kind: Type) -> Array {
        unsafe extern "C" fn nothing(_: *mut c_void) {}
        let (dims, data) = (shape.len() as c_int, data.cast_mut().cast());
        // SAFETY: the caller's promise; there is nothing to free.
        Array(unsafe { sys::mlx_array_new_data_managed(data, shape.as_ptr(), dims, kind.raw(), Some(nothing)) })
    }

    /// A scalar.
    pub fn scalar(value: f32) -> Array {
        // SAFETY: no preconditions.
        Array(unsafe { sys::mlx_array_new_float32(value) })
    }

    /// An integer scalar.
    pub fn int(value: i32) -> Array {
        // SAFETY: no preconditions.
        Array(unsafe { sys::mlx_array_new_int(value) })
    }

    /// Extents.
    pub fn shape(&self) -> Vec<i32> {
        // SAFETY: MLX returns as many extents as it has dimensions, alive while the array is.
        unsafe {
            let n = sys::mlx_array_ndim(self.0);
            if n == 0 { Vec::new() } else { std::slice::from_raw_parts(sys::mlx_array_shape(self.0), n).to_vec() }
        }
    }

    /// Elements in all.
    pub fn len(&self) -> usize {
        // SAFETY: no preconditions.
        unsafe { sys::mlx_array_size(self.0) }
    }

    /// Where the elements are, if this is an evaluated array; for telling whether it was copied.
    pub fn address(&self) -> usize {
        // SAFETY: only the address is taken.
        unsafe { sys::mlx_array_data_uint8(self.0).addr() }
    }

    /// The elements of a contiguous `f32` array that [`Mlx::eval`] has computed.
    pub fn copy_to(&self, out: &mut [f32]) -> Result<()> {
        // SAFETY: `wait` blocks until the data are there.
        unsafe { check(sys::_mlx_array_wait(self.0))? };
        // SAFETY: type and length are compared before the elements are read.
        unsafe {
            let data = sys::mlx_array_data_float32(self.0);
            if sys::mlx_array_dtype(self.0) != sys::mlx_dtype__MLX_FLOAT32 || self.len() != out.len() || data.is_null()
            {
                return Err(MlxError(format!("expected {} f32 elements, found {}", out.len(), self.len())));
            }
            out.copy_from_slice(std::slice::from_raw_parts(data, out.len()));
        }
        Ok(())
    }

    /// The only element of a `u32` array; waits for it.
    pub fn item_u32(&self) -> Result<u32> {
        let mut value = 0;
        // SAFETY: MLX checks that there is one element.
        check(unsafe { sys::mlx_array_item_uint32(&mut value, self.0) })?;
        Ok(value)
    }
}

/// Rust types of elements.
pub trait Element: Copy {
    /// The same in MLX.
    const TYPE: Type;
}
impl Element for f32 {
    const TYPE: Type = Type::F32;
}
impl Element for u32 {
    const TYPE: Type = Type::U32;
}
impl Element for i32 {
    const TYPE: Type = Type::I32;
}

/// Several arrays, as MLX passes them.
pub(super) struct Arrays(pub(super) sys::mlx_vector_array);

impl Drop for Arrays {
    fn drop(&mut self) {
        // SAFETY: the handle is ours alone.
        unsafe { sys::mlx_vector_array_free(self.0) };
    }
}

impl Arrays {
    pub fn new<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Arrays {
        let raw: Vec<sys::mlx_array> = arrays.into_iter().map(|a| a.0).collect();
        // SAFETY: live handles; MLX copies the references.
        Arrays(unsafe { sys::mlx_vector_array_new_data(raw.as_ptr(), raw.len()) })
    }

    pub fn empty() -> Arrays {
        // SAFETY: no preconditions.
        Arrays(unsafe { sys::mlx_vector_array_new() })
    }

    pub fn to_vec(&self) -> Result<Vec<Array>> {
        // SAFETY: indices are below the size.
        unsafe { to_vec(self.0) }
    }
}

/// # Safety
/// `v` is a live vector.
pub(super) unsafe fn to_vec(v: sys::mlx_vector_array) -> Result<Vec<Array>> {
    // SAFETY: the caller's promise; indices are below the size.
    unsafe {
        (0..sys::mlx_vector_array_size(v))
            .map(|i| {
                let mut array = Array(sys::mlx_array_new());
                check(sys::mlx_vector_array_get(&mut array.0, v, i))?;
                Ok(array)
            })
            .collect()
    }
}

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

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident($($arg:ident),+) = $function:ident;)*) => {
        $($(#[$doc])* pub fn $name(&self, $($arg: &Array),+) -> Result<Array> {
            // SAFETY: live handles.
            self.op(|out| unsafe { sys::$function(out, $($arg.0,)+ self.stream) })
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
        contiguous_copy(a) = mlx_copy;
    }

    pub fn astype(&self, a: &Array, kind: Type) -> Result<Array> {
        // SAFETY: live handles, here and below.
        self.op(|out| unsafe { sys::mlx_astype(out, a.0, kind.raw(), self.stream) })
    }

    pub fn reshape(&self, a: &Array, shape: &[i32]) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_reshape(out, a.0, shape.as_ptr(), shape.len(), self.stream) })
    }

    pub fn broadcast(&self, a: &Array, shape: &[i32]) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_broadcast_to(out, a.0, shape.as_ptr(), shape.len(), self.stream) })
    }

    pub fn transpose(&self, a: &Array, axes: &[i32]) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_transpose_axes(out, a.0, axes.as_ptr(), axes.len(), self.stream) })
    }

    pub fn concat(&self, arrays: &[&Array], axis: i32) -> Result<Array> {
        if let [one] = arrays {
            return Ok((*one).clone());
        }
        let all = Arrays::new(arrays.iter().copied());
        self.op(|out| unsafe { sys::mlx_concatenate_axis(out, all.0, axis, self.stream) })
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
        self.op(|out| unsafe {
            sys::mlx_slice(out, a.0, from.as_ptr(), n, to.as_ptr(), n, by.as_ptr(), n, self.stream)
        })
    }

    /// `len` indices of `axis` from `start` (an `i32` array of one element) on.
    pub fn slice_at(&self, a: &Array, start: &Array, axis: i32, len: i32) -> Result<Array> {
        let mut size = a.shape();
        size[axis as usize] = len;
        self.op(|out| unsafe {
            sys::mlx_slice_dynamic(out, a.0, start.0, &axis, 1, size.as_ptr(), size.len(), self.stream)
        })
    }

    /// `a` with `update` written over it from `start` (an `i32` array of one element) on along `axis`.
    pub fn write_at(&self, a: &Array, update: &Array, start: &Array, axis: i32) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_slice_update_dynamic(out, a.0, update.0, start.0, &axis, 1, self.stream) })
    }

    pub fn sum(&self, a: &Array, axis: i32) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_sum_axis(out, a.0, axis, false, self.stream) })
    }

    pub fn log_sum_exp(&self, a: &Array) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_logsumexp_axis(out, a.0, -1, true, self.stream) })
    }

    pub fn cumsum(&self, a: &Array, axis: i32) -> Result<Array> {
        let kind = sys::mlx_optional_dtype { value: sys::mlx_dtype__MLX_FLOAT32, has_value: false };
        self.op(|out| unsafe { sys::mlx_cumsum_axis(out, a.0, axis, false, true, kind, self.stream) })
    }

    pub fn softmax(&self, a: &Array) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_softmax_axis(out, a.0, -1, true, self.stream) })
    }

    pub fn argsort(&self, a: &Array) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_argsort_axis(out, a.0, -1, self.stream) })
    }

    pub fn argmax(&self, a: &Array) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_argmax_axis(out, a.0, -1, true, self.stream) })
    }

    /// Whole slices of axis 0.
    pub fn take(&self, a: &Array, indices: &Array) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_take_axis(out, a.0, indices.0, 0, self.stream) })
    }

    /// One element per index, on the last axis.
    pub fn take_along(&self, a: &Array, indices: &Array) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_take_along_axis(out, a.0, indices.0, -1, self.stream) })
    }

    pub fn arange(&self, n: i32) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_arange(out, 0.0, f64::from(n), 1.0, sys::mlx_dtype__MLX_INT32, self.stream) })
    }

    pub fn zeros(&self, shape: &[i32], kind: Type) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_zeros(out, shape.as_ptr(), shape.len(), kind.raw(), self.stream) })
    }

    pub fn rms_norm(&self, x: &Array, weight: &Array, eps: f32) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_fast_rms_norm(out, x.0, weight.0, eps, self.stream) })
    }

    /// Half-split rotation of the first `dims` of the last axis; axis -2 is positions from `offset` on.
    pub fn rope(&self, x: &Array, dims: i32, offset: &Array, periods: &Array) -> Result<Array> {
        let base = sys::mlx_optional_float { value: 0.0, has_value: false };
        self.op(|out| unsafe {
            sys::mlx_fast_rope_dynamic(out, x.0, dims, false, base, 1.0, offset.0, periods.0, self.stream)
        })
    }

    /// `q` is `[1, heads, rows, dim]`, keys and values `[1, kv_heads, positions, dim]`, the mask what is visible.
    pub fn attention(&self, q: &Array, k: &Array, v: &Array, scale: f32, mask: &Array) -> Result<Array> {
        self.op(|out| unsafe {
            let kind = c"array".as_ptr();
            sys::mlx_fast_scaled_dot_product_attention(
                out,
                q.0,
                k.0,
                v.0,
                scale,
                kind,
                mask.0,
                NONE,
                false,
                self.stream,
            )
        })
    }

    pub fn dequantize(&self, w: &Array, scales: &Array, biases: Option<&Array>, p: Packing) -> Result<Array> {
        let kind = sys::mlx_optional_dtype { value: sys::mlx_dtype__MLX_FLOAT32, has_value: true };
        self.op(|out| unsafe {
            let (group, bits, mode) = (some(p.group), some(p.bits), p.mode.as_ptr());
            sys::mlx_dequantize(out, w.0, scales.0, or_none(biases), group, bits, mode, NONE, kind, self.stream)
        })
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
        self.op(|out| unsafe {
            let (group, bits, mode) = (some(p.group), some(p.bits), p.mode.as_ptr());
            sys::mlx_quantized_matmul(out, x.0, w.0, scales.0, or_none(biases), true, group, bits, mode, self.stream)
        })
    }

    /// The same with the matrix that `experts` names for each slot.
    pub fn gather_qmm(
        &self,
        x: &Array,
        w: &Array,
        scales: &Array,
        biases: Option<&Array>,
        experts: &Array,
        p: Packing,
        sorted: bool,
    ) -> Result<Array> {
        self.op(|out| unsafe {
            let (group, bits, mode) = (some(p.group), some(p.bits), p.mode.as_ptr());
            let (biases, experts) = (or_none(biases), experts.0);
            sys::mlx_gather_qmm(
                out,
                x.0,
                w.0,
                scales.0,
                biases,
                NONE,
                experts,
                true,
                group,
                bits,
                mode,
                sorted,
                self.stream,
            )
        })
    }

    /// `x` times the matrix (already transposed) that `experts` names for each slot.
    pub fn gather_mm(&self, x: &Array, w: &Array, experts: &Array, sorted: bool) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_gather_mm(out, x.0, w.0, NONE, experts.0, sorted, self.stream) })
    }

    /// One draw per row from the distribution whose logits are given.
    pub fn categorical(&self, logits: &Array, key: &Array) -> Result<Array> {
        self.op(|out| unsafe { sys::mlx_random_categorical(out, logits.0, -1, key.0, self.stream) })
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
        self.op(|out| unsafe { sys::mlx_random_key(out, seed) })
    }

    /// Computes arrays and waits for them.
    pub fn eval<'a>(&self, arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
        let all = Arrays::new(arrays);
        check(unsafe { sys::mlx_eval(all.0) })
    }

    /// Starts computing arrays.
    pub fn eval_async<'a>(&self, arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
        let all = Arrays::new(arrays);
        check(unsafe { sys::mlx_async_eval(all.0) })
    }
}

/// A text for C.
pub(super) fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| MlxError("a text with a zero byte".to_owned()))
}
