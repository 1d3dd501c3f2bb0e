//! What comes out of the engine: one event per token, and the sum of them as a whole answer.

use std::fmt;

use crate::{GenerationError, RequestId};

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model picked this end token or stop token. It is no part of the answer.
    StopToken(u32),
    /// This stop string appeared in the text, which ends before it.
    StopString(String),
    /// `max_tokens`, the context or the whole cache is used up.
    Length,
    /// The caller gave up.
    Abort,
    /// Something broke; the other requests go on.
    Error(GenerationError),
}

impl FinishReason {
    /// The word that APIs use: `stop`, `length`, `abort` or `error`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error(_) => "error",
        }
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(error) => write!(f, "error: {error}"),
            other => f.write_str(other.as_str()),
        }
    }
}

/// What a request has cost so far. Tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that the prefix cache had when the request began. A resumed request does not count again.
    pub cached_tokens: usize,
    /// Tokens of the answer; an end token is not one.
    pub generated_tokens: usize,
}

/// Log-probabilities at one position, natural logarithm, of the model's own distribution: before penalties, bias,
/// temperature and filters.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that was picked.
    pub logprob: f32,
    /// The most likely tokens with theirs, the most likely first, the lower id first on ties.
    pub top: Vec<(u32, f32)>,
}

/// One step of one answer.
///
/// The texts of a request's events, joined, are its whole text; text is held back while it could be the beginning of
/// a stop string or of a character. The last event of a request has `finish`, every other one has a token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// Whose event it is.
    pub request_id: RequestId,
    /// The token that joins the answer; `None` where the answer ends without one.
    pub token: Option<u32>,
    /// Text that became certain.
    pub text: String,
    /// Log-probabilities of the token, if asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Why the answer ended, in its last event.
    pub finish: Option<FinishReason>,
    /// Counts up to this event.
    pub usage: Usage,
}

/// A whole answer: the sum of its events.
///
/// A caller that streams and one that does not see the same answer, because the second one adds up the events of the
/// first.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Whose answer it is.
    pub request_id: RequestId,
    /// The text; empty if the engine has no tokenizer.
    pub text: String,
    /// The tokens.
    pub token_ids: Vec<u32>,
    /// Log-probabilities per token, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended; `None` while it has not.
    pub finish: Option<FinishReason>,
    /// Counts.
    pub usage: Usage,
}

impl Completion {
    /// An answer without events.
    pub fn new(request_id: RequestId) -> Self {
        Self {
            request_id,
            text: String::new(),
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            finish: None,
            usage: Usage::default(),
        }
    }

    /// Adds the next event of the request.
    pub fn push(&mut self, event: TokenEvent) {
        self.text.push_str(&event.text);
        self.token_ids.extend(event.token);
        self.logprobs.extend(event.logprobs);
        self.finish = event.finish;
        self.usage = event.usage;
    }
}
