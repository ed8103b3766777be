//! `remanent pages` lists every page that an open for writing would find.

use std::path::PathBuf;

use comfy_table::Table;
use remanent_format::{Damage, Defect, PageInfo};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json;
use crate::cli::json::object;
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::cli::table::{page_cells, page_table};
use crate::read::page_bytes::PageBytes;
use crate::read::partial_view::PartialView;
use crate::read::states::damaged_since;
use crate::read::store_dir::StoreDir;

const EXAMPLES: &str = "\
Lists the pages that recovery would find now, from the newest snapshot and the log after it, without a torn tail. \
CRC32 is the checksum of a page's bytes. Damage is reported on standard error, and readable pages are listed in any \
case. A page has no checksum if its bytes are lost or exceed --memory-max.

Examples:
  remanent pages store
  remanent pages store --json | head -n 1";

/// List the pages of a store
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Pages {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: MemoryLimit,
}

impl Pages {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        let (view, bytes) = PartialView::with_bytes(&dir, self.memory.given())?;
        let pages: Vec<PageInfo> = view.pages().collect();
        if self.json {
            for info in &pages {
                out.line(page_json(info, crc32(bytes.as_ref(), info)?))?;
            }
        } else if !pages.is_empty() {
            out.line(table(&pages, bytes.as_ref())?.trim_fmt())?;
        }
        out.flush()?;
        view.check_undamaged()?;
        Ok(Ending::Fine)
    }
}

/// Returns the CRC-32 of a page, or `None` if its bytes are lost or do not fit in memory.
fn crc32(bytes: Option<&PageBytes<'_>>, info: &PageInfo) -> Result<Option<u32>, Failure> {
    let Some(proven) = bytes.filter(|bytes| bytes.check(info.page).is_ok()) else { return Ok(None) };
    match proven.crc32(info) {
        Err(Damage { defect: Defect::Memory { .. }, .. }) => Ok(None),
        crc32 => crc32.map(Some).map_err(damaged_since),
    }
}

fn page_json(info: &PageInfo, crc32: Option<u32>) -> serde_json::Value {
    object! {
        "page": info.page.0,
        "key": json::key(info.key.as_ref()),
        "len": info.len,
        "epoch": info.epoch.0,
        "lsn": info.lsn.0,
        "place": info.place.to_string(),
        "crc32": crc32,
        "metadata": json::metadata(&info.metadata),
    }
}

fn table(pages: &[PageInfo], bytes: Option<&PageBytes<'_>>) -> Result<Table, Failure> {
    let mut table = page_table(["PLACE", "CRC32", "METADATA"]);
    for info in pages {
        let metadata = match info.metadata.is_empty() {
            true => String::new(),
            false => json::metadata(&info.metadata).to_string(),
        };
        let crc = crc32(bytes, info)?.map_or("lost".to_owned(), |crc| format!("{crc:08x}"));
        table.add_row(page_cells(info).into_iter().chain([info.place.to_string(), crc, metadata]));
    }
    Ok(table)
}
