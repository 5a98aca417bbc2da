//! The golden section: prompts with the token ids they must give, so that any machine can check
//! itself.
//!
//! JSON, `{"cases":[{"prompt":[1,2],"greedy":[3,4]}]}`: token ids, and the ids that greedy decoding
//! appends to them. The baker computes them with its naive interpreter, not with the runtime's
//! kernels, and ends a continuation before a token whose logit leads the next by less than a
//! fiftieth of the largest magnitude seen in that case: two correct implementations may round
//! differently, and must still agree on every id recorded here.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Largest golden section read, in bytes.
pub const MAX_GOLDEN_BYTES: usize = 1 << 20;

/// Of the largest logit magnitude: a smaller lead ends a continuation.
///
/// Where f32 rounding moves an activation over the middle between two int8 codes, one input moves
/// by 1/127 of its group's largest value, and each of the two logits compared may follow by about
/// as much; caches keep the difference for later tokens. A thousandth, enough for f32 alone, was
/// seen to fail on a small quantised model.
pub const MIN_LEAD: f32 = 0.02;

/// One prompt and its greedy continuation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Ids that follow; may be empty.
    pub greedy: Vec<u32>,
}

/// The golden section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Golden {
    /// Its cases.
    pub cases: Vec<Case>,
}

/// A golden section that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoldenError(String);

impl fmt::Display for GoldenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "golden section: {}", self.0)
    }
}

impl std::error::Error for GoldenError {}

impl Golden {
    /// The section's bytes.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers are JSON")
    }

    /// Reads a section for a model of `vocab` tokens and `context` positions.
    ///
    /// # Errors
    /// Anything that is not a golden section, an id past the vocabulary, an empty prompt, a case
    /// past the context.
    pub fn decode(bytes: &[u8], vocab: u32, context: u32) -> Result<Golden, GoldenError> {
        if bytes.len() > MAX_GOLDEN_BYTES {
            return Err(GoldenError(format!("expected at most {MAX_GOLDEN_BYTES} bytes, found {}", bytes.len())));
        }
        let golden: Golden = serde_json::from_slice(bytes).map_err(|e| GoldenError(e.to_string()))?;
        for (i, case) in golden.cases.iter().enumerate() {
            if let Some(id) = case.prompt.iter().chain(&case.greedy).find(|id| **id >= vocab) {
                return Err(GoldenError(format!("case {i}: expected ids below {vocab}, found {id}")));
            }
            // The last id of a continuation is predicted, not evaluated, but a case that fits as a
            // whole is simpler to state.
            let tokens = case.prompt.len() + case.greedy.len();
            if case.prompt.is_empty() || tokens > context as usize {
                let found = format!("{} and {}", case.prompt.len(), case.greedy.len());
                return Err(GoldenError(format!(
                    "case {i}: expected a prompt, and at most {context} tokens, found {found}"
                )));
            }
        }
        Ok(golden)
    }
}

/// The id with the largest logit, the lower of equals, and how far it leads the next; `None` for
/// fewer than two logits.
pub fn leader(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best: Option<(usize, f32)> = None;
    let mut second = f32::NEG_INFINITY;
    for (i, &x) in logits.iter().enumerate() {
        match best {
            Some((_, b)) if x <= b || x.is_nan() => second = second.max(x),
            _ => {
                second = best.map_or(second, |(_, b)| b);
                best = Some((i, x));
            }
        }
    }
    let (i, value) = best.filter(|_| logits.len() > 1)?;
    Some((u32::try_from(i).ok()?, value - second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_survive_their_bytes_and_are_bounded() {
        let golden = Golden { cases: vec![Case { prompt: vec![1, 2], greedy: vec![3] }] };
        assert_eq!(golden.encode(), br#"{"cases":[{"prompt":[1,2],"greedy":[3]}]}"#);
        assert_eq!(Golden::decode(&golden.encode(), 4, 3), Ok(golden.clone()));
        let refused = |bytes: &[u8], vocab, context| Golden::decode(bytes, vocab, context).unwrap_err().to_string();
        assert_eq!(refused(&golden.encode(), 3, 3), "golden section: case 0: expected ids below 3, found 3");
        assert!(refused(&golden.encode(), 4, 2).contains("at most 2 tokens, found 2 and 1"));
        assert!(refused(br#"{"cases":[{"prompt":[],"greedy":[3]}]}"#, 4, 9).contains("expected a prompt"));
        assert!(refused(br#"{"cases":[],"more":1}"#, 4, 9).contains("unknown field"));
    }

    #[test]
    fn the_leader_is_the_first_of_the_largest() {
        assert_eq!(leader(&[1.0, 4.0, 2.5]), Some((1, 1.5)));
        assert_eq!(leader(&[4.0, 1.0, 4.0]), Some((0, 0.0)));
        assert_eq!(leader(&[-1.0, -3.0]), Some((0, 2.0)));
        assert_eq!(leader(&[1.0]), None);
    }
}
