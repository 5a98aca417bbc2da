//! What templates give, who wrote it, and what they are refused.

use super::*;

fn render(source: &str, inputs: &Inputs<'_>) -> Result<String, String> {
    let template = Template::parse(source).map_err(|e| e.to_string())?;
    template.render(inputs).map(|r| r.text).map_err(|e| e.to_string())
}

fn error(source: &str) -> String {
    let error = render(source, &Inputs::default()).unwrap_err();
    assert!(error.starts_with("chat template: ") && error.lines().count() == 1, "{error}");
    error
}

fn talk() -> Vec<Json> {
    vec![
        message("system", " Be brief. "),
        message("user", "Hi"),
        message("assistant", "<think>\nwhat now\n</think>\n\nHello!"),
        message("user", "A < B & 'C'?"),
    ]
}

#[test]
fn a_frame_per_message_with_blocks_trimmed() {
    let source = "\
{% for m in messages %}
{% if loop.first and m.role != 'system' %}
<s>system
{% endif %}
{{ '<s>' + m['role'] + '\n' + m['content'] | trim + '<e>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<s>assistant\n' }}
{%- endif %}
";
    let messages = [message("user", " x ")];
    let inputs = Inputs { messages: &messages, add_generation_prompt: true, ..Inputs::default() };
    assert_eq!(render(source, &inputs).unwrap(), "<s>system\n<s>user\nx<e>\n<s>assistant\n");
}

#[test]
fn namespaces_reversed_slices_and_string_methods_strip_old_thinking() {
    let source = "\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for m in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if not ns.found and m.role == 'user' and m.content is string and not(m.content.startswith('<r>') and m.content.endswith('</r>')) %}
    {%- set ns.found = true %}
    {%- set ns.last = index %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
    {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{{- '[' ~ reasoning ~ ']' }}
{%- endif %}
{{- m.role ~ ':' ~ content.strip() ~ ';' }}
{%- endfor %}
{{- ns.last }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<none>' }}{% endif %}";
    let messages = talk();
    let inputs = Inputs { messages: &messages, enable_thinking: Some(false), ..Inputs::default() };
    let expected = "system:Be brief.;user:Hi;[what now]assistant:Hello!;user:A < B & 'C'?;3<none>";
    assert_eq!(render(source, &inputs).unwrap(), expected);
    let inputs = Inputs { enable_thinking: None, ..inputs };
    assert_eq!(render(source, &inputs).unwrap(), expected.replace("<none>", ""));
}

#[test]
fn macros_headers_and_a_default_date() {
    let source = "\
{{- bos_token }}
{%- macro head(role) %}{{ '<h>' + role + '</h>\\n\\n' }}{% endmacro %}
{%- if not date_string is defined %}
{%- if strftime_now is defined %}
    {%- set date_string = strftime_now('%d %b %Y') %}
{%- else %}
    {%- set date_string = '1 Jan 2024' %}
{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}
{%- endif %}
{{- head('system') + date_string + ' ' + system + eos_token }}
{%- for m in messages %}
{{- head(m.role) + m.content + eos_token }}
{%- endfor %}";
    let messages = talk();
    let inputs =
        Inputs { messages: &messages[..2], bos_token: Some("<b>"), eos_token: Some("<e>"), ..Inputs::default() };
    let expected = "<b><h>system</h>\n\n26 Jul 2024 Be brief.<e><h>user</h>\n\nHi<e>";
    assert_eq!(render(source, &inputs).unwrap(), expected);
    let inputs = Inputs { now: Time::new(2026, 11, 3, 0, 0, 0).unwrap(), ..inputs };
    assert_eq!(render(source, &inputs).unwrap(), expected.replace("26 Jul 2024", "03 Nov 2026"));
    let inputs = Inputs { variables: &[("date_string", "today".into()), ("messages", 1.into())], ..inputs };
    assert_eq!(render(source, &inputs).unwrap(), expected.replace("26 Jul 2024", "today"));
}

#[test]
fn json_is_spelt_as_python_does_and_keeps_its_order() {
    let tool = serde_json::json!({
        "type": "function", "function": {"name": "é<&'", "args": [1, 2.5, null, true], "none": {}, "empty": []},
    });
    let inputs = Inputs { tools: &[tool], ..Inputs::default() };
    let line =
        r#"{"type": "function", "function": {"name": "é<&'", "args": [1, 2.5, null, true], "none": {}, "empty": []}}"#;
    assert_eq!(render("{% for t in tools %}{{ t | tojson }}{% endfor %}", &inputs).unwrap(), line);
    let indented = render("{{ {'b': [1, {}], 'a': []} | tojson(indent=2) }}", &inputs).unwrap();
    assert_eq!(indented, "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}");
    let items = "{% for k, v in tools[0].items() %}{{ k }} {% endfor %}";
    assert_eq!(render(items, &inputs).unwrap(), "type function ");
}

#[test]
fn constants_print_as_in_python() {
    assert_eq!(render("{{ true }} {{ none }} {{ tools }}", &Inputs::default()).unwrap(), "True None None");
}

#[test]
fn errors_are_one_line_that_names_the_place() {
    assert!(error("a\n{% if %}").contains("line 2"));
    assert!(error("{{ raise_exception('no\n\u{1b}system') }}").contains("the template refuses: no  system"));
    assert!(error("{{ strftime_now(1) }}").contains("expected a string, found a number"));
    assert!(error("{{ missing.field }}").contains("undefined"));
}

#[test]
fn errors_say_line_column_and_kind() {
    let place = |source: &str| {
        let inputs = Inputs::default();
        let error = Template::parse(source).and_then(|t| t.render(&inputs)).unwrap_err();
        (error.line(), error.column(), error.kind())
    };
    assert_eq!(place("a\n  é {% set x 3 %}"), (2, 14, ErrorKind::Syntax));
    assert_eq!(place("a\r\nb\rc {{ ? }}"), (3, 6, ErrorKind::Syntax));
    assert_eq!(place("{{ 'open }}"), (1, 4, ErrorKind::Syntax));
    assert_eq!(place("\n\n {{ 1 + messages.x }}"), (3, 5, ErrorKind::Value));
    assert_eq!(place("{{ raise_exception('no') }}").2, ErrorKind::Refused);
    assert_eq!(place("{{ 'x' * 10**9 }}").2, ErrorKind::Limit);
}

#[test]
fn limits_hold() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert!(error(loops).contains("steps"));
    let big = "{% set x = 'x' * 100000 %}{% for a in range(50) %}{{ x }}{% endfor %}";
    assert!(error(big).contains("bytes of output"));
    error("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}");
    error("{% include 'other' %}");
}

/// The parts of a rendering that came from the caller, in order.
fn typed(source: &str, inputs: &Inputs<'_>) -> Vec<String> {
    let rendered = Template::parse(source).unwrap().render(inputs).unwrap();
    let mut end = 0;
    for range in &rendered.typed {
        assert!(range.start < range.end && (end == 0 || range.start > end), "{:?}", rendered.typed);
        end = range.end;
    }
    rendered.typed.iter().map(|range| rendered.text[range.clone()].to_owned()).collect()
}

#[test]
fn what_the_caller_wrote_is_known_through_every_operation() {
    // The caller writes Greek and the template Latin, so who wrote a letter is plain to see.
    let operations = "\
{{ c }} {{ c ~ 'x' }} {{ 'x' + c }} {{ c * 2 }} {{ c[1:3] }} {{ c[::-1] }} {{ c[0] }} {{ c[2:] ~ c[:2] }} {{ (c, 'x') }}
{{ c | trim }} {{ c | upper }} {{ c | lower }} {{ c | capitalize }} {{ c | title }} {{ c | replace('γ', 'x') }} {{ c | e }}
{{ 'xyx' | replace('y', c) }} {{ c | tojson }} {{ {c: [c]} | tojson(indent=2) }} {{ [c, 'x'] | join('-') }} {{ ['x', 'y'] | join(c) }}
{{ c.split() }} {{ c.split('γ') | join('x') }} {{ c.rsplit(' ', 1) | last }} {{ c.partition('γ') }} {{ c.strip('α ') }} {{ c.title() }}
{{ c.splitlines() | first }} {{ c.removeprefix(' α') }} {{ '{}x{a}'.format(c, a=c) }} {{ c.format('x') }} {{ c.join('xy') }}
{{ c | indent(2, true) }} {{ c | string }} {{ c | list }} {{ c | reverse }} {{ c | default('x') }} {{ nothing | default(c) }}
{{ messages | map(attribute='content') | join('x') }} {{ messages }} {{ messages | tojson }} {{ messages[0].items() | list }}
{{ [c] | map('upper') | first }} {{ ['x', c] | sort | join }} {{ [c, c] | unique | list }} {{ ['x', c] | max }} {{ dict(a=c) }}
{{ messages | selectattr('content') | list }} {{ {'x': c} | dictsort }} {{ [c] + ['x'] }} {{ c if c else 'x' }} {{ c or 'x' }}
{% set x %}x{{ c }}x{% endset %}{{ x }}{% filter upper %}x{{ c }}{% endfilter %}{% for l in c %}{{ l }}x{% endfor %}{% set n = namespace(c=c) %}{{ n.c }}
{% macro m(a, b=c) %}x{{ a }}{{ b }}{{ caller() }}{% endmacro %}{% call m('x') %}{{ c }}x{% endcall %}{% with d = c %}{{ d }}{% endwith %}
{{ strftime_now('%Y' ~ c) }}{{ tools }}{{ extra }}{% set (a, b) = ['x', c] %}{{ a }}{{ b }}{{ c | attr('x') }}{{ c.find('δ') }}";
    let (messages, tools) = ([message("user", " αΒγ  δ'ε\"\\ζ ")], [serde_json::json!({"η": ["θ", {"ι": "κ"}]})]);
    let variables = [("extra", serde_json::json!(["λ"]))];
    let inputs = Inputs { messages: &messages, tools: &tools, variables: &variables, ..Inputs::default() };
    let source = format!("{{% set c = messages[0].content %}}{operations}");
    let rendered = Template::parse(&source).unwrap().render(&inputs).unwrap();
    let mut greek = 0;
    for (at, c) in rendered.text.char_indices().filter(|(_, c)| c.is_alphabetic()) {
        let typed = rendered.typed.iter().any(|range| range.contains(&at));
        // The keys and roles that messages have are of one language with the template.
        let rest = &rendered.text[..at + c.len_utf8()];
        let shared = ["role", "content", "user"].iter().any(|word| {
            (1..=word.len()).any(|n| rest.ends_with(&word[..n]) && rendered.text[at + 1..].starts_with(&word[n..]))
        });
        assert!(shared || typed != c.is_ascii(), "{typed} for {c} at the end of {rest}");
        greek += usize::from(!c.is_ascii());
    }
    assert!(greek > 300, "{greek}");
}

#[test]
fn ranges_touch_nothing_of_the_template() {
    let messages = [message("user", "a<b>"), message("user", ""), message("tool role", "c")];
    let inputs = Inputs { messages: &messages, bos_token: Some("<s>"), ..Inputs::default() };
    let source = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    assert_eq!(typed(source, &inputs), ["a<b>", "tool role", "c"], "a role of one word is no text");
    assert_eq!(typed("{{ messages[0].content }}{{ messages[2].content }}", &inputs), ["a<b>c"], "one range");
    assert_eq!(typed("{{ messages[0].content == 'a<b>' }}{{ 1 + 1 }}", &inputs), [""; 0]);
    assert_eq!(typed("{{ messages[0].content | tojson }}", &inputs), ["a<b>"], "the quotes are the template's");
    assert_eq!(typed("{{ messages[0].content | e }}", &inputs), ["a&lt;b&gt;"]);
}

#[test]
fn sources_with_other_line_ends_are_the_same_template() {
    let source = "{% if true %}\n a\n {% endif %}\n{{ 'x\ny' }}\n\n";
    let expected = " a\nx\ny\n";
    for line_end in ["\n", "\r\n", "\r"] {
        assert_eq!(render(&source.replace('\n', line_end), &Inputs::default()).unwrap(), expected);
    }
    assert_eq!(render("{{ '\\r\\n' }}", &Inputs::default()).unwrap(), "\r\n", "what the template writes stays");
}

#[test]
fn namespaces_stand_in_lists_and_never_make_cycles() {
    let source = "{% set a = namespace(n=1) %}{% set l = [a, {'k': a}] %}{% set a.n = 2 %}{{ l[0].n }}{{ l[1].k.n }}\
        {% set a.me = [a] %}{% set a.n = 3 %}{{ a.me[0].me[0].n }}{{ a == l[0] }}{{ a in l }}{{ namespace() == a }}";
    assert_eq!(render(source, &Inputs::default()).unwrap(), "223TrueTrueFalse");
    assert!(error("{% set a = namespace() %}{% set a.me = [a] %}{{ a.me }}").contains("a namespace"));
}

#[test]
fn macros_stand_in_lists_while_their_scope_is_there() {
    let source = "{% macro f(a, b) %}{{ a }}{{ b }};{% endmacro %}{% macro g(a) %}<{{ a }}>{% endmacro %}\
        {% set l = [f] + [g] %}{% set args = [[1, 2], ['x']] %}{% for i in range(2) %}{{ l[i](*args[i]) }}{% endfor %}{{ f(1, *[2]) }}";
    assert_eq!(render(source, &Inputs::default()).unwrap(), "12;<x>12;");
    let source = "{% set n = namespace() %}{% for i in range(2) %}{% if i == 0 %}{% macro f() %}{{ i }}{% endmacro %}{% set n.f = f %}\
        {% else %}{% for j in [1] %}{{ (n.f, 1)[0]() }}{% endfor %}{% endif %}{% endfor %}";
    assert!(error(source).contains("scope"));
    assert!(error("{{ range(*[1, 2, 3, 4]) }}").contains("at most 3 arguments"));
}

#[test]
fn python_white_space_is_more_than_unicode_says() {
    for (c, space) in [('\u{1c}', true), ('\u{1f}', true), ('\u{85}', true), ('\u{3000}', true), ('\u{200b}', false)] {
        let messages = [message("user", &format!("{c}a{c}b{c}"))];
        let inputs = Inputs { messages: &messages, ..Inputs::default() };
        let source =
            "{% set c = messages[0].content %}{{ c.strip() | length }}{{ c.split() | length }}{{ c[0].isspace() }}";
        assert_eq!(render(source, &inputs).unwrap(), if space { "32True" } else { "51False" });
        let source = format!("a{c}{{{{- 'b' }}}}{{% set{c}x = 1 -%}}{c}c");
        assert_eq!(render(&source, &Inputs::default()).is_ok(), space);
    }
}

#[test]
fn what_used_to_be_free_ends_at_the_limit_of_steps() {
    let long = format!("{{% set s = 'a' * 1000 %}}{}", "{% set s = s ~ s %}".repeat(13));
    let bomb = |set: &str, work: &str| {
        format!("{long}{set}{{% for i in range(999) %}}{{% for j in range(999) %}}{work}{{% endfor %}}{{% endfor %}}")
    };
    let name = "n".repeat(500_000);
    let bombs = [
        bomb("", "{% if s is lower %}{% endif %}"),
        bomb("", "{% if s is upper %}{% endif %}"),
        bomb("{% set s = s|replace('a', ' ') %}", "{% set x = s|int %}"),
        bomb("{% set s = s|replace('a', ' ') %}", "{% set x = s|float %}"),
        bomb("", "{% set x = s|int %}{% set x = s|float %}"),
        bomb("", "{% set x = messages|attr(s) %}"),
        bomb(
            "{% set t = s ~ '' %}{% set m = [{s: 1}] * 1 if 0 else [{s: 1}] %}",
            "{% set x = m|map(attribute=t)|list %}",
        ),
        bomb("{% set m = [{s: 1}, {s: 2}] %}{% set t = s ~ '' %}", "{% set x = m|sort(attribute=t) %}"),
        bomb("{% set m = {s: 1} %}{% set t = s ~ '' %}", "{% set x = m[t] %}{% if t in m %}{% endif %}"),
        bomb("{% set t = s ~ '' %}", "{% if s == t %}{% endif %}"),
        bomb("{% set t = s ~ '' %}", "{% if s < t %}{% endif %}"),
        bomb("{% set t = s ~ 'b' %}", "{% if t.startswith(s) %}{% endif %}"),
        bomb("{% set l = s|list if 0 else range(9999)|list %}", "{% if -1 in l %}{% endif %}"),
        bomb("{% set l = range(9999) %}{% set k = range(9999) %}", "{% if l == k %}{% endif %}"),
        bomb(&format!("{{% set {name} = 1 %}}"), &format!("{{% if {name} %}}{{% endif %}}")),
        bomb(&format!("{{% set n = namespace({name}=1) %}}"), &format!("{{% if n.{name} %}}{{% endif %}}")),
        bomb("", &format!("{{% if 1 is defined or 1|{name} %}}{{% endif %}}")),
        bomb(&format!("{{% macro {name}({name}x) %}}{{% endmacro %}}"), &format!("{{{{ {name}({name}x=1) }}}}")),
    ];
    for bomb in bombs {
        let error = Template::parse(&bomb).unwrap().render(&Inputs::default()).unwrap_err();
        let steps = error.message().contains("within 4000000 steps");
        assert!(steps && error.kind() == ErrorKind::Limit, "{error} of ...{}", &bomb[bomb.len() - 90..]);
    }
}

#[test]
fn whatever_reads_a_string_pays_for_all_of_it() {
    let reads = "s is lower;s is upper;s == t;s != t;s < t;s in t;t in [s];{s: 1}[t];{s: 1}.get(t);t in {s: 1};s is eq(t);\
        s is in(t);s|upper;s|lower;s|capitalize;s|title;s|replace('b', 'c');b|trim;s|e;s|tojson;[s]|string;s|length;s|list|length;\
        s|reverse;s|first;s|last;s[3];s[-1];s[2:];s[::-1];s ~ 'x';s + 'x';s * 2;[s]|join;s|join;s|indent;b|int;b|float;s|unique|list;\
        s|min;[s, t]|sort;[s, t]|unique;[s, t]|max;[[s], [t]]|sort;{t: 1, s: 2}|dictsort;[{s: 1}]|map(attribute=t)|list;\
        [{s: 1}, {s: 2}]|sort(attribute=t);[{s: 1}]|selectattr(t)|list;[{s: 1}]|sum(attribute=t);s.upper();s.split();s.split('b');s.rsplit('b', 1);\
        s.splitlines();s.partition('b');s.find('b');s.rfind('b');s.count('b');s.replace('', 'x');b.strip();b.lstrip();b.rstrip();\
        s.strip('a');s.startswith(t);s.endswith(t);s.removeprefix(t);'x'.join(s);s.format();'{}'.format(s);s.isdigit();s.isalpha();\
        s.isspace();s.islower();s.isupper();s.isalnum();s.isascii();s.title();s.swapcase();strftime_now(s)";
    let steps = |expression: &str, times: usize| {
        let set = "{% set s = 'ab' * NN %}{% set t = 'ab' * NN %}{% set b = ' ' * (NN * 2) %}";
        let source = format!("{}{{% set x = {expression} %}}", set.replace("NN", &times.to_string()));
        let rendered = Template::parse(&source).unwrap().render(&Inputs::default());
        rendered.map(|r| r.steps).map_err(|e| format!("{expression}: {e}"))
    };
    let mut free = Vec::new();
    for expression in reads.split(';').map(str::trim) {
        let (small, large) = (steps(expression, 4).unwrap(), steps(expression, 5_004).unwrap());
        // 10,000 bytes more, thrice made already, one for each of the strings.
        let paid = large - small - (steps("1", 5_004).unwrap() - steps("1", 4).unwrap());
        if paid < 10_000 / 64 - 1 {
            free.push((expression, paid));
        }
    }
    assert!(free.is_empty(), "{free:?}");
}
