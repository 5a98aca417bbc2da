//! What is linked otherwise: where MLX's library lies is said to the program that is linked with it
//! (see `runtime/build.rs`), and the small program has no table for unwinding.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=LOAF_MLX_RPATH");
    if let (Some(_), Ok(folder)) = (std::env::var_os("CARGO_FEATURE_MLX"), std::env::var("LOAF_MLX_RPATH")) {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
    let has = |name: &str, what: &str| std::env::var(name).is_ok_and(|v| v.contains(what));
    // As `make small` builds it: nothing is unwound where a panic ends the process; 25 KB.
    if has("CARGO_ENCODED_RUSTFLAGS", "force-unwind-tables=no") && has("CARGO_CFG_TARGET_OS", "linux") {
        println!("cargo:rustc-link-arg-bin=loaf-small=-Wl,--no-eh-frame-hdr");
    }
}
