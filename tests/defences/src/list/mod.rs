//! The list: every defence, the code that remains without it, and the test that then fails.
//!
//! A row names a piece of the sources by its text, which occurs once in its file, and the text that replaces
//! it while the defence is off: usually nothing for a statement, the weakest answer for a condition. A change
//! that adds a defence to the store adds a row here. A defence that another one backs up is not on the list,
//! because switching it off alone shows nothing.

mod durable;
mod log;
mod memory;
mod open;
mod process;
mod reads;
mod recovery;
mod salvage;
mod structures;
mod tiers;

/// A defence, and how it is switched off.
pub struct Defence {
    /// The defence's name, which is unique.
    pub name: &'static str,
    /// The source file, from the root of the repository.
    pub file: &'static str,
    /// The defence as it is written in the source: a statement or an expression.
    pub code: &'static str,
    /// The code that replaces it while it is off.
    pub instead: &'static str,
    /// The test that fails without it.
    pub killed_by: Test,
}

/// A test, by its binary and its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Test {
    /// The name of the binary without its hash: `it`, `golden`, `stores`, `remanent`, `remanent_format`.
    pub binary: &'static str,
    /// The name of the test in the binary.
    pub name: &'static str,
}

/// Returns a row of the list.
const fn defence(
    name: &'static str,
    file: &'static str,
    code: &'static str,
    instead: &'static str,
    killed_by: Test,
) -> Defence {
    Defence { name, file, code, instead, killed_by }
}

/// Returns a check that is a statement of its own, and is removed as a whole.
const fn check(name: &'static str, file: &'static str, code: &'static str, killed_by: Test) -> Defence {
    defence(name, file, code, "", killed_by)
}

/// Returns a condition under which a call or file is refused; switched off, it is always false.
const fn refusal(name: &'static str, file: &'static str, code: &'static str, killed_by: Test) -> Defence {
    defence(name, file, code, "false", killed_by)
}

/// Returns a test of the engine, in `tests/it`.
const fn it(name: &'static str) -> Test {
    Test { binary: "it", name }
}

/// Returns a unit test of the engine.
const fn unit(name: &'static str) -> Test {
    Test { binary: "remanent", name }
}

/// Returns a test of the format crate over whole stores, in `format/tests/stores.rs`.
const fn stores(name: &'static str) -> Test {
    Test { binary: "stores", name }
}

/// The golden files of damaged structures: each names the defect that must be found.
const GOLDEN: Test = Test { binary: "golden", name: "every_defect_has_a_message" };

/// All defences of the list.
pub fn all() -> impl Iterator<Item = &'static Defence> {
    [
        structures::LIST,
        log::LIST,
        salvage::LIST,
        recovery::LIST,
        durable::LIST,
        memory::LIST,
        open::LIST,
        process::LIST,
        reads::LIST,
        tiers::LIST,
    ]
    .into_iter()
    .flatten()
}
