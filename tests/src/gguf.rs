//! A writer of GGUF files, as plain as the format, for tests that need files nobody publishes.

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Unsigned, 32 bits.
    U32(u32),
    /// Unsigned, 64 bits.
    U64(u64),
    /// Unsigned, 16 bits.
    U16(u16),
    /// Signed, 32 bits.
    I32(i32),
    /// A float.
    F32(f32),
    /// A flag.
    Bool(bool),
    /// A string.
    Text(String),
    /// Strings.
    Texts(Vec<String>),
    /// Signed numbers.
    I32s(Vec<i32>),
    /// Floats.
    F32s(Vec<f32>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.into())
    }
}

/// A tensor: name, extents innermost first, code of the type, bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name.
    pub name: String,
    /// Extents, innermost first.
    pub extents: Vec<u64>,
    /// Code of the type.
    pub kind: u32,
    /// Bytes.
    pub data: Vec<u8>,
}

/// A file to be.
#[derive(Clone, Debug, Default)]
pub struct File {
    /// Metadata, in order.
    pub keys: Vec<(String, Value)>,
    /// Tensors, in order.
    pub tensors: Vec<Tensor>,
}

/// Appends a string.
pub fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn array(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend(9u32.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

/// Appends the type of a value and the value.
pub fn value(out: &mut Vec<u8>, value: &Value) {
    let mut scalar = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U32(v) => scalar(4, &v.to_le_bytes()),
        Value::U64(v) => scalar(10, &v.to_le_bytes()),
        Value::U16(v) => scalar(2, &v.to_le_bytes()),
        Value::I32(v) => scalar(5, &v.to_le_bytes()),
        Value::F32(v) => scalar(6, &v.to_le_bytes()),
        Value::Bool(v) => scalar(7, &[u8::from(*v)]),
        Value::Text(v) => {
            out.extend(8u32.to_le_bytes());
            text(out, v);
        }
        Value::Texts(v) => {
            array(out, 8, v.len());
            v.iter().for_each(|v| text(out, v));
        }
        Value::I32s(v) => {
            array(out, 5, v.len());
            v.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
        Value::F32s(v) => {
            array(out, 6, v.len());
            v.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
    }
}

impl File {
    /// A key more.
    pub fn key(&mut self, key: &str, value: impl Into<Value>) -> &mut File {
        self.keys.push((key.into(), value.into()));
        self
    }

    /// A tensor of f32 more.
    pub fn f32s(&mut self, name: &str, extents: &[u64], values: &[f32]) -> &mut File {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensors.push(Tensor { name: name.into(), extents: extents.to_vec(), kind: 0, data });
        self
    }

    /// The numbers of a Llama of one layer, 32 wide and with two heads, and `more` of them.
    pub fn one_layer(&mut self, more: &[(&str, u32)]) -> &mut File {
        let numbers = [
            ("block_count", 1),
            ("context_length", 64),
            ("embedding_length", 32),
            ("feed_forward_length", 32),
            ("attention.head_count", 2),
        ];
        for (key, n) in numbers.iter().chain(more) {
            self.key(&format!("llama.{key}"), Value::U32(*n));
        }
        self.key("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5))
    }

    /// Its norms, which are all ones.
    pub fn norms_of_one_layer(&mut self) -> &mut File {
        for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
            self.f32s(&format!("{name}.weight"), &[32], &[1.0; 32]);
        }
        self
    }

    /// The file's bytes, version 3, aligned to 32.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, v) in &self.keys {
            text(&mut out, key);
            value(&mut out, v);
        }
        let mut offset = 0u64;
        for t in &self.tensors {
            text(&mut out, &t.name);
            out.extend((t.extents.len() as u32).to_le_bytes());
            t.extents.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (t.data.len() as u64).next_multiple_of(32);
        }
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&t.data);
        }
        out
    }
}
