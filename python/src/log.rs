//! Queues engine events for Python's `logging`. A store thread adds an event to a queue and continues; a
//! Python thread takes events from the queue. While no handler receives events, an event costs one load.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record as SpanValues};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::gate::check_process;

/// The largest number of queued records. Further records are counted and dropped.
const QUEUED_MAX: usize = 256;

/// The lowest level that is forwarded: 0 for nothing, 1 for errors, up to 5 for everything.
static LEVEL: AtomicU8 = AtomicU8::new(0);

/// The queue of this process. A queue is never freed, because a thread may be about to write to it. A forked
/// child starts with a new queue, because a thread that does not exist in the child may hold the lock of the
/// parent's queue.
static QUEUE: AtomicPtr<LogQueue> = AtomicPtr::new(ptr::null_mut());

struct LogQueue {
    opener: u32,
    state: Mutex<QueueState>,
    more: Condvar,
}

#[derive(Default)]
struct QueueState {
    records: VecDeque<LogRecord>,
    left_out: u64,
    /// The number of marks that were set. `take` returns a mark's number once all earlier records are taken.
    marks: u64,
    is_over: bool,
}

struct LogRecord {
    level: Level,
    target: &'static str,
    file: &'static str,
    line: u32,
    /// The name of the thread (empty for a Python thread) and its system id.
    thread: (String, i32),
    seconds: f64,
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl LogQueue {
    /// Returns the queue of this process, or `None` before the first open.
    fn current() -> Option<&'static Self> {
        let queue = QUEUE.load(Ordering::Acquire);
        // SAFETY: null, or leaked by `begin_queue` and never freed.
        let queue = unsafe { queue.as_ref() }?;
        check_process(queue.opener).is_ok().then_some(queue)
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, record: LogRecord) {
        let mut state = self.state();
        if state.records.len() < QUEUED_MAX {
            state.records.push_back(record);
        } else {
            state.left_out += 1;
        }
        drop(state);
        self.more.notify_one();
    }

    /// Takes the queued records. Also returns the number of records dropped after them and the number of the
    /// last mark. Waits up to `timeout` for a record, or for a mark after `mark`. Returns `None` once the
    /// queue has ended.
    fn take(&self, timeout: Duration, mark: u64) -> Option<(VecDeque<LogRecord>, u64, u64)> {
        let waits =
            |state: &mut QueueState| state.records.is_empty() && state.marks == mark && !state.is_over;
        let waited = self.more.wait_timeout_while(self.state(), timeout, waits);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.is_over && state.records.is_empty() && state.left_out == 0 {
            return None;
        }
        let (records, left_out) = (std::mem::take(&mut state.records), std::mem::take(&mut state.left_out));
        Some((records, left_out, state.marks))
    }
}

struct Forwarder;

fn filter() -> LevelFilter {
    match LEVEL.load(Ordering::Relaxed) {
        0 => LevelFilter::OFF,
        1 => LevelFilter::ERROR,
        2 => LevelFilter::WARN,
        3 => LevelFilter::INFO,
        4 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    }
}

impl Subscriber for Forwarder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Spans are measured by other means: `Store.stats`.
        metadata.is_event() && *metadata.level() <= filter()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(filter())
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &SpanValues<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        // The callsite may still be enabled for a previous level.
        if !self.enabled(metadata) {
            return;
        }
        let Some(queue) = LogQueue::current() else { return };
        let mut event_text = EventText::default();
        event.record(&mut event_text);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        queue.push(LogRecord {
            level: *metadata.level(),
            target: metadata.target(),
            file: metadata.file().unwrap_or_default(),
            line: metadata.line().unwrap_or_default(),
            // SAFETY: the call has no arguments and cannot fail.
            thread: (std::thread::current().name().unwrap_or_default().to_owned(), unsafe { libc::gettid() }),
            seconds: since.as_secs_f64(),
            message: event_text.message,
            fields: event_text.fields,
        });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct EventText {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string fails only if a `Debug` implementation does; the text up to then is kept.
        let mut text = String::new();
        let _ = write!(text, "{value:?}");
        match field.name() {
            "message" => self.message = text,
            name => self.fields.push((name, text)),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.fields.push((name, value.to_owned())),
        }
    }
}

/// Replaces the queue. The previous queue is not freed, because threads may be about to write to it.
fn begin_queue() {
    let queue = LogQueue { opener: std::process::id(), state: Mutex::default(), more: Condvar::new() };
    QUEUE.store(Box::leak(Box::new(queue)), Ordering::Release);
}

/// Sets the lowest level that is forwarded, as a `logging` level; None forwards nothing. Returns whether the
/// process can forward events at all.
#[pyfunction]
pub fn _log_level(py: Python<'_>, level: Option<u32>) -> bool {
    let number = match level {
        None => 0,
        Some(41..) => 0,
        Some(31..) => 1,
        Some(21..) => 2,
        Some(11..) => 3,
        Some(10) => 4,
        Some(_) => 5,
    };
    if LogQueue::current().is_none() {
        if number == 0 {
            return true;
        }
        begin_queue();
    }
    if LEVEL.swap(number, Ordering::Relaxed) == number {
        return true;
    }
    // Threads that register with the event registry may hold its lock meanwhile.
    py.detach(|| {
        static ONCE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        let is_ours = *ONCE.get_or_init(|| tracing::subscriber::set_global_default(Forwarder).is_ok());
        tracing::callsite::rebuild_interest_cache();
        is_ours
    })
}

/// Takes the queued records. Also returns the number of dropped records and the number of the last mark.
/// Waits up to `timeout` seconds for a record, or for a mark after `mark`. Returns None once the queue has
/// ended.
#[pyfunction]
pub fn _log_take(py: Python<'_>, timeout: f64, mark: u64) -> PyResult<Option<(Bound<'_, PyList>, u64, u64)>> {
    let timeout = Duration::try_from_secs_f64(timeout.max(0.0)).unwrap_or(Duration::MAX);
    let taken = py.detach(|| LogQueue::current().and_then(|queue| queue.take(timeout, mark)));
    let Some((records, left_out, mark)) = taken else { return Ok(None) };
    let list = PyList::empty(py);
    for record in records {
        list.append(record_to_py(py, record)?)?;
    }
    Ok(Some((list, left_out, mark)))
}

/// Sets a mark after the events so far and returns the mark's number. `_log_take` returns that number once
/// all events before the mark are taken.
#[pyfunction]
pub fn _log_mark() -> u64 {
    let Some(queue) = LogQueue::current() else { return 0 };
    let mark = {
        let mut state = queue.state();
        state.marks += 1;
        state.marks
    };
    queue.more.notify_all();
    mark
}

/// Makes `_log_take` return None once the queued records are taken.
#[pyfunction]
pub fn _log_end() {
    if let Some(queue) = LogQueue::current() {
        queue.state().is_over = true;
        queue.more.notify_all();
    }
}

fn record_to_py(py: Python<'_>, record: LogRecord) -> PyResult<Bound<'_, PyTuple>> {
    let level = match record.level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    };
    let fields = PyDict::new(py);
    for (name, value) in record.fields {
        fields.set_item(name, value)?;
    }
    let LogRecord { target, file, line, thread, seconds, message, .. } = record;
    (level, target, file, line, thread, seconds, message, fields).into_pyobject(py)
}

/// Sets the level of forwarded events to that of the `logging` logger "remanent".
pub fn update_level(py: Python<'_>) -> PyResult<()> {
    py.import("remanent._store.log")?.call_method0("update_logging").map(drop)
}
