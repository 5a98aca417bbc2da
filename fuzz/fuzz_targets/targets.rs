//! What every fuzz target does with its bytes: one function each, which the target of that name and the replay of the committed
//! corpora (`tests/tests/fuzz_corpus.rs`, a stable compiler, every test run) both call.

use loaf_bake::checkpoint::gguf::{GgmlType, convert, dequant, parse_header as parse_gguf};
use loaf_bake::checkpoint::parse_header;
use loaf_formats::container::Container;
use loaf_formats::plan::{Plan, Region, records};
use loaf_formats::program::Trailer;
use loaf_runtime::chat::{ChatTemplate, Inputs, message};
use loaf_runtime::tokenizer::{Scratch, Tokenizer};

/// Any bytes as a container: refused or read, never a panic. What verifies entirely has tensors within its data.
pub fn container(bytes: &[u8]) {
    let _ = Trailer::read(&mut std::io::Cursor::new(bytes));
    let Ok(container) = Container::open(bytes) else { return };
    let _ = container.verify_small();
    if container.verify_all(&mut |_| {}).is_ok() {
        for tensor in container.tensors().expect("verified") {
            let end = tensor.offset.checked_add(tensor.len).expect("verified");
            assert!(end <= container.data().len() as u64);
        }
    }
}

/// Any bytes as a plan: what the verifier accepts keeps every operand of every record in its region, at row counts that
/// the verifier's corners are not.
pub fn plan(bytes: &[u8]) {
    let Ok(plan) = Plan::decode(bytes) else { return };
    let Ok(plan) = plan.verify(1 << 20) else { return };
    let mut words = Vec::new();
    for template in &plan.templates {
        let most = u64::from(template.max_rows);
        for n in [1, most / 3, most / 2, most].into_iter().filter(|n| *n > 0) {
            template.expand(n, &mut words);
            for record in records(&words) {
                let record = record.expect("verified");
                for i in 0..record.kind.spec().operands.len() {
                    let operand = record.operand(i);
                    let len = match operand.region {
                        Region::None => continue,
                        Region::Weights => plan.weight_bytes,
                        Region::Cache => plan.cache_bytes,
                        Region::Recurrent => plan.recurrent_bytes,
                        Region::Arena => plan.arena_bytes,
                        Region::Io => plan.io.bytes,
                    };
                    let dims = record.dims(i).expect("verified");
                    assert!(operand.span(dims).expect("verified").1 <= len);
                }
            }
        }
    }
}

/// Any bytes as the header of a checkpoint's weight file: refused, or entries that lie in order within the file.
pub fn safetensors(bytes: &[u8]) {
    let Ok(entries) = parse_header(bytes) else { return };
    for entry in entries {
        assert!(entry.begin <= entry.end && entry.end <= bytes.len() as u64);
    }
}

/// Any bytes as a GGUF file's header: refused in one line, or tensors that lie in order within the file, and blocks of any
/// type from the rest decoded and converted.
pub fn gguf(bytes: &[u8]) {
    match parse_gguf(bytes) {
        Ok(header) => {
            let mut end = 0;
            for t in header.tensors {
                assert!(end <= t.begin && t.begin <= t.end && t.end <= bytes.len() as u64);
                end = t.end;
            }
        }
        Err(e) => assert!(!e.to_string().contains(char::is_control)),
    }
    let mut out = vec![0.0; 512];
    for kind in GgmlType::all() {
        let Some(row) = kind.row_bytes(512).and_then(|n| bytes.get(..n as usize)) else { continue };
        dequant::dequantise(kind, row, &mut out);
        for wide in [false, true] {
            if let Some(format) = convert::lossless(kind, 512, wide) {
                let _ = convert::convert_row(kind, format, row, &mut convert::StoredRows::default());
            }
        }
    }
}

/// Any bytes as a chat template: a prompt or an error, within its limits.
pub fn template(bytes: &[u8]) {
    let messages = [message("system", "be brief"), message("user", "hello")];
    let inputs = Inputs { messages: &messages, add_generation_prompt: true, ..Inputs::default() };
    let _ = ChatTemplate::new(&String::from_utf8_lossy(bytes)).and_then(|t| t.render(&inputs));
}

/// Any bytes as tokenizer tables: what the verifier accepts encodes any text and decodes any ids.
///
/// The input is `len u32 | table | text`.
pub fn tokenizer(bytes: &[u8]) {
    let Some((len, rest)) = bytes.split_first_chunk::<4>() else { return };
    let Some((table, text)) = rest.split_at_checked(u32::from_le_bytes(*len) as usize) else { return };
    let Ok(tokenizer) = Tokenizer::open(table) else { return };
    let mut ids = Vec::new();
    tokenizer.encode(&String::from_utf8_lossy(text), true, &mut Scratch::default(), &mut ids);
    tokenizer.decode(&ids, false);
    let any: Vec<u32> = text.iter().map(|b| u32::from(*b) * 131).collect();
    tokenizer.decode(&any, true);
}
