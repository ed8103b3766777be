//! Tests of buckets in object stores and in local folders.

mod costs;
mod failures;
mod folders;
mod life;
mod secrets;
mod server;
mod writers;
