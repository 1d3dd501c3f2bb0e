//! One chat template.

use std::error::Error as _;
use std::fmt;
use std::sync::Arc;

use minijinja::Environment;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use serde_json::json;

use super::functions::{self, Raised};
use super::{ChatOptions, Message};
use crate::error::TextError;

/// The name under which the environment keeps the template. Without an extension, so that nothing is escaped.
const NAME: &str = "chat";

/// Variables that the conversation sets.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// A Jinja template that turns a conversation into a prompt, with everything that Hugging Face templates may use.
///
/// # Source
/// The environment of `apply_chat_template` in Hugging Face transformers 5: blocks are trimmed, `break` and `continue` work,
/// `{% generation %}` marks nothing, undefined variables print nothing.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    source: Arc<str>,
    /// Whether a list of content parts can be passed on; otherwise their text is joined.
    takes_parts: bool,
}

impl ChatTemplate {
    /// Compiles a template. `name` is used in messages.
    ///
    /// # Errors
    /// `TemplateSyntax`.
    pub fn new(name: &str, source: &str) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        functions::add_to(&mut environment);
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        syntax
            .and_then(|syntax| {
                environment.set_syntax(syntax);
                environment.add_template_owned(NAME, without_generation_tags(source))
            })
            .map_err(|error| TextError::TemplateSyntax {
                name: name.to_owned(),
                reason: describe(&error),
            })?;
        let mut template = Self {
            environment: Arc::new(environment),
            source: source.into(),
            takes_parts: false,
        };
        template.takes_parts = template.shows_parts();
        Ok(template)
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of a conversation. `named_tokens` are variables such as `bos_token`.
    ///
    /// # Errors
    /// `TemplateRaised` if the template refuses the conversation, `TemplateFailed` if it cannot handle it; `InvalidRole`,
    /// `UnsupportedContent`, `ReservedVariable` if the conversation is not sound.
    pub fn render(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        named_tokens: &[(&str, String)],
    ) -> Result<String, TextError> {
        self.render_json(&self.context(messages, options)?, named_tokens)
    }

    /// The variables that come from the conversation, which are text of the user.
    pub(crate) fn context(
        &self,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<serde_json::Value, TextError> {
        let mut context = options.variables.clone();
        if let Some(name) = RESERVED.iter().find(|name| context.contains_key(**name)) {
            return Err(TextError::ReservedVariable {
                name: (*name).to_owned(),
            });
        }
        let messages = messages.iter().enumerate();
        let messages = messages
            .map(|(index, message)| message.to_json(index, !self.takes_parts))
            .collect::<Result<Vec<_>, _>>()?;
        context.insert("messages".into(), messages.into());
        context.insert("tools".into(), options.tools.clone().into());
        context.insert("documents".into(), options.documents.clone().into());
        context.insert(
            "add_generation_prompt".into(),
            options.add_generation_prompt.into(),
        );
        Ok(context.into())
    }

    pub(crate) fn render_json(
        &self,
        context: &serde_json::Value,
        named_tokens: &[(&str, String)],
    ) -> Result<String, TextError> {
        let given = context.as_object().into_iter().flatten();
        let variables = named_tokens
            .iter()
            .map(|(name, spelling)| (*name, Value::from(spelling)))
            .chain(given.map(|(name, value)| (name.as_str(), to_value(value))));
        let template = self.environment.get_template(NAME).map_err(failed)?;
        template
            .render(Value::from_pairs(variables))
            .map_err(failed)
    }

    /// Whether the template walks through a list of content parts and prints their text, found by trying. One that prints
    /// the list as it is shows the name of its fields.
    fn shows_parts(&self) -> bool {
        const PROBE: &str = "probe of content";
        let context = json!({
            "messages": [{"role": "user", "content": [{"type": "text", "text": PROBE}]}],
            "tools": null, "documents": null, "add_generation_prompt": false,
        });
        self.render_json(&context, &[])
            .is_ok_and(|text| text.contains(PROBE) && !text.contains("type"))
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("source", &self.source)
            .field("takes_parts", &self.takes_parts)
            .finish_non_exhaustive()
    }
}

fn to_value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(flag) => Value::from(*flag),
        serde_json::Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => Value::from(number),
            (_, Some(number)) => Value::from(number),
            _ => number.as_f64().map_or_else(|| Value::from(()), Value::from),
        },
        serde_json::Value::String(text) => Value::from(text),
        serde_json::Value::Array(items) => items.iter().map(to_value).collect(),
        serde_json::Value::Object(fields) => Value::from_pairs(
            fields
                .iter()
                .map(|(key, value)| (key.as_str(), to_value(value))),
        ),
    }
}

fn failed(error: minijinja::Error) -> TextError {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TextError::TemplateRaised {
                message: message.clone(),
            };
        }
        cause = inner.source();
    }
    TextError::TemplateFailed {
        reason: describe(&error),
    }
}

/// Kind, detail and line, without the name of the template that only this file knows.
fn describe(error: &minijinja::Error) -> String {
    let mut text = error.kind().to_string();
    if let Some(detail) = error.detail() {
        text = format!("{text}: {detail}");
    }
    match error.line() {
        Some(line) => format!("line {line}: {text}"),
        None => text,
    }
}

/// Replaces the `generation` tags, with which the training of models finds the assistant's text, by a block that is always
/// shown. The signs for white space at the ends of a tag are kept.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}").map(|end| end + 2) else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end);
        let inside = &tag[2..end - 2];
        let name = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match name {
            "generation" => out.push_str(&tag.replacen(name, "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen(name, "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
