//! Lowering of the records that take more than a line: experts, gates, positions, attention,
//! convolution, recurrence.

use loaf_formats::dtype::WEIGHT_PLANES;
use loaf_formats::op::{OpAttrs, OpKind, attention, conv, expert_linear_quant, gdn_scan, kv_write, rope, rope_table};
use loaf_formats::plan::StateKind;
use loaf_kernels::math::rope_angle;

use super::super::array::{Array, MlxError, Result, Type};
use super::super::delta::{self, Scan};
use super::super::device::Device;
use super::super::kernels::Attend;
use super::super::values::shape;
use super::super::weights::Matrix;
use super::{Op, Planes, Trace, missing};

/// Slots from which products with experts are taken sorted by expert: fewer are read one by one
/// anyway.
const SORT_SLOTS: u64 = 64;
/// Most slots of one row that are computed as vectors at once.
const QMV_SLOTS: usize = 7;

impl Trace<'_> {
    /// A product per slot with its expert's matrix. `x`, `order`, `weight` and `out` are operand
    /// indices.
    pub(super) fn experts(
        &mut self,
        r: &Op<'_>,
        x: usize,
        order: usize,
        weight: [usize; WEIGHT_PLANES],
        out: usize,
    ) -> Result<()> {
        let m = self.m;
        // Dense and quantised ones have the same attributes.
        let a = expert_linear_quant::Attrs::of(r.attrs);
        let [rows, k, count, inp, width, x_slots] =
            [a.rows, a.k, a.experts, a.inputs, a.outputs, a.x_slots].map(|n| n as u64);
        let (format, Planes { operands: o, dims }) = (a.format, self.planes(r, weight)?);
        // MLX's CPU device multiplies gathered matrices in f32 alone.
        let dense = format.group().is_none();
        let kind = if dense && self.l.kernels.device() == Device::Cpu { Type::F32 } else { self.l.kind };
        let w = self.l.weights.matrix(m, &o, &dims, format, Some(count), kind)?;
        let ids = m.reshape(&self.values.whole(r.value(order)?)?, &shape([rows, k, 1])[..2])?;
        let product = |x: &Array, from: Option<&Array>, ids: &Array| match &w {
            Matrix::Dense(w) => m.gather_mm(x, w, ids, from.is_none()),
            Matrix::Packed { codes, scales, biases, packing } => {
                m.gather_qmm(x, codes, scales, biases.as_ref(), from, ids, *packing, from.is_none())
            }
        };
        let x = if dense { m.astype(&self.input(r, x)?, kind)? } else { self.input(r, x)? };
        let slots = rows * k;
        if slots < SORT_SLOTS {
            let x = m.reshape(&x, &[rows as i32, x_slots as i32, 1, inp as i32])?;
            // The rows of `x` are named, or MLX would make and copy their numbers at every call.
            let from: Vec<u32> = (0..slots as u32).map(|s| if x_slots == 1 { s / k as u32 } else { s }).collect();
            // Up to seven products MLX's CUDA device computes as vectors; for more it has a slow
            // kernel that it first compiles.
            let each =
                if rows == 1 && !dense && self.l.kernels.device() == Device::Cuda { QMV_SLOTS } else { k as usize };
            let mut parts = Vec::new();
            for (i, from) in from.chunks(each * rows as usize).enumerate() {
                let at = i * each;
                let ids = m.slice(&ids, 1, at as i32, (at + from.len() / rows as usize) as i32)?;
                parts.push(product(&x, Some(&Array::from_slice(from, &ids.shape())), &ids)?);
            }
            let y = m.concat(&parts.iter().collect::<Vec<_>>(), 1)?;
            let y = m.reshape(&y, &shape([rows, k, width]))?;
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
        let sorted = m.take(&flat, &sorting)?;
        let y = match &w {
            // In f32, for which MLX's CUDA device has no kernel of this kind at hand.
            Matrix::Packed { codes, scales, biases, packing }
                if self.l.kernels.device() == Device::Cuda && self.l.kind == Type::F32 =>
            {
                let w = m.dequantize(codes, scales, biases.as_ref(), *packing, Type::F32)?;
                m.gather_mm(&x, &m.transpose(&w, &[0, 2, 1])?, &sorted, true)?
            }
            _ => product(&x, None, &sorted)?,
        };
        let y = m.take(&m.reshape(&y, &[-1, width as i32])?, &back)?;
        self.out(r, out, &y)
    }

    /// Rows of a table that is computed here exactly as the CPU computes it, for every position the
    /// caches hold. Halves without kernels of ours: MLX's kernel will do it from the periods.
    pub(super) fn rope_table(&mut self, r: &Op<'_>) -> Result<()> {
        let m = self.m;
        let (half, o) = (rope_table::Attrs::of(r.attrs).half as u64, rope_table::Operands::indices());
        let pos = self.inputs.pos.clone();
        let frequencies = || {
            let mut inv = vec![0.0; half as usize];
            let frequencies = self.l.weights.vector(m, r.operand(o.inv_freq), half)?;
            m.eval([&frequencies])?;
            frequencies.copy_to(&mut inv)?;
            Ok(inv)
        };
        if self.l.kind != Type::F32 {
            let periods: Vec<f32> = frequencies()?.iter().map(|f| 1.0 / f).collect();
            self.ropes.push((r.value(o.out)?, pos.clone(), Array::from_slice(&periods, &[half as i32])));
            if !self.fused {
                return Ok(());
            }
        }
        let key = (self.capacity() + self.rows, r.operand(o.inv_freq).offset);
        let known = self.l.tables.borrow().get(&key).cloned();
        let table = match known {
            Some(table) => table,
            None => {
                let inv = frequencies()?;
                let mut table = Vec::with_capacity((key.0 * 2 * half) as usize);
                for p in 0..key.0 {
                    table.extend(inv.iter().map(|&f| rope_angle(p, f).0));
                    table.extend(inv.iter().map(|&f| rope_angle(p, f).1));
                }
                let table = Array::from_slice(&table, &shape([key.0, 2 * half, 1])[..2]);
                self.l.tables.borrow_mut().insert(key, table.clone());
                table
            }
        };
        let rows = m.slice_at(&table, &pos, 0, self.rows as i32)?;
        self.keep(r, o.out, &rows)
    }

    /// Positions the caches have room for.
    pub(super) fn capacity(&self) -> u64 {
        let caches = self.l.states.iter().zip(self.inputs.states).filter(|(s, _)| s.kind == StateKind::KvCache);
        caches.map(|(_, a)| a.shape()[1] as u64).max().unwrap_or(0)
    }

    pub(super) fn rope(&mut self, r: &Op<'_>) -> Result<()> {
        let m = self.m;
        let (a, o) = (rope::Attrs::of(r.attrs), rope::Operands::indices());
        let [rows, heads, dim, half] = [a.rows, a.heads, a.dim, a.half].map(|n| n as u64);
        let x = self.input(r, o.x)?;
        if let Some((_, pos, periods)) = self.ropes.iter().find(|t| Some(t.0) == r.source(o.table).value()) {
            // [1, heads, rows, dim]: positions are the axis before the last.
            let x = m.reshape(&m.transpose(&x, &[1, 0, 2])?, &[1, heads as i32, rows as i32, dim as i32])?;
            let y = m.rope(&x, 2 * half as i32, pos, periods)?;
            let y = m.transpose(&m.reshape(&y, &shape([heads, rows, dim]))?, &[1, 0, 2])?;
            return self.out(r, o.out, &y);
        }
        let table = m.reshape(&self.input(r, o.table)?, &shape([rows, 1, 2 * half]))?;
        let part = |a: &Array, from: u64, to: u64| m.slice(a, 2, from as i32, to as i32);
        let (cos, sin) = (part(&table, 0, half)?, part(&table, half, 2 * half)?);
        let (a, b) = (part(&x, 0, half)?, part(&x, half, 2 * half)?);
        let first = m.sub(&m.mul(&a, &cos)?, &m.mul(&b, &sin)?)?;
        let second = m.add(&m.mul(&b, &cos)?, &m.mul(&a, &sin)?)?;
        let rest = (2 * half < dim).then(|| part(&x, 2 * half, dim)).transpose()?;
        let parts: Vec<&Array> = [&first, &second].into_iter().chain(&rest).collect();
        let y = m.concat(&parts, 2)?;
        self.out(r, o.out, &y)
    }

    pub(super) fn write(&mut self, r: &Op<'_>) -> Result<()> {
        let m = self.m;
        let o = kv_write::Operands::indices();
        let at = r.state(o.cache)?;
        let rows = m.transpose(&self.input(r, o.x)?, &[1, 0, 2])?;
        let rows = m.astype(&rows, self.l.cache_type(r.operand(o.cache).dtype))?;
        self.states[at] = m.write_at(&self.states[at], &rows, self.inputs.pos, 1)?;
        Ok(())
    }

    /// Attention of queries `[rows, heads, dim]` over caches that hold the step's rows.
    pub(super) fn attention(&mut self, r: &Op<'_>, q: &Array) -> Result<()> {
        let m = self.m;
        let (a, o) = (attention::Attrs::of(r.attrs), attention::Operands::indices());
        let [rows, heads, dim, window] = [a.rows, a.heads, a.dim, a.window].map(|n| n as u64);
        let scale = a.scale;
        let caches = [r.state(o.k)?, r.state(o.v)?].map(|at| &self.states[at]);
        if rows == 1 {
            let (q, last) = (&m.reshape(q, &[heads as i32, dim as i32])?, self.inputs.pos);
            let attend = Attend { q, caches, last, scale, window: window as i32 };
            if let Some(y) = self.l.kernels.attend(m, &attend, self.l.kind)? {
                return self.out(r, o.out, &y);
            }
        }
        let [keys, values] = caches.map(|state| {
            let [kv, positions, dim] = state.shape()[..] else { return Err(missing("a cache of three extents")) };
            m.astype(&m.reshape(state, &[1, kv, positions, dim])?, self.l.kind)
        });
        let (keys, values) = (keys?, values?);
        let visible = self.visible(keys.shape()[2], [window, heads, dim])?;
        let mut q = m.reshape(&m.transpose(q, &[1, 0, 2])?, &[1, heads as i32, rows as i32, dim as i32])?;
        if self.cudnn(dim) {
            q = m.contiguous(&q)?;
        }
        let y = m.attention(&q, &keys, &values, scale, &visible)?;
        let y = m.transpose(&m.reshape(&y, &shape([heads, rows, dim]))?, &[1, 0, 2])?;
        self.out(r, o.out, &y)
    }

    /// Whether MLX gives an attention of many rows to cuDNN. That is handed nothing but arrays
    /// stored in their own order: queries by head, and a mask for every head. (With queries by row
    /// and one mask for all, a prefill in f16 came out wrong.)
    fn cudnn(&self, dim: u64) -> bool {
        let halves = self.l.kind != Type::F32 && self.l.kernels.device() == Device::Cuda;
        halves && self.rows > 1 && dim.is_multiple_of(8) && dim <= 128
    }

    /// The mask `[rows, positions]` of an attention, the same array for all layers: what is added
    /// to the scores on CUDA (MLX would make that of truth values, once per layer), else truth
    /// values.
    fn visible(&mut self, positions: i32, [window, heads, dim]: [u64; 3]) -> Result<Array> {
        let m = self.m;
        let key = [window, heads, dim];
        if let Some(mask) = self.masks.get(&key) {
            return Ok(mask.clone());
        }
        let column = m.arange(positions)?; // [positions]
        let row = m.add(&m.arange(self.rows as i32)?, self.inputs.pos)?;
        let row = m.reshape(&row, &[self.rows as i32, 1])?;
        let mut visible = m.less_equal(&column, &row)?;
        if window > 0 {
            let first = m.sub(&row, &Array::int(window as i32))?;
            visible = m.and(&visible, &m.greater(&column, &first)?)?;
        }
        if self.l.kernels.device() == Device::Cuda {
            let scores = m.select(&visible, &Array::scalar(0.0), &Array::scalar(f32::NEG_INFINITY))?;
            visible = m.astype(&scores, self.l.kind)?;
            if self.cudnn(dim) {
                visible = m.broadcast(&visible, &[1, heads as i32, self.rows as i32, positions])?;
                visible = m.contiguous(&visible)?;
            }
        }
        self.masks.insert(key, visible.clone());
        Ok(visible)
    }

    pub(super) fn convolution(&mut self, r: &Op<'_>) -> Result<()> {
        let m = self.m;
        // With silu and without, attributes and operands are the same.
        let (a, o) = (conv::Attrs::of(r.attrs), conv::Operands::indices());
        let [rows, channels, kernel] = [a.rows, a.heads * a.dim, a.kernel].map(|n| n as u64);
        if self.fused {
            let at = r.state(o.state)?;
            let taps = self.l.weights.taps(m, r.operand(o.weight), channels, kernel)?;
            let (x, silu) = (self.place(r, o.x)?, r.kind == OpKind::ConvSilu);
            let made = self.l.kernels.conv(m, &x, &taps, &self.states[at], self.inputs.rows, rows as i32, silu)?;
            if let Some([y, after]) = made {
                self.states[at] = after;
                return self.keep(r, o.out, &y);
            }
        }
        let x = m.reshape(&self.wide(r, o.x)?, &shape([rows, channels, 1])[..2])?;
        let taps = self.l.weights.taps(m, r.operand(o.weight), channels, kernel)?;
        let at = r.state(o.state)?;
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
        self.keep(r, o.out, &y)
    }

    /// A scan's operands, as records made them.
    pub(super) fn plain_scan(&self, r: &Op<'_>) -> Result<Scan> {
        let (a, o) = (gdn_scan::Attrs::of(r.attrs), gdn_scan::Operands::indices());
        let per_head = [a.rows as i32, a.v_heads as i32];
        Ok(Scan {
            q: self.wide(r, o.q)?,
            k: self.wide(r, o.k)?,
            v: self.wide(r, o.v)?,
            log_decay: self.m.reshape(&self.wide(r, o.decay)?, &per_head)?,
            beta: self.m.reshape(&self.wide(r, o.beta)?, &per_head)?,
            state: self.states[r.state(o.state)?].clone(),
        })
    }

    pub(super) fn scan(&mut self, r: &Op<'_>, scan: &Scan) -> Result<()> {
        let m = self.m;
        let (a, o) = (gdn_scan::Attrs::of(r.attrs), gdn_scan::Operands::indices());
        if a.tiled != 0 {
            return Err(MlxError(
                "expected value heads of a key head side by side, found them tiled; the CPU and CUDA take them"
                    .to_owned(),
            ));
        }
        let (y, state) = if self.rows == 1 {
            match self.l.kernels.delta_step(m, scan)? {
                Some(result) => result,
                None => delta::step(m, scan)?,
            }
        } else {
            delta::chunked(m, scan, self.inputs.rows)?
        };
        let at = r.state(o.state)?;
        self.states[at] = state;
        // A norm in f32 follows.
        self.keep(r, o.out, &y)
    }
}
