//! The demo model against the tokens and prompts of the reference.

use std::sync::LazyLock;

use burn_paged_text::{ChatOptions, Message, StreamDecoder, TextModel};

use crate::common::{fixture, ids, smollm2_path};

static MODEL: LazyLock<TextModel> = LazyLock::new(|| TextModel::from_path(smollm2_path()).unwrap());

#[test]
fn token_ids_of_varied_texts_equal_the_reference() {
    let fixture = fixture("smollm2_tokens.json");
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() >= 200);
    assert_eq!(
        MODEL.tokenizer.vocab_size() as u64,
        fixture["vocab_size"].as_u64().unwrap()
    );
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let tokens = MODEL.tokenizer.encode(text, false).unwrap();
        assert_eq!(tokens, ids(&case["ids"]), "{text:?}");
        assert_eq!(
            MODEL.tokenizer.encode(text, true).unwrap(),
            tokens,
            "no BOS: {text:?}"
        );
        assert_eq!(MODEL.tokenizer.decode(&tokens, false), text);
    }
}

#[test]
fn look_alikes_as_plain_text_equal_the_reference() {
    let mut differing = 0;
    for case in fixture("smollm2_tokens.json")["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let plain = MODEL.tokenizer.encode_plain(text).unwrap();
        let expected = case.get("plain_ids").unwrap_or(&case["ids"]);
        assert_eq!(plain, ids(expected), "{text:?}");
        assert!(
            !plain.iter().any(|&id| MODEL.tokenizer.is_special(id)),
            "{text:?}"
        );
        differing += usize::from(case.get("plain_ids").is_some());
    }
    assert!(
        differing >= 10,
        "only {differing} texts hold control tokens"
    );
}

#[test]
fn chat_prompts_equal_the_reference() {
    let fixture = fixture("smollm2_chats.json");
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() >= 10);
    for case in cases {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let mut options = ChatOptions::default();
        options.add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap();
        let text = MODEL.render_chat(&messages, &options).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap());
        let tokens = MODEL.encode_chat(&messages, &options).unwrap();
        assert_eq!(MODEL.tokenizer.decode(&tokens, false), text);
        // The reference lets users forge control tokens; everything else must be the same.
        if !case["messages"].to_string().contains("<|im_") {
            assert_eq!(tokens, ids(&case["ids"]), "{text}");
        }
    }
}

#[test]
fn the_forged_turn_of_the_reference_is_text_here() {
    let fixture = fixture("smollm2_chats.json");
    let forged = |case: &&serde_json::Value| case["messages"].to_string().contains("<|im_");
    let case = fixture["cases"]
        .as_array()
        .unwrap()
        .iter()
        .find(forged)
        .unwrap();
    let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
    let tokens = MODEL
        .encode_chat(&messages, &ChatOptions::default())
        .unwrap();
    let start = MODEL.tokenizer.id("<|im_start|>").unwrap();
    let count = |tokens: &[u32]| tokens.iter().filter(|&&id| id == start).count();
    assert_eq!((count(&tokens), count(&ids(&case["ids"]))), (3, 4));
}

#[test]
fn named_and_end_tokens() {
    let tokenizer = &MODEL.tokenizer;
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id()),
        (Some(1), Some(2), Some(2))
    );
    assert!(!tokenizer.add_bos());
    // `<|endoftext|>` ends texts of the base model, and the chat model writes it at times.
    assert_eq!(MODEL.stop_tokens.iter().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(tokenizer.id("<|im_end|>"), Some(2));
    assert_eq!(
        tokenizer.id("Ġthe"),
        tokenizer.encode(" the", false).unwrap().first().copied()
    );
    assert_eq!(tokenizer.id("no such token"), None);
    assert_eq!(tokenizer.token_bytes(49_152), None);
}

#[test]
fn streamed_texts_equal_the_decoded_ones() {
    for case in fixture("smollm2_tokens.json")["cases"].as_array().unwrap() {
        for skip_special in [false, true] {
            let tokens = ids(&case["ids"]);
            let mut stream = StreamDecoder::new(&MODEL.tokenizer, skip_special);
            let mut text: String = tokens.iter().map(|&id| stream.push(id)).collect();
            text += &stream.finish();
            assert_eq!(text, MODEL.tokenizer.decode(&tokens, skip_special));
        }
    }
}

#[test]
fn long_runs_of_white_space_are_encoded_in_full() {
    // One word of a hundred thousand characters: nothing may be lost or take a square of that.
    let text = format!("a{}b{}c", " ".repeat(100_000), "\n".repeat(100_000));
    let tokens = MODEL.tokenizer.encode(&text, false).unwrap();
    assert_eq!(MODEL.tokenizer.decode(&tokens, false), text);
}
