//! JSON files of a model folder.

use std::path::Path;

use serde_json::Value;

use crate::error::CheckpointError;

/// What the model is: sizes, kind of positions, special tokens.
pub(crate) const CONFIG_FILE: &str = "config.json";

/// How its authors want it to be sampled. Optional.
pub(crate) const GENERATION_CONFIG_FILE: &str = "generation_config.json";

/// Reads a file that holds one JSON object.
pub(crate) fn read_json(path: &Path) -> Result<Value, CheckpointError> {
    let bytes = std::fs::read(path).map_err(|error| CheckpointError::io(path, error))?;
    let value: Value = serde_json::from_slice(&bytes)
        .map_err(|error| CheckpointError::json(path, error.to_string()))?;
    if !value.is_object() {
        return Err(CheckpointError::json(path, "expected an object at the top"));
    }
    Ok(value)
}

/// Reads a file that may be absent.
pub(crate) fn read_optional_json(path: &Path) -> Result<Option<Value>, CheckpointError> {
    if path.exists() {
        read_json(path).map(Some)
    } else {
        Ok(None)
    }
}
