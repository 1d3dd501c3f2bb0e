//! The compilers of CUDA that the check of the kernels' CUDA form calls: NVRTC, ptxas, nvdisasm and the headers.
//!
//! None of them needs a GPU or a driver. They come out of NVIDIA's wheels on the package index.

use std::fs;
use std::path::PathBuf;

use crate::python::{self, ScratchFolder, Wheel};
use crate::{Failure, paths};

/// Folder in the cache; the release of CUDA that H200 drivers of the 580 series bring.
const FOLDER: &str = "cuda-13.0";
const WHEELS: [Wheel; 6] = [
    Wheel {
        name: "nvidia-cuda-nvrtc",
        version: "13.0.88",
        sha256: "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
    },
    Wheel {
        // ptxas
        name: "nvidia-cuda-nvcc",
        version: "13.0.88",
        sha256: "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
    },
    Wheel {
        // Headers, as the two below.
        name: "nvidia-cuda-runtime",
        version: "13.0.96",
        sha256: "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    },
    Wheel {
        name: "nvidia-cuda-crt",
        version: "13.0.88",
        sha256: "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
    },
    Wheel {
        name: "nvidia-cuda-cccl",
        version: "13.0.85",
        sha256: "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
    },
    Wheel {
        // The first release as a wheel. It reads what older assemblers write.
        name: "nvidia-cuda-nvdisasm",
        version: "13.2.51",
        sha256: "5a7acf77c55d6d2911ed6155d4d5bc156ffadf9df7a68a89b0c1155f4b13688c",
    },
];
/// What is kept: less than half of what the wheels hold.
const KEPT: [&str; 5] = [
    "bin/ptxas",
    "bin/nvdisasm",
    "lib/libnvrtc.so.13",
    "lib/libnvrtc-builtins.so.13.0",
    "include",
];

/// Makes sure that the compilers are in the cache; gives their folder, or `None` where there are none to have.
pub(crate) fn ensure() -> Result<Option<PathBuf>, Failure> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        eprintln!("no CUDA wheels are known for this platform");
        return Ok(None);
    }
    let cache = paths::cache()?;
    let folder = cache.join(FOLDER);
    if !folder.is_dir() {
        eprintln!(
            "fetching the CUDA compilers (131 MiB) into {}",
            folder.display()
        );
        let scratch = ScratchFolder::new_in(&cache)?;
        python::unpack_wheels(&WHEELS, scratch.path())?;
        let unpacked = scratch.path().join("nvidia/cu13");
        python::make_executable(&unpacked.join("bin"))?;
        let kept = scratch.path().join("kept");
        for path in KEPT {
            let to = kept.join(path);
            fs::create_dir_all(to.parent().unwrap_or(&kept))?;
            fs::rename(unpacked.join(path), &to)
                .map_err(|error| format!("the wheels lack {path}: {error}"))?;
        }
        // A rename within one file system is atomic: the folder is whole or not there.
        fs::rename(&kept, &folder)?;
    }
    Ok(Some(folder))
}
