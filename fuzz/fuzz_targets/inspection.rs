#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remanent_fuzz::inspections::inspection(data));
