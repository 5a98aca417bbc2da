//! The contract in plain loops: each arm is the text of its [`OpKind`], an element at a time.
//!
//! Nothing here is shared with the fast kernels but the scalar functions of [`crate::math`]; that is what makes
//! it an oracle. It allocates freely, which the fast kernels never do.

use std::ops::Range;

use half::{bf16, f16};
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{ATTENTION_BLOCK, OpKind};

use super::{CONV_CHANNELS, LANES, OpCall, QUANT_ROWS, RawOperand, tile_rows};
use crate::math::{E2M1_DOUBLED, e4m3, e8m0, exp, rope_angle, sigmoid, silu, softplus};

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

fn tree(a: [f32; 8]) -> f32 {
    ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
}

fn lane_sum(t: &[f32]) -> f32 {
    let mut acc = [0.0f32; 8];
    for (i, x) in t.iter().enumerate() {
        acc[i % 8] += x;
    }
    tree(acc)
}

fn lane_dot(x: &[f32], w: &[f32]) -> f32 {
    let mut acc = [0.0f32; 8];
    for i in 0..x.len().next_multiple_of(8) {
        let at = |v: &[f32]| v.get(i).copied().unwrap_or(0.0);
        acc[i % 8] = at(x).mul_add(at(w), acc[i % 8]);
    }
    tree(acc)
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
unsafe fn decode(format: WeightFormat, w: &[RawOperand], o: usize, i: usize) -> f32 {
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
        }
    }
}

/// One output of `LinearDense`.
unsafe fn dense_dot(format: WeightFormat, x: &[f32], w: &[RawOperand], o: usize) -> f32 {
    // SAFETY: the caller stays in the operands' extents.
    let w: Vec<f32> = (0..x.len()).map(|i| unsafe { decode(format, w, o, i) }).collect();
    lane_dot(x, &w)
}

/// One output of `LinearQuant`; `x` is codes, scales, sums.
unsafe fn quant_dot(
    format: WeightFormat,
    x: &[RawOperand],
    at: (usize, usize),
    w: &[RawOperand],
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
                    _ => E2M1_DOUBLED[code(&w[0], o, 4, i) as usize].into(),
                };
                d += q * i32::from(*x[0].at::<i8>(r, h).add(i));
            }
            acc = (scale(format, &w[1], o, g) * get(&x[1], r, h, g)).mul_add(d as f32, acc);
            if matches!(format, WeightFormat::Affine { .. }) {
                acc = get(&w[2], o, 0, g).mul_add(get(&x[2], r, h, g), acc);
            }
        }
    }
    acc
}

unsafe fn rms_norm(call: &OpCall<'_>, x: &[f32], weight: &RawOperand, out: &RawOperand, r: usize, h: usize) {
    let (eps, offset) = (call.real(3), call.real(4));
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

unsafe fn attention(call: &OpCall<'_>, r: usize, h: usize) {
    let (q, k, v, out) = (&call.operands[0], &call.operands[1], &call.operands[2], &call.operands[3]);
    let (heads, kv_heads, dim, pos) = (call.count(1), call.count(2), call.count(3), call.count(4));
    let (factor, window) = (call.real(5), call.count(6));
    let kvh = h / (heads / kv_heads);
    let position = pos + r;
    let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
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

unsafe fn conv(call: &OpCall<'_>, h: usize, i: usize) {
    let (x, weight, state, out) = (&call.operands[0], &call.operands[1], &call.operands[2], &call.operands[3]);
    let (rows, dim, kernel) = (call.count(0), call.count(2), call.count(3));
    let c = h * dim + i;
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        let mut history: Vec<f32> = (0..kernel - 1).map(|t| get(state, t, 0, c)).collect();
        history.extend((0..rows).map(|r| get(x, r, h, i)));
        for r in 0..rows {
            let acc = (0..kernel).fold(0.0f32, |acc, t| get(weight, c, 0, t).mul_add(history[r + t], acc));
            set(out, r, 0, c, if call.kind == OpKind::ConvSilu { silu(acc) } else { acc });
        }
        for t in 0..kernel - 1 {
            set(state, t, 0, c, history[rows + t]);
        }
    }
}

unsafe fn gdn_scan(call: &OpCall<'_>, head: usize) {
    let o = call.operands;
    let (rows, k_heads, v_heads, k_dim, v_dim) =
        (call.count(0), call.count(1), call.count(2), call.count(3), call.count(4));
    let key_head = head / (v_heads / k_heads);
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        for t in 0..rows {
            let (q, k) = (row(&o[0], t, key_head, k_dim), row(&o[1], t, key_head, k_dim));
            let (decay, beta) = (get(&o[3], t, 0, head), get(&o[4], t, 0, head));
            for j in 0..v_dim {
                let s: Vec<f32> = (0..k_dim).map(|i| decay * get(&o[5], head, i, j)).collect();
                let r = (0..k_dim).fold(0.0f32, |r, i| s[i].mul_add(k[i], r));
                let d = beta * (get(&o[2], t, head, j) - r);
                let mut out = 0.0f32;
                for i in 0..k_dim {
                    let s = k[i].mul_add(d, s[i]);
                    set(&o[5], head, i, j, s);
                    out = s.mul_add(q[i], out);
                }
                set(&o[6], t, head, j, out);
            }
        }
    }
}

unsafe fn top_k(call: &OpCall<'_>, r: usize) {
    let (experts, k, renorm) = (call.count(1), call.count(2), call.count(3) != 0);
    // SAFETY: the caller stays in the operands' extents.
    unsafe {
        let p = row(&call.operands[0], r, 0, experts);
        let mut order: Vec<usize> = (0..experts).collect();
        // Stable, so ties stay in index order; a NaN goes last.
        order.sort_by(|&a, &b| match (p[a].is_nan(), p[b].is_nan()) {
            (false, false) => p[b].partial_cmp(&p[a]).unwrap_or(std::cmp::Ordering::Equal),
            (a, b) => a.cmp(&b),
        });
        let sum = order.iter().take(k).fold(0.0f32, |sum, &e| sum + p[e]);
        for j in 0..k {
            let (e, w) = order.get(j).map_or((0, 0.0), |&e| (e, p[e]));
            *call.operands[1].at::<u32>(r, 0).add(j) = e as u32;
            set(&call.operands[2], r, 0, j, if renorm { w / sum } else { w });
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
    let o = call.operands;
    let n = |i: usize| call.count(i);
    let format = call.kind.spec().format_attr().and_then(|i| WeightFormat::from_code(call.attrs[i]));
    let format = format.unwrap_or(WeightFormat::Dense(DType::F32));
    let (r, h) = (u / n(1).max(1), u % n(1).max(1));
    let binary = |f: fn(f32, f32) -> f32| {
        for i in 0..n(2) {
            // SAFETY: `(r, h, i)` lies in all three operands.
            unsafe { set(&o[2], r, h, i, f(get(&o[0], r, h, i), get(&o[1], r, h, i))) }
        }
    };
    let unary = |f: fn(f32) -> f32| {
        for i in 0..n(2) {
            // SAFETY: as above.
            unsafe { set(&o[1], r, h, i, f(get(&o[0], r, h, i))) }
        }
    };
    // SAFETY: the kernel's contract; every index below is under the extent the op table gives.
    unsafe {
        match call.kind {
            View | Linear | ExpertLinear => {}
            Embed => {
                let token = (id(&o[0], 0, u) as usize).min(n(1) - 1);
                (0..n(2)).for_each(|i| set(&o[4], u, 0, i, decode(format, &o[1..4], token, i)));
            }
            RmsNorm => rms_norm(call, &row(&o[0], r, h, n(2)), &o[1], &o[2], r, h),
            AddRmsNorm => {
                let sum: Vec<f32> = (0..n(2)).map(|i| get(&o[0], r, h, i) + get(&o[1], r, h, i)).collect();
                (0..n(2)).for_each(|i| set(&o[3], r, h, i, sum[i]));
                rms_norm(call, &sum, &o[2], &o[4], r, h);
            }
            Add => binary(|a, b| a + b),
            Mul => binary(|a, b| a * b),
            Silu => unary(silu),
            Sigmoid => unary(sigmoid),
            SiluMul => binary(|a, b| silu(a) * b),
            SigmoidMul => binary(|a, b| sigmoid(a) * b),
            MulRows => (0..n(1)).for_each(|i| set(&o[2], u, 0, i, get(&o[0], u, 0, i) * get(&o[1], u, 0, 0))),
            SelectRows => (0..n(1)).for_each(|i| set(&o[1], u, 0, i, get(&o[0], n(2) + u, 0, i))),
            Quantize => {
                let x = row(&o[0], r, h, n(2));
                for (g, x) in x.chunks(n(3)).enumerate() {
                    let (scale, sum) = quantize(x, o[1].at::<i8>(r, h).add(g * n(3)));
                    set(&o[2], r, h, g, scale);
                    set(&o[3], r, h, g, sum);
                }
            }
            LinearDense => {
                for out in u * LANES..(u * LANES + LANES).min(n(2)) {
                    for r in 0..n(0) {
                        set(&o[3], r, 0, out, dense_dot(format, &row(&o[0], r, 0, n(1)), &o[1..3], out));
                    }
                }
            }
            LinearQuant => {
                for out in u * QUANT_ROWS..(u * QUANT_ROWS + QUANT_ROWS).min(n(2)) {
                    for r in 0..n(0) {
                        set(&o[6], r, 0, out, quant_dot(format, &o[..3], (r, 0), &o[3..6], out, n(1)));
                    }
                }
            }
            ExpertSort => {
                let ids: Vec<u32> =
                    (0..n(0) * n(1)).map(|s| id(&o[0], s / n(1), s % n(1)).min(n(2) as u32 - 1)).collect();
                let mut order: Vec<u32> = (0..ids.len() as u32).collect();
                order.sort_by_key(|&s| ids[s as usize]);
                for (j, s) in order.iter().enumerate() {
                    *o[1].at::<u32>(0, 0).add(j) = *s;
                }
                for e in 0..=n(2) {
                    *o[2].at::<u32>(0, 0).add(e) = ids.iter().filter(|&&i| (i as usize) < e).count() as u32;
                }
            }
            ExpertLinearDense | ExpertLinearQuant => {
                let quant = call.kind == ExpertLinearQuant;
                let (x, unit) = if quant { (3, QUANT_ROWS) } else { (1, LANES) };
                let (order, starts, result) = (&o[x], &o[x + 1], &o[o.len() - 1]);
                let (k, out_dim, slots) = (n(1), n(4), (n(0) * n(1)) as u32);
                for e in 0..n(2) {
                    for j in id(starts, 0, e).min(slots)..id(starts, 0, e + 1).min(slots) {
                        let s = id(order, 0, j as usize).min(slots - 1) as usize;
                        let (r, slot) = (s / k, s % k);
                        let from = if n(6) == 1 { (r, 0) } else { (r, slot) };
                        for out in u * unit..(u * unit + unit).min(out_dim) {
                            let w = e * out_dim + out;
                            let value = if quant {
                                quant_dot(format, &o[..3], from, &o[5..8], w, n(3))
                            } else {
                                dense_dot(format, &row(&o[0], from.0, from.1, n(3)), &o[3..5], w)
                            };
                            set(result, r, slot, out, value);
                        }
                    }
                }
            }
            WeightedSum => {
                for i in 0..n(2) {
                    let acc = (0..n(1)).fold(0.0f32, |acc, j| get(&o[0], u, j, i).mul_add(get(&o[1], u, 0, j), acc));
                    set(&o[2], u, 0, i, acc);
                }
            }
            Softmax => {
                let x = row(&o[0], u, 0, n(1));
                let m = max(&x);
                let e: Vec<f32> = x.iter().map(|x| exp(x - m)).collect();
                let sum = lane_sum(&e);
                (0..n(1)).for_each(|i| set(&o[1], u, 0, i, e[i] / sum));
            }
            TopK => top_k(call, u),
            RopeTable => {
                for i in 0..n(1) {
                    let (cos, sin) = rope_angle(call.attrs[2].wrapping_add(u as u64), get(&o[0], 0, 0, i));
                    set(&o[1], u, 0, i, cos);
                    set(&o[1], u, 0, n(1) + i, sin);
                }
            }
            Rope => {
                let (x, half) = (row(&o[0], r, h, n(2)), n(3));
                for i in 0..half {
                    let (c, s) = (get(&o[1], r, 0, i), get(&o[1], r, 0, half + i));
                    set(&o[2], r, h, i, x[i].mul_add(c, -(x[i + half] * s)));
                    set(&o[2], r, h, i + half, x[i + half].mul_add(c, x[i] * s));
                }
                (2 * half..n(2)).for_each(|i| set(&o[2], r, h, i, x[i]));
            }
            KvWrite => {
                for i in 0..n(2) {
                    let x = get(&o[0], r, h, i);
                    match o[1].dtype {
                        DType::F16 => *o[1].at::<u16>(n(3) + r, h).add(i) = f16::from_f32(x).to_bits(),
                        _ => set(&o[1], n(3) + r, h, i, x),
                    }
                }
            }
            Attention => {
                let tile_rows = tile_rows(call.attrs);
                let tiles = n(0).div_ceil(tile_rows);
                let (kvh, tile, group) = (u / tiles, u % tiles, n(1) / n(2));
                for r in tile * tile_rows..((tile + 1) * tile_rows).min(n(0)) {
                    (kvh * group..(kvh + 1) * group).for_each(|h| attention(call, r, h));
                }
            }
            Conv | ConvSilu => {
                let chunks = n(2).div_ceil(CONV_CHANNELS);
                let (h, start) = (u / chunks, u % chunks * CONV_CHANNELS);
                (start..(start + CONV_CHANNELS).min(n(2))).for_each(|i| conv(call, h, i));
            }
            L2Norm => {
                let x = row(&o[0], r, h, n(2));
                let inv = 1.0 / (lane_dot(&x, &x) + call.real(3)).sqrt();
                (0..n(2)).for_each(|i| set(&o[1], r, h, i, (x[i] * inv) * call.real(4)));
            }
            GdnGates => {
                for c in 0..n(1) * n(2) {
                    let (h, i) = (c / n(2), c % n(2));
                    let (a_log, dt) = (get(&o[2], 0, 0, c), get(&o[3], 0, 0, c));
                    set(&o[4], u, 0, c, exp(-(exp(a_log) * softplus(get(&o[0], u, h, i) + dt))));
                    set(&o[5], u, 0, c, sigmoid(get(&o[1], u, h, i)));
                }
            }
            GdnScan => gdn_scan(call, u),
        }
    }
}
