//! Streamed text equals the whole decode, and never holds half a character.

use burn_paged_text::{StreamDecoder, TextModel, Tokenizer};

use crate::common::{Random, TURN, llama3};
use crate::sentencepiece;

/// What each token adds, and what the end adds.
fn steps(tokenizer: &Tokenizer, tokens: &[u32]) -> (Vec<String>, String) {
    let mut stream = StreamDecoder::new(tokenizer, true);
    let pieces = tokens.iter().map(|&id| stream.push(id)).collect();
    (pieces, stream.finish())
}

/// The token of a byte in the vocabulary of [`llama3`] or [`sentencepiece::model`].
fn byte_token(model: &TextModel, byte: u8) -> u32 {
    let tokenizer = &model.tokenizer;
    let found = tokenizer.id(&format!("<0x{byte:02X}>"));
    found.unwrap_or_else(|| {
        let is_byte = |&id: &u32| tokenizer.token_bytes(id) == Some(&[byte]);
        (0..tokenizer.vocab_size() as u32).find(is_byte).unwrap()
    })
}

#[test]
fn a_character_over_four_tokens_comes_at_once() {
    for model in [llama3(), sentencepiece::model()] {
        let tokens = [0xF0, 0x9F, 0x99, 0x82].map(|byte| byte_token(&model, byte));
        let (pieces, rest) = steps(&model.tokenizer, &tokens);
        assert_eq!(pieces, ["", "", "", "🙂"]);
        assert_eq!(rest, "");
    }
}

#[test]
fn an_end_inside_a_character_is_one_replacement() {
    for model in [llama3(), sentencepiece::model()] {
        let tokens = [0xF0, 0x9F, 0x99].map(|byte| byte_token(&model, byte));
        let (pieces, rest) = steps(&model.tokenizer, &tokens);
        assert_eq!(pieces.concat(), "");
        assert_eq!(rest, "\u{FFFD}");
        assert_eq!(model.tokenizer.decode(&tokens, true), rest);
    }
}

#[test]
fn a_byte_that_is_never_text_does_not_hold_the_stream() {
    for model in [llama3(), sentencepiece::model()] {
        let tokens = [byte_token(&model, 0xFF), model.tokenizer.id("a").unwrap()];
        assert_eq!(steps(&model.tokenizer, &tokens).0, ["\u{FFFD}", "a"]);
        // A good start, then something else.
        let tokens = [
            byte_token(&model, 0xE2),
            byte_token(&model, 0x82),
            model.tokenizer.id("a").unwrap(),
        ];
        assert_eq!(steps(&model.tokenizer, &tokens).0, ["", "", "\u{FFFD}a"]);
    }
}

#[test]
fn words_keep_the_spaces_between_them() {
    let tokenizer = sentencepiece::model().tokenizer;
    let tokens = tokenizer.encode_plain("good day").unwrap();
    assert_eq!(steps(&tokenizer, &tokens).0, ["good", " day"]);
}

#[test]
fn a_control_token_inside_a_character_changes_nothing() {
    let model = llama3();
    let turn = model.tokenizer.id(TURN).unwrap();
    let [first, second] = [0xC3, 0xA9].map(|byte| byte_token(&model, byte));
    assert_eq!(
        steps(&model.tokenizer, &[first, turn, second]).0,
        ["", "", "é"]
    );
}

#[test]
fn joined_pieces_are_the_whole_text_for_random_tokens() {
    for model in [llama3(), sentencepiece::model()] {
        let mut random = Random(11);
        for _ in 0..1000 {
            let count = random.below(24);
            // One past the vocabulary, too.
            let id = |random: &mut Random| random.below(model.tokenizer.vocab_size() + 1) as u32;
            let tokens: Vec<u32> = (0..count).map(|_| id(&mut random)).collect();
            for skip_special in [false, true] {
                let mut stream = StreamDecoder::new(&model.tokenizer, skip_special);
                let mut joined = String::new();
                for &id in &tokens {
                    joined += &stream.push(id);
                }
                joined += &stream.finish();
                assert_eq!(
                    joined,
                    model.tokenizer.decode(&tokens, skip_special),
                    "{tokens:?}"
                );
            }
        }
    }
}
