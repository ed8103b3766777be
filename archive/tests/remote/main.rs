//! Tests of buckets in object stores and local folders.

mod costs;
mod failures;
mod folders;
mod life;
mod secrets;
mod server;
mod writers;
