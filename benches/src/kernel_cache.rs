//! Compiled kernels on disk, so that only the first run of a build compiles them.

/// Keeps compiled kernels in the user's cache folder, where the chat program has its own. To be called before a device is
/// opened.
#[cfg(feature = "persistence")]
pub fn keep_compiled_kernels() {
    use std::path::PathBuf;
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = named
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")));
    if let Some(cache) = cache {
        burn_paged_kernels::keep_compiled_kernels(&cache.join("burn-paged/kernels"));
    }
}

/// Nothing is kept in this build.
#[cfg(not(feature = "persistence"))]
pub fn keep_compiled_kernels() {}
