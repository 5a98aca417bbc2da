//! Runs a kernel: blocks one after the other, threads of a block in turns between the places where
//! they wait for each other.

use half::f16;
use loaf_runtime::backend::cuda::driver::Shape;

use super::parse::{Cmp, Instr, Kernel, LOCAL, Lane, Module, Op, PARAM, SHARED, Src, Ty};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Ready,
    /// At a barrier of the block.
    Barrier,
    /// At an instruction that a warp carries out together.
    Together,
    /// At a barrier in shared memory whose phase has not ended.
    Spinning,
    Done,
}

struct Thread {
    pc: usize,
    state: State,
    registers: Vec<u64>,
    local: Vec<u8>,
    /// Copies that were asked for and not waited for, in groups, the last of which is not ended:
    /// what they bring is there as late as it may be.
    copies: Vec<Vec<Ahead>>,
    /// Which registers are results of products that go on, or read by them, and whether any is.
    flying: Vec<Flying>,
    flies: bool,
}

/// A copy to shared memory: to, from, bytes, and how many of these are there.
#[derive(Clone, Copy)]
struct Ahead {
    to: u64,
    from: u64,
    bytes: usize,
    there: usize,
    pc: usize,
}

/// What products that go on do with a register. Reading a result of theirs, or writing over what
/// they read, is a panic.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flying {
    No,
    Read,
    Made,
    /// The same in a group that has ended, so that a wait waits for it.
    ReadOfGroup,
    MadeOfGroup,
}

struct Block<'a> {
    kernel: &'a Kernel,
    shared: Vec<u8>,
    parameter: &'a [u8],
    memory: &'a [(u64, u64)],
}

/// Runs all blocks of a launch.
pub fn launch(
    module: &Module,
    function: usize,
    shape: Shape,
    parameter: &[u8],
    memory: &[(u64, u64)],
    backwards: bool,
) {
    let kernel = &module.kernels[function];
    assert!(kernel.most_threads.is_none_or(|n| shape.block <= n), "{}: {} threads", kernel.name, shape.block);
    let [x, y, z] = shape.grid;
    let count = u64::from(x) * u64::from(y) * u64::from(z);
    let mut shared = vec![0u8; module.fixed + shape.shared as usize];
    let mut threads: Vec<Thread> = (0..shape.block)
        .map(|_| Thread {
            pc: 0,
            state: State::Ready,
            registers: vec![0; kernel.registers],
            local: vec![0; kernel.local],
            copies: vec![],
            flying: vec![Flying::No; kernel.registers],
            flies: false,
        })
        .collect();
    for i in 0..count {
        let i = if backwards { count - 1 - i } else { i };
        let at = [(i % u64::from(x)), (i / u64::from(x) % u64::from(y)), (i / u64::from(x) / u64::from(y))];
        shared.fill(0xcd);
        for (t, thread) in threads.iter_mut().enumerate() {
            (thread.pc, thread.state) = (0, State::Ready);
            thread.copies = vec![vec![]];
            thread.flying.fill(Flying::No);
            thread.flies = false;
            let r = &mut thread.registers;
            (r[0], r[1], r[2]) = (t as u64, 0, 0);
            (r[3], r[4], r[5]) = (shape.block.into(), 1, 1);
            r[6..9].copy_from_slice(&at);
            (r[9], r[10], r[11]) = (x.into(), y.into(), z.into());
        }
        let mut block = Block { kernel, shared: std::mem::take(&mut shared), parameter, memory };
        block.run(&mut threads);
        shared = block.shared;
    }
}

fn mask(v: u64, ty: Ty) -> u64 {
    match ty.bytes() {
        1 => v & 0xff,
        2 => v & 0xffff,
        4 => v & 0xffff_ffff,
        _ => v,
    }
}

fn signed(v: u64, ty: Ty) -> i64 {
    match ty.bytes() {
        1 => i64::from(v as i8),
        2 => i64::from(v as i16),
        4 => i64::from(v as i32),
        _ => v as i64,
    }
}

fn f(v: u64) -> f32 {
    f32::from_bits(v as u32)
}

fn d(v: u64) -> f64 {
    f64::from_bits(v)
}

fn bits(x: f32) -> u64 {
    x.to_bits().into()
}

/// NVIDIA's maximum and minimum: the number where one is a NaN, and the positive zero of two.
fn largest(a: f32, b: f32) -> f32 {
    if a == b { if a.is_sign_positive() { a } else { b } } else { a.max(b) }
}

impl Block<'_> {
    fn run(&mut self, threads: &mut [Thread]) {
        loop {
            let mut moved = false;
            for warp in threads.chunks_mut(32) {
                loop {
                    for thread in warp.iter_mut().filter(|t| matches!(t.state, State::Ready | State::Spinning)) {
                        let (pc, spun) = (thread.pc, thread.state == State::Spinning);
                        self.advance(thread);
                        moved |= !(spun && thread.state == State::Spinning && thread.pc == pc);
                    }
                    let mut waiting = warp.iter().filter(|t| t.state != State::Done).peekable();
                    if waiting.peek().is_none() || waiting.any(|t| t.state != State::Together) {
                        break;
                    }
                    self.together(warp);
                    moved = true;
                }
            }
            if threads.iter().all(|t| t.state == State::Done) {
                return;
            }
            if threads.iter().all(|t| matches!(t.state, State::Done | State::Barrier)) {
                threads.iter_mut().filter(|t| t.state == State::Barrier).for_each(|t| t.state = State::Ready);
            } else if !moved {
                panic!("{}: threads wait for each other for ever", self.kernel.name);
            }
        }
    }

    /// Carries out what all of a warp have come to.
    fn together(&mut self, warp: &mut [Thread]) {
        let first = warp.iter().find(|t| t.state == State::Together).map(|t| t.pc).expect("one that waits");
        let live: Vec<usize> = (0..warp.len()).filter(|i| warp[*i].state == State::Together).collect();
        let i = &self.kernel.code[first];
        assert!(
            live.iter().all(|l| warp[*l].pc == first),
            "{}, line {}: a warp that is not together",
            self.kernel.name,
            i.line
        );
        match i.op {
            Op::BarWarp => {}
            Op::Shfl(lane) => {
                let values: Vec<u64> = warp.iter().map(|t| value(t, i.s[0])).collect();
                for l in &live {
                    let by = value(&warp[*l], i.s[1]) as usize & 31;
                    let from = match lane {
                        Lane::Xor => *l ^ by,
                        Lane::At => by,
                        // A lane without one before it keeps its own.
                        Lane::Before => l.checked_sub(by).unwrap_or(*l),
                    };
                    assert!(live.contains(&from), "{}, line {}: a lane that is gone is read", self.kernel.name, i.line);
                    warp[*l].registers[i.d[0] as usize] = values[from];
                }
            }
            Op::Mma => mma(i, warp),
            Op::MmaHalves => mma_halves(i, warp),
            Op::LdMatrix(turned) => self.matrices(i, warp, turned),
            Op::Wgmma => self.wgmma(i, warp),
            Op::WgmmaHalves(turned) => self.wgmma_halves(i, warp, turned),
            Op::Redux(largest) => {
                let values = live.iter().map(|l| value(&warp[*l], i.s[0]) as u32);
                let v = if largest { values.max().unwrap_or(0) } else { values.fold(0, u32::wrapping_add) };
                live.iter().for_each(|l| warp[*l].registers[i.d[0] as usize] = v.into());
            }
            Op::Ballot => {
                let v: u64 = live.iter().filter(|l| value(&warp[**l], i.s[0]) != 0).map(|l| 1 << l).sum();
                live.iter().for_each(|l| warp[*l].registers[i.d[0] as usize] = v);
            }
            _ => unreachable!(),
        }
        for l in live {
            warp[l].pc += 1;
            warp[l].state = State::Ready;
        }
    }

    /// `ldmatrix`: lane l names row l % 8 of matrix l / 8, and has of each a pair of a row, or,
    /// turned, of a column.
    fn matrices(&mut self, i: &Instr, warp: &mut [Thread], turned: bool) {
        let mut rows = [[0u16; 8]; 32];
        for (lane, row) in rows.iter_mut().enumerate() {
            let at = value(&warp[lane], i.s[0]).wrapping_add_signed(i.at);
            self.bytes(&mut warp[lane], at, 16, i, false);
            for (k, half) in row.iter_mut().enumerate() {
                *half = self.load(&mut warp[lane], at + 2 * k as u64, 2, i) as u16;
            }
        }
        for (lane, t) in warp.iter_mut().enumerate() {
            let (g, q) = (lane / 4, lane % 4 * 2);
            for (m, d) in i.d.iter().enumerate() {
                let half = |e: usize| if turned { rows[8 * m + q + e][g] } else { rows[8 * m + g][q + e] };
                t.registers[*d as usize] = u64::from(half(0)) | u64::from(half(1)) << 16;
            }
        }
    }

    /// What the first groups of a thread's copies bring is there.
    fn copies_arrive(&mut self, t: &mut Thread, groups: usize) {
        let kernel = self.kernel;
        for copy in t.copies.drain(..groups).flatten().collect::<Vec<_>>() {
            let i = &kernel.code[copy.pc];
            for k in (0..copy.bytes as u64).step_by(4) {
                let v = if k < copy.there as u64 { self.load(t, copy.from + k, 4, i) } else { 0 };
                self.store(t, copy.to + k, 4, v, i);
            }
        }
    }

    /// A warp's part of `wgmma.m64nNk32` on bytes: sixteen rows of the first side from registers,
    /// the second side's by a descriptor of rows of 128 bytes whose sixteenths are swizzled.
    fn wgmma(&mut self, i: &Instr, warp: &mut [Thread]) {
        let (start, _, eight) = self.described(i, warp);
        let mut b = vec![[0i8; 32]; i.d.len() * 2];
        for (n, row) in b.iter_mut().enumerate() {
            for half in 0..2 {
                let from = start + n as u64 / 8 * eight + n as u64 % 8 * 128 + half * 16;
                let from = self.bytes(&mut warp[0], from ^ (from >> 7 & 7) << 4, 16, i, false);
                for k in 0..16 {
                    // SAFETY: sixteen bytes are there.
                    row[half as usize * 16 + k] = unsafe { *from.add(k) } as i8;
                }
            }
        }
        let mut a = [[0i8; 32]; 16];
        for (lane, t) in warp.iter().enumerate() {
            for r in 0..4 {
                for (k, byte) in (value(t, i.s[r]) as u32).to_le_bytes().into_iter().enumerate() {
                    a[lane / 4 + 8 * (r % 2)][lane % 4 * 4 + k + 16 * (r / 2)] = byte as i8;
                }
            }
        }
        for (lane, t) in warp.iter_mut().enumerate() {
            let more = value(t, i.s[5]) != 0;
            for (r, d) in i.d.iter().enumerate() {
                let (row, col) = (lane / 4 + 8 * (r / 2 % 2), r / 4 * 8 + lane % 4 * 2 + r % 2);
                let begin = if more { t.registers[*d as usize] as i32 } else { 0 };
                let sum =
                    a[row].iter().zip(&b[col]).fold(begin, |s, (x, y)| s.wrapping_add(i32::from(*x) * i32::from(*y)));
                t.registers[*d as usize] = u64::from(sum as u32);
            }
            fly(t, i);
        }
    }

    /// What a warp's descriptor says of rows of 128 bytes whose sixteenths are swizzled: where they
    /// begin, and how far it is from 128 bytes to those beside them, and from eight rows to the
    /// next eight.
    fn described(&self, i: &Instr, warp: &[Thread]) -> (u64, u64, u64) {
        let at = value(&warp[0], i.s[4]);
        assert!(warp.iter().all(|t| value(t, i.s[4]) == at), "{}, line {}: one descriptor", self.kernel.name, i.line);
        assert!(
            warp.len() == 32 && at >> 62 == 1 && at >> 49 & 7 == 0,
            "{}, line {}: {at:#x}",
            self.kernel.name,
            i.line
        );
        (SHARED + ((at & 0x3fff) << 4), (at >> 16 & 0x3fff) << 4, (at >> 32 & 0x3fff) << 4)
    }

    /// The same of `wgmma.m64nNk16` on halves. Rows are columns of the product, or, turned, what is
    /// summed over. The card adds in some order of its own; here sums are exact but for one
    /// rounding.
    fn wgmma_halves(&mut self, i: &Instr, warp: &mut [Thread], turned: bool) {
        let (start, beside, eight) = self.described(i, warp);
        let mut b = vec![[0f64; 16]; i.d.len() * 2];
        // Sixteen bytes are eight halves of a row.
        let (rows, pieces) = if turned { (16, b.len() / 8) } else { (b.len(), 2) };
        for row in 0..rows {
            for piece in 0..pieces {
                let from = start + piece as u64 / 8 * beside + row as u64 / 8 * eight + row as u64 % 8 * 128;
                let from = from + piece as u64 % 8 * 16;
                let from = self.bytes(&mut warp[0], from ^ (from >> 7 & 7) << 4, 16, i, false);
                for e in 0..8 {
                    // SAFETY: sixteen bytes are there.
                    let half = unsafe { f16::from_le_bytes([*from.add(2 * e), *from.add(2 * e + 1)]) }.to_f64();
                    let at = piece * 8 + e;
                    if turned { b[at][row] = half } else { b[row][at] = half }
                }
            }
        }
        let mut a = [[0f64; 16]; 16];
        for (lane, t) in warp.iter().enumerate() {
            for r in 0..4 {
                for k in 0..2 {
                    let half = f16::from_bits((value(t, i.s[r]) >> (16 * k)) as u16);
                    a[lane / 4 + 8 * (r % 2)][lane % 4 * 2 + k + 8 * (r / 2)] = half.to_f64();
                }
            }
        }
        for (lane, t) in warp.iter_mut().enumerate() {
            let more = value(t, i.s[5]) != 0;
            for (r, d) in i.d.iter().enumerate() {
                let (row, col) = (lane / 4 + 8 * (r / 2 % 2), r / 4 * 8 + lane % 4 * 2 + r % 2);
                let begin = if more { f64::from(f(t.registers[*d as usize])) } else { 0.0 };
                let sum = a[row].iter().zip(&b[col]).fold(begin, |s, (x, y)| s + x * y);
                t.registers[*d as usize] = bits(sum as f32);
            }
            fly(t, i);
        }
    }

    fn bytes(&mut self, thread: &mut Thread, at: u64, n: usize, i: &Instr, write: bool) -> *mut u8 {
        let wrong = |what: &str| -> ! { panic!("{}, line {}: {what}: {n} bytes at {at:#x}", self.kernel.name, i.line) };
        if !at.is_multiple_of(n as u64) {
            wrong("not aligned");
        }
        let within = |base: u64, len: usize| at >= base && at - base + n as u64 <= len as u64;
        if within(SHARED, self.shared.len()) {
            return self.shared[(at - SHARED) as usize..].as_mut_ptr();
        }
        if within(LOCAL, thread.local.len()) {
            return thread.local[(at - LOCAL) as usize..].as_mut_ptr();
        }
        if within(PARAM, self.parameter.len()) && !write {
            return self.parameter[(at - PARAM) as usize..].as_ptr().cast_mut();
        }
        if self.memory.iter().any(|(start, end)| at >= *start && at + n as u64 <= *end) {
            return at as *mut u8;
        }
        wrong("outside of everything")
    }

    fn load(&mut self, thread: &mut Thread, at: u64, n: usize, i: &Instr) -> u64 {
        let from = self.bytes(thread, at, n, i, false);
        let mut out = [0u8; 8];
        // SAFETY: `bytes` found so many bytes there.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), n) };
        u64::from_le_bytes(out)
    }

    fn store(&mut self, thread: &mut Thread, at: u64, n: usize, v: u64, i: &Instr) {
        let to = self.bytes(thread, at, n, i, true);
        // SAFETY: as above; parameters are never written.
        unsafe { std::ptr::copy_nonoverlapping(v.to_le_bytes().as_ptr(), to, n) };
    }

    /// Runs a thread until it waits or ends.
    fn advance(&mut self, t: &mut Thread) {
        let kernel = self.kernel;
        loop {
            let i = &kernel.code[t.pc];
            if let Some((p, not)) = i.guard
                && (t.registers[p as usize] != 0) == not
            {
                t.pc += 1;
                continue;
            }
            if t.flies {
                in_flight(t, i, &kernel.name);
            }
            match i.op {
                Op::Ret => {
                    assert!(!t.flies, "{}: products that nobody waits for", kernel.name);
                    t.state = State::Done;
                    return;
                }
                Op::Bra => {
                    t.pc = i.at as usize;
                    continue;
                }
                Op::Bar => {
                    t.pc += 1;
                    t.state = State::Barrier;
                    return;
                }
                Op::Shfl(_)
                | Op::Redux(_)
                | Op::Ballot
                | Op::Mma
                | Op::MmaHalves
                | Op::LdMatrix(_)
                | Op::BarWarp
                | Op::Wgmma
                | Op::WgmmaHalves(_) => {
                    t.state = State::Together;
                    return;
                }
                Op::Nop => {}
                Op::Split => {
                    let v = value(t, i.s[0]);
                    t.registers[i.d[0] as usize] = v & 0xffff_ffff;
                    t.registers[i.d[1] as usize] = v >> 32;
                }
                Op::Ld(n) => {
                    let (size, at) = (i.ty.bytes(), value(t, i.s[0]).wrapping_add_signed(i.at));
                    // A vector is aligned as a whole.
                    self.bytes(t, at, size * usize::from(n), i, false);
                    for k in 0..usize::from(n) {
                        let v = self.load(t, at + (k * size) as u64, size, i);
                        t.registers[i.d[k] as usize] =
                            if matches!(i.ty, Ty::S(_)) { signed(v, i.ty) as u64 } else { v };
                    }
                }
                Op::St(n) => {
                    let (size, at) = (i.ty.bytes(), value(t, i.s[0]).wrapping_add_signed(i.at));
                    self.bytes(t, at, size * usize::from(n), i, true);
                    for k in 0..usize::from(n) {
                        let v = value(t, i.s[1 + k]);
                        self.store(t, at + (k * size) as u64, size, v, i);
                    }
                }
                Op::CpAsync => {
                    let (to, from) = (value(t, i.s[0]).wrapping_add_signed(i.at), value(t, i.s[1]) + value(t, i.s[2]));
                    let (bytes, there) = (value(t, i.s[3]) as usize, value(t, i.s[4]) as u32 as usize);
                    self.bytes(t, to, bytes, i, true);
                    if there > 0 {
                        self.bytes(t, from, there, i, false);
                    }
                    let copy = Ahead { to, from, bytes, there, pc: t.pc };
                    t.copies.last_mut().expect("a group").push(copy);
                }
                Op::CopiesEnd => t.copies.push(vec![]),
                Op::CopiesWait => {
                    let groups = t.copies.len() - 1;
                    self.copies_arrive(t, groups.saturating_sub(value(t, i.s[0]) as usize));
                }
                // Those that are waited for, how many these are in a phase, and the phase.
                Op::MarkInit => {
                    let count = value(t, i.s[1]) & 0xffff;
                    self.store(t, value(t, i.s[0]).wrapping_add_signed(i.at), 8, count << 16 | count, i);
                }
                Op::CopiesAll => {
                    let all = t.copies.len();
                    self.copies_arrive(t, all);
                    t.copies.push(vec![]);
                }
                Op::MarkArrive | Op::MarkCopies => {
                    if i.op == Op::MarkCopies {
                        // As late as this: others may read from here on.
                        let all = t.copies.len();
                        self.copies_arrive(t, all);
                        t.copies.push(vec![]);
                    }
                    let at = value(t, i.s[0]).wrapping_add_signed(i.at);
                    let mark = self.load(t, at, 8, i);
                    let (left, count) = (mark & 0xffff, mark >> 16 & 0xffff);
                    assert!(left > 0, "{}, line {}: nobody is waited for", kernel.name, i.line);
                    // The last one ends the phase, and the next counts anew.
                    let next = if left > 1 { mark - 1 } else { (mark >> 32 ^ 1) << 32 | count << 16 | count };
                    self.store(t, at, 8, next, i);
                }
                Op::MarkWait => {
                    let mark = self.load(t, value(t, i.s[0]).wrapping_add_signed(i.at), 8, i);
                    if mark >> 32 & 1 == value(t, i.s[1]) & 1 {
                        t.state = State::Spinning;
                        return;
                    }
                    t.registers[i.d[0] as usize] = 1;
                }
                Op::WgmmaEnd => {
                    for flying in &mut t.flying {
                        *flying = match *flying {
                            Flying::Read => Flying::ReadOfGroup,
                            Flying::Made => Flying::MadeOfGroup,
                            other => other,
                        };
                    }
                }
                Op::WgmmaWait => {
                    let waited = |f: &mut Flying| {
                        if matches!(*f, Flying::ReadOfGroup | Flying::MadeOfGroup) {
                            *f = Flying::No;
                        }
                    };
                    t.flying.iter_mut().for_each(waited);
                    t.flies = t.flying.iter().any(|f| *f != Flying::No);
                }
                Op::AtomInc | Op::AtomAdd => {
                    let at = value(t, i.s[0]).wrapping_add_signed(i.at);
                    let size = i.ty.bytes();
                    let old = self.load(t, at, size, i);
                    let v = mask(value(t, i.s[1]), i.ty);
                    let new = match i.op {
                        Op::AtomInc if old >= v => 0,
                        Op::AtomInc => old + 1,
                        _ => old.wrapping_add(v),
                    };
                    self.store(t, at, size, new, i);
                    if let Some(d) = i.d.first() {
                        t.registers[*d as usize] = old;
                    }
                }
                _ => {
                    let s = |k: usize| i.s.get(k).map_or(0, |s| value(t, *s));
                    let v = compute(i, s(0), s(1), s(2), s(3), kernel);
                    t.registers[i.d[0] as usize] = v;
                }
            }
            t.pc += 1;
        }
    }
}

/// A warpgroup's product is on its way: nobody may read its sums, or write over what it reads.
fn fly(t: &mut Thread, i: &Instr) {
    i.d.iter().for_each(|d| t.flying[*d as usize] = Flying::Made);
    for s in &i.s[..4] {
        if let Src::Reg(r) = s {
            t.flying[*r as usize] = Flying::Read;
        }
    }
    t.flies = true;
}

/// Panics if an instruction reads what products that go on make, or writes over what they read. A
/// move that the compiler would leave out takes the mark along.
fn in_flight(t: &mut Thread, i: &Instr, kernel: &str) {
    let state = |s: &Src| match s {
        Src::Reg(r) => t.flying[*r as usize],
        Src::Imm(_) => Flying::No,
    };
    if matches!(i.op, Op::Wgmma | Op::WgmmaHalves(_)) {
        return;
    }
    let made = |f: Flying| matches!(f, Flying::Made | Flying::MadeOfGroup);
    if i.op == Op::Mov && made(state(&i.s[0])) {
        t.flying[i.d[0] as usize] = state(&i.s[0]);
        return;
    }
    assert!(!i.s.iter().any(|s| made(state(s))), "{kernel}, line {}: reads what is still being made", i.line);
    let free = |d: &u32| t.flying[*d as usize] == Flying::No;
    assert!(i.d.iter().all(free), "{kernel}, line {}: writes over what products still use", i.line);
}

fn value(t: &Thread, s: Src) -> u64 {
    match s {
        Src::Reg(r) => t.registers[r as usize],
        Src::Imm(v) => v,
    }
}

/// What an instruction without memory gives.
fn compute(i: &Instr, a: u64, b: u64, c: u64, e: u64, kernel: &Kernel) -> u64 {
    let (ty, wrong) = (i.ty, || -> ! { panic!("{}, line {}: {:?} of {:?}", kernel.name, i.line, i.op, i.ty) });
    match ty {
        Ty::F32 => match i.op {
            Op::Mov => a,
            Op::Add => bits(f(a) + f(b)),
            Op::Sub => bits(f(a) - f(b)),
            Op::Mul => bits(f(a) * f(b)),
            Op::Fma => bits(f(a).mul_add(f(b), f(c))),
            Op::Div => bits(f(a) / f(b)),
            Op::Rcp => bits(1.0 / f(a)),
            Op::Sqrt => bits(f(a).sqrt()),
            // The card's is within two units in the last place of it.
            Op::Ex2 => bits(f(a).exp2()),
            Op::Neg => a ^ 0x8000_0000,
            Op::Abs => a & 0x7fff_ffff,
            Op::Max => bits(largest(f(a), f(b))),
            Op::Min => bits(-largest(-f(a), -f(b))),
            Op::Selp => {
                if c != 0 {
                    a
                } else {
                    b
                }
            }
            Op::Setp(cmp) => compare(cmp, f(a).partial_cmp(&f(b))).into(),
            Op::Cvt(from, whole) => bits(match from {
                Ty::F16 => f16::from_bits(a as u16).to_f32(),
                Ty::F32 if whole => f(a).round_ties_even(),
                Ty::F32 => f(a),
                Ty::F64 => d(a) as f32,
                Ty::S(_) => signed(a, from) as f32,
                _ => mask(a, from) as f32,
            }),
            _ => wrong(),
        },
        Ty::F64 => match i.op {
            Op::Mov => a,
            Op::Add => (d(a) + d(b)).to_bits(),
            Op::Sub => (d(a) - d(b)).to_bits(),
            Op::Mul => (d(a) * d(b)).to_bits(),
            Op::Fma => d(a).mul_add(d(b), d(c)).to_bits(),
            Op::Div => (d(a) / d(b)).to_bits(),
            Op::Neg => a ^ 1 << 63,
            Op::Abs => a & !(1 << 63),
            Op::Selp => {
                if c != 0 {
                    a
                } else {
                    b
                }
            }
            Op::Setp(cmp) => compare(cmp, d(a).partial_cmp(&d(b))).into(),
            Op::Cvt(from, _) => match from {
                Ty::F32 => f64::from(f(a)).to_bits(),
                Ty::S(_) => (signed(a, from) as f64).to_bits(),
                _ => (mask(a, from) as f64).to_bits(),
            },
            _ => wrong(),
        },
        Ty::F16 => match i.op {
            Op::Mov => a,
            Op::Cvt(Ty::F32, _) => f16::from_f32(f(a)).to_bits().into(),
            _ => wrong(),
        },
        Ty::Pred => match i.op {
            Op::Mov => a,
            Op::And => a & b,
            Op::Or => a | b,
            Op::Xor => a ^ b,
            Op::Not => a ^ 1,
            _ => wrong(),
        },
        Ty::U(_) | Ty::S(_) => integer(i, a, b, c, e, kernel),
    }
}

fn compare(cmp: Cmp, order: Option<std::cmp::Ordering>) -> bool {
    let plain = |which: u8| match which {
        0 => order.is_some_and(|o| o.is_eq()),
        1 => order.is_some_and(|o| o.is_ne()),
        2 => order.is_some_and(|o| o.is_lt()),
        3 => order.is_some_and(|o| o.is_le()),
        4 => order.is_some_and(|o| o.is_gt()),
        _ => order.is_some_and(|o| o.is_ge()),
    };
    match cmp {
        Cmp::Eq => plain(0),
        Cmp::Ne => plain(1),
        Cmp::Lt => plain(2),
        Cmp::Le => plain(3),
        Cmp::Gt => plain(4),
        Cmp::Ge => plain(5),
        Cmp::Unordered(which) => order.is_none() || plain(which),
        Cmp::Nan => order.is_none(),
        Cmp::Num => order.is_some(),
    }
}

fn integer(i: &Instr, a: u64, b: u64, c: u64, e: u64, kernel: &Kernel) -> u64 {
    let ty = i.ty;
    let width = ty.bytes() as u32 * 8;
    let is_signed = matches!(ty, Ty::S(_));
    let (ua, ub, sa, sb) = (mask(a, ty), mask(b, ty), signed(a, ty), signed(b, ty));
    let v = match i.op {
        Op::Mov => a,
        Op::Pair => mask(a, Ty::U(4)) | b << 32,
        Op::Add => a.wrapping_add(b),
        Op::Sub => a.wrapping_sub(b),
        Op::Mul => a.wrapping_mul(b),
        Op::Mad => a.wrapping_mul(b).wrapping_add(c),
        Op::MulWide if is_signed => return sa.wrapping_mul(sb) as u64,
        Op::MulWide => return ua.wrapping_mul(ub),
        Op::MulHi if is_signed => ((i128::from(sa) * i128::from(sb)) >> width) as u64,
        Op::MulHi => ((u128::from(ua) * u128::from(ub)) >> width) as u64,
        // Division by zero gives all ones there.
        Op::Div if ub == 0 => u64::MAX,
        Op::Div if is_signed => sa.wrapping_div(sb) as u64,
        Op::Div => ua / ub,
        Op::Rem if ub == 0 => ua,
        Op::Rem if is_signed => sa.wrapping_rem(sb) as u64,
        Op::Rem => ua % ub,
        Op::Neg => a.wrapping_neg(),
        Op::Abs => sa.unsigned_abs(),
        Op::Min if is_signed => sa.min(sb) as u64,
        Op::Min => ua.min(ub),
        Op::Max if is_signed => sa.max(sb) as u64,
        Op::Max => ua.max(ub),
        Op::And => a & b,
        Op::Or => a | b,
        Op::Xor => a ^ b,
        Op::Not => !a,
        Op::Shl => {
            if (b as u32) < width {
                a << (b as u32)
            } else {
                0
            }
        }
        Op::Shr if is_signed => (sa >> (b as u32).min(width - 1).min(63)) as u64,
        Op::Shr => {
            if (b as u32) < width {
                ua >> (b as u32)
            } else {
                0
            }
        }
        Op::Bfi => {
            // Insert `a` into `b` at bit `c`, `e` bits.
            let (at, len) = (c as u32 & 255, e as u32 & 255);
            let ones = if len >= 64 { u64::MAX } else { (1 << len) - 1 };
            let ones = if at >= width { 0 } else { ones << at };
            (b & !ones) | ((a << at.min(63)) & ones)
        }
        Op::Bfe => {
            let (at, len) = (b as u32 & 255, c as u32 & 255);
            let v = if at >= width { 0 } else { ua >> at };
            if len >= width { v } else { v & ((1 << len) - 1) }
        }
        Op::Prmt => {
            let all = (ub << 32) | ua;
            (0..4).fold(0, |v, k| {
                let s = c >> (4 * k) & 15;
                let byte = all >> (8 * (s & 7)) & 0xff;
                let byte = if s & 8 != 0 { if byte & 0x80 != 0 { 0xff } else { 0 } } else { byte };
                v | byte << (8 * k)
            })
        }
        Op::Funnel => ((ub << 32) | ua) >> (c & 31),
        // The first is the upper one.
        Op::Halves => u64::from(f16::from_f32(f(a)).to_bits()) << 16 | u64::from(f16::from_f32(f(b)).to_bits()),
        Op::Popc => ua.count_ones().into(),
        Op::Clz => (ua.leading_zeros() - (64 - width)).into(),
        Op::Dp4a(x, y) => {
            let byte = |v: u64, k: u32, signed: bool| {
                let b = (v >> (8 * k)) as u8;
                if signed { i64::from(b as i8) } else { i64::from(b) }
            };
            (signed(c, Ty::S(4)) + (0..4).map(|k| byte(a, k, x) * byte(b, k, y)).sum::<i64>()) as u64
        }
        Op::Selp => {
            if c != 0 {
                a
            } else {
                b
            }
        }
        Op::Setp(cmp) => {
            let order = if is_signed { sa.cmp(&sb) } else { ua.cmp(&ub) };
            return compare(cmp, Some(order)).into();
        }
        // To an integer from a float: towards zero, or the nearest.
        Op::Cvt(Ty::F32, whole) => {
            let x = if whole { f(a).round_ties_even() } else { f(a) };
            match (is_signed, width) {
                (false, 64) => return x as u64,
                (false, _) => u64::from(x as u32),
                (true, 64) => return x as i64 as u64,
                (true, _) => x as i32 as u64,
            }
        }
        Op::Cvt(Ty::F64, _) => {
            if is_signed {
                d(a) as i32 as u64
            } else {
                u64::from(d(a) as u32)
            }
        }
        Op::Cvt(from @ Ty::S(_), _) => signed(a, from) as u64,
        Op::Cvt(from, _) => mask(a, from),
        _ => panic!("{}, line {}: {:?} of {ty:?}", kernel.name, i.line, i.op),
    };
    mask(v, ty)
}

/// `mma.m16n8k32` or `m16n8k16` on bytes: fragments as the instruction's description lays them over
/// lanes.
fn mma(i: &Instr, warp: &mut [Thread]) {
    let byte = |v: u64, k: usize, signed: bool| {
        let b = (v >> (8 * k)) as u8;
        if signed { i32::from(b as i8) } else { i32::from(b) }
    };
    // Registers of the second operand; the first has twice as many, and four are added to.
    let n = (i.s.len() - 4) / 3;
    let (mut a, mut b) = ([[0i32; 32]; 16], [[0i32; 8]; 32]);
    for (lane, t) in warp.iter().enumerate() {
        let (g, q) = (lane / 4, lane % 4);
        for r in 0..2 * n {
            let v = value(t, i.s[r]);
            for k in 0..4 {
                a[g + 8 * (r % 2)][q * 4 + k + 16 * (r / 2)] = byte(v, k, i.at & 1 != 0);
            }
        }
        for r in 0..n {
            let v = value(t, i.s[2 * n + r]);
            for k in 0..4 {
                b[q * 4 + k + 16 * r][g] = byte(v, k, i.at & 2 != 0);
            }
        }
    }
    for lane in 0..32 {
        let (g, q) = (lane / 4, lane % 4);
        for r in 0..4 {
            let (row, col) = (g + 8 * (r / 2), q * 2 + r % 2);
            let sum = (0..16 * n).fold(value(&warp[lane], i.s[3 * n + r]) as i32, |s, k| {
                s.wrapping_add(a[row][k].wrapping_mul(b[k][col]))
            });
            warp[lane].registers[i.d[r] as usize] = u64::from(sum as u32);
        }
    }
}

/// `mma.m16n8k16` on halves. The card adds its products in some order of its own, with more bits
/// than an f32 has; here they are exact but for one rounding.
fn mma_halves(i: &Instr, warp: &mut [Thread]) {
    let half = |v: u64, k: usize| f16::from_bits((v >> (16 * k)) as u16).to_f64();
    let (mut a, mut b) = ([[0f64; 16]; 16], [[0f64; 8]; 16]);
    for (lane, t) in warp.iter().enumerate() {
        let (g, q) = (lane / 4, lane % 4);
        for r in 0..4 {
            for k in 0..2 {
                a[g + 8 * (r % 2)][q * 2 + k + 8 * (r / 2)] = half(value(t, i.s[r]), k);
            }
        }
        for r in 0..2 {
            for k in 0..2 {
                b[q * 2 + k + 8 * r][g] = half(value(t, i.s[4 + r]), k);
            }
        }
    }
    for (lane, t) in warp.iter_mut().enumerate() {
        let (g, q) = (lane / 4, lane % 4);
        for r in 0..4 {
            let (row, col) = (g + 8 * (r / 2), q * 2 + r % 2);
            let sum = (0..16).fold(f64::from(f(value(t, i.s[6 + r]))), |s, k| s + a[row][k] * b[k][col]);
            t.registers[i.d[r] as usize] = bits(sum as f32);
        }
    }
}
