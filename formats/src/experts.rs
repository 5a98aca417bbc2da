//! Experts side by side: one tensor in place of a layer's stacked expert matrices.
//!
//! A token reads a few experts of a layer, and of each all its matrices. So all parts of one expert
//! lie together: the tensor `MODULE.experts`, `u8 [experts, bytes]`, has a *record* per expert, and
//! a record has the planes of the expert's matrices, one after another. The manifest names the
//! matrices with their shapes and formats ([`ExpertTensor::read_all`]); where each plane lies in a
//! record follows from that alone ([`ExpertTensor::new`]; FORMAT.md, Experts).
//!
//! Kernels need none of this: operands have strides. It is for those who write files, and for those
//! who name what is in them.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde_json::{Value, json};

use crate::container::{Container, SectionKind, TensorEntry, bad_weight_name};
use crate::dtype::{DType, Plane, WeightFormat};
use crate::op::MAX_COUNT;
use crate::text::short;

/// Records, and the planes in them, begin on multiples of this.
const ALIGN: u64 = 64;

/// One matrix of every expert of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMatrix {
    /// The weight's name, `MODULE.PROJECTION.weight`.
    pub name: String,
    /// Rows.
    pub outputs: u64,
    /// Columns.
    pub inputs: u64,
    /// How it is stored.
    pub format: WeightFormat,
}

/// A plane of a matrix in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPlane {
    /// Index of the matrix.
    pub matrix: usize,
    /// Index among the format's planes.
    pub plane: usize,
    /// First byte in the record.
    pub begin: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The experts of one layer, a record each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertTensor {
    /// The tensor's name, `MODULE.experts`.
    pub name: String,
    /// Records.
    pub experts: u64,
    /// Length of a record in bytes.
    pub record_bytes: u64,
    /// The matrices of an expert, in order.
    pub matrices: Vec<ExpertMatrix>,
    /// Their planes, in order.
    pub planes: Vec<ExpertPlane>,
}

/// A description of experts that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsError {
    /// Where in the manifest, or which tensor.
    pub at: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for ExpertsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (at, found) = (short(&self.at, 200), short(&self.found, 200));
        write!(f, "{at}: expected {}, found {found}", self.expected)
    }
}

impl std::error::Error for ExpertsError {}

fn refuse<T>(at: &str, expected: impl Into<String>, found: impl ToString) -> Result<T, ExpertsError> {
    Err(ExpertsError { at: at.to_string(), expected: expected.into(), found: found.to_string() })
}

/// The name of plane `i` of the weight `weight`: its own, or its module's followed by the plane's.
pub fn plane_name(weight: &str, i: usize, plane: Plane) -> String {
    match i {
        0 => weight.to_string(),
        _ => format!("{}.{}", weight.strip_suffix(".weight").unwrap_or(weight), plane.name),
    }
}

impl ExpertTensor {
    /// Lays records out; `None` if there is no matrix or expert, a format does not divide its rows,
    /// or a length overflows.
    pub fn new(name: String, experts: u64, matrices: Vec<ExpertMatrix>) -> Option<ExpertTensor> {
        let (mut planes, mut end) = (Vec::new(), 0u64);
        for (matrix, m) in matrices.iter().enumerate() {
            if !m.format.divides(m.inputs) {
                return None;
            }
            for (plane, p) in m.format.planes().into_iter().flatten().enumerate() {
                let begin = end.checked_next_multiple_of(ALIGN)?;
                let bytes = p.row_bytes(m.inputs)?.checked_mul(m.outputs)?;
                end = begin.checked_add(bytes)?;
                planes.push(ExpertPlane { matrix, plane, begin, bytes });
            }
        }
        let record_bytes = end.checked_next_multiple_of(ALIGN)?;
        record_bytes.checked_mul(experts).filter(|&all| all > 0)?;
        Some(ExpertTensor { name, experts, record_bytes, matrices, planes })
    }

    /// The planes of matrix `matrix`.
    pub fn planes_of(&self, matrix: usize) -> impl Iterator<Item = &ExpertPlane> {
        self.planes.iter().filter(move |p| p.matrix == matrix)
    }

    /// The gaps of a record, which hold zeros.
    pub fn padding(&self) -> impl Iterator<Item = Range<u64>> {
        let ends = self.planes.iter().map(|p| p.begin + p.bytes);
        let begins = self.planes.iter().skip(1).map(|p| p.begin).chain([self.record_bytes]);
        ends.zip(begins).map(|(end, begin)| end..begin).filter(|gap| !gap.is_empty())
    }

    /// The tensor's type and shape in the file.
    pub fn shape(&self) -> (DType, [u64; 2]) {
        (DType::U8, [self.experts, self.record_bytes])
    }

    /// As the manifest has it.
    pub fn describe(&self) -> Value {
        let matrices = self.matrices.iter().map(
            |m| json!({ "name": m.name, "outputs": m.outputs, "inputs": m.inputs, "format": m.format.to_string() }),
        );
        json!({
            "tensor": self.name, "experts": self.experts, "record_bytes": self.record_bytes,
            "matrices": matrices.collect::<Vec<_>>(),
        })
    }

    fn read(value: &Value) -> Result<ExpertTensor, ExpertsError> {
        let at = "manifest, experts";
        let text = |v: &Value, key: &str| match v[key].as_str() {
            Some(text) => Ok(text.to_string()),
            None => refuse(at, format!("a text {key:?}"), &v[key]),
        };
        let count = |v: &Value, key: &str| match v[key].as_u64().filter(|n| (1..=MAX_COUNT).contains(n)) {
            Some(n) => Ok(n),
            None => refuse(at, format!("{key:?}, a count"), &v[key]),
        };
        let Some(list) = value["matrices"].as_array() else {
            return refuse(at, "a list of matrices", &value["matrices"]);
        };
        let matrix = |m: &Value| {
            let format = text(m, "format")?;
            let Some(format) = WeightFormat::from_name(&format) else {
                return refuse(at, "the name of a weight format", format);
            };
            let (name, outputs, inputs) = (text(m, "name")?, count(m, "outputs")?, count(m, "inputs")?);
            match bad_weight_name(&name) {
                None => Ok(ExpertMatrix { name, outputs, inputs, format }),
                Some(why) => refuse(at, why, name),
            }
        };
        let matrices = list.iter().map(matrix).collect::<Result<Vec<_>, _>>()?;
        let (name, experts) = (text(value, "tensor")?, count(value, "experts")?);
        match ExpertTensor::new(name, experts, matrices) {
            Some(tensor) if value["record_bytes"].as_u64() == Some(tensor.record_bytes) => Ok(tensor),
            Some(tensor) => refuse(at, format!("records of {} bytes", tensor.record_bytes), &value["record_bytes"]),
            None => refuse(at, "matrices that a record can hold", value),
        }
    }

    /// The tensors with experts that a manifest describes; none if it describes none.
    ///
    /// # Errors
    /// What stands under `experts` describes no tensors with experts.
    pub fn read_all(manifest: &Value) -> Result<Vec<ExpertTensor>, ExpertsError> {
        match &manifest["experts"] {
            Value::Null => Ok(Vec::new()),
            Value::Array(list) => list.iter().map(ExpertTensor::read).collect(),
            other => refuse("manifest, experts", "a list", other),
        }
    }
}

/// A plane of a weight in a file: in a tensor of its own, or a piece of each of its experts'
/// records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPlane {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents, of all experts.
    pub shape: Vec<u64>,
    /// Data offset of its first byte.
    pub offset: u64,
    /// Bytes that lie together: all, or an expert's.
    pub piece: u64,
    /// Pieces, and bytes from one to the next.
    pub pieces: (u64, u64),
}

impl StoredPlane {
    /// Where the pieces are in the data area.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let (offset, piece, (count, step)) = (self.offset, self.piece, self.pieces);
        (0..count).map(move |i| offset + i * step..offset + i * step + piece)
    }

    fn of_tensor(t: &TensorEntry) -> StoredPlane {
        // An expert is a piece wherever it lies, so that a plane can be compared with one that lies
        // otherwise.
        let count = if t.shape.len() == 3 { t.shape[0].max(1) } else { 1 };
        let piece = t.len / count;
        let (name, shape) = (t.name.clone(), t.shape.clone());
        StoredPlane { name, dtype: t.dtype, shape, offset: t.offset, piece, pieces: (count, piece) }
    }

    fn of_experts(tensor: &ExpertTensor, offset: u64, p: &ExpertPlane) -> Option<StoredPlane> {
        let m = &tensor.matrices[p.matrix];
        let plane = m.format.plane(p.plane)?;
        Some(StoredPlane {
            name: plane_name(&m.name, p.plane, plane),
            dtype: plane.dtype,
            shape: vec![tensor.experts, m.outputs, plane.row_elems(m.inputs)?],
            offset: offset + p.begin,
            piece: p.bytes,
            pieces: (tensor.experts, tensor.record_bytes),
        })
    }
}

/// Every plane of every weight of a loaf, in the order of the header; those of experts by their own
/// names. The manifest must have been hashed.
///
/// # Errors
/// A header that disagrees with the head, or a manifest whose experts are not the file's.
pub fn stored_planes(container: &Container<'_>) -> Result<Vec<StoredPlane>, ExpertsError> {
    let tensors = container.tensors().or_else(|e| refuse("header", "tensors", e))?;
    let manifest = container.section(SectionKind::Manifest).map(serde_json::from_slice);
    let manifest = manifest.transpose().or_else(|e| refuse("manifest", "JSON", e))?;
    let experts = ExpertTensor::read_all(&manifest.unwrap_or(Value::Null))?;
    let count = experts.len();
    let mut experts: BTreeMap<&str, &ExpertTensor> = experts.iter().map(|e| (e.name.as_str(), e)).collect();
    if experts.len() != count {
        return refuse("manifest, experts", "every tensor once", "one twice");
    }
    let mut planes = Vec::new();
    for t in tensors.iter().filter(|t| t.is_weight()) {
        let Some(of) = experts.remove(t.name.as_str()) else {
            planes.push(StoredPlane::of_tensor(t));
            continue;
        };
        if (t.dtype, t.shape.as_slice()) != (of.shape().0, of.shape().1.as_slice()) {
            return refuse(&t.name, format!("{:?}", of.shape()), format!("{:?}", (t.dtype, &t.shape)));
        }
        planes.extend(of.planes.iter().filter_map(|p| StoredPlane::of_experts(of, t.offset, p)));
    }
    match experts.keys().next() {
        Some(missing) => refuse(missing, "a tensor", "none"),
        None => Ok(planes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q4: WeightFormat = WeightFormat::Affine { bits: 4, group: 32, params: DType::BF16 };

    fn tensor() -> ExpertTensor {
        let matrix = |name: &str, outputs, inputs, format| ExpertMatrix { name: name.into(), outputs, inputs, format };
        let matrices = vec![
            matrix("m.gate.weight", 3, 32, Q4),
            matrix("m.up.weight", 3, 32, WeightFormat::Mxfp4),
            matrix("m.down.weight", 5, 3, WeightFormat::Dense(DType::F32)),
        ];
        ExpertTensor::new("m.experts".into(), 7, matrices).expect("matrices that fit")
    }

    #[test]
    fn planes_follow_each_other_on_multiples_of_64() {
        let t = tensor();
        let places: Vec<_> = t.planes.iter().map(|p| (p.matrix, p.plane, p.begin, p.bytes)).collect();
        let expected = [(0, 0, 0, 48), (0, 1, 64, 6), (0, 2, 128, 6), (1, 0, 192, 48), (1, 1, 256, 3), (2, 0, 320, 60)];
        assert_eq!(places, expected);
        assert_eq!(t.record_bytes, 384);
        let gaps: Vec<_> = t.padding().collect();
        assert_eq!(gaps, [48..64, 70..128, 134..192, 240..256, 259..320, 380..384]);
        assert_eq!(
            gaps.iter().map(|g| g.end - g.start).sum::<u64>() + t.planes.iter().map(|p| p.bytes).sum::<u64>(),
            384
        );
    }

    #[test]
    fn a_description_is_read_back_and_a_wrong_one_refused() {
        let t = tensor();
        let good = json!({ "experts": [t.describe()] });
        assert_eq!(ExpertTensor::read_all(&good), Ok(vec![t]));
        assert_eq!(ExpertTensor::read_all(&json!({})), Ok(vec![]));
        let wrong: [(&str, Value); 6] = [
            ("/experts/0/record_bytes", 383.into()),
            ("/experts/0/experts", 0.into()),
            ("/experts/0/matrices/0/format", "q4g32".into()),
            ("/experts/0/matrices/0/inputs", 31.into()),
            ("/experts/0/matrices/2/outputs", u64::MAX.into()),
            ("/experts/0/matrices", json!([])),
        ];
        for (pointer, value) in wrong {
            let mut bad = good.clone();
            *bad.pointer_mut(pointer).expect("a value") = value;
            assert!(ExpertTensor::read_all(&bad).is_err(), "{pointer}");
        }
    }

    #[test]
    fn names_are_those_of_separate_tensors() {
        let scales = Q4.plane(1).expect("a plane");
        assert_eq!(plane_name("m.gate.weight", 1, scales), "m.gate.scales");
        assert_eq!(plane_name("m.gate.weight", 0, Q4.plane(0).expect("a plane")), "m.gate.weight");
    }
}
