//! Says where MLX's library lies to what is linked with it: `make mlx` on Linux sets the variable,
//! nothing else does.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=LOAF_MLX_RPATH");
    if let (Some(_), Ok(folder)) = (std::env::var_os("CARGO_FEATURE_MLX"), std::env::var("LOAF_MLX_RPATH")) {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
