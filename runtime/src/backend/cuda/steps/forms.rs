//! Int8 forms that prompts leave where the values would have been.
//!
//! What a gate lets through, and what Hopper's own fast attention computes, is read by a
//! quantisation alone, if it goes into products: it is then quantised as it is made. Codes, scales
//! and sums take the place of the values, which is larger. It is kept until the quantisation's
//! step, which must be the last one to read them.

use std::collections::HashMap;

use loaf_formats::op::{self, OpAttrs, OpKind};
use loaf_formats::plan::Region;

use super::super::launch::{Form, Gated, Kernel, Launch, Left, Linear, aligned, attention, stage};
use super::Steps;
use crate::schedule::{Arena, Maker, Product, RecordId, Route, Source, Step, ValueId};

/// Which records leave the int8 form of their result.
#[derive(Default)]
pub(super) struct Forms {
    /// Per record that leaves it: the quantisation that would make it.
    of: HashMap<RecordId, RecordId>,
    /// Per value of these quantisations: where it is.
    pub(super) places: HashMap<ValueId, u64>,
}

impl Forms {
    /// Whether a quantisation is made by the record before it.
    pub(super) fn is_left(&self, quantize: RecordId) -> bool {
        self.of.values().any(|q| *q == quantize)
    }
}

impl Steps<'_> {
    /// Every form that can be left by who makes its values.
    pub(super) fn forms(&self) -> Forms {
        let at = op::quantize::Operands::indices();
        let mut forms = Forms::default();
        for quantize in (0..self.records.len()).filter(|&r| self.records[r].kind == OpKind::Quantize) {
            let Some((maker, value)) = self.leaver(quantize) else { continue };
            let Some(place) = self.schedule.arena.offsets[value] else { continue };
            let made = [at.codes, at.scales, at.sums].map(|i| self.value(quantize, i));
            let Some(made) = made.into_iter().collect::<Option<Vec<ValueId>>>() else { continue };
            // The values' place is cut into three.
            let mut end = place;
            let mut places = Vec::new();
            for &v in &made {
                places.push((v, self.bases.arena + end));
                end += self.schedule.values[v].bytes[1].next_multiple_of(Arena::ALIGN);
            }
            let own = |v: &ValueId| {
                let step = self.schedule.step_of(quantize).map(|s| &self.schedule.steps[s]);
                step.is_some_and(|s| s.internal.contains(v)) && self.schedule.values[*v].region == Region::Arena
            };
            if made.iter().all(own) && end - place <= self.schedule.values[value].bytes[1] {
                forms.of.insert(maker, quantize);
                forms.places.extend(places);
            }
        }
        forms
    }

    /// The record that can leave the form that a quantisation makes, and the value that nobody then
    /// needs.
    fn leaver(&self, quantize: RecordId) -> Option<(RecordId, ValueId)> {
        let at = op::quantize::Operands::indices();
        let Source::Value { id, whole: true, .. } = self.schedule.nodes[quantize].operands[at.x] else { return None };
        let Maker::Record(maker, out) = self.schedule.values[id].maker else { return None };
        let (heads, dim) = self.made_heads(maker)?;
        let q = op::quantize::Attrs::of(self.records[quantize].attrs);
        let (from, to) = (self.place(maker, out), self.place(quantize, at.x));
        // Heads side by side may be read as one.
        let alike = (q.heads, q.dim) == (heads, dim) && (heads == 1 || from.head == to.head)
            || (q.heads, q.dim) == (1, heads * dim) && from.head as usize == dim;
        let codes = self.place(quantize, at.codes);
        let fits = q.group == 64
            && (codes.row | u64::from(codes.head)).is_multiple_of(4)
            && dim.is_multiple_of(64)
            && alike
            && from.row == to.row
            && self.is_read_by(id, &[maker, quantize])
            && self.schedule.values[id].region == Region::Arena;
        fits.then_some((maker, id))
    }

    /// Heads and their length of what a record makes that may leave it as its form.
    fn made_heads(&self, record: RecordId) -> Option<(usize, usize)> {
        let attrs = self.records[record].attrs;
        match self.records[record].kind {
            OpKind::SiluMul | OpKind::SigmoidMul => {
                let (a, at) = (op::silu_mul::Attrs::of(attrs), op::silu_mul::Operands::indices());
                [at.a, at.b].iter().all(|&i| aligned(&self.place(record, i))).then_some((a.heads, a.dim))
            }
            OpKind::Attention => {
                let a = op::attention::Attrs::of(attrs);
                let l = attention(&self.placed(record), &self.attrs(record), self.bases, self.step);
                let own = matches!(l.launch(self.bases, false).kernel, Kernel::FastHopper64 | Kernel::FastHopper128);
                own.then_some((a.heads, a.dim))
            }
            _ => None,
        }
    }

    /// Whether no record but these names a value, and no phase leaves it behind.
    fn is_read_by(&self, value: ValueId, records: &[RecordId]) -> bool {
        let names = |r: RecordId| self.schedule.nodes[r].operands.iter().any(|o| o.value() == Some(value));
        (0..self.schedule.nodes.len()).all(|r| records.contains(&r) || !names(r))
    }

    /// Where the form of a record's result goes, if it leaves that.
    pub(super) fn left(&self, record: RecordId) -> Option<Left> {
        let quantize = *self.forms.of.get(&record)?;
        let at = op::quantize::Operands::indices();
        let q = op::quantize::Attrs::of(self.records[quantize].attrs);
        let [codes, scales, sums] = [at.codes, at.scales, at.sums].map(|i| self.place(quantize, i));
        let (heads, dim) = self.made_heads(record)?;
        let heads = match q.heads == heads {
            true => [codes.head.into(), scales.head.into()],
            false => [dim as u64, dim as u64 / 64],
        };
        Some(Left { at: [codes.at, scales.at, sums.at], codes: [codes.row, heads[0]], scales: [scales.row, heads[1]] })
    }

    /// The launch of a record that leaves the form of its result.
    pub(super) fn leaves(&self, record: RecordId, left: &Left) -> Option<Launch> {
        if self.records[record].kind == OpKind::Attention {
            let mut l = attention(&self.placed(record), &self.attrs(record), self.bases, self.step);
            l.leave(left);
            return Some(l.launch(self.bases, false));
        }
        let at = op::silu_mul::Operands::indices();
        let (heads, dim) = self.made_heads(record)?;
        let sigmoid = self.records[record].kind == OpKind::SigmoidMul;
        let operands = [at.a, at.b].map(|i| self.place(record, i));
        Gated::new(operands, left, [self.rows, heads as u32, dim as u32], sigmoid).launch()
    }

    /// The products of a gate and of what it lets through, with the gate, as one launch, and the
    /// products' records; `launch` gives those of records of this step.
    pub(super) fn pairs(
        &self,
        fused: &Step,
        gate: RecordId,
        launch: impl Fn(RecordId) -> Option<Launch>,
    ) -> Option<(Launch, Vec<RecordId>)> {
        let left = self.left(gate).filter(|_| self.records[gate].kind == OpKind::SiluMul)?;
        let (a, at) = (op::silu_mul::Attrs::of(self.records[gate].attrs), op::silu_mul::Operands::indices());
        // Of each half its value, where in it the half begins, the product, and its outputs.
        let half = |operand: usize| {
            let Source::Value { id, at, .. } = self.schedule.nodes[gate].operands[operand] else { return None };
            let Maker::Record(product, out) = self.schedule.values[id].maker else { return None };
            let attrs = self.records[product].attrs;
            let outputs = match self.records[product].kind {
                OpKind::LinearQuant if a.heads == 1 => op::linear_quant::Attrs::of(attrs).outputs,
                OpKind::ExpertLinearQuant if a.heads == op::expert_linear_quant::Attrs::of(attrs).k => {
                    op::expert_linear_quant::Attrs::of(attrs).outputs
                }
                _ => return None,
            };
            let (from, to) = (self.place(product, out), self.place(gate, operand));
            let alike = from.row == to.row && (a.heads == 1 || from.head == to.head);
            let sole = self.is_read_by(id, &[product, gate]) && !fused.results.contains(&id);
            (alike && sole).then_some((id, at, product, outputs))
        };
        let (first, second) = (half(at.a)?, half(at.b)?);
        let width = 4 * a.dim as u64;
        if first.2 == second.2 {
            let whole = (first.1, second.1, first.3) == (0, width, 2 * a.dim);
            let both = launch(first.2).filter(|_| whole)?.pairs(None, &left, self.bases)?;
            return Some((both, vec![first.2]));
        }
        let whole = [first, second].iter().all(|h| (h.1, h.3) == (0, a.dim));
        let other = launch(second.2).filter(|_| whole)?;
        Some((launch(first.2)?.pairs(Some(&other), &left, self.bases)?, vec![first.2, second.2]))
    }

    /// The launches of a step record by record, but for those that are made already.
    pub(super) fn singles(&self, fused: &Step, made: &[RecordId]) -> Vec<Launch> {
        let mut out: Vec<(RecordId, Launch)> = Vec::new();
        for &record in fused.records.iter().filter(|r| !made.contains(r)) {
            let launch = |r| out.iter().find(|(record, _)| *record == r).map(|(_, launch)| *launch);
            if let Some((both, products)) = self.pairs(fused, record, launch) {
                out.retain(|(record, _)| !products.contains(record));
                out.push((record, both));
            } else {
                out.extend(self.single(record).map(|launch| (record, launch)));
            }
        }
        out.into_iter().map(|(_, launch)| launch).collect()
    }

    /// A router's step, whose norm and int8 form are one launch.
    pub(super) fn route(&self, fused: &Step, r: &Route) -> Option<Vec<Launch>> {
        let (norm, [quantize]) = (r.norm?, &r.quantizes[..]) else { return None };
        let (q, at) = (op::quantize::Attrs::of(self.records[*quantize].attrs), op::quantize::Operands::indices());
        let [x, codes, scales, sums] = [at.x, at.codes, at.scales, at.sums].map(|i| self.place(*quantize, i));
        let inputs = (q.heads * q.dim) as u32;
        let mut row = Linear { inputs, rows: self.rows, ..Linear::default() };
        let p = Product { norm: Some(norm), quantizes: r.quantizes.clone(), ..Product::default() };
        self.staged(&mut row, fused, &p, *quantize, true, &mut Vec::new())?;
        if q.group != 64 || row.stage != stage::NORM {
            return None;
        }
        // What else of the step reads the row.
        let normed = self.value(*quantize, at.x)?;
        if !self.is_read_by(normed, &[norm, *quantize]) {
            (row.normed, row.normed_row) = (x.at, x.row);
        }
        if self.records[norm].kind == OpKind::AddRmsNorm {
            let sum = self.place(norm, op::add_rms_norm::Operands::indices().sum);
            (row.sum, row.sum_row) = (sum.at, sum.row);
        }
        let form = Form { at: [codes.at, scales.at, sums.at], rows: [codes.row, scales.row], group: 64, made: false };
        let first = row.form(form)?;
        Some(std::iter::once(first).chain(self.singles(fused, &[norm, *quantize])).collect())
    }
}
