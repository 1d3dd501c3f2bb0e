//! Checkpoints on disk: a folder with `config.json` and safetensors.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::tiny::{HostTensor, Tiny};

pub(crate) type Tensors = BTreeMap<String, HostTensor>;

/// A checkpoint with everything as the model wants it.
pub(crate) fn write(tiny: &Tiny) -> TempDir {
    write_with(&tiny.config(), &tiny.weights())
}

/// A checkpoint in one file, in f32.
pub(crate) fn write_with(config: &Value, tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_config(folder.path(), config);
    write_safetensors(
        &folder.path().join("model.safetensors"),
        tensors,
        Dtype::F32,
    );
    folder
}

/// A checkpoint whose tensors are split over two files with an index.
pub(crate) fn write_sharded(config: &Value, tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_config(folder.path(), config);
    let files = shard_names();
    let mut shards = [Tensors::new(), Tensors::new()];
    let mut weight_map = BTreeMap::new();
    for (at, (name, tensor)) in tensors.iter().enumerate() {
        shards[at % 2].insert(name.clone(), tensor.clone());
        weight_map.insert(name.clone(), files[at % 2].clone());
    }
    for (file, shard) in files.iter().zip(&shards) {
        write_safetensors(&folder.path().join(file), shard, Dtype::F32);
    }
    let index = json!({"metadata": {}, "weight_map": weight_map});
    std::fs::write(
        folder.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    folder
}

pub(crate) fn shard_names() -> [String; 2] {
    [1, 2].map(|shard| format!("model-0000{shard}-of-00002.safetensors"))
}

fn write_config(folder: &Path, config: &Value) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// Writes tensors in the given type.
pub(crate) fn write_safetensors(file: &Path, tensors: &Tensors, dtype: Dtype) {
    let encode = |value: f32| match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    };
    let bytes: Vec<Vec<u8>> = tensors
        .values()
        .map(|tensor| {
            tensor
                .values
                .iter()
                .flat_map(|value| encode(*value))
                .collect()
        })
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, tensor), bytes)| {
        (
            name.as_str(),
            TensorView::new(dtype, tensor.shape.clone(), bytes).expect("sizes agree"),
        )
    });
    safetensors::serialize_to_file(views, None, file).expect("the file can be written");
}
