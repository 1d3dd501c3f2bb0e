//! Reading the files of a model folder.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use super::TokenizerConfig;
use crate::error::TextError;

/// The text of a file, or `None` if there is no such file.
pub(super) fn read_optional(path: &Path) -> Result<Option<String>, TextError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Io {
            path: path.to_owned(),
            source,
        }),
    }
}

/// The value of a JSON file, or `None` if there is no such file.
pub(super) fn read_optional_json(path: &Path) -> Result<Option<Value>, TextError> {
    let Some(text) = read_optional(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| TextError::json(path, error))
}

/// The chat templates of a folder by name. Files of their own win over those in `tokenizer_config.json`.
pub(crate) fn chat_templates(
    folder: &Path,
    config: &TokenizerConfig,
) -> Result<BTreeMap<String, String>, TextError> {
    let mut templates = config.chat_templates.clone();
    if let Some(json) = read_optional_json(&folder.join("chat_template.json"))?
        && let Some(source) = json["chat_template"].as_str()
    {
        templates.insert("default".into(), source.into());
    }
    if let Some(source) = read_optional(&folder.join("chat_template.jinja"))? {
        templates.insert("default".into(), source);
    }
    let others = folder.join("additional_chat_templates");
    let entries = match fs::read_dir(&others) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(templates),
        Err(source) => {
            return Err(TextError::Io {
                path: others,
                source,
            });
        }
    };
    for entry in entries {
        let path = entry
            .map_err(|source| TextError::Io {
                path: others.clone(),
                source,
            })?
            .path();
        let name = path.file_stem().and_then(|name| name.to_str());
        if let (Some(name), Some("jinja")) = (name, path.extension().and_then(|e| e.to_str()))
            && let Some(source) = read_optional(&path)?
        {
            templates.insert(name.to_owned(), source);
        }
    }
    Ok(templates)
}
