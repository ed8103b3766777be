/work/main/tests/defences/target/debug/deps/defences-a2d036794e917466.d: src/main.rs src/list/mod.rs src/list/durable.rs src/list/log.rs src/list/open.rs src/list/recovery.rs src/list/salvage.rs src/list/structures.rs src/run.rs src/tree.rs

/work/main/tests/defences/target/debug/deps/defences-a2d036794e917466: src/main.rs src/list/mod.rs src/list/durable.rs src/list/log.rs src/list/open.rs src/list/recovery.rs src/list/salvage.rs src/list/structures.rs src/run.rs src/tree.rs

src/main.rs:
src/list/mod.rs:
src/list/durable.rs:
src/list/log.rs:
src/list/open.rs:
src/list/recovery.rs:
src/list/salvage.rs:
src/list/structures.rs:
src/run.rs:
src/tree.rs:

# env-dep:CARGO_MANIFEST_DIR=/work/main/tests/defences
