//! Tests pushes and restores of directories that the engine writes and opens.

mod bed;
mod lives;
#[path = "../../../tests/it/size.rs"]
mod size;
mod names;
mod on_demand;
mod kills;
mod successors;
mod uploads;
mod damage;
mod views;
