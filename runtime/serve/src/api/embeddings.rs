//! `/v1/embeddings`: a text's normalised hidden rows become one vector of length 1.
//!
//! `pooling` says how, which is no field of OpenAI's: `mean` (the default) of all tokens, or
//! `last`. Sums run in f64 in the order of the tokens, so a vector has the same bits for any cut of
//! the prompt. Chat models were not trained for this; what their vectors are good for has to be
//! measured.

use std::sync::Arc;

use hyper::Response;
use serde_json::{Value, json};

use super::{App, Plan, Request, blocking, completions, open, submit};
use crate::body::Content;
use crate::fields::Refusal;
use crate::job::{Pooling, Wanted};

/// Answers a request.
///
/// # Errors
/// What is refused.
pub async fn serve(app: &Arc<App>, request: Request) -> Result<Response<Content>, Refusal> {
    let app = app.clone();
    let (mut run, model, base64, pooling) = blocking(move || {
        let mut f = super::fields(&request)?;
        let served = app.model(&mut f)?;
        let loaded = open(&served)?;
        let input = f.any("input").ok_or_else(|| f.missing("input", "a string or token ids"))?;
        let prompts = completions::prompts(input, "input", &loaded)?;
        let pooling = match f.text("pooling")?.as_deref() {
            None | Some("mean") => Pooling::Mean,
            Some("last") => Pooling::Last,
            Some(_) => return Err(Refusal::field("pooling", "expected mean or last")),
        };
        let base64 = match f.text("encoding_format")?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(_) => return Err(Refusal::field("encoding_format", "expected float or base64")),
        };
        let size = loaded.model.plan().hidden;
        f.unsupported("dimensions", &[size.into()])?;
        f.labels(&["user"]);
        f.done()?;
        let wanted = vec![Wanted::Embedding(pooling); prompts.len()];
        let run = submit(&app, &served, &loaded, &request, Plan { prompts, wanted, cached: false })?;
        Ok((run, served.name().to_owned(), base64, pooling))
    })
    .await?;
    super::wait(&mut run).await?;
    let data = run.answers.iter().enumerate().map(|(i, answer)| {
        let vector: Value = if base64 { to_base64(&answer.vector).into() } else { answer.vector.as_slice().into() };
        json!({ "object": "embedding", "index": i, "embedding": vector })
    });
    let tokens: usize = run.answers.iter().map(|a| a.usage.prompt).sum();
    let out = json!({
        "object": "list", "data": data.collect::<Value>(), "model": model, "pooling": pooling.name(),
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    });
    Ok(super::answer(200, &out))
}

/// Little-endian floats in base64.
fn to_base64(vector: &[f32]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let n = three.iter().fold(0u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let digit = DIGITS[(n >> (18 - 6 * i)) as usize & 63] as char;
            out.push(if i > three.len() { '=' } else { digit });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::to_base64;

    #[test]
    fn floats_are_encoded_as_the_standard_says() {
        assert_eq!(to_base64(&[]), "");
        assert_eq!(to_base64(&[1.0]), "AACAPw==");
        assert_eq!(to_base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(to_base64(&[0.0, 0.0, 1.0]), "AAAAAAAAAAAAAIA/");
    }
}
