//! Running other programs.

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};

use crate::{Failure, paths};

/// A cargo of the same toolchain, in the repository, building into the shared target folder.
pub(crate) fn cargo<I>(args: I) -> Result<Command, Failure>
where
    I: IntoIterator<Item: AsRef<OsStr>>,
{
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(args)
        .current_dir(paths::repository())
        .env("CARGO_TARGET_DIR", paths::target()?);
    // What `cargo run` tells of this package. Some build scripts watch these variables, and would rebuild half of the
    // dependencies for each clone and whenever a build is started without xtask.
    for (name, _) in std::env::vars_os() {
        let told = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name
            .to_str()
            .is_some_and(|name| told.iter().any(|prefix| name.starts_with(prefix)))
        {
            command.env_remove(name);
        }
    }
    Ok(command)
}

/// Shows the command, runs it with this terminal, and fails if it does.
pub(crate) fn run(command: &mut Command) -> Result<(), Failure> {
    let line = line_of(command);
    eprintln!("$ {line}");
    let status = command
        .status()
        .map_err(|error| format!("cannot start `{line}`: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`{line}` ended with {status}").into())
    }
}

/// Runs the command silently; its output is in the result, and in the message if it failed.
pub(crate) fn output(command: &mut Command) -> Result<Output, Failure> {
    let line = line_of(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot start `{line}`: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "`{line}` ended with {}\n{}",
        output.status,
        stderr.trim_end()
    )
    .into())
}

/// Whether the command starts and succeeds.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    output(Command::new(program).args(args)).is_ok()
}

/// The command as a user would type it; a long argument (a script) is cut.
fn line_of(command: &Command) -> String {
    let mut line = program_name(command.get_program());
    for arg in command.get_args() {
        let arg = arg.to_string_lossy();
        let first = arg.lines().next().unwrap_or_default();
        line.push(' ');
        line.push_str(first);
        if first.len() < arg.len() {
            line.push_str(" …");
        }
    }
    line
}

fn program_name(program: &OsStr) -> String {
    let path = std::path::Path::new(program);
    path.file_name()
        .unwrap_or(program)
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_carries_the_command_and_what_it_said() {
        let failure = output(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err();
        let text = failure.to_string();
        assert!(text.contains("sh -c"), "{text}");
        assert!(text.contains("exit status: 3"), "{text}");
        assert!(text.ends_with("why"), "{text}");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let failure = run(&mut Command::new("no-such-program-anywhere")).unwrap_err();
        assert!(
            failure
                .to_string()
                .starts_with("cannot start `no-such-program-anywhere`")
        );
    }
}
