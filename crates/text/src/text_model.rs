//! Everything about text that a model brings.

use std::path::Path;

use burn_paged_checkpoint::Checkpoint;
use serde_json::Value;

use crate::chat::{ChatOptions, ChatTemplates, Message, unmark};
use crate::error::TextError;
use crate::gguf::{self, GgufTokenizerData};
use crate::huggingface::{self, TokenizerConfig};
use crate::stop_tokens::StopTokens;
use crate::tokenizer::Tokenizer;

/// The tokenizer, the chat templates and the end tokens of a model.
///
/// # Examples
/// ```no_run
/// use burn_paged_text::{ChatOptions, Message, TextModel};
///
/// let model = TextModel::from_path("model.gguf")?;
/// let ids = model.encode_chat(&[Message::new("user", "Hello!")], &ChatOptions::default())?;
/// assert!(model.stop_tokens.iter().all(|id| model.tokenizer.is_special(id)));
/// # Ok::<(), burn_paged_text::TextError>(())
/// ```
#[derive(Debug, Clone)]
pub struct TextModel {
    /// Text to token ids and back.
    pub tokenizer: Tokenizer,
    /// Empty for base models.
    pub chat_templates: ChatTemplates,
    /// Every token that ends an answer.
    pub stop_tokens: StopTokens,
}

impl TextModel {
    /// Reads the text side of an opened model: a Hugging Face folder or a GGUF file.
    ///
    /// # Errors
    /// `MissingTokenizer` if the model has none; what [`from_folder`](Self::from_folder) and [`from_gguf`](Self::from_gguf)
    /// give.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, TextError> {
        match checkpoint.gguf_metadata() {
            Some(metadata) => Self::from_gguf(&GgufTokenizerData::from_metadata(metadata)?),
            None => Self::from_folder(
                checkpoint.path(),
                checkpoint.config(),
                checkpoint.generation_config(),
            ),
        }
    }

    /// Opens a model only for its text side.
    ///
    /// # Errors
    /// As [`from_checkpoint`](Self::from_checkpoint), and `Checkpoint` if there is no model.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, TextError> {
        Self::from_checkpoint(&Checkpoint::open(path)?)
    }

    /// Reads `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and the chat templates of a folder.
    /// `config` and `generation_config` are the folder's files of these names, for the end tokens that they name.
    ///
    /// # Errors
    /// `MissingTokenizer` without `tokenizer.json`; `Io`, `Json`, `Tokenizer`, `UnsupportedDecoder` or `TemplateSyntax` if a
    /// file cannot be used.
    pub fn from_folder(
        folder: &Path,
        config: &Value,
        generation_config: Option<&Value>,
    ) -> Result<Self, TextError> {
        let tokenizer_config = TokenizerConfig::read(folder)?;
        let tokenizer = huggingface::tokenizer(folder, &tokenizer_config)?;
        let templates = huggingface::chat_templates(folder, &tokenizer_config)?;
        let stop_tokens = huggingface::stop_tokens(&tokenizer, config, generation_config);
        Ok(Self {
            tokenizer,
            chat_templates: ChatTemplates::new(templates)?,
            stop_tokens,
        })
    }

    /// Builds the text side from the metadata of a GGUF file.
    ///
    /// # Errors
    /// `UnsupportedTokenizerModel`, `UnknownPreTokenizer`, `Vocabulary` or `TemplateSyntax`.
    pub fn from_gguf(data: &GgufTokenizerData) -> Result<Self, TextError> {
        Ok(Self {
            tokenizer: gguf::tokenizer(data)?,
            chat_templates: ChatTemplates::new(data.chat_templates.iter().cloned())?,
            stop_tokens: gguf::stop_tokens(data),
        })
    }

    /// The prompt of a conversation as text, exactly as the model's template writes it.
    ///
    /// To encode it, use [`encode_chat`](Self::encode_chat): in the text alone, control tokens of the template and look-alikes
    /// of the user are the same.
    ///
    /// # Errors
    /// `NoChatTemplate`, `UnknownChatTemplate`, and what [`ChatTemplate::render`](crate::ChatTemplate::render) gives.
    pub fn render_chat(
        &self,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<String, TextError> {
        let template = self.chat_templates.select(options)?;
        template.render(messages, options, &self.tokenizer.template_variables())
    }

    /// The token ids of a conversation's prompt.
    ///
    /// The template alone decides about BOS: nothing is added to what it writes. What looks like a control token in text of
    /// the user (contents, other fields of messages, tools, documents, variables) is encoded as plain text. Decoded, the ids
    /// give the text of [`render_chat`](Self::render_chat), unless the template itself looks for control tokens in text of
    /// the user; it does not find them here.
    ///
    /// # Errors
    /// As [`render_chat`](Self::render_chat); `Encode` if the vocabulary cannot spell the text; `NoMarkLeft`.
    pub fn encode_chat(
        &self,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, TextError> {
        let template = self.chat_templates.select(options)?;
        let named = self.tokenizer.template_variables();
        let mut context = template.context(messages, options)?;
        let mut trusted = vec![template.source()];
        trusted.extend(self.tokenizer.control_spellings());
        match self.tokenizer.guard().mark(&mut context, &trusted)? {
            None => self
                .tokenizer
                .encode(&template.render_json(&context, &named)?, false),
            Some(mark) => {
                let prompt = unmark(&template.render_json(&context, &named)?, mark);
                self.tokenizer.encode_marked(&prompt.text, &prompt.marks)
            }
        }
    }
}
