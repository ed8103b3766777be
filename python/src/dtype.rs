//! Element types and their names in this package, in weight files, in DLPack and in the buffer protocol.

use std::ffi::CStr;

use pyo3::exceptions::{PyAttributeError, PyImportError};
use pyo3::prelude::*;

use crate::dlpack::DlDtype;
use crate::errors::{invalid, memory_refused};

#[derive(Debug)]
pub struct Dtype {
    /// The name in NumPy, torch and JAX.
    pub name: &'static str,
    /// The name in safetensors and in the metadata of pages that hold tensors.
    pub short: &'static str,
    code: u8,
    bits: u8,
    /// The number of values in an element: 2 for two 4-bit floats in a byte, otherwise 1.
    lanes: u16,
    /// The format in the `struct` module, or `None` if the module has no format for the type.
    pub format: Option<&'static CStr>,
}

const fn dtype(
    name: &'static str,
    short: &'static str,
    code: u8,
    bits: u8,
    format: Option<&'static CStr>,
) -> Dtype {
    Dtype { name, short, code, bits, lanes: 1, format }
}

/// The element types. The codes are those of DLPack: 0 signed, 1 unsigned, 2 IEEE float, 4 bfloat, 5 complex,
/// 6 bool, 7 and above small floats.
static DTYPES: &[Dtype] = &[
    dtype("bool", "BOOL", 6, 8, Some(c"?")),
    dtype("uint8", "U8", 1, 8, Some(c"B")),
    dtype("int8", "I8", 0, 8, Some(c"b")),
    dtype("uint16", "U16", 1, 16, Some(c"H")),
    dtype("int16", "I16", 0, 16, Some(c"h")),
    dtype("uint32", "U32", 1, 32, Some(c"I")),
    dtype("int32", "I32", 0, 32, Some(c"i")),
    dtype("uint64", "U64", 1, 64, Some(c"Q")),
    dtype("int64", "I64", 0, 64, Some(c"q")),
    dtype("float16", "F16", 2, 16, Some(c"e")),
    dtype("bfloat16", "BF16", 4, 16, None),
    dtype("float32", "F32", 2, 32, Some(c"f")),
    dtype("float64", "F64", 2, 64, Some(c"d")),
    dtype("complex32", "C32", 5, 32, None),
    dtype("complex64", "C64", 5, 64, Some(c"Zf")),
    dtype("complex128", "C128", 5, 128, Some(c"Zd")),
    dtype("float8_e4m3fn", "F8_E4M3", 10, 8, None),
    dtype("float8_e4m3fnuz", "F8_E4M3FNUZ", 11, 8, None),
    dtype("float8_e5m2", "F8_E5M2", 12, 8, None),
    dtype("float8_e5m2fnuz", "F8_E5M2FNUZ", 13, 8, None),
    dtype("float8_e8m0fnu", "F8_E8M0", 14, 8, None),
    // Two numbers per byte. safetensors counts them individually, as F4.
    Dtype { lanes: 2, ..dtype("float4_e2m1fn_x2", "F4_X2", 17, 4, None) },
];

impl Dtype {
    /// Returns the element type with this DLPack code and width, if there is one.
    pub fn of_dlpack(dtype: DlDtype) -> Option<&'static Self> {
        let is_it = |known: &&Dtype| (known.code, known.bits, 1) == (dtype.code, dtype.bits, dtype.lanes);
        DTYPES.iter().find(is_it)
    }

    /// Returns the element type with this `struct` format and element size, if there is one and the format
    /// has the machine's byte order.
    pub fn of_format(format: &[u8], item_size: usize) -> Option<&'static Self> {
        let (order, kind) = match format {
            [order @ (b'@' | b'=' | b'<' | b'>' | b'!'), kind @ ..] => (*order, kind),
            kind => (b'@', kind),
        };
        if item_size > 1 && matches!(order, b'>' | b'!') {
            return None;
        }
        let code = match kind {
            b"?" => 6,
            [b'b' | b'h' | b'i' | b'l' | b'q' | b'n'] => 0,
            [b'B' | b'H' | b'I' | b'L' | b'Q' | b'N' | b'c'] => 1,
            [b'e' | b'f' | b'd'] => 2,
            b"Zf" | b"Zd" | b"F" | b"D" => 5,
            _ => return None,
        };
        let bits = u8::try_from(item_size.checked_mul(8)?).ok()?;
        Self::of_dlpack(DlDtype { code, bits, lanes: 1 })
    }

    /// Returns the element type with this name, which may be its NumPy name or its name in weight files.
    ///
    /// # Errors
    /// `ValueError` if the name is unknown. The message lists the known names.
    pub fn parse(name: &str) -> PyResult<&'static Self> {
        // Torch names its types `torch.float32` and so on.
        let name = name.strip_prefix("torch.").unwrap_or(name);
        DTYPES.iter().find(|dtype| dtype.name == name || dtype.short == name).ok_or_else(|| {
            let names: Vec<&str> = DTYPES.iter().map(|dtype| dtype.name).collect();
            invalid(format!("dtype {name:?} is not one of {}", names.join(", ")), "use one of these")
        })
    }

    /// Returns the length of an element in bytes.
    pub fn item_size(&self) -> usize {
        usize::from(self.bits) * usize::from(self.lanes) / 8
    }

    pub fn dlpack(&self) -> DlDtype {
        DlDtype { code: self.code, bits: self.bits, lanes: self.lanes }
    }

    /// Returns the dtype of NumPy arrays with these elements, which may be a dtype of the package
    /// `ml_dtypes`.
    ///
    /// # Errors
    /// `MemoryRefusedError` if neither package has such a dtype.
    pub fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.format.is_some() {
            return py.import("numpy")?.call_method1("dtype", (self.name,));
        }
        py.import("ml_dtypes").and_then(|added| added.getattr(self.name)).map_err(|error| {
            let instead = "read the page with dtype \"uint8\", or use DLPack";
            let refused = if error.is_instance_of::<PyAttributeError>(py) {
                memory_refused(format!("neither NumPy nor ml_dtypes has a dtype {}", self.name), instead)
            } else if error.is_instance_of::<PyImportError>(py) {
                let message = format!("NumPy has no dtype {}, and ml_dtypes cannot be imported", self.name);
                memory_refused(message, format!("install ml_dtypes; or {instead}"))
            } else {
                return error;
            };
            refused.set_cause(py, Some(error));
            refused
        })
    }
}

/// Returns the element type and shape of a page of `len` bytes. Values that the caller does not pass are
/// those in the page's metadata. If the metadata states no element type, the result is one dimension of
/// uint8.
///
/// # Errors
/// `ValueError` if `len` does not match the element type and shape.
pub fn layout(
    dtype: Option<&str>,
    shape: Option<Vec<usize>>,
    info: &remanent::PageInfo,
    len: usize,
) -> PyResult<(&'static Dtype, Vec<usize>)> {
    let own_dtype = info.metadata.get("dtype").and_then(remanent::Value::as_str);
    let own_shape = || -> Option<Vec<usize>> {
        let dims = info.metadata.get("shape")?.as_list()?;
        dims.iter().map(|dim| dim.as_u64().and_then(|dim| usize::try_from(dim).ok())).collect()
    };
    let (dtype, shape) = match (dtype, shape) {
        (Some(dtype), shape) => (Dtype::parse(dtype)?, shape),
        (None, shape) => match own_dtype {
            Some(own) => (Dtype::parse(own)?, shape.or_else(own_shape)),
            None => (&DTYPES[1], shape),
        },
    };
    let item = dtype.item_size();
    let shape = match shape {
        Some(shape) => shape,
        None if len.is_multiple_of(item) => vec![len / item],
        None => {
            return Err(invalid(
                format!("{len} bytes are not a whole number of {} elements", dtype.name),
                "use another dtype, such as \"uint8\"",
            ));
        }
    };
    let wanted = shape.iter().try_fold(item, |len, dim| len.checked_mul(*dim));
    if wanted != Some(len) {
        return Err(invalid(
            format!("{len} bytes do not match shape {shape:?} with dtype {}", dtype.name),
            "pass the dtype and shape of the page, or neither to use those in its metadata",
        ));
    }
    Ok((dtype, shape))
}
