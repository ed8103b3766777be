//! The power-cut test. It makes a point-in-time copy of a device, including its file system, while a store on the
//! device is written.

use super::mounts::Medium;
use super::{TortureContext, TortureTable};
use crate::replay::kill_run::{KillRun, KillRunStop};

/// Number of power cuts before the test creates a new store.
const CUTS_A_COURSE: u64 = 12;

impl TortureContext<'_> {
    pub(super) fn power_cuts(&mut self, report: &mut TortureTable) -> Result<(), KillRunStop> {
        report.columns = &["cuts", "lost", "right"];
        if self.requested.power_cuts == 0 {
            return Ok(());
        }
        let folder = self.folder.join("power");
        super::make(&folder)?;
        let mut medium = match Medium::new(&folder) {
            Ok(medium) => medium,
            Err(reason) => {
                report.skipped.push(format!("power cuts: {reason}"));
                return Ok(());
            }
        };
        let (mut cuts, mut gone) = (0, 0);
        for number in 0_u64.. {
            if cuts >= self.requested.power_cuts {
                break;
            }
            let store = medium.path().join(format!("store-{number}"));
            let mut course = self.course_in(store, None, true)?;
            let wanted = (self.requested.power_cuts - cuts).min(CUTS_A_COURSE);
            // Last durable request. Requests that were only in the page cache at a kill may be lost in the next cut.
            let mut durable = None;
            for cut in 1..=wanted {
                self.check_interrupt()?;
                let Some(lost) = cut_power(&mut course, &mut medium, &mut durable, (cut, wanted))? else {
                    break;
                };
                gone += lost;
                cuts += 1;
                self.bar.inc(1);
            }
            super::remove(&course.params.store)?;
        }
        report.rows.push(("ext4 on a loop device".to_owned(), vec![cuts, gone, cuts]));
        Ok(())
    }
}

/// Captures the device during a replay, then kills the replay. Returns the number of requests that were only in the
/// page cache and are therefore missing from the captured device. Returns `None` if the replay ended before the
/// capture.
fn cut_power(
    course: &mut KillRun,
    medium: &mut Medium,
    durable: &mut Option<u64>,
    (cut, of): (u64, u64),
) -> Result<Option<u64>, KillRunStop> {
    let name =
        course.params.store.strip_prefix(medium.path()).expect("the store is on the medium").to_owned();
    let done = course.run_until_then_kill(cut, of, |acknowledged| Ok((acknowledged, medium.cut()?)))?;
    let Some(((acknowledged, power_cut), checked)) = done else { return Ok(None) };
    *durable = acknowledged.max(*durable);
    // The device was copied before the kill, so the copy cannot contain a request that the check after the kill did not
    // find.
    let seen =
        power_cut.with_mount(|mounted| course.check_at(&mounted.join(name), *durable, checked.found))?;
    let (found, _) = seen?;
    *durable = checked.acknowledged.max(*durable);
    Ok(Some(course.simulation().next_request() - found.next_request()))
}
