//! Tests of push and restore with directories that the engine writes and opens.

mod bed;
mod lives;
mod kills;
mod successors;
mod damage;
