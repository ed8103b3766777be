//! Classifies each page for the next snapshot: whether the snapshot must gather the page, can refer to an existing
//! image, or must record a deletion.
//!
//! Pages are classified in groups, between batches, so that a snapshot does not block batches. (Classifying all
//! 260,000 pages at once blocked a commit for 40 to 60 ms.) If a page changes after its classification, its
//! newer version is gathered. If a page is deleted after its classification, the gather reports the deletion.
//! Pages created after the beginning of the snapshot are not classified. Together with the log after the
//! snapshot's beginning, the result is one consistent state.

use remanent_format::image::ImageRef;
use remanent_format::manifest::ManifestEntry;
use remanent_format::{PageId, PageInfo, SnapshotId};

use super::{KnownImages, entry};
use crate::base::allocation::{append, collected, push};
use crate::error::{Error, Result};

/// The number of pages classified at a time. A group of this size takes about 200 us, and a batch may have to wait for
/// two groups.
pub(crate) const CLASSIFIED_AT_ONCE: usize = 1024;

/// The class of a page. The class determines what the next snapshot does with the page.
pub(crate) enum PageClass {
    /// The newest snapshot lists the current version of the page. The value contains the listed image.
    Unchanged(PageInfo, Option<ImageRef>),
    /// An image contains the current version of the page, but the newest snapshot lists another image, another place,
    /// or none.
    Known(PageInfo, Option<ImageRef>),
    /// No image contains the page. The value is its length in bytes.
    Changed(u64),
    /// A batch deleted the page after the snapshot began.
    Deleted,
    /// The page was deleted before the snapshot began. `is_named` states whether the newest snapshot lists it.
    Gone { is_named: bool },
}

impl PageClass {
    /// Returns whether the page is deleted although the newest snapshot still names it.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { is_named: true })
    }

    /// Returns whether the newest snapshot is up to date for the page. Such a page need not be classified again
    /// until it changes.
    pub fn is_settled(&self) -> bool {
        matches!(self, Self::Unchanged(..) | Self::Gone { is_named: false })
    }
}

/// The pages that the next snapshot must list or delete, by class.
#[derive(Default)]
pub(crate) struct SnapshotWork {
    /// The pages to gather, with their lengths in bytes.
    pub gather: Vec<(PageId, u64)>,
    /// The manifest entries of the pages with known images that the snapshot must name.
    pub entries: Vec<ManifestEntry>,
    /// The pages that the newest snapshot names and that are now deleted.
    pub tombstoned: Vec<PageId>,
    /// The link that precedes the snapshot, and the checksum of that link. If `None`, the snapshot names all pages.
    pub follows: Option<(SnapshotId, u32)>,
    /// The number of pages that were classified. If the snapshot follows a link, these are the pages that changed
    /// during or since the previous snapshot, the pages of folded links, and the pages whose images are written again.
    pub visited: usize,
}

impl SnapshotWork {
    /// Adds a page of class `class` to the work.
    fn note(&mut self, page: PageId, class: PageClass) -> Result<()> {
        match class {
            PageClass::Unchanged(info, image) | PageClass::Known(info, image) => {
                push(&mut self.entries, entry(&info, image))
            }
            PageClass::Changed(len) => push(&mut self.gather, (page, len)),
            // A batch has deleted the page. The gather detects the deletion and records the batch.
            PageClass::Deleted => push(&mut self.gather, (page, 0)),
            PageClass::Gone { .. } => push(&mut self.tombstoned, page),
        }
    }

    /// Returns the pages added so far in ascending order.
    fn mentioned(&self) -> Result<Vec<PageId>> {
        let gather = self.gather.iter().map(|(page, _)| *page);
        let entries = self.entries.iter().map(|entry| entry.page);
        let mut pages = collected(gather.chain(entries).chain(self.tombstoned.iter().copied()))?;
        pages.sort_unstable();
        Ok(pages)
    }
}

/// The pages at the beginning of a snapshot.
pub(crate) struct Beginning {
    /// The pages that may differ from the newest snapshot, because they changed or were deleted.
    pub changed: Vec<PageId>,
    /// The number of pages in the table.
    pub count: usize,
}

impl KnownImages {
    /// Determines the work of a snapshot that begins with the given pages. Three kinds of pages are classified:
    /// pages that may have changed according to the table, pages with a damaged image, and further pages that
    /// the snapshot must list.
    ///
    /// `carry` lists image files whose images are to be written again, with the number of bytes to write, the most
    /// wasteful file first. Files are carried while their bytes fit in `carry_bytes_max`, or in the number of bytes
    /// that the snapshot writes anyway if that is greater. `classify` requests [`KnownImages::classify`] on the thread
    /// that applies batches, and returns a function that waits for the result.
    ///
    /// # Errors
    /// The errors of `classify`.
    pub fn plan_work<L: FnOnce() -> Result<Vec<PageClass>>>(
        &self,
        Beginning { mut changed, count }: Beginning,
        carry: &[(u64, u64)],
        carry_bytes_max: u64,
        mut classify: impl FnMut(Vec<PageId>) -> L,
    ) -> Result<SnapshotWork> {
        let mut sorted = SnapshotWork::default();
        let mut classify_each = |pages: &[PageId], each: &mut dyn FnMut(PageId, PageClass) -> Result<()>| {
            // The next group is requested before the result of this one is awaited. With one request at a time, half of
            // the time was spent on waking threads.
            let mut requested: Option<(&[PageId], L)> = None;
            for pages in pages.chunks(CLASSIFIED_AT_ONCE).map(Some).chain([None]) {
                let next = pages.map(|pages| (pages, classify(pages.to_vec())));
                if let Some((pages, answer)) = std::mem::replace(&mut requested, next) {
                    pages.iter().zip(answer()?).try_for_each(|(page, class)| each(*page, class))?;
                }
            }
            Ok::<_, Error>(())
        };

        let damaged_images = self.damaged_images();
        if !damaged_images.is_empty() {
            append(&mut changed, damaged_images)?;
            changed.sort_unstable();
            changed.dedup();
        }
        sorted.visited = changed.len();
        classify_each(&changed, &mut |page, class| {
            if class.is_settled() { Ok(()) } else { sorted.note(page, class) }
        })?;

        let dirty_bytes: u64 = sorted.gather.iter().map(|(_, len)| len).sum();
        let mut room = dirty_bytes.max(carry_bytes_max);
        let mut mentioned = sorted.mentioned()?;
        for (file, bytes) in carry {
            if *bytes <= room {
                room -= bytes;
                let mut pages = self.lock().newest.pages_in(*file)?;
                sorted.visited += pages.len();
                // Pages that an earlier iteration has classified are excluded: a page's overlay may be in one file and
                // its base in another.
                mentioned = sorted.mentioned()?;
                pages.retain(|page| mentioned.binary_search(page).is_err());
                classify_each(&pages, &mut |page, class| match class {
                    PageClass::Unchanged(info, _) => push(&mut sorted.gather, (page, info.len)),
                    class => sorted.note(page, class),
                })?;
            }
        }
        if !carry.is_empty() {
            mentioned = sorted.mentioned()?;
        }
        // I7: no open accepts a manifest that names a page twice.
        assert!(mentioned.windows(2).all(|pair| pair[0] < pair[1]), "a page is spoken of twice");

        let rest = {
            let newest = &self.lock().newest;
            if let Some((link, folded)) = newest.fold(&mentioned, count)? {
                sorted.visited += folded.len();
                sorted.follows = Some((link.snapshot, link.manifest_crc));
                folded
            } else {
                sorted.visited = count;
                let mut mentioned = mentioned.into_iter().peekable();
                let mut is_spoken_of = |page: &PageId| {
                    while mentioned.next_if(|mentioned| mentioned < page).is_some() {}
                    mentioned.peek() == Some(page)
                };
                collected(newest.pages().filter(|page| !is_spoken_of(page)))?
            }
        };
        classify_each(&rest, &mut |page, class| sorted.note(page, class))?;
        // I7: a snapshot that omits a page would lose the page, because the log with its changes may then be recycled.
        let named = sorted.gather.len() + sorted.entries.len();
        assert!(sorted.follows.is_some() || named == count, "{named} of {count} pages are named");
        sorted.gather.sort_unstable();
        sorted.tombstoned.sort_unstable();
        Ok(sorted)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use remanent_format::image::Codec;
    use remanent_format::manifest::{Manifest, ManifestKind, Tombstone};
    use remanent_format::op::{Op, OpAt};
    use remanent_format::state::table::PlanMode;
    use remanent_format::{LogPoint, Lsn, PageTable, Place, StoreId};

    use super::super::newest::{ImageTotals, LINKS_MAX, Link, NewestSnapshot};
    use super::*;

    const PAGES: u64 = 10_000;
    const LEN: u64 = 256;

    /// A page table and the snapshots of a simulated store without page contents.
    struct TableWithoutBytes {
        table: PageTable,
        known: KnownImages,
        snapshots: u64,
    }

    impl TableWithoutBytes {
        fn commit(&mut self, ops: impl IntoIterator<Item = Op<'static>>) {
            commit(&mut self.table, ops);
        }

        fn fill(&mut self, page: u64) {
            self.commit([fill(page)]);
        }

        fn beginning(&mut self) -> Beginning {
            Beginning { changed: self.table.changed().unwrap(), count: self.table.pages().len() }
        }

        fn plan_work(&mut self, carry: &[(u64, u64)]) -> SnapshotWork {
            let beginning = self.beginning();
            let classify = |pages: Vec<PageId>| {
                let classes = self.known.classify(&mut self.table, None, &pages);
                || classes
            };
            self.known.plan_work(beginning, carry, 0, classify).unwrap()
        }

        /// Plans a snapshot. Calls `meanwhile` before each group is classified. Returns the work, the pages at the
        /// beginning, and those that a batch has deleted since.
        fn plan_work_while(
            &mut self,
            carry: &[(u64, u64)],
            mut meanwhile: impl FnMut(&mut PageTable, &mut BTreeMap<PageId, Lsn>),
        ) -> (SnapshotWork, BTreeMap<PageId, PageInfo>, BTreeMap<PageId, Lsn>) {
            let began = self.table.pages().map(|info| (info.page, info)).collect();
            let (beginning, mut deleted) = (self.beginning(), BTreeMap::new());
            let classify = |pages: Vec<PageId>| {
                meanwhile(&mut self.table, &mut deleted);
                let classes = self.known.classify(&mut self.table, Some(&deleted), &pages);
                || classes
            };
            let sorted = self.known.plan_work(beginning, carry, 0, classify).unwrap();
            (sorted, began, deleted)
        }

        /// Publishes a snapshot whose gathered images are in its own file.
        fn publish(&mut self, sorted: SnapshotWork) {
            self.snapshots += 1;
            let gathered = sorted.gather.iter().zip(1..).map(|((page, len), at)| {
                let (file, offset) = (self.snapshots, 4096 * at);
                let image =
                    ImageRef { file, offset, stored_len: *len, codec: Codec::Raw, stored_crc: 0, raw_crc: 0 };
                entry(&self.table.get(*page).unwrap(), Some(image))
            });
            let mut entries: Vec<ManifestEntry> = sorted.entries.into_iter().chain(gathered).collect();
            entries.sort_unstable_by_key(|entry| entry.page);
            let change = |(previous, previous_crc)| ManifestKind::Change { previous, previous_crc };
            let kind = sorted.follows.map_or(ManifestKind::Base, change);
            let lsn = self.table.lsn();
            let tombstoned = sorted.tombstoned.into_iter().filter(|_| kind != ManifestKind::Base);
            let tombstones = tombstoned.map(|page| Tombstone { page, lsn }).collect();
            let manifest = Manifest {
                kind,
                store: StoreId([0; 16]),
                snapshot: SnapshotId(self.snapshots),
                name: None,
                created_unix_ms: 0,
                redo: LogPoint { lsn: self.table.lsn(), ..LogPoint::default() },
                end: self.table.lsn(),
                next_page: self.table.next_page(),
                epoch_high: self.table.epoch_high(),
                next_file: self.snapshots + 1,
                ahead_from: 0,
                tombstones,
                entries,
                root: self.table.root().clone(),
            };
            let (sums, _) = match sorted.follows {
                None => self.known.advance_to_base(&manifest, 0, NewestSnapshot::of_base(&manifest)),
                Some((previous, _)) => {
                    let link = Link::of(&manifest, 0).unwrap();
                    self.known.advance_by_change(&manifest, link, previous)
                }
            };
            // The totals updated link by link equal those of all entries together.
            let newest = &self.known.lock().newest;
            let images = newest.pages().map(|page| newest.get(page).unwrap().known.image);
            assert_eq!(sums, ImageTotals::of(images));
        }
    }

    fn commit(table: &mut PageTable, ops: impl IntoIterator<Item = Op<'static>>) {
        let ops: Vec<OpAt<'_>> = ops.into_iter().map(|op| OpAt { op, body_at: 0 }).collect();
        let changes = table.plan(table.lsn().next(), &ops, PlanMode::Commit).unwrap();
        table.install(&changes);
    }

    fn fill(page: u64) -> Op<'static> {
        Op::Fill { page: PageId(page), offset: 0, len: 8, pattern: &[7; 8] }
    }

    fn create(page: u64) -> Op<'static> {
        let (key, metadata) = (None, remanent_format::Metadata::new());
        Op::Create { page: PageId(page), len: LEN, place: Place::Host, key, metadata }
    }

    /// Returns a store whose newest snapshot contains the current version of all pages.
    fn settled() -> TableWithoutBytes {
        let mut subject =
            TableWithoutBytes { table: PageTable::new(), known: KnownImages::default(), snapshots: 0 };
        subject.table.watch(subject.known.changed(&subject.table).unwrap());
        subject.commit((1..=PAGES).map(create));
        for visited in [PAGES, PAGES] {
            let sorted = subject.plan_work(&[]);
            assert_eq!(sorted.visited as u64, visited);
            subject.publish(sorted);
        }
        subject
    }

    fn pages(sorted: &SnapshotWork) -> Vec<u64> {
        sorted.gather.iter().map(|(page, _)| page.0).collect()
    }

    #[test]
    fn snapshot_visits_only_pages_changed_since_or_in_previous() {
        let mut subject = settled();
        subject.fill(5000);
        subject.fill(70);
        let sorted = subject.plan_work(&[]);
        assert_eq!((pages(&sorted), sorted.visited), (vec![70, 5000], 2));
        // The previous snapshot failed. The next one must do the work of both.
        subject.fill(71);
        let sorted = subject.plan_work(&[]);
        assert_eq!((pages(&sorted), sorted.visited), (vec![70, 71, 5000], 3));
        subject.publish(sorted);
        subject.fill(72);
        let sorted = subject.plan_work(&[]);
        assert_eq!((pages(&sorted), sorted.visited), (vec![72], 4));
        subject.publish(sorted);
        assert_eq!(subject.plan_work(&[]).visited, 1);
        assert_eq!(subject.plan_work(&[]).visited, 0);
    }

    #[test]
    fn carried_images_are_found_by_file() {
        let mut subject = settled();
        (100..130).for_each(|page| subject.fill(page));
        let sorted = subject.plan_work(&[]);
        subject.publish(sorted);
        (100..120).step_by(2).for_each(|page| subject.fill(page));
        let sorted = subject.plan_work(&[]);
        subject.publish(sorted);
        assert_eq!(subject.plan_work(&[]).visited, 10);
        // The third file contains the pages that changed once, and the first file all others.
        subject.fill(119);
        let in_third: Vec<u64> = (101..120).step_by(2).chain(120..130).collect();
        let sorted = subject.plan_work(&[(3, LEN)]);
        assert_eq!(pages(&sorted), in_third);
        assert_eq!(sorted.visited, 1 + in_third.len());
        subject.publish(sorted);
        assert!(!subject.known.lock().newest.sums().files.contains_key(&3));
        let sorted = subject.plan_work(&[(3, 0)]);
        assert_eq!((sorted.gather.len(), sorted.visited), (0, 1));
    }

    /// Each snapshot follows a link until half of the pages have changed, even if each snapshot has only one change.
    #[test]
    fn links_are_folded_as_they_grow() {
        let mut subject = settled();
        let mut named = 0;
        for round in 0..1000 {
            subject.fill(1 + round * 4);
            if round % 10 == 9 {
                subject.commit([Op::Delete { page: PageId(2 + round * 4) }]);
            }
            let sorted = subject.plan_work(&[]);
            assert!(sorted.follows.is_some(), "round {round}");
            let mentioned = sorted.gather.len() + sorted.entries.len() + sorted.tombstoned.len();
            // A page in the previous snapshot is classified once more.
            assert!(sorted.visited <= mentioned + 2, "round {round}");
            named += mentioned;
            subject.publish(sorted);
            let newest = &subject.known.lock().newest;
            assert!(newest.links.len() <= LINKS_MAX);
            // Every page that changed since the base is in one of the remaining links.
            let in_links: usize = newest.links.iter().map(|link| link.pages.len()).sum();
            assert_eq!(in_links as u64, round + 1 + (round + 1) / 10, "round {round}");
        }
        // There are a thousand changes and a hundred deletions. A rule that folds all links whenever there are eight
        // listed 79,000 pages in total.
        assert!(named < 6 * 1100, "{named}");
        // Repeated changes of one page count as one change.
        (0..1000).for_each(|_| {
            subject.fill(9999);
            let sorted = subject.plan_work(&[]);
            assert!(sorted.follows.is_some());
            subject.publish(sorted);
        });
        assert_eq!(subject.known.lock().newest.get(PageId(9999)).unwrap().known.lsn, subject.table.lsn());
    }

    /// Batches are applied between two groups. After any of them, a replay from the snapshot's beginning produces the
    /// current state, because the snapshot contains the current or an earlier version of each page that existed.
    #[test]
    fn concurrent_batches_are_distinguished_from_earlier() {
        let kinds = ["all is new", "a few", "half", "no link holds", "carried", "folded"];
        for kind in kinds {
            let mut subject = settled();
            let mut carry = Vec::new();
            match kind {
                "all is new" => {
                    subject = TableWithoutBytes {
                        table: PageTable::new(),
                        known: KnownImages::default(),
                        snapshots: 0,
                    };
                    subject.table.watch(subject.known.changed(&subject.table).unwrap());
                    subject.commit((1..=PAGES).map(create));
                }
                "a few" => (1..3000).step_by(2).for_each(|page| subject.fill(page)),
                "half" => (1..=PAGES).step_by(2).for_each(|page| subject.fill(page)),
                "no link holds" => subject.known.unlink(),
                "carried" => {
                    (1..3000).for_each(|page| subject.fill(page));
                    let sorted = subject.plan_work(&[]);
                    subject.publish(sorted);
                    (1..3000).step_by(2).for_each(|page| subject.fill(page));
                    carry.push((3, LEN));
                }
                _ => (2..LINKS_MAX as u64).for_each(|round| {
                    (1..3000).skip(round as usize).step_by(10).for_each(|page| subject.fill(page));
                    let sorted = subject.plan_work(&[]);
                    subject.publish(sorted);
                }),
            }
            subject.commit([fill(10), fill(11)]);
            // The page was deleted before the beginning. In the first kind, no snapshot lists any page.
            subject.commit([Op::Delete { page: PageId(5) }]);
            let mut at = 100;
            let (sorted, began, deleted) = subject.plan_work_while(&carry, |table, deleted| {
                // Pages near those of the first kinds: they changed before the beginning or not at all, and some are
                // classified later.
                for page in [at, at + 1, PAGES - at, PAGES - at - 1] {
                    commit(table, [fill(page)]);
                    commit(table, [Op::Move { page: PageId(page + 2), place: Place::Device(0) }]);
                    commit(table, [Op::Delete { page: PageId(page + 4) }]);
                    deleted.insert(PageId(page + 4), table.lsn());
                }
                commit(table, [create(table.next_page())]);
                at += 16;
            });
            assert!(at > 116, "{kind}: it was looked more than once");

            let state = subject.known.lock();
            let newest = &state.newest;
            let gathers = |page: &PageId| sorted.gather.binary_search_by_key(page, |(page, _)| *page).is_ok();
            let entries: BTreeMap<PageId, &ManifestEntry> =
                sorted.entries.iter().map(|entry| (entry.page, entry)).collect();
            let mentioned = sorted.mentioned().unwrap();
            assert!(mentioned.windows(2).all(|pair| pair[0] < pair[1]), "{kind}: each page once");
            assert!(mentioned.iter().all(|page| began.contains_key(page) || *page == PageId(5)), "{kind}");
            assert!(!gathers(&PageId(5)), "{kind}");
            assert_eq!(
                sorted.tombstoned,
                if kind == "all is new" { vec![] } else { vec![PageId(5)] },
                "{kind}"
            );
            for (page, then) in &began {
                let (now, named) = (subject.table.get(*page), newest.get(*page));
                assert_eq!(now.is_none(), deleted.contains_key(page));
                if let Some(entry) = entries.get(page) {
                    // The page may have moved before it was classified, and changed in any way since.
                    let named = named.expect("an image that is known");
                    assert_eq!(entry.image, named.known.image, "{kind}: page {page}");
                    assert_eq!((entry.epoch, then.epoch), (named.epoch, named.epoch), "{kind}: page {page}");
                    assert!(entry.lsn >= then.lsn, "{kind}: page {page}");
                } else if !gathers(page) {
                    // An older link lists the page, and its entry was correct at the beginning.
                    assert!(sorted.follows.is_some(), "{kind}: page {page} is not named");
                    assert_eq!(named.expect("named before").known.lsn, then.lsn, "{kind}: page {page}");
                }
            }
            // Pages that changed after they were classified remain marked as changed.
            drop(state);
            let changed = subject.table.changed().unwrap();
            let newest = &subject.known.lock().newest;
            for info in subject.table.pages() {
                let is_known = newest.get(info.page).is_some_and(|named| named.known.lsn == info.lsn);
                assert!(is_known || changed.binary_search(&info.page).is_ok(), "{kind}: page {}", info.page);
            }
        }
    }
}
