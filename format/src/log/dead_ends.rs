//! Points from which a walk did not come to the log's end.
//!
//! All snapshots after which the log goes on share its end. Without this memory, damage there would be walked
//! to once from each of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::defect::Damage;
use crate::ids::LogPoint;

/// The points, each with the damage that every walk meets which comes by there. A walk that comes from
/// further back knows the same marks or more, so it ends no better.
#[derive(Clone, Debug, Default)]
pub(super) struct DeadEnds(Arc<Mutex<HashMap<LogPoint, Damage>>>);

impl DeadEnds {
    /// Notes that a walk which began at `from` met this damage. Bytes that could not be read, for want of
    /// memory or by an error of the medium, may be read the next time.
    pub fn note(&self, from: LogPoint, damage: &Damage) {
        if !damage.defect.is_unreadable() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(from, damage.clone());
        }
    }

    /// All that are known by now.
    pub fn known(&self) -> HashMap<LogPoint, Damage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
