//! Our own kernels for MLX's GPU devices: Metal and CUDA from one source.
//!
//! A decode step is bound by the number of launches, not by arithmetic, so what a plan has as
//! chains of small operations is one launch here: `rows` has what works row by row (embedding, add
//! and norm, gates, routing, choosing a token), `attention` norms, rotates and caches a layer's
//! heads and attends to them, `delta` is the gated delta rule. The recurrence, attention and
//! choosing a token keep what they need in registers. Every intermediate is f32.
//!
//! Their text is in [`mlx_text`], which knows nothing of MLX and is tested without a GPU.
//!
//! On the CPU device, and for sizes a kernel is not written for, there is none: the caller uses
//! operations. `reference` defines each kernel in operations, for tests. A kernel is compiled when
//! first used, in every process; so there are few, with sizes as template arguments, except the
//! number of rows.

mod attention;
mod delta;
mod operands;
mod reference;
mod rows;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};

use mlx_sys as sys;

use super::array::{Array, Arrays, Result, Type, c_string, check};
use super::device::Device;
use super::ops::Mlx;
use crate::backend::mlx_text::{self, Grid, Source};
use operands::strange;
pub use operands::{Act, Attend, Heads, Place, Prepare, Shared};

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

/// One launch, and the results' shapes and types.
struct Launch<'a> {
    grid: Grid,
    sizes: Sizes,
    results: &'a [(&'a [i32], Type)],
}

fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}

impl Kernel {
    fn new(device: Device, text: &Source) -> Result<Option<Kernel>> {
        let (inputs, outputs, name) = (names(text.inputs)?, names(text.outputs)?, text.name.as_ptr());
        // SAFETY: live handles and terminated strings, which MLX copies.
        Ok(unsafe {
            match device {
                Device::Cpu => None,
                Device::Cuda => {
                    let source = c_string(&text.cuda())?;
                    let (source, none) = (source.as_ptr(), c"".as_ptr());
                    Some(Kernel::Cuda(sys::mlx_fast_cuda_kernel_new(name, inputs.0, outputs.0, source, none, true, 0)))
                }
                Device::Metal => {
                    let source = c_string(&text.metal())?;
                    let (source, none) = (source.as_ptr(), c"".as_ptr());
                    let kernel = sys::mlx_fast_metal_kernel_new(name, inputs.0, outputs.0, source, none, true, false);
                    Some(Kernel::Metal(kernel))
                }
            }
        })
    }

    fn launch<const N: usize>(&self, m: &Mlx, inputs: &[&Array], l: &Launch<'_>) -> Result<[Array; N]> {
        // MLX finds a compiled kernel by name and template arguments: types of operands must be
        // among them. They are `I0`, `I1`, .. in a kernel, those of results `O0`, ..
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
                let [x, y] = l.grid.group;
                sys::$grid(config, l.grid.blocks * x, y, 1);
                sys::$group(config, x, y, 1);
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

/// Registers kernels: field = text.
macro_rules! kernels {
    ($($field:ident = $source:expr;)*) => {
        struct All { $($field: Kernel,)* }

        impl All {
            fn new(device: Device) -> Result<Option<All>> {
                $(let Some($field) = Kernel::new(device, &$source)? else { return Ok(None) };)*
                Ok(Some(All { $($field,)* }))
            }
        }
    };
}

kernels! {
    embed = mlx_text::rows::EMBED;
    add_norm = mlx_text::rows::ADD_NORM;
    gate = mlx_text::rows::GATE;
    norm_gate = mlx_text::rows::NORM_GATE;
    top_k = mlx_text::rows::TOP_K;
    mix = mlx_text::rows::MIX;
    scan = mlx_text::rows::SCAN;
    pick = mlx_text::rows::PICK;
    heads = mlx_text::attention::HEADS;
    attend = mlx_text::attention::ATTEND;
    merge = mlx_text::attention::MERGE;
    conv = mlx_text::delta::CONV;
    prepare = mlx_text::delta::PREPARE;
    step = mlx_text::delta::STEP;
}

/// The kernels of a device.
pub struct Kernels {
    all: Option<All>,
    reference: bool,
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
        Ok(Kernels { all: All::new(device)?, reference: false, device, used: RefCell::default() })
    }

    /// What the kernels are to compute, in operations.
    pub fn reference(device: Device) -> Kernels {
        Kernels { all: None, reference: true, device, used: RefCell::default() }
    }

    /// Whether there are any.
    pub fn exist(&self) -> bool {
        self.all.is_some() || self.reference
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
