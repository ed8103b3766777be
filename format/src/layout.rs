//! The `layout!` macro, which generates a struct, its codec and a description of its layout from a table of fixed
//! little-endian fields. A test compares the descriptions with the offset tables in SPEC.md.
//!
//! Reserved bytes are fields. Encoding writes zeros to them and decoding rejects other values, so that decoding and
//! re-encoding a structure produces the same bytes.

/// A value with a fixed-width little-endian encoding, which the `layout!` macro uses as a field.
pub trait Field: Sized {
    /// Length of the encoding in bytes.
    const SIZE: usize;
    /// Writes the value to the start of `out`, which must contain at least `SIZE` bytes.
    fn put(&self, out: &mut [u8]);
    /// Reads a value from the start of `bytes`, which must contain at least `SIZE` bytes.
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! integer_field {
    ($($integer:ty),*) => {$(
        impl Field for $integer {
            const SIZE: usize = size_of::<$integer>();
            #[inline]
            fn put(&self, out: &mut [u8]) {
                out[..Self::SIZE].copy_from_slice(&self.to_le_bytes());
            }
            #[inline]
            fn get(bytes: &[u8]) -> Self {
                let mut raw = [0; Self::SIZE];
                raw.copy_from_slice(&bytes[..Self::SIZE]);
                Self::from_le_bytes(raw)
            }
        }
    )*};
}
integer_field!(u8, u16, u32, u64);

impl<const N: usize> Field for [u8; N] {
    const SIZE: usize = N;
    #[inline]
    fn put(&self, out: &mut [u8]) {
        out[..N].copy_from_slice(self);
    }
    #[inline]
    fn get(bytes: &[u8]) -> Self {
        let mut raw = [0; N];
        raw.copy_from_slice(&bytes[..N]);
        raw
    }
}

/// The name, offset and length of one field of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldRow {
    /// Name of the field, as in SPEC.md.
    pub name: &'static str,
    /// Offset of the field, in bytes from the start of the structure.
    pub offset: usize,
    /// Length of the field in bytes.
    pub size: usize,
}

/// The layout of a structure on disk. A test compares it with the table in SPEC.md.
#[derive(Clone, Copy, Debug)]
pub struct LayoutTable {
    /// Name of the structure, as in SPEC.md.
    pub name: &'static str,
    /// Length of the structure in bytes.
    pub len: usize,
    /// Fields of the structure, in the order of their offsets and without gaps.
    pub fields: &'static [FieldRow],
}

/// Defines a structure with a fixed layout. Each field states its offset, and a compile-time check verifies that there
/// are no gaps between the fields. The macro is public for `remanent-archive`, whose objects have such layouts.
#[doc(hidden)]
#[macro_export]
macro_rules! layout {
    (
        $(#[$meta:meta])*
        pub struct $name:ident: $len:literal {
            $( $(#[$field_meta:meta])* $offset:literal => $field:ident: $type:ty, )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $( $(#[$field_meta])* pub $field: $type, )*
        }

        impl $name {
            /// Length of the encoded structure in bytes.
            pub const LEN: usize = $len;
            /// The fields of the structure, for comparison with SPEC.md.
            pub const TABLE: $crate::layout::LayoutTable = $crate::layout::LayoutTable {
                name: stringify!($name),
                len: $len,
                fields: &[ $( $crate::layout::FieldRow {
                    name: stringify!($field),
                    offset: $offset,
                    size: <$type as $crate::layout::Field>::SIZE,
                }, )* ],
            };

            /// Returns the encoded structure.
            #[must_use]
            #[inline]
            pub fn to_bytes(&self) -> [u8; $len] {
                let mut out = [0; $len];
                $( $crate::layout::Field::put(&self.$field, &mut out[$offset..]); )*
                out
            }

            /// Decodes the structure without checking the values of its fields.
            #[must_use]
            #[inline]
            pub fn from_bytes(bytes: &[u8; $len]) -> Self {
                Self { $( $field: $crate::layout::Field::get(&bytes[$offset..]), )* }
            }
        }

        const _: () = {
            let mut at = 0;
            $(
                assert!(at == $offset, "a gap or an overlap in a layout");
                at += <$type as $crate::layout::Field>::SIZE;
            )*
            assert!(at == $len, "a layout's length is not the sum of its fields");
        };
    };
}
#[doc(hidden)]
pub use layout;
