//! What each stage runs.
//!
//! Most of the time goes into building dependencies, and cargo builds them anew for each set of features that it
//! resolves, so the stages are cut by what they share. `clippy-flex` and `doc` select the workspace's libraries and
//! binaries with the feature of the default build; `clippy` and `test` bring the development dependencies in, with every
//! backend that runs without a GPU. The examples run as tests of their own: to build them alone would resolve other
//! features for some dependencies and build those again.

use crate::{Failure, cuda, llvm, model, packages, paths, process};

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
        name: "report",
        what: "tests of the script that joins bench results",
        run: report,
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
        name: "clippy-flex",
        what: "lints, feature flex",
        run: clippy_flex,
    },
    Stage {
        name: "doc",
        what: "documentation without warnings",
        run: doc,
    },
    Stage {
        name: "clippy",
        what: "lints, all targets, features flex, cpu, fusion, hopper",
        run: clippy,
    },
    Stage {
        name: "cuda",
        what: "the kernels as CUDA code, without a GPU",
        run: cuda,
    },
    Stage {
        name: "test",
        what: "all tests and examples, features flex, cpu, fusion, hopper",
        run: test,
    },
];

/// What the default build has.
const FLEX: &[&str] = &["--workspace", "--features", "flex"];
/// Every backend that runs on a machine without a GPU, and the kernels that only a compiler sees there.
const HOST: &[&str] = &["--workspace", "--features", "flex,cpu,fusion,hopper"];

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

fn report() -> Result<(), Failure> {
    // The packages stage has made sure of Python, which LLVM needs as well.
    let mut command = std::process::Command::new("python3");
    command.args(["-B", "-m", "unittest", "discover", "-s", "benches"]);
    process::run(command.current_dir(paths::repository()))
}

fn fetch_model() -> Result<(), Failure> {
    model::ensure().map(|path| eprintln!("{}", path.display()))
}

fn clippy_flex() -> Result<(), Failure> {
    let mut command = process::cargo(["clippy"])?;
    process::run(command.args(FLEX).args(["--", "-D", "warnings"]))
}

fn doc() -> Result<(), Failure> {
    let mut command = process::cargo(["doc", "--no-deps"])?;
    process::run(command.args(FLEX).env("RUSTDOCFLAGS", "-D warnings"))
}

fn clippy() -> Result<(), Failure> {
    let mut command = process::cargo(["clippy", "--all-targets"])?;
    process::run(command.args(HOST).args(["--", "-D", "warnings"]))
}

fn cuda() -> Result<(), Failure> {
    let mut command = process::cargo(["test"])?;
    // The packages and features of the stage `test`, so that no dependency is built for this alone; cargo then builds
    // what this test needs of them, which Burn is not.
    command.args(HOST).args(["--test", "cuda"]);
    if let Some(folder) = cuda::ensure()? {
        command.env("BURN_PAGED_CUDA_TOOLS", folder);
    }
    process::run(command.args(["--", "--nocapture"]))
}

fn test() -> Result<(), Failure> {
    process::run(process::cargo(["test"])?.args(HOST))
}
