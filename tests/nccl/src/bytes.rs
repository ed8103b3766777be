//! The movement of the bytes of an operation, between memory that is the host's.

use std::ffi::c_int;

/// One rank's call of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    pub kind: Kind,
    pub source: u64,
    pub target: u64,
    pub count: usize,
    pub element: c_int,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    AllReduce { reduction: c_int },
    ReduceScatter { reduction: c_int },
    AllGather,
    Broadcast { root: u32 },
}

/// An element of any type, as the widest of its kind.
#[derive(Clone, Copy)]
enum Value {
    Signed(i64),
    Unsigned(u64),
    Float(f64),
}

impl Call {
    /// Returns whether this library can run the call: it reduces no floats of two bytes.
    pub fn is_supported(&self) -> bool {
        let is_reduction = matches!(self.kind, Kind::AllReduce { .. } | Kind::ReduceScatter { .. });
        !is_reduction || !matches!(self.element, 6 | 9)
    }

    fn width(&self) -> usize {
        match self.element {
            0 | 1 => 1,
            6 | 9 => 2,
            2 | 3 | 7 => 4,
            4 | 5 | 8 => 8,
            unknown => panic!("element type {unknown}"),
        }
    }

    fn len(&self) -> usize {
        self.count * self.width()
    }

    fn value(&self, bytes: &[u8]) -> Value {
        let wide = |fill: u8| {
            let mut wide = [fill; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            wide
        };
        let sign = if bytes.last().is_some_and(|byte| byte >> 7 == 1) { 0xFF } else { 0 };
        match self.element {
            0 | 2 | 4 => Value::Signed(i64::from_le_bytes(wide(sign))),
            1 | 3 | 5 => Value::Unsigned(u64::from_le_bytes(wide(0))),
            7 => Value::Float(f32::from_le_bytes(bytes.try_into().unwrap()).into()),
            _ => Value::Float(f64::from_le_bytes(bytes.try_into().unwrap())),
        }
    }

    fn bytes(&self, value: Value) -> Vec<u8> {
        match value {
            Value::Signed(value) => value.to_le_bytes()[..self.width()].to_vec(),
            Value::Unsigned(value) => value.to_le_bytes()[..self.width()].to_vec(),
            Value::Float(value) if self.element == 7 => (value as f32).to_le_bytes().to_vec(),
            Value::Float(value) => value.to_le_bytes().to_vec(),
        }
    }
}

/// Combines two elements by the library's number of a reduction: sum, product, largest, smallest, average.
fn combine(reduction: c_int, one: Value, other: Value) -> Value {
    match (one, other) {
        (Value::Signed(one), Value::Signed(other)) => Value::Signed(match reduction {
            1 => one.wrapping_mul(other),
            2 => one.max(other),
            3 => one.min(other),
            _ => one.wrapping_add(other),
        }),
        (Value::Unsigned(one), Value::Unsigned(other)) => Value::Unsigned(match reduction {
            1 => one.wrapping_mul(other),
            2 => one.max(other),
            3 => one.min(other),
            _ => one.wrapping_add(other),
        }),
        (Value::Float(one), Value::Float(other)) => Value::Float(match reduction {
            1 => one * other,
            2 => one.max(other),
            3 => one.min(other),
            _ => one + other,
        }),
        _ => panic!("ranks reduce elements of different types"),
    }
}

fn divided(value: Value, by: usize) -> Value {
    match value {
        Value::Signed(value) => Value::Signed(value / by as i64),
        Value::Unsigned(value) => Value::Unsigned(value / by as u64),
        Value::Float(value) => Value::Float(value / by as f64),
    }
}

/// Reduces sources of equal length.
fn reduced(of: &Call, reduction: c_int, sources: &[Vec<u8>]) -> Vec<u8> {
    let width = of.width();
    let elements = (0..sources[0].len()).step_by(width).flat_map(|at| {
        let values = sources.iter().map(|source| of.value(&source[at..at + width]));
        let all = values.reduce(|one, other| combine(reduction, one, other)).expect("a rank");
        of.bytes(if reduction == 4 { divided(all, sources.len()) } else { all })
    });
    elements.collect()
}

/// Runs an operation that all ranks have called; the calls are in the order of the ranks.
///
/// # Safety
/// The ranges of the calls are valid memory that nothing else uses.
pub unsafe fn exchange(calls: &[Call]) {
    let first = calls[0];
    for other in calls {
        let is_same = (other.kind, other.count, other.element) == (first.kind, first.count, first.element);
        assert!(is_same, "ranks call different operations: {first:?} and {other:?}");
    }
    let ranks = calls.len();
    let source_len = if matches!(first.kind, Kind::ReduceScatter { .. }) { ranks } else { 1 } * first.len();
    let read = |call: &Call| {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(call.source as *const u8, source_len) }.to_vec()
    };
    let write = |call: &Call, bytes: &[u8]| {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), call.target as *mut u8, bytes.len()) };
    };
    match first.kind {
        Kind::AllReduce { reduction } => {
            let sources: Vec<_> = calls.iter().map(read).collect();
            let result = reduced(&first, reduction, &sources);
            calls.iter().for_each(|call| write(call, &result));
        }
        Kind::ReduceScatter { reduction } => {
            let sources: Vec<_> = calls.iter().map(read).collect();
            let result = reduced(&first, reduction, &sources);
            for (call, part) in calls.iter().zip(result.chunks(first.len())) {
                write(call, part);
            }
        }
        Kind::AllGather => {
            let all: Vec<u8> = calls.iter().flat_map(read).collect();
            calls.iter().for_each(|call| write(call, &all));
        }
        Kind::Broadcast { root } => {
            let source = read(&calls[root as usize]);
            calls.iter().for_each(|call| write(call, &source));
        }
    }
}
