//! Which kind of model lies at a path.

use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::safetensors::{INDEX_FILE, SINGLE_FILE};

/// What to open.
pub(crate) enum Location {
    /// The path is a folder with safetensors weights.
    SafetensorsFolder,
    /// The path is this file, or a folder with this GGUF file and no safetensors weights.
    GgufFile(PathBuf),
}

/// Looks at the names in a folder; files are not opened.
pub(crate) fn locate(path: &Path) -> Result<Location, CheckpointError> {
    let kind = std::fs::metadata(path).map_err(|error| CheckpointError::io(path, error))?;
    if !kind.is_dir() {
        return Ok(Location::GgufFile(path.to_path_buf()));
    }
    if path.join(SINGLE_FILE).exists() || path.join(INDEX_FILE).exists() {
        return Ok(Location::SafetensorsFolder);
    }
    only_gguf_file(path).map(Location::GgufFile)
}

/// The one GGUF file in a folder.
fn only_gguf_file(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let io = |error| CheckpointError::io(folder, error);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
        {
            files.push(path);
        }
    }
    files.sort();
    match files.as_slice() {
        [file] => Ok(file.clone()),
        [] => Err(CheckpointError::not_a_checkpoint(
            folder,
            format!("it holds neither {SINGLE_FILE}, nor {INDEX_FILE}, nor a .gguf file"),
        )),
        several => {
            let names: Vec<_> = several
                .iter()
                .filter_map(|file| file.file_name()?.to_str())
                .collect();
            Err(CheckpointError::not_a_checkpoint(
                folder,
                format!(
                    "it holds {} GGUF files, name one of them: {}",
                    several.len(),
                    names.join(", ")
                ),
            ))
        }
    }
}
