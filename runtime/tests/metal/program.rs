//! Kernels as C++ programs: what MLX writes around a body, and what reads and writes its buffers.

use std::fmt::Write;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use half::{bf16, f16};
use loaf_runtime::backend::mlx_text::{Grid, Source};

/// Types of buffers, by MLX's names in Metal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32,
    F16,
    Bf16,
    U32,
    I32,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::F32 => "float",
            Kind::F16 => "float16_t",
            Kind::Bf16 => "bfloat16_t",
            Kind::U32 => "uint32_t",
            Kind::I32 => "int32_t",
        }
    }

    /// What a result may be off by, of the largest one: half a unit of the type, and f32 sums.
    pub fn tolerance(self) -> f64 {
        match self {
            Kind::F32 => 1e-5,
            Kind::F16 => 0.00049 + 1e-5,
            Kind::Bf16 => 0.00391 + 1e-5,
            Kind::U32 | Kind::I32 => 0.0,
        }
    }

    /// The nearest number of this type.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Kind::F32 => f64::from(x as f32),
            Kind::F16 => f64::from(f16::from_f32(x as f32)),
            Kind::Bf16 => f64::from(bf16::from_f32(x as f32)),
            Kind::U32 | Kind::I32 => x,
        }
    }

    fn bytes(self, x: f64) -> Vec<u8> {
        match self {
            Kind::F32 => (x as f32).to_le_bytes().to_vec(),
            Kind::F16 => f16::from_f32(x as f32).to_le_bytes().to_vec(),
            Kind::Bf16 => bf16::from_f32(x as f32).to_le_bytes().to_vec(),
            Kind::U32 => (x as u32).to_le_bytes().to_vec(),
            Kind::I32 => (x as i32).to_le_bytes().to_vec(),
        }
    }

    fn read(self, bytes: &[u8]) -> Vec<f64> {
        let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let short = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        match self {
            Kind::F32 => bytes.chunks_exact(4).map(|b| f64::from(f32::from_bits(word(b)))).collect(),
            Kind::F16 => bytes.chunks_exact(2).map(|b| f64::from(f16::from_bits(short(b)))).collect(),
            Kind::Bf16 => bytes.chunks_exact(2).map(|b| f64::from(bf16::from_bits(short(b)))).collect(),
            Kind::U32 => bytes.chunks_exact(4).map(|b| f64::from(word(b))).collect(),
            Kind::I32 => bytes.chunks_exact(4).map(|b| f64::from(word(b) as i32)).collect(),
        }
    }

    fn size(self) -> usize {
        if matches!(self, Kind::F16 | Kind::Bf16) { 2 } else { 4 }
    }
}

/// A buffer's elements, all of which its type can hold.
#[derive(Clone)]
pub struct Data {
    pub kind: Kind,
    pub shape: Vec<i32>,
    pub values: Vec<f64>,
}

/// One launch of one kernel, and what comes of it.
#[derive(Clone)]
pub struct Case {
    pub name: String,
    pub source: &'static Source,
    /// The body, as Metal gets it.
    pub text: String,
    pub grid: Grid,
    /// Template arguments.
    pub sizes: Vec<(String, i32)>,
    pub inputs: Vec<Data>,
    /// What is expected of every result.
    pub outputs: Vec<Data>,
    /// Inputs that are written, by their place, and what is expected in them.
    pub written: Vec<(usize, Vec<f64>)>,
}

/// Inputs with fewer elements are in the constant address space.
const CONSTANT_BELOW: i32 = 8;

impl Case {
    /// The function that MLX would make of the body, template arguments before it, and one that
    /// reads its inputs, launches it and writes results and inputs.
    fn code(&self, n: usize) -> String {
        let mut code = format!("namespace case_{n} {{\n#define threadgroup SHARED_OF(shared_{n})\n");
        let out = &mut code;
        let mut line = |text: String| writeln!(out, "{text}").expect("a string");
        for (letter, all) in [("I", &self.inputs), ("O", &self.outputs)] {
            for (i, data) in all.iter().enumerate() {
                line(format!("typedef {} {letter}{i};", data.kind.name()));
            }
        }
        for (name, value) in &self.sizes {
            line(format!("constexpr int {name} = {value};"));
        }
        let (mut parameters, mut arguments, mut buffers) = (Vec::new(), Vec::new(), String::new());
        let names = self.source.inputs.iter().chain(self.source.outputs).copied();
        let data = self.inputs.iter().chain(&self.outputs);
        for (i, (name, data)) in names.zip(data).enumerate() {
            let (count, is_input) = (data.values.len(), i < self.inputs.len());
            let constant = is_input && data.shape.iter().product::<i32>() < CONSTANT_BELOW;
            let pointer = if constant { "Constant" } else { "Device" };
            let kind = format!("{}{}", if is_input { "const " } else { "" }, data.kind.name());
            parameters.push(format!("const host::{pointer}Pointer<{kind}> {name}"));
            arguments.push(format!("host::{pointer}Pointer<{kind}>{{({kind}*)b{i}.data(), {count}, \"{name}\"}}"));
            writeln!(buffers, "host::Buffer b{i}(\"{name}\", {}, {count});", data.kind.size()).expect("a string");
            if is_input {
                writeln!(buffers, "b{i}.read();").expect("a string");
            }
            let shape = format!("{name}_shape");
            if is_input && self.text.contains(&shape) {
                let dims: Vec<String> = data.shape.iter().map(ToString::to_string).collect();
                parameters.push(format!("const host::ConstantPointer<const int> {shape}"));
                arguments.push(format!("host::ConstantPointer<const int>{{{shape}, {}, \"{shape}\"}}", dims.len()));
                writeln!(buffers, "static const int {shape}[] = {{{}}};", dims.join(", ")).expect("a string");
            }
        }
        for (attribute, value) in [("thread_position_in_threadgroup", "t"), ("threadgroup_position_in_grid", "g")] {
            if self.text.contains(attribute) {
                parameters.push(format!("uint3 {attribute}"));
                arguments.push(value.to_owned());
            }
        }
        line(format!("static void body_of({}) {{{}}}", parameters.join(",\n    "), self.text));
        line("#undef threadgroup".to_owned());
        for (_, rest) in self.text.match_indices("#define ").map(|(at, _)| self.text.split_at(at + 8)) {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            line(format!("#undef {}", &rest[..end]));
        }
        let Grid { blocks, group: [x, y] } = self.grid;
        line(format!("SHARED_BOUNDS(shared_{n});\nstatic void run_case(host::Order order) {{\n{buffers}"));
        line(format!(
            "launch({blocks}, {x}, {y}, order, &shared_{n}_start, size_t(&shared_{n}_end - &shared_{n}_start),"
        ));
        line(format!(
            "    [&](uint3 t, uint3 g) {{ (void)t; (void)g; body_of({}); }});",
            arguments.join(",\n        ")
        ));
        let all = self.inputs.len() + self.outputs.len();
        for i in (self.inputs.len()..all).chain(0..self.inputs.len()) {
            line(format!("b{i}.write();"));
        }
        line("}\n}".to_owned());
        code
    }

    /// What is wrong with results and inputs, as a program wrote them.
    fn judge(&self, bytes: &[u8]) -> Result<(), String> {
        let mut rest = bytes;
        let mut next = |data: &Data| {
            let (here, after) = rest.split_at_checked(data.values.len() * data.kind.size()).unwrap_or((rest, &[]));
            rest = after;
            data.kind.read(here)
        };
        let names = self.source.outputs.iter().chain(self.source.inputs);
        for (i, (data, name)) in self.outputs.iter().chain(&self.inputs).zip(names).enumerate() {
            let input = i.checked_sub(self.outputs.len());
            let written = self.written.iter().find(|(at, _)| Some(*at) == input).map(|(_, want)| want);
            let want = written.unwrap_or(&data.values);
            // What is only read stays as it is, to the bit.
            let share = if input.is_some() && written.is_none() { 0.0 } else { data.kind.tolerance() };
            let got = next(data);
            if got.len() != want.len() {
                return Err(format!("{name}: {} elements of {}", got.len(), want.len()));
            }
            let scale = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            for (at, (got, want)) in got.iter().zip(want).enumerate() {
                // Not a number is never near.
                let near = (got - want).abs() <= share * scale;
                if !near {
                    return Err(format!("{name}[{at}]: expected {want}, found {got}"));
                }
            }
        }
        Ok(())
    }
}

/// The compiler: `CXX`, or else the first of the usual names that answers.
fn compiler() -> String {
    let usual = ["c++", "g++", "clang++"].map(str::to_owned);
    let all = std::env::var("CXX").into_iter().chain(usual);
    let answers = |name: &String| {
        let run = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        run.is_ok_and(|status| status.success())
    };
    all.into_iter().find(answers).expect(
        "the text of the Metal kernels is tested by a C++ compiler, and none was found: install g++ or clang++, or name one in CXX",
    )
}

/// Writes the program of these cases beside `path`, and has the compiler do with it what `flags`
/// say.
fn compile(path: &Path, cases: &[Case], flags: &[&str]) -> Result<(), String> {
    let source = path.with_extension("cpp");
    let mut code = include_str!("shim.h").replace("#pragma once\n", "");
    for (n, case) in cases.iter().enumerate() {
        code += &case.code(n);
    }
    code += "int main(int, char** words) {\n  const host::Order order = host::Order(atoi(words[2]));\n";
    code += "  switch (atoi(words[1])) {\n";
    for n in 0..cases.len() {
        writeln!(code, "    case {n}: case_{n}::run_case(order); break;").expect("a string");
    }
    code += "  }\n}\n";
    std::fs::write(&source, code).map_err(|e| format!("{}: {e}", source.display()))?;
    let mut command = Command::new(compiler());
    let done = command.arg("-std=c++17").args(flags).arg(&source).output().map_err(|e| e.to_string())?;
    if done.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&done.stderr);
    Err(text.lines().filter(|l| l.contains("error")).take(5).collect::<Vec<_>>().join("\n"))
}

/// What the compiler does not like of these cases, if anything.
pub fn check(name: &str, cases: &[Case]) -> Result<(), String> {
    compile(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), cases, &["-fsyntax-only"])
}

/// Cases as one program.
pub struct Program {
    path: PathBuf,
    cases: Vec<Case>,
}

impl Program {
    /// Compiles the cases, or says what the compiler did not like.
    pub fn new(name: &str, cases: Vec<Case>) -> Result<Program, String> {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        compile(&path, &cases, &["-O1", "-pthread", "-o", &path.to_string_lossy()])?;
        Ok(Program { path, cases })
    }

    /// Runs a case in every order: what is wrong, if anything is.
    pub fn run(&self, n: usize) -> Result<(), String> {
        let case = &self.cases[n];
        let bytes: Vec<u8> =
            case.inputs.iter().flat_map(|data| data.values.iter().flat_map(|x| data.kind.bytes(*x))).collect();
        for (order, number) in [("first to last", "0"), ("last to first", "1"), ("writes seen late", "2")] {
            let mut command = Command::new(&self.path);
            command.args([&n.to_string(), number]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().map_err(|e| e.to_string())?;
            // A program that fails before it has read everything says why itself.
            let _ = child.stdin.take().expect("a pipe").write_all(&bytes);
            let done = child.wait_with_output().map_err(|e| e.to_string())?;
            let failed = || format!("{}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
            let judged = if done.status.success() { case.judge(&done.stdout) } else { Err(failed()) };
            judged.map_err(|why| format!("{}, {order}: {why}", case.name))?;
        }
        Ok(())
    }

    /// Every case, in order.
    pub fn run_all(&self) -> Vec<Result<(), String>> {
        (0..self.cases.len()).map(|n| self.run(n)).collect()
    }
}
