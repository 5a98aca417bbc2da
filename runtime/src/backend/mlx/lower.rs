//! From a plan's records to a graph of MLX operations.
//!
//! [`Lowering::graph`] walks one template and calls MLX once or a few times per record: it knows ops and no model. It runs when a
//! closure is traced, once per template and cache capacity, never per token.
//!
//! What varies between calls are arrays: token ids, the position, the number of valid rows, the state. A template is lowered at
//! its largest number of rows (decode and LM head: one). Rows past the valid ones compute something that nobody reads: their cache rows lie
//! after every visible position and are written again before one sees them; recurrent state ignores them.
//!
//! Where our kernels take a chain of records in one launch, each record is lowered as operations all the same and the value
//! remembers what it was computed from (`Origin`); the record that ends the chain then uses the kernel, and nothing uses the rest.
//!
//! Where MLX departs from the arithmetic that the ops' files state: activations of quantised products stay floats (`quantize` is
//! nothing), sums run in MLX's order, `exp` is MLX's, cos and sin of positions come from a table made as the CPU makes them
//! (f32) or from MLX's fused kernel (f16, bf16). So results are compared with a tolerance.

mod layers;

use std::cell::RefCell;
use std::collections::HashMap;

use loaf_formats::dtype::{DType, WEIGHT_PLANES, WeightFormat};
use loaf_formats::op::{
    Mode, OpAttrs, OpKind, add, add_rms_norm, embed, expert_linear_dense, expert_linear_quant, expert_sort,
    gather_rows, gdn_gates, l2_norm, linear_dense, linear_quant, mul, mul_rows, quantize, rms_norm, sigmoid, silu,
    silu_mul, softmax, top_k, weighted_sum,
};
use loaf_formats::plan::{Io, Operand, Phase, Plan, Record, Region, State, StateKind, Template, records};

use super::array::{Array, MlxError, Result, Type};
use super::device::Device;
use super::kernels::{Act, Kernels, Place};
use super::ops::Mlx;
use super::values::{Origin, Values, shape};
use super::weights::{Matrix, Weights};
use crate::trace::is_shown;

/// What a graph is given besides weights.
pub struct Inputs<'a> {
    /// Token ids `u32[rows]` (decode, prefill) or hidden rows (LM head).
    pub main: &'a Array,
    /// Position, or hidden row: `i32[1]`.
    pub pos: &'a Array,
    /// Valid rows: `i32[1]`.
    pub rows: &'a Array,
    /// State arrays, in the order of the plan's table.
    pub states: &'a [Array],
}

/// What a graph computes.
pub struct Outputs {
    /// Logits `f32[vocab]` (decode, LM head) or hidden rows (prefill).
    pub main: Array,
    /// State arrays, in the order of the plan's table.
    pub states: Vec<Array>,
}

/// Is told of every record's results, in order: the tracer's ear.
pub type Observer<'a> = &'a mut dyn FnMut(&Record<'_>, usize, &Array) -> Result<()>;

/// All that graphs of one loaf share.
pub struct Lowering {
    pub(super) mlx: Mlx,
    pub(super) weights: Weights,
    pub(super) kernels: Kernels,
    /// Type of activations.
    pub(super) kind: Type,
    io: Io,
    states: Vec<State>,
    /// Cos and sin of positions, by how many and the place of the frequencies.
    tables: RefCell<HashMap<(u64, u64), Array>>,
}

/// New rows of a cache: the cache before, and where the rows come from.
struct Written {
    before: Array,
    rows: Place,
    origin: Option<Origin>,
}

/// The planes of a weight, rows of all its matrices one after another.
struct Planes {
    operands: [Operand; WEIGHT_PLANES],
    dims: [[u64; 3]; WEIGHT_PLANES],
}

/// A template being lowered.
struct Trace<'a> {
    l: &'a Lowering,
    m: &'a Mlx,
    inputs: &'a Inputs<'a>,
    rows: u64,
    values: Values<'a>,
    states: Vec<Array>,
    /// Cos and sin rows by place, and their position and periods for MLX's own kernel.
    ropes: Vec<(Operand, Array, Array)>,
    /// Caches that were written, by state.
    written: HashMap<usize, Written>,
    /// What attention sees, by window, heads and their size.
    masks: HashMap<[u64; 3], Array>,
    /// Chains are left to kernels.
    fused: bool,
}

impl Lowering {
    /// For the plan's states and memory, with activations of type `kind`.
    pub fn new(mlx: Mlx, weights: Weights, kernels: Kernels, plan: &Plan, kind: Type) -> Lowering {
        Lowering { mlx, weights, kernels, kind, io: plan.io, states: plan.states.clone(), tables: RefCell::default() }
    }

    /// The state at the start of a sequence; caches have room for `capacity` positions.
    pub fn initial(&self, state: usize, capacity: u32, operand: StateShape) -> Result<Array> {
        let dims = match self.states[state].kind {
            StateKind::KvCache => [operand.dims[0], i32::try_from(capacity).unwrap_or(i32::MAX), operand.dims[2]],
            StateKind::Recurrent => operand.dims,
        };
        self.mlx.zeros(&dims, self.cache_type(operand.dtype))
    }

    /// Caches are in the plan's type with f32 activations (f16 then is rounded to, as on the CPU); else in that of
    /// activations, since MLX's attention takes one type. Recurrent state is f32 always.
    pub fn cache_type(&self, planned: DType) -> Type {
        match (planned, self.kind) {
            (DType::F16, Type::F32) => Type::F16,
            (DType::F16, kind) => kind,
            _ => Type::F32,
        }
    }

    /// Index of the state an operand addresses.
    fn state_of(&self, o: Operand) -> Result<usize> {
        let kind = if o.region == Region::Cache { StateKind::KvCache } else { StateKind::Recurrent };
        let found = self.states.iter().position(|s| s.kind == kind && s.offset == o.offset);
        found.ok_or_else(|| MlxError(format!("expected the start of a state, found {o:?}")))
    }

    /// Shapes of the states, from the records that update them.
    pub fn state_shapes(&self, template: &Template) -> Result<Vec<StateShape>> {
        let mut shapes = vec![None; self.states.len()];
        let mut words = Vec::new();
        template.expand(1, &mut words);
        for r in records(&words).flatten() {
            for (i, rule) in r.kind.spec().operands.iter().enumerate() {
                let o = r.operand(i);
                if rule.mode != Mode::InOut {
                    continue;
                }
                let d = r.dims(i).ok_or_else(|| MlxError("a state without an extent".to_owned()))?;
                let dims = match r.kind {
                    OpKind::KvWrite => shape([d[1], 0, d[2]]),
                    OpKind::GdnScan => shape(d),
                    // `[kernel - 1, channels]`
                    _ => shape([d[0], 1, d[2]]),
                };
                shapes[self.state_of(o)?] = Some(StateShape { dims, dtype: o.dtype });
            }
        }
        let known: Option<Vec<_>> = shapes.into_iter().collect();
        known.ok_or_else(|| MlxError("expected every state to be updated by a decode step".to_owned()))
    }

    /// Rows that a template is lowered at: prompts are padded, everything else has one.
    pub fn rows(template: &Template) -> u64 {
        if template.phase == Phase::Prefill { u64::from(template.max_rows) } else { 1 }
    }

    /// Lowers a template.
    pub fn graph(
        &self,
        template: &Template,
        inputs: &Inputs<'_>,
        mut observer: Option<Observer<'_>>,
    ) -> Result<Outputs> {
        let rows = Self::rows(template);
        let mut words = Vec::new();
        template.expand(rows, &mut words);
        let mut t = Trace {
            l: self,
            m: &self.mlx,
            inputs,
            rows,
            values: Values::new(&self.mlx),
            states: inputs.states.to_vec(),
            ropes: Vec::new(),
            written: HashMap::new(),
            masks: HashMap::new(),
            // An observer wants every record by itself.
            fused: self.kernels.exist() && observer.is_none(),
        };
        let io = |offset, dtype| Operand { region: Region::Io, dtype, offset, row_stride: 0, head_stride: 0 };
        match template.phase {
            Phase::LmHead => {
                let [n, width] = inputs.main.shape()[..] else {
                    return Err(MlxError("hidden rows of another shape".to_owned()));
                };
                let hidden = Operand { row_stride: width as u64, ..io(self.io.hidden, DType::F32) };
                t.values.set(hidden, [n as u64, 1, width as u64], inputs.main)?;
            }
            _ => t.values.set(io(self.io.ids, DType::U32), [1, 1, rows], inputs.main)?,
        }
        for record in records(&words).flatten() {
            let place = |e: MlxError| MlxError(format!("{}: {}", record.kind.spec().name, e.0));
            t.record(&record).map_err(place)?;
            if let Some(observer) = &mut observer {
                t.tell(&record, observer)?;
            }
        }
        let out = if template.phase == Phase::Prefill { self.io.hidden } else { self.io.logits };
        let mut main = t.values.whole(io(out, DType::F32))?;
        if template.phase != Phase::Prefill {
            main = self.mlx.astype(&self.mlx.reshape(&main, &[-1])?, Type::F32)?;
        }
        Ok(Outputs { main, states: t.states })
    }
}

/// Extents and type of a state.
#[derive(Clone, Copy, Debug)]
pub struct StateShape {
    /// `[heads, 0, dim]` for caches, whose positions vary.
    pub dims: [i32; 3],
    /// In the plan.
    pub dtype: DType,
}

fn missing(what: &str) -> MlxError {
    MlxError(format!("expected {what}, found none"))
}

impl Trace<'_> {
    /// Tells the observer of a record's results, as floats of the plan's extent.
    fn tell(&self, r: &Record<'_>, observer: &mut Observer<'_>) -> Result<()> {
        for i in (0..r.kind.spec().operands.len()).filter(|&i| is_shown(r.kind, i)) {
            let dims = r.dims(i).ok_or_else(|| missing("an extent"))?;
            let mut value = self.m.astype(&self.values.get(r.operand(i), dims)?, Type::F32)?;
            if r.kind == OpKind::GdnGates && i == gdn_gates::Operands::indices().decay {
                // Kept as its logarithm.
                value = self.m.exp(&value)?;
            }
            observer(r, i, &self.m.contiguous(&value)?)?;
        }
        Ok(())
    }

    fn input(&self, r: &Record<'_>, i: usize) -> Result<Array> {
        let (o, dims) = (r.operand(i), r.dims(i).ok_or_else(|| missing("an extent"))?);
        if o.region == Region::Weights && dims[1] == 1 && (dims[0] == 1 || o.row_stride == 0) {
            // A vector that every row sees, such as a bias.
            let vector = self.l.weights.vector(self.m, o, dims[2])?;
            return self.m.reshape(&vector, &shape([1, 1, dims[2]]));
        }
        self.values.get(o, dims)
    }

    /// The same in `f32`.
    fn wide(&self, r: &Record<'_>, i: usize) -> Result<Array> {
        self.m.astype(&self.input(r, i)?, Type::F32)
    }

    /// Records result `i` in the type of activations.
    fn out(&mut self, r: &Record<'_>, i: usize, array: &Array) -> Result<()> {
        let array = self.m.astype(array, self.l.kind)?;
        self.keep(r, i, &array)
    }

    /// Records result `i` as it is.
    fn keep(&mut self, r: &Record<'_>, i: usize, array: &Array) -> Result<()> {
        self.values.set(r.operand(i), r.dims(i).ok_or_else(|| missing("an extent"))?, array)
    }

    /// The planes of a weight, matrices laid end to end: operands, and `[rows, 1, elements]` of each.
    fn planes(&self, r: &Record<'_>, at: [usize; WEIGHT_PLANES]) -> Result<Planes> {
        let mut planes = Planes { operands: [Operand::ABSENT; WEIGHT_PLANES], dims: [[0; 3]; WEIGHT_PLANES] };
        for (i, &at) in at.iter().enumerate() {
            let (o, Some([rows, heads, dim])) = (r.operand(at), r.dims(at)) else { continue };
            (planes.operands[i], planes.dims[i]) = (o, [rows * heads, 1, dim]);
        }
        Ok(planes)
    }

    fn record(&mut self, r: &Record<'_>) -> Result<()> {
        use OpKind::*;
        let m = self.m;
        match r.kind {
            View | Linear | ExpertLinear => Err(MlxError("an op of graphs only".to_owned())),
            Embed => self.embed(r),
            RmsNorm => {
                let (a, o) = (rms_norm::Attrs::of(r.attrs), rms_norm::Operands::indices());
                let w = self.l.weights.norm(m, r.operand(o.weight), a.dim as u64, a.offset, self.l.kind)?;
                let y = m.rms_norm(&self.input(r, o.x)?, &w, a.eps)?;
                let origin = Origin::Norm(self.place(r, o.x)?, w, a.eps);
                self.out(r, o.out, &y)?;
                self.mark(origin)
            }
            AddRmsNorm => {
                let (attrs, o) = (add_rms_norm::Attrs::of(r.attrs), add_rms_norm::Operands::indices());
                let (a, b) = (self.input(r, o.a)?, self.input(r, o.b)?);
                let w = self.l.weights.norm(m, r.operand(o.weight), attrs.dim as u64, attrs.offset, self.l.kind)?;
                let fused = if self.fused && attrs.heads == 1 {
                    self.l.kernels.add_norm(m, &a, &b, &w, attrs.eps, self.l.kind)?
                } else {
                    None
                };
                let [sum, y] = match fused {
                    Some(both) => both,
                    None => {
                        let sum = m.add(&a, &b)?;
                        let y = m.rms_norm(&sum, &w, attrs.eps)?;
                        [sum, y]
                    }
                };
                self.out(r, o.sum, &sum)?;
                self.out(r, o.out, &y)
            }
            Add => {
                let o = add::Operands::indices();
                let y = match self.mixture(r)? {
                    Some(y) => y,
                    None => m.add(&self.input(r, o.a)?, &self.input(r, o.b)?)?,
                };
                self.out(r, o.out, &y)
            }
            Mul => {
                let o = mul::Operands::indices();
                let y = m.mul(&self.input(r, o.a)?, &self.input(r, o.b)?)?;
                self.out(r, o.out, &y)
            }
            Silu => {
                let o = silu::Operands::indices();
                let x = self.input(r, o.x)?;
                let y = m.mul(&x, &m.sigmoid(&x)?)?;
                self.out(r, o.out, &y)
            }
            Sigmoid => {
                let o = sigmoid::Operands::indices();
                let y = m.sigmoid(&self.input(r, o.x)?)?;
                let origin = Origin::Sigmoid(self.place(r, o.x)?);
                self.out(r, o.out, &y)?;
                self.mark(origin)
            }
            SiluMul | SigmoidMul => {
                // Both have the same operands.
                let o = silu_mul::Operands::indices();
                if let Some(y) = self.gate(r, if r.kind == SiluMul { Act::Silu } else { Act::Sigmoid })? {
                    return self.out(r, o.out, &y);
                }
                let x = self.input(r, o.a)?;
                let open = m.sigmoid(&x)?;
                let open = if r.kind == SiluMul { m.mul(&x, &open)? } else { open };
                let y = m.mul(&open, &self.input(r, o.b)?)?;
                self.out(r, o.out, &y)
            }
            MulRows => {
                let o = mul_rows::Operands::indices();
                let x = self.input(r, o.x)?;
                let y = m.mul(&x, &self.input(r, o.s)?)?;
                let origin = match self.origin(r, o.s) {
                    Some(Origin::Sigmoid(open)) => Some(Origin::Scaled(x, open.clone())),
                    _ => None,
                };
                self.out(r, o.out, &y)?;
                origin.map_or(Ok(()), |origin| self.mark(origin))
            }
            // Products take the activations themselves; only the codes' place is ever read.
            Quantize => {
                let o = quantize::Operands::indices();
                let x = self.input(r, o.x)?;
                self.keep(r, o.codes, &x)
            }
            LinearDense => {
                let (a, o) = (linear_dense::Attrs::of(r.attrs), linear_dense::Operands::indices());
                let y = self.product(&self.input(r, o.x)?, &self.planes(r, o.weight)?, a.format)?;
                self.out(r, o.out, &y)
            }
            LinearQuant => {
                let (a, o) = (linear_quant::Attrs::of(r.attrs), linear_quant::Operands::indices());
                let y = self.product(&self.input(r, o.codes)?, &self.planes(r, o.weight)?, a.format)?;
                self.out(r, o.out, &y)
            }
            // The slots' experts themselves stand where the plan has their order.
            ExpertSort => {
                let o = expert_sort::Operands::indices();
                let ids = self.input(r, o.ids)?;
                self.keep(r, o.order, &ids)
            }
            ExpertLinearDense => {
                let o = expert_linear_dense::Operands::indices();
                self.experts(r, o.x, o.order, o.weight, o.out)
            }
            ExpertLinearQuant => {
                let o = expert_linear_quant::Operands::indices();
                self.experts(r, o.codes, o.order, o.weight, o.out)
            }
            WeightedSum => {
                let (a, o) = (weighted_sum::Attrs::of(r.attrs), weighted_sum::Operands::indices());
                let (rows, k) = (a.rows as i32, a.k as i32);
                let (slots, w) = (self.input(r, o.y)?, m.reshape(&self.input(r, o.w)?, &[rows, k, 1])?);
                let weights = m.reshape(&w, &[rows, k])?;
                let fused = if self.fused { self.l.kernels.mix(m, &slots, &weights, None, self.l.kind)? } else { None };
                let y = fused.map_or_else(|| m.sum(&m.mul(&slots, &w)?, 1), Ok)?;
                self.out(r, o.out, &y)?;
                self.mark(Origin::Sum(slots, weights))
            }
            Softmax => {
                let o = softmax::Operands::indices();
                let y = m.softmax(&self.wide(r, o.x)?)?;
                let origin = Origin::Softmax(self.place(r, o.x)?);
                self.keep(r, o.out, &y)?;
                self.mark(origin)
            }
            TopK => {
                let (a, o) = (top_k::Attrs::of(r.attrs), top_k::Operands::indices());
                let (rows, k, renorm) = (a.rows as i32, a.k as i32, a.renorm != 0);
                if let (true, Some(Origin::Softmax(scores))) = (self.fused, self.origin(r, o.probs))
                    && let Some([ids, w]) = self.l.kernels.top_k(m, scores, k, renorm, rows)?
                {
                    self.keep(r, o.ids, &ids)?;
                    return self.keep(r, o.weights, &w);
                }
                let p = m.reshape(&self.wide(r, o.probs)?, &[rows, a.experts as i32])?;
                let order = m.argsort(&m.neg(&p)?)?;
                let ids = m.slice(&order, 1, 0, k)?;
                let mut w = m.take_along(&p, &ids)?;
                if renorm {
                    let sum = m.reshape(&m.sum(&w, 1)?, &[rows, 1])?;
                    w = m.div(&w, &sum)?;
                }
                self.keep(r, o.ids, &ids)?;
                self.keep(r, o.weights, &w)
            }
            RopeTable => self.rope_table(r),
            Rope => self.rope(r),
            KvWrite => self.write(r),
            Attention => self.attention(r),
            Conv | ConvSilu => self.convolution(r),
            L2Norm => {
                let (a, o) = (l2_norm::Attrs::of(r.attrs), l2_norm::Operands::indices());
                let x = self.wide(r, o.x)?;
                let sum = m.reshape(&m.sum(&m.square(&x)?, -1)?, &[a.rows as i32, a.heads as i32, 1])?;
                let inv = m.rsqrt(&m.add(&sum, &Array::scalar(a.eps))?)?;
                let y = m.mul(&m.mul(&x, &inv)?, &Array::scalar(a.scale))?;
                let origin = Origin::Length(self.place(r, o.x)?, a.eps, a.scale);
                // Recurrences stay in f32.
                self.keep(r, o.out, &y)?;
                self.mark(origin)
            }
            GdnGates => {
                let (attrs, o) = (gdn_gates::Attrs::of(r.attrs), gdn_gates::Operands::indices());
                let heads = attrs.heads * attrs.dim;
                let flat = |x: Array| m.reshape(&x, &[attrs.rows as i32, 1, heads as i32]);
                let (a, b) = (flat(self.wide(r, o.a)?)?, flat(self.wide(r, o.b)?)?);
                let a_log = self.l.weights.vector(m, r.operand(o.a_log), heads as u64)?;
                let dt = self.l.weights.vector(m, r.operand(o.dt_bias), heads as u64)?;
                let x = m.add(&a, &dt)?;
                let soft = m.select(&m.greater(&x, &Array::scalar(20.0))?, &x, &m.log1p(&m.exp(&x)?)?)?;
                let g = m.neg(&m.mul(&m.exp(&a_log)?, &soft)?)?;
                // The logarithm of the decay: the chunked rule adds it up.
                let origin = Origin::Gates([self.place(r, o.a)?, self.place(r, o.b)?], [a_log, dt]);
                self.keep(r, o.decay, &g)?;
                self.mark(origin)?;
                self.keep(r, o.beta, &m.sigmoid(&b)?)
            }
            GdnScan => self.scan(r),
            GatherRows => {
                let (a, o) = (gather_rows::Attrs::of(r.attrs), gather_rows::Operands::indices());
                // Every hidden row there is: which one is chosen is known only when the graph runs.
                let rows = self.inputs.main.shape().first().copied().unwrap_or(0);
                let x = self.values.get(r.operand(o.x), [rows as u64, 1, a.dim as u64])?;
                let x = m.reshape(&x, &[-1, a.dim as i32])?;
                let y = m.slice_at(&x, self.inputs.pos, 0, self.rows as i32)?;
                self.out(r, o.out, &y)
            }
        }
    }

    fn embed(&mut self, r: &Record<'_>) -> Result<()> {
        let m = self.m;
        let (a, o) = (embed::Attrs::of(r.attrs), embed::Operands::indices());
        let ids = m.reshape(&self.input(r, o.ids)?, &[-1])?;
        let Planes { operands, dims } = self.planes(r, o.table)?;
        let table = self.l.weights.table(m, &operands, &dims, a.format, self.l.kind)?;
        if let (true, Matrix::Packed { codes, scales, biases: Some(biases), packing }) = (self.fused, &table)
            && let Some(y) = self.l.kernels.embed(m, &ids, [codes, scales, biases], *packing, self.l.kind)?
        {
            return self.out(r, o.out, &y);
        }
        let rows = match table {
            Matrix::Dense(table) => m.take(&table, &ids)?,
            Matrix::Packed { codes, scales, biases, packing } => {
                let biases = biases.map(|b| m.take(&b, &ids)).transpose()?;
                let (codes, scales) = (m.take(&codes, &ids)?, m.take(&scales, &ids)?);
                m.dequantize(&codes, &scales, biases.as_ref(), packing, Type::F32)?
            }
        };
        self.out(r, o.out, &rows)
    }

    /// What input `i` was computed from.
    fn origin(&self, r: &Record<'_>, i: usize) -> Option<&Origin> {
        self.values.origin(r.operand(i), r.dims(i)?)
    }

    /// Remembers what the result kept last was computed from.
    fn mark(&mut self, origin: Origin) -> Result<()> {
        if self.fused {
            self.values.mark(origin);
        }
        Ok(())
    }

    fn place(&self, r: &Record<'_>, i: usize) -> Result<Place> {
        self.values.place(r.operand(i), r.dims(i).ok_or_else(|| missing("an extent"))?)
    }

    fn product(&self, x: &Array, Planes { operands, dims }: &Planes, format: WeightFormat) -> Result<Array> {
        let m = self.m;
        let x = m.reshape(x, &[self.rows as i32, -1])?;
        let cuda = self.l.kernels.device() == Device::Cuda;
        // One row times many: MLX's CUDA device takes a kernel that it first compiles for a minute, but not if it gathers.
        let gathered = cuda && self.rows == 1 && dims[0][0] > QMV_ROWS && format.group().is_some();
        match self.l.weights.matrix(m, operands, dims, format, gathered.then_some(1), self.l.kind)? {
            Matrix::Dense(w) => m.matmul(&x, &w),
            Matrix::Packed { codes, scales, biases, packing } if gathered => {
                let x = m.reshape(&x, &[1, 1, -1])?;
                let only = Array::from_slice(&[0u32], &[1]);
                let y = m.gather_qmm(&x, &codes, &scales, biases.as_ref(), Some(&only), &only, packing, false)?;
                m.reshape(&y, &[1, -1])
            }
            // As does one of many rows; dense products of the decoded weights are faster anyway.
            Matrix::Packed { codes, scales, biases, packing } if cuda && self.rows > 1 => {
                let w = m.dequantize(&codes, &scales, biases.as_ref(), packing, self.l.kind)?;
                m.matmul(&x, &m.transpose(&w, &[1, 0])?)
            }
            Matrix::Packed { codes, scales, biases, packing } => {
                m.quantized_matmul(&x, &codes, &scales, biases.as_ref(), packing)
            }
        }
    }
}

/// Rows of a matrix up to which MLX's CUDA device multiplies a single vector with its kernel for that.
const QMV_ROWS: u64 = 16384;
