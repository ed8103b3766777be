//! Plain values of Python's as JSON, and what lies among them: one walk over a state of thousands of values.
//!
//! In Python the walk took longer than all else that a save does before it copies. It writes text, and makes
//! no objects of Python's for what it finds: the garbage collector would look at each.

use std::fmt::Write;

use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PyString, PyTuple,
};

use crate::errors;

/// The remedy for a value that cannot be stored.
const CONVERT: &str = "convert the value to one that can be stored, or leave it out of the state";

/// The key of what JSON does not tell apart.
const TAG: &str = "$";
const DEPTH_MAX: usize = 100;
/// JSON readers of other languages lose what is longer.
const INT_MAX: i64 = 1 << 53;

/// A walk over a value, which writes it as JSON.
pub struct Walk<'a, 'py> {
    py: Python<'py>,
    /// Takes what is another library's.
    adapt: &'a Bound<'py, PyAny>,
    leaves: Option<&'a Leaves<'py>>,
    /// Where the value lies that is looked at.
    path: String,
    /// What was written so far.
    text: String,
}

/// Values that are taken as they are, by their path.
#[derive(FromPyObject)]
pub struct Leaves<'py> {
    /// Their types: no others, not even those that are made of them.
    kinds: Bound<'py, PyFrozenSet>,
    /// What stands for one is this and its path.
    tag: Bound<'py, PyString>,
    into: Bound<'py, PyDict>,
}

impl<'a, 'py> Walk<'a, 'py> {
    /// A walk that begins at `path`.
    pub fn new(
        py: Python<'py>,
        path: String,
        adapt: &'a Bound<'py, PyAny>,
        leaves: Option<&'a Leaves<'py>>,
    ) -> Self {
        Self { py, adapt, leaves, path, text: String::new() }
    }

    /// The value as JSON.
    ///
    /// # Errors
    /// `RefusedError` for what cannot be stored; what `adapt` raises.
    pub fn flatten(mut self, value: &Bound<'py, PyAny>) -> PyResult<String> {
        self.value(value, 0)?;
        Ok(self.text)
    }

    fn value(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        if depth > DEPTH_MAX {
            return Err(self.refused(&format!("values nest more than {DEPTH_MAX} deep")));
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
            let number = number.value();
            if !number.is_finite() {
                return self.tagged_text("float", &value.str()?);
            }
            // The shortest text that is read as this number, with a point or an exponent.
            write!(self.text, "{number:?}").expect("a string takes all");
            return Ok(());
        }
        if value.is_exact_instance_of::<PyInt>() {
            return match value.extract::<i64>() {
                Ok(number) if (-INT_MAX..=INT_MAX).contains(&number) => {
                    write!(self.text, "{number}").expect("a string takes all");
                    Ok(())
                }
                _ => self.tagged_text("int", &value.str()?),
            };
        }
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            return self.dict(&dict.items(), "dict", true, depth);
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            return self.items(&list.to_tuple(), depth);
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            return self.tagged("tuple", |walk| walk.items(tuple, depth));
        }
        if let Some(leaves) = self.leaves
            && leaves.kinds.contains(value.get_type())?
        {
            let name = PyString::new(self.py, self.path.get(1..).unwrap_or_default());
            leaves.into.set_item(&name, value)?;
            return self.tagged_text(&leaves.tag.to_string_lossy(), &name);
        }
        let adapted = self.adapt.call1((&self.path, value))?;
        if adapted.is_none() { self.rare(value, depth) } else { self.json(&adapted) }
    }

    /// Values that are of another kind than most.
    fn rare(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        let kind = value.get_type().name()?;
        if value.is_exact_instance_of::<PyComplex>() {
            let (real, imag) = (value.getattr("real")?.str()?, value.getattr("imag")?.str()?);
            return self.tagged("complex", |walk| {
                walk.string(&real)?;
                walk.text.push(',');
                walk.string(&imag)
            });
        }
        if value.is_exact_instance_of::<PyBytes>() || value.is_exact_instance_of::<PyByteArray>() {
            let coded =
                self.py.import("base64")?.call_method1("b64encode", (value,))?.call_method0("decode")?;
            return self.tagged_text(kind.to_str()?, coded.cast()?);
        }
        let is_dict = value.is_instance_of::<PyDict>();
        for name in ["dict", "OrderedDict", "defaultdict"] {
            if is_dict && kind == name {
                // Asked for by its method: the order may be the object's own.
                let items = value.call_method0("items")?.try_iter()?.collect::<PyResult<Vec<_>>>()?;
                let stands_for = if name == "OrderedDict" { name } else { "dict" };
                return self.dict(&PyList::new(self.py, items)?, stands_for, false, depth);
            }
        }
        Err(self.refused(&format!("a {kind} cannot be stored")))
    }

    /// The items of a list or a tuple.
    fn items(&mut self, items: &Bound<'py, PyTuple>, depth: usize) -> PyResult<()> {
        let len = self.path.len();
        self.listed(items.len(), |walk, at| {
            write!(walk.path, "/{at}").expect("a string takes all");
            walk.value(&items.get_item(at)?, depth + 1)?;
            walk.path.truncate(len);
            Ok(())
        })
    }

    /// The items of a dict: by name if it is plain and has names alone, none of them ours.
    fn dict(&mut self, items: &Bound<'py, PyList>, kind: &str, is_plain: bool, depth: usize) -> PyResult<()> {
        let items = items.extract::<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>>()?;
        let is_name = |key: &Bound<'py, PyAny>| key.cast_exact::<PyString>().is_ok_and(|name| name != TAG);
        if is_plain && items.iter().all(|(key, _)| is_name(key)) {
            self.text.push('{');
            for (at, (key, value)) in items.iter().enumerate() {
                self.comma(at);
                self.string(key.cast()?)?;
                self.text.push(':');
                self.member(key, value, depth)?;
            }
            self.text.push('}');
            return Ok(());
        }
        self.tagged(kind, |walk| {
            walk.listed(items.len(), |walk, at| {
                let (key, value) = &items[at];
                let is_key = key.is_none()
                    || key.is_exact_instance_of::<PyString>()
                    || key.is_exact_instance_of::<PyInt>()
                    || key.is_exact_instance_of::<PyBool>()
                    || key.is_exact_instance_of::<PyTuple>();
                if !is_key {
                    let kind = key.get_type().name()?;
                    return Err(walk.refused(&format!("a {kind} as a key cannot be stored")));
                }
                walk.text.push('[');
                walk.value(key, depth + 1)?;
                walk.text.push(',');
                walk.member(key, value, depth)?;
                walk.text.push(']');
                Ok(())
            })
        })
    }

    /// What a dict has by this key.
    fn member(&mut self, key: &Bound<'py, PyAny>, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        let len = self.path.len();
        match key.cast_exact::<PyString>() {
            Ok(name) => {
                self.path.push('/');
                self.path.push_str(&name.to_string_lossy());
            }
            Err(_) => write!(self.path, "/{key}").expect("a string takes all"),
        }
        self.value(value, depth + 1)?;
        self.path.truncate(len);
        Ok(())
    }

    /// `[…]`, the items of which `item` writes.
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
            // It has halves of a pair of UTF-16, which JSON can tell and text of Rust's cannot.
            return self.json(text);
        };
        self.text.push('"');
        for c in plain.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                c if c.is_ascii_control() => {
                    write!(self.text, "\\u{:04x}", u32::from(c)).expect("a string takes all");
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
        Ok(())
    }

    /// What is JSON already, as objects of Python's.
    fn json(&mut self, value: &Bound<'py, PyAny>) -> PyResult<()> {
        let text = self.py.import("json")?.call_method1("dumps", (value,))?;
        self.text.push_str(text.cast::<PyString>()?.to_str()?);
        Ok(())
    }

    /// What JSON does not tell apart: `{"$":[kind,…]}`, the rest of which `rest` writes.
    fn tagged(&mut self, kind: &str, rest: impl FnOnce(&mut Self) -> PyResult<()>) -> PyResult<()> {
        write!(self.text, "{{\"{TAG}\":[\"{kind}\",").expect("a string takes all");
        rest(self)?;
        self.text.push_str("]}");
        Ok(())
    }

    fn tagged_text(&mut self, kind: &str, text: &Bound<'py, PyString>) -> PyResult<()> {
        self.tagged(kind, |walk| walk.string(text))
    }

    fn refused(&self, reason: &str) -> PyErr {
        errors::own(self.py, "RefusedError", &format!("{}: {reason}", self.path), CONVERT, None)
    }
}
