//! Runs the fuzz targets that take a whole store, without the fuzzer. They run on every input in the
//! repository, and on stores and histories that would make them fail if the engine were wrong.

#[path = "../../fuzz/src/directories.rs"]
mod directories;
#[path = "../../fuzz/src/histories.rs"]
mod histories;

use std::path::{Path, PathBuf};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::archive::Files;
use crate::damage::Victim;
use crate::model::draw::history;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

/// Returns all inputs in these folders of `fuzz/`.
fn inputs(folders: &[&str]) -> Vec<Vec<u8>> {
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(fuzz().join(folder)).unwrap());
    files.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn inputs_of_the_repository_pass_the_target_for_directories() {
    let inputs = inputs(&["seeds/rebuild", "seeds/directory", "found"]);
    assert!(inputs.len() > 8, "only {} inputs were found", inputs.len());
    inputs.iter().for_each(|input| directories::directory(input));
}

#[test]
fn inputs_of_the_repository_pass_the_target_for_histories() {
    let inputs = inputs(&["seeds/history", "found"]);
    assert!(inputs.len() > 8, "only {} inputs were found", inputs.len());
    inputs.iter().for_each(|input| histories::history(input));
}

/// The stores also serve as the fuzzer's seeds. `REMANENT_GOLDEN=write` writes them to the repository. Their
/// ids are random, so the seeds in the repository are other stores.
#[test]
fn sound_stores_open_in_directory_fuzz_target() {
    let write = std::env::var_os("REMANENT_GOLDEN").is_some_and(|value| value == "write");
    let victims =
        [("closed", Victim::closed()), ("killed", Victim::killed()), ("reopened", Victim::reopened())];
    for (name, victim) in victims {
        let archive = victim.files.to_archive();
        assert!(directories::examine(&Files::from_archive(&archive)), "{name}: a sound store opens");
        if write {
            std::fs::write(fuzz().join(format!("seeds/directory/{name}.bin")), archive).unwrap();
        }
    }
}

#[test]
fn crash_during_any_action_keeps_acknowledged_work() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let (mut crashes, mut lost) = (0, 0);
    for _ in 0..40 {
        let actions = history().new_tree(&mut runner).unwrap().current();
        let (more_crashes, more_lost) = histories::crashes(&actions);
        (crashes, lost) = (crashes + more_crashes, lost + more_lost);
    }
    // A crash between two actions loses no batch, because no batch is in flight.
    assert!(crashes >= 50 && lost >= 10, "{crashes} crashes, of which {lost} took batches");
}
