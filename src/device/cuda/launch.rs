//! Execution of a plan: its rows are written to pinned memory, its steps are queued on a stream.
//!
//! All tables of a list share one block of mapped pinned memory, and kernels read them over the bus. A copy
//! to the GPU would be another command before the first launch, on an engine where it may have to wait.
//! Launches of a list run in the order of the stream, so a step sees all bytes that earlier steps wrote.

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

/// Alignment of each table: that of [`PieceRow`](super::abi::PieceRow), which the kernels declare too.
const TABLE_ALIGN: usize = 16;

/// Bytes of a table that one thread writes.
const WRITTEN_BY_ONE_MAX: usize = 1 << 20;

/// Offsets of a plan's tables from the first one.
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
    /// Number of bytes of all tables.
    pub len: usize,
}

/// The parts of a device that execute steps.
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

    /// Writes a plan's tables to pinned memory of at least `len` bytes.
    pub fn write(&self, plan: &LaunchPlan, tables: &DeviceBlock) {
        write_runs(&plan.pieces, tables.address + self.pieces as u64);
        write_runs(&plan.parts, tables.address + self.parts as u64);
        write_rows(&plan.crcs, tables.address + self.crcs as u64);
        write_rows(&plan.combines, tables.address + self.combines as u64);
        write_rows(&plan.diffs, tables.address + self.diffs as u64);
        write_rows(&plan.digests, tables.address + self.digests as u64);
        write_rows(&plan.selects, tables.address + self.selects as u64);
        write_rows(&plan.scans, tables.address + self.scans as u64);
        write_rows(&plan.indices, tables.address + self.indices as u64);
    }
}

/// Copies the runs of a table, with several threads if it is long.
fn write_runs<R: Copy + Sync>(rows: &Rows<R>, address: u64) {
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
        write_rows(rows, address);
        Ok::<_, Infallible>(())
    };
    let Ok(_) = parallel::map_indexed(threads, placed.len(), || (), write);
}

/// Copies rows, which are plain numbers, to pinned memory allocated for them.
fn write_rows<R: Copy>(rows: &[R], address: u64) {
    // SAFETY: the caller's layout leaves room for the rows at this address, which is aligned for them, and no
    // other code has the block until work that uses it is queued.
    unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), address as *mut R, rows.len()) }
}

impl Launcher<'_> {
    /// Queues a plan's steps. Memory that they access must stay valid until the lane's next value has passed.
    ///
    /// # Errors
    /// A device error; earlier steps may have been queued.
    pub fn run(&self, plan: &LaunchPlan, layout: &Layout, tables: Option<&DeviceBlock>) -> Result<()> {
        let base = tables.map_or(0, |tables| tables.address);
        let row = |table: usize, number: usize, row_len: usize| base + (table + number * row_len) as u64;
        for step in &plan.steps {
            match step {
                LaunchStep::Apply(kernel, parts) => {
                    let rows = row(layout.parts, parts.start, size_of::<PartRow>());
                    let pieces = base + layout.pieces as u64;
                    self.launch(*kernel, rows, parts.len() as u32, Some(pieces))?;
                }
                LaunchStep::Crc(range) => {
                    let rows = row(layout.crcs, range.start, size_of_val(&plan.crcs[0]));
                    self.launch(CRC_CHUNKS, rows, range.len() as u32, None)?;
                }
                LaunchStep::Combine(range) => {
                    let rows = row(layout.combines, range.start, size_of_val(&plan.combines[0]));
                    self.launch(CRC_COMBINE, rows, range.len() as u32, None)?;
                }
                LaunchStep::Diff(range) => {
                    let rows = row(layout.diffs, range.start, size_of_val(&plan.diffs[0]));
                    self.launch(DIFF, rows, range.len() as u32, None)?;
                }
                LaunchStep::Digest(range) => {
                    let rows = row(layout.digests, range.start, size_of_val(&plan.digests[0]));
                    self.launch(DIGEST, rows, range.len() as u32, None)?;
                }
                LaunchStep::Select(range, scans) => {
                    let rows = row(layout.selects, range.start, size_of::<SelectRow>());
                    let (row_count, scan_count) = (range.len() as u32, scans.len() as u32);
                    // Empty bitmaps have no rows but still a total, which the scan writes. The driver rejects
                    // a launch without rows.
                    if row_count > 0 {
                        self.launch(SELECT_COUNT, rows, row_count, None)?;
                    }
                    let scans = row(layout.scans, scans.start, size_of::<ScanRow>());
                    self.launch(SELECT_SCAN, scans, scan_count, None)?;
                    if row_count > 0 {
                        self.launch(SELECT_EMIT, rows, row_count, None)?;
                    }
                }
                LaunchStep::Validate(range) => {
                    let rows = row(layout.indices, range.start, size_of_val(&plan.indices[0]));
                    self.launch(VALIDATE, rows, range.len() as u32, None)?;
                }
                LaunchStep::Within { source, target, len } => self.within(*source, *target, *len)?,
                LaunchStep::Up { source, target, len } => self.up(*source, *target, *len)?,
                LaunchStep::Down { source, target, len } => {
                    self.bulk.down(self.entered, self.lane, *source, *target, *len)?;
                }
            }
        }
        Ok(())
    }

    fn launch(&self, kernel: Kernel, rows: u64, row_count: u32, pieces: Option<u64>) -> Result<()> {
        let (mut rows, mut row_count, mut pieces_at): (CUdeviceptr, u32, CUdeviceptr) =
            (rows, row_count, pieces.unwrap_or(0));
        let grid = kernel.grid(row_count);
        // Kernels without pieces take only the first two.
        let mut parameters: [*mut c_void; 3] =
            [(&raw mut rows).cast(), (&raw mut row_count).cast(), (&raw mut pieces_at).cast()];
        let function = self.functions.get(kernel);
        let launch = |parameters: *mut *mut c_void| {
            // SAFETY: the context is current, the function belongs to its modules, the parameters are those
            // of the kernel's signature in `abi.rs`, and the driver copies them before it returns. All memory
            // that the rows name was checked to contain the ranges, and stays valid until the lane's next
            // value has passed.
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

    fn within(&self, source: u64, target: u64, len: u64) -> Result<()> {
        // SAFETY: the context is current; both ranges were checked to be in page memory, do not overlap, and
        // stay valid until the lane's next value has passed.
        let queued = unsafe { self.entered.copy_within(target, source, len as usize, self.lane.stream()) };
        queued.map_err(|code| self.context.fault(code))
    }

    fn up(&self, source: u64, target: u64, len: u64) -> Result<()> {
        // SAFETY: the context is current; the list's staging and page memory were checked to contain the
        // ranges, and stay valid until the lane's next value has passed.
        let queued = unsafe {
            self.entered.copy_to_device(target, source as *const c_void, len as usize, self.lane.stream())
        };
        queued.map_err(|code| self.context.fault(code))
    }
}
