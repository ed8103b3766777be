//! Agents that transfer pages of stores by NIXL: on the simulated library, and on the real one between two processes if
//! it is installed.

mod failures;
mod ground;
mod loading;
mod pages;
mod real;
mod transfers;
