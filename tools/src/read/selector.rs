//! Selection of a page on the command line, by its id, its key, or the name of its tensor.

use std::fmt;
use std::str::FromStr;

use remanent_format::{Key, PageId, PageInfo};

/// A page that the user selects on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// The page with this id, given as `page:N` or as digits.
    Number(PageId),
    /// The page with this key, given as `key:K`. K can be the key's text, the text with escaped unprintable characters,
    /// or `0x` and the key's bytes in hexadecimal.
    Key(String),
    /// The page with this tensor name or key, given as any other text.
    Name(String),
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let wrong = || format!("expected the number of a page, found {text:?}");
            text.parse().map(PageId).map_err(|_| wrong())
        };
        match text.split_once(':') {
            _ if text.is_empty() => Err("expected the number, key or tensor name of a page".to_owned()),
            Some(("key", "")) => Err("key length is 0 bytes, expected 1 to 64 bytes".to_owned()),
            Some(("key", key)) => Ok(Self::Key(key.to_owned())),
            Some(("page", page)) => Ok(Self::Number(number(page)?)),
            _ if text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(Self::Number(number(text)?)),
            _ => Ok(Self::Name(text.to_owned())),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(page) => write!(f, "page {page}"),
            Self::Key(key) => write!(f, "page with key {key:?}"),
            Self::Name(name) => write!(f, "tensor or key {name:?}"),
        }
    }
}

impl Selector {
    /// Finds the selected page.
    ///
    /// # Errors
    /// Returns a message that names the missing page and suggests the most similar name.
    pub fn find(&self, pages: impl Iterator<Item = PageInfo>) -> Result<PageInfo, String> {
        let (mut best, mut names) = (None, Vec::new());
        for info in pages {
            match self.fit(&info) {
                Fit::Exact => return Ok(info),
                Fit::Shown => _ = best.get_or_insert(info),
                Fit::No => {
                    names.extend(info.key.iter().map(Key::to_string).chain(name_of(&info).map(str::to_owned)))
                }
            }
        }
        best.ok_or_else(|| self.missing(&names))
    }

    fn fit(&self, info: &PageInfo) -> Fit {
        let by_key = |text: &str| info.key.as_ref().map_or(Fit::No, |key| fit(key, text));
        match self {
            Self::Number(page) if info.page == *page => Fit::Exact,
            Self::Number(_) => Fit::No,
            Self::Key(text) => by_key(text),
            Self::Name(name) if name_of(info) == Some(name) => Fit::Exact,
            Self::Name(name) => by_key(name),
        }
    }

    fn missing(&self, names: &[String]) -> String {
        let wanted = match self {
            Self::Number(_) => "",
            Self::Key(text) | Self::Name(text) => text,
        };
        match remanent::error::nearest(wanted, names.iter().map(String::as_str)) {
            Some(near) => format!("there is no {self}; did you mean {near:?}?"),
            None => format!("there is no {self}; `remanent pages` lists all pages"),
        }
    }
}

/// Returns the full name of a page's tensor, or `None` if the metadata contains no name.
fn name_of(info: &PageInfo) -> Option<&str> {
    info.metadata.get("name")?.as_str()
}

/// The quality of a match between a text and a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    /// The text equals the bytes of the key.
    Exact,
    /// The text equals the displayed form of the key. If the text equals the bytes of another key, the other key is
    /// selected.
    Shown,
    /// The text does not match the key.
    No,
}

fn fit(key: &Key, text: &str) -> Fit {
    match key.as_bytes() == text.as_bytes() {
        true => Fit::Exact,
        false if key.to_string() == text => Fit::Shown,
        false => Fit::No,
    }
}

#[cfg(test)]
mod tests {
    use remanent_format::{Metadata, Place, Value};

    use super::*;

    #[test]
    fn page_is_found_by_number_key_or_name() {
        let page = |number, key: &[u8], name: Option<&str>| {
            let mut info = PageInfo::new(PageId(number), 0, Place::Host);
            info.key = Some(Key::new(key).unwrap());
            let name = name.map(|name| ("name".to_owned(), Value::from(name)));
            info.metadata = Metadata::from_iter(name).into();
            info
        };
        let pages = [
            page(1, &[0xff], None),
            page(2, b"0xff", None),
            page(3, &[0xfe], None),
            page(4, b"a\nb", None),
            page(5, b"plain", None),
            page(6, b"long~1", Some("encoder/long")),
            page(7, b"4", None),
        ];
        for (text, expected) in [
            ("3", Ok(3)),
            ("page:3", Ok(3)),
            ("key:plain", Ok(5)),
            ("plain", Ok(5)),
            ("key:0xfe", Ok(3)),
            ("0xfe", Ok(3)),
            ("key:0xff", Ok(2)),
            ("a\\nb", Ok(4)),
            ("encoder/long", Ok(6)),
            ("long~1", Ok(6)),
            ("4", Ok(4)),
            ("key:4", Ok(7)),
            ("9", Err("there is no page 9; `remanent pages` lists all pages")),
            ("key:plian", Err("there is no page with key \"plian\"; did you mean \"plain\"?")),
            ("long", Err("there is no tensor or key \"long\"; did you mean \"encoder/long\"?")),
            ("", Err("expected the number, key or tensor name of a page")),
            ("key:", Err("key length is 0 bytes, expected 1 to 64 bytes")),
            ("page:x", Err("expected the number of a page, found \"x\"")),
            ("99999999999999999999", Err("expected the number of a page, found \"99999999999999999999\"")),
        ] {
            let found = text.parse::<Selector>().and_then(|selector| selector.find(pages.iter().cloned()));
            assert_eq!(found.map(|info| info.page.0), expected.map_err(str::to_owned), "{text}");
        }
    }
}
