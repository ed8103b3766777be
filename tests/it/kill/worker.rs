//! The process that is killed: it opens the store, commits the workload from several threads and takes one
//! snapshot after another, for as long as it is left alive.

use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex};

use remanent::{Ack, LogIo, Lsn, Options, Store};

use super::board::Board;
use super::workload::{Shape, changes, fill, reshape};

/// Small segments, so that rolls, snapshots and recycling never stop. `None` is what the file system allows.
pub fn options(log_io: Option<LogIo>) -> Options {
    let options = Options::default().segment_len(64 << 10).snapshot_log_bytes(None).snapshot_interval(None);
    match log_io {
        Some(log_io) => options.log_io(log_io),
        None => options,
    }
}

/// The next batch, and what it depends on. Batches are written and submitted under a lock, which gives
/// them their Lsn; they are waited for outside of it, so that they share syncs.
struct Line {
    next: Lsn,
    shape: Shape,
}

pub fn work(directory: &Path, log_io: Option<LogIo>) -> ! {
    end_with_the_parent();
    let board = Arc::new(Board::open(&directory.join("board")));
    let hook = board.clone();
    remanent::phases::on_phase(move |phase, edge| hook.pass(phase, edge));

    let store = Store::open(directory.join("store"), options(log_io)).unwrap();
    let lsn = store.lsn();
    board.set_opened(lsn);
    let shape = store.pages().unwrap().into_iter().map(|info| (info.page, info.len)).collect();
    let line = Mutex::new(Line { next: lsn.next(), shape });
    std::thread::scope(|scope| {
        for ack in [Ack::Logged, Ack::Durable, Ack::Durable] {
            let (store, board, line) = (&store, &board, &line);
            scope.spawn(move || commit(store, board, line, ack));
        }
        loop {
            store.snapshot().unwrap();
        }
    })
}

fn commit(store: &Store, board: &Board, line: &Mutex<Line>, ack: Ack) -> ! {
    loop {
        let ticket = {
            let mut line = line.lock().unwrap();
            let n = line.next;
            let changes = changes(n, &line.shape);
            let mut batch = store.batch();
            fill(&mut batch, n, &changes);
            board.begin(n);
            let ticket = store.submit(batch).unwrap();
            assert_eq!(ticket.position().lsn, n);
            reshape(&mut line.shape, &changes, ticket.pages());
            line.next = n.next();
            ticket
        };
        ticket.wait(ack).unwrap();
        board.acknowledge(ack, ticket.position().lsn);
    }
}

/// A failure anywhere ends the process, so that the parent sees it; and the parent's end closes standard
/// input, so that no worker is left behind.
fn end_with_the_parent() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
    std::thread::spawn(|| {
        // The end of the input or an error: both say that the parent is gone.
        let _ended = std::io::stdin().read(&mut [0]);
        std::process::abort();
    });
}
