//! `remanent import` adds a safetensors file to a store as its newest version, in one batch.
//!
//! The command is the only writer of the store while it runs, so the pages cannot change after they were compared. A
//! version is one batch, so readers and recovery see either the previous or the new version, even after a kill. If an
//! import did not complete, importing the file again adds the missing version.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use remanent::batch::{PageChanges, Width};
use remanent::error::{FileName, Folder, IoObject};
use remanent::options::Create;
use remanent::{Error, Key, Lsn, PageInfo, Place, Store, Value, WriteBatch};

use crate::cli::engine;
use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::weights::dtype;
use crate::weights::{HEADER_KEY, Header, Tensor, WeightsFile, is_header, key_of, name_of};

const EXAMPLES: &str = "\
Each tensor is stored as a page. The key of the page is the name of the tensor, or a shortened form if the name is \
longer than 64 bytes or already used. The metadata of the page contains the full name, the dtype and the shape. One \
more page stores the header of the file, so that `remanent export` restores the file byte for byte. When a file is \
imported again, only the elements that changed are logged. Pages are created, deleted and resized for tensors that \
were added, removed or resized. A version is one batch, so a killed import never leaves a partial version. If the file \
equals the newest version, nothing is committed.

Examples:
  remanent import store model.safetensors --note 'before training'
  remanent import store model.safetensors --root step=120 --root lr=3e-4
  remanent import store model.safetensors --place device:0";

/// Import a safetensors file into a store as its newest version
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Import {
    /// Store directory, which is created if it does not exist
    dir: PathBuf,
    /// Safetensors file to import
    file: PathBuf,
    #[command(flatten)]
    along: ImportExtras,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

/// Options of an import: a note, root entries, and the place of new tensors.
#[derive(clap::Args)]
struct ImportExtras {
    /// Note to store with the version in the log
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
    /// Set an entry of the store's root in the same batch. VALUE is stored as a number or a boolean if possible,
    /// otherwise as text
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_root)]
    root: Vec<(String, Value)>,
    /// Place of new tensors: host, pinned, disk or device:N. Existing tensors are not moved
    #[arg(long, value_name = "PLACE", default_value_t = Place::Host)]
    place: Place,
}

fn parse_root(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    let value = None
        .or_else(|| value.parse().ok().map(Value::U64))
        .or_else(|| value.parse().ok().map(Value::I64))
        .or_else(|| value.parse().ok().map(Value::Bool))
        .or_else(|| value.parse().ok().map(Value::F64))
        .unwrap_or_else(|| Value::String(value.to_owned()));
    Ok((name.to_owned(), value))
}

/// Number of bytes that are compared at a time, a multiple of every element width.
const PIECE_LEN: usize = 1 << 20;
/// Limit for logging the changes of a page, in eighths of the length of the page. If the changes cost more, the whole
/// page is written.
const WHOLE_FROM_EIGHTHS: u64 = 7;
/// Maximum length in bytes of a page whose changes are always kept in memory. An image file is not worthwhile for so
/// short a page.
const SHORT_LEN_MAX: u64 = 64 << 10;
/// Maximum total cost in bytes of the changes that an import keeps in memory until the commit. The memory use is up to
/// two and a half times this cost. If the changes cost more, whole pages are written from the file.
const HELD_COST_MAX: u64 = 32 << 20;
/// Number of bytes that are compared before the cost of a page's changes is evaluated.
const LOOKED_AT_LEN: u64 = 16 << 20;

/// The result of an import: whether a version was added, and what changed.
struct ImportReport {
    /// Whether the version differs from the newest version in the store.
    is_new: bool,
    totals: ImportTotals,
}

#[derive(Default)]
struct ImportTotals {
    created: u64,
    deleted: u64,
    resized: u64,
    changed: u64,
    changed_elements: u64,
}

impl Import {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        // Open the file first, because a file that cannot be imported must not create a store.
        let file = WeightsFile::open(&self.file)?;
        let was_there = self.dir.exists();
        let store = engine::open(&self.dir, Create::IfEmpty)?;
        let imported = match import_file(&store, &file, &self.along, &interrupt) {
            Ok(imported) => imported,
            Err(failure) => {
                if store.recovered().created && store.lsn() == Lsn(0) {
                    drop(store);
                    remove_empty_store(&self.dir, was_there);
                }
                return Err(failure);
            }
        };
        if let Some(imported) = &imported {
            self.report(&store, imported, &file.header, out)?;
        }
        store.close().map_err(engine_failure)?;
        Ok(if imported.is_some() { Ending::Fine } else { Ending::Interrupted })
    }

    fn report(
        &self,
        store: &Store,
        imported: &ImportReport,
        header: &Header,
        out: &mut Output,
    ) -> Result<(), Failure> {
        let ImportTotals { created, deleted, resized, changed, changed_elements } = imported.totals;
        let (tensors, bytes, lsn) = (header.tensors.len(), header.file_len(), store.lsn());
        if self.json {
            return out.line(object! {
                "lsn": lsn.0,
                "is_new": imported.is_new,
                "tensors": tensors,
                "bytes": bytes,
                "created": created,
                "deleted": deleted,
                "resized": resized,
                "changed": changed,
                "changed_elements": changed_elements,
            });
        }
        if !imported.is_new {
            return out.line(format_args!(
                "nothing to import: the store already contains this version at lsn {lsn}"
            ));
        }
        out.line(format_args!(
            "lsn {lsn}: {tensors} tensors of {bytes} bytes; {created} created, {deleted} deleted, {resized} resized, \
             {changed_elements} elements changed in {changed} others"
        ))
    }
}

/// Removes a store that was just created and is empty. Only files of the store are removed, and the folders that become
/// empty. Errors are ignored, because the caller reports why the import failed.
fn remove_empty_store(dir: &Path, was_there: bool) {
    for folder in Folder::INNER.into_iter().chain([Folder::Root]) {
        let path = dir.join(folder.name());
        let names = fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.file_name());
        for name in
            names.filter(|name| name.to_str().and_then(|name| FileName::parse(folder, name)).is_some())
        {
            let _ = fs::remove_file(path.join(name));
        }
        if folder != Folder::Root || !was_there {
            let _ = fs::remove_dir(path);
        }
    }
}

/// Imports a safetensors file into an open store as its newest version. Returns `false` if the newest version in the
/// store is equal to the file, or if Ctrl-C was pressed.
///
/// # Errors
///
/// Returns [`Failure::Environment`] if the file is not a safetensors file or cannot be read, or if the commit of the
/// batch fails. Returns [`Failure::Damage`] if the page with the header of an earlier file is damaged.
pub fn import(store: &Store, file: &Path) -> Result<bool, Failure> {
    let interrupt = Interrupt::listen()?;
    let along = ImportExtras { note: None, root: Vec::new(), place: Place::Host };
    let imported = import_file(store, &WeightsFile::open(file)?, &along, &interrupt)?;
    Ok(imported.is_some_and(|imported| imported.is_new))
}

/// Commits a file as the newest version of a store, and waits until the version is durable. Returns `None` if Ctrl-C
/// was pressed.
fn import_file(
    store: &Store,
    file: &WeightsFile,
    along: &ImportExtras,
    interrupt: &Interrupt,
) -> Result<Option<ImportReport>, Failure> {
    let bar = progress::bytes(file.header.file_len(), "comparing");
    let version = ImportVersion::prepare(store, file, along.place, interrupt, &bar)?;
    bar.finish_and_clear();
    let Some(mut version) = version else { return Ok(None) };
    let root = store.root().map_err(engine_failure)?;
    for (name, value) in &along.root {
        if root.get(name) != Some(value) {
            version.batch.set_root(name, value.clone());
            version.is_new = true;
        }
    }
    if version.is_new {
        along.note.iter().for_each(|note| {
            version.batch.note(note);
        });
        let committed = match store.commit(version.batch) {
            Err(Error::Io { object: IoObject::Source { .. }, .. }) if interrupt.is_noted() => {
                return Ok(None);
            }
            Err(Error::Io { object: IoObject::Source { .. }, source, .. }) => {
                return Err(file.cannot_read(&source));
            }
            committed => committed.map_err(engine_failure)?,
        };
        store.wait_durable(committed.position.lsn).map_err(engine_failure)?;
    }
    Ok(Some(ImportReport { is_new: version.is_new, totals: version.totals }))
}

/// A new version of the weights while it is prepared. Its batch contains the differences between a file and the store.
struct ImportVersion<'a> {
    store: &'a Store,
    file: &'a WeightsFile,
    interrupt: &'a Interrupt,
    /// Place of new tensors.
    place: Place,
    batch: WriteBatch,
    /// Cost in bytes of the changes that `batch` contains.
    held_cost: u64,
    is_new: bool,
    totals: ImportTotals,
    /// Buffers for a piece of the old and the new version.
    before: Vec<u8>,
    after: Vec<u8>,
}

impl<'a> ImportVersion<'a> {
    /// Compares the file with the store, and adds the differences to a batch. Returns `None` if Ctrl-C was pressed.
    fn prepare(
        store: &'a Store,
        file: &'a WeightsFile,
        place: Place,
        interrupt: &'a Interrupt,
        bar: &ProgressBar,
    ) -> Result<Option<Self>, Failure> {
        let (batch, totals) = (store.batch(), ImportTotals::default());
        let (before, after) = (vec![0; PIECE_LEN], vec![0; PIECE_LEN]);
        let mut version =
            Self { store, file, interrupt, place, batch, held_cost: 0, is_new: false, totals, before, after };
        let pages: Vec<PageInfo> = store.pages().map_err(engine_failure)?.collect();
        let header = pages.iter().find(|info| is_header(info));
        let mut old = version.tensors_before(&pages, header)?;
        let mut keys: BTreeSet<Key> = pages.iter().filter_map(|info| info.key.clone()).collect();

        // Delete pages first, so that their keys are free.
        let stays: BTreeSet<&str> = file.header.tensors.iter().map(|tensor| &tensor.name[..]).collect();
        for info in old.iter().filter(|(name, _)| !stays.contains(*name)).map(|(_, info)| info) {
            version.batch.delete(info.page);
            version.is_new = true;
            version.totals.deleted += 1;
            info.key.iter().for_each(|key| {
                keys.remove(key);
            });
        }
        old.retain(|name, _| stays.contains(name));
        for tensor in &file.header.tensors {
            if interrupt.is_noted() {
                return Ok(None);
            }
            match old.get(&tensor.name[..]) {
                Some(info) => version.update(info, tensor)?,
                None => {
                    let key = key_of(&tensor.name, |key| keys.contains(key));
                    keys.insert(key.clone());
                    version.create(key, tensor)?;
                }
            }
            bar.inc(tensor.len);
        }
        version.update_header(header)?;
        Ok(Some(version))
    }

    /// Returns the pages of the newest version in the store, keyed by tensor name. Pages that contain no tensor are
    /// excluded and never changed, even if their key is the name of a tensor.
    fn tensors_before<'p>(
        &self,
        pages: &'p [PageInfo],
        header: Option<&PageInfo>,
    ) -> Result<BTreeMap<&'p str, &'p PageInfo>, Failure> {
        let Some(header) = header else { return Ok(BTreeMap::new()) };
        let mut bytes = vec![0; header.len as usize];
        self.store.read(header.page, 0, &mut bytes).map_err(engine_failure)?;
        let refuse =
            |reason| Failure::Damage(format!("page {} is not a safetensors header: {reason}", header.page));
        let header = Header::parse(bytes).map_err(refuse)?;
        let names: BTreeSet<String> = header.tensors.into_iter().map(|tensor| tensor.name).collect();
        let named = pages.iter().filter_map(|info| Some((name_of(info)?, info)));
        Ok(named.filter(|(name, _)| names.contains(*name)).collect())
    }

    fn create(&mut self, key: Key, tensor: &Tensor) -> Result<(), Failure> {
        self.is_new = true;
        self.totals.created += 1;
        let created = if self.is_zeros(tensor)? {
            // A new page contains zeros.
            self.batch.create(tensor.len, self.place)
        } else {
            let source = self.file.source(tensor, self.interrupt);
            self.batch.create_from_source(tensor.len, source, self.place)
        };
        created.key(key).metadata(tensor.metadata());
        Ok(())
    }

    /// Returns true if all bytes of a tensor are zero.
    fn is_zeros(&mut self, tensor: &Tensor) -> Result<bool, Failure> {
        for at in (0..tensor.len).step_by(PIECE_LEN) {
            let piece = &mut self.after[..(tensor.len - at).min(PIECE_LEN as u64) as usize];
            self.file.read_at(tensor.offset + at, piece)?;
            if piece.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn update(&mut self, info: &PageInfo, tensor: &Tensor) -> Result<(), Failure> {
        for (name, value) in tensor.metadata() {
            if info.metadata.get(&name) != Some(&value) {
                self.batch.set_metadata(info.page, name, value);
                self.is_new = true;
            }
        }
        let is_resized = info.len != tensor.len;
        let (count, changes) = self.compare(info, tensor)?;
        self.is_new |= is_resized || count > 0;
        match changes {
            None => {
                let source = self.file.source(tensor, self.interrupt);
                self.batch.replace_from_source(info.page, tensor.len, source);
            }
            Some(changes) => {
                if is_resized {
                    self.batch.resize(info.page, tensor.len);
                }
                changes.put(&mut self.batch, info.page);
            }
        }
        if is_resized {
            self.totals.resized += 1;
        } else if count > 0 {
            self.totals.changed += 1;
            self.totals.changed_elements += count;
        }
        Ok(())
    }

    /// Compares a tensor with its page. Returns the number of changed elements and the changes. The changes are `None`
    /// if the whole page must be written.
    fn compare(&mut self, info: &PageInfo, tensor: &Tensor) -> Result<(u64, Option<PageChanges>), Failure> {
        let width = dtype::width(tensor.dtype);
        let mut changes = Some(PageChanges::new(width));
        // Number of changed elements in a page that is written as a whole.
        let mut counted = 0;
        for at in (0..tensor.len).step_by(PIECE_LEN) {
            let len = (tensor.len - at).min(PIECE_LEN as u64) as usize;
            self.file.read_at(tensor.offset + at, &mut self.after[..len])?;
            // Bytes after the current end of the page are zero.
            let there = info.len.saturating_sub(at).min(len as u64) as usize;
            self.before[there..len].fill(0);
            if there > 0 {
                self.store.read(info.page, at, &mut self.before[..there]).map_err(engine_failure)?;
            }
            match &mut changes {
                Some(changes) => changes.compare(at, &self.before[..len], &self.after[..len]),
                None => {
                    let mut piece = PageChanges::new(width);
                    piece.compare(at, &self.before[..len], &self.after[..len]);
                    counted += piece.count();
                }
            }
            let end = at + len as u64;
            let is_due = end == tensor.len || end.is_multiple_of(LOOKED_AT_LEN);
            if let Some(held) = changes.take_if(|held| is_due && self.is_written_whole(held, tensor)) {
                counted = held.count();
            }
        }
        let count = changes.as_ref().map_or(counted, PageChanges::count);
        self.held_cost += changes.as_mut().map_or(0, PageChanges::cost);
        Ok((count, changes))
    }

    /// Returns true if the whole page must be written. `changes` are the changes that were found so far.
    fn is_written_whole(&self, changes: &mut PageChanges, tensor: &Tensor) -> bool {
        let cost = changes.cost();
        let is_most = tensor.len > SHORT_LEN_MAX && cost * 8 > tensor.len * WHOLE_FROM_EIGHTHS;
        is_most || self.held_cost + cost > HELD_COST_MAX
    }

    /// Updates the page that contains the header of the file.
    fn update_header(&mut self, info: Option<&PageInfo>) -> Result<(), Failure> {
        let bytes = &self.file.header.bytes;
        let Some(info) = info else {
            let key = Key::new(HEADER_KEY).expect("the key is short");
            self.batch.create_from(&bytes[..], Place::Host).key(key);
            self.is_new = true;
            return Ok(());
        };
        let mut changes = PageChanges::new(Width::W1);
        for (at, after) in (0..).step_by(PIECE_LEN).zip(bytes.chunks(PIECE_LEN)) {
            let before = &mut self.before[..after.len()];
            let there = info.len.saturating_sub(at).min(after.len() as u64) as usize;
            before[there..].fill(0);
            self.store.read(info.page, at.min(info.len), &mut before[..there]).map_err(engine_failure)?;
            changes.compare(at, before, after);
        }
        let is_resized = info.len != bytes.len() as u64;
        if is_resized {
            self.batch.resize(info.page, bytes.len() as u64);
        }
        self.is_new |= is_resized || changes.count() > 0;
        changes.put(&mut self.batch, info.page);
        Ok(())
    }
}
