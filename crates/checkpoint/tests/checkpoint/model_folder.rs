//! What counts as a model, which names were used, and what the errors say.

use burn_paged_checkpoint::{Checkpoint, CheckpointError, FloatKind};
use serde_json::json;

use crate::write_gguf::GgufFile;
use crate::write_safetensors::*;
use crate::{assert_names, refusal};

#[test]
fn configuration_files_are_read_and_their_faults_named() {
    let folder = tempfile::tempdir().unwrap();
    write_single(folder.path(), &[tensor("w", &[1], &[1.0])]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.config()["hidden_size"], 6);
    assert_eq!(checkpoint.path(), folder.path());
    assert!(checkpoint.generation_config().is_none());
    assert!(checkpoint.gguf_metadata().is_none());

    let generation = folder.path().join("generation_config.json");
    std::fs::write(&generation, json!({"eos_token_id": [1, 2]}).to_string()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(
        checkpoint.generation_config().unwrap()["eos_token_id"],
        json!([1, 2])
    );

    std::fs::write(&generation, "{\"eos").unwrap();
    assert_names(
        &refusal(folder.path()),
        &["generation_config.json", "line 1"],
    );
    std::fs::remove_file(&generation).unwrap();
    let config = folder.path().join("config.json");
    std::fs::write(&config, "[1]").unwrap();
    assert_names(&refusal(folder.path()), &["config.json", "object"]);
    std::fs::remove_file(&config).unwrap();
    assert_names(&refusal(folder.path()), &["cannot read", "config.json"]);
}

#[test]
fn a_folder_with_one_gguf_file_is_that_file() {
    let folder = tempfile::tempdir().unwrap();
    assert_names(
        &refusal(folder.path()),
        &["is not a model", "model.safetensors", ".gguf"],
    );
    let file = GgufFile::model("llama", 2, 1, 8).tensor("output_norm.weight", &[8], &[0.5; 8]);
    std::fs::write(folder.path().join("a.GGUF"), file.bytes()).unwrap();
    std::fs::write(folder.path().join("config.json"), "not read").unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.config()["num_attention_heads"], 2);
    assert_eq!(
        checkpoint.gguf_metadata().unwrap().path(),
        folder.path().join("a.GGUF")
    );

    std::fs::write(folder.path().join("b.gguf"), file.bytes()).unwrap();
    assert_names(&refusal(folder.path()), &["2 GGUF files", "a.GGUF, b.gguf"]);
    let named = Checkpoint::open(folder.path().join("b.gguf")).unwrap();
    assert_eq!(named.num_tensors(), 1);

    write_single(folder.path(), &[tensor("w", &[1], &[1.0])]);
    assert!(Checkpoint::open(folder.path()).unwrap().contains("w"));
}

#[test]
fn paths_that_are_no_model_say_what_was_expected() {
    let folder = tempfile::tempdir().unwrap();
    let absent = Checkpoint::open(folder.path().join("absent")).unwrap_err();
    assert!(matches!(absent, CheckpointError::Io { .. }));
    write_single(folder.path(), &[tensor("w", &[1], &[1.0])]);
    let message = refusal(&folder.path().join("model.safetensors"));
    assert_names(
        &message,
        &["model.safetensors is not a model", "folder", "GGUF"],
    );
    std::fs::write(folder.path().join("empty.gguf"), []).unwrap();
    assert_names(
        &refusal(&folder.path().join("empty.gguf")),
        &["empty.gguf", "GGUF"],
    );
}

#[test]
fn tensors_that_nobody_used_are_listed_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let names = [
        "c",
        "a",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "b",
    ];
    let tensors: Vec<_> = names
        .iter()
        .map(|name| tensor(name, &[2], &[1.0, 2.0]))
        .collect();
    write_single(folder.path(), &tensors);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.unused(), names);
    checkpoint.read("a", FloatKind::F16).unwrap();
    checkpoint.mark_used(names[2]).unwrap();
    checkpoint.info("b").unwrap();
    assert_eq!(checkpoint.unused(), ["c", "b"]);
    checkpoint.read_raw("c").unwrap();
    assert_eq!(checkpoint.unused(), ["b"]);
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    let folder = tempfile::tempdir().unwrap();
    write_single(folder.path(), &[tensor("w", &[2, 3], &[0.0; 6])]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(checkpoint.check_shape("w", &[2, 3]).is_ok());
    let error = checkpoint
        .check_shape("w", &[3, 2])
        .unwrap_err()
        .to_string();
    assert_eq!(error, "tensor w has shape [2, 3], expected [3, 2]");
    for error in [
        checkpoint
            .read("lm_head.weight", FloatKind::F32)
            .unwrap_err(),
        checkpoint
            .read_stacked(&["w", "lm_head.weight"], FloatKind::F32)
            .unwrap_err(),
        checkpoint.read_raw("lm_head.weight").unwrap_err(),
        checkpoint.mark_used("lm_head.weight").unwrap_err(),
        checkpoint.check_shape("lm_head.weight", &[1]).unwrap_err(),
    ] {
        let folder = folder.path().to_str().unwrap();
        assert_names(
            &error.to_string(),
            &["tensor lm_head.weight is missing in", folder],
        );
    }
}
