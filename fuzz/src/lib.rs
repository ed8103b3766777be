//! Fuzz targets as plain functions of bytes. The ordinary tests run them without the fuzzer on every input in
//! the repository: the targets of [`decoders`], [`directories`] and [`histories`], and those of the command,
//! [`inspections`] and [`imports`].
//!
//! [`archive`] and [`fit`] build the inputs. The targets compare results with the models of the ordinary
//! tests.

pub mod archive;
pub mod fit;
pub mod decoders;
pub mod directories;
pub mod histories;
pub mod inspections;
pub mod imports;

#[path = "../../tests/it/files.rs"]
pub mod files;
#[path = "../../tests/it/with_options.rs"]
pub mod with_options;

/// The model of a store.
#[path = "../../tests/it/model"]
pub mod model {
    pub mod history;
    pub mod plain;
    pub mod run;
}
