#!/usr/bin/env bash
# object_store 0.14.2 with the features aws-base, reqwest and ring, which its documentation lists as separate parts: it does
# not compile.
#
# Seen: nine errors such as "no method named `tls_certs_merge` found for struct `ClientBuilder`" (E0599). The feature `reqwest`
# enables reqwest without TLS, and the code for certificates is compiled in any case. The features `aws`, `gcp`, `azure` and
# `http` hide this, because they enable `reqwest/rustls`, and aws-lc-rs with it.
#
# What follows for a user who wants ring instead of aws-lc-rs: depend on reqwest 0.13 with `rustls-no-provider` and on rustls
# with `ring`, and install the provider before the first client. Without the provider, the first client panics.
#
# Needs Rust and a C compiler; a few minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/src"
cat >"$folder/Cargo.toml" <<'TOML'
[package]
name = "finding"
version = "0.0.0"
edition = "2024"

[dependencies]
object_store = { version = "=0.14.2", default-features = false, features = ["aws-base", "reqwest", "ring"] }
TOML
echo 'pub use object_store::aws::AmazonS3Builder;' >"$folder/src/lib.rs"
if CARGO_TARGET_DIR=$folder/target cargo check --quiet --manifest-path "$folder/Cargo.toml" >"$folder/log" 2>&1; then
    echo "changed: it compiles"
    exit 1
fi
grep -q 'error\[E0599\]: no method named `tls_certs_merge` found' "$folder/log" || { cat "$folder/log"; exit 1; }
echo "as stated: object_store 0.14.2, $(grep -c '^error\[' "$folder/log") errors"
