//! Running the binary.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// A run that is over.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// The binary, not yet started, without the variables that change what it says.
pub(crate) fn chat(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chat"));
    command
        .args(args)
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command
}

/// Runs the binary to its end.
pub(crate) fn run(args: &[&str]) -> Run {
    chat(args).output().unwrap().into()
}

/// Runs it and expects an answer.
pub(crate) fn answer(args: &[&str]) -> String {
    model();
    let run = run(args);
    assert_eq!(run.code, Some(0), "{run:?}");
    run.stdout
}

/// The demo model. Tests that need it fail without it, so that nobody takes a skipped test for a passed one.
pub(crate) fn model() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute());
    let cache = cache.unwrap_or_else(|| std::env::home_dir().unwrap().join(".cache"));
    let path = cache.join("burn-paged/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.is_file(),
        "{} is missing: run `cargo xtask model`",
        path.display()
    );
    path
}
