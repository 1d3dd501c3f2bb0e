//! Text from a table of byte pieces.

use std::rc::Rc;

use crate::text::{Detokenizer, TextStream};

/// A [`Detokenizer`] for which token `i` is the `i`-th piece of bytes. Tokens without a piece have no text, as special
/// tokens have none.
///
/// # Examples
/// ```
/// use burn_paged_engine::{Detokenizer, testing::PieceDetokenizer};
///
/// let pieces = PieceDetokenizer::new(["a", "b"]);
/// let mut stream = pieces.stream(&[]);
/// assert_eq!(stream.push(1) + &stream.push(0) + &stream.finish(), "ba");
/// ```
#[derive(Debug, Clone)]
pub struct PieceDetokenizer {
    pieces: Rc<Vec<Vec<u8>>>,
}

impl PieceDetokenizer {
    /// From the pieces of tokens 0, 1, 2 and so on.
    pub fn new<P: Into<Vec<u8>>>(pieces: impl IntoIterator<Item = P>) -> Self {
        Self {
            pieces: Rc::new(pieces.into_iter().map(Into::into).collect()),
        }
    }
}

impl Detokenizer for PieceDetokenizer {
    fn stream(&self, _prompt: &[u32]) -> Box<dyn TextStream> {
        Box::new(PieceStream {
            pieces: Rc::clone(&self.pieces),
            pending: Vec::new(),
        })
    }
}

#[derive(Debug)]
struct PieceStream {
    pieces: Rc<Vec<Vec<u8>>>,
    /// The beginning of a character.
    pending: Vec<u8>,
}

impl TextStream for PieceStream {
    fn push(&mut self, token: u32) -> String {
        if let Some(piece) = self.pieces.get(token as usize) {
            self.pending.extend_from_slice(piece);
        }
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(rest) => {
                    text.push_str(rest);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, rest) = self.pending.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    // Without a length, the bytes may still become a character.
                    let bad = error.error_len();
                    if bad.is_some() {
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                    self.pending = rest[bad.unwrap_or(0)..].to_vec();
                    if bad.is_none() {
                        return text;
                    }
                }
            }
        }
    }

    fn finish(&mut self) -> String {
        let pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            String::new()
        } else {
            char::REPLACEMENT_CHARACTER.to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(pieces: &[&[u8]]) -> Vec<String> {
        let table = PieceDetokenizer::new(pieces.iter().map(|piece| piece.to_vec()));
        let mut stream = table.stream(&[]);
        let mut texts: Vec<String> = (0..pieces.len() as u32).map(|id| stream.push(id)).collect();
        texts.push(stream.finish());
        texts
    }

    #[test]
    fn a_character_comes_when_it_is_complete() {
        let found = texts(&[&[0xF0], &[0x9F], &[0x99], &[0x82]]);
        assert_eq!(found, ["", "", "", "\u{1F642}", ""]);
        assert_eq!(
            texts(&[&[0xF0], &[0x9F], &[0x99]]),
            ["", "", "", "\u{FFFD}"]
        );
    }

    #[test]
    fn a_bad_byte_does_not_hold_the_stream() {
        assert_eq!(texts(&[&[0xFF], b"a"]), ["\u{FFFD}", "a", ""]);
        assert_eq!(texts(&[&[0xC3], b"a"]), ["", "\u{FFFD}a", ""]);
    }
}
