//! What every fuzz target does with its bytes: one function each, which the target of that name and
//! the replay of the committed corpora (`tests/tests/fuzz_corpus.rs`, a stable compiler, every test
//! run) both call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use loaf_bake::checkpoint::gguf::{GgmlType, convert, dequant, parse_header as parse_gguf};
use loaf_bake::checkpoint::parse_header;
use loaf_formats::container::Container;
use loaf_formats::plan::{Plan, Region, records};
use loaf_formats::program::Trailer;
use loaf_runtime::chat::{ChatTemplate, Inputs, Limits, message};
use loaf_runtime::tokenizer::{Scratch, Tokenizer};

/// Counts what a thread allocates.
struct Counting;

/// Allocations made, their bytes in total, and the most bytes held at once.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    allocations: u64,
    allocated: u64,
    held: u64,
    peak: u64,
}

thread_local! {
    static WORK: Cell<Work> = const { Cell::new(Work { allocations: 0, allocated: 0, held: 0, peak: 0 }) };
}

fn account(more: usize, less: usize) {
    let mut work = WORK.get();
    work.allocations += u64::from(more > 0);
    work.allocated += more as u64;
    // What another thread allocated may be given back here.
    work.held = (work.held + more as u64).saturating_sub(less as u64);
    work.peak = work.peak.max(work.held);
    WORK.set(work);
}

// SAFETY: all work is the system allocator's; counting touches a thread-local that needs no
// allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        account(layout.size(), 0);
        // SAFETY: the caller's contract, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        account(0, layout.size());
        // SAFETY: the caller's contract, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `work` gives and what it allocates.
fn counted<T>(work: impl FnOnce() -> T) -> (T, Work) {
    let before = WORK.get();
    WORK.set(Work { held: before.held, peak: before.held, ..Work::default() });
    let result = work();
    let after = WORK.get();
    (result, Work { peak: after.peak - before.held, ..after })
}

/// Any bytes as a container: refused or read, never a panic. What verifies entirely has tensors
/// within its data.
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

/// Any bytes as a plan: what the verifier accepts keeps every operand of every record in its
/// region, at row counts that the verifier's corners are not.
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

/// Any bytes as the header of a checkpoint's weight file: refused, or entries that lie in order
/// within the file.
pub fn safetensors(bytes: &[u8]) {
    let Ok(entries) = parse_header(bytes) else { return };
    for entry in entries {
        assert!(entry.begin <= entry.end && entry.end <= bytes.len() as u64);
    }
}

/// Any bytes as a GGUF file's header: refused in one line, or tensors that lie in order within the
/// file, and blocks of any type from the rest decoded and converted.
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
        if let Some(format) = convert::lossless(kind, 512) {
            let _ = convert::convert_row(kind, format, row, &mut convert::StoredRows::default());
        }
    }
}

/// Any bytes as a chat template: a prompt or an error. What it does is counted by the allocator,
/// apart from its own accounts, and is never more than its steps and bytes allow.
pub fn template(bytes: &[u8]) {
    let messages = [message("system", "be brief"), message("user", "hello")];
    let inputs = Inputs { messages: &messages, add_generation_prompt: true, ..Inputs::default() };
    let Ok(template) = ChatTemplate::parse(&String::from_utf8_lossy(bytes)) else { return };
    let mut limits = Limits::default();
    (limits.steps, limits.memory_bytes, limits.output_bytes) = (50_000, 1 << 20, 1 << 18);
    let (rendered, work) = counted(|| template.render_within(&inputs, limits));
    let steps = rendered.as_ref().map_or(limits.steps, |r| r.steps);
    // A step makes a string or a list at most: a few allocations, and 64 bytes of text that may be
    // held in a buffer of twice as many.
    assert!(work.allocations <= 8 * steps + 64, "{work:?} in {steps} steps");
    assert!(work.allocated <= 1024 * steps + 2 * limits.memory_bytes as u64, "{work:?} in {steps} steps");
    // Frames of scopes, and what is on its way out.
    assert!(work.peak <= (limits.memory_bytes + (1 << 17)) as u64, "{work:?} in {steps} steps");
    let Ok(rendered) = rendered else { return };
    assert!(rendered.steps <= limits.steps && rendered.text.len() <= limits.output_bytes);
    let mut end = 0;
    for range in &rendered.typed {
        assert!(end <= range.start && rendered.text.get(range.clone()).is_some_and(|t| !t.is_empty()), "{range:?}");
        end = range.end + 1;
    }
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
