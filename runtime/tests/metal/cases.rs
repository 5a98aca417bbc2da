//! Launches of every kernel, with sizes that fill no block and no warp, and what they are to
//! compute: in f64, from the definitions alone.

use loaf_runtime::backend::mlx_text::{Grid, Source, attention, delta, rows};

use crate::program::{Case, Data, Kind};

/// Numbers in [-1, 1) that depend on the seed alone, as the type holds them.
fn numbers(seed: u64, kind: Kind, shape: &[i32]) -> Data {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        kind.round((x >> 40) as f64 / f64::from(1u32 << 23) - 1.0)
    };
    let n = shape.iter().product::<i32>() as usize;
    next();
    Data { kind, shape: shape.to_vec(), values: (0..n).map(|_| next()).collect() }
}

fn ints(kind: Kind, values: &[i32]) -> Data {
    Data { kind, shape: vec![values.len() as i32], values: values.iter().map(|x| f64::from(*x)).collect() }
}

/// Numbers as they are: what a result should be, before it is rounded.
fn result(kind: Kind, values: Vec<f64>) -> Data {
    Data { kind, shape: vec![values.len() as i32], values }
}

/// A view: row `r` of `width` elements has heads of `dim` from `at` on, `stride` apart.
#[derive(Clone, Copy)]
struct View {
    width: i32,
    at: i32,
    heads: i32,
    dim: i32,
    stride: i32,
}

impl View {
    fn new([width, at, heads, dim, stride]: [i32; 5]) -> View {
        View { width, at, heads, dim, stride }
    }

    fn get(&self, data: &Data, row: i32, e: i32) -> f64 {
        data.values[(row * self.width + self.at + e / self.dim * self.stride + e % self.dim) as usize]
    }

    fn sizes(&self, name: &str) -> Vec<(String, i32)> {
        let parts = [("W", self.width), ("A", self.at), ("D", self.dim), ("S", self.stride)];
        parts.map(|(part, n)| (format!("{name}_{part}"), n)).to_vec()
    }
}

fn bits(x: f32) -> i32 {
    x.to_bits() as i32
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn case(
    name: &str,
    source: &'static Source,
    grid: Grid,
    sizes: &[(&str, i32)],
    views: Vec<Vec<(String, i32)>>,
    inputs: Vec<Data>,
    outputs: Vec<Data>,
) -> Case {
    let sizes = sizes.iter().map(|(name, n)| ((*name).to_owned(), *n)).chain(views.into_iter().flatten()).collect();
    let name = format!("{}, {name}", source.name.to_str().expect("ASCII"));
    Case { name, source, text: source.metal(), grid, sizes, inputs, outputs, written: Vec::new() }
}

fn embed(bits: i32, group: i32, dim: i32, kind: Kind) -> Case {
    let (table, ids) = (7, [6, 0, 3, 3, 5]);
    let words = dim * bits / 32;
    let mut codes = numbers(1, Kind::F32, &[table, words]);
    codes.kind = Kind::U32;
    let mixed = |x: u32| (x.wrapping_mul(0x9e37_79b9) >> 16) ^ x.wrapping_mul(0x85eb_ca6b);
    codes.values.iter_mut().for_each(|x| *x = f64::from(mixed((*x as f32).to_bits())));
    let (scales, biases) = (numbers(2, kind, &[table, dim / group]), numbers(3, kind, &[table, dim / group]));
    let mut want = Vec::new();
    for id in ids {
        for e in 0..dim {
            // Bit by bit.
            let code: u32 = (0..bits)
                .map(|b| {
                    let at = e * bits + b;
                    let word = codes.values[(id * words + at / 32) as usize] as u32;
                    ((word >> (at % 32)) & 1) << b
                })
                .sum();
            let of = (id * (dim / group) + e / group) as usize;
            want.push(scales.values[of] * f64::from(code) + biases.values[of]);
        }
    }
    let inputs = vec![ints(Kind::U32, &ids), codes, scales, biases];
    let sizes = [("D", dim), ("BITS", bits), ("G", group)];
    let grid = rows::embed_grid(5, dim);
    case(&format!("{bits} bits"), &rows::EMBED, grid, &sizes, vec![], inputs, vec![result(kind, want)])
}

fn add_norm(n: i32, dim: i32, kind: Kind) -> Case {
    let [left, right] = [4, 5].map(|seed| numbers(seed, kind, &[n, dim]));
    let (weight, eps) = (numbers(6, kind, &[dim]), 1e-3);
    let total: Vec<f64> = left.values.iter().zip(&right.values).map(|(a, b)| kind.round(a + b)).collect();
    let mut want = Vec::new();
    for row in total.chunks(dim as usize) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / f64::from(dim);
        want.extend(row.iter().zip(&weight.values).map(|(x, w)| x / (mean + f64::from(eps)).sqrt() * w));
    }
    let outputs = vec![result(kind, total), result(kind, want)];
    let (sizes, inputs) = ([("D", dim), ("EPS", bits(eps))], vec![left, right, weight]);
    case(&format!("{n} rows of {dim}"), &rows::ADD_NORM, rows::add_norm_grid(n), &sizes, vec![], inputs, outputs)
}

fn gate(act: i32, kind: Kind) -> Case {
    let (n, a, b) = (5, View::new([40, 2, 3, 12, 13]), View::new([37, 1, 3, 12, 12]));
    let (left, right) = (numbers(7, kind, &[n, a.width]), numbers(8, kind, &[n, b.width]));
    let each = a.heads * a.dim;
    let open = |x: f64| if act == 1 { sigmoid(x) } else { silu(x) };
    let want = (0..n * each).map(|i| open(a.get(&left, i / each, i % each)) * b.get(&right, i / each, i % each));
    let outputs = vec![result(kind, want.collect())];
    let (sizes, views) = ([("N", each), ("ACT", act)], vec![a.sizes("a"), b.sizes("b")]);
    let name = if act == 1 { "sigmoid" } else { "silu" };
    case(name, &rows::GATE, rows::gate_grid(n, each), &sizes, views, vec![left, right], outputs)
}

fn norm_gate(dim: i32, kind: Kind) -> Case {
    let (n, heads, eps) = (5, 3, 1e-3);
    let (a, b) =
        (View::new([heads * dim + 4, 2, heads, dim, dim]), View::new([heads * (dim + 1), 0, heads, dim, dim + 1]));
    let (left, right) = (numbers(9, kind, &[n, a.width]), numbers(10, kind, &[n, b.width]));
    let weight = numbers(11, kind, &[dim]);
    let mut want = Vec::new();
    for row in 0..n {
        for head in 0..heads {
            let at = |e: i32| b.get(&right, row, head * dim + e);
            let mean = (0..dim).map(|e| at(e) * at(e)).sum::<f64>() / f64::from(dim);
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            let out = |e: i32| silu(a.get(&left, row, head * dim + e)) * at(e) * scale * weight.values[e as usize];
            want.extend((0..dim).map(out));
        }
    }
    let (sizes, views) = ([("H", heads), ("D", dim), ("EPS", bits(eps))], vec![a.sizes("a"), b.sizes("b")]);
    let (grid, outputs) = (rows::norm_gate_grid(n, heads), vec![result(kind, want)]);
    case(&format!("heads of {dim}"), &rows::NORM_GATE, grid, &sizes, views, vec![left, right, weight], outputs)
}

fn top_k(experts: i32, k: i32, renorm: bool, ties: bool) -> Case {
    let (n, view) = (3, View::new([experts + 4, 3, 1, experts, experts]));
    let mut scores = numbers(12, Kind::F16, &[n, view.width]);
    if ties {
        scores.values.iter_mut().for_each(|x| *x = (*x * 4.0).round());
    }
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in 0..n {
        let of = |e: i32| view.get(&scores, row, e).exp();
        let total: f64 = (0..experts).map(of).sum();
        let mut order: Vec<i32> = (0..experts).collect();
        // A stable sort: ties stay in the order of their numbers.
        order.sort_by(|a, b| of(*b).total_cmp(&of(*a)));
        let kept = &order[..k as usize];
        let sum: f64 = kept.iter().map(|e| of(*e)).sum();
        ids.extend(kept.iter().map(|e| f64::from(*e)));
        weights.extend(kept.iter().map(|e| of(*e) / if renorm { sum } else { total }));
    }
    let sizes = [("E", experts), ("K", k), ("RENORM", i32::from(renorm))];
    let outputs = vec![result(Kind::U32, ids), result(Kind::F32, weights)];
    let name = format!("{k} of {experts}{}", if ties { ", equal scores" } else { "" });
    case(&name, &rows::TOP_K, rows::top_k_grid(n), &sizes, vec![view.sizes("scores")], vec![scores], outputs)
}

fn mix(n: i32, shared: bool, kind: Kind) -> Case {
    let (k, dim, view) = (5, 50, View::new([9, 8, 1, 1, 1]));
    let (slots, weights) = (numbers(13, kind, &[n, k, dim]), numbers(14, Kind::F32, &[n, k]));
    let (row, open) = (numbers(15, kind, &[n, dim]), numbers(16, kind, &[n, view.width]));
    let of = |i: i32| {
        let (r, e) = (i / dim, i % dim);
        let slot = |j: i32| slots.values[((r * k + j) * dim + e) as usize] * weights.values[(r * k + j) as usize];
        let more = row.values[i as usize] * sigmoid(view.get(&open, r, 0));
        (0..k).map(slot).sum::<f64>() + if shared { more } else { 0.0 }
    };
    let outputs = vec![result(kind, (0..n * dim).map(of).collect())];
    let sizes = [("K", k), ("D", dim), ("SHARED", i32::from(shared))];
    let inputs = vec![slots, weights, row, open];
    let name = format!("{n} rows{}", if shared { ", a shared expert" } else { "" });
    case(&name, &rows::MIX, rows::mix_grid(n, dim), &sizes, vec![view.sizes("open")], inputs, outputs)
}

/// The parts of logits that blocks find: best, place, most, total.
fn parts_of(logits: &Data, known: i32) -> [Vec<f64>; 4] {
    let mut parts: [Vec<f64>; 4] = Default::default();
    for block in 0..rows::SCANS {
        let none = f64::from(-3.3e38f32);
        let (mut best, mut place, mut most) = (none, known, none);
        let mine = |i: &usize| *i as i32 / 256 % rows::SCANS == block;
        for i in (0..logits.values.len()).filter(mine) {
            let x = logits.values[i];
            most = most.max(x);
            if (i as i32) < known && x > best {
                (best, place) = (x, i as i32);
            }
        }
        let total = (0..logits.values.len()).filter(mine).map(|i| (logits.values[i] - most).exp()).sum();
        for (all, x) in parts.iter_mut().zip([best, f64::from(place), most, total]) {
            all.push(x);
        }
    }
    parts
}

fn scan(vocab: i32, known: i32) -> Case {
    let logits = numbers(17, Kind::F32, &[vocab]);
    let [best, place, most, total] = parts_of(&logits, known);
    let real = |x| result(Kind::F32, x);
    let outputs = vec![real(best), result(Kind::I32, place), real(most), real(total)];
    let sizes = [("V", vocab), ("N", known), ("B", rows::SCANS)];
    case(&format!("{vocab} logits"), &rows::SCAN, rows::scan_grid(), &sizes, vec![], vec![logits], outputs)
}

fn pick(vocab: i32, known: i32) -> Case {
    let mut logits = numbers(18, Kind::F32, &[vocab]);
    // Two that are equal: the first of them is the token.
    for i in [known - 1, known / 2] {
        logits.values[i as usize] = 3.0;
    }
    let sum: f64 = logits.values.iter().map(|x| x.exp()).sum();
    let [best, place, most, total] = parts_of(&logits, known);
    let real = |x: Vec<f64>| result(Kind::F32, x.into_iter().map(|x| Kind::F32.round(x)).collect());
    let inputs = vec![real(best), result(Kind::I32, place), real(most), real(total)];
    let outputs = vec![ints(Kind::U32, &[known / 2]), result(Kind::F32, vec![3.0 - sum.ln()])];
    let sizes = [("N", known), ("B", rows::SCANS)];
    case(&format!("{vocab} logits"), &rows::PICK, rows::pick_grid(), &sizes, vec![], inputs, outputs)
}

/// Queries with gates between them, a part of each head rotated.
fn heads(n: i32, norm: bool, kind: Kind, cache: Kind) -> Case {
    let (count, kv, dim, half, capacity, pos) = (4, 2, 20, 3, 64, 7);
    let width = count * 2 * dim + 2 * kv * dim + 3;
    let q = View::new([width, 1, count, dim, 2 * dim]);
    let k = View::new([width, 1 + count * 2 * dim, kv, dim, dim]);
    let v = View::new([width, 2 + (count * 2 + kv) * dim, kv, dim, dim]);
    let qkv = numbers(19, kind, &[n, width]);
    let (table, weights) = (numbers(20, Kind::F32, &[n, 2 * half]), [21, 22].map(|s| numbers(s, kind, &[dim])));
    let caches = [23, 24].map(|seed| numbers(seed, cache, &[kv, capacity, dim]));
    let eps = [1e-3f32, 1e-2];
    // One head, after norm and rotation.
    let turned = |view: &View, row: i32, head: i32, which: usize| -> Vec<f64> {
        let raw: Vec<f64> = (0..dim).map(|e| view.get(&qkv, row, head * dim + e)).collect();
        let mean = raw.iter().map(|x| x * x).sum::<f64>() / f64::from(dim);
        let scale = 1.0 / (mean + f64::from(eps[which])).sqrt();
        let at = |e: i32| raw[e as usize] * if norm { scale * weights[which].values[e as usize] } else { 1.0 };
        let turn = |e: i32| {
            let angle = |part: i32| table.values[(row * 2 * half + part * half + e % half) as usize];
            match e {
                e if e < half => at(e) * angle(0) - at(e + half) * angle(1),
                e if e < 2 * half => at(e) * angle(0) + at(e - half) * angle(1),
                e => at(e),
            }
        };
        (0..dim).map(turn).collect()
    };
    let out = (0..n * count).flat_map(|i| turned(&q, i / count, i % count, 0)).collect();
    let mut written = caches.each_ref().map(|data| data.values.clone());
    for (row, head) in (0..n).flat_map(|row| (0..kv).map(move |head| (row, head))) {
        let at = ((head * capacity + pos + row) * dim) as usize;
        let values = (0..dim).map(|e| v.get(&qkv, row, head * dim + e)).collect();
        for (all, new) in written.iter_mut().zip([turned(&k, row, head, 1), values]) {
            all[at..at + dim as usize].copy_from_slice(&new);
        }
    }
    let sizes = [("H", count), ("KV", kv), ("D", dim), ("HALF", half), ("N", i32::from(norm))];
    let sizes = [&sizes[..], &[("QE", bits(eps[0])), ("KE", bits(eps[1]))]].concat();
    let ([qw, kw], [keys, values]) = (weights, caches);
    let inputs = vec![qkv.clone(), qkv.clone(), qkv.clone(), qw, kw, table, keys, values, ints(Kind::I32, &[pos])];
    let views = vec![q.sizes("q"), k.sizes("k"), v.sizes("v")];
    let (grid, name) = (attention::heads_grid(n, count, kv), format!("{n} rows{}", if norm { ", norms" } else { "" }));
    let [keys, values] = written;
    let made = case(&name, &attention::HEADS, grid, &sizes, views, inputs, vec![result(kind, out)]);
    Case { written: vec![(6, keys), (7, values)], ..made }
}

/// What parts of the positions give: sums, the largest score, the weight.
fn attend(dim: i32, last: i32, window: i32, parts: i32, kind: Kind) -> Case {
    let (count, kv, capacity, scale) = (4, 2, 200, 0.4f32);
    let q = numbers(25, kind, &[count, dim]);
    let [keys, values] = [26, 27].map(|seed| numbers(seed, kind, &[kv, capacity, dim]));
    let begin = if window > 0 { (last + 1 - window).max(0) } else { 0 };
    let each = (last + 1 - begin + parts - 1) / parts;
    let mut want = Vec::new();
    for (head, part) in (0..count).flat_map(|head| (0..parts).map(move |part| (head, part))) {
        let at = |p: i32, d: i32| ((head / (count / kv) * capacity + p) * dim + d) as usize;
        let score = |p: i32| -> f64 {
            let products = (0..dim).map(|d| q.values[(head * dim + d) as usize] * keys.values[at(p, d)]);
            products.sum::<f64>() * f64::from(scale)
        };
        let from = begin + part * each;
        let mine: Vec<(i32, f64)> = (from..(from + each).min(last + 1)).map(|p| (p, score(p))).collect();
        let none = f64::from(-3e38f32);
        let high = mine.iter().fold(none, |most, (_, s)| most.max(*s));
        let weight: f64 = mine.iter().map(|(_, s)| (s - high).exp()).sum();
        let sum = |d: i32| mine.iter().map(|(p, s)| (s - high).exp() * values.values[at(*p, d)]).sum::<f64>();
        want.extend((0..dim).map(|d| if parts == 1 { sum(d) / weight } else { sum(d) }));
        if parts > 1 {
            want.extend([high, weight]);
        }
    }
    let sizes = [("H", count), ("KV", kv), ("D", dim), ("W", window), ("N", parts), ("SCALE", bits(scale))];
    let inputs = vec![q, keys, values, ints(Kind::I32, &[last])];
    let outputs = vec![result(if parts == 1 { kind } else { Kind::F32 }, want)];
    let name = format!("position {last}, window {window}, {parts} parts");
    case(&name, &attention::ATTEND, attention::attend_grid(count, parts), &sizes, vec![], inputs, outputs)
}

fn merge(dim: i32, parts: i32, kind: Kind) -> Case {
    let count = 3;
    let mut made = numbers(28, Kind::F32, &[count, parts, dim + 2]);
    for (i, part) in made.values.chunks_mut(dim as usize + 2).enumerate() {
        // Weights are positive; one part of each head saw no position.
        part[dim as usize + 1] = f64::from(part[dim as usize + 1].abs() as f32) + 0.5;
        if i as i32 % parts == 1 {
            part.fill(0.0);
            part[dim as usize] = f64::from(-3e38f32);
        }
    }
    let part = |head: i32, n: i32| &made.values[((head * parts + n) * (dim + 2)) as usize..][..dim as usize + 2];
    let mut want = Vec::new();
    for head in 0..count {
        let high = (0..parts).map(|n| part(head, n)[dim as usize]).fold(f64::MIN, f64::max);
        let fade = |n: i32| (part(head, n)[dim as usize] - high).exp();
        let weight: f64 = (0..parts).map(|n| fade(n) * part(head, n)[dim as usize + 1]).sum();
        want.extend((0..dim as usize).map(|d| (0..parts).map(|n| fade(n) * part(head, n)[d]).sum::<f64>() / weight));
    }
    let outputs = vec![result(kind, want)];
    let (sizes, grid) = ([("D", dim), ("N", parts)], attention::merge_grid(count));
    case(&format!("{parts} parts"), &attention::MERGE, grid, &sizes, vec![], vec![made], outputs)
}

fn conv(n: i32, valid: i32, with_silu: bool, kind: Kind) -> Case {
    let (taps, view) = (4, View::new([50, 3, 3, 10, 14]));
    let channels = view.heads * view.dim;
    let x = numbers(29, kind, &[n, view.width]);
    let (by, before) = (numbers(30, Kind::F32, &[taps, channels]), numbers(31, Kind::F32, &[taps - 1, 1, channels]));
    // Row `r` of the rows before and these.
    let past = |r: i32, c: i32| match r - (taps - 1) {
        r if r < 0 => before.values[((r + taps - 1) * channels + c) as usize],
        r => view.get(&x, r, c),
    };
    let out = |i: i32| {
        let (r, c) = (i / channels, i % channels);
        let sum = (0..taps).map(|t| by.values[(t * channels + c) as usize] * past(r + t, c)).sum();
        if with_silu { silu(sum) } else { sum }
    };
    let after = (0..(taps - 1) * channels).map(|i| past(valid + i / channels, i % channels)).collect();
    let outputs = vec![result(Kind::F32, (0..n * channels).map(out).collect()), result(Kind::F32, after)];
    let inputs = vec![x, by, before, ints(Kind::I32, &[valid])];
    let sizes = [("C", channels), ("K", taps), ("SILU", i32::from(with_silu))];
    let grid = delta::conv_grid(n, channels);
    case(&format!("{valid} of {n} rows"), &delta::CONV, grid, &sizes, vec![view.sizes("a")], inputs, outputs)
}

fn prepare(n: i32, kind: Kind) -> Case {
    let (k_heads, v_heads, dim, eps, scale) = (2, 6, 36, [1e-3f32, 1e-2], [0.25f32, 2.0]);
    let (q, k) = (View::new([80, 1, k_heads, dim, 40]), View::new([73, 0, k_heads, dim, dim]));
    let (a, b) = (View::new([13, 0, 3, 2, 4]), View::new([13, 2, 3, 2, 4]));
    let views = [("q", q), ("k", k), ("a", a), ("b", b)];
    let mut inputs: Vec<Data> =
        views.iter().enumerate().map(|(i, (_, v))| numbers(32 + i as u64, kind, &[n, v.width])).collect();
    // Beyond 20 the softplus is its argument.
    inputs[2].values[4] = kind.round(30.0);
    let [rate, step] = [36, 37].map(|seed| numbers(seed, Kind::F32, &[v_heads]));
    let key = |which: usize| -> Vec<f64> {
        let mut all = Vec::new();
        for (row, head) in (0..n).flat_map(|row| (0..k_heads).map(move |head| (row, head))) {
            let of: Vec<f64> = (0..dim).map(|e| views[which].1.get(&inputs[which], row, head * dim + e)).collect();
            let sum = of.iter().map(|x| x * x).sum::<f64>() + f64::from(eps[which]);
            all.extend(of.iter().map(|x| x * f64::from(scale[which]) / sum.sqrt()));
        }
        all
    };
    let gates = |i: i32| (i / v_heads, i % v_heads);
    let decay = |i: i32| {
        let (row, h) = gates(i);
        let x = a.get(&inputs[2], row, h) + step.values[h as usize];
        -rate.values[h as usize].exp() * x.exp().ln_1p()
    };
    let strength = |i: i32| sigmoid(b.get(&inputs[3], gates(i).0, gates(i).1));
    let real = |values| result(Kind::F32, values);
    let outputs = vec![
        real(key(0)),
        real(key(1)),
        real((0..n * v_heads).map(decay).collect()),
        real((0..n * v_heads).map(strength).collect()),
    ];
    let sizes = [("HK", k_heads), ("HV", v_heads), ("K", dim)];
    let reals = [("QE", bits(eps[0])), ("KE", bits(eps[1])), ("QS", bits(scale[0])), ("KS", bits(scale[1]))];
    let sizes = [&sizes[..], &reals].concat();
    inputs.extend([rate, step]);
    let grid = delta::prepare_grid(n, k_heads);
    let views = views.map(|(name, view)| view.sizes(name)).to_vec();
    case(&format!("{n} rows"), &delta::PREPARE, grid, &sizes, views, inputs, outputs)
}

fn step(k_dim: i32, v_dim: i32) -> Case {
    let (k_heads, v_heads) = (2, 4);
    let real = |seed, shape: &[i32]| numbers(seed, Kind::F32, shape);
    let (q, k, v) = (real(38, &[1, k_heads, k_dim]), real(39, &[1, k_heads, k_dim]), real(40, &[1, v_heads, v_dim]));
    let (decay, beta, state) = (real(41, &[1, v_heads]), real(42, &[1, v_heads]), real(43, &[v_heads, k_dim, v_dim]));
    let mut after = state.values.clone();
    let mut want = Vec::new();
    for head in 0..v_heads {
        let key = |of: &Data, i: i32| of.values[(head / (v_heads / k_heads) * k_dim + i) as usize];
        for c in 0..v_dim {
            let at = |i: i32| ((head * k_dim + i) * v_dim + c) as usize;
            (0..k_dim).for_each(|i| after[at(i)] *= decay.values[head as usize].exp());
            let recalled: f64 = (0..k_dim).map(|i| after[at(i)] * key(&k, i)).sum();
            let change = beta.values[head as usize] * (v.values[(head * v_dim + c) as usize] - recalled);
            (0..k_dim).for_each(|i| after[at(i)] += key(&k, i) * change);
            want.push((0..k_dim).map(|i| after[at(i)] * key(&q, i)).sum());
        }
    }
    let outputs = vec![result(Kind::F32, want), result(Kind::F32, after)];
    let sizes = [("HK", k_heads), ("HV", v_heads), ("K", k_dim), ("V", v_dim)];
    let (grid, inputs) = (delta::step_grid(v_heads, v_dim), vec![q, k, v, decay, beta, state]);
    case(&format!("state {k_dim} x {v_dim}"), &delta::STEP, grid, &sizes, vec![], inputs, outputs)
}

/// At least one of every kernel.
pub fn all() -> Vec<Case> {
    vec![
        embed(4, 32, 96, Kind::F16),
        embed(3, 32, 96, Kind::Bf16),
        embed(6, 64, 64, Kind::F32),
        add_norm(3, 300, Kind::F16),
        add_norm(2, 7, Kind::Bf16),
        gate(0, Kind::F16),
        gate(1, Kind::Bf16),
        norm_gate(12, Kind::F16),
        norm_gate(70, Kind::F32),
        top_k(37, 5, true, false),
        top_k(100, 9, false, true),
        mix(3, true, Kind::F16),
        mix(1, false, Kind::Bf16),
        scan(1003, 990),
        scan(20_011, 20_000),
        pick(1003, 990),
        heads(13, true, Kind::F16, Kind::F16),
        heads(1, false, Kind::F32, Kind::F16),
        attend(64, 150, 0, 1, Kind::F16),
        attend(32, 190, 37, 3, Kind::Bf16),
        attend(32, 1, 0, 3, Kind::F32),
        merge(70, 3, Kind::F16),
        conv(40, 37, true, Kind::F16),
        conv(1, 1, false, Kind::F32),
        prepare(5, Kind::F16),
        prepare(1, Kind::F32),
        step(24, 64),
        step(8, 32),
    ]
}
