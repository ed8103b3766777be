//! Access to earlier states of a store: views, restores, forks, audits and blame.

pub(crate) mod audit;
pub(crate) mod blame;
pub(crate) mod copier;
pub(crate) mod fork;
pub(crate) mod point;
pub(crate) mod restore;
pub(crate) mod seed;
pub(crate) mod state;
pub(crate) mod view;
pub(crate) mod windows;

pub use remanent_format::state::bisection::{BisectVerdict, Bisection};
pub use remanent_format::state::blame::{ChangeCause, ValueChange};
pub use remanent_format::{Incarnation, LogPoint};

pub use self::audit::{Audit, ChangedPage};
pub use self::copier::DeviceCopier;
#[doc(hidden)]
pub use self::seed::InitialState;
pub use self::view::KeptStates;
