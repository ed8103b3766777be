//! `remanent export` writes a version of the weights to a safetensors file.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use remanent::StatePoint;
use remanent_format::{Lsn, PageInfo};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json::object;
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::cli::replacement::Replacement;
use crate::read::page_bytes::{PageBytes, windows};
use crate::read::states::{KeptStates, damaged, damaged_since};
use crate::read::store_dir::StoreDir;
use crate::weights::{Header, foreign_dtype, is_header, name_of};

const EXAMPLES: &str = "\
Writes the imported file, byte for byte, with the changes that programs have made to its tensors since the import. The \
file is written under a temporary name, synced and renamed, so it is never incomplete.

Examples:
  remanent export store model.safetensors
  remanent export store before.safetensors --at lsn:7
  remanent export store then.safetensors --at snapshot:2";

/// Write a version of the weights to a safetensors file
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Export {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// File to write, which is replaced if it exists
    file: PathBuf,
    /// Version to write: lsn:N, snapshot:N or the name of a snapshot [default: newest]
    #[arg(long)]
    at: Option<StatePoint>,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: MemoryLimit,
}

impl Export {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let dir = StoreDir::open(&self.dir)?;
        dir.refuse_to_write_into(&self.file)?;
        let version = KeptStates::with_retry(&dir, |past| {
            let until = past.lsn(self.at.as_ref())?;
            ExportVersion::take(past, until, self.memory.given())
        })?;
        if interrupt.is_noted() || !version.write_file(&self.file, &interrupt)? {
            return Ok(Ending::Interrupted);
        }
        let (tensors, bytes) = (version.header.tensors.len(), version.header.file_len());
        if self.json {
            out.line(object! { "lsn": version.lsn().0, "tensors": tensors, "bytes": bytes })?;
        } else {
            out.line(format_args!("lsn {}: {tensors} tensors, {bytes} bytes", version.lsn()))?;
        }
        Ok(Ending::Fine)
    }
}

/// A version of the weights whose bytes are proven.
pub struct ExportVersion<'d> {
    header: Header,
    bytes: PageBytes<'d>,
    /// Pages in the order of their bytes in the file: the header, then the tensors.
    pages: Vec<PageInfo>,
}

impl<'d> ExportVersion<'d> {
    /// Proves the version after batch `until`, or the newest version if `until` is `None`.
    pub fn take(past: &KeptStates<'d>, until: Option<Lsn>, page_bytes_max: u64) -> Result<Self, Failure> {
        let bytes = past.bytes(until, page_bytes_max, |info| is_header(info) || name_of(info).is_some())?;
        let infos: Vec<PageInfo> = bytes.table().pages().collect();
        let none = || {
            let lsn = bytes.table().lsn();
            Failure::Environment(match infos.iter().find_map(foreign_dtype) {
                Some((tensor, dtype)) => format!(
                    "lsn {lsn} cannot be exported: tensor {tensor:?} has dtype {dtype}, which safetensors does not \
                     support; save the tensor with another dtype, for example as a view"
                ),
                None => format!("there are no weights up to lsn {lsn}; import a safetensors file first"),
            })
        };
        let header_page = infos.iter().find(|info| is_header(info)).ok_or_else(none)?;
        let changed = |what: String| {
            Failure::Environment(format!("lsn {} cannot be exported: {what}", bytes.table().lsn()))
        };
        let header = bytes.window(header_page.page, &(0..header_page.len)).map_err(damaged)?;
        let header = Header::parse(header).map_err(changed)?;
        let mut pages = vec![header_page.clone()];
        let named: BTreeMap<&str, &PageInfo> =
            infos.iter().filter_map(|info| Some((name_of(info)?, info))).collect();
        for tensor in &header.tensors {
            let name = &tensor.name;
            match named.get(&name[..]) {
                None => return Err(changed(format!("tensor {name:?} is missing"))),
                Some(info) if info.len != tensor.len => {
                    let (found, expected) = (info.len, tensor.len);
                    return Err(changed(format!("tensor {name:?} has {found} bytes, expected {expected}")));
                }
                Some(info) => pages.push((*info).clone()),
            }
        }
        Ok(Self { header, bytes, pages })
    }

    /// Returns the Lsn of the batch that completed the version.
    pub fn lsn(&self) -> Lsn {
        self.bytes.table().lsn()
    }

    /// Writes the version to a safetensors file. If Ctrl-C was pressed, returns `false` and creates no file.
    pub fn write_file(&self, path: &Path, interrupt: &Interrupt) -> Result<bool, Failure> {
        let cannot =
            |error: std::io::Error| Failure::Environment(format!("cannot write {}: {error}", path.display()));
        let replacement = Replacement::begin(path).map_err(cannot)?;
        let bar = progress::bytes(self.header.file_len(), "writing");
        let mut writer = BufWriter::new(replacement.file());
        for info in &self.pages {
            for window in windows(info.len) {
                let bytes = self.bytes.window(info.page, &window).map_err(damaged_since)?;
                writer.write_all(&bytes).map_err(cannot)?;
                bar.inc(window.end - window.start);
                if interrupt.is_noted() {
                    return Ok(false);
                }
            }
        }
        writer.flush().map_err(cannot)?;
        drop(writer);
        bar.finish_and_clear();
        replacement.put().map_err(cannot)?;
        Ok(true)
    }
}
