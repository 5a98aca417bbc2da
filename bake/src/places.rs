//! Where the planes of weights lie in the file: each in a tensor of its own, but those of a
//! mixture's experts, which stand expert by expert in one tensor a layer
//! ([`loaf_formats::experts`]).

use loaf_formats::container::{Error as ContainerError, Layout as FileWeights, WeightIx};
use loaf_formats::dtype::WeightFormat;
use loaf_formats::experts::{ExpertMatrix, ExpertTensor};

use crate::weights::{Resolved, WeightClass, WeightDecl};

/// A plane of a weight in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The tensor that holds it.
    pub tensor: WeightIx,
    /// Its first byte there.
    pub begin: u64,
    /// Of experts in records: bytes of each, and from one to the next.
    pub pieces: Option<(u64, u64)>,
}

impl Place {
    /// All of a tensor.
    pub fn whole(tensor: WeightIx) -> Place {
        Place { tensor, begin: 0, pieces: None }
    }

    /// Where in the tensor the bytes go that are the plane's from byte `at` on, cut where pieces
    /// end.
    pub fn parts<'a>(&self, at: u64, bytes: &'a [u8]) -> impl Iterator<Item = (u64, &'a [u8])> + use<'a> {
        let (begin, (piece, step)) = (self.begin, self.pieces.unwrap_or((u64::MAX, 0)));
        let mut done = 0;
        std::iter::from_fn(move || {
            let (rest, at) = (&bytes[done..], at + done as u64);
            let n = (rest.len() as u64).min(piece - at % piece) as usize;
            done += n;
            (n > 0).then(|| (begin + at / piece * step + at % piece, &rest[..n]))
        })
    }
}

/// The tensors with the experts of `decls`, each with the index of its first matrix; the others
/// follow it.
///
/// # Errors
/// Names a tensor whose records would be longer than can be.
pub fn expert_tensors(decls: &[WeightDecl], formats: &[WeightFormat]) -> Result<Vec<(usize, ExpertTensor)>, String> {
    let (mut tensors, mut i) = (Vec::new(), 0);
    while i < decls.len() {
        let module = expert_module(&decls[i]);
        let Some((name, experts)) = module else {
            i += 1;
            continue;
        };
        let of_module = decls.iter().zip(formats).skip(i).take_while(|(d, _)| expert_module(d) == module);
        let matrices: Vec<_> = of_module
            .map(|(d, &format)| ExpertMatrix { name: d.name.clone(), outputs: d.shape[1], inputs: d.shape[2], format })
            .collect();
        let (first, count) = (i, matrices.len());
        let tensor = ExpertTensor::new(format!("{name}.experts"), experts, matrices);
        tensors.push((
            first,
            tensor.ok_or_else(|| format!("experts of {name}: expected records of fewer than 2^64 bytes"))?,
        ));
        i += count;
    }
    Ok(tensors)
}

/// The module and number of the experts that a weight belongs to.
fn expert_module(decl: &WeightDecl) -> Option<(&str, u64)> {
    match (decl.class, decl.shape.as_slice()) {
        (WeightClass::Experts { .. }, &[experts, _, _]) => {
            let module = decl.name.strip_suffix(".weight")?.rsplit_once('.')?.0;
            Some((module, experts))
        }
        _ => None,
    }
}

/// Declares the tensors of every weight; per weight the places of its planes.
///
/// # Errors
/// What [`FileWeights::weight`] refuses.
pub fn declare(
    file: &mut FileWeights,
    resolved: &[Resolved],
    experts: &[(usize, ExpertTensor)],
) -> Result<Vec<Vec<Place>>, ContainerError> {
    let mut places: Vec<Vec<Place>> = Vec::with_capacity(resolved.len());
    let mut experts = experts.iter().peekable();
    while let Some(r) = resolved.get(places.len()) {
        if let Some((_, t)) = experts.next_if(|(first, _)| *first == places.len()) {
            let (dtype, shape) = t.shape();
            let tensor = file.weight(&t.name, dtype, &shape)?;
            let place = |p: &loaf_formats::experts::ExpertPlane| Place {
                tensor,
                begin: p.begin,
                pieces: Some((p.bytes, t.record_bytes)),
            };
            places.extend((0..t.matrices.len()).map(|m| t.planes_of(m).map(place).collect()));
        } else {
            let own = r.stored.iter().map(|t| file.weight(&t.name, t.dtype, &t.shape).map(Place::whole));
            places.push(own.collect::<Result<_, _>>()?);
        }
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use loaf_formats::dtype::DType;

    fn decl(name: &str, shape: [u64; 3]) -> WeightDecl {
        let class = WeightClass::Experts { count: shape[0] };
        WeightDecl { name: name.into(), shape: shape.to_vec(), class }
    }

    #[test]
    fn bytes_are_cut_where_an_expert_s_piece_ends() {
        let mut file = FileWeights::new();
        let tensor = file.weight("t", DType::U8, &[3, 100]).expect("a weight");
        let place = Place { tensor, begin: 64, pieces: Some((10, 100)) };
        let bytes: Vec<u8> = (7..28).collect();
        let parts: Vec<_> = place.parts(7, &bytes).map(|(at, b)| (at, b.to_vec())).collect();
        assert_eq!(parts, [(71, bytes[..3].to_vec()), (164, bytes[3..13].to_vec()), (264, bytes[13..].to_vec())]);
        let whole: Vec<_> = Place::whole(tensor).parts(7, &bytes).collect();
        assert_eq!(whole, [(7, bytes.as_slice())]);
        assert_eq!(place.parts(7, &[]).count(), 0);
    }

    #[test]
    fn the_experts_of_a_layer_are_one_tensor() {
        let decls = [
            decl("l.0.switch_mlp.gate.weight", [4, 8, 32]),
            decl("l.0.switch_mlp.down.weight", [4, 32, 8]),
            decl("l.1.switch_mlp.gate.weight", [4, 8, 32]),
        ];
        let formats = [WeightFormat::Mxfp4, WeightFormat::Dense(DType::BF16), WeightFormat::Mxfp4];
        let tensors = expert_tensors(&decls, &formats).expect("records");
        let facts: Vec<_> =
            tensors.iter().map(|(i, t)| (*i, t.name.as_str(), t.matrices.len(), t.record_bytes)).collect();
        // 8 rows of 16 bytes and one scale each; 32 rows of 16 bytes.
        assert_eq!(
            facts,
            [(0, "l.0.switch_mlp.experts", 2, 128 + 64 + 512), (2, "l.1.switch_mlp.experts", 1, 128 + 64)]
        );
    }
}
