//! `tokenizer_config.json` and `special_tokens_map.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use super::files::read_optional_json;
use crate::error::TextError;
use crate::tokenizer::AddedToken;

const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
];

/// What a folder says about its tokenizer beside `tokenizer.json`.
#[derive(Debug, Default)]
pub(crate) struct TokenizerConfig {
    /// Spellings by role, such as `bos_token`.
    named: BTreeMap<&'static str, String>,
    /// More control tokens by spelling.
    additional: BTreeSet<String>,
    /// Control and user-defined tokens with their ids.
    added_tokens: Vec<AddedToken>,
    pub(super) add_bos_token: Option<bool>,
    pub(super) add_eos_token: Option<bool>,
    /// Chat templates by name.
    pub(super) chat_templates: BTreeMap<String, String>,
}

impl TokenizerConfig {
    /// Reads the files of `folder`; both may be missing.
    pub(crate) fn read(folder: &Path) -> Result<Self, TextError> {
        let mut config = Self::default();
        // The later one wins where both name a token.
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            let path = folder.join(name);
            if let Some(json) = read_optional_json(&path)? {
                config.add_json(&path, &json)?;
            }
        }
        Ok(config)
    }

    /// The spelling of the token with a role.
    pub(super) fn named_token(&self, role: &str) -> Option<&str> {
        self.named.get(role).map(String::as_str)
    }

    fn add_json(&mut self, path: &Path, json: &Value) -> Result<(), TextError> {
        for role in NAMED {
            if let Some(spelling) = spelling(&json[role]) {
                self.named.insert(role, spelling.to_owned());
            }
        }
        for field in ["additional_special_tokens", "extra_special_tokens"] {
            let listed: Vec<&Value> = match &json[field] {
                Value::Array(tokens) => tokens.iter().collect(),
                Value::Object(tokens) => tokens.values().collect(),
                _ => continue,
            };
            self.additional
                .extend(listed.into_iter().filter_map(spelling).map(str::to_owned));
        }
        self.add_bos_token = json["add_bos_token"].as_bool().or(self.add_bos_token);
        self.add_eos_token = json["add_eos_token"].as_bool().or(self.add_eos_token);
        self.read_added_tokens(path, &json["added_tokens_decoder"])?;
        self.read_chat_templates(path, &json["chat_template"])
    }

    fn read_added_tokens(&mut self, path: &Path, json: &Value) -> Result<(), TextError> {
        let Some(tokens) = json.as_object() else {
            return Ok(());
        };
        for (id, token) in tokens {
            let wrong = |reason: String| {
                TextError::json(path, format!("added_tokens_decoder.{id}: {reason}"))
            };
            let mut token: AddedToken =
                serde_json::from_value(token.clone()).map_err(|error| wrong(error.to_string()))?;
            token.id = id
                .parse()
                .map_err(|_| wrong("the key is no token id".into()))?;
            self.added_tokens.push(token);
        }
        Ok(())
    }

    fn read_chat_templates(&mut self, path: &Path, json: &Value) -> Result<(), TextError> {
        match json {
            Value::Null => {}
            Value::String(source) => {
                self.chat_templates.insert("default".into(), source.clone());
            }
            Value::Array(templates) => {
                for template in templates {
                    let (Some(name), Some(source)) =
                        (template["name"].as_str(), template["template"].as_str())
                    else {
                        return Err(TextError::json(
                            path,
                            "chat_template: an entry lacks its name or template",
                        ));
                    };
                    self.chat_templates
                        .insert(name.to_owned(), source.to_owned());
                }
            }
            other => {
                let kind = if other.is_object() {
                    "an object"
                } else {
                    "no text"
                };
                return Err(TextError::json(path, format!("chat_template is {kind}")));
            }
        }
        Ok(())
    }

    /// Brings the list of added tokens of `tokenizer.json` up to date: entries that only the configuration has are added,
    /// its flags win, and tokens with a role are control tokens whatever their entry says.
    pub(super) fn add_to(&self, added: &mut Vec<AddedToken>, pipeline: &tokenizers::Tokenizer) {
        for token in &self.added_tokens {
            if let Some(known) = added
                .iter_mut()
                .find(|known| known.content == token.content)
            {
                *known = AddedToken {
                    id: known.id,
                    ..token.clone()
                };
            } else if added.iter().any(|known| known.id == token.id) {
                log::warn!(
                    "token {:?} of tokenizer_config.json has id {}, which tokenizer.json gives to another",
                    token.content,
                    token.id
                );
            } else {
                added.push(token.clone());
            }
        }
        for spelling in self.named.values().chain(&self.additional) {
            if let Some(known) = added.iter_mut().find(|known| known.content == *spelling) {
                known.special = true;
            } else if let Some(id) = pipeline.token_to_id(spelling) {
                added.push(AddedToken::new(id, spelling.clone(), true));
            } else {
                log::warn!("special token {spelling:?} is not in the vocabulary");
            }
        }
    }
}

/// A token is given by its spelling or as an object with it.
fn spelling(json: &Value) -> Option<&str> {
    json.as_str()
        .or_else(|| json["content"].as_str())
        .filter(|spelling| !spelling.is_empty())
}
