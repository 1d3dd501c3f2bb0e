//! Writes GGUF files by hand, so that they can also be wrong.

/// Numbers of ggml element types.
pub(crate) const F32: u32 = 0;
pub(crate) const F16: u32 = 1;
pub(crate) const Q8_0: u32 = 8;

/// A GGUF file in the making; every field may be set to what a sound file would not have.
#[derive(Clone)]
pub(crate) struct GgufFile {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) alignment: usize,
    pub(crate) num_tensors: Option<u64>,
    pub(crate) num_entries: Option<u64>,
    entries: Vec<(String, Vec<u8>)>,
    pub(crate) tensors: Vec<Tensor>,
}

/// A tensor to be stored, with its shape in row-major order.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) dtype: u32,
    pub(crate) bytes: Vec<u8>,
    /// Another offset than where the bytes are.
    pub(crate) offset: Option<u64>,
}

impl GgufFile {
    /// No tensors, and the metadata that every model needs.
    pub(crate) fn new(architecture: &str) -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            alignment: 32,
            num_tensors: None,
            num_entries: None,
            entries: Vec::new(),
            tensors: Vec::new(),
        }
        .string("general.architecture", architecture)
    }

    /// A llama-like model's sizes.
    pub(crate) fn model(
        architecture: &str,
        num_heads: u32,
        num_kv_heads: u32,
        hidden: u32,
    ) -> Self {
        let key = |name: &str| format!("{architecture}.{name}");
        Self::new(architecture)
            .u32(&key("block_count"), 1)
            .u32(&key("context_length"), 512)
            .u32(&key("embedding_length"), hidden)
            .u32(&key("feed_forward_length"), 24)
            .u32(&key("vocab_size"), 3)
            .u32(&key("attention.head_count"), num_heads)
            .u32(&key("attention.head_count_kv"), num_kv_heads)
            .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, value.to_le_bytes().to_vec())
    }

    pub(crate) fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, value.to_le_bytes().to_vec())
    }

    pub(crate) fn string(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, string(value))
    }

    pub(crate) fn strings(self, key: &str, values: &[&str]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| string(value)).collect();
        self.array(key, 8, values.len() as u64, items)
    }

    pub(crate) fn array(self, key: &str, item_type: u32, len: u64, items: Vec<u8>) -> Self {
        let mut value = item_type.to_le_bytes().to_vec();
        value.extend(len.to_le_bytes());
        value.extend(items);
        self.raw(key, 9, value)
    }

    /// A value of any type, its bytes given. Replaces an entry of the same key.
    pub(crate) fn raw(mut self, key: &str, value_type: u32, bytes: Vec<u8>) -> Self {
        self.entries.retain(|(existing, _)| existing != key);
        self.raw_again(key, value_type, bytes)
    }

    /// As `raw`, but leaves an entry of the same key.
    pub(crate) fn raw_again(mut self, key: &str, value_type: u32, bytes: Vec<u8>) -> Self {
        let mut value = value_type.to_le_bytes().to_vec();
        value.extend(bytes);
        self.entries.push((key.to_owned(), value));
        self
    }

    pub(crate) fn without(mut self, key: &str) -> Self {
        self.entries.retain(|(existing, _)| existing != key);
        self
    }

    pub(crate) fn tensor(self, name: &str, shape: &[u64], values: &[f32]) -> Self {
        self.stored(name, shape, F32, crate::f32_bytes(values))
    }

    pub(crate) fn stored(mut self, name: &str, shape: &[u64], dtype: u32, bytes: Vec<u8>) -> Self {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.tensors.push(Tensor {
            name,
            shape,
            dtype,
            bytes,
            offset: None,
        });
        self
    }

    /// The file; it ends with the last byte of the last tensor.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut file = self.magic.to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(
            self.num_tensors
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        file.extend(
            self.num_entries
                .unwrap_or(self.entries.len() as u64)
                .to_le_bytes(),
        );
        for (key, value) in &self.entries {
            file.extend(string(key));
            file.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            pad(&mut data, self.alignment);
            file.extend(string(&tensor.name));
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            for dimension in tensor.shape.iter().rev() {
                file.extend(dimension.to_le_bytes());
            }
            file.extend(tensor.dtype.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
        }
        pad(&mut file, self.alignment);
        file.extend(data);
        file
    }

    /// Writes the file into a fresh folder, which goes when the value is dropped.
    pub(crate) fn write(&self) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        std::fs::write(&path, self.bytes()).unwrap();
        (folder, path)
    }
}

pub(crate) fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
}
