//! The safetensors header, parsed strictly.
//!
//! A header is hostile until parsed: what this returns has in-file, non-overlapping, gapless byte
//! ranges whose lengths equal what shape and element type imply, unique names, and no arithmetic
//! that could have wrapped. The `safetensors` crate is not used for this: its final length check
//! adds header-controlled offsets unchecked, which a header of several 2^61-byte tensors can wrap.
//!
//! Element types that Loaf has no use for (I64, F8_E4M3, ...) are kept by name: a file may hold
//! some that nothing asks for.

use std::fmt;

use loaf_formats::dtype::DType;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

/// The longest header that is read: the bound the reference implementation uses.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor as its header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Tensor name.
    pub name: String,
    /// Element type as written, e.g. `BF16`.
    pub dtype_name: String,
    /// Element type, if it is one that Loaf knows.
    pub dtype: Option<DType>,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub begin: u64,
    /// Past the last byte, counted from the start of the file.
    pub end: u64,
}

/// Parses the header of a file of `file` bytes; entries come in file order.
///
/// # Errors
/// A sentence that says what is wrong and where.
pub fn parse(file: &[u8]) -> Result<Vec<HeaderEntry>, String> {
    let file_bytes = file.len() as u64;
    let Some(prefix) = file.first_chunk::<8>() else {
        return Err(format!("the file has {file_bytes} bytes, expected at least the 8 of a header length"));
    };
    let header_bytes = u64::from_le_bytes(*prefix);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(format!("the header claims {header_bytes} bytes, at most {MAX_HEADER_BYTES} are read"));
    }
    let data_start = 8 + header_bytes;
    let Some(json) = usize::try_from(data_start).ok().and_then(|end| file.get(8..end)) else {
        return Err(format!("the header ends at byte {data_start}, the file at {file_bytes}: it is truncated"));
    };
    let header: RawHeader = serde_json::from_slice(json).map_err(|e| format!("the header is not valid: {e}"))?;
    let mut entries = Vec::with_capacity(header.0.len());
    for (name, raw) in header.0 {
        entries.push(check_entry(name, raw, data_start, file_bytes)?);
    }
    check_layout(&mut entries, data_start, file_bytes)?;
    Ok(entries)
}

/// Bounds one entry's range by the file and, for known element types, equates its length with its
/// shape's.
fn check_entry(name: String, raw: RawEntry, data_start: u64, file_bytes: u64) -> Result<HeaderEntry, String> {
    let [begin, end] = raw.data_offsets;
    // `data_start <= file_bytes`, so bounding the offsets by the data area bounds both sums by the
    // file.
    let data_bytes = file_bytes - data_start;
    if begin > end || end > data_bytes {
        return Err(format!("tensor {name}: bytes {begin}..{end} do not lie in the {data_bytes} of the file's data"));
    }
    let dtype = DType::from_safetensors_name(&raw.dtype);
    if let Some(dtype) = dtype {
        let bytes = raw.shape.iter().try_fold(dtype.bytes(), |n, &extent| n.checked_mul(extent));
        if bytes != Some(end - begin) {
            let expected = bytes.map_or("more than 2^64".to_string(), |b| b.to_string());
            let shape = &raw.shape;
            return Err(format!("tensor {name}: {dtype} {shape:?} is {expected} bytes, found {}", end - begin));
        }
    }
    let (begin, end) = (data_start + begin, data_start + end);
    Ok(HeaderEntry { name, dtype_name: raw.dtype, dtype, shape: raw.shape, begin, end })
}

/// Sorts by position and proves that the tensors tile the data area, each name once.
fn check_layout(entries: &mut [HeaderEntry], data_start: u64, file_bytes: u64) -> Result<(), String> {
    entries.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    let mut expected = data_start;
    for e in entries.iter() {
        if e.begin != expected {
            return Err(format!(
                "tensor {} starts at byte {}, expected {expected}: a gap or an overlap",
                e.name, e.begin
            ));
        }
        expected = e.end;
    }
    if expected != file_bytes {
        return Err(format!("the tensors end at byte {expected}, the file at {file_bytes}"));
    }
    let mut names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("tensor {} is listed twice", pair[0])),
        None => Ok(()),
    }
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's object as a list, so that a repeated name is seen instead of overwritten.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    match name == "__metadata__" {
                        true => drop(map.next_value::<IgnoredAny>()?),
                        false => entries.push((name, map.next_value()?)),
                    }
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data_bytes: usize) -> Vec<u8> {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.resize(file.len() + data_bytes, 0);
        file
    }

    const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,2],"data_offsets":[4,20]},
        "a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"c":{"dtype":"I64","shape":[1],"data_offsets":[20,28]}}"#;

    #[test]
    fn entries_come_in_file_order_with_file_offsets() {
        let entries = parse(&file(GOOD, 28)).unwrap();
        let start = 8 + GOOD.len() as u64;
        let got: Vec<_> = entries.iter().map(|e| (e.name.as_str(), e.dtype, e.begin - start, e.end - start)).collect();
        assert_eq!(got, [("a", Some(DType::BF16), 0, 4), ("b", Some(DType::F32), 4, 20), ("c", None, 20, 28)]);
    }

    #[test]
    fn headers_that_lie_are_refused() {
        let t = |dtype: &str, shape: &str, range: &str| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{range}}}}}"#)
        };
        let huge = "[4294967296,4294967296,4]";
        let wrap: Vec<String> = (0..8u64)
            .map(|i| {
                let (begin, end) = (i << 61, ((i as u128 + 1) << 61).min(u64::MAX as u128));
                format!(r#""t{i}":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end - begin as u128)
            })
            .collect();
        for (header, data_bytes, complaint) in [
            (t("F32", "[2]", "[0,4]"), 4, "f32 [2] is 8 bytes, found 4"),
            (t("F32", "[1]", "[0,4]"), 3, "do not lie in the 3"),
            (t("F32", "[1]", "[0,4]"), 5, "the file at"),
            (t("F32", "[1]", "[4,8]"), 8, "a gap or an overlap"),
            (t("F32", "[1]", "[4,0]"), 4, "bytes 4..0"),
            (t("F32", huge, "[0,0]"), 0, "more than 2^64"),
            (t("F32", "[-1]", "[0,4]"), 4, "not valid"),
            (t("F32", "[1]", "[0,4,8]"), 4, "not valid"),
            (r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#.into(), 0, "twice"),
            (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#.into(), 3, "overlap"),
            (format!("{{{}}}", wrap.join(",")), 0, "do not lie"),
            ("[".repeat(100_000), 0, "not valid"),
        ] {
            let error = parse(&file(&header, data_bytes)).unwrap_err();
            assert!(error.contains(complaint), "{error:?} should contain {complaint:?}");
        }
        assert!(parse(&[1, 2]).unwrap_err().contains("at least the 8"));
        assert!(parse(&u64::MAX.to_le_bytes()).unwrap_err().contains("at most"));
        assert!(parse(&file(GOOD, 28)[..40]).unwrap_err().contains("truncated"));
    }

    proptest! {
        #[test]
        fn mutated_headers_never_panic_and_never_reach_outside_the_file(
            edits in prop::collection::vec((0..300usize, any::<u8>()), 1..8), cut in 0..400usize,
        ) {
            let mut bytes = file(GOOD, 28);
            for (at, byte) in edits {
                let n = bytes.len();
                bytes[at % n] = byte;
            }
            bytes.truncate(cut.max(1));
            if let Ok(entries) = parse(&bytes) {
                prop_assert!(entries.iter().all(|e| e.begin <= e.end && e.end <= bytes.len() as u64));
            }
        }

        #[test]
        fn digit_mutations_never_panic(edits in prop::collection::vec((0..20usize, 0..10u8), 1..6)) {
            let mut bytes = file(GOOD, 28);
            let digits: Vec<usize> = (8..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
            for (at, digit) in edits {
                bytes[digits[at % digits.len()]] = b'0' + digit;
            }
            if let Ok(entries) = parse(&bytes) {
                prop_assert!(entries.iter().all(|e| e.begin <= e.end && e.end <= bytes.len() as u64));
            }
        }
    }
}
