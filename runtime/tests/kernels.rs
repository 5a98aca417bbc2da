//! Every kernel table against the contract spelled out in plain loops, bit for bit.
//!
//! Calls are made up from the op table itself: random attributes, operands laid out with random gaps between rows
//! and heads, each buffer ending right before an unreadable page, so that a kernel which reads or writes past its
//! operands dies here. All memory is compared afterwards, the gaps included.

use half::{bf16, f16};
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{Dim, Mode, OPS, OpKind, Types};
use loaf_runtime::kernels::{Kernels, OpCall, RawOperand, Split, in_place, scratch_bytes, units};

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    /// Uniform in `low..=high`.
    fn int(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.next() as usize % from.len()]
    }
    /// Mostly around 1, sometimes 0, small or large.
    fn float(&mut self) -> f32 {
        let x = (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        match self.next() % 32 {
            0 => 0.0,
            1 => x * 1e-4,
            2 => x * 30.0,
            _ => x * 2.0,
        }
    }
}

/// Memory whose last byte is followed by a page nobody may touch.
struct Guarded {
    base: *mut u8,
    mapped: usize,
    len: usize,
}

const PAGE: usize = 16384;

impl Guarded {
    fn new(len: usize) -> Guarded {
        let mapped = len.next_multiple_of(PAGE) + PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh anonymous mapping; its last page is then closed.
        let base = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), mapped, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(base.byte_add(mapped - PAGE), PAGE, libc::PROT_NONE), 0);
            base.cast::<u8>()
        };
        Guarded { base, mapped, len }
    }
    fn ptr(&self) -> *mut u8 {
        // SAFETY: `len` bytes lie before the guard page.
        unsafe { self.base.add(self.mapped - PAGE - self.len) }
    }
    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, and written only between borrows.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len) }
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped and ours.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(), self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.base.cast(), self.mapped) };
    }
}

/// An operand's memory and layout.
struct Buffer {
    memory: Guarded,
    dtype: DType,
    dims: [usize; 3],
    row_stride: usize,
    head_stride: usize,
}

impl Buffer {
    fn new(dtype: DType, dims: [u64; 3], rng: &mut Rng) -> Buffer {
        let [rows, heads, dim] = dims.map(|d| d as usize);
        let mut gap = || if rng.next().is_multiple_of(2) { 0 } else { rng.int(1, 9) as usize };
        let head_stride = dim + gap();
        let row_stride = heads * head_stride + gap();
        // Only as long as the last element needs.
        let elems = if rows * heads * dim == 0 { 0 } else { (rows - 1) * row_stride + (heads - 1) * head_stride + dim };
        let memory = Guarded::new(elems * dtype.bytes() as usize);
        Buffer { memory, dtype, dims: [rows, heads, dim], row_stride, head_stride }
    }
    fn copy(&self) -> Buffer {
        let mut memory = Guarded::new(self.memory.len);
        memory.bytes_mut().copy_from_slice(self.memory.bytes());
        Buffer { memory, ..*self }
    }
    fn raw(&self) -> RawOperand {
        RawOperand {
            ptr: self.memory.ptr(),
            dtype: self.dtype,
            row_stride: self.row_stride,
            head_stride: self.head_stride,
        }
    }
    /// Sets every element, gaps included, from `f`.
    fn fill(&mut self, mut f: impl FnMut() -> f32) {
        let dtype = self.dtype;
        for element in self.memory.bytes_mut().chunks_exact_mut(dtype.bytes() as usize) {
            match dtype {
                DType::F32 => element.copy_from_slice(&f().to_ne_bytes()),
                DType::F16 => element.copy_from_slice(&f16::from_f32(f()).to_ne_bytes()),
                DType::BF16 => element.copy_from_slice(&bf16::from_f32(f()).to_ne_bytes()),
                DType::U32 => element.copy_from_slice(&(f() as u32).to_ne_bytes()),
                DType::I8 => element[0] = f() as i8 as u8,
                DType::U8 => element[0] = f() as u8,
            }
        }
    }
    /// Sets the elements of row 0 of a `u32` operand.
    fn set_ids(&mut self, ids: &[u32]) {
        for (i, id) in ids.iter().enumerate() {
            self.memory.bytes_mut()[4 * i..4 * i + 4].copy_from_slice(&id.to_ne_bytes());
        }
    }
}

/// A call with memory of its own.
struct Case {
    kind: OpKind,
    attrs: Vec<u64>,
    /// `None`: absent.
    buffers: Vec<Option<Buffer>>,
}

const FORMATS_OF_PARAMS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Every format the integer matmuls take.
fn quant_formats() -> Vec<WeightFormat> {
    let mut all = vec![WeightFormat::Mxfp4, WeightFormat::Nvfp4];
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (j, group) in [32, 64, 128].into_iter().enumerate() {
            all.push(WeightFormat::Affine { bits, group, params: FORMATS_OF_PARAMS[(i + j) % 3] });
        }
    }
    all
}

/// Every format the float matmuls take.
fn dense_formats() -> Vec<WeightFormat> {
    let mut all: Vec<_> = FORMATS_OF_PARAMS.into_iter().map(WeightFormat::Dense).collect();
    all.push(WeightFormat::Mxfp8);
    all
}

fn formats(kind: OpKind) -> Vec<WeightFormat> {
    match kind {
        OpKind::LinearQuant | OpKind::ExpertLinearQuant => quant_formats(),
        OpKind::LinearDense | OpKind::ExpertLinearDense => dense_formats(),
        OpKind::Embed => quant_formats().into_iter().chain(dense_formats()).collect(),
        _ => vec![WeightFormat::Dense(DType::F32)],
    }
}

/// Random attributes of an op.
fn attributes(kind: OpKind, format: WeightFormat, rng: &mut Rng) -> Vec<u64> {
    use OpKind::*;
    let real = |x: f32| u64::from(x.to_bits());
    let rows = rng.pick(&[1, 1, 2, 3, 5, 9, 17]);
    let dim = rng.pick(&[1, 3, 7, 8, 12, 20, 64, 100, 172]);
    let heads = rng.int(1, 4);
    // A multiple of the format's group, odd where there is none.
    let inp = match format.group() {
        None => rng.pick(&[1, 5, 8, 24, 43, 64, 172]),
        Some(group) => group * rng.int(1, 11),
    };
    let out = rng.pick(&[1, 3, 8, 9, 16, 24, 29, 43]);
    match kind {
        Embed => vec![rows, 37, inp, format.code()],
        RmsNorm => vec![rows, heads, dim, real(1e-6), real(rng.pick(&[0.0, 1.0]))],
        AddRmsNorm => vec![rows, 1, dim, real(1e-6), real(rng.pick(&[0.0, 1.0]))],
        L2Norm => vec![rows, heads, dim, real(1e-6), real(0.25)],
        MulRows | Softmax => vec![rows, dim],
        Quantize => {
            let group = rng.pick(&[16, 32, 64, 128, 5]);
            vec![rows, heads, group * rng.int(1, 5), group]
        }
        LinearDense | LinearQuant => vec![rows, inp, out, format.code()],
        ExpertSort => vec![rows, rng.int(1, 5), rng.int(5, 12)],
        ExpertLinearDense | ExpertLinearQuant => {
            let (k, experts) = (rng.int(1, 3), rng.int(3, 6));
            vec![rows, k, experts, inp.min(format.group().unwrap_or(50) * 5), out, format.code(), rng.pick(&[1, k])]
        }
        TopK => vec![rows, rng.int(8, 40), rng.int(1, 8), rng.next() % 2],
        RopeTable => vec![rows, dim, rng.int(0, 300_000)],
        KvWrite => vec![rows, heads, dim, rng.int(0, 40)],
        SelectRows => vec![rows, dim, rng.int(0, 40)],
        Rope => vec![rows, heads, dim.max(2), rng.int(1, dim.max(2) / 2)],
        Attention => {
            let kv_heads = rng.int(1, 3);
            let pos = rng.pick(&[0, 1, 7, 100, 250, 255, 256, 300, 700]);
            let window = rng.pick(&[0, 0, 1, 5, 64, 300]);
            let dim = rng.pick(&[8, 12, 20, 64, 100]);
            vec![rows, kv_heads * rng.int(1, 3), kv_heads, dim, pos, real(0.3), window]
        }
        Conv | ConvSilu => vec![rows, heads, rng.pick(&[1, 12, 64, 70, 130]), rng.int(1, 5)],
        GdnScan => {
            let k_heads = rng.int(1, 3);
            vec![rows, k_heads, k_heads * rng.int(1, 3), rng.pick(&[4, 12, 33]), rng.pick(&[3, 8, 20, 64, 77])]
        }
        _ => vec![rows, heads, dim],
    }
}

impl Case {
    fn new(kind: OpKind, attrs: Vec<u64>, rng: &mut Rng) -> Case {
        let spec = kind.spec();
        let format = spec.format_attr().and_then(|i| WeightFormat::from_code(attrs[i]));
        let mut buffers = Vec::new();
        for operand in spec.operands {
            let dtype = match operand.types {
                Types::Is(dtype) => Some(dtype),
                Types::Float => Some(rng.pick(&FORMATS_OF_PARAMS)),
                Types::Cache => Some(rng.pick(&[DType::F32, DType::F16])),
                Types::Weight => format.map(WeightFormat::weight_dtype),
                Types::Scales => format.and_then(WeightFormat::scales_dtype),
                Types::Biases => format.and_then(WeightFormat::biases_dtype),
            };
            buffers.push(dtype.map(|dtype| {
                let dims = operand.dims.map(|d| d.value(&attrs).unwrap());
                let mut b = Buffer::new(dtype, dims, rng);
                match (operand.name, dtype) {
                    ("decay" | "beta", _) => b.fill(|| rng.float().abs() % 1.0),
                    ("xscales", _) => b.fill(|| rng.float().abs()),
                    // Packed codes: any bits.
                    ("weight", DType::U32) => {
                        b.memory.bytes_mut().iter_mut().for_each(|byte| *byte = rng.next() as u8);
                    }
                    (_, DType::U8) if format == Some(WeightFormat::Nvfp4) => b.fill(|| rng.int(0, 255) as f32),
                    // Now and then a power of two that is subnormal, or close to it.
                    (_, DType::U8) => {
                        b.fill(|| if rng.int(0, 15) == 0 { rng.int(0, 2) } else { rng.int(115, 135) } as f32)
                    }
                    (_, DType::I8) => b.fill(|| rng.int(0, 254) as f32 - 127.0),
                    (_, DType::U32) => b.fill(|| rng.int(0, 4) as f32),
                    _ => b.fill(|| rng.float()),
                }
                b
            }));
        }
        let mut case = Case { kind, attrs, buffers };
        case.route(rng);
        case
    }

    /// Gives expert matmuls a valid routing.
    fn route(&mut self, rng: &mut Rng) {
        if !matches!(self.kind, OpKind::ExpertLinearDense | OpKind::ExpertLinearQuant) {
            return;
        }
        let (slots, experts) = (self.attrs[0] * self.attrs[1], self.attrs[2] as u32);
        let ids: Vec<u32> = (0..slots).map(|_| rng.int(0, u64::from(experts) - 1) as u32).collect();
        let mut order: Vec<u32> = (0..slots as u32).collect();
        order.sort_by_key(|s| ids[*s as usize]);
        let starts: Vec<u32> = (0..=experts).map(|e| ids.iter().filter(|i| **i < e).count() as u32).collect();
        let index = |name| self.kind.spec().operand_index(name).unwrap();
        let (o, s) = (index("order"), index("starts"));
        self.buffers[o].as_mut().unwrap().set_ids(&order);
        self.buffers[s].as_mut().unwrap().set_ids(&starts);
    }

    fn copy(&self) -> Case {
        let buffers = self.buffers.iter().map(|b| b.as_ref().map(Buffer::copy)).collect();
        Case { kind: self.kind, attrs: self.attrs.clone(), buffers }
    }

    fn raw(&self) -> Vec<RawOperand> {
        self.buffers.iter().map(|b| b.as_ref().map_or(RawOperand::ABSENT, Buffer::raw)).collect()
    }

    /// Runs the whole call in parts of `step` units.
    fn run(&self, kernels: &Kernels, step: usize) {
        call(kernels, self.kind, &self.raw(), &self.attrs, step);
    }

    fn assert_same(&self, other: &Case, what: &str) {
        for ((spec, a), b) in self.kind.spec().operands.iter().zip(&self.buffers).zip(&other.buffers) {
            if let (Some(a), Some(b)) = (a, b) {
                let differ = a.memory.bytes().iter().zip(b.memory.bytes()).position(|(a, b)| a != b);
                let at = differ.map(|byte| byte / a.dtype.bytes() as usize);
                let format = self.kind.spec().format_attr().and_then(|i| WeightFormat::from_code(self.attrs[i]));
                assert_eq!(
                    at, None,
                    "{what}: {:?} {:?} {format:?}: operand {} {:?} strides {} {} differs at element",
                    self.kind, self.attrs, spec.name, a.dims, a.row_stride, a.head_stride
                );
            }
        }
    }
}

/// Runs a call in parts of `step` units, on scratch full of rubbish.
fn call(kernels: &Kernels, kind: OpKind, operands: &[RawOperand], attrs: &[u64], step: usize) {
    let bytes = scratch_bytes(kind, attrs);
    let mut scratch = vec![0xa5u8; bytes + 64];
    let skip = scratch.as_ptr().align_offset(64);
    let total = units(kind, attrs);
    for start in (0..total).step_by(step) {
        let part = start..(start + step).min(total);
        let call = OpCall { kind, operands, attrs };
        // SAFETY: operands of the extents the table demands, scratch of the size asked for, a detected table.
        unsafe { kernels.get(kind)(&call, part, &mut scratch[skip..skip + bytes]) };
    }
}

fn plan_ops() -> impl Iterator<Item = OpKind> {
    OPS.iter().filter(|s| s.in_plan).map(|s| s.kind)
}

/// Calls `f` with some random cases of every op, every format.
fn for_cases(seed: u64, per_format: usize, mut f: impl FnMut(&Case, &mut Rng)) {
    let mut rng = Rng(seed);
    for kind in plan_ops() {
        let formats = formats(kind);
        let rounds = per_format * if formats.len() == 1 { 8 } else { 1 };
        for format in formats {
            for _ in 0..rounds {
                let attrs = attributes(kind, format, &mut rng);
                let case = Case::new(kind, attrs, &mut rng);
                f(&case, &mut rng);
            }
        }
    }
}

fn agrees_with_the_contract(kernels: Kernels) {
    for_cases(1, 8, |case, _| {
        let (expected, got) = (case.copy(), case.copy());
        expected.run(&Kernels::naive(), usize::MAX);
        got.run(&kernels, usize::MAX);
        expected.assert_same(&got, kernels.isa().name());
    });
}

fn any_partition_gives_the_same(kernels: Kernels) {
    for_cases(2, 3, |case, rng| {
        let (whole, parts) = (case.copy(), case.copy());
        whole.run(&kernels, usize::MAX);
        parts.run(&kernels, rng.int(1, 3) as usize);
        whole.assert_same(&parts, "parts");
    });
}

/// A call of `n` rows against `n` calls of one row: the chunk size of a prefill changes nothing.
fn rows_together_are_rows_apart(kernels: Kernels) {
    for_cases(3, 3, |case, _| {
        let spec = case.kind.spec();
        if spec.operands.iter().any(|o| o.name == "order") {
            return;
        }
        let (together, apart) = (case.copy(), case.copy());
        together.run(&kernels, usize::MAX);
        for r in 0..case.attrs[0] as usize {
            let mut attrs = case.attrs.clone();
            attrs[0] = 1;
            if let Some(pos) = spec.attrs.iter().position(|a| a.name == "pos") {
                attrs[pos] += r as u64;
            }
            let mut operands = apart.raw();
            for (o, spec) in operands.iter_mut().zip(spec.operands) {
                let elements = match spec.dims {
                    [Dim::Attr(0), ..] => r * o.row_stride,
                    [.., Dim::Attr(0)] => r,
                    _ => 0,
                };
                // SAFETY: row `r` exists.
                o.ptr = unsafe { o.ptr.add(elements * o.dtype.bytes() as usize) };
            }
            call(&kernels, case.kind, &operands, &attrs, usize::MAX);
        }
        together.assert_same(&apart, "one row at a time");
    });
}

/// An output laid over an input of the same extent, where [`in_place`] says so.
fn in_place_is_the_same(kernels: Kernels) {
    for_cases(4, 3, |case, _| {
        if !in_place(case.kind) {
            return;
        }
        let spec = case.kind.spec();
        let apart = case.copy();
        apart.run(&kernels, usize::MAX);
        let out = spec.operands.len() - 1;
        let alike = |i: &usize| {
            let o = &spec.operands[*i];
            o.mode == Mode::In && o.dims == spec.operands[out].dims && o.types == Types::Is(DType::F32)
        };
        for input in (0..out).filter(alike) {
            let over = case.copy();
            let mut operands = over.raw();
            operands[out] = operands[input];
            call(&kernels, case.kind, &operands, &case.attrs, usize::MAX);
            let (expected, got) = (apart.raw()[out], operands[input]);
            let [rows, heads, dim] = apart.buffers[out].as_ref().unwrap().dims;
            for (r, h, i) in (0..rows).flat_map(|r| (0..heads).flat_map(move |h| (0..dim).map(move |i| (r, h, i)))) {
                // SAFETY: an element of the extent.
                let at = |o: &RawOperand| unsafe {
                    o.ptr.cast::<u32>().add(r * o.row_stride + h * o.head_stride + i).read_unaligned()
                };
                assert_eq!(at(&expected), at(&got), "{:?} over operand {input}, element {r} {h} {i}", case.kind);
            }
        }
    });
}

/// Activations that quantisation must survive: nothing, infinities, NaNs, the smallest and largest numbers.
fn quantize_edges(kernels: Kernels) {
    let mut rng = Rng(5);
    let (tiny, huge) = (f32::from_bits(1), f32::MAX);
    let special = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, tiny, -tiny, huge, -huge, 1.0, 0.5, -2.5];
    for round in 0..200 {
        let mut case = Case::new(OpKind::Quantize, vec![2, 2, 64, 32], &mut rng);
        // Magnitudes whose scale's inverse overflows come without greater ones, too.
        let small = [tiny, 1e-38, -3e-38, 0.0, f32::NAN];
        let choice = if round % 4 == 0 { &small[..1 + round / 4 % 5] } else { &special[..1 + round % special.len()] };
        case.buffers[0].as_mut().unwrap().fill(|| rng.pick(choice));
        let (expected, got) = (case.copy(), case.copy());
        expected.run(&Kernels::naive(), usize::MAX);
        got.run(&kernels, usize::MAX);
        expected.assert_same(&got, "quantize edges");
    }
}

/// The largest codes of either sign against the largest weights: no partial sum may saturate.
fn extreme_codes_do_not_saturate(kernels: Kernels) {
    let mut rng = Rng(10);
    for format in quant_formats() {
        for rows in [1, 7] {
            for sign in [127u8, 127u8.wrapping_neg()] {
                for weights in [0xff, 0x77, 0x00] {
                    let group = format.group().unwrap();
                    let mut case = Case::new(OpKind::LinearQuant, vec![rows, 3 * group, 19, format.code()], &mut rng);
                    case.buffers[0].as_mut().unwrap().memory.bytes_mut().fill(sign);
                    case.buffers[3].as_mut().unwrap().memory.bytes_mut().fill(weights);
                    let (expected, got) = (case.copy(), case.copy());
                    expected.run(&Kernels::naive(), usize::MAX);
                    got.run(&kernels, usize::MAX);
                    expected.assert_same(&got, "extreme codes");
                }
            }
        }
    }
}

/// Whatever the numbers, no panic and nothing out of bounds; ids and slots may be nonsense too.
fn nonsense_is_harmless(kernels: Kernels) {
    for_cases(6, 2, |case, rng| {
        let mut case = case.copy();
        for (buffer, spec) in case.buffers.iter_mut().zip(case.kind.spec().operands) {
            if let (Some(buffer), true) = (buffer, spec.mode != Mode::Out) {
                buffer.memory.bytes_mut().iter_mut().for_each(|byte| *byte = rng.next() as u8);
            }
        }
        case.run(&kernels, usize::MAX);
    });
}

/// The silu of a vector goes through `exp`; sampled over all bit patterns, against the scalar function.
fn exp_is_the_scalar_exp(kernels: Kernels) {
    let n = 1 << 16;
    let mut rng = Rng(7);
    let mut case = Case::new(OpKind::Sigmoid, vec![1, 1, n], &mut rng);
    for round in 0..64u32 {
        let mut bits = round;
        case.buffers[0].as_mut().unwrap().fill(|| {
            bits = bits.wrapping_add(65_537);
            f32::from_bits(bits)
        });
        case.run(&kernels, usize::MAX);
        let words = |i: usize| case.buffers[i].as_ref().unwrap().memory.bytes().chunks_exact(4);
        for (x, y) in words(0).zip(words(1)) {
            let float = |b: &[u8]| f32::from_ne_bytes(b.try_into().unwrap());
            let (x, y) = (float(x), float(y));
            let expected = loaf_runtime::math::sigmoid(x);
            assert!(
                y.to_bits() == expected.to_bits() || (y.is_nan() && expected.is_nan()),
                "{x:e}: {y:e} {expected:e}"
            );
        }
    }
}

/// Attention cut by blocks of positions gives the bits of attention in one piece: few rows, all sorts of windows, more blocks
/// than a round has.
fn attention_by_blocks_is_the_same(kernels: Kernels) {
    let Some(split) = kernels.split() else { return };
    let mut rng = Rng(11);
    for (rows, pos, window) in
        [(1, 0, 0), (1, 255, 0), (1, 256, 0), (3, 1000, 0), (2, 700, 300), (1, 8447, 0), (2, 8900, 0), (1, 9000, 8500)]
    {
        for (heads, kv_heads, dim) in [(2, 1, 8), (3, 3, 24), (8, 2, 40)] {
            let scale = u64::from(0.3f32.to_bits());
            let attrs = vec![rows, heads, kv_heads, dim, pos, scale, window];
            let case = Case::new(OpKind::Attention, attrs.clone(), &mut rng);
            let (expected, got) = (case.copy(), case.copy());
            expected.run(&kernels, usize::MAX);
            let operands = got.raw();
            let call = OpCall { kind: OpKind::Attention, operands: &operands, attrs: &attrs };
            assert_eq!(Split::pays(&call, 64), pos + rows > 256, "{attrs:?}");
            let mut shared = vec![f32::NAN; Split::shared_floats(OpKind::Attention, &attrs)];
            let mut scratch = vec![0u64; scratch_bytes(OpKind::Attention, &attrs) / 8 + 16];
            let skip = scratch.as_ptr().align_offset(64);
            // SAFETY: eight-byte words as bytes.
            let scratch = unsafe { scratch[skip..].align_to_mut::<u8>().1 };
            for round in Split::rounds(&call) {
                // Units one by one, last first: their order must not matter.
                for u in (0..kv_heads as usize * round.count).rev() {
                    // SAFETY: operands as the table demands, memory of the sizes asked for.
                    unsafe { (split.parts)(&call, round, u..u + 1, shared.as_mut_ptr(), scratch) }
                }
                // SAFETY: as above.
                unsafe { (split.merge)(&call, round, 0..kv_heads as usize, shared.as_mut_ptr(), scratch) }
            }
            expected.assert_same(&got, &format!("by blocks {attrs:?}"));
        }
    }
}

macro_rules! suite {
    ($($(#[$attr:meta])* $isa:ident = $kernels:expr;)*) => { $(
        $(#[$attr])*
        mod $isa {
            use super::*;
            suite!(@tests $kernels, agrees_with_the_contract, any_partition_gives_the_same,
                rows_together_are_rows_apart, in_place_is_the_same, quantize_edges, extreme_codes_do_not_saturate, nonsense_is_harmless,
                exp_is_the_scalar_exp, attention_by_blocks_is_the_same);
        }
    )* };
    (@tests $kernels:expr, $($test:ident),*) => { $(
        #[test]
        fn $test() {
            // A CPU without the features has nothing to test.
            if let Some(kernels) = $kernels {
                super::$test(kernels);
            }
        }
    )* };
}

suite! {
    scalar = Some(Kernels::scalar());
    avx2 = Kernels::avx2();
    avx_vnni = Kernels::avx_vnni();
    avx512 = Kernels::avx512();
    #[cfg(target_arch = "aarch64")]
    neon = Kernels::neon();
}

/// The oracle's own reading of packed rows, against a row packed bit by bit.
#[test]
fn embedding_reads_codes_least_significant_bit_first() {
    let mut rng = Rng(8);
    for bits in [2u64, 3, 4, 5, 6, 8] {
        let format = WeightFormat::Affine { bits: bits as u8, group: 32, params: DType::F32 };
        let mut case = Case::new(OpKind::Embed, vec![1, 1, 96, format.code()], &mut rng);
        let codes: Vec<u64> = (0..96).map(|_| rng.next() & ((1 << bits) - 1)).collect();
        let mut stream = vec![0u8; 96 * bits as usize / 8];
        for (i, code) in codes.iter().enumerate() {
            for b in 0..bits as usize {
                let at = i * bits as usize + b;
                stream[at / 8] |= ((code >> b & 1) as u8) << (at % 8);
            }
        }
        case.buffers[1].as_mut().unwrap().memory.bytes_mut()[..stream.len()].copy_from_slice(&stream);
        case.buffers[2].as_mut().unwrap().fill(|| 1.0);
        case.buffers[3].as_mut().unwrap().fill(|| 0.0);
        let fast = [Kernels::avx2(), Kernels::avx_vnni(), Kernels::avx512(), Kernels::neon()];
        for kernels in [Kernels::naive(), Kernels::scalar()].into_iter().chain(fast.into_iter().flatten()) {
            case.run(&kernels, 1);
            let out = case.buffers[4].as_ref().unwrap().memory.bytes();
            let got: Vec<u64> = out.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap()) as u64).collect();
            assert_eq!(got, codes, "{bits} bits, {}", kernels.isa().name());
        }
    }
}

#[test]
fn scratch_does_not_depend_on_position_and_grows_with_rows() {
    let mut rng = Rng(9);
    for kind in plan_ops() {
        for format in formats(kind) {
            let mut attrs = attributes(kind, format, &mut rng);
            let mut last = 0;
            for rows in 1..20 {
                attrs[0] = rows;
                let bytes = scratch_bytes(kind, &attrs);
                assert!(bytes >= last, "{kind:?} {attrs:?}");
                last = bytes;
                if let Some(pos) = kind.spec().attrs.iter().position(|a| a.name == "pos") {
                    let mut later = attrs.clone();
                    later[pos] += 100_000;
                    assert_eq!(scratch_bytes(kind, &later), bytes, "{kind:?}");
                }
            }
        }
    }
}
