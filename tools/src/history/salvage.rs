//! `remanent salvage` copies the provable pages of a damaged store into a new store.
//!
//! The format crate decides which pages are proven. The engine only writes the new store, as for a fork.
//! Pages keep their ids, epochs and Lsns, so users of the old store find them in the new store. The new store has its
//! own identity, because it may lack pages of the old store.
//!
//! Each page is proven twice: for the report, before anything is written, and again when its bytes are written in
//! pieces. If the medium deteriorates in between, the command fails and writes no wrong page. The memory use does not
//! depend on page lengths.
//!
//! If only an earlier version of a page is provable, the page is copied only with `--older`. The new store does not
//! record that such a page is older than the other pages.

use std::path::{Path, PathBuf};

use comfy_table::Table;
use indicatif::ProgressBar;
use remanent::history::InitialState;
use remanent::{Error, Store, StoreId};
use remanent_format::salvage::{FoundBytes, LogRemainder, PageRemains, Salvage as Search};
use remanent_format::store::StoreFile;
use remanent_format::{Damage, Defect, Lsn, PageId, PageInfo, PageTable};
use serde_json::json;

use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json;
use crate::cli::json::object;
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::cli::table::{page_cells, page_table};
use crate::read::partial_view::identity;
use crate::read::states::damaged;
use crate::read::store_dir::StoreDir;

const EXAMPLES: &str = "\
Use this command if a store can no longer be opened; `remanent verify` reports the reason. Salvage finds the newest \
state whose page table is known. It then recovers each page separately, from any remaining image of the page and the \
batches after the image. The result for a page is

  exact  if checksums and epochs prove the page as of that state,
  older  if only an earlier version is proven, which is copied only with --older,
  lost   if no version is proven.

Lists the pages that are not exact, and the lost batches after the state. Without --to, nothing is written. The new \
store keeps page ids, epochs, keys and metadata, and has its own identity. An interrupted salvage leaves no store in \
NEWDIR and can be run again.

Exits with 0 if all pages are exact and no batch is lost, and with 1 otherwise.

Examples:
  remanent salvage store
  remanent salvage store --to rescued
  remanent salvage store --to rescued --older --json > report";

/// Copy the provable pages of a damaged store into a new store
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Salvage {
    /// Directory of the damaged store, which is never modified
    dir: PathBuf,
    /// Directory for the new store, which must not exist or must be empty [default: print a report only]
    #[arg(long, value_name = "NEWDIR")]
    to: Option<PathBuf>,
    /// Also copy earlier versions of pages whose last version cannot be proven
    #[arg(long)]
    older: bool,
    /// Print one JSON object per line: one for each page that was not recovered exactly, and a summary
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: MemoryLimit,
}

/// A page whose version in the state cannot be proven, although an earlier version may be provable.
struct InexactPage {
    /// Description of the page in the state.
    info: PageInfo,
    /// Earlier version that is proven, or `None` if no version of the page is proven.
    left: Option<PageInfo>,
    why: Damage,
}

/// The pages of the salvaged state: the proven pages, and the pages of which at most an earlier version is proven.
#[derive(Default)]
struct Remains {
    exact: Vec<PageInfo>,
    damaged_pages: Vec<InexactPage>,
}

/// The reason why a salvage stopped before the new store was complete.
enum SalvageStop {
    Interrupted,
    Failed(Failure),
}

impl From<Error> for SalvageStop {
    fn from(error: Error) -> Self {
        SalvageStop::Failed(engine_failure(error))
    }
}

/// The new store, with the number and total length of its pages.
struct SalvagedStore {
    store: StoreId,
    pages: usize,
    bytes: u64,
}

impl Salvage {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let dir = StoreDir::open(&self.dir)?;
        if let Some(process) = dir.holder() {
            return Err(Failure::Locked(format!(
                "process {process} has the store open, and files that it is writing would appear damaged; close the store first"
            )));
        }
        if let Some(new) = &self.to {
            dir.refuse_to_write_into(new)?;
            Store::check_create_at(new).map_err(engine_failure)?;
        }
        let (store, unnamed) = identity(&dir)?;
        if let Some(Damage { defect: defect @ Defect::Version { .. }, .. }) = &unnamed {
            return Err(Failure::Environment(defect.to_string()));
        }
        let search = Search::read(&dir, store.clone(), self.memory.limit()).map_err(damaged)?;
        let Some(remains) = find_remains(&search, &interrupt) else { return Ok(Ending::Interrupted) };
        for damaged_page in &remains.damaged_pages {
            self.report(damaged_page, out)?;
        }
        let new = match &self.to {
            Some(new) if search.state().is_whole || self.older => {
                match self.write(new, store, &search, &remains, &interrupt) {
                    Ok(new) => Some(new),
                    Err(SalvageStop::Interrupted) => return Ok(Ending::Interrupted),
                    Err(SalvageStop::Failed(failure)) => return Err(failure),
                }
            }
            _ => None,
        };
        let report = SalvageReport { search: &search, remains: &remains, unnamed: unnamed.as_ref(), new };
        if self.json {
            out.line(report.json())?
        } else {
            report.print(self, out)?
        }
        Ok(if report.is_all() { Ending::Fine } else { Ending::Difference })
    }

    /// Returns true if an earlier version of the page is copied into the new store.
    fn carries(&self, damaged_page: &InexactPage) -> bool {
        self.older && damaged_page.left.is_some()
    }

    fn report(&self, damaged_page: &InexactPage, out: &mut Output) -> Result<(), Failure> {
        if !self.json {
            // The text output prints all pages in one table at the end.
            return Ok(());
        }
        let InexactPage { info, left, why } = damaged_page;
        out.line(object! {
            "kind": "page",
            "outcome": if left.is_some() { "older" } else { "lost" },
            "carried": self.carries(damaged_page),
            "page": info.page.0,
            "key": json::key(info.key.as_ref()),
            "len": info.len,
            "epoch": info.epoch.0,
            "lsn": info.lsn.0,
            "left": left.as_ref().map(|left| json!({
                "len": left.len, "epoch": left.epoch.0, "lsn": left.lsn.0
            })),
            "file": why.file.to_string(),
            "offset": why.offset,
            "defect": why.defect.to_string(),
        })
    }

    /// Writes the proven pages to a new store.
    fn write(
        &self,
        new: &Path,
        store: StoreFile,
        search: &Search<'_>,
        remains: &Remains,
        interrupt: &Interrupt,
    ) -> Result<SalvagedStore, SalvageStop> {
        let older = remains
            .damaged_pages
            .iter()
            .filter(|damaged_page| self.carries(damaged_page))
            .filter_map(|damaged_page| damaged_page.left.clone());
        let pages: Vec<PageInfo> = remains.exact.iter().cloned().chain(older).collect();
        let (count, bytes) = (pages.len(), pages.iter().map(|info| info.len).sum());
        let state = &search.state().table;
        let table = PageTable::from_parts(
            pages,
            state.root().clone(),
            state.next_page(),
            state.epoch_high(),
            state.lsn(),
        );
        let origin = InitialState {
            features: store.features,
            record: store.record,
            table,
            point: search.state().point,
        };
        let bar = progress::bytes(bytes, "writing");
        let mut held: Option<(PageId, FoundBytes)> = None;
        let store = Store::create_at(new, &origin, |info, offset, out| -> Result<_, SalvageStop> {
            if held.as_ref().is_none_or(|(page, _)| *page != info.page) {
                held = Some((info.page, find_again(search, info, &bar)?));
            }
            if interrupt.is_noted() {
                return Err(SalvageStop::Interrupted);
            }
            let (_, found) = held.as_ref().expect("the page was found above");
            let bytes = search.window(found, offset..offset + out.len() as u64);
            out.copy_from_slice(&bytes.map_err(|damage| SalvageStop::Failed(damaged(damage)))?);
            Ok(())
        })?;
        bar.finish_and_clear();
        Ok(SalvagedStore { store, pages: count, bytes })
    }
}

/// Proves every page of the state. Returns `None` if Ctrl-C was pressed.
fn find_remains(search: &Search<'_>, interrupt: &Interrupt) -> Option<Remains> {
    let table = &search.state().table;
    let bar = progress::bytes(table.pages().map(|info| info.len).fold(0, u64::saturating_add), "proving");
    let mut remains = Remains::default();
    for info in table.pages() {
        if interrupt.is_noted() {
            return None;
        }
        let len = info.len;
        match search.find(&info) {
            PageRemains::Exact(_) => remains.exact.push(info),
            PageRemains::Older { version, why, .. } => {
                remains.damaged_pages.push(InexactPage { info, left: Some(version), why })
            }
            PageRemains::Lost(why) => remains.damaged_pages.push(InexactPage { info, left: None, why }),
        }
        bar.inc(len);
    }
    bar.finish_and_clear();
    Some(remains)
}

/// Proves a page again and returns its bytes. Returns an error if the result differs from the first proof.
fn find_again(search: &Search<'_>, info: &PageInfo, bar: &ProgressBar) -> Result<FoundBytes, SalvageStop> {
    let wanted = search.state().table.get(info.page).expect("the page was found in this state");
    let (left, bytes) = match search.find(&wanted) {
        PageRemains::Exact(bytes) => (wanted, bytes),
        PageRemains::Older { version, bytes, .. } => (version, bytes),
        PageRemains::Lost(why) => return Err(SalvageStop::Failed(Failure::Damage(why.to_string()))),
    };
    if (left.epoch, left.lsn) != (info.epoch, info.lsn) {
        let message = format!("page {} changed while it was read; run this command again", info.page);
        return Err(SalvageStop::Failed(Failure::Damage(message)));
    }
    bar.inc(info.len);
    Ok(bytes)
}

/// The report of a salvage. It is printed as text or JSON.
struct SalvageReport<'a> {
    search: &'a Search<'a>,
    remains: &'a Remains,
    /// Damage to the file STORE, or `None` if it is intact.
    unnamed: Option<&'a Damage>,
    new: Option<SalvagedStore>,
}

impl SalvageReport<'_> {
    fn lsn(&self) -> Lsn {
        self.search.state().table.lsn()
    }

    /// Returns the Lsns of the first and the last batch that are known to be lost after the state.
    fn lost_batches(&self) -> Option<(u64, u64)> {
        let LogRemainder { durable, seen, .. } = self.search.beyond();
        (durable > self.lsn()).then(|| (self.lsn().0 + 1, durable.max(seen).0))
    }

    /// Returns the Lsns of the first and the last batch that a crash cut off. Returns `None` if there is no such batch,
    /// or if a batch after the state was durable.
    fn torn_batches(&self) -> Option<(u64, u64)> {
        let LogRemainder { durable, seen, .. } = self.search.beyond();
        (durable <= self.lsn() && seen > self.lsn()).then(|| (self.lsn().0 + 1, seen.0))
    }

    fn older(&self) -> usize {
        self.remains.damaged_pages.iter().filter(|damaged_page| damaged_page.left.is_some()).count()
    }

    fn is_all(&self) -> bool {
        let is_all_log = self.lost_batches().is_none() && self.search.beyond().hidden.is_none();
        self.search.state().is_whole
            && self.remains.damaged_pages.is_empty()
            && is_all_log
            && self.unnamed.is_none()
    }

    fn json(&self) -> serde_json::Value {
        let range = |batches: Option<(u64, u64)>| {
            batches.map(|(first, last)| json!({ "first": first, "last": last }))
        };
        let state = self.search.state();
        object! {
            "kind": "summary",
            "whole": state.is_whole,
            "lsn": self.lsn().0,
            "snapshot": state.base.map(|base| base.0),
            "exact": self.remains.exact.len(),
            "older": self.older(),
            "lost": self.remains.damaged_pages.len() - self.older(),
            "lost_batches": range(self.lost_batches()),
            "torn_batches": range(self.torn_batches()),
            "hidden": self.search.beyond().hidden.map(|hidden| hidden.to_string()),
            "store_file": self.unnamed.map(ToString::to_string),
            "store": self.new.as_ref().map(|new| new.store.to_string()),
            "carried": self.new.as_ref().map(|new| new.pages),
            "carried_bytes": self.new.as_ref().map(|new| new.bytes),
        }
    }

    fn print(&self, command: &Salvage, out: &mut Output) -> Result<(), Failure> {
        if !self.remains.damaged_pages.is_empty() {
            out.line(table(&self.remains.damaged_pages).trim_fmt())?;
        }
        if let Some(damage) = self.unnamed {
            out.line(format_args!(
                "{damage}: the identity and the layout fingerprint of the store are lost"
            ))?;
        }
        let (exact, older) = (self.remains.exact.len(), self.older());
        let lost = self.remains.damaged_pages.len() - older;
        let lsn = self.lsn();
        match self.search.state().is_whole {
            true => out.line(format_args!(
                "the state after lsn {lsn}: {exact} pages exact, {older} older, {lost} lost"
            ))?,
            false => out.line(format_args!(
                "no complete state is known; {older} pages in an earlier version, {lost} lost"
            ))?,
        }
        if let Some((first, last)) = self.lost_batches() {
            out.line(format_args!("lost: batches {first} to {last}, which are no longer available"))?;
        }
        if let Some(hidden) = &self.search.beyond().hidden {
            out.line(format_args!("{hidden}: any batches in it are lost"))?;
        }
        if let Some((first, last)) = self.torn_batches() {
            out.line(format_args!("note: batches {first} to {last} are a torn tail, left by a crash"))?;
        }
        match (&self.new, &command.to) {
            (Some(SalvagedStore { store, pages, bytes }), Some(to)) => out.line(format_args!(
                "copied {pages} pages, {bytes} bytes, to {}, store {store}",
                to.display()
            )),
            (_, Some(_)) => out.line(
                "nothing was written: no complete state is known; use --older to copy earlier versions",
            ),
            (_, None) => out.line("nothing was written; use --to NEWDIR to create a store"),
        }
    }
}

fn table(damaged_page: &[InexactPage]) -> Table {
    let mut table = page_table(["LEFT", "WHY"]);
    for InexactPage { info, left, why } in damaged_page {
        let left = left.as_ref().map(|left| format!("epoch {}, lsn {}", left.epoch, left.lsn));
        let left = left.unwrap_or_else(|| "nothing".to_owned());
        table.add_row(page_cells(info).into_iter().chain([left, why.to_string()]));
    }
    table
}
