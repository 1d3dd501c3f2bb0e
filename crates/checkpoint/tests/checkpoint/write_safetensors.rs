//! Writes safetensors files by hand, so that they can also be wrong.

use std::path::Path;

use serde_json::{Map, Value, json};

/// A tensor to be stored: name, type, shape, bytes.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// An f32 tensor.
pub(crate) fn tensor(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
    stored(name, "F32", shape, crate::f32_bytes(values))
}

/// A tensor of any type.
pub(crate) fn stored(name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes,
    }
}

/// A file with a header of the caller's making.
pub(crate) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A sound file.
pub(crate) fn file_of(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        let offsets = [start, data.len()];
        header.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}),
        );
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// Writes `config.json` and one file.
pub(crate) fn write_single(folder: &Path, tensors: &[Tensor]) {
    write_config(folder);
    std::fs::write(folder.join("model.safetensors"), file_of(tensors)).unwrap();
}

/// Writes `config.json`, one shard per entry, and the index.
pub(crate) fn write_shards(folder: &Path, shards: &[&[Tensor]]) {
    write_config(folder);
    let mut weight_map = Map::new();
    for (number, tensors) in shards.iter().enumerate() {
        let name = shard_name(number, shards.len());
        for tensor in *tensors {
            weight_map.insert(tensor.name.clone(), name.clone().into());
        }
        std::fs::write(folder.join(name), file_of(tensors)).unwrap();
    }
    write_index(
        folder,
        &json!({"metadata": {"total_size": 1}, "weight_map": weight_map}),
    );
}

pub(crate) fn write_index(folder: &Path, index: &Value) {
    let path = folder.join("model.safetensors.index.json");
    std::fs::write(path, index.to_string()).unwrap();
}

pub(crate) fn shard_name(number: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", number + 1)
}

pub(crate) fn write_config(folder: &Path) {
    let config = json!({"model_type": "llama", "hidden_size": 6});
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}
