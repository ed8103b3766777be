//! Data types of tensor elements: their widths, and the values of elements as text and JSON.

use remanent_format::Width;
use safetensors::Dtype;
use serde_json::Value;

/// Returns the dtype with a safetensors name, or `None` if there is no such dtype.
pub fn parse(name: &str) -> Option<Dtype> {
    serde_json::from_value(Value::from(name)).ok()
}

/// Returns the width of the units that are compared and logged for a dtype. If an element has fewer than 8 bits, the
/// unit is a byte with several elements.
pub fn width(dtype: Dtype) -> Width {
    match dtype.bitsize() {
        64 => Width::W8,
        32 => Width::W4,
        16 => Width::W2,
        _ => Width::W1,
    }
}

/// The bit layout of a float with at most 16 bits.
struct SmallFloat {
    exponent_bits: u32,
    mantissa_bits: u32,
    bias: i32,
    specials: Specials,
}

/// The rule for which bit patterns of a float represent infinity and NaN.
#[derive(PartialEq)]
enum Specials {
    /// The highest exponent represents infinity, or NaN if the mantissa is not zero.
    Ieee,
    /// NaN has all exponent and mantissa bits set. There is no infinity.
    AllOnes,
    /// The negative zero represents NaN. There is no infinity.
    NegativeZero,
}

const fn small(exponent_bits: u32, mantissa_bits: u32, bias: i32, specials: Specials) -> SmallFloat {
    SmallFloat { exponent_bits, mantissa_bits, bias, specials }
}

impl SmallFloat {
    fn value(&self, bits: u32) -> f64 {
        let SmallFloat { exponent_bits, mantissa_bits, bias, .. } = *self;
        let exponent_max = (1 << exponent_bits) - 1;
        let sign = bits >> (exponent_bits + mantissa_bits);
        let exponent = bits >> mantissa_bits & exponent_max;
        let mantissa = bits & ((1 << mantissa_bits) - 1);
        let magnitude = match self.specials {
            Specials::Ieee if exponent == exponent_max && mantissa == 0 => f64::INFINITY,
            Specials::Ieee if exponent == exponent_max => f64::NAN,
            Specials::AllOnes if exponent == exponent_max && mantissa == (1 << mantissa_bits) - 1 => f64::NAN,
            Specials::NegativeZero if sign == 1 && exponent == 0 && mantissa == 0 => f64::NAN,
            _ => {
                // Subnormal numbers have no leading one.
                let leading = if exponent == 0 { 0 } else { 1 << mantissa_bits };
                let power = exponent.max(1) as i32 - bias - mantissa_bits as i32;
                f64::from(leading + mantissa) * f64::from(power).exp2()
            }
        };
        if sign == 1 { -magnitude } else { magnitude }
    }
}

/// Returns the value of a float element, or `None` if the dtype is not a real float.
///
/// # Panics
/// Panics if `bytes` is not one element.
pub fn float(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    let small_of = |small: SmallFloat| Some(small.value(unsigned(bytes) as u32));
    match dtype {
        Dtype::F64 => Some(f64::from_le_bytes(bytes.try_into().expect("8 bytes"))),
        Dtype::F32 => Some(f32::from_le_bytes(bytes.try_into().expect("4 bytes")).into()),
        Dtype::BF16 => Some(f32::from_bits((unsigned(bytes) as u32) << 16).into()),
        Dtype::F16 => small_of(small(5, 10, 15, Specials::Ieee)),
        Dtype::F8_E5M2 => small_of(small(5, 2, 15, Specials::Ieee)),
        Dtype::F8_E4M3 => small_of(small(4, 3, 7, Specials::AllOnes)),
        Dtype::F8_E5M2FNUZ => small_of(small(5, 2, 16, Specials::NegativeZero)),
        Dtype::F8_E4M3FNUZ => small_of(small(4, 3, 8, Specials::NegativeZero)),
        // The byte is the exponent of a power of two.
        Dtype::F8_E8M0 => {
            Some(if bytes[0] == 0xff { f64::NAN } else { (f64::from(bytes[0]) - 127.0).exp2() })
        }
        _ => None,
    }
}

/// Returns the value of an element as text.
///
/// # Panics
/// Panics if `bytes` is not one element.
pub fn text(dtype: Dtype, bytes: &[u8]) -> String {
    match dtype {
        Dtype::F64 => float(dtype, bytes).expect("a float").to_string(),
        Dtype::BOOL if bytes[0] < 2 => (bytes[0] == 1).to_string(),
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => unsigned(bytes).to_string(),
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => signed(bytes).to_string(),
        Dtype::C64 => {
            let (real, imaginary) = bytes.split_at(4);
            format!("({}, {})", text(Dtype::F32, real), text(Dtype::F32, imaginary))
        }
        // Floats of up to 32 bits are printed as `f32`, whose shortest representation is familiar.
        _ => float(dtype, bytes).map_or_else(|| hex(bytes), |value| (value as f32).to_string()),
    }
}

/// Returns the value of an element as a JSON number, or as a JSON string if no JSON number represents the value.
///
/// # Panics
/// Panics if `bytes` is not one element.
pub fn json(dtype: Dtype, bytes: &[u8]) -> Value {
    match dtype {
        Dtype::BOOL if bytes[0] < 2 => (bytes[0] == 1).into(),
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => unsigned(bytes).into(),
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => signed(bytes).into(),
        _ => float(dtype, bytes).map_or_else(|| text(dtype, bytes).into(), crate::cli::json::float),
    }
}

/// Returns bytes in hexadecimal, with the most significant byte first.
fn hex(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect();
    format!("0x{digits}")
}

fn unsigned(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn signed(bytes: &[u8]) -> i64 {
    let unused = 64 - 8 * bytes.len() as u32;
    (unsigned(bytes) << unused) as i64 >> unused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_of_every_dtype_are_decoded() {
        for (dtype, bytes, expected) in [
            (Dtype::F64, &(-0.1f64).to_le_bytes()[..], -0.1),
            (Dtype::F32, &1.5f32.to_le_bytes(), 1.5),
            (Dtype::BF16, &[0x80, 0x3f], 1.0),
            (Dtype::F16, &[0x00, 0x3c], 1.0),
            (Dtype::F16, &[0xff, 0x7b], 65504.0),
            (Dtype::F16, &[0x01, 0x80], -1.0 / f64::from(1 << 24)),
            (Dtype::F16, &[0x00, 0xfc], f64::NEG_INFINITY),
            (Dtype::F8_E5M2, &[0x7b], 57344.0),
            (Dtype::F8_E5M2, &[0x7c], f64::INFINITY),
            (Dtype::F8_E4M3, &[0x7e], 448.0),
            (Dtype::F8_E4M3, &[0x01], 1.0 / 512.0),
            (Dtype::F8_E4M3FNUZ, &[0x7f], 240.0),
            (Dtype::F8_E5M2FNUZ, &[0x7f], 57344.0),
            (Dtype::F8_E8M0, &[127], 1.0),
            (Dtype::F8_E8M0, &[0], (-127f64).exp2()),
        ] {
            assert_eq!(float(dtype, bytes), Some(expected), "{dtype} {bytes:x?}");
        }
        for (dtype, bytes) in [
            (Dtype::F16, &[0x01, 0x7c][..]),
            (Dtype::F8_E5M2, &[0xfd]),
            (Dtype::F8_E4M3, &[0xff]),
            (Dtype::F8_E4M3FNUZ, &[0x80]),
            (Dtype::F8_E5M2FNUZ, &[0x80]),
            (Dtype::F8_E8M0, &[0xff]),
        ] {
            assert!(float(dtype, bytes).unwrap().is_nan(), "{dtype} {bytes:x?}");
        }
    }

    #[test]
    fn elements_are_printed_by_their_dtype() {
        for (dtype, bytes, expected_text, expected_json) in [
            (Dtype::F32, &0.1f32.to_le_bytes()[..], "0.1", "0.10000000149011612"),
            (Dtype::F32, &f32::NAN.to_le_bytes(), "NaN", "\"NaN\""),
            (Dtype::BF16, &[0xcd, 0x3d], "0.100097656", "0.10009765625"),
            (Dtype::I16, &[0xfe, 0xff], "-2", "-2"),
            (Dtype::U64, &u64::MAX.to_le_bytes(), "18446744073709551615", "18446744073709551615"),
            (Dtype::BOOL, &[1], "true", "true"),
            (Dtype::BOOL, &[7], "0x07", "\"0x07\""),
            (Dtype::F4, &[0x3c], "0x3c", "\"0x3c\""),
            (Dtype::C64, &[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0], "(1, -2)", "\"(1, -2)\""),
        ] {
            assert_eq!(text(dtype, bytes), expected_text);
            assert_eq!(json(dtype, bytes).to_string(), expected_json);
        }
    }

    #[test]
    fn dtypes_have_names_and_widths() {
        for (name, expected) in
            [("F4", 1), ("BOOL", 1), ("F8_E4M3", 1), ("BF16", 2), ("I32", 4), ("C64", 8), ("U64", 8)]
        {
            let dtype = parse(name).unwrap();
            assert_eq!(dtype.to_string(), name);
            assert_eq!(width(dtype).bytes(), expected);
        }
        assert_eq!(parse("F33"), None);
    }
}
