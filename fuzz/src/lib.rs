//! Fuzz targets, as plain functions of bytes. The ordinary tests run them without the fuzzer, on every input
//! that the repository keeps: the targets of [`decoders`], [`directories`] and [`histories`], and those of
//! the command, [`inspections`] and [`imports`].
//!
//! Inputs are made of [`archive`] and [`fit`]. The targets compare with models that the ordinary tests own.

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
