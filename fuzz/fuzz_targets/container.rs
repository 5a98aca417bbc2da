//! Any bytes as a container: refused or read, never a panic. What verifies entirely has tensors within its data.
#![no_main]

use libfuzzer_sys::fuzz_target;
use loaf_formats::container::Container;
use loaf_formats::program::Trailer;

fuzz_target!(|bytes: &[u8]| {
    let _ = Trailer::read(&mut std::io::Cursor::new(bytes));
    let Ok(container) = Container::open(bytes) else { return };
    let _ = container.verify_small();
    if container.verify_all(&mut |_| {}).is_ok() {
        for tensor in container.tensors().expect("verified") {
            let end = tensor.offset.checked_add(tensor.len).expect("verified");
            assert!(end <= container.data().len() as u64);
        }
    }
});
