//! How a page is named on the command line: by its number, or by its key as it is shown.

use std::str::FromStr;

use remanent_format::{Key, PageId, PageInfo};

/// A page, as it was typed: its number, or `key:` and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// The page's number.
    Number(PageId),
    /// The key: its text, or its bytes as `0x` and hexadecimal digits, or with unprintable bytes escaped.
    Key(String),
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("key:") {
            Some("") => Err("a key is 1 to 64 bytes long".to_owned()),
            Some(key) => Ok(Self::Key(key.to_owned())),
            None => text
                .parse()
                .map(|number| Self::Number(PageId(number)))
                .map_err(|_| "neither a page's number nor `key:` and its key".to_owned()),
        }
    }
}

impl Selector {
    /// The page that is meant.
    pub fn find(&self, pages: impl Iterator<Item = PageInfo>) -> Option<PageInfo> {
        let mut shown_so = None;
        for info in pages {
            match self {
                Self::Number(page) if info.page == *page => return Some(info),
                Self::Number(_) => {}
                Self::Key(text) => match info.key.as_ref().map(|key| fit(key, text)) {
                    Some(Fit::Exact) => return Some(info),
                    Some(Fit::Shown) => _ = shown_so.get_or_insert(info),
                    _ => {}
                },
            }
        }
        shown_so
    }
}

/// Whether a text names a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// These are its bytes.
    Exact,
    /// This is how it is shown. A key whose bytes these are goes before.
    Shown,
    /// It is another one's.
    No,
}

/// How well a text names a key.
pub fn fit(key: &Key, text: &str) -> Fit {
    match key.as_bytes() == text.as_bytes() {
        true => Fit::Exact,
        false if key.to_string() == text => Fit::Shown,
        false => Fit::No,
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::Place;

    use super::*;

    #[test]
    fn a_key_is_given_as_it_is_shown_and_its_own_bytes_go_before() {
        let page = |number, key: &[u8]| {
            let mut info = PageInfo::new(PageId(number), 0, Place::Host);
            info.key = Some(Key::new(key).unwrap());
            info
        };
        let pages =
            [page(1, &[0xff]), page(2, b"0xff"), page(3, &[0xfe]), page(4, b"a\nb"), page(5, b"plain")];
        let find = |text: &str| {
            let found = text.parse::<Selector>().unwrap().find(pages.iter().cloned());
            found.map(|info| info.page.0)
        };
        for (text, page) in [
            ("3", Some(3)),
            ("key:plain", Some(5)),
            ("key:0xfe", Some(3)),
            ("key:0xff", Some(2)),
            ("key:a\\nb", Some(4)),
            ("key:0xfd", None),
            ("9", None),
        ] {
            assert_eq!(find(text), page, "{text}");
        }
        assert!("key:".parse::<Selector>().is_err() && "plain".parse::<Selector>().is_err());
    }
}
