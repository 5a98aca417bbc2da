//! A bake looks at all that running its loaf will need: what is malformed, meaningless or too large
//! is refused or warned of, in one line, before there is a file.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

const QWEN3: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/qwen3");
const MLX: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/mlx");

/// A copy of a checkpoint.
struct Source(tempfile::TempDir);

impl Source {
    fn of(from: &str) -> Source {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for entry in fs::read_dir(from).expect("a fixture") {
            let entry = entry.expect("an entry");
            fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("a copy");
        }
        Source(dir)
    }

    /// The same with `edit` made to one of its JSON files.
    fn with(file: &str, edit: impl Fn(&mut Value)) -> Source {
        let source = Source::of(QWEN3);
        let path = source.0.path().join(file);
        let mut value = fs::read(&path).map_or(json!({}), |b| serde_json::from_slice(&b).expect("JSON"));
        edit(&mut value);
        fs::write(path, value.to_string()).expect("a writable folder");
        source
    }

    /// Writes `value` over every element of the tensors whose names `which` picks, or from one
    /// element on.
    fn fill(&self, which: impl Fn(&str) -> bool, from: usize, value: &[u8]) {
        let path = self.0.path().join("model.safetensors");
        let mut bytes = fs::read(&path).expect("a fixture");
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..data]).expect("JSON");
        for (name, info) in header.as_object().expect("tensors").iter().filter(|(name, _)| which(name)) {
            if let Some(offsets) = info["data_offsets"].as_array() {
                let [begin, end] = [0, 1].map(|i| data + offsets[i].as_u64().expect("an offset") as usize);
                let tail = &mut bytes[begin..end][from * value.len()..];
                tail.chunks_exact_mut(value.len()).for_each(|element| element.copy_from_slice(value));
                assert!(!name.is_empty());
            }
        }
        fs::write(path, bytes).expect("a writable folder");
    }

    fn path(&self) -> &str {
        self.0.path().to_str().expect("UTF-8")
    }

    fn out(&self) -> String {
        self.0.path().join("out.loaf").to_str().expect("UTF-8").to_string()
    }

    /// Exit code and standard error of `bake build`.
    fn bake(&self, more: &[&str]) -> (i32, String) {
        let out = self.out();
        bake(&[&["build", self.path(), "-o", &out, "--context", "16"], more].concat())
    }

    /// The one line with which it is refused.
    fn refused(&self, more: &[&str]) -> String {
        let (code, text) = self.bake(more);
        assert_eq!((code, text.lines().count()), (1, 1), "{text}");
        assert!(!Path::new(&self.out()).exists());
        text
    }
}

fn bake(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_bake")).args(args).output().expect("built");
    (output.status.code().unwrap_or(-1), String::from_utf8(output.stderr).expect("UTF-8"))
}

#[test]
fn configs_that_say_what_is_not_understood_are_refused() {
    let scaled = |scaling: Value| Source::with("config.json", |c| c["rope_scaling"] = scaling.clone()).refused(&[]);
    for wrong in [json!("linear"), json!([1.0]), json!(4), json!(false)] {
        let said = scaled(wrong);
        assert!(said.contains("\"rope_scaling\": expected an object"), "{said}");
    }
    assert!(scaled(json!({ "type": 3, "factor": 2.0 })).contains("expected a string, found 3"));
    assert!(scaled(json!({ "factor": 2.0 })).contains("expected default, linear or llama3, found nothing"));
    assert!(scaled(json!({ "type": "linear", "factor": 0 })).contains("a number above 0"));
    for (key, value, expected) in [
        ("rope_parameters", json!("yarn"), "expected an object"),
        ("model_type", json!(7), "expected a string"),
        ("rms_norm_eps", json!(-1e-6), "from 0 to below 1"),
        ("rms_norm_eps", json!(1e300), "from 0 to below 1"),
        ("rope_theta", json!(1e-300), "finite frequencies"),
    ] {
        let said = Source::with("config.json", |c| c[key] = value.clone()).refused(&[]);
        assert!(said.contains(key) && said.contains(expected), "{key}: {said}");
    }
}

#[test]
fn stop_ids_and_sampling_of_the_wrong_kind_are_refused_by_file() {
    for (file, key, value) in [
        ("config.json", "eos_token_id", json!(-1)),
        ("config.json", "eos_token_id", json!([2, -1])),
        ("config.json", "eos_token_id", json!("</s>")),
        ("config.json", "eos_token_id", json!(2.5)),
        ("config.json", "eos_token_id", json!(1 << 20)),
        ("generation_config.json", "eos_token_id", json!(-1)),
        ("generation_config.json", "repetition_penalty", json!("1.1")),
        ("generation_config.json", "do_sample", json!(1)),
        ("tokenizer_config.json", "bos_token", json!(1)),
        ("tokenizer_config.json", "chat_template", json!(1)),
        ("tokenizer_config.json", "chat_template", json!([{ "name": "default" }])),
    ] {
        let said = Source::with(file, |v| v[key] = value.clone()).refused(&[]);
        assert!(said.contains(file) && said.contains(key) && said.contains("expected"), "{file} {key}: {said}");
    }
    let top_k = |v: &mut Value| (v["do_sample"], v["top_k"]) = (true.into(), (-1).into());
    assert!(Source::with("generation_config.json", top_k).refused(&[]).contains("top_k: expected a whole number"));
}

#[test]
fn chat_templates_that_do_not_work_are_warned_of() {
    for (template, expected) in [
        ("{% if messages %}\n{{ messages[0] }", "line 2"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
            "expected to be done within",
        ),
    ] {
        let source = Source::of(QWEN3);
        fs::write(source.0.path().join("chat_template.jinja"), template).expect("a writable folder");
        let (code, said) = source.bake(&[]);
        assert_eq!((code, said.lines().count()), (0, 1), "{said}");
        assert!(said.starts_with("bake: warning: ") && said.contains(expected), "{said}");
    }
    for fine in
        ["{% for m in messages %}{{ m.content }}{% endfor %}", "{{ raise_exception('a system message is needed') }}"]
    {
        let source = Source::of(QWEN3);
        fs::write(source.0.path().join("chat_template.jinja"), fine).expect("a writable folder");
        assert_eq!(source.bake(&[]), (0, String::new()));
    }
}

#[test]
fn weights_that_are_no_numbers_are_refused_by_name_and_place() {
    let norm = "model.layers.1.input_layernorm.weight";
    for (value, found) in [(f32::NAN, "found NaN"), (f32::INFINITY, "found inf"), (f32::NEG_INFINITY, "found -inf")] {
        let source = Source::of(QWEN3);
        source.fill(|name| name == norm, 3, &value.to_le_bytes());
        for quant in [&[][..], &["--quant", "q4"], &["--golden", "2"]] {
            let (code, said) = source.bake(quant);
            let said = said.lines().last().unwrap_or_default();
            assert!(code == 1 && !Path::new(&source.out()).exists());
            assert!(said.contains(norm) && said.contains("row 0, column 3") && said.contains(found), "{said}");
        }
    }
    // All of it.
    let source = Source::of(QWEN3);
    source.fill(|_| true, 0, &f32::NAN.to_le_bytes());
    assert!(source.refused(&[]).contains("expected a finite number, found NaN"));
    // Scales that come with quantised weights: of half precision, and powers of two.
    for (fixture, value) in
        [("qwen3_moe_affine8", &[0u8, 0, 0x80, 0x7f][..]), ("qwen3_5_mxfp4", &[0xff]), ("llama_mxfp8", &[0xff])]
    {
        let source = Source::of(&format!("{MLX}/{fixture}"));
        source.fill(|name| name.ends_with("q_proj.scales"), 1, value);
        let said = source.refused(&[]);
        assert!(said.contains("q_proj.scales") && said.contains("column 1") && said.contains("found inf"), "{said}");
    }
}

#[test]
fn quantisation_that_does_nothing_or_not_all_says_so() {
    let (code, said) = Source::of(QWEN3).bake(&["--quant", "q4", "--group-size", "128"]);
    assert_eq!((code, said.lines().count()), (0, 1), "{said}");
    assert!(
        said.contains("warning: --quant: nothing was quantised: 22 weights stay dense")
            && said.contains("such as 40 of")
    );
    let (_, said) = Source::of(QWEN3).bake(&["--quant-as", "model.norm.weight=q4"]);
    assert!(said.contains("nothing was quantised: no weight that can be was asked for"), "{said}");
    assert_eq!(Source::of(QWEN3).bake(&[]).1, "");
}

#[test]
fn golden_cases_without_a_token_are_warned_of_and_do_not_verify() {
    let source = Source::of(QWEN3);
    // All logits are equal, so no token leads.
    source.fill(|_| true, 0, &0f32.to_le_bytes());
    let (code, said) = source.bake(&["--golden", "4"]);
    assert_eq!((code, said.lines().count()), (0, 1), "{said}");
    assert!(said.contains("warning: golden cases: no token leads clearly enough"), "{said}");
    assert_eq!(bake(&["verify", &source.out()]), (0, String::new()));
    let (code, said) = bake(&["verify", &source.out(), "--run"]);
    assert!(code == 1 && said.contains("expected at least one token to compare, found none"), "{said}");
}

#[test]
fn sizes_that_no_machine_has_are_refused_with_the_size() {
    let sized = |key: &str, value: u64| {
        let source = Source::with("config.json", |c| c[key] = value.into());
        source.refused(&["--random-weights", "1"])
    };
    assert!(sized("num_hidden_layers", 1_000_000).contains("expected at most 4096 layers, found 1000000"));
    assert!(sized("vocab_size", 1 << 31).contains("1 to 1048576, found 2147483648"));
    let heads = Source::with("config.json", |c| c["head_dim"] = 4096.into());
    let options = ["--random-weights", "1", "--context", "1048576", "-o", &heads.out()];
    let said = bake(&[&["build", heads.path()], &options[..]].concat()).1;
    assert!(said.contains("expected at most 4294967295 elements of a head's positions"), "{said}");
    let wide = Source::with("config.json", |c| {
        for key in ["num_attention_heads", "num_key_value_heads", "head_dim"] {
            c[key] = (1 << 20).into();
        }
    });
    assert!(wide.refused(&["--random-weights", "1"]).contains("expected at most 2147483648 rows"));
    let large = Source::with("config.json", |c| {
        for key in ["vocab_size", "hidden_size", "intermediate_size"] {
            c[key] = (1 << 20).into();
        }
    });
    let said = large.refused(&["--random-weights", "1"]);
    assert!(said.contains("room for ") && said.contains(" bytes free"), "{said}");
    let source = Source::of(QWEN3);
    let out = source.out();
    for (options, expected) in [
        (&["--context", "4294967295"][..], "--context: expected 1 to 1048576 positions, found 4294967295"),
        (&["--context", "0"], "--context: expected 1 to 1048576"),
        (&["--chunk", "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17"], "--chunk: expected at most 16 sizes, found 17"),
        (&["--chunk", "4097", "--context", "8192"], "--chunk: expected 1 to 4096 rows"),
    ] {
        let (code, said) = bake(&[&["build", source.path(), "-o", &out], options].concat());
        assert!(code == 1 && said.contains(expected) && said.lines().count() == 1, "{said}");
    }
    for (options, expected) in [
        (&["--position", "4294967295"][..], "--position: expected at most 15, found 4294967295"),
        (&["--phase", "prefill", "--rows", "4294967295"], "--rows: expected 1 to 16 in prefill, found 4294967295"),
        (&["--phase", "prefill", "--position", "9", "--rows", "8"], "--position: expected at most 8, found 9"),
    ] {
        let (code, said) = bake(&[&["dump", source.path(), "--context", "16"], options].concat());
        assert!(code == 1 && said.contains(expected), "{said}");
    }
}

#[test]
fn a_program_is_read_wherever_a_loaf_is() {
    let source = Source::of(QWEN3);
    assert_eq!(source.bake(&["--golden", "2"]).0, 0);
    let (loaf, program) = (source.out(), format!("{}.program", source.out()));
    let runtime = env!("CARGO_BIN_EXE_bake");
    assert_eq!(bake(&["executable", &loaf, "-o", &program, "--runtime", runtime]).0, 0);
    let told = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_bake")).args(args).output().expect("built");
        assert!(output.status.success(), "{args:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    for command in [&["inspect"][..], &["explain"], &["verify"], &["verify", "--run"]] {
        let [of_loaf, of_program] = [&loaf, &program].map(|file| told(&[command, &[file]].concat()).replace(file, ""));
        assert_eq!(of_loaf, of_program, "{command:?}");
    }
    assert_eq!(bake(&["diff", &loaf, &program]), (0, String::new()));
    let mut bytes = fs::read(&program).expect("written");
    let at = bytes.len() - 30;
    bytes[at] ^= 1;
    fs::write(&program, bytes).expect("a writable folder");
    assert!(bake(&["inspect", &program]).1.contains("program trailer: artifact id: expected "));
}

#[test]
fn help_lists_what_maintainers_need_apart() {
    let output = Command::new(env!("CARGO_BIN_EXE_bake")).arg("--help").output().expect("built");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let (users, maintainers) = text.split_once("For maintainers").expect("a heading of their own");
    for name in ["lock", "dump", "bench-graphs"] {
        assert!(!users.contains(&format!("\n  {name} ")) && maintainers.contains(&format!("\n  {name} ")), "{text}");
    }
    for name in ["build", "inspect", "explain", "verify", "diff", "executable"] {
        assert!(users.contains(&format!("\n  {name} ")), "{text}");
    }
}
