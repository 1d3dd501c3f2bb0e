//! Typed access to the metadata of a GGUF file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::reader::Reader;
use super::value::{GgufArray, GgufValue, read_value};
use crate::error::CheckpointError;

/// The key that names the model family; every model file has it.
const ARCHITECTURE: &str = "general.architecture";

/// The key-value pairs at the front of a GGUF file.
///
/// The getters come in two forms: `optional_*` gives `None` for an absent key, the plain form makes
/// that an error. In both, a value of another type is an error that names the file, the key and
/// what was found.
#[derive(Debug, Clone)]
pub struct GgufMetadata {
    path: PathBuf,
    entries: BTreeMap<String, GgufValue>,
}

impl GgufMetadata {
    /// Metadata made in code, as if read from `path`.
    pub fn from_entries<K: Into<String>>(
        path: impl Into<PathBuf>,
        entries: impl IntoIterator<Item = (K, GgufValue)>,
    ) -> Self {
        let entries = entries
            .into_iter()
            .map(|(key, value)| (key.into(), value))
            .collect();
        Self {
            path: path.into(),
            entries,
        }
    }

    /// Reads `count` pairs.
    pub(super) fn read(reader: &mut Reader, count: usize) -> Result<Self, CheckpointError> {
        let mut entries = BTreeMap::new();
        for index in 0..count {
            let key = reader.string(&format!("key of metadata entry {index}"))?;
            let value = read_value(reader, key)?;
            if entries.insert(key.to_owned(), value).is_some() {
                return Err(reader.error(key, "the key is there twice"));
            }
        }
        Ok(Self {
            path: reader.path().to_path_buf(),
            entries,
        })
    }

    /// The file that the metadata comes from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The value of `key`, whatever its type.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.entries.get(key)
    }

    /// The model family, `general.architecture`.
    ///
    /// # Errors
    /// `Metadata` if the key is missing or no string.
    pub fn architecture(&self) -> Result<&str, CheckpointError> {
        self.string(ARCHITECTURE)
    }

    /// The string under `key`.
    ///
    /// # Errors
    /// `Metadata` if the key is missing or no string.
    pub fn string(&self, key: &str) -> Result<&str, CheckpointError> {
        self.required(key, self.optional_string(key)?)
    }

    /// The string under `key`, if there.
    ///
    /// # Errors
    /// `Metadata` if the value is no string.
    pub fn optional_string(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        self.typed(key, "a string", |value| match value {
            GgufValue::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// The non-negative integer under `key`, of any width and signedness.
    ///
    /// # Errors
    /// `Metadata` if the key is missing, no integer or negative.
    pub fn u64(&self, key: &str) -> Result<u64, CheckpointError> {
        self.required(key, self.optional_u64(key)?)
    }

    /// The non-negative integer under `key`, if there.
    ///
    /// # Errors
    /// `Metadata` if the value is no integer or negative.
    pub fn optional_u64(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        self.typed(key, "a non-negative integer", |value| match value {
            GgufValue::Unsigned(number) => Some(*number),
            GgufValue::Signed(number) => u64::try_from(*number).ok(),
            _ => None,
        })
    }

    /// The integer under `key` as a token id, if there.
    ///
    /// # Errors
    /// `Metadata` if the value is no integer or does not fit in 32 bits.
    pub fn optional_u32(&self, key: &str) -> Result<Option<u32>, CheckpointError> {
        let Some(number) = self.optional_u64(key)? else {
            return Ok(None);
        };
        u32::try_from(number)
            .map(Some)
            .map_err(|_| self.error(key, format!("is {number}, which does not fit in 32 bits")))
    }

    /// The float under `key`, if there. 64-bit floats are rounded.
    ///
    /// # Errors
    /// `Metadata` if the value is no float.
    pub fn optional_f32(&self, key: &str) -> Result<Option<f32>, CheckpointError> {
        self.typed(key, "a float", |value| match value {
            GgufValue::Float32(number) => Some(*number),
            GgufValue::Float64(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// The truth value under `key`, if there.
    ///
    /// # Errors
    /// `Metadata` if the value is no boolean.
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(key, "a boolean", |value| match value {
            GgufValue::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// The strings under `key`, if there.
    ///
    /// # Errors
    /// `Metadata` if the value is no array of strings.
    pub fn optional_strings(&self, key: &str) -> Result<Option<&[String]>, CheckpointError> {
        self.typed(key, "an array of strings", |value| match value {
            GgufValue::Array(GgufArray::String(texts)) => Some(texts.as_slice()),
            _ => None,
        })
    }

    /// The integers under `key`, if there, of any width and signedness.
    ///
    /// # Errors
    /// `Metadata` if the value is no array of integers, or one of them passes `i64::MAX`.
    pub fn optional_integers(&self, key: &str) -> Result<Option<Vec<i64>>, CheckpointError> {
        self.typed(key, "an array of integers", |value| match value {
            GgufValue::Array(GgufArray::Signed(numbers)) => Some(numbers.clone()),
            GgufValue::Array(GgufArray::Unsigned(numbers)) => numbers
                .iter()
                .map(|&number| i64::try_from(number).ok())
                .collect(),
            _ => None,
        })
    }

    /// The 32-bit floats under `key`, if there.
    ///
    /// # Errors
    /// `Metadata` if the value is no array of 32-bit floats.
    pub fn optional_f32s(&self, key: &str) -> Result<Option<&[f32]>, CheckpointError> {
        self.typed(key, "an array of 32-bit floats", |value| match value {
            GgufValue::Array(GgufArray::Float32(numbers)) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    /// An error about `key`.
    pub(super) fn error(&self, key: &str, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::Metadata {
            path: self.path.clone(),
            key: key.to_owned(),
            reason: reason.into(),
        }
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, CheckpointError> {
        value.ok_or_else(|| self.error(key, "is missing"))
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        pick: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.entries.get(key) else {
            return Ok(None);
        };
        match pick(value) {
            Some(picked) => Ok(Some(picked)),
            None => Err(self.error(key, format!("is {}, expected {wanted}", value.kind()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> GgufMetadata {
        GgufMetadata::from_entries(
            "m.gguf",
            [
                ("count", GgufValue::Unsigned(7)),
                ("signed", GgufValue::Signed(9)),
                ("negative", GgufValue::Signed(-1)),
                ("wide", GgufValue::Unsigned(1 << 40)),
                (
                    "ids",
                    GgufValue::Array(GgufArray::Unsigned(vec![1, u64::MAX])),
                ),
                ("types", GgufValue::Array(GgufArray::Signed(vec![3, 1]))),
            ],
        )
    }

    #[test]
    fn integers_of_either_sign_are_read_and_negative_ones_refused() {
        let metadata = metadata();
        assert_eq!(metadata.u64("count").unwrap(), 7);
        assert_eq!(metadata.u64("signed").unwrap(), 9);
        assert_eq!(
            metadata.optional_integers("types").unwrap(),
            Some(vec![3, 1])
        );
        assert!(metadata.u64("negative").is_err());
        assert!(metadata.optional_u32("wide").is_err());
        assert!(metadata.optional_integers("ids").is_err());
    }

    #[test]
    fn a_missing_key_and_a_wrong_type_are_named() {
        let metadata = metadata();
        assert_eq!(metadata.optional_string("absent").unwrap(), None);
        let missing = metadata.string("absent").unwrap_err().to_string();
        assert_eq!(missing, "m.gguf: metadata key absent is missing");
        let wrong = metadata.string("count").unwrap_err().to_string();
        assert_eq!(
            wrong,
            "m.gguf: metadata key count is an unsigned integer, expected a string"
        );
    }
}
