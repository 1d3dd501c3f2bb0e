//! The tokenizer's part of a GGUF file's metadata.

use std::collections::HashMap;

use burn_paged_checkpoint::GgufMetadata;

use crate::error::TextError;

/// What a token is, in the numbers of `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// Ordinary text.
    Normal,
    /// Stands for what the vocabulary cannot spell.
    Unknown,
    /// Controls the model: end of text, start of a turn.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// In the list, but never used.
    Unused,
    /// One byte, for characters that have no token.
    Byte,
}

impl TokenType {
    fn from_number(number: i64) -> Option<Self> {
        Some(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// What a GGUF file says about its tokenizer (`tokenizer.ggml.*` and `tokenizer.chat_template*`).
#[derive(Debug, Clone, Default)]
pub struct GgufTokenizerData {
    /// `gpt2` for byte-level BPE, `llama` for SentencePiece BPE.
    pub model: String,
    /// The name of the way to split text into words, for byte-level BPE.
    pub pre: Option<String>,
    /// The spelling of each token; the position is the id.
    pub tokens: Vec<String>,
    /// For SentencePiece: the higher, the earlier a token is made. Empty or one for each token.
    pub scores: Vec<f32>,
    /// Empty (all normal) or one for each token.
    pub token_types: Vec<TokenType>,
    /// For byte-level BPE: pairs with a space between, the earlier the better.
    pub merges: Vec<String>,
    /// The token at the start of a text.
    pub bos_id: Option<u32>,
    /// The token that ends a text.
    pub eos_id: Option<u32>,
    /// The token that ends a turn.
    pub eot_id: Option<u32>,
    /// The token that ends a message of a turn, for example a tool call.
    pub eom_id: Option<u32>,
    /// The token for what the vocabulary cannot spell.
    pub unk_id: Option<u32>,
    /// The token that fills up shorter sequences.
    pub pad_id: Option<u32>,
    /// Whether a text starts with the BOS token; `None` leaves it to the kind of vocabulary.
    pub add_bos: Option<bool>,
    /// Whether a text ends with the EOS token; `None` leaves it to the kind of vocabulary.
    pub add_eos: Option<bool>,
    /// For SentencePiece: whether a space goes before the first word. Most often yes.
    pub add_space_prefix: Option<bool>,
    /// Chat templates by name; the plain one is `default`.
    pub chat_templates: Vec<(String, String)>,
}

impl GgufTokenizerData {
    /// Reads the metadata of a file.
    ///
    /// # Errors
    /// `MissingTokenizer` without a tokenizer, `Checkpoint` if a key has a value of another type, `Vocabulary` for a token
    /// type that is not defined.
    pub fn from_metadata(metadata: &GgufMetadata) -> Result<Self, TextError> {
        let missing = |missing| TextError::MissingTokenizer {
            path: metadata.path().to_owned(),
            missing,
        };
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let string = |name: &str| metadata.optional_string(&key(name));
        let id = |name: &str| metadata.optional_u32(&key(name));
        let flag = |name: &str| metadata.optional_bool(&key(name));
        let strings = |name: &str| metadata.optional_strings(&key(name));
        let model = string("model")?.ok_or_else(|| missing("tokenizer.ggml.model"))?;
        let tokens = strings("tokens")?.ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
        let token_types = metadata
            .optional_integers(&key("token_type"))?
            .unwrap_or_default();
        Ok(Self {
            model: model.to_owned(),
            pre: string("pre")?.map(str::to_owned),
            tokens: tokens.to_vec(),
            scores: metadata
                .optional_f32s(&key("scores"))?
                .unwrap_or_default()
                .to_vec(),
            token_types: read_token_types(&token_types)?,
            merges: strings("merges")?.unwrap_or_default().to_vec(),
            bos_id: id("bos_token_id")?,
            eos_id: id("eos_token_id")?,
            eot_id: id("eot_token_id")?,
            eom_id: id("eom_token_id")?,
            unk_id: id("unknown_token_id")?,
            pad_id: id("padding_token_id")?,
            add_bos: flag("add_bos_token")?,
            add_eos: flag("add_eos_token")?,
            add_space_prefix: flag("add_space_prefix")?,
            chat_templates: read_chat_templates(metadata)?,
        })
    }

    /// The type of a token; `Normal` where the file does not say.
    pub fn token_type(&self, id: usize) -> TokenType {
        self.token_types
            .get(id)
            .copied()
            .unwrap_or(TokenType::Normal)
    }

    /// Whether `id` is a control token: by its type, or because it starts or ends texts.
    pub(crate) fn is_special(&self, id: usize) -> bool {
        let roles = [self.bos_id, self.eos_id, self.eot_id, self.eom_id];
        matches!(self.token_type(id), TokenType::Control | TokenType::Unknown)
            || roles.contains(&u32::try_from(id).ok())
    }

    /// Whether `id` is found in the text as it is.
    pub(crate) fn is_added(&self, id: usize) -> bool {
        self.is_special(id) || self.token_type(id) == TokenType::UserDefined
    }

    /// `id` if there is such a token, with a warning if not: files with a wrong id for a role that nobody uses exist.
    pub(crate) fn in_vocabulary(&self, role: &str, id: Option<u32>) -> Option<u32> {
        let id = id?;
        let inside = (id as usize) < self.tokens.len();
        if !inside {
            log::warn!(
                "the {role} token of the GGUF file has id {id}, but there are {} tokens; it is not used",
                self.tokens.len()
            );
        }
        inside.then_some(id)
    }

    /// The ids by spelling of the tokens that text is made of. The first of equal spellings counts.
    pub(crate) fn text_vocabulary(&self) -> HashMap<&str, u32> {
        let mut vocabulary = HashMap::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate() {
            if !self.is_added(id) {
                vocabulary.entry(token.as_str()).or_insert(id as u32);
            }
        }
        vocabulary
    }

    /// Refuses lists that do not fit each other.
    pub(crate) fn check(&self) -> Result<(), TextError> {
        let tokens = self.tokens.len();
        let fits = |count: usize| count == 0 || count == tokens;
        let problem = if tokens == 0 {
            "there are no tokens".to_owned()
        } else if u32::try_from(tokens).is_err() {
            format!("{tokens} tokens are too many for 32-bit ids")
        } else if !fits(self.scores.len()) {
            format!("{} scores for {tokens} tokens", self.scores.len())
        } else if !fits(self.token_types.len()) {
            format!("{} token types for {tokens} tokens", self.token_types.len())
        } else {
            return Ok(());
        };
        Err(TextError::Vocabulary(problem))
    }
}

fn read_token_types(numbers: &[i64]) -> Result<Vec<TokenType>, TextError> {
    let read = |(id, &number): (usize, &i64)| {
        // Type 0 is "undefined" and found in files made by hand; those tokens are ordinary.
        let token_type = if number == 0 {
            Some(TokenType::Normal)
        } else {
            TokenType::from_number(number)
        };
        token_type
            .ok_or_else(|| TextError::Vocabulary(format!("token {id} has unknown type {number}")))
    };
    numbers.iter().enumerate().map(read).collect()
}

fn read_chat_templates(metadata: &GgufMetadata) -> Result<Vec<(String, String)>, TextError> {
    const DEFAULT: &str = "tokenizer.chat_template";
    let mut templates = Vec::new();
    if let Some(source) = metadata.optional_string(DEFAULT)? {
        templates.push(("default".to_owned(), source.to_owned()));
    }
    for name in metadata
        .optional_strings("tokenizer.chat_templates")?
        .unwrap_or_default()
    {
        if let Some(source) = metadata.optional_string(&format!("{DEFAULT}.{name}"))? {
            templates.push((name.clone(), source.to_owned()));
        }
    }
    Ok(templates)
}
