//! One table of kernels per instruction set: the generic algorithms, compiled with that set's
//! features.
//!
//! Most of a program's size would be the integer matmuls, so they are compiled once per layout,
//! with the group sizes that models are published in known to the compiler and others taken as they
//! come.
//!
//! Only the functions made here carry `#[target_feature]`; everything they call is
//! `#[inline(always)]` and so takes their features on. A table is handed out by [`super::Kernels`]
//! only on a CPU that has the features.

use std::ops::Range;

use loaf_formats::dtype::WeightFormat;
#[cfg(target_arch = "x86_64")]
use loaf_formats::op::attention as attention_op;
use loaf_formats::op::{OP_COUNT, OpAttrs, OpKind, expert_linear, linear};

#[cfg(target_arch = "x86_64")]
use super::avx2::{Avx2, MADD, Products, VBMI, VEX};
#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
use super::blocks::{self, Fill};
#[cfg(target_arch = "aarch64")]
use super::neon::{Neon, Sdot, Smull, Usdot};
use super::quant::{Matrix, Packing, Panels, Row, Slots, Steps};
use super::rows::Rows;
use super::scalar::Scalar;
use super::scratch::align_frame;
use super::simd::layout;
use super::unit::Unit;
use super::{Kernel, OpCall, Round, Run, Split, attention, dense, elementwise, quant, recurrent};

/// Layout and group size under which the integer matmuls take a format; `None` for formats without
/// integer codes.
pub(super) fn quant_case(format: WeightFormat) -> Option<(u8, usize)> {
    match format {
        WeightFormat::Affine { bits: 4, group, .. } if group >= 64 => Some((layout::Q4_WIDE, group.into())),
        WeightFormat::Affine { bits, group, .. } => Some((bits, group.into())),
        WeightFormat::Mxfp4 => Some((layout::E2M1, 32)),
        WeightFormat::Nvfp4 => Some((layout::E2M1_HALVES, 16)),
        WeightFormat::Block(block) => Some((blocks::layout_of(block), block.group() as usize)),
        WeightFormat::Dense(_) | WeightFormat::Mxfp8 => None,
    }
}

/// Defines a module whose `table()` holds every op compiled for one [`super::simd::Simd`],
/// attention, dense matmuls and the scan for one [`super::wide::Wide`], under one attribute. The
/// integer matmuls follow as `layouts, groups => Rows`: one copy for each layout and group that is
/// a number, one for all multiples of a number where `times` follows it, one for all the others
/// where it is `_`.
macro_rules! isa {
    ($module:ident, $simd:ty, $wide:ty, $attr:meta, else $else:path, $($case:tt)*) => {
        pub(super) mod $module {
            use super::*;

            isa!(@functions $attr,
                Attention = attention::attention::<$wide>,
                Embed = elementwise::embed::<$simd>,
                RmsNorm = elementwise::rms_norm::<$simd>,
                AddRmsNorm = elementwise::add_rms_norm::<$simd>,
                Add = elementwise::add::<$simd>,
                Mul = elementwise::mul::<$simd>,
                Silu = elementwise::silu::<$simd>,
                Sigmoid = elementwise::sigmoid::<$simd>,
                SiluMul = elementwise::silu_mul::<$simd>,
                SigmoidMul = elementwise::sigmoid_mul::<$simd>,
                MulRows = elementwise::mul_rows::<$simd>,
                Quantize = elementwise::quantize::<$simd>,
                LinearDense = dense::linear::<$wide>,
                ExpertSort = elementwise::expert_sort::<$simd>,
                ExpertLinearDense = dense::expert_linear::<$wide>,
                WeightedSum = elementwise::weighted_sum::<$simd>,
                Softmax = elementwise::softmax::<$simd>,
                TopK = elementwise::top_k::<$simd>,
                RopeTable = elementwise::rope_table::<$simd>,
                Rope = elementwise::rope::<$simd>,
                KvWrite = elementwise::kv_write::<$simd>,
                Conv = recurrent::conv::<$simd>,
                ConvSilu = recurrent::conv_silu::<$simd>,
                L2Norm = elementwise::l2_norm::<$simd>,
                GdnGates = elementwise::gdn_gates::<$simd>,
                GdnScan = recurrent::gdn_scan::<$wide>,
                GatherRows = elementwise::gather_rows::<$simd>,
            );

            isa!(@products $attr, $else, $($case)*);

            /// Attention, for another set's table.
            #[allow(dead_code, reason = "few sets take another's")]
            pub(crate) const ATTENTION: Kernel = Attention;

            /// Attention cut by blocks.
            #[allow(dead_code, reason = "a set may do without")]
            pub(crate) const SPLIT: Split = Split { parts: split_parts, merge: split_merge };

            #[$attr]
            unsafe fn split_parts(
                call: &OpCall<'_>, run: &Run, round: Round, units: Range<usize>, shared: *mut f32, scratch: &mut [u8],
            ) {
                align();
                // SAFETY: the kernel's contract, passed on.
                unsafe { attention::split_parts::<$wide>(call, run, round, units, shared, scratch) }
            }

            #[$attr]
            unsafe fn split_merge(
                call: &OpCall<'_>, run: &Run, round: Round, units: Range<usize>, shared: *mut f32, scratch: &mut [u8],
            ) {
                align();
                // SAFETY: the kernel's contract, passed on.
                unsafe { attention::split_merge::<$wide>(call, run, round, units, shared, scratch) }
            }
        }
    };
    (@products $attr:meta, $else:path, $($case:tt)*) => {
        isa!(@steps $attr,
            permute(p: Packing, from: *const i8, inp: usize, to: *mut i8);
            arrange(p: Packing, from: *const i8, inp: usize, to: *mut i8);
            stream(m: &Matrix<'_>, first: usize, end: usize, x: &Row, codes: *const i8, panels: &Panels);
            tail_dots(p: Packing, tails: &[[u8; quant::TAIL]; 16], codes: *const i8, out: *mut u8);
            panelled(m: &Matrix<'_>, slots: &Slots<'_>, list: (*const u32, usize), panels: &Panels, units: Range<usize>););

        /// Parameters, for all layouts.
        #[$attr]
        unsafe fn parameters<S: Rows>(fill: &Fill) {
            align();
            // SAFETY: what `product` promises.
            unsafe { blocks::fill::<S>(fill) }
        }

        /// What one layout and group has of its own; zero stands for what the compiler does not
        /// know, and `PART` for groups that are some times as long.
        pub(super) const fn steps<S: Rows, const KIND: u8, const GROUP: usize, const PART: usize>() -> Steps {
            Steps {
                permute: permute::<S, KIND, GROUP, PART>,
                arrange: arrange::<S, KIND, GROUP, PART>,
                stream: stream::<S, KIND, GROUP, PART>,
                tail_dots: tail_dots::<S, KIND, GROUP, PART>,
                panelled: panelled::<S, KIND, GROUP, PART>,
                fill: parameters::<S>,
            }
        }

        #[$attr]
        pub(super) unsafe fn run<S: Rows>(
            steps: &Steps, kind: u8, group: usize, unit: Option<&'static Unit>, call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8],
        ) {
            align();
            // SAFETY: the kernel's contract, passed on.
            unsafe { quant::product::<S>(kind, group, (steps, unit), call, units, scratch) }
        }

        pub(crate) unsafe fn product(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
            // SAFETY: the kernel's contract, passed on.
            unsafe { product_on(None, call, units, scratch) }
        }

        /// [`product`], many rows of it on a matrix unit, which the CPU has.
        pub(crate) unsafe fn product_on(
            unit: Option<&'static Unit>, call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8],
        ) {
            let format = match call.kind {
                OpKind::LinearQuant => linear::Attrs::of(call.attrs).format,
                _ => expert_linear::Attrs::of(call.attrs).format,
            };
            // No other format becomes this op.
            let Some((kind, group)) = quant_case(format) else { return };
            // SAFETY: the kernel's contract, passed on.
            unsafe { isa!(@match $else, (kind, group, unit, call, units, scratch) {} $($case)*) }
        }
    };
    (@match $else:path, ($k:ident, $g:ident, $($args:ident),*) { $($arms:tt)* }) => {
        match ($k, $g) {
            $($arms)*
            #[allow(unreachable_patterns, reason = "a set may know every layout")]
            _ => $else($($args),*),
        }
    };
    (@match $else:path, ($k:ident, $g:ident, $($args:ident),*) { $($arms:tt)* } _, _ => $rows:ty; $($rest:tt)*) => {
        isa!(@match $else, ($k, $g, $($args),*) {
            $($arms)*
            _ => isa!(@run $rows, 0, 0, 0; $k, $g, $($args),*),
        } $($rest)*)
    };
    (@match $else:path, ($k:ident, $g:ident, $($args:ident),*) { $($arms:tt)* } $kind:literal, _ => $rows:ty; $($rest:tt)*) => {
        isa!(@match $else, ($k, $g, $($args),*) {
            $($arms)*
            ($kind, _) => isa!(@run $rows, $kind, 0, 0; $k, $g, $($args),*),
        } $($rest)*)
    };
    (@match $else:path, ($k:ident, $g:ident, $($args:ident),*) { $($arms:tt)* } $kind:literal, $group:literal => $rows:ty; $($rest:tt)*) => {
        isa!(@match $else, ($k, $g, $($args),*) {
            $($arms)*
            ($kind, $group) => isa!(@run $rows, $kind, $group, 0; $k, $g, $($args),*),
        } $($rest)*)
    };
    (@match $else:path, ($k:ident, $g:ident, $($args:ident),*) { $($arms:tt)* } $kind:literal, $part:literal times => $rows:ty; $($rest:tt)*) => {
        isa!(@match $else, ($k, $g, $($args),*) {
            $($arms)*
            ($kind, _) if $g % $part == 0 => isa!(@run $rows, $kind, 0, $part; $k, $g, $($args),*),
        } $($rest)*)
    };
    (@run $rows:ty, $kind:literal, $group:literal, $part:literal; $($args:ident),*) => {
        run::<$rows>(&const { steps::<$rows, $kind, $group, $part>() }, $($args),*)
    };
    (@steps $attr:meta, $($name:ident($($arg:ident: $type:ty),*);)*) => { $(
        #[$attr]
        unsafe fn $name<S: Rows, const KIND: u8, const GROUP: usize, const PART: usize>($($arg: $type),*) {
            align();
            // SAFETY: the kernel's contract, passed on.
            unsafe { quant::$name::<S, KIND, GROUP, PART>($($arg),*) }
        }
    )* };
    (@functions $attr:meta, $($kind:ident = $module:ident :: $name:ident :: <$set:ty>),* $(,)?) => {
        $(
            #[$attr]
            #[allow(non_snake_case, reason = "named after the op")]
            unsafe fn $kind(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
                align();
                // SAFETY: the kernel's contract, passed on.
                unsafe { $module::$name::<$set>(call, units, scratch) }
            }
        )*

        /// An op that has no kernel here does not compile, unless it is for graphs alone.
        fn kernel(kind: OpKind) -> Option<Kernel> {
            match kind {
                $( OpKind::$kind => Some($kind), )*
                OpKind::LinearQuant | OpKind::ExpertLinearQuant => Some(product),
                OpKind::View | OpKind::Linear | OpKind::ExpertLinear => None,
            }
        }

        /// The kernel of every op.
        pub(crate) fn table() -> [Option<Kernel>; OP_COUNT] {
            std::array::from_fn(|i| kernel(OpKind::ALL[i]))
        }
    };
}

/// [`align_frame`] of whatever may keep vectors on the stack, except in the small program, which has
/// no room for it and aligns what loses most.
#[inline(always)]
fn align() {
    if cfg!(not(loaf_small)) {
        align_frame();
    }
}

/// For sets that know every layout.
unsafe fn no_product(_: Option<&'static Unit>, _: &OpCall<'_>, _: Range<usize>, _: &mut [u8]) {}

const _: () = assert!(layout::Q4_WIDE == 44 && layout::E2M1 == 14 && layout::E2M1_HALVES == 24);
const _: () =
    assert!(layout::HALVES_2 == 22 && layout::HALVES_3 == 23 && layout::HALVES_6 == 26 && layout::TABLE == 34);

isa!(scalar, Scalar, Scalar, inline(never), else no_product,
    _, _ => Scalar;);
#[cfg(target_arch = "x86_64")]
isa!(avx2, Avx2, Avx2, target_feature(enable = "avx2,fma,f16c"), else no_product,
    44, 64 => Products<MADD>; 44, 64 times => Products<MADD>; 4, 32 => Products<MADD>; 2, 32 => Products<MADD>;
    2, 64 => Products<MADD>; 2, 64 times => Products<MADD>; 3, 32 => Products<MADD>; 3, 64 => Products<MADD>; 3, 64 times => Products<MADD>;
    5, 32 => Products<MADD>; 5, 64 => Products<MADD>; 5, 64 times => Products<MADD>; 6, 32 => Products<MADD>;
    6, 64 => Products<MADD>; 6, 64 times => Products<MADD>; 8, 32 => Products<MADD>; 8, 64 => Products<MADD>; 8, 64 times => Products<MADD>;
    14, 32 => Products<MADD>; 24, 16 => Products<MADD>;
    22, 16 => Products<MADD>; 23, 16 => Products<MADD>; 26, 16 => Products<MADD>; 34, 32 => Products<MADD>;);

/// Integer matmuls with the dot instructions of AVX-VNNI.
#[cfg(target_arch = "x86_64")]
pub(super) mod avx_vnni {
    use super::*;

    isa!(@products target_feature(enable = "avx2,fma,f16c,avxvnni"), avx2::product_on,
        44, 64 => Products<VEX>; 4, 32 => Products<VEX>; 2, 32 => Products<VEX>;
        2, 64 => Products<VEX>; 3, 32 => Products<VEX>; 3, 64 => Products<VEX>;
        5, 32 => Products<VEX>; 5, 64 => Products<VEX>; 6, 32 => Products<VEX>;
        6, 64 => Products<VEX>; 8, 32 => Products<VEX>; 8, 64 => Products<VEX>;
        14, 32 => Products<VEX>; 24, 16 => Products<VEX>;
        22, 16 => Products<VEX>; 23, 16 => Products<VEX>; 26, 16 => Products<VEX>; 34, 32 => Products<VEX>;);
}

/// The same instructions as AVX-512 encodes them: of the layouts that the AVX-512 table has no
/// better kernel for, and in debug builds of all, so that CPUs with AVX-512 test them.
#[cfg(target_arch = "x86_64")]
pub(super) mod avx_vnni_evex {
    use super::super::avx2::EVEX;
    use super::*;

    #[cfg(not(debug_assertions))]
    isa!(@products target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512vnni"), avx2::product_on,
        2, 64 => Products<EVEX>; 3, 64 => Products<EVEX>; 5, 32 => Products<EVEX>; 5, 64 => Products<EVEX>;
        6, 64 => Products<EVEX>; 22, 16 => Products<EVEX>; 23, 16 => Products<EVEX>; 26, 16 => Products<EVEX>;);

    #[cfg(debug_assertions)]
    isa!(@products target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512vnni"), avx2::product_on,
        44, 64 => Products<EVEX>; 4, 32 => Products<EVEX>; 2, 64 => Products<EVEX>;
        3, 64 => Products<EVEX>; 5, 32 => Products<EVEX>; 5, 64 => Products<EVEX>;
        6, 64 => Products<EVEX>; 8, 32 => Products<EVEX>; 8, 64 => Products<EVEX>;
        14, 32 => Products<EVEX>; 24, 16 => Products<EVEX>;
        22, 16 => Products<EVEX>; 23, 16 => Products<EVEX>; 26, 16 => Products<EVEX>; 34, 32 => Products<EVEX>;);
}

// Everything but matmuls, attention and the scan keeps its eight lanes; here it has thirty-two
// registers. Widths that no 512-bit instruction unpacks well without VBMI are those of half as long
// vectors.
#[cfg(target_arch = "x86_64")]
isa!(avx512, Avx2, Avx512<false>,
    target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"), else avx_vnni_evex::product_on,
    44, 64 => Avx512<false>; 44, 128 => Avx512<false>; 4, 32 => Avx512<false>;
    8, 64 => Avx512<false>; 8, 32 times => Avx512<false>;
    14, 32 => Avx512<false>; 24, 16 => Avx512<false>; 34, 32 => Avx512<false>;);

/// Integer matmuls of the widths that VBMI unpacks in three instructions; those of [`avx512`]
/// otherwise.
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512_vbmi {
    use super::*;

    isa!(@products target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi"),
        avx512::product_on,
        2, 64 => Avx512<true>; 2, 128 => Avx512<true>; 2, _ => Avx512<true>; 3, 64 => Avx512<true>;
        5, 32 => Avx512<true>; 5, 64 => Avx512<true>; 5, _ => Avx512<true>; 6, 64 => Avx512<true>; 6, _ => Avx512<true>;
        22, 16 => Avx512<true>; 23, 16 => Avx512<true>; 26, 16 => Avx512<true>;);
}

/// Integer matmuls of many rows on AMX's tiles, others as [`avx512_vbmi`] has them.
#[cfg(target_arch = "x86_64")]
pub(super) mod amx {
    use super::*;

    pub(crate) unsafe fn product(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
        // SAFETY: the kernel's contract, passed on.
        unsafe { avx512_vbmi::product_on(Some(&crate::amx::AMX), call, units, scratch) }
    }
}

/// What CPUs that have all of AVX-512 but run it on units of 256 bits take from AVX2. One to three
/// rows of activations are multiplied by its kernels, which read eight weight rows side by side,
/// not sixteen, and so get nearly twice as much from memory there. One row of few query heads goes
/// over a cache without copies there.
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512_halves {
    use super::*;

    isa!(@steps target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi"),
        arrange(p: Packing, from: *const i8, inp: usize, to: *mut i8);
        stream(m: &Matrix<'_>, first: usize, end: usize, x: &Row, codes: *const i8, panels: &Panels);
        tail_dots(p: Packing, tails: &[[u8; quant::TAIL]; 16], codes: *const i8, out: *mut u8););

    /// [`avx2`]'s, but for products of one row by dot instructions and VBMI.
    const fn steps<const KIND: u8, const GROUP: usize>() -> Steps {
        type One = Products<VBMI>;
        Steps {
            arrange: arrange::<One, KIND, GROUP, 0>,
            stream: stream::<One, KIND, GROUP, 0>,
            tail_dots: tail_dots::<One, KIND, GROUP, 0>,
            ..avx2::steps::<Products<MADD>, KIND, GROUP, 0>()
        }
    }

    /// Products of few rows: of the layouts for which AVX2 has many operations, by [`steps`].
    unsafe fn few(format: WeightFormat, call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
        // No other format becomes this op.
        let Some((kind, group)) = quant_case(format) else { return };
        let steps = match (kind, group) {
            (5, 32) => &const { steps::<5, 32>() },
            (6, 64) => &const { steps::<6, 64>() },
            (layout::HALVES_6, 16) => &const { steps::<{ layout::HALVES_6 }, 16>() },
            // SAFETY: the kernel's contract, passed on.
            _ => return unsafe { avx2::product(call, units, scratch) },
        };
        // SAFETY: as above; all else of a product is AVX2's.
        unsafe { avx2::run::<Products<MADD>>(steps, kind, group, None, call, units, scratch) }
    }

    pub(crate) unsafe fn product(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
        // Of an expert as many as there are rows, at most.
        let (rows, format) = match call.kind {
            OpKind::LinearQuant => (linear::Attrs::of(call.attrs).rows, linear::Attrs::of(call.attrs).format),
            _ => (expert_linear::Attrs::of(call.attrs).rows, expert_linear::Attrs::of(call.attrs).format),
        };
        // SAFETY: the kernel's contract, passed on; a CPU with AVX-512 has AVX2.
        unsafe {
            if rows <= <Products<MADD> as Rows>::STREAMED {
                few(format, call, units, scratch)
            } else {
                avx512_vbmi::product(call, units, scratch)
            }
        }
    }

    pub(crate) unsafe fn attention(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]) {
        let a = attention_op::Attrs::of(call.attrs);
        let is_few = a.heads <= 4 * a.kv_heads && call.runs.iter().all(|run| run.rows == 1);
        let kernel = if is_few { avx2::ATTENTION } else { avx512::ATTENTION };
        // SAFETY: as `product`.
        unsafe { kernel(call, units, scratch) }
    }
}

// Registers of sixteen bytes hold the nibbles of 32 codes, so the wide layout is as good as the
// other.
#[cfg(target_arch = "aarch64")]
isa!(neon, Neon, Neon, target_feature(enable = "neon"), else no_product,
    44, _ => Smull; 4, _ => Smull; 8, _ => Smull;
    2, _ => Smull; 3, _ => Smull; 5, _ => Smull; 6, _ => Smull;
    14, 32 => Smull; 24, 16 => Smull;
    22, 16 => Smull; 23, 16 => Smull; 26, 16 => Smull; 34, 32 => Smull;);

/// Integer matmuls with dot instructions.
#[cfg(target_arch = "aarch64")]
pub(super) mod neon_dotprod {
    use super::*;

    isa!(@products target_feature(enable = "neon,dotprod"), neon::product_on,
        44, 64 => Sdot; 44, _ => Sdot; 4, 32 => Sdot;
        8, 64 => Sdot; 8, _ => Sdot;
        2, _ => Sdot; 3, _ => Sdot; 5, _ => Sdot; 6, _ => Sdot;
        14, 32 => Sdot; 24, 16 => Sdot;
        22, 16 => Sdot; 23, 16 => Sdot; 26, 16 => Sdot; 34, 32 => Sdot;);
}

/// Integer matmuls of 8-bit codes without a bias, which only they have; those of [`neon_dotprod`]
/// otherwise.
#[cfg(target_arch = "aarch64")]
pub(super) mod neon_i8mm {
    use super::*;

    isa!(@products target_feature(enable = "neon,dotprod,i8mm"), neon_dotprod::product_on,
        8, 64 => Usdot; 8, _ => Usdot;);
}
