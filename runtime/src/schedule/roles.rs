//! The proof that roles are what they say: ops, and who feeds whom within a step.

use loaf_formats::op::{
    OpKind, add, add_rms_norm, attention, conv, expert_linear_dense, expert_linear_quant, expert_sort, gdn_gates,
    gdn_scan, kv_write, l2_norm, linear_dense, linear_quant, mul_rows, quantize, rms_norm, rope, sigmoid, silu_mul,
    softmax, top_k, weighted_sum,
};

use super::{
    Attend, Checked, Delta, Draft, ExpertsIn, ExpertsOut, Gated, Product, RecordId, Route, ScheduleError, SharedOut,
    Source, Step, Work, ensure,
};

const NORMS: &[OpKind] = &[OpKind::RmsNorm, OpKind::AddRmsNorm];
const PRODUCTS: &[OpKind] = &[OpKind::LinearQuant, OpKind::LinearDense];
const EXPERTS: &[OpKind] = &[OpKind::ExpertLinearQuant, OpKind::ExpertLinearDense];
const GATES: &[OpKind] = &[OpKind::SiluMul, OpKind::SigmoidMul];

/// What a value is between two records of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    /// All of it is read, and nobody else sees it.
    Own,
    /// Any part is read, and nobody else sees it.
    OwnPart,
    /// All of it is read; others may, too.
    Shared,
    /// Any part is read; others may, too.
    Part,
}

struct Roles<'a> {
    draft: &'a Draft,
    step: &'a Step,
}

/// Proves a step's roles.
pub(super) fn check(draft: &Draft, step: &Step) -> Checked {
    let r = Roles { draft, step };
    match &step.work {
        // One record has one role.
        Work::Single(_) => Ok(()),
        Work::Product(p) => r.product(p),
        Work::Attend(a) => r.attend(a),
        Work::Delta(d) => r.delta(d),
        Work::Route(x) => r.route(x),
        Work::ExpertsIn(x) => r.experts_in(x),
        Work::ExpertsOut(x) => r.experts_out(x),
    }
}

/// An operand of a record, by name.
macro_rules! at {
    ($roles:expr, $record:expr, $op:ident . $operand:ident) => {
        ($record, $op::Operands::of(&$roles.draft.nodes[$record].operands).$operand)
    };
}

impl Roles<'_> {
    fn is(&self, record: RecordId, kinds: &[OpKind]) -> Checked {
        let kind = self.draft.nodes[record].kind;
        ensure(
            kinds.contains(&kind),
            || format!("record {record}"),
            &format!("one of {kinds:?}"),
            || format!("{kind:?}"),
        )
    }

    fn all(&self, records: &[RecordId], kinds: &[OpKind]) -> Checked {
        records.iter().try_for_each(|&r| self.is(r, kinds))
    }

    /// What one record makes is what the other reads.
    fn link(&self, (maker, made): (RecordId, Source), (reader, read): (RecordId, Source), link: Link) -> Checked {
        let at = || format!("record {reader}");
        let id = made.value();
        let same = id.is_some() && id == read.value();
        ensure(same, at, &format!("what record {maker} makes, {made:?}"), || format!("{read:?}"))?;
        let all = matches!(read, Source::Value { whole: true, .. });
        ensure(all || matches!(link, Link::Part | Link::OwnPart), at, "all of a value", || format!("{read:?}"))?;
        let own = id.is_some_and(|id| self.step.internal.binary_search(&id).is_ok());
        let wanted = matches!(link, Link::Own | Link::OwnPart);
        ensure(own || !wanted, at, "a value that nobody else sees", || format!("{read:?}"))
    }

    /// What any of some records makes.
    fn any(&self, makers: &[(RecordId, Source)], to: (RecordId, Source), link: Link) -> Checked {
        match makers.iter().find(|m| m.1.value().is_some() && m.1.value() == to.1.value()) {
            Some(maker) => self.link(*maker, to, link),
            None => ensure(
                false,
                || format!("record {}", to.0),
                "a result of the step's products",
                || format!("{:?}", to.1),
            ),
        }
    }

    fn normed(&self, norm: RecordId) -> Result<(RecordId, Source), ScheduleError> {
        self.is(norm, NORMS)?;
        Ok(match self.draft.nodes[norm].kind {
            OpKind::RmsNorm => at!(self, norm, rms_norm.out),
            _ => at!(self, norm, add_rms_norm.out),
        })
    }

    /// The activations or codes that a product reads, and its result.
    fn ends(&self, product: RecordId) -> [(RecordId, Source); 2] {
        match self.draft.nodes[product].kind {
            OpKind::LinearDense => [at!(self, product, linear_dense.x), at!(self, product, linear_dense.out)],
            OpKind::LinearQuant => [at!(self, product, linear_quant.codes), at!(self, product, linear_quant.out)],
            OpKind::ExpertLinearDense => {
                [at!(self, product, expert_linear_dense.x), at!(self, product, expert_linear_dense.out)]
            }
            _ => [at!(self, product, expert_linear_quant.codes), at!(self, product, expert_linear_quant.out)],
        }
    }

    /// Norm, int8 forms and products are of the same row.
    fn row(&self, norm: Option<RecordId>, quantizes: &[RecordId], products: &[RecordId]) -> Checked {
        self.all(quantizes, &[OpKind::Quantize])?;
        self.all(products, PRODUCTS)?;
        let normed = norm.map(|n| self.normed(n)).transpose()?;
        let mut row = normed.and_then(|n| n.1.value());
        let inputs = quantizes.iter().map(|&q| at!(self, q, quantize.x));
        let codes: Vec<_> = quantizes.iter().map(|&q| at!(self, q, quantize.codes)).collect();
        let direct = products.iter().map(|&p| self.ends(p)[0]);
        for (record, read) in inputs.chain(direct) {
            if codes.iter().any(|c| c.1.value() == read.value()) {
                continue;
            }
            // An int8 form from elsewhere has no row here to be compared with.
            let elsewhere = self.draft.nodes[record].kind == OpKind::LinearQuant;
            let id = *row.get_or_insert(read.value().unwrap_or(usize::MAX));
            ensure(
                Some(id) == read.value() || (elsewhere && norm.is_none()),
                || format!("record {record}"),
                "the step's row",
                || format!("{read:?}"),
            )?;
        }
        Ok(())
    }

    fn product(&self, p: &Product) -> Checked {
        let Product { norm, quantizes, products, biases, gate, residual } = p;
        ensure(!products.is_empty(), || "products".to_owned(), "at least one", || "none".to_owned())?;
        self.row(*norm, quantizes, products)?;
        self.all(biases, &[OpKind::Add])?;
        let mut made: Vec<_> = products.iter().map(|&p| self.ends(p)[1]).collect();
        for &b in biases {
            let [x, y] = [at!(self, b, add.a), at!(self, b, add.b)];
            let (bias, to) = if x.1 == Source::Weights { (x, y) } else { (y, x) };
            ensure(bias.1 == Source::Weights, || format!("record {b}"), "a weight", || format!("{:?}", bias.1))?;
            self.any(&made[..products.len()], to, Link::Part)?;
            made.push(at!(self, b, add.out));
        }
        if let Some(g) = *gate {
            self.is(g, GATES)?;
            self.any(&made, at!(self, g, silu_mul.a), Link::Part)?;
            self.any(&made, at!(self, g, silu_mul.b), Link::Part)?;
        }
        if let Some(r) = *residual {
            self.is(r, &[OpKind::Add])?;
            let [a, b] = [at!(self, r, add.a), at!(self, r, add.b)];
            let to = if self.any(&made[..products.len()], a, Link::OwnPart).is_ok() { a } else { b };
            self.any(&made[..products.len()], to, Link::OwnPart)?;
        }
        Ok(())
    }

    fn attend(&self, a: &Attend) -> Checked {
        let Attend { q_norm, q_rope, k_norm, k_rope, keys, values, attention, gate } = a;
        let (keys, values, attention) = (*keys, *values, *attention);
        self.is(attention, &[OpKind::Attention])?;
        self.all(&[keys, values], &[OpKind::KvWrite])?;
        for (write, read) in [(keys, at!(self, attention, attention.k)), (values, at!(self, attention, attention.v))] {
            let cache = at!(self, write, kv_write.cache).1;
            ensure(
                cache == read.1,
                || format!("record {write}"),
                &format!("the cache {:?}", read.1),
                || format!("{cache:?}"),
            )?;
        }
        let chains =
            [(*q_norm, *q_rope, at!(self, attention, attention.q)), (*k_norm, *k_rope, at!(self, keys, kv_write.x))];
        for (norm, rotation, to) in chains {
            if let Some(rotation) = rotation {
                self.is(rotation, &[OpKind::Rope])?;
                self.link(at!(self, rotation, rope.out), to, Link::Own)?;
            }
            match (norm, rotation) {
                (Some(norm), Some(rotation)) => {
                    self.is(norm, &[OpKind::RmsNorm])?;
                    self.link(at!(self, norm, rms_norm.out), at!(self, rotation, rope.x), Link::Own)?;
                }
                (Some(norm), None) => {
                    ensure(false, || format!("record {norm}"), "a rotation after it", || "none".to_owned())?
                }
                (None, _) => {}
            }
        }
        let Some(gate) = *gate else { return Ok(()) };
        self.is(gate, &[OpKind::SigmoidMul])?;
        self.link(at!(self, attention, attention.out), at!(self, gate, silu_mul.b), Link::Own)
    }

    fn delta(&self, d: &Delta) -> Checked {
        let Delta { convs, q_norm, k_norm, gates, scan, norm, gate } = d;
        let scan = *scan;
        self.is(scan, &[OpKind::GdnScan])?;
        self.all(convs, &[OpKind::Conv, OpKind::ConvSilu])?;
        let mut inputs = vec![at!(self, scan, gdn_scan.v)];
        for (norm, to) in [(*q_norm, at!(self, scan, gdn_scan.q)), (*k_norm, at!(self, scan, gdn_scan.k))] {
            inputs.push(match norm {
                Some(norm) => {
                    self.is(norm, &[OpKind::L2Norm])?;
                    self.link(at!(self, norm, l2_norm.out), to, Link::Own)?;
                    at!(self, norm, l2_norm.x)
                }
                None => to,
            });
        }
        for &c in convs {
            // With silu and without, operands are the same.
            let made = at!(self, c, conv.out);
            let Some(to) = inputs.iter().find(|i| i.1.value() == made.1.value()) else {
                return ensure(
                    false,
                    || format!("record {c}"),
                    "a norm or the rule that reads it",
                    || "none".to_owned(),
                );
            };
            self.link(made, *to, Link::OwnPart)?;
        }
        if let Some(g) = *gates {
            self.is(g, &[OpKind::GdnGates])?;
            self.link(at!(self, g, gdn_gates.decay), at!(self, scan, gdn_scan.decay), Link::Own)?;
            self.link(at!(self, g, gdn_gates.beta), at!(self, scan, gdn_scan.beta), Link::Own)?;
        }
        if let Some(norm) = *norm {
            self.is(norm, &[OpKind::RmsNorm])?;
            self.link(at!(self, scan, gdn_scan.out), at!(self, norm, rms_norm.x), Link::Own)?;
        }
        match (*norm, *gate) {
            (Some(norm), Some(gate)) => {
                self.is(gate, &[OpKind::SiluMul])?;
                self.link(at!(self, norm, rms_norm.out), at!(self, gate, silu_mul.b), Link::Own)
            }
            (None, Some(gate)) => ensure(false, || format!("record {gate}"), "a norm before it", || "none".to_owned()),
            (_, None) => Ok(()),
        }
    }

    fn route(&self, r: &Route) -> Checked {
        let Route { norm, quantizes, router, others, softmax, top_k, sort } = r;
        let (router, softmax, top_k) = (*router, *softmax, *top_k);
        self.is(softmax, &[OpKind::Softmax])?;
        self.is(top_k, &[OpKind::TopK])?;
        let products: Vec<RecordId> = [router].into_iter().chain(others.iter().copied()).collect();
        self.row(*norm, quantizes, &products)?;
        self.link(self.ends(router)[1], at!(self, softmax, softmax.x), Link::Part)?;
        self.link(at!(self, softmax, softmax.out), at!(self, top_k, top_k.probs), Link::Own)?;
        let Some(sort) = *sort else { return Ok(()) };
        self.is(sort, &[OpKind::ExpertSort])?;
        self.link(at!(self, top_k, top_k.ids), at!(self, sort, expert_sort.ids), Link::Shared)
    }

    fn gated(&self, g: &Gated, kinds: &[OpKind]) -> Checked {
        self.all(&g.products, kinds)?;
        self.is(g.gate, &[OpKind::SiluMul])?;
        let made: Vec<_> = g.products.iter().map(|&p| self.ends(p)[1]).collect();
        self.any(&made, at!(self, g.gate, silu_mul.a), Link::OwnPart)?;
        self.any(&made, at!(self, g.gate, silu_mul.b), Link::OwnPart)?;
        let unused = made.iter().find(|m| {
            let read = [at!(self, g.gate, silu_mul.a), at!(self, g.gate, silu_mul.b)];
            read.iter().all(|r| r.1.value() != m.1.value())
        });
        ensure(unused.is_none(), || format!("record {}", g.gate), "both products", || format!("none of {unused:?}"))
    }

    fn experts_in(&self, x: &ExpertsIn) -> Checked {
        self.all(&x.quantizes, &[OpKind::Quantize])?;
        self.gated(&x.experts, EXPERTS)?;
        x.shared.as_ref().map_or(Ok(()), |shared| self.gated(shared, PRODUCTS))
    }

    /// A product with the int8 form that it alone reads.
    fn down(&self, quantize: Option<RecordId>, product: RecordId, kinds: &[OpKind]) -> Checked {
        self.is(product, kinds)?;
        let Some(q) = quantize else { return Ok(()) };
        self.is(q, &[OpKind::Quantize])?;
        self.link(at!(self, q, quantize.codes), self.ends(product)[0], Link::Own)
    }

    fn experts_out(&self, x: &ExpertsOut) -> Checked {
        let ExpertsOut { quantize, down, sum, shared } = x;
        self.down(*quantize, *down, EXPERTS)?;
        self.is(*sum, &[OpKind::WeightedSum])?;
        self.link(self.ends(*down)[1], at!(self, *sum, weighted_sum.y), Link::Own)?;
        let Some(SharedOut { quantize, down, scale, add }) = shared else { return Ok(()) };
        self.down(*quantize, *down, PRODUCTS)?;
        self.is(*add, &[OpKind::Add])?;
        let mut other = self.ends(*down)[1];
        if let Some([open, scaled]) = *scale {
            self.is(open, &[OpKind::Sigmoid])?;
            self.is(scaled, &[OpKind::MulRows])?;
            self.link(other, at!(self, scaled, mul_rows.x), Link::Own)?;
            self.link(at!(self, open, sigmoid.out), at!(self, scaled, mul_rows.s), Link::Own)?;
            other = at!(self, scaled, mul_rows.out);
        }
        let sum = at!(self, *sum, weighted_sum.out);
        let [a, b] = [at!(self, *add, add.a), at!(self, *add, add.b)];
        let (first, second) = if a.1.value() == sum.1.value() { (a, b) } else { (b, a) };
        self.link(sum, first, Link::Own)?;
        self.link(other, second, Link::Own)
    }
}
