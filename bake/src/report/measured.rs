//! What `loaf bench --json` said of the same loaf.
//!
//! A measurement is a file like any other: every field that is shown is looked at, and one that is
//! not what `loaf bench` writes is an error that names it. Fields that are not shown are passed
//! over, so that a newer program may say more.

use loaf_formats::container::ArtifactId;
use loaf_formats::plan::Phase;
use serde_json::Value;

use super::ReportError;

/// A figure of several repetitions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

/// All calls of a kind of op in one repetition.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// The op.
    pub op: String,
    /// How often it ran.
    pub calls: u64,
    /// Milliseconds in all.
    pub ms: f64,
    /// Bytes moved in all, by the cost model.
    pub bytes: u64,
    /// Of the read bandwidth.
    pub percent_of_bandwidth: f64,
}

/// A measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Bench {
    /// What ran the loaf.
    pub engine: String,
    /// On so many threads.
    pub threads: u64,
    /// Positions before the first token that was measured.
    pub context: u64,
    /// Tokens of a prompt and tokens one by one, of a repetition.
    pub tokens: [(Phase, u64); 2],
    /// Tokens per second, where there were any.
    pub speed: [(Phase, Option<Spread>); 2],
    /// Of the bytes a decode step reads, beside what memory gives.
    pub percent_of_bandwidth: Option<Spread>,
    /// GB/s.
    pub read_bandwidth: f64,
    /// Longest first; empty without `--ops`.
    pub ops: Vec<(Phase, Vec<OpTime>)>,
}

/// A value and where in the file it is.
#[derive(Clone)]
struct At<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> At<'a> {
    fn of(&self, key: &str) -> At<'a> {
        let path = if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) };
        At { path, value: &self.value[key] }
    }

    /// The same, unless it is not there.
    fn there(self) -> Option<At<'a>> {
        if self.value.is_null() { None } else { Some(self) }
    }

    fn refuse<T>(&self, expected: &str) -> Result<T, ReportError> {
        Err(ReportError::Bench(self.path.clone(), expected.to_string(), self.value.to_string()))
    }

    fn text(&self) -> Result<&'a str, ReportError> {
        self.value.as_str().map_or_else(|| self.refuse("a text"), Ok)
    }

    fn count(&self) -> Result<u64, ReportError> {
        self.value.as_u64().map_or_else(|| self.refuse("a count"), Ok)
    }

    /// JSON has neither NaN nor infinity.
    fn number(&self) -> Result<f64, ReportError> {
        self.value.as_f64().filter(|n| *n >= 0.0).map_or_else(|| self.refuse("a number that is not negative"), Ok)
    }

    fn list(&self) -> Result<Vec<At<'a>>, ReportError> {
        let Some(list) = self.value.as_array() else { return self.refuse("a list") };
        Ok(list.iter().enumerate().map(|(i, value)| At { path: format!("{}[{i}]", self.path), value }).collect())
    }

    fn spread(&self) -> Result<Spread, ReportError> {
        let of = |key| self.of(key).number();
        Ok(Spread { median: of("median")?, min: of("min")?, max: of("max")? })
    }

    fn op(&self) -> Result<OpTime, ReportError> {
        Ok(OpTime {
            op: self.of("op").text()?.to_string(),
            calls: self.of("calls").count()?,
            ms: self.of("ms").number()?,
            bytes: self.of("bytes").count()?,
            percent_of_bandwidth: self.of("percent_of_bandwidth").number()?,
        })
    }
}

impl Bench {
    /// Reads what `loaf bench --json` printed for the loaf `id`.
    ///
    /// # Errors
    /// [`ReportError::Bench`]: it is of another loaf, or a field is not what it must be.
    pub fn read(bytes: &[u8], id: ArtifactId) -> Result<Bench, ReportError> {
        let json: Value = serde_json::from_slice(bytes)
            .map_err(|e| ReportError::Bench(String::new(), "what 'loaf bench --json' prints".into(), e.to_string()))?;
        let top = At { path: String::new(), value: &json };
        if top.of("id").text()? != id.to_string() {
            return top.of("id").refuse(&id.to_string());
        }
        let phases = [(Phase::Prefill, "prefill"), (Phase::Decode, "decode")];
        let mut ops = Vec::new();
        for (phase, name) in phases {
            if let Some(list) = top.of("ops").there().and_then(|ops| ops.of(name).there()) {
                ops.push((phase, list.list()?.iter().map(At::op).collect::<Result<_, _>>()?));
            }
        }
        let spread = |key: &str| top.of(key).there().map(|at| at.spread()).transpose();
        Ok(Bench {
            engine: top.of("engine").text()?.to_string(),
            threads: top.of("threads").count()?,
            context: top.of("context").count()?,
            tokens: [(Phase::Prefill, top.of("prefill").count()?), (Phase::Decode, top.of("decode").count()?)],
            speed: [(Phase::Prefill, spread("prefill_tok_s")?), (Phase::Decode, spread("decode_tok_s")?)],
            percent_of_bandwidth: spread("decode_percent_of_bandwidth")?,
            read_bandwidth: top.of("read_bandwidth_gb_s").number()?,
            ops,
        })
    }
}
