//! The safetensors header of a loaf: written in one canonical way, and read strictly.
//!
//! Canonical form: `{"__metadata__":{"format":"pt"}` and then, for each tensor in data order,
//! `,"NAME":{"dtype":"D","shape":[S,..],"data_offsets":[B,E]}`, a closing brace, no white space,
//! then spaces up to a length that puts the data area on a page. [`parse`] renders what it read
//! again and requires the same bytes: so two JSON parsers can never see two different files. (`pt`
//! is what loaders that insist on a format accept.)
//!
//! [`check`] proves that header and table say the same: the tensors tile the data area without hole
//! or overlap, `loaf.*` tensors are exactly the head, the sections and the padding, and all others
//! lie in the Weights section and fill it from end to end. Neither function looks at tensor bytes.

use super::error::{Error, Where};
use super::head::{HEAD_BYTES, Head, expect};
use super::{LINE_BYTES, PAGE_BYTES, SectionKind};
use crate::dtype::DType;
use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

/// Longest JSON header in bytes: what the safetensors library itself accepts.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most tensors of a file, padding included.
pub const MAX_TENSORS: usize = 1 << 20;
/// Most dimensions of a tensor.
pub(crate) const MAX_RANK: usize = 8;

pub(crate) const HEAD_NAME: &str = "loaf.head";
pub(crate) const OWN_PREFIX: &str = "loaf.";
pub(crate) const PAD_PREFIX: &str = "loaf.pad.";
const METADATA_NAME: &str = "__metadata__";
const METADATA: &str = r#"{"format":"pt"}"#;

/// One tensor as the safetensors header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Elements along each dimension, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// First byte, from the start of the data area.
    pub offset: u64,
    /// Length in bytes: elements times element size.
    pub len: u64,
}

impl TensorEntry {
    /// A run of bytes under one of the container's own names.
    pub(crate) fn own(name: String, offset: u64, len: u64) -> TensorEntry {
        TensorEntry { name, dtype: DType::U8, shape: vec![len], offset, len }
    }

    /// Whether this is a weight, not something the container put there.
    pub fn is_weight(&self) -> bool {
        !self.name.starts_with(OWN_PREFIX)
    }

    /// Whether these are bytes that must be zero.
    pub fn is_padding(&self) -> bool {
        self.name.starts_with(PAD_PREFIX)
    }
}

/// Bytes of a tensor; `None` on overflow.
pub(crate) fn tensor_bytes(dtype: DType, shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(dtype.bytes(), |n, dim| n.checked_mul(*dim))
}

/// Why a weight may not be called this, if it may not.
pub(crate) fn bad_weight_name(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("expected a name, found an empty one")
    } else if name.len() > 1024 {
        Some("expected a name of at most 1024 bytes, found a longer one")
    } else if name == METADATA_NAME || name.starts_with(OWN_PREFIX) {
        Some("expected the name of a weight, found one that the format keeps for itself")
    } else if name.chars().any(char::is_control) {
        Some("expected a printable name, found control characters")
    } else {
        None
    }
}

/// The file's first bytes: length prefix, canonical JSON, spaces. The result is a whole number of
/// pages.
///
/// # Errors
/// [`Error::Field`] if the JSON would be longer than [`MAX_HEADER_BYTES`].
pub(crate) fn render(tensors: &[TensorEntry]) -> Result<Vec<u8>, Error> {
    let mut out = vec![0; 8];
    out.extend_from_slice(format!("{{\"{METADATA_NAME}\":{METADATA}").as_bytes());
    for t in tensors {
        out.push(b',');
        out.extend_from_slice(serde_json::Value::from(t.name.as_str()).to_string().as_bytes());
        let shape: Vec<String> = t.shape.iter().map(u64::to_string).collect();
        let (dtype, shape, end) = (t.dtype.safetensors_name(), shape.join(","), t.offset.saturating_add(t.len));
        let value = format!(":{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{},{end}]}}", t.offset);
        out.extend_from_slice(value.as_bytes());
    }
    out.push(b'}');
    out.resize(out.len().next_multiple_of(PAGE_BYTES as usize), b' ');
    let json_len = out.len() as u64 - 8;
    if json_len > MAX_HEADER_BYTES {
        return Err(Error::field(Where::Header, "length", format!("at most {MAX_HEADER_BYTES}"), json_len));
    }
    out[..8].copy_from_slice(&json_len.to_le_bytes());
    Ok(out)
}

/// Reads the length prefix and JSON, `8 + N` bytes in all.
///
/// # Errors
/// [`Error::Json`] for anything other than a safetensors header within the caps, and
/// [`Error::Field`] for a tensor whose length is not that of its shape or for a header not in
/// canonical form.
pub(crate) fn parse(header: &[u8]) -> Result<Vec<TensorEntry>, Error> {
    let json = header.get(8..).unwrap_or_default();
    let Tensors(tensors) = serde_json::from_slice(json).map_err(|e| Error::Json { message: e.to_string() })?;
    for t in &tensors {
        let at = || Where::Tensor(t.name.clone());
        if t.shape.len() > MAX_RANK {
            let expected = format!("at most {MAX_RANK} dimensions");
            return Err(Error::field(at(), "shape", expected, t.shape.len()));
        }
        let bytes = tensor_bytes(t.dtype, &t.shape)
            .ok_or_else(|| Error::field(at(), "shape", "a length in bytes below 2^64", "an overflow"))?;
        expect(at(), "length", bytes, t.len)?;
    }
    let canonical = render(&tensors)?;
    if canonical != header {
        let differ = canonical.iter().zip(header).position(|(a, b)| a != b);
        let at = differ.unwrap_or(canonical.len().min(header.len()));
        let found = format!("a difference at file offset {at}");
        return Err(Error::field(Where::Header, "JSON", "canonical form", found));
    }
    Ok(tensors)
}

/// Proves that the tensors of the header are those of the table, as the module's essay has it.
///
/// # Errors
/// [`Error::Field`] or [`Error::Name`] for the first tensor that is not where or what it must be.
pub(crate) fn check(tensors: &[TensorEntry], head: &Head) -> Result<(), Error> {
    let weights = head.section(SectionKind::Weights).ok_or(Error::MissingSection { kind: SectionKind::Weights })?;
    let mut sections = head.sections.iter().filter(|s| s.kind != SectionKind::Weights.code());
    let (mut cursor, mut pads, mut after_pad, mut weights_end) = (0, 0u64, false, None);
    for (i, t) in tensors.iter().enumerate() {
        let at = || Where::Tensor(t.name.clone());
        expect(at(), "offset", cursor, t.offset)?;
        cursor = t
            .offset
            .checked_add(t.len)
            .filter(|end| *end <= head.data_len)
            .ok_or_else(|| Error::field(at(), "length", format!("at most {}", head.data_len - t.offset), t.len))?;
        if (i == 0) != (t.name == HEAD_NAME) {
            return Err(Error::field(at(), "place", "loaf.head first and only there", format!("tensor {i}")));
        }
        if !t.is_weight() && (t.dtype != DType::U8 || t.shape != [t.len]) {
            return Err(Error::field(at(), "type", "a row of U8", format!("{} of shape {:?}", t.dtype, t.shape)));
        }
        if t.is_padding() {
            let expected = format!("{PAD_PREFIX}{pads}");
            if t.name != expected {
                return Err(Error::field(at(), "name", expected, "another number"));
            }
            if t.len == 0 || t.len >= PAGE_BYTES || after_pad {
                return Err(Error::field(at(), "length", "one run of 1..16384 bytes", t.len));
            }
            pads += 1;
        } else if i == 0 {
            expect(at(), "length", HEAD_BYTES, t.len)?;
        } else if t.is_weight() {
            if let Some(why) = bad_weight_name(&t.name) {
                return Err(Error::Name { name: t.name.clone(), why });
            }
            if t.len == 0 || !t.offset.is_multiple_of(LINE_BYTES) {
                let found = format!("{} bytes at {}", t.len, t.offset);
                return Err(Error::field(at(), "span", "some bytes at a multiple of 64", found));
            }
            if weights_end.is_none() {
                expect(at(), "offset of the first weight", weights.offset, t.offset)?;
            }
            if cursor > weights.end() {
                return Err(Error::field(at(), "end", format!("at most {}", weights.end()), cursor));
            }
            weights_end = Some(cursor);
        } else {
            let section = sections.next().ok_or_else(|| Error::field(at(), "place", "no further section", "one"))?;
            let named = match SectionKind::from_code(section.kind) {
                Some(kind) => kind.tensor_name() == Some(t.name.as_str()),
                None => SectionKind::ALL.iter().all(|k| k.tensor_name() != Some(t.name.as_str())),
            };
            if !named {
                return Err(Error::field(at(), "name", format!("that of {}", Where::Section(section.kind)), "this"));
            }
            expect(at(), "offset", section.offset, t.offset)?;
            expect(at(), "length", section.len, t.len)?;
        }
        after_pad = t.is_padding();
    }
    expect(Where::Header, "end of the last tensor", head.data_len, cursor)?;
    if let Some(section) = sections.next() {
        return Err(Error::field(Where::Section(section.kind), "tensor", "one", "none"));
    }
    expect(Where::section(SectionKind::Weights), "end", weights.end(), weights_end.unwrap_or(weights.offset))
}

/// The tensors of a header in the order they are written in, names unique.
struct Tensors(Vec<TensorEntry>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Tensors {
    fn deserialize<D: de::Deserializer<'de>>(from: D) -> Result<Tensors, D::Error> {
        from.deserialize_map(TensorsVisitor)
    }
}

struct TensorsVisitor;

impl<'de> Visitor<'de> for TensorsVisitor {
    type Value = Tensors;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from names to tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tensors, A::Error> {
        let (mut tensors, mut names) = (Vec::new(), HashSet::new());
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(de::Error::custom(format!("the name \"{}\" twice", name.escape_default())));
            }
            if name == METADATA_NAME {
                // What it must be is settled by the comparison with the canonical form.
                map.next_value::<de::IgnoredAny>()?;
                continue;
            }
            if tensors.len() == MAX_TENSORS {
                return Err(de::Error::custom(format!("more than {MAX_TENSORS} tensors")));
            }
            let Info { dtype, shape, data_offsets: (offset, end) } = map.next_value()?;
            let dtype = DType::from_safetensors_name(&dtype)
                .ok_or_else(|| de::Error::custom(format!("the unknown type \"{}\"", dtype.escape_default())))?;
            let len =
                end.checked_sub(offset).ok_or_else(|| de::Error::custom(format!("a tensor from {offset} to {end}")))?;
            tensors.push(TensorEntry { name, dtype, shape, offset, len });
        }
        Ok(Tensors(tensors))
    }
}

#[cfg(test)]
mod tests {
    use super::super::head::Section;
    use super::super::layout::{FileLayout, Layout};
    use super::*;

    fn header(json: &str) -> Vec<u8> {
        let mut out = vec![0; 8];
        out.extend_from_slice(json.as_bytes());
        out.resize(out.len().next_multiple_of(PAGE_BYTES as usize), b' ');
        let json_len = out.len() as u64 - 8;
        out[..8].copy_from_slice(&json_len.to_le_bytes());
        out
    }

    const META: &str = r#"{"__metadata__":{"format":"pt"},"#;

    fn refused(tail: &str) -> String {
        parse(&header(&format!("{META}{tail}"))).unwrap_err().to_string()
    }

    #[test]
    fn a_header_survives_its_bytes_even_with_odd_names() {
        let named = |name: &str, offset| TensorEntry {
            name: name.into(),
            dtype: DType::BF16,
            shape: vec![2, 3],
            offset,
            len: 12,
        };
        let tensors = vec![TensorEntry::own("loaf.head".into(), 0, 5), named("a\"\\b\u{1F35E}é/", 5), named("", 17)];
        let bytes = render(&tensors).unwrap();
        assert!((bytes.len() as u64).is_multiple_of(PAGE_BYTES));
        assert_eq!(parse(&bytes).unwrap(), tensors);
    }

    #[test]
    fn a_scalar_has_one_element() {
        let text = format!("{META}\"x\":{{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}}}");
        assert_eq!(parse(&header(&text)).unwrap()[0].len, 4);
    }

    #[test]
    fn headers_that_two_parsers_could_read_differently_are_refused() {
        let x = r#""x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
        assert!(parse(&header(&format!("{META}{x}}}"))).is_ok());
        assert!(refused(&format!("{x},{x}}}")).contains("twice"));
        assert!(refused(&format!(" {x}}}")).contains("canonical form"));
        assert!(refused(r#""\u0078":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#).contains("canonical"));
        assert!(refused(r#""x":{"dtype":"U8","data_offsets":[0,1],"shape":[1]}}"#).contains("canonical"));
        assert!(refused(r#""x":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}"#).contains("duplicate"));
        assert!(refused(&format!("{x}}} x")).contains("trailing"));
        assert!(parse(&header(&format!("{{{x}}}"))).is_err());
        assert!(parse(&header(&format!("{{\"__metadata__\":{{\"format\":\"np\"}},{x}}}"))).is_err());
    }

    #[test]
    fn shapes_and_spans_are_checked_without_overflow() {
        let with = |shape: &str, span: &str| {
            refused(&format!("\"x\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":{span}}}}}"))
        };
        assert!(with("[4294967296,4294967296]", "[0,0]").contains("an overflow"));
        assert!(with("[2]", "[0,4]").contains("length: expected 8, found 4"));
        assert!(with("[2]", "[8,0]").contains("from 8 to 0"));
        assert!(with("[-1]", "[0,4]").contains("invalid value"));
        assert!(with("[1.5]", "[0,4]").contains("invalid type"));
        assert!(with("[1,1,1,1,1,1,1,1,1]", "[0,4]").contains("at most 8 dimensions"));
        assert!(with("[18446744073709551616]", "[0,4]").contains("invalid type"));
        assert!(with("[1]", "[0,4,8]").contains("trailing"), "{}", with("[1]", "[0,4,8]"));
    }

    /// A file of two weights with padding around them and two sections, as its header and its table
    /// have it.
    fn agreeing() -> (Vec<TensorEntry>, Head) {
        let mut layout = Layout::new();
        layout.weight("a", DType::F32, &[3]).unwrap();
        layout.weight("b", DType::F16, &[2, 4]).unwrap();
        let file = FileLayout::new(layout.finish().unwrap(), &[(SectionKind::Plan, 5)]).unwrap();
        let sections = [SectionKind::Weights, SectionKind::Plan, SectionKind::HashTree].map(|kind| {
            let span = file.section(kind).unwrap();
            let (offset, len, alignment) = (span.start, span.end - span.start, kind.alignment() as u32);
            Section { kind: kind.code(), flags: 0, offset, len, alignment, root: [0; 32] }
        });
        let head = Head {
            major: 1,
            minor: 0,
            required_features: 0,
            optional_features: 0,
            file_len: file.file_len(),
            json_len: file.data_start() - 8,
            data_len: file.data_len(),
            header_sha256: [0; 32],
            sections: sections.to_vec(),
        };
        (parse(file.header()).unwrap(), head)
    }

    #[test]
    fn header_and_table_must_name_the_same_bytes() {
        let (tensors, head) = agreeing();
        check(&tensors, &head).unwrap();
        let names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        let expected =
            ["loaf.head", "loaf.pad.0", "a", "loaf.pad.1", "b", "loaf.pad.2", "loaf.plan", "loaf.pad.3", "loaf.hashes"];
        assert_eq!(names, expected);

        let refused = |change: &dyn Fn(&mut Vec<TensorEntry>, &mut Head), message: &str| {
            let (mut tensors, mut head) = (tensors.clone(), head.clone());
            change(&mut tensors, &mut head);
            let found = check(&tensors, &head).unwrap_err().to_string();
            assert!(found.contains(message), "expected \"{message}\", found \"{found}\"");
        };
        let shorten =
            |t: &mut TensorEntry, by: u64| *t = TensorEntry { len: t.len - by, shape: vec![t.len - by], ..t.clone() };
        refused(&|t, _| t.truncate(0), "end of the last tensor: expected");
        refused(&|t, _| drop(t.remove(0)), "tensor \"loaf.pad.0\": offset: expected 0, found 2048");
        refused(&|t, _| t[0].name = "head".into(), "loaf.head first");
        refused(&|t, _| t[2].name = "loaf.head".into(), "loaf.head first");
        refused(&|t, _| t[0].dtype = DType::I8, "type: expected a row of U8");
        refused(&|t, _| t[6].shape = vec![1, 5], "type: expected a row of U8");
        refused(&|t, _| t[1].name = "loaf.pad.1".into(), "name: expected loaf.pad.0");
        refused(&|t, _| t[1].name = "stowaway".into(), "offset of the first weight: expected 16384, found 2048");
        refused(&|t, _| t[3].name = "stowaway".into(), "span: expected some bytes at a multiple of 64");
        refused(&|t, _| t[6].name = "stowaway".into(), "end: expected at most");
        refused(&|t, _| t[4].name = "".into(), "expected a name, found an empty one");
        refused(&|t, _| t[6].name = "loaf.chat".into(), "name: expected that of section plan");
        refused(&|t, _| t[2].name = "loaf.extra".into(), "type: expected a row of U8");
        refused(&|t, _| shorten(&mut t[3], 1), "tensor \"b\": offset: expected");
        refused(&|t, _| t[8].len += 1, "tensor \"loaf.hashes\": length: expected at most 64, found 65");
        refused(&|t, _| shorten(&mut t[8], 1), "tensor \"loaf.hashes\": length: expected 64, found 63");
        refused(&|t, _| t[8].len = u64::MAX, "tensor \"loaf.hashes\": length: expected at most 64");
        refused(&|_, h| h.sections[0].len += 1, "section weights: end");
        refused(&|_, h| h.sections[1].len += 1, "tensor \"loaf.plan\": length: expected 6, found 5");
        refused(&|_, h| h.sections[1].kind = 77, "name: expected that of section of unknown kind 77");
        refused(&|_, h| h.sections.retain(|s| s.kind != 2), "name: expected that of section hashes");
        refused(&|_, h| h.sections.push(h.sections[2].clone()), "section hashes: tensor: expected one, found none");
        let split_pad = |t: &mut Vec<TensorEntry>, _: &mut Head| {
            let len = t[7].len;
            shorten(&mut t[7], len - 1);
            t.insert(8, TensorEntry::own("loaf.pad.4".into(), t[7].offset + 1, len - 1));
        };
        refused(&split_pad, "length: expected one run of 1..16384 bytes");
    }
}
