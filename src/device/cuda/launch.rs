//! Execution of a plan: its rows are written to pinned memory, and its steps are queued on a stream.
//!
//! All tables of a list share one block of mapped pinned memory, and kernels read them over the bus. A copy of the
//! tables to the GPU would be another command before the first launch, on an engine where the copy may have to wait.
//! Launches of a list run in the order of the stream, so a step observes all bytes that earlier steps wrote.

use std::convert::Infallible;
use std::ffi::c_void;

use super::abi::{
    CRC_CHUNKS, CRC_COMBINE, DIFF, DIGEST, Kernel, PartRow, PieceRow, SELECT_COUNT, SELECT_EMIT, SELECT_SCAN,
    ScanRow, SelectRow, VALIDATE,
};
use super::bulk_copies::BulkQueue;
use super::context::{Context, ContextGuard};
use super::driver::CUdeviceptr;
use super::kernels::Functions;
use super::lane::Timeline;
use super::memory::DeviceBlock;
use super::piece_plan::Rows;
use super::plan::{LaunchPlan, LaunchStep};
use crate::base::parallel;
use crate::device::many_deltas::THREADS_MAX;
use crate::error::Result;

/// Alignment of each table in bytes: that of [`PieceRow`](super::abi::PieceRow), which the kernels declare too.
const TABLE_ALIGN: usize = 16;

/// The maximum number of bytes of a table that a single thread writes. Several threads write a longer table.
const WRITTEN_BY_ONE_MAX: usize = 1 << 20;

/// The offsets of a plan's tables in the block that contains them.
pub(super) struct Layout {
    pieces: usize,
    parts: usize,
    crcs: usize,
    combines: usize,
    diffs: usize,
    digests: usize,
    selects: usize,
    scans: usize,
    indices: usize,
    /// Total length of the tables in bytes.
    pub len: usize,
}

/// The parts of a device that are needed to execute a plan's steps.
pub(super) struct Launcher<'l> {
    pub context: &'static Context,
    pub entered: &'l ContextGuard<'l>,
    pub functions: &'l Functions,
    pub bulk: &'l BulkQueue,
    pub lane: &'l Timeline,
}

impl Layout {
    /// Computes the layout of a plan's tables.
    pub fn of(plan: &LaunchPlan) -> Self {
        let mut len = 0;
        let mut place = |bytes: usize| {
            let at = len;
            len = (at + bytes).next_multiple_of(TABLE_ALIGN);
            at
        };
        Self {
            pieces: place(plan.pieces.len() * size_of::<PieceRow>()),
            parts: place(plan.parts.len() * size_of::<PartRow>()),
            crcs: place(size_of_val(&plan.crcs[..])),
            combines: place(size_of_val(&plan.combines[..])),
            diffs: place(size_of_val(&plan.diffs[..])),
            digests: place(size_of_val(&plan.digests[..])),
            selects: place(size_of_val(&plan.selects[..])),
            scans: place(size_of_val(&plan.scans[..])),
            indices: place(size_of_val(&plan.indices[..])),
            len,
        }
    }

    /// Writes a plan's tables.
    ///
    /// # Safety
    /// `tables` is pinned memory of at least `len` bytes, and no queued work uses it.
    #[expect(
        clippy::multiple_unsafe_ops_per_block,
        reason = "the same call for each table, under one contract"
    )]
    pub unsafe fn write(&self, plan: &LaunchPlan, tables: &mut DeviceBlock) {
        let at = |table: usize| tables.address + table as u64;
        // SAFETY: `of` made room for each table at its offset, which is aligned; the rest is the caller's promise.
        unsafe {
            write_runs(&plan.pieces, at(self.pieces));
            write_runs(&plan.parts, at(self.parts));
            write_rows(&plan.crcs, at(self.crcs));
            write_rows(&plan.combines, at(self.combines));
            write_rows(&plan.diffs, at(self.diffs));
            write_rows(&plan.digests, at(self.digests));
            write_rows(&plan.selects, at(self.selects));
            write_rows(&plan.scans, at(self.scans));
            write_rows(&plan.indices, at(self.indices));
        }
    }
}

/// Copies the runs of a table to `address`, with several threads if the table is long.
///
/// # Safety
/// Same as [`write_rows`], for all rows together.
unsafe fn write_runs<R: Copy + Sync>(rows: &Rows<R>, address: u64) {
    let mut at = address;
    let placed: Vec<(&[R], u64)> = rows
        .runs()
        .iter()
        .map(|run| {
            let begin = at;
            at += size_of_val(&run[..]) as u64;
            (&run[..], begin)
        })
        .collect();
    let is_long = rows.len() * size_of::<R>() > WRITTEN_BY_ONE_MAX;
    let threads = if is_long { parallel::threads(THREADS_MAX) } else { 1 };
    let write = |(): &mut (), index: usize| {
        let (rows, address) = placed[index];
        // SAFETY: the caller's promise; the runs are placed one after the other.
        unsafe { write_rows(rows, address) };
        Ok::<_, Infallible>(())
    };
    let Ok(_) = parallel::map_indexed(threads, placed.len(), || (), write);
}

/// Copies rows, which are plain numbers, to pinned memory.
///
/// # Safety
/// The address is aligned for a row, in memory that the caller owns and that has room for all rows. No other
/// code, and no queued work, uses that memory.
unsafe fn write_rows<R: Copy>(rows: &[R], address: u64) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), address as *mut R, rows.len()) }
}

impl Launcher<'_> {
    /// Queues a plan's steps.
    ///
    /// # Errors
    /// A device error; earlier steps may have been queued.
    ///
    /// # Safety
    /// `tables` contains the plan's tables. All ranges that the plan and its tables name are in allocated memory. That
    /// memory stays allocated, and its owner uses it for nothing else, until the lane's next value has passed.
    pub unsafe fn run(&self, plan: &LaunchPlan, layout: &Layout, tables: Option<&DeviceBlock>) -> Result<()> {
        let base = tables.map_or(0, |tables| tables.address);
        let row = |table: usize, number: usize, row_len: usize| base + (table + number * row_len) as u64;
        // SAFETY: the caller's promise for the whole plan.
        let launch =
            |kernel, rows, row_count, pieces| unsafe { self.launch(kernel, rows, row_count, pieces) };
        for step in &plan.steps {
            match step {
                LaunchStep::Apply(kernel, parts) => {
                    let rows = row(layout.parts, parts.start, size_of::<PartRow>());
                    let pieces = base + layout.pieces as u64;
                    launch(*kernel, rows, parts.len() as u32, Some(pieces))?;
                }
                LaunchStep::Crc(range) => {
                    let rows = row(layout.crcs, range.start, size_of_val(&plan.crcs[0]));
                    launch(CRC_CHUNKS, rows, range.len() as u32, None)?;
                }
                LaunchStep::Combine(range) => {
                    let rows = row(layout.combines, range.start, size_of_val(&plan.combines[0]));
                    launch(CRC_COMBINE, rows, range.len() as u32, None)?;
                }
                LaunchStep::Diff(range) => {
                    let rows = row(layout.diffs, range.start, size_of_val(&plan.diffs[0]));
                    launch(DIFF, rows, range.len() as u32, None)?;
                }
                LaunchStep::Digest(range) => {
                    let rows = row(layout.digests, range.start, size_of_val(&plan.digests[0]));
                    launch(DIGEST, rows, range.len() as u32, None)?;
                }
                LaunchStep::Select(range, scans) => {
                    let rows = row(layout.selects, range.start, size_of::<SelectRow>());
                    let (row_count, scan_count) = (range.len() as u32, scans.len() as u32);
                    // If all bitmaps are empty, there are no rows, and the driver rejects a launch without rows. The
                    // scan still writes a total for each bitmap.
                    if row_count > 0 {
                        launch(SELECT_COUNT, rows, row_count, None)?;
                    }
                    let scans = row(layout.scans, scans.start, size_of::<ScanRow>());
                    launch(SELECT_SCAN, scans, scan_count, None)?;
                    if row_count > 0 {
                        launch(SELECT_EMIT, rows, row_count, None)?;
                    }
                }
                LaunchStep::Validate(range) => {
                    let rows = row(layout.indices, range.start, size_of_val(&plan.indices[0]));
                    launch(VALIDATE, rows, range.len() as u32, None)?;
                }
                LaunchStep::Within { source, target, len } => {
                    // SAFETY: the same; `plan.rs` makes this step only for ranges that do not overlap.
                    unsafe { self.within(*source, *target, *len) }?;
                }
                LaunchStep::Up { source, target, len } => {
                    // SAFETY: the same.
                    unsafe { self.up(*source, *target, *len) }?;
                }
                LaunchStep::Down { source, target, len } => {
                    // SAFETY: the same.
                    unsafe { self.bulk.down(self.entered, self.lane, *source, *target, *len) }?;
                }
            }
        }
        Ok(())
    }

    /// Queues a kernel over rows of a table.
    ///
    /// # Safety
    /// Same as [`run`](Self::run), for the rows and for all memory that the rows name.
    unsafe fn launch(&self, kernel: Kernel, rows: u64, row_count: u32, pieces: Option<u64>) -> Result<()> {
        let (mut rows, mut row_count, mut pieces_at): (CUdeviceptr, u32, CUdeviceptr) =
            (rows, row_count, pieces.unwrap_or(0));
        let grid = kernel.grid(row_count);
        // A kernel without pieces has only the first two parameters.
        let mut parameters: [*mut c_void; 3] =
            [(&raw mut rows).cast(), (&raw mut row_count).cast(), (&raw mut pieces_at).cast()];
        let function = self.functions.get(kernel);
        let launch = |parameters: *mut *mut c_void| {
            // SAFETY: the context is current, the function belongs to its modules, the parameters are those
            // of the kernel's signature in `abi.rs`, and the driver copies them before it returns. The rows
            // are the caller's promise.
            unsafe {
                self.entered.launch(
                    function,
                    grid,
                    1,
                    1,
                    kernel.threads,
                    1,
                    1,
                    0,
                    self.lane.stream(),
                    parameters,
                    std::ptr::null_mut(),
                )
            }
        };
        launch(parameters.as_mut_ptr()).map_err(|code| self.context.fault(code))
    }

    /// Queues a copy between two ranges of page memory.
    ///
    /// # Safety
    /// Same as [`run`](Self::run), for the source and the target. They must not overlap.
    unsafe fn within(&self, source: u64, target: u64, len: u64) -> Result<()> {
        // SAFETY: the context is current; the ranges are the caller's promise.
        let queued = unsafe { self.entered.copy_within(target, source, len as usize, self.lane.stream()) };
        queued.map_err(|code| self.context.fault(code))
    }

    /// Queues a copy from staging to page memory.
    ///
    /// # Safety
    /// Same as [`run`](Self::run), for the source and the target.
    unsafe fn up(&self, source: u64, target: u64, len: u64) -> Result<()> {
        // SAFETY: the context is current; the ranges are the caller's promise.
        let queued = unsafe {
            self.entered.copy_to_device(target, source as *const c_void, len as usize, self.lane.stream())
        };
        queued.map_err(|code| self.context.fault(code))
    }
}
