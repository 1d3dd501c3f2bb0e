//! Byte-level BPE, `tokenizer.ggml.model` = `gpt2`.

use tokenizers::models::bpe::{BPE, Vocab};

use super::pre_tokenizers::{self, PreTokenizerSpec};
use super::{GgufTokenizerData, Vocabulary};
use crate::error::TextError;
use crate::tokenizer::{TextStart, byte_level, tokenizer_error};

pub(super) fn build(data: &GgufTokenizerData) -> Result<Vocabulary, TextError> {
    let spec = pre_tokenizers::find(data.pre.as_deref())?;
    let model = bpe(data, spec)?;
    let mut pipeline = tokenizers::Tokenizer::new(model);
    pipeline.with_pre_tokenizer(Some(spec.build()?));
    Ok(Vocabulary {
        pipeline,
        start: TextStart::Keep,
        add_bos: spec.add_bos,
        add_eos: false,
    })
}

/// Control tokens are left out, so that no text can be merged into one.
fn bpe(data: &GgufTokenizerData, spec: &PreTokenizerSpec) -> Result<BPE, TextError> {
    if data.merges.is_empty() {
        return Err(TextError::Vocabulary(
            "tokenizer.ggml.merges is missing or empty".into(),
        ));
    }
    let vocabulary: Vocab = data
        .text_vocabulary()
        .into_iter()
        .map(|(token, id)| (token.to_owned(), id))
        .collect();
    let merges = data
        .merges
        .iter()
        .enumerate()
        .map(|(rank, merge)| split_merge(rank, merge))
        .collect::<Result<Vec<_>, _>>()?;
    BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(spec.whole_words_first)
        .build()
        .map_err(tokenizer_error)
}

fn split_merge(rank: usize, merge: &str) -> Result<(String, String), TextError> {
    // The first character is never the separator, so that a spelling may begin with a space.
    let from = merge.chars().next().map_or(0, char::len_utf8);
    let (left, right) = merge[from..]
        .find(' ')
        .map(|at| (&merge[..from + at], &merge[from + at + 1..]))
        .filter(|(_, right)| !right.is_empty())
        .ok_or_else(|| {
            TextError::Vocabulary(format!("merge {rank} is {merge:?}, not two tokens"))
        })?;
    Ok((left.to_owned(), right.to_owned()))
}

/// The bytes of a token that is text. Tokens outside the alphabet, such as padding at the end of the list, are literal.
pub(super) fn token_bytes(token: &str) -> Vec<u8> {
    byte_level::decode(token).unwrap_or_else(|| token.into())
}
