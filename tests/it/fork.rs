//! A forked child has the parent's handle and none of its threads: the handle refuses, and what the child
//! inherited keeps nobody out.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use remanent::{Error, Lsn, Options, Place, Store};

#[test]
fn a_forked_child_can_neither_use_the_store_nor_keep_it_locked() {
    let directory = tempfile::tempdir().unwrap();
    let options = || Options::default().segment_len(16 << 10);
    let store = Arc::new(Store::open(directory.path(), options()).unwrap());
    let mut batch = store.batch();
    batch.create(16, Place::Host);
    let page = store.commit(batch).unwrap().pages[0];

    // `cat` lives until its standard input ends, and is a fork of this process until it is `cat`.
    let mut command = Command::new("cat");
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let inherited = store.clone();
    let use_in_the_child = move || {
        let forked = |result: remanent::Result<()>| matches!(result, Err(Error::Forked { .. }));
        let mut bytes = [0; 16];
        let refused = forked(inherited.read(page, 0, &mut bytes).map(drop))
            && forked(inherited.wait_durable(Lsn(1)))
            && forked(inherited.submit(inherited.batch()).map(drop))
            && forked(inherited.snapshot().map(drop))
            && forked(inherited.pages().map(drop));
        // What the child returns here is what `spawn` returns in the parent.
        if refused { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    };
    // SAFETY: between fork and exec only calls that are safe after a fork may be made. Each of these asks
    // for the process's id, finds that it is not the opener's, and returns an error that owns no memory:
    // no lock is taken, nothing is allocated or freed, no thread is waited for.
    unsafe { command.pre_exec(use_in_the_child) };
    let mut child = command.spawn().expect("every call in the child is refused as forked");

    // The parent's handle is what it was.
    let mut bytes = [1; 16];
    assert_eq!(store.read(page, 0, &mut bytes).unwrap(), Lsn(1));
    assert_eq!(bytes, [0; 16]);
    drop(command);
    Arc::into_inner(store).unwrap().close().unwrap();
    let again = Store::open(directory.path(), options()).unwrap();
    assert_eq!(again.lsn(), Lsn(1));
    assert_eq!(child.try_wait().unwrap(), None, "the child must have outlived the parent's handle");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}
