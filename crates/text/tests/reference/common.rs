//! Fixtures, vocabularies made in code, and a random number generator.

use std::env;
use std::path::{Path, PathBuf};

use burn_paged_text::{GgufTokenizerData, TextModel, TokenType};
use serde_json::Value;

/// A file of reference data.
pub(crate) fn fixture(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

pub(crate) fn ids(json: &Value) -> Vec<u32> {
    serde_json::from_value(json.clone()).unwrap()
}

/// The demo model in the user's cache.
pub(crate) fn smollm2_path() -> PathBuf {
    let cache = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute());
    let home = || PathBuf::from(env::var_os("HOME").expect("HOME is not set")).join(".cache");
    let path = cache
        .unwrap_or_else(home)
        .join("burn-paged/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.is_file(),
        "{} is missing; run `cargo xtask model`",
        path.display()
    );
    path
}

/// The character that stands for each byte in byte-level vocabularies, written down from the definition.
pub(crate) fn byte_alphabet() -> Vec<char> {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut substitutes = (256..).filter_map(char::from_u32);
    (0..256)
        .map(|byte| match printable(byte) {
            true => char::from_u32(byte).unwrap(),
            false => substitutes.next().unwrap(),
        })
        .collect()
}

pub(crate) const BOS: &str = "<|begin_of_text|>";
pub(crate) const END: &str = "<|end_of_text|>";
pub(crate) const START_HEADER: &str = "<|start_header_id|>";
pub(crate) const END_HEADER: &str = "<|end_header_id|>";
pub(crate) const TURN: &str = "<|eot_id|>";
pub(crate) const MESSAGE: &str = "<|eom_id|>";

/// A template in the style of Llama 3.
pub(crate) const HEADERS: &str = "{{ bos_token }}{% for m in messages %}\
    {{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

/// A byte-level vocabulary in the style of Llama 3: all bytes, a few merges, control tokens.
pub(crate) fn llama3_data() -> GgufTokenizerData {
    let mut tokens: Vec<String> = byte_alphabet().iter().map(char::to_string).collect();
    let merges = [
        "H i", "Ċ Ċ", "e r", "Ġ a", "u s", "us er", "< |", "| >", "e o", "eo t", "Ġ Ġ",
    ];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut token_types = vec![TokenType::Normal; tokens.len()];
    for control in [BOS, END, START_HEADER, END_HEADER, TURN, MESSAGE] {
        tokens.push(control.into());
        token_types.push(TokenType::Control);
    }
    tokens.push("<tool>".into());
    token_types.push(TokenType::UserDefined);
    let id = |token: &str| {
        tokens
            .iter()
            .position(|other| other == token)
            .map(|id| id as u32)
    };
    GgufTokenizerData {
        model: "gpt2".into(),
        pre: Some("llama-bpe".into()),
        bos_id: id(BOS),
        eos_id: id(END),
        merges: merges.map(str::to_owned).to_vec(),
        token_types,
        chat_templates: vec![("default".into(), HEADERS.into())],
        tokens,
        ..GgufTokenizerData::default()
    }
}

pub(crate) fn llama3() -> TextModel {
    TextModel::from_gguf(&llama3_data()).unwrap()
}

pub(crate) fn with_template(source: &str) -> TextModel {
    let chat_templates = vec![("default".into(), source.into())];
    TextModel::from_gguf(&GgufTokenizerData {
        chat_templates,
        ..llama3_data()
    })
    .unwrap()
}

/// A small random number generator (SplitMix64), so that every run sees the same cases.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub(crate) fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// Some of `pieces` in a row.
    pub(crate) fn text(&mut self, pieces: &[&str], most: usize) -> String {
        (0..self.below(most + 1))
            .map(|_| *self.pick(pieces))
            .collect()
    }
}
