//! Safetensors files: conversion, sharding, and headers that lie.

use burn_paged_checkpoint::{Checkpoint, CheckpointError, FloatData, FloatKind, HostTensor};
use half::{bf16, f16};
use serde_json::json;

use crate::write_safetensors::*;
use crate::{assert_names, refusal, varied};

fn f16_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| f16::from_f32(value).to_le_bytes())
        .collect()
}

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
        .collect()
}

#[test]
fn stored_and_wanted_floats_convert_in_all_nine_ways() {
    let folder = tempfile::tempdir().unwrap();
    let values = varied(15, 3);
    write_single(
        folder.path(),
        &[
            tensor("f32", &[5, 3], &values),
            stored("f16", "F16", &[5, 3], f16_bytes(&values)),
            stored("bf16", "BF16", &[5, 3], bf16_bytes(&values)),
        ],
    );
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for name in ["f32", "f16", "bf16"] {
        let exact: Vec<f32> = match name {
            "f16" => values.iter().map(|&v| f16::from_f32(v).to_f32()).collect(),
            "bf16" => values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect(),
            _ => values.clone(),
        };
        let read = |kind| checkpoint.read(name, kind).unwrap();
        let shape = vec![5, 3];
        let as_f16 = FloatData::F16(exact.iter().map(|&v| f16::from_f32(v)).collect());
        assert_eq!(
            read(FloatKind::F16),
            HostTensor {
                shape: shape.clone(),
                data: as_f16
            }
        );
        let as_bf16 = FloatData::BF16(exact.iter().map(|&v| bf16::from_f32(v)).collect());
        assert_eq!(
            read(FloatKind::BF16),
            HostTensor {
                shape: shape.clone(),
                data: as_bf16
            }
        );
        assert_eq!(
            read(FloatKind::F32),
            HostTensor {
                shape,
                data: FloatData::F32(exact)
            }
        );
    }
}

#[test]
fn values_too_large_for_f16_are_counted_and_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_single(
        folder.path(),
        &[stored(
            "w",
            "BF16",
            &[4],
            bf16_bytes(&[1e5, 1.0, -2e5, f32::INFINITY]),
        )],
    );
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = checkpoint.read("w", FloatKind::F16).unwrap_err();
    let CheckpointError::OutOfRange {
        name,
        dtype: FloatKind::F16,
        count: 2,
        ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(name, "w");
    assert_names(
        &error.to_string(),
        &["2 values of tensor w do not fit in f16", "1.99", "bf16"],
    );
    assert_eq!(checkpoint.unused(), ["w"]);
    assert!(checkpoint.read("w", FloatKind::BF16).is_ok());
    assert!(checkpoint.read("w", FloatKind::F32).is_ok());
}

#[test]
fn other_types_are_refused_by_name_when_read() {
    let folder = tempfile::tempdir().unwrap();
    write_single(
        folder.path(),
        &[
            stored("double", "F64", &[2], vec![1; 16]),
            stored("position_ids", "I64", &[1], vec![2; 8]),
            tensor("w", &[1], &[0.25]),
        ],
    );
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for (name, dtype) in [("double", "F64"), ("position_ids", "I64")] {
        let error = checkpoint
            .read(name, FloatKind::F32)
            .unwrap_err()
            .to_string();
        assert_names(&error, &[name, dtype, "model.safetensors"]);
    }
    assert_eq!(&*checkpoint.read_raw("position_ids").unwrap().bytes, [2; 8]);
    assert_eq!(crate::read_f32(&checkpoint, "w"), [0.25]);
}

fn tiny() -> Vec<Tensor> {
    vec![
        tensor("model.embed_tokens.weight", &[7, 6], &varied(42, 1)),
        tensor(
            "model.layers.0.self_attn.q_proj.weight",
            &[6, 6],
            &varied(36, 2),
        ),
        tensor(
            "model.layers.0.self_attn.k_proj.weight",
            &[2, 6],
            &varied(12, 3),
        ),
        tensor("model.norm.weight", &[6], &varied(6, 4)),
    ]
}

#[test]
fn shards_hold_the_same_as_a_single_file() {
    let (single, sharded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let tensors = tiny();
    write_single(single.path(), &tensors);
    write_shards(sharded.path(), &[&tensors[..1], &tensors[1..]]);
    let single = Checkpoint::open(single.path()).unwrap();
    let sharded = Checkpoint::open(sharded.path()).unwrap();
    assert_eq!(
        single.names().collect::<Vec<_>>(),
        sharded.names().collect::<Vec<_>>()
    );
    assert_eq!(
        (single.num_tensors(), single.total_bytes()),
        (4, 4 * (42 + 36 + 12 + 6))
    );
    assert_eq!(
        (sharded.num_tensors(), sharded.total_bytes()),
        (4, single.total_bytes())
    );
    for name in single.names() {
        let [a, b] = [&single, &sharded].map(|c| c.read(name, FloatKind::F32).unwrap());
        assert_eq!(a, b);
    }
}

#[test]
fn a_missing_shard_is_named_by_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = tiny();
    write_shards(folder.path(), &[&tensors[..1], &tensors[1..]]);
    std::fs::remove_file(folder.path().join(shard_name(1, 2))).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::MissingShard { .. }));
    assert_names(
        &error.to_string(),
        &["model-00002-of-00002.safetensors is missing", "index.json"],
    );
}

#[test]
fn a_name_that_its_shard_does_not_hold_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = tiny();
    write_shards(folder.path(), &[&tensors[..1], &tensors[1..]]);
    std::fs::write(
        folder.path().join(shard_name(1, 2)),
        file_of(&tensors[1..3]),
    )
    .unwrap();
    assert_names(
        &refusal(folder.path()),
        &["model.norm.weight", "00002-of-00002.safetensors"],
    );
}

#[test]
fn a_tensor_in_two_shards_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = tiny();
    write_shards(folder.path(), &[&tensors[..2], &tensors[1..]]);
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(
        matches!(error, CheckpointError::DuplicateTensor { .. }),
        "{error}"
    );
    assert_names(
        &error.to_string(),
        &["q_proj", "00001-of-00002", "00002-of-00002"],
    );
}

#[test]
fn an_index_that_is_no_index_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path());
    for index in [
        json!({}),
        json!({"weight_map": {}}),
        json!({"weight_map": [1]}),
        json!({"weight_map": {"a": 3}}),
        json!({"weight_map": {"a": "../model.safetensors"}}),
        json!({"weight_map": {"a": "/model.safetensors"}}),
    ] {
        write_index(folder.path(), &index);
        let message = refusal(folder.path());
        assert_names(&message, &["model.safetensors.index.json", "weight_map"]);
    }
}

/// Opens a folder whose only weights are `file`, and returns the refusal.
fn refused_file(file: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path());
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    refusal(folder.path())
}

#[test]
fn headers_that_lie_are_refused() {
    let entry = |shape: &str, start: u64, end: u64| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}}}"#)
    };
    let half = 1u64 << 63;
    // Two tensors that together reach to the end of the address space.
    let wrapping = format!(
        r#"{{"a":{{"dtype":"U8","shape":[{half}],"data_offsets":[0,{half}]}},
            "b":{{"dtype":"U8","shape":[{}],"data_offsets":[{half},{}]}}}}"#,
        half - 1,
        u64::MAX
    );
    let cases = [
        entry("[2,3]", 0, 16),
        entry("[2,2]", 0, 20),
        entry("[2,2]", 4, 20),
        entry("[4294967296,4294967296]", 0, 16),
        entry("[0,4294967296,4294967296]", 0, 0),
        entry("[2305843009213693952]", 0, 1 << 63),
        entry("[-1]", 0, 16),
        wrapping,
        "[]".to_owned(),
        "{".to_owned(),
        "[".repeat(100_000),
    ];
    for header in cases {
        let message = refused_file(&with_header(&header, &[0; 16]));
        assert_names(&message, &["model.safetensors"]);
    }
    let mut longer = with_header(&entry("[2,2]", 0, 16), &[0; 16]);
    longer.push(0);
    assert_names(
        &refused_file(&longer),
        &["not a valid safetensors file", "not fully covered"],
    );
    assert_names(&refused_file(&[]), &["of 0 bytes"]);
    assert_names(&refused_file(&[0xff; 64]), &["of 64 bytes", "header"]);
}

#[test]
fn tensors_stack_along_their_rows() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = tiny();
    tensors.push(tensor("narrow", &[2, 3], &varied(6, 5)));
    write_single(folder.path(), &tensors);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (q, k) = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    );
    let packed = checkpoint.read_stacked(&[q, k], FloatKind::F32).unwrap();
    let expected = [varied(36, 2), varied(12, 3)].concat();
    assert_eq!(
        packed,
        HostTensor {
            shape: vec![8, 6],
            data: FloatData::F32(expected)
        }
    );
    assert_eq!(
        checkpoint.unused(),
        ["model.embed_tokens.weight", "model.norm.weight", "narrow"]
    );
    let error = checkpoint
        .read_stacked(&[q, "model.norm.weight"], FloatKind::F32)
        .unwrap_err();
    assert_names(&error.to_string(), &["model.norm.weight", "[6, 6]", "[6]"]);
    let error = checkpoint
        .read_stacked(&[q, "narrow"], FloatKind::F32)
        .unwrap_err();
    assert_names(
        &error.to_string(),
        &["narrow has shape [2, 3], expected [2, 6]"],
    );
}
