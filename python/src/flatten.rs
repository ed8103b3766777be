//! Converts a state of plain values to JSON and collects the tensors among them, in one walk over thousands
//! of values.
//!
//! In Python, this walk took longer than all other work before the copies of a save. The walk writes text and
//! creates no Python objects for what it visits, because the garbage collector would scan each of them.
//!
//! A tensor's name is its path, so no two values of a state have the same path; see `Walk::member`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PyString, PyTuple};

use crate::errors;

const CONVERT: &str = "convert the value to one that can be stored, or remove it from the state";

/// The key of a JSON object that represents a value for which JSON has no type of its own.
const TAG: &str = "$";
const DEPTH_MAX: usize = 100;
/// The largest integer written as a JSON number. JSON readers of other languages lose precision beyond it.
const INT_MAX: i64 = 1 << 53;
/// The bits of the NaN that `float("nan")` creates. Other NaNs are written with their bits.
const NAN_BITS: u64 = 0x7ff8_0000_0000_0000;
/// The prefix of a path segment for a key that is not a plain name. No escaped name begins with it.
const OTHER_KEY: &str = "~:";
/// The module that encodes rarer values, and dict keys.
const VALUES: &str = "remanent._state.plain_values";

/// A walk over a value that writes the value as JSON.
pub struct Walk<'a, 'py> {
    py: Python<'py>,
    adapt: &'a Bound<'py, PyAny>,
    leaves: Option<&'a Leaves<'py>>,
    path: String,
    text: String,
    /// The mutable containers visited so far, by address.
    containers: HashMap<usize, Container<'py>>,
}

struct Container<'py> {
    /// The number of containers that were visited before this one.
    number: usize,
    /// Whether the walk is inside this container.
    is_open: bool,
    /// Keeps the container alive, so that no other object gets its address during the walk.
    _value: Bound<'py, PyAny>,
}

/// Collects values unchanged, by path.
#[derive(FromPyObject)]
pub struct Leaves<'py> {
    /// The types of the values to collect. Subclasses are not collected.
    kinds: Bound<'py, PyFrozenSet>,
    /// The tag that represents a collected value in the text, together with its path.
    tag: Bound<'py, PyString>,
    into: Bound<'py, PyDict>,
    /// An attribute name. A value whose attribute is true is passed to `adapt` instead.
    unless: Option<Bound<'py, PyString>>,
}

impl<'a, 'py> Walk<'a, 'py> {
    pub fn new(
        py: Python<'py>,
        path: String,
        adapt: &'a Bound<'py, PyAny>,
        leaves: Option<&'a Leaves<'py>>,
    ) -> Self {
        Self { py, adapt, leaves, path, text: String::new(), containers: HashMap::new() }
    }

    /// Returns the JSON text of a value.
    ///
    /// # Errors
    /// `RefusedError` for a value that cannot be stored, and errors of `adapt`.
    pub fn flatten(mut self, value: &Bound<'py, PyAny>) -> PyResult<String> {
        self.value(value, 0)?;
        Ok(self.text)
    }

    fn value(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        if depth > DEPTH_MAX {
            return Err(self.refused(&format!("values are nested more than {DEPTH_MAX} levels deep")));
        }
        if let Ok(text) = value.cast_exact::<PyString>() {
            return self.string(text);
        }
        if value.is_none() {
            self.text.push_str("null");
            return Ok(());
        }
        if let Ok(truth) = value.cast_exact::<PyBool>() {
            self.text.push_str(if truth.is_true() { "true" } else { "false" });
            return Ok(());
        }
        if let Ok(number) = value.cast_exact::<PyFloat>() {
            return self.float(number.value());
        }
        if value.is_exact_instance_of::<PyInt>() {
            return match value.extract::<i64>() {
                Ok(number) if (-INT_MAX..=INT_MAX).contains(&number) => {
                    write!(self.text, "{number}").expect("a write to a String cannot fail");
                    Ok(())
                }
                _ => self.key(value),
            };
        }
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            return self.container(value, |walk| walk.dict(&dict.items(), "dict", true, depth, None));
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            return self.container(value, |walk| walk.items(&list.to_tuple(), depth));
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            return self.tagged("tuple", |walk| walk.items(tuple, depth));
        }
        if let Some(leaves) = self.leaves
            && leaves.kinds.contains(value.get_type())?
            && !leaves.is_other(value)?
        {
            let name = PyString::new(self.py, self.path.get(1..).unwrap_or_default());
            if leaves.into.contains(&name)? {
                return Err(self.refused("another value has this path"));
            }
            leaves.into.set_item(&name, value)?;
            return self.tagged_text(&leaves.tag.to_string_lossy(), &name);
        }
        if value.get_type().is(&self.py.import("collections")?.getattr(intern!(self.py, "OrderedDict"))?) {
            return self.container(value, |walk| walk.ordered_dict(value, depth));
        }
        if self.containers.contains_key(&(value.as_ptr() as usize)) {
            return self.container(value, |_| unreachable!("the container was already written"));
        }
        let mut adapted = self.adapt.call1((&self.path, value))?;
        if adapted.is_none() {
            adapted = self.py.import(VALUES)?.call_method1("encode", (&self.path, value))?;
        }
        if adapted.is_none() {
            let kind = value.get_type().name()?;
            return Err(self.refused(&format!("a {kind} cannot be stored")));
        }
        match adapted.cast::<PyTuple>() {
            Ok(parts) => self.parts(value, parts, depth),
            Err(_) => self.json(&adapted),
        }
    }

    /// Writes a value that Python code has encoded as the first elements of the tag, the content or None, and
    /// whether the value is mutable.
    fn parts(
        &mut self,
        value: &Bound<'py, PyAny>,
        parts: &Bound<'py, PyTuple>,
        depth: usize,
    ) -> PyResult<()> {
        let (head, content, is_mutable) = parts.extract::<(Bound<'py, PyList>, Bound<'py, PyAny>, bool)>()?;
        let write = |walk: &mut Self| {
            write!(walk.text, "{{\"{TAG}\":").expect("a write to a String cannot fail");
            walk.json(&head)?;
            if !content.is_none() {
                walk.text.pop();
                walk.text.push(',');
                walk.value(&content, depth + 1)?;
                walk.text.push(']');
            }
            walk.text.push('}');
            Ok(())
        };
        if is_mutable { self.container(value, write) } else { write(self) }
    }

    /// Writes a mutable container by calling `write`. A container that was written before is written as a
    /// reference.
    fn container(
        &mut self,
        value: &Bound<'py, PyAny>,
        write: impl FnOnce(&mut Self) -> PyResult<()>,
    ) -> PyResult<()> {
        let address = value.as_ptr() as usize;
        if let Some(Container { number, is_open, .. }) = self.containers.get(&address) {
            if *is_open {
                return Err(self.refused("the value contains itself"));
            }
            write!(self.text, "{{\"{TAG}\":[\"same\",{number}]}}").expect("a write to a String cannot fail");
            return Ok(());
        }
        let number = self.containers.len();
        self.containers.insert(address, Container { number, is_open: true, _value: value.clone() });
        write(self)?;
        if let Some(container) = self.containers.get_mut(&address) {
            container.is_open = false;
        }
        Ok(())
    }

    fn float(&mut self, number: f64) -> PyResult<()> {
        if number.is_finite() {
            // The shortest text that parses to this number, with a point or an exponent.
            write!(self.text, "{number:?}").expect("a write to a String cannot fail");
            return Ok(());
        }
        self.tagged("float", |walk| {
            match number.to_bits() {
                NAN_BITS => write!(walk.text, "\"nan\""),
                bits if number.is_nan() => write!(walk.text, "\"nan:{bits:016x}\""),
                _ => write!(walk.text, "\"{number}\""),
            }
            .expect("a write to a String cannot fail");
            Ok(())
        })
    }

    /// Writes an OrderedDict in its own order, with its attributes, such as those of torch module states.
    fn ordered_dict(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        // Called as a method, since a subclass may define its own order.
        let items = value.call_method0("items")?.try_iter()?.collect::<PyResult<Vec<_>>>()?;
        let attributes = value.getattr("__dict__")?.cast_into::<PyDict>()?;
        let attributes = (!attributes.is_empty()).then_some(attributes);
        self.dict(&PyList::new(self.py, items)?, "OrderedDict", false, depth, attributes.as_ref())
    }

    fn items(&mut self, items: &Bound<'py, PyTuple>, depth: usize) -> PyResult<()> {
        let len = self.path.len();
        self.listed(items.len(), |walk, at| {
            write!(walk.path, "/{at}").expect("a write to a String cannot fail");
            walk.value(&items.get_item(at)?, depth + 1)?;
            walk.path.truncate(len);
            Ok(())
        })
    }

    /// Writes a dict. A plain dict whose keys are all strings other than the tag is written as a JSON object.
    fn dict(
        &mut self,
        items: &Bound<'py, PyList>,
        kind: &str,
        is_plain: bool,
        depth: usize,
        attributes: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<()> {
        let items = items.extract::<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>>()?;
        let all_names = items.iter().all(|(key, _)| key.is_exact_instance_of::<PyString>());
        let is_name = |key: &Bound<'py, PyAny>| key.cast_exact::<PyString>().is_ok_and(|name| name != TAG);
        if is_plain && items.iter().all(|(key, _)| is_name(key)) {
            self.text.push('{');
            for (at, (key, value)) in items.iter().enumerate() {
                self.comma(at);
                self.key(key)?;
                self.text.push(':');
                self.member(key, all_names, value, depth)?;
            }
            self.text.push('}');
            return Ok(());
        }
        self.tagged(kind, |walk| {
            walk.listed(items.len(), |walk, at| {
                let (key, value) = &items[at];
                walk.text.push('[');
                walk.key(key)?;
                walk.text.push(',');
                walk.member(key, all_names, value, depth)?;
                walk.text.push(']');
                Ok(())
            })?;
            if let Some(attributes) = attributes {
                walk.text.push(',');
                let len = walk.path.len();
                walk.path.push('/');
                walk.path.push_str(OTHER_KEY);
                walk.path.push_str("attributes");
                walk.value(attributes, depth + 1)?;
                walk.path.truncate(len);
            }
            Ok(())
        })
    }

    /// Writes the JSON of a dict key or an integer.
    fn key(&mut self, key: &Bound<'py, PyAny>) -> PyResult<()> {
        if let Ok(name) = key.cast_exact::<PyString>() {
            return self.string(name);
        }
        let coded = self.py.import(VALUES)?.call_method1("key", (&self.path, key))?;
        self.json(&coded)
    }

    /// Writes the value for one key of a dict.
    ///
    /// The value's path is the path of the dict and a segment that no other key of the dict has. A name is
    /// unchanged, except that `~` becomes `~0` and `/` becomes `~1`. An integer is written in decimal. Any
    /// other key becomes `~:` and its JSON. This also applies to a name that is not valid Unicode, and to a
    /// name that looks like an integer if not all keys of the dict are names.
    fn member(
        &mut self,
        key: &Bound<'py, PyAny>,
        all_names: bool,
        value: &Bound<'py, PyAny>,
        depth: usize,
    ) -> PyResult<()> {
        let len = self.path.len();
        self.path.push('/');
        let name = key.cast_exact::<PyString>().ok().and_then(|name| name.to_str().ok());
        match name {
            Some(name) if all_names || !is_like_integer(name) => self.path.push_str(&escaped(name)),
            None if key.is_exact_instance_of::<PyInt>() && key.extract::<i64>().is_ok() => {
                write!(self.path, "{key}").expect("a write to a String cannot fail");
            }
            _ => {
                let start = self.text.len();
                self.key(key)?;
                let text = self.text.split_off(start);
                // The brackets of the tag are removed.
                let inner = text.strip_prefix("{\"$\":[\"").and_then(|text| text.strip_suffix("]}"));
                let text = match inner.and_then(|inner| inner.split_once("\",")) {
                    Some((kind, rest)) => Cow::Owned(format!("{kind}{rest}")),
                    None => Cow::Borrowed(&text[..]),
                };
                self.path.push_str(OTHER_KEY);
                self.path.push_str(&escaped(&text));
            }
        }
        self.value(value, depth + 1)?;
        self.path.truncate(len);
        Ok(())
    }

    /// Writes a JSON list whose items are written by `item`.
    fn listed(
        &mut self,
        count: usize,
        mut item: impl FnMut(&mut Self, usize) -> PyResult<()>,
    ) -> PyResult<()> {
        self.text.push('[');
        for at in 0..count {
            self.comma(at);
            item(self, at)?;
        }
        self.text.push(']');
        Ok(())
    }

    fn comma(&mut self, at: usize) {
        if at > 0 {
            self.text.push(',');
        }
    }

    fn string(&mut self, text: &Bound<'py, PyString>) -> PyResult<()> {
        let Ok(plain) = text.to_str() else {
            // The text contains unpaired UTF-16 surrogates, which JSON can represent and Rust strings cannot.
            return self.json(text);
        };
        self.text.push('"');
        for c in plain.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                c if c.is_ascii_control() => {
                    write!(self.text, "\\u{:04x}", u32::from(c)).expect("a write to a String cannot fail");
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
        Ok(())
    }

    /// Writes a Python value for which JSON has a type.
    fn json(&mut self, value: &Bound<'py, PyAny>) -> PyResult<()> {
        let text = self.py.import("json")?.call_method1("dumps", (value,))?;
        self.text.push_str(text.cast::<PyString>()?.to_str()?);
        Ok(())
    }

    /// Writes `{"$":[kind,…]}`, a value for which JSON has no type. `rest` writes the elements after the
    /// kind.
    fn tagged(&mut self, kind: &str, rest: impl FnOnce(&mut Self) -> PyResult<()>) -> PyResult<()> {
        write!(self.text, "{{\"{TAG}\":[\"{kind}\",").expect("a write to a String cannot fail");
        rest(self)?;
        self.text.push_str("]}");
        Ok(())
    }

    fn tagged_text(&mut self, kind: &str, text: &Bound<'py, PyString>) -> PyResult<()> {
        self.tagged(kind, |walk| walk.string(text))
    }

    fn refused(&self, reason: &str) -> PyErr {
        let path = self.path.strip_prefix('/').unwrap_or(&self.path);
        errors::own(self.py, "RefusedError", &format!("{path}: {reason}"), CONVERT, None)
    }
}

impl Leaves<'_> {
    /// Returns whether a value of one of the types is passed to `adapt` instead of being collected.
    fn is_other(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.unless.as_ref().map_or(Ok(false), |name| value.getattr(name)?.is_truthy())
    }
}

pub fn escaped(name: &str) -> Cow<'_, str> {
    if name.contains(['~', '/']) {
        Cow::Owned(name.replace('~', "~0").replace('/', "~1"))
    } else {
        Cow::Borrowed(name)
    }
}

fn is_like_integer(name: &str) -> bool {
    let digits = name.strip_prefix('-').unwrap_or(name);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}
