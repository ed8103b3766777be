//! One macro that turns a table of fixed little-endian fields into a struct, its codec and a
//! description of itself; a test holds SPEC.md's offset tables against those descriptions.
//!
//! Reserved bytes are fields too: they are written as zero and refused when they are not, so that
//! decoding and encoding again gives the same bytes.

/// A value with one fixed-width little-endian representation.
pub trait Field: Sized {
    /// Bytes on disk.
    const SIZE: usize;
    /// Writes the value to the start of `out`, which holds at least `SIZE` bytes.
    fn put(&self, out: &mut [u8]);
    /// Reads a value from the start of `bytes`, which holds at least `SIZE` bytes.
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

/// One row of a structure's table: name, offset and size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldRow {
    /// The field's name, as in SPEC.md.
    pub name: &'static str,
    /// Offset from the structure's first byte.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// A structure's table, for documentation and tests.
#[derive(Clone, Copy, Debug)]
pub struct LayoutTable {
    /// The structure's name, as in SPEC.md.
    pub name: &'static str,
    /// Its length in bytes.
    pub len: usize,
    /// Its fields, in order, without gaps.
    pub fields: &'static [FieldRow],
}

/// Defines a structure of fixed layout. Offsets are written out, and checked at compile time to follow
/// each other without a gap.
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
            /// Length on disk, in bytes.
            pub const LEN: usize = $len;
            /// The structure's own description.
            pub const TABLE: $crate::layout::LayoutTable = $crate::layout::LayoutTable {
                name: stringify!($name),
                len: $len,
                fields: &[ $( $crate::layout::FieldRow {
                    name: stringify!($field),
                    offset: $offset,
                    size: <$type as $crate::layout::Field>::SIZE,
                }, )* ],
            };

            /// The structure's bytes.
            #[must_use]
            #[inline]
            pub fn to_bytes(&self) -> [u8; $len] {
                let mut out = [0; $len];
                $( $crate::layout::Field::put(&self.$field, &mut out[$offset..]); )*
                out
            }

            /// Reads the fields; checks nothing.
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
pub(crate) use layout;
