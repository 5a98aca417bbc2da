//! Speed of the kernels that take the time of a model, next to what the memory gives.
//!
//! `cargo run --release -p loaf-runtime --example kernel_bench`: half a minute; with names after it
//! (`bf16 mxfp4`), those formats alone; with a number among them, on so many threads alone.
//! `LOAF_ISA` names the table of kernels. Every figure is the best of several runs, on one thread
//! (its own processor time) and on all physical cores (wall time). Weights are random bits; results
//! are not looked at. GGUF's block formats stand beside 4-bit affine weights, measured in the same
//! moment: the share of their bytes per second. With `ops`, every kind of op, on one thread.

use std::ops::Range;
use std::time::Instant;

use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{self, MAX_OPERANDS, OpAttrs, OpKind};
use loaf_kernels::{Kernels, OpCall, RawOperand, Run, scratch_bytes, units};
use loaf_runtime::bandwidth::BandwidthProbe;
use loaf_runtime::pool::{Pool, Turn, default_threads};

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
    // As the tensors of a loaf are: on page boundaries, large ones in large pages.
    let page: usize = if bytes > 4 << 20 { 2 << 20 } else { 4096 };
    let words = vec![0u64; bytes.div_ceil(8) + page / 8].leak();
    let at = words.as_ptr().align_offset(page);
    let words = &mut words[at..];
    #[cfg(target_os = "linux")]
    // SAFETY: advice about memory that is ours; nothing depends on the answer.
    unsafe {
        libc::madvise(words.as_mut_ptr().cast(), bytes / page * page, libc::MADV_HUGEPAGE);
    }
    words.iter_mut().for_each(|w| *w = word());
    RawOperand { ptr: words.as_mut_ptr().cast(), dtype, row_stride: heads * dim, head_stride: dim }
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
            Types::Plane(i) => format.and_then(|f| f.plane(i.into())).map(|p| p.dtype),
        };
        dtype.map_or(RawOperand::ABSENT, |d| {
            let [rows, heads, dim] = o.dims.map(|d| d.value(attrs).unwrap_or(0) as usize);
            operand(d, rows, heads, dim)
        })
    };
    let operands: Vec<RawOperand> = spec.operands.iter().map(make).collect();
    for (spec, operand) in spec.operands.iter().zip(&operands) {
        let count: u64 = spec.dims.iter().map(|d| d.value(attrs).unwrap_or(0)).product();
        // Numbers of slots and experts that exist, each expert chosen as often as others.
        let slots = attrs[0] * attrs.get(1).copied().unwrap_or(1);
        let number: &dyn Fn(u64) -> u64 = match spec.name {
            "order" => &|i| i,
            "starts" => &|i| i * slots / (count - 1),
            "ids" if kind == OpKind::ExpertSort => &|i| i * 7 % attrs[2],
            "ids" | "select" => &|i| i * 7 % attrs[1],
            _ => continue,
        };
        // SAFETY: the operand has so many words.
        (0..count).for_each(|i| unsafe { operand.ptr.cast::<u32>().add(i as usize).write(number(i) as u32) });
    }
    operands
}

/// Seconds on a clock that, on one thread, stands still while neighbours have the processor.
fn now(threads: usize) -> f64 {
    let clock = if threads == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the one struct it is given.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds of the fastest of the runs that fit into so many milliseconds: the op's rows are one
/// sequence's, from position `pos` on.
fn time_at(pos: usize, ms: u128, pool: &Pool, kernels: &Kernels, kind: OpKind, attrs: &[u64]) -> f64 {
    let operands = operands(kind, attrs);
    let runs = [Run { rows: attrs[0] as usize, pos, ..Run::ONE }];
    let call = OpCall { kind, operands: &operands, attrs, runs: &runs, again: false };
    let (kernel, bytes) = (kernels.get(kind).expect("an op of plans"), scratch_bytes(kind, attrs).expect("a size"));
    let shared = Shared(call, bytes);
    let scratch: Vec<usize> =
        (0..pool.threads()).map(|_| vec![0u64; shared.1 / 8 + 16].leak().as_mut_ptr() as usize).collect();
    let mut best = f64::INFINITY;
    let begin = Instant::now();
    while begin.elapsed().as_millis() < ms {
        let start = now(pool.threads());
        let body = |range: Range<usize>, turn: Turn| {
            let shared = &shared;
            let at = scratch[turn.worker].next_multiple_of(64) as *mut u8;
            // SAFETY: this worker's own scratch, of the size asked for; operands as the table
            // demands.
            unsafe {
                kernel(&OpCall { again: turn.again, ..shared.0 }, range, std::slice::from_raw_parts_mut(at, shared.1))
            }
        };
        pool.run(units(&call), &body);
        best = best.min(now(pool.threads()) - start);
    }
    best
}

fn time_for(ms: u128, pool: &Pool, kernels: &Kernels, kind: OpKind, attrs: &[u64]) -> f64 {
    time_at(0, ms, pool, kernels, kind, attrs)
}

fn time(pool: &Pool, kernels: &Kernels, kind: OpKind, attrs: &[u64]) -> f64 {
    time_for(150, pool, kernels, kind, attrs)
}

fn attention(rows: usize, (heads, kv_heads): (usize, usize), dim: usize, context: usize) -> Vec<u64> {
    words(op::attention::Attrs {
        rows,
        heads,
        kv_heads,
        dim,
        value_dim: dim,
        context,
        scale: 0.088,
        window: 0,
        soft_cap: 0.0,
        sinks: 0,
    })
}

fn words(attrs: impl OpAttrs) -> Vec<u64> {
    let (words, n) = attrs.words();
    words[..n].to_vec()
}

/// The op of products with weights in a format.
fn kind_of(format: WeightFormat) -> OpKind {
    if format.activation_group().is_some() { OpKind::LinearQuant } else { OpKind::LinearDense }
}

/// Every kind of op in microseconds; those of many sizes in several.
fn every_op(pool: &Pool, kernels: &Kernels) {
    use OpKind::*;
    let us = |name: &str, kind: OpKind, attrs: &[u64], pos: usize| {
        println!("  {name:<36} {:10.2} us", time_at(pos, 150, pool, kernels, kind, attrs) * 1e6);
    };
    let affine = |bits, group| WeightFormat::Affine { bits, group, params: DType::BF16 };
    let dense = [WeightFormat::Dense(DType::F32), WeightFormat::Dense(DType::BF16), WeightFormat::Mxfp8];
    for format in dense {
        for (rows, inputs, outputs) in [(1, 64, 512), (1, 1024, 512), (3, 1024, 512), (24, 1024, 64), (64, 1024, 512)] {
            let attrs = words(op::linear::Attrs { rows, inputs, outputs, format });
            us(&format!("linear {format} {rows} x {inputs} x {outputs}"), LinearDense, &attrs, 0);
        }
    }
    let formats = [4, 5, 6, 8].map(|bits| affine(bits, 64)).into_iter();
    let formats = formats.chain([affine(4, 32), WeightFormat::Mxfp4, WeightFormat::Nvfp4]);
    for format in formats {
        for (rows, inputs, outputs) in [(1, 1024, 512), (3, 1024, 512), (24, 1024, 512)] {
            let attrs = words(op::linear::Attrs { rows, inputs, outputs, format });
            us(&format!("linear {format} {rows} x {inputs} x {outputs}"), LinearQuant, &attrs, 0);
        }
    }
    for (kind, format) in [(ExpertLinearDense, dense[1]), (ExpertLinearQuant, affine(4, 64))] {
        for rows in [1, 64] {
            let (k, experts, inputs, outputs) = (8, 32, 512, 128);
            let attrs = op::expert_linear::Attrs { rows, k, experts, inputs, outputs, format, x_slots: 1 };
            us(&format!("experts {format} {rows} x 8 of 32"), kind, &words(attrs), 0);
        }
    }
    us("embed q4g64 1 x 1024", Embed, &[1, 4096, 1024, affine(4, 64).code()], 0);
    us("embed bf16 64 x 1024", Embed, &[64, 4096, 1024, dense[1].code()], 0);
    let (eps, zero) = (u64::from(1e-6f32.to_bits()), 0);
    for (heads, dim) in [(16, 8), (16, 64), (16, 128), (1, 1024), (1, 4096)] {
        us(&format!("rms_norm {heads} x {dim}"), RmsNorm, &[1, heads, dim, eps, zero], 0);
    }
    us("add_rms_norm 1024", AddRmsNorm, &[1, 1, 1024, eps, zero], 0);
    us("l2_norm 32 x 128", L2Norm, &[1, 32, 128, eps, eps], 0);
    us("softmax 128", Softmax, &[1, 128], 0);
    us("softmax 16 x 512", Softmax, &[16, 512], 0);
    us("quantize 4096", Quantize, &[1, 1, 4096, 64], 0);
    for (name, kind) in [("add", Add), ("mul", Mul), ("silu", Silu), ("sigmoid", Sigmoid)] {
        us(&format!("{name} 4096"), kind, &[1, 1, 4096], 0);
    }
    for (name, kind) in [("silu_mul", SiluMul), ("sigmoid_mul", SigmoidMul)] {
        us(&format!("{name} 3072"), kind, &[1, 1, 3072], 0);
    }
    us("mul_rows 64 x 1024", MulRows, &[64, 1024], 0);
    us("weighted_sum 1 x 8 x 1024", WeightedSum, &[1, 8, 1024], 0);
    us("gather_rows 16 x 1024", GatherRows, &[16, 64, 1024], 0);
    us("rope 16 x 128", Rope, &[1, 16, 128, 64], 0);
    us("rope_table 64", RopeTable, &[1, 64], 4000);
    us("kv_write 8 x 128", KvWrite, &[1, 8, 128, 4096], 4000);
    us("top_k 8 of 128", TopK, &[1, 128, 8, 1], 0);
    us("expert_sort 64 x 8 of 128", ExpertSort, &[64, 8, 128], 0);
    for (rows, heads, dim, pos) in [
        (1, (16, 8), 128, 31),
        (1, (16, 8), 128, 1023),
        (1, (14, 2), 64, 1023),
        (1, (32, 32), 80, 1023),
        (1, (16, 2), 256, 1023),
        (64, (16, 8), 128, 960),
        (64, (14, 2), 64, 960),
        (64, (16, 2), 256, 960),
    ] {
        let attrs = attention(rows, heads, dim, pos + rows);
        us(&format!("attention {}/{} x {dim}, {rows} at {pos}", heads.0, heads.1), Attention, &attrs, pos);
    }
    us("gdn_gates 32", GdnGates, &[1, 1, 32], 0);
    for rows in [1, 64] {
        us(&format!("conv {rows} x 8192"), Conv, &[rows, 1, 8192, 4], 0);
        us(&format!("conv_silu {rows} x 8192"), ConvSilu, &[rows, 1, 8192, 4], 0);
        us(&format!("gdn_scan {rows} x 32 heads"), GdnScan, &[rows, 16, 32, 128, 128, 0], 0);
    }
}

fn main() {
    let kernels = match std::env::var("LOAF_ISA") {
        Ok(name) => Kernels::named(&name).expect("LOAF_ISA"),
        Err(_) => Kernels::detect(),
    };
    if std::env::args().skip(1).any(|name| name == "ops") {
        println!("1 thread, {}", kernels.isa().name());
        return every_op(&Pool::new(1), &kernels);
    }
    let (numbers, only): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|a| a.parse::<usize>().is_ok());
    let short = only.iter().any(|a| a == "short");
    let only: Vec<_> = only.into_iter().filter(|a| a != "short").collect();
    let short_ms = if short { 600 } else { 150 };
    let numbers: Vec<usize> = numbers.iter().filter_map(|n| n.parse().ok()).collect();
    for threads in if numbers.is_empty() { vec![1, default_threads()] } else { numbers } {
        let pool = Pool::new(threads);
        let read = BandwidthProbe::new(threads).expect("memory to read").measure() / 1e9;
        println!("{} thread(s), {}: plain read {read:.1} GB/s", threads, kernels.isa().name());
        let affine = |bits, group| WeightFormat::Affine { bits, group, params: DType::BF16 };
        let formats = [
            affine(4, 64),
            affine(4, 32),
            affine(8, 64),
            affine(2, 64),
            affine(3, 64),
            affine(5, 64),
            affine(6, 64),
            WeightFormat::Mxfp8,
        ];
        // What types of GGUF become: Q4_1 and Q5_1 are affine.
        let mut of_gguf = [DType::F32, DType::F16, DType::BF16].map(WeightFormat::Dense).to_vec();
        of_gguf.extend([4, 5].map(|bits| WeightFormat::Affine { bits, group: 32, params: DType::F16 }));
        of_gguf.extend([WeightFormat::Mxfp4, WeightFormat::Nvfp4]);
        of_gguf.extend(Block::ALL.map(WeightFormat::Block));
        for format in formats.iter().chain(&of_gguf).copied() {
            if !only.is_empty() && !only.contains(&format.to_string()) {
                continue;
            }
            let kind = kind_of(format);
            let bytes = |inp: u64, out: u64| out * format.row_bytes(inp).unwrap_or(0);
            let (inp, out) = (1024, 3072);
            // Some microseconds in the second cache, tried often: neighbours on the same core slow
            // the rest.
            let tiny = time_for(short_ms, &pool, &kernels, kind, &[1, inp, 512, format.code()]);
            let tiles = time_for(short_ms, &pool, &kernels, kind, &[24, inp, 64, format.code()]);
            if short {
                println!(
                    "  {:<12} 512x1024: 1 row {:5.1} GB/s, {:5.2} us; 64x1024: 24 rows {:5.1} GMAC/s",
                    format.to_string(),
                    bytes(inp, 512) as f64 / tiny / 1e9,
                    tiny * 1e6,
                    (24 * inp * 64) as f64 / tiles / 1e9,
                );
                continue;
            }
            let small = time(&pool, &kernels, kind, &[1, inp, out, format.code()]);
            // About 64 MB, so that it comes from memory.
            let long = |format: WeightFormat| (64 << 20) / format.row_bytes(4096).unwrap_or(1) / 8 * 8;
            let large = time(&pool, &kernels, kind, &[1, 4096, long(format), format.code()]);
            let [chunk32, chunk] = [32, 128].map(|rows| time(&pool, &kernels, kind, &[rows, inp, out, format.code()]));
            let few = [2, 3, 4, 6, 8].map(|rows| time(&pool, &kernels, kind, &[rows, inp, out, format.code()]) * 1e6);
            let share = if of_gguf.contains(&format) {
                let speed = |ms, inp: u64, out: u64, format: WeightFormat| {
                    let seconds = time_for(ms, &pool, &kernels, kind_of(format), &[1, inp, out, format.code()]);
                    (out * format.row_bytes(inp).unwrap_or(0)) as f64 / seconds
                };
                let of = |inp, rows: &dyn Fn(WeightFormat) -> u64| {
                    // In turns, the best of each.
                    let mut best = [0.0f64; 2];
                    for _ in 0..3 {
                        for (best, format) in best.iter_mut().zip([format, formats[0]]) {
                            *best = best.max(speed(60, inp, rows(format), format));
                        }
                    }
                    best[0] / best[1]
                };
                let [tiny, wide] = [1024, 4096].map(|inp| of(inp, &|_| 512));
                let large = of(4096, &long);
                format!("; of {}: 512x1024 {tiny:.2}, 512x4096 {wide:.2}, 64 MB {large:.2}", formats[0])
            } else {
                String::new()
            };
            println!(
                "  {:<12} decode 512x1024 {:5.1} GB/s, 24 rows of 64x1024 {:5.1} GMAC/s; decode 3072x1024 {:5.1} GB/s ({:6.1} us), 64 MB {:5.1} GB/s; \
                 32 rows {:5.1}, 128 rows {:5.1} GMAC/s; 2, 3, 4, 6, 8 rows {few:.0?} us{share}",
                format.to_string(),
                bytes(inp, 512) as f64 / tiny / 1e9,
                (24 * inp * 64) as f64 / tiles / 1e9,
                bytes(inp, out) as f64 / small / 1e9,
                small * 1e6,
                bytes(4096, long(format)) as f64 / large / 1e9,
                (32 * inp * out) as f64 / chunk32 / 1e9,
                (128 * inp * out) as f64 / chunk / 1e9,
            );
        }
        if !only.is_empty() {
            continue;
        }
        for (rows, pos) in [(1, 31), (1, 4095), (128, 3968)] {
            let attrs = attention(rows, (16, 8), 128, pos + rows);
            let s = time_at(pos, 150, &pool, &kernels, OpKind::Attention, &attrs);
            let macs = (rows * 16 * 128 * 2 * (pos + rows)) as f64;
            println!("  attention 16/8 heads, {rows} row(s) at {pos}: {:.0} us, {:.1} GMAC/s", s * 1e6, macs / s / 1e9);
        }
        let s = time(&pool, &kernels, OpKind::GdnScan, &[128, 16, 32, 128, 128, 0]);
        println!("  gdn scan 32 heads, 128 rows: {:.0} us", s * 1e6);
    }
}
