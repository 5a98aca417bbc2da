//! The text of our own kernels for MLX's GPU devices: Metal and CUDA from one source.
//!
//! MLX takes a function's body and writes its signature: inputs and results by name, the extents of
//! an input `a` as `a_shape` where the body says so, sizes and types as template arguments. A body
//! here says `x` and `y` for a thread in its block, a row of threads being one warp (Metal says
//! SIMD group), `block` for the block (Metal says threadgroup), and `LOAF_` words for what the two
//! languages call differently: [`METAL`] and [`CUDA`] define them.
//!
//! Nothing here knows MLX, so this is compiled into every build. The test `metal` of this crate
//! compiles these very bodies as C++, with a shim for Metal's words, and compares what they
//! compute.

use std::ffi::CStr;

pub mod attention;
pub mod delta;
pub mod rows;

/// What the words of the kernels are in CUDA.
pub const CUDA: &str = "
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

/// What they are in Metal.
pub const METAL: &str = "
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

/// Element `e` of row `r` of the view `name`, whose row has `name_W` elements, of which it takes
/// heads of `name_D` from `name_A` on, `name_S` apart; and sigmoid.
pub const COMMON: &str = "
  #define LOAF_AT(name, r, e) (float)name[(r) * name##_W + name##_A + ((e) / name##_D) * name##_S + (e) % name##_D]
  #define LOAF_SIGMOID(value) (1.0f / (1.0f + LOAF_EXP(-(value))))
";

/// A kernel's text.
pub struct Source {
    /// The function's name; MLX adds template arguments to it.
    pub name: &'static CStr,
    /// Inputs; their types are `I0`, `I1`, .. in the body.
    pub inputs: &'static [&'static str],
    /// Results; their types are `O0`, `O1`, ..
    pub outputs: &'static [&'static str],
    /// The function's body, after the words it is written in.
    pub body: &'static str,
}

impl Source {
    /// The body that Metal compiles.
    pub fn metal(&self) -> String {
        format!("{METAL}{COMMON}{}", self.body)
    }

    /// The body that CUDA compiles.
    pub fn cuda(&self) -> String {
        format!("{CUDA}{COMMON}{}", self.body)
    }
}

/// A launch: how many blocks, and how many threads of a block along `x` and `y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: i32,
    /// Threads: 32, and the number of warps.
    pub group: [i32; 2],
}

impl Grid {
    /// Blocks of so many warps.
    const fn blocks(blocks: i32, warps: i32) -> Grid {
        Grid { blocks, group: [32, warps] }
    }

    /// At least `n` threads, 256 a block.
    const fn threads(n: i32) -> Grid {
        Grid::blocks((n + 255) / 256, 8)
    }

    /// At least `n` warps, four a block.
    const fn warps(n: i32) -> Grid {
        Grid::blocks((n + 3) / 4, 4)
    }
}
