//! The closed op set, a file an op.
//!
//! Everything a loaf can ask of a backend is one of these ops. An op's file says what its operands
//! are (name, direction, admissible element types, extent, what an output may stand on), what its
//! attributes mean and must satisfy, what it costs, and in the doc of its `Attrs` the arithmetic
//! with the order of every rounding. Shape inference, lowering, verification, `bake explain`, the
//! cost model and the runtime all read the same row ([`OpKind::spec`]), so an op exists once; and
//! its attributes and operands have names (`rms_norm::Attrs`, `rms_norm::Operands`), so nobody
//! counts.
//!
//! # Operands are views
//! An operand is a view `[rows, heads, dim]` over one memory region: element `(r, h, i)` is at
//! element offset `r * row_stride + h * head_stride + i` from the operand's byte offset. `rows` are
//! tokens (or table rows of a weight, or its experts); `dim` is always contiguous. Extents are
//! given by the table as products of attributes, so a verifier can bound every access without
//! knowing the op's arithmetic.
//!
//! # Rows, slots and positions
//! The rows of a step belong to sequences. An op that only looks at a row's values knows nothing of
//! that. Ops over caches and recurrent state, and the rotation's table, are told each row's slot
//! and position when a step runs: no record holds a position.
//!
//! # Arithmetic
//! Results are bit-exact across instruction sets, thread counts, chunk sizes and what else is
//! computed in the same step, because the order of every rounding is part of the op (the doc of its
//! `Attrs`). Terms used there:
//! - *elementwise*: each output element depends on its own inputs only; every `+ - * /`, `sqrt` and
//!   `fma` is one IEEE binary32 operation, round to nearest even, no contraction beyond the written
//!   `fma`.
//! - *lane sum* of `t[0..n]`: [`LANES`] = 32 accumulators start at `+0`; accumulator `j` takes
//!   `t[j], t[j+32], ..` in order; then they are folded in halves: `a[j] += a[j+16]` for `j < 16`,
//!   then by 8, 4, 2, 1 (a warp's butterfly). A *lane dot* is the same with `acc = fma(x, w, acc)`;
//!   past the end both factors are `+0`.
//! - `exp`, `sigmoid(x) = 1 / (1 + exp(-x))`, `silu(x) = x * sigmoid(x)`: the runtime's own
//!   polynomial `exp` (see the runtime's `math` module), the same on every instruction set.
//!
//! # Not here
//! No op knows a model, a position table or a tokenizer. Nothing allocates. `View`, `Linear` and
//! `ExpertLinear` belong to graphs alone: lowering removes them, and a plan that holds one is
//! refused.

mod spec;

pub use spec::{
    AttrKind, AttrSpec, Dim, MAX_ATTRS, MAX_COUNT, MAX_OPERANDS, Mode, OpAttrs, OpSpec, OperandSpec, Rules, Take,
    Touched, Types,
};

/// Accumulators of a lane sum or lane dot.
pub const LANES: usize = 32;

/// Positions folded together by [`OpKind::Attention`] before blocks are merged.
pub const ATTENTION_BLOCK: usize = 256;

macro_rules! ops {
    ($( $kind:ident = $code:literal, $module:ident; )*) => {
        $( pub mod $module; )*

        /// The ops. The discriminant is the on-disk code; an op's file states its arithmetic.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum OpKind { $( #[doc = concat!("See [`", stringify!($module), "::Attrs`].")] $kind = $code, )* }

        impl OpKind {
            /// Every op, in code order.
            pub const ALL: &[OpKind] = &[ $( OpKind::$kind ),* ];

            /// The op's row in the table.
            #[inline]
            pub const fn spec(self) -> &'static OpSpec {
                match self { $( OpKind::$kind => &$module::SPEC, )* }
            }
        }
    };
}

ops! {
    View = 0, view;
    Linear = 1, linear;
    ExpertLinear = 2, expert_linear;
    Embed = 3, embed;
    RmsNorm = 4, rms_norm;
    AddRmsNorm = 5, add_rms_norm;
    Add = 6, add;
    Mul = 7, mul;
    Silu = 8, silu;
    Sigmoid = 9, sigmoid;
    SiluMul = 10, silu_mul;
    SigmoidMul = 11, sigmoid_mul;
    MulRows = 12, mul_rows;
    Quantize = 13, quantize;
    LinearDense = 14, linear_dense;
    LinearQuant = 15, linear_quant;
    ExpertSort = 16, expert_sort;
    ExpertLinearDense = 17, expert_linear_dense;
    ExpertLinearQuant = 18, expert_linear_quant;
    WeightedSum = 19, weighted_sum;
    Softmax = 20, softmax;
    TopK = 21, top_k;
    RopeTable = 22, rope_table;
    Rope = 23, rope;
    KvWrite = 24, kv_write;
    Attention = 25, attention;
    Conv = 26, conv;
    ConvSilu = 27, conv_silu;
    L2Norm = 28, l2_norm;
    GdnGates = 29, gdn_gates;
    GdnScan = 30, gdn_scan;
    GatherRows = 31, gather_rows;
}

/// Number of ops.
pub const OP_COUNT: usize = OpKind::ALL.len();

impl OpKind {
    /// The op with this on-disk code, if there is one.
    pub fn from_code(code: u8) -> Option<OpKind> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{DType, WeightFormat};

    #[test]
    fn table_is_in_code_order() {
        for (i, kind) in OpKind::ALL.iter().enumerate() {
            assert_eq!((*kind as usize, kind.spec().kind), (i, *kind), "{}", kind.spec().name);
            assert_eq!(kind.spec().attrs[0].name, "rows", "{}", kind.spec().name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = OpKind::ALL.iter().map(|k| k.spec().name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), OP_COUNT);
    }

    #[test]
    fn an_output_stands_only_on_inputs_of_its_own_extent_and_type() {
        for spec in OpKind::ALL.iter().map(|k| k.spec()) {
            for out in spec.operands {
                for over in out.over {
                    let input = &spec.operands[spec.operand_index(over).expect("an operand of the op")];
                    assert_eq!((input.mode, out.mode), (Mode::In, Mode::Out), "{} {over}", spec.name);
                    assert_eq!((input.types, input.dims), (out.types, out.dims), "{} {over}", spec.name);
                }
            }
        }
    }

    #[test]
    fn attributes_survive_their_words() {
        let attrs = rms_norm::Attrs { rows: 3, heads: 2, dim: 8, eps: 1e-6, offset: 1.0 };
        let (words, n) = attrs.words();
        assert_eq!((n, rms_norm::Attrs::of(&words[..n])), (5, attrs));
    }

    #[test]
    fn dims_refuse_what_does_not_divide() {
        assert_eq!(Dim::Div(0, 1).value(&[10, 4]), None);
        assert_eq!(Dim::Div(0, 1).value(&[10, 0]), None);
        assert_eq!(Dim::Mul(0, 1).value(&[u64::MAX, 2]), None);
        assert_eq!(Dim::Attr(3).value(&[1]), None);
        let q4 = WeightFormat::Affine { bits: 4, group: 64, params: DType::BF16 }.code();
        assert_eq!(Dim::Plane(0, 1, 0).value(&[128, q4]), Some(16));
        assert_eq!(Dim::Plane(0, 1, 2).value(&[128, q4]), Some(2));
        assert_eq!(Dim::Plane(0, 1, 3).value(&[128, q4]), None);
        assert_eq!(Dim::Groups(0, 1).value(&[100, q4]), None);
    }
}
