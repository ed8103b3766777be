//! One element of a tensor: its name on the command line, and its location in a page.

use std::ops::Range;
use std::str::FromStr;

use remanent_format::PageInfo;
use safetensors::Dtype;

use crate::read::selector::Selector;
use crate::weights::dtype;
use crate::weights::{dtype_of, label, shape_of};

/// The name of an element, `KEY[INDEX]`, parsed from the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElementName {
    /// The page that contains the element.
    pub page: Selector,
    /// Indices of the element: one per dimension of the tensor, or a single index into all elements in order.
    pub index: Vec<u64>,
}

impl FromStr for ElementName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "expected KEY[INDEX], for example layer.weight[3,7] or layer.weight[1543]".to_owned();
        // A page name may contain brackets, so use the last pair.
        let (page, index) =
            text.strip_suffix(']').and_then(|text| text.rsplit_once('[')).ok_or_else(wrong)?;
        let number = |text: &str| text.trim().parse().map_err(|_| wrong());
        let index = index.split(',').map(number).collect::<Result<_, _>>()?;
        Ok(Self { page: page.parse()?, index })
    }
}

/// The location and the dtype of an element in an existing page.
#[derive(Clone, Debug)]
pub struct Element {
    /// The page that contains the element.
    pub info: PageInfo,
    /// The dtype of the element. `None` if the metadata of the page states no dtype. The element is then one byte.
    pub dtype: Option<Dtype>,
    /// Offset of the element in the page, in bytes.
    pub offset: u64,
    /// Width of the element in bytes.
    pub width: usize,
}

impl ElementName {
    /// Finds the element in the page `info`. Returns an error message if the page has no such element.
    pub fn find(&self, info: &PageInfo) -> Result<Element, String> {
        let dtype = dtype_of(info);
        let width = dtype.map_or(1, |dtype| dtype::width(dtype).bytes());
        let shape = shape_of(info).filter(|shape| shape.len() == self.index.len());
        let outside = || format!("there is no element {:?} in {}", self.index, label(info));
        let flat = match (&self.index[..], shape) {
            // Indices are in row-major order, so the last dimension varies fastest.
            (index, Some(shape)) => {
                let within = index.iter().zip(&shape).all(|(index, dimension)| index < dimension);
                let flat = index.iter().zip(&shape).try_fold(0_u64, |flat, (index, dimension)| {
                    flat.checked_mul(*dimension)?.checked_add(*index)
                });
                flat.filter(|_| within)
            }
            ([flat], None) => Some(*flat),
            (index, None) => {
                return Err(format!("{} does not have {} dimensions", label(info), index.len()));
            }
        };
        let bits = dtype.map_or(8, |dtype| dtype.bitsize() as u64);
        let offset = flat.and_then(|flat| flat.checked_mul(bits)).map(|bits| bits / 8).ok_or_else(outside)?;
        if offset.checked_add(width as u64).is_none_or(|end| end > info.len) {
            return Err(outside());
        }
        Ok(Element { info: info.clone(), dtype, offset, width })
    }
}

impl Element {
    /// Returns the byte range of the element in its page.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.width as u64
    }

    /// Returns the value of the element as text, given its bytes.
    pub fn text(&self, bytes: &[u8]) -> String {
        self.dtype.map_or_else(|| bytes[0].to_string(), |dtype| dtype::text(dtype, bytes))
    }

    /// Returns the value of the element as JSON, given its bytes.
    pub fn json(&self, bytes: &[u8]) -> serde_json::Value {
        self.dtype.map_or_else(|| bytes[0].into(), |dtype| dtype::json(dtype, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remanent_format::{PageId, Place, Value};

    fn page(dtype: &str, shape: &[u64], len: u64) -> PageInfo {
        let mut info = PageInfo::new(PageId(7), len, Place::Host);
        let shape = shape.iter().map(|dimension| Value::U64(*dimension)).collect();
        info.metadata = remanent_format::Metadata::from([
            ("name".to_owned(), Value::from("w[0]")),
            ("dtype".to_owned(), Value::from(dtype)),
            ("shape".to_owned(), Value::List(shape)),
        ])
        .into();
        info
    }

    #[test]
    fn element_is_found_by_indices_or_by_flat_index() {
        let info = page("F32", &[2, 3, 4], 96);
        for (text, expected) in [
            ("w[0][0,0,0]", Some(0)),
            ("w[0][1, 2, 3]", Some(92)),
            ("w[0][0,1,2]", Some(24)),
            ("w[0][23]", Some(92)),
            ("w[0][24]", None),
            ("w[0][2,0,0]", None),
            ("w[0][0,3,0]", None),
            ("w[0][1,2]", None),
            ("page:7[18446744073709551615]", None),
        ] {
            let name: ElementName = text.parse().unwrap();
            assert!(name.page.find([info.clone()].into_iter()).is_ok(), "{text}");
            assert_eq!(name.find(&info).ok().map(|element| element.offset), expected, "{text}");
        }
        assert_eq!("w[3]".parse::<ElementName>().unwrap().find(&page("F4", &[8], 4)).unwrap().offset, 1);
        assert!("w[0]".parse::<ElementName>().unwrap().page.find([info].into_iter()).is_err());
        for text in ["", "w", "w[]", "w[x]", "w[1", "w[-1]", "w[1,]"] {
            assert!(text.parse::<ElementName>().is_err(), "{text}");
        }
    }
}
