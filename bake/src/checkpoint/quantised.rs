//! MLX's `quantization` entry of config.json: which modules are quantised, and how.
//!
//! A default (`group_size`, `bits`, `mode`) and, per module path, an override: an object (its own
//! three values, missing ones being the mode's defaults, a missing mode affine), `true` (the
//! default) or `false` (dense). Whether a module *is* quantised is told by its `.scales` tensor;
//! the config only tells the format. The same content is often repeated as `quantization_config`,
//! which other tools use for formats of their own (`quant_method`).

use std::collections::BTreeMap;

use loaf_formats::dtype::{DType, WeightFormat};
use serde_json::{Map, Value};

/// Mode, bits and group size of a quantised module, before its parameter type is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantSpec(WeightFormat);

impl QuantSpec {
    /// The format, affine scales and biases being of type `params`.
    pub fn format(self, params: DType) -> WeightFormat {
        match self.0 {
            WeightFormat::Affine { bits, group, .. } => WeightFormat::Affine { bits, group, params },
            other => other,
        }
    }

    fn parse(object: &Map<String, Value>) -> Result<QuantSpec, String> {
        let mode = match object.get("mode") {
            None | Some(Value::Null) => "affine",
            Some(Value::String(mode)) => mode,
            Some(other) => return Err(format!("mode should be a string, is {other}")),
        };
        let (default_bits, default_group) = match mode {
            "affine" => (4, 64),
            "mxfp4" => (4, 32),
            "nvfp4" => (4, 16),
            "mxfp8" => (8, 32),
            _ => return Err(format!("mode {mode:?} is none of affine, mxfp4, nvfp4, mxfp8")),
        };
        let number = |key: &str, default: u8| match object.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(v) => match v.as_u64().map(u8::try_from) {
                Some(Ok(n)) => Ok(n),
                _ => Err(format!("{key} should be a small number, is {v}")),
            },
        };
        let (bits, group) = (number("bits", default_bits)?, number("group_size", default_group)?);
        let format = match mode {
            "affine" => WeightFormat::Affine { bits, group, params: DType::F32 },
            "mxfp4" => WeightFormat::Mxfp4,
            "nvfp4" => WeightFormat::Nvfp4,
            _ => WeightFormat::Mxfp8,
        };
        let as_asked = format.bits() == u64::from(bits) && format.group() == Some(u64::from(group));
        match format.is_valid() && as_asked {
            true => Ok(QuantSpec(format)),
            false => Err(format!("mode {mode} has no {bits} bits in groups of {group}")),
        }
    }
}

/// The parsed entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantConfig {
    default: Option<QuantSpec>,
    /// By module path; `None`: must be dense.
    overrides: BTreeMap<String, Option<QuantSpec>>,
}

impl QuantConfig {
    /// Reads `quantization`, or failing that an MLX-shaped `quantization_config`.
    ///
    /// # Errors
    /// A sentence about the first entry that cannot be read, or about a quantisation that is not
    /// MLX's.
    pub fn from_config(config: &Value) -> Result<QuantConfig, String> {
        let (key, value) = match (config.get("quantization"), config.get("quantization_config")) {
            (Some(v), _) if !v.is_null() => ("quantization", v),
            (_, Some(v)) if !v.is_null() => ("quantization_config", v),
            _ => return Ok(QuantConfig::default()),
        };
        let Value::Object(object) = value else { return Err(format!("{key} should be an object, is {value}")) };
        if let (Some(method), None) = (object.get("quant_method"), object.get("group_size")) {
            return Err(format!(
                "{key}: quant_method {method} is not supported; start from the bf16 or an MLX checkpoint"
            ));
        }
        let default = QuantSpec::parse(object).map_err(|e| format!("{key}: {e}"))?;
        let mut overrides = BTreeMap::new();
        for (path, value) in object {
            let spec = match value {
                Value::Bool(false) => None,
                // A module path has dots; a flag of the entry itself has none.
                Value::Bool(true) if path.contains('.') => Some(default),
                Value::Object(o) => Some(QuantSpec::parse(o).map_err(|e| format!("{key}, {path}: {e}"))?),
                _ => continue,
            };
            overrides.insert(path.clone(), spec);
        }
        Ok(QuantConfig { default: Some(default), overrides })
    }

    /// What the config says of `module`, which has scales.
    ///
    /// # Errors
    /// A sentence, if the config says that it is dense, or nothing at all.
    pub fn spec_of(&self, module: &str) -> Result<QuantSpec, String> {
        match (self.overrides.get(module), self.default) {
            (Some(Some(spec)), _) => Ok(*spec),
            (Some(None), _) => Err("config.json says it is not quantised, but it has scales".into()),
            (None, Some(default)) => Ok(default),
            (None, None) => Err("it has scales, but config.json has no `quantization`".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn affine(bits: u8, group: u8) -> WeightFormat {
        WeightFormat::Affine { bits, group, params: DType::BF16 }
    }

    #[test]
    fn overrides_stand_before_the_default_and_a_missing_mode_is_affine() {
        let config = QuantConfig::from_config(&json!({"quantization": {
            "group_size": 32, "bits": 4, "mode": "mxfp4",
            "a.gate": {"group_size": 64, "bits": 8}, "a.dense": false, "a.same": true, "a.nv": {"mode": "nvfp4"}}}))
        .unwrap();
        let format = |m| config.spec_of(m).map(|s| s.format(DType::BF16));
        assert_eq!(format("a.other"), Ok(WeightFormat::Mxfp4));
        assert_eq!(format("a.gate"), Ok(affine(8, 64)));
        assert_eq!(format("a.same"), Ok(WeightFormat::Mxfp4));
        assert_eq!(format("a.nv"), Ok(WeightFormat::Nvfp4));
        assert!(format("a.dense").unwrap_err().contains("not quantised"));
        let plain = QuantConfig::from_config(&json!({"quantization_config": {"group_size": 128, "bits": 3}})).unwrap();
        assert_eq!(plain.spec_of("x").map(|s| s.format(DType::BF16)), Ok(affine(3, 128)));
        assert!(QuantConfig::default().spec_of("x").unwrap_err().contains("no `quantization`"));
    }

    #[test]
    fn what_mlx_does_not_have_is_refused() {
        for (entry, complaint) in [
            (json!({"group_size": 64, "bits": 7}), "no 7 bits"),
            (json!({"group_size": 48, "bits": 4}), "groups of 48"),
            (json!({"group_size": 64, "bits": 4, "mode": "mxfp4"}), "groups of 64"),
            (json!({"group_size": 64, "bits": 4, "mode": "awq"}), "none of affine"),
            (json!({"group_size": 64, "bits": "4"}), "small number"),
            (json!({"group_size": 64, "bits": 4, "a.b": {"bits": 300}}), "a.b"),
            (json!({"quant_method": "fp8"}), "not supported"),
            (json!(4), "should be an object"),
        ] {
            let error = QuantConfig::from_config(&json!({"quantization": entry})).unwrap_err();
            assert!(error.contains(complaint), "{error:?} should contain {complaint:?}");
        }
    }
}
