//! All chat templates of a model.

use std::collections::BTreeMap;

use super::{ChatOptions, ChatTemplate};
use crate::error::TextError;

/// The template that is used when nothing else is asked for.
const DEFAULT: &str = "default";

/// The template that is preferred when there are tools.
const TOOL_USE: &str = "tool_use";

/// The chat templates of a model by name. Base models have none.
#[derive(Debug, Clone, Default)]
pub struct ChatTemplates {
    named: BTreeMap<String, ChatTemplate>,
}

impl ChatTemplates {
    /// Compiles templates, given with their names.
    ///
    /// # Errors
    /// `TemplateSyntax` if one does not parse.
    pub fn new(sources: impl IntoIterator<Item = (String, String)>) -> Result<Self, TextError> {
        let compile = |(name, source): (String, String)| {
            let template = ChatTemplate::new(&name, &source)?;
            Ok((name, template))
        };
        Ok(Self {
            named: sources
                .into_iter()
                .map(compile)
                .collect::<Result<_, TextError>>()?,
        })
    }

    /// Adds a template or puts it in the place of another.
    pub fn insert(&mut self, name: impl Into<String>, template: ChatTemplate) {
        self.named.insert(name.into(), template);
    }

    /// The names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.named.keys().map(String::as_str)
    }

    /// Whether the model has no template.
    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }

    /// The template for a conversation.
    ///
    /// # Errors
    /// `NoChatTemplate` if there is none at all, `UnknownChatTemplate` if there are only others.
    pub fn select(&self, options: &ChatOptions) -> Result<&ChatTemplate, TextError> {
        if self.named.is_empty() {
            return Err(TextError::NoChatTemplate);
        }
        let for_tools = options.tools.is_some() && self.named.contains_key(TOOL_USE);
        let fallback = if for_tools { TOOL_USE } else { DEFAULT };
        let name = options.template.as_deref().unwrap_or(fallback);
        self.named
            .get(name)
            .ok_or_else(|| TextError::UnknownChatTemplate {
                name: name.to_owned(),
                known: self.names().map(str::to_owned).collect(),
            })
    }
}
