//! Our own kernels for MLX's GPU devices: Metal and CUDA from one source.
//!
//! A decode step is bound by the number of launches, not by arithmetic, so what a plan has as chains of small operations is
//! one launch here: `rows` has what works row by row (embedding, add and norm, gates, routing, choosing a token), `attention` norms,
//! rotates and caches a layer's heads and attends to them, `delta` is the gated delta rule. The recurrence, attention and
//! choosing a token keep what they need in registers. Every intermediate is f32.
//!
//! On the CPU device, and for sizes a kernel is not written for, there is none: the caller uses operations. `twins` defines each kernel
//! in operations, for tests. A kernel is compiled when first used, in every process; so there are few, with sizes as template
//! arguments, except the number of rows.

mod attention;
mod delta;
mod operands;
mod rows;
mod twins;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};

use mlx_sys as sys;

use super::array::{Array, Arrays, Result, Type, c_string, check};
use super::device::Device;
use super::ops::Mlx;
use operands::strange;
pub use operands::{Act, Attend, Heads, Place, Prepare, Shared};

const CUDA: &str = "
  const int x = threadIdx.x, y = threadIdx.y, block = blockIdx.x;
  #define LOAF_SHARED __shared__
  #define LOAF_DEVICE
  #define LOAF_SYNC __syncthreads()
  #define LOAF_REAL(bits) __int_as_float(bits)
  #define LOAF_EXP(value) expf(value)
  #define LOAF_LOG(value) logf(value)
  #define LOAF_LOG1P(value) log1pf(value)
  #define LOAF_RSQRT(value) rsqrtf(value)
  #define LOAF_LANES(value) for (int s = 16; s > 0; s /= 2) value += __shfl_xor_sync(0xffffffffu, value, s)
  #define LOAF_MOST(value) for (int s = 16; s > 0; s /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, s))
  #define LOAF_LEAST(value) for (int s = 16; s > 0; s /= 2) value = min(value, __shfl_xor_sync(0xffffffffu, value, s))
";

const METAL: &str = "
  const int x = thread_position_in_threadgroup.x, y = thread_position_in_threadgroup.y;
  const int block = threadgroup_position_in_grid.x;
  #define LOAF_SHARED threadgroup
  #define LOAF_DEVICE device
  #define LOAF_SYNC threadgroup_barrier(mem_flags::mem_threadgroup)
  #define LOAF_REAL(bits) as_type<float>(bits)
  #define LOAF_EXP(value) metal::exp(value)
  #define LOAF_LOG(value) metal::log(value)
  #define LOAF_LOG1P(value) metal::log(1.0f + (value))
  #define LOAF_RSQRT(value) metal::precise::rsqrt(value)
  #define LOAF_LANES(value) value = simd_sum(value)
  #define LOAF_MOST(value) value = simd_max(value)
  #define LOAF_LEAST(value) value = simd_min(value)
";

/// Element `e` of row `r` of a [`Place`]; silu and sigmoid.
const COMMON: &str = "
  #define LOAF_AT(name, r, e) (float)name[(r) * name##_W + name##_A + ((e) / name##_D) * name##_S + (e) % name##_D]
  #define LOAF_SIGMOID(value) (1.0f / (1.0f + LOAF_EXP(-(value))))
";

enum Kernel {
    Cuda(sys::mlx_fast_cuda_kernel),
    Metal(sys::mlx_fast_metal_kernel),
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: the handles are ours alone.
        unsafe {
            match self {
                Kernel::Cuda(k) => sys::mlx_fast_cuda_kernel_free(*k),
                Kernel::Metal(k) => sys::mlx_fast_metal_kernel_free(*k),
            }
        }
    }
}

/// Names, as MLX passes them.
struct Names(sys::mlx_vector_string);

impl Drop for Names {
    fn drop(&mut self) {
        // SAFETY: the handle is ours alone.
        unsafe { sys::mlx_vector_string_free(self.0) };
    }
}

fn names(of: &[&str]) -> Result<Names> {
    let owned: Vec<CString> = of.iter().map(|n| c_string(n)).collect::<Result<_>>()?;
    let mut raw: Vec<*const c_char> = owned.iter().map(|n| n.as_ptr()).collect();
    // SAFETY: terminated strings that live through the call; MLX copies them.
    Ok(Names(unsafe { sys::mlx_vector_string_new_data(raw.as_mut_ptr(), raw.len()) }))
}

/// Template arguments: numbers by name.
#[derive(Default)]
struct Sizes(Vec<(CString, i32)>);

impl Sizes {
    fn new(of: &[(&CStr, i32)]) -> Sizes {
        Sizes(of.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect())
    }

    /// What `LOAF_AT(name, ..)` reads.
    fn place(mut self, name: &str, p: &Place) -> Result<Sizes> {
        for (part, n) in [("W", p.width), ("A", p.at), ("D", p.dim), ("S", p.stride)] {
            self.0.push((c_string(&format!("{name}_{part}"))?, n));
        }
        Ok(self)
    }
}

/// One launch: blocks of `group` threads, and the results' shapes and types.
struct Launch<'a> {
    blocks: i32,
    group: [i32; 2],
    sizes: Sizes,
    results: &'a [(&'a [i32], Type)],
}

fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}

impl Kernel {
    fn new(device: Device, name: &CStr, inputs: &[&str], outputs: &[&str], body: &str) -> Result<Option<Kernel>> {
        let (inputs, outputs, name) = (names(inputs)?, names(outputs)?, name.as_ptr());
        // SAFETY: live handles and terminated strings, which MLX copies.
        Ok(unsafe {
            match device {
                Device::Cpu => None,
                Device::Cuda => {
                    let source = c_string(&format!("{CUDA}{COMMON}{body}"))?;
                    let (source, none) = (source.as_ptr(), c"".as_ptr());
                    Some(Kernel::Cuda(sys::mlx_fast_cuda_kernel_new(name, inputs.0, outputs.0, source, none, true, 0)))
                }
                Device::Metal => {
                    let source = c_string(&format!("{METAL}{COMMON}{body}"))?;
                    let (source, none) = (source.as_ptr(), c"".as_ptr());
                    let kernel = sys::mlx_fast_metal_kernel_new(name, inputs.0, outputs.0, source, none, true, false);
                    Some(Kernel::Metal(kernel))
                }
            }
        })
    }

    fn launch<const N: usize>(&self, m: &Mlx, inputs: &[&Array], l: &Launch<'_>) -> Result<[Array; N]> {
        // MLX finds a compiled kernel by name and template arguments: types of operands must be among them. They are `I0`, `I1`,
        // .. in a kernel, those of results `O0`, ..
        let of = |letter: char, i: usize| c_string(&format!("{letter}{i}"));
        let mut types = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            types.push((of('I', i)?, input.raw_type()));
        }
        for (i, (_, kind)) in l.results.iter().enumerate() {
            types.push((of('O', i)?, kind.raw()));
        }
        let inputs = Arrays::new(inputs.iter().copied());
        let mut out = Arrays::empty();
        // The two interfaces have the same functions under two names.
        macro_rules! apply {
            ($kernel:expr, $new:ident, $output:ident, $int:ident, $type:ident, $grid:ident, $group:ident, $apply:ident, $free:ident) => {{
                let config = sys::$new();
                for (shape, kind) in l.results {
                    sys::$output(config, shape.as_ptr(), shape.len(), kind.raw());
                }
                for (name, size) in &l.sizes.0 {
                    sys::$int(config, name.as_ptr(), *size);
                }
                for (name, kind) in &types {
                    sys::$type(config, name.as_ptr(), *kind);
                }
                sys::$grid(config, l.blocks * l.group[0], l.group[1], 1);
                sys::$group(config, l.group[0], l.group[1], 1);
                let status = sys::$apply(&mut out.0, *$kernel, inputs.0, config, m.stream);
                sys::$free(config);
                check(status)?;
            }};
        }
        // SAFETY: live handles; callers check that extents are what the kernel is written for.
        unsafe {
            match self {
                Kernel::Cuda(k) => apply!(
                    k,
                    mlx_fast_cuda_kernel_config_new,
                    mlx_fast_cuda_kernel_config_add_output_arg,
                    mlx_fast_cuda_kernel_config_add_template_arg_int,
                    mlx_fast_cuda_kernel_config_add_template_arg_dtype,
                    mlx_fast_cuda_kernel_config_set_grid,
                    mlx_fast_cuda_kernel_config_set_thread_group,
                    mlx_fast_cuda_kernel_apply,
                    mlx_fast_cuda_kernel_config_free
                ),
                Kernel::Metal(k) => apply!(
                    k,
                    mlx_fast_metal_kernel_config_new,
                    mlx_fast_metal_kernel_config_add_output_arg,
                    mlx_fast_metal_kernel_config_add_template_arg_int,
                    mlx_fast_metal_kernel_config_add_template_arg_dtype,
                    mlx_fast_metal_kernel_config_set_grid,
                    mlx_fast_metal_kernel_config_set_thread_group,
                    mlx_fast_metal_kernel_apply,
                    mlx_fast_metal_kernel_config_free
                ),
            }
        }
        out.to_vec()?.try_into().map_err(|_| strange())
    }
}

/// Registers kernels: field = name, inputs, results, body.
macro_rules! kernels {
    ($($field:ident = $name:literal, $inputs:expr, $outputs:expr, $body:expr;)*) => {
        struct All { $($field: Kernel,)* }

        impl All {
            fn new(device: Device) -> Result<Option<All>> {
                $(let Some($field) = Kernel::new(device, $name, &$inputs, &$outputs, $body)? else { return Ok(None) };)*
                Ok(Some(All { $($field,)* }))
            }
        }
    };
}

kernels! {
    embed = c"loaf_embed", ["ids", "codes", "scales", "biases"], ["out"], rows::EMBED;
    add_norm = c"loaf_add_norm", ["left", "right", "weight"], ["total", "out"], rows::ADD_NORM;
    gate = c"loaf_gate", ["a", "b"], ["out"], rows::GATE;
    norm_gate = c"loaf_norm_gate", ["a", "b", "weight"], ["out"], rows::NORM_GATE;
    top_k = c"loaf_top_k", ["scores"], ["ids", "weights"], rows::TOP_K;
    mix = c"loaf_mix", ["slots", "weights", "shared", "open"], ["out"], rows::MIX;
    scan = c"loaf_scan_logits", ["logits"], ["best", "place", "most", "total"], rows::SCAN;
    pick = c"loaf_pick", ["best", "place", "most", "total"], ["token", "log_prob"], rows::PICK;
    heads = c"loaf_heads", ["q", "k", "v", "q_weight", "k_weight", "table", "keys", "values", "pos"], ["out"], attention::HEADS;
    attend = c"loaf_attend", ["q", "keys", "values", "last"], ["out"], attention::ATTEND;
    merge = c"loaf_merge", ["parts"], ["out"], attention::MERGE;
    conv = c"loaf_conv", ["a", "taps", "before", "valid"], ["out", "after"], delta::CONV;
    prepare = c"loaf_delta_prepare", ["q", "k", "a", "b", "a_log", "dt"], ["q_out", "k_out", "log_decay", "beta"], delta::PREPARE;
    step = c"loaf_delta_step", ["q", "k", "v", "log_decay", "beta", "state"], ["out", "new_state"], delta::STEP;
}

/// The kernels of a device.
pub struct Kernels {
    all: Option<All>,
    twins: bool,
    device: Device,
    used: RefCell<BTreeMap<&'static str, usize>>,
}

// SAFETY: as for `Array`.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Registers the device's kernels; they are compiled when first used.
    ///
    /// # Errors
    /// What MLX says.
    pub fn new(device: Device) -> Result<Kernels> {
        Ok(Kernels { all: All::new(device)?, twins: false, device, used: RefCell::default() })
    }

    /// What the kernels are to compute, in operations.
    pub fn twins(device: Device) -> Kernels {
        Kernels { all: None, twins: true, device, used: RefCell::default() }
    }

    /// Whether there are any.
    pub fn exist(&self) -> bool {
        self.all.is_some() || self.twins
    }

    /// How often each was taken, over all graphs that were lowered.
    pub fn used(&self) -> BTreeMap<&'static str, usize> {
        self.used.borrow().clone()
    }

    fn count(&self, name: &'static str) {
        *self.used.borrow_mut().entry(name).or_insert(0) += 1;
    }

    /// Where they run.
    pub fn device(&self) -> Device {
        self.device
    }
}
