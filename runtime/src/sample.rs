//! From logits to one token id.
//!
//! The order is fixed: repetition, presence and frequency penalties; temperature; top-k; top-p;
//! min-p; a draw. Temperature 0 takes the best token after penalties, the lower id of equals.
//!
//! A candidate's weight is `w = exp((x - best) / temperature)` in f32, 0 if the exponent is below
//! -27; its share is the integer part of `w * 2^39`. Sums of shares are integers, so that they
//! are exact in any order, and a device may add and search them in its own: a token is the same.
//! Top-p keeps, best first, until the shares' sum is `top_p` of what top-k left, rounded up; min-p
//! compares `w`. The draw is the upper half of a random word times the sum of shares that are left
//! (128 bits); the token is the first whose share makes the sum larger than it, best first if top-k
//! or top-p ranked anything, else by id.
//!
//! What always holds: the same logits, history, options and seed give the same token on every
//! machine and device that chooses by these rules, since sums are exact, `exp` is
//! [`loaf_kernels::math::exp`], and the generator is ours. Nothing is allocated after
//! [`Sampler::new`]; only the candidates that survive a filter are ever sorted. A NaN logit is
//! minus infinity, an infinite one the largest finite number; if no logit is left, that is an error
//! and not a guess.
//!
//! What this does not do: it knows nothing of text, of stopping, or of probabilities that a caller
//! wants to see; for those there is [`log_prob`], over the logits as the model gave them.

use std::cmp::Ordering;
use std::fmt;

use loaf_formats::chat::{OutOfRange, Sampling};
use loaf_formats::memory::{NoMemory, filled, reserved};

use loaf_kernels::fused;
use loaf_kernels::math::exp;

/// How to choose a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Divides logits; 0 is greedy.
    pub temperature: f32,
    /// Candidates kept by rank; 0 keeps all.
    pub top_k: u32,
    /// Candidates are kept, best first, until their probabilities add up to this; in (0, 1].
    pub top_p: f32,
    /// Candidates less probable than this fraction of the best are dropped; in [0, 1).
    pub min_p: f32,
    /// Divides positive logits, and multiplies negative ones, of every token of prompt and output;
    /// 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token of the output.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token of the output, once per occurrence.
    pub frequency_penalty: f32,
    /// Seeds the draws.
    pub seed: u64,
}

impl Default for SamplerOptions {
    /// Greedy, without penalties.
    fn default() -> Self {
        SamplerOptions::new(&Sampling::default(), 0)
    }
}

impl SamplerOptions {
    /// A model's defaults and a seed.
    pub fn new(defaults: &Sampling, seed: u64) -> SamplerOptions {
        SamplerOptions {
            temperature: defaults.temperature,
            top_k: defaults.top_k,
            top_p: defaults.top_p,
            min_p: defaults.min_p,
            repetition_penalty: defaults.repetition_penalty,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed,
        }
    }

    /// Whether the best token is taken and nothing changes which that is.
    pub fn is_plainly_greedy(&self) -> bool {
        let Self { temperature, repetition_penalty, presence_penalty, frequency_penalty, .. } = *self;
        [temperature, repetition_penalty - 1.0, presence_penalty, frequency_penalty] == [0.0; 4]
    }

    /// Whether a token's logit depends on what came before.
    pub(crate) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// `top_p` in parts of 2^64; 0 keeps all.
    pub(crate) fn top_part(&self) -> u64 {
        // Exact, unless below 2^-41.
        if self.top_p < 1.0 { ((f64::from(self.top_p) * 2f64.powi(64)) as u64).max(1) } else { 0 }
    }

    /// Whether every value is in its range.
    ///
    /// # Errors
    /// [`SampleError::Option`] with the first that is not.
    pub fn check(&self) -> Result<(), SampleError> {
        let SamplerOptions { temperature, top_k, top_p, min_p, repetition_penalty, .. } = *self;
        let shared = Sampling { temperature, top_k, top_p, min_p, repetition_penalty };
        shared.check().map_err(SampleError::Option)?;
        for (name, v) in [("presence penalty", self.presence_penalty), ("frequency penalty", self.frequency_penalty)] {
            if !(-100.0..=100.0).contains(&v) {
                return Err(SampleError::Option(OutOfRange::new(name, "-100 to 100", v)));
            }
        }
        Ok(())
    }
}

/// Why no token can be chosen.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum SampleError {
    /// An option is out of its range.
    Option(OutOfRange),
    /// Every logit is NaN or minus infinity.
    NoCandidate,
    /// There is no memory for a vocabulary of this size.
    Memory(NoMemory),
}

impl fmt::Display for SampleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SampleError::Option(what) => write!(f, "sampling: {what}"),
            SampleError::NoCandidate => write!(f, "logits: expected at least one finite value, found none"),
            SampleError::Memory(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for SampleError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SampleError::Option(e) => Some(e),
            SampleError::Memory(e) => Some(e),
            SampleError::NoCandidate => None,
        }
    }
}

impl From<NoMemory> for SampleError {
    fn from(e: NoMemory) -> Self {
        SampleError::Memory(e)
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): a counter times an odd constant, mixed.
#[derive(Clone, Debug)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A token that may be chosen: its penalised logit, and its weight relative to the best (1 for the
/// best).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    logit: f32,
    weight: f32,
    id: u32,
}

/// Exponents below this weigh nothing: `2^39 exp` of what is not is at least 1.
const LEAST_EXPONENT: f32 = -27.0;

impl Candidate {
    /// The weight as an integer, of 2^-39. A vocabulary has at most 2^24 tokens, so that no sum
    /// overflows.
    fn share(&self) -> u64 {
        (self.weight * (1u64 << 39) as f32) as u64
    }
}

/// The upper half of a product.
fn upper(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

/// Best first, the lower id of equals first: a total order, so that sorted prefixes are the same by
/// any algorithm.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// What is counted of a token.
#[derive(Clone, Copy, Default)]
struct Seen {
    anywhere: bool,
    in_output: u32,
}

/// Candidates first sorted for top-p; a multiple of this whenever they do not suffice.
const FIRST_RANKED: usize = 256;

/// Chooses the tokens of one sequence; see the module's doc.
pub struct Sampler {
    options: SamplerOptions,
    rng: Rng,
    vocab: usize,
    seen: Vec<Seen>,    // [vocab], empty without penalties
    distinct: Vec<u32>, // ids with `seen`, in order of appearance
    adjusted: Vec<f32>, // [vocab], empty without penalties
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler over the first `vocab` logits; all it will ever allocate.
    ///
    /// # Errors
    /// [`SampleError::Option`], [`SampleError::Memory`].
    pub fn new(options: SamplerOptions, vocab: usize) -> Result<Sampler, SampleError> {
        options.check()?;
        let penalties = if options.has_penalties() { vocab as u64 } else { 0 };
        let candidates = if options.temperature > 0.0 { vocab as u64 } else { 0 };
        Ok(Sampler {
            options,
            rng: Rng(options.seed),
            vocab,
            seen: filled("counts of tokens", penalties, Seen::default())?,
            distinct: reserved("tokens seen", penalties)?,
            adjusted: filled("penalised logits", penalties, 0.0)?,
            candidates: reserved("candidates", candidates)?,
        })
    }

    /// Logits that are looked at: the first so many.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Tells the sampler of tokens of the prompt.
    pub fn observe_prompt(&mut self, ids: &[u32]) {
        ids.iter().for_each(|id| self.see(*id, 0));
    }

    /// Tells the sampler of a token of the output.
    pub fn observe_output(&mut self, id: u32) {
        self.see(id, 1);
    }

    fn see(&mut self, id: u32, in_output: u32) {
        if let Some(seen) = self.seen.get_mut(id as usize) {
            if !seen.anywhere {
                seen.anywhere = true;
                self.distinct.push(id);
            }
            seen.in_output = seen.in_output.saturating_add(in_output);
        }
    }

    /// Chooses a token by `logits`, `[vocab]` or longer (what is longer is never chosen).
    ///
    /// # Errors
    /// [`SampleError::NoCandidate`].
    pub fn pick(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let logits = &logits[..self.vocab.min(logits.len())];
        let mut adjusted = std::mem::take(&mut self.adjusted);
        let picked = if adjusted.len() < logits.len() {
            self.choose(logits)
        } else {
            let adjusted = &mut adjusted[..logits.len()];
            adjusted.copy_from_slice(logits);
            self.penalise(adjusted);
            self.choose(adjusted)
        };
        self.adjusted = adjusted;
        picked
    }

    /// Divides by the repetition penalty, then subtracts the other two.
    fn penalise(&self, logits: &mut [f32]) {
        let SamplerOptions { repetition_penalty: r, presence_penalty, frequency_penalty, .. } = self.options;
        for &id in &self.distinct {
            let (Some(x), seen) = (logits.get_mut(id as usize), self.seen[id as usize]) else { continue };
            *x = if *x > 0.0 { *x / r } else { *x * r };
            if seen.in_output > 0 {
                *x -= presence_penalty + frequency_penalty * seen.in_output as f32;
            }
        }
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let (best, max) = best(logits).ok_or(SampleError::NoCandidate)?;
        if self.options.temperature == 0.0 {
            return Ok(best);
        }
        self.filter(logits, max);
        let total = self.candidates.iter().map(Candidate::share).sum();
        let draw = upper(self.rng.next(), total);
        let mut sum = 0;
        for c in &self.candidates {
            sum += c.share();
            if sum > draw {
                return Ok(c.id);
            }
        }
        // The best token's share is 2^39, so that there is always one.
        Ok(best)
    }

    /// Leaves in `candidates` what the filters keep: best first if anything was ranked, else by id.
    fn filter(&mut self, logits: &[f32], max: f32) {
        let SamplerOptions { temperature, top_k, min_p, .. } = self.options;
        let top_part = self.options.top_part();
        let candidates = &mut self.candidates;
        candidates.clear();
        let all = (0u32..).zip(logits).map(|(id, x)| Candidate { logit: tame(*x), weight: 0.0, id });
        candidates.extend(all.filter(|c| c.logit > f32::NEG_INFINITY));
        let top_k = top_k as usize;
        if top_k > 0 {
            rank(candidates, top_k);
            candidates.truncate(top_k);
        }
        fused!(weigh(candidates: &mut [Candidate], max: f32, temperature: f32) -> ());
        if top_part > 0 {
            let total: u64 = candidates.iter().map(Candidate::share).sum();
            let wanted = part_of(total, top_part);
            let (mut sum, mut kept, mut ranked) = (0, 0, 0);
            while sum < wanted && kept < candidates.len() {
                if kept == ranked {
                    ranked = (ranked * 8).max(FIRST_RANKED);
                    rank(candidates, ranked);
                }
                sum += candidates[kept].share();
                kept += 1;
            }
            candidates.truncate(kept);
        }
        if min_p > 0.0 {
            candidates.retain(|c| c.weight >= min_p);
        }
    }
}

/// Such a part of a sum, rounded up, and at least 1.
fn part_of(total: u64, part: u64) -> u64 {
    let whole = u128::from(total) * u128::from(part);
    (whole.div_ceil(1 << 64) as u64).max(1)
}

/// Puts the best `n` first and in order; where the others end up is unspecified.
fn rank(candidates: &mut [Candidate], n: usize) {
    let n = n.min(candidates.len());
    if n < candidates.len() {
        candidates.select_nth_unstable_by(n, best_first);
    }
    candidates[..n].sort_unstable_by(best_first);
}

/// A logit that arithmetic can stand: NaN is minus infinity, plus infinity the largest number.
#[inline(always)]
fn tame(x: f32) -> f32 {
    if x.is_nan() { f32::NEG_INFINITY } else { x.min(f32::MAX) }
}

/// Id and value of the best logit, the lower id of equals; `None` if all are NaN or minus infinity.
pub fn best(logits: &[f32]) -> Option<(u32, f32)> {
    let max = fused!(largest(logits: &[f32]) -> f32);
    let id = logits.iter().position(|x| *x == max)?;
    (max > f32::NEG_INFINITY).then_some((id as u32, tame(max)))
}

/// The largest of `x`, minus infinity if there is none; comparisons with NaN are false.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let larger = |m: f32, x: f32| if x > m { x } else { m };
    let mut lanes = [f32::NEG_INFINITY; 32];
    let (whole, rest) = x.as_chunks::<32>();
    for chunk in whole {
        for (m, x) in lanes.iter_mut().zip(chunk) {
            *m = larger(*m, *x);
        }
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, larger)
}

/// Sums of `exp(x - max)` over every eighth element.
#[inline(always)]
fn sum_exp(x: &[f32], max: f32) -> [f64; 8] {
    let mut lanes = [0.0f64; 8];
    let (whole, rest) = x.as_chunks::<8>();
    for chunk in whole {
        // No closure here: it would be a function of its own, compiled without the features.
        for i in 0..8 {
            lanes[i] += f64::from(exp(tame(chunk[i]) - max));
        }
    }
    for i in 0..rest.len() {
        lanes[i] += f64::from(exp(tame(rest[i]) - max));
    }
    lanes
}

/// The weight of every candidate.
#[inline(always)]
fn weigh(candidates: &mut [Candidate], max: f32, temperature: f32) {
    for c in candidates {
        let exponent = (c.logit - max) / temperature;
        c.weight = if exponent >= LEAST_EXPONENT { exp(exponent) } else { 0.0 };
    }
}

/// Natural logarithm of the probability of `id` under `logits`, untouched by any sampling option:
/// `x - max - ln(sum exp(x - max))`, the sum in f64 over eight interleaved lanes, then the lanes in
/// order.
///
/// Minus infinity for an id that has none; `None` if all logits are NaN or minus infinity.
pub fn log_prob(logits: &[f32], id: u32) -> Option<f64> {
    Some(LogProbs::of(logits)?.of_id(logits, id))
}

/// What log-probabilities of several ids under the same logits share, taken once; each is as
/// [`log_prob`] says.
#[derive(Clone, Copy, Debug)]
pub struct LogProbs {
    max: f32,
    log_sum: f64,
}

impl LogProbs {
    /// Of these logits; `None` if all are NaN or minus infinity.
    pub fn of(logits: &[f32]) -> Option<LogProbs> {
        let (_, max) = best(logits)?;
        let sum: f64 = fused!(sum_exp(logits: &[f32], max: f32) -> [f64; 8]).iter().sum();
        Some(LogProbs { max, log_sum: libm::log(sum) })
    }

    /// Of one id; `logits` are the same.
    pub fn of_id(&self, logits: &[f32], id: u32) -> f64 {
        let x = logits.get(id as usize).map_or(f32::NEG_INFINITY, |x| tame(*x));
        f64::from(x) - f64::from(self.max) - self.log_sum
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl super::Rng {
        /// Uniform in [0, 1), 53 bits.
        fn uniform(&mut self) -> f64 {
            (self.next() >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    fn options() -> SamplerOptions {
        SamplerOptions { temperature: 1.0, seed: 7, ..SamplerOptions::default() }
    }

    fn logits(seed: u64, vocab: usize) -> Vec<f32> {
        let mut rng = super::Rng(seed);
        (0..vocab).map(|_| (rng.uniform() * 16.0 - 8.0) as f32).collect()
    }

    /// The filters one after another on a fully sorted list, as their definitions read.
    fn naive(logits: &[f32], o: &SamplerOptions) -> Vec<u32> {
        let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).filter(|(x, _)| !x.is_nan()).collect();
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if o.top_k > 0 {
            all.truncate(o.top_k as usize);
        }
        let p = |all: &[(f32, u32)]| -> Vec<f64> {
            let w: Vec<f64> = all.iter().map(|(x, _)| f64::from((x - all[0].0) / o.temperature).exp()).collect();
            let sum: f64 = w.iter().sum();
            w.iter().map(|w| w / sum).collect()
        };
        if o.top_p < 1.0 {
            let mut sum = 0.0;
            let keep = p(&all).iter().take_while(|p| (sum < f64::from(o.top_p), sum += **p).0).count();
            all.truncate(keep);
        }
        let p = p(&all);
        all.iter().zip(&p).filter(|(_, q)| **q >= p[0] * f64::from(o.min_p)).map(|(c, _)| c.1).collect()
    }

    proptest! {
        #[test]
        fn filters_keep_what_sorting_everything_keeps(
            seed in 0u64..1 << 40, vocab in 1usize..3000, top_k in 0u32..80, top_p in 0.05f32..1.0, min_p in 0f32..0.5,
            temperature in 0.2f32..3.0, which in 0u32..8,
        ) {
            let o = SamplerOptions {
                temperature,
                top_k: if which & 1 > 0 { top_k } else { 0 },
                top_p: if which & 2 > 0 { top_p } else { 1.0 },
                min_p: if which & 4 > 0 { min_p } else { 0.0 },
                ..options()
            };
            let logits = logits(seed, vocab);
            let mut sampler = Sampler::new(o, vocab).unwrap();
            sampler.filter(&logits, best(&logits).unwrap().1);
            let mut kept: Vec<u32> = sampler.candidates.iter().map(|c| c.id).collect();
            let mut expected = naive(&logits, &o);
            // Without ranking the order is by id.
            kept.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(kept, expected);
        }

        #[test]
        fn any_bits_at_all_give_a_token_or_an_error(bits in prop::collection::vec(any::<u32>(), 1..50), top_k in 0u32..9) {
            let logits: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
            let o = SamplerOptions { top_k, top_p: 0.9, min_p: 0.1, repetition_penalty: 1.3, frequency_penalty: 0.5, ..options() };
            let mut sampler = Sampler::new(o, logits.len()).unwrap();
            sampler.observe_prompt(&[0, 3, 1 << 30]);
            for _ in 0..4 {
                match sampler.pick(&logits) {
                    Ok(id) => {
                        prop_assert!(!logits[id as usize].is_nan());
                        sampler.observe_output(id);
                    }
                    Err(e) => prop_assert_eq!(e, SampleError::NoCandidate),
                }
            }
        }
    }

    #[test]
    fn greedy_takes_the_lower_id_of_equals_and_passes_nan_over() {
        let mut greedy = Sampler::new(SamplerOptions::default(), 5).unwrap();
        assert_eq!(greedy.pick(&[1.0, 3.0, f32::NAN, 3.0, 2.0]), Ok(1));
        assert_eq!(greedy.pick(&[f32::NAN, f32::NEG_INFINITY, -5.0]), Ok(2));
        assert_eq!(greedy.pick(&[0.0, f32::INFINITY]), Ok(1));
    }

    #[test]
    fn logits_without_a_number_are_an_error() {
        for o in [SamplerOptions::default(), options()] {
            let mut sampler = Sampler::new(o, 2).unwrap();
            assert_eq!(sampler.pick(&[f32::NAN, f32::NEG_INFINITY]), Err(SampleError::NoCandidate));
            assert_eq!(sampler.pick(&[]), Err(SampleError::NoCandidate));
        }
    }

    #[test]
    fn rows_past_the_vocabulary_are_never_chosen() {
        let mut sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..options() }, 2).unwrap();
        assert_eq!(sampler.pick(&[0.0, 1.0, 99.0]), Ok(1));
    }

    #[test]
    fn a_seed_gives_this_very_sequence_on_every_machine() {
        let logits = logits(1, 1000);
        let o = SamplerOptions { temperature: 0.8, top_p: 0.95, min_p: 0.01, repetition_penalty: 1.1, ..options() };
        let mut sampler = Sampler::new(o, 1000).unwrap();
        let ids: Vec<u32> = (0..8)
            .map(|_| {
                let id = sampler.pick(&logits).unwrap();
                sampler.observe_output(id);
                id
            })
            .collect();
        assert_eq!(ids, SEQUENCE);
    }

    const SEQUENCE: [u32; 8] = [494, 886, 999, 633, 2, 660, 654, 195];

    #[test]
    fn draws_follow_the_distribution() {
        // Chi-square over 8 tokens: below 24.3 with probability 0.999 for 7 degrees of freedom.
        let logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.25];
        let mut sampler = Sampler::new(options(), 8).unwrap();
        let draws = 40_000;
        let mut counts = [0u32; 8];
        for _ in 0..draws {
            counts[sampler.pick(&logits).unwrap() as usize] += 1;
        }
        let chi: f64 = (0..8)
            .map(|i| {
                let expected = log_prob(&logits, i).unwrap().exp() * f64::from(draws);
                (f64::from(counts[i as usize]) - expected).powi(2) / expected
            })
            .sum();
        assert!(chi < 24.3, "{chi}: {counts:?}");
    }

    #[test]
    fn penalties_follow_their_formulas() {
        let o = SamplerOptions { repetition_penalty: 2.0, presence_penalty: 0.5, frequency_penalty: 0.25, ..options() };
        let mut sampler = Sampler::new(o, 4).unwrap();
        sampler.observe_prompt(&[0, 1]);
        sampler.observe_output(1);
        sampler.observe_output(1);
        sampler.observe_output(3);
        let mut logits = [4.0, -1.0, 3.0, 2.0];
        sampler.penalise(&mut logits);
        assert_eq!(logits, [2.0, -3.0, 3.0, 0.25]);
    }

    #[test]
    fn log_probabilities_add_up_to_one() {
        let logits = logits(5, 77);
        let sum: f64 = (0..77).map(|id| log_prob(&logits, id).unwrap().exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!(log_prob(&[0.0, f32::NAN], 1), Some(f64::NEG_INFINITY));
        assert_eq!(log_prob(&[f32::NAN], 0), None);
    }

    #[test]
    fn options_out_of_range_are_refused_by_name() {
        let bad = |o: SamplerOptions| o.check().unwrap_err().to_string();
        assert!(bad(SamplerOptions { temperature: -1.0, ..options() }).contains("temperature"));
        assert!(bad(SamplerOptions { top_p: f32::NAN, ..options() }).contains("top_p"));
        assert!(bad(SamplerOptions { frequency_penalty: f32::NAN, ..options() }).contains("frequency"));
    }
}
