//! The user documentation refers to files and tests as evidence, contains links, and states numbers about tests. All of
//! them are compared with the repository.

use std::fs;
use std::path::Path;

use super::layout::read;

/// The pages whose references and links are checked.
const PAGES: [&str; 8] = [
    "README.md",
    "docs/guarantees.md",
    "docs/guides/training.md",
    "docs/guides/kv-cache.md",
    "docs/guides/weights.md",
    "docs/guides/rust-service.md",
    "CHANGELOG.md",
    "SECURITY.md",
];

/// Numbers about tests: the page, the sentence with the number, the test, and the code that the sentence describes.
const NUMBERS: [(&str, &str, &str, &str); 4] = [
    (
        "docs/guarantees.md",
        "at least 90,000 crash images",
        "tests/it/rule_model/mod.rs",
        "verdict.images >= 90_000",
    ),
    ("docs/guarantees.md", "234 kills", "tests/it/kill/mod.rs", "const KILLS_A_ROUND: usize = 234;"),
    ("docs/guarantees.md", "nine phases", "tests/it/kill/board.rs", "const PHASES: [Phase; 9]"),
    ("docs/guarantees.md", "1,000 forks", "tests/it/fork/mod.rs", "const FORKS: usize = 1000;"),
];

/// Returns names in backticks that look like a file of the repository or like a test.
fn evidence(page: &str) -> Vec<&str> {
    let names = prose(page).flat_map(|text| text.split('`').skip(1).step_by(2));
    let file = |name: &str| name.contains('/') || name.ends_with(".md") || name.starts_with("LICENSE");
    let test = |name: &str| name.matches('_').count() >= 2 && !name.contains([':', ' ', '(']);
    names.filter(|name| file(name) || test(name)).collect()
}

/// Returns the lines of a page outside of code blocks.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    page.split("```").step_by(2)
}

/// Returns the references that do not exist.
fn missing<'a>(page: &'a str, root: &Path, tests: &str) -> Vec<&'a str> {
    let names = evidence(page).into_iter();
    names.filter(|name| !root.join(name).exists() && !tests.contains(&format!("fn {name}("))).collect()
}

/// Returns the anchors of a page's headings.
fn anchors(page: &str) -> Vec<String> {
    let headings = prose(page).flat_map(str::lines).filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let text = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        text.chars().filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter)).collect()
    };
    headings.map(anchor).collect()
}

/// Returns the relative links of a page whose file or heading does not exist.
fn broken<'a>(page: &'a str, folder: &Path) -> Vec<&'a str> {
    let links =
        prose(page).flat_map(|text| text.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
    let leads_nowhere = |link: &&str| {
        let (path, heading) = link.split_once('#').unwrap_or((link, ""));
        let file = folder.join(path);
        let text = if path.is_empty() { Some(page.to_owned()) } else { fs::read_to_string(&file).ok() };
        let has_heading = |text: String| anchors(&text).iter().any(|anchor| anchor == heading);
        let file_exists = path.is_empty() || file.exists();
        !link.starts_with("https://")
            && !(file_exists && (heading.is_empty() || text.is_some_and(has_heading)))
    };
    links.filter(leads_nowhere).collect()
}

#[test]
fn references_in_docs_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["tests/it", "format/tests", "tools/tests/it"];
    let tests: String = folders.into_iter().flat_map(|folder| read(folder).into_values()).collect();
    for path in PAGES {
        let page = fs::read_to_string(root.join(path)).expect(path);
        assert_eq!(missing(&page, root, &tests), [""; 0], "{path}");
        assert_eq!(broken(&page, root.join(path).parent().unwrap()), [""; 0], "{path}");
    }
    let recognized = |path: &str| evidence(&fs::read_to_string(root.join(path)).unwrap()).len();
    assert!(recognized("README.md") > 5, "the evidence of README.md is not recognized");
    assert!(recognized("docs/guarantees.md") > 20, "the evidence of docs/guarantees.md is not recognized");
}

#[test]
fn numbers_about_tests_match_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (page, statement, test, code) in NUMBERS {
        let text = |path: &str| fs::read_to_string(root.join(path)).expect(path);
        assert!(text(page).contains(statement), "{page} does not state: {statement}");
        assert!(
            text(test).contains(code),
            "{page} states {statement:?}, and {test} does not contain: {code}"
        );
    }
}

#[test]
fn missing_references_and_broken_links_are_found() {
    let page =
        "See `src/gone.rs`, `README.md`, `a_test_that_is` and `one_that_is_not`.\n```\n`a/b`\n```\n`Store`";
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(missing(page, root, "fn a_test_that_is() {}"), ["src/gone.rs", "one_that_is_not"]);
    let page = "# A b\n[1](README.md) [2](gone.md) [3](#a-b) [4](#c) [5](https://example.com)\n```\n[6](gone)\n```\n";
    assert_eq!(broken(page, root), ["gone.md", "#c"]);
}
