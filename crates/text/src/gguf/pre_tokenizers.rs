//! The named ways in which byte-level vocabularies split text into words.
//!
//! A word is what byte-pair merges stay within, so the split has to be the one that the vocabulary was trained with. GGUF
//! files only carry its name. Each split is a list of regular expressions: the first cuts the text into its matches and
//! what is between them, the next cuts those pieces, and so on.

use tokenizers::SplitDelimiterBehavior;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use crate::error::TextError;
use crate::tokenizer::tokenizer_error;

/// One way of splitting text.
pub(super) struct PreTokenizerSpec {
    /// The names under which files know it.
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// A word that is a token by itself is not merged from parts.
    pub(super) whole_words_first: bool,
    /// The models of this family start every text with BOS unless the file says otherwise.
    pub(super) add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// Han, most of the scripts before it, and Hangul.
const CJK: &str = r"[\u{4E00}-\u{9FA5}\u{800}-\u{4E00}\u{AC00}-\u{D7FF}]+";

/// Han and kana.
const HAN_KANA: &str = r"[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";

/// Everything but white space and the signs that end words in many scripts.
const BLOOM: &str = r" ?[^(\s|.,!?\u{2026}\u{3002}\u{FF0C}\u{3001}\u{964}\u{6D4}\u{60C})]+";

const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

#[rustfmt::skip] // One family a line is easier to compare with the lists of other programs.
const KNOWN: [PreTokenizerSpec; 15] = [
    spec(&["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "gigachat"], &[GPT2]),
    // Digits are split off one by one, then as GPT-2.
    spec(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], &[r"\p{N}", GPT2]),
    whole_words(&["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"], &[LLAMA3]),
    spec(&["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"], &[LLAMA3]),
    spec(&["qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"], &[QWEN2]),
    spec(&["qwen35"], &[QWEN35]),
    whole_words(&["tekken"], &[TEKKEN]),
    spec(&["gpt-4o", "llama4", "kanana2", "minimax-m2"], &[GPT4O]),
    spec(&["deepseek-coder"], &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"]),
    spec(&["deepseek-v3", "hunyuan-dense", "joyai-llm"], &[r"\p{N}{1,3}", HAN_KANA, DEEPSEEK3]),
    spec(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    spec(&["bloom", "poro-chat", "gpt3-finnish"], &[BLOOM]),
    spec(&["viking"], &[BLOOM, r"\p{N}"]),
    spec(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    // How llama.cpp splits text for files from before these names.
    spec(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
];

const fn spec(
    names: &'static [&'static str],
    patterns: &'static [&'static str],
) -> PreTokenizerSpec {
    PreTokenizerSpec {
        names,
        patterns,
        whole_words_first: false,
        add_bos: false,
    }
}

/// Families whose tokenizers look a word up before they merge its parts. All of them start texts with BOS.
const fn whole_words(
    names: &'static [&'static str],
    patterns: &'static [&'static str],
) -> PreTokenizerSpec {
    PreTokenizerSpec {
        names,
        patterns,
        whole_words_first: true,
        add_bos: true,
    }
}

/// The split of a name. A file without one is split by `default`, with a warning.
///
/// # Errors
/// `UnknownPreTokenizer`.
pub(super) fn find(name: Option<&str>) -> Result<&'static PreTokenizerSpec, TextError> {
    let wanted = name.unwrap_or_else(|| {
        log::warn!("the GGUF file does not name its pre-tokenizer; text may be split wrongly");
        "default"
    });
    KNOWN
        .iter()
        .find(|spec| spec.names.contains(&wanted))
        .ok_or_else(|| TextError::UnknownPreTokenizer {
            name: wanted.to_owned(),
            known: KNOWN.iter().flat_map(|spec| spec.names).copied().collect(),
        })
}

impl PreTokenizerSpec {
    pub(super) fn build(&self) -> Result<Sequence, TextError> {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        for &pattern in self.patterns {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
            steps.push(split.map_err(tokenizer_error)?.into());
        }
        // The words are spelled in the byte alphabet at the end; the patterns see the text itself.
        steps.push(ByteLevel::new(false, false, false).into());
        Ok(Sequence::new(steps))
    }
}
