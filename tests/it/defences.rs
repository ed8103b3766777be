//! The list of `tests/defences` fits the sources: each defence is found where the list says, and its test exists.
//! That the tests go red is seen there, in a copy of the sources that has the switches.

#[path = "../defences/src/list/mod.rs"]
mod list;

use std::collections::BTreeSet;
use std::path::Path;

use list::{Defence, all};

use super::floors::read;

#[test]
fn every_defence_is_where_the_list_says_and_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["tests/it", "format/tests"];
    let tests: String = folders.into_iter().flat_map(|folder| read(folder).into_values()).collect();
    let mut names = BTreeSet::new();
    for Defence { name, file, code, instead, killed_by } in all() {
        assert!(names.insert(name), "{name}: there are two of it");
        let found = std::fs::read_to_string(root.join(file)).unwrap().matches(code).count();
        assert_eq!(found, 1, "{name}: its code must be found once in {file}:\n{code}");
        assert_ne!(code, instead, "{name}: without it nothing is different");
        let test = killed_by.name.rsplit("::").next().unwrap();
        let declared = format!("#[test]\nfn {test}()");
        assert!(tests.contains(&declared), "{name}: there is no test {test}");
    }
    assert!(names.len() >= 100, "{} defences", names.len());
}
