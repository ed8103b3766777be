//! Stores of random pages, for benchmarks that measure whole stores: the number of bytes, and the lengths of
//! pages.

use remanent::{Options, PageId, Store};
use remanent_tools::shared::SplitMix64;
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;

use crate::Common;
use crate::figures::{Findings, Group};
use crate::room::{BenchStop, Room, size};

/// Length in bytes of a hot page's delta; no page is shorter.
pub const DELTA_LEN: usize = 256;
/// Total size in bytes of the pages that one batch creates.
const BATCH_BYTES: u64 = 64 << 20;

/// The given sizes.
#[derive(clap::Args)]
pub struct Sizes {
    /// Total size of all pages in bytes
    #[arg(long, default_value = "256MiB")]
    bytes: Size,
    /// Page lengths in bytes, separated by commas
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "2MiB,16KiB")]
    page_len: Vec<Size>,
}

impl Sizes {
    /// Returns the total size in bytes of the pages of one store.
    pub fn bytes(&self) -> u64 {
        self.bytes.0
    }

    /// Returns the steps of all stores, if each has `of_each`.
    pub fn steps(&self, of_each: u64) -> u64 {
        of_each * self.page_len.len() as u64
    }

    /// Rejects invalid page lengths.
    pub fn check(&self) -> Result<(), Failure> {
        let good =
            |len: &&Size| len.0 >= DELTA_LEN as u64 && len.0.is_multiple_of(8) && len.0 <= self.bytes.0;
        match self.page_len.iter().find(|len| !good(len)) {
            Some(len) => Err(Failure::Environment(format!(
                "--page-len {len} is not a multiple of 8 between {DELTA_LEN} and --bytes"
            ))),
            None => Ok(()),
        }
    }

    /// Calls `measure` for each page length, in order, and returns the results.
    pub fn each<T>(&self, measure: impl FnMut(u64) -> Result<T, BenchStop>) -> Result<Vec<T>, BenchStop> {
        self.page_len.iter().map(|len| len.0).map(measure).collect()
    }

    /// Runs a benchmark for each page length and returns its findings.
    pub fn findings(
        &self,
        bench: &'static str,
        room: &Room,
        common: &Common,
        measure: impl FnMut(u64) -> Result<Group, BenchStop>,
    ) -> Result<Findings, BenchStop> {
        let groups = self.each(measure)?;
        let mut settings = room.settings(common);
        settings.push(("rounds", common.rounds.to_string()));
        Ok(Findings { bench, settings, groups, left_out: Vec::new() })
    }

    /// Returns the title of a store with pages of this length.
    pub fn title(&self, page_len: u64) -> String {
        format!("{} in pages of {}", size(self.bytes.0), size(page_len))
    }

    /// Creates a store with pages of this length that hold random bytes, and returns it with its pages.
    pub fn store(
        &self,
        room: &Room,
        name: &str,
        page_len: u64,
        options: Options,
    ) -> Result<(Store, Vec<PageId>), BenchStop> {
        let store = room.open(name, options)?;
        let mut random = SplitMix64::new(page_len);
        let mut content = vec![0; page_len as usize];
        let mut pages = Vec::new();
        let count = self.bytes.0 / page_len;
        while (pages.len() as u64) < count {
            let mut batch = store.batch();
            for _ in 0..(BATCH_BYTES / page_len).clamp(1, count - pages.len() as u64) {
                for word in content.chunks_exact_mut(8) {
                    word.copy_from_slice(&random.next_word().to_le_bytes());
                }
                batch.create_from(content.clone(), room.place).metadata(remanent::Metadata::new());
            }
            pages.extend(store.commit(batch)?.pages);
            room.check()?;
        }
        Ok((store, pages))
    }
}
