//! Histories, which are lists of actions with arbitrary numbers. The model reduces these numbers to valid
//! ones. `draw.rs` generates histories randomly, and this file generates them from a fuzzer's bytes.

use arbitrary::{Arbitrary, Result, Unstructured};
use remanent::batch::Width;
use remanent::{Place, Value};

/// Keys of pages. There are only a few, so that keys are often used, released and reused.
pub const KEYS: [&str; 4] =
    ["a", "weights", "\u{1F511}", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"];
/// Names of metadata and root entries.
pub const NAMES: [&str; 3] = ["step", "dtype", ""];

/// Names of snapshots.
pub const SNAPSHOT_NAMES: [&str; 3] = ["first", "before tuning", "\u{1F4CC}"];

/// An action on a store.
#[derive(Arbitrary, Clone, Debug)]
pub enum Action {
    Commit(Vec<Step>),
    /// Takes a snapshot. If the snapshot is only published, it is read back after the model already contains
    /// it.
    Snapshot {
        exact: bool,
        is_published: bool,
    },
    /// Takes a snapshot with one of the names.
    Name {
        #[arbitrary(with = snapshot_name)]
        name: usize,
        is_published: bool,
    },
    /// Releases one of the existing names. Removes all snapshots that are no longer kept, or only the named
    /// one.
    GiveUp {
        #[arbitrary(with = pick)]
        pick: usize,
        is_alone: bool,
    },
    /// Keeps one to three of the newest snapshots, and all named snapshots.
    Prune(u8),
    /// Reads all files, which must not be damaged.
    Scrub,
    /// Restores one of the kept snapshots.
    Restore(#[arbitrary(with = pick)] usize),
    /// Restores the state after any restorable batch.
    RestoreTo(#[arbitrary(with = pick)] usize),
    /// Opens a view of the state after any batch.
    Look(#[arbitrary(with = pick)] usize),
    /// Forks the state after any restorable batch.
    Fork(#[arbitrary(with = pick)] usize),
    /// Reads the range of a page between two offsets.
    Read(#[arbitrary(with = pick)] usize, u16, u16),
    /// Moves a page with a separate call.
    #[arbitrary(skip)]
    Call(usize, MoveCall),
    /// Captures a working copy of a page in which some bytes from an offset on were changed.
    #[arbitrary(skip)]
    Capture {
        page: usize,
        is_digest: bool,
        at: u16,
        count: u16,
    },
    Reopen,
    /// Crashes. The number selects one of the states that a crash during the previous action could leave.
    Crash(u64),
}

/// A call that moves a page.
#[derive(Clone, Copy, Debug)]
pub enum MoveCall {
    Ensure(Place),
    Prefetch(Place),
    Promote,
    Demote,
}

/// The tiers of stores that have tiers. They are larger than any history needs, so pages move only on
/// request.
pub const TIERS: [Place; 4] = [Place::Device(0), Place::Pinned, Place::Host, Place::Disk];

/// An operation of a batch. Pages are selected from those that exist at this point of the batch, including
/// those that the batch creates. Offsets and lengths are limited to the page.
#[derive(Arbitrary, Clone, Debug)]
pub enum Step {
    Create {
        #[arbitrary(with = len)]
        len: u16,
        #[arbitrary(with = place)]
        place: Place,
        #[arbitrary(with = key)]
        key: Option<usize>,
        #[arbitrary(with = entry)]
        metadata: Option<(usize, Value)>,
    },
    Clone {
        #[arbitrary(with = pick)]
        page: usize,
    },
    Write {
        #[arbitrary(with = pick)]
        page: usize,
        at: u16,
        bytes: Vec<u8>,
    },
    Masked {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = width)]
        width: Width,
        at: u16,
        mask: Vec<bool>,
        seed: u8,
    },
    Scatter {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = width)]
        width: Width,
        indices: Vec<u16>,
        seed: u8,
    },
    Fill {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = width)]
        width: Width,
        at: u16,
        count: u16,
        seed: u8,
    },
    Resize {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = len)]
        len: u16,
    },
    /// Replaces all bytes of a page, which is then long enough for an image file.
    Replace {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = len)]
        len: u16,
        seed: u8,
    },
    Delete {
        #[arbitrary(with = pick)]
        page: usize,
    },
    Move {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = place)]
        place: Place,
    },
    SetMetadata {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = name)]
        name: usize,
        #[arbitrary(with = value)]
        value: Value,
    },
    RemoveMetadata {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = name)]
        name: usize,
    },
    SetRoot {
        #[arbitrary(with = name)]
        name: usize,
        #[arbitrary(with = value)]
        value: Value,
    },
    RemoveRoot {
        #[arbitrary(with = name)]
        name: usize,
    },
    Note(String),
    /// A precondition that is met.
    Expect {
        #[arbitrary(with = pick)]
        page: usize,
    },
    /// A precondition that is met. A page that was deleted or never existed has epoch 0.
    ExpectGone {
        #[arbitrary(with = pick)]
        page: usize,
    },
    Bad(Bad),
}

/// An invalid step that makes the batch fail.
#[derive(Arbitrary, Clone, Debug)]
pub enum Bad {
    /// A precondition that is not met.
    Conflict {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = off_by)]
        off_by: i8,
    },
    WriteOutside {
        #[arbitrary(with = pick)]
        page: usize,
        past: u8,
    },
    FillOutside {
        #[arbitrary(with = pick)]
        page: usize,
    },
    ScatterOutside {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = width)]
        width: Width,
    },
    MaskedOutside {
        #[arbitrary(with = pick)]
        page: usize,
        #[arbitrary(with = width)]
        width: Width,
    },
    SameElementTwice {
        #[arbitrary(with = pick)]
        page: usize,
    },
    PatternOfThree {
        #[arbitrary(with = pick)]
        page: usize,
    },
    FillNotWhole {
        #[arbitrary(with = pick)]
        page: usize,
    },
    MaskTooShort {
        #[arbitrary(with = pick)]
        page: usize,
    },
    ValuesTooFew {
        #[arbitrary(with = pick)]
        page: usize,
    },
    GonePage {
        #[arbitrary(with = pick)]
        pick: usize,
        what: u8,
    },
    KeyTaken {
        #[arbitrary(with = pick)]
        pick: usize,
    },
    PlaceNowhere,
    MoveNowhere {
        #[arbitrary(with = pick)]
        page: usize,
    },
    TooLong,
    LongName {
        #[arbitrary(with = pick)]
        page: usize,
    },
    LongMetadata {
        #[arbitrary(with = pick)]
        page: usize,
    },
    DeepValue,
    LongNote,
}

/// Selects one of any number of items. One byte of input suffices.
fn pick(raw: &mut Unstructured) -> Result<usize> {
    u8::arbitrary(raw).map(usize::from)
}

/// Generates a length that is mostly short, as [`super::draw`] does.
fn len(raw: &mut Unstructured) -> Result<u16> {
    let len = u16::arbitrary(raw)?;
    Ok(if len.is_multiple_of(8) { len % 20_000 } else { len % 600 })
}

fn place(raw: &mut Unstructured) -> Result<Place> {
    let places =
        [Place::Device(0), Place::Device(7), Place::Pinned, Place::Host, Place::Unified, Place::Disk];
    raw.choose(&places).copied()
}

fn width(raw: &mut Unstructured) -> Result<Width> {
    raw.choose(&[Width::W1, Width::W2, Width::W4, Width::W8, Width::W16]).copied()
}

fn key(raw: &mut Unstructured) -> Result<Option<usize>> {
    Ok(if raw.arbitrary()? { Some(raw.choose_index(KEYS.len())?) } else { None })
}

fn name(raw: &mut Unstructured) -> Result<usize> {
    raw.choose_index(NAMES.len())
}

fn snapshot_name(raw: &mut Unstructured) -> Result<usize> {
    raw.choose_index(SNAPSHOT_NAMES.len())
}

fn entry(raw: &mut Unstructured) -> Result<Option<(usize, Value)>> {
    Ok(if raw.arbitrary()? { Some((name(raw)?, value(raw)?)) } else { None })
}

fn off_by(raw: &mut Unstructured) -> Result<i8> {
    Ok(if raw.arbitrary()? { 1 } else { -1 })
}

fn value(raw: &mut Unstructured) -> Result<Value> {
    value_within(raw, 3)
}

/// Generates a value with at most this number of nested levels.
fn value_within(raw: &mut Unstructured, levels: u32) -> Result<Value> {
    let kinds = if levels == 0 { 7 } else { 9 };
    Ok(match raw.int_in_range(0..=kinds - 1)? {
        0 => Value::Null,
        1 => Value::Bool(raw.arbitrary()?),
        2 => Value::I64(raw.arbitrary()?),
        3 => Value::U64(raw.arbitrary()?),
        4 => Value::F64(f64::from_bits(raw.arbitrary()?)),
        5 => Value::String(raw.arbitrary()?),
        6 => Value::Bytes(raw.arbitrary()?),
        7 => {
            let count = raw.int_in_range(0..=2)?;
            Value::List((0..count).map(|_| value_within(raw, levels - 1)).collect::<Result<_>>()?)
        }
        _ => {
            let count = raw.int_in_range(0..=2)?;
            let entry = |_| Ok((raw.arbitrary()?, value_within(raw, levels - 1)?));
            Value::Map((0..count).map(entry).collect::<Result<_>>()?)
        }
    })
}
