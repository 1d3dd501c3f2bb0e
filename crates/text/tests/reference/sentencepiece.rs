//! SentencePiece BPE with byte fallback, against the sentencepiece library.

use burn_paged_text::{GgufTokenizerData, StreamDecoder, TextModel, TokenType};
use serde_json::Value;

use crate::common::{fixture, ids};

fn data(fixture: &Value) -> GgufTokenizerData {
    let token_type = |number: &Value| match number.as_u64().unwrap() {
        1 => TokenType::Normal,
        2 => TokenType::Unknown,
        3 => TokenType::Control,
        6 => TokenType::Byte,
        other => panic!("token type {other}"),
    };
    let id = |name: &str| Some(fixture[name].as_u64().unwrap() as u32);
    GgufTokenizerData {
        model: "llama".into(),
        tokens: serde_json::from_value(fixture["tokens"].clone()).unwrap(),
        scores: serde_json::from_value(fixture["scores"].clone()).unwrap(),
        token_types: fixture["token_types"]
            .as_array()
            .unwrap()
            .iter()
            .map(token_type)
            .collect(),
        bos_id: id("bos_id"),
        eos_id: id("eos_id"),
        unk_id: id("unk_id"),
        ..GgufTokenizerData::default()
    }
}

pub(crate) fn model() -> TextModel {
    TextModel::from_gguf(&data(&fixture("sentencepiece.json"))).unwrap()
}

#[test]
fn ids_and_texts_equal_the_reference() {
    let fixture = fixture("sentencepiece.json");
    let tokenizer = TextModel::from_gguf(&data(&fixture)).unwrap().tokenizer;
    for case in fixture["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let tokens = tokenizer.encode_plain(text).unwrap();
        assert_eq!(tokens, ids(&case["ids"]), "{text:?}");
        assert_eq!(
            tokenizer.decode(&tokens, true),
            case["decoded"].as_str().unwrap(),
            "{text:?}"
        );
    }
}

#[test]
fn every_text_gets_one_bos_unless_the_file_says_no() {
    let data = data(&fixture("sentencepiece.json"));
    let tokenizer = TextModel::from_gguf(&data).unwrap().tokenizer;
    let with_bos = tokenizer.encode("the cat", true).unwrap();
    assert_eq!(with_bos[0], data.bos_id.unwrap());
    assert_eq!(with_bos[1..], tokenizer.encode("the cat", false).unwrap());
    let without = GgufTokenizerData {
        add_bos: Some(false),
        add_eos: Some(true),
        ..data
    };
    let tokenizer = TextModel::from_gguf(&without).unwrap().tokenizer;
    let tokens = tokenizer.encode("the cat", true).unwrap();
    assert_eq!(tokens[..tokens.len() - 1], with_bos[1..]);
    assert_eq!(tokens.last().copied(), without.eos_id);
}

#[test]
fn control_tokens_split_the_text_and_get_a_space_after() {
    let tokenizer = model().tokenizer;
    let the_cat = tokenizer.encode_plain("the cat").unwrap();
    let joined = tokenizer.encode("the cat</s>the cat", false).unwrap();
    assert_eq!(joined, [the_cat.clone(), vec![2], the_cat].concat());
    assert_eq!(tokenizer.decode(&joined, false), "the cat</s> the cat");
}

#[test]
fn no_space_is_added_where_the_file_says_so() {
    let data = GgufTokenizerData {
        add_space_prefix: Some(false),
        ..data(&fixture("sentencepiece.json"))
    };
    let tokenizer = TextModel::from_gguf(&data).unwrap().tokenizer;
    let tokens = tokenizer.encode_plain(" the cat").unwrap();
    assert_eq!(tokens, model().tokenizer.encode_plain("the cat").unwrap());
    assert_eq!(tokenizer.decode(&tokens, true), " the cat");
}

#[test]
fn a_text_that_goes_on_keeps_its_first_space() {
    let tokenizer = model().tokenizer;
    let tokens = tokenizer.encode_plain("good day").unwrap();
    let mut start = StreamDecoder::new(&tokenizer, true);
    let pieces: Vec<String> = tokens.iter().map(|&id| start.push(id)).collect();
    assert_eq!(pieces.concat(), "good day");
    let mut later = StreamDecoder::new(&tokenizer, true).continuing();
    let pieces: Vec<String> = tokens.iter().map(|&id| later.push(id)).collect();
    assert_eq!(pieces.concat(), " good day");
}
