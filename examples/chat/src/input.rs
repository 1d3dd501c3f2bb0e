//! Lines from the user: edited on a terminal, plain from a pipe or a file.

use std::io::{self, BufRead, IsTerminal};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

/// What came in.
#[derive(Debug, PartialEq)]
pub(crate) enum Line {
    /// A line without its line feed.
    Text(String),
    /// Ctrl-C while nothing was being answered.
    Interrupted,
    /// The end of the input.
    End,
}

/// Where the lines come from.
pub(crate) enum Input {
    /// Somebody types: with a prompt, editing and history.
    Terminal(Box<DefaultEditor>),
    /// A pipe or a file.
    Piped(Box<dyn BufRead>),
}

impl Input {
    /// Standard input, whichever it is.
    pub(crate) fn open() -> io::Result<Self> {
        if io::stdin().is_terminal() {
            let editor = DefaultEditor::new().map_err(io::Error::other)?;
            Ok(Self::Terminal(Box::new(editor)))
        } else {
            Ok(Self::Piped(Box::new(io::stdin().lock())))
        }
    }

    /// Whether somebody types.
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Waits for the next line.
    pub(crate) fn next_line(&mut self) -> io::Result<Line> {
        match self {
            Self::Terminal(editor) => match editor.readline("> ") {
                Ok(line) => {
                    // A history that cannot be kept is no reason to lose the line.
                    editor.add_history_entry(&line).ok();
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(io::Error::other(error)),
            },
            Self::Piped(reader) => {
                let mut bytes = Vec::new();
                if reader.read_until(b'\n', &mut bytes)? == 0 {
                    return Ok(Line::End);
                }
                let text = String::from_utf8_lossy(&bytes);
                Ok(Line::Text(text.trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn piped_lines_lose_their_ends_and_survive_bad_bytes() {
        let mut input = Input::Piped(Box::new(&b"one\r\n\ntw\xffo\nlast"[..]));
        let mut line = || input.next_line().unwrap();
        assert_eq!(line(), Line::Text("one".into()));
        assert_eq!(line(), Line::Text("".into()));
        assert_eq!(line(), Line::Text("tw\u{fffd}o".into()));
        assert_eq!(line(), Line::Text("last".into()));
        assert_eq!(line(), Line::End);
    }
}
