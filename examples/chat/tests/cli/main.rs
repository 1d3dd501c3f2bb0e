//! The chat binary as its users run it: flags in, exit code, standard output and standard error out.
//!
//! - `refused`: what it does not do, each in one line and with exit code 2
//! - `answers`: `--prompt` on the demo model
//! - `conversation`: turns over a pipe

mod answers;
mod conversation;
mod refused;
mod run;
