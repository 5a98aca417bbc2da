//! One prompt, one answer:
//! `cargo run --release -p loaf-runtime --example generate -- model.loaf "Once upon a time"`.

use std::io::Write;
use std::ops::ControlFlow;

use loaf_runtime::{Engine, EngineOptions, GenerateOptions, Generation, Model, Session, generate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (path, prompt) = (args.next().ok_or("no loaf named")?, args.next().unwrap_or_default());
    let model = Model::open(path.as_ref())?;
    let tokenizer = model.tokenizer()?.ok_or("a loaf without a tokenizer")?;
    let mut ids = Vec::new();
    tokenizer.encode(&prompt, true, &mut Default::default(), &mut ids);
    let Session { mut engine, mut sequence } = Session::new(Engine::new(&model, EngineOptions::default())?)?;
    let stop_ids = model.chat().stop_ids.clone();
    let options = GenerateOptions { max_tokens: Some(100), stop_ids, continues_text: true, ..Default::default() };
    let mut generation = Generation::new(&model, Some(tokenizer), &ids, 0, options)?;
    let report = generate::run(&mut engine, &mut sequence, &mut generation, &mut |_, text| {
        print!("{text}");
        let _ = std::io::stdout().flush();
        ControlFlow::Continue(())
    })?;
    eprintln!("\n{} tokens, {:.1} a second", report.tokens, report.decode_tok_s());
    Ok(())
}
