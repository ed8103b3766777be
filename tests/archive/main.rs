//! Tests of stores that are archived while they are open.

mod bed;
mod followers;
mod kills;
mod lives;
mod lost_buckets;
mod names;
mod on_demand;
mod refusals;
#[path = "../it/size.rs"]
mod size;
mod views;
