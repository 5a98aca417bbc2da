//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use hyper::Response;
use loaf_runtime::tokenizer::{EncodeOptions, Scratch};
use serde_json::{Value, json};

use super::switches::Switches;
use super::{App, Request, blocking, messages_in, open, typed};
use crate::body::Content;
use crate::fields::{Refusal, whole};
use crate::prompt::Talk;

/// Text, or messages, to ids.
///
/// # Errors
/// What is refused.
pub async fn tokenize(app: &Arc<App>, request: Request) -> Result<Response<Content>, Refusal> {
    let app = app.clone();
    let out = blocking(move || {
        let mut f = super::fields(&request)?;
        let loaded = open(&*app.model(&mut f)?)?;
        let tokenizer = loaded.tokenizer.as_ref().ok_or_else(|| Refusal::new(400, "this model has no tokenizer"))?;
        let mut ids = Vec::new();
        if let Some(list) = f.list("messages")? {
            let mut talk = Talk { messages: messages_in::messages(list)?, ..Talk::default() };
            talk.tools = messages_in::tools(f.list("tools")?.unwrap_or_default())?;
            ids = Switches::of_chat(&mut f)?.render(&loaded, &mut talk)?.ids;
        } else {
            let text = f.text("content")?;
            let text = match text {
                Some(text) => text,
                None => f.text("prompt")?.ok_or_else(|| f.missing("content", "a text or messages"))?,
            };
            let add_special = f.bool("add_special")?.unwrap_or(false);
            let parse_special = f.bool("parse_special")?.unwrap_or(false);
            let options = EncodeOptions { add_special, parse_special };
            tokenizer.encode_with(&text, options, &mut Scratch::default(), &mut ids);
        }
        let pieces = f.bool("with_pieces")?.unwrap_or(false);
        f.done()?;
        let mut out = json!({ "tokens": ids, "count": ids.len() });
        if pieces {
            let piece = |id: &u32| {
                let bytes = tokenizer.token_bytes(*id);
                json!({ "id": id, "piece": String::from_utf8_lossy(bytes), "bytes": bytes })
            };
            out["pieces"] = ids.iter().map(piece).collect();
        }
        Ok(out.to_string())
    })
    .await?;
    Ok(typed(200, "application/json", out))
}

/// Ids to text.
///
/// # Errors
/// What is refused.
pub async fn detokenize(app: &Arc<App>, request: Request) -> Result<Response<Content>, Refusal> {
    let app = app.clone();
    let out = blocking(move || {
        let mut f = super::fields(&request)?;
        let loaded = open(&*app.model(&mut f)?)?;
        let tokenizer = loaded.tokenizer.as_ref().ok_or_else(|| Refusal::new(400, "this model has no tokenizer"))?;
        let list = f.list("tokens")?.ok_or_else(|| f.missing("tokens", "an array of token ids"))?;
        let skip = f.bool("skip_special")?.unwrap_or(false);
        f.done()?;
        let vocab = loaded.model.plan().vocab;
        let read = |v: &Value| whole(v).and_then(|id| u32::try_from(id).ok()).filter(|id| *id < vocab);
        let ids = list.iter().map(|v| {
            let shown = loaf_formats::text::short(&v.to_string(), 40);
            read(v).ok_or_else(|| Refusal::field("tokens", format!("expected token ids below {vocab}, found {shown}")))
        });
        let ids: Vec<u32> = ids.collect::<Result<_, _>>()?;
        Ok(json!({ "content": tokenizer.decode(&ids, skip) }).to_string())
    })
    .await?;
    Ok(typed(200, "application/json", out))
}
