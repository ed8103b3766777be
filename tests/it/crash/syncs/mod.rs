//! Omits every sync once. Each acknowledgement depends on a chain of syncs, and each row of this table omits
//! one of them. The crashes of the same workload must then show a loss, or the engine must detect the
//! omission immediately, because it reads back the bytes that it depends on from the medium. If a sync is
//! redundant, the row states the reason, and the exploration must find no loss.
//!
//! [`scenes`] contains the workloads, and [`rule`] selects the sync.

mod rule;
mod scenes;

use std::fmt;

use crate::with_options::With;
use remanent::error::Folder;
use remanent::testing::sim_disk::Tears;
use remanent::{Error, Options};

use super::explore::{Explorer, Level, Violation};
use super::options;
use super::work::Driver;
use rule::{Rule, Sync, after, nth};
use scenes::Bench;

/// The consequence of a missing sync.
enum Fate {
    /// An acknowledged batch is lost, or an intact store cannot be opened.
    Seen,
    /// The engine reads back its writes from the medium, detects the loss and stops.
    NoticedAtOnce,
    /// The omission has no effect, for this reason.
    Harmless(&'static str),
}
use Fate::{Harmless, NoticedAtOnce, Seen};

struct Row {
    sync: &'static str,
    scene: fn(&mut Bench) -> Result<Driver, Error>,
    rule: Rule,
    options: Options,
    fate: Fate,
}

fn row(sync: &'static str, scene: fn(&mut Bench) -> Result<Driver, Error>, rule: Rule, fate: Fate) -> Row {
    Row { sync, scene, rule, options: options(), fate }
}

impl Row {
    fn with(self, options: Options) -> Self {
        Self { options, ..self }
    }
}

/// Rows of stores that are created.
fn creations() -> Vec<Row> {
    use scenes::{creation, rolling_at_once, second_creation};
    let root = Sync::Folder(Folder::Root);
    let segment = Sync::Temporary(Folder::Log);
    let unnamed = || Harmless("there are only temporary files to remove, which no store names");
    vec![
        row("folders of a new store", creation, nth(1, root), Seen),
        row("first opening segment", creation, nth(1, segment), NoticedAtOnce),
        row("first empty segment", rolling_at_once, nth(2, segment), Seen),
        row("STORE", creation, nth(1, Sync::Temporary(Folder::Root)), Seen),
        row("name of STORE", creation, nth(2, root), Seen),
        row(
            "removal of an unfinished creation's segments",
            second_creation,
            nth(1, Sync::Folder(Folder::Log)),
            Harmless("the new segments get the same names, and their folder is synced before STORE is there"),
        ),
        row(
            "removal of an unfinished creation's images",
            second_creation,
            nth(1, Sync::Folder(Folder::Pages)),
            unnamed(),
        ),
        row(
            "removal of an unfinished creation's manifests",
            second_creation,
            nth(1, Sync::Folder(Folder::Snapshots)),
            unnamed(),
        ),
    ]
}

/// Rows of stores that are reopened.
fn openings() -> Vec<Row> {
    use scenes::{
        opening, opening_after_a_publish, opening_after_an_opening, opening_after_the_creation,
        opening_with_spares, rolling, rolling_with_spares,
    };
    let one = || options().with(|options| options.retention.snapshots_kept = 1);
    let log = Sync::Folder(Folder::Log);
    let segment = Sync::Temporary(Folder::Log);
    vec![
        row(
            "names in log/ at open",
            opening_after_an_opening,
            nth(1, log),
            Harmless("nothing depends on them before the name of the segment after the opening is synced"),
        ),
        row(
            "names in the store directory at open",
            opening_after_the_creation,
            nth(1, Sync::Folder(Folder::Root)),
            Seen,
        ),
        row(
            "names in pages/ at open",
            opening_after_a_publish,
            nth(1, Sync::Folder(Folder::Pages)),
            Harmless("whatever names an image or a table is written only after their names are durable"),
        )
        .with(one()),
        row(
            "names in snapshots/ at open",
            opening_after_a_publish,
            nth(1, Sync::Folder(Folder::Snapshots)),
            Harmless("a manifest that no seal records is published anew, folder and all"),
        )
        .with(one()),
        row(
            "manifest published anew",
            opening_after_a_publish,
            nth(1, Sync::Temporary(Folder::Snapshots)),
            NoticedAtOnce,
        )
        .with(one()),
        row(
            "name of a manifest published anew",
            opening_after_a_publish,
            nth(2, Sync::Folder(Folder::Snapshots)),
            Harmless("the name was synced at open, and both files say the same"),
        )
        .with(one()),
        row("opening segment", opening, nth(1, segment), NoticedAtOnce),
        row("segment after the opening", rolling, nth(2, segment), Seen),
        row("name of the segment after the opening", opening, nth(2, log), Seen),
        row("name of the opening segment", opening, nth(3, log), Seen),
        row(
            "name that a spare gives up",
            opening_with_spares,
            nth(2, log),
            Harmless("whatever comes back under it is the beginning of a segment that was never begun"),
        ),
        row("opening segment in a spare", opening_with_spares, nth(1, segment), NoticedAtOnce),
        row("spare after the opening", rolling_with_spares, nth(1, Sync::Spare), Seen),
        row("name of a spare after the opening", opening_with_spares, nth(3, log), Seen),
        row("name of an opening in a spare", opening_with_spares, nth(4, log), Seen),
    ]
}

/// Rows of commits and of the growing log.
fn commits() -> Vec<Row> {
    use scenes::{committing, filling_the_reserve, long_frame, recycling_rounds, rolling, whole_page};
    let log = Sync::Folder(Folder::Log);
    let spare = Sync::TemporarySegment(0);
    let with_reserve = || options().with(|options| options.log.reserve_bytes = Some(16 << 10));
    vec![
        row("group", committing, nth(1, Sync::Window), Seen),
        row("segment made ahead", rolling, nth(3, Sync::Temporary(Folder::Log)), Seen),
        row("name of a segment made ahead", rolling, nth(4, log), Seen),
        row("long segment", long_frame, nth(2, Sync::TemporarySegment(2)), Seen),
        row("name of a long segment", long_frame, after(2, Sync::TemporarySegment(2), log), Seen),
        row("spare that becomes a segment", recycling_rounds, nth(1, Sync::Spare), Seen)
            .with(options().with(|options| options.retention.snapshots_kept = 1)),
        row(
            "spare of the reserve",
            filling_the_reserve,
            nth(1, spare),
            Harmless("it holds nothing, and is synced as a whole when it becomes a segment"),
        )
        .with(with_reserve()),
        row(
            "name of a spare of the reserve",
            filling_the_reserve,
            after(1, spare, log),
            Harmless("a spare that is lost costs nothing, and its next name includes the first"),
        )
        .with(with_reserve()),
        row("images of a batch", whole_page, nth(1, Sync::Images), Seen),
        row("name of a batch's image file", whole_page, nth(1, Sync::Folder(Folder::Pages)), Seen),
    ]
}

/// Rows of restores, and of snapshots. Only one snapshot is kept, so that the files that a snapshot replaces
/// are removed as soon as possible.
fn snapshots() -> Vec<Row> {
    use scenes::{change_link, first_snapshot, folding, restoring, second_snapshot, writing_again};
    let names = Sync::Folder(Folder::Snapshots);
    let manifest = Sync::Temporary(Folder::Snapshots);
    let image_names = Sync::Folder(Folder::Pages);
    let of_one_kept = vec![
        row("images", first_snapshot, nth(1, Sync::Images), NoticedAtOnce),
        row("name of the image file", first_snapshot, nth(1, image_names), Seen),
        row("manifest", first_snapshot, nth(1, manifest), NoticedAtOnce),
        row("name of the manifest", first_snapshot, nth(1, names), Seen),
        row(
            "record that a snapshot is verified",
            first_snapshot,
            after(1, names, Sync::Window),
            // The loss is not caused by the record itself. The frames after it depend on it through the chain
            // hash.
            Seen,
        ),
        row(
            "removal of the manifest before",
            second_snapshot,
            nth(2, names),
            Harmless("a manifest that comes back is older than the one used"),
        ),
        row(
            "removal of the images before",
            second_snapshot,
            nth(2, image_names),
            Harmless("an image file that comes back is named by nothing"),
        ),
        row(
            "recycling",
            second_snapshot,
            after(2, names, Sync::Folder(Folder::Log)),
            Harmless(
                "a segment that comes back lies before all that is read, and a spare's names follow each other",
            ),
        ),
        row("images of a change", change_link, nth(1, Sync::Images), NoticedAtOnce),
        row("name of a change's image file", change_link, nth(1, image_names), Seen),
        row("manifest of a change", change_link, nth(1, manifest), NoticedAtOnce),
        row("name of a change's manifest", change_link, nth(1, names), Seen),
        row("name of the manifest that folds a chain", folding, nth(1, names), Seen),
        row(
            "removal of the links that a base replaces",
            folding,
            nth(2, names),
            Harmless("a link that comes back is older than the base, which needs none"),
        ),
    ];
    let again = vec![
        row(
            "new names of spare image files",
            writing_again,
            nth(1, image_names),
            // The test `image_spares::spares_hold_no_chunk_with_future_number` shows why this sync exists.
            Harmless("the names are synced once more before a manifest names the images"),
        ),
        row("images in a file that was a spare", writing_again, nth(1, Sync::Images), NoticedAtOnce),
        row(
            "name of an image file that was a spare",
            writing_again,
            nth(2, image_names),
            Harmless("it was synced before the first chunk was written"),
        ),
        row(
            "names of new spare image files",
            writing_again,
            nth(3, image_names),
            Harmless(
                "an image file that comes back is named by nothing, and a spare's names follow each other",
            ),
        ),
    ];
    let again = again.into_iter().map(|row| {
        row.with(options().with(|options| {
            options.retention.snapshots_kept = 1;
            options.images.chunk_len = Some(8 << 10);
        }))
    });
    let restores = vec![
        row("table of the old state", restoring, nth(1, Sync::Temporary(Folder::Pages)), NoticedAtOnce),
        row("name of the table", restoring, nth(1, image_names), Seen),
    ];
    let of_one_kept = of_one_kept
        .into_iter()
        .map(|row| row.with(options().with(|options| options.retention.snapshots_kept = 1)));
    of_one_kept.chain(again).chain(restores).collect()
}

/// Rows of forks to an empty directory.
fn forks() -> Vec<Row> {
    use scenes::forking;
    let (root, log, pages) =
        (Sync::Folder(Folder::Root), Sync::Folder(Folder::Log), Sync::Folder(Folder::Pages));
    let (segment, manifests) = (Sync::Temporary(Folder::Log), Sync::Folder(Folder::Snapshots));
    let nothing = || Harmless("nothing was there that could come back");
    vec![
        row(
            "folders of a fork",
            forking,
            nth(1, root),
            Harmless("the sync of the claim's name includes them, and nothing lies in them before"),
        ),
        row("removal of an unfinished fork's segments", forking, nth(1, log), nothing()),
        row("removal of an unfinished fork's images", forking, nth(1, pages), nothing()),
        row("removal of an unfinished fork's manifests", forking, nth(1, manifests), nothing()),
        row("claim of a fork's directory", forking, nth(1, Sync::Temporary(Folder::Root)), Seen),
        row("name of the claim", forking, nth(2, root), Seen),
        row("images that a fork copies", forking, nth(1, Sync::Images), NoticedAtOnce),
        row("names of a fork's images", forking, nth(2, pages), Seen),
        row("first segment of a fork", forking, nth(1, segment), NoticedAtOnce),
        row(
            "second segment of a fork",
            forking,
            nth(2, segment),
            Harmless(
                "no frame comes after the first segment before an open, which puts another in its place",
            ),
        ),
        row(
            "name of a fork's second segment",
            forking,
            nth(2, log),
            Harmless("the sync of the first one's name includes it, and before that there is no store"),
        ),
        row("name of a fork's first segment", forking, nth(3, log), Seen),
        row("manifest of a fork", forking, nth(1, Sync::Temporary(Folder::Snapshots)), NoticedAtOnce),
        row("name of a fork's manifest", forking, nth(2, manifests), Seen),
        row("name of a fork's STORE", forking, nth(3, root), Seen),
    ]
}

/// Levels for crashes of the workload alone, because these tests are not about recovery.
const LEVELS: &[Level] =
    &[Level { tears: Tears::None, images_max: 40, closely_of: usize::MAX, nest_of: usize::MAX }];

/// The result of a run.
enum Verdict {
    Clean,
    /// The workload itself failed.
    Stopped(Error),
    /// A crash of the workload showed a violation.
    Found(Violation),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Clean => f.write_str("nothing was found"),
            Verdict::Stopped(error) => write!(f, "it stopped: {error}"),
            Verdict::Found(violation) => write!(f, "{violation}"),
        }
    }
}

fn run(row: &Row, left_out: Option<Rule>) -> Verdict {
    let mut bench = Bench::new(row.options.clone(), left_out);
    let driver = match (row.scene)(&mut bench) {
        Ok(driver) => driver,
        Err(error) => return Verdict::Stopped(error),
    };
    let skipped = driver.disk.history().iter().filter(|event| event.starts_with("skipped sync")).count();
    assert_eq!(skipped, usize::from(left_out.is_some()), "{}: one sync is left out", row.sync);
    let explorer = Explorer { from: bench.from, ..Explorer::new(&row.options, LEVELS, 1) };
    match explorer.explore(&driver) {
        Ok(()) => Verdict::Clean,
        Err(violation) => Verdict::Found(violation),
    }
}

fn check(rows: Vec<Row>) {
    let mut wrong = Vec::new();
    for row in rows {
        match run(&row, None) {
            Verdict::Clean => {}
            verdict => wrong.push(format!("{}: nothing is left out, and yet {verdict}", row.sync)),
        }
        let verdict = run(&row, Some(row.rule));
        match (&row.fate, &verdict) {
            (Seen, Verdict::Found(_))
            | (NoticedAtOnce, Verdict::Stopped(_))
            | (Harmless(_), Verdict::Clean) => {}
            (Seen | NoticedAtOnce, _) => wrong.push(format!("{}: left out, and {verdict}", row.sync)),
            (Harmless(why), _) => wrong.push(format!("{}: harmless, as {why}, but {verdict}", row.sync)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_sync_of_creations_and_openings_matters() {
    check(creations());
    check(openings());
}

#[test]
fn each_sync_of_commits_matters() {
    check(commits());
}

#[test]
fn each_sync_of_snapshots_and_restores_matters() {
    check(snapshots());
}

#[test]
fn each_sync_of_forks_matters() {
    check(forks());
}
