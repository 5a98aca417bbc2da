//! Activations as int8.

use super::spec::op;

op! {
    /// Int8 activations, per `(row, head)` and group of `group` elements: `m = max |x|`; if
    /// `m == 0`, codes, scale and sum are 0; else `scale = m / 127`,
    /// `code = round_half_even(x * (127 / m))` clamped to `[-127, 127]`,
    /// `sum = scale * f32(sum of codes)`. A NaN takes code 0 and is ignored by the maximum;
    /// infinities are clamped to the largest finite magnitude first.
    Quantize = "quantize", plan;
    attrs { rows: count, heads: count, dim: count, group: count }
    operands {
        x: reads F32 [rows, heads, dim],
        codes: writes I8 [rows, heads, dim],
        scales: writes F32 [rows, heads, (dim / group)],
        sums: writes F32 [rows, heads, (dim / group)],
    }
}

impl Rules for Attrs {
    fn check(&self) -> Result<(), &'static str> {
        if matches!(self.group, 16 | 32 | 64 | 128) { Ok(()) } else { Err("a group of 16, 32, 64 or 128") }
    }
}
