//! Text by a real tokenizer of SentencePiece kind, where pieces carry the space before a word and bytes make characters.

use burn_paged_engine::testing::FakeModel;
use burn_paged_engine::{Engine, FinishReason, Request, StopConditions};
use burn_paged_text::{GgufTokenizerData, TextModel, TokenType};

use crate::common::*;

const PIECES: [(&str, TokenType); 10] = [
    ("<unk>", TokenType::Unknown),
    ("<s>", TokenType::Control),
    ("</s>", TokenType::Control),
    ("<|eot|>", TokenType::Control),
    ("▁Good", TokenType::Normal),
    ("▁day", TokenType::Normal),
    ("<0xF0>", TokenType::Byte),
    ("<0x9F>", TokenType::Byte),
    ("<0x99>", TokenType::Byte),
    ("<0x82>", TokenType::Byte),
];
const BOS: u32 = 1;
const EOS: u32 = 2;
const EOT: u32 = 3;
const GOOD: u32 = 4;
const DAY: u32 = 5;

/// An engine with the tokenizer and all end tokens of the model, and the answer to a prompt of two tokens.
fn engine_for(script: &[u32]) -> Engine {
    let data = GgufTokenizerData {
        model: "llama".to_owned(),
        tokens: PIECES.map(|(piece, _)| piece.to_owned()).to_vec(),
        token_types: PIECES.map(|(_, kind)| kind).to_vec(),
        scores: vec![0.0; PIECES.len()],
        bos_id: Some(BOS),
        eos_id: Some(EOS),
        eot_id: Some(EOT),
        unk_id: Some(0),
        ..Default::default()
    };
    let TextModel {
        tokenizer,
        stop_tokens,
        ..
    } = TextModel::from_gguf(&data).unwrap();
    let model = FakeModel::scripted(PIECES.len(), &device(), 2, script.to_vec());
    engine_with(model, config(16))
        .with_detokenizer(tokenizer)
        .with_end_tokens(stop_tokens.iter())
}

#[test]
fn words_keep_their_spaces_and_characters_come_whole() {
    let script = [GOOD, DAY, 6, 7, 8, 9, EOT];
    // Behind a control token an answer begins a text, behind a word it goes on with it.
    for (prompt, text) in [
        ([DAY, BOS], "Good day\u{1F642}"),
        ([BOS, DAY], " Good day\u{1F642}"),
    ] {
        let completion = answer(&mut engine_for(&script), Request::new(prompt));
        assert_eq!(completion.text, text);
        assert_eq!(completion.finish, Some(FinishReason::StopToken(EOT)));
        assert_eq!(completion.token_ids, script[..6]);
    }
}

#[test]
fn both_end_tokens_count_and_control_tokens_have_no_text() {
    for end in [EOS, EOT] {
        let completion = answer(&mut engine_for(&[GOOD, end, DAY]), Request::new([DAY, BOS]));
        assert_eq!(
            (completion.text.as_str(), completion.usage.generated_tokens),
            ("Good", 1)
        );
        let ignore = StopConditions {
            ignore_eos: true,
            max_tokens: Some(3),
            ..Default::default()
        };
        let request = Request::new([DAY, BOS]).with_stop(ignore);
        let completion = answer(&mut engine_for(&[GOOD, end, DAY]), request);
        assert_eq!(completion.text, "Good day");
        assert_eq!(completion.token_ids, [GOOD, end, DAY]);
    }
}

#[test]
fn a_stop_string_may_begin_in_one_piece_and_end_in_another() {
    let stop = StopConditions {
        stop_strings: vec!["od da".into()],
        ..Default::default()
    };
    let request = Request::new([DAY, BOS]).with_stop(stop);
    let completion = answer(&mut engine_for(&[GOOD, DAY, EOT]), request);
    assert_eq!(completion.text, "Go");
    assert_eq!(
        completion.finish,
        Some(FinishReason::StopString("od da".into()))
    );
}
