//! Operations on an archive with the functions of `line`, on any bucket.

use std::cell::RefCell;
use std::io::Read;
use std::rc::Rc;

use remanent_archive::bucket::Bucket;
use remanent_archive::line::{Archive, Line, Nonces, Takeover, Verified, probe};
use remanent_archive::local::LocalStore;
use remanent_archive::object::Nonce;
use remanent_archive::rules::Rules;
use remanent_archive::testing::handle::SimStoreHandle;
use remanent_archive::testing::store::{Restored, SimStore};
use remanent_archive::testing::world::World;
use remanent_archive::{Error, Result};

/// Nonces from the operating system.
pub struct SystemNonces;

impl Nonces for SystemNonces {
    fn draw(&self) -> Nonce {
        let mut bytes = [0; 16];
        std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
        Nonce(bytes)
    }
}

pub fn random() -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| SystemNonces.draw().0[at])) >> 8
}

pub type RemoteLine<'a, B> = Line<'a, B, SystemNonces>;

pub fn line<B: Bucket>(bucket: &B) -> RemoteLine<'_, B> {
    Line::new(archive(bucket))
}

pub fn archive<B: Bucket>(bucket: &B) -> Archive<'_, B, SystemNonces> {
    Archive { bucket, nonces: &SystemNonces, rules: Rules::default() }
}

/// Returns the directory of a simulated store.
pub fn directory(store: SimStore) -> SimStoreHandle {
    let mut world = World::new(1);
    world.machines[0] = Some(store);
    SimStoreHandle { world: Rc::new(RefCell::new(world)), machine: 0, rules: Rules::default() }
}

/// Opens a directory and creates its fence.
pub async fn open<B: Bucket>(line: &mut RemoteLine<'_, B>, local: &mut SimStoreHandle) -> Result<()> {
    local.with(|store| store.plan_opening(random()));
    line.check_lineage(local, Takeover::Permitted)?;
    local.with(SimStore::publish_opening);
    line.fence(local, Takeover::Permitted).await
}

/// Creates a store and the first fence of an empty archive.
pub async fn create<'a, B: Bucket>(bucket: &'a B) -> Result<(RemoteLine<'a, B>, SimStoreHandle)> {
    let mut local = directory(SimStore::create(random()));
    let mut line = line(bucket);
    line.find().await?;
    open(&mut line, &mut local).await?;
    Ok((line, local))
}

/// Claims the archive, restores a directory from it, and creates its fence.
pub async fn take_over<'a, B: Bucket>(bucket: &'a B) -> Result<(RemoteLine<'a, B>, SimStoreHandle)> {
    let mut line = line(bucket);
    line.find().await?;
    let claim = line.claim(SystemNonces.draw()).await?;
    let mut state = Restored::default();
    let end = line.read_state(&mut state).await?;
    let mut local = directory(SimStore::restored(state, &end, Some(claim)));
    open(&mut line, &mut local).await?;
    Ok((line, local))
}

/// Commits batches, seals them and archives them.
pub async fn commit<B: Bucket>(
    line: &mut RemoteLine<'_, B>,
    local: &SimStoreHandle,
    tokens: &[u64],
) -> Result<()> {
    tokens.iter().for_each(|token| local.with(|store| store.commit(*token)));
    local.with(SimStore::seal);
    let appended = line.append_run(local).await?.expect("there are batches to append");
    assert_eq!(appended.archived, local.newest());
    Ok(())
}

/// Archives a snapshot of the current state.
pub async fn snapshot<B: Bucket>(line: &mut RemoteLine<'_, B>, local: &SimStoreHandle) -> Result<()> {
    let parts = local.with(|store| {
        let redo = store.snapshot_redo();
        store.complete_snapshot(redo, true)
    });
    line.append_manifest(local, &parts).await.map(drop)
}

/// Returns the contents of the batches that a restore of the end returns.
pub async fn restore<B: Bucket>(bucket: &B) -> Result<Vec<u64>> {
    let mut line = line(bucket);
    line.find().await?;
    let mut state = Restored::default();
    line.read_state(&mut state).await?;
    Ok(state.tokens())
}

/// Runs a probe, a fence, runs, snapshots, prunes, a takeover by a second writer, and restores.
pub async fn whole_life<B: Bucket>(bucket: &B) -> Result<()> {
    let (mut first, local) = create(bucket).await?;
    probe(archive(bucket), local.store()).await?;
    commit(&mut first, &local, &[1, 2, 3]).await?;
    for token in 4..7 {
        snapshot(&mut first, &local).await?;
        commit(&mut first, &local, &[token]).await?;
        let manifest = first.newest_manifest().expect("a snapshot was archived");
        first.prune(Verified::by_server(manifest)).await?;
    }
    first.write_hint().await?;
    assert!(first.start() > 1, "a boundary has passed the first objects");
    assert_eq!(restore(bucket).await?, [1, 2, 3, 4, 5, 6]);

    let (mut second, local_of_second) = take_over(bucket).await?;
    commit(&mut second, &local_of_second, &[7]).await?;
    local.with(|store| store.commit(100));
    local.with(SimStore::seal);
    let error = first.append_run(&local).await.expect_err("the first writer is superseded");
    assert!(matches!(error, Error::Superseded { .. }), "{error}");
    assert_eq!(restore(bucket).await?, [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(line(bucket).unknown_names().await?, Vec::<String>::new());
    Ok(())
}
