//! Our own kernels for MLX's GPU devices: Metal and CUDA from one source.
//!
//! - A step of the gated delta rule, which as separate operations would read and write the state several times. A block computes 32
//!   columns of one value head's state; its eight rows of threads share the key dimension, each holding its part of
//!   the columns in registers, so that the state is read once and written once.
//! - Attention of one query row up to a position that only the device knows. MLX's own would read the caches' whole capacity behind a
//!   mask. A block takes one query head; its warps take positions in turns, and their partial results are merged at the end.
//!
//! On the CPU device, and for head sizes a kernel is not written for, there is none: the caller uses operations.

use std::ffi::{CStr, CString, c_char};

use mlx_sys as sys;

use super::array::{Array, Arrays, Mlx, MlxError, Result, Type, c_string, check};
use super::delta::Scan;
use super::device::Device;

/// Parts the key dimension is cut into, and columns of a block.
const PARTS: i32 = 8;
const COLUMNS: i32 = 32;
/// Warps of a block of attention.
const WARPS: i32 = 16;

const CUDA: &str = "
  const int x = threadIdx.x, y = threadIdx.y, block = blockIdx.x;
  #define LOAF_SHARED __shared__
  #define LOAF_SYNC __syncthreads()
  #define LOAF_EXP(value) expf(value)
  #define LOAF_LANES(value) for (int s = 16; s > 0; s /= 2) value += __shfl_xor_sync(0xffffffffu, value, s)
";

const METAL: &str = "
  const int x = thread_position_in_threadgroup.x, y = thread_position_in_threadgroup.y;
  const int block = threadgroup_position_in_grid.x;
  #define LOAF_SHARED threadgroup
  #define LOAF_SYNC threadgroup_barrier(mem_flags::mem_threadgroup)
  #define LOAF_EXP(value) metal::exp(value)
  #define LOAF_LANES(value) value = simd_sum(value)
";

/// Operands and extents are as in `delta.rs`; template arguments: HK, HV key and value heads, K, V their sizes.
const DELTA_STEP: &str = "
  LOAF_SHARED float partial[8][32];
  const int head = block / (V / 32), column = (block % (V / 32)) * 32 + x;
  const int key = (head / (HV / HK)) * K + y * (K / 8);
  const int first = (head * K + y * (K / 8)) * V + column;
  const float decay = LOAF_EXP(log_decay[head]);
  float s[K / 8];
  float sum = 0.0f;
  for (int i = 0; i < K / 8; ++i) {
    s[i] = decay * state[first + i * V];
    sum += s[i] * k[key + i];
  }
  partial[y][x] = sum;
  LOAF_SYNC;
  float recalled = 0.0f;
  for (int p = 0; p < 8; ++p) recalled += partial[p][x];
  const float delta = beta[head] * (v[head * V + column] - recalled);
  sum = 0.0f;
  for (int i = 0; i < K / 8; ++i) {
    s[i] += k[key + i] * delta;
    new_state[first + i * V] = s[i];
    sum += s[i] * q[key + i];
  }
  LOAF_SYNC;
  partial[y][x] = sum;
  LOAF_SYNC;
  if (y == 0) {
    float o = 0.0f;
    for (int p = 0; p < 8; ++p) o += partial[p][x];
    out[head * V + column] = o;
  }
";

/// `q` is `[H, D]`, `k` and `v` are `[KV, capacity, D]`, `last` the query's position, `scale` one float; positions after
/// `last - W` count, all of them if W is 0. 16 warps, as `WARPS` says.
const ATTEND: &str = "
  LOAF_SHARED float all[16][D];
  LOAF_SHARED float most[16];
  LOAF_SHARED float total[16];
  const int end = last[0] + 1, begin = (W > 0 && end > W) ? end - W : 0;
  const int cache = (block / (H / KV)) * k_shape[1] * D;
  float query[D / 32], sum[D / 32];
  for (int i = 0; i < D / 32; ++i) {
    query[i] = (float)q[block * D + i * 32 + x] * scale[0];
    sum[i] = 0.0f;
  }
  float max_score = -3.0e38f, weight = 0.0f;
  for (int p = begin + y; p < end; p += 16) {
    float score = 0.0f;
    for (int i = 0; i < D / 32; ++i) score += query[i] * (float)k[cache + p * D + i * 32 + x];
    LOAF_LANES(score);
    const float higher = score > max_score ? score : max_score;
    const float fade = LOAF_EXP(max_score - higher), w = LOAF_EXP(score - higher);
    max_score = higher;
    weight = weight * fade + w;
    for (int i = 0; i < D / 32; ++i) sum[i] = sum[i] * fade + w * (float)v[cache + p * D + i * 32 + x];
  }
  for (int i = 0; i < D / 32; ++i) all[y][i * 32 + x] = sum[i];
  if (x == 0) {
    most[y] = max_score;
    total[y] = weight;
  }
  LOAF_SYNC;
  for (int d = y * 32 + x; d < D; d += 16 * 32) {
    float high = most[0];
    for (int w = 1; w < 16; ++w) high = most[w] > high ? most[w] : high;
    float value = 0.0f, divisor = 0.0f;
    for (int w = 0; w < 16; ++w) {
      const float part = LOAF_EXP(most[w] - high);
      value += part * all[w][d];
      divisor += part * total[w];
    }
    out[block * D + d] = (T)(value / divisor);
  }
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

/// One launch: blocks of `group` threads, template arguments, the results' shapes and type.
struct Launch<'a> {
    blocks: i32,
    group: [i32; 2],
    sizes: &'a [(&'static CStr, i32)],
    shapes: &'a [&'a [i32]],
    kind: Type,
}

impl Kernel {
    fn new(device: Device, name: &CStr, inputs: &[&str], outputs: &[&str], body: &str) -> Result<Option<Kernel>> {
        let (inputs, outputs, name) = (names(inputs)?, names(outputs)?, name.as_ptr());
        // SAFETY: live handles and terminated strings, which MLX copies.
        Ok(unsafe {
            match device {
                Device::Cpu => None,
                Device::Cuda => {
                    let source = c_string(&format!("{CUDA}{body}"))?;
                    let (source, none) = (source.as_ptr(), c"".as_ptr());
                    Some(Kernel::Cuda(sys::mlx_fast_cuda_kernel_new(name, inputs.0, outputs.0, source, none, true, 0)))
                }
                Device::Metal => {
                    let source = c_string(&format!("{METAL}{body}"))?;
                    let (source, none) = (source.as_ptr(), c"".as_ptr());
                    let kernel = sys::mlx_fast_metal_kernel_new(name, inputs.0, outputs.0, source, none, true, false);
                    Some(Kernel::Metal(kernel))
                }
            }
        })
    }

    fn launch(&self, m: &Mlx, inputs: &[&Array], l: &Launch<'_>) -> Result<Vec<Array>> {
        let inputs = Arrays::new(inputs.iter().copied());
        let mut out = Arrays::empty();
        let kind = l.kind.raw();
        // The two interfaces have the same functions under two names.
        macro_rules! apply {
            ($kernel:expr, $new:ident, $output:ident, $int:ident, $type:ident, $grid:ident, $group:ident, $apply:ident, $free:ident) => {{
                let config = sys::$new();
                for shape in l.shapes {
                    sys::$output(config, shape.as_ptr(), shape.len(), kind);
                }
                for (name, size) in l.sizes {
                    sys::$int(config, name.as_ptr(), *size);
                }
                sys::$type(config, c"T".as_ptr(), kind);
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
        out.to_vec()
    }
}

/// The kernels of a device.
pub struct Kernels {
    delta: Option<Kernel>,
    attend: Option<Kernel>,
}

// SAFETY: as for `Array`.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Registers the device's kernels; they are compiled when first used.
    ///
    /// # Errors
    /// What MLX says.
    pub fn new(device: Device) -> Result<Kernels> {
        let delta = ["q", "k", "v", "log_decay", "beta", "state"];
        Ok(Kernels {
            delta: Kernel::new(device, c"loaf_delta_step", &delta, &["out", "new_state"], DELTA_STEP)?,
            attend: Kernel::new(device, c"loaf_attend", &["q", "k", "v", "last", "scale"], &["out"], ATTEND)?,
        })
    }

    /// [`super::delta::step`] in one launch; `None` where there is no kernel for it.
    ///
    /// # Errors
    /// What MLX says.
    pub fn delta_step(&self, m: &Mlx, s: &Scan) -> Result<Option<(Array, Array)>> {
        let [rows, k_heads, v_heads, k_dim, v_dim] = s.extents();
        let Some(kernel) = &self.delta else { return Ok(None) };
        if rows != 1 || k_dim % PARTS != 0 || k_dim > 256 || v_dim % COLUMNS != 0 {
            return Ok(None);
        }
        let launch = Launch {
            blocks: v_heads * (v_dim / COLUMNS),
            group: [COLUMNS, PARTS],
            sizes: &[(c"HK", k_heads), (c"HV", v_heads), (c"K", k_dim), (c"V", v_dim)],
            shapes: &[&[1, v_heads, v_dim], &[v_heads, k_dim, v_dim]],
            kind: Type::F32,
        };
        let out = kernel.launch(m, &[&s.q, &s.k, &s.v, &s.log_decay, &s.beta, &s.state], &launch)?;
        <[Array; 2]>::try_from(out).map(|[y, state]| Some((y, state))).map_err(|_| strange())
    }

    /// Attention of one row, `q` `[heads, dim]`, over caches `[kv_heads, capacity, dim]` of the same type up to position `last`
    /// (`i32[1]`); `None` where there is no kernel for it.
    ///
    /// # Errors
    /// What MLX says.
    pub fn attend(
        &self,
        m: &Mlx,
        [q, k, v]: [&Array; 3],
        last: &Array,
        scale: f32,
        window: i32,
        kind: Type,
    ) -> Result<Option<Array>> {
        let Some(kernel) = &self.attend else { return Ok(None) };
        let ([heads, dim], [kv_heads, ..]) = (&q.shape()[..], &k.shape()[..]) else { return Err(strange()) };
        let (heads, dim, kv_heads) = (*heads, *dim, *kv_heads);
        if dim % 32 != 0 || dim > 256 {
            return Ok(None);
        }
        let launch = Launch {
            blocks: heads,
            group: [32, WARPS],
            sizes: &[(c"H", heads), (c"KV", kv_heads), (c"D", dim), (c"W", window)],
            shapes: &[&[heads, dim]],
            kind,
        };
        let out = kernel.launch(m, &[q, k, v, last, &Array::from_slice(&[scale], &[1])], &launch)?;
        out.into_iter().next().map(Some).ok_or_else(strange)
    }
}

fn strange() -> MlxError {
    MlxError("a kernel with other operands or results".to_owned())
}
