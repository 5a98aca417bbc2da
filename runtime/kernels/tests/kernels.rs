//! Every kernel table against the contract spelled out in plain loops, bit for bit.
//!
//! Calls are made up from the op table itself: random attributes, operands laid out with random
//! gaps between rows and heads, each buffer ending right before an unreadable page, so that a
//! kernel which reads or writes past its operands dies here. The rows are those of several
//! sequences, in slots and versions of state of their own. All memory is compared afterwards, the
//! gaps and the other slots included.

use half::{bf16, f16};
use loaf_formats::block::Block;
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::op::{self, ATTENTION_BLOCK, Dim, MAX_COUNT, Mode, OpAttrs, OpKind, OperandSpec, Types};
use loaf_kernels::{Kernels, OpCall, RawOperand, Run, Split, cost, scratch_bytes, units};

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

/// Elements of rows, heads and dim with these strides, up to the last.
fn elements([rows, heads, dim]: [usize; 3], row_stride: usize, head_stride: usize) -> usize {
    if rows * heads * dim == 0 { 0 } else { (rows - 1) * row_stride + (heads - 1) * head_stride + dim }
}

impl Buffer {
    /// `copies` of it, `apart` bytes from each other.
    fn new(dtype: DType, dims: [u64; 3], copies: usize, apart: usize, rng: &mut Rng) -> Buffer {
        let [rows, heads, dim] = dims.map(|d| d as usize);
        let mut gap = || if rng.next().is_multiple_of(2) { 0 } else { rng.int(1, 9) as usize };
        let head_stride = dim + gap();
        let row_stride = heads * head_stride + gap();
        // Only as long as the last element needs.
        let bytes = elements([rows, heads, dim], row_stride, head_stride) * dtype.bytes() as usize;
        assert!(copies == 1 || bytes <= apart);
        let memory = Guarded::new((copies - 1) * apart + bytes);
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
    runs: Vec<Run>,
    /// `None`: absent.
    buffers: Vec<Option<Buffer>>,
}

/// Bytes that no operand's slot or version is longer than, gaps included.
fn slot_bytes(spec: &OperandSpec, attrs: &[u64]) -> usize {
    let [rows, heads, dim] = spec.dims.map(|d| d.value(attrs).unwrap() as usize);
    (elements([rows, heads, dim], heads * (dim + 9) + 9, dim + 9) * 4).next_multiple_of(64)
}

/// Slots and versions of the state of a case's operands.
const COPIES: usize = 24;

fn is_cache(spec: &OperandSpec) -> bool {
    spec.types == Types::Cache
}

fn is_recurrent(spec: &OperandSpec) -> bool {
    spec.mode == Mode::InOut && !is_cache(spec)
}

/// The op's rows as runs of up to three sequences. Of recurrent state each has as many versions as
/// it writes, and the one it reads: the same, another, or one that is overwritten after it was
/// read.
fn runs(kind: OpKind, attrs: &[u64], rng: &mut Rng) -> Vec<Run> {
    let spec = kind.spec();
    let value = |name: &str| spec.attrs.iter().position(|a| a.name == name).map(|i| attrs[i] as usize);
    let apart = |of: fn(&OperandSpec) -> bool| {
        spec.operands.iter().filter(|o| of(o)).map(|o| slot_bytes(o, attrs)).max().unwrap_or(0)
    };
    let (slot, version) = (apart(is_cache), apart(is_recurrent));
    let (rows, context) = (attrs[0] as usize, value("context").unwrap_or(300_000));
    // Slots in any order.
    let mut slots = [0, 1, 2];
    slots.swap(0, rng.int(0, 2) as usize);
    slots.swap(1, rng.int(1, 2) as usize);
    let (mut out, mut first, mut used) = (Vec::new(), 0, 0);
    while first < rows {
        let rows = if out.len() == 2 { rows - first } else { rng.int(1, (rows - first) as u64) as usize };
        let pos = rng.pick(&[0, 1, 7, 100, 250, 255, 256, 300, context]).min(context - rows);
        let (stride, versions) = if rng.next().is_multiple_of(2) { (0, 1) } else { (version, rows) };
        let to = used;
        let from = match rng.int(0, 2) {
            0 => to,
            1 => to + versions,
            _ => to + versions - 1,
        };
        used += versions + 1;
        let cache = slots[out.len()] * slot;
        out.push(Run { first, rows, pos, cache, from: from * version, to: to * version, stride });
        first += rows;
    }
    assert!(used <= COPIES);
    out
}

fn words(attrs: impl OpAttrs) -> Vec<u64> {
    let (words, n) = attrs.words();
    words[..n].to_vec()
}

const FORMATS_OF_PARAMS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Every format the integer matmuls take.
fn quant_formats() -> Vec<WeightFormat> {
    let mut all = vec![WeightFormat::Mxfp4, WeightFormat::Nvfp4];
    all.extend(Block::ALL.map(WeightFormat::Block));
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
    let dim = rng.pick(&[1, 3, 7, 8, 12, 20, 31, 64, 100, 128, 172]);
    let heads = rng.int(1, 4);
    // A multiple of the format's group, odd where there is none.
    let inp = match format.group() {
        None => rng.pick(&[1, 5, 8, 24, 32, 43, 64, 172]),
        Some(_) => format.unit() * rng.int(1, if format.unit() > 128 { 3 } else { 11 }),
    };
    let out = rng.pick(&[1, 3, 8, 9, 16, 24, 29, 43]);
    let attrs = match kind {
        View | Linear | ExpertLinear => panic!("{kind:?} has no kernel"),
        Embed => vec![rows, 37, inp, format.code()],
        RmsNorm => vec![rows, heads, dim, real(1e-6), real(rng.pick(&[0.0, 1.0]))],
        AddRmsNorm => vec![rows, 1, dim, real(1e-6), real(rng.pick(&[0.0, 1.0]))],
        L2Norm => vec![rows, heads, dim, real(1e-6), real(0.25)],
        Add | Mul | Silu | Sigmoid | SiluMul | SigmoidMul | GdnGates => vec![rows, heads, dim],
        MulRows | Softmax => vec![rows, dim],
        WeightedSum => vec![rows, heads, dim],
        Quantize => {
            let group = rng.pick(&[16, 32, 64, 128]);
            vec![rows, heads, group * rng.int(1, 5), group]
        }
        LinearDense | LinearQuant => vec![rows, inp, out, format.code()],
        ExpertSort => vec![rows, rng.int(1, 5), rng.int(5, 12)],
        ExpertLinearDense | ExpertLinearQuant => {
            let (k, experts) = (rng.int(1, 3), rng.int(3, 6));
            vec![
                rows,
                k,
                experts,
                inp.min(format.group().map_or(250, |_| format.unit() * 5)),
                out,
                format.code(),
                rng.pick(&[1, k]),
            ]
        }
        TopK => vec![rows, rng.int(8, 40), rng.int(1, 8), rng.next() % 2],
        RopeTable => vec![rows, dim],
        KvWrite => vec![rows, heads, dim, rows + rng.int(0, 40)],
        GatherRows => vec![rows, rng.int(1, 40), dim],
        Rope => vec![rows, heads, dim.max(2), rng.int(1, dim.max(2) / 2)],
        Attention => {
            let kv_heads = rng.int(1, 3) as usize;
            let dim = rng.pick(&[8, 12, 20, 32, 64, 64, 96, 100, 128, 128, 256, 384]);
            words(op::attention::Attrs {
                rows: rows as usize,
                heads: kv_heads * rng.int(1, 9) as usize,
                kv_heads,
                dim,
                value_dim: dim,
                context: rows as usize + rng.pick(&[0, 1, 100, 255, 300, 700]),
                scale: rng.pick(&[0.3, -0.3]),
                window: rng.pick(&[0, 0, 1, 5, 64, 300]),
                soft_cap: 0.0,
                sinks: 0,
            })
        }
        Conv | ConvSilu => vec![rows, heads, rng.pick(&[1, 12, 64, 70, 130]), rng.int(2, 5)],
        GdnScan => {
            let k_heads = rng.int(1, 3);
            let (k_dim, v_dim) = (rng.pick(&[4, 12, 33]), rng.pick(&[3, 8, 20, 64, 77]));
            vec![rows, k_heads, k_heads * rng.int(1, 3), k_dim, v_dim, rng.next() % 2]
        }
    };
    assert_eq!(kind.spec().check(&attrs), Ok(()), "{kind:?} {attrs:?}");
    attrs
}

impl Case {
    fn new(kind: OpKind, attrs: Vec<u64>, rng: &mut Rng) -> Case {
        let runs = runs(kind, &attrs, rng);
        Case::with_runs(kind, attrs, runs, rng)
    }

    fn with_runs(kind: OpKind, attrs: Vec<u64>, runs: Vec<Run>, rng: &mut Rng) -> Case {
        let spec = kind.spec();
        let format = spec.format_attr().and_then(|i| WeightFormat::from_code(attrs[i]));
        // As many slots and versions as the runs name.
        let apart = |of: fn(&OperandSpec) -> bool| {
            spec.operands.iter().filter(|o| of(o)).map(|o| slot_bytes(o, &attrs)).max().unwrap_or(1)
        };
        let last = |at: fn(&Run) -> usize| runs.iter().map(at).max().unwrap_or(0);
        let recurrent = last(|r| r.from.max(r.to + (r.rows - 1) * r.stride)) / apart(is_recurrent) + 1;
        let mut buffers = Vec::new();
        for operand in spec.operands {
            let dtype = match operand.types {
                Types::Is(dtype) => Some(dtype),
                Types::Float => Some(rng.pick(&FORMATS_OF_PARAMS)),
                Types::Cache => Some(rng.pick(&[DType::F32, DType::F16])),
                Types::Plane(i) => format.and_then(|f| f.plane(i.into())).map(|p| p.dtype),
            };
            buffers.push(dtype.map(|dtype| {
                let dims = operand.dims.map(|d| d.value(&attrs).unwrap());
                let (copies, apart) = match () {
                    () if is_cache(operand) => (last(|r| r.cache) / apart(is_cache) + 1, apart(is_cache)),
                    () if is_recurrent(operand) => (recurrent, apart(is_recurrent)),
                    () => (1, 0),
                };
                let mut b = Buffer::new(dtype, dims, copies, apart, rng);
                match (operand.name, dtype) {
                    ("decay" | "beta", _) => b.fill(|| rng.float().abs() % 1.0),
                    ("xscales", _) => b.fill(|| rng.float().abs()),
                    // Packed codes: any bits.
                    (_, DType::U32) if operand.is_plane() => {
                        b.memory.bytes_mut().iter_mut().for_each(|byte| *byte = rng.next() as u8);
                    }
                    (_, DType::U8) if format.is_some_and(|f| f.group() == Some(16)) => {
                        b.fill(|| rng.int(0, 255) as f32)
                    }
                    // Now and then a power of two that is subnormal, or close to it.
                    (_, DType::U8) => {
                        b.fill(|| if rng.int(0, 15) == 0 { rng.int(0, 2) } else { rng.int(115, 135) } as f32)
                    }
                    (_, DType::I8) => b.fill(|| rng.int(0, 254) as f32 - 127.0),
                    ("select", _) => b.fill(|| rng.int(0, 50) as f32),
                    (_, DType::U32) => b.fill(|| rng.int(0, 4) as f32),
                    _ => b.fill(|| rng.float()),
                }
                b
            }));
        }
        let mut case = Case { kind, attrs, runs, buffers };
        case.route(rng);
        case
    }

    /// Gives expert matmuls a valid routing.
    fn route(&mut self, rng: &mut Rng) {
        if !matches!(self.kind, OpKind::ExpertLinearDense | OpKind::ExpertLinearQuant) {
            return;
        }
        let (slots, experts) = (self.attrs[0] * self.attrs[1], self.attrs[2] as u32);
        // At times rows choose one expert in every slot.
        let most = if rng.int(0, 3) == 0 { 0 } else { u64::from(experts) - 1 };
        let ids: Vec<u32> = (0..slots).map(|_| rng.int(0, most) as u32).collect();
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
        Case { kind: self.kind, attrs: self.attrs.clone(), runs: self.runs.clone(), buffers }
    }

    fn raw(&self) -> Vec<RawOperand> {
        self.buffers.iter().map(|b| b.as_ref().map_or(RawOperand::ABSENT, Buffer::raw)).collect()
    }

    /// Runs the whole call in parts of `step` units; whether later ones are told of the first.
    fn run_parts(&self, kernels: &Kernels, step: usize, again: bool) {
        call(kernels, self.kind, &self.raw(), &self.attrs, &self.runs, (step, again));
    }

    /// Runs the whole call.
    fn run(&self, kernels: &Kernels) {
        self.run_parts(kernels, usize::MAX, false);
    }

    fn assert_same(&self, other: &Case, what: &str) {
        for ((spec, a), b) in self.kind.spec().operands.iter().zip(&self.buffers).zip(&other.buffers) {
            if let (Some(a), Some(b)) = (a, b) {
                let differ = a.memory.bytes().iter().zip(b.memory.bytes()).position(|(a, b)| a != b);
                let at = differ.map(|byte| byte / a.dtype.bytes() as usize);
                let format = self.kind.spec().format_attr().and_then(|i| WeightFormat::from_code(self.attrs[i]));
                assert_eq!(
                    at, None,
                    "{what}: {:?} {:?} {format:?} {:?}: operand {} {:?} strides {} {} differs at element",
                    self.kind, self.attrs, self.runs, spec.name, a.dims, a.row_stride, a.head_stride
                );
            }
        }
    }
}

/// Runs a call in parts of `step` units, on scratch full of rubbish; later parts say that the first
/// came before them, or not.
fn call(
    kernels: &Kernels,
    kind: OpKind,
    operands: &[RawOperand],
    attrs: &[u64],
    runs: &[Run],
    (step, again): (usize, bool),
) {
    let bytes = scratch_bytes(kind, attrs).unwrap();
    let mut scratch = vec![0xa5u8; bytes + 64];
    let skip = scratch.as_ptr().align_offset(64);
    let call = OpCall { kind, operands, attrs, runs, again: false };
    let (kernel, total) = (kernels.get(kind).unwrap(), units(&call));
    for start in (0..total).step_by(step) {
        let part = start..(start + step).min(total);
        let call = OpCall { again: again && start > 0, ..call };
        // SAFETY: operands of the extents the table demands, scratch of the size asked for, a
        // detected table.
        unsafe { kernel(&call, part, &mut scratch[skip..skip + bytes]) };
    }
}

fn plan_ops() -> impl Iterator<Item = OpKind> {
    OpKind::ALL.iter().copied().filter(|k| k.spec().in_plan)
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
        expected.run(&Kernels::naive());
        got.run(&kernels);
        expected.assert_same(&got, kernels.isa().name());
    });
}

fn any_partition_gives_the_same(kernels: Kernels) {
    for_cases(2, 3, |case, rng| {
        let (whole, parts) = (case.copy(), case.copy());
        whole.run(&kernels);
        parts.run_parts(&kernels, rng.int(1, 3) as usize, rng.int(0, 1) == 1);
        whole.assert_same(&parts, "parts");
    });
}

/// A call of `n` rows against `n` calls of one row: neither the chunk size of a prefill nor what
/// else is in a step changes anything, and a version is the state after its row.
fn rows_together_are_rows_apart(kernels: Kernels) {
    for_cases(3, 3, |case, _| {
        let spec = case.kind.spec();
        if spec.operands.iter().any(|o| o.name == "order") {
            return;
        }
        let (together, apart) = (case.copy(), case.copy());
        together.run(&kernels);
        for run in &case.runs {
            for i in 0..run.rows {
                let mut attrs = case.attrs.clone();
                attrs[0] = 1;
                let mut operands = apart.raw();
                for (o, spec) in operands.iter_mut().zip(spec.operands) {
                    let elements = match spec.dims {
                        [Dim::Attr(0), ..] => (run.first + i) * o.row_stride,
                        [.., Dim::Attr(0)] => run.first + i,
                        _ => 0,
                    };
                    // SAFETY: the row exists.
                    o.ptr = unsafe { o.ptr.add(elements * o.dtype.bytes() as usize) };
                }
                let from = if i == 0 { run.from } else { run.to + (i - 1) * run.stride };
                let (pos, to) = (run.pos + i, run.to + i * run.stride);
                let alone = Run { first: 0, rows: 1, pos, cache: run.cache, from, to, stride: 0 };
                call(&kernels, case.kind, &operands, &attrs, &[alone], (usize::MAX, false));
            }
        }
        together.assert_same(&apart, "one row at a time");
    });
}

/// An output laid over an input that the op table names, and all outputs over inputs of their own
/// at once.
fn in_place_is_the_same(kernels: Kernels) {
    for_cases(4, 3, |case, _| {
        let spec = case.kind.spec();
        let over = |i: usize| spec.operands[i].over.iter().map(|name| spec.operand_index(name).unwrap());
        let outputs: Vec<usize> = (0..spec.operands.len()).filter(|&i| !spec.operands[i].over.is_empty()).collect();
        let mut choices: Vec<Vec<(usize, usize)>> =
            outputs.iter().flat_map(|&out| over(out).map(move |input| vec![(out, input)])).collect();
        if let [first, second] = outputs[..] {
            let pairs = over(first).flat_map(|a| over(second).map(move |b| vec![(first, a), (second, b)]));
            choices.extend(pairs.filter(|p| p[0].1 != p[1].1));
        }
        if choices.is_empty() {
            return;
        }
        let apart = case.copy();
        apart.run(&kernels);
        for choice in choices {
            let laid = case.copy();
            let mut operands = laid.raw();
            choice.iter().for_each(|&(out, input)| operands[out] = operands[input]);
            call(&kernels, case.kind, &operands, &case.attrs, &case.runs, (usize::MAX, false));
            for &out in &outputs {
                let (expected, got) = (apart.raw()[out], operands[out]);
                let [rows, heads, dim] = apart.buffers[out].as_ref().unwrap().dims;
                for (r, h, i) in (0..rows).flat_map(|r| (0..heads).flat_map(move |h| (0..dim).map(move |i| (r, h, i))))
                {
                    // SAFETY: an element of the extent.
                    let at = |o: &RawOperand| unsafe {
                        o.ptr.cast::<u32>().add(r * o.row_stride + h * o.head_stride + i).read_unaligned()
                    };
                    let what = format!("{:?} (output, input) {choice:?}: output {out}", case.kind);
                    assert_eq!(at(&expected), at(&got), "{what}, element {r} {h} {i}");
                }
            }
        }
    });
}

/// The version that a run reads stays as it is, unless the run writes it.
fn the_version_that_is_read_stays(kernels: Kernels) {
    let (mut rng, mut kept) = (Rng(12), 0);
    for kind in [OpKind::Conv, OpKind::ConvSilu, OpKind::GdnScan] {
        for _ in 0..24 {
            let attrs = attributes(kind, WeightFormat::Dense(DType::F32), &mut rng);
            let case = Case::new(kind, attrs, &mut rng);
            let (before, after) = (case.copy(), case.copy());
            after.run(&kernels);
            let state = kind.spec().operand_index("state").unwrap();
            let bytes = |case: &Case| case.buffers[state].as_ref().unwrap().memory.bytes().to_vec();
            let (before, after) = (bytes(&before), bytes(&after));
            let version = slot_bytes(&kind.spec().operands[state], &case.attrs);
            for run in &case.runs {
                let written = |i: usize| run.to + i * run.stride;
                if (0..run.rows).all(|i| written(i) != run.from) {
                    let range = run.from..(run.from + version).min(before.len());
                    assert_eq!(before[range.clone()], after[range], "{kind:?} {run:?}");
                    kept += 1;
                }
                let range = written(run.rows - 1)..(written(run.rows - 1) + version).min(before.len());
                assert_ne!(before[range.clone()], after[range], "{kind:?} {run:?}");
            }
        }
    }
    assert!(kept > 20);
}

/// Products too small to be told from zero leave its sign in an accumulator: dots of such, whole
/// and not whole 32s.
fn dots_of_nothing_have_the_sign_of_the_contract(kernels: Kernels) {
    let (mut rng, mut signs) = (Rng(13), [0, 0]);
    for inputs in [1, 8, 16, 20, 32, 40, 56, 64, 70, 96] {
        for rows in [1, 2, 7] {
            for values in [&[-1e-30f32][..], &[1e-30, -1e-30], &[1e-30, -1e-30, 0.0, -0.0], &[-0.0]] {
                let format = WeightFormat::Dense(DType::F32);
                let attrs = words(op::linear::Attrs { rows, inputs, outputs: 19, format });
                let mut case = Case::new(OpKind::LinearDense, attrs, &mut rng);
                case.buffers[0].as_mut().unwrap().fill(|| 1e-30);
                case.buffers[1].as_mut().unwrap().fill(|| rng.pick(values));
                let (expected, got) = (case.copy(), case.copy());
                expected.run(&Kernels::naive());
                got.run(&kernels);
                expected.assert_same(&got, "nothing");
                let out = expected.buffers.last().unwrap().as_ref().unwrap();
                // SAFETY: the first element.
                let first = unsafe { *out.raw().ptr.cast::<f32>() };
                assert_eq!(first, 0.0);
                signs[usize::from(first.is_sign_negative())] += 1;
            }
        }
    }
    assert!(signs[0] > 3 && signs[1] > 3, "{signs:?}");
}

/// More columns and activation rows than a dense product takes together.
fn dense_products_in_blocks(kernels: Kernels) {
    let mut rng = Rng(17);
    for (rows, inputs) in [(5, 1024), (4, 1056), (50, 2048), (7, 2592), (101, 3072)] {
        for format in dense_formats() {
            for inputs in [inputs, inputs + 16, inputs + 27] {
                if format.group().is_some_and(|group| inputs % group as usize != 0) {
                    continue;
                }
                let attrs = words(op::linear::Attrs { rows, inputs, outputs: 11, format });
                let case = Case::with_runs(OpKind::LinearDense, attrs, vec![Run { rows, ..Run::ONE }], &mut rng);
                let (expected, got) = (case.copy(), case.copy());
                expected.run(&Kernels::naive());
                got.run(&kernels);
                expected.assert_same(&got, &format!("{format} {rows} x {inputs}"));
            }
        }
    }
}

/// Activations that quantisation must survive: nothing, infinities, NaNs, the smallest and largest
/// numbers.
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
        expected.run(&Kernels::naive());
        got.run(&kernels);
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
                    let inputs = 3 * format.group().unwrap().max(format.unit());
                    let attrs = vec![rows, inputs, 19, format.code()];
                    let mut case = Case::new(OpKind::LinearQuant, attrs, &mut rng);
                    case.buffers[0].as_mut().unwrap().memory.bytes_mut().fill(sign);
                    case.buffers[3].as_mut().unwrap().memory.bytes_mut().fill(weights);
                    let (expected, got) = (case.copy(), case.copy());
                    expected.run(&Kernels::naive());
                    got.run(&kernels);
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
        case.run(&kernels);
    });
}

/// The silu of a vector goes through `exp`; sampled over all bit patterns, against the scalar
/// function.
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
        case.run(&kernels);
        let words = |i: usize| case.buffers[i].as_ref().unwrap().memory.bytes().chunks_exact(4);
        for (x, y) in words(0).zip(words(1)) {
            let float = |b: &[u8]| f32::from_ne_bytes(b.try_into().unwrap());
            let (x, y) = (float(x), float(y));
            let expected = loaf_kernels::math::sigmoid(x);
            assert!(
                y.to_bits() == expected.to_bits() || (y.is_nan() && expected.is_nan()),
                "{x:e}: {y:e} {expected:e}"
            );
        }
    }
}

/// Attributes of attention of `rows` rows with a cache of `context`: query heads, KV heads and
/// their elements, without a cap and sinks.
fn attention_of(
    rows: usize,
    (heads, kv_heads, dim): (usize, usize, usize),
    context: usize,
    scale: f32,
    window: usize,
) -> Vec<u64> {
    let value_dim = dim;
    words(op::attention::Attrs {
        rows,
        heads,
        kv_heads,
        dim,
        value_dim,
        context,
        scale,
        window,
        soft_cap: 0.0,
        sinks: 0,
    })
}

/// Rows enough for large tiles, which several blocks and a window's edges cross; scores from alike
/// to so far apart that weights vanish.
fn attention_of_many_rows(kernels: Kernels) {
    let mut rng = Rng(23);
    for (heads, kv_heads, dim) in [(16, 8, 128), (28, 4, 64), (8, 8, 80)] {
        for (rows, pos, window, scale) in [(37, 0, 0, 0.3), (33, 240, 0, 9.0), (70, 200, 40, -0.3)] {
            let attrs = attention_of(rows, (heads, kv_heads, dim), rows + pos, scale, window);
            let runs = vec![Run { rows, pos, ..Run::ONE }];
            let case = Case::with_runs(OpKind::Attention, attrs.clone(), runs, &mut rng);
            let (expected, got) = (case.copy(), case.copy());
            expected.run(&Kernels::naive());
            got.run(&kernels);
            expected.assert_same(&got, &format!("many rows {attrs:?}"));
        }
    }
}

/// Attention cut by blocks of positions gives the bits of attention in one piece: few rows, one run
/// and two, all sorts of windows, more blocks than a round has.
fn attention_by_blocks_is_the_same(kernels: Kernels) {
    let Some(split) = kernels.split() else { return };
    let mut rng = Rng(11);
    // Rows and first position of each run.
    let steps: [(&[(usize, usize)], usize); 9] = [
        (&[(1, 0)], 0),
        (&[(1, 255)], 0),
        (&[(1, 256)], 0),
        (&[(3, 1000)], 0),
        (&[(2, 700)], 300),
        (&[(1, 8447)], 0),
        (&[(2, 8900)], 0),
        (&[(1, 9000)], 8500),
        (&[(1, 600), (3, 20), (1, 300)], 0),
    ];
    for (step, window) in steps {
        for (heads, kv_heads, dim) in
            [(2, 1, 8), (3, 3, 24), (8, 2, 40), (2, 1, 128), (8, 1, 64), (9, 1, 32), (14, 2, 96)]
        {
            let (rows, end) = (step.iter().map(|r| r.0).sum(), step.iter().map(|r| r.0 + r.1).max().unwrap());
            let attrs = attention_of(rows, (heads, kv_heads, dim), end, 0.3, window);
            let slot = slot_bytes(&OpKind::Attention.spec().operands[1], &attrs);
            let mut runs: Vec<Run> = Vec::new();
            for (i, &(rows, pos)) in step.iter().enumerate() {
                let first = runs.last().map_or(0, |r| r.first + r.rows);
                runs.push(Run { first, rows, pos, cache: i * slot, ..Run::ONE });
            }
            let case = Case::with_runs(OpKind::Attention, attrs.clone(), runs.clone(), &mut rng);
            let (expected, got) = (case.copy(), case.copy());
            expected.run(&kernels);
            let operands = got.raw();
            let call =
                OpCall { kind: OpKind::Attention, operands: &operands, attrs: &attrs, runs: &runs, again: false };
            assert_eq!(Split::pays(&call, 64), end > ATTENTION_BLOCK, "{attrs:?}");
            assert!(!Split::pays(&call, kv_heads * runs.len()), "{attrs:?}");
            let mut shared = vec![f32::NAN; Split::shared_floats(OpKind::Attention, &attrs).unwrap()];
            let mut scratch = vec![0u64; scratch_bytes(OpKind::Attention, &attrs).unwrap() / 8 + 16];
            let skip = scratch.as_ptr().align_offset(64);
            // SAFETY: eight-byte words as bytes.
            let scratch = unsafe { scratch[skip..].align_to_mut::<u8>().1 };
            for (run, round) in Split::rounds(&call) {
                for (kernel, units) in split.kernels(&call, round) {
                    // Units one by one, last first: their order must not matter.
                    for u in (0..units).rev() {
                        // SAFETY: operands as the table demands, memory of the sizes asked for.
                        unsafe { kernel(&call, run, round, u..u + 1, shared.as_mut_ptr(), scratch) }
                    }
                }
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
                rows_together_are_rows_apart, in_place_is_the_same, the_version_that_is_read_stays,
                dots_of_nothing_have_the_sign_of_the_contract, dense_products_in_blocks, quantize_edges, extreme_codes_do_not_saturate,
                nonsense_is_harmless, exp_is_the_scalar_exp, attention_of_many_rows, attention_by_blocks_is_the_same);
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
    naive = Some(Kernels::naive());
    scalar = Some(Kernels::scalar());
    avx2 = Kernels::avx2();
    avx_vnni = Kernels::avx_vnni();
    avx512 = Kernels::avx512();
    avx512_halves = Kernels::avx512_halves();
    amx = Kernels::amx();
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
        let fast = [Kernels::avx2(), Kernels::avx_vnni(), Kernels::avx512(), Kernels::amx(), Kernels::neon()];
        for kernels in [Kernels::naive(), Kernels::scalar()].into_iter().chain(fast.into_iter().flatten()) {
            case.run_parts(&kernels, 1, false);
            let out = case.buffers.last().unwrap().as_ref().unwrap().memory.bytes();
            let got: Vec<u64> = out.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap()) as u64).collect();
            assert_eq!(got, codes, "{bits} bits, {}", kernels.isa().name());
        }
    }
}

#[test]
fn scratch_grows_with_rows() {
    let mut rng = Rng(9);
    for kind in plan_ops() {
        for format in formats(kind) {
            let mut attrs = attributes(kind, format, &mut rng);
            let mut last = (0, 0);
            for rows in 1..40 {
                attrs[0] = rows;
                let bytes = (scratch_bytes(kind, &attrs).unwrap(), Split::shared_floats(kind, &attrs).unwrap());
                assert!(bytes.0 >= last.0 && bytes.1 >= last.1, "{kind:?} {attrs:?}");
                last = bytes;
            }
        }
    }
}

/// Attributes as large as they may be, and larger: what is needed never wraps to something small.
#[test]
fn hostile_attributes_do_not_wrap() {
    for kind in plan_ops() {
        let spec = kind.spec();
        for format in formats(kind) {
            let mut last = (0, 0);
            for size in [1 << 10, 1 << 20, MAX_COUNT, 1 << 62, u64::MAX] {
                let mut attrs = vec![size; spec.attrs.len()];
                if let Some(i) = spec.format_attr() {
                    attrs[i] = format.code();
                }
                let too_many = |n: Option<usize>| n.unwrap_or(usize::MAX);
                let bytes = too_many(scratch_bytes(kind, &attrs));
                let floats = too_many(Split::shared_floats(kind, &attrs));
                assert!(bytes >= last.0 && floats >= last.1, "{kind:?} {size}: {bytes} {floats}, before {last:?}");
                last = (bytes, floats);
                // What passed the table's check has products of two, at most.
                if size <= MAX_COUNT {
                    let call = OpCall { kind, operands: &[], attrs: &attrs, runs: &[Run::ONE], again: false };
                    let _ = (units(&call), cost(&call), Split::pays(&call, 64));
                }
            }
        }
    }
}
