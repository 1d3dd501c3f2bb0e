//! `--prompt`: one answer, and the end.

use std::io::Write;

use burn_paged_text::Message;

use crate::args::Args;
use crate::failure::Failure;
use crate::session::Session;

/// Answers `prompt`: as text while it comes, or as one JSON object at the end.
pub(crate) fn answer(
    session: &mut Session,
    args: &Args,
    prompt: &str,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let tokens = if args.raw {
        session.encode_raw(prompt)?
    } else {
        let system = args
            .system
            .as_deref()
            .map(|text| Message::new("system", text));
        let messages: Vec<_> = system
            .into_iter()
            .chain([Message::new("user", prompt)])
            .collect();
        session.encode_chat(&messages)?
    };
    let never = || false;
    if args.json {
        let mut object = session.answer(tokens, never, |_| Ok(()))?.to_json();
        object["model"] = session.description().clone();
        writeln!(out, "{object}")?;
    } else {
        session.answer(tokens, never, |text| {
            out.write_all(text.as_bytes())?;
            out.flush()
        })?;
        writeln!(out)?;
    }
    Ok(out.flush()?)
}
