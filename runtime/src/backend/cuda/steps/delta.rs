//! The gated delta rule of one row in one launch (`delta.cu`).

use loaf_formats::dtype::DType;
use loaf_formats::op::{self, OpAttrs, OpKind};

use super::super::launch::{DELTA_DIM, DELTA_TAPS, DeltaPart, DeltaRow, Launch};
use super::Steps;
use crate::schedule::{Delta, RecordId, Source, Step};

impl Steps<'_> {
    pub(super) fn delta(&self, fused: &Step, d: &Delta) -> Option<Vec<Launch>> {
        let (q_norm, k_norm, gates, norm, gate) = (d.q_norm?, d.k_norm?, d.gates?, d.norm?, d.gate?);
        let scan = op::gdn_scan::Attrs::of(self.records[d.scan].attrs);
        let operands = self.placed(d.scan);
        let (o, at) = (op::gdn_scan::Operands::of(&operands), op::gdn_scan::Operands::indices());
        let dim = DELTA_DIM as usize;
        let (width, lengths) = (scan.v_heads * dim, op::l2_norm::Operands::indices());
        let length = |norm: RecordId| {
            let a = op::l2_norm::Attrs::of(self.records[norm].attrs);
            ((a.heads, a.dim) == (scan.k_heads, dim)).then_some([a.eps.to_bits(), a.scale.to_bits()])
        };
        let ([q_eps, q_scale], [k_eps, k_scale]) = (length(q_norm)?, length(k_norm)?);
        let parts = [
            self.convolved(d, q_norm, lengths.x, scan.k_heads)?,
            self.convolved(d, k_norm, lengths.x, scan.k_heads)?,
            self.convolved(d, d.scan, at.v, scan.v_heads)?,
        ];
        let g = op::gdn_gates::Attrs::of(self.records[gates].attrs);
        let made = self.placed(gates);
        let made = op::gdn_gates::Operands::of(&made);
        let n = op::rms_norm::Attrs::of(self.records[norm].attrs);
        let (weight, z) = (op::rms_norm::Operands::indices().weight, op::silu_mul::Operands::indices());
        let s = op::silu_mul::Attrs::of(self.records[gate].attrs);
        let fits = self.rows == 1
            && (scan.k_dim, scan.v_dim) == (dim, dim)
            && g.heads * g.dim == scan.v_heads
            && (o.state.head, o.state.row) == (DELTA_DIM, u64::from(DELTA_DIM * DELTA_DIM))
            && (n.heads, n.dim) == (scan.v_heads, dim)
            && s.heads * s.dim == width
            && Self::are_all(fused, &[self.value(gate, z.out)]);
        fits.then_some(())?;
        let parameter = DeltaRow {
            parts,
            a: made.a,
            b: made.b,
            a_log: made.a_log,
            dt: made.dt_bias,
            z: self.place(gate, z.a),
            norm: self.place(norm, weight),
            out: self.place(gate, z.out),
            state: o.state.at,
            runs: self.step.runs,
            counters: self.bases.counters,
            state_head: o.state.row,
            gate_dim: g.dim as u32,
            z_dim: s.dim as u32,
            out_dim: s.dim as u32,
            k_heads: scan.k_heads as u32,
            v_heads: scan.v_heads as u32,
            tiled: scan.tiled as u32,
            q_eps,
            q_scale,
            k_eps,
            k_scale,
            norm_eps: n.eps.to_bits(),
            norm_offset: n.offset.to_bits(),
        };
        Some(vec![parameter.launch()])
    }

    /// The channels of a convolution that an operand of so many heads is.
    fn convolved(&self, d: &Delta, reader: RecordId, operand: usize, heads: usize) -> Option<DeltaPart> {
        let Source::Value { at, .. } = self.schedule.nodes[reader].operands[operand] else { return None };
        let (conv, _) = self.maker(reader, operand).filter(|made| d.convs.contains(&made.0))?;
        if self.records[conv].kind != OpKind::ConvSilu {
            return None;
        }
        let a = op::conv_silu::Attrs::of(self.records[conv].attrs).0;
        let operands = self.placed(conv);
        let o = op::conv_silu::Operands::of(&operands);
        let first = at as usize / 4;
        let fits = a.kernel == DELTA_TAPS
            && o.weight.dtype == DType::BF16 as u32
            && o.weight.row == DELTA_TAPS as u64
            && o.weight.at.is_multiple_of(8)
            && self.place(reader, operand).head == DELTA_DIM
            && first + heads * DELTA_DIM as usize <= a.heads * a.dim;
        fits.then_some(DeltaPart {
            x: o.x.at,
            w: o.weight.at,
            state: o.state.at,
            first: first as u32,
            dim: a.dim as u32,
            x_head: o.x.head,
            tap: o.state.row.try_into().ok()?,
        })
    }
}
