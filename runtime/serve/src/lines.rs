//! What is spoken on the Unix socket: HTTP as anywhere, and for scripts a JSON object a line.
//!
//! What begins with `{` is not HTTP. Each line is then a request, with the fields of `/v1/completions`, or with `messages` those of
//! `/v1/chat/completions`; `stream` and what goes with it have no meaning here. The answer to a line is a line per event: `started`, `token`, `done` or
//! `error`, and `ping` when nothing happened for a while. Lines are answered one after another.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::api::{self, Request};
use crate::fields::Refusal;
use crate::job::Event;
use crate::run::Run;
use crate::server::{Gate, Listener, connection};
use crate::socket::Listening;
use crate::wire::Wire;

/// Time without an event after which a line says that the server is alive.
const PING: Duration = Duration::from_secs(5);

impl Listener for Listening {
    type Stream = UnixStream;

    async fn next(&self) -> std::io::Result<UnixStream> {
        self.accept().await
    }

    async fn serve(mut stream: UnixStream, gate: Arc<Gate>, mut stopped: watch::Receiver<bool>) {
        let mut first = [0];
        let read = tokio::select! {
            read = timeout(gate.options.reading, stream.read_exact(&mut first)) => read,
            _ = stopped.wait_for(|stop| *stop) => return,
        };
        if !matches!(read, Ok(Ok(_))) {
            return;
        }
        let wire = Wire::new(stream, gate.options.writing, first.to_vec());
        if first[0] == b'{' {
            // A client that goes away is no error of ours.
            let _ = lines(wire, &gate, stopped).await;
        } else {
            connection(wire, gate, false, stopped).await;
        }
    }
}

async fn lines(wire: Wire<UnixStream>, gate: &Gate, mut stopped: watch::Receiver<bool>) -> std::io::Result<()> {
    let (reader, mut writer) = tokio::io::split(wire);
    let most = gate.options.body as u64;
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = Vec::new();
        let mut limited = (&mut reader).take(most + 1);
        let read = tokio::select! {
            read = limited.read_until(b'\n', &mut line) => read?,
            _ = stopped.wait_for(|stop| *stop) => return Ok(()),
        };
        if read == 0 {
            return Ok(());
        }
        if read as u64 > most {
            let refusal = Refusal::new(413, format!("line: expected at most {most} bytes, found more"));
            return write(&mut writer, &error(&refusal, &Value::Null)).await;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let mut id = Value::Null;
        match start(gate, &line, &mut id).await {
            Ok(run) => events(run, &id, &mut writer).await?,
            Err(refusal) => write(&mut writer, &error(&refusal, &id)).await?,
        }
    }
}

async fn write(writer: &mut (impl AsyncWriteExt + Unpin), value: &Value) -> std::io::Result<()> {
    writer.write_all(format!("{value}\n").as_bytes()).await?;
    writer.flush().await
}

fn error(refusal: &Refusal, id: &Value) -> Value {
    json!({ "event": "error", "id": id, "status": refusal.status, "message": refusal.message, "param": refusal.param })
}

/// Hands the request of a line over. `id` becomes what the line calls itself.
async fn start(gate: &Gate, line: &[u8], id: &mut Value) -> Result<Run, Refusal> {
    let bad = |e: serde_json::Error| Refusal::new(400, format!("line: expected a JSON object: {e}"));
    let mut value: Value = serde_json::from_slice(line).map_err(bad)?;
    let mut chat = false;
    if let Some(map) = value.as_object_mut() {
        *id = map.shift_remove("id").unwrap_or_default();
        chat = map.contains_key("messages");
    }
    let app = gate.app.clone();
    let body = value.to_string().into_bytes();
    let request = Request { id: app.id(&body), body, endpoint: "socket" };
    api::blocking(move || if chat { api::chat::run(&app, &request) } else { api::completions::run(&app, &request) })
        .await
}

async fn events(mut run: Run, id: &Value, writer: &mut (impl AsyncWriteExt + Unpin)) -> std::io::Result<()> {
    loop {
        let Ok(next) = timeout(PING, run.next()).await else {
            write(writer, &json!({ "event": "ping", "id": id })).await?;
            continue;
        };
        let line = match next {
            None => return Ok(()),
            Some((_, Event::Failed(why))) => {
                return write(writer, &error(&Refusal::from(&why), id)).await;
            }
            Some((index, Event::Started(cached))) => {
                json!({ "event": "started", "id": id, "index": index, "cached_tokens": cached })
            }
            Some((index, Event::Token(token, text, probs))) => {
                let mut line = json!({ "event": "token", "id": id, "index": index, "token": token, "text": text });
                if let Some(p) = probs.and_then(|p| p.log_prob) {
                    line["logprob"] = api::log_prob(p).into();
                }
                line
            }
            Some((index, Event::Done(tail, stop, usage))) => json!({
                "event": "done", "id": id, "index": index, "tail": tail, "text": run.answers[index].text, "stop": stop.name(),
                "seed": run.seed().map(|seed| seed.wrapping_add(index as u64)),
                "prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "answer_tokens": usage.answer,
                "first_ms": usage.first.as_secs_f64() * 1e3, "all_ms": usage.all.as_secs_f64() * 1e3,
            }),
            Some(_) => continue,
        };
        write(writer, &line).await?;
    }
}
