//! The patterns: which records form a step.
//!
//! Every pattern starts at the op that gives it its name (an attention, a delta rule, an expert's
//! sum, a choice, a product) and takes in the records before and after it that serve nothing else.
//! Nothing here looks at where a record stands or what it is called: only at ops, and at who makes
//! and who reads which value. Patterns that take more come first.
//!
//! Steps gather records that lie apart, so two of them could each need something of the other.
//! Patterns of this project's recipes never do; where a plan's do, what cannot be put in order
//! falls back to single records.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use loaf_formats::op::{
    OpKind, add, add_rms_norm, attention, expert_linear_dense, expert_linear_quant, expert_sort, gdn_gates, gdn_scan,
    kv_write, l2_norm, linear_dense, linear_quant, mul_rows, quantize, rms_norm, rope, silu_mul, softmax, top_k,
    weighted_sum,
};
use loaf_formats::plan::{Region, Template, VerifiedPlan, records};

use super::flow::{Flow, flow};
use super::{
    Arena, Attend, Delta, Draft, Edge, ExpertsIn, ExpertsOut, Gated, Maker, Node, Product, RecordId, Route,
    ScheduleError, SharedOut, Source, Step, Through, Value, ValueId, Work,
};
use loaf_formats::op::Mode;

/// The operands of a node by name.
macro_rules! operands {
    ($node:expr, $op:ident) => {
        $op::Operands::of(&$node.operands)
    };
}

struct Builder<'a> {
    nodes: &'a [Node],
    values: &'a [Value],
    /// `[rows, heads, dim]` of an operand at the most rows.
    dims: Vec<Vec<[u64; 3]>>,
    /// Per value: the records that read it, each once.
    users: Vec<Vec<RecordId>>,
    /// The record that updates a state.
    writers: HashMap<usize, RecordId>,
    /// Per record: taken by a step.
    taken: Vec<bool>,
    works: Vec<Work>,
}

/// Works out the steps of a template.
pub(super) fn draft(plan: &VerifiedPlan, template: &Template) -> Result<Draft, ScheduleError> {
    let Flow { nodes, values } = flow(plan, template)?;
    let mut words = Vec::new();
    template.expand(u64::from(template.max_rows), &mut words);
    let extents = |r: loaf_formats::plan::Record<'_>| {
        (0..r.kind.spec().operands.len()).map(|j| r.dims(j).unwrap_or_default()).collect()
    };
    let dims = records(&words).flatten().map(extents).collect();
    let mut users = vec![Vec::new(); values.len()];
    let mut writers = HashMap::new();
    for (i, node) in nodes.iter().enumerate() {
        for (rule, source) in node.kind.spec().operands.iter().zip(&node.operands) {
            match source {
                Source::Value { id, .. } if rule.mode == Mode::In && users[*id].last() != Some(&i) => {
                    users[*id].push(i)
                }
                Source::State(s) if rule.mode == Mode::InOut => drop(writers.insert(*s, i)),
                _ => {}
            }
        }
    }
    let taken = vec![false; nodes.len()];
    let mut b = Builder { nodes: &nodes, values: &values, dims, users, writers, taken, works: Vec::new() };
    b.all_of(&[OpKind::Attention], Builder::attend);
    b.all_of(&[OpKind::GdnScan], Builder::delta);
    b.all_of(&[OpKind::WeightedSum], Builder::experts);
    b.all_of(&[OpKind::TopK], Builder::route);
    b.all_of(&[OpKind::LinearQuant, OpKind::LinearDense], Builder::product);
    let works = std::mem::take(&mut b.works);
    let works = b.ordered(works);
    let steps: Vec<Step> = b.steps(works);
    let edges = edges(&nodes, &steps);
    let arena = Arena::place(&steps, &values);
    Ok(Draft { phase: template.phase, max_rows: template.max_rows, nodes, values, steps, edges, arena })
}

impl Builder<'_> {
    /// Tries a pattern at every record of these ops that is not taken yet.
    fn all_of(&mut self, kinds: &[OpKind], pattern: impl Fn(&Self, RecordId) -> Option<Vec<Work>>) {
        for i in 0..self.nodes.len() {
            if self.taken[i] || !kinds.contains(&self.nodes[i].kind) {
                continue;
            }
            let Some(works) = pattern(self, i) else { continue };
            let all: Vec<RecordId> = works.iter().flat_map(Work::records).collect();
            // A record in two roles, or taken already, is a pattern that does not fit.
            let mut seen = HashSet::new();
            if all.iter().all(|&r| !self.taken[r] && seen.insert(r)) {
                all.iter().for_each(|&r| self.taken[r] = true);
                self.works.extend(works);
            }
        }
    }

    fn kind(&self, record: RecordId) -> OpKind {
        self.nodes[record].kind
    }

    /// The record that makes what an operand is (part of).
    fn maker(&self, source: Source) -> Option<RecordId> {
        match self.values[source.value()?].maker {
            Maker::Record(record, _) => Some(record),
            Maker::Given => None,
        }
    }

    /// The record of one of these ops, not taken yet, that makes what an operand is all of.
    fn made_by(&self, source: Source, kinds: &[OpKind]) -> Option<RecordId> {
        let Source::Value { whole: true, .. } = source else { return None };
        self.maker(source).filter(|&m| !self.taken[m] && kinds.contains(&self.kind(m)))
    }

    /// Whether these records alone see a value.
    fn only(&self, made: Source, by: &[RecordId]) -> bool {
        let Some(id) = made.value() else { return false };
        self.values[id].region == Region::Arena && self.users[id].iter().all(|u| by.contains(u))
    }

    /// The record of one of these ops, not taken yet, that alone sees a value.
    fn only_user(&self, made: Source, kinds: &[OpKind]) -> Option<RecordId> {
        let id = made.value()?;
        let [user] = self.users[id][..] else { return None };
        let fits = self.values[id].region == Region::Arena && !self.taken[user] && kinds.contains(&self.kind(user));
        fits.then_some(user)
    }

    /// The norm that makes a row of activations, all of it, one head.
    fn norm_of(&self, x: Source) -> Option<RecordId> {
        let norm = self.made_by(x, &[OpKind::RmsNorm, OpKind::AddRmsNorm])?;
        let (i, made) = match self.kind(norm) {
            OpKind::RmsNorm => (rms_norm::Operands::indices().out, operands!(self.nodes[norm], rms_norm).out),
            _ => (add_rms_norm::Operands::indices().out, operands!(self.nodes[norm], add_rms_norm).out),
        };
        (made.value() == x.value() && self.dims[norm][i][1] == 1).then_some(norm)
    }

    /// The norm over heads whose result a rotation takes as it is.
    fn head_norm(&self, rotation: RecordId) -> Option<RecordId> {
        let (x, at) = (operands!(self.nodes[rotation], rope).x, rope::Operands::indices().x);
        let norm = self.made_by(x, &[OpKind::RmsNorm])?;
        let same = self.dims[norm][rms_norm::Operands::indices().out] == self.dims[rotation][at];
        (same && self.only(x, &[rotation])).then_some(norm)
    }

    fn attend(&self, attention: RecordId) -> Option<Vec<Work>> {
        let o = operands!(self.nodes[attention], attention);
        let writer = |state: Source| match state {
            Source::State(s) => self.writers.get(&s).copied().filter(|&w| self.kind(w) == OpKind::KvWrite),
            _ => None,
        };
        let (keys, values) = (writer(o.k)?, writer(o.v)?);
        let rotation =
            |x: Source, reader: RecordId| self.made_by(x, &[OpKind::Rope]).filter(|_| self.only(x, &[reader]));
        let q_rope = rotation(o.q, attention);
        let k_rope = rotation(operands!(self.nodes[keys], kv_write).x, keys);
        let gate = self.only_user(o.out, &[OpKind::SigmoidMul]).filter(|&g| {
            // Sigmoid and silu have the same operands.
            let g = operands!(self.nodes[g], silu_mul);
            matches!(g.b, Source::Value { whole: true, .. })
                && g.b.value() == o.out.value()
                && g.a.value() != o.out.value()
        });
        let [q_norm, k_norm] = [q_rope, k_rope].map(|r| self.head_norm(r?));
        Some(vec![Work::Attend(Attend { q_norm, q_rope, k_norm, k_rope, keys, values, attention, gate })])
    }

    fn delta(&self, scan: RecordId) -> Option<Vec<Work>> {
        let o = operands!(self.nodes[scan], gdn_scan);
        let length = |x: Source| self.made_by(x, &[OpKind::L2Norm]).filter(|_| self.only(x, &[scan]));
        let (q_norm, k_norm) = (length(o.q), length(o.k));
        let gates = self.made_by(o.decay, &[OpKind::GdnGates]).filter(|&g| {
            let made = operands!(self.nodes[g], gdn_gates);
            let same = (made.decay.value(), made.beta.value()) == (o.decay.value(), o.beta.value());
            same && self.made_by(o.beta, &[OpKind::GdnGates]).is_some()
                && self.only(o.decay, &[scan])
                && self.only(o.beta, &[scan])
        });
        // What the norms and the rule read, if a convolution makes it for them alone.
        let readers: Vec<RecordId> = q_norm.into_iter().chain(k_norm).chain([scan]).collect();
        let norm_input = |n: Option<RecordId>, or: Source| n.map_or(or, |n| operands!(self.nodes[n], l2_norm).x);
        let mut convs = Vec::new();
        for x in [norm_input(q_norm, o.q), norm_input(k_norm, o.k), o.v] {
            let conv = self.maker(x).filter(|&c| {
                let is = matches!(self.kind(c), OpKind::Conv | OpKind::ConvSilu);
                is && !self.taken[c] && self.only(x, &readers) && !convs.contains(&c)
            });
            convs.extend(conv);
        }
        convs.sort_unstable();
        let norm = self
            .only_user(o.out, &[OpKind::RmsNorm])
            .filter(|&n| matches!(operands!(self.nodes[n], rms_norm).x, Source::Value { whole: true, .. }));
        let gate = norm.and_then(|n| {
            let made = operands!(self.nodes[n], rms_norm).out;
            self.only_user(made, &[OpKind::SiluMul]).filter(|&g| {
                let g = operands!(self.nodes[g], silu_mul);
                matches!(g.b, Source::Value { whole: true, .. })
                    && g.b.value() == made.value()
                    && g.a.value() != made.value()
            })
        });
        Some(vec![Work::Delta(Delta { convs, q_norm, k_norm, gates, scan, norm, gate })])
    }

    /// What a product multiplies: the activations, through their int8 form if there is one.
    fn factor(&self, product: RecordId) -> (Source, Option<RecordId>) {
        let node = &self.nodes[product];
        let codes = match node.kind {
            OpKind::LinearDense => return (operands!(node, linear_dense).x, None),
            OpKind::ExpertLinearDense => return (operands!(node, expert_linear_dense).x, None),
            OpKind::LinearQuant => operands!(node, linear_quant).codes,
            _ => operands!(node, expert_linear_quant).codes,
        };
        match self.maker(codes).filter(|&q| self.kind(q) == OpKind::Quantize) {
            Some(q) => (operands!(self.nodes[q], quantize).x, Some(q)),
            None => (codes, None),
        }
    }

    fn result(&self, product: RecordId) -> Source {
        let node = &self.nodes[product];
        match node.kind {
            OpKind::LinearDense => operands!(node, linear_dense).out,
            OpKind::ExpertLinearDense => operands!(node, expert_linear_dense).out,
            OpKind::LinearQuant => operands!(node, linear_quant).out,
            _ => operands!(node, expert_linear_quant).out,
        }
    }

    /// Whether these records alone see an int8 form.
    fn only_quantizes(&self, quantize: RecordId, by: &[RecordId]) -> bool {
        let made = operands!(self.nodes[quantize], quantize);
        !self.taken[quantize] && [made.codes, made.scales, made.sums].iter().all(|&v| self.only(v, by))
    }

    /// The gated product (of one of these ops) that makes what `down` multiplies, for it alone.
    fn gated(&self, down: RecordId, kinds: &[OpKind]) -> Option<(Option<RecordId>, Gated)> {
        let (x, quantize) = self.factor(down);
        let gate = self.made_by(x, &[OpKind::SiluMul])?;
        if !self.only(x, &[quantize.unwrap_or(down)]) || quantize.is_some_and(|q| !self.only_quantizes(q, &[down])) {
            return None;
        }
        let o = operands!(self.nodes[gate], silu_mul);
        let mut products = Vec::new();
        for part in [o.a, o.b] {
            let product = self.maker(part).filter(|&p| !self.taken[p] && kinds.contains(&self.kind(p)))?;
            if !self.only(part, &[gate]) {
                return None;
            }
            if !products.contains(&product) {
                products.push(product);
            }
        }
        // Both halves of the same row.
        let rows: HashSet<Option<ValueId>> = products.iter().map(|&p| self.factor(p).0.value()).collect();
        products.sort_unstable();
        (rows.len() == 1).then_some((quantize, Gated { products, gate }))
    }

    fn experts(&self, sum: RecordId) -> Option<Vec<Work>> {
        const CHOSEN: [OpKind; 2] = [OpKind::ExpertLinearQuant, OpKind::ExpertLinearDense];
        let o = operands!(self.nodes[sum], weighted_sum);
        let down = self.made_by(o.y, &CHOSEN).filter(|_| self.only(o.y, &[sum]))?;
        let (quantize, experts) = self.gated(down, &CHOSEN)?;
        let shared = self.shared(o.out);
        let (shared, shared_in) = shared.unzip();
        let products: Vec<RecordId> =
            experts.products.iter().chain(shared_in.iter().flat_map(|g| &g.products)).copied().collect();
        // Int8 forms that serve these products alone, unless they are a norm's: those come with it.
        let forms: HashSet<RecordId> = products.iter().filter_map(|&p| self.factor(p).1).collect();
        let mut quantizes: Vec<RecordId> = forms.into_iter().filter(|&q| self.only_quantizes(q, &products)).collect();
        quantizes.retain(|&q| self.norm_of(operands!(self.nodes[q], quantize).x).is_none());
        quantizes.sort_unstable();
        Some(vec![
            Work::ExpertsIn(ExpertsIn { quantizes, experts, shared: shared_in }),
            Work::ExpertsOut(ExpertsOut { quantize, down, sum, shared }),
        ])
    }

    /// The shared expert that is added to a sum of experts.
    fn shared(&self, sum: Source) -> Option<(SharedOut, Gated)> {
        const SHARED: [OpKind; 2] = [OpKind::LinearQuant, OpKind::LinearDense];
        let add = self.only_user(sum, &[OpKind::Add])?;
        let o = operands!(self.nodes[add], add);
        let other = if o.a.value() == sum.value() { o.b } else { o.a };
        if !self.only(other, &[add]) || other.value() == sum.value() {
            return None;
        }
        let (product, scale) = match self.made_by(other, &[OpKind::MulRows]) {
            Some(by) => {
                let o = operands!(self.nodes[by], mul_rows);
                let open = self.made_by(o.s, &[OpKind::Sigmoid]).filter(|_| self.only(o.s, &[by]))?;
                (self.only(o.x, &[by]).then_some(o.x)?, Some([open, by]))
            }
            None => (other, None),
        };
        let down = self.made_by(product, &SHARED)?;
        let (quantize, gated) = self.gated(down, &SHARED)?;
        Some((SharedOut { quantize, down, scale, add }, gated))
    }

    /// Int8 forms of a row, and products of it, that no step has taken.
    fn of_row(&self, x: ValueId) -> (Vec<RecordId>, Vec<RecordId>) {
        let is_product = |r: &RecordId| matches!(self.kind(*r), OpKind::LinearQuant | OpKind::LinearDense);
        let free = |r: &&RecordId| !self.taken[**r];
        let all = |of: &RecordId| matches!(self.nodes[*of].operands.first(), Some(Source::Value { whole: true, .. }));
        let (mut quantizes, mut products) = (Vec::new(), Vec::new());
        for user in self.users[x].iter().filter(free).copied() {
            if is_product(&user) && all(&user) {
                products.push(user);
            }
            if self.kind(user) == OpKind::Quantize && all(&user) {
                quantizes.push(user);
                let codes = operands!(self.nodes[user], quantize).codes;
                let readers = codes.value().map_or(&[][..], |c| &self.users[c]);
                products.extend(readers.iter().filter(free).filter(|r| is_product(r) && all(r)));
            }
        }
        products.sort_unstable();
        products.dedup();
        (quantizes, products)
    }

    fn route(&self, top_k: RecordId) -> Option<Vec<Work>> {
        let o = operands!(self.nodes[top_k], top_k);
        let softmax = self.made_by(o.probs, &[OpKind::Softmax]).filter(|_| self.only(o.probs, &[top_k]))?;
        // The router may be one product with others of the row, such as the gate of a shared
        // expert.
        let scores = operands!(self.nodes[softmax], softmax).x;
        let is_product = |r: &RecordId| matches!(self.kind(*r), OpKind::LinearQuant | OpKind::LinearDense);
        let router = self.maker(scores).filter(|r| !self.taken[*r] && is_product(r))?;
        let sort = self.users[o.ids.value()?].iter().copied().find(|&s| {
            let sorts = self.kind(s) == OpKind::ExpertSort && !self.taken[s];
            sorts && operands!(self.nodes[s], expert_sort).ids.value() == o.ids.value()
        });
        let x = self.factor(router).0;
        let norm = self.norm_of(x);
        let (quantizes, mut products) = self.of_row(x.value()?);
        let quantizes = self.own_forms(norm, quantizes, &products);
        products.retain(|&p| p != router);
        Some(vec![Work::Route(Route { norm, quantizes, router, others: products, softmax, top_k, sort })])
    }

    /// The int8 forms that go with products of a row: all there are where the norm is in the step
    /// too, else those that serve the products alone.
    fn own_forms(&self, norm: Option<RecordId>, forms: Vec<RecordId>, products: &[RecordId]) -> Vec<RecordId> {
        forms.into_iter().filter(|&q| norm.is_some() || self.only_quantizes(q, products)).collect()
    }

    fn product(&self, first: RecordId) -> Option<Vec<Work>> {
        let x = self.factor(first).0;
        let norm = self.norm_of(x);
        let (quantizes, products) = self.of_row(x.value()?);
        if !products.contains(&first) {
            return None;
        }
        let quantizes = self.own_forms(norm, quantizes, &products);
        let made: Vec<Source> = products.iter().map(|&p| self.result(p)).collect();
        let readers = |v: &Source| v.value().map_or(&[][..], |v| &self.users[v]).iter().copied();
        let of = |list: &[Source], s: Source| s.value().is_some() && list.iter().any(|m| m.value() == s.value());
        let free = |r: &RecordId| !self.taken[*r];
        // What is added to the products: weights, or another value to a product that nobody else
        // reads.
        let (mut biases, mut residual) = (Vec::new(), None);
        for sum in made.iter().flat_map(readers).filter(free).filter(|&r| self.kind(r) == OpKind::Add) {
            let o = operands!(self.nodes[sum], add);
            let (product, other) = if of(&made, o.a) { (o.a, o.b) } else { (o.b, o.a) };
            if other == Source::Weights && !biases.contains(&sum) {
                biases.push(sum);
            } else if products.len() == 1 && self.only(product, &[sum]) && !of(&made, other) && other.value().is_some()
            {
                residual = Some(sum);
            }
        }
        biases.sort_unstable();
        let summed = biases.iter().map(|&b| operands!(self.nodes[b], add).out);
        let parts: Vec<Source> = made.iter().copied().chain(summed).collect();
        let is_gate = |g: &RecordId| matches!(self.kind(*g), OpKind::SiluMul | OpKind::SigmoidMul);
        let gate = parts.iter().flat_map(readers).filter(free).filter(is_gate).find(|&g| {
            let o = operands!(self.nodes[g], silu_mul);
            of(&parts, o.a) && of(&parts, o.b)
        });
        Some(vec![Work::Product(Product { norm, quantizes, products, biases, gate, residual })])
    }

    /// All records: the steps' and what is left, in an order that respects every dependency. Steps
    /// that have none become single records.
    fn ordered(&self, works: Vec<Work>) -> Vec<Work> {
        let single = (0..self.nodes.len()).filter(|&i| !self.taken[i]).map(Work::Single);
        let mut works: Vec<Work> = works.into_iter().chain(single).collect();
        loop {
            let mut step_of = vec![0; self.nodes.len()];
            for (s, work) in works.iter().enumerate() {
                work.records().into_iter().for_each(|r| step_of[r] = s);
            }
            let mut after: Vec<Vec<usize>> = vec![Vec::new(); works.len()];
            let mut waits = vec![0usize; works.len()];
            for (reader, node) in self.nodes.iter().enumerate() {
                for from in node.operands.iter().filter_map(|&o| self.before(o, reader)) {
                    if step_of[from] != step_of[reader] {
                        after[step_of[from]].push(step_of[reader]);
                        waits[step_of[reader]] += 1;
                    }
                }
            }
            let first: Vec<RecordId> = works.iter().map(|w| w.records().into_iter().min().unwrap_or(0)).collect();
            let mut ready: BinaryHeap<Reverse<(RecordId, usize)>> =
                (0..works.len()).filter(|&s| waits[s] == 0).map(|s| Reverse((first[s], s))).collect();
            let mut order = Vec::with_capacity(works.len());
            while let Some(Reverse((_, s))) = ready.pop() {
                order.push(s);
                for &t in &after[s] {
                    waits[t] -= 1;
                    if waits[t] == 0 {
                        ready.push(Reverse((first[t], t)));
                    }
                }
            }
            let mut place = vec![None; works.len()];
            order.iter().enumerate().for_each(|(i, &s)| place[s] = Some(i));
            if order.len() == works.len() {
                let mut placed: Vec<(Option<usize>, Work)> = place.into_iter().zip(works).collect();
                placed.sort_by_key(|p| p.0);
                return placed.into_iter().map(|p| p.1).collect();
            }
            // What is left waits for itself. Single records cannot, since the template's order is
            // one.
            let split = |(place, work): (Option<usize>, Work)| match place {
                Some(_) => vec![work],
                None => work.records().into_iter().map(Work::Single).collect(),
            };
            works = place.into_iter().zip(works).flat_map(split).collect();
        }
    }

    /// The record that must come before one that has this operand.
    fn before(&self, operand: Source, reader: RecordId) -> Option<RecordId> {
        let before = match operand {
            Source::State(s) => self.writers.get(&s).copied(),
            other => self.maker(other),
        };
        before.filter(|&b| b != reader)
    }

    fn steps(&self, works: Vec<Work>) -> Vec<Step> {
        let mut step_of = vec![0; self.nodes.len()];
        for (s, work) in works.iter().enumerate() {
            work.records().into_iter().for_each(|r| step_of[r] = s);
        }
        let step = |(s, work): (usize, Work)| {
            let mut records = work.records();
            records.sort_unstable();
            let (mut reads, mut results, mut internal) = (Vec::new(), Vec::new(), Vec::new());
            let (mut state_reads, mut state_updates) = (Vec::new(), Vec::new());
            for &r in &records {
                let node = &self.nodes[r];
                for (rule, source) in node.kind.spec().operands.iter().zip(&node.operands) {
                    match (rule.mode, *source) {
                        (Mode::In, Source::Value { id, .. }) => {
                            let outside = self.maker(*source).is_none_or(|m| step_of[m] != s);
                            if outside {
                                reads.push(id);
                            }
                        }
                        (Mode::Out, Source::Value { id, .. }) => {
                            let leaves = self.values[id].region == Region::Io;
                            let seen = leaves || self.users[id].iter().any(|&u| step_of[u] != s);
                            if seen { results.push(id) } else { internal.push(id) }
                        }
                        (Mode::In, Source::State(state)) => state_reads.push(state),
                        (Mode::InOut, Source::State(state)) => state_updates.push(state),
                        _ => {}
                    }
                }
            }
            for list in [&mut reads, &mut results, &mut internal, &mut state_reads, &mut state_updates] {
                list.sort_unstable();
                list.dedup();
            }
            Step { work, records, reads, results, internal, state_reads, state_updates }
        };
        works.into_iter().enumerate().map(step).collect()
    }
}

/// Every dependency between two steps.
fn edges(nodes: &[Node], steps: &[Step]) -> Vec<Edge> {
    let mut makers = HashMap::new();
    for (from, step) in steps.iter().enumerate() {
        makers.extend(step.results.iter().map(|&v| (Through::Value(v), from)));
        makers.extend(step.state_updates.iter().map(|&s| (Through::State(s), from)));
    }
    debug_assert!(steps.iter().map(|s| s.records.len()).sum::<usize>() == nodes.len());
    let mut edges = Vec::new();
    for (to, step) in steps.iter().enumerate() {
        let reads = step.reads.iter().map(|&v| Through::Value(v));
        for through in reads.chain(step.state_reads.iter().map(|&s| Through::State(s))) {
            if let Some(&from) = makers.get(&through).filter(|&&from| from != to) {
                edges.push(Edge { from, to, through });
            }
        }
    }
    edges.sort_unstable();
    edges
}
