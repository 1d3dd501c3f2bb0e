//! GGUF files, versions 2 and 3, little-endian.
//!
//! A file is a header, metadata, the list of tensors, padding, and the tensors' bytes. Everything
//! is checked against the length of the file when it is opened, so that reading a tensor later
//! needs no check.
//!
//! - `reader`: bounds-checked cursor; `value` and `metadata`: the key-value part; `dequant`: number
//!   formats;
//! - `names`: tensor names in Hugging Face's terms; `config`: the `config.json` that the metadata
//!   amounts to.
//!
//! Files split in several parts and files of version 1 or big-endian order are refused.

mod config;
pub(crate) mod dequant;
mod metadata;
mod names;
mod reader;
mod value;

use std::collections::HashSet;
use std::path::Path;

use serde_json::Value;

pub use self::metadata::GgufMetadata;
pub use self::value::{GgufArray, GgufValue};

use self::names::{RotaryProjection, hugging_face_name, rotary_projection};
use self::reader::Reader;
use crate::error::CheckpointError;
use crate::tensor::{RowOrder, SourceDType, StoredTensor, TensorInfo, checked_num_elements};

/// The first four bytes of a GGUF file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// The format allows four dimensions.
const MAX_DIMENSIONS: u32 = 4;

/// Where tensors begin, if the file does not say otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;

/// The fewest bytes of a metadata entry (key length, type, value) and of a tensor entry (name
/// length, number of dimensions, type, offset).
const MIN_METADATA_BYTES: usize = 8 + 4 + 1;
const MIN_TENSOR_BYTES: usize = 8 + 4 + 4 + 8;

/// What a GGUF file holds.
pub(crate) struct GgufContents {
    pub(crate) metadata: GgufMetadata,
    pub(crate) config: Value,
    pub(crate) tensors: Vec<StoredTensor>,
}

/// A tensor entry as the file has it.
struct TensorEntry {
    name: String,
    /// Row-major, so reversed from the file.
    shape: Vec<usize>,
    dtype: SourceDType,
    offset: usize,
}

/// Reads everything but the tensors' bytes.
pub(crate) fn read(path: &Path, bytes: &[u8]) -> Result<GgufContents, CheckpointError> {
    let mut reader = Reader::new(path, bytes);
    read_magic_and_version(&mut reader)?;
    // Both counts come before what they count, so the first is checked against the whole rest of
    // the file.
    let num_tensors = reader.count(MIN_TENSOR_BYTES, "tensor count")?;
    let num_entries = reader.count(MIN_METADATA_BYTES, "metadata count")?;
    let metadata = GgufMetadata::read(&mut reader, num_entries)?;
    refuse_split(&metadata)?;
    let alignment = alignment(&metadata)?;

    let mut entries = Vec::with_capacity(num_tensors);
    for index in 0..num_tensors {
        entries.push(read_entry(&mut reader, index)?);
    }
    let tensors = place(&reader, bytes.len(), alignment, entries, &metadata)?;
    let config = config::synthesize(&metadata, &tensors)?;
    Ok(GgufContents {
        metadata,
        config,
        tensors,
    })
}

fn read_magic_and_version(reader: &mut Reader) -> Result<(), CheckpointError> {
    let magic = reader.array("magic number")?;
    if magic != MAGIC {
        let found = String::from_utf8_lossy(&magic).into_owned();
        return Err(reader.error("magic number", format!("is {found:?}, expected \"GGUF\"")));
    }
    match reader.u32("version")? {
        2 | 3 => Ok(()),
        version @ (0x0200_0000 | 0x0300_0000) => Err(CheckpointError::unsupported(
            reader.path(),
            format!("big-endian GGUF (version field {version:#010x}); little-endian is supported"),
        )),
        version => Err(CheckpointError::unsupported(
            reader.path(),
            format!("GGUF version {version}; versions 2 and 3 are supported"),
        )),
    }
}

fn refuse_split(metadata: &GgufMetadata) -> Result<(), CheckpointError> {
    match metadata.optional_u64("split.count")? {
        None | Some(0 | 1) => Ok(()),
        Some(parts) => Err(CheckpointError::unsupported(
            metadata.path(),
            format!("the model is split into {parts} files; merge them into one first"),
        )),
    }
}

fn alignment(metadata: &GgufMetadata) -> Result<u64, CheckpointError> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.optional_u64(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() {
        return Err(metadata.error(KEY, format!("is {alignment}, expected a power of two")));
    }
    Ok(alignment)
}

fn read_entry(reader: &mut Reader, index: usize) -> Result<TensorEntry, CheckpointError> {
    let name = reader.string(&format!("name of tensor {index}"))?;
    let field = format!("tensor {name}");
    let num_dimensions = reader.u32(&field)?;
    if num_dimensions > MAX_DIMENSIONS {
        return Err(reader.error(
            &field,
            format!("has {num_dimensions} dimensions, the format allows {MAX_DIMENSIONS}"),
        ));
    }
    let mut shape = Vec::with_capacity(num_dimensions as usize);
    for _ in 0..num_dimensions {
        let dimension = reader.u64(&field)?;
        shape.push(usize::try_from(dimension).map_err(|_| {
            reader.error(
                &field,
                format!("dimension {dimension} is too large for this machine"),
            )
        })?);
    }
    // The file has the fastest dimension first.
    shape.reverse();
    let dtype = dtype_of(reader.u32(&field)?);
    let offset = reader.u64(&field)?;
    let offset = usize::try_from(offset).map_err(|_| {
        reader.error(
            &field,
            format!("offset {offset} passes the end of the file"),
        )
    })?;
    Ok(TensorEntry {
        name: name.to_owned(),
        shape,
        dtype,
        offset,
    })
}

/// The element type with a number of the ggml library.
fn dtype_of(id: u32) -> SourceDType {
    let name = match id {
        0 => return SourceDType::F32,
        1 => return SourceDType::F16,
        2 => return SourceDType::Q4_0,
        3 => return SourceDType::Q4_1,
        6 => return SourceDType::Q5_0,
        7 => return SourceDType::Q5_1,
        8 => return SourceDType::Q8_0,
        12 => return SourceDType::Q4K,
        13 => return SourceDType::Q5K,
        14 => return SourceDType::Q6K,
        30 => return SourceDType::BF16,
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return SourceDType::Other(format!("ggml type {id}")),
    };
    SourceDType::Other(name.to_owned())
}

/// Turns entries into tensors whose bytes are known to be in the file.
fn place(
    reader: &Reader,
    file_len: usize,
    alignment: u64,
    entries: Vec<TensorEntry>,
    metadata: &GgufMetadata,
) -> Result<Vec<StoredTensor>, CheckpointError> {
    if entries.is_empty() {
        return Err(reader.error("tensor count", "is 0"));
    }
    let data_start = usize::try_from(alignment)
        .ok()
        .and_then(|alignment| reader.position().checked_next_multiple_of(alignment))
        .filter(|&start| start <= file_len)
        .ok_or_else(|| {
            let position = reader.position();
            reader.error(
                "tensor data",
                format!(
                    "begins at the next multiple of {alignment} after {position}, \
                     but the file ends at {file_len}"
                ),
            )
        })?;

    let mut by_offset: Vec<usize> = (0..entries.len()).collect();
    by_offset.sort_by_key(|&index| entries[index].offset);
    let mut ends = vec![0; entries.len()];
    for (position, &index) in by_offset.iter().enumerate() {
        let next = by_offset.get(position + 1).map(|&next| &entries[next]);
        ends[index] = end_of(
            reader,
            &entries[index],
            next,
            alignment,
            file_len - data_start,
        )?;
    }

    let reorder = Reorder::new(metadata)?;
    let mut seen = HashSet::new();
    let mut tensors = Vec::with_capacity(entries.len());
    for (entry, end) in entries.into_iter().zip(ends) {
        let row_order = reorder.row_order(reader, &entry)?;
        let name = hugging_face_name(&reorder.architecture, &entry.name);
        if !seen.insert(name.clone()) {
            return Err(CheckpointError::DuplicateTensor {
                name,
                first: reader.path().to_path_buf(),
                second: reader.path().to_path_buf(),
            });
        }
        let range = data_start + entry.offset..data_start + end;
        let info = TensorInfo {
            shape: entry.shape,
            dtype: entry.dtype,
            num_bytes: range.len(),
        };
        tensors.push(StoredTensor {
            name,
            info,
            range,
            row_order,
        });
    }
    Ok(tensors)
}

/// Where the bytes of a tensor end, from the beginning of the tensor data. `next` is the tensor
/// that lies after it.
fn end_of(
    reader: &Reader,
    entry: &TensorEntry,
    next: Option<&TensorEntry>,
    alignment: u64,
    data_len: usize,
) -> Result<usize, CheckpointError> {
    let error = |reason: String| reader.error(&format!("tensor {}", entry.name), reason);
    let TensorEntry {
        shape,
        dtype,
        offset,
        ..
    } = entry;
    if !(*offset as u64).is_multiple_of(alignment) {
        return Err(error(format!(
            "offset {offset} is no multiple of the alignment {alignment}"
        )));
    }
    let limit = next.map_or(data_len, |next| next.offset.min(data_len));
    let too_large = || error(format!("shape {shape:?} has too many elements"));
    let num_elements = checked_num_elements(shape).ok_or_else(too_large)?;
    let end = match dtype.block() {
        // The size of a type that is not decoded is not known, but it cannot pass what comes next.
        None => limit.max(*offset),
        Some(block) => {
            let row = shape.last().copied().unwrap_or(1);
            if !row.is_multiple_of(block.elements) {
                return Err(error(format!(
                    "rows of {row} elements are not whole blocks of {} ({dtype})",
                    block.elements
                )));
            }
            (num_elements / block.elements)
                .checked_mul(block.bytes)
                .and_then(|num_bytes| offset.checked_add(num_bytes))
                .ok_or_else(too_large)?
        }
    };
    if end > data_len {
        return Err(error(format!(
            "shape {shape:?} of {dtype} at offset {offset} ends at {end}, \
             but only {data_len} bytes of tensor data are there"
        )));
    }
    match next {
        Some(next) if next.offset < end => Err(error(format!(
            "shape {shape:?} of {dtype} ends at {end}, inside tensor {} at {}",
            next.name, next.offset
        ))),
        _ => Ok(end),
    }
}

/// Which tensors of a file have their rows in another order, and how many heads they have.
struct Reorder {
    architecture: String,
    /// Query and key heads; `None` where rows are stored in order.
    heads: Option<(u64, u64)>,
}

impl Reorder {
    fn new(metadata: &GgufMetadata) -> Result<Self, CheckpointError> {
        let architecture = metadata.architecture()?.to_owned();
        // The converters reorder the rows for this architecture name alone.
        let heads = if architecture == "llama" {
            Some(config::head_counts(metadata, &architecture)?)
        } else {
            None
        };
        Ok(Self {
            architecture,
            heads,
        })
    }

    fn row_order(&self, reader: &Reader, entry: &TensorEntry) -> Result<RowOrder, CheckpointError> {
        let (Some((num_heads, num_kv_heads)), Some(projection)) =
            (self.heads, rotary_projection(&entry.name))
        else {
            return Ok(RowOrder::AsStored);
        };
        let heads = match projection {
            RotaryProjection::Query => num_heads,
            RotaryProjection::Key => num_kv_heads,
        };
        let rows = entry.shape.first().copied().unwrap_or(0) as u64;
        let head_dim = rows / heads;
        if head_dim * heads != rows || !head_dim.is_multiple_of(2) {
            return Err(reader.error(
                &format!("tensor {}", entry.name),
                format!("has {rows} rows, which are not {heads} heads of an even size"),
            ));
        }
        if head_dim == 0 {
            return Ok(RowOrder::AsStored);
        }
        Ok(RowOrder::AlternatingHalves {
            head_dim: head_dim as usize,
        })
    }
}
