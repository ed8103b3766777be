//! Agents that transfer pages of stores with NIXL: in one process with the simulated library, and between two processes
//! with the real library if it is installed.

mod failures;
mod ground;
mod loading;
mod pages;
mod real;
mod transfers;
