//! `remanent bench create`: new pages in bulk, compared with a file written and synced as often.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use super::figures::{Figure, Findings, Group, Unit};
use super::room::{self, BenchStop, Room, size};
use super::{Common, Measure, transfer};
use crate::cli::exit::Failure;
use crate::cli::size::Size;

const EXAMPLES: &str = "\
Pages of random bytes are created, --batch bytes to a batch, and each batch is waited for until it is durable. The \
ceiling is a file that takes the same bytes by one thread, synced as often. A long batch's bytes go to an image file \
once, and the log and the next snapshot only name them. All bytes written, a snapshot included, are shown as a \
multiple of the pages' bytes.

Examples:
  remanent bench create /mnt/fast
  remanent bench create /mnt/fast --bytes 4GiB --batch 256MiB --page-len 8MiB";

/// New pages in bulk, as an import makes them
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CreateBench {
    #[command(flatten)]
    common: Common,
    /// Bytes of all pages together
    #[arg(long, default_value = "256MiB")]
    bytes: Size,
    /// Bytes of the pages of one batch
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    batch: Size,
    /// Bytes of a page
    #[arg(long, value_name = "BYTES", default_value = "8MiB")]
    page_len: Size,
}

impl Measure for CreateBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        if self.page_len.0 == 0 || self.page_len > self.batch || self.batch > self.bytes {
            let text =
                "--page-len is at least 1, --batch no less than that, and --bytes no less than --batch";
            return Err(Failure::Environment(text.to_owned()));
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        // As many as are written where no batch is large enough for an image file.
        self.bytes.0.saturating_mul(3)
    }

    fn steps(&self) -> u64 {
        u64::from(self.common.rounds)
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let (page_len, batch) = (size(self.page_len.0), size(self.batch.0));
        let title = format!("{} in pages of {page_len}, {batch} a batch", size(self.bytes.0));
        let mut raw = Figure::new("raw, one file, write + fdatasync", Unit::BytesPerSecond);
        let mut store = Figure::new("create, durable", Unit::BytesPerSecond).under(&raw.name);
        let mut written = Figure::new("written, of the pages' bytes", Unit::Share);
        let content = transfer::random(self.page_len.0 as usize);
        let per_batch = self.batch.0 / self.page_len.0;
        let batches = self.bytes.0 / (per_batch * self.page_len.0);
        let bytes = (batches * per_batch * self.page_len.0) as f64;
        for _ in 0..self.common.rounds {
            room.step(&title)?;
            let path = room.path("raw");
            let started = Instant::now();
            let mut file = File::create(&path)?;
            for _ in 0..batches {
                for _ in 0..per_batch {
                    file.write_all(&content)?;
                }
                file.sync_data()?;
            }
            raw.push(bytes / started.elapsed().as_secs_f64());
            std::fs::remove_file(path)?;

            let made = room.open("store", room::options())?;
            let started = Instant::now();
            for _ in 0..batches {
                let mut batch = made.batch();
                for _ in 0..per_batch {
                    batch.create_from(content.to_vec(), room.place);
                }
                made.wait_durable(made.commit(batch)?.position.lsn)?;
            }
            store.push(bytes / started.elapsed().as_secs_f64());
            made.snapshot()?;
            let files = room::files(&room.path("store"), &["pages", "snapshots"])?;
            let all = files.iter().map(|(_, len)| len).sum::<u64>() + made.stats().log.bytes;
            written.push(all as f64 / bytes);
            made.close()?;
            std::fs::remove_dir_all(room.path("store"))?;
        }
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        let groups = vec![Group { title, figures: vec![raw, store, written] }];
        Ok(Findings { bench: "create", settings, groups, left_out: Vec::new() })
    }
}
