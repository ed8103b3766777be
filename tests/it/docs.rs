//! Checks that the files, threads and API items named in `docs/` exist.

use std::fs;
use std::path::Path;

use super::layout::read;

/// The pages that describe the code, and the folders in which the named files are looked up.
const PAGES: &[(&str, &[&str])] = &[
    ("docs/architecture.md", &["", "src"]),
    ("docs/concurrency.md", &["", "src"]),
    ("docs/decisions.md", &["", "src"]),
];

#[test]
fn files_named_in_docs_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let is_file = |name: &str| name.ends_with(".rs") || name.ends_with(".md") || name.ends_with('/');
    let is_path =
        |name: &str| name.contains('/') && !name.starts_with('/') && !name.contains(['<', '*', ' ']);
    for (page, folders) in PAGES {
        let text = fs::read_to_string(root.join(page)).expect("the page is part of the repository");
        let prose = text.split("```").step_by(2);
        let names = prose.flat_map(|text| text.split('`').skip(1).step_by(2));
        let named: Vec<_> = names.filter(|name| is_path(name) && is_file(name)).collect();
        let exists = |name: &&str| folders.iter().any(|folder| root.join(folder).join(name).exists());
        let missing: Vec<_> = named.iter().filter(|name| !exists(name)).collect();
        assert!(missing.is_empty(), "{page} names {missing:?}");
    }
}

#[test]
fn every_thread_is_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/concurrency.md")).expect("the page exists");
    let mut started = 0;
    for (file, text) in read("src") {
        for name in text.split("\"remanent-").skip(1).filter_map(|rest| rest.split('"').next()) {
            if name.chars().all(|letter| letter.is_ascii_lowercase()) {
                started += 1;
                assert!(page.contains(&format!("`remanent-{name}`")), "{file} starts remanent-{name}");
            }
        }
    }
    assert!(started > 10, "threads are not recognized");
}

/// Returns the link definitions of a page that point to sources, as pairs of name and source.
fn defined_links(page: &str) -> Vec<(&str, &str)> {
    let links = page.lines().filter_map(|line| line.strip_prefix("[`")?.split_once("`]: ../"));
    links.filter(|(_, file)| file.ends_with(".rs")).collect()
}

#[test]
fn api_names_of_other_systems_page_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/coming-from.md")).expect("the page exists");
    let links = defined_links(&page);
    assert!(links.len() > 50, "links are not recognized");
    for (name, file) in &links {
        let source = fs::read_to_string(root.join(file)).unwrap_or_default();
        let last = name.rsplit("::").next().unwrap_or(name);
        let kinds = ["fn", "struct", "enum", "trait", "type"];
        let is_item = kinds.iter().any(|kind| source.contains(&format!("{kind} {last}")));
        let is_variant = ["(", " {", ","].iter().any(|end| source.contains(&format!("    {last}{end}")));
        assert!(is_item || is_variant, "{file} has no {name}");
    }
    let used = page.lines().filter(|line| line.starts_with('|')).flat_map(|line| line.split("[`").skip(1));
    for name in used.filter_map(|rest| rest.split_once("`]").map(|(name, _)| name)) {
        assert!(links.iter().any(|(defined, _)| *defined == name), "{name} is not linked");
    }
}
