//! The program `loaf`, called in process with streams of our own, on loaves baked here.
//!
//! Weights are drawn, so what the models say means nothing; what is tested is the road there and
//! the promises around it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use loaf_bake::build::{BuildOptions, Silent, build};
use loaf_cli::{Io, main};
use loaf_runtime::kernels::Kernels;
use loaf_tests::{Expected, bake, fixture};
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// A frame per message; knows system messages, and thinking only as a switch.
const TEMPLATE: &str = "\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content.strip() + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}";

/// What a call gave.
#[derive(Debug, PartialEq)]
struct Ran {
    code: u8,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Value {
        assert_eq!((self.code, self.err.as_str()), (0, ""));
        serde_json::from_str(&self.out).expect("one JSON object")
    }

    /// One line on standard error, nothing on standard output.
    fn error(&self, code: u8) -> &str {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{self:?}");
        let line = self.err.strip_prefix("loaf: error: ").expect("the program's name first").strip_suffix('\n');
        line.filter(|l| !l.contains('\n')).expect("one line")
    }
}

/// Calls the program; environment as `NAME=VALUE`.
fn loaf_with(env: &[&str], stdin: &str, args: &[&str]) -> Ran {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let var = |name: &str| env.iter().find_map(|e| e.strip_prefix(name)?.strip_prefix('=')).map(OsString::from);
    let mut stdin = stdin.as_bytes();
    let mut io = Io::new(&mut stdin, &mut out, &mut err, &var);
    let code = main(["loaf"].iter().chain(args).map(OsString::from), &mut io);
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Ran { code, out: text(out), err: text(err) }
}

fn loaf(args: &[&str]) -> Ran {
    loaf_with(&[], "", args)
}

/// Loaves that the tests share.
struct Models {
    dir: tempfile::TempDir,
    plain: PathBuf,     // qwen3 with a tokenizer and a chat template
    recurrent: PathBuf, // qwen3_next with the same
    raw: PathBuf,       // llama with a byte-fallback tokenizer, no template
    ids: PathBuf,       // llama without a tokenizer
}

fn models() -> &'static Models {
    static MODELS: OnceLock<Models> = OnceLock::new();
    MODELS.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let make = |name: &str, config: &str, tokenizer: &str, tokens: Value| {
            let source = dir.path().join(name);
            std::fs::create_dir(&source).unwrap();
            let bytes = std::fs::read(fixture(config).join("config.json")).unwrap();
            let mut config: Value = serde_json::from_slice(&bytes).unwrap();
            // A few rows more than the tokenizer has tokens, as published models do.
            config["vocab_size"] = 3072.into();
            config["eos_token_id"] = tokens["eos"].clone();
            let write = |file: &str, value: &Value| std::fs::write(source.join(file), value.to_string()).unwrap();
            write("config.json", &config);
            write("tokenizer_config.json", &tokens["config"]);
            let tokenizer = fixture("tokenizers").join(tokenizer);
            std::fs::copy(tokenizer, source.join("tokenizer.json")).unwrap();
            let out = dir.path().join(format!("{name}.loaf"));
            let options = BuildOptions { random: Some(7), context: Some(256), ..BuildOptions::default() };
            build(&source, &out, &options, &Silent).unwrap_or_else(|e| panic!("{name}: {e}"));
            out
        };
        let chatml = json!({ "eos": 3002, "config": { "eos_token": "<|im_end|>", "chat_template": TEMPLATE } });
        let plain = make("plain", "hf/qwen3", "qwen3.json", chatml.clone());
        let recurrent = make("recurrent", "hf/qwen3_next", "qwen3.json", chatml);
        let raw = make("raw", "hf/llama3", "llama2.json", json!({ "eos": 2, "config": { "eos_token": "</s>" } }));
        let ids = dir.path().join("ids.loaf");
        std::fs::copy(bake("hf/llama3", &BuildOptions::default()).path, &ids).unwrap();
        Models { dir, plain, recurrent, raw, ids }
    })
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a readable path")
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().expect("an array").iter().map(|v| v.as_u64().expect("a number") as u32).collect()
}

#[test]
fn greedy_ids_are_those_of_the_reference() {
    let expected = Expected::read("hf/llama3");
    let (length, greedy) = expected.greedy.last().expect("a greedy continuation");
    let prompt: Vec<String> = expected.ids[..*length].iter().map(u32::to_string).collect();
    let prompt = prompt.join(",");
    let n = greedy.len().to_string();
    let args = ["run", "-m", text(&models().ids), "--greedy", "-n", &n, "--ids", &prompt];
    let got = numbers(&loaf(&[&args[..], &["--json"]].concat()).json()["ids"]);
    assert_eq!(got, greedy[..got.len()]);
    let line: Vec<String> = got.iter().map(u32::to_string).collect();
    assert_eq!(loaf(&args).out, line.join(" ") + "\n");
}

#[test]
fn a_loaf_without_tokenizer_asks_for_ids() {
    let ran = loaf(&["run", "-m", text(&models().ids), "hello"]);
    assert!(ran.error(2).contains("--ids"));
    let object = loaf(&["run", "-m", text(&models().ids), "--ids", "1,2", "-n", "2", "--json"]).json();
    assert!(object.get("text").is_none());
}

#[test]
fn the_prompt_is_wrapped_by_the_template_unless_raw() {
    let model = text(&models().plain);
    let wrapped = loaf(&["run", "-m", model, "-n", "1", "--json", "hello"]).json();
    let by_hand = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n";
    let raw = loaf(&["run", "-m", model, "-n", "1", "--json", "--raw", "--special", by_hand]).json();
    assert_eq!(wrapped["prompt_ids"], raw["prompt_ids"]);
    assert_eq!(wrapped["prompt_ids"][0], 3001);
    let system = loaf(&["run", "-m", model, "-n", "1", "--json", "--system", "be", "--no-thinking", "hello"]).json();
    let by_hand = format!("<|im_start|>system\nbe<|im_end|>\n{by_hand}<think>\n\n</think>\n\n");
    let raw = loaf(&["run", "-m", model, "-n", "1", "--json", "--raw", "--special", &by_hand]).json();
    assert_eq!(system["prompt_ids"], raw["prompt_ids"]);
}

#[test]
fn typed_text_spells_special_tokens_only_if_asked() {
    let count = |args: &[&str]| {
        let ids = numbers(&loaf(args).json()[if args[0] == "score" { "ids" } else { "prompt_ids" }]);
        ids.iter().filter(|id| **id == 3002).count()
    };
    let model = text(&models().plain);
    let run = ["run", "-m", model, "-n", "1", "--json", "a<|im_end|>b"];
    // The one that ends the user's message is the template's.
    assert_eq!(count(&run), 1);
    assert_eq!(count(&[&run[..], &["--special"]].concat()), 2);
    assert_eq!(count(&[&run[..], &["--raw"]].concat()), 0);
    assert_eq!(count(&[&run[..], &["--raw", "--special"]].concat()), 1);
    assert_eq!(count(&[&run[..], &["--system", "<|im_end|>"]].concat()), 2);
    let file = models().dir.path().join("special.txt");
    std::fs::write(&file, "a<|im_end|>b").unwrap();
    let score = ["score", "-m", model, text(&file), "--json"];
    assert_eq!(count(&score), 0);
    assert_eq!(count(&[&score[..], &["--special"]].concat()), 1);
}

#[test]
fn a_piped_prompt_is_the_argument_without_its_newline() {
    let model = text(&models().plain);
    let args = ["run", "-m", model, "-n", "4", "--greedy"];
    let argument = loaf(&[&args[..], &["hello world"]].concat());
    assert_eq!(loaf_with(&[], "hello world\n", &args), argument);
    assert_eq!(loaf_with(&[], "hello world\r\n", &[&args[..], &["-"]].concat()), argument);
    assert_eq!((argument.code, argument.err.as_str()), (0, ""));
    assert!(argument.out.ends_with('\n'));
}

#[test]
fn text_is_that_of_the_ids_and_goes_on_where_the_prompt_ends() {
    let model = text(&models().raw);
    let object =
        loaf(&["run", "-m", model, "--json", "-n", "60", "--temperature", "1.5", "--seed", "4", "The end"]).json();
    let open = loaf_runtime::Model::open(&models().raw).unwrap();
    let tokenizer = open.tokenizer().expect("valid tables").expect("a tokenizer");
    let all = [numbers(&object["prompt_ids"]), numbers(&object["ids"])].concat();
    assert_eq!(format!("The end{}", object["text"].as_str().unwrap()), tokenizer.decode(&all, true));
}

#[test]
fn a_seed_decides_everything_and_threads_and_kernels_nothing() {
    let model = text(&models().recurrent);
    let args = ["run", "-m", model, "-n", "30", "--temperature", "1", "--top-p", "0.95", "hello"];
    let seeded = |seed, more: &[&str], env: &[&str]| {
        let ran = loaf_with(env, "", &[&args[..], &["--seed", seed], more].concat());
        assert_eq!((ran.code, ran.err.as_str()), (0, ""));
        ran.out
    };
    let one = seeded("1", &["--threads", "1"], &[]);
    assert_eq!(seeded("1", &["--threads", "3"], &[]), one);
    for kernels in Kernels::all() {
        assert_eq!(seeded("1", &["--threads", "2"], &[&format!("LOAF_ISA={}", kernels.isa().name())]), one);
    }
    assert_ne!(seeded("2", &[], &[]), one);
}

#[test]
fn generation_ends_where_it_should_and_says_why() {
    let model = text(&models().plain);
    let stop = |args: &[&str]| {
        let ran = loaf(&[&["run", "-m", model, "--json", "--greedy"], args].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        serde_json::from_str::<Value>(&ran.out).expect("JSON")
    };
    let length = stop(&["-n", "12", "hello"]);
    assert_eq!((&length["stop"], numbers(&length["ids"]).len()), (&json!("length"), 12));
    assert_eq!(stop(&["-n", "0", "hello"])["ids"], json!([]));
    let context = stop(&["hello"]);
    if context["stop"] != "stop" {
        assert_eq!(context["stop"], "context");
        assert_eq!(numbers(&context["ids"]).len() + numbers(&context["prompt_ids"]).len(), 257);
    }
    // A stop string taken from the middle of the text ends it there.
    let text = length["text"].as_str().unwrap();
    let at = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let marker: String = text[at..].chars().take(3).collect();
    let cut = stop(&["-n", "12", "--stop", &marker, "hello"]);
    assert_eq!((&cut["stop"], cut["text"].as_str().unwrap()), (&json!("stop"), &text[..text.find(&marker).unwrap()]));
}

#[test]
fn scoring_agrees_with_itself_however_it_is_computed() {
    let models = models();
    for model in [&models.plain, &models.recurrent, &models.raw] {
        let file = models.dir.path().join("text.txt");
        std::fs::write(&file, "The quick brown fox jumps over the lazy dog. ".repeat(8)).unwrap();
        let score = |out: &str, env: &[&str], more: &[&str]| {
            let out = models.dir.path().join(out);
            let args = [&["score", "-m", text(model), text(&file), "--json", "--logits", text(&out)], more].concat();
            (loaf_with(env, "", &args).json(), std::fs::read(&out).unwrap())
        };
        let (chunked, logits) = score("a.safetensors", &[], &[]);
        assert_eq!(
            score("b.safetensors", &["LOAF_ISA=scalar"], &["--decode", "--threads", "1"]),
            (chunked.clone(), logits.clone())
        );
        let ids = numbers(&chunked["ids"]);
        let logits = SafeTensors::deserialize(&logits).unwrap();
        let logits = logits.tensor("logits").unwrap();
        assert_eq!(logits.shape(), [ids.len(), 3072]);
        // Log-probabilities by the book, in f64.
        let rows: Vec<f64> =
            logits.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect();
        for (i, &id) in ids[1..].iter().enumerate() {
            let row = &rows[i * 3072..][..3072];
            let expected = row[id as usize] - row.iter().map(|x| x.exp()).sum::<f64>().ln();
            let got = chunked["log_probs"][i].as_f64().unwrap();
            assert!((got - expected).abs() < 1e-6 * expected.abs().max(1.0), "{i}: {got} {expected}");
        }
        let mean = chunked["log_prob"].as_f64().unwrap() / (ids.len() - 1) as f64;
        assert!((chunked["perplexity"].as_f64().unwrap() / (-mean).exp() - 1.0).abs() < 1e-12);
    }
}

#[test]
fn no_partial_file_stays_behind() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.safetensors");
    let ran = loaf(&["score", "-m", text(&models().ids), "--ids", "1,99999", "--logits", text(&out)]);
    assert!(ran.error(1).contains("token id"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn outputs_replace_neither_inputs_nor_what_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let (model, prompt, folder) = (dir.path().join("m.loaf"), dir.path().join("text"), dir.path().join("folder"));
    std::fs::copy(&models().plain, &model).unwrap();
    std::fs::write(&prompt, "some words").unwrap();
    std::fs::create_dir(&folder).unwrap();
    let link = dir.path().join("link");
    std::fs::hard_link(&model, &link).unwrap();
    let before = std::fs::read(&model).unwrap();
    let mut outputs = vec![(&model, "than the input"), (&link, "than the input"), (&prompt, "than the input")];
    outputs.push((&folder, "found a folder"));
    for (out, found) in outputs {
        let ran = loaf(&["score", "-m", text(&model), text(&prompt), "--logits", text(out)]);
        assert!(ran.error(1).contains(found), "{ran:?}");
        if out != &prompt {
            let lines = format!("/save {}\n", out.display());
            let ran = loaf_with(&[], &lines, &["chat", "-m", text(&model)]);
            assert!(ran.err.contains(found), "{ran:?}");
        }
    }
    // The environment names an input too.
    let ran = loaf_with(
        &[&format!("LOAF_MODEL={}", model.display())],
        "",
        &["score", text(&prompt), "--logits", text(&model)],
    );
    assert!(ran.error(1).contains("than the input"), "{ran:?}");
    assert_eq!((std::fs::read(&model).unwrap(), std::fs::read_dir(dir.path()).unwrap().count()), (before, 4));
}

#[test]
fn a_resumed_conversation_gives_the_same_answer_as_one_that_reused_its_state() {
    for model in [&models().plain, &models().recurrent] {
        let dir = tempfile::tempdir().unwrap();
        let (saved, again) = (dir.path().join("a.json"), dir.path().join("b.json"));
        let chat = |lines: String| {
            loaf_with(&[], &lines, &["chat", "-m", text(model), "--greedy", "-n", "6", "--system", "be"])
        };
        let first = chat(format!("hello\n\nand now?\n/save {}\n/stats\n/exit\nnever\n", saved.display()));
        assert_eq!(first.code, 0, "{first:?}");
        assert!(first.err.contains("4 messages saved") && first.err.contains("context:"), "{first:?}");
        let second = chat(format!("/load {}\n/regen\n/save {}\n", saved.display(), again.display()));
        assert!(first.out.ends_with(&second.out) && !second.out.is_empty(), "{first:?} {second:?}");
        let read = |path| std::fs::read_to_string(path).unwrap();
        assert_eq!(read(&saved), read(&again));
    }
}

#[test]
fn chat_survives_mistakes_and_a_full_context() {
    let model = text(&models().plain);
    let long = "many words ".repeat(200);
    let lines = format!("/what\n/load\n/load /nonexistent/x\n/regen\n/help\n{long}\nhello\n/system\n/reset\n/stats\n");
    let ran = loaf_with(&[], &lines, &["chat", "-m", model, "--greedy", "-n", "3"]);
    assert_eq!(ran.code, 0);
    let expected = [
        "/what: no such command",
        "expected a file name",
        "/nonexistent/x",
        "no answer",
        "/regen",
        "256 (the context)",
        "removed",
        "empty",
    ];
    for part in expected {
        assert!(ran.err.contains(part), "{part}: {ran:?}");
    }
    assert!(!ran.out.is_empty(), "hello is answered");
    let alone = loaf_with(&[], "hello\n", &["chat", "-m", model, "--greedy", "-n", "3"]);
    assert_eq!(ran.out, alone.out);
}

#[test]
fn a_full_context_forgets_the_oldest_turns_or_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved.json");
    let model = text(&models().plain);
    let turns: String = (0..12).map(|i| format!("message {i} with a good many words in it\n")).collect();
    let lines = format!("{turns}/save {}\n", saved.display());
    let args = ["chat", "-m", model, "--greedy", "-n", "4", "--system", "be brief"];
    let ran = loaf_with(&[], &lines, &args);
    assert!(ran.code == 0 && ran.err.contains("oldest messages are forgotten"), "{ran:?}");
    assert!(!ran.err.contains("error"), "no message is refused: {ran:?}");
    let talk: Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    let messages = talk["messages"].as_array().unwrap();
    assert_eq!(talk["system"], "be brief");
    assert!(messages.len() < 24 && messages.len().is_multiple_of(2), "{}", messages.len());
    assert_eq!(messages[0]["role"], "user");
    let last = messages[messages.len() - 2]["content"].as_str().unwrap();
    assert!(last.starts_with("message 11"), "{last}");
    let refusing = loaf_with(&[], &lines, &[&args[..], &["--keep-all"]].concat());
    assert!(refusing.err.contains("256 (the context); /reset starts anew"), "{refusing:?}");
    assert!(!refusing.err.contains("forgotten"), "{refusing:?}");
}

#[test]
fn chat_reads_files_and_changes_settings() {
    let dir = tempfile::tempdir().unwrap();
    let (file, saved) = (dir.path().join("notes.txt"), dir.path().join("saved.json"));
    std::fs::write(&file, "first line\nsecond line\n").unwrap();
    let lines = format!(
        "/read {}\nwhat is\\\nthis?\n/set temperature 0.5\n/set top_p 3\n/set max_tokens 2\n/set\n/set x 1\n/save {}\n/read {}\n",
        file.display(),
        saved.display(),
        dir.path().display()
    );
    let ran = loaf_with(&[], &lines, &["chat", "-m", text(&models().plain), "--greedy", "-n", "3"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    for part in ["2 lines of", "top_p", "temperature 0.5", "max_tokens 2", "/set x: no such setting", "found a folder"]
    {
        assert!(ran.err.contains(part), "{part}: {ran:?}");
    }
    let talk: Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    assert_eq!(talk["messages"][0]["content"], "first line\nsecond line\n\nwhat is\nthis?");
}

#[test]
fn models_have_names_and_settings_a_file() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("models");
    std::fs::create_dir(&folder).unwrap();
    for name in ["tale", "other"] {
        std::fs::copy(&models().plain, folder.join(format!("{name}.loaf"))).unwrap();
    }
    std::fs::write(folder.join("broken.loaf"), "nothing").unwrap();
    let env = format!("LOAF_HOME={}", text(home.path()));
    let call = |args: &[&str]| loaf_with(&[&env], "", args);
    let id = loaf(&["info", "-m", text(&models().plain), "--json"]).json()["id"].clone();
    assert_eq!(call(&["info", "-m", "tale", "--json"]).json()["id"], id);
    assert_eq!(loaf_with(&[&env, "LOAF_MODEL=other"], "", &["info", "--json"]).json()["id"], id);
    let list = call(&["list", "--json"]).json();
    let names: Vec<_> = list["models"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["broken", "other", "tale"]);
    assert!(call(&["list"]).out.contains("broken  cannot be used"), "{:?}", call(&["list"]));
    assert!(call(&["rm", "other", "none"]).error(2).contains("none: no model of that name"));
    assert!(call(&["rm", "../models/other"]).error(2).contains("no model of that name"));
    assert_eq!(call(&["rm", "other"]).code, 0);
    assert!(!folder.join("other.loaf").exists() && folder.join("tale.loaf").exists());

    let settings = home.path().join("config.toml");
    std::fs::write(&settings, "model = \"tale\"\nmax_tokens = 2\ntemperature = 0\n").unwrap();
    let ran = call(&["run", "--json", "hello"]).json();
    assert_eq!(numbers(&ran["ids"]).len(), 2);
    let more = call(&["run", "--json", "-n", "3", "hello"]).json();
    assert_eq!(numbers(&more["ids"]).len(), 3, "arguments go before the settings");
    assert_eq!(call(&["run", "--json", "hello"]).json()["ids"], ran["ids"], "temperature 0");
    std::fs::write(&settings, "\nthreads = many\n").unwrap();
    let error = call(&["run", "hello"]);
    assert!(error.error(1).contains("config.toml: line 2: threads: expected a number from 1 to 1024, found"));
    assert_eq!(call(&["list"]).code, 0, "what needs no settings does not read them");
}

#[test]
fn what_is_no_loaf_is_told_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join("model.gguf");
    std::fs::write(&gguf, b"GGUF\x03\0\0\0").unwrap();
    let checkpoint = fixture("hf/qwen3");
    let mut cases = vec![
        (text(dir.path()).to_owned(), "expected a loaf, found a folder"),
        (text(&checkpoint).to_owned(), "found a checkpoint; 'bake build "),
        (text(&gguf).to_owned(), "found a GGUF file; 'bake build "),
        ("Qwen/Qwen3-0.6B".to_owned(), "'loaf pull hf:Qwen/Qwen3-0.6B' fetches a loaf"),
        ("Qwen/Qwen3-0.6B".to_owned(), "'bake build hf:Qwen/Qwen3-0.6B -o Qwen3-0.6B.loaf' bakes a checkpoint"),
        ("nothing".to_owned(), "or a name that 'loaf list' shows"),
    ];
    let pipe = dir.path().join("pipe");
    if std::process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|s| s.success()) {
        cases.push((text(&pipe).to_owned(), "found a pipe or a device"));
    }
    for (model, expected) in cases {
        for command in ["info", "run"] {
            let ran = loaf(&[command, "-m", &model]);
            assert!(ran.error(1).contains(expected), "{model}: {ran:?}");
        }
    }
}

#[test]
fn a_request_needs_no_command() {
    let model = text(&models().plain);
    let expected = loaf(&["run", "-m", model, "--greedy", "-n", "3", "hello big world"]);
    assert_eq!(loaf(&[model, "--greedy", "-n", "3", "hello", "big", "world"]), expected);
    assert_eq!(loaf(&["-m", model, "--greedy", "-n", "3", "hello", "big", "world"]), expected);
    assert_eq!(loaf_with(&[], "hello big world\n", &[model, "--greedy", "-n", "3"]), expected);
    assert_eq!(loaf(&["run", model, "--greedy", "-n", "3", "hello big world"]), expected);
    let help = loaf(&[]);
    assert!(help.code == 0 && help.out.contains("loaf show the largest files"), "{help:?}");
    assert_eq!(
        loaf_with(&[&format!("LOAF_MODEL={model}")], "", &["hello", "big", "world", "--greedy", "-n", "3"]),
        expected
    );
}

#[test]
fn completions_and_manual_come_from_the_arguments() {
    for shell in ["bash", "zsh", "fish"] {
        let ran = loaf(&["completions", shell]);
        assert!(ran.code == 0 && ran.out.contains("keep-all"), "{shell}");
    }
    let man = loaf(&["man"]);
    assert!(man.code == 0 && man.out.contains("keep\\-all") && man.out.contains(".TH"), "{}", man.out);
    let version = loaf(&["--version"]).out;
    assert!(version.starts_with("loaf 0") && version.contains("features:") && version.contains("scalar"), "{version}");
}

#[test]
fn kernels_are_held_to_each_other_without_tolerance() {
    let names: Vec<_> = Kernels::all().map(|kernels| kernels.isa().name()).collect();
    for name in [&names[..], &["cpu"]].concat() {
        let object = loaf(&["check", "-m", text(&models().plain), "--against", name, "--json", "a b c"]).json();
        assert_eq!(object["tolerance"], 0.0, "{name}");
    }
}

#[test]
fn what_auto_takes_is_not_held_to_itself() {
    let model = text(&models().plain);
    let has_gpu = !loaf(&["run", "-m", model, "--backend", "cuda", "-n", "1", "hello"]).err.contains("CUDA:");
    let object = loaf(&["check", "-m", model, "--backend", "auto", "--json", "a b c"]).json();
    assert_eq!(object["against"], if has_gpu { "cpu" } else { "scalar" });
}

#[test]
fn usage_errors_are_one_line_and_code_2() {
    let model = text(&models().plain);
    let cases: [(&[&str], &str); 20] = [
        (&["run", "-m", model, "--fast", "x"], "--fast: expected --backend cuda beside it, found --backend cpu"),
        (&["bench", "-m", model, "--fast", "--backend", "auto"], "--fast: expected --backend cuda beside it"),
        (&["chta"], "did you mean 'loaf chat'"),
        (&["list", "the", "files"], "wants quotes"),
        (&["run", "-m", model, "  "], "the prompt is empty"),
        (&["run", "-m", model, "--raw", ""], "the prompt is empty"),
        (&["check", "-m", model, "--tolerance", "nan", "x"], "--tolerance: expected a number from 0 on, found NaN"),
        (&["check", "-m", model, "--tolerance", "-1", "x"], "--tolerance"),
        (&["bench", "-m", model, "--context", "256"], "--context: expected below 256"),
        (&["run", "--fly"], "--fly"),
        (&["run", "-m", model, "--top-p", "2", "x"], "top_p"),
        (&["run", "-m", model, "--temperature", "nan", "x"], "temperature"),
        (&["run", "-m", model, "--greedy", "--temperature", "1", "x"], "--temperature"),
        (&["run", "-m", model, "--ids", "1,x"], "--ids"),
        (&["run", "-m", model, "--threads", "0", "x"], "--threads"),
        (&["run", "-m", model, "--raw", "--system", "s", "x"], "--system"),
        (&["run", "-m", text(&models().raw), "--system", "s", "x"], "chat template"),
        (&["chat", "-m", text(&models().raw)], "chat template"),
        (&["score", "-m", text(&models().ids)], "--ids"),
        (&["score", "-m", model], "nothing to score"),
    ];
    for (args, part) in cases {
        let ran = loaf(args);
        assert!(ran.error(2).contains(part), "{args:?}: {ran:?}");
    }
    let ran = loaf_with(&["LOAF_ISA=mmx"], "", &["run", "-m", model, "x"]);
    let names: Vec<_> = Kernels::all().map(|kernels| kernels.isa().name()).collect();
    assert!(ran.error(2).contains("LOAF_ISA") && ran.error(2).contains(&names.join(", ")), "{ran:?}");
}

#[test]
fn failures_are_one_line_and_code_1() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        text(&path).to_owned()
    };
    let good = std::fs::read(&models().plain).unwrap();
    let mut damaged = good.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    let long = "word ".repeat(400);
    let cases: [(&[&str], &str); 6] = [
        (&["run", "-m", "/nonexistent", "x"], "/nonexistent"),
        (&["run", "-m", &path("empty", b""), "x"], "empty"),
        (&["info", "-m", &path("cut", &good[..good.len() - 1])], "expected"),
        (&["info", "-m", &path("text", b"not a loaf, but long enough to have a length")], "is it a loaf"),
        (&["verify", "-m", &path("damaged", &damaged)], "damaged"),
        (&["run", "-m", text(&models().plain), &long], "256 tokens (the context)"),
    ];
    for (args, part) in cases {
        let ran = loaf(args);
        assert!(ran.error(1).contains(part), "{args:?}: {ran:?}");
    }
}

#[test]
fn info_and_verify_name_the_artifact() {
    let model = text(&models().plain);
    let info = loaf(&["info", "-m", model, "--json"]).json();
    let verify = loaf(&["verify", "-m", model, "--json"]).json();
    assert_eq!(info["id"], verify["id"]);
    assert_eq!(info["manifest"]["family"], "qwen3");
    assert_eq!(info["context"], 256);
    let memory = &info["memory"];
    let sum: u64 =
        ["weights_bytes", "state_bytes", "arena_bytes", "io_bytes"].iter().map(|k| memory[k].as_u64().unwrap()).sum();
    assert_eq!(memory["peak_bytes"], sum);
    let id = info["id"].as_str().unwrap();
    assert!(loaf(&["info", "-m", model]).out.contains(id));
    // The environment names the model where no argument does.
    assert!(loaf_with(&[&format!("LOAF_MODEL={model}")], "", &["verify"]).out.contains(id));
}

#[test]
fn a_closed_pipe_is_a_quiet_end() {
    struct Closed;
    impl std::io::Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let model = text(&models().plain);
    for args in [&["run", "-m", model, "hello"][..], &["chat", "-m", model], &["info", "-m", model], &["--help"]] {
        let mut err = Vec::new();
        let (mut stdin, mut closed) = ("hello\n".as_bytes(), Closed);
        let mut io = Io::new(&mut stdin, &mut closed, &mut err, &|_| None);
        assert_eq!(main(["loaf"].iter().chain(args).map(OsString::from), &mut io), 0, "{args:?}");
        assert_eq!(err, b"", "{args:?}");
    }
}

#[test]
fn bench_counts_what_the_plan_says() {
    for model in [text(&models().plain), text(&models().recurrent)] {
        let args =
            ["bench", "-m", model, "--prefill", "9", "--decode", "2", "--context", "4", "--repeat", "2", "--ops"];
        let bench = loaf(&[&args[..], &["--json"]].concat()).json();
        for part in ["prefill_tok_s", "decode_tok_s"] {
            let [min, median, max] = ["min", "median", "max"].map(|k| bench[part][k].as_f64().unwrap());
            assert!(0.0 < min && min <= median && median <= max, "{part}");
        }
        assert!(bench["read_bandwidth_gb_s"].as_f64().unwrap() > 0.0);
        let bytes: u64 =
            bench["ops"]["decode"].as_array().unwrap().iter().map(|op| op["bytes"].as_u64().unwrap()).sum();
        let per_token = &bench["decode_bytes_per_token"];
        let expected: u64 = ["weights", "state", "activations"].iter().map(|k| per_token[k].as_u64().unwrap()).sum();
        // Each of the three was rounded down.
        assert!((2 * expected..2 * expected + 6).contains(&bytes), "{bytes} {expected}");
        assert!(loaf(&args).out.contains("linear_"));
        let none = loaf(&["bench", "-m", model, "--prefill", "0", "--decode", "0", "--json"]).json();
        assert!(none["prefill_tok_s"].is_null() && none["decode_tok_s"].is_null());
    }
    let beyond = loaf(&["bench", "-m", text(&models().plain), "--context", "256"]);
    assert!(beyond.error(2).contains("--context: expected below 256"));
    let too_much = loaf(&["bench", "-m", text(&models().plain), "--context", "200", "--prefill", "57"]);
    assert!(too_much.error(2).contains("at most 56 tokens"));
}

#[test]
fn help_is_an_answer() {
    for args in [&["--help"][..], &["run", "--help"], &["--version"]] {
        let ran = loaf(args);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""));
        assert!(!ran.out.is_empty());
    }
}
