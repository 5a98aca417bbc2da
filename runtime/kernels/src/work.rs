//! How much work an op is: units it can be cut into, scratch it needs, a rough cost.

use loaf_formats::dtype::WeightFormat;
use loaf_formats::op::{self, ATTENTION_BLOCK, OpAttrs, OpKind};

use super::{CONV_CHANNELS, DENSE_ROWS, EIGHT, OpCall, QUANT_ROWS, attention, blocks, dense, rows};

/// Number of independent work units of an op.
pub fn units(call: &OpCall<'_>) -> usize {
    use OpKind::*;
    macro_rules! of {
        ($op:ident, |$a:ident| $e:expr) => {{
            let $a = op::$op::Attrs::of(call.attrs);
            $e
        }};
    }
    match call.kind {
        View | Linear | ExpertLinear => 0,
        Embed => of!(embed, |a| a.rows),
        RmsNorm => of!(rms_norm, |a| a.rows * a.heads),
        AddRmsNorm => of!(add_rms_norm, |a| a.rows * a.heads),
        Add => of!(add, |a| a.rows * a.heads),
        Mul => of!(mul, |a| a.rows * a.heads),
        Silu => of!(silu, |a| a.rows * a.heads),
        Sigmoid => of!(sigmoid, |a| a.rows * a.heads),
        SiluMul => of!(silu_mul, |a| a.rows * a.heads),
        SigmoidMul => of!(sigmoid_mul, |a| a.rows * a.heads),
        MulRows => of!(mul_rows, |a| a.rows),
        Quantize => of!(quantize, |a| a.rows * a.heads),
        LinearDense => of!(linear_dense, |a| a.outputs.div_ceil(DENSE_ROWS)),
        LinearQuant => of!(linear_quant, |a| a.outputs.div_ceil(QUANT_ROWS)),
        ExpertSort => 1,
        ExpertLinearDense => of!(expert_linear_dense, |a| a.outputs.div_ceil(DENSE_ROWS)),
        ExpertLinearQuant => of!(expert_linear_quant, |a| a.outputs.div_ceil(QUANT_ROWS)),
        WeightedSum => of!(weighted_sum, |a| a.rows),
        Softmax => of!(softmax, |a| a.rows),
        TopK => of!(top_k, |a| a.rows),
        RopeTable => of!(rope_table, |a| a.rows),
        Rope => of!(rope, |a| a.rows * a.heads),
        KvWrite => of!(kv_write, |a| a.rows * a.heads),
        Attention => of!(attention, |a| call.runs.iter().map(|run| attention::run_units(&a, run)).sum()),
        Conv => of!(conv, |a| a.heads * a.dim.div_ceil(CONV_CHANNELS)),
        ConvSilu => of!(conv_silu, |a| a.heads * a.dim.div_ceil(CONV_CHANNELS)),
        L2Norm => of!(l2_norm, |a| a.rows * a.heads),
        GdnGates => of!(gdn_gates, |a| a.rows),
        GdnScan => of!(gdn_scan, |a| a.v_heads),
        GatherRows => of!(gather_rows, |a| a.rows),
    }
}

/// Bytes of scratch one thread needs for an op, whatever the runs: never fewer for more rows. `None` if there are no so many.
pub fn scratch_bytes(kind: OpKind, attrs: &[u64]) -> Option<usize> {
    use OpKind::*;
    // Each buffer carved from scratch starts on 64 bytes.
    let slack = 64 * 14;
    let bytes = match kind {
        LinearDense => dense_scratch(op::linear_dense::Attrs::of(attrs).inputs)?,
        ExpertLinearDense => dense_scratch(op::expert_linear_dense::Attrs::of(attrs).inputs)?,
        LinearQuant => {
            let a = op::linear_quant::Attrs::of(attrs);
            quant_scratch(a.rows, a.inputs, a.format)?
        }
        ExpertLinearQuant => {
            let a = op::expert_linear_quant::Attrs::of(attrs);
            quant_scratch(a.rows.checked_mul(a.x_slots)?, a.inputs, a.format)?
        }
        Attention => {
            let a = op::attention::Attrs::of(attrs);
            let queries = attention::tile_queries(a.rows.min(attention::tile_rows(&a)), &a)?;
            let dim = a.dim.checked_next_multiple_of(2 * EIGHT)?;
            // queries, accumulators, block accumulators; scores; a run of keys or values; three scalars a query.
            let of_query = dim.checked_mul(3)?.checked_add(ATTENTION_BLOCK + 4)?;
            queries.checked_mul(of_query)?.checked_add(dim.checked_mul(32)?)?.checked_mul(4)?
        }
        Conv => op::conv::Attrs::of(attrs).kernel.checked_mul(CONV_CHANNELS * 4)?,
        ConvSilu => op::conv_silu::Attrs::of(attrs).kernel.checked_mul(CONV_CHANNELS * 4)?,
        View | Linear | ExpertLinear | Embed | RmsNorm | AddRmsNorm | Add | Mul | Silu | Sigmoid | SiluMul
        | SigmoidMul | MulRows | Quantize | ExpertSort | WeightedSum | Softmax | TopK | RopeTable | Rope | KvWrite
        | L2Norm | GdnGates | GdnScan | GatherRows => 0,
    };
    bytes.checked_add(slack)
}

/// Scratch of a dense matmul: a panel of eight decoded rows, and what tiles leave.
fn dense_scratch(inputs: usize) -> Option<usize> {
    inputs.checked_next_multiple_of(4 * EIGHT)?.checked_mul(DENSE_ROWS)?.checked_add(dense::LEFT)?.checked_mul(4)
}

/// Scratch of a quantised matmul over `x_rows` activation rows: permuted codes, their integer group sums, four
/// arranged rows, two unpacked panels of at most sixteen weight rows, the panels' scales and biases, and what these are
/// decoded from.
fn quant_scratch(x_rows: usize, inputs: usize, format: WeightFormat) -> Option<usize> {
    let group = format.group().unwrap_or(32) as usize;
    let padded = inputs.checked_next_multiple_of(128)?;
    let groups = inputs.div_ceil(group).checked_next_multiple_of(16)?;
    let codes = x_rows.checked_mul(groups.checked_mul(4)?.checked_add(padded)?)?;
    let panels = padded.checked_mul(2 * QUANT_ROWS + 4 * rows::ARRANGED)?;
    let [words, supers] = blocks::scratch_lanes(format, inputs);
    let lanes = groups.checked_mul(4)?.checked_add(words)?.checked_add(supers)?;
    codes.checked_add(panels)?.checked_add(lanes.checked_mul(QUANT_ROWS * 4)?)
}

/// Rough cost of an op in bytes touched (a multiply-add of a matmul counts a quarter), so that a caller runs
/// tiny ops on one thread.
pub fn cost(call: &OpCall<'_>) -> u64 {
    use OpKind::*;
    macro_rules! of {
        ($op:ident, |$a:ident| $e:expr) => {{
            let $a = op::$op::Attrs::of(call.attrs);
            $e
        }};
    }
    let times = |factors: &[usize]| factors.iter().fold(1u64, |n, &f| n.saturating_mul(f as u64));
    // `matrices` of `[outputs, inputs]` read once each, `rows` of products.
    let matrix = |matrices: usize, rows: usize, inputs: usize, outputs: usize, format: WeightFormat| {
        let bytes = times(&[inputs, format.bits() as usize, outputs, matrices]) / 8;
        bytes.saturating_add(times(&[rows, inputs, outputs]) / 4)
    };
    match call.kind {
        View | Linear | ExpertLinear => 0,
        Embed => of!(embed, |a| times(&[8, a.rows, a.dim])),
        RmsNorm => of!(rms_norm, |a| times(&[12, a.rows, a.heads, a.dim])),
        AddRmsNorm => of!(add_rms_norm, |a| times(&[12, a.rows, a.heads, a.dim])),
        Add => of!(add, |a| times(&[12, a.rows, a.heads, a.dim])),
        Mul => of!(mul, |a| times(&[12, a.rows, a.heads, a.dim])),
        Silu => of!(silu, |a| times(&[24, a.rows, a.heads, a.dim])),
        Sigmoid => of!(sigmoid, |a| times(&[24, a.rows, a.heads, a.dim])),
        SiluMul => of!(silu_mul, |a| times(&[24, a.rows, a.heads, a.dim])),
        SigmoidMul => of!(sigmoid_mul, |a| times(&[24, a.rows, a.heads, a.dim])),
        MulRows => of!(mul_rows, |a| times(&[16, a.rows, a.dim])),
        Quantize => of!(quantize, |a| times(&[12, a.rows, a.heads, a.dim])),
        LinearDense => of!(linear_dense, |a| matrix(1, a.rows, a.inputs, a.outputs, a.format)),
        LinearQuant => of!(linear_quant, |a| matrix(1, a.rows, a.inputs, a.outputs, a.format)),
        ExpertSort => of!(expert_sort, |a| times(&[8, a.rows, a.k]).saturating_add(times(&[8, a.experts]))),
        ExpertLinearDense => of!(expert_linear_dense, |a| {
            let slots = a.rows.saturating_mul(a.k);
            matrix(slots.min(a.experts), slots, a.inputs, a.outputs, a.format)
        }),
        ExpertLinearQuant => of!(expert_linear_quant, |a| {
            let slots = a.rows.saturating_mul(a.k);
            matrix(slots.min(a.experts), slots, a.inputs, a.outputs, a.format)
        }),
        WeightedSum => of!(weighted_sum, |a| times(&[12, a.rows, a.k, a.dim])),
        Softmax => of!(softmax, |a| times(&[16, a.rows, a.dim])),
        TopK => of!(top_k, |a| times(&[8, a.rows, a.experts])),
        RopeTable => of!(rope_table, |a| times(&[64, a.rows, a.half])),
        Rope => of!(rope, |a| times(&[12, a.rows, a.heads, a.dim])),
        KvWrite => of!(kv_write, |a| times(&[12, a.rows, a.heads, a.dim])),
        Attention => of!(attention, |a| {
            let of_run = |run: &super::Run| {
                let end = run.pos + run.rows;
                let span = if a.window == 0 { end } else { a.window.min(end) + run.rows };
                times(&[run.rows, a.heads, a.dim, span])
            };
            call.runs.iter().map(of_run).fold(0, u64::saturating_add)
        }),
        Conv => of!(conv, |a| times(&[4, a.rows, a.heads, a.dim, a.kernel])),
        ConvSilu => of!(conv_silu, |a| times(&[4, a.rows, a.heads, a.dim, a.kernel])),
        L2Norm => of!(l2_norm, |a| times(&[12, a.rows, a.heads, a.dim])),
        GdnGates => of!(gdn_gates, |a| times(&[64, a.rows, a.heads, a.dim])),
        GdnScan => of!(gdn_scan, |a| times(&[8, a.rows, a.v_heads, a.k_dim, a.v_dim])),
        GatherRows => of!(gather_rows, |a| times(&[16, a.rows, a.dim])),
    }
}
