//! The contract in plain loops: each arm is the text of its [`OpKind`], an element at a time.
//!
//! Nothing here is shared with the fast kernels but the scalar functions of [`crate::math`]; that
//! is what makes it an oracle. It allocates freely, which the fast kernels never do.

use std::ops::Range;

use half::{bf16, f16};
use loaf_formats::block::{Block, TABLE};
use loaf_formats::dtype::{DType, WEIGHT_PLANES, WeightFormat};
use loaf_formats::op::{self, ATTENTION_BLOCK, LANES, OpAttrs, OpKind};

use super::work::expert_parts;
use super::{CONV_CHANNELS, DENSE_ROWS, OpCall, QUANT_ROWS, RawOperand, Run, attention};
use crate::math::{E2M1_DOUBLED, e4m3, e8m0, exp, rope_angle, sigmoid, silu, softplus};

type Planes = [RawOperand; WEIGHT_PLANES];

/// Element `(r, h, i)` of a float operand, widened.
unsafe fn get(o: &RawOperand, r: usize, h: usize, i: usize) -> f32 {
    // SAFETY: the caller stays in the operand's extent.
    unsafe {
        match o.dtype {
            DType::F16 => f16::from_bits(*o.at::<u16>(r, h).add(i)).to_f32(),
            DType::BF16 => bf16::from_bits(*o.at::<u16>(r, h).add(i)).to_f32(),
            _ => *o.at::<f32>(r, h).add(i),
        }
    }
}

unsafe fn set(o: &RawOperand, r: usize, h: usize, i: usize, value: f32) {
    // SAFETY: as `get`.
    unsafe { *o.at::<f32>(r, h).add(i) = value }
}

unsafe fn id(o: &RawOperand, r: usize, i: usize) -> u32 {
    // SAFETY: as `get`.
    unsafe { *o.at::<u32>(r, 0).add(i) }
}

unsafe fn row(o: &RawOperand, r: usize, h: usize, n: usize) -> Vec<f32> {
    // SAFETY: as `get`.
    (0..n).map(|i| unsafe { get(o, r, h, i) }).collect()
}

/// Folds accumulators in halves.
fn fold(mut a: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        (0..half).for_each(|j| a[j] += a[j + half]);
        half /= 2;
    }
    a[0]
}

fn lane_sum(t: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    for (i, x) in t.iter().enumerate() {
        acc[i % LANES] += x;
    }
    fold(acc)
}

fn lane_dot(x: &[f32], w: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    for i in 0..x.len().next_multiple_of(LANES) {
        let at = |v: &[f32]| v.get(i).copied().unwrap_or(0.0);
        acc[i % LANES] = at(x).mul_add(at(w), acc[i % LANES]);
    }
    fold(acc)
}

fn max(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Code `i` of row `o` of a packed weight.
unsafe fn code(weight: &RawOperand, o: usize, bits: usize, i: usize) -> u32 {
    let mut value = 0;
    for b in 0..bits {
        let p = i * bits + b;
        // SAFETY: bit `p` lies in the packed row.
        let word = unsafe { *weight.at::<u32>(o, 0).add(p / 32) };
        value |= (word >> (p % 32) & 1) << b;
    }
    value
}

/// Scale and bias of group `g` of row `o` in a block format, byte by byte.
unsafe fn block_params(block: Block, w: &Planes, o: usize, g: usize) -> (f32, f32) {
    // SAFETY: the caller stays in the operands' extents.
    let byte = |i: usize| unsafe { i32::from(*w[1].at::<u32>(o, 0).cast::<u8>().add(i)) };
    let of = 256 / block.group() as usize;
    let (b, j) = (g / of, g % of);
    // SAFETY: as above.
    let d = |i: usize, plane: usize| unsafe { get(&w[plane], o, 0, i) };
    let (scale, negative) = match block {
        Block::Q4_0 => (d(g, 1), 8.0),
        Block::Q5_0 => (d(g, 1), 16.0),
        Block::Q8_0 => (d(g, 1), 128.0),
        Block::Iq4Nl => (d(g, 1), 0.0),
        Block::Tq2 => (d(b, 1), 1.0),
        // SAFETY: as above.
        Block::Nvfp4Scaled => return (unsafe { e4m3(*w[1].at::<u8>(o, 0).add(g)) } * 0.5 * d(0, 2), 0.0),
        Block::Q6K => (d(b, 2) * (byte(16 * b + j) - 128) as f32, 32.0),
        Block::Iq4Xs => (d(b, 2) * (byte(8 * b + j) - 32) as f32, 0.0),
        Block::Q3K => {
            let low = byte(12 * b + j % 8) / if j < 8 { 1 } else { 16 } % 16;
            let high = byte(12 * b + 8 + j % 4) >> (2 * (j / 4)) & 3;
            (d(b, 2) * (low + 16 * high - 32) as f32, 4.0)
        }
        Block::Q2K => {
            let both = byte(16 * b + j);
            return (d(2 * b, 2) * (both % 16) as f32, -(d(2 * b + 1, 2) * (both / 16) as f32));
        }
        Block::Q4K | Block::Q5K => {
            let at = |i: usize| byte(12 * b + i);
            let (s, m) = match j {
                0..4 => (at(j) % 64, at(j + 4) % 64),
                _ => (at(j + 4) % 16 + at(j - 4) / 64 * 16, at(j + 4) / 16 + at(j) / 64 * 16),
            };
            return (d(2 * b, 2) * s as f32, -(d(2 * b + 1, 2) * m as f32));
        }
    };
    (scale, scale * -negative)
}

/// The integer that code `q` stands for, and whether groups have biases.
fn block_value(block: Block, q: u32) -> (i32, bool) {
    match block {
        Block::Iq4Nl | Block::Iq4Xs => (i32::from(TABLE[q as usize]), false),
        Block::Nvfp4Scaled => (i32::from(E2M1_DOUBLED[q as usize]), false),
        _ => (q as i32, true),
    }
}

/// Scale of group `g` of row `o` in the form the integer matmul multiplies with.
unsafe fn scale(format: WeightFormat, scales: &RawOperand, o: usize, g: usize) -> f32 {
    // SAFETY: the caller stays in the operand's extent.
    unsafe {
        match format {
            WeightFormat::Mxfp4 => e8m0(*scales.at::<u8>(o, 0).add(g)) * 0.5,
            WeightFormat::Nvfp4 => e4m3(*scales.at::<u8>(o, 0).add(g)) * 0.5,
            WeightFormat::Mxfp8 => e8m0(*scales.at::<u8>(o, 0).add(g)),
            _ => get(scales, o, 0, g),
        }
    }
}

/// Weight `(o, i)` as a float.
unsafe fn decode(format: WeightFormat, w: &Planes, o: usize, i: usize) -> f32 {
    let g = i / format.group().unwrap_or(1) as usize;
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        match format {
            WeightFormat::Dense(_) => get(&w[0], o, 0, i),
            WeightFormat::Affine { bits, .. } => {
                let q = code(&w[0], o, bits.into(), i) as f32;
                get(&w[1], o, 0, g).mul_add(q, get(&w[2], o, 0, g))
            }
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => {
                f32::from(E2M1_DOUBLED[code(&w[0], o, 4, i) as usize]) * scale(format, &w[1], o, g)
            }
            WeightFormat::Mxfp8 => e4m3(code(&w[0], o, 8, i) as u8) * scale(format, &w[1], o, g),
            WeightFormat::Block(block) => {
                let (scale, bias) = block_params(block, w, o, g);
                let (value, biased) = block_value(block, code(&w[0], o, block.bits() as usize, i));
                if biased { scale.mul_add(value as f32, bias) } else { scale * value as f32 }
            }
        }
    }
}

/// One output of `LinearDense`.
unsafe fn dense_dot(format: WeightFormat, x: &[f32], w: &Planes, o: usize) -> f32 {
    // SAFETY: the caller stays in the operands' extents.
    let w: Vec<f32> = (0..x.len()).map(|i| unsafe { decode(format, w, o, i) }).collect();
    lane_dot(x, &w)
}

/// One output of `LinearQuant`; `x` is codes, scales, sums.
unsafe fn quant_dot(
    format: WeightFormat,
    x: &[RawOperand; 3],
    at: (usize, usize),
    w: &Planes,
    o: usize,
    n: usize,
) -> f32 {
    let group = format.group().unwrap_or(1) as usize;
    let (r, h) = at;
    let mut acc = 0.0f32;
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        for g in 0..n / group {
            let mut d = 0i32;
            for i in g * group..(g + 1) * group {
                let q = match format {
                    WeightFormat::Affine { bits, .. } => code(&w[0], o, bits.into(), i) as i32,
                    WeightFormat::Block(block) => block_value(block, code(&w[0], o, block.bits() as usize, i)).0,
                    _ => E2M1_DOUBLED[code(&w[0], o, 4, i) as usize].into(),
                };
                d += q * i32::from(*x[0].at::<i8>(r, h).add(i));
            }
            if let WeightFormat::Block(block) = format {
                let (scale, bias) = block_params(block, w, o, g);
                acc = (scale * get(&x[1], r, h, g)).mul_add(d as f32, acc);
                if block_value(block, 0).1 {
                    acc = bias.mul_add(get(&x[2], r, h, g), acc);
                }
                continue;
            }
            acc = (scale(format, &w[1], o, g) * get(&x[1], r, h, g)).mul_add(d as f32, acc);
            if matches!(format, WeightFormat::Affine { .. }) {
                acc = get(&w[2], o, 0, g).mul_add(get(&x[2], r, h, g), acc);
            }
        }
    }
    acc
}

unsafe fn rms_norm(a: &op::rms_norm::Attrs, x: &[f32], weight: &RawOperand, out: &RawOperand, r: usize, h: usize) {
    let (eps, offset) = (a.eps, a.offset);
    let inv = 1.0 / (lane_dot(x, x) / x.len() as f32 + eps).sqrt();
    for i in 0..x.len() {
        // SAFETY: the caller stays in the operands' extents.
        unsafe { set(out, r, h, i, (x[i] * inv) * (offset + get(weight, 0, 0, i))) }
    }
}

unsafe fn quantize(x: &[f32], codes: *mut i8) -> (f32, f32) {
    let x: Vec<f32> = x.iter().map(|x| x.clamp(f32::MIN, f32::MAX)).collect();
    let m = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let mut sum = 0i32;
    for (i, x) in x.iter().enumerate() {
        let scaled = if m == 0.0 { 0.0 } else { x * (127.0 / m) };
        // `as` takes a NaN to 0.
        let code = scaled.round_ties_even().clamp(-127.0, 127.0) as i8;
        sum += i32::from(code);
        // SAFETY: the caller gives room for the group.
        unsafe { *codes.add(i) = code }
    }
    let scale = m / 127.0;
    (scale, scale * sum as f32)
}

unsafe fn attend(call: &OpCall<'_>, run: &Run, r: usize, h: usize) {
    let (a, o) = (op::attention::Attrs::of(call.attrs), op::attention::Operands::of(call.operands));
    let (dim, factor) = (a.dim, a.scale);
    let kvh = h / (a.heads / a.kv_heads);
    let position = run.pos + r - run.first;
    let first = if a.window == 0 { 0 } else { (position + 1).saturating_sub(a.window) };
    // SAFETY: the run's slot exists.
    let (q, out, k, v) = unsafe { (&o.q, &o.out, &o.k.offset(run.cache), &o.v.offset(run.cache)) };
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        let query = row(q, r, h, dim);
        let mut merged: Option<(f32, f32, Vec<f32>)> = None;
        for block in first / ATTENTION_BLOCK..=position / ATTENTION_BLOCK {
            let start = block * ATTENTION_BLOCK;
            let visible = first.max(start)..(position + 1).min(start + ATTENTION_BLOCK);
            let s: Vec<f32> = visible.clone().map(|j| lane_dot(&query, &row(k, j, kvh, dim)) * factor).collect();
            let m = max(&s);
            let mut p = vec![0.0; ATTENTION_BLOCK];
            let mut acc = vec![0.0f32; dim];
            for (j, s) in visible.zip(&s) {
                p[j - start] = exp(s - m);
                for i in 0..dim {
                    acc[i] = p[j - start].mul_add(get(v, j, kvh, i), acc[i]);
                }
            }
            let l = lane_sum(&p);
            merged = Some(match merged {
                None => (m, l, acc),
                Some((big_m, big_l, big_a)) => {
                    let new = big_m.max(m);
                    let (c, d) = (exp(big_m - new), exp(m - new));
                    (new, big_l.mul_add(c, l * d), big_a.iter().zip(&acc).map(|(a, x)| a.mul_add(c, x * d)).collect())
                }
            });
        }
        if let Some((_, l, a)) = merged {
            for i in 0..dim {
                set(out, r, h, i, a[i] / l);
            }
        }
    }
}

/// A run, a row at a time: what state each row reads and what it leaves.
fn rows_of(run: &Run) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..run.rows).map(|i| {
        let from = if i == 0 { run.from } else { run.to + (i - 1) * run.stride };
        (run.first + i, from, run.to + i * run.stride)
    })
}

unsafe fn conv(call: &OpCall<'_>, h: usize, i: usize) {
    let (a, o) = (op::conv::Attrs::of(call.attrs), op::conv::Operands::of(call.operands));
    let (kernel, c) = (a.kernel, h * a.dim + i);
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        for (r, from, to) in call.runs.iter().flat_map(rows_of) {
            let mut taps: Vec<f32> = (0..kernel - 1).map(|t| get(&o.state.offset(from), t, 0, c)).collect();
            taps.push(get(&o.x, r, h, i));
            let acc = (0..kernel).fold(0.0f32, |acc, t| get(&o.weight, c, 0, t).mul_add(taps[t], acc));
            set(&o.out, r, 0, c, if call.kind == OpKind::ConvSilu { silu(acc) } else { acc });
            for t in 0..kernel - 1 {
                set(&o.state.offset(to), t, 0, c, taps[t + 1]);
            }
        }
    }
}

unsafe fn gdn_scan(call: &OpCall<'_>, head: usize) {
    let (a, o) = (op::gdn_scan::Attrs::of(call.attrs), op::gdn_scan::Operands::of(call.operands));
    let (k_dim, key_head) = (a.k_dim, a.key_head(head));
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        for (t, from, to) in call.runs.iter().flat_map(rows_of) {
            let (q, k) = (row(&o.q, t, key_head, k_dim), row(&o.k, t, key_head, k_dim));
            let (decay, beta) = (get(&o.decay, t, 0, head), get(&o.beta, t, 0, head));
            for j in 0..a.v_dim {
                let s: Vec<f32> = (0..k_dim).map(|i| decay * get(&o.state.offset(from), head, i, j)).collect();
                let r = (0..k_dim).fold(0.0f32, |r, i| s[i].mul_add(k[i], r));
                let d = beta * (get(&o.v, t, head, j) - r);
                let mut out = 0.0f32;
                for i in 0..k_dim {
                    let s = k[i].mul_add(d, s[i]);
                    set(&o.state.offset(to), head, i, j, s);
                    out = s.mul_add(q[i], out);
                }
                set(&o.out, t, head, j, out);
            }
        }
    }
}

unsafe fn top_k(call: &OpCall<'_>, r: usize) {
    let (a, o) = (op::top_k::Attrs::of(call.attrs), op::top_k::Operands::of(call.operands));
    let (experts, k, renorm) = (a.experts, a.k, a.renorm != 0);
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        let p = row(&o.probs, r, 0, experts);
        let mut order: Vec<usize> = (0..experts).collect();
        // Stable, so ties stay in index order; a NaN goes last.
        order.sort_by(|&a, &b| match (p[a].is_nan(), p[b].is_nan()) {
            (false, false) => p[b].partial_cmp(&p[a]).unwrap_or(std::cmp::Ordering::Equal),
            (a, b) => a.cmp(&b),
        });
        let sum = order.iter().take(k).fold(0.0f32, |sum, &e| sum + p[e]);
        for j in 0..k {
            let (e, w) = order.get(j).map_or((0, 0.0), |&e| (e, p[e]));
            *o.ids.at::<u32>(r, 0).add(j) = e as u32;
            set(&o.weights, r, 0, j, if renorm { w / sum } else { w });
        }
    }
}

/// Runs one unit after another.
pub(super) unsafe fn run(call: &OpCall<'_>, units: Range<usize>, _scratch: &mut [u8]) {
    for unit in units {
        // SAFETY: the kernel's contract, and `unit` is below the op's unit count.
        unsafe { run_unit(call, unit) }
    }
}

unsafe fn run_unit(call: &OpCall<'_>, u: usize) {
    use OpKind::*;
    /// The op's attributes and operands, by name.
    macro_rules! of {
        ($op:ident) => {
            (op::$op::Attrs::of(call.attrs), op::$op::Operands::of(call.operands))
        };
    }
    macro_rules! binary {
        ($op:ident, $f:expr) => {{
            let ((a, o), f) = (of!($op), $f);
            let (r, h) = (u / a.heads, u % a.heads);
            (0..a.dim).for_each(|i| set(&o.out, r, h, i, f(get(&o.a, r, h, i), get(&o.b, r, h, i))))
        }};
    }
    macro_rules! unary {
        ($op:ident, $f:expr) => {{
            let ((a, o), f) = (of!($op), $f);
            let (r, h) = (u / a.heads, u % a.heads);
            (0..a.dim).for_each(|i| set(&o.out, r, h, i, f(get(&o.x, r, h, i))))
        }};
    }
    // SAFETY: the kernel's contract; every index below is under the extent the op table gives.
    unsafe {
        match call.kind {
            View | Linear | ExpertLinear => {}
            Embed => {
                let (a, o) = of!(embed);
                let token = (id(&o.ids, 0, u) as usize).min(a.vocab - 1);
                (0..a.dim).for_each(|i| set(&o.out, u, 0, i, decode(a.format, &o.table, token, i)));
            }
            RmsNorm => {
                let (a, o) = of!(rms_norm);
                let (r, h) = (u / a.heads, u % a.heads);
                rms_norm(&a, &row(&o.x, r, h, a.dim), &o.weight, &o.out, r, h);
            }
            AddRmsNorm => {
                let (a, o) = of!(add_rms_norm);
                let op::add_rms_norm::Attrs { rows, heads, dim, eps, offset } = a;
                let (r, h) = (u / heads, u % heads);
                let sum: Vec<f32> = (0..dim).map(|i| get(&o.a, r, h, i) + get(&o.b, r, h, i)).collect();
                (0..dim).for_each(|i| set(&o.sum, r, h, i, sum[i]));
                rms_norm(&op::rms_norm::Attrs { rows, heads, dim, eps, offset }, &sum, &o.weight, &o.out, r, h);
            }
            Add => binary!(add, |a, b| a + b),
            Mul => binary!(mul, |a, b| a * b),
            Silu => unary!(silu, silu),
            Sigmoid => unary!(sigmoid, sigmoid),
            SiluMul => binary!(silu_mul, |a, b| silu(a) * b),
            SigmoidMul => binary!(sigmoid_mul, |a, b| sigmoid(a) * b),
            MulRows => {
                let (a, o) = of!(mul_rows);
                (0..a.dim).for_each(|i| set(&o.out, u, 0, i, get(&o.x, u, 0, i) * get(&o.s, u, 0, 0)));
            }
            GatherRows => {
                let (a, o) = of!(gather_rows);
                let from = (id(&o.select, 0, u) as usize).min(a.of - 1);
                (0..a.dim).for_each(|i| set(&o.out, u, 0, i, get(&o.x, from, 0, i)));
            }
            Quantize => {
                let (a, o) = of!(quantize);
                let (r, h) = (u / a.heads, u % a.heads);
                for (g, x) in row(&o.x, r, h, a.dim).chunks(a.group).enumerate() {
                    let (scale, sum) = quantize(x, o.codes.at::<i8>(r, h).add(g * a.group));
                    set(&o.scales, r, h, g, scale);
                    set(&o.sums, r, h, g, sum);
                }
            }
            LinearDense => {
                let (a, o) = of!(linear_dense);
                for out in u * DENSE_ROWS..(u * DENSE_ROWS + DENSE_ROWS).min(a.outputs) {
                    for r in 0..a.rows {
                        set(&o.out, r, 0, out, dense_dot(a.format, &row(&o.x, r, 0, a.inputs), &o.weight, out));
                    }
                }
            }
            LinearQuant => {
                let (a, o) = of!(linear_quant);
                let x = [o.codes, o.xscales, o.xsums];
                for out in u * QUANT_ROWS..(u * QUANT_ROWS + QUANT_ROWS).min(a.outputs) {
                    for r in 0..a.rows {
                        set(&o.out, r, 0, out, quant_dot(a.format, &x, (r, 0), &o.weight, out, a.inputs));
                    }
                }
            }
            ExpertSort => {
                let (a, o) = of!(expert_sort);
                let last = a.experts as u32 - 1;
                let ids: Vec<u32> = (0..a.rows * a.k).map(|s| id(&o.ids, s / a.k, s % a.k).min(last)).collect();
                let mut order: Vec<u32> = (0..ids.len() as u32).collect();
                order.sort_by_key(|&s| ids[s as usize]);
                for (j, s) in order.iter().enumerate() {
                    *o.order.at::<u32>(0, 0).add(j) = *s;
                }
                for e in 0..=a.experts {
                    let before = ids.iter().filter(|&&i| (i as usize) < e).count();
                    *o.starts.at::<u32>(0, 0).add(e) = before as u32;
                }
            }
            ExpertLinearDense => {
                let (a, o) = of!(expert_linear_dense);
                for_slots(&o.order, &o.starts, (a.rows, a.k, a.experts), |_, e, r, slot| {
                    let w = o.weight.map(|plane| plane.expert(e));
                    let x = row(&o.x, r, slot.min(a.x_slots - 1), a.inputs);
                    for out in u * DENSE_ROWS..(u * DENSE_ROWS + DENSE_ROWS).min(a.outputs) {
                        set(&o.out, r, slot, out, dense_dot(a.format, &x, &w, out));
                    }
                });
            }
            ExpertLinearQuant => {
                let (a, o) = of!(expert_linear_quant);
                let x = [o.codes, o.xscales, o.xsums];
                // Where slots have units of their own: whose it is, by its place among all.
                let each = a.outputs.div_ceil(QUANT_ROWS);
                let are_parts = expert_parts(&op::expert_linear::Attrs::of(call.attrs)) > 1;
                let (part, u) = if are_parts { (Some(u / each), u % each) } else { (None, u) };
                for_slots(&o.order, &o.starts, (a.rows, a.k, a.experts), |place, e, r, slot| {
                    if part.is_some_and(|part| part != place) {
                        return;
                    }
                    let w = o.weight.map(|plane| plane.expert(e));
                    let from = (r, slot.min(a.x_slots - 1));
                    for out in u * QUANT_ROWS..(u * QUANT_ROWS + QUANT_ROWS).min(a.outputs) {
                        set(&o.out, r, slot, out, quant_dot(a.format, &x, from, &w, out, a.inputs));
                    }
                });
            }
            WeightedSum => {
                let (a, o) = of!(weighted_sum);
                for i in 0..a.dim {
                    let add = |acc, j| get(&o.y, u, j, i).mul_add(get(&o.w, u, 0, j), acc);
                    set(&o.out, u, 0, i, (0..a.k).fold(0.0f32, add));
                }
            }
            Softmax => {
                let (a, o) = of!(softmax);
                let x = row(&o.x, u, 0, a.dim);
                let m = max(&x);
                let e: Vec<f32> = x.iter().map(|x| exp(x - m)).collect();
                let sum = lane_sum(&e);
                (0..a.dim).for_each(|i| set(&o.out, u, 0, i, e[i] / sum));
            }
            TopK => top_k(call, u),
            RopeTable => {
                let (a, o) = of!(rope_table);
                let run = call.run_of(u);
                for i in 0..a.half {
                    let (cos, sin) = rope_angle((run.pos + u - run.first) as u64, get(&o.inv_freq, 0, 0, i));
                    set(&o.out, u, 0, i, cos);
                    set(&o.out, u, 0, a.half + i, sin);
                }
            }
            Rope => {
                let (a, o) = of!(rope);
                let (r, h, half) = (u / a.heads, u % a.heads, a.half);
                let x = row(&o.x, r, h, a.dim);
                for i in 0..half {
                    let (c, s) = (get(&o.table, r, 0, i), get(&o.table, r, 0, half + i));
                    set(&o.out, r, h, i, x[i].mul_add(c, -(x[i + half] * s)));
                    set(&o.out, r, h, i + half, x[i + half].mul_add(c, x[i] * s));
                }
                (2 * half..a.dim).for_each(|i| set(&o.out, r, h, i, x[i]));
            }
            KvWrite => {
                let (a, o) = of!(kv_write);
                let (r, h) = (u / a.heads, u % a.heads);
                let run = call.run_of(r);
                let (cache, position) = (o.cache.offset(run.cache), run.pos + r - run.first);
                for i in 0..a.dim {
                    let x = get(&o.x, r, h, i);
                    match cache.dtype {
                        DType::F16 => *cache.at::<u16>(position, h).add(i) = f16::from_f32(x).to_bits(),
                        _ => set(&cache, position, h, i, x),
                    }
                }
            }
            Attention => {
                let (a, _) = of!(attention);
                let (mut u, tile_rows, group) = (u, attention::tile_rows(&a), a.heads / a.kv_heads);
                for run in call.runs {
                    let (units, tiles) = (attention::run_units(&a, run), run.rows.div_ceil(tile_rows));
                    if u >= units {
                        u -= units;
                        continue;
                    }
                    let (kvh, tile) = (u / tiles, u % tiles);
                    for r in tile * tile_rows..((tile + 1) * tile_rows).min(run.rows) {
                        (kvh * group..(kvh + 1) * group).for_each(|h| attend(call, run, run.first + r, h));
                    }
                    return;
                }
            }
            Conv | ConvSilu => {
                let (a, _) = of!(conv);
                let chunks = a.dim.div_ceil(CONV_CHANNELS);
                let (h, start) = (u / chunks, u % chunks * CONV_CHANNELS);
                (start..(start + CONV_CHANNELS).min(a.dim)).for_each(|i| conv(call, h, i));
            }
            L2Norm => {
                let (a, o) = of!(l2_norm);
                let (r, h) = (u / a.heads, u % a.heads);
                let x = row(&o.x, r, h, a.dim);
                let inv = 1.0 / (lane_dot(&x, &x) + a.eps).sqrt();
                (0..a.dim).for_each(|i| set(&o.out, r, h, i, (x[i] * inv) * a.scale));
            }
            GdnGates => {
                let (a, o) = of!(gdn_gates);
                for c in 0..a.heads * a.dim {
                    let (h, i) = (c / a.dim, c % a.dim);
                    let (a_log, dt) = (get(&o.a_log, 0, 0, c), get(&o.dt_bias, 0, 0, c));
                    set(&o.decay, u, 0, c, exp(-(exp(a_log) * softplus(get(&o.a, u, h, i) + dt))));
                    set(&o.beta, u, 0, c, sigmoid(get(&o.b, u, h, i)));
                }
            }
            GdnScan => gdn_scan(call, u),
        }
    }
}

/// Calls `f` with each slot's place in the order of experts, its expert, its row and which of the
/// row's slots it is.
unsafe fn for_slots(
    order: &RawOperand,
    starts: &RawOperand,
    (rows, k, experts): (usize, usize, usize),
    f: impl Fn(usize, usize, usize, usize),
) {
    let slots = (rows * k) as u32;
    for e in 0..experts {
        // SAFETY: `experts + 1` starts, clamped to the slots there are, of each of which `order`
        // has one.
        unsafe {
            for j in id(starts, 0, e).min(slots)..id(starts, 0, e + 1).min(slots) {
                let s = id(order, 0, j as usize).min(slots - 1) as usize;
                f(j as usize, e, s / k, s % k);
            }
        }
    }
}
