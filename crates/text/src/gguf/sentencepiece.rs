//! SentencePiece BPE with byte fallback, `tokenizer.ggml.model` = `llama`.

use std::collections::HashMap;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};

use super::{GgufTokenizerData, TokenType, Vocabulary};
use crate::error::TextError;
use crate::tokenizer::{TextStart, fallback_byte, tokenizer_error};

/// Stands for a space in the vocabulary.
const SPACE: &str = "▁";

pub(super) fn build(data: &GgufTokenizerData) -> Result<Vocabulary, TextError> {
    let add_space_prefix = data.add_space_prefix.unwrap_or(true);
    let mut pipeline = tokenizers::Tokenizer::new(bpe(data)?);
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if add_space_prefix {
        // Once for the text and once after each control token, as llama.cpp does and the Llama 2 tokenizer did.
        steps.push(Prepend::new(SPACE.to_owned()).into());
    }
    steps.push(Replace::new(" ", SPACE).map_err(tokenizer_error)?.into());
    pipeline.with_normalizer(Some(Sequence::new(steps)));
    let start = if add_space_prefix {
        TextStart::DropSpaces(1)
    } else {
        TextStart::Keep
    };
    Ok(Vocabulary {
        pipeline,
        start,
        add_bos: true,
        add_eos: false,
    })
}

/// The vocabulary holds the text tokens and the one for the unknown; no text can be merged into a control token.
fn bpe(data: &GgufTokenizerData) -> Result<BPE, TextError> {
    if data.scores.is_empty() {
        return Err(TextError::Vocabulary(
            "tokenizer.ggml.scores is missing".into(),
        ));
    }
    let text = data.text_vocabulary();
    let merges = merges_by_score(data, &text);
    let mut vocabulary: Vocab = text
        .into_iter()
        .map(|(token, id)| (token.to_owned(), id))
        .collect();
    let mut builder = BPE::builder().byte_fallback(true).fuse_unk(true);
    if let Some(id) = data.in_vocabulary("unknown", data.unk_id) {
        let unknown = data.tokens[id as usize].clone();
        vocabulary.insert(unknown.clone(), id);
        builder = builder.unk_token(unknown);
    }
    builder
        .vocab_and_merges(vocabulary, merges)
        .build()
        .map_err(tokenizer_error)
}

/// The merges that the scores imply.
///
/// SentencePiece joins the pair whose result has the best score; the leftmost if several have it. With merges sorted by
/// the score of the result, byte-pair encoding does the same, except where one token can be made of several pairs, which
/// are ranked by the length of their left part here. No difference is known for trained vocabularies.
fn merges_by_score(data: &GgufTokenizerData, text: &HashMap<&str, u32>) -> Merges {
    let is_part = |id: u32| data.token_type(id as usize) != TokenType::Byte;
    let mut merges: Vec<(u32, &str, &str)> = Vec::new();
    for (&token, &id) in text.iter().filter(|&(_, &id)| is_part(id)) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            let known = |part| text.get(part).is_some_and(|&id| is_part(id));
            if known(left) && known(right) {
                merges.push((id, left, right));
            }
        }
    }
    let score = |id: u32| data.scores[id as usize];
    merges.sort_by(|a, b| {
        let by_score = score(b.0).total_cmp(&score(a.0));
        by_score.then(a.0.cmp(&b.0)).then(b.1.len().cmp(&a.1.len()))
    });
    merges
        .into_iter()
        .map(|(_, left, right)| (left.to_owned(), right.to_owned()))
        .collect()
}

pub(super) fn token_bytes(token: &str, token_type: TokenType) -> Vec<u8> {
    match fallback_byte(token) {
        Some(byte) if token_type == TokenType::Byte => vec![byte],
        _ => token.replace(SPACE, " ").into_bytes(),
    }
}
