//! The damage test. It damages one file of a copy of a store. Reading the copy must then return the correct requests,
//! or fail with an error that names the damaged file.
//!
//! The test uses two kinds of stores. In a closed store, a durable mark in the log covers all requests. A store whose
//! process was killed may have lost its last requests. Every damaged copy is read without the engine. One of every
//! [`ENGINE_EVERY`] copies is also opened with the engine, which copies the pages to the device.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use remanent::error::Mismatch;
use remanent::options::Create;
use remanent::{Error, Options};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::{FileName, Folder, Lsn};

use super::{TortureContext, TortureTable, cannot};
use crate::cli::exit::Failure;
use crate::cli::memory::available;
use crate::read::store_dir::StoreDir;
use crate::replay::check;
use crate::replay::check::{Epochs, last_request};
use crate::replay::kill_run::{KillRun, KillRunStop};
use crate::replay::simulate::SplitMix64;

const ENGINE_EVERY: u64 = 10;
const SECTOR_LEN: u64 = 512;
const DRAWS: usize = 64;
/// Number of times that the process of a new store is killed before copies of the store are damaged.
const KILLS: u64 = 3;

/// The ways in which the test damages a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bit,
    ZeroedSector,
    MisdirectedSector,
    StaleSector,
    CutEnd,
    MissingFile,
    ForeignFile,
}

impl Kind {
    const ALL: [(Kind, &'static str); 7] = [
        (Kind::Bit, "bit flipped"),
        (Kind::ZeroedSector, "sector zeroed"),
        (Kind::MisdirectedSector, "sector overwritten by another"),
        (Kind::StaleSector, "sector write lost"),
        (Kind::CutEnd, "file truncated"),
        (Kind::MissingFile, "file missing"),
        (Kind::ForeignFile, "file replaced by another"),
    ];
}

/// The outcome of reading or opening a damaged copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DamageVerdict {
    /// The copy contains all requests.
    Right,
    /// Reading or opening the copy failed, and the error named the damaged file.
    Refused,
    /// The copy lacks the last requests, which no durable mark covered.
    Cut,
    /// The copy lacks requests although a durable mark covered them.
    Lost,
    /// The copy contains bytes of a state that never existed.
    Wrong,
}

/// A store whose process has ended, and the copy of the store that the test damages.
struct Victim<'c> {
    course: &'c KillRun,
    original: PathBuf,
    /// A copy of the store from an earlier time.
    earlier: PathBuf,
    /// The copy whose files are damaged and then repaired.
    copy: PathBuf,
    files: Vec<(PathBuf, u64)>,
    /// Number of the last request in the store.
    last: Option<u64>,
    /// Lsn of the last batch that a durable mark covers.
    marked: Lsn,
}

impl TortureContext<'_> {
    pub(super) fn damages(&mut self, report: &mut TortureTable) -> Result<(), KillRunStop> {
        report.columns = &["done", "right", "refused", "cut"];
        let mut counts = [[0; 5]; Kind::ALL.len()];
        let mut done = 0;
        for number in 0_u64.. {
            if done >= self.requested.damages {
                break;
            }
            // Create a new store for every thousand damages. Half of the damages are made after the store was closed.
            let wanted = (self.requested.damages - done).min(1000);
            let mut course = self.course(&format!("life-{number}"), None, false)?;
            let earlier = self.folder.join("earlier");
            for kill in 1..=KILLS {
                course.run_and_kill(kill, KILLS + 1)?;
                if kill == KILLS - 1 && course.params.store.exists() {
                    super::copy(&course.params.store, &earlier)?;
                }
            }
            let (killed, closed) = (self.folder.join("killed"), self.folder.join("closed"));
            if course.params.store.join(FileName::Store.name()).exists() {
                super::copy(&course.params.store, &killed)?;
                let victim = Victim::new(&course, killed.clone(), &earlier)?;
                self.damage(&victim, wanted / 2, &mut counts, &mut report.wrong)?;
            }
            course.run_to_end()?;
            super::copy(&course.params.store, &closed)?;
            let victim = Victim::new(&course, closed.clone(), &earlier)?;
            self.damage(&victim, wanted - wanted / 2, &mut counts, &mut report.wrong)?;
            done += wanted;
            for folder in [&killed, &closed, &earlier, &course.params.store] {
                super::remove(folder)?;
            }
        }
        for ((_, name), counts) in Kind::ALL.iter().zip(counts) {
            let [right, refused, cut, ..] = counts;
            report.rows.push(((*name).to_owned(), vec![counts.iter().sum(), right, refused, cut]));
        }
        Ok(())
    }

    /// Damages the copy `times` times, and counts the verdicts.
    fn damage(
        &mut self,
        victim: &Victim<'_>,
        times: u64,
        counts: &mut [[u64; 5]; Kind::ALL.len()],
        wrong: &mut Vec<String>,
    ) -> Result<(), KillRunStop> {
        super::copy(&victim.original, &victim.copy)?;
        for time in 0..times {
            self.check_interrupt()?;
            let at = self.random.below(Kind::ALL.len() as u64) as usize;
            let (kind, name) = Kind::ALL[at];
            let (file, _) = &victim.files[self.random.below(victim.files.len() as u64) as usize];
            let place = victim.strike(kind, file, &mut self.random)?;
            let mut verdict = victim.judge_decoder()?;
            if time % ENGINE_EVERY == 0
                && matches!(verdict, DamageVerdict::Right | DamageVerdict::Refused | DamageVerdict::Cut)
            {
                verdict = victim.judge_engine(self.requested.device, verdict)?;
            }
            counts[at][verdict as usize] += 1;
            if matches!(verdict, DamageVerdict::Lost | DamageVerdict::Wrong) {
                let kept = self.folder.join(format!("evidence-{}", wrong.len()));
                super::copy(&victim.copy, &kept)?;
                wrong.push(format!("{name}, {place}: {verdict:?}; the store is kept in {}", kept.display()));
            }
            victim.repair(file)?;
            self.bar.inc(1);
        }
        super::remove(&victim.copy)?;
        Ok(())
    }
}

impl<'c> Victim<'c> {
    fn new(course: &'c KillRun, original: PathBuf, earlier: &Path) -> Result<Self, KillRunStop> {
        let rebuilt = check::recovered(&original)?;
        let end = rebuilt.end.as_ref().expect("a rebuild of the whole log contains its end");
        let files = StoreDir::open(&original)?.files().map_err(|error| cannot("list", &original, &error))?;
        let files = files.into_iter().filter(|(folder, name, _)| {
            // The lock file contains no bytes.
            (*folder, name.as_str()) != (Folder::Root, FileName::Lock.name().as_str())
        });
        Ok(Self {
            course,
            earlier: earlier.to_owned(),
            copy: original.with_extension("damaged"),
            files: files.map(|(folder, name, len)| (Path::new(folder.name()).join(name), len)).collect(),
            last: last_request(rebuilt.table.root()).map_err(Failure::Damage)?,
            marked: end.proven.lsn,
            original,
        })
    }

    /// Damages a file, and returns a description of the damage.
    fn strike(&self, kind: Kind, file: &Path, random: &mut SplitMix64) -> Result<String, Failure> {
        let path = self.copy.join(file);
        let cannot_access = |error: std::io::Error| cannot("damage", &path, &error);
        let open = || fs::OpenOptions::new().read(true).write(true).open(&path).map_err(cannot_access);
        let len = fs::metadata(&path).map_err(cannot_access)?.len();
        let byte = self.written(file, len, random)?;
        let sector = byte / SECTOR_LEN * SECTOR_LEN;
        let sector_len = SECTOR_LEN.min(len - sector) as usize;
        let mut bytes = vec![0; sector_len];
        let name = file.display();
        match kind {
            Kind::Bit => {
                let (file, mut one) = (open()?, [0]);
                if len > 0 {
                    file.read_exact_at(&mut one, byte).map_err(cannot_access)?;
                    file.write_all_at(&[one[0] ^ 1 << random.below(8)], byte).map_err(cannot_access)?;
                }
                return Ok(format!("{name} at offset {byte}"));
            }
            Kind::ZeroedSector => {}
            Kind::MisdirectedSector => {
                let from = random.below(len / SECTOR_LEN + 1) * SECTOR_LEN;
                let from = from.min(len - sector_len as u64);
                open()?.read_exact_at(&mut bytes, from).map_err(cannot_access)?;
            }
            Kind::StaleSector => {
                let earlier = self.earlier.join(file);
                let stale = fs::File::open(earlier).and_then(|file| file.read_exact_at(&mut bytes, sector));
                if stale.is_err() {
                    // Use zeros if the file did not exist at the earlier time.
                    bytes.fill(0);
                }
            }
            Kind::CutEnd => {
                open()?.set_len(byte).map_err(cannot_access)?;
                return Ok(format!("{name} at {byte} of {len} bytes"));
            }
            Kind::MissingFile => {
                fs::remove_file(&path).map_err(cannot_access)?;
                return Ok(name.to_string());
            }
            Kind::ForeignFile => {
                let (other, _) = &self.files[random.below(self.files.len() as u64) as usize];
                fs::copy(self.original.join(other), &path).map_err(cannot_access)?;
                return Ok(format!("{name} is {}", other.display()));
            }
        }
        open()?.write_all_at(&bytes, sector).map_err(cannot_access)?;
        Ok(format!("{name} at offset {sector}"))
    }

    /// Returns a random offset in a file. Prefers bytes that are not zero, because most of a log segment is zeros.
    fn written(&self, file: &Path, len: u64, random: &mut SplitMix64) -> Result<u64, Failure> {
        let path = self.original.join(file);
        let cannot_access = |error: std::io::Error| cannot("read", &path, &error);
        let open = fs::File::open(&path).map_err(cannot_access)?;
        let mut bytes = [0; SECTOR_LEN as usize];
        let mut at = 0;
        for _ in 0..DRAWS {
            at = random.below(len.max(1));
            let sector = at / SECTOR_LEN * SECTOR_LEN;
            let read = &mut bytes[..SECTOR_LEN.min(len - sector) as usize];
            open.read_exact_at(read, sector).map_err(cannot_access)?;
            if read.iter().any(|byte| *byte != 0) {
                break;
            }
        }
        Ok(at)
    }

    /// Replaces the damaged file with the original.
    fn repair(&self, file: &Path) -> Result<(), Failure> {
        let copied = fs::copy(self.original.join(file), self.copy.join(file));
        copied.map(drop).map_err(|error| cannot("copy", file, &error))
    }

    /// Reads the copy without the engine, and returns the verdict.
    fn judge_decoder(&self) -> Result<DamageVerdict, Failure> {
        let options = RebuildOptions { page_bytes_max: available(), ..RebuildOptions::default() };
        let Ok(rebuilt) = rebuild(&StoreDir::open(&self.copy)?, &options) else {
            return Ok(DamageVerdict::Refused);
        };
        let Ok(found) = last_request(rebuilt.table.root()) else { return Ok(DamageVerdict::Wrong) };
        let is_exact = check::compare(&self.course.simulation_at(found), Epochs::Exact, &rebuilt).is_empty();
        let accepted = rebuilt.end.as_ref().map_or(Lsn(0), |end| end.accepted.lsn);
        Ok(self.judge(found, accepted, is_exact))
    }

    /// Opens the copy with the engine, and returns the verdict. The engine may report damage that the read without the
    /// engine did not find. If the read without the engine failed, the open must fail, too.
    fn judge_engine(
        &self,
        device: remanent::DeviceChoice,
        decoded: DamageVerdict,
    ) -> Result<DamageVerdict, Failure> {
        let folder = self.copy.with_extension("opened");
        super::copy(&self.copy, &folder)?;
        let options = Options::new().create(Create::Never).device(device);
        let verdict = match options.open(&folder) {
            Ok(store) => {
                let root = store.root().map_err(crate::cli::engine::engine_failure)?;
                match last_request(&root) {
                    Ok(found) => {
                        let differences = check::compare_open(&self.course.simulation_at(found), &store)
                            .map_err(crate::cli::engine::engine_failure)?;
                        let verdict = self.judge(found, store.lsn(), differences.is_empty());
                        // The engine must reach the same result, because it reads the same files by the same rules.
                        if verdict == decoded { verdict } else { DamageVerdict::Wrong }
                    }
                    Err(_) => DamageVerdict::Wrong,
                }
            }
            Err(error) if is_refusal(&error) => DamageVerdict::Refused,
            Err(error) => return Err(crate::cli::engine::engine_failure(error)),
        };
        super::remove(&folder)?;
        Ok(verdict)
    }

    fn judge(&self, found: Option<u64>, accepted: Lsn, is_exact: bool) -> DamageVerdict {
        judge((found, self.last), (accepted, self.marked), is_exact)
    }
}

/// Returns the verdict for a copy that could be read. The pairs contain the found and the expected number of the last
/// request, and the found and the expected Lsn of the last batch. `is_exact` states whether all pages are correct.
fn judge(
    (found, last): (Option<u64>, Option<u64>),
    (accepted, marked): (Lsn, Lsn),
    is_exact: bool,
) -> DamageVerdict {
    if !is_exact || found > last {
        DamageVerdict::Wrong
    } else if found == last {
        DamageVerdict::Right
    } else if accepted >= marked {
        DamageVerdict::Cut
    } else {
        DamageVerdict::Lost
    }
}

/// Returns true if the error reports damage to a file of the store. Returns false if the files could not be read.
fn is_refusal(error: &Error) -> bool {
    matches!(
        error,
        Error::Damaged(_)
            | Error::NoStore { .. }
            | Error::Mismatch(Mismatch::Identity { .. })
            | Error::Mismatch(Mismatch::Layout { .. })
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_frames_above_mark_may_be_truncated() {
        let judge = |found, accepted, is_exact| judge((found, Some(9)), (Lsn(accepted), Lsn(8)), is_exact);
        assert_eq!(judge(Some(9), 10, true), DamageVerdict::Right);
        assert_eq!(judge(Some(8), 9, true), DamageVerdict::Cut);
        assert_eq!(judge(Some(7), 8, true), DamageVerdict::Cut);
        assert_eq!(judge(Some(6), 7, true), DamageVerdict::Lost);
        assert_eq!(judge(None, 0, true), DamageVerdict::Lost);
        // Pages of a state that never existed are wrong.
        assert_eq!(judge(Some(9), 10, false), DamageVerdict::Wrong);
        assert_eq!(judge(Some(10), 11, true), DamageVerdict::Wrong);
    }
}
