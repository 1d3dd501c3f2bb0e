//! `--prompt` on the demo model: standard output is the answer, or the JSON object, and nothing else.

use serde_json::Value;

use crate::run::{answer, chat, model};

const QUESTION: &str = "What is the capital of France?";

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&answer(args)).unwrap()
}

#[test]
fn the_answer_alone_is_printed() {
    assert_eq!(
        answer(&["--prompt", QUESTION]),
        "The capital of France is Paris.\n"
    );
}

#[test]
fn json_has_text_tokens_usage_and_times() {
    let object = json(&["--prompt", QUESTION, "--json", "--max-tokens", "5"]);
    let token_ids = object["token_ids"].as_array().unwrap();
    assert_eq!(token_ids.len(), 5);
    assert!("The capital of France is Paris.".starts_with(object["text"].as_str().unwrap()));
    assert_eq!(object["finish_reason"], "length");
    assert_eq!(object["usage"]["completion_tokens"], 5);
    assert_eq!(object["usage"]["cached_tokens"], 0);
    assert!(object["usage"]["prompt_tokens"].as_u64().unwrap() > 7);
    assert!(object["time_to_first_token_s"].as_f64().unwrap() > 0.0);
    assert!(object["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(object["model"]["architecture"], "LlamaForCausalLM");
    assert_eq!(object["model"]["device"], "flex");
    assert_eq!(object["model"]["dtype"], "f32");
    assert_eq!(object["model"]["captured_steps"], false);
}

#[test]
fn the_block_size_changes_no_token() {
    let tokens =
        |size| json(&["--prompt", QUESTION, "--json", "--block-size", size])["token_ids"].clone();
    let expected = tokens("16");
    assert_eq!(tokens("1"), expected);
    assert_eq!(tokens("64"), expected);
}

#[test]
fn raw_continues_the_text_without_a_template() {
    let args = [
        "--prompt",
        "The capital of France is",
        "--max-tokens",
        "3",
        "--json",
    ];
    let raw = json(&[&args[..], &["--raw"]].concat());
    assert!(raw["text"].as_str().unwrap().contains("Paris"), "{raw}");
    let chat = json(&args);
    let num_tokens = |object: &Value| object["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(num_tokens(&raw) < num_tokens(&chat));
}

#[test]
fn the_system_message_is_part_of_the_prompt() {
    let args = ["--prompt", QUESTION, "--max-tokens", "1", "--json"];
    let with = json(
        &[
            &args[..],
            &[
                "--system",
                "You are a pirate and say so in every single sentence.",
            ],
        ]
        .concat(),
    );
    let without = json(&[&args[..], &["--system", "Hi"]].concat());
    assert!(with["usage"]["prompt_tokens"].as_u64() > without["usage"]["prompt_tokens"].as_u64());
}

#[test]
fn a_seed_repeats_a_random_answer() {
    let sampled = |seed: u64| {
        let seed = seed.to_string();
        let args = [
            "--prompt",
            "Write a poem.",
            "--max-tokens",
            "12",
            "--temperature",
            "1.5",
        ];
        answer(&[&args[..], &["--top-p", "0.95", "--seed", &seed]].concat())
    };
    let first = sampled(7);
    assert_eq!(sampled(7), first);
    assert!((8..12).any(|seed| sampled(seed) != first));
}

/// A reader that closes the pipe early, as `chat | head -c 1` does, is no failure.
#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    model();
    let mut child = chat(&["--prompt", "Count to one hundred.", "--max-tokens", "200"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}
