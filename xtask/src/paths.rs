//! Where things lie: the repository, the user's cache and data folders, the target folder.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::Failure;

/// Root of the repository.
pub(crate) fn repository() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// Folder of everything that this project caches for the user.
pub(crate) fn cache() -> Result<PathBuf, Failure> {
    Ok(base("XDG_CACHE_HOME", ".cache")?.join("burn-paged"))
}

/// Folder where the user's programs keep data.
pub(crate) fn data() -> Result<PathBuf, Failure> {
    base("XDG_DATA_HOME", ".local/share")
}

/// Target folder of every build that xtask starts.
///
/// One folder in the cache instead of one per clone: the dependencies take far longer to build than this repository.
pub(crate) fn target() -> Result<PathBuf, Failure> {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) if !dir.is_empty() => Ok(std::path::absolute(dir)?),
        _ => Ok(cache()?.join("target")),
    }
}

fn base(variable: &str, fallback: &str) -> Result<PathBuf, Failure> {
    choose(std::env::var_os(variable), std::env::home_dir(), fallback)
        .ok_or_else(|| format!("neither {variable} nor a home folder is set").into())
}

/// The folder that `variable` names if it is absolute, as the XDG base directory specification demands; else
/// `fallback` below the home folder.
fn choose(variable: Option<OsString>, home: Option<PathBuf>, fallback: &str) -> Option<PathBuf> {
    match variable.map(PathBuf::from) {
        Some(dir) if dir.is_absolute() => Some(dir),
        _ => home
            .filter(|home| !home.as_os_str().is_empty())
            .map(|home| home.join(fallback)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_absolute_variable_counts() {
        let home = || Some(PathBuf::from("/home/u"));
        assert_eq!(
            choose(Some("/c".into()), home(), ".cache"),
            Some("/c".into())
        );
        assert_eq!(
            choose(Some("c".into()), home(), ".cache"),
            Some("/home/u/.cache".into())
        );
        assert_eq!(
            choose(Some("".into()), home(), ".cache"),
            Some("/home/u/.cache".into())
        );
        assert_eq!(choose(None, Some("".into()), ".cache"), None);
    }

    #[test]
    fn the_repository_holds_the_workspace_manifest() {
        assert!(repository().join("Cargo.lock").is_file());
    }
}
