//! Compiled kernels of a GPU on disk, so that only the first start of a build compiles them.

/// Keeps compiled kernels in the user's cache folder. To be called before a device starts.
#[cfg(feature = "persistence")]
pub(crate) fn enable() {
    if let Some(cache) = crate::default_model::cache() {
        burn_paged::keep_compiled_kernels(&cache.join("burn-paged/kernels"));
    }
}

/// Nothing is kept in this build.
#[cfg(not(feature = "persistence"))]
pub(crate) fn enable() {}
