//! From a plan's records to a graph of MLX operations.
//!
//! [`Lowering::graph`] walks one template and calls MLX once or a few times per record: it knows ops and no model. It runs when a
//! closure is traced, once per template and cache capacity, never per token.
//!
//! What varies between calls are arrays: token ids, the position, the number of valid rows, the state. A template is lowered at
//! its family's largest number of rows. Rows past the valid ones compute something that nobody reads: their cache rows lie
//! after every visible position and are written again before one sees them; recurrent state ignores them.
//!
//! Where MLX departs from the arithmetic that `op.rs` states: activations of quantised products stay floats (`quantize` is
//! nothing), sums run in MLX's order, `exp` is MLX's, cos and sin of positions come from a table made as the CPU makes them
//! (f32) or from MLX's fused kernel (f16, bf16). So results are compared with a tolerance.

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{Mode, OpKind};
use loaf_formats::plan::{Family, Io, Operand, Patch, Phase, Plan, Record, Region, State, StateKind, records};

use super::array::{Array, Mlx, MlxError, Result, Type};
use super::delta::{self, Scan};
use super::kernels::Kernels;
use super::values::{Values, shape};
use super::weights::{Matrix, Weights};
use crate::math::rope_angle;
use crate::trace::is_shown;

/// Slots from which products with experts are taken sorted by expert: fewer are read one by one anyway.
const SORT_SLOTS: u64 = 64;

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
    kernels: Kernels,
    /// Type of activations.
    pub(super) kind: Type,
    io: Io,
    states: Vec<State>,
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
}

impl Lowering {
    /// For the plan's states and memory, with activations of type `kind`.
    pub fn new(mlx: Mlx, weights: Weights, kernels: Kernels, plan: &Plan, kind: Type) -> Lowering {
        Lowering { mlx, weights, kernels, kind, io: plan.io, states: plan.states.clone() }
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
            observer(r, i, &self.m.contiguous_copy(&value)?)?;
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
                let rows = match self.l.weights.table(m, &o, &dims, format, self.l.kind)? {
                    Matrix::Dense(table) => m.take(&table, &ids)?,
                    Matrix::Packed { codes, scales, biases, packing } => {
                        let biases = biases.map(|b| m.take(&b, &ids)).transpose()?;
                        m.dequantize(&m.take(&codes, &ids)?, &m.take(&scales, &ids)?, biases.as_ref(), packing)?
                    }
                };
                self.out(r, 4, &rows)
            }
            RmsNorm => {
                let w = self.l.weights.norm(m, r.operand(1), n(2), real(4), self.l.kind)?;
                let y = m.rms_norm(&self.input(r, 0)?, &w, real(3))?;
                self.out(r, 2, &y)
            }
            AddRmsNorm => {
                let sum = m.add(&self.input(r, 0)?, &self.input(r, 1)?)?;
                let w = self.l.weights.norm(m, r.operand(2), n(2), real(4), self.l.kind)?;
                let y = m.rms_norm(&sum, &w, real(3))?;
                self.out(r, 3, &sum)?;
                self.out(r, 4, &y)
            }
            Add => {
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
                self.out(r, 1, &y)
            }
            SiluMul => {
                let x = self.input(r, 0)?;
                let y = m.mul(&m.mul(&x, &m.sigmoid(&x)?)?, &self.input(r, 1)?)?;
                self.out(r, 2, &y)
            }
            SigmoidMul => {
                let y = m.mul(&m.sigmoid(&self.input(r, 0)?)?, &self.input(r, 1)?)?;
                self.out(r, 2, &y)
            }
            MulRows => {
                let y = m.mul(&self.input(r, 0)?, &self.input(r, 1)?)?;
                self.out(r, 2, &y)
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
                let w = m.reshape(&self.input(r, 1)?, &shape([n(0), n(1), 1]))?;
                let y = m.sum(&m.mul(&self.input(r, 0)?, &w)?, 1)?;
                self.out(r, 2, &y)
            }
            Softmax => {
                let y = m.softmax(&self.wide(r, 0)?)?;
                self.keep(r, 1, &y)
            }
            TopK => {
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
            KvWrite => {
                let at = self.l.state_of(r.operand(1))?;
                let rows = m.transpose(&self.input(r, 0)?, &[1, 0, 2])?;
                let rows = m.astype(&rows, self.l.cache_type(r.operand(1).dtype))?;
                self.states[at] = m.write_at(&self.states[at], &rows, &self.position(r, 3)?, 1)?;
                Ok(())
            }
            Attention => self.attention(r),
            Conv | ConvSilu => self.convolution(r),
            L2Norm => {
                let x = self.wide(r, 0)?;
                let sum = m.reshape(&m.sum(&m.square(&x)?, -1)?, &shape([n(0), n(1), 1]))?;
                let inv = m.rsqrt(&m.add(&sum, &Array::scalar(real(3)))?)?;
                let y = m.mul(&m.mul(&x, &inv)?, &Array::scalar(real(4)))?;
                // Recurrences stay in f32.
                self.keep(r, 1, &y)
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
                self.keep(r, 4, &g)?;
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

    fn product(&self, x: &Array, o: &[Operand], dims: &[[u64; 3]], format: WeightFormat) -> Result<Array> {
        let m = self.m;
        let x = m.reshape(x, &[self.rows as i32, -1])?;
        match self.l.weights.matrix(m, o, dims, format, None, self.l.kind)? {
            Matrix::Dense(w) => m.matmul(&x, &w),
            Matrix::Packed { codes, scales, biases, packing } => {
                m.quantized_matmul(&x, &codes, &scales, biases.as_ref(), packing)
            }
        }
    }

    /// A product per slot with its expert's matrix. `order`, `weight` and `out` are operand indices.
    fn experts(&mut self, r: &Record<'_>, format: WeightFormat, order: usize, weight: usize, out: usize) -> Result<()> {
        let m = self.m;
        let [rows, k, count, inp, width] = [0, 1, 2, 3, 4].map(|i| r.attrs[i]);
        let x_slots = r.attrs[6];
        let (o, dims) = Self::operands(r, weight);
        let w = self.l.weights.matrix(m, &o, &dims, format, Some(count), self.l.kind)?;
        let ids = m.reshape(&self.values.whole(r.operand(order))?, &shape([rows, k, 1])[..2])?;
        let product = |x: &Array, ids: &Array, sorted: bool| match &w {
            Matrix::Dense(w) => m.gather_mm(x, w, ids, sorted),
            Matrix::Packed { codes, scales, biases, packing } => {
                m.gather_qmm(x, codes, scales, biases.as_ref(), ids, *packing, sorted)
            }
        };
        let x = self.input(r, 0)?;
        let slots = rows * k;
        if slots < SORT_SLOTS {
            let x = m.reshape(&x, &[rows as i32, x_slots as i32, 1, inp as i32])?;
            let y = m.reshape(&product(&x, &ids, false)?, &shape([rows, k, width]))?;
            return self.out(r, out, &y);
        }
        let flat = m.reshape(&ids, &[-1])?;
        let sorting = m.argsort(&flat)?;
        let back = m.argsort(&sorting)?;
        let source = match x_slots {
            1 => m.floor_divide(&sorting, &Array::from_slice(&[k as u32], &[1]))?,
            _ => sorting.clone(),
        };
        let x = m.take(&m.reshape(&x, &[-1, 1, inp as i32])?, &source)?;
        let y = product(&x, &m.take(&flat, &sorting)?, true)?;
        let y = m.take(&m.reshape(&y, &[-1, width as i32])?, &back)?;
        self.out(r, out, &y)
    }

    /// f32: rows of a table that is computed here exactly as the CPU computes it, for every position the caches hold. Halves:
    /// MLX's kernel will do it from the periods.
    fn rope_table(&mut self, r: &Record<'_>) -> Result<()> {
        let m = self.m;
        let half = r.attrs[1];
        let frequencies = self.l.weights.vector(m, r.operand(0), half)?;
        let mut inv = vec![0.0; half as usize];
        m.eval([&frequencies])?;
        frequencies.copy_to(&mut inv)?;
        let pos = self.position(r, 2)?;
        if self.l.kind != Type::F32 {
            let periods: Vec<f32> = inv.iter().map(|f| 1.0 / f).collect();
            self.ropes.push((r.operand(1), pos, Array::from_slice(&periods, &[half as i32])));
            return Ok(());
        }
        let positions = self.capacity() + self.rows;
        let mut table = Vec::with_capacity((positions * 2 * half) as usize);
        for p in 0..positions {
            table.extend(inv.iter().map(|&f| rope_angle(p, f).0));
            table.extend(inv.iter().map(|&f| rope_angle(p, f).1));
        }
        let table = Array::from_slice(&table, &shape([positions, 2 * half, 1])[..2]);
        let rows = m.slice_at(&table, &pos, 0, self.rows as i32)?;
        self.keep(r, 1, &rows)
    }

    /// Positions the caches have room for.
    fn capacity(&self) -> u64 {
        let caches = self.l.states.iter().zip(self.inputs.states).filter(|(s, _)| s.kind == StateKind::KvCache);
        caches.map(|(_, a)| a.shape()[1] as u64).max().unwrap_or(0)
    }

    fn rope(&mut self, r: &Record<'_>) -> Result<()> {
        let m = self.m;
        let [rows, heads, dim, half] = [0, 1, 2, 3].map(|i| r.attrs[i]);
        let x = self.input(r, 0)?;
        if let Some((_, pos, periods)) = self.ropes.iter().rev().find(|t| t.0.offset == r.operand(1).offset) {
            // [1, heads, rows, dim]: positions are the axis before the last.
            let x = m.reshape(&m.transpose(&x, &[1, 0, 2])?, &[1, heads as i32, rows as i32, dim as i32])?;
            let y = m.rope(&x, 2 * half as i32, pos, periods)?;
            let y = m.transpose(&m.reshape(&y, &shape([heads, rows, dim]))?, &[1, 0, 2])?;
            return self.out(r, 2, &y);
        }
        let table = m.reshape(&self.input(r, 1)?, &shape([rows, 1, 2 * half]))?;
        let part = |a: &Array, from: u64, to: u64| m.slice(a, 2, from as i32, to as i32);
        let (cos, sin) = (part(&table, 0, half)?, part(&table, half, 2 * half)?);
        let (a, b) = (part(&x, 0, half)?, part(&x, half, 2 * half)?);
        let first = m.sub(&m.mul(&a, &cos)?, &m.mul(&b, &sin)?)?;
        let second = m.add(&m.mul(&b, &cos)?, &m.mul(&a, &sin)?)?;
        let rest = (2 * half < dim).then(|| part(&x, 2 * half, dim)).transpose()?;
        let parts: Vec<&Array> = [&first, &second].into_iter().chain(&rest).collect();
        let y = m.concat(&parts, 2)?;
        self.out(r, 2, &y)
    }

    fn attention(&mut self, r: &Record<'_>) -> Result<()> {
        let m = self.m;
        let [rows, heads, _, dim] = [0, 1, 2, 3].map(|i| r.attrs[i]);
        let (scale, window) = (f32::from_bits(r.attrs[5] as u32), r.attrs[6]);
        let cache = |i: usize| {
            let state = &self.states[self.l.state_of(r.operand(i))?];
            let [kv, positions, dim] = state.shape()[..] else { return Err(missing("a cache of three extents")) };
            m.astype(&m.reshape(state, &[1, kv, positions, dim])?, self.l.kind)
        };
        let (keys, values) = (cache(1)?, cache(2)?);
        if rows == 1 {
            let q = m.reshape(&self.input(r, 0)?, &[heads as i32, dim as i32])?;
            let flat = |a: &Array| m.reshape(a, &a.shape()[1..]);
            let (k, v, last) = (flat(&keys)?, flat(&values)?, self.position(r, 4)?);
            if let Some(y) = self.l.kernels.attend(m, [&q, &k, &v], &last, scale, window as i32, self.l.kind)? {
                return self.out(r, 3, &y);
            }
        }
        let positions = keys.shape()[2];
        let column = m.arange(positions)?; // [positions]
        let row = m.add(&m.arange(rows as i32)?, &self.position(r, 4)?)?;
        let row = m.reshape(&row, &[rows as i32, 1])?;
        let mut visible = m.less_equal(&column, &row)?; // [rows, positions]
        if window > 0 {
            let first = m.sub(&row, &Array::int(window as i32))?;
            visible = m.and(&visible, &m.greater(&column, &first)?)?;
        }
        let q = m.transpose(&self.input(r, 0)?, &[1, 0, 2])?;
        let q = m.reshape(&q, &[1, heads as i32, rows as i32, dim as i32])?;
        let y = m.attention(&q, &keys, &values, scale, &visible)?;
        let y = m.transpose(&m.reshape(&y, &shape([heads, rows, dim]))?, &[1, 0, 2])?;
        self.out(r, 3, &y)
    }

    fn convolution(&mut self, r: &Record<'_>) -> Result<()> {
        let m = self.m;
        let [rows, heads, dim, kernel] = [0, 1, 2, 3].map(|i| r.attrs[i]);
        let channels = heads * dim;
        let x = m.reshape(&self.wide(r, 0)?, &shape([rows, channels, 1])[..2])?;
        let taps = self.l.weights.taps(m, r.operand(1), channels, kernel)?;
        let at = self.l.state_of(r.operand(2))?;
        let before = m.reshape(&self.states[at], &shape([kernel - 1, channels, 1])[..2])?;
        let history = m.concat(&[&before, &x], 0)?;
        let mut sum: Option<Array> = None;
        for t in 0..kernel {
            let term = m.mul(
                &m.slice(&history, 0, t as i32, (t + rows) as i32)?,
                &m.slice(&taps, 0, t as i32, t as i32 + 1)?,
            )?;
            sum = Some(match sum {
                None => term,
                Some(s) => m.add(&s, &term)?,
            });
        }
        let mut y = sum.ok_or_else(|| missing("a tap"))?;
        if r.kind == OpKind::ConvSilu {
            y = m.mul(&y, &m.sigmoid(&y)?)?;
        }
        // The last `kernel - 1` of the valid rows.
        let after = m.slice_at(&history, self.inputs.rows, 0, kernel as i32 - 1)?;
        self.states[at] = m.reshape(&after, &shape([kernel - 1, 1, channels]))?;
        // What follows is the recurrence and its norms, in f32.
        self.keep(r, 3, &y)
    }

    fn scan(&mut self, r: &Record<'_>) -> Result<()> {
        let m = self.m;
        let at = self.l.state_of(r.operand(5))?;
        let scan = Scan {
            q: self.wide(r, 0)?,
            k: self.wide(r, 1)?,
            v: self.wide(r, 2)?,
            log_decay: m.reshape(&self.wide(r, 3)?, &shape([r.attrs[0], r.attrs[2], 1])[..2])?,
            beta: m.reshape(&self.wide(r, 4)?, &shape([r.attrs[0], r.attrs[2], 1])[..2])?,
            state: self.states[at].clone(),
        };
        let (y, state) = if self.rows == 1 {
            match self.l.kernels.delta_step(m, &scan)? {
                Some(result) => result,
                None => delta::step(m, &scan)?,
            }
        } else {
            delta::chunked(m, &scan, self.inputs.rows)?
        };
        self.states[at] = state;
        self.out(r, 6, &y)
    }
}
