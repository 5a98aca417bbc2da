//! Lowering step by step: where one kernel takes several records of a step, and what becomes of the
//! step where it does not.

use loaf_formats::op::{
    OpAttrs, add, attention, gdn_gates, gdn_scan, kv_write, l2_norm, mul_rows, rms_norm, rope, sigmoid, silu_mul,
    softmax, top_k, weighted_sum,
};

use super::super::array::{Array, Result};
use super::super::delta::Scan;
use super::super::kernels::{Heads, Place, Prepare, Shared};
use super::Trace;
use crate::schedule::{Attend, Delta, ExpertsOut, RecordId, Route, SharedOut, Step, Work};

impl Trace<'_> {
    /// Lowers one step.
    pub(super) fn step(&mut self, step: &Step) -> Result<()> {
        if self.fused {
            match &step.work {
                Work::Attend(attend) => return self.attend(attend),
                Work::Delta(delta) => return self.delta(delta),
                Work::Route(route) => return self.route(step, route),
                Work::ExpertsOut(out) => return self.experts_out(step, out),
                // Their records have kernels of their own where they have any.
                Work::Single(_) | Work::Product(_) | Work::ExpertsIn(_) => {}
            }
        }
        self.each(step.records.iter().copied())
    }

    fn each(&mut self, records: impl IntoIterator<Item = RecordId>) -> Result<()> {
        records.into_iter().try_for_each(|r| self.record(r))
    }

    fn attend(&mut self, a: &Attend) -> Result<()> {
        match self.heads(a)? {
            Some(q) => {
                let r = self.ops[a.attention];
                self.attention(&r, &q)?;
            }
            None => {
                let mut before: Vec<RecordId> =
                    [a.q_norm, a.q_rope, a.k_norm, a.k_rope].into_iter().flatten().collect();
                before.extend([a.keys, a.values, a.attention]);
                before.sort_unstable();
                self.each(before)?;
            }
        }
        self.each(a.gate)
    }

    /// A norm's weight and epsilon.
    fn norm(&self, record: RecordId) -> Result<(Array, f32)> {
        let r = self.ops[record];
        let (a, o) = (rms_norm::Attrs::of(r.attrs), rms_norm::Operands::indices());
        let w = self.l.weights.norm(self.m, r.operand(o.weight), a.dim as u64, a.offset, self.l.kind)?;
        Ok((w, a.eps))
    }

    /// Queries `[rows, heads, dim]` of an attention, where one kernel norms, rotates and caches;
    /// the caches stay the arrays they were.
    fn heads(&mut self, a: &Attend) -> Result<Option<Array>> {
        let (Some(q_rope), Some(k_rope)) = (a.q_rope, a.k_rope) else { return Ok(None) };
        let o = rope::Operands::indices();
        let (q_turn, k_turn) = (self.ops[q_rope], self.ops[k_rope]);
        let half = rope::Attrs::of(q_turn.attrs).half;
        if half != rope::Attrs::of(k_turn.attrs).half || q_turn.source(o.table) != k_turn.source(o.table) {
            return Ok(None);
        }
        // What comes before norm and rotation.
        let source = |norm: Option<RecordId>, turn: RecordId| -> Result<Place> {
            match norm {
                Some(norm) => self.place(&self.ops[norm], rms_norm::Operands::indices().x),
                None => self.place(&self.ops[turn], o.x),
            }
        };
        let (q, k) = (source(a.q_norm, q_rope)?, source(a.k_norm, k_rope)?);
        let weights = match (a.q_norm, a.k_norm) {
            (Some(q), Some(k)) => Some([self.norm(q)?, self.norm(k)?]),
            (None, None) => None,
            _ => return Ok(None),
        };
        let norms = weights.as_ref().map(|w| w.each_ref().map(|(w, eps)| (w, *eps)));
        let writes = [self.ops[a.keys], self.ops[a.values]];
        let v = self.place(&writes[1], kv_write::Operands::indices().x)?;
        let r = self.ops[a.attention];
        let o = attention::Operands::indices();
        let caches = [r.state(o.k)?, r.state(o.v)?];
        // What reads the caches must also read the queries, to come after; operations would convert
        // the caches first.
        let reads = self.rows == 1 && self.l.kernels.attends(q.dim);
        if !reads && self.states[caches[0]].raw_type() != self.l.kind.raw() {
            return Ok(None);
        }
        let table = self.input(&q_turn, rope::Operands::indices().table)?;
        let table = self.m.reshape(&table, &[self.rows as i32, 2 * half as i32])?;
        let heads = Heads {
            rows: self.rows as i32,
            parts: [&q, &k, &v],
            norms,
            table: (&table, half as i32),
            caches: caches.map(|at| &self.states[at]),
            pos: self.inputs.pos,
        };
        let Some([q, keys, values]) = self.l.kernels.heads(self.m, &heads, self.l.kind)? else { return Ok(None) };
        for (at, cache) in caches.into_iter().zip([keys, values]) {
            self.states[at] = cache;
        }
        Ok(Some(q))
    }

    fn delta(&mut self, d: &Delta) -> Result<()> {
        self.each(d.convs.iter().copied())?;
        let r = self.ops[d.scan];
        let scan = match self.prepared(d)? {
            Some(scan) => scan,
            None => {
                self.each([d.q_norm, d.k_norm, d.gates].into_iter().flatten())?;
                self.plain_scan(&r)?
            }
        };
        self.scan(&r, &scan)?;
        let (Some(norm), Some(gate)) = (d.norm, d.gate) else { return self.each(d.norm) };
        let (from, (weight, eps)) = (self.place(&self.ops[norm], rms_norm::Operands::indices().x)?, self.norm(norm)?);
        let (r, o) = (self.ops[gate], silu_mul::Operands::indices());
        let open = self.place(&r, o.a)?;
        let rows = self.rows as i32;
        match self.l.kernels.norm_gate(self.m, &open, &from, &weight, eps, rows, self.l.kind)? {
            Some(y) => self.out(&r, o.out, &y),
            None => self.each([norm, gate]),
        }
    }

    /// A scan's operands with norms and gates from one launch.
    fn prepared(&self, d: &Delta) -> Result<Option<Scan>> {
        let (Some(q_norm), Some(k_norm), Some(gates)) = (d.q_norm, d.k_norm, d.gates) else { return Ok(None) };
        let (m, o) = (self.m, l2_norm::Operands::indices());
        let length = |record: RecordId| -> Result<(Place, f32, f32)> {
            let r = self.ops[record];
            let a = l2_norm::Attrs::of(r.attrs);
            Ok((self.place(&r, o.x)?, a.eps, a.scale))
        };
        let [(q, q_eps, q_scale), (k, k_eps, k_scale)] = [length(q_norm)?, length(k_norm)?];
        let (r, o) = (self.ops[gates], gdn_gates::Operands::indices());
        let attrs = gdn_gates::Attrs::of(r.attrs);
        let count = (attrs.heads * attrs.dim) as u64;
        let (a, b) = (self.place(&r, o.a)?, self.place(&r, o.b)?);
        let a_log = self.l.weights.vector(m, r.operand(o.a_log), count)?;
        let dt = self.l.weights.vector(m, r.operand(o.dt_bias), count)?;
        let prepare = Prepare {
            rows: self.rows as i32,
            keys: [(&q, q_eps, q_scale), (&k, k_eps, k_scale)],
            gates: [&a, &b],
            vectors: [&a_log, &dt],
        };
        let made = self.l.kernels.delta_prepare(m, &prepare)?;
        let (r, o) = (self.ops[d.scan], gdn_scan::Operands::indices());
        let (v, state) = (self.wide(&r, o.v)?, self.states[r.state(o.state)?].clone());
        Ok(made.map(|[q, k, log_decay, beta]| Scan { q, k, v, log_decay, beta, state }))
    }

    fn route(&mut self, step: &Step, x: &Route) -> Result<()> {
        let chain = [Some(x.softmax), Some(x.top_k), x.sort];
        self.each(step.records.iter().copied().filter(|r| !chain.contains(&Some(*r))))?;
        let (r, o) = (self.ops[x.top_k], top_k::Operands::indices());
        let a = top_k::Attrs::of(r.attrs);
        let scores = self.place(&self.ops[x.softmax], softmax::Operands::indices().x)?;
        match self.l.kernels.top_k(self.m, &scores, a.k as i32, a.renorm != 0, a.rows as i32)? {
            Some([ids, weights]) => {
                self.keep(&r, o.ids, &ids)?;
                self.keep(&r, o.weights, &weights)?;
            }
            None => self.each([x.softmax, x.top_k])?,
        }
        self.each(x.sort)
    }

    fn experts_out(&mut self, step: &Step, x: &ExpertsOut) -> Result<()> {
        let Some(SharedOut { scale: Some([open, scaled]), add, .. }) = x.shared else {
            return self.each(step.records.iter().copied());
        };
        let last = [x.sum, open, scaled, add];
        self.each(step.records.iter().copied().filter(|r| !last.contains(r)))?;
        let (r, o) = (self.ops[x.sum], weighted_sum::Operands::indices());
        let a = weighted_sum::Attrs::of(r.attrs);
        let slots = self.input(&r, o.y)?;
        let weights = self.m.reshape(&self.input(&r, o.w)?, &[a.rows as i32, a.k as i32])?;
        let shared = Shared {
            array: self.input(&self.ops[scaled], mul_rows::Operands::indices().x)?,
            open: self.place(&self.ops[open], sigmoid::Operands::indices().x)?,
        };
        match self.l.kernels.mix(self.m, &slots, &weights, Some(&shared), self.l.kind)? {
            Some(y) => {
                let r = self.ops[add];
                self.out(&r, add::Operands::indices().out, &y)
            }
            None => {
                let mut rest = last;
                rest.sort_unstable();
                self.each(rest)
            }
        }
    }
}
