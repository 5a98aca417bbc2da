//! Our own kernels for MLX's GPU devices: Metal and CUDA from one source.
//!
//! One kernel so far: a step of the gated delta rule, which as separate operations would read and write the state several
//! times. A block computes 32 columns of one value head's state; its eight rows of threads share the key dimension, each holding
//! its part of the columns in registers, so that the state is read once and written once.
//!
//! On the CPU device, and for head sizes the kernel is not written for, there is none: the caller uses operations.

use std::ffi::{CString, c_char};

use mlx_sys as sys;

use super::array::{Array, Arrays, Mlx, Result, c_string, check};
use super::delta::Scan;
use super::device::Device;

/// Parts the key dimension is cut into, and columns of a block.
const PARTS: i32 = 8;
const COLUMNS: i32 = 32;

const CUDA: &str = "
  const int column_in_block = threadIdx.x, part = threadIdx.y, block = blockIdx.x;
  __shared__ float partial[8][32];
  #define LOAF_SYNC __syncthreads()
";

const METAL: &str = "
  const int column_in_block = thread_position_in_threadgroup.x, part = thread_position_in_threadgroup.y;
  const int block = threadgroup_position_in_grid.x;
  threadgroup float partial[8][32];
  #define LOAF_SYNC threadgroup_barrier(mem_flags::mem_threadgroup)
";

/// Operands and extents are as in `delta.rs`; template arguments: HK, HV key and value heads, K, V their sizes.
const DELTA_STEP: &str = "
  const int head = block / (V / 32), column = (block % (V / 32)) * 32 + column_in_block;
  const int key = (head / (HV / HK)) * K + part * (K / 8);
  const int first = (head * K + part * (K / 8)) * V + column;
  const float decay = exp(log_decay[head]);
  float s[K / 8];
  float sum = 0.0f;
  for (int i = 0; i < K / 8; ++i) {
    s[i] = decay * state[first + i * V];
    sum += s[i] * k[key + i];
  }
  partial[part][column_in_block] = sum;
  LOAF_SYNC;
  float recalled = 0.0f;
  for (int p = 0; p < 8; ++p) recalled += partial[p][column_in_block];
  const float delta = beta[head] * (v[head * V + column] - recalled);
  sum = 0.0f;
  for (int i = 0; i < K / 8; ++i) {
    s[i] += k[key + i] * delta;
    new_state[first + i * V] = s[i];
    sum += s[i] * q[key + i];
  }
  LOAF_SYNC;
  partial[part][column_in_block] = sum;
  LOAF_SYNC;
  if (part == 0) {
    float o = 0.0f;
    for (int p = 0; p < 8; ++p) o += partial[p][column_in_block];
    out[head * V + column] = o;
  }
";

const INPUTS: [&str; 6] = ["q", "k", "v", "log_decay", "beta", "state"];
const OUTPUTS: [&str; 2] = ["out", "new_state"];

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

/// The kernels of a device.
pub struct Kernels {
    delta: Option<Kernel>,
}

// SAFETY: as for `Array`.
unsafe impl Send for Kernels {}

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

impl Kernels {
    /// Registers the device's kernels; they are compiled when first used.
    pub fn new(device: Device) -> Result<Kernels> {
        let (inputs, outputs, header) = (names(&INPUTS)?, names(&OUTPUTS)?, c_string("")?);
        let name = c"loaf_delta_step".as_ptr();
        // SAFETY: live handles and terminated strings.
        let delta = unsafe {
            match device {
                Device::Cpu => None,
                Device::Cuda => {
                    let source = c_string(&format!("{CUDA}{DELTA_STEP}"))?;
                    let k = sys::mlx_fast_cuda_kernel_new(
                        name, inputs.0, outputs.0, source.as_ptr(), header.as_ptr(), true, 0,
                    );
                    Some(Kernel::Cuda(k))
                }
                Device::Metal => {
                    let source = c_string(&format!("{METAL}{DELTA_STEP}"))?;
                    let k = sys::mlx_fast_metal_kernel_new(
                        name, inputs.0, outputs.0, source.as_ptr(), header.as_ptr(), true, false,
                    );
                    Some(Kernel::Metal(k))
                }
            }
        };
        Ok(Kernels { delta })
    }

    /// [`super::delta::step`] in one launch; `None` where there is no kernel for it.
    pub fn delta_step(&self, m: &Mlx, s: &Scan) -> Result<Option<(Array, Array)>> {
        let [rows, k_heads, v_heads, k_dim, v_dim] = s.extents();
        let Some(kernel) = &self.delta else { return Ok(None) };
        if rows != 1 || k_dim % PARTS != 0 || k_dim > 256 || v_dim % COLUMNS != 0 {
            return Ok(None);
        }
        let inputs = Arrays::new([&s.q, &s.k, &s.v, &s.log_decay, &s.beta, &s.state]);
        let shapes = [[1, v_heads, v_dim], [v_heads, k_dim, v_dim]];
        let sizes = [(c"HK", k_heads), (c"HV", v_heads), (c"K", k_dim), (c"V", v_dim)];
        let blocks = v_heads * (v_dim / COLUMNS);
        let float = sys::mlx_dtype__MLX_FLOAT32;
        let mut out = Arrays::empty();
        // The two interfaces have the same functions under two names.
        macro_rules! apply {
            ($kernel:expr, $new:ident, $output:ident, $int:ident, $grid:ident, $group:ident, $apply:ident, $free:ident) => {{
                let config = sys::$new();
                for shape in &shapes {
                    sys::$output(config, shape.as_ptr(), shape.len(), float);
                }
                for (name, size) in sizes {
                    sys::$int(config, name.as_ptr(), size);
                }
                sys::$grid(config, blocks * COLUMNS, PARTS, 1);
                sys::$group(config, COLUMNS, PARTS, 1);
                let status = sys::$apply(&mut out.0, *$kernel, inputs.0, config, m.stream);
                sys::$free(config);
                check(status)?;
            }};
        }
        // SAFETY: live handles; the extents were checked to be what the kernel is written for.
        unsafe {
            match kernel {
                Kernel::Cuda(k) => apply!(
                    k,
                    mlx_fast_cuda_kernel_config_new,
                    mlx_fast_cuda_kernel_config_add_output_arg,
                    mlx_fast_cuda_kernel_config_add_template_arg_int,
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
                    mlx_fast_metal_kernel_config_set_grid,
                    mlx_fast_metal_kernel_config_set_thread_group,
                    mlx_fast_metal_kernel_apply,
                    mlx_fast_metal_kernel_config_free
                ),
            }
        }
        let [y, state] = <[Array; 2]>::try_from(out.to_vec()?).map_err(|_| super::array::MlxError("a kernel with other results".into()))?;
        Ok(Some((y, state)))
    }
}
