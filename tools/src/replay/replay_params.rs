//! The rule with which a store is replayed. The identity blob of the store contains the rule, so that the store cannot
//! be continued or checked with another rule.

use std::path::Path;

use remanent_format::FileName;
use remanent_format::store::StoreFile;

use crate::cli::exit::Failure;
use crate::read::store_dir::StoreDir;
use crate::replay::simulate::Rule;

/// Rule of a new store if the user specifies no rule.
const DEFAULT: Rule = Rule { page_len: 4096, pages_max: 4096 };

/// Returns the identity blob of a store that is replayed with a rule.
pub fn identity(rule: Rule) -> String {
    format!("remanent replay: page-len {}, pages-max {}", rule.page_len, rule.pages_max)
}

/// Parses the rule in an identity blob.
fn parse(identity: &[u8]) -> Option<Rule> {
    let text = std::str::from_utf8(identity).ok()?;
    let (page_len, pages_max) =
        text.strip_prefix("remanent replay: page-len ")?.split_once(", pages-max ")?;
    let rule = Rule { page_len: page_len.parse().ok()?, pages_max: pages_max.parse().ok()? };
    (self::identity(rule) == text).then_some(rule)
}

/// Returns the rule of the store in `dir`. If there is no store, returns the rule that the user specified. Returns an
/// error if the user specified another rule than that of the store.
pub fn choose(dir: &Path, page_len: Option<usize>, pages_max: Option<usize>) -> Result<Rule, Failure> {
    let own = if dir.exists() { own_rule(&StoreDir::open(dir)?)? } else { None };
    let base = own.unwrap_or(DEFAULT);
    let rule =
        Rule { page_len: page_len.unwrap_or(base.page_len), pages_max: pages_max.unwrap_or(base.pages_max) };
    match own {
        Some(own) if own != rule => Err(Failure::Environment(format!(
            "{} was created with --page-len {} --pages-max {}; use the same values or omit them",
            dir.display(),
            own.page_len,
            own.pages_max
        ))),
        _ => Ok(rule),
    }
}

/// Returns the rule of the store in a directory, or `None` if there is no store.
fn own_rule(dir: &StoreDir) -> Result<Option<Rule>, Failure> {
    let cannot = |reason: String| Failure::Environment(format!("{}/STORE: {reason}", dir.path().display()));
    let Some(bytes) = dir.read_whole(FileName::Store).map_err(|error| cannot(error.to_string()))? else {
        return Ok(None);
    };
    let file = StoreFile::decode(&bytes).map_err(|defect| Failure::Damage(format!("STORE: {defect}")))?;
    match parse(&file.record.identity) {
        Some(rule) => Ok(Some(rule)),
        None => Err(cannot("the store was not created by `replay`; use another directory".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_round_trips_through_identity() {
        let rule = Rule { page_len: 512, pages_max: 300 };
        assert_eq!(parse(identity(rule).as_bytes()), Some(rule));
        for other in ["", "remanent replay: page-len 512", "remanent replay: page-len +512, pages-max 300"] {
            assert_eq!(parse(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn new_store_uses_requested_options() {
        let dir = tempfile::tempdir().unwrap();
        let requested = Rule { page_len: 512, pages_max: 300 };
        assert_eq!(choose(dir.path(), Some(512), Some(300)), Ok(requested));
        assert_eq!(choose(&dir.path().join("missing"), None, None), Ok(DEFAULT));
    }
}
