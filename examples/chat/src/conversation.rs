//! A conversation in the terminal: turns, commands, and the history that the prefix cache lives on.

use std::io::Write;

use burn_paged_text::Message;

use crate::answer::Answer;
use crate::command::{Command, HELP};
use crate::failure::Failure;
use crate::input::{Input, Line};
use crate::interrupt::Interrupt;
use crate::session::Session;
use crate::stats::Totals;

/// The state of one conversation.
pub(crate) struct Conversation<'a, W> {
    session: &'a mut Session,
    interrupt: Interrupt,
    system: Option<String>,
    history: Vec<Message>,
    totals: Totals,
    out: W,
}

impl<'a, W: Write> Conversation<'a, W> {
    /// A conversation without turns.
    pub(crate) fn new(
        session: &'a mut Session,
        interrupt: Interrupt,
        system: Option<String>,
        out: W,
    ) -> Self {
        Self {
            session,
            interrupt,
            system,
            history: Vec::new(),
            totals: Totals::default(),
            out,
        }
    }

    /// Takes turns until the input ends or `/exit` comes.
    pub(crate) fn hold(&mut self, input: &mut Input) -> Result<(), Failure> {
        loop {
            let line = match input.next_line()? {
                Line::Text(line) => line,
                Line::Interrupted => {
                    self.print("/exit or Ctrl-D ends the conversation")?;
                    continue;
                }
                Line::End => return Ok(()),
            };
            match Command::parse(&line) {
                Command::Nothing => {}
                Command::Exit => return Ok(()),
                Command::Help => self.print(HELP)?,
                Command::Stats => self.print(&self.totals.report())?,
                Command::Reset => {
                    self.history.clear();
                    self.print("the conversation is forgotten")?;
                }
                Command::System(None) => {
                    let text = self.system.clone();
                    self.print(text.as_deref().unwrap_or("no system message is set"))?;
                }
                Command::System(Some(text)) => {
                    self.system = Some(text.to_owned());
                    self.print("the system message is replaced")?;
                }
                Command::Unknown(command) => {
                    self.print(&format!("unknown command {command}; /help lists them"))?;
                }
                Command::Say(message) => self.turn(message)?,
            }
        }
    }

    /// One message and its answer. What cannot be answered is said and forgotten: the conversation goes on.
    fn turn(&mut self, message: &str) -> Result<(), Failure> {
        let question = Message::new("user", message);
        let system = self
            .system
            .as_deref()
            .map(|text| Message::new("system", text));
        let history = self.history.iter().cloned();
        let messages: Vec<_> = system
            .into_iter()
            .chain(history)
            .chain([question.clone()])
            .collect();
        match self
            .session
            .encode_chat(&messages)
            .and_then(|tokens| self.answer(tokens))
        {
            Ok(answer) => {
                self.totals.add(&answer);
                self.history.push(question);
                self.history
                    .push(Message::new("assistant", &answer.completion.text));
                Ok(())
            }
            Err(Failure::Refused(reason) | Failure::Broke(reason)) => {
                self.print(&format!("not answered: {reason}"))
            }
            Err(failure) => Err(failure),
        }
    }

    fn answer(&mut self, tokens: Vec<u32>) -> Result<Answer, Failure> {
        self.interrupt.begin();
        let out = &mut self.out;
        let result = self.session.answer(
            tokens,
            || self.interrupt.requested(),
            |text| {
                out.write_all(text.as_bytes())?;
                out.flush()
            },
        );
        self.interrupt.end();
        writeln!(self.out)?;
        result
    }

    fn print(&mut self, text: &str) -> Result<(), Failure> {
        writeln!(self.out, "{text}")?;
        Ok(self.out.flush()?)
    }
}
