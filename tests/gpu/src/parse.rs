//! PTX as text to PTX as instructions: what the compiler makes of our kernels, and nothing else.
//! What is not known is a panic that shows the line.

use std::collections::HashMap;

/// Where the shared memory of a block, a thread's own, and the parameter begin. The host's
/// addresses lie above all of them.
pub const SHARED: u64 = 0x1000_0000;
pub const LOCAL: u64 = 0x2000_0000;
pub const PARAM: u64 = 0x3000_0000;

/// The type an instruction works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ty {
    Pred,
    /// Bits, unsigned or signed, of so many bytes.
    U(u8),
    S(u8),
    F16,
    F32,
    F64,
}

impl Ty {
    pub fn bytes(self) -> usize {
        match self {
            Ty::Pred => 1,
            Ty::U(n) | Ty::S(n) => usize::from(n),
            Ty::F16 => 2,
            Ty::F32 => 4,
            Ty::F64 => 8,
        }
    }

    fn of(name: &str) -> Ty {
        match name {
            "pred" => Ty::Pred,
            "f16" => Ty::F16,
            "f32" => Ty::F32,
            "f64" => Ty::F64,
            "b8" | "u8" => Ty::U(1),
            "b16" | "u16" => Ty::U(2),
            "b32" | "u32" => Ty::U(4),
            "b64" | "u64" => Ty::U(8),
            "s8" => Ty::S(1),
            "s16" => Ty::S(2),
            "s32" => Ty::S(4),
            "s64" => Ty::S(8),
            _ => panic!("PTX: type {name}"),
        }
    }
}

/// A register, or a number.
#[derive(Clone, Copy, Debug)]
pub enum Src {
    Reg(u32),
    Imm(u64),
}

/// Names of the registers that hold where a thread is, in the order of their numbers.
const SPECIAL: [&str; 12] = [
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// The same, true where either is a NaN.
    Unordered(u8),
    Nan,
    Num,
}

/// Which lane a shuffle reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Xor,
    At,
    Before,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Mov,
    /// A word as two halves, the lower one first, and the opposite.
    Split,
    Pair,
    Add,
    Sub,
    Mul,
    MulWide,
    MulHi,
    Mad,
    Fma,
    Div,
    Rem,
    Rcp,
    Sqrt,
    Neg,
    Abs,
    Min,
    Max,
    And,
    Or,
    Xor,
    Not,
    Shl,
    Shr,
    Bfi,
    Bfe,
    Prmt,
    /// Two words, the lower one first, to the right by less than a word.
    Funnel,
    Popc,
    Clz,
    /// Whether each side is signed.
    Dp4a(bool, bool),
    Setp(Cmp),
    Selp,
    /// From a type; whether to the nearest integer.
    Cvt(Ty, bool),
    /// Vector width.
    Ld(u8),
    St(u8),
    /// So many bytes from global to shared memory, of which some may be zeros.
    CpAsync,
    /// Those asked for so far are a group; all but so many of the last groups are waited for, or
    /// whatever was asked for.
    CopiesEnd,
    CopiesWait,
    CopiesAll,
    /// A barrier in shared memory: begun, arrived at, arrived at once a thread's copies are there,
    /// and its phase of a parity waited for.
    MarkInit,
    MarkArrive,
    MarkCopies,
    MarkWait,
    /// Products of a warpgroup on bytes, the second side by a descriptor; those so far are a group;
    /// all groups are waited for.
    Wgmma,
    /// On halves, with sums in f32; whether what is summed over are the second side's rows.
    WgmmaHalves(bool),
    WgmmaEnd,
    WgmmaWait,
    AtomInc,
    AtomAdd,
    Shfl(Lane),
    /// A warp's largest number, or its sum.
    Redux(bool),
    /// Which lanes' condition holds.
    Ballot,
    Mma,
    /// On halves, with sums in f32.
    MmaHalves,
    /// Four matrices of 8 by 8 halves; whether turned.
    LdMatrix(bool),
    /// Two floats as halves.
    Halves,
    /// A power of two.
    Ex2,
    Bra,
    Bar,
    BarWarp,
    Ret,
    Nop,
}

#[derive(Clone, Debug)]
pub struct Instr {
    /// The predicate, and whether it is wanted false.
    pub guard: Option<(u32, bool)>,
    pub op: Op,
    pub ty: Ty,
    pub d: Vec<u32>,
    pub s: Vec<Src>,
    /// Offset of an address, or target of a branch.
    pub at: i64,
    pub line: u32,
}

#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub registers: usize,
    pub code: Vec<Instr>,
    pub local: usize,
    /// Threads that a block has at most, where the kernel says so.
    pub most_threads: Option<u32>,
}

/// A module's kernels.
#[derive(Debug)]
pub struct Module {
    /// Each with its code.
    pub kernels: Vec<Kernel>,
    /// Bytes of static shared memory; what a launch asks for comes after it.
    pub fixed: usize,
}

impl Module {
    /// Names in order.
    pub fn names(&self) -> Vec<String> {
        self.kernels.iter().map(|k| k.name.clone()).collect()
    }

    /// Reads a module.
    pub fn parse(text: &str) -> Module {
        let mut symbols: HashMap<String, u64> = HashMap::new();
        let mut fixed = 0usize;
        // Shared memory first: it may be named before its kernel.
        for line in text.lines().map(str::trim).filter(|l| l.starts_with(".shared")) {
            let name = line.trim_end_matches(';').split_whitespace().last().expect("a name");
            let (name, len) = match name.split_once('[') {
                Some((name, len)) => (name, len.trim_end_matches(']').parse().expect("a length")),
                None => (name, 8),
            };
            fixed = fixed.next_multiple_of(16);
            symbols.insert(name.to_owned(), SHARED + fixed as u64);
            fixed += len;
        }
        fixed = fixed.next_multiple_of(16);
        symbols.insert("shared".to_owned(), SHARED + fixed as u64);
        let mut kernels = Vec::new();
        let mut lines = (1u32..).zip(text.lines()).peekable();
        while let Some((_, line)) = lines.next() {
            let Some(rest) = line.trim().strip_prefix(".visible .entry ") else { continue };
            let name = rest.trim_end_matches('(').to_owned();
            let mut most_threads = None;
            let mut body = Vec::new();
            for (_, line) in lines.by_ref() {
                if line == "{" {
                    break;
                }
                if let Some(n) = line.trim().strip_prefix(".maxntid ") {
                    most_threads = n.split(',').next().and_then(|n| n.trim().parse().ok());
                }
                if let Some(p) = line.trim().strip_prefix(".param ") {
                    let p = p.split_whitespace().last().expect("a name");
                    symbols.insert(p.split('[').next().expect("a name").to_owned(), PARAM);
                }
            }
            for (n, line) in lines.by_ref() {
                if line == "}" {
                    break;
                }
                body.push((n, line.trim()));
            }
            kernels.push(Body::new(&symbols).kernel(name, &body, most_threads));
        }
        Module { kernels, fixed }
    }
}

struct Body<'a> {
    symbols: &'a HashMap<String, u64>,
    registers: HashMap<String, u32>,
    local: usize,
    depot: String,
}

impl<'a> Body<'a> {
    fn new(symbols: &'a HashMap<String, u64>) -> Body<'a> {
        let registers = SPECIAL.iter().enumerate().map(|(i, n)| ((*n).to_owned(), i as u32)).collect();
        Body { symbols, registers, local: 0, depot: String::new() }
    }

    fn reg(&mut self, name: &str) -> u32 {
        if let Some(r) = self.registers.get(name) {
            return *r;
        }
        let r = self.registers.len() as u32;
        self.registers.insert(name.to_owned(), r);
        r
    }

    fn src(&mut self, text: &str) -> Src {
        let t = text.trim();
        if let Some(hex) = t.strip_prefix("0f") {
            return Src::Imm(u64::from_str_radix(hex, 16).expect("an f32"));
        }
        if let Some(hex) = t.strip_prefix("0d") {
            return Src::Imm(u64::from_str_radix(hex, 16).expect("an f64"));
        }
        if let Ok(n) = t.parse::<i64>() {
            return Src::Imm(n as u64);
        }
        if let Ok(n) = t.parse::<u64>() {
            return Src::Imm(n);
        }
        if t == self.depot {
            return Src::Imm(LOCAL);
        }
        if let Some(at) = self.symbols.get(t) {
            return Src::Imm(*at);
        }
        Src::Reg(self.reg(t))
    }

    /// `[base+offset]`.
    fn address(&mut self, text: &str) -> (Src, i64) {
        let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
        match inner.split_once('+') {
            Some((base, offset)) => (self.src(base), offset.trim().parse().expect("an offset")),
            None => (self.src(inner), 0),
        }
    }

    fn kernel(mut self, name: String, body: &[(u32, &str)], most_threads: Option<u32>) -> Kernel {
        let mut code: Vec<Instr> = Vec::new();
        let mut labels: HashMap<&str, usize> = HashMap::new();
        let mut targets: Vec<(usize, String)> = Vec::new();
        let mut statements = Vec::new();
        for (n, line) in body {
            let line = line.split("//").next().unwrap_or_default().trim();
            // Inline assembly is one line of several statements in braces.
            let line = line.trim_start_matches('{').trim_end_matches('}');
            statements.extend(line.split_inclusive(';').map(|s| (*n, s.trim().trim_end_matches(';').trim())));
        }
        // Instructions over several lines (vectors of registers) are joined.
        let mut whole: Vec<(u32, String)> = Vec::new();
        for (n, s) in &statements {
            if s.is_empty() || s.starts_with('.') || s.starts_with("$L") && s.ends_with(':') {
                if s.starts_with(".local") {
                    let last = s.split_whitespace().last().expect("a name");
                    let (depot, len) = last.split_once('[').expect("a length");
                    (self.depot, self.local) = (depot.to_owned(), len.trim_end_matches(']').parse().expect("a length"));
                }
                if s.ends_with(':') {
                    whole.push((*n, (*s).to_owned()));
                }
                continue;
            }
            whole.push((*n, (*s).to_owned()));
        }
        for (n, s) in &whole {
            if let Some(label) = s.strip_suffix(':') {
                labels.insert(label, code.len());
                continue;
            }
            let (guard, rest) = match s.strip_prefix('@') {
                Some(rest) => {
                    let (p, rest) = rest.split_once(char::is_whitespace).expect("an instruction");
                    let (p, not) = p.strip_prefix('!').map_or((p, false), |p| (p, true));
                    (Some((self.reg(p), not)), rest.trim())
                }
                None => (None, s.as_str()),
            };
            let (name, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            let mut instr = self.instruction(name, operands, *n, rest);
            instr.guard = guard;
            if instr.op == Op::Bra {
                targets.push((code.len(), operands.trim().to_owned()));
            }
            code.push(instr);
        }
        for (at, label) in targets {
            code[at].at = *labels.get(label.as_str()).unwrap_or_else(|| panic!("PTX: label {label}")) as i64;
        }
        Kernel { name, registers: self.registers.len(), code, local: self.local, most_threads }
    }

    fn instruction(&mut self, name: &str, operands: &str, line: u32, text: &str) -> Instr {
        let parts: Vec<&str> = name.split('.').collect();
        let ty = |i: usize| Ty::of(parts[parts.len() - i]);
        let fields = split(operands);
        let one = |this: &mut Self, op: Op, ty: Ty| {
            let d = vec![this.reg(fields[0].split('|').next().expect("a register").trim())];
            let s = fields[1..].iter().map(|f| this.src(f)).collect();
            Instr { guard: None, op, ty, d, s, at: 0, line }
        };
        let empty = |op| Instr { guard: None, op, ty: Ty::U(4), d: vec![], s: vec![], at: 0, line };
        match parts[0] {
            "mov" if operands.contains('{') => {
                assert_eq!(name, "mov.b64", "PTX: {text}");
                let d: Vec<u32> = vector(fields[0]).0.into_iter().map(|r| self.reg(r)).collect();
                let s = vector(fields[1]).0.into_iter().map(|v| self.src(v)).collect();
                let op = if d.len() == 2 { Op::Split } else { Op::Pair };
                Instr { guard: None, op, ty: ty(1), d, s, at: 0, line }
            }
            "mov" => one(self, Op::Mov, ty(1)),
            "cvta" => one(self, Op::Mov, Ty::U(8)),
            "add" => one(self, Op::Add, ty(1)),
            "sub" => one(self, Op::Sub, ty(1)),
            "mul" if parts[1] == "wide" => one(self, Op::MulWide, ty(1)),
            "mul" if parts[1] == "hi" => one(self, Op::MulHi, ty(1)),
            "mul" => one(self, Op::Mul, ty(1)),
            "mad" if parts[1] == "lo" => one(self, Op::Mad, ty(1)),
            "fma" => one(self, Op::Fma, ty(1)),
            "div" => one(self, Op::Div, ty(1)),
            "rem" => one(self, Op::Rem, ty(1)),
            "rcp" => one(self, Op::Rcp, ty(1)),
            "sqrt" => one(self, Op::Sqrt, ty(1)),
            "neg" => one(self, Op::Neg, ty(1)),
            "abs" => one(self, Op::Abs, ty(1)),
            "min" => one(self, Op::Min, ty(1)),
            "max" => one(self, Op::Max, ty(1)),
            "and" => one(self, Op::And, ty(1)),
            "or" => one(self, Op::Or, ty(1)),
            "xor" => one(self, Op::Xor, ty(1)),
            "not" => one(self, Op::Not, ty(1)),
            "shl" => one(self, Op::Shl, ty(1)),
            "shr" => one(self, Op::Shr, ty(1)),
            "bfi" => one(self, Op::Bfi, ty(1)),
            "bfe" => one(self, Op::Bfe, ty(1)),
            "prmt" => one(self, Op::Prmt, ty(1)),
            "shf" if name == "shf.r.wrap.b32" => one(self, Op::Funnel, ty(1)),
            "popc" => one(self, Op::Popc, ty(1)),
            "clz" => one(self, Op::Clz, ty(1)),
            "dp4a" => one(self, Op::Dp4a(parts[1] == "s32", parts[2] == "s32"), Ty::S(4)),
            "selp" => one(self, Op::Selp, ty(1)),
            "setp" => {
                let cmp = match parts[1] {
                    "eq" => Cmp::Eq,
                    "ne" => Cmp::Ne,
                    "lt" | "lo" => Cmp::Lt,
                    "le" | "ls" => Cmp::Le,
                    "gt" | "hi" => Cmp::Gt,
                    "ge" | "hs" => Cmp::Ge,
                    "equ" => Cmp::Unordered(0),
                    "neu" => Cmp::Unordered(1),
                    "ltu" => Cmp::Unordered(2),
                    "leu" => Cmp::Unordered(3),
                    "gtu" => Cmp::Unordered(4),
                    "geu" => Cmp::Unordered(5),
                    "nan" => Cmp::Nan,
                    "num" => Cmp::Num,
                    _ => panic!("PTX: {text}"),
                };
                one(self, Op::Setp(cmp), ty(1))
            }
            "cvt" if parts.contains(&"f16x2") => one(self, Op::Halves, Ty::U(4)),
            "ex2" => one(self, Op::Ex2, Ty::F32),
            "ldmatrix" => {
                assert!(
                    name.starts_with("ldmatrix.sync.aligned.m8n8.x4.") && name.ends_with("shared.b16"),
                    "PTX: {text}"
                );
                let d = vector(fields[0]).0.into_iter().map(|r| self.reg(r)).collect();
                let (s, at) = self.address(fields[1]);
                let turned = parts.contains(&"trans");
                Instr { guard: None, op: Op::LdMatrix(turned), ty: Ty::U(4), d, s: vec![s], at, line }
            }
            "cvt" => one(self, Op::Cvt(ty(1), parts.contains(&"rni")), ty(2)),
            "ld" => {
                let (d, width) = vector(fields[0]);
                let d = d.into_iter().map(|r| self.reg(r)).collect();
                let (s, at) = self.address(fields[1]);
                Instr { guard: None, op: Op::Ld(width), ty: ty(1), d, s: vec![s], at, line }
            }
            "st" => {
                let (values, width) = vector(fields[1]);
                let (base, at) = self.address(fields[0]);
                let s = std::iter::once(base).chain(values.into_iter().map(|v| self.src(v))).collect();
                Instr { guard: None, op: Op::St(width), ty: ty(1), d: vec![], s, at, line }
            }
            "cp" if parts.contains(&"shared") => {
                let (to, at) = self.address(fields[0]);
                let (from, more) = self.address(fields[1]);
                let bytes = self.src(fields[2]);
                let there = fields.get(3).map_or(bytes, |n| self.src(n));
                let s = vec![to, from, Src::Imm(more as u64), bytes, there];
                Instr { guard: None, op: Op::CpAsync, ty: Ty::U(4), d: vec![], s, at, line }
            }
            "cp" if parts.contains(&"mbarrier") => {
                assert!(parts.contains(&"noinc"), "PTX: {text}");
                let (s, at) = self.address(fields[0]);
                Instr { guard: None, op: Op::MarkCopies, ty: Ty::U(8), d: vec![], s: vec![s], at, line }
            }
            "cp" if parts.contains(&"commit_group") => empty(Op::CopiesEnd),
            "cp" if parts.contains(&"wait_group") => {
                let s = vec![self.src(fields[0])];
                Instr { guard: None, op: Op::CopiesWait, ty: Ty::U(4), d: vec![], s, at: 0, line }
            }
            "cp" if parts.contains(&"wait_all") => empty(Op::CopiesAll),
            "cp" => {
                assert!(parts.contains(&"prefetch"), "PTX: {text}");
                empty(Op::Nop)
            }
            "mbarrier" => {
                let (op, barrier) = match parts[1] {
                    "init" => (Op::MarkInit, 0),
                    "arrive" => (Op::MarkArrive, 1),
                    "try_wait" if parts[2] == "parity" => (Op::MarkWait, 1),
                    _ => panic!("PTX: {text}"),
                };
                let d = if op == Op::MarkWait { vec![self.reg(fields[0])] } else { vec![] };
                let (base, at) = self.address(fields[barrier]);
                let s = std::iter::once(base).chain(fields[barrier + 1..].iter().map(|f| self.src(f))).collect();
                Instr { guard: None, op, ty: Ty::U(8), d, s, at, line }
            }
            "wgmma" if parts[1] == "mma_async" => {
                let bytes = parts[4].ends_with("k32") && name.ends_with("s32.s8.s8");
                let halves = parts[4].ends_with("k16") && name.ends_with("f32.f16.f16");
                assert!(parts[4].starts_with("m64n") && (bytes || halves), "PTX: {text}");
                let d: Vec<u32> = vector(fields[0]).0.into_iter().map(|r| self.reg(r)).collect();
                // On halves no side changes its sign, and the last number says what is turned.
                let (op, ty) = match fields[4..] {
                    [] if bytes => (Op::Wgmma, Ty::S(4)),
                    ["1", "1", turned] if halves => (Op::WgmmaHalves(turned == "1"), Ty::F32),
                    _ => panic!("PTX: {text}"),
                };
                let a = vector(fields[1]).0.into_iter().chain(fields[2..4].iter().copied());
                let s = a.map(|v| self.src(v)).collect();
                Instr { guard: None, op, ty, d, s, at: 0, line }
            }
            "wgmma" => match parts[1] {
                "fence" => empty(Op::Nop),
                "commit_group" => empty(Op::WgmmaEnd),
                "wait_group" if operands.trim() == "0" => empty(Op::WgmmaWait),
                _ => panic!("PTX: {text}"),
            },
            "setmaxnreg" | "griddepcontrol" => empty(Op::Nop),
            "atom" => {
                let op = if parts.contains(&"inc") { Op::AtomInc } else { Op::AtomAdd };
                assert!(op == Op::AtomInc || parts.contains(&"add"), "PTX: {text}");
                let (base, at) = self.address(fields[1]);
                let (d, v) = (self.reg(fields[0]), self.src(fields[2]));
                Instr { guard: None, op, ty: ty(1), d: vec![d], s: vec![base, v], at, line }
            }
            "red" => {
                assert!(parts.contains(&"add"), "PTX: {text}");
                let (base, at) = self.address(fields[0]);
                let v = self.src(fields[1]);
                Instr { guard: None, op: Op::AtomAdd, ty: ty(1), d: vec![], s: vec![base, v], at, line }
            }
            "shfl" => {
                let lane = match parts[2] {
                    "bfly" => Lane::Xor,
                    "idx" => Lane::At,
                    "up" => Lane::Before,
                    _ => panic!("PTX: {text}"),
                };
                one(self, Op::Shfl(lane), ty(1))
            }
            "redux" => {
                assert!(matches!(parts[2], "max" | "add"), "PTX: {text}");
                one(self, Op::Redux(parts[2] == "max"), ty(1))
            }
            "vote" => {
                assert_eq!(parts[2], "ballot", "PTX: {text}");
                one(self, Op::Ballot, ty(1))
            }
            "mma" if name == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => {
                let d: Vec<u32> = vector(fields[0]).0.into_iter().map(|r| self.reg(r)).collect();
                let s = fields[1..4].iter().flat_map(|f| vector(f).0).map(|v| self.src(v)).collect();
                Instr { guard: None, op: Op::MmaHalves, ty: Ty::F32, d, s, at: 0, line }
            }
            "mma" => {
                let bytes = ["m16n8k16", "m16n8k32"].contains(&parts[3])
                    && parts[4..6] == ["row", "col"]
                    && ["s32.s8.s8.s32", "s32.u8.s8.s32", "s32.s8.u8.s32"].iter().any(|t| name.ends_with(t));
                assert!(bytes, "PTX: {text}");
                let d: Vec<u32> = vector(fields[0]).0.into_iter().map(|r| self.reg(r)).collect();
                let s = fields[1..4].iter().flat_map(|f| vector(f).0).map(|v| self.src(v)).collect();
                let signs = i64::from(parts[parts.len() - 3] == "s8") | i64::from(parts[parts.len() - 2] == "s8") << 1;
                Instr { guard: None, op: Op::Mma, ty: Ty::S(4), d, s, at: signs, line }
            }
            "bra" => empty(Op::Bra),
            "bar" if parts[1] == "warp" => empty(Op::BarWarp),
            "bar" | "barrier" => empty(Op::Bar),
            "ret" | "exit" => empty(Op::Ret),
            "membar" | "fence" | "prefetch" => empty(Op::Nop),
            _ => panic!("PTX, line {line}: unknown instruction: {text}"),
        }
    }
}

/// Operands between commas, braces and brackets kept together.
fn split(text: &str) -> Vec<&str> {
    let (mut out, mut depth, mut start) = (Vec::new(), 0, 0);
    for (i, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                out.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    if !text[start..].trim().is_empty() {
        out.push(text[start..].trim());
    }
    out
}

fn vector(text: &str) -> (Vec<&str>, u8) {
    let t = text.trim();
    match t.strip_prefix('{') {
        Some(inner) => {
            let all: Vec<&str> = inner.trim_end_matches('}').split(',').map(str::trim).collect();
            let n = all.len() as u8;
            (all, n)
        }
        None => (vec![t], 1),
    }
}
