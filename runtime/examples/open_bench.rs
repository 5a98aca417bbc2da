//! How long opening a loaf takes, warm:
//! `cargo run --release -p loaf-runtime --example open_bench -- model.loaf`.

use std::path::PathBuf;
use std::time::Instant;

use loaf_runtime::Model;

fn main() {
    let path = PathBuf::from(std::env::args_os().nth(1).expect("the path of a loaf"));
    let mut times: Vec<f64> = (0..101)
        .map(|_| {
            let begun = Instant::now();
            let loaf = Model::open(&path).expect("a loaf");
            let tokenizer = loaf.tokenizer().expect("tables");
            std::hint::black_box(&tokenizer);
            begun.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!(
        "open: best {:.2} ms, median {:.2} ms, worst {:.2} ms of {}",
        times[0],
        times[50],
        times[100],
        times.len()
    );
}
