//! MLX's arrays and errors as Rust values.
//!
//! What always holds: a C++ exception is an [`MlxError`] with MLX's own words, never the end of the
//! program.
//!
//! Bindings are `mlx-sys`, the raw half of mlx-rs, alone. mlx-rs keeps the message of an error to
//! itself, so raw calls beside it would fail without a reason; and most of what is called here
//! (managed arrays, dynamic slices, block-float modes, compiled closures that live, custom kernels)
//! it does not wrap.

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

/// Keeps the first message until it is asked for: later ones only say that something under them
/// failed.
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

// SAFETY: MLX counts references atomically; what belongs to a thread are streams, and using one
// from another thread is an exception, which is a result here.
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

    /// An array over bytes that outlive it. MLX takes them as they are where its allocator can
    /// (Metal, if they begin and end on pages), and copies them at once where it cannot.
    ///
    /// # Safety
    /// `data` is as long as `shape` and `kind` say, is never written, and lives as long as the
    /// array and all that is computed from it.
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

    pub(super) fn raw_type(&self) -> sys::mlx_dtype {
        // SAFETY: no preconditions.
        unsafe { sys::mlx_array_dtype(self.0) }
    }

    /// Elements in all.
    pub fn size(&self) -> usize {
        // SAFETY: no preconditions.
        unsafe { sys::mlx_array_size(self.0) }
    }

    /// Where the elements are, if this is an evaluated array; for telling whether it was copied.
    pub fn address(&self) -> usize {
        // SAFETY: only the address is taken.
        unsafe { sys::mlx_array_data_uint8(self.0).addr() }
    }

    /// The elements of a contiguous `f32` array that [`eval`](super::ops::Mlx::eval) has computed.
    pub fn copy_to(&self, out: &mut [f32]) -> Result<()> {
        // SAFETY: `wait` blocks until the data are there.
        unsafe { check(sys::_mlx_array_wait(self.0))? };
        // SAFETY: type and length are compared before the elements are read.
        unsafe {
            let data = sys::mlx_array_data_float32(self.0);
            if self.raw_type() != sys::mlx_dtype__MLX_FLOAT32 || self.size() != out.len() || data.is_null() {
                return Err(MlxError(format!("expected {} f32 elements, found {}", out.len(), self.size())));
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

/// A text for C.
pub(super) fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| MlxError("a text with a zero byte".to_owned()))
}
