//! The model that `loaf` runs when no file is named: `artifacts/default.loaf`, compiled in.
//!
//! It is replayed where the program was mapped; nothing is unpacked.

/// Places bytes on a page, as a file's mapping would.
#[repr(C, align(16384))]
#[cfg_attr(not(feature = "default-model"), allow(dead_code))]
struct Paged<T: ?Sized>(T);

/// The built-in loaf, in builds that have one.
#[cfg(feature = "default-model")]
pub const LOAF: Option<&[u8]> = {
    static BYTES: &Paged<[u8]> = &Paged(*include_bytes!("../../../artifacts/default.loaf"));
    Some(&BYTES.0)
};

/// The built-in loaf, in builds that have one.
#[cfg(not(feature = "default-model"))]
pub const LOAF: Option<&[u8]> = None;

#[cfg(all(test, feature = "default-model"))]
mod tests {
    use loaf_runtime::threads::threads_for;

    #[test]
    fn the_built_in_model_is_worth_one_thread() {
        let loaf = super::LOAF.expect("a built-in model");
        let model = loaf_runtime::Model::from_static(loaf).expect("it opens");
        assert_eq!(threads_for(model.plan()), 1);
    }
}
