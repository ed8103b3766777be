//! The summary of a run of the laws: the code, the kernels, the device, the number of cases, and a checksum
//! of all results. If the receipts of two machines differ only in the device, both ran the same tests with
//! the same results.
//!
//! The commit is the value of an environment variable when these tests were built: `REMANENT_COMMIT=$(git
//! describe --always --dirty --abbrev=40) cargo test --test it --no-run`.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Result};

use remanent::device::cuda::modules::MODULES;
use remanent::device::{Command, Device, PieceKind};

use super::model::{Case, Outcome};
use crate::gpu;

/// The cases that one device has passed.
pub struct Receipt {
    device: String,
    cases: u64,
    /// Numbers of executed commands and pieces, keyed by name.
    ran: BTreeMap<&'static str, u64>,
    results: crc32fast::Hasher,
}

impl Receipt {
    /// Returns an empty receipt.
    pub fn new(device: &dyn Device) -> Self {
        Self { device: device.label(), cases: 0, ran: BTreeMap::new(), results: Default::default() }
    }

    /// Adds a case that had this outcome on the device.
    pub fn agreed(&mut self, case: &Case, outcome: &Outcome) {
        self.cases += 1;
        for command in case.lists.iter().flat_map(|list| &list.commands) {
            names(command).into_iter().for_each(|name| *self.ran.entry(name).or_default() += 1);
        }
        outcome.memories.iter().for_each(|bytes| self.results.update(bytes));
        for known in outcome.staging.iter().flatten().flatten().flatten() {
            self.results.update(&[*known]);
        }
    }

    /// Returns the names of the executed commands and pieces.
    pub fn ran(&self) -> impl Iterator<Item = &'static str> {
        self.ran.keys().copied()
    }

    /// Returns the checksum of all results: page memory, and returned staging memory.
    pub fn results(&self) -> u32 {
        self.results.clone().finalize()
    }
}

impl Display for Receipt {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let driver =
            gpu::driver_version().map_or("none".to_owned(), |(major, minor)| format!("CUDA {major}.{minor}"));
        let kernels = MODULES.map(|module| {
            let [ptx, cubin] = [module.ptx.as_bytes(), module.cubin_sm_90].map(crc32fast::hash);
            format!("{} {ptx:08x} {cubin:08x}", module.name)
        });
        let ran: Vec<String> = self.ran.iter().map(|(name, count)| format!("{name} {count}")).collect();
        writeln!(f, "receipt: the laws are kept")?;
        writeln!(f, "  commit   {}", option_env!("REMANENT_COMMIT").unwrap_or("unknown"))?;
        writeln!(f, "  kernels  {} (PTX, cubin)", kernels.join(", "))?;
        writeln!(f, "  driver   {driver}")?;
        writeln!(f, "  device   {}", self.device)?;
        writeln!(f, "  cases    {}: {}", self.cases, ran.join(", "))?;
        write!(f, "  results  {:08x}", self.results())
    }
}

/// Returns the names of a command and its pieces.
fn names(command: &Command) -> Vec<&'static str> {
    let name = match command {
        Command::Upload { .. } => "upload",
        Command::Download { .. } => "download",
        Command::Apply { pieces } => {
            let piece = |kind| match kind {
                PieceKind::Dense => "dense",
                PieceKind::Masked { .. } => "masked",
                PieceKind::Sparse { .. } => "sparse",
            };
            return pieces.iter().map(|of| piece(of.kind)).collect();
        }
        Command::Copy { .. } => "copy",
        Command::Fill { .. } => "fill",
        Command::Gather { .. } => "gather",
        Command::Scatter { .. } => "scatter",
        Command::Diff { .. } => "diff",
        Command::Select { .. } => "select",
        Command::Crc { .. } => "crc",
        Command::Digest { .. } => "digest",
        Command::Pick { .. } => "pick",
        Command::Validate { .. } => "validate",
    };
    vec![name]
}
