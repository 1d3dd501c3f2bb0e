//! Why text cannot become tokens, or a conversation a prompt.

use std::path::{Path, PathBuf};

use burn_paged_checkpoint::CheckpointError;

/// What went wrong while loading a tokenizer, encoding text or rendering a chat template.
///
/// Three families: a file is broken or lacks something (`Io`, `Json`, `Checkpoint`, `MissingTokenizer`, `Vocabulary`,
/// `Tokenizer`, `TemplateSyntax`), this crate does not do what the model asks for (`Unsupported*`, `UnknownPreTokenizer`),
/// or the request does not fit the model (`NoChatTemplate` and the variants after it).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The operating system refused to read a file.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// A JSON file cannot be parsed, or a field of it has the wrong form.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The field or position, and what is wrong there.
        reason: String,
    },

    /// The metadata of a GGUF file could not be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),

    /// The model brings no tokenizer.
    #[error("{} has no tokenizer: {missing} is missing", path.display())]
    MissingTokenizer {
        /// The model's folder or file.
        path: PathBuf,
        /// The file or metadata key that was looked for.
        missing: &'static str,
    },

    /// The vocabulary of a GGUF file contradicts itself.
    #[error("vocabulary of the GGUF file: {0}")]
    Vocabulary(String),

    /// The tokenizers library refused the tokenizer's parts.
    #[error("cannot build the tokenizer: {0}")]
    Tokenizer(String),

    /// The GGUF file has another kind of tokenizer than those supported.
    #[error("tokenizer model {model:?} is not supported (supported: gpt2, llama)")]
    UnsupportedTokenizerModel {
        /// The value of `tokenizer.ggml.model`.
        model: String,
    },

    /// The GGUF file names a way of splitting text that is not known here.
    #[error("pre-tokenizer {name:?} is not known (known: {})", known.join(", "))]
    UnknownPreTokenizer {
        /// The value of `tokenizer.ggml.pre`.
        name: String,
        /// All names that are known.
        known: Vec<&'static str>,
    },

    /// `tokenizer.json` has a decoder that does not turn each token into bytes.
    #[error("decoder of the tokenizer is not supported: {0}")]
    UnsupportedDecoder(String),

    /// The tokenizers library could not encode a text.
    #[error("cannot encode the text: {0}")]
    Encode(String),

    /// A chat template is not valid Jinja.
    #[error("chat template {name:?} does not parse: {reason}")]
    TemplateSyntax {
        /// Which of the model's templates.
        name: String,
        /// The position and the fault.
        reason: String,
    },

    /// The model has no chat template, and the caller brought none.
    #[error("the model has no chat template")]
    NoChatTemplate,

    /// The model has several chat templates, but not the wanted one.
    #[error("the model has no chat template {name:?} (it has: {})", known.join(", "))]
    UnknownChatTemplate {
        /// The name that was asked for.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },

    /// The chat template called `raise_exception`: the conversation is not one that the model was made for.
    #[error("the chat template refuses the conversation: {message}")]
    TemplateRaised {
        /// The template's own words.
        message: String,
    },

    /// The chat template failed otherwise, for example on a missing field.
    #[error("the chat template failed: {reason}")]
    TemplateFailed {
        /// The position and the fault.
        reason: String,
    },

    /// A role holds other characters than ASCII letters, digits, `_` and `-`.
    #[error("role {role:?} of message {index} has characters other than letters, digits, _ and -")]
    InvalidRole {
        /// The role.
        role: String,
        /// The position of the message, from 0.
        index: usize,
    },

    /// A message has a part of content that the template cannot show.
    #[error("message {index} has content of type {kind:?}; the chat template takes text only")]
    UnsupportedContent {
        /// The type that the part claims.
        kind: String,
        /// The position of the message, from 0.
        index: usize,
    },

    /// A template variable has a name that the conversation itself uses.
    #[error("template variable {name:?} is set from the conversation and cannot be given")]
    ReservedVariable {
        /// The name.
        name: String,
    },

    /// The conversation holds all characters that could mark where the user's text is.
    #[error(
        "the conversation uses every private-use character, which leaves none to protect control tokens"
    )]
    NoMarkLeft,
}

impl TextError {
    pub(crate) fn json(path: &Path, reason: impl ToString) -> Self {
        Self::Json {
            path: path.to_path_buf(),
            reason: reason.to_string(),
        }
    }
}
