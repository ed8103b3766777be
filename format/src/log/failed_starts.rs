//! Points from which a walk failed to reach the end of the log.
//!
//! All snapshots after which the log continues share its end. Without this record, each of them would cause
//! one walk to the same damage.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::defect::Damage;
use crate::ids::LogPoint;

/// Start points of failed walks, each with the damage that any walk through this point will meet. A walk that
/// starts earlier knows at least the same marks, so it cannot succeed either.
#[derive(Clone, Debug, Default)]
pub(super) struct FailedStarts(Arc<Mutex<HashMap<LogPoint, Damage>>>);

impl FailedStarts {
    /// Records that a walk from `from` met `damage`. Unreadable bytes are not recorded: a later attempt may
    /// succeed.
    pub fn note(&self, from: LogPoint, damage: &Damage) {
        if !damage.defect.is_unreadable() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(from, damage.clone());
        }
    }

    /// Returns all points recorded so far.
    pub fn known(&self) -> HashMap<LogPoint, Damage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
