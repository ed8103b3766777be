//! Tables for people, with aligned columns and without borders.

use comfy_table::{CellAlignment, Table, presets};
use remanent_format::PageInfo;

/// Headings of the first columns in every table of pages.
const PAGE_COLUMNS: [&str; 5] = ["PAGE", "KEY", "LEN", "EPOCH", "LSN"];

/// Creates a table without rows. `numbers` contains the indices of the columns whose cells are numbers. These columns
/// are aligned to the right.
pub fn with_header<const N: usize>(header: [&str; N], numbers: impl IntoIterator<Item = usize>) -> Table {
    with_columns(&header, numbers)
}

fn with_columns(header: &[&str], numbers: impl IntoIterator<Item = usize>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    for number in numbers {
        let column = table.column_mut(number).expect("a table has all the columns of its header");
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Creates a table of pages without rows. Its columns are the columns of [`page_cells`], followed by the columns in
/// `more`.
pub fn page_table<const N: usize>(more: [&str; N]) -> Table {
    let header: Vec<&str> = PAGE_COLUMNS.into_iter().chain(more).collect();
    with_columns(&header, [0, 2, 3, 4])
}

/// Returns the first cells of the row that describes a page.
pub fn page_cells(info: &PageInfo) -> [String; PAGE_COLUMNS.len()] {
    let key = info.key.as_ref().map(ToString::to_string).unwrap_or_default();
    [info.page.to_string(), key, info.len.to_string(), info.epoch.to_string(), info.lsn.to_string()]
}
