#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remanent_fuzz::imports::import(data));
