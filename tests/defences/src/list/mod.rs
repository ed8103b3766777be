//! The list of all defences. Each row contains the code that remains without the defence, and the test that
//! then fails.
//!
//! A row names a piece of source code by its text, which occurs once in its file, and the text that replaces
//! it while the defence is disabled: usually nothing for a statement, and the weakest result for a condition.
//! A change that adds a defence to the store adds a row here. A defence that another one backs up is not on
//! the list, because disabling it alone has no effect.

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

/// A defence, and how to disable it.
pub struct Defence {
    /// The unique name of the defence.
    pub name: &'static str,
    /// The path of the source file, relative to the root of the repository.
    pub file: &'static str,
    /// The defence as written in the source: a statement or an expression.
    pub code: &'static str,
    /// The code that replaces the defence while it is disabled.
    pub instead: &'static str,
    /// The test that fails without the defence.
    pub killed_by: Test,
}

/// A test, identified by its binary and its name.
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

/// Returns a check that is a complete statement and is removed when disabled.
const fn check(name: &'static str, file: &'static str, code: &'static str, killed_by: Test) -> Defence {
    defence(name, file, code, "", killed_by)
}

/// Returns a condition under which a call or a file is rejected. When disabled, the condition is always
/// false.
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

/// The golden files of damaged structures. Each file names the defect that must be detected.
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
