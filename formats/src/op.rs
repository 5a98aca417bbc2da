//! The closed op set, in one table.
//!
//! Everything a loaf can ask of a backend is one of these ops. A row of the table says what an op's operands
//! are (name, direction, admissible element types, extent) and what its attributes mean; shape inference,
//! lowering, verification, `bake explain`, the byte ledger and the runtime all read the same row, so an op
//! exists once.
//!
//! # Operands are views
//! An operand is a view `[rows, heads, dim]` over one memory region: element `(r, h, i)` is at element offset
//! `r * row_stride + h * head_stride + i` from the operand's byte offset. `rows` are tokens (or table rows of
//! a weight); `dim` is always contiguous. Extents are given by the table as products of attributes, so a
//! verifier can bound every access without knowing the op's arithmetic.
//!
//! # Arithmetic
//! Results are bit-exact across instruction sets, thread counts and chunk sizes, because the order of every
//! rounding is part of the op (the doc of each [`OpKind`]). Terms used there:
//! - *elementwise*: each output element depends on its own inputs only; every `+ - * /`, `sqrt` and `fma`
//!   is one IEEE binary32 operation, round to nearest even, no contraction beyond the written `fma`.
//! - *lane sum* of `t[0..n]`: eight accumulators start at `+0`; accumulator `j` takes `t[j], t[j+8], ..` in
//!   order; then `((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7))`. A *lane dot* is the same with
//!   `acc = fma(x, w, acc)`; past the end both factors are `+0`.
//! - `exp`, `sigmoid(x) = 1 / (1 + exp(-x))`, `silu(x) = x * sigmoid(x)`: the runtime's own polynomial `exp`
//!   (see the runtime's `math` module), the same on every instruction set.
//!
//! # Not here
//! No op knows a model, a position table or a tokenizer. Nothing allocates. `View`, `Linear` and
//! `ExpertLinear` belong to graphs alone: lowering removes them, and a plan that holds one is refused.

use crate::dtype::{DType, WeightFormat};

/// What an op does with an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Read only.
    In,
    /// Written entirely, never read.
    Out,
    /// Updated in place (recurrent state).
    InOut,
}

/// Admissible element types of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Types {
    /// Exactly this one.
    Is(DType),
    /// Any float type.
    Float,
    /// `f32` or `f16`: what a KV cache holds.
    Cache,
    /// The `weight` tensor of the format in the op's `format` attribute.
    Weight,
    /// The `scales` tensor of that format; the operand is absent if the format has none.
    Scales,
    /// The `biases` tensor of that format; the operand is absent if the format has none.
    Biases,
}

/// One extent of an operand, computed from the op's attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// 1.
    One,
    /// The attribute with this index.
    Attr(u8),
    /// The product of two attributes.
    Mul(u8, u8),
    /// The sum of two attributes.
    Sum(u8, u8),
    /// Attribute plus one.
    Inc(u8),
    /// Attribute minus one.
    Dec(u8),
    /// Twice an attribute.
    Twice(u8),
    /// The quotient of two attributes, which must be exact.
    Div(u8, u8),
    /// Elements of a stored weight row: attribute (inputs), attribute (format).
    Packed(u8, u8),
    /// Scale groups of a weight row: attribute (inputs), attribute (format).
    Groups(u8, u8),
}

/// One operand of an op.
#[derive(Clone, Copy, Debug)]
pub struct OperandSpec {
    /// Name in dumps and errors.
    pub name: &'static str,
    /// Direction.
    pub mode: Mode,
    /// Element types.
    pub types: Types,
    /// `[rows, heads, dim]`.
    pub dims: [Dim; 3],
}

/// How an attribute word is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttrKind {
    /// A count; at least 1, at most [`MAX_COUNT`].
    Count,
    /// A position in the sequence; may be 0.
    Position,
    /// A flag or a count that may be 0.
    Flag,
    /// The bits of an `f32`, finite.
    Real,
    /// [`WeightFormat::code`].
    Format,
}

/// One attribute of an op.
#[derive(Clone, Copy, Debug)]
pub struct AttrSpec {
    /// Name in dumps and errors.
    pub name: &'static str,
    /// Reading.
    pub kind: AttrKind,
}

/// A row of the op table.
#[derive(Clone, Copy, Debug)]
pub struct OpSpec {
    /// Which op.
    pub kind: OpKind,
    /// Name in dumps.
    pub name: &'static str,
    /// Whether the op may stand in a plan (graph-only ops may not).
    pub in_plan: bool,
    /// Operands in record order: inputs, then in-out, then outputs.
    pub operands: &'static [OperandSpec],
    /// Attributes in record order.
    pub attrs: &'static [AttrSpec],
}

/// No count in a plan may exceed this; products of two stay far from overflow.
pub const MAX_COUNT: u64 = 1 << 31;
/// Most operands an op has.
pub const MAX_OPERANDS: usize = 9;
/// Most attributes an op has.
pub const MAX_ATTRS: usize = 8;

const fn a(name: &'static str) -> AttrSpec {
    AttrSpec { name, kind: AttrKind::Count }
}
const fn pos(name: &'static str) -> AttrSpec {
    AttrSpec { name, kind: AttrKind::Position }
}
const fn flag(name: &'static str) -> AttrSpec {
    AttrSpec { name, kind: AttrKind::Flag }
}
const fn real(name: &'static str) -> AttrSpec {
    AttrSpec { name, kind: AttrKind::Real }
}
const FORMAT: AttrSpec = AttrSpec { name: "format", kind: AttrKind::Format };
const ROWS: AttrSpec = a("rows");

const fn operand(name: &'static str, mode: Mode, types: Types, dims: [Dim; 3]) -> OperandSpec {
    OperandSpec { name, mode, types, dims }
}
const fn input(name: &'static str, dims: [Dim; 3]) -> OperandSpec {
    operand(name, Mode::In, Types::Is(DType::F32), dims)
}
const fn output(name: &'static str, dims: [Dim; 3]) -> OperandSpec {
    operand(name, Mode::Out, Types::Is(DType::F32), dims)
}
const fn typed(name: &'static str, mode: Mode, dtype: DType, dims: [Dim; 3]) -> OperandSpec {
    operand(name, mode, Types::Is(dtype), dims)
}
/// The three stored tensors of a weight whose rows are `rows`, inputs attribute `inp`, format attribute `fmt`.
const fn weight(rows: Dim, inp: u8, fmt: u8) -> [OperandSpec; 3] {
    [
        operand("weight", Mode::In, Types::Weight, [rows, Dim::One, Dim::Packed(inp, fmt)]),
        operand("scales", Mode::In, Types::Scales, [rows, Dim::One, Dim::Groups(inp, fmt)]),
        operand("biases", Mode::In, Types::Biases, [rows, Dim::One, Dim::Groups(inp, fmt)]),
    ]
}

use Dim::{Attr, Dec, Div, Groups, Inc, Mul, One, Packed, Sum, Twice};

const RHD: [Dim; 3] = [Attr(0), Attr(1), Attr(2)];
const UNARY: &[OperandSpec] = &[input("x", RHD), output("out", RHD)];
const BINARY: &[OperandSpec] = &[input("a", RHD), input("b", RHD), output("out", RHD)];
const RHD_ATTRS: &[AttrSpec] = &[ROWS, a("heads"), a("dim")];
const EMBED_W: [OperandSpec; 3] = weight(Attr(1), 2, 3);
const LINEAR_W: [OperandSpec; 3] = weight(Attr(2), 1, 3);
const EXPERT_W: [OperandSpec; 3] = weight(Mul(2, 4), 3, 5);
const LINEAR_ATTRS: &[AttrSpec] = &[ROWS, a("in"), a("out"), FORMAT];
const EXPERT_ATTRS: &[AttrSpec] = &[ROWS, a("k"), a("experts"), a("in"), a("out"), FORMAT, a("x_slots")];
const CONV_OPERANDS: &[OperandSpec] = &[
    input("x", RHD),
    operand("weight", Mode::In, Types::Float, [Mul(1, 2), One, Attr(3)]),
    typed("state", Mode::InOut, DType::F32, [Dec(3), One, Mul(1, 2)]),
    output("out", [Attr(0), One, Mul(1, 2)]),
];
const CONV_ATTRS: &[AttrSpec] = &[ROWS, a("heads"), a("dim"), a("kernel")];

macro_rules! ops {
    ($( $(#[$doc:meta])* $kind:ident = $code:literal, $name:literal, $in_plan:literal, $operands:expr, $attrs:expr; )*) => {
        /// The ops. The discriminant is the on-disk code; the doc of each states its arithmetic.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum OpKind { $( $(#[$doc])* $kind = $code, )* }

        /// The op table, in code order.
        pub static OPS: &[OpSpec] = &[
            $( OpSpec { kind: OpKind::$kind, name: $name, in_plan: $in_plan, operands: $operands, attrs: $attrs }, )*
        ];
    };
}

ops! {
    /// Graph only: reinterprets `[rows, ..]` as `[rows, heads, dim]`, starting at element `start` of a row,
    /// heads `head_stride` elements apart. Moves nothing.
    View = 0, "view", false,
        &[input("x", [Attr(0), One, One]), output("out", RHD)],
        &[ROWS, a("heads"), a("dim"), flag("start"), flag("head_stride")];
    /// Graph only: `out = x * weight^T`, whatever the weight's format; becomes `Quantize` + `LinearQuant`, or
    /// `LinearDense`.
    Linear = 1, "linear", false,
        &[input("x", [Attr(0), One, Attr(1)]), operand("weight", Mode::In, Types::Weight, [Attr(2), One, Attr(1)]),
          output("out", [Attr(0), One, Attr(2)])],
        &[ROWS, a("in"), a("out")];
    /// Graph only: slot `(r, j)` is multiplied by the matrix of expert `ids[r, j]`; becomes an
    /// `ExpertLinear{Dense,Quant}`.
    ExpertLinear = 2, "expert_linear", false,
        &[input("x", [Attr(0), Attr(5), Attr(3)]), typed("order", Mode::In, DType::U32, [One, One, Mul(0, 1)]),
          typed("starts", Mode::In, DType::U32, [One, One, Inc(2)]),
          operand("weight", Mode::In, Types::Weight, [Mul(2, 4), One, Attr(3)]), output("out", [Attr(0), Attr(1), Attr(4)])],
        &[ROWS, a("k"), a("experts"), a("in"), a("out"), a("x_slots")];
    /// `out[r] = decode(table[ids[r]])`: `fma(scale, code, bias)` for affine, exact otherwise. An id past the
    /// table is the caller's error; the runtime checks ids before replay.
    Embed = 3, "embed", true,
        &[typed("ids", Mode::In, DType::U32, [One, One, Attr(0)]), EMBED_W[0], EMBED_W[1], EMBED_W[2],
          output("out", [Attr(0), One, Attr(2)])],
        &[ROWS, a("vocab"), a("dim"), FORMAT];
    /// Per `(row, head)`: `s = lane sum of x*x` (as lane dot of `x` with `x`),
    /// `inv = 1 / sqrt(s / dim + eps)`, `out = (x * inv) * (offset + w)`; `offset` is 1 for zero-centred weights.
    RmsNorm = 4, "rms_norm", true,
        &[input("x", RHD), operand("weight", Mode::In, Types::Float, [One, One, Attr(2)]), output("out", RHD)],
        &[ROWS, a("heads"), a("dim"), real("eps"), real("offset")];
    /// `sum = a + b`, then `RmsNorm` of `sum`; heads are 1.
    AddRmsNorm = 5, "add_rms_norm", true,
        &[input("a", RHD), input("b", RHD), operand("weight", Mode::In, Types::Float, [One, One, Attr(2)]),
          output("sum", RHD), output("out", RHD)],
        &[ROWS, a("heads"), a("dim"), real("eps"), real("offset")];
    /// Elementwise `a + b`.
    Add = 6, "add", true, BINARY, RHD_ATTRS;
    /// Elementwise `a * b`.
    Mul = 7, "mul", true, BINARY, RHD_ATTRS;
    /// Elementwise `silu(x)`.
    Silu = 8, "silu", true, UNARY, RHD_ATTRS;
    /// Elementwise `sigmoid(x)`.
    Sigmoid = 9, "sigmoid", true, UNARY, RHD_ATTRS;
    /// Elementwise `silu(a) * b`.
    SiluMul = 10, "silu_mul", true, BINARY, RHD_ATTRS;
    /// Elementwise `sigmoid(a) * b`.
    SigmoidMul = 11, "sigmoid_mul", true, BINARY, RHD_ATTRS;
    /// `out[r, i] = x[r, i] * s[r]`.
    MulRows = 12, "mul_rows", true,
        &[input("x", [Attr(0), One, Attr(1)]), input("s", [Attr(0), One, One]), output("out", [Attr(0), One, Attr(1)])],
        &[ROWS, a("dim")];
    /// Int8 activations, per `(row, head)` and group of `group` elements: `m = max |x|`; if `m == 0`, codes,
    /// scale and sum are 0; else `scale = m / 127`, `code = round_half_even(x * (127 / m))` clamped to
    /// `[-127, 127]`, `sum = scale * f32(sum of codes)`. A NaN takes code 0 and is ignored by the maximum;
    /// infinities are clamped to the largest finite magnitude first.
    Quantize = 13, "quantize", true,
        &[input("x", RHD), typed("codes", Mode::Out, DType::I8, RHD),
          output("scales", [Attr(0), Attr(1), Div(2, 3)]), output("sums", [Attr(0), Attr(1), Div(2, 3)])],
        &[ROWS, a("heads"), a("dim"), a("group")];
    /// `out[r, o] = lane dot(x[r], decode(weight[o]))`; formats: dense, `mxfp8` (elements decoded exactly,
    /// scale included; E4M3 `0x7f` is 480, as everywhere).
    LinearDense = 14, "linear_dense", true,
        &[input("x", [Attr(0), One, Attr(1)]), LINEAR_W[0], LINEAR_W[1], output("out", [Attr(0), One, Attr(2)])],
        LINEAR_ATTRS;
    /// `acc = 0`; for groups `g` in order: `d` = exact i32 dot of the group's weight codes and activation
    /// codes; `acc = fma(scale[o,g] * xscale[r,g], f32(d), acc)`; affine then `acc = fma(bias[o,g],
    /// xsum[r,g], acc)`. The codes of `mxfp4`/`nvfp4` are twice their E2M1 value (integers), their scale is
    /// half the stored one. Parameters are widened to f32 first. The activation group is the weight's.
    LinearQuant = 15, "linear_quant", true,
        &[typed("codes", Mode::In, DType::I8, [Attr(0), One, Attr(1)]), input("xscales", [Attr(0), One, Groups(1, 3)]),
          input("xsums", [Attr(0), One, Groups(1, 3)]), LINEAR_W[0], LINEAR_W[1], LINEAR_W[2],
          output("out", [Attr(0), One, Attr(2)])],
        LINEAR_ATTRS;
    /// Counting sort of the slots `s = r*k + j` by expert, stable: `order` lists slots expert by expert,
    /// `starts[e]..starts[e+1]` is expert `e`'s part of it.
    ExpertSort = 16, "expert_sort", true,
        &[typed("ids", Mode::In, DType::U32, [Attr(0), One, Attr(1)]),
          typed("order", Mode::Out, DType::U32, [One, One, Mul(0, 1)]),
          typed("starts", Mode::Out, DType::U32, [One, One, Inc(2)])],
        &[ROWS, a("k"), a("experts")];
    /// `LinearDense` per slot, with the slot's expert's matrix (`weight` rows `e*out ..`); the input row is
    /// `x[r, 0]` if `x_slots` is 1, `x[r, j]` if it is `k`.
    ExpertLinearDense = 17, "expert_linear_dense", true,
        &[input("x", [Attr(0), Attr(6), Attr(3)]), typed("order", Mode::In, DType::U32, [One, One, Mul(0, 1)]),
          typed("starts", Mode::In, DType::U32, [One, One, Inc(2)]), EXPERT_W[0], EXPERT_W[1],
          output("out", [Attr(0), Attr(1), Attr(4)])],
        EXPERT_ATTRS;
    /// `LinearQuant` per slot, as `ExpertLinearDense`.
    ExpertLinearQuant = 18, "expert_linear_quant", true,
        &[typed("codes", Mode::In, DType::I8, [Attr(0), Attr(6), Attr(3)]),
          input("xscales", [Attr(0), Attr(6), Groups(3, 5)]), input("xsums", [Attr(0), Attr(6), Groups(3, 5)]),
          typed("order", Mode::In, DType::U32, [One, One, Mul(0, 1)]),
          typed("starts", Mode::In, DType::U32, [One, One, Inc(2)]), EXPERT_W[0], EXPERT_W[1], EXPERT_W[2],
          output("out", [Attr(0), Attr(1), Attr(4)])],
        EXPERT_ATTRS;
    /// `out[r] = sum over j of y[r, j] * w[r, j]`: `acc = fma(y, w, acc)` from 0 in order of `j`.
    WeightedSum = 19, "weighted_sum", true,
        &[input("y", RHD), input("w", [Attr(0), One, Attr(1)]), output("out", [Attr(0), One, Attr(2)])],
        &[ROWS, a("k"), a("dim")];
    /// `m = max x`, `e = exp(x - m)`, `out = e / lane sum(e)`.
    Softmax = 20, "softmax", true,
        &[input("x", [Attr(0), One, Attr(1)]), output("out", [Attr(0), One, Attr(1)])], &[ROWS, a("dim")];
    /// The `k` largest in descending order, ties to the lower index (a NaN ranks below everything); with
    /// `renorm`, weights are divided by their sum (taken in order from `+0`).
    TopK = 21, "top_k", true,
        &[input("probs", [Attr(0), One, Attr(1)]), typed("ids", Mode::Out, DType::U32, [Attr(0), One, Attr(2)]),
          output("weights", [Attr(0), One, Attr(2)])],
        &[ROWS, a("experts"), a("k"), flag("renorm")];
    /// Row `r` holds `cos(t_i)` for `i < half`, then `sin(t_i)`, `t_i = f64(pos + r) * f64(inv_freq[i])`,
    /// evaluated in f64 and rounded once.
    RopeTable = 22, "rope_table", true,
        &[input("inv_freq", [One, One, Attr(1)]), output("out", [Attr(0), One, Twice(1)])],
        &[ROWS, a("half"), pos("pos")];
    /// Half-split rotation: for `i < half`: `out[i] = x[i]*c - x[i+half]*s` and
    /// `out[i+half] = x[i+half]*c + x[i]*s`, each as `fma(x[i], c, -(x[i+half]*s))` and
    /// `fma(x[i+half], c, x[i]*s)`; the rest of `dim` is copied.
    Rope = 23, "rope", true,
        &[input("x", RHD), input("table", [Attr(0), One, Twice(3)]), output("out", RHD)],
        &[ROWS, a("heads"), a("dim"), a("half")];
    /// Rounds `x` (to nearest even) into cache rows `pos..pos+rows`.
    KvWrite = 24, "kv_write", true,
        &[input("x", RHD), operand("cache", Mode::InOut, Types::Cache, [Sum(0, 3), Attr(1), Attr(2)])],
        &[ROWS, a("heads"), a("dim"), pos("pos")];
    /// Causal attention of `rows` queries at positions `pos..pos+rows` over keys and values `0..=position`
    /// (with `window > 0`: the last `window` positions only). Query head `h` reads KV head
    /// `h / (heads / kv_heads)`. Positions are folded in blocks of [`ATTENTION_BLOCK`] counted from 0. Within a
    /// block, over its visible positions `j`: `s_j = lane dot(q, k_j) * scale`; `m = max s_j`;
    /// `p_j = exp(s_j - m)`; `l = lane sum(p_j)` (lane = index in the block mod 8, hidden positions count as
    /// `+0`); `acc = fma(p_j, v_j, acc)` from 0 in order of `j`. Blocks are merged in order: the first visible block
    /// is `(M, L, A)`; then `M' = max(M, m)`, `c = exp(M - M')`, `d = exp(m - M')`, `L = fma(L, c, l * d)`,
    /// `A = fma(A, c, acc * d)`. Finally `out = A / L`.
    Attention = 25, "attention", true,
        &[input("q", [Attr(0), Attr(1), Attr(3)]),
          operand("k", Mode::In, Types::Cache, [Sum(0, 4), Attr(2), Attr(3)]),
          operand("v", Mode::In, Types::Cache, [Sum(0, 4), Attr(2), Attr(3)]),
          output("out", [Attr(0), Attr(1), Attr(3)])],
        &[ROWS, a("heads"), a("kv_heads"), a("dim"), pos("pos"), real("scale"), flag("window")];
    /// Causal depthwise convolution: channel `c = h*dim + i`, `acc = 0`, taps `t` in order
    /// `acc = fma(w[c, t], in[r - kernel + 1 + t][c], acc)`, rows before the first taken from `state` (oldest
    /// first), which then holds the last `kernel - 1` input rows.
    Conv = 26, "conv", true, CONV_OPERANDS, CONV_ATTRS;
    /// `silu(Conv)`.
    ConvSilu = 27, "conv_silu", true, CONV_OPERANDS, CONV_ATTRS;
    /// Per `(row, head)`: `out = (x * (1 / sqrt(lane dot(x, x) + eps))) * scale`.
    L2Norm = 28, "l2_norm", true, UNARY, &[ROWS, a("heads"), a("dim"), real("eps"), real("scale")];
    /// Per value head: `decay = exp(-(exp(a_log) * softplus(a + dt_bias)))`, `beta = sigmoid(b)`;
    /// `softplus(x)` is `x` above 20, else `log1p(exp(x))`. `exp` as everywhere, `log1p` in f64, rounded once.
    GdnGates = 29, "gdn_gates", true,
        &[input("a", RHD), input("b", RHD), operand("a_log", Mode::In, Types::Float, [One, One, Mul(1, 2)]),
          operand("dt_bias", Mode::In, Types::Float, [One, One, Mul(1, 2)]),
          output("decay", [Attr(0), One, Mul(1, 2)]), output("beta", [Attr(0), One, Mul(1, 2)])],
        RHD_ATTRS;
    /// Gated delta rule, rows in order, per value head `v` with key head `v / (v_heads / k_heads)` and state
    /// `S[k_dim, v_dim]`: `S = decay * S`; `r_j = fma(S[i,j], k_i, r_j)` from 0 over `i` in order;
    /// `d_j = beta * (v_j - r_j)`; `S[i,j] = fma(k_i, d_j, S[i,j])`; `out_j = fma(S[i,j], q_i, out_j)` from 0
    /// over `i` in order.
    GdnScan = 30, "gdn_scan", true,
        &[input("q", [Attr(0), Attr(1), Attr(3)]), input("k", [Attr(0), Attr(1), Attr(3)]),
          input("v", [Attr(0), Attr(2), Attr(4)]), input("decay", [Attr(0), One, Attr(2)]),
          input("beta", [Attr(0), One, Attr(2)]),
          typed("state", Mode::InOut, DType::F32, [Attr(2), Attr(3), Attr(4)]),
          output("out", [Attr(0), Attr(2), Attr(4)])],
        &[ROWS, a("k_heads"), a("v_heads"), a("k_dim"), a("v_dim")];
    /// Copies rows `pos..pos+rows` of `x`.
    SelectRows = 31, "select_rows", true,
        &[input("x", [Sum(0, 2), One, Attr(1)]), output("out", [Attr(0), One, Attr(1)])],
        &[ROWS, a("dim"), pos("pos")];
}

/// Positions folded together by [`OpKind::Attention`] before blocks are merged.
pub const ATTENTION_BLOCK: usize = 256;

impl OpKind {
    /// The op with this on-disk code, if there is one.
    pub fn from_code(code: u8) -> Option<OpKind> {
        OPS.get(usize::from(code)).map(|s| s.kind)
    }

    /// The op's row in the table.
    #[inline]
    pub fn spec(self) -> &'static OpSpec {
        &OPS[self as usize]
    }
}

impl Dim {
    /// The extent for these attribute words; `None` if an attribute is missing, a division is not exact, a
    /// format does not divide its row, or the result overflows.
    #[inline]
    pub fn value(self, attrs: &[u64]) -> Option<u64> {
        let at = |i: u8| attrs.get(usize::from(i)).copied();
        match self {
            One => Some(1),
            Attr(i) => at(i),
            Mul(i, j) => at(i)?.checked_mul(at(j)?),
            Sum(i, j) => at(i)?.checked_add(at(j)?),
            Inc(i) => at(i)?.checked_add(1),
            Dec(i) => at(i)?.checked_sub(1),
            Twice(i) => at(i)?.checked_mul(2),
            Div(i, j) => {
                let (n, d) = (at(i)?, at(j)?);
                (d != 0 && n % d == 0).then(|| n / d)
            }
            Packed(i, f) => stored_row(at(i)?, at(f)?).map(|r| r.0),
            Groups(i, f) => stored_row(at(i)?, at(f)?).map(|r| r.1),
        }
    }
}

/// Elements and groups of a stored row of `inputs` weights in the format `code`.
fn stored_row(inputs: u64, code: u64) -> Option<(u64, u64)> {
    let format = WeightFormat::from_code(code)?;
    Some((format.row_elems(inputs)?, format.row_groups(inputs)?))
}

impl OpSpec {
    /// Index of the attribute that holds the weight format, if the op has one.
    pub fn format_attr(&self) -> Option<usize> {
        self.attrs.iter().position(|a| a.kind == AttrKind::Format)
    }

    /// Index of the operand with this name.
    pub fn operand_index(&self, name: &str) -> Option<usize> {
        self.operands.iter().position(|o| o.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_code_order_and_within_its_caps() {
        for (i, spec) in OPS.iter().enumerate() {
            assert_eq!(spec.kind as usize, i, "{}", spec.name);
            assert!(spec.operands.len() <= MAX_OPERANDS && spec.attrs.len() <= MAX_ATTRS, "{}", spec.name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = OPS.iter().map(|s| s.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), OPS.len());
    }

    #[test]
    fn dims_refuse_what_does_not_divide() {
        assert_eq!(Div(0, 1).value(&[10, 4]), None);
        assert_eq!(Div(0, 1).value(&[10, 0]), None);
        assert_eq!(Mul(0, 1).value(&[u64::MAX, 2]), None);
        assert_eq!(Attr(3).value(&[1]), None);
        let q4 = WeightFormat::Affine { bits: 4, group: 64, params: DType::BF16 }.code();
        assert_eq!(Packed(0, 1).value(&[128, q4]), Some(16));
        assert_eq!(Groups(0, 1).value(&[100, q4]), None);
    }
}
