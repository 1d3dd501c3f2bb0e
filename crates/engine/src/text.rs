//! Tokens to text, as it comes.

use std::fmt;

use burn_paged_text::{StreamDecoder, Tokenizer};

use crate::stop_strings::{Scan, StopStrings};

/// Makes text of token ids. Implemented for the tokenizers of `burn-paged-text`, and by
/// [`testing::PieceDetokenizer`](crate::testing::PieceDetokenizer).
pub trait Detokenizer {
    /// A stream for the answer to `prompt`, from the first token of the answer on.
    fn stream(&self, prompt: &[u32]) -> Box<dyn TextStream>;
}

/// The text of one answer.
///
/// The returned texts, joined, are the text of all tokens. None of them ends within a character.
pub trait TextStream {
    /// Adds a token and returns the text that became complete.
    fn push(&mut self, token: u32) -> String;

    /// Returns what is left when no more tokens come: at most the replacement of an incomplete character.
    fn finish(&mut self) -> String;
}

/// Control tokens have no text. An answer that follows a control token begins a text; one that follows anything else goes
/// on with the text of the prompt, which matters to tokenizers that drop the space before the first word of a text.
impl Detokenizer for Tokenizer {
    fn stream(&self, prompt: &[u32]) -> Box<dyn TextStream> {
        let decoder = StreamDecoder::new(self, true);
        let continues = prompt.last().is_some_and(|token| !self.is_special(*token));
        Box::new(if continues {
            decoder.continuing()
        } else {
            decoder
        })
    }
}

impl TextStream for StreamDecoder {
    fn push(&mut self, token: u32) -> String {
        StreamDecoder::push(self, token)
    }

    fn finish(&mut self) -> String {
        StreamDecoder::finish(self)
    }
}

/// Text of one answer, up to its first stop string.
pub(crate) struct TextOutput {
    stream: Option<Box<dyn TextStream>>,
    stops: StopStrings,
}

impl fmt::Debug for TextOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stream, stops } = self;
        let has_stream = stream.is_some();
        f.debug_struct("TextOutput")
            .field("has_stream", &has_stream)
            .field("stops", stops)
            .finish()
    }
}

impl TextOutput {
    /// Without a stream there is no text.
    pub(crate) fn new(stream: Option<Box<dyn TextStream>>, stops: Vec<String>) -> Self {
        Self {
            stream,
            stops: StopStrings::new(stops),
        }
    }

    /// Adds a token; its text is searched for stop strings if `search` says so.
    pub(crate) fn push(&mut self, token: u32, search: bool) -> Scan {
        let Some(stream) = &mut self.stream else {
            return Scan::default();
        };
        let text = stream.push(token);
        if search {
            self.stops.push(&text)
        } else {
            Scan { text, stop: None }
        }
    }

    /// Lets go what was held back. The end of the text may complete a stop string.
    pub(crate) fn finish(&mut self) -> Scan {
        let Some(stream) = &mut self.stream else {
            return Scan::default();
        };
        let mut scan = self.stops.push(&stream.finish());
        if scan.stop.is_none() {
            scan.text.push_str(&self.stops.finish());
        }
        scan
    }
}
