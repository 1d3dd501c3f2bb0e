//! Folders with safetensors files, single or sharded.

use std::collections::{BTreeMap, HashSet};
use std::path::{Component, Path};

use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata};

use crate::config::read_json;
use crate::error::CheckpointError;
use crate::mapped_file::MappedFile;
use crate::tensor::{RowOrder, SourceDType, StoredTensor, TensorInfo, checked_num_elements};

/// The weights of a model that is not sharded.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";

/// The list of shards of a model that is.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// A file begins with the length of its header, eight bytes.
const LENGTH_BYTES: usize = 8;

/// One mapped file and the tensors in it, in the order in which they are stored.
pub(crate) type Shard = (MappedFile, Vec<StoredTensor>);

/// Opens the weights in `folder`, which holds one of the two files above.
pub(crate) fn open_folder(folder: &Path) -> Result<Vec<Shard>, CheckpointError> {
    let single = folder.join(SINGLE_FILE);
    if single.exists() {
        return Ok(vec![open_shard(&single)?]);
    }
    open_sharded(folder)
}

fn open_sharded(folder: &Path) -> Result<Vec<Shard>, CheckpointError> {
    let index = folder.join(INDEX_FILE);
    let mut shards = Vec::new();
    for (file_name, names) in read_index(&index)? {
        let file = folder.join(&file_name);
        if !file.exists() {
            return Err(CheckpointError::MissingShard { file, index });
        }
        let shard = open_shard(&file)?;
        let stored: HashSet<&str> = shard.1.iter().map(|tensor| tensor.name.as_str()).collect();
        if let Some(name) = names.iter().find(|name| !stored.contains(name.as_str())) {
            return Err(CheckpointError::MissingTensor {
                name: name.clone(),
                path: file,
            });
        }
        shards.push(shard);
    }
    Ok(shards)
}

/// The tensors that the index expects in each file, by file name.
fn read_index(index: &Path) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
    let json = read_json(index)?;
    let weight_map = json
        .get("weight_map")
        .and_then(|map| map.as_object())
        .filter(|map| !map.is_empty())
        .ok_or_else(|| CheckpointError::json(index, "weight_map is missing, empty or no object"))?;
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, file) in weight_map {
        let file = file
            .as_str()
            .filter(|file| is_plain_file_name(file))
            .ok_or_else(|| {
                let reason = format!("weight_map.{name} is {file}, expected the name of a file");
                CheckpointError::json(index, reason)
            })?;
        files.entry(file.to_owned()).or_default().push(name.clone());
    }
    Ok(files)
}

/// Whether `name` stays in its folder.
fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!(
        (components.next(), components.next()),
        (Some(Component::Normal(_)), None)
    ) && !name.contains('\\')
}

fn open_shard(path: &Path) -> Result<Shard, CheckpointError> {
    let file = MappedFile::open(path)?;
    let tensors = read_header(file.bytes()).map_err(|source| CheckpointError::Safetensors {
        path: path.to_path_buf(),
        file_len: file.bytes().len(),
        source,
    })?;
    Ok((file, tensors))
}

/// Parses the header and checks that it describes exactly the bytes that follow.
///
/// The arithmetic around the header is done here with checks: a header may promise close to 2^64
/// bytes.
fn read_header(bytes: &[u8]) -> Result<Vec<StoredTensor>, SafeTensorError> {
    let length = bytes
        .first_chunk::<LENGTH_BYTES>()
        .ok_or(SafeTensorError::HeaderTooSmall)?;
    let header_len = usize::try_from(u64::from_le_bytes(*length))
        .map_err(|_| SafeTensorError::HeaderTooLarge)?;
    let body = &bytes[LENGTH_BYTES..];
    let (header, data) = body
        .split_at_checked(header_len)
        .ok_or(SafeTensorError::InvalidHeaderLength)?;
    let metadata: Metadata =
        serde_json::from_slice(header).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
    if metadata.data_len() != data.len() {
        return Err(SafeTensorError::MetadataIncompleteBuffer);
    }
    let data_start = LENGTH_BYTES + header_len;
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else {
            continue;
        };
        checked_num_elements(&info.shape).ok_or(SafeTensorError::ValidationOverflow)?;
        // The offsets are contiguous and the last is the length of the data, so all of them are in
        // it.
        let range = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
        let info = TensorInfo {
            shape: info.shape.clone(),
            dtype: source_dtype(info.dtype),
            num_bytes: range.len(),
        };
        tensors.push(StoredTensor {
            name,
            info,
            range,
            row_order: RowOrder::AsStored,
        });
    }
    Ok(tensors)
}

fn source_dtype(dtype: Dtype) -> SourceDType {
    match dtype {
        Dtype::F32 => SourceDType::F32,
        Dtype::F16 => SourceDType::F16,
        Dtype::BF16 => SourceDType::BF16,
        other => SourceDType::Other(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_name_may_not_leave_the_folder() {
        assert!(is_plain_file_name("model-00001-of-00002.safetensors"));
        for name in ["", "..", ".", "/etc/passwd", "../x", "a/b", "a\\b"] {
            assert!(!is_plain_file_name(name), "{name}");
        }
    }
}
