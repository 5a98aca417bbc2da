//! Any bytes as the header of a checkpoint's weight file: refused, or entries that lie in order within the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use loaf_bake::checkpoint::parse_header;

fuzz_target!(|bytes: &[u8]| {
    let Ok(entries) = parse_header(bytes) else { return };
    for entry in entries {
        assert!(entry.begin <= entry.end && entry.end <= bytes.len() as u64);
    }
});
