//! A conversation with a local model in the terminal, or one answer to a script.
//!
//! Run with
//!
//! ```text
//! cargo xtask chat -- --prompt "What is the capital of France?"
//! ```
//!
//! - `args`: flags; `device`: the device behind `--device`; `default_model`: the model behind no `--model`
//! - `session`: model, tokenizer and engine together; `answer`: what one request gives
//! - `once`: `--prompt`; `conversation`: turns, with `input`, `command`, `interrupt` and `stats`
//! - `progress`: the loading bar; `kernel_cache`: compiled kernels on disk; `failure`: exit codes

mod answer;
mod args;
mod command;
mod conversation;
mod default_model;
mod device;
mod failure;
mod input;
mod interrupt;
mod kernel_cache;
mod once;
mod progress;
mod session;
mod stats;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

use args::Args;
use conversation::Conversation;
use failure::Failure;
use input::Input;
use interrupt::Interrupt;
use session::Session;

/// What is logged unless `RUST_LOG` says otherwise. CubeCL warns of a recording without a launch, by which the engine asks whether
/// the device records at all; a recording that breaks is an error, which the engine logs.
const LOG: &str = "warn,cubecl_cuda::compute::capture=error";

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(LOG)).init();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => return refuse(&usage_fault(&error)),
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the answer has gone away; that is no fault of ours.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(Failure::Refused(reason)) => refuse(&reason),
        Err(Failure::Broke(reason)) => complain(&reason, ExitCode::FAILURE),
        Err(Failure::Output(error)) => complain(&error.to_string(), ExitCode::FAILURE),
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    args.check().map_err(Failure::refused)?;
    let path = match &args.model {
        Some(path) => path.clone(),
        None => default_model::find().map_err(Failure::refused)?,
    };
    kernel_cache::enable();
    let device = args.device.start().map_err(Failure::refused)?;
    let mut session = Session::load(&path, device, args)?;
    let mut out = io::stdout();
    match &args.prompt {
        Some(prompt) => once::answer(&mut session, args, prompt, &mut out),
        None => converse(&mut session, args, out),
    }
}

fn converse(session: &mut Session, args: &Args, out: impl Write) -> Result<(), Failure> {
    let mut input = Input::open()?;
    let interrupt = Interrupt::install(!input.is_terminal()).map_err(Failure::broke)?;
    if input.is_terminal() {
        let about = session.description();
        let line = format!(
            "{}, {} on {}",
            about["path"], about["dtype"], about["device"]
        );
        writeln!(
            io::stderr(),
            "{}\n/help lists the commands",
            line.replace('"', "")
        )?;
    }
    Conversation::new(session, interrupt, args.system.clone(), out).hold(&mut input)
}

/// What is wrong with the flags, in one line: the parser's message without its usage.
fn usage_fault(error: &clap::Error) -> String {
    let text = error.to_string();
    let fault = text.split("\n\n").next().unwrap_or_default();
    failure::one_line(fault.trim_start_matches("error: "))
}

fn refuse(reason: &str) -> ExitCode {
    complain(reason, ExitCode::from(2))
}

/// One line on standard error. If even that cannot be written, the exit code has to do.
fn complain(reason: &str, code: ExitCode) -> ExitCode {
    writeln!(io::stderr(), "chat: {reason}").ok();
    code
}
