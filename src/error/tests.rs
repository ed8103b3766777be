use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// The cause that the documentation of a variant states for errors of the caller.
const CALLER: &str = "the caller";
const ENVIRONMENT: &str = "the environment";
const DATA: &str = "damaged data";
const BUG: &str = "a bug";
const CONTAINED: &str = "the contained error";

/// A row of the table: an error, its file, offset and Lsn, its remedy, its cause, and a part of its message.
type Row = (Error, (Option<FileName>, Option<u64>, Option<Lsn>), Remedy, &'static str, &'static str);

const NOWHERE: (Option<FileName>, Option<u64>, Option<Lsn>) = (None, None, None);
const SEGMENT: FileName = FileName::Segment(3);
const PAGE: PageId = PageId(7);
const PLACE: Place = Place::Device(1);

fn text(text: &str) -> String {
    text.to_owned()
}

/// Creates an error of the operating system: 5 is EIO, 11 is EAGAIN, which is a shortage.
fn io(action: IoAction, object: IoObject, errno: i32) -> Error {
    Error::system(action, object, io::Error::from_raw_os_error(errno))
}

fn archive(url: &str, kind: ArchiveErrorKind, reason: &str) -> Error {
    ArchiveError { url: text(url), kind, reason: text(reason) }.into()
}

fn failed_sync() -> Error {
    io(IoAction::Sync, IoObject::File { file: SEGMENT, offset: Some(4096) }, 5)
}

fn lost_device() -> Error {
    Error::Device { reason: text("gone"), context_lost: true }
}

fn key() -> Key {
    Key::new("weights").unwrap()
}

fn system_errors() -> Vec<Row> {
    let file = |offset| IoObject::File { file: SEGMENT, offset };
    let folder = || IoObject::Folder { path: text("store/log") };
    let thread = || IoObject::Thread { thread: "a thread" };
    let source = |offset| IoObject::Source { index: 4, offset };
    let full = || Error::disk_full(SEGMENT, 16384);
    let (of_segment, at) = ((Some(SEGMENT), None, None), (Some(SEGMENT), Some(4096), None));
    let damage = Defect::Missing.at_lsn(SEGMENT, 8192, Lsn(9));
    let locked = || Error::Locked { holder: text("process 5"), store: None };
    vec![
        (
            failed_sync(),
            at,
            Remedy::Reopen,
            ENVIRONMENT,
            "cannot sync log/0000000000000003.log at offset 4096: ",
        ),
        (
            io(IoAction::Open, file(None), 5).in_store("/srv/pages"),
            of_segment,
            Remedy::Reopen,
            ENVIRONMENT,
            "cannot open log/0000000000000003.log of the store in /srv/pages: ",
        ),
        (io(IoAction::Open, file(None), 24), of_segment, Remedy::Retry, ENVIRONMENT, "cannot open"),
        (io(IoAction::Sync, file(None), 12), of_segment, Remedy::Reopen, ENVIRONMENT, "cannot sync"),
        (io(IoAction::Open, file(None), 13), of_segment, Remedy::Permit, ENVIRONMENT, "cannot open"),
        (
            io(IoAction::Sync, folder(), 5).in_store("store"),
            NOWHERE,
            Remedy::Reopen,
            ENVIRONMENT,
            "cannot sync store/log: ",
        ),
        (
            io(IoAction::Start, thread(), 11).in_store("/srv/pages"),
            NOWHERE,
            Remedy::Retry,
            ENVIRONMENT,
            "cannot start a thread of the store in /srv/pages: ",
        ),
        (io(IoAction::Start, thread(), 5), NOWHERE, Remedy::Permit, ENVIRONMENT, "cannot start a thread: "),
        (
            io(IoAction::Read, source(4096), 5),
            NOWHERE,
            Remedy::Permit,
            ENVIRONMENT,
            "cannot read the source of operation 4 of the batch at offset 4096: ",
        ),
        (io(IoAction::Read, source(0), 11), NOWHERE, Remedy::Retry, ENVIRONMENT, "operation 4"),
        (
            io(IoAction::Draw, IoObject::Randomness, 5),
            NOWHERE,
            Remedy::Permit,
            ENVIRONMENT,
            "cannot draw random bytes for an identity: ",
        ),
        (full(), of_segment, Remedy::FreeSpace, ENVIRONMENT, "(16384 bytes); free some space"),
        (
            full().in_store("/srv/pages"),
            of_segment,
            Remedy::FreeSpace,
            ENVIRONMENT,
            "of the store in /srv/pages (16384 bytes)",
        ),
        (
            damage.into(),
            (Some(SEGMENT), Some(8192), Some(Lsn(9))),
            Remedy::Inspect,
            DATA,
            "run `remanent verify`",
        ),
        (locked(), NOWHERE, Remedy::Retry, ENVIRONMENT, "process 5"),
        (
            locked().in_store("/srv/pages"),
            NOWHERE,
            Remedy::Retry,
            ENVIRONMENT,
            "the store in /srv/pages is open in process 5",
        ),
        (
            Error::Superseded { holder: text("process 5"), store: Some("/srv/pages".into()) },
            NOWHERE,
            Remedy::Reopen,
            ENVIRONMENT,
            "the store in /srv/pages was opened by another writer: process 5; this handle has stopped",
        ),
        (
            Error::panicked("a thread").in_store("/srv/pages"),
            NOWHERE,
            Remedy::Reopen,
            BUG,
            "a thread of the store in /srv/pages panicked, and the store has stopped",
        ),
        (
            Error::Device { reason: text("busy"), context_lost: false },
            NOWHERE,
            Remedy::Reopen,
            ENVIRONMENT,
            "device: busy",
        ),
        (lost_device(), NOWHERE, Remedy::NewProcess, ENVIRONMENT, "device: gone"),
        (Error::OutOfMemory { place: PLACE, len: 9 }, NOWHERE, Remedy::FreeSpace, ENVIRONMENT, "9 bytes"),
        (
            Error::Unavailable(Unavailable::Place { place: PLACE, reason: "no GPU" }),
            NOWHERE,
            Remedy::ChangeCall,
            ENVIRONMENT,
            "place device:1 cannot hold pages: no GPU",
        ),
        (
            Error::Unavailable(Unavailable::Device { device: text("cuda:9"), reason: text("no driver") }),
            NOWHERE,
            Remedy::ChangeCall,
            ENVIRONMENT,
            "device cuda:9 cannot be used: no driver",
        ),
        (
            Error::Diverged {
                position: Position { lsn: Lsn(9), ..Position::default() },
                survived: Some(Lsn(7)),
            },
            (None, None, Some(Lsn(9))),
            Remedy::StartOver,
            ENVIRONMENT,
            "7 is the last one",
        ),
        (
            Error::Diverged { position: Position { lsn: Lsn(9), ..Position::default() }, survived: None },
            (None, None, Some(Lsn(9))),
            Remedy::StartOver,
            ENVIRONMENT,
            "9 in incarnation 0",
        ),
        (
            archive("s3://bucket/path", ArchiveErrorKind::Bucket, "get line/7: access denied"),
            NOWHERE,
            Remedy::Permit,
            ENVIRONMENT,
            "the archive s3://bucket/path: get line/7: access denied; check the network, the credential and the URL",
        ),
        (
            archive("", ArchiveErrorKind::NoArchive, "the store has no archive"),
            NOWHERE,
            Remedy::ChangeCall,
            ENVIRONMENT,
            "the store has no archive; open the store with `Options::archive`",
        ),
        (
            archive("az://a/b", ArchiveErrorKind::Diverged, "the archive ends at 9"),
            NOWHERE,
            Remedy::StartOver,
            ENVIRONMENT,
            "restore the archive into an empty directory",
        ),
        (
            archive("az://a/b", ArchiveErrorKind::Damaged, "line/7 is damaged"),
            NOWHERE,
            Remedy::Inspect,
            ENVIRONMENT,
            "run `remanent archive verify`",
        ),
        (
            NcclError::NotFound { tried: vec![(text("libnccl.so.2"), text("no file"))] }.into(),
            NOWHERE,
            Remedy::Permit,
            ENVIRONMENT,
            "could not load the NCCL library: libnccl.so.2 (no file); install NCCL",
        ),
        (
            NcclError::TimedOut {
                rank: 0,
                ranks: 2,
                call: "ncclAllGather",
                waited: std::time::Duration::from_secs(9),
                ended: vec![1],
            }
            .into(),
            NOWHERE,
            Remedy::Retry,
            ENVIRONMENT,
            "rank 0 of 2: ncclAllGather was not complete after 9 s; ended: rank 1; restart the ranks",
        ),
        (
            NcclError::RankTaken { rank: 3 }.into(),
            NOWHERE,
            Remedy::ChangeCall,
            ENVIRONMENT,
            "rank 3 has joined already; give each process",
        ),
        (
            NixlError::NotFound { tried: vec![(text("libnixl_capi.so"), text("no file"))] }.into(),
            NOWHERE,
            Remedy::Permit,
            ENVIRONMENT,
            "could not load the NIXL library: libnixl_capi.so (no file); install NIXL",
        ),
        (
            NixlError::TimedOut {
                agent: text("a-1"),
                peer: text("b-2"),
                waited: std::time::Duration::from_secs(9),
            }
            .into(),
            NOWHERE,
            Remedy::Retry,
            ENVIRONMENT,
            "agent a-1: a transfer with b-2 was not complete after 9 s; check that the peer",
        ),
        (
            NixlError::OutOfRegion { offset: 8, len: 8, region_len: 12 }.into(),
            NOWHERE,
            Remedy::ChangeCall,
            ENVIRONMENT,
            "bytes 8..8+8 are empty or outside the region of 12 bytes; give a range within the region",
        ),
        (
            NixlError::UnexpectedAnswer { peer: text("b-2") }.into(),
            NOWHERE,
            Remedy::Permit,
            ENVIRONMENT,
            "peer b-2 sent an answer that does not match the request; check that the peer is a page server",
        ),
        (
            NixlError::NotConnected { peer: text("b-2") }.into(),
            NOWHERE,
            Remedy::Retry,
            ENVIRONMENT,
            "peer b-2 is not connected to this server of pages; connect the client to the server again",
        ),
        (Error::Poisoned(Arc::new(failed_sync())), at, Remedy::Reopen, CONTAINED, "open it again"),
        (Error::Poisoned(Arc::new(lost_device())), NOWHERE, Remedy::NewProcess, CONTAINED, "new process"),
        (Error::Poisoned(Arc::new(full())), of_segment, Remedy::Reopen, CONTAINED, "open it again"),
        (
            Error::Poisoned(Arc::new(Error::OutOfMemory { place: PLACE, len: 9 })),
            NOWHERE,
            Remedy::Reopen,
            CONTAINED,
            "open it again",
        ),
    ]
}

/// Returns the errors whose cause is the caller.
fn call_errors() -> Vec<(Error, Option<Lsn>, Remedy, &'static str)> {
    let no_store = |found| Error::NoStore { path: text("home"), found };
    let no_name = |nearest| Error::NoSuchState(NoSuchState::Name { name: text("wram"), nearest });
    let refused = |refused| (Error::Refused(refused), None, Remedy::ChangeCall);
    let with = |(error, lsn, remedy), words| (error, lsn, remedy, words);
    let change = |error, words| (error, None, Remedy::ChangeCall, words);
    let invalid = |invalid, words| (Error::Invalid(invalid), None, Remedy::ChangeCall, words);
    let retry = |error, words| (error, None, Remedy::Retry, words);
    let outside =
        NoSuchState::OutsideWindow { requested: Lsn(9), oldest: Lsn(2), newest: Lsn(7), below: vec![Lsn(1)] };
    let not_committed = NoSuchState::NotCommitted { requested: Lsn(9), newest: Lsn(7) };
    let out_of_order = Invalid::OutOfOrder { lsn: Lsn(9), expected: Lsn(7) };
    vec![
        change(Error::Forked { opener: 5 }, "process 5, of which this is a forked child"),
        change(no_store(None), "no store in home; check the path"),
        change(
            no_store(Some(text("thesis"))),
            "in home, which is not empty (it contains thesis); give an empty directory",
        ),
        change(Error::Mismatch(Mismatch::Identity { found: vec![1] }), "identity"),
        change(Error::Mismatch(Mismatch::Layout { expected: [0xCD; 32], found: Some([0xAB; 32]) }), "abab"),
        change(Error::Mismatch(Mismatch::Layout { expected: [1; 32], found: None }), "none"),
        invalid(Invalid::Option { option: "ack", reason: text("no") }, "option ack: no"),
        invalid(
            Invalid::StatePoint { found: text("12") },
            "expected lsn:N, snapshot:N or the name of a snapshot, found \"12\"",
        ),
        change(Key::new("").unwrap_err().into(), "1 to 64 bytes"),
        invalid(Invalid::Layout(LayoutError::Zero { dimension: "heads" }), "heads is 0"),
        invalid(Invalid::Operation { index: 4, reason: text("no") }, "operation 4 of the batch: no"),
        invalid(
            Invalid::LengthsDiffer { pages: [PAGE, PageId(8)], lens: [1, 2] },
            "7 and 8 are 1 and 2 bytes",
        ),
        (Error::Invalid(out_of_order), Some(Lsn(9)), Remedy::ChangeCall, "7 is the next"),
        change(Error::Limit { what: "note", found: 9, limit: 8 }, "note is 9, over the limit of 8"),
        change(Error::Limit { what: INCARNATION, found: 9, limit: 8 }, "copy its pages to a new store"),
        change(Error::UnknownPage { page: PAGE }, "no page 7"),
        change(Error::UnknownKey { key: key() }, "no page with key weights"),
        change(
            Error::OutOfBounds { page: PAGE, offset: 5, len: 4, page_len: 8 },
            "5..5+4 are outside page 7",
        ),
        change(
            Error::Taken(Taken::Key { key: key(), holder: PAGE }),
            "key weights already belongs to page 7",
        ),
        change(
            Error::Taken(Taken::Name { name: text("warm"), snapshot: SnapshotId(4) }),
            "name \"warm\" already belongs to snapshot 4",
        ),
        retry(Error::Conflict { page: PAGE, expected: Epoch(1), found: Epoch(2) }, "at epoch 2"),
        retry(Error::Leased { page: PAGE }, "page 7 is leased or pinned"),
        retry(Error::Refused(Refused::MemoryInUse { len: 9, page: PAGE }), "it is in use by page 7"),
        with(refused(Refused::Memory { len: 9, reason: text("no") }), "9 bytes"),
        with(refused(Refused::Hint { place: PLACE, reason: "no" }), "hints"),
        with(refused(Refused::Stream { stream: 1, reason: "no" }), "0x1"),
        (
            Error::OverBudget { place: PLACE, requested: 9, available: 8, budget: 10 },
            None,
            Remedy::FreeSpace,
            "9 bytes in place device:1 are over the budget: 8 of 10 left",
        ),
        change(Error::NoSuchState(NoSuchState::Snapshot { snapshot: SnapshotId(4) }), "no snapshot 4"),
        change(no_name(Some(text("warm"))), "there is no snapshot named \"wram\"; did you mean \"warm\"?"),
        change(no_name(None), "there is no snapshot named \"wram\"; list"),
        (
            Error::NoSuchState(outside),
            Some(Lsn(9)),
            Remedy::ChangeCall,
            "9 is outside the retained range 2..=7",
        ),
        (Error::NoSuchState(not_committed), Some(Lsn(9)), Remedy::ChangeCall, "9 is not committed yet"),
        (
            Error::Overtaken { lsn: Lsn(9), snapshot: Some(SnapshotId(4)) },
            Some(Lsn(9)),
            Remedy::StartOver,
            "start over from snapshot 4",
        ),
        (Error::Overtaken { lsn: Lsn(9), snapshot: None }, Some(Lsn(9)), Remedy::StartOver, "batch 9"),
        change(Error::Closed, "closed"),
    ]
}

/// Returns the variants of the enumeration `name` in a source file, and the documentation of each.
fn documented<'s>(source: &'s str, name: &str) -> BTreeMap<&'s str, String> {
    let body = source.split(&format!("pub enum {name} {{\n")).nth(1).expect("it is declared in this file");
    let body = body.split("\n}\n").next().unwrap();
    let (mut variants, mut doc) = (BTreeMap::new(), String::new());
    for line in body.lines().filter_map(|line| line.strip_prefix("    ")) {
        match line.strip_prefix("/// ").or(line.strip_prefix("///")) {
            Some(more) => doc.extend([more, " "]),
            None if line.starts_with(char::is_uppercase) => {
                let end = line.find(|c: char| !c.is_alphanumeric()).unwrap_or(line.len());
                variants.insert(&line[..end], std::mem::take(&mut doc));
            }
            None => {}
        }
    }
    variants
}

/// Returns the name of an error's variant, and the name of its kind if the variant has kinds.
fn names(error: &Error) -> (String, Option<String>) {
    let debug = format!("{error:?}");
    let mut words = debug.split(|c: char| !c.is_alphanumeric()).map(str::to_owned);
    let variant = words.next().unwrap();
    let kind = match error {
        Error::Io { object, .. } => Some(format!("{object:?}").split(' ').next().unwrap().to_owned()),
        Error::Mismatch(_)
        | Error::Invalid(_)
        | Error::Taken(_)
        | Error::Refused(_)
        | Error::Unavailable(_)
        | Error::NoSuchState(_) => words.next(),
        _ => None,
    };
    (variant, kind)
}

#[test]
fn every_error_names_location_cause_state_and_remedy() {
    let calls = call_errors().into_iter();
    let calls = calls.map(|(error, lsn, remedy, words)| (error, (None, None, lsn), remedy, CALLER, words));
    let rows: Vec<Row> = system_errors().into_iter().chain(calls).collect();
    let variants = documented(include_str!("mod.rs"), "Error");
    let (mut seen, mut advised) = (BTreeSet::new(), BTreeMap::new());
    for (error, location, remedy, cause, words) in &rows {
        assert_eq!((error.file(), error.offset(), error.lsn()), *location, "{error}");
        assert_eq!(error.remedy(), *remedy, "{error}");
        let message = error.to_string();
        assert!(message.contains(words), "{message:?} does not state {words:?}");
        assert!(!message.starts_with(char::is_uppercase) && !message.ends_with('.'), "{message}");
        // The remedy is stated, and the message ends with it or with a suggestion.
        let advice = error.advice();
        assert!(message.ends_with(&*advice) || message.ends_with("did you mean \"warm\"?"), "{message}");
        assert!(advice.len() > 12 && !advice.contains("change the call"), "{error}: {advice}");
        assert!(!advice.ends_with('.') && !advice.starts_with(char::is_uppercase), "{error}: {advice}");
        // The documentation states the cause and the store afterwards.
        let (variant, kind) = names(error);
        let doc = &variants[&*variant];
        assert!(doc.contains(&format!("Caused by {cause}")), "{variant}: {doc}");
        let is_poisoned = matches!(remedy, Remedy::Reopen | Remedy::NewProcess);
        let state = match error {
            Error::Io { .. } => "The store is unchanged if the remedy is to retry or to permit access",
            _ if is_poisoned => "The store is poisoned. ",
            _ => "The store is unchanged. ",
        };
        assert!(doc.ends_with(state) || doc.contains(state), "{variant}: {doc}");
        if variant != "Poisoned" {
            let name = (variant.clone(), kind.clone().filter(|_| variant != "Io"));
            advised.entry(advice).or_insert_with(BTreeSet::new).insert(name);
        }
        seen.insert((variant, kind));
    }
    // Except for failed system calls, two kinds of errors never share the text of a remedy.
    for (advice, names) in advised {
        assert!(names.len() == 1, "{advice}: {names:?}");
    }
    // Every variant and every kind has a row.
    for variant in variants.keys() {
        assert!(seen.iter().any(|(seen, _)| seen == variant), "{variant} has no row");
    }
    let kinds = ["IoObject", "Mismatch", "Invalid", "Taken", "Refused", "Unavailable", "NoSuchState"];
    for name in kinds {
        let variant = if name == "IoObject" { "Io" } else { name };
        for kind in documented(include_str!("kinds.rs"), name).into_keys() {
            assert!(seen.contains(&(variant.to_owned(), Some(kind.to_owned()))), "{name}::{kind} has no row");
        }
    }
}
