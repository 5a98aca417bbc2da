//! Renders what it reads: one JSON object a line, `{"source": .., "cases": [{"messages": [..], ..},
//! ..]}`, gives one line with an array of what each case renders to, `{"text": .., "typed":
//! [[start, end], ..], "steps": ..}` or `{"error": .., "kind": ..}`. `tests/templates_peer.py`
//! compares that with Jinja.

use std::io::{BufRead, Write};

use loaf_template::{Error, Inputs, Template};
use serde_json::{Value, json};

fn failed(error: &Error) -> Value {
    json!({ "error": error.to_string(), "kind": format!("{:?}", error.kind()) })
}

fn render(template: &Template, case: &Value) -> Value {
    let list = |name: &str| case[name].as_array().map_or(&[][..], Vec::as_slice);
    let variables = case["variables"].as_object().into_iter().flatten();
    let variables: Vec<_> = variables.map(|(name, value)| (name.as_str(), value.clone())).collect();
    let inputs = Inputs {
        messages: list("messages"),
        tools: list("tools"),
        add_generation_prompt: case["add_generation_prompt"] == true,
        enable_thinking: case["enable_thinking"].as_bool(),
        bos_token: case["bos_token"].as_str(),
        eos_token: case["eos_token"].as_str(),
        variables: &variables,
        ..Inputs::default()
    };
    match template.render(&inputs) {
        Ok(rendered) => {
            let typed: Vec<_> = rendered.typed.iter().map(|range| [range.start, range.end]).collect();
            json!({ "text": rendered.text, "typed": typed, "steps": rendered.steps })
        }
        Err(error) => failed(&error),
    }
}

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        let template = Template::parse(request["source"].as_str().unwrap_or_default());
        let cases = request["cases"].as_array().into_iter().flatten();
        let results: Vec<Value> = match &template {
            Ok(template) => cases.map(|case| render(template, case)).collect(),
            Err(error) => cases.map(|_| failed(error)).collect(),
        };
        writeln!(out, "{}", Value::from(results))?;
    }
    Ok(())
}
