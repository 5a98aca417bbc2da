//! CPU kernels of every op that may stand in a plan.
//!
//! One function per op and instruction set, gathered in a table that is chosen once, at load:
//! [`Kernels`]. The arithmetic is the one written at each [`OpKind`]; this module adds no rounding
//! of its own, so every table gives the same bits. What an op reads and writes arrives as an
//! [`OpCall`]; the work is cut into *units* that do not depend on each other ([`units`]), so a
//! caller may give any ranges of them to any threads.
//!
//! - `naive` is the contract spelled out in plain loops, and the oracle of the tests.
//! - `simd` is the small set of vector operations the fast kernels need; `scalar` (arrays), `avx2`
//!   and `neon` implement it; `rows` is that of the integer matmuls, which `avx512` implements too,
//!   and `avx2` twice. The algorithms (`elementwise`, `dense`, `quant`, `attention`, `recurrent`)
//!   are written once over it.
//!
//! # What a kernel relies on
//! The plan verifier has proved that each operand's extent lies within its region and that outputs
//! overlap no other operand, except that an output may be *the very same view* as an input that its
//! row of the op table names ([`OperandSpec::over`](loaf_formats::op::OperandSpec::over)). The
//! engine answers for the [`Run`]s: positions within the context, slots and versions that exist.
//! Indices that come out of memory (token ids, expert ids, chosen rows) are not proved by anybody;
//! kernels clamp or skip them, so a hostile plan can produce nonsense but touch nothing that is not
//! its own.
//!
//! # Not here
//! No kernel allocates, panics on any operand contents, reads the environment or knows about
//! threads.

use std::ops::Range;

use loaf_formats::dtype::DType;
use loaf_formats::op::{OP_COUNT, OpAttrs, OpKind, attention as attention_op};

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod dense;
mod dots;
mod elementwise;
mod isa;
pub mod math;
mod naive;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod quant;
mod recurrent;
mod rows;
mod scalar;
mod scratch;
mod simd;
// No other architecture has one that is used.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod unit;
mod wide;
mod work;

pub use work::{cost, scratch_bytes, units};

/// Lanes of the vectors that kernels are written in ([`LANES`](loaf_formats::op::LANES) is the
/// contract's number: four of these).
const EIGHT: usize = 8;
/// Rows of a dense weight matrix in one work unit.
pub const DENSE_ROWS: usize = 8;
/// Rows of a quantised weight matrix in one work unit.
pub const QUANT_ROWS: usize = 16;
/// Channels of one convolution unit.
pub const CONV_CHANNELS: usize = 256;

/// One operand resolved to memory. Element `(r, h, i)` is at element
/// `r * row_stride + h * head_stride + i`.
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

    /// The operand `bytes` further on: another slot's, another version.
    ///
    /// # Safety
    /// It is in the same allocation.
    #[inline(always)]
    unsafe fn offset(self, bytes: usize) -> RawOperand {
        // SAFETY: the caller's promise.
        RawOperand { ptr: unsafe { self.ptr.add(bytes) }, ..self }
    }

    /// Expert `e`'s matrix of an operand `[experts, outputs, plane]`, as an operand
    /// `[outputs, 1, plane]`.
    ///
    /// # Safety
    /// Expert `e` exists, or the operand is absent.
    #[inline(always)]
    unsafe fn expert(self, e: usize) -> RawOperand {
        if self.ptr.is_null() {
            return self;
        }
        let bytes = e * self.row_stride * self.dtype.bytes() as usize;
        // SAFETY: the caller's promise.
        RawOperand { ptr: unsafe { self.ptr.add(bytes) }, row_stride: self.head_stride, ..self }
    }

    /// Address of element `(r, h, 0)`; `T` is the Rust type of `dtype`.
    ///
    /// # Safety
    /// `(r, h, 0)` lies in the operand's extent.
    #[inline(always)]
    pub unsafe fn at<T>(&self, r: usize, h: usize) -> *mut T {
        debug_assert_eq!(std::mem::size_of::<T>() as u64, self.dtype.bytes());
        // SAFETY: within the operand's allocation, by the caller's promise.
        unsafe { self.ptr.cast::<T>().add(r * self.row_stride + h * self.head_stride) }
    }
}

/// Consecutive rows of a step that belong to one sequence: where it stands and where its state is.
///
/// With `from == to` and `stride == 0` recurrent state is updated in place. Otherwise the version
/// at `from` is read before any other is written, and left as it is unless it is one of those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First row of the step.
    pub first: usize,
    /// Rows, at least 1.
    pub rows: usize,
    /// Position of the first row.
    pub pos: usize,
    /// Bytes from the resolved address of a cache operand to that of this run's slot.
    pub cache: usize,
    /// Bytes from the resolved address of a recurrent operand to the version that is read.
    pub from: usize,
    /// Bytes to the version that holds the state after the run's first row.
    pub to: usize,
    /// Bytes from there to the version after the next row, and so on; 0: only the state after the
    /// last row is kept, at `to`.
    pub stride: usize,
}

impl Run {
    /// One row at position 0 of the first slot.
    pub const ONE: Run = Run { first: 0, rows: 1, pos: 0, cache: 0, from: 0, to: 0, stride: 0 };

    /// The parts of it after which state is kept: all of it, or each of its rows.
    #[inline(always)]
    fn kept(self) -> impl Iterator<Item = Run> {
        let (parts, rows) = if self.stride == 0 { (1, self.rows) } else { (self.rows, 1) };
        (0..parts).map(move |i| Run {
            first: self.first + i,
            rows,
            pos: self.pos + i,
            from: if i == 0 { self.from } else { self.to + (i - 1) * self.stride },
            to: self.to + i * self.stride,
            stride: 0,
            ..self
        })
    }
}

/// One op about to run: operands and attribute words in table order (see [`OpKind::spec`]).
#[derive(Clone, Copy)]
pub struct OpCall<'a> {
    /// Which op.
    pub kind: OpKind,
    /// Operands in table order; those in caches and recurrent state are the first slot's first
    /// version.
    pub operands: &'a [RawOperand],
    /// Attribute words in table order.
    pub attrs: &'a [u64],
    /// The step's rows by sequence, in order of rows; together they are all of the op's rows. Ops
    /// that only look at a row's values take no notice of them.
    pub runs: &'a [Run],
    /// Whether other units of this very call came before on the same scratch, which nobody has
    /// written since: what a kernel prepares there for all units is still there.
    pub again: bool,
}

impl OpCall<'_> {
    /// The run of a row.
    #[inline(always)]
    fn run_of(&self, row: usize) -> &Run {
        let next = self.runs.partition_point(|run| run.first <= row);
        &self.runs[next - 1]
    }
}

/// Computes work units `units` of an op (`units.end <=` [`units()`]).
///
/// # Safety
/// - Every operand's extent, as the op table computes it from `attrs`, is valid memory: readable,
///   and for `Out` and `InOut` writable; of caches and recurrent state that of every slot and
///   version that `runs` name, besides. f32 and u32 operands are 4-byte aligned, f16 and bf16
///   2-byte aligned.
/// - No output overlaps another operand, except that it may be the very view of an input that its
///   [`OperandSpec::over`](loaf_formats::op::OperandSpec::over) names. Slots of different runs are
///   different, and two versions are the same or do not overlap.
/// - The attributes passed [`OpSpec::check`](loaf_formats::op::OpSpec::check).
/// - `runs` are in order of rows and cover all of the op's; for ops with a cache `pos + rows` of
///   each is within the context.
/// - `scratch` is 64-byte aligned, at least [`scratch_bytes`] long and used by nobody else; its
///   contents are what [`OpCall::again`] says.
/// - No other thread computes the same units at the same time.
/// - The CPU has the features of the table the kernel came from.
pub type Kernel = unsafe fn(call: &OpCall<'_>, units: Range<usize>, scratch: &mut [u8]);

/// Consecutive blocks of positions of one [`Run`].
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
/// As [`Kernel`]; besides, `run` and `round` are of [`Split::rounds`], in whose order they come,
/// and `shared` points to [`Split::shared_floats`] floats that all units of an op share.
pub type SplitKernel =
    unsafe fn(call: &OpCall<'_>, run: &Run, round: Round, units: Range<usize>, shared: *mut f32, scratch: &mut [u8]);

/// Attention over few heads and many positions, parallel over blocks of positions, with the same
/// bits: blocks are folded by whoever is free and merged in order. Run after run; memory is bounded
/// by taking blocks in rounds.
#[derive(Clone, Copy)]
pub struct Split {
    /// Folds blocks; units are KV heads times the round's blocks.
    parts: SplitKernel,
    /// Merges a round's blocks; units are KV heads. All of `parts` comes before.
    merge: SplitKernel,
}

impl Split {
    /// Whether an op on `threads` threads has fewer units than it could have.
    pub fn pays(call: &OpCall<'_>, threads: usize) -> bool {
        if call.kind != OpKind::Attention {
            return false;
        }
        let (a, runs) = (attention_op::Attrs::of(call.attrs), call.runs);
        runs.iter().all(|run| (1..=attention::split_rows(&a)).contains(&run.rows))
            && (1..threads).contains(&(a.kv_heads * runs.len()))
            && runs.iter().any(|run| attention::blocks(&a, run).len() > 1)
    }

    /// The rounds of an op, each with its run.
    pub fn rounds<'a>(call: &OpCall<'a>) -> impl Iterator<Item = (&'a Run, Round)> + use<'a> {
        let a = attention_op::Attrs::of(call.attrs);
        call.runs.iter().flat_map(move |run| {
            let blocks = attention::blocks(&a, run);
            let rounds = blocks.clone().step_by(attention::ROUND);
            rounds.map(move |first| (run, Round { first, count: attention::ROUND.min(blocks.end - first) }))
        })
    }

    /// The kernels of a round and their units: all of the first's come before the second's.
    pub fn kernels(&self, call: &OpCall<'_>, round: Round) -> [(SplitKernel, usize); 2] {
        let kv_heads = attention_op::Attrs::of(call.attrs).kv_heads;
        [(self.parts, kv_heads * round.count), (self.merge, kv_heads)]
    }

    /// Floats that the units of an op share, with as many rows as `attrs` say or fewer, whatever
    /// the runs; `None` if there are no so many.
    pub fn shared_floats(kind: OpKind, attrs: &[u64]) -> Option<usize> {
        if kind != OpKind::Attention {
            return Some(0);
        }
        let a = attention_op::Attrs::of(attrs);
        let rows = attention::split_rows(&a).min(a.rows);
        a.kv_heads.checked_mul(attention::ROUND + 1)?.checked_mul(attention::part_floats(rows, &a)?)
    }
}

/// This CPU has no table of such a name; says which it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoTable;

impl std::fmt::Display for NoTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = Kernels::all().map(|kernels| kernels.isa.name()).collect();
        write!(f, "expected one of {}, which this CPU has", names.join(", "))
    }
}

impl std::error::Error for NoTable {}

/// An instruction set a table is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
    /// The same, with VBMI, and AMX's products of bytes for integer matmuls of many rows.
    Amx,
    /// NEON.
    Neon,
}

impl Isa {
    /// All there are, the best first, the one for tests last.
    pub const ALL: [Isa; 7] = [Isa::Amx, Isa::Avx512, Isa::AvxVnni, Isa::Avx2, Isa::Neon, Isa::Scalar, Isa::Naive];

    /// Name in reports and in `LOAF_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Naive => "naive",
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
        }
    }
}

/// A kernel for every op that may stand in a plan, all of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: [Option<Kernel>; OP_COUNT],
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
            Isa::Amx => Kernels::amx(),
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
    /// No table of [`Kernels::all`] has that name.
    pub fn named(name: &str) -> Result<Kernels, NoTable> {
        Kernels::all().find(|kernels| kernels.isa.name() == name).ok_or(NoTable)
    }

    /// The vector algorithms on arrays, for any CPU.
    pub fn scalar() -> Kernels {
        Kernels { isa: Isa::Scalar, table: isa::scalar::table(), split: None }
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

    /// The AVX2 table with the dot instructions of AVX-VNNI, if this CPU has them in either
    /// encoding.
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
            kernels.table[OpKind::LinearQuant as usize] = Some(product);
            kernels.table[OpKind::ExpertLinearQuant as usize] = Some(product);
            Some(kernels)
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// The AVX-512 table, if this CPU has AVX-512 F, BW, DQ, VL and VNNI.
    pub fn avx512() -> Option<Kernels> {
        #[cfg(target_arch = "x86_64")]
        {
            if is_zen4() {
                return Kernels::avx512_halves();
            }
            has_avx512().then(|| {
                let mut table = isa::avx512::table();
                if is_x86_feature_detected!("avx512vbmi") {
                    table[OpKind::LinearQuant as usize] = Some(isa::avx512_vbmi::product);
                    table[OpKind::ExpertLinearQuant as usize] = Some(isa::avx512_vbmi::product);
                }
                Kernels { isa: Isa::Avx512, table, split: Some(isa::avx512::SPLIT) }
            })
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// The AVX-512 table of Zen 4, on any CPU that has VBMI, too: so that more of them test it.
    #[doc(hidden)]
    pub fn avx512_halves() -> Option<Kernels> {
        #[cfg(target_arch = "x86_64")]
        {
            (has_avx512() && is_x86_feature_detected!("avx512vbmi")).then(|| {
                let mut table = isa::avx512::table();
                table[OpKind::Attention as usize] = Some(isa::avx512_halves::attention);
                table[OpKind::LinearQuant as usize] = Some(isa::avx512_halves::product);
                table[OpKind::ExpertLinearQuant as usize] = Some(isa::avx512_halves::product);
                Kernels { isa: Isa::Avx512, table, split: Some(isa::avx512::SPLIT) }
            })
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// The AVX-512 table with AMX, if this CPU has both and VBMI, and the system lets this process
    /// use tiles (Linux).
    pub fn amx() -> Option<Kernels> {
        #[cfg(target_arch = "x86_64")]
        {
            let mut kernels = Kernels::avx512()?;
            if !is_x86_feature_detected!("avx512vbmi") || !amx::is_there() {
                return None;
            }
            kernels.isa = Isa::Amx;
            kernels.table[OpKind::LinearQuant as usize] = Some(isa::amx::product);
            kernels.table[OpKind::ExpertLinearQuant as usize] = Some(isa::amx::product);
            Some(kernels)
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// The NEON table, if this CPU has NEON; integer matmuls use `dotprod` and `i8mm` where it has
    /// those.
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
                    table[OpKind::LinearQuant as usize] = Some(product);
                    table[OpKind::ExpertLinearQuant as usize] = Some(product);
                }
                Kernels { isa: Isa::Neon, table, split: Some(isa::neon::SPLIT) }
            })
        }
        #[cfg(not(target_arch = "aarch64"))]
        None
    }

    /// The contract in plain loops: the oracle of tests, far too slow for anything else.
    pub fn naive() -> Kernels {
        let table = std::array::from_fn(|i| OpKind::ALL[i].spec().in_plan.then_some(naive::run as Kernel));
        Kernels { isa: Isa::Naive, table, split: None }
    }

    /// The instruction set of this table.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Work units of a quantised matrix that a product of many rows takes at once: fewer are slower
    /// than their number says.
    pub fn units_at_once(&self) -> usize {
        if matches!(self.isa, Isa::Avx512 | Isa::Amx) { 2 } else { 1 }
    }

    /// Attention cut by blocks, where the set has it.
    pub fn split(&self) -> Option<Split> {
        self.split
    }

    /// The kernel of an op; ops for graphs alone have none.
    pub fn get(&self, kind: OpKind) -> Option<Kernel> {
        self.table[kind as usize]
    }
}

/// Whether this CPU has all of AVX-512 that every table of it needs.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    Kernels::avx2().is_some()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// Whether this CPU has AVX-512 and is of AMD's family 19h: Zen 4, which runs it on units of 256
/// bits and has VBMI.
#[cfg(target_arch = "x86_64")]
fn is_zen4() -> bool {
    use std::arch::x86_64::__cpuid;
    if !has_avx512() {
        return false;
    }
    // SAFETY: CPUs with AVX-512 have the instruction. (Later compilers know that it needs no such
    // promise.)
    #[allow(unused_unsafe)]
    let (vendor, version) = unsafe { (__cpuid(0), __cpuid(1).eax) };
    let family = (version >> 8 & 15) + (version >> 20 & 255);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD" && family == 0x19
}
