//! What a line of a conversation means: a message to the model, or a command to the program.

/// What the user typed.
#[derive(Debug, PartialEq)]
pub(crate) enum Command<'a> {
    /// A message for the model.
    Say(&'a str),
    /// Forget the conversation.
    Reset,
    /// Show the system message, or replace it.
    System(Option<&'a str>),
    /// Show the numbers of the last answer and of the conversation.
    Stats,
    /// Show the commands.
    Help,
    /// End the program.
    Exit,
    /// Nothing was typed.
    Nothing,
    /// A command that is not there.
    Unknown(&'a str),
}

/// Text of `/help`.
pub(crate) const HELP: &str = "\
/reset          forget the conversation; the system message stays
/system         show the system message
/system TEXT    replace the system message
/stats          tokens, prefix cache hits and speed of the last answer and of the conversation
/help           this text
/exit           end (also Ctrl-D)
Ctrl-C stops an answer. A message that begins with a slash needs a space before it.";

impl<'a> Command<'a> {
    /// Reads one line, without its line feed.
    pub(crate) fn parse(line: &'a str) -> Self {
        let message = line.trim();
        if message.is_empty() {
            return Self::Nothing;
        }
        if !line.starts_with('/') {
            return Self::Say(message);
        }
        let (name, rest) = message
            .split_once(char::is_whitespace)
            .unwrap_or((message, ""));
        let rest = rest.trim();
        match (name, rest.is_empty()) {
            ("/reset", true) => Self::Reset,
            ("/system", true) => Self::System(None),
            ("/system", false) => Self::System(Some(rest)),
            ("/stats", true) => Self::Stats,
            ("/help", true) => Self::Help,
            ("/exit", true) => Self::Exit,
            _ => Self::Unknown(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_messages_are_told_apart() {
        for (line, command) in [
            ("hello there ", Command::Say("hello there")),
            (" /help me", Command::Say("/help me")),
            ("/help", Command::Help),
            ("/reset ", Command::Reset),
            ("/system", Command::System(None)),
            ("/system  Be brief. ", Command::System(Some("Be brief."))),
            ("/stats", Command::Stats),
            ("/exit", Command::Exit),
            ("/exit now", Command::Unknown("/exit now")),
            ("/bin/ls", Command::Unknown("/bin/ls")),
            ("  ", Command::Nothing),
            ("", Command::Nothing),
        ] {
            assert_eq!(Command::parse(line), command, "{line:?}");
        }
    }

    #[test]
    fn help_lists_every_command() {
        for name in ["/reset", "/system", "/stats", "/help", "/exit"] {
            assert!(HELP.contains(name), "{name}");
        }
    }
}
