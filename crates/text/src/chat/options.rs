//! How a conversation is rendered.

use serde_json::{Map, Value};

/// How a conversation becomes a prompt.
///
/// # Examples
/// ```
/// let mut options = burn_paged_text::ChatOptions::default();
/// options.variables.insert("enable_thinking".into(), false.into());
/// assert!(options.add_generation_prompt);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ChatOptions {
    /// Whether the prompt ends with the opening of the assistant's turn. On by default.
    pub add_generation_prompt: bool,
    /// Tools that the model may call, as JSON schemas.
    pub tools: Option<Vec<Value>>,
    /// Documents to answer from, where the template knows them.
    pub documents: Option<Vec<Value>>,
    /// The name of the template; `None` takes `tool_use` if there are tools and the model has it, otherwise `default`.
    pub template: Option<String>,
    /// More variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            tools: None,
            documents: None,
            template: None,
            variables: Map::new(),
        }
    }
}
