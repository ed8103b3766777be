//! Every crash image of a scenario, to a given depth, and the state that recovery computes from each image.

use std::collections::HashSet;

use super::disk::Disk;
use super::log::{Batch, Refused};
use super::rule::Rule;
use super::run::{Promised, Run, Step};

/// A disk after a crash, and the guarantees that recovery must keep.
pub type Image = (Disk, Promised);

/// Counts over all images.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Number of distinct images that were recovered.
    pub images: usize,
    /// Number of images whose recovered state lacks an acknowledged batch.
    pub lost: usize,
    /// Number of images whose recovery failed although only crashes had happened.
    pub refused: usize,
    /// Number of images whose recovered state is not a prefix of the commits.
    pub wrong: usize,
    /// Number of images whose state differs after a second recovery.
    pub unstable: usize,
}

impl Verdict {
    pub fn failures(&self) -> usize {
        self.lost + self.refused + self.wrong + self.unstable
    }

    pub fn add(&mut self, other: &Verdict) {
        self.images += other.images;
        self.lost += other.lost;
        self.refused += other.refused;
        self.wrong += other.wrong;
        self.unstable += other.unstable;
    }
}

/// Runs the scenario and crashes it at every point. Recovers each image, commits `after`, and crashes that at
/// every point, and so on, to `depth` nested crashes.
pub fn explore(rule: Rule, scenario: &[Step], after: &[Step], depth: u32) -> Verdict {
    let mut verdict = Verdict::default();
    let mut images = first_images(rule, scenario);
    for level in 1.. {
        let mut next = HashSet::new();
        for (disk, promised) in &images {
            verdict.images += 1;
            if !check(&mut verdict, rule, disk, promised) || level > depth {
                continue;
            }
            let mut run = Run::new(disk.clone(), promised.clone(), rule, level);
            let writer = run.recover().expect("recovered a moment ago");
            run.work(writer, after);
            add_images(&mut next, run.crashes);
        }
        if level > depth {
            return verdict;
        }
        images = next;
    }
    unreachable!("the loop ends at the depth")
}

/// Returns the crash images of the scenario itself.
pub fn first_images(rule: Rule, scenario: &[Step]) -> HashSet<Image> {
    let (mut run, writer) = Run::create(rule);
    run.work(writer, scenario);
    let mut images = HashSet::new();
    add_images(&mut images, run.crashes);
    images
}

fn add_images(images: &mut HashSet<Image>, crashes: Vec<Image>) {
    // Identical crash points have the same images, so only one of them is explored.
    for (disk, promised) in crashes.into_iter().collect::<HashSet<_>>() {
        let cut = Promised { logged: promised.durable, ..promised.clone() };
        images.extend(disk.power_cuts().into_iter().map(|disk| (disk.tidy(), cut.clone())));
        images.insert((disk.tidy(), promised)); // the death of the process alone
    }
}

/// Recovers an image twice, and counts violations. Returns true if there were none.
fn check(verdict: &mut Verdict, rule: Rule, disk: &Disk, promised: &Promised) -> bool {
    let before = verdict.failures();
    match recovered(rule, disk) {
        Err(_) => verdict.refused += 1,
        Ok((state, disk)) => {
            if !promised.line.starts_with(&state) {
                verdict.wrong += 1;
            } else if state.len() < promised.logged {
                verdict.lost += 1;
            }
            // All batches are now acknowledged as durable, so a power cut that discards all pending versions
            // must change nothing.
            let cut = disk.least_power_cut();
            for again in [&disk, &cut].map(|disk| recovered(rule, disk)) {
                match again {
                    Err(_) => verdict.refused += 1,
                    Ok((again, _)) if again == state => {}
                    Ok((again, _)) if state.starts_with(&again) => verdict.lost += 1,
                    Ok(_) => verdict.unstable += 1,
                }
            }
        }
    }
    verdict.failures() == before
}

/// Returns the recovered state, and the disk after recovery.
pub fn recovered(rule: Rule, disk: &Disk) -> Result<(Vec<Batch>, Disk), Refused> {
    let mut run = Run::new(disk.clone(), Promised::default(), rule, u32::MAX);
    run.recording = false;
    run.recover()?;
    Ok((run.promised.line, run.disk))
}
