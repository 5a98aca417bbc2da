//! Listening, connections, and who may speak: everything between a socket and [`crate::api`].
//!
//! One thread runs all connections. A connection is bounded in everything that a stranger decides:
//! the size and the time of headers and bodies, how long a write may make no progress, and how many
//! connections there are (`places`). A response that nobody reads any more is dropped, and its jobs
//! with it.

use std::future::Future;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Incoming};
use hyper::header::{AUTHORIZATION, HOST, HeaderMap, ORIGIN};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request as HttpRequest, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::timeout;

use crate::api::{self, App};
use crate::body::{Content, Held};
use crate::error::ServeError;
use crate::fields::Refusal;
use crate::flavour::Flavour;
use crate::places::{Place, Places};
use crate::wire::Wire;

/// How to listen.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Addresses.
    pub listen: Vec<SocketAddr>,
    /// A Unix socket.
    pub socket: Option<PathBuf>,
    /// Keys of which a client has to know one; none for clients on this machine only.
    pub keys: Vec<String>,
    /// Names under which clients may reach it, beside those of this machine.
    pub hosts: Vec<String>,
    /// Bytes of a request's body.
    pub body: usize,
    /// Connections at once. When there are so many, idle ones make room for others.
    pub connections: usize,
    /// Time for a request's headers, and for its body.
    pub reading: Duration,
    /// Time in which a write has to make progress.
    pub writing: Duration,
    /// Time for running requests after a stop.
    pub grace: Duration,
    /// Whether SIGTERM and SIGINT stop it.
    pub signals: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 8080))],
            socket: None,
            keys: Vec::new(),
            hosts: Vec::new(),
            body: 8 << 20,
            connections: 256,
            reading: Duration::from_secs(30),
            writing: Duration::from_secs(30),
            grace: Duration::from_secs(30),
            signals: false,
        }
    }
}

/// A server that runs.
pub struct Server {
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
    stop: watch::Sender<bool>,
    thread: JoinHandle<Result<(), ServeError>>,
}

/// What every connection is held to.
pub(crate) struct Gate {
    pub app: Arc<App>,
    pub options: ServerOptions,
    keys: Vec<[u8; 32]>,
    /// Whether others can reach this machine, under any address that it has.
    open: bool,
    /// KiB that large bodies may have together, until they were read.
    large: Arc<Semaphore>,
    /// Told of bodies that took memory beyond what is worth keeping.
    grew: Notify,
}

/// Bytes of a body that anyone may send at any time. Larger ones share [`LARGE_BODIES`].
const SMALL_BODY: usize = 256 << 10;
/// Bytes that larger ones may have together; or two of the largest, if that is more.
const LARGE_BODIES: usize = 64 << 20;
/// Bytes of a body after which freed memory is given back: as JSON it has some twenty times as
/// many.
const GROWS: usize = 64 << 10;
/// Time without the end of such a body's request before that.
const REST: Duration = Duration::from_secs(1);
/// Time for what is half said when the server is to stop.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Bytes of a body that is too large which are read all the same, so that its sender comes to read
/// why.
const DRAINED: usize = 64 << 20;

impl Server {
    /// Begins to listen.
    ///
    /// # Errors
    /// An address that is taken, or open to others without a key; a socket that cannot be made.
    pub fn start(app: App, threads: Vec<JoinHandle<()>>, options: ServerOptions) -> Result<Server, ServeError> {
        let open = options.listen.iter().find(|a| !a.ip().is_loopback());
        if let (Some(open), true) = (open, options.keys.is_empty()) {
            return Err(ServeError::NoKey(*open));
        }
        let mut listeners = Vec::new();
        for address in &options.listen {
            let listener = StdListener::bind(address).map_err(|e| ServeError::Address(*address, e))?;
            listener.set_nonblocking(true).map_err(|e| ServeError::Address(*address, e))?;
            listeners.push(listener);
        }
        let addresses = listeners.iter().filter_map(|l| l.local_addr().ok()).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build();
        let runtime = runtime.map_err(ServeError::System)?;
        #[cfg(unix)]
        let socket = options.socket.as_deref().map(crate::socket::bind).transpose()?;
        let (stop, stopped) = watch::channel(false);
        let sender = stop.clone();
        let keys = options.keys.iter().map(|k| Sha256::digest(k.as_bytes()).into()).collect();
        let large =
            Arc::new(Semaphore::new(LARGE_BODIES.max(2 * options.body).div_ceil(1024).min(Semaphore::MAX_PERMITS)));
        let gate =
            Arc::new(Gate { app: Arc::new(app), open: open.is_some(), keys, large, grew: Notify::new(), options });
        let body = move || {
            runtime.block_on(async {
                let mut signals = Signals::watch(gate.options.signals);
                let places = Places::new(gate.options.connections);
                let mut tasks = Vec::new();
                for listener in listeners {
                    let listener = TcpListener::from_std(listener).map_err(ServeError::System)?;
                    tasks.push(tokio::spawn(accept(listener, gate.clone(), places.clone(), stopped.clone())));
                }
                #[cfg(unix)]
                if let Some(socket) = socket {
                    let socket = socket.listening().map_err(ServeError::System)?;
                    tasks.push(tokio::spawn(accept(socket, gate.clone(), places.clone(), stopped.clone())));
                }
                let tidy = tokio::spawn(tidy(gate.clone()));
                let mut stopped = stopped;
                tokio::select! {
                    _ = stopped.wait_for(|stop| *stop) => (),
                    () = signals.next() => (),
                }
                // All connections are told through this.
                sender.send_replace(true);
                gate.app.models.iter().for_each(|m| m.stop());
                tidy.abort();
                for task in tasks {
                    let _ = task.await;
                }
                let all = timeout(gate.options.grace, places.all_free());
                tokio::select! {
                    // What is still running then ends with its connection.
                    _ = all => (),
                    () = signals.next() => (),
                }
                Ok::<(), ServeError>(())
            })?;
            drop(runtime);
            // Their engines end what nobody listens to any more, and write the cache.
            threads.into_iter().for_each(|t| drop(t.join()));
            Ok(())
        };
        let thread = std::thread::Builder::new().name("loaf-serve".into()).spawn(body).map_err(ServeError::System)?;
        Ok(Server { addresses, stop, thread })
    }

    /// Stops it as a signal would, and waits.
    ///
    /// # Errors
    /// What went wrong while it ran.
    pub fn stop(self) -> Result<(), ServeError> {
        self.stop.send_replace(true);
        self.wait()
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// What went wrong while it ran.
    pub fn wait(self) -> Result<(), ServeError> {
        let Server { thread, stop, .. } = self;
        let ended = thread.join().unwrap_or_else(|_| Err(ServeError::Panicked));
        drop(stop);
        ended
    }
}

/// The signals that end programs. They are watched from first to last, so that none is missed in
/// between.
struct Signals {
    #[cfg(unix)]
    both: Option<[tokio::signal::unix::Signal; 2]>,
}

impl Signals {
    #[cfg_attr(not(unix), allow(unused_variables))]
    fn watch(on: bool) -> Signals {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let both = || Some([signal(SignalKind::terminate()).ok()?, signal(SignalKind::interrupt()).ok()?]);
            Signals { both: if on { both() } else { None } }
        }
        #[cfg(not(unix))]
        Signals {}
    }

    /// Waits for the next one.
    async fn next(&mut self) {
        #[cfg(unix)]
        if let Some([terminate, interrupt]) = &mut self.both {
            tokio::select! {
                _ = terminate.recv() => (),
                _ = interrupt.recv() => (),
            }
            return;
        }
        std::future::pending().await
    }
}

/// What connections come from.
pub(crate) trait Listener: Send + 'static {
    /// One of them.
    type Stream: Send + 'static;

    /// Waits for the next one.
    fn next(&self) -> impl Future<Output = std::io::Result<Self::Stream>> + Send;

    /// Serves one to its end.
    fn serve(
        stream: Self::Stream,
        gate: Arc<Gate>,
        place: &Place,
        stopped: watch::Receiver<bool>,
    ) -> impl Future<Output = ()> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> std::io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }

    async fn serve(stream: TcpStream, gate: Arc<Gate>, place: &Place, stopped: watch::Receiver<bool>) {
        // Without it events are late, but come.
        let _ = stream.set_nodelay(true);
        connection(Wire::new(stream, gate.options.writing, Vec::new()), gate, place, true, stopped).await;
    }
}

/// Tells that a large body was dealt with, or given up, when it is dropped: what it took is free
/// by then, and was not when its last byte came.
struct Grown<'a>(&'a Notify);

impl Drop for Grown<'_> {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// Gives memory back to the system after bodies that took much of it, once none has been dealt with
/// for a while.
async fn tidy(gate: Arc<Gate>) {
    loop {
        gate.grew.notified().await;
        while timeout(REST, gate.grew.notified()).await.is_ok() {}
        // It may wait for locks, and take a while.
        let _ = tokio::task::spawn_blocking(crate::memory::give_back).await;
    }
}

/// Takes connections, as many at once as there may be, until the server stops.
async fn accept<L: Listener>(listener: L, gate: Arc<Gate>, places: Arc<Places>, mut stopped: watch::Receiver<bool>) {
    loop {
        let next = async {
            let Ok(stream) = listener.next().await else {
                // Out of file descriptors, say.
                places.make_room();
                tokio::time::sleep(Duration::from_millis(50)).await;
                return None;
            };
            Some((stream, places.take().await?))
        };
        let next = tokio::select! {
            next = next => next,
            _ = stopped.wait_for(|stop| *stop) => return,
        };
        let Some((stream, place)) = next else { continue };
        let (gate, stopped) = (gate.clone(), stopped.clone());
        tokio::spawn(async move {
            tokio::select! {
                // What it has to say comes first.
                biased;
                () = L::serve(stream, gate, &place, stopped) => (),
                () = place.leave() => (),
            }
        });
    }
}

/// Serves one connection to its end.
pub(crate) async fn connection(
    wire: Wire<impl AsyncRead + AsyncWrite + Unpin + Send + 'static>,
    gate: Arc<Gate>,
    place: &Place,
    remote: bool,
    mut stopped: watch::Receiver<bool>,
) {
    let reading = gate.options.reading;
    let wire = wire.watched(place.stuck());
    let stops = stopped.clone();
    let service = service_fn(move |request| {
        let (gate, held, stops) = (gate.clone(), place.answering(), stops.clone());
        async move {
            let response = respond(&gate, request, remote, stops).await;
            Ok::<_, std::convert::Infallible>(response.map(|content| Held(content, held)))
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(reading)
        .auto_date_header(false)
        .max_headers(64)
        .max_buf_size(64 << 10);
    let mut served = std::pin::pin!(builder.serve_connection(TokioIo::new(wire), service));
    let ended = tokio::select! {
        ended = served.as_mut() => Some(ended),
        _ = stopped.wait_for(|stop| *stop) => None,
    };
    if ended.is_some() {
        return;
    }
    served.as_mut().graceful_shutdown();
    loop {
        // A client that goes away is no error of ours.
        if timeout(LAST_WORDS, served.as_mut()).await.is_ok() {
            return;
        }
        // Half a head is not waited for.
        if place.is_idle() {
            return;
        }
    }
}

async fn respond(
    gate: &Gate,
    request: HttpRequest<Incoming>,
    remote: bool,
    stopped: watch::Receiver<bool>,
) -> Response<Content> {
    let path = request.uri().path().to_owned();
    let flavour = Flavour::of(&path);
    let refuse = |refusal: &Refusal| {
        gate.log(&path, refusal);
        api::refuse(refusal, flavour)
    };
    if let Err(refusal) = gate.check(&request, &path, remote) {
        return refuse(&refusal);
    }
    let method = request.method().clone();
    if let Some(response) = api::place(&gate.app, &method, &path) {
        return response;
    }
    let body = match gate.read(request, stopped).await {
        Ok(body) => body,
        Err(refusal) => return refuse(&refusal),
    };
    let _grown = (body.bytes.len() > GROWS).then(|| Grown(&gate.grew));
    match api::route(&gate.app, &method, &path, body).await {
        Some(Ok(response)) => response,
        Some(Err(refusal)) => refuse(&refusal),
        None => {
            let shown = loaf_formats::text::short(&path, 100);
            refuse(&Refusal::new(404, format!("{shown}: no such place here")))
        }
    }
}

/// Reads what is left of a body that is refused, so that its sender comes to read why.
async fn drain(mut body: impl Body<Data = hyper::body::Bytes> + Unpin) {
    let mut left = DRAINED;
    let all = async {
        while let Some(Ok(frame)) = body.frame().await {
            let n = frame.data_ref().map_or(0, hyper::body::Bytes::len);
            match left.checked_sub(n) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    };
    // Who takes longer finds out by the end of the connection.
    let _ = timeout(Duration::from_secs(1), all).await;
}

impl Gate {
    /// A line in the audit log for a request that no model had work with.
    pub(crate) fn log(&self, endpoint: &str, refusal: &Refusal) {
        // What failed later has its line already.
        if let Some(audit) = self.app.audit.as_ref().filter(|_| refusal.status < 500) {
            audit.refused(&loaf_formats::text::short(endpoint, 100), refusal.status);
        }
    }

    /// Reads a body, in time, of no more bytes than it may have.
    async fn read(
        &self,
        request: HttpRequest<Incoming>,
        mut stopped: watch::Receiver<bool>,
    ) -> Result<api::Body, Refusal> {
        let most = self.options.body;
        let too_large = || Refusal::new(413, format!("body: expected at most {most} bytes, found more"));
        let headers = request.headers();
        let length = headers.get(hyper::header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        let (coded, waits) =
            (headers.contains_key(hyper::header::CONTENT_ENCODING), headers.contains_key(hyper::header::EXPECT));
        // What else a body was put through would have to be undone.
        let mut all = headers.get_all(hyper::header::TRANSFER_ENCODING).iter();
        let transferred =
            all.next().is_some_and(|v| !v.as_bytes().eq_ignore_ascii_case(b"chunked")) || all.next().is_some();
        let body = request.into_body();
        if length.is_some_and(|n| n > most as u64) {
            // Who waits to be asked for it has sent nothing yet.
            if !waits {
                drain(body).await;
            }
            return Err(too_large());
        }
        if transferred {
            return Err(Refusal::new(400, "transfer-encoding: not supported here but as chunked, alone"));
        }
        if coded {
            return Err(Refusal::new(415, "content-encoding: not supported; send the body as it is"));
        }
        let size = body.size_hint().upper().map_or(most, |n| n.min(most as u64) as usize);
        let late = async {
            let begun = tokio::time::Instant::now();
            let limit = tokio::time::sleep_until(begun + self.options.reading);
            tokio::select! {
                () = limit => (),
                () = async {
                    // If the server's end is gone there is no stop to come.
                    let _ = stopped.wait_for(|stop| *stop).await;
                    tokio::time::sleep(LAST_WORDS).await;
                } => (),
            }
        };
        let read = async {
            let mut held = None;
            if size > SMALL_BODY {
                held = self.large.clone().acquire_many_owned(size.div_ceil(1024) as u32).await.ok();
            }
            let mut limited = Limited::new(body, most);
            let mut bytes = Vec::new();
            while let Some(frame) = limited.frame().await {
                match frame {
                    Ok(frame) => bytes.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data)),
                    Err(e) if e.is::<LengthLimitError>() => return Err(too_large()),
                    Err(e) => return Err(Refusal::new(400, format!("body: {e}"))),
                }
            }
            Ok(api::Body { bytes, held })
        };
        tokio::select! {
            read = read => read,
            () = late => Err(Refusal::new(408, "body: expected it sooner")),
        }
    }

    /// Whether a request may be answered. Over the Unix socket it may: who can open that is whom
    /// its mode lets.
    fn check(&self, request: &HttpRequest<Incoming>, path: &str, remote: bool) -> Result<(), Refusal> {
        let headers = request.headers();
        let one = |name: hyper::header::HeaderName| {
            let mut all = headers.get_all(&name).iter();
            let first = all.next().map(|v| v.to_str().unwrap_or("\u{fffd}"));
            if all.next().is_some() {
                Err(Refusal::new(400, format!("{name}: expected one, found more")))
            } else {
                Ok(first)
            }
        };
        let host = one(HOST)?;
        if remote {
            let Some(host) = host else { return Err(Refusal::new(400, "host: expected one, found none")) };
            // Where the request's line names one too, that is the one it is for.
            for host in request.uri().authority().map(|a| a.as_str()).into_iter().chain([host]) {
                let name = name_of(host);
                if !self.is_named(name) {
                    let shown = loaf_formats::text::short(name, 100);
                    return Err(Refusal::new(403, format!("host: {shown} is no name of this server (--allow-host)")));
                }
            }
        }
        // A page of somebody else's has no business here; the one at '/' has the server's own name.
        if let Some(origin) = one(ORIGIN)? {
            let own = host.is_some_and(|host| {
                let name = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
                name.is_some_and(|name| name.eq_ignore_ascii_case(host))
            });
            if !own {
                return Err(Refusal::new(403, "origin: pages of other origins are not answered"));
            }
        }
        self.check_key(one(AUTHORIZATION)?, headers, path, remote)?;
        // Anthropic's clients say it; it changes nothing.
        let known = |part: &&str| !part.is_empty() && part.split('=').next() != Some("beta");
        match request.uri().query().unwrap_or_default().split('&').find(known) {
            None => Ok(()),
            Some(part) => {
                let name = loaf_formats::text::short(part.split('=').next().unwrap_or_default(), 60);
                Err(Refusal::field(&name, "no such parameter here; what a request says stands in its body"))
            }
        }
    }

    fn check_key(
        &self,
        authorization: Option<&str>,
        headers: &HeaderMap,
        path: &str,
        remote: bool,
    ) -> Result<(), Refusal> {
        if !remote || self.keys.is_empty() || matches!(path, "/health" | "/v1/health" | "/") {
            return Ok(());
        }
        let bearer = authorization.and_then(|v| v.split_once(' '));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim());
        let key = headers.get("x-api-key").and_then(|v| v.to_str().ok());
        // Hashes are compared, so that the time taken says nothing of a key.
        let known = |key: &str| self.keys.contains(&Sha256::digest(key.as_bytes()).into());
        if bearer.is_some_and(known) || key.is_some_and(known) {
            return Ok(());
        }
        Err(Refusal::new(401, "expected a key of this server in 'authorization: Bearer' or 'x-api-key'"))
    }

    /// Whether clients may call this server so. Somebody else's page could reach this machine by a
    /// name of its own, but by no address.
    fn is_named(&self, name: &str) -> bool {
        let bare = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')).unwrap_or(name);
        let address: Option<std::net::IpAddr> = bare.parse().ok();
        let local = |a: std::net::IpAddr| matches!(bare, "127.0.0.1" | "::1") || self.is_listened_to(a);
        name.eq_ignore_ascii_case("localhost")
            || address.is_some_and(|a| self.open || local(a))
            || self.options.hosts.iter().any(|h| h.eq_ignore_ascii_case(name))
    }

    fn is_listened_to(&self, address: std::net::IpAddr) -> bool {
        self.options.listen.iter().any(|a| a.ip() == address)
    }
}

/// A host without its port.
fn name_of(host: &str) -> &str {
    let port =
        host.rfind(':').filter(|at| host[at + 1..].bytes().all(|b| b.is_ascii_digit()) && !host[..*at].ends_with(':'));
    match port {
        Some(at) if host.starts_with('[') == host[..at].ends_with(']') => &host[..at],
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::name_of;

    #[test]
    fn ports_are_no_part_of_a_name() {
        let hosts = ["localhost", "localhost:8080", "[::1]", "[::1]:80", "127.0.0.1:1", "evil.example:8080"];
        let names = ["localhost", "localhost", "[::1]", "[::1]", "127.0.0.1", "evil.example"];
        assert_eq!(hosts.map(name_of), names);
    }
}
