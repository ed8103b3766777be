//! Tables for people: columns side by side, without lines.

use comfy_table::{CellAlignment, Table, presets};

/// A table without rows. `numbers` are the columns, counted from 0, that hold numbers: they end on one line.
pub fn with_header<const N: usize>(header: [&str; N], numbers: impl IntoIterator<Item = usize>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    for number in numbers {
        let column = table.column_mut(number).expect("a table has all the columns of its header");
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
