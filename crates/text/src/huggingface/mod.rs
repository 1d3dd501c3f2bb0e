//! Tokenizers out of a Hugging Face model folder.
//!
//! - `files`: reading the folder's JSON files; `config`: what `tokenizer_config.json` says;
//! - this file: `tokenizer.json` and putting everything together.

mod config;
mod files;

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

pub(crate) use config::TokenizerConfig;
pub(crate) use files::chat_templates;

use crate::error::TextError;
use crate::stop_tokens::StopTokens;
use crate::tokenizer::{
    AddedToken, DecodeRule, NamedTokens, TokenEntry, TokenTable, Tokenizer, TokenizerParts,
    tokenizer_error,
};

const TOKENIZER: &str = "tokenizer.json";

/// Ids past this are a broken file: tables are as long as the largest id.
const LARGEST_ID: u32 = 1 << 24;

/// The part of `tokenizer.json` that is read here; the rest is the `tokenizers` crate's.
#[derive(Deserialize)]
struct AddedTokensField {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

/// Reads `tokenizer.json` and what goes with it.
///
/// # Errors
/// `MissingTokenizer` without `tokenizer.json`; `Io`, `Json`, `Tokenizer` or `UnsupportedDecoder` if it cannot be used.
pub(crate) fn tokenizer(folder: &Path, config: &TokenizerConfig) -> Result<Tokenizer, TextError> {
    let path = folder.join(TOKENIZER);
    let Some(json) = files::read_optional(&path)? else {
        return Err(TextError::MissingTokenizer {
            path: folder.to_owned(),
            missing: TOKENIZER,
        });
    };
    let AddedTokensField { mut added_tokens } =
        serde_json::from_str(&json).map_err(|error| TextError::json(&path, error))?;
    let mut pipeline: tokenizers::Tokenizer = json
        .parse()
        .map_err(|error| TextError::json(&path, error))?;
    // Some published files carry the truncation of their training; a prompt must never be cut silently.
    pipeline.with_truncation(None).map_err(tokenizer_error)?;
    pipeline.with_padding(None);

    config.add_to(&mut added_tokens, &pipeline);
    let table = token_table(&path, &pipeline, &added_tokens)?;
    let id = |name: &str| {
        let spelling = config.named_token(name)?;
        let added = added_tokens.iter().find(|token| token.content == spelling);
        added
            .map(|token| token.id)
            .or_else(|| pipeline.token_to_id(spelling))
    };
    let named = NamedTokens {
        bos: id("bos_token"),
        eos: id("eos_token"),
        unk: id("unk_token"),
        pad: id("pad_token"),
    };
    let (prefix, suffix) = surroundings(&pipeline, config, named)?;
    Tokenizer::from_parts(TokenizerParts {
        pipeline,
        added: added_tokens,
        table,
        named,
        prefix,
        suffix,
    })
}

/// The tokens that end an answer, of all places that may name them.
pub(crate) fn stop_tokens(
    tokenizer: &Tokenizer,
    config: &Value,
    generation_config: Option<&Value>,
) -> StopTokens {
    let mut stop: StopTokens = tokenizer.eos_id().into_iter().collect();
    let configs = [Some(config), config.get("text_config"), generation_config];
    for config in configs.into_iter().flatten() {
        stop.add_config(config, tokenizer.vocab_size());
    }
    stop
}

fn token_table(
    path: &Path,
    pipeline: &tokenizers::Tokenizer,
    added: &[AddedToken],
) -> Result<TokenTable, TextError> {
    let rule = DecodeRule::new(pipeline.get_decoder())?;
    let vocabulary = pipeline.get_vocab(false);
    let ids = vocabulary
        .values()
        .copied()
        .chain(added.iter().map(|token| token.id));
    let largest = ids.max().unwrap_or(0);
    if largest > LARGEST_ID {
        return Err(TextError::json(
            path,
            format!("token id {largest} is not plausible"),
        ));
    }
    let mut entries = vec![TokenEntry::default(); largest as usize + 1];
    for (token, &id) in &vocabulary {
        entries[id as usize].bytes = rule.bytes(token);
    }
    for token in added {
        let spelled = &token.content;
        let bytes = if token.special {
            spelled.as_bytes().into()
        } else {
            rule.added_bytes(spelled)
        };
        entries[token.id as usize] = TokenEntry {
            bytes,
            special: token.special,
            literal: true,
        };
    }
    Ok(TokenTable::new(&entries, rule.start))
}

/// What goes before and after a text that gets special tokens: what the post-processor of `tokenizer.json` adds, unless
/// `tokenizer_config.json` says otherwise about BOS or EOS.
fn surroundings(
    pipeline: &tokenizers::Tokenizer,
    config: &TokenizerConfig,
    named: NamedTokens,
) -> Result<(Vec<u32>, Vec<u32>), TextError> {
    // Any text does, as long as it is not empty.
    const PROBE: &str = "a";
    let ids = |add_special_tokens| -> Result<Vec<u32>, TextError> {
        let encoding = pipeline
            .encode_fast(PROBE, add_special_tokens)
            .map_err(tokenizer_error)?;
        Ok(encoding.get_ids().to_vec())
    };
    let (bare, full) = (ids(false)?, ids(true)?);
    let at = (0..=full.len().saturating_sub(bare.len()))
        .find(|&at| full[at..].starts_with(&bare))
        .ok_or_else(|| tokenizer_error("its post-processor changes the tokens of a text"))?;
    let mut prefix = full[..at].to_vec();
    let mut suffix = full[at + bare.len()..].to_vec();
    if let Some(bos) = named.bos {
        match (config.add_bos_token, prefix.first() == Some(&bos)) {
            (Some(true), false) => prefix.insert(0, bos),
            (Some(false), true) => _ = prefix.remove(0),
            _ => {}
        }
    }
    if let Some(eos) = named.eos {
        match (config.add_eos_token, suffix.last() == Some(&eos)) {
            (Some(true), false) => suffix.push(eos),
            (Some(false), true) => _ = suffix.pop(),
            _ => {}
        }
    }
    Ok((prefix, suffix))
}
