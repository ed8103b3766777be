//! Checks that the list of `tests/defences` matches the sources: each listed piece of code occurs in its
//! file, and its test exists. `tests/defences` itself checks that the tests fail, in a copy of the sources
//! with switches.

#[path = "../defences/src/list/mod.rs"]
mod list;

use std::collections::BTreeSet;
use std::path::Path;

use list::{Defence, all};

use super::layout::read;

#[test]
fn every_defence_has_its_line_and_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["tests/it", "format/tests", "format/src", "src"];
    let tests: String = folders.into_iter().flat_map(|folder| read(folder).into_values()).collect();
    let mut names = BTreeSet::new();
    let (mut places, mut lost) = (Vec::new(), Vec::new());
    for Defence { name, file, code, instead, killed_by } in all() {
        assert!(names.insert(name), "{name} is listed twice");
        let source = std::fs::read_to_string(root.join(file)).unwrap();
        let found: Vec<usize> = source.match_indices(code).map(|(at, _)| at).collect();
        match found[..] {
            [at] => places.push((file, at..at + code.len(), name)),
            _ => lost.push(format!("{name}: its code is {} times in {file}, not once:\n{code}", found.len())),
        }
        assert_ne!(code, instead, "{name}: switching it off changes nothing");
        let test = killed_by.name.rsplit("::").next().unwrap();
        // A property test has parameters and is indented twice.
        let is_declared = ["", "    ", "        "]
            .iter()
            .any(|indent| tests.contains(&format!("#[test]\n{indent}fn {test}(")));
        assert!(is_declared, "{name}: there is no test {test}");
    }
    assert!(lost.is_empty(), "{}", lost.join("\n"));
    let page = std::fs::read_to_string(root.join("tests/README.md")).unwrap();
    let count = names.len();
    assert!(
        page.contains(&format!("| {count} defences;")),
        "tests/README.md does not state the number {count}"
    );
    // Each defence is wrapped in its own switch, and a switch may contain another one.
    places.sort_unstable_by_key(|(file, code, _)| (*file, code.start));
    for pair in places.windows(2) {
        let [(file, code, name), (next_file, next_code, next)] = pair else { unreachable!("pairs") };
        let is_apart = code.end <= next_code.start || next_code.end <= code.end;
        assert!(file != next_file || is_apart, "{name} and {next} overlap in {file}");
    }
}
