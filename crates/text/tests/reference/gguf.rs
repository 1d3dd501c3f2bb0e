//! Metadata that is broken or odd is refused with its names and numbers.

use burn_paged_checkpoint::{GgufArray, GgufMetadata, GgufValue};
use burn_paged_text::{GgufTokenizerData, TextError, TextModel, TokenType};

use crate::common::{byte_alphabet, llama3_data};

fn refusal(change: impl FnOnce(&mut GgufTokenizerData)) -> String {
    let mut data = llama3_data();
    change(&mut data);
    TextModel::from_gguf(&data).unwrap_err().to_string()
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    let count = llama3_data().tokens.len();
    assert_eq!(
        refusal(|data| data.token_types.truncate(3)),
        format!("vocabulary of the GGUF file: 3 token types for {count} tokens")
    );
    assert_eq!(
        refusal(|data| data.scores = vec![0.0; 2]),
        format!("vocabulary of the GGUF file: 2 scores for {count} tokens")
    );
    assert_eq!(
        refusal(|data| data.tokens.clear()),
        "vocabulary of the GGUF file: there are no tokens"
    );
    assert!(refusal(|data| data.merges.clear()).contains("merges is missing"));
    assert!(
        refusal(|data| data.merges[1] = "ab".into()).contains("merge 1 is \"ab\", not two tokens")
    );
    assert!(
        refusal(|data| data.merges[1] = "a ".into()).contains("merge 1 is \"a \", not two tokens")
    );
    assert!(refusal(|data| data.merges[0] = "a nowhere".into()).contains("nowhere"));
    assert!(refusal(|data| data.model = "llama".into()).contains("scores is missing"));
}

#[test]
fn unknown_kinds_are_refused_with_those_known() {
    assert_eq!(
        refusal(|data| data.model = "bert".into()),
        "tokenizer model \"bert\" is not supported (supported: gpt2, llama)"
    );
    let message = refusal(|data| data.pre = Some("brand-new".into()));
    assert!(
        message.starts_with("pre-tokenizer \"brand-new\" is not known (known: gpt-2, "),
        "{message}"
    );
    assert!(message.contains("smollm"), "{message}");
}

#[test]
fn metadata_is_read_under_its_published_keys() {
    let mut tokens: Vec<String> = byte_alphabet().iter().map(char::to_string).collect();
    tokens.extend(["Hi".into(), "<s>".into()]);
    let last = tokens.len() as u64 - 1;
    let mut types = vec![1; tokens.len()];
    types[last as usize] = 3;
    let text = |text: &str| GgufValue::String(text.into());
    let strings = |list: Vec<String>| GgufValue::Array(GgufArray::String(list));
    let metadata = GgufMetadata::from_entries(
        "m.gguf",
        [
            ("tokenizer.ggml.model", text("gpt2")),
            ("tokenizer.ggml.pre", text("qwen2")),
            ("tokenizer.ggml.tokens", strings(tokens)),
            (
                "tokenizer.ggml.token_type",
                GgufValue::Array(GgufArray::Signed(types)),
            ),
            ("tokenizer.ggml.merges", strings(vec!["H i".into()])),
            ("tokenizer.ggml.bos_token_id", GgufValue::Unsigned(last)),
            ("tokenizer.ggml.add_bos_token", GgufValue::Bool(true)),
            ("tokenizer.chat_template", text("plain")),
            ("tokenizer.chat_templates", strings(vec!["tool_use".into()])),
            ("tokenizer.chat_template.tool_use", text("tools")),
        ],
    );
    let data = GgufTokenizerData::from_metadata(&metadata).unwrap();
    assert_eq!(data.token_type(last as usize), TokenType::Control);
    let model = TextModel::from_gguf(&data).unwrap();
    assert_eq!(
        model.tokenizer.encode("Hi", true).unwrap(),
        [last as u32, 256]
    );
    assert_eq!(
        model.chat_templates.names().collect::<Vec<_>>(),
        ["default", "tool_use"]
    );
}

#[test]
fn a_file_without_a_tokenizer_says_what_is_missing() {
    let entries: [(&str, GgufValue); 0] = [];
    let metadata = GgufMetadata::from_entries("m.gguf", entries);
    let error = GgufTokenizerData::from_metadata(&metadata).unwrap_err();
    assert!(matches!(error, TextError::MissingTokenizer { .. }));
    assert_eq!(
        error.to_string(),
        "m.gguf has no tokenizer: tokenizer.ggml.model is missing"
    );
    let wrong = [("tokenizer.ggml.model", GgufValue::Unsigned(1))];
    let error = GgufTokenizerData::from_metadata(&GgufMetadata::from_entries("m.gguf", wrong));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("tokenizer.ggml.model")
    );
}

/// The words that a text is split into, seen through a vocabulary in which nothing can be merged over their borders: every
/// pair of letters, digits, spaces and signs is a token, so that a token of two characters never spans two words.
fn pairs(pre: &str, text: &str) -> Vec<String> {
    let alphabet = byte_alphabet();
    let spelled = |text: &str| {
        text.bytes()
            .map(|b| alphabet[b as usize])
            .collect::<String>()
    };
    let mut tokens: Vec<String> = alphabet.iter().map(char::to_string).collect();
    let mut merges = Vec::new();
    let signs = spelled("ab1 .\n'sS");
    for left in signs.chars() {
        for right in signs.chars() {
            tokens.push(format!("{left}{right}"));
            merges.push(format!("{left} {right}"));
        }
    }
    tokens.dedup();
    let data = GgufTokenizerData {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens,
        merges,
        ..GgufTokenizerData::default()
    };
    let tokenizer = TextModel::from_gguf(&data).unwrap().tokenizer;
    let ids = tokenizer.encode(text, false).unwrap();
    ids.iter()
        .map(|&id| tokenizer.decode(&[id], false))
        .collect()
}

#[test]
fn pre_tokenizers_split_as_their_models_do() {
    // Numbers: one word, a digit each, three digits each.
    assert_eq!(pairs("gpt-2", "1111"), ["11", "11"]);
    assert_eq!(pairs("smollm", "1111"), ["1", "1", "1", "1"]);
    assert_eq!(pairs("qwen2", "1111"), ["1", "1", "1", "1"]);
    assert_eq!(pairs("llama-bpe", "1111"), ["11", "1", "1"]);
    assert_eq!(pairs("deepseek-v3", "1111"), ["11", "1", "1"]);
    // The space goes with the number in GPT-2 only.
    assert_eq!(pairs("gpt-2", "a 1"), ["a", " 1"]);
    assert_eq!(pairs("smollm", "a 1"), ["a", " ", "1"]);
    assert_eq!(pairs("llama-bpe", "a 1"), ["a", " ", "1"]);
    // A sign in front of a word.
    assert_eq!(pairs("gpt-2", ".ab"), [".", "ab"]);
    assert_eq!(pairs("llama-bpe", ".a"), [".a"]);
    assert_eq!(pairs("tekken", ".a"), [".a"]);
    // Contractions: only in lower case in GPT-2.
    assert_eq!(pairs("gpt-2", "a'S"), ["a", "'", "S"]);
    assert_eq!(pairs("llama-bpe", "a'S"), ["a", "'S"]);
    // Line ends.
    assert_eq!(pairs("deepseek-coder", "a\n\n"), ["a", "\n", "\n"]);
    assert_eq!(pairs("qwen2", "a\n\n"), ["a", "\n\n"]);
    assert_eq!(pairs("qwen2", ".\n\na"), [".\n", "\n", "a"]);
}

#[test]
fn every_known_pre_tokenizer_compiles_and_loses_nothing() {
    let message = refusal(|data| data.pre = Some("?".into()));
    let (_, names) = message.split_once("known: ").unwrap();
    let names: Vec<&str> = names.trim_end_matches(')').split(", ").collect();
    assert!(names.len() > 40);
    let text = "Hi 12345 it's  IT'S\r\n\n x=[1];é 日本語 한국어 ＡＢ，🙂\u{301} \t end  ";
    for name in names {
        let data = GgufTokenizerData {
            pre: Some(name.into()),
            ..llama3_data()
        };
        let model = TextModel::from_gguf(&data).unwrap_or_else(|error| panic!("{name}: {error}"));
        let ids = model.tokenizer.encode(text, false).unwrap();
        assert_eq!(model.tokenizer.decode(&ids, false), text, "{name}");
    }
}
