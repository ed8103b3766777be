//! `remanent dump`: the bytes of one page.

use std::fs;
use std::path::{Path, PathBuf};

use remanent_format::{Key, PageId, PageInfo};

use crate::exit::{Ending, Failure, Outcome};
use crate::memory::Memory;
use crate::output::Output;
use crate::store_dir::StoreDir;
use crate::view::View;

const EXAMPLES: &str = "\
Examples:
  remanent dump store 17 -o page.bin
  remanent dump store key:embedding.weight -o - | xxd | head";

/// Write the bytes of one page to a file
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Dump {
    /// The store's directory; it is only read
    dir: PathBuf,
    /// The page: its number, or `key:` and its key
    #[arg(value_parser = parse_selector)]
    page: Selector,
    /// Where the bytes go; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    memory: Memory,
}

/// How a page is named on the command line.
#[derive(Clone, Debug)]
enum Selector {
    Number(PageId),
    Key(Key),
}

fn parse_selector(text: &str) -> Result<Selector, String> {
    match text.strip_prefix("key:") {
        Some(key) => Key::new(key).map(Selector::Key).map_err(|error| error.to_string()),
        None => text
            .parse()
            .map(|number| Selector::Number(PageId(number)))
            .map_err(|_| "neither a page's number nor `key:` and its key".to_owned()),
    }
}

impl Dump {
    /// Writes.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        if self.output != Path::new("-") {
            dir.refuse_to_write_into(&self.output)?;
        }
        let (view, contents) = View::with_contents(&dir, self.memory.limit())?;
        let is_wanted = |info: &PageInfo| match &self.page {
            Selector::Number(page) => info.page == *page,
            Selector::Key(key) => info.key.as_ref() == Some(key),
        };
        let Some(info) = view.pages().find(is_wanted) else {
            // In a damaged store the page may have been there; then the damage is the answer.
            view.complain()?;
            return Err(Failure::Environment("there is no such page".to_owned()));
        };
        match &contents[&info.page] {
            Ok(bytes) => self.write(bytes, out)?,
            Err(damage) => {
                return Err(Failure::Damage(format!("page {} cannot be read: {damage}", info.page)));
            }
        }
        view.complain()?;
        Ok(Ending::Fine)
    }

    fn write(&self, bytes: &[u8], out: &mut Output) -> Result<(), Failure> {
        if self.output == Path::new("-") {
            out.bytes(bytes)?;
            return out.flush();
        }
        fs::write(&self.output, bytes)
            .map_err(|error| Failure::Environment(format!("cannot write {}: {error}", self.output.display())))
    }
}
