//! Floor 5. What lies on disk already: which pages the next snapshot need not gather.
//!
//! A page's bytes are those of an image as long as no batch touched the page since, and its Lsn tells: one Lsn
//! of one page is one content. So a snapshot gathers the pages whose Lsn is another than that of the image
//! known, and names the known image for the others. A batch that only moves a page leaves its epoch, and one
//! epoch of one page is one content, too: then the snapshot says where it is now, and names the image that it
//! had. It takes 56 bytes of memory a page.
//!
//! Nothing here is on disk: it is rebuilt by each open from the snapshot used and the log behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use remanent_format::by_id::ById;
use remanent_format::image::ImageRef;
use remanent_format::manifest::{Manifest, ManifestEntry};
use remanent_format::rebuild::{Survey, check_image};
use remanent_format::replay::Base;
use remanent_format::{Lsn, PageId, PageTable, ReadAt, SnapshotId};

use super::entry;
use super::newest::{Known, Link, Newest, Sums};
use crate::error::Result;
use crate::sync::Mutex;

/// The images that lie on disk and hold a page's bytes of now, or of a moment ago.
#[derive(Default)]
pub(crate) struct KnownImages {
    newest: Mutex<Newest>,
    /// Images that the newest snapshot does not name: those of a restore's table, and those that were written
    /// ahead of their batch.
    beside: Mutex<BTreeMap<PageId, Known>>,
    /// Images that were written ahead of their batch, and that nobody read back yet; with the pages' lengths.
    ahead: Mutex<BTreeMap<PageId, (Known, u64)>>,
    /// Images that do not hold any more, by file and offset, with their pages: no snapshot names them again.
    spoilt: Mutex<BTreeMap<(u64, u64), PageId>>,
}

/// What a snapshot has to do, as of the batch at which it begins.
pub(crate) struct Sorted {
    /// The pages to gather, with their lengths in bytes.
    pub gather: Vec<(PageId, u64)>,
    /// Pages that it must name, and whose images are known.
    pub entries: Vec<ManifestEntry>,
    /// Pages of the newest snapshot that are gone.
    pub gone: Vec<PageId>,
    /// The link that it follows, and its checksum; if none, it names all pages.
    pub follows: Option<(SnapshotId, u32)>,
    /// How many pages were looked at to find out. Unless it names all pages, these are the ones that changed since
    /// the snapshot before, or in that one, those of links that are folded, and those that are carried.
    pub visited: usize,
}

impl KnownImages {
    /// What an open knows once it followed the log behind a snapshot. The pages' bases are nobody's any more when
    /// that is put together: it lies where they did.
    pub fn recovered(
        survey: &Survey,
        base: Option<SnapshotId>,
        table: &PageTable,
        bases: ById<PageId, Base>,
    ) -> Result<Self> {
        let beside = Self::beside(survey, base, table, &bases)?;
        drop(bases);
        let newest = match base {
            Some(base) => {
                let crc = |link: SnapshotId| survey.links[&link].as_ref().map_err(Clone::clone);
                let link = |link: &Arc<Manifest>| Ok(Link::of(link, crc(link.snapshot)?.1.header_crc));
                let chain = survey.chain(base)?;
                let links = chain.into_iter().rev().map(link).collect::<Result<_>>()?;
                Newest::of(links, survey.entries(base)?)
            }
            None => Newest::default(),
        };
        Ok(Self { newest: Mutex::new(newest), beside: Mutex::new(beside), ..Self::default() })
    }

    /// What replay took from elsewhere than the snapshot: a restore's table, images named by the log.
    fn beside(
        survey: &Survey,
        base: Option<SnapshotId>,
        table: &PageTable,
        bases: &ById<PageId, Base>,
    ) -> Result<BTreeMap<PageId, Known>> {
        // Both the snapshot's pages and those here ascend.
        let named = base.map(|base| survey.entries(base)).transpose()?;
        let mut named = named.into_iter().flatten().peekable();
        let beside = bases.iter().filter_map(|(page, base)| {
            while named.next_if(|entry| entry.page < page).is_some() {}
            let info = table.get(page)?;
            let is_newest = named.peek().is_some_and(|entry| entry.page == page && entry.lsn == info.lsn);
            let holds = info.lsn <= base.lsn && !base.resized && (base.image.is_some() || info.len == 0);
            (holds && !is_newest).then_some((page, Known { lsn: info.lsn, image: base.image }))
        });
        Ok(beside.collect())
    }

    /// Has the table note from here on what changes, so that [`KnownImages::sort_out`] need not look through it. What
    /// is not as the newest snapshot has it has changed already.
    pub fn watch(&self, table: &mut PageTable) {
        let newest = self.newest.lock();
        let is_unchanged = |page, lsn: Lsn| newest.get(page).is_some_and(|named| named.known.lsn == lsn);
        let changed = table.pages().filter(|info| !is_unchanged(info.page, info.lsn)).map(|info| info.page);
        let gone = newest.pages().filter(|page| table.get(*page).is_none());
        let changed: Vec<PageId> = changed.chain(gone).collect();
        table.watch(changed);
    }

    /// Notes an image that no snapshot names yet, and that holds the page as batch `lsn` left it. Something
    /// else keeps its file until one does.
    pub fn note(&self, page: PageId, lsn: Lsn, image: Option<ImageRef>) {
        self.beside.lock().insert(page, Known { lsn, image });
    }

    /// Notes an image that was written ahead of batch `lsn`, for a page of length `len`.
    pub fn note_ahead(&self, page: PageId, lsn: Lsn, image: ImageRef, len: u64) {
        self.ahead.lock().insert(page, (Known { lsn, image: Some(image) }, len));
    }

    /// Reads the images back that were written ahead of their batches: a snapshot may name those that hold. The
    /// pages of the others are gathered, for their bytes are in memory.
    pub fn prove(&self, source: &dyn ReadAt) {
        let ahead = std::mem::take(&mut *self.ahead.lock());
        for (page, (known, len)) in ahead {
            let Some(image) = known.image else { continue };
            match check_image(source, &image, len) {
                Ok(()) => _ = self.beside.lock().insert(page, known),
                Err(damage) => tracing::warn!(%damage, %page, "an image that a batch names does not hold"),
            }
        }
    }

    /// Notes that an image does not hold any more: the next snapshot gathers its page.
    pub fn spoil(&self, page: PageId, image: &ImageRef) {
        let is_it = |known: &Known| known.image.is_some_and(|known| place(&known) == place(image));
        self.beside.lock().retain(|_, known| !is_it(known));
        // It stays among the newest snapshot's: were its page deleted, the next one must say that it is gone.
        self.spoilt.lock().insert(place(image), page);
    }

    /// Lets the next snapshot follow none: a link before it does not hold.
    pub fn unlink(&self) {
        self.newest.lock().links.clear();
    }

    /// Sorts the pages of a watched table into those to gather and those that are known. `carry` names image files
    /// whose images are to be written again, with the bytes that this takes, the most wasteful first: as many
    /// of them as fit into `carry_bytes_max`, or into what the snapshot writes anyway.
    ///
    /// Looked at is what the table says may have changed, and what has no image that holds. A page is settled only
    /// once the newest snapshot is seen to have it as it is: so a snapshot that fails after this forgets nothing.
    pub fn sort_out(&self, table: &mut PageTable, carry: &[(u64, u64)], carry_bytes_max: u64) -> Sorted {
        let (newest, beside) = (self.newest.lock(), self.beside.lock());
        let spoilt = self.spoilt.lock();
        let holds = |known: &Known| known.image.is_none_or(|image| !spoilt.contains_key(&place(&image)));
        let (mut gather, mut entries) = (Vec::new(), Vec::new());
        let (mut gone, mut settled) = (Vec::new(), Vec::new());
        let changed = table.changed().into_iter().chain(spoilt.values().copied());
        let changed: BTreeSet<PageId> = changed.collect();
        for &page in &changed {
            let named = newest.get(page);
            let Some(info) = table.get(page) else {
                if named.is_some() {
                    gone.push(page)
                } else {
                    settled.push(page)
                }
                continue;
            };
            let named = named.filter(|named| holds(&named.known));
            if named.is_some_and(|named| named.known.lsn == info.lsn) {
                settled.push(page);
                continue;
            }
            let beside = beside.get(&page).filter(|known| known.lsn == info.lsn);
            let only_moved = named.filter(|named| named.epoch == info.epoch).map(|named| &named.known);
            match beside.or(only_moved) {
                Some(known) => entries.push(entry(&info, known.image)),
                None => gather.push((page, info.len)),
            }
        }
        table.settle(&settled);
        let mut visited = changed.len();
        let is_changed = |page: &PageId| changed.contains(page) && settled.binary_search(page).is_err();

        let dirty_bytes: u64 = gather.iter().map(|(_, len)| len).sum();
        let mut room = dirty_bytes.max(carry_bytes_max);
        let mut carried = BTreeSet::new();
        for (file, bytes) in carry {
            if *bytes <= room {
                room -= bytes;
                carried.insert(*file);
                let pages = newest.pages_in(*file);
                visited += pages.len();
                let unchanged = pages.into_iter().filter(|page| !is_changed(page));
                gather.extend(unchanged.filter_map(|page| Some((page, table.get(page)?.len))));
            }
        }
        gather.sort_unstable();
        let spoken_of: BTreeSet<PageId> = gather
            .iter()
            .map(|(page, _)| *page)
            .chain(entries.iter().map(|entry: &ManifestEntry| entry.page))
            .chain(gone.iter().copied())
            .collect();
        let follows = newest.fold(&spoken_of, table.pages().len()).map(|(at, folded)| {
            visited += folded.len() - spoken_of.len();
            for &page in folded.difference(&spoken_of) {
                match table.get(page).zip(newest.get(page)) {
                    Some((info, named)) => entries.push(entry(&info, named.known.image)),
                    None => gone.push(page),
                }
            }
            gone.sort_unstable();
            (newest.links[at].snapshot, newest.links[at].manifest_crc)
        });
        if follows.is_none() {
            visited = table.pages().len();
            let is_carried = |known: &Known| known.image.is_some_and(|image| carried.contains(&image.file));
            let unchanged = table.pages().filter(|info| !is_changed(&info.page)).filter_map(|info| {
                let named = newest.get(info.page).expect("a page that did not change since it was named");
                assert!(named.known.lsn == info.lsn, "page {} changed unseen", info.page);
                (!is_carried(&named.known)).then(|| entry(&info, named.known.image))
            });
            entries.extend(unchanged);
        }
        Sorted { gather, entries, gone, follows, visited }
    }

    /// A snapshot was published: `manifest` is its own link. Returns what it names, together, and the links before
    /// it, the newest first.
    pub fn advance(&self, manifest: &Manifest, manifest_crc: u32) -> (Sums, Vec<SnapshotId>) {
        let mut newest = self.newest.lock();
        newest.advance(manifest, manifest_crc);
        // Whatever was known up to there, this snapshot names, or it is of the past.
        self.beside.lock().retain(|_, known| known.lsn > manifest.redo.lsn);
        let before = newest.links.iter().rev().skip(1).map(|link| link.snapshot).collect();
        (newest.sums().clone(), before)
    }
}

/// Where an image lies: numbers of files are never used again, so this is its name.
fn place(image: &ImageRef) -> (u64, u64) {
    (image.file, image.offset)
}

#[cfg(test)]
mod tests {
    use remanent_format::image::Codec;
    use remanent_format::manifest::{ManifestKind, Tombstone};
    use remanent_format::op::{Op, OpAt};
    use remanent_format::table::PlanMode;
    use remanent_format::{LogPoint, Place, StoreId};

    use super::super::newest::LINKS_MAX;
    use super::*;

    const PAGES: u64 = 10_000;
    const LEN: u64 = 256;

    /// A store without any bytes.
    struct Subject {
        table: PageTable,
        known: KnownImages,
        snapshots: u64,
    }

    impl Subject {
        fn commit(&mut self, ops: impl IntoIterator<Item = Op<'static>>) {
            let ops: Vec<OpAt<'_>> = ops.into_iter().map(|op| OpAt { op, body_at: 0 }).collect();
            let changes = self.table.plan(self.table.lsn().next(), &ops, PlanMode::Commit).unwrap();
            self.table.install(&changes);
        }

        fn fill(&mut self, page: u64) {
            self.commit([Op::Fill { page: PageId(page), offset: 0, len: 8, pattern: &[7; 8] }]);
        }

        fn sort_out(&mut self, carry: &[(u64, u64)]) -> Sorted {
            self.known.sort_out(&mut self.table, carry, 0)
        }

        /// Publishes a snapshot that gathered into a file of its own.
        fn publish(&mut self, sorted: Sorted) {
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
            let gone = sorted.gone.into_iter().filter(|_| kind != ManifestKind::Base);
            let tombstones = gone.map(|page| Tombstone { page, lsn }).collect();
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
                tombstones,
                entries,
                root: self.table.root().clone(),
            };
            let (sums, _) = self.known.advance(&manifest, 0);
            // Kept from link to link, they are what all entries together say.
            let newest = self.known.newest.lock();
            let images = newest.pages().map(|page| newest.get(page).unwrap().known.image);
            assert_eq!(sums, Sums::of(images));
        }
    }

    /// A store of which the newest snapshot has all.
    fn settled() -> Subject {
        let mut subject = Subject { table: PageTable::new(), known: KnownImages::default(), snapshots: 0 };
        subject.known.watch(&mut subject.table);
        let create = |page| Op::Create {
            page: PageId(page),
            len: LEN,
            place: Place::Host,
            key: None,
            metadata: remanent_format::Metadata::new(),
        };
        subject.commit((1..=PAGES).map(create));
        for visited in [PAGES, PAGES] {
            let sorted = subject.sort_out(&[]);
            assert_eq!(sorted.visited as u64, visited);
            subject.publish(sorted);
        }
        subject
    }

    fn pages(sorted: &Sorted) -> Vec<u64> {
        sorted.gather.iter().map(|(page, _)| page.0).collect()
    }

    #[test]
    fn a_snapshot_looks_at_what_changed_since_the_one_before_and_in_it() {
        let mut subject = settled();
        subject.fill(5000);
        subject.fill(70);
        let sorted = subject.sort_out(&[]);
        assert_eq!((pages(&sorted), sorted.visited), (vec![70, 5000], 2));
        // It failed. Another one has to do it all, and what came since.
        subject.fill(71);
        let sorted = subject.sort_out(&[]);
        assert_eq!((pages(&sorted), sorted.visited), (vec![70, 71, 5000], 3));
        subject.publish(sorted);
        subject.fill(72);
        let sorted = subject.sort_out(&[]);
        assert_eq!((pages(&sorted), sorted.visited), (vec![72], 4));
        subject.publish(sorted);
        assert_eq!(subject.sort_out(&[]).visited, 1);
        assert_eq!(subject.sort_out(&[]).visited, 0);
    }

    #[test]
    fn what_is_carried_is_found_by_its_file() {
        let mut subject = settled();
        (100..130).for_each(|page| subject.fill(page));
        let sorted = subject.sort_out(&[]);
        subject.publish(sorted);
        (100..120).step_by(2).for_each(|page| subject.fill(page));
        let sorted = subject.sort_out(&[]);
        subject.publish(sorted);
        assert_eq!(subject.sort_out(&[]).visited, 10);
        // The third file has what was changed once, and all else the first one.
        subject.fill(119);
        let in_third: Vec<u64> = (101..120).step_by(2).chain(120..130).collect();
        let sorted = subject.sort_out(&[(3, LEN)]);
        assert_eq!(pages(&sorted), in_third);
        assert_eq!(sorted.visited, 1 + in_third.len());
        subject.publish(sorted);
        assert!(!subject.known.newest.lock().sums().files.contains_key(&3));
        let sorted = subject.sort_out(&[(3, 0)]);
        assert_eq!((sorted.gather.len(), sorted.visited), (0, 1));
    }

    /// What snapshots cost that each follow one change: never all pages, until half of them changed.
    #[test]
    fn links_are_folded_as_they_grow() {
        let mut subject = settled();
        let mut named = 0;
        for round in 0..1000 {
            subject.fill(1 + round * 4);
            if round % 10 == 9 {
                subject.commit([Op::Delete { page: PageId(2 + round * 4) }]);
            }
            let sorted = subject.sort_out(&[]);
            assert!(sorted.follows.is_some(), "round {round}");
            let spoken_of = sorted.gather.len() + sorted.entries.len() + sorted.gone.len();
            // What was in the snapshot before is looked at once more.
            assert!(sorted.visited <= spoken_of + 2, "round {round}");
            named += spoken_of;
            subject.publish(sorted);
            let newest = subject.known.newest.lock();
            assert!(newest.links.len() <= LINKS_MAX);
            // A page that changed in any link since the base is in one of those that there are.
            let in_links: usize = newest.links.iter().map(|link| link.pages.len()).sum();
            assert_eq!(in_links as u64, round + 1 + (round + 1) / 10, "round {round}");
        }
        // A thousand changes and a hundred ends. To fold all links whenever there are eight named 79,000.
        assert!(named < 6 * 1100, "{named}");
        // One page that changes again and again is one change.
        (0..1000).for_each(|_| {
            subject.fill(9999);
            let sorted = subject.sort_out(&[]);
            assert!(sorted.follows.is_some());
            subject.publish(sorted);
        });
        assert_eq!(subject.known.newest.lock().get(PageId(9999)).unwrap().known.lsn, subject.table.lsn());
    }
}
