//! Sizes in bytes, with an optional unit: `4096`, `64KiB`, `1GiB`.

use std::fmt;
use std::str::FromStr;

const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// A number of bytes, parsed from text with an optional unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, shift) = UNITS
            .iter()
            .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?.trim_end(), *shift)))
            .unwrap_or((text, 0));
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
        bytes.map(Size).ok_or_else(|| format!("expected a size such as 4096, 64KiB or 1GiB, found `{text}`"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, shift)| self.0 > 0 && self.0.is_multiple_of(1 << shift)) {
            Some((unit, shift)) => write!(f, "{} {unit}", self.0 >> shift),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_and_shown_with_units() {
        for (text, bytes, shown) in
            [("0", 0, "0 B"), ("4096", 4096, "4 KiB"), ("1000", 1000, "1000 B"), ("3GiB", 3 << 30, "3 GiB")]
        {
            let size: Size = text.parse().unwrap();
            assert_eq!((size, size.to_string().as_str()), (Size(bytes), shown));
        }
        for text in ["", "KiB", "-1", "1.5GiB", "1 GB", "16777216TiB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
