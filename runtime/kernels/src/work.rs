//! How much work an op is: units it can be cut into, scratch it needs, a rough cost.

use loaf_formats::dtype::WeightFormat;
use loaf_formats::op::{self, ATTENTION_BLOCK, Mode, OpAttrs, OpKind};

use super::simd::layout;
use super::{CONV_CHANNELS, DENSE_ROWS, EIGHT, OpCall, QUANT_ROWS, attention, blocks, dense, isa, quant, rows, unit};

/// Attributes of `$call` as those of op `$op`.
macro_rules! of {
    ($call:expr, $op:ident) => {
        op::$op::Attrs::of($call.attrs)
    };
}

/// Number of independent work units of an op: rows times heads of what it writes, if it is not cut
/// otherwise.
pub fn units(call: &OpCall<'_>) -> usize {
    use OpKind::*;
    match call.kind {
        View | Linear | ExpertLinear => 0,
        LinearDense => of!(call, linear_dense).outputs.div_ceil(DENSE_ROWS),
        LinearQuant => of!(call, linear_quant).outputs.div_ceil(QUANT_ROWS),
        ExpertSort => 1,
        ExpertLinearDense => of!(call, expert_linear_dense).outputs.div_ceil(DENSE_ROWS),
        ExpertLinearQuant => {
            let a = of!(call, expert_linear);
            a.outputs.div_ceil(QUANT_ROWS).saturating_mul(expert_parts(&a))
        }
        KvWrite => of!(call, kv_write).rows * of!(call, kv_write).heads,
        Attention => call.runs.iter().map(|run| attention::run_units(&of!(call, attention), run)).sum(),
        Conv => of!(call, conv).heads * of!(call, conv).dim.div_ceil(CONV_CHANNELS),
        ConvSilu => of!(call, conv_silu).heads * of!(call, conv_silu).dim.div_ceil(CONV_CHANNELS),
        GdnScan => of!(call, gdn_scan).v_heads,
        _ => {
            let written = call.kind.spec().operands.iter().find(|o| o.mode == Mode::Out);
            let extent = |i: usize| written.and_then(|o| o.dims[i].value(call.attrs)).unwrap_or(0) as usize;
            extent(0).saturating_mul(extent(1))
        }
    }
}

/// Parts of equal size that the units of an expert op fall into. Those of a single row are its
/// slots, in the order of their experts: a worker reads whole matrices one after the other, not a
/// piece of each. Of more rows a part is everything, since a matrix is read once for all its slots.
pub(super) fn expert_parts(a: &op::expert_linear::Attrs) -> usize {
    if a.rows == 1 { a.k } else { 1 }
}

/// Bytes of scratch one thread needs for an op, whatever the runs: never fewer for more rows.
/// `None` if there are no so many.
pub fn scratch_bytes(kind: OpKind, attrs: &[u64]) -> Option<usize> {
    use OpKind::*;
    // Each buffer carved from scratch starts on 64 bytes.
    let slack = 64 * 19;
    let bytes = match kind {
        LinearDense => dense_scratch(op::linear_dense::Attrs::of(attrs).inputs)?,
        ExpertLinearDense => dense_scratch(op::expert_linear_dense::Attrs::of(attrs).inputs)?,
        LinearQuant => {
            let a = op::linear_quant::Attrs::of(attrs);
            quant_scratch(a.rows, 1, a.inputs, a.format)?
        }
        ExpertLinearQuant => {
            let a = op::expert_linear_quant::Attrs::of(attrs);
            quant_scratch(a.rows, a.x_slots, a.inputs, a.format)?
        }
        Attention => {
            let a = op::attention::Attrs::of(attrs);
            let queries = attention::tile_queries(a.rows.min(attention::tile_rows(&a)), &a)?;
            let dim = a.dim.checked_next_multiple_of(2 * EIGHT)?;
            // queries, accumulators, block accumulators; scores; a run of keys or values; three
            // scalars a query; what scores are added up from.
            let of_query = dim.checked_mul(3)?.checked_add(ATTENTION_BLOCK + 4)?;
            queries
                .checked_mul(of_query)?
                .checked_add(dim.checked_mul(32)?)?
                .checked_add(attention::PARKED)?
                .checked_mul(4)?
        }
        Conv => op::conv::Attrs::of(attrs).kernel.checked_mul(CONV_CHANNELS * 4)?,
        ConvSilu => op::conv_silu::Attrs::of(attrs).kernel.checked_mul(CONV_CHANNELS * 4)?,
        _ => 0,
    };
    bytes.checked_add(slack)
}

/// Scratch of a dense matmul: a panel of eight decoded rows, and what tiles leave.
fn dense_scratch(inputs: usize) -> Option<usize> {
    inputs.checked_next_multiple_of(4 * EIGHT)?.checked_mul(DENSE_ROWS)?.checked_add(dense::LEFT)?.checked_mul(4)
}

/// Scratch of a quantised matmul over `rows` rows of `x_slots` activations: permuted codes, their
/// integer group sums, four arranged rows, two unpacked panels of at most sixteen weight rows (or
/// of eight, with codes of two bytes), the panels' scales and biases, what these are decoded from,
/// where rows lie, and what a matrix unit takes.
fn quant_scratch(rows: usize, x_slots: usize, inputs: usize, format: WeightFormat) -> Option<usize> {
    let x_rows = rows.checked_mul(x_slots)?;
    let group = format.group().unwrap_or(32) as usize;
    let padded = inputs.checked_next_multiple_of(128)?;
    let groups = inputs.div_ceil(group).checked_next_multiple_of(16)?;
    // What may be multiplied as i16.
    let code_bytes = match isa::quant_case(format) {
        Some((layout::Q8 | layout::TABLE, _)) => padded.checked_mul(2)?,
        _ => padded,
    };
    let codes = x_rows.checked_mul(groups.checked_mul(4)?.checked_add(code_bytes)?)?;
    let panels = padded.checked_mul(2 * QUANT_ROWS + 4 * rows::ARRANGED)?;
    let [words, supers] = blocks::scratch_lanes(format, inputs);
    let lanes = groups.checked_mul(4)?.checked_add(words)?.checked_add(supers)?;
    let places = quant::places(rows)?;
    let stage = unit::Stage::bytes(rows, padded, groups)?.checked_add(places)?;
    codes.checked_add(panels)?.checked_add(lanes.checked_mul(QUANT_ROWS * 4)?)?.checked_add(stage)
}

/// Rough cost of an op in bytes touched (a multiply-add counts a quarter), so that a caller runs
/// tiny ops on one thread. Of several runs that which is furthest stands for all.
pub fn cost(call: &OpCall<'_>) -> u64 {
    let (spec, pos) = (call.kind.spec(), call.runs.iter().map(|run| run.pos as u64).max().unwrap_or(0));
    let mut bytes = spec.macs(call.attrs, pos) / 4;
    for (i, (operand, given)) in spec.operands.iter().zip(call.operands).enumerate() {
        // Planes that a format lacks have no extent.
        let extent = |d: usize| operand.dims[d].value(call.attrs).unwrap_or(0);
        let touched = spec.touched(call.attrs, i, pos);
        let rows = touched.read.saturating_add(touched.written);
        bytes = bytes.saturating_add(
            rows.saturating_mul(extent(1)).saturating_mul(extent(2)).saturating_mul(given.dtype.bytes()),
        );
    }
    bytes.saturating_mul(spec.effort(call.attrs))
}
