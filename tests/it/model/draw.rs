//! Generates random histories.

use proptest::bool::weighted;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use remanent::batch::Width;
use remanent::{Place, Value};

use super::history::{Action, Bad, KEYS, MoveCall, NAMES, SNAPSHOT_NAMES, Step};

/// Generates a whole history.
pub fn history() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        16 => vec(step(), 0..10).prop_map(Action::Commit),
        3 => (any::<bool>(), weighted(0.3)).prop_map(|(exact, is_published)| Action::Snapshot { exact, is_published }),
        1 => (0..SNAPSHOT_NAMES.len(), weighted(0.3)).prop_map(|(name, is_published)| Action::Name { name, is_published }),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(pick, is_alone)| Action::GiveUp { pick, is_alone }),
        1 => any::<u8>().prop_map(Action::Prune),
        1 => Just(Action::Scrub),
        1 => any::<usize>().prop_map(Action::Fork),
        1 => any::<usize>().prop_map(Action::Restore),
        1 => any::<usize>().prop_map(Action::RestoreTo),
        2 => any::<usize>().prop_map(Action::Look),
        3 => (any::<usize>(), any::<u16>(), any::<u16>()).prop_map(|(page, from, to)| Action::Read(page, from, to)),
        4 => (page(), move_call()).prop_map(|(page, call)| Action::Call(page, call)),
        3 => (page(), any::<bool>(), any::<u16>(), any::<u16>())
            .prop_map(|(page, is_digest, at, count)| Action::Capture { page, is_digest, at, count }),
        1 => Just(Action::Reopen),
        3 => any::<u64>().prop_map(Action::Crash),
    ];
    vec(action, 1..50)
}

fn move_call() -> impl Strategy<Value = MoveCall> {
    prop_oneof![
        2 => place().prop_map(MoveCall::Ensure),
        1 => place().prop_map(MoveCall::Prefetch),
        1 => Just(MoveCall::Promote),
        2 => Just(MoveCall::Demote),
    ]
}

fn page() -> impl Strategy<Value = usize> {
    any::<usize>()
}

fn name() -> impl Strategy<Value = usize> {
    0..NAMES.len()
}

/// Generates a length. Most lengths are short, and some pages and writes need several groups or their own
/// segment.
fn len() -> impl Strategy<Value = u16> {
    prop_oneof![2 => Just(0u16), 20 => 1..600u16, 2 => 600..20_000u16]
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::I64),
        any::<u64>().prop_map(Value::U64),
        any::<u64>().prop_map(|bits| Value::F64(f64::from_bits(bits))),
        "\\PC{0,12}".prop_map(Value::String),
        vec(any::<u8>(), 0..40).prop_map(Value::Bytes),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(Value::List),
            proptest::collection::btree_map("[a-z]{0,3}", inner, 0..3).prop_map(Value::Map),
        ]
    })
}

fn place() -> impl Strategy<Value = Place> {
    select(vec![Place::Device(0), Place::Device(7), Place::Pinned, Place::Host, Place::Unified, Place::Disk])
}

fn width() -> impl Strategy<Value = Width> {
    select(vec![Width::W1, Width::W2, Width::W4, Width::W8, Width::W16])
}

fn step() -> impl Strategy<Value = Step> {
    let key = proptest::option::weighted(0.4, 0..KEYS.len());
    let metadata = proptest::option::of((name(), value()));
    let bytes = prop_oneof![9 => vec(any::<u8>(), 0..200), 1 => vec(any::<u8>(), 4000..9000)];
    prop_oneof![
        6 => (len(), place(), key, metadata)
            .prop_map(|(len, place, key, metadata)| Step::Create { len, place, key, metadata }),
        2 => page().prop_map(|page| Step::Clone { page }),
        6 => (page(), any::<u16>(), bytes).prop_map(|(page, at, bytes)| Step::Write { page, at, bytes }),
        4 => (page(), width(), any::<u16>(), vec(any::<bool>(), 0..70), any::<u8>())
            .prop_map(|(page, width, at, mask, seed)| Step::Masked { page, width, at, mask, seed }),
        4 => (page(), width(), vec(any::<u16>(), 0..30), any::<u8>())
            .prop_map(|(page, width, indices, seed)| Step::Scatter { page, width, indices, seed }),
        3 => (page(), width(), any::<u16>(), any::<u16>(), any::<u8>())
            .prop_map(|(page, width, at, count, seed)| Step::Fill { page, width, at, count, seed }),
        3 => (page(), len()).prop_map(|(page, len)| Step::Resize { page, len }),
        2 => (page(), 4096..20_000u16, any::<u8>())
            .prop_map(|(page, len, seed)| Step::Replace { page, len, seed }),
        3 => page().prop_map(|page| Step::Delete { page }),
        4 => (page(), place()).prop_map(|(page, place)| Step::Move { page, place }),
        2 => (page(), name(), value())
            .prop_map(|(page, name, value)| Step::SetMetadata { page, name, value }),
        1 => (page(), name()).prop_map(|(page, name)| Step::RemoveMetadata { page, name }),
        2 => (name(), value()).prop_map(|(name, value)| Step::SetRoot { name, value }),
        1 => name().prop_map(|name| Step::RemoveRoot { name }),
        1 => "\\PC{0,20}".prop_map(Step::Note),
        2 => page().prop_map(|page| Step::Expect { page }),
        1 => page().prop_map(|page| Step::ExpectGone { page }),
        2 => bad().prop_map(Step::Bad),
    ]
}

fn bad() -> impl Strategy<Value = Bad> {
    prop_oneof![
        3 => (page(), prop_oneof![Just(1i8), Just(-1)]).prop_map(|(page, off_by)| Bad::Conflict { page, off_by }),
        1 => (page(), any::<u8>()).prop_map(|(page, past)| Bad::WriteOutside { page, past }),
        1 => page().prop_map(|page| Bad::FillOutside { page }),
        1 => (page(), width()).prop_map(|(page, width)| Bad::ScatterOutside { page, width }),
        1 => (page(), width()).prop_map(|(page, width)| Bad::MaskedOutside { page, width }),
        1 => page().prop_map(|page| Bad::SameElementTwice { page }),
        1 => page().prop_map(|page| Bad::PatternOfThree { page }),
        1 => page().prop_map(|page| Bad::FillNotWhole { page }),
        1 => page().prop_map(|page| Bad::MaskTooShort { page }),
        1 => page().prop_map(|page| Bad::ValuesTooFew { page }),
        3 => (any::<usize>(), 0..7u8).prop_map(|(pick, what)| Bad::GonePage { pick, what }),
        2 => any::<usize>().prop_map(|pick| Bad::KeyTaken { pick }),
        1 => Just(Bad::PlaceNowhere),
        1 => page().prop_map(|page| Bad::MoveNowhere { page }),
        1 => Just(Bad::TooLong),
        1 => page().prop_map(|page| Bad::LongName { page }),
        1 => page().prop_map(|page| Bad::LongMetadata { page }),
        1 => Just(Bad::DeepValue),
        1 => Just(Bad::LongNote),
    ]
}
