//! Start points of walks that did not reach the end of the log.
//!
//! All walks to the end of the log read the same last frames. If a walk fails, its start point is recorded, so that the
//! walk from an older snapshot can stop there and need not read up to the same damage again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::defect::Damage;
use crate::ids::LogPoint;

/// Start points of failed walks, each with the damage that the walk found. A walk that starts earlier in the log and
/// reaches one of these points fails in the same way, because it has read at least the same durable marks.
#[derive(Clone, Debug, Default)]
pub(super) struct FailedStarts(Arc<Mutex<HashMap<LogPoint, Damage>>>);

impl FailedStarts {
    /// Records that the walk from the point `from` found `damage`. Damage from failed reads is not recorded, because a
    /// later attempt may succeed.
    pub fn note(&self, from: LogPoint, damage: &Damage) {
        if !damage.defect.is_unreadable() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(from, damage.clone());
        }
    }

    /// Returns a copy of the recorded points and their damage.
    pub fn known(&self) -> HashMap<LogPoint, Damage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
