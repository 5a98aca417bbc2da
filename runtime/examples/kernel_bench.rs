//! Speed of the kernels that take the time of a model, next to what the memory gives.
//!
//! `cargo run --release -p loaf-runtime --example kernel_bench`: half a minute. Every figure is the best of several
//! runs, on one thread (its own processor time) and on all physical cores (wall time). Weights are random bits; results are not looked at.

use std::ops::Range;
use std::time::Instant;

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{MAX_OPERANDS, OpKind};
use loaf_runtime::ceiling::read_bytes_per_second;
use loaf_runtime::kernels::{Kernels, OpCall, RawOperand, scratch_bytes, units};
use loaf_runtime::pool::{Pool, default_threads};

/// Operand addresses, so that a loop body may be shared between threads.
/// And the scratch a thread needs.
struct Shared<'a>(OpCall<'a>, usize);
// SAFETY: threads compute disjoint units of the call and use scratch of their own.
unsafe impl Sync for Shared<'_> {}

/// An operand of `rows * dim` contiguous elements over leaked, filled memory.
fn operand(dtype: DType, rows: usize, heads: usize, dim: usize) -> RawOperand {
    let bytes = rows * heads * dim * dtype.bytes() as usize;
    let mut state = 1u64;
    let mut word = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        // Exponents around 1, whatever the type: subnormals would be slow.
        match dtype {
            DType::F16 => 0x3c00_3c00_3c00_3c00 | (state >> 32 & 0x00ff_00ff),
            DType::F32 | DType::BF16 => 0x3f00_3f00_3f00_3f00 | (state >> 32 & 0x007f_007f),
            DType::U8 => 0x7878_7878_7878_7878 | (state >> 32 & 0x0303_0303),
            _ => state,
        }
    };
    // As the tensors of a loaf are.
    let words: Vec<u64> = (0..bytes.div_ceil(8) + 512).map(|_| word()).collect();
    let at = words.as_ptr().align_offset(4096);
    RawOperand { ptr: words.leak()[at..].as_mut_ptr().cast(), dtype, row_stride: heads * dim, head_stride: dim }
}

/// Operands of a call, contiguous, absent where the format has none.
fn operands(kind: OpKind, attrs: &[u64]) -> Vec<RawOperand> {
    use loaf_formats::op::Types;
    let spec = kind.spec();
    assert!(spec.operands.len() <= MAX_OPERANDS);
    let format = spec.format_attr().and_then(|i| WeightFormat::from_code(attrs[i]));
    let make = |o: &loaf_formats::op::OperandSpec| {
        let dtype = match o.types {
            Types::Is(d) => Some(d),
            Types::Float => Some(DType::F32),
            Types::Cache => Some(DType::F16),
            Types::Weight => format.map(WeightFormat::weight_dtype),
            Types::Scales => format.and_then(WeightFormat::scales_dtype),
            Types::Biases => format.and_then(WeightFormat::biases_dtype),
        };
        dtype.map_or(RawOperand::ABSENT, |d| {
            let [rows, heads, dim] = o.dims.map(|d| d.value(attrs).unwrap_or(0) as usize);
            operand(d, rows, heads, dim)
        })
    };
    spec.operands.iter().map(make).collect()
}

/// Seconds on a clock that, on one thread, stands still while neighbours have the processor.
fn now(threads: usize) -> f64 {
    let clock = if threads == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the one struct it is given.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds of the fastest of several runs.
fn time(pool: &Pool, kernels: &Kernels, kind: OpKind, attrs: &[u64]) -> f64 {
    let operands = operands(kind, attrs);
    let shared = Shared(OpCall { kind, operands: &operands, attrs }, scratch_bytes(kind, attrs));
    let scratch: Vec<usize> =
        (0..pool.threads()).map(|_| vec![0u64; shared.1 / 8 + 16].leak().as_mut_ptr() as usize).collect();
    let mut best = f64::INFINITY;
    let begin = Instant::now();
    while begin.elapsed().as_millis() < 10 {
        let start = now(pool.threads());
        let body = |range: Range<usize>, worker: usize| {
            let shared = &shared;
            let at = scratch[worker].next_multiple_of(64) as *mut u8;
            // SAFETY: this worker's own scratch, of the size asked for; operands as the table demands.
            unsafe { kernels.get(kind)(&shared.0, range, std::slice::from_raw_parts_mut(at, shared.1)) }
        };
        pool.run(units(kind, attrs), &body);
        best = best.min(now(pool.threads()) - start);
    }
    best
}


fn main() {
    use std::sync::atomic::Ordering::Relaxed;
    let kernels = Kernels::detect();
    let threads: usize = std::env::args().nth(1).map_or(2, |s| s.parse().unwrap());
    let pool = Pool::new(threads);
    let affine = |bits, group| WeightFormat::Affine { bits, group, params: DType::BF16 };
    if std::env::args().nth(2).is_some() {
        for (bits, group, inp, out) in [(4u8, 64u8, 512u64, 512u64), (4, 64, 1024, 256), (4, 64, 1024, 64), (4, 64, 2048, 64), (4, 64, 4096, 64), (4, 128, 1024, 256), (4, 128, 4096, 64), (8, 64, 1024, 128), (8, 64, 4096, 32), (6, 64, 1024, 128), (6, 64, 4096, 32)] {
            let f = affine(bits, group);
            let bytes = out * (f.row_bytes(inp).unwrap() + f.row_groups(inp).unwrap() * 4);
            let attrs = [1, inp, out, f.code()];
            let ops = operands(OpKind::LinearQuant, &attrs);
            let shared = Shared(OpCall { kind: OpKind::LinearQuant, operands: &ops, attrs: &attrs }, scratch_bytes(OpKind::LinearQuant, &attrs));
            let mut scratch = vec![1u64; shared.1 / 8 + 16];
            let at = (scratch.as_mut_ptr() as usize).next_multiple_of(64) as *mut u8;
            let k = kernels.get(OpKind::LinearQuant);
            let mut best = f64::MAX;
            for _ in 0..300 {
                let start = now(1);
                for _ in 0..8 { unsafe { k(&shared.0, 0..units(OpKind::LinearQuant, &attrs), std::slice::from_raw_parts_mut(at, shared.1)) } }
                best = best.min((now(1) - start) / 8.0);
            }
            println!("q{bits}g{group} {inp}x{out}: {:.1} GB/s, {:.0} ns per 16 rows", bytes as f64 / best / 1e9, best * 1e9 / (out as f64 / 16.0));
        }
        return;
    }
    let modes: &[(usize, usize, usize)] = &[(0,0,0),(9,0,0),(1,0,0),(0,8192,0),(0,16384,0),(1,16384,0),(1,32768,0),(1,65536,0),(2,0,4096),(3,0,32768),(3,4096,32768),(3,8192,32768),(4,0,0),(4,16384,0)];
    for (bits, inp) in [(4u8,1024u64),(4,2048),(4,3072),(4,4096),(4,5120),(8,1024),(8,2048),(8,3072),(8,4096),(6,1024),(6,4096)] {
        let f = affine(bits, 64);
        let kind = OpKind::LinearQuant;
        let bytes = |inp: u64, out: u64| out * (f.row_bytes(inp).unwrap() + f.row_groups(inp).unwrap() * 4);
        let long = (64 << 20) / bytes(inp, 1) / 32 * 32;
        let attrs = [1, inp, long, f.code()];
        let ops = operands(kind, &attrs);
        let plain = operand(DType::F32, 1, 1, 16 << 20);
        let small = [1, inp, 512, f.code()];
        let sops = operands(kind, &small);
        let mut t = vec![vec![]; modes.len()];
        let mut rd = vec![];
        let mut cache = vec![];
        for _ in 0..15 {
            let s = Instant::now();
            let sh = plain.ptr as usize;
            pool.run(threads, &|r, _| { for w in r { let n = (64usize << 20) / threads; std::hint::black_box(unsafe { rd64((sh + w * n) as *const u8, n) }); } });
            rd.push((64 << 20) as f64 / s.elapsed().as_secs_f64() / 1e9);
            for (i, m) in modes.iter().enumerate() {
                t[i].push(bytes(inp, long) as f64 / once(&pool, &kernels, kind, &attrs, &ops) / 1e9);
            }
            cache.push(bytes(inp, 512) as f64 / once(&pool, &kernels, kind, &small, &sops) / 1e9);
        }
        let show = |v: &mut Vec<f64>| { v.sort_by(f64::total_cmp); format!("{:5.1} {:5.1}", v[7], v[14]) };
        println!("q{bits} {inp}: read {}  cache {}", show(&mut rd), show(&mut cache));
        for (i, m) in modes.iter().enumerate() { println!("   {:?} {}", m, show(&mut t[i])); }
    }
}
#[target_feature(enable = "avx512f")]
unsafe fn rd64(p: *const u8, n: usize) -> u64 {
    let w = unsafe { std::slice::from_raw_parts(p.cast::<u64>(), n / 8) };
    let mut f = [0u64; 64];
    for c in w.chunks_exact(64) { for i in 0..64 { f[i] ^= c[i]; } }
    f.iter().fold(0, |a, b| a ^ b)
}
fn once(pool: &Pool, kernels: &Kernels, kind: OpKind, attrs: &[u64], operands: &[RawOperand]) -> f64 {
    let shared = Shared(OpCall { kind, operands, attrs }, scratch_bytes(kind, attrs));
    let scratch: Vec<Vec<u64>> = (0..pool.threads()).map(|_| vec![1u64; shared.1 / 8 + 16]).collect();
    let start = Instant::now();
    let body = |range: Range<usize>, worker: usize| {
        let shared = &shared;
        let at = (scratch[worker].as_ptr() as usize).next_multiple_of(64) as *mut u8;
        unsafe { kernels.get(kind)(&shared.0, range, std::slice::from_raw_parts_mut(at, shared.1)) }
    };
    pool.run(units(kind, attrs), &body);
    start.elapsed().as_secs_f64()
}
