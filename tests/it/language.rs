//! The language of comments and prose, where the words alone tell that it breaks the rule.
//!
//! The rule: the subject comes first and is a noun with a name, a bound is "up to N bytes", and the first
//! line of a doc comment makes sense alone in an index. This finds what a search can find of its opposite:
//!
//! - pronouns that stand where a noun should (`BARE_SUBJECTS`), and pairs of words that read like a
//!   translation (`PAIRS`), also across the end of a line;
//! - doc comments whose first line has fewer than three words;
//! - comments that go on past column 110. A row of a table cannot be broken, and is let through.
//!
//! Code between backticks and blocks of code are names, not language: in prose they are passed over.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders where comments are read, with the endings of the files.
const SOURCES: &[(&str, &[&str])] = &[
    ("src", &["rs"]),
    ("format/src", &["rs"]),
    ("tools/src", &["rs"]),
    ("tests", &["rs"]),
    ("examples", &["rs"]),
    ("kernels", &["cu", "cuh"]),
    ("python/src", &["rs"]),
];

/// The folders where prose is read: every page below them, and the pages in the root.
const PROSE: &[&str] = &["benches", "docs", "format", "fuzz", "kernels", "python", "src", "tests", "tools"];

/// Pronouns that hide which thread, caller or process is meant.
const BARE_SUBJECTS: &[&str] = &["who", "whoever", "whom", "nobody", "somebody", "anybody"];

/// Pairs of words for which English has a number, a bound or a plain infinitive.
const PAIRS: &[(&str, &str)] = &[("so", "many"), ("so", "much"), ("for", "to")];

/// The last column that a comment may reach.
const WIDTH_MAX: usize = 110;

/// The fewest words that a doc comment's first line may have.
const FIRST_LINE_WORDS_MIN: usize = 3;

/// A comment of one line, up to its end.
struct Comment<'a> {
    /// The line's number, from 1.
    line: usize,
    /// The number of the line's columns, with the code before the comment.
    width: usize,
    /// The slashes that begin it, with the `!` of a module's docs.
    mark: &'a str,
    text: &'a str,
}

/// The comments of a source. The content of strings and characters is none.
fn comments(source: &str) -> Vec<Comment<'_>> {
    let mut comments = Vec::new();
    // The string that a line begins in.
    let mut string: Option<Opening> = None;
    for (index, line) in source.lines().enumerate() {
        let mut at = 0;
        while let Some(rest) = line.get(at..).filter(|rest| !rest.is_empty()) {
            if let Some(opening) = &string {
                if opening.escapes && rest.starts_with('\\') {
                    at += 1 + rest[1..].chars().next().map_or(0, char::len_utf8);
                } else if rest.starts_with(opening.end.as_str()) {
                    at += opening.end.len();
                    string = None;
                } else {
                    at += rest.chars().next().map_or(1, char::len_utf8);
                }
            } else if rest.starts_with("//") {
                let mark = rest.find(|c| c != '/').unwrap_or(rest.len());
                let mark = if rest[mark..].starts_with('!') { mark + 1 } else { mark };
                let (mark, text) = rest.split_at(mark);
                comments.push(Comment { line: index + 1, width: line.chars().count(), mark, text });
                break;
            } else if let Some(opening) = Opening::of(&line[..at], rest) {
                at += opening.len;
                string = Some(opening);
            } else if let Some(len) = character(rest) {
                at += len;
            } else {
                at += rest.chars().next().map_or(1, char::len_utf8);
            }
        }
    }
    comments
}

/// The beginning of a string in the source.
struct Opening {
    len: usize,
    /// The quote and the hashes that will end the string.
    end: String,
    /// A raw string has no escapes.
    escapes: bool,
}

impl Opening {
    /// The beginning of a string at the start of `rest`, if there is one.
    fn of(before: &str, rest: &str) -> Option<Self> {
        let in_name = before.ends_with(|c: char| c.is_alphanumeric() && c != 'b' || c == '_');
        if let Some(raw) = rest.strip_prefix('r').filter(|_| !in_name) {
            let hashes = raw.len() - raw.trim_start_matches('#').len();
            if raw[hashes..].starts_with('"') {
                let end = format!("\"{}", "#".repeat(hashes));
                return Some(Self { len: hashes + 2, end, escapes: false });
            }
        }
        rest.starts_with('"').then(|| Self { len: 1, end: "\"".to_owned(), escapes: true })
    }
}

/// The length of a character at the start of `rest`; a lifetime is none.
fn character(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix('\'')?;
    let first = inner.chars().next()?;
    if first == '\\' {
        return Some(1 + 2 + inner.get(2..)?.find('\'')? + 1);
    }
    inner[first.len_utf8()..].starts_with('\'').then(|| first.len_utf8() + 2)
}

/// The faults of a source's comments, each with its line.
fn comment_faults(source: &str) -> Vec<(usize, String)> {
    let mut faults = Vec::new();
    let mut words = Words::default();
    let mut before: Option<Comment<'_>> = None;
    for comment in comments(source) {
        let goes_on = before.as_ref().is_some_and(|b| b.line + 1 == comment.line && b.mark == comment.mark);
        if !goes_on {
            words.forget();
        }
        faults.extend(words.faults(comment.text).into_iter().map(|fault| (comment.line, fault)));
        if comment.width > WIDTH_MAX && !comment.text.trim_start().starts_with('|') {
            faults.push((comment.line, format!("{} columns", comment.width)));
        }
        // An empty first line goes on after a `#[doc]` attribute.
        let count = comment.text.split_whitespace().filter(|w| w.contains(char::is_alphanumeric)).count();
        if ["///", "//!"].contains(&comment.mark) && !goes_on && (1..FIRST_LINE_WORDS_MIN).contains(&count) {
            faults.push((comment.line, format!("a first line of few words:{}", comment.text)));
        }
        before = Some(comment);
    }
    faults
}

/// The faults of a page's prose, each with its line. Blocks of code are passed over.
fn prose_faults(page: &str) -> Vec<(usize, String)> {
    let mut faults = Vec::new();
    let mut words = Words::default();
    let (mut fenced, mut indented, mut after_blank) = (false, false, true);
    for (index, line) in page.lines().enumerate() {
        let text = line.trim_start();
        if text.starts_with("```") {
            fenced = !fenced;
            words.forget();
            continue;
        }
        indented = !text.is_empty() && line.starts_with("    ") && (indented || after_blank);
        after_blank = text.is_empty();
        if fenced || indented {
            continue;
        }
        if after_blank {
            words.forget();
        }
        faults.extend(words.faults(text).into_iter().map(|fault| (index + 1, fault)));
    }
    faults
}

/// Reads a text line by line, and remembers its last word: a pair may stand across the end of a line.
#[derive(Default)]
struct Words {
    /// The word before, if nothing but space came after it.
    last: Option<String>,
}

impl Words {
    fn forget(&mut self) {
        self.last = None;
    }

    /// The faults of one line.
    fn faults(&mut self, line: &str) -> Vec<String> {
        let mut faults = Vec::new();
        let in_word = |c: char| c.is_alphanumeric() || c == '_';
        for token in without_code(line).split_whitespace() {
            let token = token.to_lowercase();
            let words = token.split(|c| !in_word(c));
            let bare = words.filter(|word| BARE_SUBJECTS.contains(word));
            faults.extend(bare.map(|word| format!("\"{word}\"")));
            let first = token.split(|c| !in_word(c)).next().unwrap_or_default();
            let pair = PAIRS.iter().find(|(one, two)| self.last.as_deref() == Some(*one) && first == *two);
            faults.extend(pair.map(|(one, two)| format!("\"{one} {two}\"")));
            self.last =
                token.rsplit(|c| !in_word(c)).next().filter(|word| !word.is_empty()).map(str::to_owned);
        }
        faults
    }
}

/// The line with a dash for each piece of code between backticks.
fn without_code(line: &str) -> String {
    let pieces = line.split('`').enumerate();
    pieces.map(|(index, piece)| if index % 2 == 0 { piece } else { "-" }).collect()
}

/// The files below a folder, or right in it, that have one of these endings.
fn files(folder: &Path, endings: &[&str], deep: bool) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("the folder is part of the repository") {
            let path = entry.expect("the folder can be read").path();
            // Caches and environments of Python are none of the repository's.
            let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if path.is_dir() && deep && !path.ends_with("target") && !is_hidden {
                folders.push(path);
            } else if path.extension().is_some_and(|e| endings.iter().any(|ending| e == *ending)) {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

#[test]
fn comments_and_prose_keep_to_the_rule() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file: &Path| fs::read_to_string(file).expect("a source is text");
    let mut faults = Vec::new();
    let mut add = |file: &Path, found: Vec<(usize, String)>| {
        let name = file.strip_prefix(root).expect("below the root").display();
        faults.extend(found.into_iter().map(|(line, fault)| format!("{name}:{line}: {fault}")));
    };
    for (folder, endings) in SOURCES {
        let sources = files(&root.join(folder), endings, true);
        assert!(!sources.is_empty(), "no sources in {folder}");
        for file in sources {
            add(&file, comment_faults(&read(&file)));
        }
    }
    let mut pages = files(root, &["md"], false);
    assert!(!pages.is_empty(), "no pages in the root");
    pages.extend(PROSE.iter().flat_map(|folder| files(&root.join(folder), &["md"], true)));
    for file in pages {
        add(&file, prose_faults(&read(&file)));
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// Each fault as `LINE: FAULT`.
fn shown(faults: Vec<(usize, String)>) -> Vec<String> {
    faults.into_iter().map(|(line, fault)| format!("{line}: {fault}")).collect()
}

#[test]
fn a_comment_that_breaks_the_rule_is_found() {
    let long = "x".repeat(108);
    let rows: &[(&str, &[&str])] = &[
        ("// Waits for who holds it.", &["1: \"who\""]),
        ("/// Whoever asks is told.", &["1: \"whoever\""]),
        ("//! The thread, for whom it waits, is nobody's.", &["1: \"whom\"", "1: \"nobody\""]),
        ("//// Somebody is here.", &["1: \"somebody\""]),
        ("let a = 1; // as *anybody* may", &["1: \"anybody\""]),
        ("let a = '\"'; // nobody", &["1: \"nobody\""]),
        ("let a = r#\"\"who\"#; // nobody", &["1: \"nobody\""]),
        ("let a = \"\\\\\"; // nobody", &["1: \"nobody\""]),
        ("let a = r\"\\\"; // nobody", &["1: \"nobody\""]),
        ("let a = \"first\n// in it\"; // nobody", &["2: \"nobody\""]),
        ("fn f<'a>(a: &'a str) {} // nobody", &["1: \"nobody\""]),
        ("// At most so many bytes.", &["1: \"so many\""]),
        ("// One is for So\n// much of it.", &["2: \"so much\""]),
        ("// It waits for to begin.", &["1: \"for to\""]),
        ("/// The thread.\nfn f() {}", &["1: a first line of few words: The thread."]),
        (
            "struct A {\n    /// - Two words -\n    b: u8,\n}",
            &["2: a first line of few words: - Two words -"],
        ),
        ("fn f() {}\n/// Late.\n/// But then it says more.", &["2: a first line of few words: Late."]),
        ("//! Two words\n//!\n//! And more than that.", &["1: a first line of few words: Two words"]),
        (&format!("// {long}"), &["1: 111 columns"]),
        (&format!("{} // é", "é".repeat(107)), &["1: 112 columns"]),
    ];
    for (text, expected) in rows {
        assert_eq!(shown(comment_faults(text)), *expected, "for {text}");
    }
}

#[test]
fn a_comment_that_keeps_to_the_rule_is_let_through() {
    let rows = [
        "// A whole page, whose bytes are known; a whoop.",
        "// It calls `nobody` and `who_waits`, or so_many.",
        "fn who() { nobody() }",
        "let a = \"// who\"; let b = r\"// nobody\"; let c = b\"// so many\";",
        "let a = \"one \\\" // who\n// nobody\";",
        "let a = r##\"\"# // who\n// nobody\"##;",
        "let a = '\\''; let b = \"// who\"; let c = '/'; let d = '\\u{2f}';",
        "// It is so. Many do it, so; much of it is for. To do so, (so) many.",
        "// It looks for tokens.",
        "// One is so\n\n// many are more.",
        "// Short.",
        "/// Says three words.\n/// Short.\n///\n/// Short.",
        "//// Not docs.",
        &format!("// {}", "é".repeat(107)),
        &format!("//! | {} |", "a cell of a table ".repeat(9)),
        &format!("let a = \"{}\";", "long".repeat(40)),
    ];
    for text in rows {
        assert_eq!(shown(comment_faults(text)), [""; 0], "for {text}");
    }
}

#[test]
fn prose_that_breaks_the_rule_is_found() {
    let rows: &[(&str, &[&str])] = &[
        ("# Who we are", &["1: \"who\""]),
        ("| one | for nobody |\n|---|---|", &["1: \"nobody\""]),
        ("It takes so\nmany bytes.", &["2: \"so many\""]),
        ("```\nlet who = 1;\n```\n\nIt is for to find somebody.", &["5: \"for to\"", "5: \"somebody\""]),
        ("- a list\n    goes on for whom", &["2: \"whom\""]),
        ("    code\n\n    code\n\nanybody", &["5: \"anybody\""]),
    ];
    for (text, expected) in rows {
        assert_eq!(shown(prose_faults(text)), *expected, "for {text}");
    }
}

#[test]
fn prose_that_keeps_to_the_rule_is_let_through() {
    let rows = [
        "# A title\n\nThe whole text; `who` is a name.",
        "```sh\n# nobody\n```\n",
        "It runs:\n\n    who am i\n    nobody\n",
        "It is so\n\nmany years ago.",
        "| for | to |",
        &"long prose ".repeat(40),
    ];
    for text in rows {
        assert_eq!(shown(prose_faults(text)), [""; 0], "for {text}");
    }
}
