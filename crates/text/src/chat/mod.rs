//! Conversations to prompts.
//!
//! - `message`: what a conversation is; `options`: how it is rendered;
//! - `template`: one Jinja template; `templates`: all that a model brings;
//! - `functions`: what templates may call beyond Jinja; `python_json`: JSON as Python writes it;
//! - `guard`: marks text of the user, so that it cannot forge control tokens.

mod functions;
mod guard;
mod message;
mod options;
mod python_json;
mod template;
mod templates;

pub(crate) use guard::{Guard, unmark};
pub use message::{Content, Message};
pub use options::ChatOptions;
pub use template::ChatTemplate;
pub use templates::ChatTemplates;
