//! `cargo xtask chat`: from a fresh clone to a conversation in one command.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::{Failure, llvm, model, paths, process};

/// Package and binary of the chat example.
const PACKAGE: &str = "burn-paged-chat";
const BINARY: &str = "chat";

/// What a device needs beside the default build.
#[derive(Debug, PartialEq)]
struct Needs {
    features: Option<&'static str>,
    llvm: bool,
}

/// Fetches, builds and runs; gives the exit code of the binary where it does not replace this process.
pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    // `cargo xtask chat -- --prompt hi` and `cargo xtask chat --prompt hi` mean the same.
    let args = args.strip_prefix(&["--".to_owned()]).unwrap_or(args);
    let needs = needs_of(
        value_of(args, "--device").unwrap_or("flex"),
        has_cuda_headers(),
    )?;
    if value_of(args, "--model").is_none() && !args.iter().any(|arg| arg == "--help" || arg == "-h")
    {
        model::ensure()?;
    }
    if needs.llvm {
        llvm::ensure()?;
    }
    build(needs.features)?;
    let binary = paths::target()?.join("release").join(BINARY);
    hand_over(Command::new(binary).args(args))
}

/// Builds the release binary with the default features and `features`.
fn build(features: Option<&str>) -> Result<(), Failure> {
    let mut command = process::cargo(["build", "--release", "--package", PACKAGE])?;
    if let Some(features) = features {
        command.args(["--features", features]);
    }
    process::run(&mut command)
}

/// Becomes the binary: Ctrl-C then reaches the conversation alone, not a parent that would end first.
#[cfg(unix)]
fn hand_over(command: &mut Command) -> Result<ExitCode, Failure> {
    use std::os::unix::process::CommandExt;
    let error = command.exec();
    Err(format!(
        "cannot start {}: {error}",
        command.get_program().to_string_lossy()
    )
    .into())
}

#[cfg(not(unix))]
fn hand_over(command: &mut Command) -> Result<ExitCode, Failure> {
    let code = command
        .status()?
        .code()
        .and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Value of `flag` in `args`, as `--flag value` or `--flag=value`.
fn value_of<'a>(args: &'a [String], flag: &str) -> Option<&'a str> {
    args.iter()
        .enumerate()
        .find_map(|(i, arg)| match arg.strip_prefix(flag)? {
            "" => args.get(i + 1).map(String::as_str),
            rest => rest.strip_prefix('='),
        })
}

/// Whether a CUDA toolkit is where CubeCL looks for its headers: then kernels are compiled by it, and those for Hopper can be.
fn has_cuda_headers() -> bool {
    let named = std::env::var_os("CUDA_PATH").map(PathBuf::from);
    let usual = ["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from);
    let mut places = named.into_iter().chain(usual);
    places.any(|place| place.join("include/cuda_runtime.h").exists())
}

/// What to compile in for `--device`; an index after a colon does not matter here.
fn needs_of(device: &str, has_cuda_headers: bool) -> Result<Needs, Failure> {
    let (features, llvm) = match device.split(':').next().unwrap_or_default() {
        "flex" => (None, false),
        "cpu" => (Some("cpu,fusion"), true),
        // Without fusion: the ops of a model are kernels of their own, between which it finds nothing to fuse, and each takes the
        // host longer (dev builds on an H200, SmolLM2, a prompt of 2,048 tokens: 13.1 ms with it, 7.2 to 8.4 without).
        "cuda" if has_cuda_headers => (Some("cuda-hopper"), true),
        "cuda" => (Some("cuda"), true),
        "rocm" => (Some("rocm"), false),
        "vulkan" => (Some("vulkan"), false),
        "metal" => (Some("metal"), false),
        "wgpu" => (Some("wgpu"), false),
        _ => {
            let known = "flex, cpu, cuda, rocm, vulkan, metal, wgpu";
            return Err(format!("unknown device {device:?}; known: {known}").into());
        }
    };
    Ok(Needs { features, llvm })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_flag_has_its_value_behind_a_space_or_an_equals_sign() {
        assert_eq!(
            value_of(&args("--prompt hi --device cuda:1"), "--device"),
            Some("cuda:1")
        );
        assert_eq!(
            value_of(&args("--device=cpu --json"), "--device"),
            Some("cpu")
        );
        assert_eq!(value_of(&args("--devices cpu"), "--device"), None);
        assert_eq!(value_of(&args("--device"), "--device"), None);
    }

    #[test]
    fn the_device_decides_the_features_and_llvm() {
        assert_eq!(
            needs_of("flex", true).unwrap(),
            Needs {
                features: None,
                llvm: false
            }
        );
        assert_eq!(
            needs_of("cuda:3", false).unwrap(),
            Needs {
                features: Some("cuda"),
                llvm: true
            }
        );
        assert_eq!(
            needs_of("cuda", true).unwrap(),
            Needs {
                features: Some("cuda-hopper"),
                llvm: true
            }
        );
        assert_eq!(
            needs_of("wgpu", false).unwrap(),
            Needs {
                features: Some("wgpu"),
                llvm: false
            }
        );
        let refused = needs_of("tpu", false).unwrap_err().to_string();
        assert!(refused.contains("\"tpu\""));
    }
}
