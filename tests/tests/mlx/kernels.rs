//! Each kernel of ours against its definition in operations, on a GPU, with sizes that fill no
//! block and no warp. And the attention of many rows in halves, which is MLX's own, against the
//! same in f32.

use loaf_runtime::backend::mlx::array::{Array, Type};
use loaf_runtime::backend::mlx::kernels::{Act, Attend, Heads, Kernels, Place, Prepare, Shared};
use loaf_runtime::backend::mlx::ops::{Mlx, Packing};

use super::{host, max_diff, numbers, open};

fn half(m: &Mlx, seed: u64, shape: &[i32]) -> Array {
    let n = shape.iter().product::<i32>() as usize;
    m.astype(&Array::from_slice(&numbers(seed, n), shape), Type::F16).expect("a conversion")
}

fn real(seed: u64, shape: &[i32]) -> Array {
    Array::from_slice(&numbers(seed, shape.iter().product::<i32>() as usize), shape)
}

/// `rows` of `width`, of which the view takes `heads` times `dim`.
fn place(m: &Mlx, seed: u64, rows: i32, [width, at, heads, dim, stride]: [i32; 5]) -> Place {
    Place { array: half(m, seed, &[rows, width]), width, at, heads, dim, stride }
}

fn floats(m: &Mlx, a: &Array) -> Vec<f32> {
    host(m, &m.astype(a, Type::F32).expect("a conversion"))
}

/// Of the largest number wanted.
fn distance(m: &Mlx, got: &Array, want: &Array) -> f32 {
    let (got, want) = (floats(m, got), floats(m, want));
    let scale = want.iter().fold(1.0f32, |s, x| s.max(x.abs()));
    if got.iter().chain(&want).any(|x| !x.is_finite()) { f32::INFINITY } else { max_diff(&got, &want) / scale }
}

#[test]
fn kernels_compute_what_their_definitions_say() {
    let (m, device) = open();
    let (mut ours, reference) = (Kernels::new(device).expect("kernels"), Kernels::reference(device));
    if !ours.exist() {
        println!("SKIPPED: MLX's CPU device runs no kernels; only that the definitions take these operands is tested");
        ours = Kernels::reference(device);
    }
    let mut far: Vec<String> = Vec::new();
    let f16 = Type::F16;
    // Runs both; all results in the order of the kernel's.
    let mut same = |name: &str, run: &dyn Fn(&Kernels) -> Vec<Array>| {
        for (i, (got, want)) in run(&ours).iter().zip(&run(&reference)).enumerate() {
            let d = distance(&m, got, want);
            if d > 2e-3 {
                far.push(format!("{name}, result {i}: {d}"));
            }
        }
    };

    let codes: Vec<u32> = numbers(1, 7 * 12).iter().map(|x| x.to_bits().wrapping_mul(0x9e37_79b9)).collect();
    let (codes, ids) = (Array::from_slice(&codes, &[7, 12]), Array::from_slice(&[6u32, 0, 3, 3, 5], &[5]));
    let (scales, biases) = (half(&m, 2, &[7, 3]), half(&m, 3, &[7, 3]));
    let packing = Packing { mode: c"affine", bits: 4, group: 32 };
    same("embed", &|k| vec![k.embed(&m, &ids, [&codes, &scales, &biases], packing, f16).unwrap().unwrap()]);

    let (a, b, w) = (half(&m, 4, &[3, 300]), half(&m, 5, &[3, 300]), half(&m, 6, &[300]));
    same("add_norm", &|k| k.add_norm(&m, &a, &b, &w, 1e-6, f16).unwrap().unwrap().into());

    let (a, b) = (place(&m, 7, 5, [40, 2, 3, 12, 13]), place(&m, 8, 5, [36, 0, 3, 12, 12]));
    same("gate", &|k| vec![k.gate(&m, &a, &b, Act::Sigmoid, 5, f16).unwrap().unwrap()]);
    let w = half(&m, 9, &[12]);
    same("norm_gate", &|k| vec![k.norm_gate(&m, &a, &b, &w, 1e-6, 5, f16).unwrap().unwrap()]);

    let scores = place(&m, 10, 3, [41, 4, 1, 37, 37]);
    same("top_k", &|k| k.top_k(&m, &scores, 5, true, 3).unwrap().unwrap().into());

    let (slots, weights) = (half(&m, 11, &[3, 5, 50]), real(12, &[3, 5]));
    let shared = Shared { array: half(&m, 13, &[3, 50]), open: place(&m, 14, 3, [9, 8, 1, 1, 1]) };
    same("mix", &|k| vec![k.mix(&m, &slots, &weights, Some(&shared), f16).unwrap().unwrap()]);

    let logits = real(15, &[1003]);
    same("pick", &|k| k.pick(&m, &logits, 990).unwrap().map(|(a, b)| vec![a, b]).unwrap());

    // Queries with gates between them, a part of each head rotated.
    let rows = 40;
    let qkv = half(&m, 16, &[rows, 192]);
    let at = |at, heads, stride| Place { array: qkv.clone(), width: 192, at, heads, dim: 16, stride };
    let (q, k, v) = (at(0, 4, 32), at(128, 2, 16), at(160, 2, 16));
    let (table, norm) = (real(17, &[rows, 4]), half(&m, 18, &[16]));
    let pos = Array::from_slice(&[7i32], &[1]);
    same("heads", &|kernels| {
        // Kernels write into the caches they are given.
        let caches = [19, 20].map(|seed| half(&m, seed, &[2, 64, 16]));
        m.eval(&caches).unwrap();
        let norms = Some([(&norm, 1e-6), (&norm, 1e-5)]);
        let parts = [&q, &k, &v];
        let heads = Heads { rows, parts, norms, table: (&table, 2), caches: [&caches[0], &caches[1]], pos: &pos };
        let made = kernels.heads(&m, &heads, f16).unwrap().unwrap();
        m.eval(&made).unwrap();
        made.into()
    });

    // Caches so long that two blocks share them.
    let (q, caches) = (half(&m, 21, &[4, 64]), [22, 23].map(|seed| half(&m, seed, &[2, 600, 64])));
    let last = Array::from_slice(&[598i32], &[1]);
    let attend = Attend { q: &q, caches: [&caches[0], &caches[1]], last: &last, scale: 0.4, window: 0 };
    same("attend", &|k| vec![k.attend(&m, &attend, f16).unwrap().unwrap()]);

    let (x, taps, before) = (place(&m, 24, rows, [50, 3, 3, 10, 14]), real(25, &[4, 30]), real(26, &[3, 1, 30]));
    let valid = Array::from_slice(&[37i32], &[1]);
    same("conv", &|k| k.conv(&m, &x, &taps, &before, &valid, rows, true).unwrap().unwrap().into());

    let (q, k) = (place(&m, 27, rows, [32, 0, 2, 16, 16]), place(&m, 28, rows, [70, 5, 2, 16, 32]));
    let gates = [place(&m, 29, rows, [12, 0, 3, 2, 4]), place(&m, 30, rows, [12, 2, 3, 2, 4])];
    let vectors = [real(31, &[6]), real(32, &[6])];
    let keys = [(&q, 1e-6, 0.25), (&k, 1e-6, 1.0)];
    let [a, b] = &gates;
    let prepare = Prepare { rows, keys, gates: [a, b], vectors: [&vectors[0], &vectors[1]] };
    same("delta_prepare", &|k| k.delta_prepare(&m, &prepare).unwrap().unwrap().into());
    assert!(far.is_empty(), "{far:#?}");
}

#[test]
fn attention_of_many_rows_is_near_in_halves() {
    let (m, device) = open();
    let (heads, kv_heads, rows, positions, dim) = (4, 2, 64, 256, 16);
    let q = half(&m, 1, &[rows, heads, dim]);
    let [k, v] = [2, 3].map(|seed| half(&m, seed, &[1, kv_heads, positions, dim]));
    let open = |x: i32| if x % positions <= 5 + x / positions { 0.0 } else { f32::NEG_INFINITY };
    let mask: Vec<f32> = (0..rows * positions).map(open).collect();
    let mask = Array::from_slice(&mask, &[rows, positions]);
    let turned = m.reshape(&m.transpose(&q, &[1, 0, 2]).unwrap(), &[1, heads, rows, dim]).unwrap();
    let wide = |a: &Array| m.astype(a, Type::F32).unwrap();
    let want = m.attention(&wide(&turned), &wide(&k), &wide(&v), 0.25, &mask).expect("a graph");
    let mask = m.astype(&mask, Type::F16).unwrap();
    let per_head = m.contiguous(&m.broadcast(&mask, &[1, heads, rows, positions]).unwrap()).unwrap();
    let in_order = m.contiguous(&turned).unwrap();
    let far = |q: &Array, mask: &Array| distance(&m, &m.attention(q, &k, &v, 0.25, mask).expect("a graph"), &want);
    let cases = [(&in_order, &per_head), (&turned, &per_head), (&in_order, &mask), (&turned, &mask)];
    let all = cases.map(|(q, mask)| far(q, mask));
    // What lowering does on CUDA is the first; the rest tells what MLX gets wrong, if it does.
    let [used, by_row, one_mask, both] = all;
    println!("{device:?}: {used}; queries by row {by_row}, one mask {one_mask}, both {both}");
    assert!(used < 4e-3, "{all:?}");
}
