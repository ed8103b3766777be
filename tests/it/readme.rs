//! README.md names files and tests as its evidence: they must be there.

use std::fs;
use std::path::Path;

use super::layout::read;

/// Names in backticks that look like a file of the repository or like a test.
fn evidence(page: &str) -> Vec<&str> {
    let prose = page.split("```").step_by(2);
    let names = prose.flat_map(|text| text.split('`').skip(1).step_by(2));
    let file = |name: &str| name.contains('/') || name.ends_with(".md") || name.starts_with("LICENSE");
    let test = |name: &str| name.matches('_').count() >= 2 && !name.contains([':', ' ', '(']);
    names.filter(|name| file(name) || test(name)).collect()
}

/// The named evidence that is not there.
fn missing<'a>(page: &'a str, root: &Path, tests: &str) -> Vec<&'a str> {
    let names = evidence(page).into_iter();
    names.filter(|name| !root.join(name).exists() && !tests.contains(&format!("fn {name}("))).collect()
}

#[test]
fn what_the_readme_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("README.md")).expect("there is a README");
    let folders = ["tests/it", "format/tests", "tools/tests/it"];
    let tests: String = folders.into_iter().flat_map(|folder| read(folder).into_values()).collect();
    assert!(evidence(&page).len() > 5, "the page's evidence is not recognized");
    assert_eq!(missing(&page, root, &tests), [""; 0]);
}

#[test]
fn evidence_that_is_missing_is_found() {
    let page =
        "See `src/gone.rs`, `README.md`, `a_test_that_is` and `one_that_is_not`.\n```\n`a/b`\n```\n`Store`";
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(missing(page, root, "fn a_test_that_is() {}"), ["src/gone.rs", "one_that_is_not"]);
}
