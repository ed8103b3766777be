//! The element type and shape of a caller's array, and the metadata entries that record them: `dtype` and
//! `shape`, as written by `remanent import`.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use remanent::batch::PageRef;
use remanent::{Metadata, PageInfo, Value, WriteBatch};

use crate::dtype::Dtype;
use crate::errors::{invalid, invalid_type};

pub const DTYPE: &str = "dtype";
pub const SHAPE: &str = "shape";

const GIVE_BYTES: &str =
    "convert the array to a dtype that has a name, or pass its bytes, such as array.view(\"uint8\")";

#[derive(Clone, Debug)]
pub enum Elements {
    /// Bytes, or a one-dimensional array of uint8. A page without metadata is read in this form.
    Bytes,
    Named(Layout),
    /// Elements of a type that has no name in metadata. Contains the producer's name of the type.
    Unnamed(String),
}

#[derive(Clone, Debug)]
pub struct Layout {
    pub dtype: &'static Dtype,
    pub shape: Vec<u64>,
}

impl Elements {
    /// Returns elements of this type and shape. If `dtype` is `None`, `unnamed` returns the producer's name
    /// of the type.
    pub fn of(dtype: Option<&'static Dtype>, shape: Vec<u64>, unnamed: impl FnOnce() -> String) -> Self {
        match dtype {
            Some(dtype) if dtype.short == "U8" && shape.len() == 1 => Self::Bytes,
            Some(dtype) => Self::Named(Layout { dtype, shape }),
            None => Self::Unnamed(unnamed()),
        }
    }

    /// Returns the layout to record for a page with exactly these elements, or `None` for bytes.
    ///
    /// # Errors
    /// `InvalidTypeError` for elements whose type has no name.
    pub fn layout(&self) -> PyResult<Option<Layout>> {
        match self {
            Self::Bytes => Ok(None),
            Self::Named(layout) => Ok(Some(layout.clone())),
            Self::Unnamed(word) => Err(invalid_type(
                format!("elements of dtype {word} have no name in a page's metadata"),
                GIVE_BYTES,
            )),
        }
    }

    /// Returns an error if elements of another type than the page's are written to a part of that page. Bytes
    /// fit every page.
    ///
    /// # Errors
    /// `InvalidError` if the types differ.
    pub fn check_fit(&self, page: &PageLayout) -> PyResult<()> {
        let Some(wanted) = &page.dtype else { return Ok(()) };
        let found = match self {
            Self::Bytes => return Ok(()),
            Self::Named(layout) if layout.dtype.short == "U8" || layout.dtype.short == wanted => {
                return Ok(());
            }
            Self::Named(layout) => layout.dtype.short,
            Self::Unnamed(word) => word,
        };
        Err(invalid(
            format!("the page has elements of dtype {wanted}, but the data has dtype {found}"),
            "convert the data, or pass its bytes, such as array.view(\"uint8\")",
        ))
    }
}

impl Layout {
    pub fn entries(&self) -> [(&'static str, Value); 2] {
        let shape = self.shape.iter().map(|dim| Value::U64(*dim)).collect();
        [(DTYPE, Value::from(self.dtype.short)), (SHAPE, Value::List(shape))]
    }
}

/// The element type that a page's metadata states after the operations of a batch so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PageLayout {
    pub dtype: Option<String>,
    pub shape: Option<Vec<u64>>,
    /// Whether the caller of the batch has set the entries explicitly. Updates then keep them.
    pub is_stated: bool,
}

impl PageLayout {
    pub fn of(metadata: &BTreeMap<String, Value>) -> Self {
        let dims = metadata.get(SHAPE).and_then(Value::as_list);
        let dtype = metadata.get(DTYPE).and_then(Value::as_str).map(str::to_owned);
        let shape = dims.map(|dims| dims.iter().filter_map(Value::as_u64).collect());
        Self { dtype, shape, is_stated: false }
    }

    /// Records that the caller has set or removed a metadata entry.
    pub fn state(&mut self, name: &str, value: Option<&Value>) {
        let entries = BTreeMap::from_iter(value.map(|value| (name.to_owned(), value.clone())));
        let named = Self::of(&entries);
        match name {
            DTYPE => self.dtype = named.dtype,
            SHAPE => self.shape = named.shape,
            _ => return,
        }
        self.is_stated = true;
    }

    fn is(&self, layout: &Layout) -> bool {
        self.dtype.as_deref() == Some(layout.dtype.short) && self.shape.as_ref() == Some(&layout.shape)
    }

    /// Adds operations that make a page's metadata match these elements, or bytes if `layout` is `None`.
    /// Returns the resulting state of the metadata.
    pub fn put(&self, batch: &mut WriteBatch, page: PageRef, layout: Option<&Layout>) -> Self {
        let Some(layout) = layout else { return self.drop_entries(batch, page, true) };
        if !self.is(layout) {
            for (name, value) in layout.entries() {
                batch.set_metadata(page, name, value);
            }
        }
        Self {
            dtype: Some(layout.dtype.short.to_owned()),
            shape: Some(layout.shape.clone()),
            is_stated: false,
        }
    }

    /// Adds operations that make a page's metadata match a new length: the shape is removed, and also the
    /// element type if it does not fit. Returns the resulting state of the metadata.
    pub fn put_len(&self, batch: &mut WriteBatch, page: PageRef, len: u64) -> Self {
        if self.is_stated {
            return self.clone();
        }
        let dtype = self.dtype.as_deref().and_then(|name| Dtype::parse(name).ok());
        let fits = dtype.is_some_and(|dtype| len.is_multiple_of(dtype.item_size() as u64));
        self.drop_entries(batch, page, !fits)
    }

    fn drop_entries(&self, batch: &mut WriteBatch, page: PageRef, with_dtype: bool) -> Self {
        if self.shape.is_some() {
            batch.remove_metadata(page, SHAPE);
        }
        if with_dtype && self.dtype.is_some() {
            batch.remove_metadata(page, DTYPE);
        }
        Self { dtype: self.dtype.clone().filter(|_| !with_dtype), shape: None, is_stated: false }
    }
}

impl From<&PageInfo> for PageLayout {
    fn from(info: &PageInfo) -> Self {
        Self::of(&info.metadata)
    }
}

/// Returns the metadata of a new page: the caller's entries and, unless they state an element type or shape,
/// entries for `elements`.
///
/// # Errors
/// `InvalidTypeError` for elements whose type has no name.
pub fn new_metadata(mut metadata: Metadata, elements: &Elements) -> PyResult<(Metadata, PageLayout)> {
    let is_stated = metadata.contains_key(DTYPE) || metadata.contains_key(SHAPE);
    if !is_stated && let Some(layout) = elements.layout()? {
        metadata.extend(layout.entries().map(|(name, value)| (name.to_owned(), value)));
    }
    let layout = PageLayout { is_stated, ..PageLayout::of(&metadata) };
    Ok((metadata, layout))
}
