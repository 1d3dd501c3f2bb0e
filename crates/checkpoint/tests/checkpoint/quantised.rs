//! Every stored type against values from another implementation; `fixtures/make.py` writes them.

use burn_paged_checkpoint::{Checkpoint, CheckpointError, FloatData, FloatKind, SourceDType};
use half::{bf16, f16};

use crate::write_gguf::GgufFile;

macro_rules! fixture {
    ($name:literal) => {
        (
            include_bytes!(concat!("../fixtures/", $name, ".bin")).as_slice(),
            include_bytes!(concat!("../fixtures/", $name, ".f32")).as_slice(),
        )
    };
}

type Fixture = (&'static [u8], &'static [u8]);

/// Number and name of the type, elements per row, stored bytes and expected values.
fn fixtures() -> Vec<(u32, &'static str, usize, Fixture)> {
    vec![
        (2, "Q4_0", 32, fixture!("Q4_0")),
        (3, "Q4_1", 32, fixture!("Q4_1")),
        (6, "Q5_0", 32, fixture!("Q5_0")),
        (7, "Q5_1", 32, fixture!("Q5_1")),
        (8, "Q8_0", 32, fixture!("Q8_0")),
        (12, "Q4_K", 256, fixture!("Q4_K")),
        (13, "Q5_K", 256, fixture!("Q5_K")),
        (14, "Q6_K", 256, fixture!("Q6_K")),
        (30, "BF16", 32, fixture!("BF16")),
    ]
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}

/// A file with one tensor of each type.
fn file_of_all_types() -> GgufFile {
    fixtures()
        .into_iter()
        .fold(GgufFile::model("llama", 2, 1, 8), |file, fixture| {
            let (dtype, name, row, (stored, expected)) = fixture;
            let rows = expected.len() / 4 / row;
            file.stored(name, &[rows as u64, row as u64], dtype, stored.to_vec())
        })
}

#[test]
fn every_type_decodes_to_the_same_bits_as_elsewhere() {
    let (_folder, path) = file_of_all_types().write();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for (_, name, row, (stored, expected)) in fixtures() {
        let expected = floats(expected);
        let info = checkpoint.info(name).unwrap();
        assert_eq!(info.dtype.name(), name);
        assert_eq!(info.shape, [expected.len() / row, row]);
        assert_eq!(info.num_bytes, stored.len());
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(
            bits(&crate::read_f32(&checkpoint, name)),
            bits(&expected),
            "{name}"
        );
        assert_eq!(&*checkpoint.read_raw(name).unwrap().bytes, stored);
    }
}

#[test]
fn every_type_converts_to_16_bits_by_rounding_the_f32_value() {
    let (_folder, path) = file_of_all_types().write();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for (_, name, _, (_, expected)) in fixtures() {
        let expected = floats(expected);
        let read = |kind| checkpoint.read(name, kind).unwrap().data;
        let as_f16 = expected.iter().map(|&value| f16::from_f32(value)).collect();
        assert_eq!(read(FloatKind::F16), FloatData::F16(as_f16), "{name}");
        let as_bf16 = expected
            .iter()
            .map(|&value| bf16::from_f32(value))
            .collect();
        assert_eq!(read(FloatKind::BF16), FloatData::BF16(as_bf16), "{name}");
    }
}

#[test]
fn unknown_types_open_but_are_refused_by_name_when_read() {
    let (_folder, path) = GgufFile::model("llama", 2, 1, 8)
        .tensor("token_embd.weight", &[3, 8], &crate::varied(24, 1))
        .stored("blk.0.ffn_up.weight", &[1, 256], 10, vec![7; 84])
        .stored("strange.weight", &[5, 7], 99, vec![8; 11])
        .tensor("output_norm.weight", &[8], &crate::varied(8, 2))
        .write();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for (name, dtype) in [
        ("model.layers.0.mlp.up_proj.weight", "Q2_K"),
        ("strange.weight", "ggml type 99"),
    ] {
        let error = checkpoint.read(name, FloatKind::F32).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::UnsupportedDType { .. }),
            "{error}"
        );
        crate::assert_names(&error.to_string(), &[name, dtype, "tiny.gguf", "Q6_K"]);
        assert_eq!(
            checkpoint.info(name).unwrap().dtype,
            SourceDType::Other(dtype.to_owned())
        );
    }
    assert!(
        checkpoint
            .read_raw("strange.weight")
            .unwrap()
            .bytes
            .starts_with(&[8; 11])
    );
    assert_eq!(
        crate::read_f32(&checkpoint, "model.norm.weight"),
        crate::varied(8, 2)
    );
}
