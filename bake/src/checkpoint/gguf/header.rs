//! The header of a GGUF file, versions 2 and 3, parsed strictly.
//!
//! A header is hostile until parsed. What [`parse`] returns has unique keys and tensor names,
//! in-file tensors that do not overlap and are as long as type and shape imply, and no arithmetic
//! that could have wrapped. Memory is bounded by the number of keys and tensors, which are capped:
//! arrays stay in the file ([`Array`] says where), however long they claim to be. Every error is
//! one line that says where, what was expected and what was found.
//!
//! ```text
//! "GGUF" | u32 version | u64 tensors | u64 keys
//! keys     times: string key | u32 type | value
//! tensors  times: string name | u32 n | u64 extents[n], innermost first | u32 type | u64 offset
//! zero bytes up to the alignment | data, each tensor at its offset
//! string = u64 length | UTF-8;  array = u32 type | u64 length | elements
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use loaf_formats::text::line;

use super::types::GgmlType;

/// Most keys a file may have; published ones have fewer than a hundred.
pub const MAX_KEYS: u64 = 1 << 16;
/// Most tensors a file may have.
pub const MAX_TENSORS: u64 = 1 << 17;
/// Longest key or tensor name, in bytes.
pub const MAX_NAME_BYTES: u64 = 1024;
/// Longest string value that is taken out of the file (a chat template), in bytes.
pub const MAX_STRING_BYTES: u64 = 16 << 20;
/// Most extents of a tensor.
pub const MAX_DIMS: u32 = 4;
/// Largest alignment of tensor data.
pub const MAX_ALIGNMENT: u64 = 1 << 20;
/// The alignment where the file does not say.
const DEFAULT_ALIGNMENT: u64 = 32;

/// What is wrong with a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderError {
    /// Byte of the file.
    pub at: u64,
    /// What stands there.
    pub what: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HeaderError { at, what, expected, found } = self;
        write!(f, "byte {at}, {}: expected {}, found {}", line(what), line(expected), line(found))
    }
}

impl std::error::Error for HeaderError {}

/// The type of a metadata value. The discriminant is the code in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the format's own")]
#[repr(u8)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [ValueType; 13] = {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64]
    };

    /// The type with this code.
    pub fn from_code(code: u32) -> Option<ValueType> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// Bytes of an element; for strings the least, the length alone.
    fn least_bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::String => 8,
            ValueType::Array => 12,
        }
    }
}

/// A metadata value. Integers and floats are widened; arrays stay in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Any float.
    Real(f64),
    /// A flag.
    Bool(bool),
    /// A string.
    Text(String),
    /// An array of anything but arrays.
    Array(Array),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(v) => v.fmt(f),
            Value::Signed(v) => v.fmt(f),
            Value::Real(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            // Debug formatting keeps a hostile string in one line.
            Value::Text(text) => write!(f, "{:?}", text.chars().take(80).collect::<String>()),
            Value::Array(a) => write!(f, "{} values of type {:?}", a.len, a.kind),
        }
    }
}

/// An array: its elements lie in `bytes` of the file, and all of them are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Type of the elements; never an array.
    pub kind: ValueType,
    /// Number of elements.
    pub len: u64,
    /// Where they lie in the file.
    pub bytes: Range<u64>,
}

/// One tensor as its header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub kind: GgmlType,
    /// Extents, outermost first (the file has them the other way round).
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub begin: u64,
    /// Past the last byte.
    pub end: u64,
}

/// A parsed header.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Format version, 2 or 3.
    pub version: u32,
    /// Metadata by key.
    pub metadata: BTreeMap<String, Value>,
    /// Tensors in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
}

/// Parses the header of a whole file.
///
/// # Errors
/// The first thing that is wrong.
pub fn parse(file: &[u8]) -> Result<Header, HeaderError> {
    let mut r = Reader { file, at: 0 };
    let magic = r.take(4, || "magic".into())?;
    if magic != b"GGUF" {
        return Err(error(0, "magic", "\"GGUF\"", format!("\"{}\"", magic.escape_ascii())));
    }
    let version = r.u32("version")?;
    if version & 0xffff == 0 && version != 0 {
        return Err(error(4, "version", "a little-endian file", "a big-endian one"));
    }
    if !matches!(version, 2 | 3) {
        return Err(error(4, "version", "2 or 3", version));
    }
    // The least of a key: length, one byte, type, one byte; of a tensor: length, count of extents,
    // one of them, type, offset.
    let tensors = r.count("tensor count", MAX_TENSORS, 32)?;
    let keys = r.count("key count", MAX_KEYS, 13)?;
    let mut metadata = BTreeMap::new();
    for i in 0..keys {
        let at = r.at;
        let key = r.name(|| format!("key {i}"))?;
        let value = r.value(&key)?;
        if metadata.contains_key(&key) {
            return Err(error(at, format!("key {key:?}"), "each key once", "it a second time"));
        }
        metadata.insert(key, value);
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(&Value::Unsigned(n)) if n.is_power_of_two() && n <= MAX_ALIGNMENT => n,
        Some(other) => {
            let expected = format!("a power of two of at most {MAX_ALIGNMENT}");
            return Err(error(r.at, "key \"general.alignment\"", expected, other));
        }
    };
    let mut raw = Vec::with_capacity(tensors as usize);
    for i in 0..tensors {
        raw.push(r.tensor(i)?);
    }
    let data = r.at.next_multiple_of(alignment);
    let mut tensors = Vec::with_capacity(raw.len());
    for t in raw {
        tensors.push(place(t, data, alignment, file.len() as u64)?);
    }
    check_layout(&mut tensors, data, alignment)?;
    Ok(Header { version, metadata, tensors })
}

/// The strings of an array; `None` if it is of another type. They were proved to lie in the file.
///
/// # Errors
/// The first string that is not UTF-8.
pub fn strings<'a>(file: &'a [u8], array: &Array) -> Option<Result<Vec<&'a str>, HeaderError>> {
    if array.kind != ValueType::String {
        return None;
    }
    let mut r = Reader { file, at: array.bytes.start };
    let read = (0..array.len).map(|i| {
        let at = r.at;
        let bytes = r.string(u64::MAX, || format!("string {i} of an array"))?;
        std::str::from_utf8(bytes).map_err(|_| error(at, format!("string {i} of an array"), "UTF-8", "other bytes"))
    });
    Some(read.collect())
}

/// The numbers of an array, widened; `None` if it holds no numbers.
pub fn numbers(file: &[u8], array: &Array) -> Option<Vec<f64>> {
    let mut r = Reader { file, at: array.bytes.start };
    let mut out = Vec::new();
    for _ in 0..array.len {
        out.push(match r.scalar(array.kind, "").ok()?? {
            Value::Unsigned(v) => v as f64,
            Value::Signed(v) => v as f64,
            Value::Real(v) => v,
            Value::Bool(v) => f64::from(u8::from(v)),
            Value::Text(_) | Value::Array(_) => return None,
        });
    }
    Some(out)
}

fn error(at: u64, what: impl fmt::Display, expected: impl fmt::Display, found: impl fmt::Display) -> HeaderError {
    HeaderError { at, what: what.to_string(), expected: expected.to_string(), found: found.to_string() }
}

struct RawTensor {
    at: u64,
    name: String,
    kind: GgmlType,
    shape: Vec<u64>,
    offset: u64,
}

/// Turns an offset into bytes of the file, equating its length with that of type and shape.
fn place(t: RawTensor, data: u64, alignment: u64, file_bytes: u64) -> Result<TensorInfo, HeaderError> {
    let RawTensor { at, name, kind, shape, offset } = t;
    let wrong = |expected: String, found: String| Err(error(at, format!("tensor {name:?}"), expected, found));
    if !offset.is_multiple_of(alignment) {
        return wrong(format!("an offset that is a multiple of {alignment}"), offset.to_string());
    }
    let rows = shape.split_last().map(|(inner, rows)| (kind.row_bytes(*inner), rows));
    let bytes = rows.and_then(|(row, rows)| rows.iter().try_fold(row?, |n, &extent| n.checked_mul(extent)));
    let Some(bytes) = bytes else {
        return wrong(format!("rows of whole {kind} blocks, fewer than 2^64 bytes"), format!("{shape:?}"));
    };
    let begin = data.checked_add(offset);
    match begin.and_then(|begin| Some((begin, begin.checked_add(bytes)?))) {
        Some((begin, end)) if end <= file_bytes => Ok(TensorInfo { name, kind, shape, begin, end }),
        _ => wrong(
            format!("{bytes} bytes of data at offset {offset}"),
            format!("{} in the file", file_bytes.saturating_sub(data)),
        ),
    }
}

/// Sorts by position and proves that each tensor follows the one before, padding aside, and each
/// name stands once.
fn check_layout(tensors: &mut [TensorInfo], data: u64, alignment: u64) -> Result<(), HeaderError> {
    tensors.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    let mut expected = data;
    for t in tensors.iter() {
        if t.begin != expected {
            let what = format!("tensor {:?}", t.name);
            return Err(error(t.begin, what, format!("it at byte {expected}"), "a gap or an overlap"));
        }
        // In the file, so far from overflow.
        expected = t.end.next_multiple_of(alignment);
    }
    let mut names = BTreeSet::new();
    match tensors.iter().find(|t| !names.insert(t.name.as_str())) {
        Some(t) => Err(error(t.begin, format!("tensor {:?}", t.name), "each tensor once", "it a second time")),
        None => Ok(()),
    }
}

/// A position in the file.
struct Reader<'a> {
    file: &'a [u8],
    at: u64,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> u64 {
        (self.file.len() as u64).saturating_sub(self.at)
    }

    /// The next `n` bytes.
    fn take(&mut self, n: u64, what: impl FnOnce() -> String) -> Result<&'a [u8], HeaderError> {
        if n > self.rest() {
            return Err(error(self.at, what(), format!("{n} bytes"), format!("{} up to the end", self.rest())));
        }
        let begin = self.at as usize;
        self.at += n;
        Ok(&self.file[begin..begin + n as usize])
    }

    fn fixed<const N: usize>(&mut self, what: &str) -> Result<[u8; N], HeaderError> {
        let bytes = self.take(N as u64, || what.to_string())?;
        let mut fixed = [0; N];
        fixed.copy_from_slice(bytes);
        Ok(fixed)
    }

    fn u32(&mut self, what: &str) -> Result<u32, HeaderError> {
        self.fixed(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, HeaderError> {
        self.fixed(what).map(u64::from_le_bytes)
    }

    /// A count of things of at least `least` bytes each.
    fn count(&mut self, what: &str, most: u64, least: u64) -> Result<u64, HeaderError> {
        let (at, n) = (self.at, self.u64(what)?);
        if n > most {
            return Err(error(at, what, format!("at most {most}"), n));
        }
        match n.checked_mul(least) {
            Some(bytes) if bytes <= self.rest() => Ok(n),
            _ => Err(error(at, what, format!("what the {} bytes to the end can hold", self.rest()), n)),
        }
    }

    /// A string's bytes.
    fn string(&mut self, most: u64, what: impl Fn() -> String) -> Result<&'a [u8], HeaderError> {
        let at = self.at;
        let n = u64::from_le_bytes(self.take(8, &what)?.try_into().unwrap_or([0; 8]));
        if n > most {
            return Err(error(at, what(), format!("at most {most} bytes"), n));
        }
        self.take(n, what)
    }

    /// A key or tensor name.
    fn name(&mut self, what: impl Fn() -> String) -> Result<String, HeaderError> {
        let at = self.at;
        let bytes = self.string(MAX_NAME_BYTES, &what)?;
        match std::str::from_utf8(bytes) {
            Ok("") => Err(error(at, what(), "a name", "an empty one")),
            Ok(name) => Ok(name.to_string()),
            Err(_) => Err(error(at, what(), "UTF-8", format!("\"{}\"", bytes.escape_ascii()))),
        }
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, HeaderError> {
        let at = self.at;
        let code = self.u32(key)?;
        ValueType::from_code(code).ok_or_else(|| error(at, format!("key {key:?}"), "a value type of 0 to 12", code))
    }

    fn value(&mut self, key: &str) -> Result<Value, HeaderError> {
        let kind = self.value_type(key)?;
        if let Some(value) = self.scalar(kind, key)? {
            return Ok(value);
        }
        let at = self.at;
        if kind == ValueType::String {
            let bytes = self.string(MAX_STRING_BYTES, || format!("key {key:?}"))?;
            let text = std::str::from_utf8(bytes);
            return text
                .map(|t| Value::Text(t.to_string()))
                .map_err(|_| error(at, format!("key {key:?}"), "UTF-8", "other bytes"));
        }
        let kind = self.value_type(key)?;
        if kind == ValueType::Array {
            return Err(error(at, format!("key {key:?}"), "an array of plain values", "an array of arrays"));
        }
        let len = self.count(&format!("length of key {key:?}"), u64::MAX, kind.least_bytes())?;
        let begin = self.at;
        match kind {
            ValueType::String => {
                for i in 0..len {
                    self.string(u64::MAX, || format!("string {i} of key {key:?}"))?;
                }
            }
            // The count was held against the file, so the product is in it.
            _ => drop(self.take(len * kind.least_bytes(), || format!("key {key:?}"))?),
        }
        Ok(Value::Array(Array { kind, len, bytes: begin..self.at }))
    }

    /// A number or a flag; `None` for what is neither.
    fn scalar(&mut self, kind: ValueType, key: &str) -> Result<Option<Value>, HeaderError> {
        let at = self.at;
        Ok(Some(match kind {
            ValueType::U8 => Value::Unsigned(self.fixed::<1>(key)?[0].into()),
            ValueType::I8 => Value::Signed(i8::from_le_bytes(self.fixed(key)?).into()),
            ValueType::U16 => Value::Unsigned(u16::from_le_bytes(self.fixed(key)?).into()),
            ValueType::I16 => Value::Signed(i16::from_le_bytes(self.fixed(key)?).into()),
            ValueType::U32 => Value::Unsigned(self.u32(key)?.into()),
            ValueType::I32 => Value::Signed(i32::from_le_bytes(self.fixed(key)?).into()),
            ValueType::F32 => Value::Real(f32::from_le_bytes(self.fixed(key)?).into()),
            ValueType::U64 => Value::Unsigned(self.u64(key)?),
            ValueType::I64 => Value::Signed(i64::from_le_bytes(self.fixed(key)?)),
            ValueType::F64 => Value::Real(f64::from_le_bytes(self.fixed(key)?)),
            ValueType::Bool => match self.fixed::<1>(key)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => return Err(error(at, format!("key {key:?}"), "a flag of 0 or 1", other)),
            },
            ValueType::String | ValueType::Array => return Ok(None),
        }))
    }

    fn tensor(&mut self, i: u64) -> Result<RawTensor, HeaderError> {
        let at = self.at;
        let name = self.name(|| format!("tensor {i}"))?;
        let wrong =
            |at, expected: &str, found: &dyn fmt::Display| error(at, format!("tensor {name:?}"), expected, found);
        let dims_at = self.at;
        let dims = self.u32("extents")?;
        if !(1..=MAX_DIMS).contains(&dims) {
            return Err(wrong(dims_at, "1 to 4 extents", &dims));
        }
        let mut shape = Vec::with_capacity(dims as usize);
        for _ in 0..dims {
            let at = self.at;
            match self.u64("extents")? {
                0 => return Err(wrong(at, "extents of at least 1", &0)),
                n => shape.push(n),
            }
        }
        shape.reverse();
        let type_at = self.at;
        let code = self.u32("tensor type")?;
        let kind = GgmlType::from_code(code).ok_or_else(|| wrong(type_at, "a tensor type that is known", &code))?;
        let offset = self.u64("tensor offset")?;
        Ok(RawTensor { at, name, kind, shape, offset })
    }
}
