//! Why the program ends early, and with which exit code.

use std::fmt::Display;
use std::io;

/// The end of the program before its work was done.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Flags, model, device or prompt are wrong: exit code 2. One line.
    Refused(String),
    /// Something broke while running: exit code 1. One line.
    Broke(String),
    /// The answer cannot be written.
    Output(io::Error),
}

impl Failure {
    /// Refused, for a reason that is brought to one line.
    pub(crate) fn refused(reason: impl Display) -> Self {
        Self::Refused(one_line(reason))
    }

    /// Broke, for a reason that is brought to one line.
    pub(crate) fn broke(reason: impl Display) -> Self {
        Self::Broke(one_line(reason))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Puts all lines of a message behind one another.
pub(crate) fn one_line(message: impl Display) -> String {
    let text = message.to_string();
    let lines: Vec<_> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_several_lines_becomes_one() {
        assert_eq!(one_line("a:\n\n  b\n  c"), "a: b c");
    }
}
