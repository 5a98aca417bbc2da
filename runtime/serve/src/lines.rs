//! What is spoken on the Unix socket: HTTP as anywhere, and for scripts a JSON object a line.
//!
//! What begins with `{` is not HTTP. Each line is then a request, with the fields of
//! `/v1/completions`, or with `messages` those of `/v1/chat/completions`; what an answer a line has
//! no place for (`stream`, `echo`, `tools`, `return_token_ids`) is refused by name. The answer to a
//! line is a line per event: `started`, `token`, `done` or `error`, and `ping` when nothing
//! happened for a while. Lines are answered one after another.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::api::{self, LINES, Request};
use crate::fields::Refusal;
use crate::job::Event;
use crate::places::Place;
use crate::run::Run;
use crate::server::{Gate, Listener, connection};
use crate::socket::Listening;
use crate::wire::Wire;

/// How often it is looked at whether the client of a line is still there.
const LOOK: Duration = Duration::from_millis(20);

impl Listener for Listening {
    type Stream = UnixStream;

    async fn next(&self) -> std::io::Result<UnixStream> {
        self.accept().await
    }

    async fn serve(mut stream: UnixStream, gate: Arc<Gate>, place: &Place, mut stopped: watch::Receiver<bool>) {
        let mut first = [0];
        let read = tokio::select! {
            read = timeout(gate.options.reading, stream.read_exact(&mut first)) => read,
            _ = stopped.wait_for(|stop| *stop) => return,
        };
        if !matches!(read, Ok(Ok(_))) {
            return;
        }
        if first[0] == b'{' {
            // A client that goes away is no error of ours.
            let _ = lines(stream, &gate, place, stopped).await;
        } else {
            connection(Wire::new(stream, gate.options.writing, first.to_vec()), gate, place, false, stopped).await;
        }
    }
}

/// Answers lines; the first byte, a brace, was read already.
async fn lines(
    stream: UnixStream,
    gate: &Gate,
    place: &Place,
    mut stopped: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let (reader, writer) = stream.into_split();
    let (reader, mut writer) =
        (Wire::new(reader, gate.options.reading, b"{".to_vec()), Wire::new(writer, gate.options.writing, Vec::new()));
    let most = gate.options.body as u64;
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = Vec::new();
        // Between lines a client may take its time, within one it may not.
        tokio::select! {
            begun = reader.fill_buf() => drop(begun?),
            _ = stopped.wait_for(|stop| *stop) => return Ok(()),
        }
        let mut limited = (&mut reader).take(most + 1);
        let read = tokio::select! {
            read = timeout(gate.options.reading, limited.read_until(b'\n', &mut line)) => read,
            _ = stopped.wait_for(|stop| *stop) => return Ok(()),
        };
        let Ok(read) = read else {
            let refusal = Refusal::new(408, "line: expected its end sooner");
            return write(&mut writer, &error(&refusal, &Value::Null)).await;
        };
        let read = read?;
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
        let _answering = place.answering();
        let mut id = Value::Null;
        match start(gate, line, &mut id).await {
            Ok(run) => events(run, &id, &mut writer).await?,
            Err(refusal) => {
                gate.log(LINES, &refusal);
                write(&mut writer, &error(&refusal, &id)).await?;
            }
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
async fn start(gate: &Gate, line: Vec<u8>, id: &mut Value) -> Result<Run, Refusal> {
    let app = gate.app.clone();
    let work = move || {
        let bad = |e: serde_json::Error| Refusal::new(400, format!("line: expected a JSON object: {e}"));
        let mut line = line;
        line.truncate(line.trim_ascii_end().len());
        let request = Request { id: app.id(), body: line, endpoint: LINES, _held: None };
        let mut value = match crate::fields::json(&request.body) {
            Ok(value) => value,
            Err(e) => return Ok((Value::Null, Err(bad(e)))),
        };
        let chat = !value["messages"].is_null();
        let run = if chat { api::chat::run(&app, &request) } else { api::completions::run(&app, &request) };
        Ok((value["id"].take(), run))
    };
    let (named, run) = api::blocking(work).await?;
    *id = named;
    run
}

/// Waits until a client is gone for good. One that only has nothing more to say may still listen.
async fn gone(writer: &Wire<OwnedWriteHalf>) {
    loop {
        // What the runtime was told last; looking at it asks nobody.
        match timeout(Duration::ZERO, writer.stream().ready(Interest::WRITABLE)).await {
            Ok(Ok(ready)) if !ready.is_write_closed() => (),
            Err(_) => (),
            Ok(_) => return,
        }
        sleep(LOOK).await;
    }
}

async fn events(mut run: Run, id: &Value, writer: &mut Wire<OwnedWriteHalf>) -> std::io::Result<()> {
    loop {
        let ping = run.ping;
        let next = tokio::select! {
            next = timeout(ping, run.next()) => next,
            () = gone(writer) => return Err(std::io::ErrorKind::BrokenPipe.into()),
        };
        let Ok(next) = next else {
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
                if let Some((p, top)) = probs.and_then(|p| Some((p.log_prob?, p.top))) {
                    line["logprob"] = api::log_prob(p).into();
                    let one = |(token, p)| json!({ "token": token, "logprob": api::log_prob(p) });
                    line["top"] = top.into_iter().map(one).collect();
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
