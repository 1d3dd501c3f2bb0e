//! The static LLVM that CubeCL's CPU and CUDA compilers link against.
//!
//! The build script of `tracel-llvm-bundler` downloads it from its project's release page unless a folder with a mark
//! is already in place. We put the same libraries there from two wheels, so that a machine that reaches nothing but
//! package indices can build.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use crate::python::{self, ScratchFolder, Wheel};
use crate::{Failure, packages, paths, process};

/// Version of `tracel-llvm-bundler` in Cargo.lock: it names the folder where that crate looks.
const BUNDLE: &str = "23.1.0-4";
/// Empty file by which the bundler knows a complete installation.
const MARK: &str = ".tracel-llvm-installed";
const WHEELS: [Wheel; 2] = [
    Wheel {
        name: "mlc-llvm-static",
        version: "23.1.1.post0",
        sha256: "dcfec888abfaa418be77d41af585805f31463584cf9c90582992c00f392c1ac5",
    },
    Wheel {
        name: "mlc-llvm-static-extra-targets",
        version: "23.1.1.post0",
        sha256: "c36e834d9a4e9cf9759f27fece65711ece7a2fc2b5a96dbb15d66f5e9e787929",
    },
];

/// Makes sure that LLVM is where the build looks for it, with what linking it takes.
pub(crate) fn ensure() -> Result<(), Failure> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        eprintln!("no LLVM wheels are known for this platform: the build downloads LLVM itself");
        return Ok(());
    }
    packages::ensure(packages::LLVM)?;
    let parent = paths::data()?.join("tracel");
    let folder = parent.join(format!("tracel-llvm-{BUNDLE}"));
    if !folder.join(MARK).is_file() {
        eprintln!(
            "installing LLVM (88 MiB to fetch) into {}",
            folder.display()
        );
        install(&parent, &folder)?;
    }
    let config = folder.join("bin/llvm-config");
    let version = process::output(Command::new(&config).arg("--version"))?;
    eprintln!(
        "LLVM {} in {}",
        String::from_utf8_lossy(&version.stdout).trim(),
        folder.display()
    );
    Ok(())
}

fn install(parent: &Path, folder: &Path) -> Result<(), Failure> {
    let scratch = ScratchFolder::new_in(parent)?;
    python::unpack_wheels(&WHEELS, scratch.path())?;
    let unpacked = scratch.path().join("mlc_llvm_static/static");
    python::make_executable(&unpacked.join("bin"))?;
    File::create(unpacked.join(MARK))?;
    if folder.exists() {
        // Without the mark it is what an interrupted installation left.
        fs::remove_dir_all(folder)?;
    }
    fs::rename(&unpacked, folder)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_name_is_the_one_that_the_locked_bundler_looks_for() {
        let lock = fs::read_to_string(paths::repository().join("Cargo.lock")).unwrap();
        let entry = format!("name = \"tracel-llvm-bundler\"\nversion = \"{BUNDLE}\"\n");
        assert!(
            lock.contains(&entry),
            "Cargo.lock holds another version than {BUNDLE}"
        );
    }
}
