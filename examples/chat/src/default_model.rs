//! The model that is used when none is named.

use std::path::{Path, PathBuf};

/// File name of the demo model, as `cargo xtask model` stores it.
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Path of the demo model.
///
/// # Errors
/// If it is not there; the message says how to get it.
pub(crate) fn find() -> Result<PathBuf, String> {
    let path = cache()
        .ok_or("no --model is given, and no home folder is set to look for the demo model in")?
        .join("burn-paged/models")
        .join(FILE);
    if path.is_file() {
        Ok(path)
    } else {
        Err(missing(&path))
    }
}

fn missing(path: &Path) -> String {
    format!(
        "no --model is given, and the demo model is not at {}: `cargo xtask model` fetches it",
        path.display()
    )
}

/// The user's cache folder, by the XDG base directory specification: a relative `XDG_CACHE_HOME` does not count.
pub(crate) fn cache() -> Option<PathBuf> {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    named
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
}
