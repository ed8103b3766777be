//! The contents of line objects: fences, runs, manifests, boundaries and catalogs.

use std::collections::HashSet;

use remanent_format::layout::layout;
use remanent_format::limits::{NUMBER_MAX, SNAPSHOT_NAME_LEN_MAX, STORE_RECORD_LEN_MAX};
use remanent_format::segment::{SegmentHeader, SegmentHeaderRaw};
use remanent_format::store::{StoreFile, StoreHeaderRaw};
use remanent_format::{Lsn, SnapshotId, StoreId};

use super::defect::{Cursor, Defect, ObjectDefect, check_field, check_limit, check_zeros};
use super::header::{BatchPoint, Kind, Nonce, check_point};

/// Bit in `flags` of a fence: the fence cuts the line.
const FLAG_CUT: u32 = 1;
/// Bit in `flags` of a fence: the writer archives the store while it is open.
const FLAG_OPEN: u32 = 2;
/// Bit in `flags` of a manifest: the manifest follows a gap.
const FLAG_GAP: u32 = 1;

layout! {
    /// The encoded start of a fence.
    pub struct FenceRaw: 32 {
        /// Bit 0: the fence cuts the line at `cut`. Bit 1: the writer archives the store while it is open.
        0 => flags: u32,
        /// Length of the STORE file in bytes.
        4 => store_len: u32,
        /// Number of openings.
        8 => openings: u32,
        /// The last batch that a cut keeps, or zero if the fence does not cut the line.
        12 => cut: BatchPoint,
    }
}

layout! {
    /// The encoded start of a run.
    pub struct RunRaw: 40 {
        /// The last batch before the first frame.
        0 => before: BatchPoint,
        /// The last batch of the run.
        20 => after: BatchPoint,
    }
}

layout! {
    /// The encoded contents of a manifest.
    pub struct ManifestRaw: 64 {
        /// Number of the snapshot.
        0 => snapshot: SnapshotId,
        /// Position of the run that contains `redo`.
        8 => start: u64,
        /// The batch after which a restore of the snapshot replays the log.
        16 => redo: BatchPoint,
        /// Bit 0: the manifest follows a gap.
        36 => flags: u32,
        /// The batch up to which a restore of the snapshot replays the log.
        40 => end: BatchPoint,
        /// Reserved, always zero.
        60 => reserved: [u8; 4],
    }
}

layout! {
    /// The encoded start of a boundary.
    pub struct BoundaryRaw: 64 {
        /// Number of the boundary.
        0 => number: u64,
        /// The lowest position that is kept.
        8 => start: u64,
        /// Position of the manifest that is kept.
        16 => manifest: u64,
        /// Position of the newest fence below `start`, or zero if there is none.
        24 => fence: u64,
        /// Nonce of that fence, or zero.
        32 => fence_nonce: Nonce,
        /// Length of that fence's contents in bytes, or zero.
        48 => fence_len: u32,
        /// Number of kept snapshots.
        52 => snapshots: u32,
        /// Reserved, always zero.
        56 => reserved: [u8; 8],
    }
}

layout! {
    /// The encoded start of a catalog.
    pub struct CatalogRaw: 8 {
        /// Number of kept snapshots.
        0 => snapshots: u32,
        /// Reserved, always zero.
        4 => reserved: [u8; 4],
    }
}

layout! {
    /// The encoded entry of a named snapshot in a catalog or boundary.
    pub struct KeptSnapshotRaw: 128 {
        /// Position of the catalog that lists the files of the snapshot.
        0 => position: u64,
        /// Nonce of that catalog.
        8 => nonce: Nonce,
        /// Number of the snapshot.
        24 => snapshot: SnapshotId,
        /// The last batch that the snapshot contains.
        32 => batch: BatchPoint,
        /// Length of the name in bytes.
        52 => name_len: u32,
        /// The name, padded with zeros.
        56 => name: [u8; SNAPSHOT_NAME_LEN_MAX],
        /// Total length of the files of the snapshot in bytes.
        120 => bytes: u64,
    }
}

/// The contents of a fence. A fence starts the term of a writer.
///
/// A restore has no directory yet. It first creates a fence without openings (a *claim*) and reads the state up to this
/// fence. Once the directory has an opening, it creates a second fence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The contents of the STORE file.
    pub store_file: Vec<u8>,
    /// The segment headers of the openings since the last archived batch, oldest first.
    pub openings: Vec<SegmentHeader>,
    /// The last batch that remains on the line, if the fence cuts the line (rule 8).
    pub cut: Option<BatchPoint>,
    /// Whether the writer archives the store while it is open. A claim copies this value from the previous fence.
    pub follows_open_store: bool,
}

/// The contents of a run: contiguous frames of the log. If the object lists data objects, the data objects contain the
/// frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The last batch before the first frame.
    pub before: BatchPoint,
    /// The last batch of the run.
    pub after: BatchPoint,
    /// The frames. Empty if data objects contain them.
    pub frames: Vec<u8>,
}

/// The contents of a manifest. The object lists every data object that a restore of the snapshot needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Number of the snapshot.
    pub snapshot: SnapshotId,
    /// Position of the run that contains the first batch after `redo`, or the manifest's own position if there is no
    /// such run.
    pub start: u64,
    /// The batch after which a restore of the snapshot replays the log.
    pub redo: BatchPoint,
    /// The batch up to which a restore of the snapshot replays the log.
    pub end: BatchPoint,
    /// Whether batches between the last archived batch and `redo` were not archived (rule 28). The manifest then lists
    /// the frames from `redo` to `end` as data objects.
    pub follows_gap: bool,
}

/// The contents of a boundary. A boundary releases the line objects below `start`, and the data objects that only these
/// line objects list. It does not release the catalogs of the snapshots in `snapshots` and the data objects that these
/// catalogs list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// Number of the boundary, starting at 1.
    pub number: u64,
    /// The lowest position that is kept.
    pub start: u64,
    /// Position of the manifest for which the boundary was appended.
    pub manifest: u64,
    /// A copy of the newest fence below `start`. A restore needs its STORE file and its openings.
    pub fence: Option<KeptFence>,
    /// The named snapshots that are kept: those of the newest catalog below the boundary.
    pub snapshots: Vec<KeptSnapshot>,
}

/// The contents of a catalog: all named snapshots that the archive keeps from this position on, oldest first. If the
/// last snapshot is new, its `position` is that of this catalog, and the object lists its files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Catalog {
    /// The kept named snapshots.
    pub snapshots: Vec<KeptSnapshot>,
}

/// A copy of a fence, which a boundary contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptFence {
    /// Position of the fence.
    pub position: u64,
    /// Nonce of the fence.
    pub nonce: Nonce,
    /// Contents of the fence.
    pub content: Fence,
}

/// A named snapshot that the archive keeps. A restore of the snapshot needs the files that the catalog at `position`
/// lists, and no frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptSnapshot {
    /// Position of the catalog that lists the files of the snapshot.
    pub position: u64,
    /// Nonce of that catalog.
    pub nonce: Nonce,
    /// Number of the snapshot.
    pub snapshot: SnapshotId,
    /// The last batch that the snapshot contains.
    pub batch: BatchPoint,
    /// The name, 1 to 64 bytes long. It is unique among the kept snapshots.
    pub name: String,
    /// Total length of the files of the snapshot in bytes.
    pub bytes: u64,
}

/// The contents of a line object.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant names its type")]
pub enum Content {
    Fence(Fence),
    Run(Run),
    Manifest(Manifest),
    Boundary(Boundary),
    Catalog(Catalog),
}

/// Fields of a line object that its contents must match.
#[derive(Clone, Copy)]
pub(super) struct OwnFields {
    pub store: StoreId,
    pub position: u64,
    pub nonce: Nonce,
    /// Number and total length in bytes of the data objects that the object lists.
    pub listed: u32,
    pub listed_bytes: u64,
}

impl Content {
    /// Returns the kind of the object.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Content::Fence(_) => Kind::Fence,
            Content::Run(_) => Kind::Run,
            Content::Manifest(_) => Kind::Manifest,
            Content::Boundary(_) => Kind::Boundary,
            Content::Catalog(_) => Kind::Catalog,
        }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Content::Fence(fence) => fence.encode(out),
            Content::Run(run) => {
                out.extend_from_slice(&RunRaw { before: run.before, after: run.after }.to_bytes());
                out.extend_from_slice(&run.frames);
            }
            Content::Manifest(manifest) => out.extend_from_slice(&manifest.to_raw().to_bytes()),
            Content::Boundary(boundary) => boundary.encode(out),
            Content::Catalog(catalog) => catalog.encode(out),
        }
    }

    /// Decodes the contents of a line object of `kind` (SPEC A8, A9, B1, B2 and B6).
    pub(super) fn decode(kind: Kind, cursor: &mut Cursor<'_>, own: OwnFields) -> Result<Self, ObjectDefect> {
        match kind {
            Kind::Run => Run::decode(cursor, own.listed).map(Content::Run),
            Kind::Manifest => Manifest::decode(cursor).map(Content::Manifest),
            Kind::Boundary => Boundary::decode(cursor, own).map(Content::Boundary),
            Kind::Catalog => Catalog::decode(cursor, own).map(Content::Catalog),
            _ => {
                let fence = Fence::decode(cursor, own.store)?;
                cursor.finish()?;
                Ok(Content::Fence(fence))
            }
        }
    }
}

impl Fence {
    fn encode(&self, out: &mut Vec<u8>) {
        let raw = FenceRaw {
            flags: if self.cut.is_some() { FLAG_CUT } else { 0 }
                | if self.follows_open_store { FLAG_OPEN } else { 0 },
            store_len: self.store_file.len() as u32,
            openings: self.openings.len() as u32,
            cut: self.cut.unwrap_or_default(),
        };
        out.extend_from_slice(&raw.to_bytes());
        out.extend_from_slice(&self.store_file);
        for opening in &self.openings {
            out.extend_from_slice(&opening.encode());
        }
    }

    fn decode(cursor: &mut Cursor<'_>, store: StoreId) -> Result<Self, ObjectDefect> {
        let at = cursor.offset();
        let raw = FenceRaw::from_bytes(cursor.array()?);
        check_limit("flags of a fence", raw.flags.into(), (FLAG_CUT | FLAG_OPEN).into(), at)?;
        check_point("point of a cut", &raw.cut, at + 12)?;
        let cuts = raw.flags & FLAG_CUT != 0;
        let follows_open_store = raw.flags & FLAG_OPEN != 0;
        check_field(
            cuts || raw.cut == BatchPoint::default(),
            "unused point of a cut",
            raw.cut.lsn.0,
            at + 12,
        )?;
        let store_len_max = StoreHeaderRaw::LEN + STORE_RECORD_LEN_MAX;
        check_limit("length of STORE", raw.store_len.into(), store_len_max as u64, at + 4)?;
        let at = cursor.offset();
        let store_file = cursor.take(raw.store_len as usize)?.to_vec();
        let decoded = StoreFile::decode(&store_file).map_err(|defect| Defect::Store(defect).at(at))?;
        if decoded.store != store {
            return Err(Defect::Foreign.at(at));
        }
        cursor.check_count(raw.openings, SegmentHeaderRaw::LEN)?;
        let mut openings: Vec<SegmentHeader> = Vec::with_capacity(raw.openings as usize);
        for _ in 0..raw.openings {
            let at = cursor.offset();
            let header = SegmentHeader::decode(cursor.take(SegmentHeaderRaw::LEN)?);
            let header = header.map_err(|defect| Defect::Store(defect).at(at))?;
            if header.store != store {
                return Err(Defect::Foreign.at(at));
            }
            check_field(header.opening.is_some(), "segment that opens no incarnation", header.segment, at)?;
            openings.push(header);
        }
        Ok(Self { store_file, openings, cut: cuts.then_some(raw.cut), follows_open_store })
    }
}

impl Run {
    fn decode(cursor: &mut Cursor<'_>, listed: u32) -> Result<Self, ObjectDefect> {
        let at = cursor.offset();
        let raw = RunRaw::from_bytes(cursor.array()?);
        check_point("batch before a run", &raw.before, at)?;
        check_point("last batch of a run", &raw.after, at + 20)?;
        check_field(raw.before.lsn < raw.after.lsn, "last batch of a run", raw.after.lsn.0, at + 20)?;
        let at = cursor.offset();
        let frames = cursor.rest();
        // Either the object contains the frames, or data objects do.
        check_field(frames.is_empty() != (listed == 0), "length of a run's frames", frames.len() as u64, at)?;
        Ok(Self { before: raw.before, after: raw.after, frames: frames.to_vec() })
    }
}

impl Manifest {
    fn to_raw(self) -> ManifestRaw {
        ManifestRaw {
            snapshot: self.snapshot,
            start: self.start,
            redo: self.redo,
            flags: if self.follows_gap { FLAG_GAP } else { 0 },
            end: self.end,
            reserved: [0; 4],
        }
    }

    fn decode(cursor: &mut Cursor<'_>) -> Result<Self, ObjectDefect> {
        let at = cursor.offset();
        let raw = ManifestRaw::from_bytes(cursor.array()?);
        check_limit("number of a snapshot", raw.snapshot.0, NUMBER_MAX, at)?;
        check_limit("start of a manifest", raw.start, NUMBER_MAX, at + 8)?;
        check_field(raw.start > 0, "start of a manifest", raw.start, at + 8)?;
        check_limit("flags of a manifest", raw.flags.into(), FLAG_GAP.into(), at + 36)?;
        check_range(&raw.redo, &raw.end, at + 16, at + 40)?;
        check_zeros("reserved byte of a manifest", &raw.reserved, at + 60)?;
        cursor.finish()?;
        let follows_gap = raw.flags == FLAG_GAP;
        Ok(Self { snapshot: raw.snapshot, start: raw.start, redo: raw.redo, end: raw.end, follows_gap })
    }
}

impl Boundary {
    fn encode(&self, out: &mut Vec<u8>) {
        let mut fence = Vec::new();
        if let Some(kept) = &self.fence {
            kept.content.encode(&mut fence);
        }
        let raw = BoundaryRaw {
            number: self.number,
            start: self.start,
            manifest: self.manifest,
            fence: self.fence.as_ref().map_or(0, |kept| kept.position),
            fence_nonce: self.fence.as_ref().map_or_else(Nonce::default, |kept| kept.nonce),
            fence_len: fence.len() as u32,
            snapshots: self.snapshots.len() as u32,
            reserved: [0; 8],
        };
        out.extend_from_slice(&raw.to_bytes());
        out.extend_from_slice(&fence);
        self.snapshots.iter().for_each(|kept| kept.encode(out));
    }

    fn decode(cursor: &mut Cursor<'_>, own: OwnFields) -> Result<Self, ObjectDefect> {
        let at = cursor.offset();
        let raw = BoundaryRaw::from_bytes(cursor.array()?);
        check_limit("number of a boundary", raw.number, NUMBER_MAX, at)?;
        check_limit("start of a boundary", raw.start, NUMBER_MAX, at + 8)?;
        check_field(raw.number > 0, "number of a boundary", raw.number, at)?;
        check_field(raw.start > 0, "start of a boundary", raw.start, at + 8)?;
        check_limit("manifest of a boundary", raw.manifest, NUMBER_MAX, at + 16)?;
        check_field(raw.manifest >= raw.start, "manifest of a boundary", raw.manifest, at + 16)?;
        check_field(raw.fence < raw.start, "fence below a boundary", raw.fence, at + 24)?;
        let has_fence = raw.fence > 0;
        check_field(
            has_fence == (raw.fence_len > 0),
            "length of a kept fence",
            raw.fence_len.into(),
            at + 48,
        )?;
        check_field(has_fence == (raw.fence_nonce != Nonce::default()), "nonce of a kept fence", 0, at + 32)?;
        check_zeros("reserved byte of a boundary", &raw.reserved, at + 56)?;
        let mut fence = None;
        if has_fence {
            let mut inner = Cursor::new(cursor.take(raw.fence_len as usize)?, at + BoundaryRaw::LEN);
            let content = Fence::decode(&mut inner, own.store)?;
            inner.finish()?;
            fence = Some(KeptFence { position: raw.fence, nonce: raw.fence_nonce, content });
        }
        let at = cursor.offset();
        let snapshots = decode_kept(cursor, raw.snapshots, own.position)?;
        check_field(own.listed == 0, "number of data objects of a boundary", own.listed.into(), at)?;
        let newest = snapshots.last().map_or(0, |kept| kept.position);
        check_field(newest < own.position, "position of a kept snapshot", newest, at)?;
        cursor.finish()?;
        Ok(Self { number: raw.number, start: raw.start, manifest: raw.manifest, fence, snapshots })
    }
}

impl Catalog {
    fn encode(&self, out: &mut Vec<u8>) {
        let raw = CatalogRaw { snapshots: self.snapshots.len() as u32, reserved: [0; 4] };
        out.extend_from_slice(&raw.to_bytes());
        self.snapshots.iter().for_each(|kept| kept.encode(out));
    }

    fn decode(cursor: &mut Cursor<'_>, own: OwnFields) -> Result<Self, ObjectDefect> {
        let at = cursor.offset();
        let raw = CatalogRaw::from_bytes(cursor.array()?);
        check_zeros("reserved byte of a catalog", &raw.reserved, at + 4)?;
        let snapshots = decode_kept(cursor, raw.snapshots, own.position)?;
        let at = cursor.offset();
        let is_own = |kept: &&KeptSnapshot| kept.position == own.position;
        match snapshots.last().filter(is_own) {
            Some(kept) => {
                check_field(own.listed > 0, "number of data objects of a catalog", 0, at)?;
                check_field(kept.nonce == own.nonce, "nonce of a kept snapshot", kept.snapshot.0, at)?;
                check_field(kept.bytes == own.listed_bytes, "bytes of a kept snapshot", kept.bytes, at)?;
            }
            None => {
                check_field(own.listed == 0, "number of data objects of a catalog", own.listed.into(), at)?;
            }
        }
        cursor.finish()?;
        Ok(Self { snapshots })
    }
}

impl KeptSnapshot {
    fn encode(&self, out: &mut Vec<u8>) {
        let Self { position, nonce, snapshot, batch, name, bytes } = self;
        let mut padded = [0; SNAPSHOT_NAME_LEN_MAX];
        padded[..name.len()].copy_from_slice(name.as_bytes());
        let raw = KeptSnapshotRaw {
            position: *position,
            nonce: *nonce,
            snapshot: *snapshot,
            batch: *batch,
            name_len: name.len() as u32,
            name: padded,
            bytes: *bytes,
        };
        out.extend_from_slice(&raw.to_bytes());
    }

    /// Returns true if `name` is a valid snapshot name, which is 1 to 64 bytes long.
    #[must_use]
    pub fn is_name(name: &str) -> bool {
        (1..=SNAPSHOT_NAME_LEN_MAX).contains(&name.len())
    }

    fn decode(cursor: &mut Cursor<'_>) -> Result<Self, ObjectDefect> {
        let at = cursor.offset();
        let raw = KeptSnapshotRaw::from_bytes(cursor.array()?);
        check_field(raw.nonce != Nonce::default(), "nonce of a kept snapshot", 0, at + 8)?;
        check_limit("number of a snapshot", raw.snapshot.0, NUMBER_MAX, at + 24)?;
        check_point("batch of a kept snapshot", &raw.batch, at + 32)?;
        let len = raw.name_len as usize;
        check_limit("length of a name", raw.name_len.into(), SNAPSHOT_NAME_LEN_MAX as u64, at + 52)?;
        check_field(len > 0, "length of a name", 0, at + 52)?;
        check_zeros("byte after a name", &raw.name[len..], at + 56 + len)?;
        let name = std::str::from_utf8(&raw.name[..len]).ok();
        let name = name.ok_or_else(|| {
            Defect::Field { what: "first byte of a name that is not UTF-8", found: raw.name[0].into() }
                .at(at + 56)
        })?;
        Ok(Self {
            position: raw.position,
            nonce: raw.nonce,
            snapshot: raw.snapshot,
            batch: raw.batch,
            name: name.to_owned(),
            bytes: raw.bytes,
        })
    }
}

/// Decodes `count` kept snapshots of an object. Their positions and numbers must increase, and their names must be
/// unique.
fn decode_kept(
    cursor: &mut Cursor<'_>,
    count: u32,
    position: u64,
) -> Result<Vec<KeptSnapshot>, ObjectDefect> {
    cursor.check_count(count, KeptSnapshotRaw::LEN)?;
    let mut snapshots: Vec<KeptSnapshot> = Vec::with_capacity(count as usize);
    let mut names = HashSet::with_capacity(count as usize);
    for _ in 0..count {
        let at = cursor.offset();
        let kept = KeptSnapshot::decode(cursor)?;
        let before = snapshots.last().map_or((0, 0), |before| (before.position, before.snapshot.0));
        let is_above = kept.position > before.0 && kept.position <= position;
        check_field(is_above, "position of a kept snapshot", kept.position, at)?;
        check_field(kept.snapshot.0 > before.1, "number of a snapshot", kept.snapshot.0, at + 24)?;
        check_field(names.insert(kept.name.clone()), "repeated name of snapshot", kept.snapshot.0, at + 56)?;
        snapshots.push(kept);
    }
    Ok(snapshots)
}

fn check_range(
    redo: &BatchPoint,
    end: &BatchPoint,
    redo_at: usize,
    end_at: usize,
) -> Result<(), ObjectDefect> {
    check_point("redo of a snapshot", redo, redo_at)?;
    check_point("end of a snapshot", end, end_at)?;
    check_field(redo.lsn <= end.lsn, "end of a snapshot", end.lsn.0, end_at)
}

impl Boundary {
    /// Returns true if this boundary keeps the object at `position`.
    #[must_use]
    pub fn keeps(&self, position: u64) -> bool {
        position >= self.start
    }
}

/// Returns the predecessor of an opening: the last earlier batch that the opening continues (W2 of `format/SPEC.md`).
#[must_use]
pub fn predecessor(header: &SegmentHeader) -> BatchPoint {
    let Some(opening) = &header.opening else { return BatchPoint::default() };
    let point = opening.predecessor;
    if point.lsn == Lsn(0) {
        return BatchPoint::default();
    }
    BatchPoint { incarnation: point.incarnation, lsn: point.lsn, chain: point.chain }
}
