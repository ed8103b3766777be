//! Tests the properties of the crash images that a simulated disk creates.

use super::*;

#[test]
fn crash_images_record_earlier_acknowledgements() {
    let (disk, file) = with_segment(1);
    let first = disk.events();
    file.write_at(0, &[1]).unwrap();
    disk.note_ack(11);
    file.write_at(0, &[2]).unwrap();
    disk.note_ack(22);
    let plan = CrashPlan { events: first..usize::MAX, ..every() };
    let mut seen = Vec::new();
    disk.kill_images(&plan, |image| seen.push((heads(&image.disk).unwrap()[0], image.acks.to_vec())));
    // There is no image between a write and its acknowledgement, because the next image has the same disk and stricter
    // requirements.
    assert_eq!(seen, [(0, vec![]), (1, vec![11]), (2, vec![11, 22])]);
    let mut seen = BTreeSet::new();
    disk.power_images(&plan, |image| {
        seen.insert((image.acks.len(), heads(&image.disk).unwrap()[0]));
    });
    assert_eq!(seen, [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)].into());
}

#[test]
fn images_beyond_budget_are_seeded_sample_without_repeats() {
    let (disk, file) = with_segment(64);
    file.write_at(0, &[1; 64 * SECTOR_LEN]).unwrap();
    disk.create(FileName::Segment(1)).unwrap();
    let hashes = |seed| {
        let plan = CrashPlan { images_max: 50, seed, ..at_the_end(&disk) };
        let mut hashes = Vec::new();
        disk.power_images(&plan, |image| hashes.push(image.hash));
        hashes
    };
    let images = hashes(1);
    assert!((40..=50).contains(&images.len()), "{}", images.len());
    assert_eq!(images.iter().collect::<BTreeSet<_>>().len(), images.len());
    assert_eq!(images, hashes(1));
    assert_ne!(images, hashes(2));
}

/// The revealing combinations must be included even if the limit is far below the number of combinations.
#[test]
fn small_budget_includes_the_four_extreme_images() {
    let (disk, file) = with_segment(64);
    file.write_at(0, &[1; 64 * SECTOR_LEN]).unwrap();
    disk.create(FileName::Segment(1)).unwrap();
    let mut seen = BTreeSet::new();
    disk.power_images(&CrashPlan { images_max: 4, ..at_the_end(&disk) }, |image| {
        let heads = heads(&image.disk).unwrap();
        seen.insert((
            heads.iter().filter(|head| **head == 1).count(),
            image.disk.bytes(FileName::Segment(1)).is_some(),
        ));
    });
    assert_eq!(seen, [(0, false), (0, true), (64, false), (64, true)].into());
}

/// Random combinations must keep dependent changes in order.
#[test]
fn name_order_is_kept_within_budget() {
    let (disk, file) = with_segment(64);
    file.write_at(0, &[1; 64 * SECTOR_LEN]).unwrap();
    for _ in 0..4 {
        disk.create(TEMPORARY).unwrap();
        disk.rename(TEMPORARY, SEGMENT).unwrap();
    }
    let mut seen = BTreeSet::new();
    disk.power_images(&CrashPlan { images_max: 200, ..at_the_end(&disk) }, |image| {
        let old = image.disk.bytes(SEGMENT).unwrap().len() == 64 * SECTOR_LEN;
        seen.insert((old, image.disk.bytes(TEMPORARY).is_some()));
    });
    // The name may refer to the old file or to the new one. Another new file may or may not exist under the temporary
    // name.
    assert_eq!(seen, [(false, false), (false, true), (true, false), (true, true)].into());
}
