//! Chat templates: what they give is what Jinja gives, and none of them can use up memory, stack or
//! time.
//!
//! The allocator of this test program counts what each thread holds, so a rendering's peak is
//! measured, not believed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;

use loaf_runtime::chat::{ChatTemplate, Inputs, message};
use loaf_tests::fixture;
use serde_json::Value;

/// What a rendering may hold, and then some for the template's own tree.
const PEAK: isize = (64 << 20) + (24 << 20);
/// An allocator that gives no more: what runs away ends the test instead of the machine.
const LIMIT: isize = 1 << 30;

struct Metered;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

fn account(bytes: isize) -> bool {
    let held = HELD.with(|h| {
        h.set(h.get() + bytes);
        h.get()
    });
    MOST.with(|m| m.set(m.get().max(held)));
    held <= LIMIT
}

// SAFETY: all work is the system allocator's; counting touches thread-locals that need no
// allocation, and a null pointer is an allocator's way to refuse.
unsafe impl GlobalAlloc for Metered {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !account(layout.size() as isize) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        account(-(layout.size() as isize));
        // SAFETY: the caller's contract, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be there at once.
        let fits = account(size as isize);
        account(-(layout.size() as isize));
        if !fits {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's contract, passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Metered = Metered;

/// The most that `work` held beyond what was held before.
fn peak<T>(work: impl FnOnce() -> T) -> (T, isize) {
    let before = HELD.with(Cell::get);
    MOST.with(|m| m.set(before));
    let result = work();
    (result, MOST.with(Cell::get) - before)
}

/// Compiles and renders; the peak has to be within bounds whatever comes of it.
fn render(source: &str) -> Result<String, String> {
    let messages = [message("system", "be brief"), message("user", "hello")];
    let inputs = Inputs { messages: &messages, ..Inputs::default() };
    let (result, most) = peak(|| ChatTemplate::parse(source).and_then(|t| t.render(&inputs)));
    assert!(most <= PEAK, "{most} bytes held at once by {:.200}", source);
    result.map(|r| r.text).map_err(|e| e.to_string())
}

#[test]
fn the_meter_sees_what_is_held_at_once() {
    let ((), most) = peak(|| {
        drop(std::hint::black_box(vec![1u8; 5_000_000]));
        drop(std::hint::black_box(vec![1u8; 3_000_000]));
    });
    assert!((5_000_000..5_100_000).contains(&most), "{most}");
}

#[test]
fn bombs_are_stopped_by_a_limit_they_ran_into() {
    let (memory, steps, output) = ("bytes of memory", "steps", "bytes of output");
    let (recursion, nested) = ("recursion", "nested");
    let doubling =
        |op: &str| format!("{{% set s = 'ab' %}}{}{{{{ s|length }}}}", format!("{{% set s = {op} %}}").repeat(80));
    let space = |what: &str| {
        format!("{{% set n = namespace(s='ab', l=['ab'], d={{}}) %}}{{% for i in range(100000) %}}{what}{{% endfor %}}")
    };
    let bombs: Vec<(String, &str)> = vec![
        // Doubled strings and lists, straight on and in loops.
        (doubling("s ~ s"), memory),
        (doubling("s + s"), memory),
        (doubling("s|replace('a', 'aa')"), memory),
        (doubling("[s, s]|join"), memory),
        (doubling("[s, s]|string"), memory),
        (doubling("[s, s]|tojson"), memory),
        (doubling("[s] + [s]"), nested),
        (doubling("(s|list) + (s|list)"), memory),
        (doubling("'{}{}'.format(s, s)"), memory),
        (doubling("[s, s]"), nested),
        (space("{% set n.s = n.s ~ n.s %}"), memory),
        (space("{% set n.s = n.s * 2 %}"), memory),
        (space("{% set n.l = n.l + n.l %}"), memory),
        (space("{% set n.l = [n.l] %}"), nested),
        (space("{% set n.l = [n.l, n.l] %}"), nested),
        (space("{% set n.d = dict(n.d, a=n.d) %}"), nested),
        (space("{% set n.n = [n] %}{{ n.n }}"), "something to print"),
        (space("{% set n.n = loop %}"), "plain data"),
        ("{% for i in range(400000) %}{% set n = namespace(s='ab') %}{% endfor %}".into(), memory),
        (space("{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"), memory),
        (space("{% filter upper %}{% set n.s = n.s ~ n.s %}{% endfilter %}"), memory),
        // One step each.
        ("{{ 'x' * 10**9 }}".into(), memory),
        ("{{ 'x' * 10**30 }}".into(), "127 bits"),
        ("{{ [1] * 10**18 }}".into(), memory),
        ("{{ [[1] * 1000] * 10**9 }}".into(), memory),
        ("{{ '' * 10**18 }}{{ 'xy' * 10**18 }}".into(), memory),
        ("{{ range(10**9)|list|length }}".into(), memory),
        ("{{ range(0, 0 - 10**18, -1)|length }}".into(), memory),
        ("{% for i in range(10**9) %}{% endfor %}".into(), memory),
        ("{{ 'x'|center(10**9) }}".into(), "filter"),
        ("{{ '%1000000000d' % 1 }}".into(), "operands"),
        ("{{ '%1000000000d'|format(1) }}".into(), "filter"),
        ("{{ '{:1000000000}'.format(1) }}".into(), "argument of format"),
        ("{{ 'x'.ljust(10**9) }}".into(), "method"),
        ("{{ ('a\n' * 100000)|indent(10**6) }}".into(), memory),
        ("{{ 2**(10**9) }}".into(), "127 bits"),
        ("{{ {'a': [1, 2]}|tojson(indent=10**9) }}{{ 'x' * 1000 * 5000 }}".into(), output),
        ("{{ ('x' * 10**6)|list|map('list')|list|map('string')|join|length }}".into(), memory),
        ("{{ ('ab' * 10**6).replace('a', 'x' * 10**6) }}".into(), memory),
        ("{{ ('x' * 10**6).join('y' * 10**6) }}".into(), memory),
        ("{{ ('a ' * 10**6).split()|length }}".into(), memory),
        ("{{ ('x' * 60000000)[::-1] }}".into(), memory),
        // Work without growth.
        ("{% set l = range(100000) %}{% for i in l %}{{ 'x' if i in l }}{% endfor %}".into(), steps),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}".into(), steps),
        ("{% set s = 'x' * 10**6 %}{% for a in range(9999) %}{{ s.count('y') }}{% endfor %}".into(), steps),
        ("{% set s = 'x' * 10**6 %}{% for a in range(9999) %}{{ 'x' if s == s ~ '' }}{% endfor %}".into(), steps),
        ("{{ range(100000)|sort(reverse=true)|sort|unique|length }}".into(), steps),
        ("{% set s = 'x' * 10**5 %}{{ s.strip(s) }}".into(), steps),
        (
            format!(
                "{{% set a = [1] %}}{{% set b = [1] %}}{}{{{{ a == b }}}}",
                "{% set a = [a, a] %}{% set b = [b, b] %}".repeat(50)
            ),
            steps,
        ),
        (format!("{{% set a = ['x'] %}}{}{{{{ a }}}}", "{% set a = [a, a] %}".repeat(50)), memory),
        (format!("{{% set a = ['x'] %}}{}{{{{ a|tojson }}}}", "{% set a = {'k': a, 'l': a} %}".repeat(50)), memory),
        // Output.
        ("{% for i in range(100000) %}".to_owned() + &"raw text ".repeat(100) + "{% endfor %}", output),
        (
            "{% set s %}{% for i in range(100000) %}".to_owned()
                + &"raw text ".repeat(1000)
                + "{% endfor %}{% endset %}",
            memory,
        ),
        // Recursion.
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(), recursion),
        ("{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".into(), recursion),
        ("{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}".into(), recursion),
        (
            "{% macro f(x) %}{% if x %}{{ [[[[[[[[f(x - 1)]]]]]]]] }}{% endif %}{% endmacro %}{{ f(1000) }}".into(),
            recursion,
        ),
        (
            format!(
                "{{% macro f({}) %}}{{{{ f({}) }}}}{{% endmacro %}}{{{{ f() }}}}",
                (0..20_000).map(|i| format!("a{i},")).collect::<String>(),
                "1,".repeat(20_000)
            ),
            memory,
        ),
        ("{% macro f() %}{% for i in [1] if f() %}{% endfor %}{% endmacro %}{{ f() }}".into(), recursion),
        ("{% macro f() %}{% for i in [1] %}{% filter upper %}{{ f() }}{% endfilter %}{% endfor %}{% endmacro %}{{ f() }}".into(), recursion),
        ("{% macro f() %}{% with a = f() %}{% set b %}{{ f() }}{% endset %}{% endwith %}{% endmacro %}{{ f() }}".into(), recursion),
        ("{% macro g() %}{{ f() }}{% endmacro %}{% macro f(a=g()) %}{% endmacro %}{{ f() }}".into(), recursion),
        // Trees.
        (format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)), nested),
        (format!("{{{{ {}1{} }}}}", "[".repeat(100_000), "]".repeat(100_000)), nested),
        (format!("{{{{ {}1 }}}}", "-".repeat(100_000)), nested),
        (format!("{{{{ {}1 }}}}", "not ".repeat(100_000)), nested),
        (format!("{{{{ 1{} }}}}", " + 1".repeat(100_000)), nested),
        (format!("{{{{ a{} }}}}", ".a".repeat(100_000)), nested),
        (format!("{{{{ a{} }}}}", "|upper".repeat(100_000)), nested),
        (format!("{{{{ a{} }}}}", " if a".repeat(100_000)), nested),
        (format!("{{{{ [{}] }}}}", "a,".repeat(1_000_000)), "parts"),
        ("{{a}}".repeat(500_000), "parts"),
        ("{% if a %}".repeat(100_000), nested),
        ("{% for a in b %}".repeat(100_000), nested),
        (format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(1_000_000)), "parts"),
    ];
    let mut missed = Vec::new();
    for (bomb, limit) in bombs {
        let Err(error) = render(&bomb) else {
            missed.push(format!("{bomb:.100} renders"));
            continue;
        };
        // Growing by small steps may use them up before the memory.
        let stopped = error.contains(limit) || limit == memory && error.contains(steps);
        if !stopped {
            missed.push(format!("{bomb:.100} ran into another limit than {limit}: {error}"));
        }
        assert!(
            error.starts_with("chat template: line ") && error.lines().count() == 1 && error.len() < 700,
            "{error}"
        );
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn templates_at_random_stay_within_their_bounds() {
    let pieces = [
        "{% set s = s ~ s %}",
        "{% set n.s = n.s ~ n.s %}",
        "{% set n.s = n.s * 3 %}",
        "{% set n.s = [n.s, s] %}",
        "{{ s }}",
        "{{ n.s }}",
        "{% for i in range(50) %}",
        "{% for k in n.s %}",
        "{% endfor %}",
        "{% if s %}",
        "{% endif %}",
        "{% macro f(a, b=s) %}",
        "{% endmacro %}",
        "{{ f(s) }}",
        "{{ f(n.s, b=1) }}",
        "{{ caller() }}",
        "{% call f(1) %}",
        "{% endcall %}",
        "{% set s %}",
        "{% endset %}",
        "{% set s = n.s|join(s|string) %}",
        "{% set s = s|string|replace('a', s|string) %}",
        "{% set n.s = range(1000)|list %}",
        "{% set s = [s]|tojson %}",
        "{{ messages }}",
        "{{ loop.index }}",
        "{% break %}",
        "{% set s = (s|string)[::-1].split('b') %}",
        "{% set n.s = {'k': n.s, 1: s} %}",
        "{% with s = [s, s] %}",
        "{% endwith %}",
        "{% set s = s|list|sort|unique|list %}",
        "{% set n.s = n.s|list + n.s|list %}",
        "{{ s == n.s }}",
        "text ",
        "{#",
        "#}",
        "{{",
        "-%}",
    ];
    let mut random = 0x2545_F491_4F6C_DD1D_u64;
    let mut rendered = 0;
    for _ in 0..2_000 {
        let mut source = String::from("{% set n = namespace(s='ab') %}{% set s = 'ba' %}");
        let mut open = Vec::new();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        for i in 0..4 + random % 24 {
            let piece = pieces[((random >> (i % 40)) as usize ^ (i as usize * 7)) % pieces.len()];
            source.push_str(piece);
            for (start, end) in
                [("for", "endfor"), ("if", "endif"), ("macro", "endmacro"), ("call", "endcall"), ("with", "endwith")]
            {
                if piece.starts_with(&format!("{{% {start} ")) {
                    open.push(end);
                }
            }
            random = random.rotate_left(7).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        for end in open.into_iter().rev() {
            source.push_str(&format!("{{% {end} %}}"));
        }
        rendered += usize::from(render(&source).is_ok());
    }
    assert!(rendered > 30, "some are templates: {rendered}");
}

#[test]
fn what_templates_give_is_what_jinja_gives() {
    let text = fs::read_to_string(fixture("chat/expected.json")).expect("a fixture");
    let cases: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    assert!(cases.len() > 100);
    let empty = Vec::new();
    for case in &cases {
        let source = case["source"].as_str().expect("a source");
        let inputs = Inputs {
            messages: case["messages"].as_array().unwrap_or(&empty),
            tools: case["tools"].as_array().unwrap_or(&empty),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(false),
            enable_thinking: case["enable_thinking"].as_bool(),
            bos_token: Some("<s>"),
            eos_token: Some("</s>"),
            ..Inputs::default()
        };
        let found = ChatTemplate::parse(source).and_then(|t| t.render(&inputs));
        match case["text"].as_str() {
            Some(text) => assert_eq!(found.as_ref().map(|r| r.text.as_str()), Ok(text), "{source}"),
            None => assert!(found.is_err(), "{source} gives {found:?}"),
        }
    }
}
