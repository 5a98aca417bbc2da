//! From a plan's records to a graph of MLX operations.
//!
//! [`Lowering::graph`] walks one template and calls MLX once or a few times per record: it knows ops and no model. It runs when a
//! closure is traced, once per template and cache capacity, never per token.
//!
//! What varies between calls are arrays: token ids, the position, the number of valid rows, the state. A template is lowered at
//! its family's largest number of rows. Rows past the valid ones compute something that nobody reads: their cache rows lie
//! after every visible position and are written again before one sees them; recurrent state ignores them.
//!
//! Where our kernels take a chain of records in one launch, each record is lowered as operations all the same and the value
//! remembers what it was computed from (`Origin`); the record that ends the chain then uses the kernel, and nothing uses the rest.
//!
//! Where MLX departs from the arithmetic that `op.rs` states: activations of quantised products stay floats (`quantize` is
//! nothing), sums run in MLX's order, `exp` is MLX's, cos and sin of positions come from a table made as the CPU makes them
//! (f32) or from MLX's fused kernel (f16, bf16). So results are compared with a tolerance.

mod layers;

use std::cell::RefCell;
use std::collections::HashMap;

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{Mode, OpKind};
use loaf_formats::plan::{Family, Io, Operand, Patch, Phase, Plan, Record, Region, State, StateKind, records};

use super::array::{Array, MlxError, Result, Type};
use super::device::Device;
use super::kernels::{Act, Kernels, Place};
use super::ops::Mlx;
use super::values::{Origin, Values, shape};
use super::weights::{Matrix, Weights};
use crate::trace::is_shown;

/// What a graph is given besides weights.
pub struct Inputs<'a> {
    /// Token ids `u32[rows]` (decode, prefill) or hidden rows (head).
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
    /// Logits `f32[vocab]` (decode, head) or hidden rows (prefill).
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

/// A template being lowered.
struct Trace<'a> {
    l: &'a Lowering,
    m: &'a Mlx,
    inputs: &'a Inputs<'a>,
    rows: u64,
    words: &'a [u64],
    patches: &'a [Patch],
    values: Values<'a>,
    states: Vec<Array>,
    /// Cos and sin rows by place, and their position and periods for MLX's own kernel.
    ropes: Vec<(Operand, Array, Array)>,
    /// Caches that were written, by state.
    written: HashMap<usize, Written>,
    /// What attention sees, by position's place; window, heads and their size.
    masks: HashMap<(usize, [u64; 3]), Array>,
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
        let found = self.states.iter().position(|s| s.offset == o.offset);
        found.ok_or_else(|| MlxError(format!("expected the start of a state, found {o:?}")))
    }

    /// Shapes of the states, from the records that update them.
    pub fn state_shapes(&self, family: &Family) -> Result<Vec<StateShape>> {
        let mut shapes = vec![None; self.states.len()];
        let mut words = Vec::new();
        family.segments[0].expand(0, 1, &mut words);
        for r in records(&words).flatten() {
            for (i, rule) in r.kind.spec().operands.iter().enumerate() {
                let o = r.operand(i);
                if o.region != Region::State || rule.mode == Mode::In {
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

    /// Lowers segment `index` of a family.
    pub fn graph(
        &self,
        family: &Family,
        index: usize,
        inputs: &Inputs<'_>,
        mut observer: Option<Observer<'_>>,
    ) -> Result<Outputs> {
        let segment = &family.segments[index];
        let rows = u64::from(family.max_rows);
        // Row counts become the largest; positions are read from the patches.
        let mut words = Vec::new();
        segment.expand(0, rows, &mut words);
        let mut t = Trace {
            l: self,
            m: &self.mlx,
            inputs,
            rows,
            words: &segment.words,
            patches: &segment.patches,
            values: Values::new(&self.mlx),
            states: inputs.states.to_vec(),
            ropes: Vec::new(),
            written: HashMap::new(),
            masks: HashMap::new(),
            // An observer wants every record by itself.
            fused: self.kernels.exist() && observer.is_none(),
        };
        let io = |offset, dtype| Operand { region: Region::Io, dtype, offset, row_stride: 0, head_stride: 0 };
        match family.phase {
            Phase::Head => {
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
        let out = if family.phase == Phase::Prefill { self.io.hidden } else { self.io.logits };
        let mut main = t.values.whole(io(out, DType::F32))?;
        if family.phase != Phase::Prefill {
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
            if r.kind == OpKind::GdnGates && i == 4 {
                // Kept as its logarithm.
                value = self.m.exp(&value)?;
            }
            observer(r, i, &self.m.contiguous(&value)?)?;
        }
        Ok(())
    }

    fn input(&self, r: &Record<'_>, i: usize) -> Result<Array> {
        self.values.get(r.operand(i), r.dims(i).ok_or_else(|| missing("an extent"))?)
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

    /// Attribute `i`, a position, as an array: `base + per_pos * pos + per_row * rows`.
    fn position(&self, r: &Record<'_>, i: usize) -> Result<Array> {
        let word = r.at + 1 + 3 * r.kind.spec().operands.len() + i;
        let base = Array::from_slice(&[self.words[word] as i32], &[1]);
        let Some(patch) = self.patches.iter().find(|p| p.word as usize == word) else { return Ok(base) };
        let term = |per: u32, of: &Array| match per {
            0 => Ok(None),
            1 => Ok(Some(of.clone())),
            n => self.m.mul(of, &Array::from_slice(&[n as i32], &[1])).map(Some),
        };
        let terms = [term(patch.per_pos, self.inputs.pos)?, term(patch.per_row, self.inputs.rows)?];
        let mut sum = if self.words[word] == 0 { None } else { Some(base.clone()) };
        for t in terms.into_iter().flatten() {
            sum = Some(match sum {
                None => t,
                Some(s) => self.m.add(&s, &t)?,
            });
        }
        Ok(sum.unwrap_or(base))
    }

    fn operands(r: &Record<'_>, from: usize) -> ([Operand; 3], [[u64; 3]; 3]) {
        let at = |i: usize| (r.operand(from + i), r.dims(from + i).unwrap_or([0; 3]));
        let [a, b, c] = [at(0), at(1), at(2)];
        ([a.0, b.0, c.0], [a.1, b.1, c.1])
    }

    fn record(&mut self, r: &Record<'_>) -> Result<()> {
        use OpKind::*;
        let m = self.m;
        let n = |i: usize| r.attrs[i];
        let real = |i: usize| f32::from_bits(r.attrs[i] as u32);
        let format = r.kind.spec().format_attr().and_then(|i| WeightFormat::from_code(r.attrs[i]));
        let format = format.unwrap_or(WeightFormat::Dense(DType::F32));
        match r.kind {
            View | Linear | ExpertLinear => Err(MlxError("an op of graphs only".to_owned())),
            Embed => {
                let ids = m.reshape(&self.input(r, 0)?, &[-1])?;
                let (o, dims) = Self::operands(r, 1);
                let table = self.l.weights.table(m, &o, &dims, format, self.l.kind)?;
                if let (true, Matrix::Packed { codes, scales, biases: Some(biases), packing }) = (self.fused, &table)
                    && let Some(y) = self.l.kernels.embed(m, &ids, [codes, scales, biases], *packing, self.l.kind)?
                {
                    return self.out(r, 4, &y);
                }
                let rows = match table {
                    Matrix::Dense(table) => m.take(&table, &ids)?,
                    Matrix::Packed { codes, scales, biases, packing } => {
                        let biases = biases.map(|b| m.take(&b, &ids)).transpose()?;
                        let (codes, scales) = (m.take(&codes, &ids)?, m.take(&scales, &ids)?);
                        m.dequantize(&codes, &scales, biases.as_ref(), packing, Type::F32)?
                    }
                };
                self.out(r, 4, &rows)
            }
            RmsNorm => {
                let w = self.l.weights.norm(m, r.operand(1), n(2), real(4), self.l.kind)?;
                let y = m.rms_norm(&self.input(r, 0)?, &w, real(3))?;
                let origin = Origin::Norm(self.place(r, 0)?, w, real(3));
                self.out(r, 2, &y)?;
                self.mark(origin)
            }
            AddRmsNorm => {
                let (a, b) = (self.input(r, 0)?, self.input(r, 1)?);
                let w = self.l.weights.norm(m, r.operand(2), n(2), real(4), self.l.kind)?;
                if self.fused
                    && n(1) == 1
                    && let Some([sum, y]) = self.l.kernels.add_norm(m, &a, &b, &w, real(3), self.l.kind)?
                {
                    self.out(r, 3, &sum)?;
                    return self.out(r, 4, &y);
                }
                let sum = m.add(&a, &b)?;
                let y = m.rms_norm(&sum, &w, real(3))?;
                self.out(r, 3, &sum)?;
                self.out(r, 4, &y)
            }
            Add => {
                if let Some(y) = self.mixture(r)? {
                    return self.out(r, 2, &y);
                }
                let y = m.add(&self.input(r, 0)?, &self.input(r, 1)?)?;
                self.out(r, 2, &y)
            }
            Mul => {
                let y = m.mul(&self.input(r, 0)?, &self.input(r, 1)?)?;
                self.out(r, 2, &y)
            }
            Silu => {
                let x = self.input(r, 0)?;
                let y = m.mul(&x, &m.sigmoid(&x)?)?;
                self.out(r, 1, &y)
            }
            Sigmoid => {
                let y = m.sigmoid(&self.input(r, 0)?)?;
                let origin = Origin::Sigmoid(self.place(r, 0)?);
                self.out(r, 1, &y)?;
                self.mark(origin)
            }
            SiluMul | SigmoidMul => {
                if let Some(y) = self.gate(r, if r.kind == SiluMul { Act::Silu } else { Act::Sigmoid })? {
                    return self.out(r, 2, &y);
                }
                let x = self.input(r, 0)?;
                let open = m.sigmoid(&x)?;
                let open = if r.kind == SiluMul { m.mul(&x, &open)? } else { open };
                let y = m.mul(&open, &self.input(r, 1)?)?;
                self.out(r, 2, &y)
            }
            MulRows => {
                let x = self.input(r, 0)?;
                let y = m.mul(&x, &self.input(r, 1)?)?;
                let origin = match self.origin(r, 1) {
                    Some(Origin::Sigmoid(open)) => Some(Origin::Scaled(x, open.clone())),
                    _ => None,
                };
                self.out(r, 2, &y)?;
                origin.map_or(Ok(()), |origin| self.mark(origin))
            }
            // Products take the activations themselves; only the codes' place is ever read.
            Quantize => {
                let x = self.input(r, 0)?;
                self.keep(r, 1, &x)
            }
            LinearDense => {
                let (o, dims) = Self::operands(r, 1);
                let y = self.product(&self.input(r, 0)?, &o, &dims, format)?;
                self.out(r, 3, &y)
            }
            LinearQuant => {
                let (o, dims) = Self::operands(r, 3);
                let y = self.product(&self.input(r, 0)?, &o, &dims, format)?;
                self.out(r, 6, &y)
            }
            // The slots' experts themselves stand where the plan has their order.
            ExpertSort => {
                let ids = self.input(r, 0)?;
                self.keep(r, 1, &ids)
            }
            ExpertLinearDense => self.experts(r, format, 1, 3, 5),
            ExpertLinearQuant => self.experts(r, format, 3, 5, 8),
            WeightedSum => {
                let (slots, w) = (self.input(r, 0)?, m.reshape(&self.input(r, 1)?, &shape([n(0), n(1), 1]))?);
                let weights = m.reshape(&w, &shape([n(0), n(1), 1])[..2])?;
                let fused = if self.fused { self.l.kernels.mix(m, &slots, &weights, None, self.l.kind)? } else { None };
                let y = fused.map_or_else(|| m.sum(&m.mul(&slots, &w)?, 1), Ok)?;
                self.out(r, 2, &y)?;
                self.mark(Origin::Sum(slots, weights))
            }
            Softmax => {
                let y = m.softmax(&self.wide(r, 0)?)?;
                let origin = Origin::Softmax(self.place(r, 0)?);
                self.keep(r, 1, &y)?;
                self.mark(origin)
            }
            TopK => {
                if let (true, Some(Origin::Softmax(scores))) = (self.fused, self.origin(r, 0)) {
                    let (k, renorm, rows) = (n(2) as i32, n(3) != 0, n(0) as i32);
                    if let Some([ids, w]) = self.l.kernels.top_k(m, scores, k, renorm, rows)? {
                        self.keep(r, 1, &ids)?;
                        return self.keep(r, 2, &w);
                    }
                }
                let p = m.reshape(&self.wide(r, 0)?, &shape([n(0), n(1), 1])[..2])?;
                let order = m.argsort(&m.neg(&p)?)?;
                let ids = m.slice(&order, 1, 0, n(2) as i32)?;
                let mut w = m.take_along(&p, &ids)?;
                if n(3) != 0 {
                    let sum = m.reshape(&m.sum(&w, 1)?, &[n(0) as i32, 1])?;
                    w = m.div(&w, &sum)?;
                }
                self.keep(r, 1, &ids)?;
                self.keep(r, 2, &w)
            }
            RopeTable => self.rope_table(r),
            Rope => self.rope(r),
            KvWrite => self.write(r),
            Attention => self.attention(r),
            Conv | ConvSilu => self.convolution(r),
            L2Norm => {
                let x = self.wide(r, 0)?;
                let sum = m.reshape(&m.sum(&m.square(&x)?, -1)?, &shape([n(0), n(1), 1]))?;
                let inv = m.rsqrt(&m.add(&sum, &Array::scalar(real(3)))?)?;
                let y = m.mul(&m.mul(&x, &inv)?, &Array::scalar(real(4)))?;
                let origin = Origin::Length(self.place(r, 0)?, real(3), real(4));
                // Recurrences stay in f32.
                self.keep(r, 1, &y)?;
                self.mark(origin)
            }
            GdnGates => {
                let heads = n(1) * n(2);
                let flat = |x: Array| m.reshape(&x, &shape([n(0), 1, heads]));
                let (a, b) = (flat(self.wide(r, 0)?)?, flat(self.wide(r, 1)?)?);
                let a_log = self.l.weights.vector(m, r.operand(2), heads)?;
                let dt = self.l.weights.vector(m, r.operand(3), heads)?;
                let x = m.add(&a, &dt)?;
                let soft = m.select(&m.greater(&x, &Array::scalar(20.0))?, &x, &m.log1p(&m.exp(&x)?)?)?;
                let g = m.neg(&m.mul(&m.exp(&a_log)?, &soft)?)?;
                // The logarithm of the decay: the chunked rule adds it up.
                let origin = Origin::Gates([self.place(r, 0)?, self.place(r, 1)?], [a_log, dt]);
                self.keep(r, 4, &g)?;
                self.mark(origin)?;
                self.keep(r, 5, &m.sigmoid(&b)?)
            }
            GdnScan => self.scan(r),
            SelectRows => {
                let x = self.values.get(Operand { ..r.operand(0) }, self.all_rows(r)?)?;
                let y = m.slice_at(&m.reshape(&x, &[-1, n(1) as i32])?, &self.position(r, 2)?, 0, self.rows as i32)?;
                self.out(r, 1, &y)
            }
        }
    }

    /// Every hidden row there is: which one is selected is known only when the graph runs.
    fn all_rows(&self, r: &Record<'_>) -> Result<[u64; 3]> {
        let rows = self.inputs.main.shape().first().copied().unwrap_or(0);
        Ok([rows as u64, 1, r.attrs[1]])
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

    fn product(&self, x: &Array, o: &[Operand], dims: &[[u64; 3]], format: WeightFormat) -> Result<Array> {
        let m = self.m;
        let x = m.reshape(x, &[self.rows as i32, -1])?;
        let cuda = self.l.kernels.device() == Device::Cuda;
        // One row times many: MLX's CUDA device takes a kernel that it first compiles for a minute, but not if it gathers.
        let gathered = cuda && self.rows == 1 && dims[0][0] > QMV_ROWS && format.group().is_some();
        match self.l.weights.matrix(m, o, dims, format, gathered.then_some(1), self.l.kind)? {
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
