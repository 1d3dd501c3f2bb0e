//! Text to token ids and conversations to prompts, as the model's own files say.
//!
//! A [`TextModel`] is what a model brings about text: a [`Tokenizer`], [`ChatTemplates`] and [`StopTokens`]. It is read from
//! a Hugging Face folder (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` ...) or from the metadata of a
//! GGUF file, with the same result. [`StreamDecoder`] turns generated tokens into text as they come.
//!
//! - `tokenizer`: encoding, decoding, streaming; `stop_tokens`: what ends an answer;
//! - `gguf`, `huggingface`: where a tokenizer comes from;
//! - `chat`: messages, templates, and the guard that keeps users from forging control tokens;
//! - `text_model`: all of it together; `error`: what can go wrong.
//!
//! The crate knows no model and no tensor.
//!
//! # Examples
//! ```
//! use burn_paged_text::{ChatOptions, ChatTemplate, Message};
//!
//! let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
//! let template = ChatTemplate::new("default", source)?;
//! let messages = [Message::new("system", "Be brief."), Message::new("user", "Hello!")];
//! let prompt = template.render(&messages, &ChatOptions::default(), &[])?;
//! assert_eq!(prompt, "system: Be brief.\nuser: Hello!\n");
//! # Ok::<(), burn_paged_text::TextError>(())
//! ```

mod chat;
mod error;
mod gguf;
mod huggingface;
mod stop_tokens;
mod text_model;
mod tokenizer;

pub use chat::{ChatOptions, ChatTemplate, ChatTemplates, Content, Message};
pub use error::TextError;
pub use gguf::{GgufTokenizerData, TokenType};
pub use stop_tokens::StopTokens;
pub use text_model::TextModel;
pub use tokenizer::{StreamDecoder, Tokenizer};
