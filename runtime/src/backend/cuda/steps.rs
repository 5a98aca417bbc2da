//! Steps in the shared schedule's fused steps: as few launches as there are kernels for.
//!
//! Of one row a product makes its activations itself (norm, sum, int8 form) and adds what follows;
//! attention makes its queries, the new key and value and the gate; the delta rule is one launch, a
//! mixture of experts three. Of several rows activations are made once, before their products, and
//! queries, keys and values before attention. Prompts do the same with products of many rows, whose
//! results they do not finish, but for a gate's. What has no kernel of its own is launched record
//! by record, with operands where the schedule places them.
//!
//! A sum before a norm is made by the product (or the mixture) whose result goes into it, which has
//! its outputs at hand, and not by every block of the product after it ([`Sums`]).

mod delta;
mod forms;
mod mixture;

use std::collections::HashMap;

use loaf_formats::op::{self, OpAttrs, OpKind};
use loaf_formats::plan::{Record, Region, records};

use forms::Forms;

use super::launch::{
    Bases, Form, HeadNorm, Launch, Linear, Operand, Parameter, Step, attention, begin, launch_with, stage,
};
use crate::schedule::{
    Arena, Attend, Draft, Maker, Product, RecordId, Route, Schedule, Source, Step as Fused, ValueId, Work,
};

/// Most inputs whose values a product holds in shared memory while it stages them.
const MOST_HELD: usize = 6144;
/// Places of sums that products make: one is read while the next is written.
const SUMS: u64 = 2;

/// Sums before norms that are made by the product before them.
#[derive(Default)]
struct Sums {
    /// Per sum: where it is.
    places: HashMap<ValueId, u64>,
    /// Per product, or last record of a mixture: the norm whose sum it makes, and that one's other
    /// operand.
    of: HashMap<RecordId, (RecordId, usize)>,
}

struct Steps<'a> {
    schedule: &'a Draft,
    records: Vec<Record<'a>>,
    bases: &'a Bases,
    step: Step,
    rows: u32,
    /// Whether these are the rows of prompts.
    many: bool,
    sums: Sums,
    forms: Forms,
}

/// Bytes of transient values, sums that products make included.
pub(super) fn room(schedule: &Schedule) -> u64 {
    schedule.arena.bytes.next_multiple_of(Arena::ALIGN) + SUMS * sum_bytes(schedule)
}

/// Bytes of the largest sum before a norm.
fn sum_bytes(schedule: &Draft) -> u64 {
    let at = op::add_rms_norm::Operands::indices();
    let norms = schedule.nodes.iter().filter(|n| n.kind == OpKind::AddRmsNorm);
    let bytes = norms.filter_map(|n| n.operands[at.sum].value()).map(|v| schedule.values[v].bytes[1]);
    bytes.max().unwrap_or(0).next_multiple_of(Arena::ALIGN)
}

/// The launches of a decode step of few rows; `words` is the template's graph for them.
pub(super) fn few_rows(schedule: &Schedule, words: &[u64], rows: u32, bases: &Bases, step: Step) -> Vec<Launch> {
    let records = records(words).flatten().collect();
    let mut all =
        Steps { schedule, records, bases, step, rows, many: false, sums: Sums::default(), forms: Forms::default() };
    let without = all.all_made();
    all.sums = all.sums_of(&without);
    let mut made = all.all_made();
    if made.iter().zip(&without).any(|(a, b)| a.is_none() && b.is_some()) {
        (made, all.sums) = (without, Sums::default());
    }
    let mut out: Vec<Launch> = Vec::new();
    for (fused, made) in schedule.steps.iter().zip(made) {
        match made {
            Some(mut launches) => {
                if let Some(Launch { kernel, parameter: Parameter::Attend(attend), .. }) = out.last_mut()
                    && attend.makes_form(*kernel, &launches)
                {
                    launches.remove(0);
                }
                if let (Some(before), [Launch { parameter: Parameter::DeltaRow(delta), .. }]) =
                    (out.last_mut(), &launches[..])
                {
                    delta.ahead(before);
                }
                out.extend(launches);
            }
            None => {
                for launch in fused.records.iter().filter_map(|&i| all.single(i)) {
                    match out.last().and_then(|last| begin(last, &launch).or_else(|| begin(&launch, last))) {
                        Some(both) => *out.last_mut().expect("a launch before it") = both,
                        None => out.push(launch),
                    }
                }
            }
        }
    }
    out
}

/// The launches of a step of prompts; `words` is the template's graph for its rows.
pub(super) fn many_rows(schedule: &Schedule, words: &[u64], rows: u32, bases: &Bases, step: Step) -> Vec<Launch> {
    let records = records(words).flatten().collect();
    let (sums, forms) = (Sums::default(), Forms::default());
    let mut all = Steps { schedule, records, bases, step, rows, many: true, sums, forms };
    all.forms = all.forms();
    schedule.steps.iter().flat_map(|fused| all.made(fused).unwrap_or_else(|| all.singles(fused, &[]))).collect()
}

impl Steps<'_> {
    /// Of each step the launches, if it has kernels of its own.
    fn all_made(&self) -> Vec<Option<Vec<Launch>>> {
        let mut made: Vec<_> = self.schedule.steps.iter().map(|s| self.made(s)).collect();
        for first in 0..made.len() {
            let mixture = self.mixture(first).into_iter().flatten();
            mixture.enumerate().for_each(|(i, launch)| made[first + i] = Some(vec![launch]));
        }
        made
    }

    /// The launches of a step that has kernels of its own.
    fn made(&self, fused: &Fused) -> Option<Vec<Launch>> {
        match &fused.work {
            Work::Product(product) => self.product(fused, product),
            Work::Attend(attend) => self.attend(fused, attend),
            Work::Delta(delta) => self.delta(fused, delta),
            Work::Route(route) if self.many => self.route(fused, route),
            // See `mixture`.
            _ => None,
        }
    }

    /// Which sums the product before them can make; `made` says which steps have kernels of their
    /// own.
    fn sums_of(&self, made: &[Option<Vec<Launch>>]) -> Sums {
        let (schedule, at) = (self.schedule, op::add_rms_norm::Operands::indices());
        let (start, bytes) = (schedule.arena.bytes.next_multiple_of(Arena::ALIGN), sum_bytes(schedule));
        let mut sums = Sums::default();
        // Per place: the last step that reads what is there.
        let mut taken: [Option<usize>; SUMS as usize] = [None; SUMS as usize];
        for (after, fused) in schedule.steps.iter().enumerate() {
            let (Work::Product(Product { norm: Some(norm), .. }) | Work::Route(Route { norm: Some(norm), .. })) =
                &fused.work
            else {
                continue;
            };
            if self.records[*norm].kind != OpKind::AddRmsNorm || made[after].is_none() {
                continue;
            }
            for (own, other) in [(at.a, at.b), (at.b, at.a)] {
                let Some((product, before)) = self.sole_product(*norm, own, after, made) else { continue };
                let Some(sum) = self.value(*norm, at.sum) else { continue };
                let earlier = match self.value(*norm, other).map(|v| schedule.values[v].maker) {
                    Some(Maker::Record(r, _)) => schedule.step_of(r).is_some_and(|s| s < before),
                    Some(Maker::Given) => true,
                    None => false,
                };
                let free = taken.iter().position(|last| last.is_none_or(|last| last < before));
                if let (true, Some(free), Region::Arena) = (earlier, free, schedule.values[sum].region) {
                    let last = schedule.steps.iter().rposition(|s| s.reads.contains(&sum)).unwrap_or(after);
                    taken[free] = Some(last.max(after));
                    sums.places.insert(sum, self.bases.arena + start + free as u64 * bytes);
                    sums.of.insert(product, (*norm, other));
                    break;
                }
            }
        }
        sums
    }

    /// The product, or last record of a mixture, and its step, that makes all of an operand of a
    /// norm in step `after`, which nothing else reads and nothing follows.
    fn sole_product(
        &self,
        norm: RecordId,
        operand: usize,
        after: usize,
        made: &[Option<Vec<Launch>>],
    ) -> Option<(RecordId, usize)> {
        let schedule = self.schedule;
        let Source::Value { id, whole: true, .. } = schedule.nodes[norm].operands[operand] else { return None };
        let (product, _) = self.maker(norm, operand)?;
        let before = schedule.step_of(product).filter(|&s| made[s].is_some())?;
        let bare = match &schedule.steps[before].work {
            Work::Product(p) => {
                let whole = self.records[product].kind == OpKind::LinearQuant
                    && op::linear_quant::Attrs::of(self.records[product].attrs).outputs
                        == op::add_rms_norm::Attrs::of(self.records[norm].attrs).dim;
                whole && p.products == [product] && p.gate.is_none() && p.residual.is_none() && p.biases.is_empty()
            }
            // What a mixture's last step makes is one row.
            Work::ExpertsOut(_) => true,
            _ => false,
        };
        let read = |s: usize| schedule.steps[s].reads.contains(&id);
        let uses = |r: &&RecordId| schedule.nodes[**r].operands.iter().any(|o| o.value() == Some(id));
        let sole = (0..schedule.steps.len()).all(|s| s == after || !read(s))
            && schedule.steps[after].records.iter().filter(uses).count() == 1
            && schedule.values[id].region == Region::Arena;
        (bare && sole && before < after).then_some((product, before))
    }

    /// Where an operand of a record is.
    fn place(&self, record: usize, operand: usize) -> Operand {
        let o = self.records[record].operand(operand);
        if let Source::Value { id, at, .. } = self.schedule.nodes[record].operands[operand]
            && let Some(offset) = self.schedule.arena.offsets[id]
        {
            let elsewhere = self.sums.places.get(&id).or_else(|| self.forms.places.get(&id));
            let at = elsewhere.copied().unwrap_or(self.bases.arena + offset) + at;
            return Operand { at, row: o.row_stride, head: o.head_stride, dtype: o.dtype as u32 };
        }
        self.bases.operand(o)
    }

    fn placed(&self, record: usize) -> [Operand; 12] {
        let mut operands = [Operand::default(); 12];
        (0..self.schedule.nodes[record].operands.len()).for_each(|i| operands[i] = self.place(record, i));
        operands
    }

    fn attrs(&self, record: usize) -> [u64; 12] {
        let (mut attrs, from) = ([0; 12], self.records[record].attrs);
        attrs[..from.len()].copy_from_slice(from);
        attrs
    }

    fn single(&self, record: usize) -> Option<Launch> {
        if self.forms.is_left(record) {
            return None;
        }
        if let Some(left) = self.left(record) {
            return self.leaves(record, &left);
        }
        launch_with(&self.records[record], self.placed(record), self.bases, self.step, !self.many)
    }

    /// The record that makes an operand of another.
    fn maker(&self, record: usize, operand: usize) -> Option<(usize, usize)> {
        let value = self.schedule.nodes[record].operands[operand].value()?;
        match self.schedule.values[value].maker {
            Maker::Record(record, operand) => Some((record, operand)),
            Maker::Given => None,
        }
    }

    fn value(&self, record: usize, operand: usize) -> Option<ValueId> {
        self.schedule.nodes[record].operands[operand].value()
    }

    /// Whether every result of a step is one of these.
    fn are_all(fused: &Fused, made: &[Option<ValueId>]) -> bool {
        fused.results.iter().all(|v| made.contains(&Some(*v)))
    }

    fn product(&self, fused: &Fused, p: &Product) -> Option<Vec<Launch>> {
        if !p.biases.is_empty() || p.gate.is_some() && p.residual.is_some() {
            return None;
        }
        let mut made: Vec<Option<ValueId>> = Vec::new();
        let mut launches = Vec::new();
        let mut quantized = None;
        let mut finished = p.gate.is_none() && p.residual.is_none();
        for (n, &product) in p.products.iter().enumerate() {
            if self.records[product].kind != OpKind::LinearQuant {
                return None;
            }
            let at = op::linear_quant::Operands::indices();
            let (a, o) = (op::linear_quant::Attrs::of(self.records[product].attrs), self.placed(product));
            let o = op::linear_quant::Operands::of(&o);
            let mut l = Linear {
                inputs: a.inputs as u32,
                outputs: a.outputs as u32,
                rows: self.rows,
                format: a.format.code(),
                out: o.out.at,
                out_row: o.out.row,
                ..Linear::default()
            };
            l.set_weight(&o.weight, false);
            let quantize = self.maker(product, at.codes).map(|m| m.0);
            match self.maker(product, at.codes) {
                Some((quantize, _)) if p.quantizes.contains(&quantize) => {
                    self.staged(&mut l, fused, p, quantize, n == 0, &mut made)?;
                }
                _ if p.norm.is_none() => {
                    l.stage = stage::CODES;
                    l.x = [o.codes.at, o.xscales.at, o.xsums.at];
                    (l.x_row, l.xs_row) = (o.codes.row, o.xscales.row);
                }
                _ => return None,
            }
            made.push(self.value(product, at.out));
            if !self.many && self.finish(&mut l, p, product, at.out, &mut made).is_some() {
                finished = true;
            }
            if self.rows == 1 && !self.many || l.stage == stage::CODES && self.many {
                let launch = l.launch(self.bases);
                match launches.last().and_then(|last: &Launch| last.beside(&launch)) {
                    Some(both) => *launches.last_mut().expect("a launch before it") = both,
                    None => launches.push(launch),
                }
                continue;
            }
            let quantize = quantize?;
            let at = op::quantize::Operands::indices();
            let [codes, scales, sums] = [at.codes, at.scales, at.sums].map(|i| self.place(quantize, i));
            let group = op::quantize::Attrs::of(self.records[quantize].attrs).group as u32;
            let made = quantized.replace(quantize) == Some(quantize) || self.forms.is_left(quantize);
            let form = Form { at: [codes.at, scales.at, sums.at], rows: [codes.row, scales.row], group, made };
            launches.extend(match self.many {
                true => l.many(form, self.bases)?,
                false => l.few(form, self.bases)?,
            });
        }
        if !finished {
            // What follows the products is computed by itself.
            for &after in p.gate.iter().chain(&p.residual) {
                let product = |r| launches.last().filter(|_| p.products == [r]).copied();
                match self.pairs(fused, after, product) {
                    Some((both, _)) => *launches.last_mut().expect("a product") = both,
                    None => launches.extend(self.single(after)),
                }
                made.extend((0..self.schedule.nodes[after].operands.len()).map(|i| self.value(after, i)));
            }
        }
        Self::are_all(fused, &made).then_some(launches)
    }

    /// Makes a product make its activations from what a quantisation, and the norm before it, read.
    fn staged(
        &self,
        l: &mut Linear,
        fused: &Fused,
        p: &Product,
        quantize: usize,
        first: bool,
        made: &mut Vec<Option<ValueId>>,
    ) -> Option<()> {
        let at = op::quantize::Operands::indices();
        let (a, x) = (op::quantize::Attrs::of(self.records[quantize].attrs), self.place(quantize, at.x));
        if a.heads != 1 && x.head as usize != a.dim || a.heads * a.dim != l.inputs as usize {
            return None;
        }
        if l.inputs as usize <= MOST_HELD {
            l.flags |= stage::HELD;
        }
        let norm = p.norm.filter(|n| self.maker(quantize, at.x).is_some_and(|m| m.0 == *n));
        let Some(norm) = norm else {
            (l.stage, l.x[0], l.x_row) = (stage::PLAIN, x.at, x.row);
            return p.norm.is_none().then_some(());
        };
        if l.flags & stage::HELD == 0 {
            return None;
        }
        l.stage = stage::NORM;
        let wanted = |record: usize, operand: usize| {
            let value = self.value(record, operand)?;
            (first && fused.results.contains(&value)).then(|| self.place(record, operand))
        };
        let (weight, eps, offset, dim, out);
        if self.records[norm].kind == OpKind::AddRmsNorm {
            let (a, at) =
                (op::add_rms_norm::Attrs::of(self.records[norm].attrs), op::add_rms_norm::Operands::indices());
            (weight, eps, offset, dim, out) = (self.place(norm, at.weight), a.eps, a.offset, a.dim, at.out);
            let sum = self.value(norm, at.sum);
            if sum.is_some_and(|sum| self.sums.places.contains_key(&sum)) {
                let x = self.place(norm, at.sum);
                (l.x[0], l.x_row) = (x.at, x.row);
            } else {
                let (x, x2) = (self.place(norm, at.a), self.place(norm, at.b));
                (l.x[0], l.x_row, l.x2, l.x2_row) = (x.at, x.row, x2.at, x2.row);
                (l.sum, l.sum_row) = wanted(norm, at.sum).map_or((0, 0), |o| (o.at, o.row));
            }
            made.push(sum);
        } else {
            let (a, at) = (op::rms_norm::Attrs::of(self.records[norm].attrs), op::rms_norm::Operands::indices());
            if a.heads != 1 {
                return None;
            }
            (weight, eps, offset, dim, out) = (self.place(norm, at.weight), a.eps, a.offset, a.dim, at.out);
            let x = self.place(norm, at.x);
            (l.x[0], l.x_row) = (x.at, x.row);
        }
        (l.normed, l.normed_row) = wanted(norm, out).map_or((0, 0), |o| (o.at, o.row));
        made.push(self.value(norm, out));
        (l.y, l.y_dtype, l.eps, l.offset) = (weight.at, weight.dtype, eps.to_bits(), offset.to_bits());
        (dim == l.inputs as usize).then_some(())
    }

    /// Lets a product compute what becomes of its result, where it can.
    fn finish(
        &self,
        l: &mut Linear,
        p: &Product,
        product: usize,
        out: usize,
        made: &mut Vec<Option<ValueId>>,
    ) -> Option<()> {
        let result = self.value(product, out);
        if let Some(&(norm, other)) = self.sums.of.get(&product) {
            let at = op::add_rms_norm::Operands::indices();
            let (x, sum) = (self.place(norm, other), self.place(norm, at.sum));
            (l.add, l.add_row, l.out, l.out_row) = (x.at, x.row, sum.at, sum.row);
        }
        if let Some(gate) = p.gate {
            let at = op::silu_mul::Operands::indices();
            let half = u64::from(l.outputs) / 2;
            if p.products.len() != 1 || self.records[gate].kind != OpKind::SiluMul || !l.outputs.is_multiple_of(2) {
                return None;
            }
            let a = op::silu_mul::Attrs::of(self.records[gate].attrs);
            let offset = |operand: usize| match self.schedule.nodes[gate].operands[operand] {
                Source::Value { id, at, .. } if Some(id) == result => Some(at),
                _ => None,
            };
            let whole = a.heads == 1 && a.dim as u64 == half;
            if !whole || offset(at.a) != Some(0) || offset(at.b) != Some(4 * half) {
                return None;
            }
            l.flags |= stage::PAIRS;
            let out = self.place(gate, at.out);
            (l.out, l.out_row) = (out.at, out.row);
            made.push(self.value(gate, at.out));
        }
        if let Some(residual) = p.residual {
            let at = op::add::Operands::indices();
            let a = op::add::Attrs::of(self.records[residual].attrs);
            if p.products.len() != 1 || a.heads * a.dim != l.outputs as usize {
                return None;
            }
            let [first, second] = [at.a, at.b].map(|i| self.value(residual, i) == result);
            let other = if first { at.b } else { at.a };
            let (x, out) = (self.place(residual, other), self.place(residual, at.out));
            let flat = |o: &Operand| a.heads == 1 || o.head as usize == a.dim;
            if first == second || !flat(&x) || !flat(&out) {
                return None;
            }
            (l.add, l.add_row, l.out, l.out_row) = (x.at, x.row, out.at, out.row);
            made.push(self.value(residual, at.out));
        }
        Some(())
    }

    fn head_norm(&self, norm: Option<usize>, heads: usize, dim: usize) -> Option<(HeadNorm, Option<Operand>)> {
        let Some(norm) = norm else { return Some((HeadNorm::default(), None)) };
        if self.records[norm].kind != OpKind::RmsNorm {
            return None;
        }
        let (a, at) = (op::rms_norm::Attrs::of(self.records[norm].attrs), op::rms_norm::Operands::indices());
        let weight = self.place(norm, at.weight);
        let made = HeadNorm {
            at: weight.at,
            dtype: weight.dtype,
            eps: a.eps.to_bits(),
            offset: a.offset.to_bits(),
            unused: 0,
        };
        (a.heads == heads && a.dim == dim).then(|| (made, Some(self.place(norm, at.x))))
    }

    fn attend(&self, fused: &Fused, p: &Attend) -> Option<Vec<Launch>> {
        let a = op::attention::Attrs::of(self.records[p.attention].attrs);
        let mut l = attention(&self.placed(p.attention), &self.attrs(p.attention), self.bases, self.step);
        let write = op::kv_write::Operands::indices();
        let rotated = |rope: Option<usize>, heads: usize| {
            let Some(rope) = rope else { return Some((0, Operand::default(), None)) };
            let (r, at) = (op::rope::Attrs::of(self.records[rope].attrs), op::rope::Operands::indices());
            (r.heads == heads && r.dim == a.dim)
                .then(|| (r.half as u32, self.place(rope, at.table), Some(self.place(rope, at.x))))
        };
        let (q_half, q_table, q_rope) = rotated(p.q_rope, a.heads)?;
        let (k_half, k_table, k_rope) = rotated(p.k_rope, a.kv_heads)?;
        if (q_half, q_table) != (k_half, k_table) {
            return None;
        }
        let (q_norm, q_first) = self.head_norm(p.q_norm, a.heads, a.dim)?;
        let (k_norm, k_first) = self.head_norm(p.k_norm, a.kv_heads, a.dim)?;
        let queries = l.q;
        l.q = q_first.or(q_rope).unwrap_or(l.q);
        l.new_k = k_first.or(k_rope).unwrap_or_else(|| self.place(p.keys, write.x));
        l.new_v = self.place(p.values, write.x);
        (l.half, l.q_norm, l.k_norm, l.makes) = (q_half, q_norm, k_norm, 1);
        (l.table, l.table_row) = (q_table.at, q_table.row as u32);
        let at = op::attention::Operands::indices();
        let mut out = self.value(p.attention, at.out);
        // Both caches are those that are read.
        if self.place(p.keys, write.cache) != l.k || self.place(p.values, write.cache) != l.v {
            return None;
        }
        if let Some(gate) = p.gate {
            let at = op::sigmoid_mul::Operands::indices();
            let g = op::sigmoid_mul::Attrs::of(self.records[gate].attrs);
            let (from, to) = (self.place(gate, at.a), self.place(gate, at.out));
            // Heads of the gate may be side by side, as one of them.
            let heads = |o: Operand| match (g.heads == a.heads && g.dim == a.dim, g.heads == 1) {
                (true, _) => Some(o),
                (false, true) if g.dim == a.heads * a.dim => Some(Operand { head: a.dim as u32, ..o }),
                _ => None,
            };
            if !self.many {
                (l.gate, l.out) = (heads(from)?, heads(to)?);
            }
            out = self.value(gate, at.out);
        }
        if !Self::are_all(fused, &[out]) {
            return None;
        }
        let heads = (self.rows > 1 || self.many).then(|| l.heads(queries));
        let gate = p.gate.filter(|_| self.many).and_then(|gate| self.single(gate));
        if let Some(left) = self.left(p.attention) {
            l.leave(&left);
        }
        Some(heads.into_iter().chain([l.launch(self.bases, !self.many)]).chain(gate).collect())
    }
}
