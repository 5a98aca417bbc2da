//! One table of kernels per instruction set: the generic algorithms, compiled with that set's features.
//!
//! Only the functions made here carry `#[target_feature]`; everything they call is `#[inline(always)]` and so
//! takes their features on. A table is handed out by [`super::Kernels`] only on a CPU that has the features.

use loaf_formats::dtype::WeightFormat;

use super::simd::layout;

/// Layout and group size under which the integer matmuls take a format; `None` for formats without integer codes.
pub(super) fn quant_case(format: u64) -> Option<(u8, usize)> {
    match WeightFormat::from_code(format)? {
        WeightFormat::Affine { bits: 4, group, .. } if group >= 64 => Some((layout::Q4_WIDE, group.into())),
        WeightFormat::Affine { bits, group, .. } => Some((bits, group.into())),
        WeightFormat::Mxfp4 => Some((layout::E2M1, 32)),
        WeightFormat::Nvfp4 => Some((layout::E2M1_HALVES, 16)),
        WeightFormat::Dense(_) | WeightFormat::Mxfp8 => None,
    }
}

/// Defines a module whose `table()` holds every op compiled for one [`super::simd::Simd`], under one attribute.
macro_rules! isa {
    ($module:ident, $simd:ty, $attr:meta) => {
        pub(super) mod $module {
            use std::ops::Range;

            use loaf_formats::op::{OPS, OpKind};

            use crate::kernels::isa::quant_case;
            use crate::kernels::simd::layout;
            use crate::kernels::{Kernel, OpCall, attention, dense, elementwise, quant, recurrent};

            isa!(@functions $attr, $simd,
                Embed = elementwise::embed, RmsNorm = elementwise::rms_norm, AddRmsNorm = elementwise::add_rms_norm,
                Add = elementwise::add, Mul = elementwise::mul, Silu = elementwise::silu,
                Sigmoid = elementwise::sigmoid, SiluMul = elementwise::silu_mul,
                SigmoidMul = elementwise::sigmoid_mul, MulRows = elementwise::mul_rows,
                Quantize = elementwise::quantize, LinearDense = dense::linear, ExpertSort = elementwise::expert_sort,
                ExpertLinearDense = dense::expert_linear, WeightedSum = elementwise::weighted_sum,
                Softmax = elementwise::softmax, TopK = elementwise::top_k, RopeTable = elementwise::rope_table,
                Rope = elementwise::rope, KvWrite = elementwise::kv_write, Attention = attention::attention,
                Conv = recurrent::conv, ConvSilu = recurrent::conv_silu, L2Norm = elementwise::l2_norm,
                GdnGates = elementwise::gdn_gates, GdnScan = recurrent::gdn_scan,
                SelectRows = elementwise::select_rows,
            );
            isa!(@quant $attr, $simd,
                (2, 32) (2, 64) (2, 128) (3, 32) (3, 64) (3, 128) (5, 32) (5, 64) (5, 128) (6, 32) (6, 64) (6, 128)
                (8, 32) (8, 64) (8, 128) (4, 32) (44, 64) (44, 128) (14, 32) (24, 16));
        }
    };
    (@functions $attr:meta, $simd:ty, $($kind:ident = $module:ident :: $name:ident),* $(,)?) => {
        $(
            #[$attr]
            #[allow(non_snake_case, reason = "named after the op")]
            unsafe fn $kind(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
                // SAFETY: the kernel's contract, passed on.
                unsafe { $module::$name::<$simd>(call, units, scratch) }
            }
        )*

        /// Graph-only ops have nothing to do.
        unsafe fn nothing(_: &OpCall<'_>, _: Range<usize>, _: &mut [u8]) {}

        /// The kernel of every op.
        pub(in crate::kernels) fn table() -> [Kernel; OPS.len()] {
            let mut table: [Kernel; OPS.len()] = [nothing; OPS.len()];
            $( table[OpKind::$kind as usize] = $kind; )*
            table[OpKind::LinearQuant as usize] = product;
            table[OpKind::ExpertLinearQuant as usize] = product;
            table
        }
    };
    (@quant $attr:meta, $simd:ty, $(($kind:literal, $group:literal))*) => {
        #[$attr]
        unsafe fn case<const KIND: u8, const GROUP: usize>(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
            // SAFETY: the kernel's contract, passed on.
            unsafe { quant::product::<$simd, KIND, GROUP>(call, units, scratch) }
        }

        unsafe fn product(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
            const _: () = assert!(layout::Q4_WIDE == 44 && layout::E2M1 == 14 && layout::E2M1_HALVES == 24);
            let format = call.attrs[if call.kind == OpKind::LinearQuant { 3 } else { 5 }];
            // SAFETY: the kernel's contract, passed on.
            unsafe {
                match quant_case(format) {
                    $( Some(($kind, $group)) => case::<$kind, $group>(call, units, scratch), )*
                    // No other format becomes this op.
                    _ => {}
                }
            }
        }
    };
}

isa!(scalar, crate::kernels::scalar::Scalar, inline(never));
#[cfg(target_arch = "x86_64")]
isa!(avx2, crate::kernels::avx2::Avx2, target_feature(enable = "avx2,fma,f16c"));
