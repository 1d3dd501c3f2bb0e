//! What is refused: exit code 2, nothing on standard output, one line on standard error that names the fault.

use std::fs;
use std::path::Path;

use crate::run::{Run, chat, model, run};

fn assert_refused(run: &Run, words: &[&str]) {
    assert_eq!(run.code, Some(2), "{run:?}");
    assert_eq!(run.stdout, "", "{run:?}");
    assert!(run.stderr.starts_with("chat: "), "{run:?}");
    assert_eq!(run.stderr.matches('\n').count(), 1, "{run:?}");
    for word in words {
        assert!(run.stderr.contains(word), "{word:?} is not in {run:?}");
    }
}

fn refused_model(path: &Path, words: &[&str]) {
    assert_refused(
        &run(&["--model", path.to_str().unwrap(), "--prompt", "hi"]),
        words,
    );
}

#[test]
fn wrong_flags() {
    assert_refused(&run(&["--device", "tpu"]), &["tpu", "--device", "flex|cpu"]);
    assert_refused(&run(&["--temperature", "NaN"]), &["--temperature", "NaN"]);
    assert_refused(
        &run(&["--max-tokens", "0"]),
        &["--max-tokens", "at least 1"],
    );
    // Such a block was once allocated, which ended the process.
    assert_refused(
        &run(&["--block-size", "100000000"]),
        &["--block-size", "8192"],
    );
    assert_refused(&run(&["--prompt", ""]), &["--prompt", "empty"]);
    assert_refused(&run(&["--dtype", "int8"]), &["--dtype", "int8"]);
    assert_refused(&run(&["--top-p", "0.5"]), &["--top-p", "--temperature"]);
    assert_refused(&run(&["--raw"]), &["--prompt"]);
    assert_refused(&run(&["--prompts", "hi"]), &["--prompts"]);
    assert_refused(&run(&["hi"]), &["hi"]);
}

#[test]
fn help_and_version_are_no_faults() {
    let help = run(&["--help"]);
    assert_eq!(help.code, Some(0));
    assert!(help.stdout.contains("--block-size"), "{help:?}");
    assert_eq!(run(&["--version"]).code, Some(0));
}

#[test]
fn a_model_that_is_not_there() {
    refused_model(Path::new("no/such/model.gguf"), &["no/such/model.gguf"]);
}

#[test]
fn no_model_at_all_names_the_command_that_fetches_one() {
    let empty = tempfile::tempdir().unwrap();
    let output = chat(&["--prompt", "hi"])
        .env("XDG_CACHE_HOME", empty.path())
        .output()
        .unwrap();
    assert_refused(&output.into(), &["cargo xtask model"]);
}

#[test]
fn a_file_that_is_no_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("notes.gguf");
    fs::write(&file, "just text").unwrap();
    refused_model(&file, &["notes.gguf"]);
    refused_model(folder.path(), &[folder.path().to_str().unwrap()]);
}

#[test]
fn a_truncated_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("half.gguf");
    let whole = fs::read(model()).unwrap();
    for length in [4, 1000, whole.len() / 2, whole.len() - 1] {
        fs::write(&file, &whole[..length]).unwrap();
        refused_model(&file, &["half.gguf"]);
    }
}

#[test]
fn an_architecture_that_is_not_supported() {
    let mut bytes = fs::read(model()).unwrap();
    // The metadata stands at the beginning; the names of its keys begin with the architecture, too.
    for at in 0..100_000 {
        if bytes[at..].starts_with(b"llama") {
            bytes[at..at + 5].copy_from_slice(b"mamba");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.gguf");
    fs::write(&file, &bytes).unwrap();
    refused_model(&file, &["other.gguf", "mamba", "LlamaForCausalLM"]);
}

#[test]
fn a_context_beyond_the_model() {
    model();
    let run = run(&["--prompt", "hi", "--context", "100000"]);
    assert_refused(&run, &["--context 100000", "8192"]);
}

#[test]
fn a_prompt_longer_than_the_context() {
    model();
    let run = run(&[
        "--raw",
        "--prompt",
        "one two three four five six seven eight",
        "--context",
        "6",
    ]);
    assert_refused(&run, &["prompt", "6"]);
}

#[cfg(not(feature = "rocm"))]
#[test]
fn a_device_that_is_not_compiled_in() {
    let run = run(&["--device", "rocm:1", "--prompt", "hi"]);
    model();
    assert_refused(&run, &["rocm:1", "--features rocm"]);
}
