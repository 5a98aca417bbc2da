//! CPU kernels of every op that may stand in a plan.
//!
//! One function per op and instruction set, gathered in a table that is chosen once, at load: [`Kernels`]. The
//! arithmetic is the one written at each [`OpKind`]; this module adds no rounding of its own, so every table
//! gives the same bits. What an op reads and writes arrives as an [`OpCall`]; the work is cut into *units* that
//! do not depend on each other ([`units`]), so a caller may give any ranges of them to any threads.
//!
//! - `naive` is the contract spelled out in plain loops, and the oracle of the tests.
//! - `simd` is the small set of vector operations the fast kernels need; `scalar` (arrays), `avx2` and `neon`
//!   implement it; `rows` is that of the integer matmuls, which `avx512` implements too, and `avx2` twice. The algorithms
//!   (`elementwise`, `dense`, `quant`, `attention`, `recurrent`) are written once over it.
//!
//! # What a kernel relies on
//! The plan verifier has proved that each operand's extent lies within its region and that outputs overlap no
//! other operand, except that an output may be *the very same view* as an input where [`in_place`] says so.
//! Indices that come out of memory (token ids, expert ids, slots) are not proved by anybody; kernels clamp or
//! skip them, so a hostile plan can produce nonsense but touch nothing that is not its own.
//!
//! # Not here
//! No kernel allocates, panics on any operand contents, reads the environment or knows about threads.

use std::ops::Range;

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{ATTENTION_BLOCK, OPS, OpKind};

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dense;
mod elementwise;
mod isa;
mod naive;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod quant;
mod recurrent;
mod rows;
mod scalar;
mod scratch;
mod simd;
mod wide;

/// Lanes of a dot, by contract, and rows of a dense weight matrix in one work unit.
pub const LANES: usize = 8;
/// Rows of a quantised weight matrix in one work unit.
pub const QUANT_ROWS: usize = 16;
/// Queries of one attention tile, at most, unless a row has more.
const TILE_QUERIES: usize = 32;
/// Channels of one convolution unit.
pub const CONV_CHANNELS: usize = 256;

/// One operand resolved to memory. Element `(r, h, i)` is at element `r * row_stride + h * head_stride + i`.
#[derive(Clone, Copy, Debug)]
pub struct RawOperand {
    /// First element; null if the operand is absent (biases of a format that has none).
    pub ptr: *mut u8,
    /// Type of an element.
    pub dtype: DType,
    /// Elements from a row to the next.
    pub row_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
}

impl RawOperand {
    /// An operand the format does not have.
    pub const ABSENT: RawOperand =
        RawOperand { ptr: std::ptr::null_mut(), dtype: DType::F32, row_stride: 0, head_stride: 0 };

    /// Address of element `(r, h, 0)`; `T` is the Rust type of `dtype`.
    ///
    /// # Safety
    /// `(r, h, 0)` lies in the operand's extent.
    #[inline(always)]
    pub(crate) unsafe fn at<T>(&self, r: usize, h: usize) -> *mut T {
        debug_assert_eq!(std::mem::size_of::<T>() as u64, self.dtype.bytes());
        // SAFETY: within the operand's allocation, by the caller's promise.
        unsafe { self.ptr.cast::<T>().add(r * self.row_stride + h * self.head_stride) }
    }
}

/// One op about to run: operands and attribute words in table order (see [`OPS`]).
#[derive(Clone, Copy)]
pub struct OpCall<'a> {
    /// Which op.
    pub kind: OpKind,
    /// Operands in table order.
    pub operands: &'a [RawOperand],
    /// Attribute words in table order.
    pub attrs: &'a [u64],
}

impl OpCall<'_> {
    /// Attribute `i` as a count.
    #[inline(always)]
    pub(crate) fn count(&self, i: usize) -> usize {
        self.attrs[i] as usize
    }

    /// Attribute `i` as a real number.
    #[inline(always)]
    pub(crate) fn real(&self, i: usize) -> f32 {
        f32::from_bits(self.attrs[i] as u32)
    }
}

/// Computes work units `units` of an op (`units.end <=` [`units()`]).
///
/// # Safety
/// Every operand's extent, as the op table computes it from `attrs`, is valid memory: readable, and for `Out`
/// and `InOut` writable; no output overlaps another operand except as [`in_place`] allows; f32 and u32 operands
/// are 4-byte aligned, f16 and bf16 2-byte aligned. `scratch` is 64-byte aligned, at least [`scratch_bytes`]
/// long and used by nobody else. No other thread computes the same units at the same time. The CPU has the
/// features of the table the kernel came from.
pub type Kernel = unsafe fn(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]);

/// Consecutive blocks of positions, from the first.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Its first block.
    pub first: usize,
    /// Blocks in it.
    pub count: usize,
}

/// A kernel of one round of [`Split`].
///
/// # Safety
/// As [`Kernel`]; besides, `shared` points to [`Split::shared_floats`] floats that all units of an op share.
pub type SplitKernel =
    unsafe fn(call: &OpCall<'_>, round: Round, units: Range<usize>, shared: *mut f32, scratch: &mut [u8]);

/// Attention over few heads and many positions, parallel over blocks of positions, with the same bits: blocks are folded by
/// whoever is free and merged in order. Memory is bounded by taking blocks in rounds.
#[derive(Clone, Copy)]
pub struct Split {
    /// Folds blocks; units are KV heads times the round's blocks.
    pub parts: SplitKernel,
    /// Merges a round's blocks; units are KV heads. All of `parts` comes before.
    pub merge: SplitKernel,
}

impl Split {
    /// Whether an op on `threads` threads has fewer units than it could have.
    pub fn pays(call: &OpCall<'_>, threads: usize) -> bool {
        call.kind == OpKind::Attention
            && (1..=tile_rows(call.attrs)).contains(&call.count(0))
            && (1..threads).contains(&call.count(2))
            && attention::blocks(call).len() > 1
    }

    /// The rounds of an op.
    pub fn rounds(call: &OpCall<'_>) -> impl Iterator<Item = Round> {
        let blocks = attention::blocks(call);
        blocks
            .clone()
            .step_by(attention::ROUND)
            .map(move |first| Round { first, count: attention::ROUND.min(blocks.end - first) })
    }

    /// Floats that the units of an op share, with as many rows as `attrs` say or fewer: independent of position.
    pub fn shared_floats(kind: OpKind, attrs: &[u64]) -> usize {
        if kind != OpKind::Attention {
            return 0;
        }
        let rows = tile_rows(attrs).min(attrs[0] as usize);
        attrs[2] as usize * (attention::ROUND + 1) * attention::part_floats(rows, attrs)
    }
}

/// An instruction set a table is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// The contract in plain loops; slow.
    Naive,
    /// The vector algorithms on arrays; any CPU.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX2 with FMA and F16C, and dot instructions for the integer matmuls.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// NEON.
    Neon,
}

impl Isa {
    /// All there are, the best first, the one for tests last.
    pub const ALL: [Isa; 6] = [Isa::Avx512, Isa::AvxVnni, Isa::Avx2, Isa::Neon, Isa::Scalar, Isa::Naive];

    /// Name in reports and in `LOAF_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Naive => "naive",
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        }
    }
}

/// A kernel for every op, all of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: [Kernel; OPS.len()],
    split: Option<Split>,
}

impl Kernels {
    /// The best table this CPU can run.
    pub fn detect() -> Kernels {
        Kernels::all().next().unwrap_or_else(Kernels::scalar)
    }

    /// Every table this CPU can run, in the order of [`Isa::ALL`].
    pub fn all() -> impl Iterator<Item = Kernels> {
        Isa::ALL.into_iter().filter_map(|isa| match isa {
            Isa::Avx512 => Kernels::avx512(),
            Isa::AvxVnni => Kernels::avx_vnni(),
            Isa::Avx2 => Kernels::avx2(),
            Isa::Neon => Kernels::neon(),
            Isa::Scalar => Some(Kernels::scalar()),
            Isa::Naive => Some(Kernels::naive()),
        })
    }

    /// The table of that name.
    ///
    /// # Errors
    /// What was expected: the names of [`Kernels::all`].
    pub fn named(name: &str) -> Result<Kernels, String> {
        Kernels::all().find(|kernels| kernels.isa.name() == name).ok_or_else(|| {
            let names: Vec<_> = Kernels::all().map(|kernels| kernels.isa.name()).collect();
            format!("expected one of {}, which this CPU has", names.join(", "))
        })
    }

    /// The vector algorithms on arrays, for any CPU.
    pub fn scalar() -> Kernels {
        Kernels { isa: Isa::Scalar, table: isa::scalar::table(), split: Some(isa::scalar::SPLIT) }
    }

    /// The AVX2 table, if this CPU has AVX2, FMA and F16C.
    pub fn avx2() -> Option<Kernels> {
        #[cfg(target_arch = "x86_64")]
        {
            let has =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            has.then(|| Kernels { isa: Isa::Avx2, table: isa::avx2::table(), split: Some(isa::avx2::SPLIT) })
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// The AVX2 table with the dot instructions of AVX-VNNI, if this CPU has them in either encoding.
    pub fn avx_vnni() -> Option<Kernels> {
        #[cfg(target_arch = "x86_64")]
        {
            let product: Kernel = if is_x86_feature_detected!("avxvnni") {
                isa::avx_vnni::product
            } else if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                isa::avx_vnni_evex::product
            } else {
                return None;
            };
            let mut kernels = Kernels::avx2()?;
            kernels.isa = Isa::AvxVnni;
            kernels.table[OpKind::LinearQuant as usize] = product;
            kernels.table[OpKind::ExpertLinearQuant as usize] = product;
            Some(kernels)
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// The AVX-512 table, if this CPU has AVX-512 F, BW, DQ, VL and VNNI.
    pub fn avx512() -> Option<Kernels> {
        #[cfg(target_arch = "x86_64")]
        {
            let has = Kernels::avx2().is_some()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            has.then(|| {
                let mut table = isa::avx512::table();
                if is_x86_feature_detected!("avx512vbmi") {
                    table[OpKind::LinearQuant as usize] = isa::avx512_vbmi::product;
                    table[OpKind::ExpertLinearQuant as usize] = isa::avx512_vbmi::product;
                }
                Kernels { isa: Isa::Avx512, table, split: Some(isa::avx512::SPLIT) }
            })
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// The NEON table, if this CPU has NEON; integer matmuls use `dotprod` and `i8mm` where it has those.
    pub fn neon() -> Option<Kernels> {
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected as has;
            has!("neon").then(|| {
                let mut table = isa::neon::table();
                let product: Option<Kernel> = match (has!("dotprod"), has!("i8mm")) {
                    (true, true) => Some(isa::neon_i8mm::product),
                    (true, false) => Some(isa::neon_dotprod::product),
                    (false, _) => None,
                };
                if let Some(product) = product {
                    table[OpKind::LinearQuant as usize] = product;
                    table[OpKind::ExpertLinearQuant as usize] = product;
                }
                Kernels { isa: Isa::Neon, table, split: Some(isa::neon::SPLIT) }
            })
        }
        #[cfg(not(target_arch = "aarch64"))]
        None
    }

    /// The contract in plain loops: the oracle of tests, far too slow for anything else.
    pub fn naive() -> Kernels {
        Kernels { isa: Isa::Naive, table: [naive::run; OPS.len()], split: None }
    }

    /// The instruction set of this table.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Attention cut by blocks, where the set has it.
    pub fn split(&self) -> Option<Split> {
        self.split
    }

    /// The kernel of an op. Graph-only ops have one that does nothing.
    pub fn get(&self, kind: OpKind) -> Kernel {
        self.table[kind as usize]
    }
}

/// Whether the op's last output may be the very same view (address, strides) as one of its `f32` inputs of the
/// same extent; for `AddRmsNorm` that holds of each of its outputs, as long as the two differ from each other.
/// Everything else must not overlap.
pub const fn in_place(kind: OpKind) -> bool {
    use OpKind::*;
    matches!(
        kind,
        RmsNorm | AddRmsNorm | Add | Mul | Silu | Sigmoid | SiluMul | SigmoidMul | MulRows | Softmax | Rope | L2Norm
    )
}

/// Number of independent work units of an op.
pub fn units(kind: OpKind, attrs: &[u64]) -> usize {
    use OpKind::*;
    let at = |i: usize| attrs[i] as usize;
    match kind {
        View | Linear | ExpertLinear => 0,
        Embed | MulRows | WeightedSum | Softmax | TopK | RopeTable | GdnGates | SelectRows => at(0),
        RmsNorm | AddRmsNorm | Add | Mul | Silu | Sigmoid | SiluMul | SigmoidMul | Quantize | Rope | KvWrite
        | L2Norm => at(0) * at(1),
        LinearDense => at(2).div_ceil(LANES),
        ExpertLinearDense => at(4).div_ceil(LANES),
        LinearQuant => at(2).div_ceil(QUANT_ROWS),
        ExpertLinearQuant => at(4).div_ceil(QUANT_ROWS),
        ExpertSort => 1,
        Attention => at(2) * at(0).div_ceil(tile_rows(attrs)),
        Conv | ConvSilu => at(1) * at(2).div_ceil(CONV_CHANNELS),
        GdnScan => at(2),
    }
}

/// Query rows of one attention tile.
fn tile_rows(attrs: &[u64]) -> usize {
    let group = (attrs[1] / attrs[2].max(1)).max(1) as usize;
    (TILE_QUERIES / group).max(1)
}

/// Bytes of scratch one thread needs for an op: independent of position, and monotone in rows.
pub fn scratch_bytes(kind: OpKind, attrs: &[u64]) -> usize {
    use OpKind::*;
    let at = |i: usize| attrs[i] as usize;
    let pad = |n: usize| n.next_multiple_of(LANES);
    // Each buffer carved from scratch starts on 64 bytes.
    let slack = 64 * 12;
    slack
        + match kind {
            LinearDense => LANES * pad(at(1)) * 4,
            ExpertLinearDense => LANES * pad(at(3)) * 4,
            LinearQuant => quant_scratch(at(0), at(1), attrs[3]),
            ExpertLinearQuant => quant_scratch(at(0) * at(6), at(3), attrs[5]),
            Attention => {
                let queries = at(0).min(tile_rows(attrs)) * (at(1) / at(2).max(1)).max(1);
                let dim = at(3).next_multiple_of(2 * LANES);
                // queries, accumulators, block accumulators; scores; a run of keys or values; three scalars a query.
                4 * (queries * (3 * dim + ATTENTION_BLOCK + 4) + 32 * dim)
            }
            Conv | ConvSilu => at(3) * CONV_CHANNELS * 4,
            _ => 0,
        }
}

/// Scratch of a quantised matmul over `x_rows` activation rows: permuted codes, their integer group sums, four
/// arranged rows, two unpacked panels of at most sixteen weight rows, and the panels' scales and biases.
fn quant_scratch(x_rows: usize, inp: usize, format: u64) -> usize {
    let group = WeightFormat::from_code(format).and_then(|f| f.group()).unwrap_or(32) as usize;
    let padded = inp.next_multiple_of(128);
    let groups = inp.div_ceil(group).next_multiple_of(16);
    let arranged = 4 * rows::ARRANGED * padded;
    x_rows * (padded + groups * 4) + arranged + 2 * QUANT_ROWS * padded + 4 * QUANT_ROWS * groups * 4
}

/// Rough cost of an op in bytes touched (a multiply-add of a matmul counts a quarter), so that a caller runs
/// tiny ops on one thread.
pub fn cost(kind: OpKind, attrs: &[u64]) -> u64 {
    use OpKind::*;
    let at = |i: usize| attrs[i];
    // `matrices` of `[out, inp]` read once each, `rows` of products.
    let matrix = |matrices: u64, rows: u64, inp: u64, out: u64, format: u64| {
        let bits = WeightFormat::from_code(format).map_or(32, |f| f.bits());
        let bytes = (inp * bits / 8).saturating_mul(out).saturating_mul(matrices);
        bytes.saturating_add(rows.saturating_mul(inp).saturating_mul(out) / 4)
    };
    match kind {
        View | Linear | ExpertLinear => 0,
        Embed => 8 * at(0) * at(2),
        LinearDense | LinearQuant => matrix(1, at(0), at(1), at(2), at(3)),
        ExpertLinearDense | ExpertLinearQuant => {
            let slots = at(0) * at(1);
            matrix(slots.min(at(2)), slots, at(3), at(4), at(5))
        }
        ExpertSort => 8 * at(0) * at(1) + 8 * at(2),
        MulRows | Softmax | SelectRows => 16 * at(0) * at(1),
        TopK => 8 * at(0) * at(1),
        RopeTable => 64 * at(0) * at(1),
        GdnGates => 64 * at(0) * at(1) * at(2),
        Attention => {
            let span = match at(6) {
                0 => at(4) + at(0),
                window => window.min(at(4) + at(0)) + at(0),
            };
            (at(0) * at(1) * at(3)).saturating_mul(span)
        }
        Conv | ConvSilu => (4 * at(0) * at(1) * at(2)).saturating_mul(at(3)),
        GdnScan => (8 * at(0) * at(2)).saturating_mul(at(3) * at(4)),
        Silu | Sigmoid | SiluMul | SigmoidMul => 24 * at(0) * at(1) * at(2),
        _ => 12 * at(0) * at(1) * at(2),
    }
}
