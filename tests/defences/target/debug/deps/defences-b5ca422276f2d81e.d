/work/main/tests/defences/target/debug/deps/defences-b5ca422276f2d81e.d: /work/main/clippy.toml src/main.rs src/list/mod.rs src/list/durable.rs src/list/log.rs src/list/open.rs src/list/recovery.rs src/list/salvage.rs src/list/structures.rs src/run.rs src/tree.rs Cargo.toml

/work/main/tests/defences/target/debug/deps/libdefences-b5ca422276f2d81e.rmeta: /work/main/clippy.toml src/main.rs src/list/mod.rs src/list/durable.rs src/list/log.rs src/list/open.rs src/list/recovery.rs src/list/salvage.rs src/list/structures.rs src/run.rs src/tree.rs Cargo.toml

/work/main/clippy.toml:
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
Cargo.toml:

# env-dep:CARGO_MANIFEST_DIR=/work/main/tests/defences
# env-dep:CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
# env-dep:CLIPPY_CONF_DIR
