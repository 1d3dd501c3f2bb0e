//! Text to token ids and back.
//!
//! - `added_tokens`: tokens that are found in the text as they are;
//! - `token_table`, `decoder`, `byte_level`: what bytes a token stands for;
//! - `stream`: text that appears token by token.
//!
//! Splitting into words and the merges of byte-pair encoding are the `tokenizers` crate's. Finding control tokens is done
//! here, because it must be possible to refuse some of them by where they stand.

mod added_tokens;
pub(crate) mod byte_level;
mod decoder;
mod stream;
mod token_table;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Token,
};

use added_tokens::Found;
pub(crate) use added_tokens::{AddedToken, TokenFinder};
pub(crate) use decoder::{DecodeRule, fallback_byte};
pub use stream::StreamDecoder;
pub(crate) use token_table::{TextStart, TokenEntry, TokenTable};

use crate::chat::Guard;
use crate::error::TextError;

/// The ids of the tokens with a role, where the model has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NamedTokens {
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) unk: Option<u32>,
    pub(crate) pad: Option<u32>,
}

/// What a loader collects of a tokenizer.
pub(crate) struct TokenizerParts {
    /// The model, normalizer and pre-tokenizer. Its own added tokens are not used.
    pub(crate) pipeline: tokenizers::Tokenizer,
    pub(crate) added: Vec<AddedToken>,
    pub(crate) table: TokenTable,
    pub(crate) named: NamedTokens,
    /// What is put before and after a text that gets special tokens.
    pub(crate) prefix: Vec<u32>,
    pub(crate) suffix: Vec<u32>,
}

/// Text to token ids and back, of one model. Cheap to clone.
///
/// # Examples
/// ```no_run
/// use burn_paged_text::TextModel;
///
/// let model = TextModel::from_path("model.gguf")?;
/// let ids = model.tokenizer.encode("Hello, world!", true)?;
/// assert_eq!(model.tokenizer.decode(&ids, true), "Hello, world!");
/// # Ok::<(), burn_paged_text::TextError>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    pipeline: tokenizers::Tokenizer,
    /// Found in the text as it came: all control tokens, and user-defined ones.
    raw: TokenFinder,
    /// Found in the normalized text: user-defined tokens that ask for it.
    normalized: TokenFinder,
    added_ids: BTreeMap<String, u32>,
    table: Arc<TokenTable>,
    named: NamedTokens,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// Made when the first conversation is encoded.
    guard: OnceLock<Guard>,
}

impl Tokenizer {
    pub(crate) fn from_parts(parts: TokenizerParts) -> Result<Self, TextError> {
        let TokenizerParts {
            pipeline,
            added,
            table,
            named,
            prefix,
            suffix,
        } = parts;
        let added_ids = added
            .iter()
            .map(|token| (token.content.clone(), token.id))
            .collect();
        let (in_normalized, in_raw): (Vec<_>, Vec<_>) = added
            .into_iter()
            .partition(|token| token.normalized && !token.special);
        let raw = TokenFinder::new(in_raw.into_iter().map(|token| {
            let spelling = token.content.clone();
            (token, spelling)
        }));
        let spelled = in_normalized.into_iter().map(|token| {
            let mut spelling = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = pipeline.get_normalizer() {
                normalizer
                    .normalize(&mut spelling)
                    .map_err(tokenizer_error)?;
            }
            Ok((token, spelling.get().to_owned()))
        });
        let normalized = TokenFinder::new(spelled.collect::<Result<Vec<_>, TextError>>()?);
        let table = Arc::new(table);
        let inner = Inner {
            pipeline,
            raw,
            normalized,
            added_ids,
            table,
            named,
            prefix,
            suffix,
            guard: OnceLock::new(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The token ids of `text`, in which control tokens like `<|im_end|>` are recognized.
    ///
    /// With `add_special_tokens`, the tokens that the model wants around every text are added: most often the BOS token
    /// or nothing. Text that is already complete, such as a rendered chat template, is encoded without.
    ///
    /// # Errors
    /// `Encode` if the vocabulary cannot spell the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let ids = self.encode_where(text, |_, _| true)?;
        Ok(if add_special_tokens {
            self.surround(ids)
        } else {
            ids
        })
    }

    /// The token ids of `text` as plain text: what looks like a control token is spelled out. For text of users, who must
    /// not be able to end their own turn.
    ///
    /// # Errors
    /// `Encode` if the vocabulary cannot spell the text.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_where(text, |token, _| !token.special)
    }

    /// As [`encode`](Self::encode) without special tokens, but a control token that has one of `marks` (sorted byte
    /// positions) inside is plain text.
    pub(crate) fn encode_marked(&self, text: &str, marks: &[usize]) -> Result<Vec<u32>, TextError> {
        self.encode_where(text, |token, range| {
            let first_inside = marks.partition_point(|&mark| mark <= range.start);
            let broken = marks
                .get(first_inside)
                .is_some_and(|&mark| mark < range.end);
            !(token.special && broken)
        })
    }

    fn encode_where(
        &self,
        text: &str,
        allowed: impl Fn(&AddedToken, &Range<usize>) -> bool,
    ) -> Result<Vec<u32>, TextError> {
        let Inner {
            pipeline,
            raw,
            normalized,
            ..
        } = &*self.inner;
        let encode = || -> tokenizers::Result<Vec<u32>> {
            let mut pieces = PreTokenizedString::from(text);
            // The first call sees the whole text, so that the positions that `allowed` gets are those of the text.
            pieces.split(|_, piece| {
                let found = raw.find(piece.get(), &allowed);
                split_at(&piece, &found)
            })?;
            pieces.split(|_, mut piece| {
                if let Some(normalizer) = pipeline.get_normalizer() {
                    normalizer.normalize(&mut piece)?;
                }
                let found = normalized.find(piece.get(), |_, _| true);
                split_at(&piece, &found)
            })?;
            if let Some(pre_tokenizer) = pipeline.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut pieces)?;
            }
            pieces.tokenize(|piece| pipeline.get_model().tokenize(piece.get()))?;
            Ok(pieces
                .into_encoding(None, 0, OffsetType::None)?
                .get_ids()
                .to_vec())
        };
        encode().map_err(|error| TextError::Encode(error.to_string()))
    }

    fn surround(&self, ids: Vec<u32>) -> Vec<u32> {
        let Inner { prefix, suffix, .. } = &*self.inner;
        prefix
            .iter()
            .copied()
            .chain(ids)
            .chain(suffix.iter().copied())
            .collect()
    }

    /// The text of `ids`. With `skip_special`, control tokens add nothing; ids that are not in the vocabulary never do.
    /// Bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        self.inner.table.decode(ids, skip_special)
    }

    /// The id of a token by its spelling in the vocabulary, where a leading space may be `Ġ` or `▁`.
    pub fn id(&self, token: &str) -> Option<u32> {
        let added = self.inner.added_ids.get(token).copied();
        added.or_else(|| self.inner.pipeline.get_model().token_to_id(token))
    }

    /// The bytes that a token stands for, not always whole characters; `None` for an id that is not in the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.table.bytes(id)
    }

    /// Whether the token controls the model and is no text: end of text, start of a turn and the like.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.table.is_special(id)
    }

    /// The token at the start of a text, if the model has one.
    pub fn bos_id(&self) -> Option<u32> {
        self.inner.named.bos
    }

    /// The token that ends a text, if the model has one. Not the only one that may: see [`StopTokens`](crate::StopTokens).
    pub fn eos_id(&self) -> Option<u32> {
        self.inner.named.eos
    }

    /// The token that fills up shorter sequences of a batch, if the model has one.
    pub fn pad_id(&self) -> Option<u32> {
        self.inner.named.pad
    }

    /// Whether [`encode`](Self::encode) puts the BOS token before a text.
    pub fn add_bos(&self) -> bool {
        self.inner.named.bos.is_some() && self.inner.prefix.first() == self.inner.named.bos.as_ref()
    }

    /// The number of ids, one past the largest. The model's embedding may be larger, padded to a round size.
    pub fn vocab_size(&self) -> usize {
        self.inner.table.len()
    }

    pub(crate) fn table(&self) -> Arc<TokenTable> {
        Arc::clone(&self.inner.table)
    }

    /// Keeps text of the user from forging the control tokens of this vocabulary.
    pub(crate) fn guard(&self) -> &Guard {
        self.inner
            .guard
            .get_or_init(|| Guard::new(self.control_spellings()))
    }

    /// The spellings of the control tokens.
    pub(crate) fn control_spellings(&self) -> impl Iterator<Item = &str> {
        let control = self.inner.raw.tokens().filter(|token| token.special);
        control.map(|token| token.content.as_str())
    }

    /// The tokens with a role, under the names that chat templates use.
    pub(crate) fn template_variables(&self) -> Vec<(&'static str, String)> {
        let NamedTokens { bos, eos, unk, pad } = self.inner.named;
        [
            ("bos_token", bos),
            ("eos_token", eos),
            ("unk_token", unk),
            ("pad_token", pad),
        ]
        .into_iter()
        .filter_map(|(name, id)| {
            let bytes = self.token_bytes(id?)?;
            Some((name, String::from_utf8_lossy(bytes).into_owned()))
        })
        .collect()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("named", &self.inner.named)
            .field("prefix", &self.inner.prefix)
            .field("suffix", &self.inner.suffix)
            .finish_non_exhaustive()
    }
}

pub(crate) fn tokenizer_error(error: impl fmt::Display) -> TextError {
    TextError::Tokenizer(error.to_string())
}

/// The pieces of `text` between `found`, and those themselves, already tokens.
fn split_at(
    text: &NormalizedString,
    found: &[Found],
) -> tokenizers::Result<Vec<(NormalizedString, Option<Vec<Token>>)>> {
    let slice = |range: Range<usize>| {
        text.slice(tokenizers::normalizer::Range::Normalized(range))
            .ok_or("a token was found outside the text")
    };
    let mut pieces = Vec::with_capacity(2 * found.len() + 1);
    let mut end = 0;
    for Found { range, id } in found {
        if end < range.start {
            pieces.push((slice(end..range.start)?, None));
        }
        let piece = slice(range.clone())?;
        let token = Token::new(*id, piece.get().to_owned(), (0, piece.get().len()));
        pieces.push((piece, Some(vec![token])));
        end = range.end;
    }
    if end < text.get().len() {
        pieces.push((slice(end..text.get().len())?, None));
    }
    Ok(pieces)
}
