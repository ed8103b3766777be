//! Floor 0. The state of a store directory, computed purely over [`ReadAt`]: no device, no mapping, no
//! write. Inspectors and read-only opens use it, and the engine's recovery is tested against it.
//!
//! [`Survey`] looks at every file and judges none; [`Survey::resolve`] follows the log from one snapshot;
//! [`rebuild`] tries the snapshots from the newest to the oldest, then the log's beginning, and loads bytes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::bases::Base;
use crate::defect::{Damage, Defect, check_limit, reserve};
use crate::follow::Following;
use crate::frame::FrameKind;
use crate::head::PageHead;
use crate::ids::{Lsn, PageId, SnapshotId};
use crate::image::{Codec, ImageRef, decompress_from};
use crate::limits::CHAIN_LINKS_MAX;
use crate::log::{Frame, LogEnd, LogMap, LogWalk};
use crate::manifest::{
    CopyHealth, Manifest, ManifestEntry, ManifestHeaderRaw, ManifestKind, check_link, merge, merged_entries,
};
use crate::names::{FileName, Folder, ReadAt};
use crate::op::{OpAt, decode_payload};
use crate::replay::{Resolved, Resolver};
use crate::segment::SEGMENT_HEADER_BLOCK;
use crate::store::StoreFile;
use crate::table::PageTable;

/// What to rebuild.
#[derive(Clone, Copy, Debug)]
pub struct RebuildOptions {
    /// Start from this snapshot and no other.
    pub base: Option<SnapshotId>,
    /// Stop after this batch; the base must not have later ones.
    pub until: Option<Lsn>,
    /// Refuse a state whose pages take more memory than this together, in bytes. A length on disk may be any
    /// up to [`crate::limits::PAGE_LEN_MAX`], and zeros take no space there: who reads what a stranger wrote
    /// sets this.
    pub page_bytes_max: u64,
}

impl Default for RebuildOptions {
    fn default() -> Self {
        Self { base: None, until: None, page_bytes_max: u64::MAX }
    }
}

/// All that lies in a store directory, as far as it can be read.
#[derive(Debug)]
pub struct Survey {
    /// The store's identity.
    pub store: StoreFile,
    /// The log.
    pub log: LogMap,
    /// The links of snapshots. What a snapshot consists of, [`Survey::snapshot`] says.
    pub links: Links,
}

/// The links of snapshots, one a file: the manifest with the health of its copies, or why it cannot be read. A link may be
/// there for the snapshots that follow it only.
pub type Links = BTreeMap<SnapshotId, Result<(Arc<Manifest>, CopyHealth), Damage>>;

/// Reads a link of which both copies are good; gives its header checksum with it. `None` if anything is not as it should
/// be.
pub type FasterLinks<'a> = &'a dyn Fn(FileName) -> Option<(Manifest, u32)>;

/// A place to start from: a snapshot, whole, or the log's beginning, which is `None`.
pub(crate) type Candidate = (Option<SnapshotId>, Result<Option<Arc<Manifest>>, Damage>);

/// A state without its bytes.
#[derive(Debug)]
pub struct Resolution {
    /// The snapshot from which it was followed; `None` is the log's beginning.
    pub base: Option<SnapshotId>,
    /// The state.
    pub resolved: Resolved,
    /// The end of the log; `None` if the walk stopped before, at the batch asked for. Its record of verified
    /// snapshots is the last one there is, also where that lies before the base.
    pub end: Option<LogEnd>,
    /// Batches replayed.
    pub batches: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// The image files that they name, each with the last batch that does.
    pub ahead: BTreeMap<u64, Lsn>,
    /// Bytes of these images, as they are stored.
    pub ahead_bytes: u64,
}

impl Resolution {
    /// Refuses pages that take more than `limit` bytes of memory together (I10): those that have a base here.
    ///
    /// # Errors
    /// [`Defect::Limit`].
    pub fn check_page_bytes(&self, limit: u64) -> Result<(), Damage> {
        let lens = self.resolved.bases.iter().map(|(page, _)| self.resolved.final_len(page));
        let found = lens.fold(0, u64::saturating_add);
        check_limit("bytes of all pages", found, limit).map_err(|defect| defect.at(FileName::Store, 0))
    }
}

/// A state with its bytes.
#[derive(Debug)]
pub struct Rebuilt {
    /// How it came about.
    pub base: Option<SnapshotId>,
    /// Pages and root.
    pub table: PageTable,
    /// The pages' bytes.
    pub contents: BTreeMap<PageId, Vec<u8>>,
    /// The end of the log; `None` if the rebuild stopped before, at the batch asked for.
    pub end: Option<LogEnd>,
    /// Batches replayed behind the base.
    pub batches: u64,
    /// Snapshots that could not be used, newest first; time was lost, not data.
    pub passed_over: Vec<Damage>,
}

impl Survey {
    /// Looks at every file.
    ///
    /// # Errors
    /// [`Damage`] if STORE is missing or unreadable, or a folder cannot be listed.
    pub fn read(source: &dyn ReadAt) -> Result<Self, Damage> {
        Self::read_as(source, read_store(source)?)
    }

    /// Looks at every file but STORE, whose content is given: an inspector that guesses the store's id goes
    /// on where STORE is lost.
    ///
    /// # Errors
    /// [`Damage`] if a folder cannot be listed.
    pub fn read_as(source: &dyn ReadAt, store: StoreFile) -> Result<Self, Damage> {
        let log = LogMap::read(source, store.store)?;
        let links = read_links(source, &store, &|_| None)?;
        Ok(Self { store, log, links })
    }

    /// The highest durable mark that manifests give: a manifest is published only when the log is durable
    /// up to its end (I7).
    #[must_use]
    pub fn mark(&self) -> Lsn {
        self.readable().map(|manifest| manifest.end).max().unwrap_or_default()
    }

    /// The links that can be read, oldest first, each as it is on disk: a change names only what changed.
    pub fn readable(&self) -> impl DoubleEndedIterator<Item = &Arc<Manifest>> + Clone {
        self.links.values().filter_map(|read| read.as_ref().ok()).map(|(manifest, _)| manifest)
    }

    /// The links of which a snapshot consists: its own first, its base last.
    ///
    /// # Errors
    /// [`Damage`] to one of them: it is missing, unreadable, or not the one that is followed; or there are
    /// more than [`CHAIN_LINKS_MAX`].
    pub fn chain(&self, snapshot: SnapshotId) -> Result<Vec<&Arc<Manifest>>, Damage> {
        let (newest, _) = self.link(snapshot)?;
        let mut chain = vec![newest];
        // Numbers fall from link to link, so this ends.
        while let Some(change) = chain.last()
            && let ManifestKind::Change { previous, .. } = change.kind
        {
            let at = |defect: Defect| defect.at(FileName::Manifest(change.snapshot.0), 0);
            check_limit("links of a snapshot", chain.len() as u64 + 1, CHAIN_LINKS_MAX as u64).map_err(at)?;
            let (link, health) = self.link(previous)?;
            check_link(change, link, health.header_crc).map_err(at)?;
            chain.push(link);
        }
        Ok(chain)
    }

    /// A snapshot, whole: its chain of links merged. A base is given as it is; what is merged is made anew
    /// with each call, as large as all of its links together at most.
    ///
    /// # Errors
    /// As for [`Survey::chain`].
    pub fn snapshot(&self, snapshot: SnapshotId) -> Result<Arc<Manifest>, Damage> {
        let chain = self.chain(snapshot)?;
        if let [base] = chain[..] {
            return Ok(base.clone());
        }
        let links: Vec<&Manifest> = chain.iter().map(AsRef::as_ref).collect();
        merge(&links).map(Arc::new).map_err(|defect| defect.at(FileName::Manifest(snapshot.0), 0))
    }

    /// The pages of a snapshot, whole, in the order of their ids: what [`Survey::snapshot`] has, where nothing
    /// else of it is wanted. No entry is copied.
    ///
    /// # Errors
    /// As for [`Survey::chain`].
    pub fn entries(&self, snapshot: SnapshotId) -> Result<impl Iterator<Item = &ManifestEntry>, Damage> {
        let links: Vec<&Manifest> = self.chain(snapshot)?.into_iter().map(AsRef::as_ref).collect();
        merged_entries(&links).map_err(|defect| defect.at(FileName::Manifest(snapshot.0), 0))
    }

    fn link(&self, snapshot: SnapshotId) -> Result<&(Arc<Manifest>, CopyHealth), Damage> {
        match self.links.get(&snapshot) {
            Some(read) => read.as_ref().map_err(Clone::clone),
            None => Err(Defect::Missing.at(FileName::Manifest(snapshot.0), 0)),
        }
    }

    /// Where a recovery may start, best first: the newest snapshot, older ones, the log's beginning, which is
    /// `None`. A snapshot that cannot be read is there as its damage; each is merged when it is asked for.
    pub fn candidates(&self) -> impl Iterator<Item = Result<Option<Arc<Manifest>>, Damage>> + '_ {
        self.named_candidates().map(|(_, candidate)| candidate)
    }

    /// The same, with the number of each; also of one that cannot be read.
    pub fn named_candidates(&self) -> impl Iterator<Item = Candidate> + '_ {
        let snapshots =
            self.links.keys().rev().map(|snapshot| (Some(*snapshot), self.snapshot(*snapshot).map(Some)));
        snapshots.chain(self.beginning().map(|beginning| (None, beginning)))
    }

    /// The log's beginning as a candidate, unless it was recycled.
    fn beginning(&self) -> Option<Result<Option<Arc<Manifest>>, Damage>> {
        match (self.log.beginning(), self.log.cut()) {
            (Some(_), _) => Some(Ok(None)),
            (None, cut) => cut.cloned().map(Err),
        }
    }

    /// Follows the log from `base`, a whole snapshot, to the log's end or to `until`. A snapshot that was
    /// caught at one moment, and at which the walk is to stop, needs no log at all.
    ///
    /// # Errors
    /// [`Damage`] in the log, or a table that a restore names; `base` is a change.
    pub fn resolve(
        &self,
        source: &dyn ReadAt,
        base: Option<&Arc<Manifest>>,
        until: Option<Lsn>,
    ) -> Result<Resolution, Damage> {
        self.follow(source, base, until, &mut |_, _, _| {})
    }

    /// As [`Survey::resolve`]; `note` sees each batch once it was followed.
    pub(crate) fn follow(
        &self,
        source: &dyn ReadAt,
        base: Option<&Arc<Manifest>>,
        until: Option<Lsn>,
        note: &mut dyn FnMut(&Resolver, &Frame<'_>, &[OpAt<'_>]),
    ) -> Result<Resolution, Damage> {
        let mut following = Following::new(self, source, base)?;
        if base.is_some_and(|manifest| Some(manifest.redo.lsn) == until) {
            return following.finish_at_base();
        }
        let mut walk = LogWalk::new(source, &self.log, following.start(), self.mark())?;
        while until.is_none_or(|until| walk.point().lsn < until) {
            let Some(frame) = walk.next()? else { break };
            if frame.header.kind == FrameKind::Batch {
                let ops = following.batch(&frame.header, frame.payload)?;
                note(following.resolver(), &frame, &ops);
            }
        }
        following.finish(walk.end().cloned(), walk.point())
    }

    /// Loads the bytes of a state, each page on its own: what damage to an image takes from one page it does
    /// not take from the others.
    ///
    /// # Errors
    /// [`Damage`] in the log, which held when the state was resolved; or the pages take more than
    /// `page_bytes_max` together.
    pub fn load(
        &self,
        source: &dyn ReadAt,
        resolution: &Resolution,
        page_bytes_max: u64,
    ) -> Result<BTreeMap<PageId, Result<Vec<u8>, Damage>>, Damage> {
        let resolved = &resolution.resolved;
        resolution.check_page_bytes(page_bytes_max)?;
        let load = |(page, base)| (page, load_base(source, &base, resolved.final_len(page)));
        let mut heads: BTreeMap<PageId, Result<PageHead, Damage>> = resolved.bases.iter().map(load).collect();
        let bytes = |heads: BTreeMap<PageId, Result<PageHead, Damage>>| {
            heads.into_iter().map(|(page, head)| (page, head.map(PageHead::into_bytes))).collect()
        };
        let base = resolution.base.and_then(|base| self.links.get(&base)?.as_ref().ok());
        let from = match base {
            Some((manifest, _)) => manifest.redo,
            None => self.log.beginning().ok_or(Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1)))?,
        };
        if resolution.batches == 0 {
            return Ok(bytes(heads));
        }
        // The same walk again: it held a moment ago, and now the bytes are wanted.
        let mut walk = LogWalk::new(source, &self.log, from, self.mark())?;
        while walk.point().lsn < resolved.table.lsn() {
            let Some(frame) = walk.next()? else { break };
            if frame.header.kind != FrameKind::Batch {
                continue;
            }
            let (lsn, file, offset) =
                (frame.header.lsn, FileName::Segment(frame.header.segment), frame.header.offset);
            for at in decode_payload(frame.payload).map_err(|defect| defect.at_lsn(file, offset, lsn))? {
                let Some(page) = at.op.page().filter(|page| resolved.applies(*page, lsn)) else { continue };
                if let Ok(head) = heads.get_mut(&page).expect("every base is a page's") {
                    head.apply(&at.op);
                }
            }
        }
        Ok(bytes(heads))
    }

    /// Reads the table of an old state that a restore names.
    ///
    /// # Errors
    /// [`Damage`] if it is missing, damaged, or another one.
    pub fn read_table(&self, source: &dyn ReadAt, table: u64, table_crc: u32) -> Result<Manifest, Damage> {
        let file = FileName::Table(table);
        let (manifest, health) = read_manifest(source, file, &self.store)?;
        if health.header_crc != table_crc {
            let (found, expected) = (health.header_crc.into(), table_crc.into());
            return Err(
                Defect::Mismatch { what: "checksum of the restored table", found, expected }.at(file, 0)
            );
        }
        Ok(manifest)
    }
}

/// Computes the state of a store directory.
///
/// # Errors
/// The first [`Damage`] that no snapshot gets around.
pub fn rebuild(source: &dyn ReadAt, options: &RebuildOptions) -> Result<Rebuilt, Damage> {
    let survey = Survey::read(source)?;
    let mut passed_over = Vec::new();
    let wanted = |snapshot: &SnapshotId| match &survey.links[snapshot] {
        Ok((manifest, _)) => {
            options.base.is_none_or(|base| base == *snapshot)
                && options.until.is_none_or(|until| manifest.end <= until)
        }
        // It may be the one: then its damage is the answer.
        Err(_) => true,
    };
    let snapshots = survey.links.keys().rev().copied().filter(wanted);
    let candidates = snapshots.map(|snapshot| survey.snapshot(snapshot).map(Some));
    let beginning = survey.beginning().filter(|read| options.base.is_none() || read.is_err());
    for candidate in candidates.chain(beginning) {
        let attempt =
            candidate.and_then(|manifest| rebuild_from(source, &survey, manifest.as_ref(), options));
        match attempt {
            Ok(rebuilt) => return Ok(Rebuilt { passed_over, ..rebuilt }),
            Err(damage) => passed_over.push(damage),
        }
    }
    // The newest snapshot's complaint names the damage; an older one's is mostly that its log is gone.
    let nothing = || Defect::Missing.at_lsn(FileName::Segment(1), SEGMENT_HEADER_BLOCK, Lsn(1));
    let cut = survey.log.cut().cloned();
    Err(passed_over.into_iter().next().or(cut).unwrap_or_else(nothing))
}

fn rebuild_from(
    source: &dyn ReadAt,
    survey: &Survey,
    base: Option<&Arc<Manifest>>,
    options: &RebuildOptions,
) -> Result<Rebuilt, Damage> {
    let resolution = survey.resolve(source, base, options.until)?;
    let contents = survey
        .load(source, &resolution, options.page_bytes_max)?
        .into_iter()
        .map(|(page, content)| Ok((page, content?)))
        .collect::<Result<_, Damage>>()?;
    let Resolution { base, resolved, end, batches, .. } = resolution;
    Ok(Rebuilt { base, table: resolved.table, contents, end, batches, passed_over: Vec::new() })
}

/// What a page is made from that is `final_len` bytes long in the end: its image is proven whole, and no more of
/// it is kept than that.
///
/// # Errors
/// [`Damage`] in its image, or there is no memory.
pub fn load_base(source: &dyn ReadAt, base: &Base, final_len: u64) -> Result<PageHead, Damage> {
    let (file, offset) =
        base.image.map_or((FileName::Store, 0), |image| (FileName::Pages(image.file), image.offset));
    let at = |defect: Defect| defect.at_lsn(file, offset, base.lsn);
    let bytes = match &base.image {
        Some(image) => read_image_head(source, image, base.len, final_len)?,
        None => zeros(base.len.min(final_len)).map_err(at)?,
    };
    PageHead::new(bytes, base.len, final_len).map_err(at)
}

fn zeros(len: u64) -> Result<Vec<u8>, Defect> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, len)?;
    bytes.resize(len as usize, 0);
    Ok(bytes)
}

/// Bytes of an image that are checked at a time.
const CHECKED_AT_ONCE: u64 = 1 << 20;

/// Checks the image of a page of length `len`: for who needs only to know that it is sound. One that is
/// stored as it is is read piece by piece.
///
/// # Errors
/// [`Damage`] if it is missing, cut short or damaged.
pub fn check_image(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<(), Damage> {
    stream_image(source, image, len, |_| Ok(()))
}

/// Reads the image of a page of length `len`, checks all of its bytes, and keeps the first `len_max` of them, if
/// there are as many: memory for more is not asked for.
///
/// # Errors
/// [`Damage`] if it is missing, cut short or damaged.
pub(crate) fn read_image_head(
    source: &dyn ReadAt,
    image: &ImageRef,
    len: u64,
    len_max: u64,
) -> Result<Vec<u8>, Damage> {
    if len <= len_max {
        return read_image(source, image, len);
    }
    let mut head = Vec::new();
    reserve(&mut head, len_max).map_err(|defect| defect.at(FileName::Pages(image.file), image.offset))?;
    stream_image(source, image, len, |piece| -> Result<(), Damage> {
        let missing = len_max as usize - head.len();
        head.extend_from_slice(&piece[..missing.min(piece.len())]);
        Ok(())
    })?;
    Ok(head)
}

/// Hands the bytes of a page of length `len` to `sink`, in their order and piece by piece, as its image has them:
/// however long the page is, memory is held for one piece. They are proven when this returns `Ok`, and not before,
/// so until then nobody may see them. A compressed image is read twice, for it is checked as it is stored first.
///
/// # Errors
/// [`Damage`] if the image is missing, cut short or damaged; what `sink` returns.
pub fn stream_image<E: From<Damage>>(
    source: &dyn ReadAt,
    image: &ImageRef,
    len: u64,
    mut sink: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (file, offset) = (FileName::Pages(image.file), image.offset);
    let at = |defect: Defect| E::from(defect.at(file, offset));
    let check_sum = |what, found, sum: crc32fast::Hasher| {
        let computed = sum.finalize();
        if found == computed { Ok(()) } else { Err(at(Defect::Checksum { what, found, computed })) }
    };
    image.check(len).map_err(at)?;
    // Asked of the whole first, so that what is cut short is said as such.
    check_range(source, file, offset, image.stored_len).map_err(at)?;
    let read_stored = |sink: &mut dyn FnMut(&[u8]) -> Result<(), E>| {
        let mut sum = crc32fast::Hasher::new();
        let mut piece = zeros(CHECKED_AT_ONCE.min(image.stored_len)).map_err(at)?;
        let mut done = 0;
        while done < image.stored_len {
            let piece = &mut piece[..CHECKED_AT_ONCE.min(image.stored_len - done) as usize];
            source.read_at(file, offset + done, piece).map_err(|error| at(unreadable(error)))?;
            sum.update(piece);
            sink(piece)?;
            done += piece.len() as u64;
        }
        check_sum("image", image.stored_crc, sum)
    };
    if image.codec == Codec::Raw {
        return read_stored(&mut sink);
    }
    read_stored(&mut |_| Ok(()))?;
    let end = offset + image.stored_len;
    let mut stored = StoredBytes { source, file, at: offset, end, refused: None };
    let (mut sum, mut refused) = (crc32fast::Hasher::new(), None);
    let buffered = BufReader::with_capacity(CHECKED_AT_ONCE as usize, &mut stored);
    let decompressed = decompress_from(buffered, len, |piece| {
        sum.update(piece);
        match sink(piece) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                refused = Some(error);
                ControlFlow::Break(())
            }
        }
    });
    match (refused, stored.refused) {
        (Some(error), _) => Err(error),
        (None, Some(defect)) => Err(at(defect)),
        (None, None) => {
            decompressed.map_err(at)?;
            check_sum("page", image.raw_crc, sum)
        }
    }
}

/// The payload of an image, for a reader that goes through it once.
struct StoredBytes<'s> {
    source: &'s dyn ReadAt,
    file: FileName,
    at: u64,
    end: u64,
    /// Why they could not be read, if so.
    refused: Option<Defect>,
}

impl io::Read for StoredBytes<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = (out.len() as u64).min(self.end - self.at);
        let read = self.source.read_at(self.file, self.at, &mut out[..len as usize]);
        read.inspect_err(|error| self.refused = Some(Defect::Unreadable(error.to_string())))?;
        self.at += len;
        Ok(len as usize)
    }
}

/// Reads the image of a page of length `len`, and checks its bytes.
///
/// # Errors
/// [`Damage`] if it is missing, cut short or damaged.
pub fn read_image(source: &dyn ReadAt, image: &ImageRef, len: u64) -> Result<Vec<u8>, Damage> {
    let file = FileName::Pages(image.file);
    let at = |defect: Defect| defect.at(file, image.offset);
    // Of what is stored as it is, the bytes that are read are the page's. Of what is compressed, no more than a piece
    // is held beside them.
    if image.codec != Codec::Raw && len > CHECKED_AT_ONCE {
        let mut bytes = Vec::new();
        stream_image(source, image, len, |piece| -> Result<(), Damage> {
            if bytes.is_empty() {
                reserve(&mut bytes, len).map_err(at)?;
            }
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        return Ok(bytes);
    }
    let stored = read_range(source, file, image.offset, image.stored_len).map_err(at)?;
    image.decode(stored.into(), len).map(Cow::into_owned).map_err(at)
}

/// Reads STORE.
///
/// # Errors
/// [`Damage`] if it is missing or unreadable.
pub fn read_store(source: &dyn ReadAt) -> Result<StoreFile, Damage> {
    let bytes = read_whole(source, FileName::Store)?;
    StoreFile::decode(&bytes).map_err(|defect| defect.at(FileName::Store, 0))
}

/// Reads the links of all snapshots. For who has a faster way to read one of which nothing is wrong: where that gives
/// none, the ordinary one says what is.
///
/// # Errors
/// [`Damage`] if their folder cannot be listed; [`Defect::Shortage`] of any of them.
pub fn read_links(source: &dyn ReadAt, store: &StoreFile, faster: FasterLinks<'_>) -> Result<Links, Damage> {
    let mut links = Links::new();
    let names = source
        .list(Folder::Snapshots)
        .map_err(|error| Defect::unreadable(&error).at(FileName::Manifest(0), 0))?;
    for name in names {
        if let Some(FileName::Manifest(number)) = FileName::parse(Folder::Snapshots, &name) {
            let file = FileName::Manifest(number);
            let read = match faster(file) {
                Some((link, crc)) => check_file(&link, file, store).map(|()| (link, CopyHealth::whole(crc))),
                None => read_manifest(source, file, store),
            };
            match read {
                // A link that nobody has looked at must not be taken for a damaged one: an older snapshot would take its
                // place.
                Err(damage @ Damage { defect: Defect::Shortage { .. }, .. }) => return Err(damage),
                // A writer removed it after the folder was listed.
                Err(Damage { defect: Defect::Missing, .. }) => continue,
                _ => {}
            }
            links.insert(SnapshotId(number), read.map(|(manifest, health)| (Arc::new(manifest), health)));
        }
    }
    Ok(links)
}

/// Reads one link of a snapshot, or a table of the same form. A change alone is no state: [`Survey::snapshot`]
/// follows the chain.
///
/// # Errors
/// [`Damage`] if neither copy is whole, or it is another store's or another file's.
pub fn read_manifest(
    source: &dyn ReadAt,
    file: FileName,
    store: &StoreFile,
) -> Result<(Manifest, CopyHealth), Damage> {
    let (manifest, health) = match read_copies(source, file) {
        Some(whole) => whole,
        None => Manifest::decode(&read_whole(source, file)?).map_err(|defect| defect.at(file, 0))?,
    };
    check_file(&manifest, file, store)?;
    Ok((manifest, health))
}

/// Refuses another store's or another file's manifest.
fn check_file(manifest: &Manifest, file: FileName, store: &StoreFile) -> Result<(), Damage> {
    if manifest.store != store.store {
        return Err(Defect::Foreign.at(file, 0));
    }
    let (number, is_table) = match file {
        FileName::Table(number) => (number, true),
        FileName::Manifest(number) => (number, false),
        _ => (manifest.snapshot.0, false),
    };
    if manifest.snapshot.0 != number {
        let (found, expected) = (manifest.snapshot.0, number);
        return Err(Defect::Mismatch { what: "manifest's number", found, expected }.at(file, 0));
    }
    if (manifest.kind == ManifestKind::Table) != is_table {
        let found = manifest.kind.to_raw().into();
        return Err(Defect::Field { what: "manifest kind", found }.at(file, 0));
    }
    Ok(())
}

/// The manifest of a file of two copies that are alike, as nearly every one is: of the second one no more than a piece
/// is held at a time. `None` if anything is not as it should be: then the whole file says what.
fn read_copies(source: &dyn ReadAt, file: FileName) -> Option<(Manifest, CopyHealth)> {
    let len = source.len(file).ok()??;
    let mut header = [0; ManifestHeaderRaw::LEN];
    source.read_at(file, 0, &mut header).ok()?;
    let half = Manifest::copy_len(&header).filter(|half| len == 2 * half)?;
    let first = read_range(source, file, 0, half).ok()?;
    let (manifest, header_crc) = Manifest::decode_first(&first)?;
    for (piece, at) in first.chunks(CHECKED_AT_ONCE as usize).zip((half..).step_by(CHECKED_AT_ONCE as usize))
    {
        let second = read_range(source, file, at, piece.len() as u64).ok()?;
        if piece != second {
            return None;
        }
    }
    Some((manifest, CopyHealth::whole(header_crc)))
}

fn read_whole(source: &dyn ReadAt, file: FileName) -> Result<Vec<u8>, Damage> {
    let unreadable = |error: std::io::Error| Defect::unreadable(&error).at(file, 0);
    let len = source.len(file).map_err(unreadable)?.ok_or(Defect::Missing.at(file, 0))?;
    read_range(source, file, 0, len).map_err(|defect| defect.at(file, 0))
}

/// Refuses a range that does not lie within its file.
fn check_range(source: &dyn ReadAt, file: FileName, offset: u64, len: u64) -> Result<(), Defect> {
    let file_len = source.len(file).map_err(unreadable)?.ok_or(Defect::Missing)?;
    let end = offset.saturating_add(len);
    if end > file_len { Err(Defect::Truncated { needed: end, have: file_len }) } else { Ok(()) }
}

/// Reads a range that must lie within its file: so nothing longer than the file is allocated (I9).
pub(crate) fn read_range(
    source: &dyn ReadAt,
    file: FileName,
    offset: u64,
    len: u64,
) -> Result<Vec<u8>, Defect> {
    check_range(source, file, offset, len)?;
    let mut bytes = zeros(len)?;
    source.read_at(file, offset, &mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

fn unreadable(error: std::io::Error) -> Defect {
    Defect::unreadable(&error)
}
