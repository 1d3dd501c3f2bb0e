//! End tokens, stop tokens, stop strings, lengths, and the text around them.

use burn_paged_engine::testing::{FakeModel, PieceDetokenizer};
use burn_paged_engine::{Completion, Engine, FinishReason, Request, StopConditions, TokenEvent};

use crate::common::*;

const NUM_PROMPT: usize = 5;
const END: u32 = 30;
const OTHER_END: u32 = 31;

/// An engine whose model answers with `script`; token `i` has the `i`-th piece as its text.
fn scripted<P: Into<Vec<u8>>>(script: &[u32], pieces: impl IntoIterator<Item = P>) -> Engine {
    let model = FakeModel::scripted(VOCAB, &device(), NUM_PROMPT, script.to_vec());
    engine_with(model, config(32))
        .with_detokenizer(PieceDetokenizer::new(pieces))
        .with_end_tokens([END, OTHER_END])
}

fn request(change: impl FnOnce(&mut StopConditions)) -> Request {
    let mut stop = StopConditions {
        max_tokens: Some(8),
        ..Default::default()
    };
    change(&mut stop);
    Request::new(prompt(1, NUM_PROMPT)).with_stop(stop)
}

/// Runs a script of one token per piece, then an end token, against stop strings.
fn with_stop_strings(pieces: &[&str], stops: &[&str]) -> (String, FinishReason, Vec<TokenEvent>) {
    let mut script: Vec<u32> = (0..pieces.len() as u32).collect();
    script.push(END);
    let mut engine = scripted(&script, pieces.iter().copied());
    let stops = stops.iter().map(|stop| stop.to_string()).collect();
    let id = engine
        .add_request(request(|stop| stop.stop_strings = stops))
        .unwrap();
    let mut events = Vec::new();
    while engine.has_work() {
        events.extend(engine.step());
    }
    let mut completion = Completion::new(id);
    events
        .iter()
        .for_each(|event| completion.push(event.clone()));
    assert_idle(&engine);
    (completion.text, completion.finish.unwrap(), events)
}

#[track_caller]
fn assert_text(pieces: &[&str], stops: &[&str], text: &str, stop: Option<&str>) {
    let (found, finish, _) = with_stop_strings(pieces, stops);
    let expected = match stop {
        Some(stop) => FinishReason::StopString(stop.to_owned()),
        None => FinishReason::StopToken(END),
    };
    assert_eq!((found.as_str(), &finish), (text, &expected));
    assert_eq!(finish.as_str(), "stop");
}

#[test]
fn stop_strings_across_tokens() {
    assert_text(&["LM", "N", "OP", "Q"], &["LMNOPQ"], "", Some("LMNOPQ"));
    assert_text(&["LM", "N", "OX"], &["LMNOPQ"], "LMNOX", None);
    assert_text(
        &["the l", "ate", " train"],
        &["ate tr"],
        "the l",
        Some("ate tr"),
    );
    assert_text(&["red green blue"], &["green"], "red ", Some("green"));
    assert_text(&["a", "b", "c", "d"], &["cd", "bcd"], "a", Some("bcd"));
    assert_text(&["a", "b"], &[], "ab", None);
}

#[test]
fn text_is_held_back_only_while_it_may_stop() {
    let (_, _, events) = with_stop_strings(&["LM", "N", "OX", "L"], &["LMNOPQ"]);
    let texts: Vec<&str> = events.iter().map(|event| event.text.as_str()).collect();
    assert_eq!(texts, ["", "", "LMNOX", "", "L"]);
    let tokens: Vec<Option<u32>> = events.iter().map(|event| event.token).collect();
    assert_eq!(tokens, [Some(0), Some(1), Some(2), Some(3), None]);
}

#[test]
fn a_stop_string_in_the_prompt_has_no_effect() {
    // The prompt is token 0 five times, whose text is the stop string; the answer is tokens 1 and 2.
    let mut engine = scripted(&[1, 2, END], ["stop", "st", "art"]);
    let mut request = request(|stop| stop.stop_strings = vec!["stop".into()]);
    request.prompt = vec![0; NUM_PROMPT];
    let completion = answer(&mut engine, request);
    assert_eq!(completion.text, "start");
    assert_eq!(completion.finish, Some(FinishReason::StopToken(END)));
}

#[test]
fn every_end_token_counts_and_none_is_output() {
    for end in [END, OTHER_END] {
        let mut engine = scripted(&[5, 6, end, 7], ["."; VOCAB]);
        let completion = answer(&mut engine, request(|_| ()));
        assert_eq!(completion.token_ids, [5, 6]);
        assert_eq!(
            completion.text, "..",
            "the end token has a text here, which must not appear"
        );
        assert_eq!(completion.finish, Some(FinishReason::StopToken(end)));
        assert_eq!(completion.usage.generated_tokens, 2);

        let mut engine = scripted(&[5, 6, end, 7], ["."; VOCAB]);
        let completion = answer(&mut engine, request(|stop| stop.ignore_eos = true));
        assert_eq!(completion.token_ids, [5, 6, end, 7, 7, 7, 7, 7]);
        assert_eq!(completion.finish, Some(FinishReason::Length));
    }
}

#[test]
fn stop_tokens_of_the_request_count_also_without_end_tokens() {
    for ignore_eos in [false, true] {
        let mut engine = scripted(&[5, 6, 9, 7], ["."; VOCAB]);
        let completion = answer(
            &mut engine,
            request(|stop| (stop.stop_token_ids, stop.ignore_eos) = (vec![9], ignore_eos)),
        );
        assert_eq!(completion.token_ids, [5, 6]);
        assert_eq!(completion.finish, Some(FinishReason::StopToken(9)));
    }
}

#[test]
fn an_end_token_at_once_gives_an_empty_answer() {
    let mut engine = scripted(&[END], ["."]);
    let completion = answer(&mut engine, request(|_| ()));
    assert_eq!(
        (completion.token_ids.len(), completion.text.as_str()),
        (0, "")
    );
    assert_eq!(completion.finish, Some(FinishReason::StopToken(END)));
    assert_idle(&engine);
}

#[test]
fn max_tokens_counts_and_the_end_token_after_it_is_never_drawn() {
    let mut engine = scripted(&[5, 6, END], ["."; VOCAB]);
    let completion = answer(&mut engine, request(|stop| stop.max_tokens = Some(2)));
    assert_eq!(completion.token_ids, [5, 6]);
    assert_eq!(completion.finish, Some(FinishReason::Length));
    assert_eq!(completion.finish.unwrap().as_str(), "length");
}

#[test]
fn min_tokens_bans_end_tokens_and_stop_strings() {
    // Where the model wants the end, the ban leaves all other tokens at 0: the lowest id wins.
    let mut engine = scripted(&[END, 5, END], ["x"; VOCAB]);
    let min = |stop: &mut StopConditions| {
        stop.min_tokens = 2;
        stop.stop_strings = vec!["x".into()];
    };
    let completion = answer(&mut engine, request(min));
    assert_eq!(
        (completion.token_ids.as_slice(), completion.text.as_str()),
        (&[0, 5][..], "xx")
    );
    assert_eq!(completion.finish, Some(FinishReason::StopToken(END)));
}

#[test]
fn half_a_character_is_never_sent() {
    let bytes = [vec![0xF0_u8], vec![0x9F], vec![0x99], vec![0x82]];
    let texts = |max_tokens: usize| {
        let mut engine = scripted(&[0, 1, 2, 3, END], bytes.clone());
        engine
            .add_request(request(|stop| stop.max_tokens = Some(max_tokens)))
            .unwrap();
        let mut events = Vec::new();
        while engine.has_work() {
            events.extend(engine.step());
        }
        let finish = events.last().unwrap().finish.clone().unwrap();
        (
            events
                .into_iter()
                .map(|event| event.text)
                .collect::<Vec<_>>(),
            finish,
        )
    };
    assert_eq!(texts(8).0, ["", "", "", "\u{1F642}", ""]);
    let (cut, finish) = texts(3);
    assert_eq!(
        (cut.concat(), finish),
        ("\u{FFFD}".to_owned(), FinishReason::Length)
    );
}

#[test]
fn a_bad_byte_does_not_hold_the_stream_back() {
    let mut engine = scripted(&[0, 1, END], [vec![0xFF_u8], b"a".to_vec()]);
    let completion = answer(&mut engine, request(|_| ()));
    assert_eq!(completion.text, "\u{FFFD}a");
}

#[test]
fn a_stop_string_completed_by_the_last_token_wins_over_the_length() {
    let mut engine = scripted(&[0, 1], ["EN", "D"]);
    let completion = answer(
        &mut engine,
        request(|stop| {
            stop.max_tokens = Some(2);
            stop.stop_strings = vec!["END".into()];
        }),
    );
    assert_eq!(completion.text, "");
    assert_eq!(
        completion.finish,
        Some(FinishReason::StopString("END".into()))
    );
}

#[test]
fn without_a_detokenizer_there_are_tokens_and_no_text() {
    let model = FakeModel::scripted(VOCAB, &device(), NUM_PROMPT, vec![5, 6, END]);
    let mut engine = engine_with(model, config(32)).with_end_tokens([END]);
    let completion = answer(&mut engine, request(|_| ()));
    assert_eq!(
        (completion.token_ids.as_slice(), completion.text.as_str()),
        (&[5, 6][..], "")
    );
}
