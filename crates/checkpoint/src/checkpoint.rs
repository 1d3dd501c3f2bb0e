//! One face for both formats: named tensors with shapes, read one at a time.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::config::{CONFIG_FILE, GENERATION_CONFIG_FILE, read_json, read_optional_json};
use crate::convert::{Element, Overflow, Stored};
use crate::error::CheckpointError;
use crate::gguf::{self, GgufMetadata};
use crate::locate::{Location, locate};
use crate::mapped_file::MappedFile;
use crate::safetensors;
use crate::tensor::{FloatData, FloatKind, HostTensor, RowOrder, StoredTensor, TensorInfo};

/// A model on disk: its configuration and its tensors.
///
/// The files are mapped into memory and everything but the tensors' values is checked when they are
/// opened. The files must not change while the value lives. All methods take `&self` and may be
/// called from several threads; reading a tensor uses the global thread pool of rayon.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: Value,
    generation_config: Option<Value>,
    gguf_metadata: Option<GgufMetadata>,
    files: Vec<MappedFile>,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    tensor: StoredTensor,
    used: AtomicBool,
}

/// The stored bytes of a tensor.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RawTensor<'a> {
    /// Shape and element type.
    pub info: &'a TensorInfo,
    /// The bytes with the rows in the order of `info.shape`: borrowed from the file, or owned if
    /// the file has the rows in another order.
    pub bytes: Cow<'a, [u8]>,
}

impl Checkpoint {
    /// Opens a model.
    ///
    /// `path` is a folder with `config.json` and safetensors files, a folder with exactly one
    /// `.gguf` file, or a GGUF file. In a folder with both kinds, safetensors win.
    ///
    /// # Errors
    /// `NotACheckpoint` if nothing of that kind is there; else what is wrong with the files.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        match locate(path)? {
            Location::SafetensorsFolder => Self::open_folder(path),
            Location::GgufFile(file) => Self::open_gguf(path, &file),
        }
    }

    fn open_folder(folder: &Path) -> Result<Self, CheckpointError> {
        let config = read_json(&folder.join(CONFIG_FILE))?;
        let generation_config = read_optional_json(&folder.join(GENERATION_CONFIG_FILE))?;
        let shards = safetensors::open_folder(folder)?;
        Self::assemble(folder, config, generation_config, None, shards)
    }

    fn open_gguf(path: &Path, file: &Path) -> Result<Self, CheckpointError> {
        let mapped = MappedFile::open(file)?;
        if !mapped.bytes().starts_with(&gguf::MAGIC) {
            return Err(CheckpointError::not_a_checkpoint(
                file,
                "expected a folder with model.safetensors, or a file that begins with \"GGUF\"",
            ));
        }
        let contents = gguf::read(file, mapped.bytes())?;
        let shards = vec![(mapped, contents.tensors)];
        Self::assemble(path, contents.config, None, Some(contents.metadata), shards)
    }

    fn assemble(
        path: &Path,
        config: Value,
        generation_config: Option<Value>,
        gguf_metadata: Option<GgufMetadata>,
        shards: Vec<safetensors::Shard>,
    ) -> Result<Self, CheckpointError> {
        let mut files: Vec<MappedFile> = Vec::new();
        let mut entries: Vec<Entry> = Vec::new();
        let mut by_name = HashMap::new();
        for (mapped, tensors) in shards {
            let file = files.len();
            files.push(mapped);
            for tensor in tensors {
                if let Some(first) = by_name.insert(tensor.name.clone(), entries.len()) {
                    return Err(CheckpointError::DuplicateTensor {
                        name: tensor.name,
                        first: files[entries[first].file].path().to_path_buf(),
                        second: files[file].path().to_path_buf(),
                    });
                }
                entries.push(Entry {
                    file,
                    tensor,
                    used: AtomicBool::new(false),
                });
            }
        }
        let path = path.to_path_buf();
        Ok(Self {
            path,
            config,
            generation_config,
            gguf_metadata,
            files,
            entries,
            by_name,
        })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration in the form of a Hugging Face `config.json`, always an object. For a GGUF
    /// file it is made from the metadata.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `generation_config.json` of a folder, if it has one.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// The metadata of a GGUF file, which also holds the tokenizer; `None` for a folder.
    pub fn gguf_metadata(&self) -> Option<&GgufMetadata> {
        self.gguf_metadata.as_ref()
    }

    /// The number of tensors.
    pub fn num_tensors(&self) -> usize {
        self.entries.len()
    }

    /// The bytes that all tensors take in their files.
    pub fn total_bytes(&self) -> u64 {
        self.entries
            .iter()
            .map(|entry| entry.tensor.info.num_bytes as u64)
            .sum()
    }

    /// The names of all tensors in the order of the files. In a GGUF file of a llama-like model,
    /// tensors have their Hugging Face names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.tensor.name.as_str())
    }

    /// Whether a tensor is stored.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Shape and element type of a tensor.
    ///
    /// # Errors
    /// `MissingTensor` if there is none of that name.
    pub fn info(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        self.entry(name).map(|entry| &entry.tensor.info)
    }

    /// Compares the shape of a tensor with the one that the caller needs.
    ///
    /// # Errors
    /// `MissingTensor` or `Shape`.
    pub fn check_shape(&self, name: &str, expected: &[usize]) -> Result<(), CheckpointError> {
        let found = &self.info(name)?.shape;
        if found == expected {
            return Ok(());
        }
        Err(CheckpointError::Shape {
            name: name.to_owned(),
            expected: expected.to_vec(),
            found: found.clone(),
        })
    }

    /// Reads a tensor, converted to the wanted type.
    ///
    /// # Numerics
    /// Quantised values are formed in f32; from f32 to a 16-bit type each value goes to the nearest,
    /// ties to even. A tensor that is stored in the wanted type is copied.
    ///
    /// # Errors
    /// - `MissingTensor` if there is none of that name;
    /// - `UnsupportedDType` if the stored type is not decoded;
    /// - `OutOfRange` if finite values would become infinite, as 1e5 in f16.
    pub fn read(&self, name: &str, want: FloatKind) -> Result<HostTensor, CheckpointError> {
        let shape = self.info(name)?.shape.clone();
        Ok(HostTensor {
            shape,
            data: self.read_values(&[name], want)?,
        })
    }

    /// Reads several tensors into one, stacked along the first axis: for projections that a model
    /// keeps packed.
    ///
    /// # Shapes
    /// Each `[rows_i, ..]` with equal dimensions behind the first; returns `[sum of rows_i, ..]`.
    ///
    /// # Errors
    /// As `read`, and `Shape` if a tensor does not match the first one.
    ///
    /// # Panics
    /// If `names` is empty.
    pub fn read_stacked(
        &self,
        names: &[&str],
        want: FloatKind,
    ) -> Result<HostTensor, CheckpointError> {
        assert!(!names.is_empty(), "read_stacked needs at least one name");
        let mut shape = self.info(names[0])?.shape.clone();
        if shape.is_empty() {
            return Err(self.stacking_error(names[0], &[1]));
        }
        for name in &names[1..] {
            let other = &self.info(name)?.shape;
            if other.len() != shape.len() || other[1..] != shape[1..] {
                let mut expected = shape.clone();
                expected[0] = other.first().copied().unwrap_or(1);
                return Err(self.stacking_error(name, &expected));
            }
            shape[0] = shape[0].saturating_add(other[0]);
        }
        Ok(HostTensor {
            shape,
            data: self.read_values(names, want)?,
        })
    }

    /// The bytes of a tensor as they are stored, for readers that keep quantised weights.
    ///
    /// # Errors
    /// `MissingTensor`; `UnsupportedDType` if rows have to be reordered and the type has no whole
    /// blocks per row.
    pub fn read_raw(&self, name: &str) -> Result<RawTensor<'_>, CheckpointError> {
        let entry = self.entry(name)?;
        let info = &entry.tensor.info;
        let bytes = self.bytes(entry);
        let bytes = match entry.tensor.row_order {
            RowOrder::AsStored => Cow::Borrowed(bytes),
            order @ RowOrder::AlternatingHalves { .. } => {
                // Where rows are whole blocks, they can change places without being decoded.
                self.stored(entry)?;
                let row_bytes = bytes.len() / info.shape[0];
                let mut ordered = Vec::with_capacity(bytes.len());
                for row in 0..info.shape[0] {
                    let start = order.stored_row(row) * row_bytes;
                    ordered.extend_from_slice(&bytes[start..start + row_bytes]);
                }
                Cow::Owned(ordered)
            }
        };
        entry.used.store(true, Ordering::Relaxed);
        Ok(RawTensor { info, bytes })
    }

    /// Counts a tensor as used without reading it: for tensors that a model computes itself or does
    /// not need.
    ///
    /// # Errors
    /// `MissingTensor` if there is none of that name.
    pub fn mark_used(&self, name: &str) -> Result<(), CheckpointError> {
        self.entry(name)?.used.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The names of the tensors that were neither read nor marked as used, in the order of the
    /// files.
    pub fn unused(&self) -> Vec<&str> {
        let unused = self
            .entries
            .iter()
            .filter(|entry| !entry.used.load(Ordering::Relaxed));
        unused.map(|entry| entry.tensor.name.as_str()).collect()
    }

    fn entry(&self, name: &str) -> Result<&Entry, CheckpointError> {
        self.by_name
            .get(name)
            .map(|&index| &self.entries[index])
            .ok_or_else(|| CheckpointError::MissingTensor {
                name: name.to_owned(),
                path: self.path.clone(),
            })
    }

    fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.files[entry.file].bytes()[entry.tensor.range.clone()]
    }

    fn stored<'a>(&'a self, entry: &'a Entry) -> Result<Stored<'a>, CheckpointError> {
        let tensor = &entry.tensor;
        let TensorInfo { shape, dtype, .. } = &tensor.info;
        Stored::new(dtype, self.bytes(entry), shape, tensor.row_order).ok_or_else(|| {
            CheckpointError::UnsupportedDType {
                name: tensor.name.clone(),
                path: self.files[entry.file].path().to_path_buf(),
                dtype: dtype.clone(),
            }
        })
    }

    fn stacking_error(&self, name: &str, expected: &[usize]) -> CheckpointError {
        let found = self
            .info(name)
            .map(|info| info.shape.clone())
            .unwrap_or_default();
        CheckpointError::Shape {
            name: name.to_owned(),
            expected: expected.to_vec(),
            found,
        }
    }

    fn read_values(&self, names: &[&str], want: FloatKind) -> Result<FloatData, CheckpointError> {
        Ok(match want {
            FloatKind::F32 => FloatData::F32(self.read_elements(names)?),
            FloatKind::F16 => FloatData::F16(self.read_elements(names)?),
            FloatKind::BF16 => FloatData::BF16(self.read_elements(names)?),
        })
    }

    /// Reads tensors one behind the other into one buffer; the buffer is all that is allocated.
    fn read_elements<T: Element>(&self, names: &[&str]) -> Result<Vec<T>, CheckpointError> {
        let mut parts = Vec::with_capacity(names.len());
        let mut num_elements = 0;
        for name in names {
            let entry = self.entry(name)?;
            let stored = self.stored(entry)?;
            num_elements += entry.tensor.info.num_elements();
            parts.push((entry, stored));
        }
        let mut values = vec![T::ZERO; num_elements];
        let mut rest = values.as_mut_slice();
        for (entry, stored) in parts {
            let (out, behind) = rest.split_at_mut(entry.tensor.info.num_elements());
            rest = behind;
            self.files[entry.file].read_ahead(entry.tensor.range.start);
            let Overflow { count, largest } = stored.convert_into(out);
            if count > 0 {
                let name = entry.tensor.name.clone();
                return Err(CheckpointError::OutOfRange {
                    name,
                    dtype: T::KIND,
                    count,
                    largest,
                });
            }
            entry.used.store(true, Ordering::Relaxed);
            self.files[entry.file].release(entry.tensor.range.clone());
        }
        Ok(values)
    }
}
