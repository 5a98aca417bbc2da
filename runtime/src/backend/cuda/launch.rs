//! From a record of a verified plan to the launch of a kernel.
//!
//! Operands become addresses, attributes are handed on as they are; what follows from the number of
//! rows alone is the grid. Positions, slots and runs stand in device memory ([`Step`]), so a launch
//! is the same for every token.

use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{self, ATTENTION_BLOCK, OpAttrs, OpKind};
use loaf_formats::plan::{self, Record, Region};

use super::driver::{Address, Shape};
use crate::sample::SamplerOptions;

macro_rules! kernels {
    ($($kernel:ident = $name:literal,)*) => {
        /// The compiled kernels.
        #[allow(missing_docs, non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Kernel { $($kernel),* }

        impl Kernel {
            /// Their names, in order.
            pub const NAMES: &'static [&'static str] = &[$($name),*];
        }
    };
}

kernels! {
    Embed = "embed",
    RmsNorm = "rms_norm",
    AddRmsNorm = "add_rms_norm",
    L2Norm = "l2_norm",
    Add = "add",
    Mul = "mul",
    Silu = "silu",
    Sigmoid = "sigmoid",
    SiluMul = "silu_mul",
    SigmoidMul = "sigmoid_mul",
    MulRows = "mul_rows",
    GatherRows = "gather_rows",
    Quantize = "quantize",
    Quantize64 = "quantize_64",
    Softmax = "softmax",
    WeightedSum = "weighted_sum",
    Rope = "rope",
    RopeTable = "rope_table",
    KvWrite = "kv_write",
    LinearDense = "linear_dense",
    ExpertLinearDense = "expert_linear_dense",
    TopK = "top_k",
    ExpertSort = "expert_sort",
    Conv = "conv_plain",
    ConvSilu = "conv_silu",
    Conv4 = "conv_plain_4",
    ConvSilu4 = "conv_silu_4",
    GdnGates = "gdn_gates",
    GdnScan = "gdn_scan",
    GdnScan128 = "gdn_scan_128",
    Attention = "attention",
    LinearQ4x1 = "linear_q4_1x1",
    LinearQ4x4 = "linear_q4_1x4",
    LinearQ4Rows = "linear_q4_8x4",
    LinearE2m1x4 = "linear_e2m1_1x4",
    LinearE2m1Rows = "linear_e2m1_8x4",
    LinearAnyx4 = "linear_any_1x4",
    LinearAnyRows = "linear_any_8x4",
    TilesQ4 = "tiles_q4",
    TilesE2m1 = "tiles_e2m1",
    TilesAny = "tiles_any",
    LinearBlockx4 = "linear_block_1x4",
    LinearBlockRows = "linear_block_8x4",
    TilesBlock = "tiles_block",
    LinearQ4_0x4 = "linear_q4_0_1x4",
    LinearQ4_0Rows = "linear_q4_0_8x4",
    TilesQ4_0 = "tiles_q4_0",
    LinearQ8_0x4 = "linear_q8_0_1x4",
    LinearQ8_0Rows = "linear_q8_0_8x4",
    TilesQ8_0 = "tiles_q8_0",
    LinearQ4Kx4 = "linear_q4_k_1x4",
    LinearQ4KRows = "linear_q4_k_8x4",
    TilesQ4K = "tiles_q4_k",
    LinearQ5Kx4 = "linear_q5_k_1x4",
    LinearQ5KRows = "linear_q5_k_8x4",
    TilesQ5K = "tiles_q5_k",
    LinearQ6Kx4 = "linear_q6_k_1x4",
    LinearQ6KRows = "linear_q6_k_8x4",
    TilesQ6K = "tiles_q6_k",
    Wide32 = "wide_32",
    Wide64 = "wide_64",
    Wide128 = "wide_128",
    Hopper128 = "hopper_128",
    HopperPairs128 = "hopper_pairs_128",
    GatedCodes = "gated_codes",
    FastAttention64 = "fast_attention_64",
    FastAttention128 = "fast_attention_128",
    FastAttention256 = "fast_attention_256",
    FastRuleChunks = "fast_rule_chunks",
    FastRule = "fast_rule",
    FastHopper64 = "fast_hopper_64",
    FastHopper128 = "fast_hopper_128",
    AttentionTile64 = "attention_tile_64",
    AttentionTile128 = "attention_tile_128",
    AttentionTile256 = "attention_tile_256",
    RowNorm1 = "row_norm_1",
    RowNorm2 = "row_norm_2",
    RowPairs1 = "row_pairs_1",
    RowPairs2 = "row_pairs_2",
    RowPlain1 = "row_plain_1",
    RowPlain2 = "row_plain_2",
    RowPlain3 = "row_plain_3",
    RowPlain4 = "row_plain_4",
    RowHead1 = "row_head_1",
    RowHead2 = "row_head_2",
    AttentionRow64 = "attention_row_64",
    AttentionRow128 = "attention_row_128",
    AttentionLate64 = "attention_late_64",
    AttentionLate128 = "attention_late_128",
    AttentionLate256 = "attention_late_256",
    AttentionRows64 = "attention_rows_64",
    AttentionRows128 = "attention_rows_128",
    AttentionRowsLate64 = "attention_rows_late_64",
    AttentionRowsLate128 = "attention_rows_late_128",
    Begin = "begin",
    FewCodes = "few_codes",
    FewNorm1 = "few_norm_1",
    FewNorm2 = "few_norm_2",
    NormCodes1 = "norm_codes_1",
    FewWide1 = "few_wide_1",
    FewWide2 = "few_wide_2",
    FewPairs1 = "few_pairs_1",
    FewPairs2 = "few_pairs_2",
    FewPlain1 = "few_plain_1",
    FewPlain2 = "few_plain_2",
    FewPlain3 = "few_plain_3",
    FewHead1 = "few_head_1",
    FewHead2 = "few_head_2",
    FewHeads = "few_heads",
    FewHeads64 = "few_heads_64",
    FewHeads128 = "few_heads_128",
    Choose = "choose",
    SampleBest = "sample_best",
    SampleWeigh = "sample_weigh",
    SamplePick = "sample_pick",
    Route2 = "route_2",
    ExpertsIn2 = "experts_in_2",
    ExpertsIn5 = "experts_in_5",
    ExpertsOut = "experts_out",
    DeltaRow128 = "delta_row_128",
    BlocksNorm1 = "blocks_norm_1",
    BlocksNorm2 = "blocks_norm_2",
    BlocksPlain1 = "blocks_plain_1",
    BlocksPlain2 = "blocks_plain_2",
    BlocksPlain3 = "blocks_plain_3",
    BlocksPlain4 = "blocks_plain_4",
}

/// `struct Operand` of the kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Operand {
    /// Address of the first element; 0 if the operand is absent.
    pub at: Address,
    /// Elements from a row to the next.
    pub row: u64,
    /// Elements from a head to the next.
    pub head: u32,
    /// [`DType`].
    pub dtype: u32,
}

/// `struct Step`: where a step's rows belong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Step {
    /// The number of runs, `u32`.
    pub head: Address,
    /// [`RunAt`] each.
    pub runs: Address,
    /// [`RowAt`] each.
    pub rows: Address,
}

/// `struct Run`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RunAt {
    /// First row.
    pub first: u32,
    /// Rows.
    pub rows: u32,
    /// Position of the first.
    pub pos: u32,
    /// Nothing.
    pub unused: u32,
    /// Bytes to the slot's caches.
    pub cache: u64,
    /// Bytes to the version that is read.
    pub from: u64,
    /// Bytes to the version that holds the state after the first row.
    pub to: u64,
    /// Bytes from there to the version after the next.
    pub stride: u64,
}

/// `struct Row`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RowAt {
    /// Its run.
    pub run: u32,
    /// Its position.
    pub pos: u32,
    /// Bytes to its slot's caches.
    pub cache: u64,
}

/// `struct Call`: a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Call {
    /// Operands in record order.
    pub operands: [Operand; 12],
    /// Attributes in record order.
    pub attrs: [u64; 12],
    /// Where rows belong.
    pub step: Step,
}

/// Where the int8 form of a product's activations is.
#[derive(Clone, Copy)]
pub struct Form {
    /// Codes, scales and sums.
    pub at: [Address; 3],
    /// Bytes from a row of codes to the next, and elements of scales and sums.
    pub rows: [u64; 2],
    /// Codes of a group.
    pub group: u32,
    /// Whether it is there already.
    pub made: bool,
}

/// `struct Linear`: a product with quantised weights.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Linear {
    pub planes: [Address; 3],
    pub plane_row: [u64; 3],
    pub plane_expert: [u64; 3],
    pub format: u64,
    pub inputs: u32,
    pub outputs: u32,
    pub rows: u32,
    pub stage: u32,
    pub x: [Address; 3],
    pub x_row: u64,
    pub x_slot: u64,
    pub xs_row: u64,
    pub xs_slot: u64,
    pub y: Address,
    pub y_row: u64,
    pub y_slot: u64,
    pub y_dtype: u32,
    pub eps: u32,
    pub offset: u32,
    pub unused: u32,
    pub out: Address,
    pub out_row: u64,
    pub out_slot: u64,
    pub add: Address,
    pub add_row: u64,
    pub x2: Address,
    pub x2_row: u64,
    pub sum: Address,
    pub sum_row: u64,
    pub normed: Address,
    pub normed_row: u64,
    pub order: Address,
    pub starts: Address,
    pub k: u32,
    pub experts: u32,
    pub x_slots: u32,
    pub flags: u32,
}

/// Where the int8 form, in groups of 64, of what a record makes goes in place of that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Left {
    /// Codes, scales and sums.
    pub at: [Address; 3],
    /// Bytes from a row of codes to the next, and from a head of the record's to the next.
    pub codes: [u64; 2],
    /// The same of scales and sums, in elements.
    pub scales: [u64; 2],
}

impl Left {
    /// Whether codes can be written four at a time.
    fn is_aligned(&self) -> bool {
        [self.at[0], self.codes[0], self.codes[1]].iter().all(|n| n.is_multiple_of(4))
    }
}

/// `struct Pairs`: products of a gate and of what it lets through.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Pairs {
    pub product: Linear,
    pub planes: [Address; 3],
    pub left: Left,
}

/// `struct Gated`: what a gate lets through, as its int8 form.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Gated {
    pub a: Operand,
    pub b: Operand,
    pub left: Left,
    pub rows: u32,
    pub heads: u32,
    pub dim: u32,
    pub sigmoid: u32,
}

/// What the activations of a product are made from: codes that are there, values, values and a
/// norm.
#[allow(missing_docs)]
pub mod stage {
    pub const CODES: u32 = 0;
    pub const PLAIN: u32 = 1;
    pub const NORM: u32 = 2;
    /// The row is held in shared memory while it is staged.
    pub const HELD: u32 = 1;
    /// Outputs are pairs, of which `silu(first) * second` is kept.
    pub const PAIRS: u32 = 2;
}

/// `struct HeadNorm`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HeadNorm {
    pub at: Address,
    pub dtype: u32,
    pub eps: u32,
    pub offset: u32,
    pub unused: u32,
}

/// `struct Attend`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Attend {
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    pub out: Operand,
    pub rows: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub dim: u32,
    pub scale: u32,
    pub window: u32,
    pub per_block: u32,
    pub makes: u32,
    pub step: Step,
    pub parts: Address,
    pub counters: Address,
    pub most_blocks: u32,
    pub half: u32,
    pub new_k: Operand,
    pub new_v: Operand,
    pub gate: Operand,
    pub q_norm: HeadNorm,
    pub k_norm: HeadNorm,
    pub table: Address,
    pub holds_values: u32,
    pub table_row: u32,
    pub codes: Address,
    pub scales: Address,
    pub sums: Address,
    pub codes_row: u32,
    pub scales_row: u32,
}

/// `struct RowProduct`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RowProduct {
    pub planes: [Address; 3],
    pub x: Address,
    pub y: Address,
    pub out: Address,
    pub add: Address,
    pub x2: Address,
    pub sum: Address,
    pub normed: Address,
    pub ahead: Address,
    pub runs: Address,
    pub w_row: u32,
    pub s_row: u32,
    pub outputs: u32,
    pub eps: u32,
    pub offset: u32,
    pub ahead_bytes: u32,
}

/// `struct RowPart`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RowPart {
    pub planes: [Address; 3],
    pub out: Address,
    pub w_row: u32,
    pub s_row: u32,
    pub b_row: u32,
    pub outputs: u32,
    pub block: u32,
    pub first: u32,
    pub blocks: u32,
    pub unused: u32,
}

/// Products of a row that one short kernel takes at most, where weights are in blocks.
pub const ROW_PARTS: usize = 3;

/// `struct RowBlocks`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RowBlocks {
    pub row: RowProduct,
    pub pairs: u32,
    pub unused: u32,
    pub parts: [RowPart; ROW_PARTS],
}

/// `struct RouteIn`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RouteIn {
    pub row: RowProduct,
    pub planes: [Address; 3],
    pub scores: Address,
    pub codes: Address,
    pub scales: Address,
    pub sums: Address,
    pub w_row: u32,
    pub s_row: u32,
    pub outputs: u32,
    pub unused: u32,
}

/// `struct ExpertsIn`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ExpertsIn {
    pub gate: [Address; 3],
    pub up: [Address; 3],
    pub w_expert: u64,
    pub s_expert: u64,
    pub codes: Address,
    pub scales: Address,
    pub sums: Address,
    pub scores: Address,
    pub out: Address,
    pub w_row: u32,
    pub s_row: u32,
    pub experts: u32,
    pub k: u32,
    pub out_slot: u32,
    pub unused: u32,
}

/// `struct ExpertsOut`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ExpertsOut {
    pub planes: [Address; 3],
    pub w_expert: u64,
    pub s_expert: u64,
    pub shared: [Address; 3],
    pub x: Address,
    pub shared_x: Address,
    pub scores: Address,
    pub gate: Address,
    pub add: Address,
    pub out: Address,
    pub w_row: u32,
    pub s_row: u32,
    pub shared_w_row: u32,
    pub shared_s_row: u32,
    pub x_slot: u32,
    pub experts: u32,
    pub k: u32,
    pub renorm: u32,
}

/// `struct DeltaPart`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DeltaPart {
    pub x: Address,
    pub w: Address,
    pub state: Address,
    pub first: u32,
    pub dim: u32,
    pub x_head: u32,
    pub tap: u32,
}

/// `struct DeltaRow`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DeltaRow {
    pub parts: [DeltaPart; 3],
    pub a: Operand,
    pub b: Operand,
    pub a_log: Operand,
    pub dt: Operand,
    pub z: Operand,
    pub norm: Operand,
    pub out: Operand,
    pub state: Address,
    pub runs: Address,
    pub counters: Address,
    pub state_head: u64,
    pub gate_dim: u32,
    pub z_dim: u32,
    pub out_dim: u32,
    pub k_heads: u32,
    pub v_heads: u32,
    pub tiled: u32,
    pub q_eps: u32,
    pub q_scale: u32,
    pub k_eps: u32,
    pub k_scale: u32,
    pub norm_eps: u32,
    pub norm_offset: u32,
}

/// `struct Begin`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Begin {
    pub embed: Call,
    pub table: Call,
    pub blocks: u64,
}

/// `struct FewCodes`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FewCodes {
    pub x: Address,
    pub x2: Address,
    pub y: Address,
    pub sum: Address,
    pub normed: Address,
    pub codes: Address,
    pub scales: Address,
    pub sums: Address,
    pub x_row: u32,
    pub x2_row: u32,
    pub sum_row: u32,
    pub normed_row: u32,
    pub codes_row: u32,
    pub scales_row: u32,
    pub eps: u32,
    pub offset: u32,
    pub rows: u32,
    pub unused: u32,
}

/// `struct FewProduct`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FewProduct {
    pub planes: [Address; 3],
    pub codes: Address,
    pub scales: Address,
    pub sums: Address,
    pub out: Address,
    pub add: Address,
    pub w_row: u32,
    pub s_row: u32,
    pub outputs: u32,
    pub rows: u32,
    pub codes_row: u32,
    pub scales_row: u32,
    pub out_row: u32,
    pub add_row: u32,
}

/// `struct Choose`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Choose {
    pub logits: Address,
    pub head: Address,
    pub run: Address,
    pub row: Address,
    pub id: Address,
    pub parts: Address,
    pub counter: Address,
    pub results: Address,
    pub vocab: u32,
    pub unused: u32,
}

/// Bytes, of a row, of what the blocks of a choice leave for the last of them, and the counter
/// after it.
pub const CHOICE_ROOM: u64 = 8 * CHOICE_BLOCKS as u64 + 8;

impl Choose {
    /// How it is cut, of so many rows.
    pub fn launch(self, rows: u32) -> Launch {
        let shape = shape([CHOICE_BLOCKS, rows, 1], 512, 0);
        Launch { kernel: Kernel::Choose, shape, parameter: Parameter::Choose(self) }
    }
}

/// `struct How`: how a row's token is chosen.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct HowAt {
    pub temperature: f32,
    pub min_p: f32,
    pub top_k: u32,
    pub penalised: u32,
    pub top_p: u64,
    pub counter: u64,
    pub repetition: f32,
    pub presence: f32,
    pub frequency: f32,
    pub unused: u32,
}

impl HowAt {
    /// By these options, the next random number being the one after `counter`.
    pub fn new(options: &SamplerOptions, counter: u64) -> HowAt {
        HowAt {
            temperature: options.temperature,
            min_p: options.min_p,
            top_k: options.top_k,
            penalised: options.has_penalties().into(),
            top_p: options.top_part(),
            counter,
            repetition: options.repetition_penalty,
            presence: options.presence_penalty,
            frequency: options.frequency_penalty,
            unused: 0,
        }
    }
}

/// `struct Sample`.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Sample {
    pub choose: Choose,
    pub how: Address,
    pub room: Address,
    pub seen: Address,
}

/// Bytes of `struct Room`, of a row.
pub const SAMPLE_ROOM: u64 = 8 * (3 * 2048 + SAMPLE_BLOCKS as u64) + 4 * 2048 + 24;

impl Sample {
    /// How it is cut, of so many rows: the best logit, the shares, the draw.
    pub fn launches(self, rows: u32) -> [Launch; 3] {
        let of = |kernel, blocks| {
            let shape = shape([blocks, rows, 1], 512, 0);
            Launch { kernel, shape, parameter: Parameter::Sample(self) }
        };
        [
            of(Kernel::SampleBest, CHOICE_BLOCKS),
            of(Kernel::SampleWeigh, SAMPLE_BLOCKS),
            of(Kernel::SamplePick, SAMPLE_BLOCKS),
        ]
    }
}

/// A kernel's parameter.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// A record.
    Call(Call),
    /// A product.
    Linear(Linear),
    /// Attention.
    Attend(Attend),
    /// A product of one row by a short kernel.
    RowProduct(RowProduct),
    /// Such products with weights in blocks.
    RowBlocks(RowBlocks),
    /// Products of a gate and of what it lets through.
    Pairs(Pairs),
    /// What a gate lets through.
    Gated(Gated),
    /// What a step begins with.
    Begin(Begin),
    /// Activations of few rows.
    FewCodes(FewCodes),
    /// A product of few rows.
    FewProduct(FewProduct),
    /// A choice.
    Choose(Choose),
    /// A draw.
    Sample(Sample),
    /// A router, and what is computed beside it.
    RouteIn(RouteIn),
    /// The first half of a mixture's experts.
    ExpertsIn(ExpertsIn),
    /// The second.
    ExpertsOut(ExpertsOut),
    /// The delta rule of one row.
    DeltaRow(DeltaRow),
    /// The delta rule in chunks.
    Rule(Rule),
}

impl Parameter {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        fn of<T>(p: &T) -> (*const u8, usize) {
            (std::ptr::from_ref(p).cast(), size_of::<T>())
        }
        let (at, len) = match self {
            Parameter::Call(p) => of(p),
            Parameter::Linear(p) => of(p),
            Parameter::Attend(p) => of(p),
            Parameter::RowProduct(p) => of(p),
            Parameter::RowBlocks(p) => of(p),
            Parameter::Pairs(p) => of(p),
            Parameter::Gated(p) => of(p),
            Parameter::Begin(p) => of(p),
            Parameter::FewCodes(p) => of(p),
            Parameter::FewProduct(p) => of(p),
            Parameter::Choose(p) => of(p),
            Parameter::Sample(p) => of(p),
            Parameter::RouteIn(p) => of(p),
            Parameter::ExpertsIn(p) => of(p),
            Parameter::ExpertsOut(p) => of(p),
            Parameter::DeltaRow(p) => of(p),
            Parameter::Rule(p) => of(p),
        };
        // SAFETY: a plain struct without padding (fields are ordered so), borrowed as long as
        // `self`.
        unsafe { std::slice::from_raw_parts(at, len) }
    }
}

/// One kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Grid, block, shared memory.
    pub shape: Shape,
    /// Its parameter.
    pub parameter: Parameter,
}

/// Where the regions are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bases {
    /// The data area.
    pub weights: Address,
    /// The first slot's caches.
    pub cache: Address,
    /// The first version of its recurrent state.
    pub recurrent: Address,
    /// Transient values.
    pub arena: Address,
    /// Ids, hidden rows, logits.
    pub io: Address,
    /// Room for parts of attention, and for its counters.
    pub parts: Address,
    /// See `parts`.
    pub counters: Address,
    /// Token ids of the step.
    pub ids: Address,
    /// Hidden rows that the LM head chooses.
    pub select: Address,
    /// Where the plan has the ids, and the chosen rows, in [`Region::Io`].
    pub io_words: [u64; 2],
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block may ask for.
    pub shared: u32,
    /// Whether the kernels that only Hopper has are there.
    pub hopper: bool,
    /// Most runs of a step.
    pub runs: u32,
    /// Whether attention and the delta rule of many rows may be near the contract's, and not its
    /// bits.
    pub fast: bool,
    /// Room for what chunks of the delta rule are by themselves; 0 where there is none.
    pub chunks: Address,
    /// Blocks of positions that attention is cut into at most: a power of two that the rows'
    /// positions need.
    pub blocks: u32,
}

impl Bases {
    /// An operand of a verified plan as an address.
    pub fn operand(&self, o: plan::Operand) -> Operand {
        let base = match o.region {
            Region::None => return Operand::default(),
            Region::Weights => self.weights,
            Region::Cache => self.cache,
            Region::Recurrent => self.recurrent,
            Region::Arena => self.arena,
            // What the host writes is copied with the rest of the step.
            Region::Io if o.offset == self.io_words[0] => self.ids.wrapping_sub(o.offset),
            Region::Io if o.offset == self.io_words[1] => self.select.wrapping_sub(o.offset),
            Region::Io => self.io,
        };
        Operand { at: base.wrapping_add(o.offset), row: o.row_stride, head: o.head_stride, dtype: o.dtype as u32 }
    }
}

/// Threads of a block where nothing asks for another number.
pub const THREADS: u32 = 256;
/// Most bytes of shared memory that a product takes, so that two kernels in a row fit side by side.
const MOST_SHARED: u32 = 100 << 10;
/// What the names begin with of kernels whose launches may ask for as much shared memory as there
/// is.
pub const ASK_SHARED: [&str; 8] = ["linear_", "attention", "fast_", "wide_", "hopper_", "top_k", "expert_sort", "few_"];
/// Bytes of shared memory that such a kernel has of its own at most, besides what launches ask for.
pub const OWN_SHARED: u32 = 2048;
/// Query heads that one block of attention takes.
const ATTENTION_HEADS: u32 = 4;
/// Blocks that a row and group of heads is cut into where few rows are computed.
pub const ATTENTION_SPLIT: u32 = 32;
/// Rows, and outputs, of a tile of tensor cores.
const TILE: u32 = 64;
/// Outputs of the larger tiles, and bytes of a stage of so many rows of them (`wide_stage` of the
/// kernels); they have four stages, or three.
const WIDE_OUTS: u32 = 128;
const fn wide_shared(rows: u32) -> u32 {
    (if rows == 128 { 3 } else { 4 }) * (rows * (128 + 16) + WIDE_OUTS * (64 + 8) + 256)
}
/// Rows and outputs of Hopper's own tiles, and the bytes that they take: what it takes to begin at
/// a multiple of 1,024, four stages as the kernel has them, and where rows begin.
const HOPPER_ROWS: u32 = 128;
const HOPPER_OUTS: u32 = 256;
const HOPPER_SHARED: u32 = 1024 + 4 * (HOPPER_ROWS * (128 + 16) + HOPPER_OUTS * (80 + 8)) + 8 * HOPPER_ROWS;
/// The same of pairs: also where scales of results go, and 64 rows of each warpgroup's results.
const HOPPER_PAIRS: u32 = HOPPER_SHARED + 8 * HOPPER_ROWS + 2 * 64 * 68 * 4;
/// Slots that an expert has on average from which on Hopper's own tiles are used.
const HOPPER_FROM: u32 = 48;
/// Queries of a tile of the attention that is near the contract's.
const FAST_QUERIES: u32 = 128;
/// Elements of a head of the delta rule that is near the contract's, rows of a chunk, columns of a
/// block, and rows from which on it is used.
const RULE_DIM: usize = 128;
const RULE_ROWS: u32 = 64;
const RULE_COLUMNS: u32 = 32;
const RULE_FROM: u32 = 64;
/// Threads of a block that makes what chunks are by themselves.
const CHUNK_THREADS: u32 = 128;
/// Bytes that a chunk is by itself: of a key head keys and queries in halves, of a value head two
/// squares of its rows and their gates.
const RULE_OF_KEYS: u32 = 2 * 2 * RULE_ROWS * RULE_DIM as u32;
const RULE_OF_VALUES: u32 = 2 * 2 * RULE_ROWS * RULE_ROWS + 16 * RULE_ROWS;
/// Bytes of shared memory of what makes these, and of what goes from chunk to chunk: three stages,
/// the state's columns and three times the rows', in halves.
const CHUNK_SHARED: u32 = RULE_OF_KEYS + 2 * RULE_ROWS * (4 * (RULE_ROWS + 4) + 16) + 16;
const RULE_SHARED: u32 = 3 * (RULE_OF_KEYS + RULE_OF_VALUES) + 2 * RULE_COLUMNS * (RULE_DIM as u32 + 3 * RULE_ROWS);
/// Rows from which on tiles are used.
const TILES_FROM: u32 = 24;
/// Threads of a block of the short attention.
const ROW_THREADS: u32 = 256;
/// Most rows that are multiplied together by tensor cores where weights are read once.
pub const FEW_ROWS: u32 = 16;
/// Blocks of the choice of a token.
const CHOICE_BLOCKS: u32 = 64;
const SAMPLE_BLOCKS: u32 = 128;
/// Most outputs of a product of one row that all are computed at once.
const MOST_AT_ONCE: u32 = 4096;
/// Queries of a tile of attention, and rows from which on attention is computed by tiles.
const TILE_QUERIES: u32 = 64;
const ATTENTION_TILES_FROM: u32 = 16;
/// What the short kernels of mixtures take: values of a row, values between an expert's two halves,
/// experts, and experts of a row, a shared one among them.
pub const MIXTURE_WIDTH: u32 = 2048;
/// See [`MIXTURE_WIDTH`].
pub const EXPERT_INNER: u32 = 512;
/// See [`MIXTURE_WIDTH`].
pub const MOST_EXPERTS: u32 = 512;
/// See [`MIXTURE_WIDTH`].
pub const EXPERT_SLOTS: u32 = 12;
/// Elements of a head, and taps, of the short kernel for the delta rule.
pub const DELTA_DIM: u32 = 128;
/// See [`DELTA_DIM`].
pub const DELTA_TAPS: usize = 4;
/// Rows of a convolution that one thread computes.
const CONV_TILE: u64 = 32;

const fn up(n: u64, by: u64) -> u32 {
    n.div_ceil(by) as u32
}

fn shape(grid: [u32; 3], block: u32, shared: u32) -> Shape {
    Shape { grid, block, shared, overlap: false }
}

/// Query heads a block of attention takes: a divisor of the group that shares keys and values.
pub fn heads_per_block(a: &op::attention::Attrs) -> u32 {
    let group = (a.heads / a.kv_heads.max(1)) as u32;
    (1..=ATTENTION_HEADS).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
}

/// Bytes that attention needs to put parts aside, and counters, for `rows` rows.
pub fn attention_room(a: &op::attention::Attrs, rows: u64) -> (u64, u64) {
    let blocks = (a.context as u64).div_ceil(ATTENTION_BLOCK as u64);
    let part = rows * a.heads as u64 * blocks * (a.dim as u64 + 2) * 4;
    (part, rows * a.heads as u64 * 4)
}

/// A grid with so many places, spread over two dimensions as one has room for 65,535.
fn places(mut shape: Shape, n: u64) -> Shape {
    shape.grid[2] = up(n, 32768);
    shape.grid[1] = up(n, shape.grid[2].into());
    shape
}

/// The weight format that short kernels take, of so many bits.
pub fn usual(bits: u8) -> u64 {
    WeightFormat::Affine { bits, group: 64, params: DType::BF16 }.code()
}

/// Bytes of shared memory of a short kernel: a staged row, and what the folds of so many outputs
/// take, or the row itself.
fn row_shared(inputs: u32, outputs: u32) -> u32 {
    let groups = inputs / 64;
    inputs + 8 * groups + (outputs * fold_bytes(groups)).max(4 * inputs)
}

/// Bytes that the fold of an output with so many groups takes.
fn fold_bytes(groups: u32) -> u32 {
    4 * (groups + 4) + 16 * (groups / 4 + 1)
}

/// Of a block format that short kernels take: values of a group, and bytes of the parameters of
/// 1,024 weights.
fn short_block(block: Block) -> Option<(u32, u32)> {
    let taken = matches!(block, Block::Q4_0 | Block::Q8_0 | Block::Q4K | Block::Q5K | Block::Q6K);
    let bytes = |elems: u64| 1024 / block.unit() as u32 * elems as u32;
    let (scales, supers) = match block.scale_words() {
        0 => (bytes(2), 0),
        words => (bytes(4 * words), bytes(if block.has_minimums() { 4 } else { 2 })),
    };
    taken.then(|| (block.group() as u32, scales + supers))
}

impl RowBlocks {
    /// Outputs of a warp, as the kernels have it.
    fn outs(kernel: Kernel) -> Option<u32> {
        match kernel {
            Kernel::BlocksNorm1 => Some(4),
            Kernel::BlocksNorm2 | Kernel::BlocksPlain1 => Some(2),
            Kernel::BlocksPlain2 | Kernel::BlocksPlain3 | Kernel::BlocksPlain4 => Some(1),
            _ => None,
        }
    }

    /// The kernel for so many inputs, with a norm or without.
    fn kernel(inputs: u32, norm: bool) -> Option<Kernel> {
        match (inputs, norm) {
            (1024, true) => Some(Kernel::BlocksNorm1),
            (2048, true) => Some(Kernel::BlocksNorm2),
            (1024, false) => Some(Kernel::BlocksPlain1),
            (2048, false) => Some(Kernel::BlocksPlain2),
            (3072, false) => Some(Kernel::BlocksPlain3),
            (4096, false) => Some(Kernel::BlocksPlain4),
            _ => None,
        }
    }

    /// Bytes of shared memory of a block that computes outputs in this format: the row, the
    /// parameters of eight warps' rows, and the folds, or the row itself.
    fn shared(inputs: u32, block: Block, out: u32, norm: bool) -> Option<u32> {
        let (group, params) = short_block(block)?;
        let (groups, lists) = (inputs / group, if block.has_minimums() { 3 } else { 2 });
        let folds = 8 * out * if norm { 2 } else { 1 } * 4 * (lists * groups + 4);
        Some(inputs + 8 * groups + 8 * out * (inputs / 1024) * params + folds.max(4 * inputs))
    }
}

impl Launch {
    /// What must be launched before it: of the delta rule in chunks what chunks are by themselves.
    pub fn before(&self) -> Option<Launch> {
        let Parameter::Rule(rule) = self.parameter else { return None };
        let shape = shape([rule.k_heads, rule.chunks, 1], CHUNK_THREADS, CHUNK_SHARED);
        Some(Launch { kernel: Kernel::FastRuleChunks, shape, ..*self })
    }

    /// This and another product of the same row in one launch, if both are in blocks.
    pub fn beside(&self, other: &Launch) -> Option<Launch> {
        let (Parameter::RowBlocks(mut both), Parameter::RowBlocks(more)) = (self.parameter, other.parameter) else {
            return None;
        };
        // What leaves the norm is written once, by the first.
        let row = RowProduct { sum: both.row.sum, normed: both.row.normed, ..more.row };
        let fits = self.kernel == other.kernel
            && row == both.row
            && [more.row.sum, more.row.normed, both.row.add, more.row.add] == [0; 4]
            && (both.pairs, more.pairs) == (0, 0);
        let free = both.parts.iter().position(|part| part.blocks == 0)?;
        let ([part, RowPart { blocks: 0, .. }, _], true) = (more.parts, fits) else { return None };
        let mut shape = self.shape;
        both.parts[free] = RowPart { first: shape.grid[0], ..part };
        shape.grid[0] += part.blocks;
        shape.shared = shape.shared.max(other.shape.shared);
        Some(Launch { shape, parameter: Parameter::RowBlocks(both), ..*self })
    }

    /// This product as that of a gate, together with what the gate lets through: its own second
    /// half, or another product. The int8 form of `silu(gate) * other` is what is left of them.
    pub fn pairs(&self, other: Option<&Launch>, left: &Left, bases: &Bases) -> Option<Launch> {
        let (Kernel::Hopper128, Parameter::Linear(mut product)) = (self.kernel, self.parameter) else { return None };
        let planes = match other {
            Some(Launch { kernel: Kernel::Hopper128, parameter: Parameter::Linear(other), .. }) => {
                let like = Linear {
                    planes: product.planes,
                    out: product.out,
                    out_row: product.out_row,
                    out_slot: product.out_slot,
                    ..*other
                };
                (like == product).then_some(other.planes)?
            }
            Some(_) => return None,
            None => {
                product.outputs /= 2;
                [0, 1, 2].map(|i| product.planes[i] + u64::from(product.outputs) * product.plane_row[i])
            }
        };
        let fits = product.outputs.is_multiple_of(64) && left.is_aligned() && HOPPER_PAIRS <= bases.shared;
        let parameter = Parameter::Pairs(Pairs { product, planes, left: *left });
        let mut shape = Shape { shared: HOPPER_PAIRS, ..self.shape };
        shape.grid[0] = product.outputs.div_ceil(HOPPER_OUTS / 2);
        fits.then_some(Launch { kernel: Kernel::HopperPairs128, shape, parameter })
    }
}

impl Gated {
    /// What a gate lets through, a silu or a sigmoid, as `left`; of so many rows, and of so many
    /// heads of so many values each.
    pub fn new([a, b]: [Operand; 2], left: &Left, [rows, heads, dim]: [u32; 3], sigmoid: bool) -> Gated {
        Gated { a, b, left: *left, rows, heads, dim, sigmoid: sigmoid.into() }
    }

    /// How it is cut, if sixteen bytes are loaded at once.
    pub fn launch(self) -> Option<Launch> {
        let fits = [&self.a, &self.b].into_iter().all(aligned) && self.left.is_aligned() && self.dim.is_multiple_of(64);
        // Eight groups a warp.
        let groups = u64::from(self.rows * self.heads) * u64::from(self.dim / 64);
        let shape = shape([up(groups, 64), 1, 1], THREADS, 0);
        fits.then_some(Launch { kernel: Kernel::GatedCodes, shape, parameter: Parameter::Gated(self) })
    }
}

impl RouteIn {
    /// How it is cut.
    pub fn launch(self) -> Launch {
        let blocks = self.row.outputs / 16 + self.outputs.div_ceil(8);
        let shape = shape([blocks, 1, 1], THREADS, row_shared(MIXTURE_WIDTH, 16));
        Launch { kernel: Kernel::Route2, shape, parameter: Parameter::RouteIn(self) }
    }
}

impl ExpertsIn {
    /// How it is cut: sixteen warps of two pairs, or of two and a half where those would be more
    /// blocks than there are multiprocessors.
    pub fn launch(self, bases: &Bases) -> Launch {
        let pairs = self.k * EXPERT_INNER;
        let (kernel, each) = match pairs / 32 > bases.multiprocessors && pairs.is_multiple_of(40) {
            true => (Kernel::ExpertsIn5, 40),
            false => (Kernel::ExpertsIn2, 32),
        };
        let shape = shape([pairs / each, 1, 1], 2 * THREADS, row_shared(MIXTURE_WIDTH, 2 * each));
        Launch { kernel, shape, parameter: Parameter::ExpertsIn(self) }
    }
}

impl ExpertsOut {
    /// How it is cut.
    pub fn launch(self) -> Launch {
        let groups = EXPERT_INNER / 64;
        let shared = EXPERT_SLOTS * (EXPERT_INNER + 8 * groups + 16 * fold_bytes(groups));
        let shape = shape([MIXTURE_WIDTH / 16, 1, 1], 512, shared);
        Launch { kernel: Kernel::ExpertsOut, shape, parameter: Parameter::ExpertsOut(self) }
    }
}

/// `struct Rule`: the delta rule of many rows in chunks.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Rule {
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    pub decay: Operand,
    pub beta: Operand,
    pub state: Operand,
    pub out: Operand,
    pub step: Step,
    /// [`rule_room`].
    pub room: Address,
    pub k_heads: u32,
    pub v_heads: u32,
    pub tiled: u32,
    /// Chunks that the step's rows may be.
    pub chunks: u32,
}

/// Chunks of so many rows of so many runs at most, each of which has one that it does not fill.
fn chunks(rows: u64, runs: u32) -> u64 {
    rows.div_ceil(RULE_ROWS.into()) + rows.min(runs.into()).saturating_sub(1)
}

/// Bytes that the delta rule in chunks needs for so many rows of so many runs; 0 if it does not
/// take these heads.
pub fn rule_room(a: &op::gdn_scan::Attrs, rows: u64, runs: u32) -> u64 {
    let heads = (a.k_dim, a.v_dim) == (RULE_DIM, RULE_DIM) && a.k_heads > 0 && a.v_heads.is_multiple_of(a.k_heads);
    let of = a.k_heads as u64 * u64::from(RULE_OF_KEYS) + a.v_heads as u64 * u64::from(RULE_OF_VALUES);
    if heads { chunks(rows, runs) * of } else { 0 }
}

/// Whether a block may ask for the shared memory that the rule in chunks takes, of so many bytes.
pub fn rule_fits(shared: u32) -> bool {
    CHUNK_SHARED.max(RULE_SHARED) <= shared
}

impl Rule {
    /// The rule in chunks, where that is asked for, and heads and rows are such as it takes.
    pub fn of(operands: &[Operand; 12], attrs: &[u64; 12], bases: &Bases, step: Step) -> Option<Launch> {
        let (a, o) = (op::gdn_scan::Attrs::of(attrs), op::gdn_scan::Operands::of(operands));
        let rows = a.rows as u64;
        let fits = rule_room(&a, rows, bases.runs) > 0
            && rows >= RULE_FROM.into()
            && [&o.q, &o.k, &o.v, &o.state, &o.out].into_iter().all(aligned)
            && rule_fits(bases.shared);
        if !bases.fast || bases.chunks == 0 || !fits {
            return None;
        }
        let rule = Rule {
            q: o.q,
            k: o.k,
            v: o.v,
            decay: o.decay,
            beta: o.beta,
            state: o.state,
            out: o.out,
            step,
            room: bases.chunks,
            k_heads: a.k_heads as u32,
            v_heads: a.v_heads as u32,
            tiled: a.tiled as u32,
            chunks: chunks(rows, bases.runs) as u32,
        };
        let grid = [RULE_DIM as u32 / RULE_COLUMNS, rule.v_heads, rows.min(bases.runs.into()) as u32];
        let shape = shape(grid, THREADS, RULE_SHARED);
        Some(Launch { kernel: Kernel::FastRule, shape, parameter: Parameter::Rule(rule) })
    }
}

impl DeltaRow {
    /// Lets the product before it ask for the state, whose heads lie side by side.
    pub fn ahead(&self, product: &mut Launch) {
        if let Parameter::RowProduct(product) = &mut product.parameter {
            (product.ahead, product.runs) = (self.state, self.runs);
            product.ahead_bytes = (u64::from(self.v_heads) * self.state_head * 4) as u32;
        }
    }

    /// How it is cut.
    pub fn launch(self) -> Launch {
        let shape = shape([self.v_heads, 1, 1], DELTA_DIM, 0);
        Launch { kernel: Kernel::DeltaRow128, shape, parameter: Parameter::DeltaRow(self) }
    }
}

/// The launch of a record, or none if the op moves nothing. `few` says that attention's parts have
/// room, as in decode steps.
pub fn launch(r: &Record<'_>, bases: &Bases, step: Step, few: bool) -> Option<Launch> {
    let mut operands = [Operand::default(); 12];
    (0..r.kind.spec().operands.len()).for_each(|i| operands[i] = bases.operand(r.operand(i)));
    launch_with(r, operands, bases, step, few)
}

/// The same with operands elsewhere than the plan has them.
pub fn launch_with(r: &Record<'_>, operands: [Operand; 12], bases: &Bases, step: Step, few: bool) -> Option<Launch> {
    use Kernel as K;
    let mut attrs = [0; 12];
    attrs[..r.attrs.len()].copy_from_slice(r.attrs);
    let call = Parameter::Call(Call { operands, attrs, step });
    // Attributes of op `$op` by name.
    macro_rules! of {
        ($op:ident, |$a:ident| $e:expr) => {{
            let $a = op::$op::Attrs::of(&attrs);
            $e
        }};
    }
    // The first attribute of every op.
    let rows = attrs[0];
    // A thread an element of a row; a warp a thing.
    let flat = |n: usize| shape([up(n as u64, THREADS.into()), rows as u32, 1], THREADS, 0);
    let warps = |n: usize, y: u64| shape([up(n as u64, 4), y as u32, 1], 128, 0);
    let conv = |kernel: Kernel, channels: usize| {
        // Each run has a tile that it does not fill.
        let tiles = rows.div_ceil(CONV_TILE) + rows.min(bases.runs.into()) - 1;
        (kernel, shape([up(channels as u64, 128), tiles as u32, 1], 128, 0))
    };
    let (kernel, shape) = match r.kind {
        OpKind::View | OpKind::Linear | OpKind::ExpertLinear => return None,
        OpKind::Embed => (K::Embed, of!(embed, |a| flat(a.dim))),
        OpKind::RmsNorm => (K::RmsNorm, of!(rms_norm, |a| warps(a.rows * a.heads, 1))),
        OpKind::AddRmsNorm => (K::AddRmsNorm, of!(add_rms_norm, |a| warps(a.rows * a.heads, 1))),
        OpKind::L2Norm => (K::L2Norm, of!(l2_norm, |a| warps(a.rows * a.heads, 1))),
        OpKind::Add => (K::Add, of!(add, |a| flat(a.heads * a.dim))),
        OpKind::Mul => (K::Mul, of!(mul, |a| flat(a.heads * a.dim))),
        OpKind::Silu => (K::Silu, of!(silu, |a| flat(a.heads * a.dim))),
        OpKind::Sigmoid => (K::Sigmoid, of!(sigmoid, |a| flat(a.heads * a.dim))),
        OpKind::SiluMul => (K::SiluMul, of!(silu_mul, |a| flat(a.heads * a.dim))),
        OpKind::SigmoidMul => (K::SigmoidMul, of!(sigmoid_mul, |a| flat(a.heads * a.dim))),
        OpKind::MulRows => (K::MulRows, of!(mul_rows, |a| flat(a.dim))),
        OpKind::GatherRows => (K::GatherRows, of!(gather_rows, |a| flat(a.dim))),
        OpKind::Quantize => {
            let (a, o) = (op::quantize::Attrs::of(&attrs), op::quantize::Operands::of(&operands));
            let (x, codes) = (o.x, o.codes);
            let aligned = (x.at | (x.row * 4) | (u64::from(x.head) * 4)).is_multiple_of(16)
                && (codes.at | codes.row | u64::from(codes.head)).is_multiple_of(4);
            if a.group == 64 && a.dim.is_multiple_of(512) && aligned {
                (K::Quantize64, warps(a.rows * a.heads * (a.dim / 512), 1))
            } else {
                (K::Quantize, warps(a.rows * a.heads * (a.dim / a.group), 1))
            }
        }
        OpKind::Softmax => (K::Softmax, of!(softmax, |a| warps(a.rows, 1))),
        OpKind::WeightedSum => (K::WeightedSum, of!(weighted_sum, |a| flat(a.dim))),
        OpKind::Rope => (K::Rope, of!(rope, |a| flat(a.heads * (a.dim - a.half)))),
        OpKind::RopeTable => (K::RopeTable, of!(rope_table, |a| flat(a.half))),
        OpKind::KvWrite => (K::KvWrite, of!(kv_write, |a| flat(a.heads * a.dim))),
        OpKind::LinearDense => (K::LinearDense, of!(linear_dense, |a| warps(a.outputs, rows.div_ceil(8)))),
        OpKind::ExpertLinearDense => {
            (K::ExpertLinearDense, of!(expert_linear_dense, |a| places(warps(a.outputs, 1), rows * a.k as u64)))
        }
        OpKind::TopK => (K::TopK, of!(top_k, |a| shape([rows as u32, 1, 1], 32, (2 * a.experts + a.k) as u32 * 4))),
        OpKind::ExpertSort => {
            // Counts for each warp, in 32 KB if experts are not too many.
            let experts = op::expert_sort::Attrs::of(&attrs).experts as u32;
            let warps = (8192 / experts.max(1)).clamp(1, 16);
            (K::ExpertSort, shape([1, 1, 1], 32 * warps, (experts * (warps + 1) + 1) * 4))
        }
        OpKind::Conv => {
            of!(conv, |a| conv(if a.kernel <= 4 { K::Conv4 } else { K::Conv }, a.heads * a.dim))
        }
        OpKind::ConvSilu => {
            of!(conv_silu, |a| conv(if a.kernel <= 4 { K::ConvSilu4 } else { K::ConvSilu }, a.heads * a.dim))
        }
        OpKind::GdnGates => (K::GdnGates, of!(gdn_gates, |a| flat(a.heads * a.dim))),
        OpKind::GdnScan => {
            if let Some(rule) = Rule::of(&operands, &attrs, bases, step).filter(|_| !few) {
                return Some(rule);
            }
            let s = op::gdn_scan::Attrs::of(&attrs);
            // Columns of a block, and its threads.
            let (kernel, columns, threads) =
                if s.k_dim == 128 { (K::GdnScan128, 32, 128) } else { (K::GdnScan, 64, 64) };
            let grid = [up(s.v_dim as u64, columns), s.v_heads as u32, rows.min(bases.runs.into()) as u32];
            (kernel, shape(grid, threads, 0))
        }
        OpKind::LinearQuant | OpKind::ExpertLinearQuant => return Some(product(r, &operands, &attrs, bases)),
        OpKind::Attention => return Some(attention(&operands, &attrs, bases, step).launch(bases, few)),
    };
    Some(Launch { kernel, shape, parameter: call })
}

/// The embedding of a step's rows and the table of their rotations as one launch, if they are that.
pub fn begin(embed: &Launch, table: &Launch) -> Option<Launch> {
    let (Parameter::Call(e), Parameter::Call(t)) = (embed.parameter, table.parameter) else { return None };
    let same = embed.shape.grid[1] == table.shape.grid[1];
    if embed.kernel != Kernel::Embed || table.kernel != Kernel::RopeTable || !same {
        return None;
    }
    let [blocks, rows, _] = embed.shape.grid;
    let parameter = Parameter::Begin(Begin { embed: e, table: t, blocks: blocks.into() });
    Some(Launch { kernel: Kernel::Begin, shape: shape([blocks + table.shape.grid[0], rows, 1], THREADS, 0), parameter })
}

/// A product as a record asks for it: activations are copied as they are.
fn product(r: &Record<'_>, operands: &[Operand; 12], attrs: &[u64; 12], bases: &Bases) -> Launch {
    let expert = r.kind == OpKind::ExpertLinearQuant;
    let mut p = Linear::default();
    let (x, planes, out);
    if expert {
        let (a, o) = (op::expert_linear_quant::Attrs::of(attrs), op::expert_linear_quant::Operands::of(operands));
        (x, planes, out) = ([o.codes, o.xscales, o.xsums], o.weight, o.out);
        (p.order, p.starts) = (o.order.at, o.starts.at);
        (p.k, p.experts, p.x_slots) = (a.k as u32, a.experts as u32, a.x_slots as u32);
        (p.inputs, p.outputs, p.rows, p.format) = (a.inputs as u32, a.outputs as u32, a.rows as u32, a.format.code());
    } else {
        let (a, o) = (op::linear_quant::Attrs::of(attrs), op::linear_quant::Operands::of(operands));
        (x, planes, out) = ([o.codes, o.xscales, o.xsums], o.weight, o.out);
        (p.inputs, p.outputs, p.rows, p.format) = (a.inputs as u32, a.outputs as u32, a.rows as u32, a.format.code());
    }
    p.set_weight(&planes, expert);
    p.x = x.map(|o| o.at);
    (p.x_row, p.x_slot) = (x[0].row, u64::from(x[0].head));
    (p.xs_row, p.xs_slot) = (x[1].row, u64::from(x[1].head));
    (p.out, p.out_row, p.out_slot) = (out.at, out.row, u64::from(out.head));
    p.launch(bases)
}

impl Linear {
    /// Takes the planes of a weight.
    pub fn set_weight(&mut self, planes: &[Operand], expert: bool) {
        for (i, plane) in planes.iter().take(3).enumerate() {
            let size = DType::from_code(plane.dtype as u8).unwrap_or(DType::F32).bytes();
            self.planes[i] = plane.at;
            let row = if expert { u64::from(plane.head) } else { plane.row };
            self.plane_row[i] = row * size;
            self.plane_expert[i] = if expert { plane.row * size } else { 0 };
        }
    }

    /// One of the short kernels for one row, if the product is of the usual kind: whole lots of
    /// 1,024 inputs, four bits, groups of 64.
    fn row(&self, bases: &Bases) -> Option<Launch> {
        use Kernel as K;
        if let Some(WeightFormat::Block(block)) = WeightFormat::from_code(self.format) {
            return self.row_blocks(block, bases);
        }
        let norm = self.stage == stage::NORM;
        // Of 2,048 inputs three blocks of 32 outputs fit on a multiprocessor.
        let at_once = if self.inputs == 2048 { 96 * bases.multiprocessors } else { 0 };
        let head = self.outputs > MOST_AT_ONCE.max(at_once);
        let (kernel, out) = match (self.inputs, norm, self.flags & stage::PAIRS != 0) {
            (1024, true, false) if head && self.add == 0 => (K::RowHead1, 4),
            (2048, true, false) if head && self.add == 0 => (K::RowHead2, 4),
            (1024, true, false) => (K::RowNorm1, 4),
            (2048, true, false) => (K::RowNorm2, 4),
            (1024, true, true) => (K::RowPairs1, 8),
            (2048, true, true) => (K::RowPairs2, 2),
            (1024, false, false) => (K::RowPlain1, 2),
            (2048, false, false) => (K::RowPlain2, 1),
            (3072, false, false) => (K::RowPlain3, 1),
            (4096, false, false) => (K::RowPlain4, 2),
            _ => return None,
        };
        if !self.outputs.is_multiple_of(8 * out) || !norm && self.stage != stage::PLAIN {
            return None;
        }
        let parameter = self.row_product()?;
        // A block of the last product goes on to further outputs, so that what it stages is used
        // often; it then has two turns' dots at a time.
        let loops = matches!(kernel, K::RowHead1 | K::RowHead2);
        // As many as fit on a multiprocessor at once.
        let most = if loops { 3 * bases.multiprocessors } else { u32::MAX };
        let grid = [(self.outputs / (8 * out)).min(most), 1, 1];
        let threads = if kernel == K::RowPlain4 { 2 * THREADS } else { THREADS };
        let shape = shape(grid, threads, row_shared(self.inputs, 8 * out * if loops { 2 } else { 1 }));
        Some(Launch { kernel, shape, parameter: Parameter::RowProduct(parameter) })
    }

    /// The short kernel for one row and weights in blocks, if there is one: whole lots of 1,024
    /// inputs, a norm in F32.
    fn row_blocks(&self, block: Block, bases: &Bases) -> Option<Launch> {
        let norm = self.stage == stage::NORM;
        let kernel = RowBlocks::kernel(self.inputs, norm)?;
        let out = RowBlocks::outs(kernel)?;
        let pieces = [self.planes[1], self.planes[2], self.plane_row[1], self.plane_row[2]];
        let rows = [self.planes[0], self.plane_row[0], self.x[0], self.x2, self.sum, self.normed, self.y];
        let fits = (norm || self.stage == stage::PLAIN)
            && (self.rows, self.order) == (1, 0)
            && self.outputs.is_multiple_of(8 * out)
            && rows.iter().all(|n| n.is_multiple_of(16))
            && pieces.iter().all(|n| n.is_multiple_of(8))
            && if norm {
                self.add == 0 && self.y_dtype == DType::F32 as u32
            } else {
                [self.x2, self.normed] == [0; 2] && self.flags & stage::PAIRS == 0
            };
        fits.then_some(())?;
        let shared = RowBlocks::shared(self.inputs, block, out, norm)?;
        // With a norm a block goes on to further outputs; as many as fit on a multiprocessor at
        // once.
        let most = if norm { 3 * bases.multiprocessors } else { u32::MAX };
        let blocks = (self.outputs / (8 * out)).min(most);
        let part = RowPart {
            planes: self.planes,
            out: self.out,
            w_row: self.plane_row[0].try_into().ok()?,
            s_row: self.plane_row[1].try_into().ok()?,
            b_row: self.plane_row[2].try_into().ok()?,
            outputs: self.outputs,
            block: block as u32,
            first: 0,
            blocks,
            unused: 0,
        };
        let none = RowPart { first: u32::MAX, ..RowPart::default() };
        let row = RowProduct {
            x: self.x[0],
            y: self.y,
            add: self.add,
            x2: self.x2,
            sum: self.sum,
            normed: self.normed,
            eps: self.eps,
            offset: self.offset,
            ..RowProduct::default()
        };
        let pairs = u32::from(self.flags & stage::PAIRS != 0);
        let parameter = Parameter::RowBlocks(RowBlocks { row, pairs, unused: 0, parts: [part, none, none] });
        Some(Launch { kernel, shape: shape([blocks, 1, 1], THREADS, shared), parameter })
    }

    /// What the short kernels are told, if planes and activations are of the kind they take.
    pub fn row_product(&self) -> Option<RowProduct> {
        let norm = self.stage == stage::NORM;
        let fits = self.is_usual(4)
            && self.rows == 1
            && self.order == 0
            && self.x[0].is_multiple_of(16)
            && [self.x2, self.sum, self.normed].iter().all(|at| at.is_multiple_of(16))
            && (norm || [self.x2, self.normed] == [0; 2])
            && (!norm || self.y_dtype == DType::BF16 as u32 && self.y.is_multiple_of(8));
        fits.then_some(())?;
        Some(RowProduct {
            planes: self.planes,
            x: self.x[0],
            y: self.y,
            out: self.out,
            add: self.add,
            x2: self.x2,
            sum: self.sum,
            normed: self.normed,
            w_row: self.plane_row[0].try_into().ok()?,
            s_row: self.plane_row[1].try_into().ok()?,
            outputs: self.outputs,
            eps: self.eps,
            offset: self.offset,
            ..RowProduct::default()
        })
    }

    /// Whether the weight has so many bits in groups of 64, parameters in BF16, and rows of which
    /// sixteen bytes are loaded at once.
    pub fn is_usual(&self, bits: u8) -> bool {
        let codes = [self.planes[0], self.plane_row[0], self.plane_expert[0]];
        let params = [self.planes[1], self.planes[2], self.plane_row[1], self.plane_expert[1]];
        self.format == usual(bits)
            && codes.iter().chain(&params).all(|n| n.is_multiple_of(16))
            && self.plane_row[1] == self.plane_row[2]
            && self.plane_expert[1] == self.plane_expert[2]
    }

    /// The launches of a product of few rows that makes its activations itself, unless they are
    /// made; if it is of the usual kind.
    pub fn few(&self, form: Form, bases: &Bases) -> Option<Vec<Launch>> {
        use Kernel as K;
        let Form { at: codes, rows, group, made } = form;
        let head = self.outputs > MOST_AT_ONCE;
        let pairs = self.flags & stage::PAIRS != 0;
        let (kernel, tiles) = match (self.inputs, pairs) {
            (1024, false) if head && self.add == 0 => (K::FewHead1, 1),
            (2048, false) if head && self.add == 0 => (K::FewHead2, 1),
            (1024, true) => (K::FewPairs1, 4),
            (2048, true) => (K::FewPairs2, 4),
            // Few outputs are spread over as many blocks as there are tiles of eight.
            (1024, false) if self.outputs <= 8 * bases.multiprocessors => (K::FewPlain1, 1),
            (2048, false) if self.outputs <= 16 * bases.multiprocessors => (K::FewPlain2, 1),
            (3072, false) => (K::FewPlain3, 1),
            (1024, false) => (K::FewWide1, 4),
            (2048, false) => (K::FewWide2, 4),
            _ => return None,
        };
        let bytes16 = [self.planes[0], self.plane_row[0], codes[0], rows[0]];
        let bytes8 = [self.planes[1], self.planes[2], self.plane_row[1], self.out, 4 * self.out_row];
        let fits = bytes16.iter().all(|n| n.is_multiple_of(16))
            && bytes8.iter().all(|n| n.is_multiple_of(8))
            && self.plane_row[1] == self.plane_row[2]
            && (2..=FEW_ROWS).contains(&self.rows)
            && self.order == 0
            && self.format == usual(4)
            && group == 64
            && self.outputs.is_multiple_of(8 * tiles);
        if !fits || self.stage == stage::CODES {
            return None;
        }
        let small = |n: u64| u32::try_from(n).ok();
        let mut launches = Vec::new();
        if !made {
            launches.push(self.form(form)?);
        }
        let parameter = FewProduct {
            planes: self.planes,
            codes: codes[0],
            scales: codes[1],
            sums: codes[2],
            out: self.out,
            add: self.add,
            w_row: small(self.plane_row[0])?,
            s_row: small(self.plane_row[1])?,
            outputs: self.outputs,
            rows: self.rows,
            codes_row: small(rows[0])?,
            scales_row: small(rows[1])?,
            out_row: small(self.out_row)?,
            add_row: small(self.add_row)?,
        };
        let groups = self.inputs / 64;
        let (blocks, shared) = match kernel {
            // Codes and parameters of all rows, and parameters of eight warps' tiles.
            K::FewHead1 | K::FewHead2 => (
                (self.outputs / 64).clamp(1, 2 * bases.multiprocessors),
                FEW_ROWS * (self.inputs + 64) + 8 * FEW_ROWS * (groups + 1) + 8 * 8 * 8 * 17,
            ),
            _ => (self.outputs / (8 * tiles), 512 * tiles * groups + 8 * (8 * tiles + FEW_ROWS) * (groups + 1)),
        };
        let shape = shape([blocks, 1, 1], THREADS, shared);
        launches.push(Launch { kernel, shape, parameter: Parameter::FewProduct(parameter) });
        Some(launches)
    }

    /// What makes the activations of several rows, in groups of 64, if there is a kernel for it.
    pub fn form(&self, Form { at: codes, rows, .. }: Form) -> Option<Launch> {
        use Kernel as K;
        let small = |n: u64| u32::try_from(n).ok();
        let parameter = FewCodes {
            x: self.x[0],
            x2: self.x2,
            y: self.y,
            sum: self.sum,
            normed: self.normed,
            codes: codes[0],
            scales: codes[1],
            sums: codes[2],
            x_row: small(self.x_row)?,
            x2_row: small(self.x2_row)?,
            sum_row: small(self.sum_row)?,
            normed_row: small(self.normed_row)?,
            codes_row: small(rows[0])?,
            scales_row: small(rows[1])?,
            eps: self.eps,
            offset: self.offset,
            rows: self.rows,
            unused: 0,
        };
        // Four values are loaded at once, and as many factors of the norm.
        let bytes16 = [self.x[0], self.x2, self.sum, self.normed];
        let rows16 = [self.x_row, self.x2_row, self.sum_row, self.normed_row];
        let norm = self.stage == stage::NORM;
        // Of more rows than few a warp has one, if it is short.
        let many = self.rows > FEW_ROWS;
        let (kernel, grid, shared) = match (norm, self.inputs) {
            (false, inputs) if inputs.is_multiple_of(1024) => (K::FewCodes, [self.rows, inputs / 1024, 1], 0),
            (true, 1024) if many => (K::NormCodes1, [self.rows.div_ceil(8), 1, 1], 0),
            (true, 1024) => (K::FewNorm1, [self.rows, 1, 1], 0),
            (true, 2048) => (K::FewNorm2, [self.rows, 1, 1], 4 * self.inputs),
            _ => return None,
        };
        let fits = bytes16.iter().all(|n| n.is_multiple_of(16))
            && rows16.iter().all(|n| n.is_multiple_of(4))
            && codes[0].is_multiple_of(16)
            && rows[0].is_multiple_of(16)
            && (!norm || self.y_dtype == DType::BF16 as u32 && self.y.is_multiple_of(8));
        let shape = shape(grid, THREADS, shared);
        fits.then_some(Launch { kernel, shape, parameter: Parameter::FewCodes(parameter) })
    }

    /// The launches of a product of many rows whose activations are made first, as for
    /// [`Linear::few`].
    pub fn many(mut self, form: Form, bases: &Bases) -> Option<Vec<Launch>> {
        let usual = form.group == 64 && WeightFormat::from_code(self.format)?.activation_group() == Some(64);
        let makes = if form.made { None } else { Some(self.form(form).filter(|_| usual)?) };
        (self.stage, self.flags, self.x) = (stage::CODES, 0, form.at);
        [self.x_row, self.xs_row] = form.rows;
        Some(makes.into_iter().chain([self.launch(bases)]).collect())
    }

    /// The larger tiles, if the weight is of the usual kind: a kernel, the rows and outputs of its
    /// tiles, and threads and shared memory of its blocks. Offsets within an operand have 32 bits
    /// there.
    fn wide(&self, slots: u32, bases: &Bases) -> Option<(Kernel, [u32; 2], u32, u32)> {
        // So many bytes are brought at once.
        let bytes16 = [self.planes[0], self.plane_row[0], self.plane_expert[0], self.x_row, self.x_slot];
        let bytes8 = [self.x[1], self.x[2], 4 * self.xs_row, 4 * self.xs_slot];
        let bytes4 = [&self.planes[1..], &self.plane_row[1..], &self.plane_expert[1..]].concat();
        let within = |rows: u32, row: u64| u64::from(rows) * row < 1 << 32;
        let last = u64::from(self.x_slots) * self.x_slot.max(4 * self.xs_slot);
        let fits = self.format == usual(4)
            && self.inputs.is_multiple_of(128)
            && bytes16.iter().all(|n| n.is_multiple_of(16))
            && bytes8.iter().all(|n| n.is_multiple_of(8))
            && bytes4.iter().all(|n| n.is_multiple_of(4))
            && self.plane_row[1] == self.plane_row[2]
            && within(self.rows, self.x_row.max(4 * self.xs_row) + last)
            && within(self.outputs, self.plane_row[0].max(self.plane_row[1]));
        if !fits {
            return None;
        }
        // Of Hopper's own, which are much quicker, three quarters of the multiprocessors having a
        // block are enough; what an expert does not fill of a tile costs it little.
        let blocks = slots.div_ceil(HOPPER_ROWS) * (self.outputs / HOPPER_OUTS);
        let enough = match self.order {
            0 => 4 * blocks >= 3 * bases.multiprocessors,
            _ => self.outputs >= HOPPER_OUTS && slots / self.experts.max(1) >= HOPPER_FROM,
        };
        if bases.hopper && enough && HOPPER_SHARED <= bases.shared {
            return Some((Kernel::Hopper128, [HOPPER_ROWS, HOPPER_OUTS], 384, HOPPER_SHARED));
        }
        // The largest of which every multiprocessor has a block, or, of experts, that their slots
        // fill.
        let blocks = |rows| u64::from(slots.div_ceil(rows)) * u64::from(self.outputs.div_ceil(WIDE_OUTS));
        let enough = |rows: u32| match self.order {
            0 => blocks(rows) >= u64::from(bases.multiprocessors),
            _ => rows <= 64 && slots / self.experts.max(1) >= rows,
        };
        let all = [(Kernel::Wide128, 128, 256), (Kernel::Wide64, 64, 128), (Kernel::Wide32, 32, 128)];
        let (kernel, rows, threads) = all.into_iter().find(|(_, rows, _)| enough(*rows)).unwrap_or(all[2]);
        let shared = wide_shared(rows);
        (shared <= bases.shared).then_some((kernel, [rows, WIDE_OUTS], threads, shared))
    }

    /// The kernel that fits, and how it is cut.
    pub fn launch(self, bases: &Bases) -> Launch {
        use Kernel as K;
        if let Some(row) = self.row(bases) {
            return row;
        }
        let format = WeightFormat::from_code(self.format).unwrap_or(WeightFormat::Mxfp4);
        // Sixteen bytes are loaded at once where rows begin at multiples of that.
        let aligned = self.planes[0].is_multiple_of(16)
            && self.plane_row[0].is_multiple_of(16)
            && self.plane_expert[0].is_multiple_of(16);
        // For one row, for one with several outputs a warp, for several rows, for tiles.
        let [few, one_row, several, tile] = match format {
            WeightFormat::Affine { bits: 4, .. } if aligned => {
                [K::LinearQ4x1, K::LinearQ4x4, K::LinearQ4Rows, K::TilesQ4]
            }
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => {
                [K::LinearE2m1x4, K::LinearE2m1x4, K::LinearE2m1Rows, K::TilesE2m1]
            }
            WeightFormat::Block(block) => {
                let [one, several, tile] = match block {
                    Block::Q4_0 if aligned => [K::LinearQ4_0x4, K::LinearQ4_0Rows, K::TilesQ4_0],
                    Block::Q8_0 if aligned => [K::LinearQ8_0x4, K::LinearQ8_0Rows, K::TilesQ8_0],
                    Block::Q4K if aligned => [K::LinearQ4Kx4, K::LinearQ4KRows, K::TilesQ4K],
                    Block::Q5K if aligned => [K::LinearQ5Kx4, K::LinearQ5KRows, K::TilesQ5K],
                    Block::Q6K if aligned => [K::LinearQ6Kx4, K::LinearQ6KRows, K::TilesQ6K],
                    _ => [K::LinearBlockx4, K::LinearBlockRows, K::TilesBlock],
                };
                [one, one, several, tile]
            }
            _ => [K::LinearAnyx4, K::LinearAnyx4, K::LinearAnyRows, K::TilesAny],
        };
        let group = format.activation_group().unwrap_or(32) as u32;
        let x16 = [self.x[0], self.x_row, self.x_slot].iter().all(|n| n.is_multiple_of(16));
        let slots = if self.order == 0 { self.rows } else { self.rows * self.k };
        let tiled = group >= 32 || matches!(format, WeightFormat::Block(_));
        if self.stage == stage::CODES && slots >= TILES_FROM && tiled && x16 {
            // Every expert has a tile that it does not fill.
            let tiles_of = |rows| slots.div_ceil(rows) + if self.order == 0 { 0 } else { self.experts.min(slots) };
            if let Some((kernel, [rows, outs], threads, shared)) = self.wide(slots, bases) {
                let shape = shape([self.outputs.div_ceil(outs), 1, 1], threads, shared);
                let shape = places(shape, tiles_of(rows).into());
                return Launch { kernel, shape, parameter: Parameter::Linear(self) };
            }
            let tiles = tiles_of(TILE);
            let shape = places(shape([self.outputs.div_ceil(TILE), 1, 1], 128, 0), tiles.into());
            return Launch { kernel: tile, shape, parameter: Parameter::Linear(self) };
        }
        let pitch = 1024 / group + 1;
        let held = if self.flags & stage::HELD != 0 { 8 * self.inputs } else { 0 };
        let need = |r: u32, out: u32, warps: u32| {
            r * self.inputs + 8 * r * (self.inputs / group) + warps * (8 * out * r + 4 * out) * pitch + held
        };
        let one = self.order != 0 || self.rows == 1 || need(8, 4, 1) > MOST_SHARED;
        let count = if self.order != 0 { self.rows * self.k } else { self.rows.div_ceil(if one { 1 } else { 8 }) };
        let many = u64::from(self.outputs) * u64::from(count) >= u64::from(bases.multiprocessors) * 32;
        let pairs = self.flags & stage::PAIRS != 0;
        let (kernel, r, out) = match (one, many || pairs) {
            (true, false) if few == K::LinearQ4x1 => (few, 1, 1),
            (true, _) => (one_row, 1, 4),
            (false, _) => (several, 8, 4),
        };
        let warps = [8, 4, 2, 1].into_iter().find(|w| need(r, out, *w) <= MOST_SHARED).unwrap_or(1);
        // A warp goes on to further outputs where there are very many, so that what a block stages
        // is used often.
        let blocks = self.outputs.div_ceil(warps * out).min((bases.multiprocessors * 16).div_ceil(count).max(1));
        let shape = places(shape([blocks, 1, 1], warps * 32, need(r, out, warps)), count.into());
        Launch { kernel, shape, parameter: Parameter::Linear(self) }
    }
}

/// Attention as a record asks for it.
pub fn attention(operands: &[Operand; 12], attrs: &[u64; 12], bases: &Bases, step: Step) -> Attend {
    let (a, o) = (op::attention::Attrs::of(attrs), op::attention::Operands::of(operands));
    Attend {
        q: o.q,
        k: o.k,
        v: o.v,
        out: o.out,
        rows: a.rows as u32,
        heads: a.heads as u32,
        kv_heads: a.kv_heads as u32,
        dim: a.dim as u32,
        scale: a.scale.to_bits(),
        window: a.window as u32,
        per_block: heads_per_block(&a),
        step,
        parts: bases.parts,
        counters: bases.counters,
        most_blocks: a.context.div_ceil(ATTENTION_BLOCK) as u32,
        ..Attend::default()
    }
}

/// Whether all rows and heads of an operand begin at multiples of sixteen bytes.
pub fn aligned(o: &Operand) -> bool {
    let bytes = DType::from_code(o.dtype as u8).unwrap_or(DType::F32).bytes();
    [o.at, o.row * bytes, u64::from(o.head) * bytes].iter().all(|n| n.is_multiple_of(16))
}

impl Attend {
    /// What makes the queries of several rows, at `q`, and their keys and values in the caches;
    /// attention itself then makes nothing.
    pub fn heads(&mut self, q: Operand) -> Launch {
        let units = self.heads + self.kv_heads;
        let usual = [&self.k, &self.v].into_iter().all(|o| o.dtype == DType::F16 as u32) && self.table != 0;
        let (kernel, shared) = match (self.dim, self.half) {
            (64, 32) if usual => (Kernel::FewHeads64, 0),
            (128, 64) if usual => (Kernel::FewHeads128, 0),
            _ => (Kernel::FewHeads, 8 * self.dim * 4),
        };
        let shape = shape([units.div_ceil(8), self.rows, 1], THREADS, shared);
        let parameter = Parameter::Attend(Attend { out: q, ..*self });
        (self.makes, self.q) = (0, q);
        Launch { kernel, shape, parameter }
    }

    /// How it is cut.
    pub fn launch(mut self, bases: &Bases, few: bool) -> Launch {
        let fits = |l: &Launch| l.shape.shared <= bases.shared;
        let fast = if few { None } else { self.fast(bases).filter(fits) };
        let special = if few { self.row(bases) } else { fast.or_else(|| self.tiles(bases)) };
        if let Some(special) = special.filter(fits) {
            return special;
        }
        let split = if few { self.split(bases) } else { 1 };
        let padded = self.dim.next_multiple_of(32);
        let block = ATTENTION_BLOCK as u32;
        let mut shared = 4 * (ATTENTION_HEADS * (padded + block + self.dim) + 2 * self.dim);
        let size = if self.v.dtype == DType::F16 as u32 { 2 } else { 4 };
        let held = self.dim * size * block;
        let aligned = [self.v.at, self.v.row * u64::from(size), u64::from(self.v.head * size), u64::from(shared)];
        if shared + held <= MOST_SHARED
            && aligned.iter().all(|n| n.is_multiple_of(16))
            && (self.dim * size).is_multiple_of(16)
        {
            self.holds_values = 1;
            shared += held;
        }
        let grid = [split, self.heads / self.per_block, self.rows];
        Launch { kernel: Kernel::Attention, shape: shape(grid, THREADS, shared), parameter: Parameter::Attend(self) }
    }

    /// Leaves its result's int8 form in place of the result.
    pub fn leave(&mut self, left: &Left) {
        (self.codes, self.scales, self.sums) = (left.at[0], left.at[1], left.at[2]);
        (self.codes_row, self.scales_row) = (left.codes[0] as u32, left.scales[0] as u32);
    }

    /// Blocks that a row and group of heads is cut into.
    fn split(&self, bases: &Bases) -> u32 {
        self.most_blocks.min(bases.blocks).clamp(1, ATTENTION_SPLIT)
    }

    /// Lets the attention of several rows, if these launches begin with the int8 form of its
    /// result, make that itself; gives whether it does.
    pub fn makes_form(&mut self, kernel: Kernel, next: &[Launch]) -> bool {
        use Kernel::{AttentionRows64, AttentionRows128, AttentionRowsLate64, AttentionRowsLate128};
        let [Launch { kernel: Kernel::FewCodes, parameter: Parameter::FewCodes(form), .. }, product, ..] = next else {
            return false;
        };
        let Parameter::FewProduct(product) = product.parameter else { return false };
        let fits = matches!(kernel, AttentionRows64 | AttentionRows128 | AttentionRowsLate64 | AttentionRowsLate128)
            && (form.x, u64::from(form.x_row)) == (self.out.at, self.out.row)
            && self.out.head == self.dim
            && product.codes == form.codes
            && form.codes_row >= self.heads * self.dim
            && form.scales_row >= self.heads * self.dim / 64;
        if fits {
            (self.codes, self.scales, self.sums) = (form.codes, form.scales, form.sums);
            (self.codes_row, self.scales_row) = (form.codes_row, form.scales_row);
        }
        fits
    }

    /// The short kernel for one row that makes its queries, key and value, or for rows whose are
    /// made, if heads are of the usual kind.
    fn row(&self, bases: &Bases) -> Option<Launch> {
        // Kernels, elements of a head that are rotated in pairs, and most heads of a block.
        let ([early, late], half, most) = match (self.dim, self.makes) {
            (64, 1) => ([Kernel::AttentionRow64, Kernel::AttentionLate64], 32, ATTENTION_HEADS),
            (128, 1) => ([Kernel::AttentionRow128, Kernel::AttentionLate128], 64, ATTENTION_HEADS),
            (256, 1) => ([Kernel::AttentionLate256, Kernel::AttentionLate256], 32, 2),
            (64, _) => ([Kernel::AttentionRows64, Kernel::AttentionRowsLate64], 32, ATTENTION_HEADS),
            (128, _) => ([Kernel::AttentionRows128, Kernel::AttentionRowsLate128], 64, ATTENTION_HEADS),
            _ => return None,
        };
        let usual = |o: &Operand| o.dtype == DType::F16 as u32 && aligned(o);
        let makes = self.rows == 1 && self.table != 0 && self.half == half;
        if self.makes == 1 && !makes || ![&self.k, &self.v].into_iter().all(usual) {
            return None;
        }
        // As few heads a block as there are multiprocessors for.
        let split = self.split(bases);
        let fits =
            |n: &u32| self.per_block.is_multiple_of(*n) && self.rows * split * self.heads / n <= bases.multiprocessors;
        let most = (1..=most.min(self.per_block)).rev().find(|n| self.per_block.is_multiple_of(*n)).unwrap_or(1);
        let per_block = (1..most).find(fits).unwrap_or(most);
        // Blocks of positions that are not there come last.
        let grid = [self.heads / per_block, split, self.rows];
        // Keys and values of a block, or half of its values, its scores, weights and queries.
        let block = ATTENTION_BLOCK as u32;
        let crowded = self.rows * split * self.heads / per_block > bases.multiprocessors;
        let (kernel, planes) = if crowded || early == late { (late, 3) } else { (early, 4) };
        let shared = planes * block * self.dim + 4 * ATTENTION_HEADS * (2 * block + self.dim);
        let parameter = Parameter::Attend(Attend { per_block, ..*self });
        Some(Launch { kernel, shape: shape(grid, ROW_THREADS, shared), parameter })
    }

    /// Tiles of rows by tensor cores, where that is asked for and the caches are F16.
    fn fast(&self, bases: &Bases) -> Option<Launch> {
        let group = self.heads / self.kv_heads.max(1);
        let (kernel, dim, threads) = match self.dim {
            ..=64 => (Kernel::FastAttention64, 64, 128),
            65..=128 => (Kernel::FastAttention128, 128, 128),
            129..=256 => (Kernel::FastAttention256, 256, 256),
            _ => return None,
        };
        let fits = [&self.q, &self.k, &self.v, &self.out].into_iter().all(aligned)
            && self.dim.is_multiple_of(8)
            && [&self.k, &self.v].into_iter().all(|o| o.dtype == DType::F16 as u32)
            && (1..=FAST_QUERIES).contains(&group);
        if !bases.fast || self.rows < ATTENTION_TILES_FROM || self.makes != 0 || !fits {
            return None;
        }
        if bases.hopper && dim <= 128 {
            let kernel = if dim == 64 { Kernel::FastHopper64 } else { Kernel::FastHopper128 };
            // Four chunks of 64 keys and of values each, and what it takes to begin at a multiple
            // of 1,024. A block takes tile after tile.
            let tiles = self.kv_heads * (self.rows.div_ceil(FAST_QUERIES / group) + self.rows.min(bases.runs) - 1);
            let shape = shape([tiles.min(bases.multiprocessors), 1, 1], 384, 1024 + 2 * dim * 2 * 4 * 64);
            return Some(Launch { kernel, shape, parameter: Parameter::Attend(*self) });
        }
        // Queries, and two chunks of 64 keys and of values each, in halves.
        let shared = 2 * dim * (FAST_QUERIES + 4 * 64);
        // Each run has a tile that it does not fill.
        let tiles = self.rows.div_ceil(FAST_QUERIES / group) + self.rows.min(bases.runs) - 1;
        let shape = shape([self.kv_heads, tiles, 1], threads, shared);
        Some(Launch { kernel, shape, parameter: Parameter::Attend(*self) })
    }

    /// Tiles of rows, if there are enough and everything is aligned to sixteen bytes.
    fn tiles(&self, bases: &Bases) -> Option<Launch> {
        let group = self.heads / self.kv_heads.max(1);
        let (kernel, dim) = match self.dim {
            ..=64 => (Kernel::AttentionTile64, 64),
            65..=128 => (Kernel::AttentionTile128, 128),
            129..=256 => (Kernel::AttentionTile256, 256),
            _ => return None,
        };
        let fits = [&self.q, &self.k, &self.v, &self.out].into_iter().all(aligned)
            && self.dim.is_multiple_of(8)
            && self.k.dtype == self.v.dtype
            && (1..=TILE_QUERIES).contains(&group);
        if self.rows < ATTENTION_TILES_FROM || self.makes != 0 || !fits {
            return None;
        }
        // Scores, half of the queries, a part of keys or values, and four numbers of each query.
        let parts = if dim > 128 { 2 } else { 1 };
        let chunk = (dim / 2 / parts * 64).max(32 * dim.min(128));
        let floats = ATTENTION_BLOCK as u32 * TILE_QUERIES + dim / 2 * TILE_QUERIES + chunk + 4 * TILE_QUERIES;
        // Each run has a tile that it does not fill.
        let tiles = self.rows.div_ceil(TILE_QUERIES / group) + self.rows.min(bases.runs) - 1;
        let shape = shape([self.kv_heads, tiles, 1], THREADS, 4 * floats);
        Some(Launch { kernel, shape, parameter: Parameter::Attend(*self) })
    }
}
