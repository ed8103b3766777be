//! Scrubs that find damage. After a crash at any point, acknowledged batches exist. Once the scrub has
//! returned, no file depends on the damaged bytes.

use remanent::error::FileName;
use remanent::snapshot::SnapshotInfo;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, PageId, SnapshotId};
use remanent_format::image::ImageRef;
use remanent_format::state::survey::Survey;

use super::explore::Level;
use super::work::Random;
use super::{LEVELS, options, suite_at};

fn image_of(disk: &SimDisk, snapshot: &SnapshotInfo, page: PageId) -> ImageRef {
    let snapshot = Survey::read(disk).and_then(|survey| survey.snapshot(snapshot.id)).expect("it is sound");
    let entry = snapshot.entries.iter().find(|entry| entry.page == page).expect("it has the page");
    entry.image.expect("the page is not empty")
}

/// With one snapshot and the log from its beginning, a damaged image can be reconstructed from the log, and a
/// damaged batch from the image, so no open fails after a crash. First the image is damaged, then the log.
/// Earlier states are not checked, because a view or restore that needs the damaged bytes fails.
#[test]
fn repairing_scrub_survives_crash() {
    let levels: Vec<Level> = LEVELS.iter().map(|level| Level { closely_of: usize::MAX, ..*level }).collect();
    suite_at(&levels, options(), 1800, |driver, random: &mut Random| {
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 8, 300)?;
        let snapshot = driver.snapshot(&store)?;
        driver.change(&store, random, &pages[4..])?;
        let image = image_of(&driver.disk, &snapshot, pages[0]);
        driver.disk.damage(FileName::Pages(image.file), image.offset, &[0x5a; 8]);
        let scrubbed = store.scrub()?;
        assert_eq!(scrubbed.damage.len(), 1, "{scrubbed:?}");
        assert_eq!(scrubbed.mended.transpose()?, Some(SnapshotId(2)));
        driver.change(&store, random, &pages[..2])?;
        // Damages the first batch of the log.
        driver.disk.damage(FileName::Segment(1), 8192 + 100, &[0x5a; 8]);
        let scrubbed = store.scrub()?;
        assert_eq!(scrubbed.damage.len(), 1, "{scrubbed:?}");
        assert_eq!(scrubbed.mended.transpose()?, Some(SnapshotId(3)));
        driver.change(&store, random, &pages[2..5])?;
        driver.check(&store);
        driver.close(store)?;
        Ok::<_, Error>(driver.into())
    });
}
