//! Operations on the line of an archive: find its end, fence, append, prune and read.
//!
//! Comments cite the rules of [`rules`](crate::rules) by number, and by the name of a [`Rule`](crate::rules::Rule) in
//! brackets if a test can leave it out.
//!
//! | file | rules |
//! |---|---|
//! | `audit.rs` | 22, 23: checks every object that a restore of the end needs |
//! | `status.rs` | 22: summarizes an archive with few requests |
//! | `follow.rs` | 22, 23, 27: reads the objects of the line as they are appended |
//! | `lazy.rs` | 23, 27: reads a state whose images are fetched later |
//! | `restore.rs` | 10, 22 to 24, 27, 28: reads a state |
//! | `ahead.rs` | reads a range of the line in advance |
//! | `cut.rs` | 8: continues the line at an earlier batch |
//! | `boundary.rs` | 14, 15, 17 to 20: appends boundaries and deletes released objects |
//! | `append.rs` | 3, 6, 7, 9 to 12, 16, 17: appends runs, manifests and catalogs |
//! | `known_runs.rs` | 17: finds the run that contains the `redo` of a snapshot |
//! | `fence.rs` | 4, 5, 29: checks the lineage and creates fences |
//! | `find.rs` | 15, 22: finds the newest boundary and the end |
//! | `probe.rs` | 30: checks that the bucket supports the protocol |
//! | `request.rs` | 2, 23: sends single requests, and resolves creates of unknown outcome |
//! | `view.rs` | the part of the line that a process has read or appended |
//! | `nonces.rs` | 2: random numbers from the operating system |

mod audit;
mod status;
mod follow;
mod lazy;
mod restore;
mod ahead;
mod cut;
mod boundary;
mod append;
mod known_runs;
mod fence;
mod find;
mod probe;
mod request;
mod view;
mod nonces;

use std::collections::{HashMap, HashSet};

use remanent_format::StoreId;

use crate::bucket::Bucket;
use crate::object::{BatchPoint, DataKey, DataRef, Nonce, Part};
use crate::rules::Rules;
use append::Pending;
use view::View;

pub use append::{Appended, NamedParts, SnapshotParts, UPLOADS_MAX};
pub use audit::{Audited, DamagedObject, audit};
pub use boundary::{PrunePlan, Pruned, Swept, Verification, Verified};
pub use fence::Takeover;
pub use follow::{Cut, FollowPoint, FoundCursor, LineCursor};
pub use lazy::{ViewPoint, fetch_part};
pub use nonces::SystemNonces;
pub use probe::probe;
pub use restore::{ListedPart, RestoredEnd, StateSink};
pub use status::{ManifestStatus, Status, status};

/// A source of random numbers for nonces. All draws of all processes must differ.
pub trait Nonces {
    /// Returns a new random number, which is not zero.
    fn draw(&self) -> Nonce;
}

/// The location of an archive, and the dependencies of its operations.
#[derive(Debug)]
pub struct Archive<'a, B, N> {
    /// The bucket that contains the archive.
    pub bucket: &'a B,
    /// The source of nonces.
    pub nonces: &'a N,
    /// The rules to follow. The default follows every rule.
    pub rules: Rules,
}

impl<B, N> Clone for Archive<'_, B, N> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B, N> Copy for Archive<'_, B, N> {}

/// A handle to the line of an archive.
///
/// A reader calls [`find`](Line::find) and then [`read_state`](Line::read_state). A writer calls `find` and
/// [`fence`](Line::fence), and then appends. A restore has no directory yet, so it calls [`claim`](Line::claim) before
/// it reads. After an error other than [`Error::Bucket`](crate::Error::Bucket) or
/// [`Error::Unknown`](crate::Error::Unknown), a writer must not append.
#[derive(Debug)]
pub struct Line<'a, B, N> {
    archive: Archive<'a, B, N>,
    view: View,
    writer: Option<Writer>,
    /// An object to append, whose create may have been sent. No other object is appended until the outcome of the
    /// create is known (rules 1 and 3).
    pending: Option<Pending>,
    /// Data objects that this writer created and that no line object lists yet, by part.
    fresh: HashMap<Part, DataRef>,
    /// Position and nonce of the last fence that this process tried to create.
    tried_fence: Option<(u64, Nonce)>,
    /// Total length in bytes of the parts that this writer uploaded.
    uploaded: u64,
    /// Data objects of the newest manifest that were already read back.
    verified: HashSet<DataKey>,
    /// Data objects whose upload a test delays until after a manifest lists them.
    #[cfg(feature = "testing")]
    late: Vec<(DataRef, std::sync::Arc<Vec<u8>>)>,
}

/// The writer of a term.
#[derive(Clone, Copy, Debug)]
struct Writer {
    /// Position of the fence of this writer.
    term: u64,
    /// The random number of the directory's current open.
    random: u64,
    /// Number of data objects created in the term.
    data_objects: u64,
}

impl<'a, B: Bucket, N: Nonces> Line<'a, B, N> {
    /// Creates a handle that has not read the line yet.
    #[must_use]
    pub fn new(archive: Archive<'a, B, N>) -> Self {
        Self {
            archive,
            view: View::default(),
            writer: None,
            pending: None,
            fresh: HashMap::new(),
            tried_fence: None,
            uploaded: 0,
            verified: HashSet::new(),
            #[cfg(feature = "testing")]
            late: Vec::new(),
        }
    }

    pub(crate) fn draw_nonce(&self) -> Nonce {
        self.archive.nonces.draw()
    }

    /// Returns true if the line contains no object that this handle has read or appended.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.view.next == 1
    }

    /// Returns the id of the store, or `None` if the archive is empty or was not read yet.
    #[must_use]
    pub fn store(&self) -> Option<StoreId> {
        self.view.store
    }

    /// Returns the position after the last object of the line that this handle has read or appended.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.view.next
    }

    /// Returns the lowest position that the newest known boundary keeps, or 1.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.view.start
    }

    /// Returns the last archived batch that this handle has read or appended. A caller may acknowledge the batch only
    /// once an [`Appended`] or a restore contains it.
    #[must_use]
    pub fn archived(&self) -> BatchPoint {
        self.view.archived
    }

    /// Returns the total length in bytes of the parts that this handle uploaded.
    #[must_use]
    pub fn uploaded(&self) -> u64 {
        self.uploaded
    }

    /// Returns the total length in bytes of the parts that objects after the newest manifest list.
    #[must_use]
    pub fn listed_after_manifest(&self) -> u64 {
        let after = self.newest_manifest().map_or(self.view.start, |manifest| manifest + 1);
        let listed = self.view.listings.range(after..).flat_map(|(_, listed)| listed);
        listed.map(|entry| entry.part.len).sum()
    }

    /// Returns the term of this writer, which is the position of its fence, or `None` before [`fence`](Line::fence).
    #[must_use]
    pub fn term(&self) -> Option<u64> {
        self.writer.map(|writer| writer.term)
    }
}
