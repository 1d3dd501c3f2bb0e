//! Text and chat templates against reference data (`fixtures`, made by `tools/reference/make_text_fixtures.py`) and against
//! the faults that other engines had.
//!
//! - `smollm2`: the demo model; needs `cargo xtask model`;
//! - `sentencepiece`, `templates`: reference vocabulary and templates;
//! - `chat`, `guard`: one BOS, and no forged control tokens, with a vocabulary made in code;
//! - `folder`: Hugging Face folders, with the `tokenizers` crate as the oracle; `gguf`: broken and odd metadata;
//! - `streaming`: streamed text is the whole text.

mod chat;
mod common;
mod folder;
mod gguf;
mod guard;
mod sentencepiece;
mod smollm2;
mod streaming;
mod templates;
