//! Golden cases: recorded by the interpreter, reproduced by replay, noticed when wrong.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use loaf_bake::build::{BuildOptions, Prepared, Silent};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::weights::QuantOptions;
use loaf_formats::container::{Container, HEAD_BYTES, SectionKind};
use loaf_formats::golden::Golden;
use loaf_tests::{bake, command_line, fixture, fixtures};
use sha2::{Digest, Sha256};

/// Exit code, standard output, standard error of `loaf verify --run`.
fn verify_run(file: &Path) -> (u8, String, String) {
    let arguments = ["loaf", "verify", "--run", "-m"].map(OsStr::new);
    command_line(arguments.into_iter().chain([file.as_os_str()]))
}

fn options(tokens: u32, quant: Option<(u8, u64)>) -> BuildOptions {
    let quant = quant.map_or(QuantOptions::default(), |(bits, group)| QuantOptions {
        bits: Some(bits),
        group,
        ..QuantOptions::default()
    });
    BuildOptions { golden: Some(tokens), context: Some(64), quant, ..BuildOptions::default() }
}

fn golden(file: &Path) -> Golden {
    let bytes = fs::read(file).expect("baked");
    let section =
        Container::open(&bytes).expect("a loaf").verify_section(SectionKind::Golden).expect("golden").to_vec();
    Golden::decode(&section, u32::MAX, 64).expect("cases")
}

#[test]
fn replay_gives_what_the_interpreter_recorded() {
    let mut ids = 0;
    let cases = fixtures("hf").into_iter().chain(fixtures("mlx")).map(|name| (name, None));
    for (name, quant) in
        cases.chain([("stories260k".to_string(), Some((8, 64))), ("stories260k".to_string(), Some((4, 32)))])
    {
        let baked = bake(&name, &options(12, quant));
        let golden = golden(&baked.path);
        assert_eq!(golden.cases.iter().map(|c| c.prompt.len()).collect::<Vec<_>>(), [1, 5, 12], "{name}");
        let recorded = golden.cases.iter().map(|c| c.greedy.len()).sum::<usize>();
        ids += recorded;
        let (code, out, err) = verify_run(&baked.path);
        if recorded == 0 {
            // Nothing was clear enough; what was not compared is not said to be right.
            assert!(code == 1 && err.contains("expected at least one golden token to compare"), "{name}: {out}{err}");
            continue;
        }
        assert_eq!((code, err.as_str()), (0, ""), "{name} {quant:?}: {out}");
        assert!(out.contains("golden ids"), "{out}");
    }
    assert!(ids > 60, "some continuations are clear enough to record: {ids}");
}

#[test]
fn the_interpreter_reproduces_its_own_cases_and_notices_others() {
    let options = options(6, None);
    let baked = bake("hf/qwen3_5_moe", &options);
    let bytes = fs::read(&baked.path).expect("baked");
    let data = Container::open(&bytes).expect("a loaf").data();
    let checkpoint = Checkpoint::open(&fixture("hf/qwen3_5_moe")).expect("a fixture");
    let prepared = Prepared::new(&checkpoint, &options, &Silent).expect("it was baked before");
    let mut golden = golden(&baked.path);
    assert_eq!(prepared.lowered().differing(data, &golden).expect("traces"), None);
    let right = golden.cases[1].greedy[0];
    golden.cases[1].greedy[0] ^= 1;
    let (case, ids) = prepared.lowered().differing(data, &golden).expect("traces").expect("a wrong id");
    assert_eq!((case, ids[0]), (1, right));
}

/// Changes the last digit of the first recorded id and makes all hashes fit.
fn forge(file: &Path) {
    let mut bytes = fs::read(file).expect("baked");
    let container = Container::open(&bytes).expect("a loaf");
    let start = bytes.len() - container.data().len();
    let (index, section) =
        container.sections().iter().enumerate().find(|(_, s)| s.kind == SectionKind::Golden.code()).expect("golden");
    let tree = container.head().section(SectionKind::HashTree).expect("a tree").clone();
    // Every section here but the weights fits in one leaf, and those of this fixture do too.
    assert_eq!(tree.len, 32 * (container.sections().len() as u64 - 1));
    let (offset, len) = (start + section.offset as usize, section.len as usize);
    let text = &bytes[offset..offset + len];
    let first = (0..len - 10).find(|i| text[*i..].starts_with(b"\"greedy\":[") && text[i + 10].is_ascii_digit());
    let first = first.expect("a case that has ids") + 10;
    let digits = text[first..].iter().take_while(|b| b.is_ascii_digit()).count();
    let at = offset + first + digits - 1;
    bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
    let hash = |prefix: u8, bytes: &[u8]| -> [u8; 32] {
        Sha256::new().chain_update([prefix]).chain_update(bytes).finalize().into()
    };
    let leaf = hash(0, &bytes[offset..offset + len]);
    bytes[start + 96 + 64 * index + 32..][..32].copy_from_slice(&leaf);
    let tree_at = start + tree.offset as usize;
    bytes[tree_at + 32 * index..][..32].copy_from_slice(&leaf);
    let root = hash(0, &bytes[tree_at..tree_at + tree.len as usize]);
    let tree_index = tree.len as usize / 32;
    bytes[start + 96 + 64 * tree_index + 32..][..32].copy_from_slice(&root);
    let id_at = start + HEAD_BYTES as usize - 32;
    let id: [u8; 32] = Sha256::digest(&bytes[start..id_at]).into();
    bytes[id_at..id_at + 32].copy_from_slice(&id);
    fs::write(file, bytes).expect("a writable folder");
}

#[test]
fn a_wrong_id_fails_and_no_cases_is_said() {
    let baked = bake("hf/llama_f16", &options(6, None));
    forge(&baked.path);
    let (code, out, err) = verify_run(&baked.path);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("golden case ") && err.contains(": id 0: expected "), "{err}");
    let without = bake("hf/llama_f16", &options(0, None));
    let (code, _, err) = verify_run(&without.path);
    assert_eq!(code, 1);
    assert!(err.contains("this loaf has no golden prompts"), "{err}");
}
