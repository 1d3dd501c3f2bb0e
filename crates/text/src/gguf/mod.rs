//! Tokenizers out of the metadata of a GGUF file.
//!
//! - `data`: what the metadata says; `byte_level`, `sentencepiece`: the two kinds of vocabulary;
//! - `pre_tokenizers`: how byte-level vocabularies split text into words, by name.

mod byte_level;
mod data;
mod pre_tokenizers;
mod sentencepiece;

pub use data::{GgufTokenizerData, TokenType};

use crate::error::TextError;
use crate::stop_tokens::StopTokens;
use crate::tokenizer::{
    AddedToken, NamedTokens, TextStart, TokenEntry, TokenTable, Tokenizer, TokenizerParts,
};

/// Spellings that end an answer in models of this format, which has no list of end tokens as `generation_config.json` has.
/// Each counts if the vocabulary has it as a control token.
const END_SPELLINGS: [&str; 12] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<EOT>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// What the kinds of vocabulary differ in.
struct Vocabulary {
    pipeline: tokenizers::Tokenizer,
    start: TextStart,
    /// What a text gets at its ends if the metadata does not say.
    add_bos: bool,
    add_eos: bool,
}

/// Builds the tokenizer that a GGUF file describes.
///
/// # Errors
/// `UnsupportedTokenizerModel`, `UnknownPreTokenizer`, or `Vocabulary` if the lists contradict each other.
pub(crate) fn tokenizer(data: &GgufTokenizerData) -> Result<Tokenizer, TextError> {
    data.check()?;
    let vocabulary = match data.model.as_str() {
        "gpt2" => byte_level::build(data)?,
        "llama" => sentencepiece::build(data)?,
        model => {
            return Err(TextError::UnsupportedTokenizerModel {
                model: model.to_owned(),
            });
        }
    };
    let entries: Vec<TokenEntry> = (0..data.tokens.len()).map(|id| entry(data, id)).collect();
    let added = added_tokens(data);
    let named = NamedTokens {
        bos: data.in_vocabulary("bos", data.bos_id),
        eos: data.in_vocabulary("eos", data.eos_id),
        unk: data.in_vocabulary("unknown", data.unk_id),
        pad: data.in_vocabulary("padding", data.pad_id),
    };
    let add_bos = data.add_bos.unwrap_or(vocabulary.add_bos);
    let add_eos = data.add_eos.unwrap_or(vocabulary.add_eos);
    Tokenizer::from_parts(TokenizerParts {
        pipeline: vocabulary.pipeline,
        added,
        table: TokenTable::new(&entries, vocabulary.start),
        named,
        prefix: named.bos.filter(|_| add_bos).into_iter().collect(),
        suffix: named.eos.filter(|_| add_eos).into_iter().collect(),
    })
}

/// All tokens that end an answer: those that the metadata names, and control tokens with a known spelling.
pub(crate) fn stop_tokens(data: &GgufTokenizerData) -> StopTokens {
    let named = [
        ("eos", data.eos_id),
        ("eot", data.eot_id),
        ("eom", data.eom_id),
    ];
    let named = named
        .into_iter()
        .filter_map(|(name, id)| data.in_vocabulary(name, id));
    let spelled = (0..data.tokens.len())
        .filter(|&id| data.is_special(id) && END_SPELLINGS.contains(&data.tokens[id].as_str()));
    named.chain(spelled.map(|id| id as u32)).collect()
}

/// Control tokens and user-defined ones, and those that the metadata gives a role, whatever their type says.
fn added_tokens(data: &GgufTokenizerData) -> Vec<AddedToken> {
    (0..data.tokens.len())
        .filter(|&id| data.is_added(id))
        .map(|id| AddedToken::new(id as u32, data.tokens[id].clone(), data.is_special(id)))
        .collect()
}

fn entry(data: &GgufTokenizerData, id: usize) -> TokenEntry {
    let token = &data.tokens[id];
    let literal = data.is_added(id);
    let bytes = match data.model.as_str() {
        _ if literal => token.clone().into_bytes(),
        "gpt2" => byte_level::token_bytes(token),
        _ => sentencepiece::token_bytes(token, data.token_type(id)),
    };
    TokenEntry {
        bytes,
        special: data.is_special(id),
        literal,
    }
}
