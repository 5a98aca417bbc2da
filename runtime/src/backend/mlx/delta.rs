//! The gated delta rule: one row at a time, and many at once.
//!
//! Per value head, with state `S[k_dim, v_dim]`, log-decay `g` and strength `beta`:
//! `S = exp(g) S; d = beta (v - S^T k); S = S + k d^T; o = S^T q`. [`step`] is that. [`chunked`]
//! rewrites `CHUNK` rows of it into matrix products: with `b` the running sum of `g` within a chunk
//! and `D[i, j] = exp(b_i - b_j)` for `j <= i`, else 0,
//!
//! ```text
//! A  = strictly lower part of (beta K K^T) * D          T  = (I + A)^-1
//! V' = T (beta V) - T (beta exp(b) K) S                 O  = (exp(b) Q) S + ((Q K^T) * D) V'
//! S' = exp(b_last) S + (exp(b_last - b) K)^T V'
//! ```
//!
//! Everything but the two lines with `S` is computed for all chunks at once; `S` goes through the
//! chunks in order. Rows past the valid ones get `g = 0` and `beta = 0`, which leaves `S` as it is.
//!
//! `T` is built by doubling blocks: the inverse of `[[X, 0], [Y, Z]]` is
//! `[[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]`. Powers of `A` (which would be fewer products) overflow
//! f32's precision when keys repeat.
//!
//! All of it is f32. This file knows arrays, no plan.

use super::array::{Array, Result};
use super::ops::Mlx;

/// Rows that are taken together.
pub const CHUNK: i32 = 64;

/// Operands of the rule. `q`, `k` are `[rows, k_heads, k_dim]`, `v` is `[rows, v_heads, v_dim]`,
/// `log_decay` and `beta` are `[rows, v_heads]`, the state `[v_heads, k_dim, v_dim]`.
pub struct Scan {
    /// Queries.
    pub q: Array,
    /// Keys.
    pub k: Array,
    /// Values.
    pub v: Array,
    /// Logarithm of the decay.
    pub log_decay: Array,
    /// Strength of the update.
    pub beta: Array,
    /// State before.
    pub state: Array,
}

impl Scan {
    /// rows, k_heads, v_heads, k_dim, v_dim
    pub fn extents(&self) -> [i32; 5] {
        let (q, v) = (self.q.shape(), self.v.shape());
        [q[0], q[1], v[1], q[2], v[2]]
    }
}

/// `[rows, k_heads, dim]` as `[rows, v_heads, dim]`: head `h` is key head
/// `h / (v_heads / k_heads)`.
fn spread(m: &Mlx, a: &Array, [rows, k_heads, v_heads, dim]: [i32; 4]) -> Result<Array> {
    if k_heads == v_heads {
        return Ok(a.clone());
    }
    let each = v_heads / k_heads;
    let a = m.reshape(a, &[rows, k_heads, 1, dim])?;
    m.reshape(&m.broadcast(&a, &[rows, k_heads, each, dim])?, &[rows, v_heads, dim])
}

/// One row. Gives `[1, v_heads, v_dim]` and the state after.
pub fn step(m: &Mlx, s: &Scan) -> Result<(Array, Array)> {
    let [_, k_heads, v_heads, k_dim, v_dim] = s.extents();
    let key = |a: &Array| m.reshape(&spread(m, a, [1, k_heads, v_heads, k_dim])?, &[v_heads, k_dim, 1]);
    let (q, k) = (key(&s.q)?, key(&s.k)?);
    let scalar = |a: &Array| m.reshape(a, &[v_heads, 1, 1]);
    let decayed = m.mul(&s.state, &m.exp(&scalar(&s.log_decay)?)?)?;
    let recalled = m.sum(&m.mul(&decayed, &k)?, 1)?; // [v_heads, v_dim]
    let delta = m.sub(&m.reshape(&s.v, &[v_heads, v_dim])?, &recalled)?;
    let delta = m.mul(&m.reshape(&delta, &[v_heads, 1, v_dim])?, &scalar(&s.beta)?)?;
    let state = m.add(&decayed, &m.mul(&k, &delta)?)?;
    let out = m.sum(&m.mul(&state, &q)?, 1)?;
    Ok((m.reshape(&out, &[1, v_heads, v_dim])?, state))
}

/// Lower-triangular `[CHUNK, CHUNK]` of ones, with the diagonal or without.
fn lower(diagonal: bool) -> Array {
    let c = CHUNK;
    let at = |i: i32, j: i32| if j < i || (diagonal && i == j) { 1.0 } else { 0.0 };
    let data: Vec<f32> = (0..c * c).map(|x| at(x / c, x % c)).collect();
    Array::from_slice(&data, &[c, c])
}

/// `(I + a)^-1` for a batch of strictly lower triangular `a`.
fn unit_lower_inverse(m: &Mlx, a: &Array) -> Result<Array> {
    let c = CHUNK;
    let eye: Vec<f32> = (0..c * c).map(|x| if x / c == x % c { 1.0 } else { 0.0 }).collect();
    let mut inverse = Array::from_slice(&eye, &[c, c]);
    let mut block = 1;
    while block < c {
        // Of each pair of blocks on the diagonal, the one below it.
        let below = |i: i32, j: i32| (i / block) % 2 == 1 && j / block == i / block - 1;
        let mask: Vec<f32> = (0..c * c).map(|x| if below(x / c, x % c) { 1.0 } else { 0.0 }).collect();
        let y = m.mul(a, &Array::from_slice(&mask, &[c, c]))?;
        inverse = m.sub(&inverse, &if block == 1 { y } else { m.matmul(&m.matmul(&inverse, &y)?, &inverse)? })?;
        block *= 2;
    }
    Ok(inverse)
}

/// Any number of rows, of which the first `valid` (`i32[1]`) count. Gives `[rows, v_heads, v_dim]`
/// and the state after them.
pub fn chunked(m: &Mlx, s: &Scan, valid: &Array) -> Result<(Array, Array)> {
    let [rows, k_heads, v_heads, k_dim, v_dim] = s.extents();
    let c = CHUNK;
    let chunks = (rows + c - 1) / c;
    let padded = chunks * c;
    let mask = m.reshape(&m.less(&m.arange(rows)?, valid)?, &[rows, 1])?;
    let zero = Array::scalar(0.0);
    let (g, beta) = (m.select(&mask, &s.log_decay, &zero)?, m.select(&mask, &s.beta, &zero)?);
    // [rows, heads, d] as [chunks, heads, c, d].
    let cut = |a: &Array, d: i32| {
        let a = m.reshape(a, &[rows, v_heads, d])?;
        let a = if padded == rows {
            a
        } else {
            m.concat(&[&a, &m.zeros(&[padded - rows, v_heads, d], super::array::Type::F32)?], 0)?
        };
        m.transpose(&m.reshape(&a, &[chunks, c, v_heads, d])?, &[0, 2, 1, 3])
    };
    let heads = [rows, k_heads, v_heads, k_dim];
    let (q, k) = (cut(&spread(m, &s.q, heads)?, k_dim)?, cut(&spread(m, &s.k, heads)?, k_dim)?);
    let v = cut(&s.v, v_dim)?;
    let (g, beta) = (cut(&g, 1)?, cut(&beta, 1)?); // [chunks, heads, c, 1]
    let swap = |a: &Array| m.transpose(a, &[0, 1, 3, 2]);

    let b = m.cumsum(&g, 2)?;
    let difference = m.sub(&b, &swap(&b)?)?; // [.., i, j]
    // Masked before `exp`, which would overflow above the diagonal.
    let with_diagonal = lower(true);
    let decay = m.mul(&m.exp(&m.mul(&difference, &with_diagonal)?)?, &with_diagonal)?;
    let k_t = swap(&k)?;
    let scaled_k = m.mul(&beta, &k)?;
    let a = m.mul(&m.mul(&m.matmul(&scaled_k, &k_t)?, &decay)?, &lower(false))?;
    let t = unit_lower_inverse(m, &a)?;
    let growth = m.exp(&b)?;
    let u = m.matmul(&t, &m.mul(&beta, &v)?)?;
    let w = m.matmul(&t, &m.mul(&scaled_k, &growth)?)?;
    let local = m.mul(&m.matmul(&q, &k_t)?, &decay)?;
    let grown_q = m.mul(&q, &growth)?;
    let last = m.slice(&b, 2, c - 1, c)?; // [chunks, heads, 1, 1]
    let keys = swap(&m.mul(&k, &m.exp(&m.sub(&last, &b)?)?)?)?;
    let kept = m.exp(&last)?;

    let mut state = m.reshape(&s.state, &[1, v_heads, k_dim, v_dim])?;
    let mut outs = Vec::with_capacity(chunks as usize);
    for i in 0..chunks {
        let of = |a: &Array| m.slice(a, 0, i, i + 1);
        let values = m.sub(&of(&u)?, &m.matmul(&of(&w)?, &state)?)?;
        outs.push(m.add(&m.matmul(&of(&grown_q)?, &state)?, &m.matmul(&of(&local)?, &values)?)?);
        state = m.add(&m.mul(&of(&kept)?, &state)?, &m.matmul(&of(&keys)?, &values)?)?;
    }
    let out = m.concat(&outs.iter().collect::<Vec<_>>(), 0)?;
    let out = m.reshape(&m.transpose(&out, &[0, 2, 1, 3])?, &[padded, v_heads, v_dim])?;
    Ok((m.slice(&out, 0, 0, rows)?, m.reshape(&state, &[v_heads, k_dim, v_dim])?))
}
