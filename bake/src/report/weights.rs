//! Whose every byte of the weights is: which layer's, for what, in which format.
//!
//! Names say the layer and the part (they are ours: `recipes` declares them), the plan says the
//! format, since its records say how each plane is read. What always holds: parts and padding
//! together are the Weights section, to the byte.

use std::collections::BTreeMap;

use loaf_formats::container::{Container, SectionKind};
use loaf_formats::dtype::WeightFormat;
use loaf_formats::experts::{ExpertsError, StoredPlane, stored_planes};
use loaf_formats::op::Types;
use loaf_formats::plan::{Plan, Region, records};

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// A row for each id; of many models the LM head as well.
    Embedding,
    /// Projections of attention, and its norms.
    Attention,
    /// Projections, convolution, gates and norm of a gated delta rule.
    DeltaRule,
    /// The feed-forward block of every token.
    FeedForward,
    /// The matrices of which a token uses some.
    Experts,
    /// The expert of every token.
    SharedExpert,
    /// What chooses experts, and the shared one's gate.
    Router,
    /// Norms around blocks and at the end.
    Norm,
    /// Hidden rows to logits.
    LmHead,
    /// Numbers that the bake computed, such as frequencies of the rotation.
    Constant,
    /// Anything else.
    Other,
}

impl Role {
    /// Every role, in the order of a token's way.
    pub const ALL: [Role; 11] = [
        Role::Embedding,
        Role::Attention,
        Role::DeltaRule,
        Role::FeedForward,
        Role::Experts,
        Role::SharedExpert,
        Role::Router,
        Role::Norm,
        Role::LmHead,
        Role::Constant,
        Role::Other,
    ];

    /// In words.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Embedding => "embedding",
            Role::Attention => "attention",
            Role::DeltaRule => "delta rule",
            Role::FeedForward => "feed-forward",
            Role::Experts => "experts",
            Role::SharedExpert => "shared expert",
            Role::Router => "router",
            Role::Norm => "norms",
            Role::LmHead => "LM head",
            Role::Constant => "constants",
            Role::Other => "other",
        }
    }

    fn of(name: &str) -> Role {
        let has = |part: &str| name.contains(part);
        match name {
            _ if name.starts_with("model.embed_tokens.") => Role::Embedding,
            _ if name.starts_with("lm_head.") => Role::LmHead,
            _ if name.starts_with("rope.") => Role::Constant,
            _ if has(".self_attn.") => Role::Attention,
            _ if has(".linear_attn.") => Role::DeltaRule,
            _ if has(".mlp.switch_mlp.") => Role::Experts,
            _ if has(".mlp.gate.") || has(".mlp.shared_expert_gate.") => Role::Router,
            _ if has(".mlp.shared_expert.") => Role::SharedExpert,
            _ if has(".mlp.") => Role::FeedForward,
            _ if has("_layernorm.") || name.starts_with("model.norm.") => Role::Norm,
            _ => Role::Other,
        }
    }
}

/// The layer that a name is of: `model.layers.3.mlp.gate.weight`, `layers.3.k`.
pub(super) fn layer_of(name: &str) -> Option<u32> {
    let name = name.strip_prefix("model.").unwrap_or(name);
    name.strip_prefix("layers.")?.split_once('.')?.0.parse().ok()
}

/// Sums of several weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// How many matrices and vectors; a matrix of all experts is one.
    pub tensors: u64,
    /// Numbers in them.
    pub weights: u64,
    /// Bytes, scales and biases included.
    pub bytes: u64,
}

impl Sum {
    fn add(&mut self, other: Sum) {
        self.tensors += other.tensors;
        self.weights = self.weights.saturating_add(other.weights);
        self.bytes += other.bytes;
    }

    /// Bits that a weight takes; nothing where there is none.
    pub fn bits(&self) -> Option<f64> {
        (self.weights > 0).then(|| self.bytes as f64 * 8.0 / self.weights as f64)
    }
}

/// All weights of a file.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    /// By layer (none: outside of layers), role and format.
    pub parts: BTreeMap<(Option<u32>, Role, String), Sum>,
    /// Bytes of the section that are no part of a weight.
    pub padding: u64,
    /// Length of the section.
    pub section: u64,
}

impl Weights {
    /// Looks at the header, the manifest's experts and the plan's records.
    ///
    /// # Errors
    /// See [`stored_planes`].
    pub fn read(container: &Container<'_>, plan: &Plan) -> Result<Weights, ExpertsError> {
        let formats = Formats::of(plan);
        let mut weights = Weights {
            section: container.head().section(SectionKind::Weights).map_or(0, |s| s.len),
            ..Weights::default()
        };
        let mut named = 0u64;
        for plane in stored_planes(container)? {
            let bytes = plane.piece.saturating_mul(plane.pieces.0);
            let (format, numbers) = formats.describe(&plane);
            let sum = Sum { tensors: numbers.is_some().into(), weights: numbers.unwrap_or(0), bytes };
            weights.parts.entry((layer_of(&plane.name), Role::of(&plane.name), format)).or_default().add(sum);
            named = named.saturating_add(bytes);
        }
        weights.padding = weights.section.saturating_sub(named);
        Ok(weights)
    }

    /// The sum over what `wanted` accepts.
    pub fn sum(&self, wanted: impl Fn(Option<u32>, Role, &str) -> bool) -> Sum {
        let mut all = Sum::default();
        let parts = self.parts.iter().filter(|((layer, role, format), _)| wanted(*layer, *role, format));
        parts.for_each(|(_, sum)| all.add(*sum));
        all
    }

    /// What the checkpoint's parameters became: everything but constants.
    pub fn parameters(&self) -> Sum {
        self.sum(|_, role, _| role != Role::Constant)
    }

    /// Formats, those with most bytes first.
    pub fn formats(&self) -> Vec<(String, Sum)> {
        let mut sums: BTreeMap<&String, Sum> = BTreeMap::new();
        self.parts.iter().for_each(|((.., format), sum)| sums.entry(format).or_default().add(*sum));
        let mut list: Vec<_> = sums.into_iter().map(|(format, sum)| (format.clone(), sum)).collect();
        list.sort_by_key(|(_, sum)| std::cmp::Reverse(sum.bytes));
        list
    }

    /// Bytes by layer (none: outside of layers) and role.
    pub fn by_layer(&self) -> BTreeMap<Option<u32>, BTreeMap<Role, u64>> {
        let mut layers = BTreeMap::<_, BTreeMap<Role, u64>>::new();
        for ((layer, role, _), sum) in &self.parts {
            *layers.entry(*layer).or_default().entry(*role).or_default() += sum.bytes;
        }
        layers
    }

    /// How many layers have weights.
    pub fn layers(&self) -> u64 {
        let mut layers: Vec<u32> = self.parts.keys().filter_map(|(layer, ..)| *layer).collect();
        layers.dedup();
        layers.len() as u64
    }
}

/// How the planes of packed weights are read: by first byte, with the end. Weights that are
/// multiplied together are one operand, so a plane may begin within a range.
struct Formats(BTreeMap<u64, (u64, WeightFormat)>);

impl Formats {
    fn of(plan: &Plan) -> Formats {
        let (mut ranges, mut words) = (BTreeMap::new(), Vec::new());
        for template in &plan.templates {
            template.expand(1, &mut words);
            for record in records(&words).flatten() {
                let spec = record.kind.spec();
                let attr = spec.format_attr().and_then(|i| record.attrs.get(i));
                let Some(format) = attr.and_then(|&code| WeightFormat::from_code(code)) else { continue };
                for (i, operand) in spec.operands.iter().enumerate() {
                    let at = record.operand(i);
                    let is_plane = matches!(operand.types, Types::Plane(_)) && at.region == Region::Weights;
                    let span = record.dims(i).filter(|_| is_plane).and_then(|dims| at.span(dims));
                    if let Some((start, end)) = span {
                        let range = ranges.entry(start).or_insert((end, format));
                        range.0 = range.0.max(end);
                    }
                }
            }
        }
        Formats(ranges)
    }

    /// The name of the plane's format, and how many weights it has if it is the first of its
    /// weight's planes.
    fn describe(&self, plane: &StoredPlane) -> (String, Option<u64>) {
        let elements = plane.shape.iter().fold(1u64, |n, d| n.saturating_mul(*d));
        let range = self.0.range(..=plane.offset).next_back().map(|(_, range)| *range);
        let Some((_, format)) = range.filter(|(end, _)| *end >= plane.offset.saturating_add(plane.piece)) else {
            return (plane.dtype.to_string(), Some(elements));
        };
        let mut others = format.planes().into_iter().flatten().skip(1);
        let last = plane.name.rsplit_once('.').map_or("", |(_, last)| last);
        let codes = format.plane(0).filter(|_| !others.any(|other| other.name == last));
        (format.to_string(), codes.map(|codes| elements.saturating_mul(codes.per) / codes.elems.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_layer_and_role() {
        for (name, layer, role) in [
            ("model.embed_tokens.weight", None, Role::Embedding),
            ("model.layers.0.input_layernorm.weight", Some(0), Role::Norm),
            ("model.layers.12.self_attn.q_norm.weight", Some(12), Role::Attention),
            ("model.layers.1.linear_attn.A_log", Some(1), Role::DeltaRule),
            ("model.layers.1.mlp.gate.scales", Some(1), Role::Router),
            ("model.layers.1.mlp.gate_proj.scales", Some(1), Role::FeedForward),
            ("model.layers.1.mlp.switch_mlp.up_proj.weight", Some(1), Role::Experts),
            ("model.layers.1.mlp.shared_expert.up_proj.weight", Some(1), Role::SharedExpert),
            ("model.layers.1.mlp.shared_expert_gate.weight", Some(1), Role::Router),
            ("model.norm.weight", None, Role::Norm),
            ("lm_head.biases", None, Role::LmHead),
            ("rope.inv_freq", None, Role::Constant),
            ("model.layers.x.y", None, Role::Other),
            ("layers.3.k", Some(3), Role::Other),
        ] {
            assert_eq!((layer_of(name), Role::of(name)), (layer, role), "{name}");
        }
    }
}
