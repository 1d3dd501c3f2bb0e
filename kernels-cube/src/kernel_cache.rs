//! Compiled kernels on disk, between runs.

use std::path::Path;

use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

/// Keeps compiled kernels in a database in `folder`, so that the next run of the same build finds them there. Kernels of
/// CUDA, ROCm and Vulkan are kept; other runtimes compile on every run.
///
/// To be called by a program, not by a library, and before it uses a device: CubeCL reads its configuration once. A
/// `cubecl.toml` that names a place of its own for what is kept wins over `folder`. Several processes may share one.
///
/// Returns whether the setting was taken: `false` if CubeCL's configuration had been read before.
///
/// A rebuilt program has another build id and compiles anew.
pub fn keep_compiled_kernels(folder: &Path) -> bool {
    // What CubeCL would read by itself.
    let found = CubeClRuntimeConfig::from_current_dir().override_from_env();
    CubeClRuntimeConfig::try_set(keeping(found, folder))
}

fn keeping(mut config: CubeClRuntimeConfig, folder: &Path) -> CubeClRuntimeConfig {
    config.compilation.cache = true;
    // The default is a place that depends on the folder in which the program is started.
    if matches!(config.environment.path, CacheConfig::Target) {
        config.environment.path = CacheConfig::Directory(folder.to_path_buf());
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_the_user_chose_is_kept() {
        let folder = Path::new("kernels");
        let config = keeping(CubeClRuntimeConfig::default(), folder);
        assert!(config.compilation.cache);
        assert_eq!(config.environment.path.root(), folder);

        let mut chosen = CubeClRuntimeConfig::default();
        chosen.environment.path = CacheConfig::Directory("elsewhere".into());
        let config = keeping(chosen, folder);
        assert!(config.compilation.cache);
        assert_eq!(config.environment.path.root(), Path::new("elsewhere"));
    }
}
