//! Reading a Hugging Face `config.json`, with errors that name the key.

use serde_json::Value;

use crate::model::ConfigError;

/// No dimension of a model is larger than this; products of three fit in `u64`.
const MAX_DIM: u64 = 1 << 20;

/// Every layer is some thirty values and records of each graph; the deepest published models have
/// some 130.
const MAX_LAYERS: u64 = 1 << 12;

/// A view of one JSON object and the path that led to it.
#[derive(Clone, Copy)]
pub struct Config<'a> {
    object: &'a Value,
    prefix: &'a str,
}

impl<'a> Config<'a> {
    /// The whole file.
    pub fn new(object: &'a Value) -> Self {
        Config { object, prefix: "" }
    }

    /// The nested object under `key`, if there is one; else `self` (text models come both ways).
    ///
    /// # Errors
    /// Present and not an object: what it would have said must not be passed over.
    pub fn section(self, key: &'static str) -> Result<Self, ConfigError> {
        match self.get(key) {
            None => Ok(self),
            Some(object) if object.is_object() => Ok(Config { object, prefix: key }),
            other => self.fail(key, "an object", other),
        }
    }

    fn fail<T>(self, key: &str, expected: impl Into<String>, found: Option<&Value>) -> Result<T, ConfigError> {
        let key = if self.prefix.is_empty() { key.to_string() } else { format!("{}.{key}", self.prefix) };
        let found = found.map_or_else(|| "nothing".to_string(), |v| v.to_string());
        Err(ConfigError { key, expected: expected.into(), found })
    }

    /// The raw value, `null` counting as absent.
    pub fn get(self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    /// A dimension: an integer of 1 to 2^20.
    ///
    /// # Errors
    /// Absent or anything else.
    pub fn dim(self, key: &str) -> Result<u64, ConfigError> {
        let value = self.get(key);
        match value.and_then(Value::as_u64) {
            Some(n) if (1..=MAX_DIM).contains(&n) => Ok(n),
            _ => self.fail(key, format!("a whole number from 1 to {MAX_DIM}"), value),
        }
    }

    /// The number of layers: 1 to 4096.
    ///
    /// # Errors
    /// Absent or anything else.
    pub fn layers(self) -> Result<u64, ConfigError> {
        let key = "num_hidden_layers";
        match self.dim(key)? {
            n if n <= MAX_LAYERS => Ok(n),
            _ => self.refuse(key, format!("at most {MAX_LAYERS} layers")),
        }
    }

    /// A dimension, or `default` where the key is absent.
    ///
    /// # Errors
    /// Present and not a dimension.
    pub fn dim_or(self, key: &str, default: u64) -> Result<u64, ConfigError> {
        if self.get(key).is_none() { Ok(default) } else { self.dim(key) }
    }

    /// A finite number.
    ///
    /// # Errors
    /// Absent or anything else.
    pub fn real(self, key: &str) -> Result<f64, ConfigError> {
        let value = self.get(key);
        match value.and_then(Value::as_f64).filter(|v| v.is_finite()) {
            Some(v) => Ok(v),
            None => self.fail(key, "a number", value),
        }
    }

    /// A finite number, or `default`.
    ///
    /// # Errors
    /// Present and not a number.
    pub fn real_or(self, key: &str, default: f64) -> Result<f64, ConfigError> {
        if self.get(key).is_none() { Ok(default) } else { self.real(key) }
    }

    /// A boolean, or `default`.
    ///
    /// # Errors
    /// Present and not a boolean.
    pub fn flag(self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            other => self.fail(key, "true or false", other),
        }
    }

    /// A string, if present.
    ///
    /// # Errors
    /// Present and not a string.
    pub fn text(self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            other => self.fail(key, "a string", other),
        }
    }

    /// The small number that keeps a norm from dividing by zero: from 0 to below 1.
    ///
    /// # Errors
    /// Absent or anything else.
    pub fn epsilon(self, key: &str) -> Result<f32, ConfigError> {
        match self.real(key)? {
            eps if (0.0..1.0).contains(&eps) => Ok(eps as f32),
            _ => self.refuse(key, "a number from 0 to below 1"),
        }
    }

    /// Refuses a feature this recipe does not have.
    ///
    /// # Errors
    /// `key` is present and not `expected`.
    pub fn must_be(self, key: &str, expected: &Value) -> Result<(), ConfigError> {
        match self.get(key) {
            None => Ok(()),
            Some(v) if v == expected => Ok(()),
            other => self.fail(key, expected.to_string(), other),
        }
    }

    /// An error about `key`, for checks across keys.
    ///
    /// # Errors
    /// Always.
    pub fn refuse<T>(self, key: &str, expected: impl Into<String>) -> Result<T, ConfigError> {
        self.fail(key, expected, self.get(key))
    }
}
