//! Set-up and checks of this repository: `cargo xtask help` lists what there is.
//!
//! - `chat`: fetch the demo model, build the chat binary, talk to it
//! - `test`: everything that CI runs, on a machine with nothing but Rust
//! - `model`, `llvm`, `cuda-tools`: the downloads that the others need, alone
//!
//! No dependencies: this must build in seconds, before anything else does.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool prints"
)]

mod chat;
mod cuda;
mod llvm;
mod model;
mod packages;
mod paths;
mod process;
mod python;
mod test;

use std::process::ExitCode;

/// Why a command stopped; the text is shown as one message.
type Failure = Box<dyn std::error::Error>;

const HELP: &str = "\
cargo xtask <command>

  chat [ARGS]       fetch the demo model, build the chat binary and run it; ARGS go to the binary.
                    --device cpu|cuda[:N]|vulkan|metal|wgpu|rocm[:N] also chooses what is compiled in.
  test              everything CI needs on a fresh machine, stage by stage
    --only STAGE    one stage (may be repeated)
    --list          names of the stages
  model             fetch SmolLM2-135M-Instruct (GGUF, 94 MiB) into the user's cache, checked by hash
  llvm              install the static LLVM that the features cpu and cuda link against
  cuda-tools        fetch the CUDA compilers (NVRTC, ptxas, nvdisasm) into the user's cache, and say where
  help              this text

Caches: $XDG_CACHE_HOME/burn-paged (models, target, CUDA compilers) and $XDG_DATA_HOME/tracel (LLVM), by default
~/.cache and ~/.local/share. CARGO_TARGET_DIR is respected where it is set.
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let Some((command, rest)) = args.split_first() else {
        print!("{HELP}");
        return Ok(ExitCode::FAILURE);
    };
    match command.as_str() {
        "chat" => return chat::run(rest),
        "test" => test::run(rest)?,
        "model" => {
            no_arguments(command, rest)?;
            println!("{}", model::ensure()?.display());
        }
        "llvm" => {
            no_arguments(command, rest)?;
            llvm::ensure()?;
        }
        "cuda-tools" => {
            no_arguments(command, rest)?;
            if let Some(folder) = cuda::ensure()? {
                println!("{}", folder.display());
            }
        }
        "help" | "--help" | "-h" => print!("{HELP}"),
        other => return Err(format!("unknown command {other:?}; see `cargo xtask help`").into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn no_arguments(command: &str, rest: &[String]) -> Result<(), Failure> {
    match rest.first() {
        None => Ok(()),
        Some(extra) => Err(format!("{command} takes no arguments, found {extra:?}").into()),
    }
}
