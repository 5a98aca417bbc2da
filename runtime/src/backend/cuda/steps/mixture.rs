//! A mixture of experts of one row in three launches: the router, gate and up of the chosen, down
//! and all that is added (`mixture.cu`).
//!
//! They make what the schedule's three steps make, but for what nobody else reads: the choice
//! itself is made anew by whoever needs it.

use loaf_formats::op::{self, OpAttrs, OpKind};

use super::super::driver::Address;
use super::super::launch::{
    self, EXPERT_INNER, EXPERT_SLOTS, Launch, Linear, MIXTURE_WIDTH, MOST_EXPERTS, RouteIn, stage,
};
use super::Steps;
use crate::schedule::{ExpertsIn, ExpertsOut, Gated, Product, RecordId, Route, SharedOut, Source, ValueId, Work};

/// A mixture's three steps, and what follows from its router.
struct Mixture<'a> {
    steps: [usize; 3],
    route: &'a Route,
    experts: &'a ExpertsIn,
    out: &'a ExpertsOut,
    /// The int8 form of the row.
    quantize: RecordId,
    sort: RecordId,
    choice: op::top_k::Attrs,
    scores: Address,
}

impl Steps<'_> {
    /// The launches of the mixture whose first step this is, one a step, if it is of the usual
    /// kind.
    pub(super) fn mixture(&self, at: usize) -> Option<[Launch; 3]> {
        let [first, second, third] = self.schedule.steps.get(at..at + 3)? else { return None };
        let (Work::Route(route), Work::ExpertsIn(experts), Work::ExpertsOut(out)) =
            (&first.work, &second.work, &third.work)
        else {
            return None;
        };
        let [quantize] = route.quantizes[..] else { return None };
        let softmax = op::softmax::Operands::indices();
        let mixture = Mixture {
            steps: [at, at + 1, at + 2],
            route,
            experts,
            out,
            quantize,
            sort: route.sort?,
            choice: op::top_k::Attrs::of(self.records[route.top_k].attrs),
            scores: self.place(route.softmax, softmax.x).at,
        };
        let slots = mixture.choice.k as u32 + u32::from(out.shared.is_some());
        let experts = mixture.choice.experts as u32;
        let fits = self.rows == 1
            && slots <= EXPERT_SLOTS
            && experts <= MOST_EXPERTS
            && experts.is_multiple_of(32)
            && route.others.is_empty()
            && out.shared.is_some() == mixture.experts.shared.is_some();
        if !fits {
            return None;
        }
        Some([self.router(&mixture)?, self.gates(&mixture)?, self.downs(&mixture)?])
    }

    /// Whether no step but the mixture's reads a value.
    fn is_within(&self, m: &Mixture<'_>, value: ValueId) -> bool {
        let steps = self.schedule.steps.iter().enumerate();
        steps.filter(|(s, _)| !m.steps.contains(s)).all(|(_, step)| !step.reads.contains(&value))
    }

    /// A product as the short kernels take it.
    fn quant(&self, record: RecordId) -> Option<Linear> {
        if self.records[record].kind != OpKind::LinearQuant {
            return None;
        }
        let a = op::linear_quant::Attrs::of(self.records[record].attrs);
        let operands = self.placed(record);
        let o = op::linear_quant::Operands::of(&operands);
        let mut l = Linear { inputs: a.inputs as u32, outputs: a.outputs as u32, rows: 1, ..Linear::default() };
        (l.format, l.out) = (a.format.code(), o.out.at);
        l.set_weight(&o.weight, false);
        Some(l)
    }

    /// A product of chosen experts, of so many inputs, outputs and slots of activations, whose int8
    /// form is `quantize`'s.
    fn expert(&self, m: &Mixture<'_>, record: RecordId, quantize: RecordId, sizes: [u32; 3]) -> Option<Linear> {
        if self.records[record].kind != OpKind::ExpertLinearQuant {
            return None;
        }
        let a = op::expert_linear_quant::Attrs::of(self.records[record].attrs);
        let at = op::expert_linear_quant::Operands::indices();
        let operands = self.placed(record);
        let mut l = Linear { rows: 1, format: a.format.code(), ..Linear::default() };
        l.set_weight(&op::expert_linear_quant::Operands::of(&operands).weight, true);
        let sort = op::expert_sort::Operands::indices();
        let fits = [a.inputs as u32, a.outputs as u32, a.x_slots as u32] == sizes
            && (a.k, a.experts) == (m.choice.k, m.choice.experts)
            && self.value(record, at.order) == self.value(m.sort, sort.order)
            && self.value(record, at.starts) == self.value(m.sort, sort.starts)
            && self.reads(record, at.codes, quantize)
            && l.is_usual(4);
        fits.then_some(l)
    }

    /// Whether a product's codes are those of an int8 form in groups of 64.
    fn reads(&self, product: RecordId, codes: usize, quantize: RecordId) -> bool {
        let at = op::quantize::Operands::indices();
        let group = op::quantize::Attrs::of(self.records[quantize].attrs).group;
        group == 64 && self.value(product, codes) == self.value(quantize, at.codes)
    }

    /// The row that a mixture begins with, and of the shared expert, if there is one, gate and up;
    /// and what values that makes.
    fn row(&self, m: &Mixture<'_>) -> Option<(Linear, Vec<Option<ValueId>>)> {
        let (fused, at) = (&self.schedule.steps[m.steps[0]], op::linear_quant::Operands::indices());
        let mut row = Linear { inputs: MIXTURE_WIDTH, rows: 1, format: launch::usual(4), ..Linear::default() };
        let mut p = Product { norm: m.route.norm, quantizes: m.route.quantizes.clone(), ..Product::default() };
        let mut made = Vec::new();
        if let Some(Gated { products, gate }) = &m.experts.shared {
            let [product] = products[..] else { return None };
            row = self.quant(product).filter(|r| r.inputs == MIXTURE_WIDTH && r.outputs == 2 * EXPERT_INNER)?;
            (p.products, p.gate) = (products.clone(), Some(*gate));
            self.finish(&mut row, &p, product, at.out, &mut made)?;
            self.reads(product, at.codes, m.quantize).then_some(())?;
        }
        self.staged(&mut row, fused, &p, m.quantize, true, &mut made)?;
        (row.stage == stage::NORM).then_some((row, made))
    }

    /// Where the int8 form of the row is: codes, scales, sums.
    fn form(&self, m: &Mixture<'_>) -> [Address; 3] {
        let at = op::quantize::Operands::indices();
        [at.codes, at.scales, at.sums].map(|i| self.place(m.quantize, i).at)
    }

    fn router(&self, m: &Mixture<'_>) -> Option<Launch> {
        let (fused, at) = (&self.schedule.steps[m.steps[0]], op::linear_quant::Operands::indices());
        let router = self.quant(m.route.router).filter(|r| r.inputs == MIXTURE_WIDTH && r.is_usual(8))?;
        let (row, mut made) = self.row(m)?;
        let form = op::quantize::Operands::indices();
        made.extend([form.codes, form.scales, form.sums].map(|i| self.value(m.quantize, i)));
        made.push(self.value(m.route.router, at.out));
        let [codes, scales, sums] = self.form(m);
        // The choice is made again by those that need it.
        let fits = self.reads(m.route.router, at.codes, m.quantize)
            && codes.is_multiple_of(16)
            && fused.results.iter().all(|v| made.contains(&Some(*v)) || self.is_within(m, *v));
        fits.then_some(())?;
        let parameter = RouteIn {
            row: row.row_product()?,
            planes: router.planes,
            scores: router.out,
            codes,
            scales,
            sums,
            w_row: router.plane_row[0].try_into().ok()?,
            s_row: router.plane_row[1].try_into().ok()?,
            outputs: router.outputs,
            unused: 0,
        };
        Some(parameter.launch())
    }

    fn gates(&self, m: &Mixture<'_>) -> Option<Launch> {
        let (fused, at) = (&self.schedule.steps[m.steps[1]], op::silu_mul::Operands::indices());
        let Gated { products, gate } = &m.experts.experts;
        let result = op::expert_linear_quant::Operands::indices().out;
        let half = |operand: usize| {
            let whole = matches!(self.schedule.nodes[*gate].operands[operand], Source::Value { whole: true, .. });
            let (product, _) = self.maker(*gate, operand).filter(|made| whole && made.1 == result)?;
            self.expert(m, product, m.quantize, [MIXTURE_WIDTH, EXPERT_INNER, 1])
        };
        let (first, second, out) = (half(at.a)?, half(at.b)?, self.place(*gate, at.out));
        let a = op::silu_mul::Attrs::of(self.records[*gate].attrs);
        let shared = m.experts.shared.as_ref().and_then(|s| self.value(s.gate, at.out));
        let fits = products.len() == 2
            && m.experts.quantizes.is_empty()
            && (a.heads, a.dim) == (m.choice.k, EXPERT_INNER as usize)
            && (first.plane_row, first.plane_expert) == (second.plane_row, second.plane_expert)
            && Self::are_all(fused, &[self.value(*gate, at.out), shared]);
        fits.then_some(())?;
        let [codes, scales, sums] = self.form(m);
        let parameter = launch::ExpertsIn {
            gate: first.planes,
            up: second.planes,
            w_expert: first.plane_expert[0],
            s_expert: first.plane_expert[1],
            codes,
            scales,
            sums,
            scores: m.scores,
            out: out.at,
            w_row: first.plane_row[0].try_into().ok()?,
            s_row: first.plane_row[1].try_into().ok()?,
            experts: m.choice.experts as u32,
            k: m.choice.k as u32,
            out_slot: out.head,
            unused: 0,
        };
        Some(parameter.launch(self.bases))
    }

    /// The activations of a second half: so many slots, made by a gate of the first half.
    fn hidden(&self, quantize: Option<RecordId>, gate: RecordId, slots: usize) -> Option<super::Operand> {
        let (quantize, at) = (quantize?, op::quantize::Operands::indices());
        let a = op::quantize::Attrs::of(self.records[quantize].attrs);
        let x = self.place(quantize, at.x);
        let made = self.value(gate, op::silu_mul::Operands::indices().out);
        let fits = (a.heads, a.dim) == (slots, EXPERT_INNER as usize)
            && self.value(quantize, at.x) == made
            && x.at.is_multiple_of(16)
            && x.head.is_multiple_of(4);
        fits.then_some(x)
    }

    fn downs(&self, m: &Mixture<'_>) -> Option<Launch> {
        let fused = &self.schedule.steps[m.steps[2]];
        let ExpertsOut { quantize, down, sum, shared } = m.out;
        let x = self.hidden(*quantize, m.experts.experts.gate, m.choice.k)?;
        let down = self.expert(m, *down, (*quantize)?, [EXPERT_INNER, MIXTURE_WIDTH, m.choice.k as u32])?;
        let at = op::weighted_sum::Operands::indices();
        let weights = op::top_k::Operands::indices().weights;
        if self.value(*sum, at.w) != self.value(m.route.top_k, weights) {
            return None;
        }
        let mut parameter = launch::ExpertsOut {
            planes: down.planes,
            w_expert: down.plane_expert[0],
            s_expert: down.plane_expert[1],
            x: x.at,
            scores: m.scores,
            w_row: down.plane_row[0].try_into().ok()?,
            s_row: down.plane_row[1].try_into().ok()?,
            x_slot: x.head,
            experts: m.choice.experts as u32,
            k: m.choice.k as u32,
            renorm: m.choice.renorm as u32,
            ..launch::ExpertsOut::default()
        };
        let (mut last, mut result) = (*sum, at.out);
        if let (Some(shared), Some(first)) = (shared, &m.experts.shared) {
            self.shared(m, &mut parameter, shared, first.gate)?;
            (last, result) = (shared.add, op::add::Operands::indices().out);
        }
        parameter.out = self.place(last, result).at;
        if let Some(&(norm, other)) = self.sums.of.get(&last) {
            let sum = op::add_rms_norm::Operands::indices().sum;
            (parameter.add, parameter.out) = (self.place(norm, other).at, self.place(norm, sum).at);
        }
        Self::are_all(fused, &[self.value(last, result)]).then(|| parameter.launch())
    }

    /// Lets the second half compute that of the shared expert, too.
    fn shared(&self, m: &Mixture<'_>, to: &mut launch::ExpertsOut, out: &SharedOut, gate: RecordId) -> Option<()> {
        let x = self.hidden(out.quantize, gate, 1)?;
        let down = self.quant(out.down).filter(|d| (d.inputs, d.outputs) == (EXPERT_INNER, MIXTURE_WIDTH))?;
        (to.shared, to.shared_x) = (down.planes, x.at);
        to.shared_w_row = down.plane_row[0].try_into().ok()?;
        to.shared_s_row = down.plane_row[1].try_into().ok()?;
        if let Some([open, _]) = out.scale {
            let at = op::sigmoid::Operands::indices();
            to.gate = self.place(open, at.x).at;
            // A score that the router makes.
            (self.maker(open, at.x)?.0 == m.route.router).then_some(())?;
        }
        down.is_usual(4).then_some(())
    }
}
