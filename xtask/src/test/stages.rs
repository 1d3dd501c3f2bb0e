//! What each stage runs.
//!
//! Most of the time goes into building dependencies, so the stages are cut by what they share. The `-flex` stages all
//! select the whole workspace with the same features: cargo then builds each dependency once for running and once for
//! checking (clippy and rustdoc use the latter). The `-cpu` stages select only the crates with device code.

use std::process::{Command, Stdio};

use crate::{Failure, chat, llvm, model, packages, paths, process};

/// One step of CI.
pub(super) struct Stage {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) run: fn() -> Result<(), Failure>,
}

pub(super) const STAGES: &[Stage] = &[
    Stage {
        name: "packages",
        what: "system packages and Rust components",
        run: packages_and_components,
    },
    Stage {
        name: "fmt",
        what: "formatting",
        run: fmt,
    },
    Stage {
        name: "model",
        what: "the demo model",
        run: fetch_model,
    },
    Stage {
        name: "llvm",
        what: "LLVM for the cpu and cuda features",
        run: llvm::ensure,
    },
    Stage {
        name: "chat",
        what: "release build of chat, one question",
        run: ask_chat,
    },
    Stage {
        name: "clippy-flex",
        what: "lints, all targets, feature flex",
        run: clippy_flex,
    },
    Stage {
        name: "doc",
        what: "documentation without warnings",
        run: doc,
    },
    Stage {
        name: "test-flex",
        what: "all tests, feature flex",
        run: test_flex,
    },
    Stage {
        name: "examples",
        what: "the examples run",
        run: run_examples,
    },
    Stage {
        name: "clippy-cpu",
        what: "lints, features flex, cpu, fusion",
        run: clippy_cpu,
    },
    Stage {
        name: "test-cpu",
        what: "device tests, features flex, cpu, fusion",
        run: test_cpu,
    },
];

/// Crates with device code: what they compute depends on the backend.
const DEVICE_CRATES: &[&str] = &["burn-paged-kernels", "burn-paged", "burn-paged-llama"];
const WORKSPACE_FLEX: &[&str] = &["--workspace", "--features", "flex"];
const DEVICE_FEATURES: &[&str] = &["--features", "flex,cpu,fusion"];

/// Binaries that a user runs without arguments.
const EXAMPLES: &[&str] = &[
    "burn-paged-example-paged-attention",
    "burn-paged-example-add-a-model",
];

fn packages_and_components() -> Result<(), Failure> {
    packages::ensure(packages::LLVM)?;
    for (component, tool) in [("rustfmt", "fmt"), ("clippy", "clippy")] {
        process::output(&mut process::cargo([tool, "--version"])?).map_err(|failure| {
            format!("cargo {tool} is missing: rustup component add {component}\n{failure}")
        })?;
    }
    Ok(())
}

fn fmt() -> Result<(), Failure> {
    process::run(&mut process::cargo(["fmt", "--all", "--check"])?)
}

fn fetch_model() -> Result<(), Failure> {
    model::ensure().map(|path| eprintln!("{}", path.display()))
}

fn clippy_flex() -> Result<(), Failure> {
    let mut command = process::cargo(["clippy", "--all-targets"])?;
    process::run(command.args(WORKSPACE_FLEX).args(["--", "-D", "warnings"]))
}

fn clippy_cpu() -> Result<(), Failure> {
    let mut command = process::cargo(["clippy", "--all-targets"])?;
    command.args(device_crates()).args(DEVICE_FEATURES);
    process::run(command.args(["--", "-D", "warnings"]))
}

fn doc() -> Result<(), Failure> {
    let mut command = process::cargo(["doc", "--no-deps"])?;
    process::run(
        command
            .args(WORKSPACE_FLEX)
            .env("RUSTDOCFLAGS", "-D warnings"),
    )
}

fn test_flex() -> Result<(), Failure> {
    process::run(process::cargo(["test"])?.args(WORKSPACE_FLEX))
}

fn test_cpu() -> Result<(), Failure> {
    process::run(
        process::cargo(["test"])?
            .args(device_crates())
            .args(DEVICE_FEATURES),
    )
}

fn device_crates() -> impl Iterator<Item = &'static str> {
    DEVICE_CRATES.iter().flat_map(|name| ["--package", *name])
}

/// Builds with the whole workspace selected, as the tests do: `cargo run --package` would resolve other features for
/// some dependencies and build them again.
fn run_examples() -> Result<(), Failure> {
    process::run(process::cargo(["build"])?.args(WORKSPACE_FLEX))?;
    let folder = paths::target()?.join("debug");
    EXAMPLES
        .iter()
        .try_for_each(|name| process::run(&mut Command::new(folder.join(name))))
}

/// The README's first command, in effect: the answer on standard output, and nothing else.
fn ask_chat() -> Result<(), Failure> {
    chat::build(None)?;
    let mut command = Command::new(paths::target()?.join("release/chat"));
    command
        .args(["--prompt", "What is the capital of France?"])
        .stderr(Stdio::inherit());
    let output = process::output(&mut command)?;
    let answer = String::from_utf8(output.stdout)?;
    eprintln!("chat answers: {}", answer.trim_end());
    if answer.contains("Paris") {
        Ok(())
    } else {
        Err("the answer does not name Paris".into())
    }
}
