//! Fuzz targets for the decoders. See [`shim`] for what each of them holds.

pub mod shim;
