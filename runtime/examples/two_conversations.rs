//! Two texts grow on one engine, a token each in every step:
//! `cargo run --release -p loaf-runtime --example two_conversations -- model.loaf "Once upon a time" "The cat"`.

use loaf_runtime::generate::{GenerateOptions, Generation, Need};
use loaf_runtime::{Engine, EngineOptions, Model, Sequence};

struct Talk {
    sequence: Sequence,
    generation: Generation,
    text: String,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = Model::open(args.next().ok_or("no loaf named")?.as_ref())?;
    let prompts: Vec<String> = args.take(2).collect();
    let tokenizer = model.tokenizer()?.ok_or("a loaf without a tokenizer")?;
    let slots = prompts.len() as u32;
    let mut engine = Engine::new(&model, EngineOptions { slots, ..EngineOptions::default() })?;
    let mut talks = Vec::new();
    for prompt in &prompts {
        let mut ids = Vec::new();
        tokenizer.encode(prompt, true, &mut Default::default(), &mut ids);
        let options = GenerateOptions { max_tokens: Some(60), continues_text: true, ..GenerateOptions::default() };
        let mut generation = Generation::new(&model, Some(tokenizer.clone()), &ids, 0, options)?;
        let mut sequence = engine.sequence()?;
        let logits = engine.eval(&mut sequence, generation.feed())?;
        generation.fed(ids.len());
        generation.choose(logits)?;
        let text = generation.text().to_owned();
        talks.push(Talk { sequence, generation, text });
    }
    loop {
        // Those that go on, with the token that each of them feeds.
        let mut going: Vec<&mut Talk> = Vec::new();
        for talk in &mut talks {
            if talk.generation.need() == Need::Feed {
                going.push(talk);
            }
        }
        if going.is_empty() {
            break;
        }
        let mut rows: Vec<(&mut Sequence, u32)> =
            going.iter_mut().map(|t| (&mut t.sequence, t.generation.feed()[0])).collect();
        engine.decode(&mut rows)?;
        for (row, talk) in going.into_iter().enumerate() {
            talk.generation.fed(1);
            talk.generation.choose(engine.logits(row))?;
            talk.text.push_str(talk.generation.text());
        }
    }
    for (prompt, talk) in prompts.iter().zip(&talks) {
        println!("{prompt}{}\n", talk.text);
    }
    Ok(())
}
