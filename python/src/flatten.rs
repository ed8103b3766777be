//! Plain values of Python's as JSON, and what lies among them: one walk over a state of thousands of values.
//!
//! In Python the walk took longer than all else that a save does before it copies.

use std::fmt::Write;

use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PyString, PyTuple,
};

use crate::errors;

/// The key of what JSON does not tell apart.
const TAG: &str = "$";
const DEPTH_MAX: usize = 100;
/// JSON readers of other languages lose what is longer.
const INT_MAX: i64 = 1 << 53;

/// A walk over a value.
pub struct Walk<'a, 'py> {
    py: Python<'py>,
    /// Takes what is another library's.
    adapt: &'a Bound<'py, PyAny>,
    leaves: Option<&'a Leaves<'py>>,
    /// Where the value lies that is looked at.
    path: String,
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
        Self { py, adapt, leaves, path }
    }

    /// The value as JSON.
    ///
    /// # Errors
    /// `RefusedError` for what cannot be stored; what `adapt` raises.
    pub fn flatten(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        if depth > DEPTH_MAX {
            return Err(self.refused(&format!("values nest more than {DEPTH_MAX} deep")));
        }
        let is_text = value.is_exact_instance_of::<PyString>();
        if is_text || value.is_none() || value.is_exact_instance_of::<PyBool>() {
            return Ok(value.clone());
        }
        if value.is_exact_instance_of::<PyFloat>() {
            let is_finite = value.extract::<f64>()?.is_finite();
            return if is_finite { Ok(value.clone()) } else { self.tagged("float", value.str()?) };
        }
        if value.is_exact_instance_of::<PyInt>() {
            let is_short = value.extract::<i64>().is_ok_and(|value| (-INT_MAX..=INT_MAX).contains(&value));
            return if is_short { Ok(value.clone()) } else { self.tagged("int", value.str()?) };
        }
        if value.is_exact_instance_of::<PyDict>() {
            let items = value.cast::<PyDict>()?.items();
            return self.dict(&items, "dict", true, depth);
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            return self.inner(&list.to_tuple(), depth).map(Bound::into_any);
        }
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            let inner = self.inner(tuple, depth)?;
            return self.tagged("tuple", inner);
        }
        if let Some(leaves) = self.leaves
            && leaves.kinds.contains(value.get_type())?
        {
            let name = PyString::new(self.py, self.path.get(1..).unwrap_or_default());
            leaves.into.set_item(&name, value)?;
            return self.tag([leaves.tag.clone().into_any(), name.into_any()]);
        }
        let adapted = self.adapt.call1((&self.path, value))?;
        if !adapted.is_none() {
            return Ok(adapted);
        }
        self.rare(value, depth)
    }

    /// Values that are of another kind than most.
    fn rare(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        let kind = value.get_type().name()?;
        if value.is_exact_instance_of::<PyComplex>() {
            let part = |name| Ok::<_, PyErr>(value.getattr(name)?.str()?.into_any());
            let kind = PyString::new(self.py, "complex").into_any();
            return self.tag([kind, part("real")?, part("imag")?]);
        }
        if value.is_exact_instance_of::<PyBytes>() || value.is_exact_instance_of::<PyByteArray>() {
            let coded = self.py.import("base64")?.call_method1("b64encode", (value,))?;
            return self.tagged(kind.to_str()?, coded.call_method0("decode")?);
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
    fn inner(&mut self, items: &Bound<'py, PyTuple>, depth: usize) -> PyResult<Bound<'py, PyList>> {
        let len = self.path.len();
        let mut inner = Vec::with_capacity(items.len());
        for (at, item) in items.iter().enumerate() {
            write!(self.path, "/{at}").expect("a string takes all");
            inner.push(self.flatten(&item, depth + 1)?);
            self.path.truncate(len);
        }
        PyList::new(self.py, inner)
    }

    /// The items of a dict: by name if it is plain and has names alone, none of them ours.
    fn dict(
        &mut self,
        items: &Bound<'py, PyList>,
        kind: &str,
        is_plain: bool,
        depth: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let len = self.path.len();
        let (mut held, mut by_name) = (Vec::with_capacity(items.len()), is_plain);
        for item in items.iter() {
            let (key, value) = item.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
            if let Ok(name) = key.cast_exact::<PyString>() {
                let name = name.to_string_lossy();
                by_name &= name != TAG;
                self.path.push('/');
                self.path.push_str(&name);
            } else {
                let is_key = key.is_none()
                    || key.is_exact_instance_of::<PyInt>()
                    || key.is_exact_instance_of::<PyBool>()
                    || key.is_exact_instance_of::<PyTuple>();
                if !is_key {
                    let kind = key.get_type().name()?;
                    return Err(self.refused(&format!("a {kind} as a key cannot be stored")));
                }
                by_name = false;
                write!(self.path, "/{key}").expect("a string takes all");
            }
            let flat = self.flatten(&value, depth + 1)?;
            self.path.truncate(len);
            held.push((key, flat));
        }
        if by_name {
            let dict = PyDict::new(self.py);
            for (key, value) in held {
                dict.set_item(key, value)?;
            }
            return Ok(dict.into_any());
        }
        let mut keyed = Vec::with_capacity(held.len());
        for (key, value) in held {
            keyed.push(PyList::new(self.py, [self.flatten(&key, depth + 1)?, value])?);
        }
        self.tagged(kind, PyList::new(self.py, keyed)?)
    }

    fn tagged<T>(&self, kind: &str, value: Bound<'py, T>) -> PyResult<Bound<'py, PyAny>> {
        self.tag([PyString::new(self.py, kind).into_any(), value.into_any()])
    }

    /// What JSON does not tell apart: `{"$": [kind, …]}`.
    fn tag<const N: usize>(&self, parts: [Bound<'py, PyAny>; N]) -> PyResult<Bound<'py, PyAny>> {
        let dict = PyDict::new(self.py);
        dict.set_item(TAG, PyList::new(self.py, parts)?)?;
        Ok(dict.into_any())
    }

    fn refused(&self, reason: &str) -> PyErr {
        errors::own(self.py, "RefusedError", &format!("{}: {reason}", self.path), "change the call", None)
    }
}
