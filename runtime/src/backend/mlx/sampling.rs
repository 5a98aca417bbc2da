//! Choosing tokens on the device.
//!
//! The order of the filters is the CPU sampler's (penalties, temperature, top-k, top-p, min-p), and
//! so are their thresholds; sums and draws are MLX's. Greedy choices are those of the CPU wherever
//! the logits agree; a seed gives the same text on one device again, and another text than on the
//! CPU.
//!
//! It is one more compiled function: logits, key and counts in; token, its log-probability, key and
//! counts out.

use std::rc::Rc;

use super::array::{Array, Result, Type};
use super::compile::Compiled;
use super::lower::Lowering;
use super::ops::Mlx;
use crate::sample::SamplerOptions;

/// Tokens being chosen.
pub struct Sampling {
    choose: Compiled,
    /// The random key; then per token whether it was seen, and how often it was chosen (both
    /// `f32[known]`).
    state: Vec<Array>,
    /// Token `u32[1]` and log-probability `f32[1]` that were submitted and not read.
    pub waiting: Option<(Array, Array)>,
    /// The step that gave them has moved the state.
    pub ahead: bool,
    /// The token read last.
    pub read: u32,
}

impl Sampling {
    /// Among the first `known` tokens of `vocab`, after `prompt`.
    pub fn new(l: Rc<Lowering>, o: &SamplerOptions, known: u32, vocab: usize, prompt: &[u32]) -> Result<Sampling> {
        let mut seen = vec![0.0f32; known as usize];
        for &id in prompt {
            if let Some(seen) = seen.get_mut(id as usize) {
                *seen = 1.0;
            }
        }
        let shape = [known as i32];
        let state = vec![l.mlx.key(o.seed)?, Array::from_slice(&seen, &shape), l.mlx.zeros(&shape, Type::F32)?];
        let o = *o;
        let penalties = o.repetition_penalty != 1.0 || o.presence_penalty != 0.0 || o.frequency_penalty != 0.0;
        let choose = Compiled::new(move |inputs| {
            let m = &l.mlx;
            let known = known.min(vocab as u32) as i32;
            if o.temperature == 0.0
                && !penalties
                && let Some((token, log_prob)) = l.kernels.pick(m, &inputs[0], known)?
            {
                return Ok([token, log_prob].into_iter().chain(inputs[1..].iter().cloned()).collect());
            }
            let (key, next) = m.split_key(&inputs[1])?;
            let token = pick(m, &o, &m.slice(&inputs[0], 0, 0, known)?, &key, &inputs[2], &inputs[3])?;
            let chosen = m.astype(&m.equal(&m.arange(known)?, &m.astype(&token, Type::I32)?)?, Type::F32)?;
            let log_prob = m.sub(&m.take(&inputs[0], &token)?, &m.log_sum_exp(&inputs[0])?)?;
            Ok(vec![token, log_prob, next, m.maximum(&inputs[2], &chosen)?, m.add(&inputs[3], &chosen)?])
        })?;
        Ok(Sampling { choose, state, waiting: None, ahead: false, read: 0 })
    }

    /// Submits a choice by `logits`, `f32[vocab]`.
    pub fn choose(&mut self, logits: &Array) -> Result<(Array, Array)> {
        let mut inputs = vec![logits.clone()];
        inputs.append(&mut self.state);
        let mut out = self.choose.apply(inputs)?.into_iter();
        let (Some(token), Some(log_prob)) = (out.next(), out.next()) else {
            return Err(super::array::MlxError("a choice without a token".to_owned()));
        };
        self.state = out.collect();
        Ok((token, log_prob))
    }

    /// What is carried from token to token.
    pub fn state(&self) -> impl Iterator<Item = &Array> {
        self.state.iter()
    }
}

/// The token, `u32[1]`; `x` is `f32[known]`.
fn pick(m: &Mlx, o: &SamplerOptions, x: &Array, key: &Array, seen: &Array, chosen: &Array) -> Result<Array> {
    let zero = Array::scalar(0.0);
    let floor = Array::scalar(f32::NEG_INFINITY);
    // Comparisons with NaN are false.
    let mut x = m.select(&m.greater_equal(x, &floor)?, x, &floor)?;
    if o.repetition_penalty != 1.0 {
        let r = Array::scalar(o.repetition_penalty);
        let less = m.select(&m.greater(&x, &zero)?, &m.div(&x, &r)?, &m.mul(&x, &r)?)?;
        x = m.select(&m.greater(seen, &zero)?, &less, &x)?;
    }
    if o.presence_penalty != 0.0 || o.frequency_penalty != 0.0 {
        let each = m.mul(chosen, &Array::scalar(o.frequency_penalty))?;
        let all = m.add(&each, &Array::scalar(o.presence_penalty))?;
        x = m.sub(&x, &m.select(&m.greater(chosen, &zero)?, &all, &zero)?)?;
    }
    if o.temperature == 0.0 {
        return m.argmax(&x);
    }
    let x = m.div(&x, &Array::scalar(o.temperature))?;
    if o.top_k == 0 && o.top_p >= 1.0 && o.min_p == 0.0 {
        return m.reshape(&m.categorical(&x, key)?, &[1]);
    }
    let order = m.argsort(&m.neg(&x)?)?;
    let mut ranked = m.take(&x, &order)?;
    if o.top_k > 0 && (o.top_k as usize) < ranked.size() {
        ranked = m.slice(&ranked, 0, 0, o.top_k as i32)?;
    }
    let p = m.softmax(&ranked)?;
    let mut kept = m.less(&m.sub(&m.cumsum(&p, 0)?, &p)?, &Array::scalar(o.top_p))?;
    if o.min_p > 0.0 {
        let least = m.mul(&m.slice(&p, 0, 0, 1)?, &Array::scalar(o.min_p))?;
        kept = m.and(&kept, &m.greater_equal(&p, &least)?)?;
    }
    let rank = m.categorical(&m.select(&kept, &ranked, &floor)?, key)?;
    m.take(&order, &m.reshape(&rank, &[1])?)
}
