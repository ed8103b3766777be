//! An HTTP server on the loopback interface that stores objects like S3 and fails on demand.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use remanent_archive::remote::RemoteOptions;

/// The behavior of the server for one request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Handles the request like a real server.
    #[allow(dead_code, reason = "for the tests of the command, which include this file")]
    None,
    /// Returns a status and a body without applying the request.
    Status(u16, String),
    /// Applies the request, and returns a status without a body.
    StatusAfter(u16),
    /// Closes the connection without applying the request.
    DropBefore,
    /// Applies the request, and closes the connection without a response.
    DropAfter,
    /// Applies the request, and closes the connection in the middle of the body.
    Truncate,
    /// Never responds.
    Hang,
}

impl Fault {
    /// Returns a fault that responds with a status and an S3 error code.
    pub fn code(status: u16, code: &str) -> Self {
        let body =
            format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>A message</Message></Error>");
        Fault::Status(status, body)
    }
}

/// A received request.
#[derive(Clone, Debug)]
pub struct Received {
    pub method: String,
    pub head: String,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    faults: VecDeque<Fault>,
    received: Vec<Received>,
    hanging: Vec<TcpStream>,
    ignores_conditions: bool,
}

/// The server.
pub struct Server {
    port: u16,
    state: Arc<Mutex<State>>,
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State::default()));
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (served, stopped) = (state.clone(), is_stopped.clone());
        let thread = std::thread::spawn(move || {
            for connection in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let (state, connection) = (served.clone(), connection.unwrap());
                // A client that closes its connection does not fail the test.
                std::thread::spawn(move || drop(serve(&state, connection)));
            }
        });
        Self { port, state, is_stopped, thread: Some(thread) }
    }

    /// Returns options with which a bucket connects to this server.
    pub fn options(&self) -> RemoteOptions {
        self.options_without_credential()
            .setting("access_key_id", "test")
            .setting("secret_access_key", "testtest")
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn options_without_credential(&self) -> RemoteOptions {
        RemoteOptions::default()
            .setting("endpoint", self.url())
            .setting("allow_http", "true")
            .setting("region", "us-east-1")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies one fault to each of the next requests, in order.
    pub fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state().faults.extend(faults);
    }

    /// Handles the next `count` requests, and never responds to the request after them.
    #[allow(dead_code, reason = "for the tests of the command, which include this file")]
    pub fn hang_after(&self, count: usize) {
        let answers = std::iter::repeat_n(Fault::None, count);
        self.state().faults = answers.chain([Fault::Hang]).collect();
    }

    /// Returns true if a request is waiting for an answer that will not be sent.
    #[allow(dead_code, reason = "for the tests of the command, which include this file")]
    pub fn is_hanging(&self) -> bool {
        !self.state().hanging.is_empty()
    }

    /// Ends all faults, and closes the connections of requests that were never answered.
    #[allow(dead_code, reason = "for the tests of the command, which include this file")]
    pub fn recover(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.hanging.clear();
    }

    /// From now on, creates replace existing objects, as on some servers.
    pub fn ignore_conditions(&self) {
        self.state().ignores_conditions = true;
    }

    /// Stores an object.
    pub fn store(&self, name: &str, bytes: &[u8]) {
        self.state().objects.insert(name.to_owned(), bytes.to_vec());
    }

    pub fn object(&self, name: &str) -> Option<Vec<u8>> {
        self.state().objects.get(name).cloned()
    }

    /// Returns the requests received since the last call.
    pub fn take_received(&self) -> Vec<Received> {
        std::mem::take(&mut self.state().received)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn serve(state: &Mutex<State>, connection: TcpStream) -> std::io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut head = String::new();
    while reader.read_line(&mut head)? > 2 {}
    let line: Vec<&str> = head.lines().next().unwrap_or("").split(' ').collect();
    let [method, target, _] = line[..] else { return Ok(()) };
    let mut body = vec![0; header(&head, "content-length").map_or(0, |len| len.parse().unwrap())];
    reader.read_exact(&mut body)?;
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let name = path.trim_start_matches("/bucket").trim_start_matches('/').to_owned();
    let received = Received { method: method.to_owned(), head: head.clone() };
    state.received.push(received);
    let fault = state.faults.pop_front();
    match fault {
        Some(Fault::DropBefore) => return Ok(()),
        Some(Fault::Hang) => {
            state.hanging.push(connection);
            return Ok(());
        }
        Some(Fault::Status(status, text)) => {
            return answer(connection, status, "", text.as_bytes(), text.len());
        }
        _ => {}
    }
    let is_refused = !state.ignores_conditions && header(&head, "if-none-match").is_some();
    let exists = state.objects.contains_key(&name);
    let (status, headers, bytes) = match method {
        "PUT" if is_refused && exists => error(412, "PreconditionFailed"),
        "PUT" => {
            state.objects.insert(name, body);
            (200, FOUND.to_owned(), Vec::new())
        }
        _ => apply(&mut state.objects, method, &name, query, &head),
    };
    drop(state);
    match fault {
        Some(Fault::DropAfter) => Ok(()),
        Some(Fault::StatusAfter(status)) => answer(connection, status, "", b"", 0),
        Some(Fault::Truncate) => answer(connection, status, &headers, &bytes, bytes.len() / 2),
        _ => answer(connection, status, &headers, &bytes, bytes.len()),
    }
}

fn answer(
    mut connection: TcpStream,
    status: u16,
    headers: &str,
    body: &[u8],
    sent: usize,
) -> std::io::Result<()> {
    let len = body.len();
    let head =
        format!("HTTP/1.1 {status} Status\r\ncontent-length: {len}\r\nconnection: close\r\n{headers}\r\n");
    connection.write_all(head.as_bytes())?;
    connection.write_all(&body[..sent])
}

fn header<'h>(head: &'h str, name: &str) -> Option<&'h str> {
    let mut fields = head.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

const FOUND: &str = "etag: \"1\"\r\nlast-modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n";

/// Status, headers and body of an answer.
type Answer = (u16, String, Vec<u8>);

fn error(status: u16, code: &str) -> Answer {
    (status, String::new(), format!("<Error><Code>{code}</Code></Error>").into_bytes())
}

fn apply(
    objects: &mut BTreeMap<String, Vec<u8>>,
    method: &str,
    name: &str,
    query: &str,
    head: &str,
) -> Answer {
    match method {
        "DELETE" => {
            objects.remove(name);
            (204, String::new(), Vec::new())
        }
        "GET" if query.contains("list-type=2") => (200, String::new(), listing(objects, query).into_bytes()),
        "GET" => {
            let Some(object) = objects.get(name) else { return error(404, "NoSuchKey") };
            let Some(range) = header(head, "range") else { return (200, FOUND.to_owned(), object.clone()) };
            let (start, end) = range.trim_start_matches("bytes=").split_once('-').unwrap();
            let start: usize = start.parse().unwrap();
            let end = end.parse::<usize>().unwrap().min(object.len().saturating_sub(1));
            if start >= object.len() {
                return error(416, "InvalidRange");
            }
            let headers = format!("{FOUND}content-range: bytes {start}-{end}/{}\r\n", object.len());
            (206, headers, object[start..=end].to_vec())
        }
        _ => error(501, "NotImplemented"),
    }
}

fn listing(objects: &BTreeMap<String, Vec<u8>>, query: &str) -> String {
    let prefix =
        query.split('&').find_map(|field| field.strip_prefix("prefix=")).unwrap_or("").replace("%2F", "/");
    let entry = |name: &String| {
        let fields = "<Size>1</Size><LastModified>2026-11-30T00:00:00Z</LastModified><ETag>1</ETag>";
        format!("<Contents><Key>{name}</Key>{fields}</Contents>")
    };
    let entries: String = objects.keys().filter(|name| name.starts_with(&prefix)).map(entry).collect();
    format!(
        "<ListBucketResult><KeyCount>1</KeyCount><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
    )
}
