//! Fuzz targets, as plain functions of bytes, so that the ordinary tests run them without the fuzzer, on every
//! input that the repository keeps: those of [`decoders`], [`directories`] and [`histories`], and those of the
//! command, [`inspections`] and [`imports`].
//!
//! [`archive`] and [`fit`] are what inputs are made of. What the targets compare with is the ordinary tests' own.

pub mod archive;
pub mod fit;
pub mod decoders;
pub mod directories;
pub mod histories;
pub mod inspections;
pub mod imports;

#[path = "../../tests/it/files.rs"]
pub mod files;

/// The model of a store.
#[path = "../../tests/it/model"]
pub mod model {
    pub mod history;
    pub mod plain;
    pub mod run;
}
