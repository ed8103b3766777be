//! The command as a user runs it: one binary of tests over the built program.

mod bench;
mod command;
mod damaged;
mod follow;
mod history;
mod inspect;
mod replay;
mod salvage;
mod torture;
mod usage;
mod weights;
