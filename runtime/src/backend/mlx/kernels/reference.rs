//! The definition of each kernel in operations of MLX.
//!
//! With these in the place of kernels a plan is lowered with the same chains on MLX's CPU device,
//! so that the choice of chains and the views they hand over are tested without a GPU; on a GPU
//! each kernel is held to its reference. Sizes that a kernel refuses, its reference is not asked
//! for. Everything is computed in f32 and rounded once, at the end.

use super::super::array::{Array, Result, Type};
use super::super::ops::{Mlx, Packing};
use super::operands::{Act, Attend, Heads, Place, Prepare, Shared, strange};

/// A view's elements in f32, `[rows, heads, dim]`, each by its own index.
fn view(m: &Mlx, p: &Place) -> Result<Array> {
    let at = |e: i32| (p.at + e / p.dim * p.stride + e % p.dim) as u32;
    let places: Vec<u32> = (0..p.heads * p.dim).map(at).collect();
    let columns = m.transpose(&m.reshape(&p.array, &[-1, p.width])?, &[1, 0])?;
    let taken = m.take(&columns, &Array::from_slice(&places, &[places.len() as i32]))?;
    let rows = m.astype(&m.transpose(&taken, &[1, 0])?, Type::F32)?;
    m.reshape(&rows, &[-1, p.heads, p.dim])
}

fn flat(m: &Mlx, p: &Place) -> Result<Array> {
    m.reshape(&view(m, p)?, &[-1, p.heads * p.dim])
}

/// Sums over the last axis, which stays.
fn total(m: &Mlx, a: &Array) -> Result<Array> {
    let mut shape = a.shape();
    *shape.last_mut().ok_or_else(strange)? = 1;
    m.reshape(&m.sum(a, -1)?, &shape)
}

/// `x * scale / sqrt(sum of squares / by + eps)`, over the last axis.
fn scaled(m: &Mlx, x: &Array, by: f32, eps: f32, scale: f32) -> Result<Array> {
    let mean = m.mul(&total(m, &m.square(x)?)?, &Array::scalar(1.0 / by))?;
    let inverse = m.rsqrt(&m.add(&mean, &Array::scalar(eps))?)?;
    m.mul(&m.mul(x, &inverse)?, &Array::scalar(scale))
}

fn norm(m: &Mlx, x: &Array, weight: &Array, eps: f32) -> Result<Array> {
    m.mul(&scaled(m, x, weight.size() as f32, eps, 1.0)?, &m.astype(weight, Type::F32)?)
}

fn silu(m: &Mlx, x: &Array) -> Result<Array> {
    m.mul(x, &m.sigmoid(x)?)
}

pub fn embed(m: &Mlx, ids: &Array, parts: [&Array; 3], p: Packing, kind: Type) -> Result<Array> {
    let [codes, scales, biases] = parts.map(|part| m.take(part, ids));
    let wide = |a: Array| m.astype(&a, Type::F32);
    let (scales, biases) = (wide(scales?)?, wide(biases?)?);
    m.astype(&m.dequantize(&codes?, &scales, Some(&biases), p, Type::F32)?, kind)
}

pub fn add_norm(m: &Mlx, a: &Array, b: &Array, w: &Array, eps: f32, kind: Type) -> Result<[Array; 2]> {
    let wide = |x: &Array| m.astype(&m.reshape(x, &[-1, w.size() as i32])?, Type::F32);
    let sum = m.astype(&m.add(&wide(a)?, &wide(b)?)?, kind)?;
    let y = m.astype(&norm(m, &wide(&sum)?, w, eps)?, kind)?;
    Ok([sum, y])
}

pub fn gate(m: &Mlx, a: &Place, b: &Place, act: Act, kind: Type) -> Result<Array> {
    let open = flat(m, a)?;
    let open = if act == Act::Silu { silu(m, &open)? } else { m.sigmoid(&open)? };
    m.astype(&m.mul(&open, &flat(m, b)?)?, kind)
}

pub fn norm_gate(m: &Mlx, a: &Place, b: &Place, weight: &Array, eps: f32, kind: Type) -> Result<Array> {
    let n = a.heads * a.dim;
    let heads = m.reshape(&flat(m, b)?, &[-1, n / weight.size() as i32, weight.size() as i32])?;
    let normed = m.reshape(&norm(m, &heads, weight, eps)?, &[-1, n])?;
    m.astype(&m.mul(&silu(m, &flat(m, a)?)?, &normed)?, kind)
}

pub fn top_k(m: &Mlx, scores: &Place, k: i32, renorm: bool) -> Result<[Array; 2]> {
    let p = m.softmax(&flat(m, scores)?)?;
    let ids = m.slice(&m.argsort(&m.neg(&p)?)?, 1, 0, k)?;
    let weights = m.take_along(&p, &ids)?;
    let weights = if renorm { m.div(&weights, &total(m, &weights)?)? } else { weights };
    Ok([m.astype(&ids, Type::U32)?, weights])
}

pub fn mix(m: &Mlx, slots: &Array, weights: &Array, shared: Option<&Shared>, kind: Type) -> Result<Array> {
    let [rows, k, dim] = slots.shape()[..] else { return Err(strange()) };
    let weights = m.reshape(&m.astype(weights, Type::F32)?, &[rows, k, 1])?;
    let mut sum = m.sum(&m.mul(&m.astype(slots, Type::F32)?, &weights)?, 1)?;
    if let Some(s) = shared {
        let row = m.reshape(&m.astype(&s.array, Type::F32)?, &[rows, dim])?;
        sum = m.add(&sum, &m.mul(&row, &m.sigmoid(&flat(m, &s.open)?)?)?)?;
    }
    m.astype(&sum, kind)
}

pub fn pick(m: &Mlx, logits: &Array, known: i32) -> Result<(Array, Array)> {
    let token = m.argmax(&m.slice(logits, 0, 0, known)?)?;
    let log_prob = m.sub(&m.take(logits, &token)?, &m.log_sum_exp(logits)?)?;
    Ok((token, log_prob))
}

/// Norm and rotation of heads `[rows, heads, dim]`.
fn turned(m: &Mlx, x: Array, of: Option<(&Array, f32)>, (table, half): (&Array, i32)) -> Result<Array> {
    let x = of.map_or(Ok(x.clone()), |(w, eps)| norm(m, &x, w, eps))?;
    let dim = x.shape()[2];
    let table = m.reshape(table, &[-1, 1, 2 * half])?;
    let part = |a: &Array, from, to| m.slice(a, 2, from, to);
    let (cos, sin) = (part(&table, 0, half)?, part(&table, half, 2 * half)?);
    let (a, b) = (part(&x, 0, half)?, part(&x, half, 2 * half)?);
    let first = m.sub(&m.mul(&a, &cos)?, &m.mul(&b, &sin)?)?;
    let second = m.add(&m.mul(&b, &cos)?, &m.mul(&a, &sin)?)?;
    let rest = (2 * half < dim).then(|| part(&x, 2 * half, dim)).transpose()?;
    m.concat(&[&first, &second].into_iter().chain(&rest).collect::<Vec<_>>(), 2)
}

/// Queries, and the caches with the new rows.
pub fn heads(m: &Mlx, h: &Heads<'_>, kind: Type) -> Result<[Array; 3]> {
    let [q, k, v] = h.parts.map(|p| view(m, p));
    let norms = h.norms.map_or([None; 2], |n| n.map(Some));
    let q = m.astype(&turned(m, q?, norms[0], h.table)?, kind)?;
    let write = |cache: &Array, rows: &Array| {
        let rows = m.transpose(rows, &[1, 0, 2])?;
        m.write_at(cache, &m.astype_like(&rows, cache)?, h.pos, 1)
    };
    let keys = write(h.caches[0], &turned(m, k?, norms[1], h.table)?)?;
    Ok([q, keys, write(h.caches[1], &v?)?])
}

pub fn attend(m: &Mlx, a: &Attend<'_>, kind: Type) -> Result<Array> {
    let ([heads, dim], [kv_heads, capacity, _]) = (&a.q.shape()[..], &a.caches[0].shape()[..]) else {
        return Err(strange());
    };
    let wide = |x: &Array| m.astype(x, Type::F32);
    let q = m.mul(&wide(a.q)?, &Array::scalar(a.scale))?;
    let q = m.reshape(&q, &[*kv_heads, heads / kv_heads, *dim])?;
    let scores = m.matmul(&q, &m.transpose(&wide(a.caches[0])?, &[0, 2, 1])?)?;
    let place = m.arange(*capacity)?;
    let mut seen = m.less_equal(&place, a.last)?;
    if a.window > 0 {
        seen = m.and(&seen, &m.greater(&place, &m.sub(a.last, &Array::int(a.window))?)?)?;
    }
    let p = m.softmax(&m.select(&seen, &scores, &Array::scalar(f32::NEG_INFINITY))?)?;
    let y = m.matmul(&p, &wide(a.caches[1])?)?;
    m.astype(&m.reshape(&y, &[*heads, *dim])?, kind)
}

pub fn conv(m: &Mlx, a: &Place, taps: &Array, before: &Array, valid: &Array, with_silu: bool) -> Result<[Array; 2]> {
    let (x, kernel) = (flat(m, a)?, taps.shape()[0]);
    let [rows, channels] = x.shape()[..] else { return Err(strange()) };
    let past = m.concat(&[&m.reshape(before, &[kernel - 1, channels])?, &x], 0)?;
    let mut y = m.zeros(&[rows, channels], Type::F32)?;
    for t in 0..kernel {
        y = m.add(&y, &m.mul(&m.slice(&past, 0, t, t + rows)?, &m.slice(taps, 0, t, t + 1)?)?)?;
    }
    let y = if with_silu { silu(m, &y)? } else { y };
    let after = m.slice_at(&past, valid, 0, kernel - 1)?;
    Ok([y, m.reshape(&after, &[kernel - 1, 1, channels])?])
}

pub fn delta_prepare(m: &Mlx, p: &Prepare<'_>) -> Result<[Array; 4]> {
    let [q, k] = p.keys.map(|(place, eps, scale)| scaled(m, &view(m, place)?, 1.0, eps, scale));
    let input = m.add(&flat(m, p.gates[0])?, p.vectors[1])?;
    let soft = m.select(&m.greater(&input, &Array::scalar(20.0))?, &input, &m.log1p(&m.exp(&input)?)?)?;
    let log_decay = m.neg(&m.mul(&m.exp(p.vectors[0])?, &soft)?)?;
    Ok([q?, k?, log_decay, m.sigmoid(&flat(m, p.gates[1])?)?])
}
