//! Rotary position embedding: which frequencies a config asks for.
//!
//! Powers are taken by `libm`, the same on every system, since these bits are part of the artifact.

use crate::config::Config;
use crate::graph::WeightId;
use crate::model::{ConfigError, Decls};

/// Declares the table of inverse frequencies of a head of `head_dim`, of which
/// `partial_rotary_factor` rotates.
///
/// `theta_i = base^(-2i/d)` for `i < d/2`; scaling `llama3` (Llama 3.x), `linear` and `divisors` (a
/// divisor for each frequency, as GGUF files have them) are known, anything else is refused.
///
/// # Errors
/// A key that is absent, malformed or asks for an unknown scaling.
pub fn declare(d: &mut Decls, c: Config<'_>, head_dim: u64, default_partial: f64) -> Result<WeightId, ConfigError> {
    // Published configs carry `rope_theta` and `rope_scaling`; newer ones one `rope_parameters`
    // object.
    let parameters = c.section("rope_parameters")?;
    let scaling = c.section("rope_scaling")?.section("rope_parameters")?;
    let base = parameters.real_or("rope_theta", c.real_or("rope_theta", 10_000.0)?)?;
    let partial = parameters.real_or("partial_rotary_factor", c.real_or("partial_rotary_factor", default_partial)?)?;
    let width = (head_dim as f64 * partial) as u64;
    if width < 2 || !width.is_multiple_of(2) || width > head_dim || base <= 0.0 {
        return c.refuse("partial_rotary_factor", format!("an even rotary width within the head of {head_dim}"));
    }
    let mut freqs: Vec<f64> = (0..width / 2).map(|i| libm::pow(base, -2.0 * i as f64 / width as f64)).collect();
    let has_scaling = c.get("rope_scaling").is_some() || c.get("rope_parameters").is_some();
    let kind = if has_scaling { scaling.text("rope_type")?.or(scaling.text("type")?) } else { None };
    match kind {
        // Factors of a scaling without a name would be passed over.
        None if has_scaling && scaling.get("factor").is_some() => {
            return scaling.refuse("rope_type", "default, linear or llama3");
        }
        None | Some("default") => {}
        Some("linear") => {
            let factor = scaling.real("factor")?;
            if factor <= 0.0 {
                return scaling.refuse("factor", "a number above 0");
            }
            freqs.iter_mut().for_each(|f| *f /= factor);
        }
        Some("llama3") => llama3(&mut freqs, scaling)?,
        Some("divisors") => {
            let divisors = scaling.get("divisors").and_then(|d| d.as_array()).filter(|d| d.len() == freqs.len());
            let divisors: Option<Vec<f64>> = divisors.and_then(|d| d.iter().map(|v| v.as_f64()).collect());
            match divisors.filter(|d| d.iter().all(|v| *v > 0.0)) {
                Some(divisors) => freqs.iter_mut().zip(divisors).for_each(|(f, d)| *f /= d),
                None => return scaling.refuse("divisors", format!("{} positive numbers", freqs.len())),
            }
        }
        Some(_) => return scaling.refuse("rope_type", "default, linear, llama3 or divisors"),
    }
    let freqs: Vec<f32> = freqs.into_iter().map(|f| f as f32).collect();
    if freqs.iter().any(|f| !f.is_finite()) {
        return c.refuse("rope_theta", "a base and a scaling that give finite frequencies");
    }
    Ok(d.constant("rope.inv_freq", freqs))
}

/// Llama 3's scaling by wavelength: long waves are slowed by `factor`, short ones kept, those
/// between blended.
fn llama3(freqs: &mut [f64], c: Config<'_>) -> Result<(), ConfigError> {
    let factor = c.real("factor")?;
    let (low, high) = (c.real("low_freq_factor")?, c.real("high_freq_factor")?);
    let trained = c.real("original_max_position_embeddings")?;
    if !(factor > 0.0 && low > 0.0 && high > low && trained > 0.0) {
        return c.refuse("factor", "positive factors, low below high");
    }
    for f in freqs {
        let wavelength = 2.0 * std::f64::consts::PI / *f;
        if wavelength > trained / low {
            *f /= factor;
        } else if wavelength >= trained / high {
            let smooth = (trained / wavelength - low) / (high - low);
            *f = (1.0 - smooth) * *f / factor + smooth * *f;
        }
    }
    Ok(())
}
