//! Tests of the host memory that a store allocates. They are in a separate binary, because its allocator
//! counts.

#[macro_use]
#[path = "../it/forward.rs"]
mod forward;
mod allocator;
mod long_form;
mod long_pages;
mod new_pages;
mod refusals;
#[path = "../it/size.rs"]
mod size;
