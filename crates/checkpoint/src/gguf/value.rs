//! The values of GGUF metadata and how they are stored.

use super::reader::Reader;
use crate::error::CheckpointError;

/// One metadata value. Integers and floats of all widths are widened, their kind is kept.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum GgufValue {
    /// An unsigned integer of 8 to 64 bits.
    Unsigned(u64),
    /// A signed integer of 8 to 64 bits.
    Signed(i64),
    /// A 32-bit float.
    Float32(f32),
    /// A 64-bit float.
    Float64(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    String(String),
    /// A list of values of one type.
    Array(GgufArray),
}

/// A list of metadata values of one type.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum GgufArray {
    /// Unsigned integers of 8 to 64 bits.
    Unsigned(Vec<u64>),
    /// Signed integers of 8 to 64 bits.
    Signed(Vec<i64>),
    /// 32-bit floats.
    Float32(Vec<f32>),
    /// 64-bit floats.
    Float64(Vec<f64>),
    /// Truth values.
    Bool(Vec<bool>),
    /// Texts.
    String(Vec<String>),
    /// Lists.
    Array(Vec<GgufArray>),
}

impl GgufArray {
    /// The number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::Unsigned(items) => items.len(),
            Self::Signed(items) => items.len(),
            Self::Float32(items) => items.len(),
            Self::Float64(items) => items.len(),
            Self::Bool(items) => items.len(),
            Self::String(items) => items.len(),
            Self::Array(items) => items.len(),
        }
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an array of unsigned integers",
            Self::Signed(_) => "an array of signed integers",
            Self::Float32(_) | Self::Float64(_) => "an array of floats",
            Self::Bool(_) => "an array of booleans",
            Self::String(_) => "an array of strings",
            Self::Array(_) => "an array of arrays",
        }
    }
}

impl GgufValue {
    /// What the value is, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an unsigned integer",
            Self::Signed(_) => "a signed integer",
            Self::Float32(_) | Self::Float64(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Array(array) => array.kind(),
        }
    }
}

/// The stored type of a value.
#[derive(Clone, Copy)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

/// Arrays may hold arrays; deeper than this is refused, so that a file cannot exhaust the stack.
const MAX_ARRAY_DEPTH: usize = 4;

impl ValueType {
    fn read(reader: &mut Reader, key: &str) -> Result<Self, CheckpointError> {
        let id = reader.u32(key)?;
        Ok(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return Err(reader.error(key, format!("value type {id} does not exist"))),
        })
    }

    /// The fewest bytes that one value of the type takes in the file.
    fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// Reads the type and the value of `key`.
pub(super) fn read_value(reader: &mut Reader, key: &str) -> Result<GgufValue, CheckpointError> {
    let value_type = ValueType::read(reader, key)?;
    Ok(match value_type {
        ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => {
            GgufValue::Unsigned(read_unsigned(reader, value_type, key)?)
        }
        ValueType::I8 | ValueType::I16 | ValueType::I32 | ValueType::I64 => {
            GgufValue::Signed(read_signed(reader, value_type, key)?)
        }
        ValueType::F32 => GgufValue::Float32(read_f32(reader, key)?),
        ValueType::F64 => GgufValue::Float64(read_f64(reader, key)?),
        ValueType::Bool => GgufValue::Bool(read_bool(reader, key)?),
        ValueType::String => GgufValue::String(reader.string(key)?.to_owned()),
        ValueType::Array => GgufValue::Array(read_array(reader, key, 1)?),
    })
}

fn read_array(reader: &mut Reader, key: &str, depth: usize) -> Result<GgufArray, CheckpointError> {
    if depth > MAX_ARRAY_DEPTH {
        return Err(reader.error(key, format!("arrays nest deeper than {MAX_ARRAY_DEPTH}")));
    }
    let item = ValueType::read(reader, key)?;
    let len = reader.count(item.min_bytes(), key)?;
    Ok(match item {
        ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => {
            GgufArray::Unsigned(read_items(len, || read_unsigned(reader, item, key))?)
        }
        ValueType::I8 | ValueType::I16 | ValueType::I32 | ValueType::I64 => {
            GgufArray::Signed(read_items(len, || read_signed(reader, item, key))?)
        }
        ValueType::F32 => GgufArray::Float32(read_items(len, || read_f32(reader, key))?),
        ValueType::F64 => GgufArray::Float64(read_items(len, || read_f64(reader, key))?),
        ValueType::Bool => GgufArray::Bool(read_items(len, || read_bool(reader, key))?),
        ValueType::String => {
            GgufArray::String(read_items(len, || reader.string(key).map(str::to_owned))?)
        }
        ValueType::Array => {
            GgufArray::Array(read_items(len, || read_array(reader, key, depth + 1))?)
        }
    })
}

fn read_items<T>(
    len: usize,
    mut read: impl FnMut() -> Result<T, CheckpointError>,
) -> Result<Vec<T>, CheckpointError> {
    let mut items = Vec::with_capacity(len);
    for _ in 0..len {
        items.push(read()?);
    }
    Ok(items)
}

fn read_unsigned(
    reader: &mut Reader,
    value_type: ValueType,
    key: &str,
) -> Result<u64, CheckpointError> {
    Ok(match value_type {
        ValueType::U8 => u8::from_le_bytes(reader.array(key)?).into(),
        ValueType::U16 => u16::from_le_bytes(reader.array(key)?).into(),
        ValueType::U32 => reader.u32(key)?.into(),
        _ => reader.u64(key)?,
    })
}

fn read_signed(
    reader: &mut Reader,
    value_type: ValueType,
    key: &str,
) -> Result<i64, CheckpointError> {
    Ok(match value_type {
        ValueType::I8 => i8::from_le_bytes(reader.array(key)?).into(),
        ValueType::I16 => i16::from_le_bytes(reader.array(key)?).into(),
        ValueType::I32 => i32::from_le_bytes(reader.array(key)?).into(),
        _ => i64::from_le_bytes(reader.array(key)?),
    })
}

fn read_f32(reader: &mut Reader, key: &str) -> Result<f32, CheckpointError> {
    reader.array(key).map(f32::from_le_bytes)
}

fn read_f64(reader: &mut Reader, key: &str) -> Result<f64, CheckpointError> {
    reader.array(key).map(f64::from_le_bytes)
}

fn read_bool(reader: &mut Reader, key: &str) -> Result<bool, CheckpointError> {
    match reader.array(key)? {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(reader.error(key, format!("boolean has the value {other}"))),
    }
}
