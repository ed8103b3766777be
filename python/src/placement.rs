//! Moving pages to a place.

use pyo3::prelude::*;
use remanent::{PageId, Position, Result, Store};

use crate::gate::Gate;
use crate::page_name::{found, page_names};

/// Moves pages by calling `run`. Returns the Lsn of the batch that moved them, or `None` if no batch was
/// needed.
pub fn move_pages(
    gate: &Gate,
    pages: &Bound<'_, PyAny>,
    run: impl FnOnce(&Store, &[PageId]) -> Result<Option<Position>> + Send,
) -> PyResult<Option<u64>> {
    let names = page_names(pages)?;
    let moved = gate.call(pages.py(), |store| run(store, &found(store, &names)?))?;
    Ok(moved.map(|position| position.lsn.0))
}
