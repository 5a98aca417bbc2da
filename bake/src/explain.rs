//! Reading a loaf back for people: what it holds, and any one concrete graph.

use std::fmt::Write;

use loaf_formats::container::Container;
use loaf_formats::dtype::WeightFormat;
use loaf_formats::experts::{ExpertsError, StoredPlane, stored_planes};
use loaf_formats::op::{AttrKind, Mode};
use loaf_formats::plan::{Operand, Phase, Record, Region, StateKind, VerifiedPlan, records};
use loaf_formats::text::line;

/// Names for addresses: which tensor, state or port an operand is.
pub struct Names<'a> {
    plan: &'a VerifiedPlan,
    /// By offset; of experts that of the first.
    tensors: Vec<StoredPlane>,
}

impl<'a> Names<'a> {
    /// Reads the names out of the container's header and manifest.
    ///
    /// # Errors
    /// See [`stored_planes`].
    pub fn new(container: &Container<'_>, plan: &'a VerifiedPlan) -> Result<Self, ExpertsError> {
        let mut tensors = stored_planes(container)?;
        tensors.sort_by_key(|t| t.offset);
        Ok(Names { plan, tensors })
    }

    fn of(&self, o: &Operand) -> String {
        let within = |name: &str, start: u64| match o.offset - start {
            0 => line(name).to_string(),
            more => format!("{}+{more}", line(name)),
        };
        match o.region {
            Region::None => "-".to_string(),
            Region::Arena => format!("A+{}", o.offset),
            Region::Weights => {
                let i = self.tensors.partition_point(|t| t.offset <= o.offset);
                self.tensors
                    .get(i.wrapping_sub(1))
                    .map_or_else(|| format!("W+{}", o.offset), |t| within(&t.name, t.offset))
            }
            Region::Cache | Region::Recurrent => {
                let kind = if o.region == Region::Cache { StateKind::KvCache } else { StateKind::Recurrent };
                let state = self.plan.states.iter().rev().find(|s| s.kind == kind && s.offset <= o.offset);
                state.map_or_else(|| format!("{}+{}", o.region, o.offset), |s| within(&s.name, s.offset))
            }
            Region::Io => {
                let io = &self.plan.io;
                let ports = [("logits", io.logits), ("hidden", io.hidden), ("select", io.select), ("ids", io.ids)];
                let port = ports.iter().find(|p| p.1 <= o.offset);
                port.map_or_else(|| format!("IO+{}", o.offset), |(name, start)| within(name, *start))
            }
        }
    }
}

/// The concrete graph of a phase at position `p` with `n` rows, one op per line; `None` if the loaf
/// has no such graph.
pub fn graph(names: &Names<'_>, phase: Phase, p: u32, n: u32) -> Option<String> {
    let template = names.plan.templates_of(phase).find(|t| t.max_rows >= n && n > 0)?;
    if p.checked_add(n)? > template.positions {
        return None;
    }
    let mut words = Vec::new();
    template.expand(u64::from(n), &mut words);
    let mut out = String::new();
    for (i, record) in records(&words).flatten().enumerate() {
        let _ = writeln!(out, "{i:>5}  {}", record_line(names, &record));
    }
    Some(out)
}

fn record_line(names: &Names<'_>, record: &Record<'_>) -> String {
    let spec = record.kind.spec();
    let operand = |i: usize| {
        let (o, dims) = (record.operand(i), record.dims(i).unwrap_or_default());
        format!("{}:{}[{},{},{}]", names.of(&o), o.dtype, dims[0], dims[1], dims[2])
    };
    let of_mode = |written: bool| -> Vec<String> {
        let present = |i: &usize| record.operand(*i).region != Region::None;
        (0..spec.operands.len())
            .filter(|&i| (spec.operands[i].mode == Mode::In) != written)
            .filter(present)
            .map(operand)
            .collect()
    };
    let mut text = format!("{} = {}({})", of_mode(true).join(", "), spec.name, of_mode(false).join(", "));
    for (rule, &v) in spec.attrs.iter().zip(record.attrs) {
        let _ = match rule.kind {
            AttrKind::Real => write!(text, " {}={}", rule.name, f32::from_bits(v as u32)),
            AttrKind::Format => match WeightFormat::from_code(v) {
                Some(f) => write!(text, " {}={f}", rule.name),
                None => write!(text, " {}={v:#x}", rule.name),
            },
            _ => write!(text, " {}={v}", rule.name),
        };
    }
    text
}
