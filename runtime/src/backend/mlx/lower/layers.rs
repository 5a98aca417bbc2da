//! Lowering of the records that take more than a line: experts, positions, attention, convolution, recurrence.

use loaf_formats::dtype::WeightFormat;
use loaf_formats::op::OpKind;
use loaf_formats::plan::{Record, StateKind};

use super::super::array::{Array, Result, Type};
use super::super::delta::{self, Scan};
use super::super::values::shape;
use super::super::weights::Matrix;
use super::{Trace, missing};
use crate::math::rope_angle;

/// Slots from which products with experts are taken sorted by expert: fewer are read one by one anyway.
const SORT_SLOTS: u64 = 64;

impl Trace<'_> {
    /// A product per slot with its expert's matrix. `order`, `weight` and `out` are operand indices.
    pub(super) fn experts(
        &mut self,
        r: &Record<'_>,
        format: WeightFormat,
        order: usize,
        weight: usize,
        out: usize,
    ) -> Result<()> {
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
    pub(super) fn rope_table(&mut self, r: &Record<'_>) -> Result<()> {
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
    pub(super) fn capacity(&self) -> u64 {
        let caches = self.l.states.iter().zip(self.inputs.states).filter(|(s, _)| s.kind == StateKind::KvCache);
        caches.map(|(_, a)| a.shape()[1] as u64).max().unwrap_or(0)
    }

    pub(super) fn rope(&mut self, r: &Record<'_>) -> Result<()> {
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

    pub(super) fn attention(&mut self, r: &Record<'_>) -> Result<()> {
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

    pub(super) fn convolution(&mut self, r: &Record<'_>) -> Result<()> {
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

    pub(super) fn scan(&mut self, r: &Record<'_>) -> Result<()> {
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
