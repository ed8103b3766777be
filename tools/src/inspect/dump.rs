//! `remanent dump` writes the bytes of one page.

use std::fs::File;
use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};

use remanent_format::{Damage, PageInfo};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::read::page_bytes::{PageBytes, windows};
use crate::read::partial_view::PartialView;
use crate::read::selector::Selector;
use crate::read::states::damaged_since;
use crate::read::store_dir::StoreDir;

const EXAMPLES: &str = "\
Examples:
  remanent dump store 17 -o page.bin
  remanent dump store embedding.weight | xxd | head
  remanent dump store key:0xff01 -o page.bin";

/// Write the bytes of a page to a file
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Dump {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Number, key or tensor name of the page; `remanent pages` lists numbers and keys
    page: Selector,
    /// File to write, or `-` for standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    #[command(flatten)]
    memory: MemoryLimit,
}

impl Dump {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        if self.output != Path::new("-") {
            dir.refuse_to_write_into(&self.output)?;
        }
        let (view, bytes) = PartialView::with_bytes(&dir, self.memory.given())?;
        let info = match self.page.find(view.pages()) {
            Ok(info) => info,
            Err(missing) => {
                // Report the damage first, because the missing page may have existed in the undamaged store.
                view.check_undamaged()?;
                return Err(Failure::Environment(missing));
            }
        };
        let Some(bytes) = bytes else {
            view.check_undamaged()?;
            return Err(Failure::Damage(format!("page {} cannot be read", info.page)));
        };
        self.write(&bytes, &info, out)?;
        view.check_undamaged()?;
        Ok(Ending::Fine)
    }

    fn write(&self, bytes: &PageBytes<'_>, info: &PageInfo, out: &mut Output) -> Result<(), Failure> {
        let lost = |damage: Damage| Failure::Damage(format!("page {} cannot be read: {damage}", info.page));
        bytes.check(info.page).map_err(lost)?;
        let read = |window| bytes.window(info.page, &window).map_err(damaged_since);
        if self.output == Path::new("-") {
            windows(info.len).try_for_each(|window| out.bytes(&read(window)?))?;
            return out.flush();
        }
        let cannot = |error: io::Error| {
            Failure::Environment(format!("cannot write {}: {error}", self.output.display()))
        };
        let mut file = File::create(&self.output).map_err(cannot)?;
        windows(info.len).try_for_each(|window| file.write_all(&read(window)?).map_err(cannot))
    }
}
