//! Histories: a list of actions, with raw numbers that the model makes fit its state. `draw.rs` draws them at
//! random; a fuzzer's bytes make them here.

use arbitrary::{Arbitrary, Result, Unstructured};
use remanent::batch::Width;
use remanent::{Place, Value};

/// Keys that pages may have: few, so that they are taken, freed and given again.
pub const KEYS: [&str; 4] =
    ["a", "weights", "\u{1F511}", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"];
/// Names of metadata and root entries.
pub const NAMES: [&str; 3] = ["step", "dtype", ""];

/// Names that snapshots may have.
pub const SNAPSHOT_NAMES: [&str; 3] = ["first", "before tuning", "\u{1F4CC}"];

/// An action on a store.
#[derive(Arbitrary, Clone, Debug)]
pub enum Action {
    Commit(Vec<Step>),
    /// A snapshot; one that is only published is read back when it already stands.
    Snapshot {
        exact: bool,
        is_published: bool,
    },
    /// A snapshot with one of the names.
    Name {
        #[arbitrary(with = snapshot_name)]
        name: usize,
        is_published: bool,
    },
    /// One of the names that there are is given up. All snapshots are removed that nothing keeps, or its own
    /// alone.
    GiveUp {
        #[arbitrary(with = pick)]
        pick: usize,
        is_alone: bool,
    },
    /// One to three of the newest snapshots are kept, and those with names.
    Prune(u8),
    /// All that lies on disk is read, and nothing is wrong with it.
    Scrub,
    /// A restore of one of the kept snapshots.
    Restore(#[arbitrary(with = pick)] usize),
    /// A restore of the state after any batch of the window.
    RestoreTo(#[arbitrary(with = pick)] usize),
    /// A look at the state after any batch.
    Look(#[arbitrary(with = pick)] usize),
    /// A new store of the state after any batch of the window.
    Fork(#[arbitrary(with = pick)] usize),
    /// A page, and two ends of a range.
    Read(#[arbitrary(with = pick)] usize, u16, u16),
    /// A page moves by a call of its own.
    #[arbitrary(skip)]
    Call(usize, MoveCall),
    /// A working copy of a page is captured, in which some bytes from a place on are others.
    #[arbitrary(skip)]
    Capture {
        page: usize,
        is_digest: bool,
        at: u16,
        count: u16,
    },
    Reopen,
    /// The number chooses among what a crash in the middle of the action before could leave.
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

/// The tiers of stores that have them, with more room than any history needs: what moves is told to.
pub const TIERS: [Place; 4] = [Place::Device(0), Place::Pinned, Place::Host, Place::Disk];

/// An operation of a batch. Pages are picked among those that live at that point of the batch, those that
/// it creates included; offsets and lengths are cut to the page.
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
    /// All bytes of a page, and its new length: enough of them to be written ahead of the batch.
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
    /// A precondition that holds.
    Expect {
        #[arbitrary(with = pick)]
        page: usize,
    },
    /// A precondition that holds: a page that is gone, or never was, is at epoch 0.
    ExpectGone {
        #[arbitrary(with = pick)]
        page: usize,
    },
    Bad(Bad),
}

/// A step that makes a batch be refused.
#[derive(Arbitrary, Clone, Debug)]
pub enum Bad {
    /// A precondition that does not hold.
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

/// The choice of one of any number: a byte is enough.
fn pick(raw: &mut Unstructured) -> Result<usize> {
    u8::arbitrary(raw).map(usize::from)
}

/// Draws a length that is mostly short, like [`super::draw`].
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

/// Draws a value with at most this number of levels.
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
