//! RocksDB as installed on the system, through its C interface. Each record has its own key and is written
//! with `sync`. All other settings have their defaults. RocksDB groups concurrent writes. By default,
//! recovery reads the log up to the first damage. The setting that rejects all damage
//! (`kAbsoluteConsistency`) also rejects the files that a power cut leaves.

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use super::{Blocks, Commit, Found, Result};
use crate::record;

/// A pointer to a RocksDB object.
type Object = *mut c_void;

#[link(name = "rocksdb")]
unsafe extern "C" {
    fn rocksdb_options_create() -> Object;
    fn rocksdb_options_destroy(options: Object);
    fn rocksdb_options_set_create_if_missing(options: Object, is: c_uchar);
    fn rocksdb_writeoptions_create() -> Object;
    fn rocksdb_writeoptions_destroy(options: Object);
    fn rocksdb_writeoptions_set_sync(options: Object, is: c_uchar);
    fn rocksdb_readoptions_create() -> Object;
    fn rocksdb_readoptions_destroy(options: Object);
    fn rocksdb_open(options: Object, path: *const c_char, error: *mut *mut c_char) -> Object;
    fn rocksdb_close(database: Object);
    fn rocksdb_put(
        database: Object,
        options: Object,
        key: *const c_char,
        key_len: usize,
        value: *const c_char,
        value_len: usize,
        error: *mut *mut c_char,
    );
    fn rocksdb_create_iterator(database: Object, options: Object) -> Object;
    fn rocksdb_iter_destroy(iterator: Object);
    fn rocksdb_iter_seek_to_first(iterator: Object);
    fn rocksdb_iter_valid(iterator: Object) -> c_uchar;
    fn rocksdb_iter_next(iterator: Object);
    fn rocksdb_iter_key(iterator: Object, len: *mut usize) -> *const c_char;
    fn rocksdb_iter_value(iterator: Object, len: *mut usize) -> *const c_char;
    fn rocksdb_iter_get_error(iterator: Object, error: *mut *mut c_char);
    fn rocksdb_free(memory: *mut c_void);
    fn rocksdb_get(
        database: Object,
        options: Object,
        key: *const c_char,
        key_len: usize,
        value_len: *mut usize,
        error: *mut *mut c_char,
    ) -> *mut c_char;
    fn rocksdb_cache_create_lru(bytes: usize) -> Object;
    fn rocksdb_cache_destroy(cache: Object);
    fn rocksdb_block_based_options_create() -> Object;
    fn rocksdb_block_based_options_destroy(table: Object);
    fn rocksdb_block_based_options_set_block_cache(table: Object, cache: Object);
    fn rocksdb_options_set_block_based_table_factory(options: Object, table: Object);
    fn rocksdb_options_set_compression(options: Object, kind: c_int);
    fn rocksdb_options_enable_statistics(options: Object);
    fn rocksdb_options_statistics_get_string(options: Object) -> *mut c_char;
}

/// An open database and its write options.
struct Database {
    database: Object,
    synced: Object,
}

// SAFETY: RocksDB locks its own state, and options that do not change may be read by all threads.
unsafe impl Sync for Database {}

impl Database {
    fn open(directory: &Path) -> Result<Self> {
        // SAFETY: they are destroyed after the call that reads them.
        let options = unsafe { rocksdb_options_create() };
        let opened = Self::open_with(directory, options, true);
        // SAFETY: they are not used any more.
        unsafe { rocksdb_options_destroy(options) };
        opened
    }

    fn open_with(directory: &Path, options: Object, is_synced: bool) -> Result<Self> {
        let path = CString::new(directory.as_os_str().as_bytes())?;
        let mut error = ptr::null_mut();
        // SAFETY: the options live, and the path ends with a zero.
        let database = unsafe {
            rocksdb_options_set_create_if_missing(options, 1);
            rocksdb_open(options, path.as_ptr(), &mut error)
        };
        refused(error)?;
        // SAFETY: they are destroyed when this is dropped.
        let synced = unsafe { rocksdb_writeoptions_create() };
        // SAFETY: they were just made.
        unsafe { rocksdb_writeoptions_set_sync(synced, is_synced.into()) };
        Ok(Self { database, synced })
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        let mut error = ptr::null_mut();
        let (at, of) = (key.as_ptr().cast(), value.as_ptr().cast());
        // SAFETY: both live as long as this, and key and value have these lengths.
        unsafe { rocksdb_put(self.database, self.synced, at, key.len(), of, value.len(), &mut error) };
        refused(error)
    }

    fn records(&self) -> Result<Vec<record::Record>> {
        let mut records = Vec::new();
        let mut error = ptr::null_mut();
        // SAFETY: the iterator is used between being made and being destroyed, while the database is open;
        // keys and values, which have the lengths that it says, are copied before it goes on.
        unsafe {
            let options = rocksdb_readoptions_create();
            let iterator = rocksdb_create_iterator(self.database, options);
            rocksdb_iter_seek_to_first(iterator);
            while rocksdb_iter_valid(iterator) != 0 {
                let bytes = |of: unsafe extern "C" fn(Object, *mut usize) -> *const c_char| {
                    let mut len = 0;
                    let at = of(iterator, &mut len);
                    std::slice::from_raw_parts(at.cast::<u8>(), len).to_vec()
                };
                records.push((bytes(rocksdb_iter_key), bytes(rocksdb_iter_value)));
                rocksdb_iter_next(iterator);
            }
            rocksdb_iter_get_error(iterator, &mut error);
            rocksdb_iter_destroy(iterator);
            rocksdb_readoptions_destroy(options);
        }
        refused(error)?;
        Ok(records)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SAFETY: neither is used any more.
        unsafe {
            rocksdb_close(self.database);
            rocksdb_writeoptions_destroy(self.synced);
        }
    }
}

/// Returns the error that a RocksDB call reported, if any.
fn refused(error: *mut c_char) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: it is a text that ends with a zero, and ours to free.
    let text = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
    // SAFETY: the text is not used any more.
    unsafe { rocksdb_free(error.cast()) };
    Err(text.into())
}

pub fn write(directory: &Path, done: &dyn Fn()) -> Result<()> {
    let database = Database::open(directory)?;
    for number in 0..record::COUNT {
        database.put(&number.to_be_bytes(), &record::bytes(number))?;
    }
    // Remove the file of log messages, which is longer than all other files and which RocksDB does not read.
    std::fs::remove_file(directory.join("LOG"))?;
    done();
    Ok(())
}

pub fn read(directory: &Path) -> Result<Found> {
    Ok(Database::open(directory)?.records()?.into())
}

pub fn open(directory: &Path, _: usize) -> Result<Box<dyn Commit>> {
    Ok(Box::new(Database::open(directory)?))
}

impl Commit for Database {
    fn commit(&self, thread: usize, count: u64, record: &[u8]) -> Result<()> {
        self.put(&super::key(thread, count), record)
    }
}

/// Blocks with a block cache of a given length. Blocks that are not yet in a file are in a memory table of 64
/// MiB, which is not part of the cache.
struct CachedBlocks {
    database: Database,
    /// The options, which contain the statistics.
    options: Object,
    reading: Object,
    gets: u64,
}

/// Opens a store of blocks without a sync per write and without compression.
pub fn open_blocks(directory: &Path, cache: u64) -> Result<Box<dyn Blocks>> {
    // SAFETY: each object is made here, and what others refer to is counted by RocksDB itself.
    let (options, reading) = unsafe {
        let (options, table) = (rocksdb_options_create(), rocksdb_block_based_options_create());
        let cache = rocksdb_cache_create_lru(cache as usize);
        rocksdb_block_based_options_set_block_cache(table, cache);
        rocksdb_options_set_block_based_table_factory(options, table);
        rocksdb_cache_destroy(cache);
        rocksdb_block_based_options_destroy(table);
        rocksdb_options_set_compression(options, 0);
        rocksdb_options_enable_statistics(options);
        (options, rocksdb_readoptions_create())
    };
    let database = Database::open_with(directory, options, false)?;
    Ok(Box::new(CachedBlocks { database, options, reading, gets: 0 }))
}

impl Blocks for CachedBlocks {
    fn get(&mut self, block: u64) -> Result<Vec<u8>> {
        self.gets += 1;
        let (key, mut len, mut error) = (block.to_be_bytes(), 0, ptr::null_mut());
        let (database, at) = (self.database.database, key.as_ptr().cast());
        // SAFETY: all live as long as this, and the key has this length.
        let value = unsafe { rocksdb_get(database, self.reading, at, key.len(), &mut len, &mut error) };
        refused(error)?;
        if value.is_null() {
            return Err("a block is gone".into());
        }
        // SAFETY: it has this length, and is ours to free.
        let bytes = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len) }.to_vec();
        // SAFETY: it is not used any more.
        unsafe { rocksdb_free(value.cast()) };
        Ok(bytes)
    }

    fn put(&mut self, block: u64, bytes: &[u8]) -> Result<()> {
        self.database.put(&block.to_be_bytes(), bytes)
    }

    fn hits(&self) -> Option<u64> {
        // SAFETY: the options live, and the text ends with a zero and is ours to free.
        let (text, counts) = unsafe {
            let text = rocksdb_options_statistics_get_string(self.options);
            (text, CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        // SAFETY: the text is not used any more.
        unsafe { rocksdb_free(text.cast()) };
        let missed =
            counts.lines().find_map(|line| line.strip_prefix("rocksdb.block.cache.data.miss COUNT : "))?;
        Some(self.gets.saturating_sub(missed.trim().parse().ok()?))
    }
}

impl Drop for CachedBlocks {
    fn drop(&mut self) {
        // SAFETY: no call is under way; the database has its own reference to what the options hold.
        unsafe {
            rocksdb_readoptions_destroy(self.reading);
            rocksdb_options_destroy(self.options);
        }
    }
}
