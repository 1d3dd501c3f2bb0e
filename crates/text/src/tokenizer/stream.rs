//! Text that appears token by token.

use std::sync::Arc;

use super::Tokenizer;
use super::token_table::{TextStart, TokenTable};

/// Turns tokens into text as they come, never half a character.
///
/// The pieces that [`push`](Self::push) and [`finish`](Self::finish) return, joined, are exactly what
/// [`Tokenizer::decode`] returns for all tokens at once. At most three bytes are held back, and a step costs as much as the
/// token is long. Bytes that cannot become a character turn into U+FFFD at once and hold nothing back.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    table: Arc<TokenTable>,
    skip_special: bool,
    start: TextStart,
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder at the start of a text. With `skip_special`, control tokens add nothing.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let table = tokenizer.table();
        let start = table.start();
        Self {
            table,
            skip_special,
            start,
            pending: Vec::new(),
        }
    }

    /// The same for a text that goes on where other text ended. SentencePiece tokenizers drop the space of the first word
    /// of a text; here it is kept.
    pub fn continuing(mut self) -> Self {
        self.start = TextStart::Keep;
        self
    }

    /// The text that is certain after one more token; often empty in the middle of a character.
    pub fn push(&mut self, id: u32) -> String {
        self.table
            .append(id, self.skip_special, &mut self.start, &mut self.pending);
        self.take_certain()
    }

    /// What is left at the end: empty, or one U+FFFD if the text ends inside a character.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_certain(&mut self) -> String {
        let mut text = String::new();
        let mut certain = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            certain += chunk.valid().len();
            let last = certain + chunk.invalid().len() == self.pending.len();
            if last && may_become_character(chunk.invalid()) {
                break;
            }
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                certain += chunk.invalid().len();
            }
        }
        self.pending.drain(..certain);
        text
    }
}

/// Whether more bytes can make a character of these.
fn may_become_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
