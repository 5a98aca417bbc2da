//! A function of arrays, traced once and replayed by MLX.
//!
//! [`Compiled::new`] hands a Rust closure to `mlx_compile`, once; MLX calls it when it first meets
//! the inputs' shapes, records the graph, simplifies and (where a device compiler exists) fuses it.
//! Every later call clones that graph's nodes over new inputs and schedules them: that much MLX
//! still does per call. The closure is not called again, which [`Compiled::traces`] shows.
//!
//! Arrays that the closure captures become constants of the graph: references, not copies.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlx_sys as sys;

use super::array::{Array, Arrays, MlxError, Result, check, note, to_vec};

type Function = dyn Fn(&[Array]) -> Result<Vec<Array>>;

struct Payload {
    function: Box<Function>,
    traces: Arc<AtomicUsize>,
}

unsafe extern "C" fn call(
    out: *mut sys::mlx_vector_array,
    inputs: sys::mlx_vector_array,
    payload: *mut c_void,
) -> c_int {
    // SAFETY: the payload is the `Payload` that `Compiled::new` boxed, alive until `free`.
    let payload = unsafe { &*payload.cast::<Payload>() };
    payload.traces.fetch_add(1, Ordering::Relaxed);
    // A panic must not unwind into C++.
    let result = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: MLX passes a live vector.
        let inputs = unsafe { to_vec(inputs) }?;
        (payload.function)(&inputs)
    }));
    match result.unwrap_or_else(|_| Err(MlxError("panic while tracing".to_owned()))) {
        Ok(arrays) => {
            let arrays = Arrays::new(&arrays);
            // SAFETY: `out` is a vector of MLX's to be set.
            unsafe { sys::mlx_vector_array_set(out, arrays.0) }
        }
        Err(e) => {
            note(e.0);
            1
        }
    }
}

unsafe extern "C" fn free(payload: *mut c_void) {
    // SAFETY: MLX calls this once, with what `Compiled::new` gave it.
    drop(unsafe { Box::from_raw(payload.cast::<Payload>()) });
}

/// A compiled function.
pub struct Compiled {
    closure: sys::mlx_closure,
    traces: Arc<AtomicUsize>,
}

// SAFETY: as for `Array`; the function inside is called only under `apply`, which borrows
// exclusively.
unsafe impl Send for Compiled {}

impl Drop for Compiled {
    fn drop(&mut self) {
        // SAFETY: the handle is ours alone.
        unsafe { sys::mlx_closure_free(self.closure) };
    }
}

impl Compiled {
    /// Compiles `function`, which is called at the first [`Compiled::apply`].
    pub fn new(function: impl Fn(&[Array]) -> Result<Vec<Array>> + 'static) -> Result<Compiled> {
        let traces = Arc::new(AtomicUsize::new(0));
        let payload = Box::new(Payload { function: Box::new(function), traces: traces.clone() });
        // SAFETY: `call` and `free` expect this payload; handles are live and freed once.
        unsafe {
            let plain = sys::mlx_closure_new_func_payload(Some(call), Box::into_raw(payload).cast(), Some(free));
            let mut compiled = Compiled { closure: sys::mlx_closure_new(), traces };
            let status = sys::mlx_compile(&mut compiled.closure, plain, false);
            sys::mlx_closure_free(plain);
            check(status)?;
            Ok(compiled)
        }
    }

    /// The results of `inputs`, not computed yet. The inputs' last references are given up, so that
    /// MLX may write into them.
    pub fn apply(&mut self, inputs: Vec<Array>) -> Result<Vec<Array>> {
        let passed = Arrays::new(&inputs);
        drop(inputs);
        let mut out = Arrays::empty();
        // SAFETY: live handles.
        check(unsafe { sys::mlx_closure_apply(&mut out.0, self.closure, passed.0) })?;
        drop(passed);
        out.to_vec()
    }

    /// How often the function has been traced.
    pub fn traces(&self) -> usize {
        self.traces.load(Ordering::Relaxed)
    }
}
