//! The very text that Metal compiles, compiled as C++ with a shim for Metal's words (`shim.h`), and
//! held to what each kernel is to compute (`cases.rs`). And slips in that text, each of which has
//! to be found.

mod cases;
mod program;

use loaf_runtime::backend::mlx_text::METAL;

use program::{Case, Program};

/// Declarations and casts of pointers that name no address space: Metal refuses them, and C++ knows
/// none.
fn without_space(text: &str) -> Vec<String> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut text = text.to_owned();
    for name in ["LOAF_DEVICE", "LOAF_SHARED"] {
        let define = format!("#define {name}");
        let meaning = text.lines().find_map(|line| line.trim().strip_prefix(&define)).unwrap_or_default().to_owned();
        text = text.replace(name, meaning.trim());
    }
    let bare = |line: &&str| {
        line.match_indices('*').any(|(at, _)| {
            // `float* x` and `(float*)x` are pointers; products stand between spaces.
            let kind = line[..at].chars().next_back().is_some_and(word);
            let before = line[..at].trim_end_matches(word).split_whitespace().next_back().unwrap_or_default();
            kind && !["device", "constant", "threadgroup"].contains(&before.trim_start_matches(|c| !word(c)))
        })
    };
    text.lines().filter(bare).map(str::to_owned).collect()
}

/// A slip: the kernel, what its text says, and what it says instead.
type Slip = (&'static str, &'static str, &'static str);

/// Slips that compile, the words of Metal first, in the order of their lines.
const WRONG: [Slip; 24] = [
    ("loaf_add_norm", "x = thread_position_in_threadgroup.x", "x = thread_position_in_threadgroup.y"),
    ("loaf_add_norm", "y = thread_position_in_threadgroup.y", "y = thread_position_in_threadgroup.x"),
    ("loaf_add_norm", "threadgroup_position_in_grid.x", "threadgroup_position_in_grid.y"),
    ("loaf_add_norm", "LOAF_SHARED threadgroup", "LOAF_SHARED"),
    ("loaf_add_norm", "mem_flags::mem_threadgroup", "mem_flags::mem_none"),
    ("loaf_add_norm", "as_type<float>(bits)", "(float)(bits)"),
    ("loaf_top_k", "metal::exp(value)", "metal::log(value)"),
    ("loaf_pick", "metal::log(value)", "metal::exp(value)"),
    ("loaf_delta_prepare", "metal::log(1.0f + (value))", "metal::log(value)"),
    ("loaf_add_norm", "metal::precise::rsqrt(value)", "1.0f / metal::precise::rsqrt(value)"),
    ("loaf_add_norm", "simd_sum(value)", "simd_max(value)"),
    ("loaf_top_k", "simd_max(value)", "simd_min(value)"),
    ("loaf_top_k", "simd_min(value)", "simd_max(value)"),
    // One lane's value in place of the SIMD group's; a lane that does not take part.
    ("loaf_norm_gate", "LOAF_LANES(sum);", ""),
    ("loaf_norm_gate", "LOAF_LANES(sum);", "if (x != 5) LOAF_LANES(sum);"),
    // A barrier that some threads never reach.
    ("loaf_scan_logits", "LOAF_SYNC;", "if (y != 0) return; LOAF_SYNC;"),
    // Another thread's row, another extent, the element after the last one.
    ("loaf_heads", "row_of[y][with]", "row_of[0][with]"),
    ("loaf_heads", "keys_shape[1]", "keys_shape[2]"),
    ("loaf_attend", "keys_shape[1]", "keys_shape[0]"),
    ("loaf_attend", "all[y][i * 32 + x] = sum[i]", "all[y][i * 32 + 31 - x] = sum[i]"),
    ("loaf_conv", "if (row >= a_shape[0]) return;", "if (row > a_shape[0]) return;"),
    ("loaf_embed", "if (shift + BITS > 32)", "if (shift + BITS > 33)"),
    ("loaf_merge", "block * N * (D + 2)", "block * N * (D + 1)"),
    ("loaf_delta_step", "(V / 32)) * 32 + x", "(V / 32)) * 32 + y"),
];

/// Slips that Metal's compiler would refuse.
const REFUSED: [Slip; 4] = [
    ("loaf_gate", "metal::exp(value)", "expf(value)"),
    ("loaf_add_norm", "threadgroup_barrier(mem_flags::mem_threadgroup)", "__syncthreads()"),
    ("loaf_add_norm", "const int lane =", "const int thread ="),
    ("loaf_embed", "LOAF_DEVICE device", "LOAF_DEVICE constant"),
];

fn changed(cases: &[Case], (kernel, from, to): Slip) -> Vec<Case> {
    let of = |case: &&Case| case.source.name.to_str() == Ok(kernel);
    let all: Vec<Case> = cases.iter().filter(of).cloned().collect();
    assert!(!all.is_empty(), "no case of {kernel}");
    let change = |mut case: Case| {
        assert!(case.text.contains(from), "{kernel} should say `{from}`");
        case.text = case.text.replacen(from, to, 1);
        case
    };
    all.into_iter().map(change).collect()
}

#[test]
fn every_kernel_computes_on_metal_what_it_should() {
    let cases = cases::all();
    for case in &cases {
        assert_eq!(without_space(&case.text), [""; 0], "{}: pointers without an address space", case.name);
    }
    let program = Program::new("metal", cases).unwrap_or_else(|why| panic!("the kernels do not compile:\n{why}"));
    let wrong: Vec<String> = program.run_all().into_iter().filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn slips_are_found() {
    let cases = cases::all();
    for line in METAL.lines().filter(|line| !line.trim().is_empty()) {
        let slip = WRONG.iter().chain(&REFUSED).any(|(_, from, _)| line.contains(from));
        assert!(slip, "no slip is tried in `{line}`");
    }
    // Besides, every barrier of every kernel in its turn.
    let mut slips: Vec<(String, Vec<Case>)> =
        WRONG.map(|slip| (format!("{slip:?}"), changed(&cases, slip))).into_iter().collect();
    for case in cases.iter().filter(|case| case.text.matches("LOAF_SYNC;").count() > 0) {
        for (n, (at, _)) in case.text.match_indices("LOAF_SYNC;").enumerate() {
            let text = format!("{}{}", &case.text[..at], &case.text[at + "LOAF_SYNC;".len()..]);
            slips.push((format!("{} without barrier {n}", case.name), vec![Case { text, ..case.clone() }]));
        }
    }
    let all = slips.iter().flat_map(|(_, cases)| cases.iter().cloned()).collect();
    let program = Program::new("metal_slips", all).unwrap_or_else(|why| panic!("these should compile:\n{why}"));
    let mut first = 0;
    for (name, cases) in &slips {
        let runs: Vec<_> = (first..first + cases.len()).map(|n| program.run(n)).collect();
        assert!(runs.iter().any(Result::is_err), "nobody noticed: {name}");
        first += cases.len();
    }
    for (i, slip) in REFUSED.into_iter().enumerate() {
        let checked = program::check(&format!("metal_refused_{i}"), &changed(&cases, slip));
        assert!(checked.is_err(), "this compiles: {slip:?}");
    }
}

#[test]
fn pointers_name_their_address_space() {
    assert_eq!(without_space("float* a = b;\n  c = (I6*)d; e = f * g;\n(device I6*)h").len(), 2);
    assert_eq!(without_space("#define LOAF_DEVICE device\nconst LOAF_DEVICE float* a = b;").len(), 0);
    assert_eq!(without_space("#define LOAF_DEVICE\nconst LOAF_DEVICE float* a = b;").len(), 1);
}
