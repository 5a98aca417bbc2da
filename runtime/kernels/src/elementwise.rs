//! Ops whose rows do not meet: norms, gates, rotations, quantisation of activations, routing.
//!
//! Every loop takes eight elements at a time and the rest with masked loads. A pass reads an
//! element before it writes the same element, so outputs may be the same view as inputs where the
//! op table says so. A lane sum has four vectors of accumulators, the first for the first eight of
//! every 32 elements, and so on.

use std::ops::Range;

use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WEIGHT_PLANES, WeightFormat};
use loaf_formats::op::{self, OpAttrs};

use super::simd::{self, Simd};
use super::{EIGHT, OpCall, RawOperand};
use crate::math;

/// Elements `i..i + n` of a float vector, widened; `n <= 8`. Bytes are E4M3, and `n` is 8.
#[inline(always)]
pub(super) unsafe fn floats<S: Simd>(dtype: DType, p: *const u8, i: usize, n: usize) -> S::F {
    // SAFETY: the caller names `n` valid elements; short runs go through a buffer.
    unsafe {
        match dtype {
            DType::F16 | DType::BF16 => {
                let p = p.cast::<u16>().add(i);
                let mut buffer = [0u16; EIGHT];
                let p = if n == EIGHT {
                    p
                } else {
                    for j in 0..n {
                        buffer[j] = *p.add(j);
                    }
                    buffer.as_ptr()
                };
                if dtype == DType::F16 { S::load_f16(p) } else { S::load_bf16(p) }
            }
            DType::U8 => S::load_e4m3(p.add(i)),
            _ => load::<S>(p.cast::<f32>().add(i), n),
        }
    }
}

/// Element `i` of row `row` of a float operand without heads.
#[inline(always)]
unsafe fn float<S: Simd>(o: &RawOperand, row: usize, i: usize) -> f32 {
    // SAFETY: the caller names an existing element; the tree of one lane and zeros is the lane.
    unsafe { S::tree(floats::<S>(o.dtype, o.ptr.add(row * o.row_stride * o.dtype.bytes() as usize), i, 1)) }
}

#[inline(always)]
pub(super) unsafe fn load<S: Simd>(p: *const f32, n: usize) -> S::F {
    // SAFETY: the caller names `n` valid elements.
    unsafe { if n == EIGHT { S::load(p) } else { S::load_n(p, n) } }
}

#[inline(always)]
pub(super) unsafe fn store<S: Simd>(p: *mut f32, x: S::F, n: usize) {
    // SAFETY: the caller names `n` valid elements.
    unsafe { if n == EIGHT { S::store(p, x) } else { S::store_n(p, x, n) } }
}

/// Runs `$body` for every eight of `$n` elements, `$i` the first and `$lanes` how many: a loop over
/// whole eights, in which the count is a constant, then perhaps a shorter one.
macro_rules! eights {
    ($n:expr, |$i:ident, $lanes:ident| $body:expr) => {{
        let (n, mut $i) = ($n, 0usize);
        while $i + EIGHT <= n {
            let $lanes = EIGHT;
            $body;
            $i += EIGHT;
        }
        if $i < n {
            let $lanes = n - $i;
            $body;
        }
    }};
}

/// As [`eights`], `$sum` being the one of the four vectors of accumulators `$acc` that takes them:
/// a loop over whole 32s, then perhaps what is left of one.
macro_rules! lanes {
    ($n:expr, $acc:ident, |$i:ident, $count:ident, $sum:ident| $body:expr) => {{
        let (n, mut $i) = ($n, 0usize);
        while $i + 4 * EIGHT <= n {
            for part in 0..4 {
                let ($count, $sum) = (EIGHT, &mut $acc[part]);
                $body;
                $i += EIGHT;
            }
        }
        if $i < n {
            // In memory: where an index is computed there are no registers.
            let mut parked = $acc;
            for $sum in std::hint::black_box(&mut parked) {
                if $i < n {
                    let $count = EIGHT.min(n - $i);
                    $body;
                    $i += $count;
                }
            }
            $acc = parked;
        }
    }};
}

/// The lane dot of `x` with itself. Squares are not negative, so no accumulator is `-0`, and zeros
/// past the end need not be added.
#[inline(always)]
unsafe fn square<S: Simd>(x: *const f32, n: usize) -> f32 {
    // SAFETY: `n` valid elements.
    unsafe {
        let mut acc = [S::splat(0.0); 4];
        lanes!(n, acc, |i, count, sum| {
            let x = load::<S>(x.add(i), count);
            *sum = S::fma(x, x, *sum);
        });
        simd::fold::<S>(acc)
    }
}

/// `out = f(a, b)` over `n` elements.
macro_rules! map2 {
    ($S:ty, $n:expr, $out:expr, ($a:ident = $pa:expr, $b:ident = $pb:expr) => $e:expr) => {{
        let (out, pa, pb): (*mut f32, *const f32, *const f32) = ($out, $pa, $pb);
        eights!($n, |i, lanes| {
            let ($a, $b) = (load::<$S>(pa.add(i), lanes), load::<$S>(pb.add(i), lanes));
            store::<$S>(out.add(i), $e, lanes);
        });
    }};
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident = |$a:ident, $b:ident| $e:expr;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        pub(super) unsafe fn $name<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
            let (a, o) = (op::$name::Attrs::of(call.attrs), op::$name::Operands::of(call.operands));
            for u in units {
                let (r, h) = (u / a.heads, u % a.heads);
                // SAFETY: row `r`, head `h` and `dim` elements are within all three extents.
                unsafe { map2!(S, a.dim, o.out.at(r, h), ($a = o.a.at(r, h), $b = o.b.at(r, h)) => $e) }
            }
        }
    )* };
}
macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident = |$a:ident| $e:expr;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        pub(super) unsafe fn $name<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
            let (a, o) = (op::$name::Attrs::of(call.attrs), op::$name::Operands::of(call.operands));
            for u in units {
                let (r, h) = (u / a.heads, u % a.heads);
                // SAFETY: row `r`, head `h` and `dim` elements are within both extents.
                unsafe { map2!(S, a.dim, o.out.at(r, h), ($a = o.x.at(r, h), _b = o.x.at(r, h)) => $e) }
            }
        }
    )* };
}

binary! {
    add = |a, b| S::add(a, b);
    mul = |a, b| S::mul(a, b);
    silu_mul = |a, b| S::mul(simd::silu::<S>(a), b);
    sigmoid_mul = |a, b| S::mul(simd::sigmoid::<S>(a), b);
}
unary! {
    silu = |a| simd::silu::<S>(a);
    sigmoid = |a| simd::sigmoid::<S>(a);
}

#[inline(always)]
pub(super) unsafe fn mul_rows<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::mul_rows::Attrs::of(call.attrs), op::mul_rows::Operands::of(call.operands));
    for r in units {
        // SAFETY: row `r` is within the extents.
        unsafe {
            let s = S::splat(*o.s.at::<f32>(r, 0));
            map2!(S, a.dim, o.out.at(r, 0), (x = o.x.at(r, 0), _y = o.x.at(r, 0)) => S::mul(x, s));
        }
    }
}

/// What the norms have in common, from the attributes of either.
struct Norm {
    dim: usize,
    eps: f32,
    offset: f32,
}

/// `out = (x * inv) * (offset + w)` for one row and head; `square` is the lane dot of `x` with
/// itself.
#[inline(always)]
unsafe fn norm_row<S: Simd>(norm: &Norm, x: *const f32, square: f32, weight: &RawOperand, out: *mut f32) {
    let &Norm { dim, eps, offset } = norm;
    // SAFETY: `dim` elements of each.
    unsafe {
        let inv = S::splat(1.0 / (square / dim as f32 + eps).sqrt());
        let offset = S::splat(offset);
        macro_rules! norm {
            ($dtype:expr) => {
                eights!(dim, |i, lanes| {
                    let w = S::add(offset, floats::<S>($dtype, weight.ptr, i, lanes));
                    store::<S>(out.add(i), S::mul(S::mul(load::<S>(x.add(i), lanes), inv), w), lanes);
                })
            };
        }
        match weight.dtype {
            DType::BF16 => norm!(DType::BF16),
            DType::F16 => norm!(DType::F16),
            _ => norm!(DType::F32),
        }
    }
}

#[inline(always)]
pub(super) unsafe fn rms_norm<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::rms_norm::Attrs::of(call.attrs), op::rms_norm::Operands::of(call.operands));
    let norm = Norm { dim: a.dim, eps: a.eps, offset: a.offset };
    for u in units {
        let (r, h) = (u / a.heads, u % a.heads);
        // SAFETY: row `r` and head `h` are within the extents.
        unsafe {
            let x = o.x.at::<f32>(r, h);
            norm_row::<S>(&norm, x, square::<S>(x, a.dim), &o.weight, o.out.at(r, h));
        }
    }
}

/// The norm reads `sum`, so that `out` may be the view of `a` or `b`.
#[inline(always)]
pub(super) unsafe fn add_rms_norm<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::add_rms_norm::Attrs::of(call.attrs), op::add_rms_norm::Operands::of(call.operands));
    let norm = Norm { dim: a.dim, eps: a.eps, offset: a.offset };
    for u in units {
        let (r, h) = (u / a.heads, u % a.heads);
        // SAFETY: row `r` and head `h` are within the extents.
        unsafe {
            let (x, y, sum) = (o.a.at::<f32>(r, h), o.b.at::<f32>(r, h), o.sum.at::<f32>(r, h));
            let mut acc = [S::splat(0.0); 4];
            lanes!(a.dim, acc, |i, count, square| {
                let x = S::add(load::<S>(x.add(i), count), load::<S>(y.add(i), count));
                store::<S>(sum.add(i), x, count);
                *square = S::fma(x, x, *square);
            });
            norm_row::<S>(&norm, sum, simd::fold::<S>(acc), &o.weight, o.out.at(r, h));
        }
    }
}

#[inline(always)]
pub(super) unsafe fn l2_norm<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::l2_norm::Attrs::of(call.attrs), op::l2_norm::Operands::of(call.operands));
    for u in units {
        let (r, h) = (u / a.heads, u % a.heads);
        // SAFETY: row `r` and head `h` are within the extents.
        unsafe {
            let x = o.x.at::<f32>(r, h);
            let inv = S::splat(1.0 / (square::<S>(x, a.dim) + a.eps).sqrt());
            let scale = S::splat(a.scale);
            map2!(S, a.dim, o.out.at(r, h), (x = x, _y = x) => S::mul(S::mul(x, inv), scale));
        }
    }
}

#[inline(always)]
pub(super) unsafe fn rope<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::rope::Attrs::of(call.attrs), op::rope::Operands::of(call.operands));
    let (dim, half) = (a.dim, a.half);
    for u in units {
        let (r, h) = (u / a.heads, u % a.heads);
        // SAFETY: row `r` and head `h` are within the extents, and `2 * half <= dim`.
        unsafe {
            let (x, table, out) = (o.x.at::<f32>(r, h), o.table.at::<f32>(r, 0), o.out.at::<f32>(r, h));
            for i in (0..half).step_by(EIGHT) {
                let n = EIGHT.min(half - i);
                let (a, b) = (load::<S>(x.add(i), n), load::<S>(x.add(half + i), n));
                let (c, s) = (load::<S>(table.add(i), n), load::<S>(table.add(half + i), n));
                store::<S>(out.add(i), S::fma(a, c, S::neg(S::mul(b, s))), n);
                store::<S>(out.add(half + i), S::fma(b, c, S::mul(a, s)), n);
            }
            std::ptr::copy(x.add(2 * half), out.add(2 * half), dim - 2 * half);
        }
    }
}

#[inline(always)]
pub(super) unsafe fn rope_table<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::rope_table::Attrs::of(call.attrs), op::rope_table::Operands::of(call.operands));
    let half = a.half;
    for r in units {
        // SAFETY: row `r` has `2 * half` elements.
        unsafe {
            let (freq, out) = (o.inv_freq.at::<f32>(0, 0), o.out.at::<f32>(r, 0));
            let run = call.run_of(r);
            let position = (run.pos + r - run.first) as u64;
            for i in 0..half {
                let (cos, sin) = math::rope_angle(position, *freq.add(i));
                *out.add(i) = cos;
                *out.add(half + i) = sin;
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn kv_write<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::kv_write::Attrs::of(call.attrs), op::kv_write::Operands::of(call.operands));
    let dim = a.dim;
    for u in units {
        let (r, h) = (u / a.heads, u % a.heads);
        let run = call.run_of(r);
        let position = run.pos + r - run.first;
        // SAFETY: row `r`, head `h` and the position are within the extents; the slot exists.
        unsafe {
            let (x, cache) = (o.x.at::<f32>(r, h), o.cache.offset(run.cache));
            if cache.dtype != DType::F16 {
                std::ptr::copy_nonoverlapping(x, cache.at::<f32>(position, h), dim);
                continue;
            }
            let out = cache.at::<u16>(position, h);
            eights!(dim, |i, lanes| {
                if lanes == EIGHT {
                    S::store_f16(out.add(i), S::load(x.add(i)));
                } else {
                    let mut eight = [0; EIGHT];
                    S::store_f16(eight.as_mut_ptr(), S::load_n(x.add(i), lanes));
                    std::ptr::copy_nonoverlapping(eight.as_ptr(), out.add(i), lanes);
                }
            });
        }
    }
}

#[inline(always)]
pub(super) unsafe fn gather_rows<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::gather_rows::Attrs::of(call.attrs), op::gather_rows::Operands::of(call.operands));
    for r in units {
        // SAFETY: the row of `x` is clamped to those there are, and row `r` of `out` is one; they
        // do not overlap.
        unsafe {
            let from = (*o.select.at::<u32>(0, 0).add(r) as usize).min(a.of - 1);
            std::ptr::copy_nonoverlapping(o.x.at::<f32>(from, 0), o.out.at::<f32>(r, 0), a.dim);
        }
    }
}

#[inline(always)]
pub(super) unsafe fn quantize<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::quantize::Attrs::of(call.attrs), op::quantize::Operands::of(call.operands));
    let (dim, group) = (a.dim, a.group);
    for u in units {
        let (r, h) = (u / a.heads, u % a.heads);
        // SAFETY: row `r` and head `h` are within the extents; groups divide `dim`.
        unsafe {
            let (x, codes) = (o.x.at::<f32>(r, h), o.codes.at::<i8>(r, h));
            let (scales, sums) = (o.scales.at::<f32>(r, h), o.sums.at::<f32>(r, h));
            for g in (0..dim / group).step_by(EIGHT) {
                let n = EIGHT.min(dim / group - g);
                quantize_groups::<S>(x.add(g * group), codes.add(g * group), group, n, scales.add(g), sums.add(g));
            }
        }
    }
}

/// `n <= 8` groups: what is done once a group is done for all of them in one vector.
#[inline(always)]
unsafe fn quantize_groups<S: Simd>(
    x: *const f32,
    codes: *mut i8,
    group: usize,
    n: usize,
    scales: *mut f32,
    sums: *mut f32,
) {
    // SAFETY: `n` groups of each.
    unsafe {
        let (zero, largest) = (S::splat(0.0), S::splat(f32::MAX));
        let (limit, minus_limit) = (S::splat(127.0), S::splat(-127.0));
        let mut largests = [zero; EIGHT];
        for g in 0..n {
            let mut m = zero;
            eights!(group, |i, lanes| {
                let x = S::abs(load::<S>(x.add(g * group + i), lanes));
                // `min` keeps a NaN in its second operand, and `max` then drops it in its first.
                m = S::max(S::min(largest, x), m);
            });
            largests[g] = m;
        }
        let lanes = S::transpose(largests);
        let mut m = zero;
        for i in 0..EIGHT {
            m = S::max(lanes[i], m);
        }
        let (mut maxima, mut inverses) = ([0.0f32; EIGHT], [0.0f32; EIGHT]);
        S::store(maxima.as_mut_ptr(), m);
        S::store(inverses.as_mut_ptr(), S::div(limit, m));
        let mut code_sums = [zero; EIGHT];
        for g in 0..n {
            let inv = S::splat(if maxima[g] == 0.0 { 0.0 } else { inverses[g] });
            let mut sum = S::splat_i(0);
            eights!(group, |i, lanes| {
                let (at, to) = (x.add(g * group + i), codes.add(g * group + i));
                let x = S::max(S::neg(largest), S::min(largest, load::<S>(at, lanes)));
                let scaled = S::nan_to_zero(S::mul(x, inv));
                let code = S::round(S::max(minus_limit, S::min(limit, scaled)));
                sum = S::add_i(sum, code);
                if lanes == EIGHT {
                    S::store_i8(to, code);
                } else {
                    let mut eight = [0; EIGHT];
                    S::store_i8(eight.as_mut_ptr(), code);
                    std::ptr::copy_nonoverlapping(eight.as_ptr(), to, lanes);
                }
            });
            code_sums[g] = S::to_float(sum);
        }
        // Sums of a group are far below 2^24, so their lanes add exactly as floats.
        let lanes = S::transpose(code_sums);
        let mut sum = zero;
        for i in 0..EIGHT {
            sum = S::add(sum, lanes[i]);
        }
        let scale = S::div(m, limit);
        store::<S>(scales, scale, n);
        store::<S>(sums, S::mul(scale, sum), n);
    }
}

#[inline(always)]
pub(super) unsafe fn weighted_sum<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::weighted_sum::Attrs::of(call.attrs), op::weighted_sum::Operands::of(call.operands));
    let (k, dim) = (a.k, a.dim);
    for r in units {
        // SAFETY: row `r`, `k` heads and `dim` elements are within the extents.
        unsafe {
            let w = o.w.at::<f32>(r, 0);
            for i in (0..dim).step_by(EIGHT) {
                let n = EIGHT.min(dim - i);
                let mut acc = S::splat(0.0);
                for j in 0..k {
                    acc = S::fma(load::<S>(o.y.at::<f32>(r, j).add(i), n), S::splat(*w.add(j)), acc);
                }
                store::<S>(o.out.at::<f32>(r, 0).add(i), acc, n);
            }
        }
    }
}

/// The largest of `n` elements; NaNs are ignored.
#[inline(always)]
pub(super) unsafe fn max_of<S: Simd>(x: *const f32, n: usize) -> f32 {
    // SAFETY: `n` valid elements.
    unsafe {
        let mut lanes = [f32::NEG_INFINITY; EIGHT];
        let mut m = S::splat(f32::NEG_INFINITY);
        let whole = n - n % EIGHT;
        for i in (0..whole).step_by(EIGHT) {
            m = S::max(S::load(x.add(i)), m);
        }
        S::store(lanes.as_mut_ptr(), m);
        let rest = (whole..n).map(|i| *x.add(i));
        lanes.into_iter().chain(rest).fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
}

#[inline(always)]
pub(super) unsafe fn softmax<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::softmax::Attrs::of(call.attrs), op::softmax::Operands::of(call.operands));
    let dim = a.dim;
    for r in units {
        // SAFETY: row `r` has `dim` elements in both.
        unsafe {
            let (x, out) = (o.x.at::<f32>(r, 0), o.out.at::<f32>(r, 0));
            let m = S::splat(max_of::<S>(x, dim));
            let mut acc = [S::splat(0.0); 4];
            lanes!(dim, acc, |i, count, sum| {
                let mut e = simd::exp::<S>(S::sub(load::<S>(x.add(i), count), m));
                store::<S>(out.add(i), e, count);
                if count < EIGHT {
                    // Read back, so that lanes past the end are zero.
                    e = S::load_n(out.add(i), count);
                }
                *sum = S::add(*sum, e);
            });
            let sum = S::splat(simd::fold::<S>(acc));
            map2!(S, dim, out, (e = out, _f = out) => S::div(e, sum));
        }
    }
}

#[inline(always)]
pub(super) unsafe fn top_k<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::top_k::Attrs::of(call.attrs), op::top_k::Operands::of(call.operands));
    let (experts, k) = (a.experts, a.k);
    for r in units {
        // SAFETY: row `r` has `experts` inputs and `k` outputs of each kind.
        unsafe {
            let (p, ids, weights) = (o.probs.at::<f32>(r, 0), o.ids.at::<u32>(r, 0), o.weights.at::<f32>(r, 0));
            let mut found = 0;
            for e in 0..experts {
                let value = *p.add(e);
                // An earlier expert wins a tie, so a later one moves up only past what is strictly
                // smaller.
                let beats = |other: f32| value > other || (other.is_nan() && !value.is_nan());
                if found == k && !beats(*weights.add(k - 1)) {
                    continue;
                }
                let mut at = if found < k { found } else { k - 1 };
                found = (found + 1).min(k);
                while at > 0 && beats(*weights.add(at - 1)) {
                    *weights.add(at) = *weights.add(at - 1);
                    *ids.add(at) = *ids.add(at - 1);
                    at -= 1;
                }
                *weights.add(at) = value;
                *ids.add(at) = e as u32;
            }
            let sum = (0..found).fold(0.0f32, |sum, j| sum + *weights.add(j));
            for j in found..k {
                *ids.add(j) = 0;
                *weights.add(j) = 0.0;
            }
            if a.renorm != 0 {
                (0..k).for_each(|j| *weights.add(j) /= sum);
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn expert_sort<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::expert_sort::Attrs::of(call.attrs), op::expert_sort::Operands::of(call.operands));
    let (rows, k, experts) = (a.rows, a.k, a.experts);
    for _ in units {
        // SAFETY: `rows * k` ids and slots, `experts + 1` starts; an id past the experts counts as
        // the last.
        unsafe {
            let expert = |slot: usize| (*o.ids.at::<u32>(slot / k, 0).add(slot % k) as usize).min(experts - 1);
            let (order, starts) = (o.order.at::<u32>(0, 0), o.starts.at::<u32>(0, 0));
            (0..=experts).for_each(|e| *starts.add(e) = 0);
            for slot in 0..rows * k {
                *starts.add(expert(slot) + 1) += 1;
            }
            (0..experts).for_each(|e| *starts.add(e + 1) += *starts.add(e));
            for slot in 0..rows * k {
                let next = starts.add(expert(slot));
                *order.add(*next as usize) = slot as u32;
                *next += 1;
            }
            // Each start has run to its end, which is the next one's start.
            (0..experts).rev().for_each(|e| *starts.add(e + 1) = *starts.add(e));
            *starts = 0;
        }
    }
}

#[inline(always)]
pub(super) unsafe fn gdn_gates<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (attrs, o) = (op::gdn_gates::Attrs::of(call.attrs), op::gdn_gates::Operands::of(call.operands));
    let (heads, dim) = (attrs.heads, attrs.dim);
    for r in units {
        for c in 0..heads * dim {
            // SAFETY: row `r` and channel `c` are within the extents.
            unsafe {
                let (a, b) = (*o.a.at::<f32>(r, c / dim).add(c % dim), *o.b.at::<f32>(r, c / dim).add(c % dim));
                let rate = math::exp(float::<S>(&o.a_log, 0, c)) * math::softplus(a + float::<S>(&o.dt_bias, 0, c));
                *o.decay.at::<f32>(r, 0).add(c) = math::exp(-rate);
                *o.beta.at::<f32>(r, 0).add(c) = math::sigmoid(b);
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn embed<S: Simd>(call: &OpCall<'_>, units: Range<usize>, _: &mut [u8]) {
    let (a, o) = (op::embed::Attrs::of(call.attrs), op::embed::Operands::of(call.operands));
    for r in units {
        // SAFETY: the id is clamped to the table; `dim` elements of its row and of row `r`.
        unsafe {
            let id = (*o.ids.at::<u32>(0, 0).add(r) as usize).min(a.vocab - 1);
            decode_row::<S>(a.format, &o.table, id, a.dim, o.out.at::<f32>(r, 0));
        }
    }
}

/// A weight: codes, scales and, for affine, biases.
type Planes = [RawOperand; WEIGHT_PLANES];

/// Decodes weight row `row` (`n` elements) into `out`.
#[inline(always)]
unsafe fn decode_row<S: Simd>(format: WeightFormat, w: &Planes, row: usize, n: usize, out: *mut f32) {
    // SAFETY: the caller names a row of the weight.
    unsafe {
        match format {
            WeightFormat::Dense(dtype) => {
                let p = w[0].ptr.add(row * w[0].row_stride * dtype.bytes() as usize);
                for i in (0..n).step_by(EIGHT) {
                    let lanes = EIGHT.min(n - i);
                    store::<S>(out.add(i), floats::<S>(dtype, p, i, lanes), lanes);
                }
            }
            WeightFormat::Mxfp8 => {
                let (p, scales) = (w[0].at::<u32>(row, 0).cast::<u8>(), w[1].at::<u8>(row, 0));
                for i in (0..n).step_by(EIGHT) {
                    let scale = S::splat(math::e8m0(*scales.add(i / 32)));
                    S::store(out.add(i), S::mul(S::load_e4m3(p.add(i)), scale));
                }
            }
            WeightFormat::Affine { bits, group, .. } => match bits {
                2 => decode_affine::<S, 2>(group, w, row, n, out),
                3 => decode_affine::<S, 3>(group, w, row, n, out),
                4 => decode_affine::<S, 4>(group, w, row, n, out),
                5 => decode_affine::<S, 5>(group, w, row, n, out),
                6 => decode_affine::<S, 6>(group, w, row, n, out),
                _ => decode_affine::<S, 8>(group, w, row, n, out),
            },
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => {
                let (p, scales) = (w[0].at::<u32>(row, 0).cast::<u8>(), w[1].at::<u8>(row, 0));
                let mx = format == WeightFormat::Mxfp4;
                for i in 0..n {
                    let value = math::E2M1_DOUBLED[usize::from(*p.add(i / 2) >> (i % 2 * 4) & 15)];
                    let scale = if mx { math::e8m0(*scales.add(i / 32)) } else { math::e4m3(*scales.add(i / 16)) };
                    *out.add(i) = f32::from(value) * (scale * 0.5);
                }
            }
            WeightFormat::Block(block) => decode_block(block, w, row, n, out),
        }
    }
}

/// As [`decode_row`]; once a token, so that one copy will do.
unsafe fn decode_block(block: Block, w: &Planes, row: usize, n: usize, out: *mut f32) {
    let (bits, group, table) = (block.bits() as usize, block.group() as usize, block.table());
    // SAFETY: a row of the weight is whole groups in every plane; `n` elements of room.
    unsafe {
        let plane = |i: usize| {
            let bytes = WeightFormat::Block(block).plane(i).and_then(|p| p.row_bytes(n as u64)).unwrap_or(0) as usize;
            let at = row * w[i].row_stride * w[i].dtype.bytes() as usize;
            if bytes == 0 { &[][..] } else { std::slice::from_raw_parts(w[i].ptr.add(at).cast_const(), bytes) }
        };
        let (codes, scales, supers) = (plane(0), plane(1), plane(2));
        for g in 0..n / group {
            let (scale, bias) = block.params(scales, supers, g).unwrap_or_default();
            for i in (g * group..(g + 1) * group).step_by(EIGHT) {
                let mut bytes = [0; 8];
                bytes[..bits].copy_from_slice(&codes[i / EIGHT * bits..][..bits]);
                let word = u64::from_le_bytes(bytes);
                for j in 0..EIGHT {
                    let code = (word >> (j * bits)) as usize & ((1 << bits) - 1);
                    *out.add(i + j) = match table {
                        Some(table) => scale * f32::from(table[code & 15]),
                        None => scale.mul_add(code as f32, bias),
                    };
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn decode_affine<S: Simd, const BITS: usize>(group: u8, w: &Planes, row: usize, n: usize, out: *mut f32) {
    let group = usize::from(group);
    // SAFETY: as `decode_row`; a row is whole groups, a group whole eights.
    unsafe {
        let mut p = w[0].at::<u32>(row, 0).cast::<u8>().cast_const();
        for g in 0..n / group {
            let (scale, bias) = (S::splat(float::<S>(&w[1], row, g)), S::splat(float::<S>(&w[2], row, g)));
            for i in (g * group..(g + 1) * group).step_by(EIGHT) {
                let mut bytes = [0; 8];
                std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), BITS);
                let word = u64::from_le_bytes(bytes);
                let mut codes = [0i32; EIGHT];
                for j in 0..EIGHT {
                    codes[j] = (word >> (j * BITS)) as i32 & ((1 << BITS) - 1);
                }
                S::store(out.add(i), S::fma(scale, S::to_float(S::load_i(codes.as_ptr())), bias));
                p = p.add(BITS);
            }
        }
    }
}
