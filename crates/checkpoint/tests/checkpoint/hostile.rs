//! Files that are cut short or damaged: an error or a readable model, never a panic, never memory
//! without bound.

use std::path::{Path, PathBuf};

use burn_paged_checkpoint::{Checkpoint, FloatKind};
use proptest::prelude::*;

use crate::tracking_allocator::peak_of;
use crate::write_gguf::{F16, GgufFile, Q8_0};
use crate::write_safetensors::{file_of, stored, tensor, write_config};
use crate::{read_f32, varied};

fn gguf_file() -> Vec<u8> {
    GgufFile::model("llama", 4, 2, 8)
        .strings("tokenizer.ggml.tokens", &["<s>", "a", "bc", ""])
        .array(
            "tokenizer.ggml.scores",
            6,
            4,
            crate::f32_bytes(&varied(4, 1)),
        )
        .tensor("token_embd.weight", &[4, 8], &varied(32, 2))
        .tensor("blk.0.attn_q.weight", &[16, 8], &varied(128, 3))
        .stored("blk.0.attn_k.weight", &[8, 8], F16, vec![0x35; 128])
        .stored("blk.0.ffn_up.weight", &[2, 32], Q8_0, vec![0x2a; 68])
        .tensor("output_norm.weight", &[8], &varied(8, 4))
        .bytes()
}

fn safetensors_file() -> Vec<u8> {
    file_of(&[
        tensor("model.embed_tokens.weight", &[4, 8], &varied(32, 2)),
        stored("model.norm.weight", "BF16", &[8], vec![0x3f; 16]),
        stored("ids", "I64", &[2], vec![1; 16]),
    ])
}

/// A folder in which one kind of file is replaced again and again.
struct Place {
    _folder: tempfile::TempDir,
    file: PathBuf,
    opened: PathBuf,
}

impl Place {
    fn gguf() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("damaged.gguf");
        Self {
            opened: file.clone(),
            file,
            _folder: folder,
        }
    }

    fn safetensors() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_config(folder.path());
        let file = folder.path().join("model.safetensors");
        Self {
            opened: folder.path().to_owned(),
            file,
            _folder: folder,
        }
    }

    fn open(&self, bytes: &[u8]) -> Option<Checkpoint> {
        std::fs::write(&self.file, bytes).unwrap();
        Checkpoint::open(&self.opened).ok()
    }
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    for (place, bytes) in [
        (Place::gguf(), gguf_file()),
        (Place::safetensors(), safetensors_file()),
    ] {
        let whole = place.open(&bytes).expect("the whole file is sound");
        assert_eq!(read_f32(&whole, "model.embed_tokens.weight"), varied(32, 2));
        drop(whole);
        for len in 0..bytes.len() {
            assert!(
                place.open(&bytes[..len]).is_none(),
                "accepted {len} of {} bytes",
                bytes.len()
            );
        }
    }
}

#[test]
fn an_index_or_configuration_cut_at_any_byte_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [tensor("a", &[2], &[1.0, 2.0])];
    crate::write_safetensors::write_shards(folder.path(), &[&tensors]);
    for name in ["model.safetensors.index.json", "config.json"] {
        let path = folder.path().join(name);
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(
                Checkpoint::open(folder.path()).is_err(),
                "accepted {len} bytes of {name}"
            );
        }
        std::fs::write(&path, &whole).unwrap();
        assert!(Checkpoint::open(folder.path()).is_ok());
    }
}

/// Reads all that can be read, in every way.
fn read_all(checkpoint: &Checkpoint) {
    for name in checkpoint.names() {
        for kind in [FloatKind::F32, FloatKind::F16, FloatKind::BF16] {
            if let Ok(tensor) = checkpoint.read(name, kind) {
                assert_eq!(tensor.data.len(), tensor.shape.iter().product::<usize>());
            }
        }
        drop(checkpoint.read_stacked(&[name, name], FloatKind::F32));
        drop(checkpoint.read_raw(name));
    }
}

/// Opens and reads a damaged file and checks the memory that it took.
fn survive(place: &Place, bytes: &[u8]) {
    let ((), peak) = peak_of(|| {
        if let Some(checkpoint) = place.open(bytes) {
            read_all(&checkpoint);
        }
    });
    // Metadata values take up to 32 bytes for 8 in the file, 4-bit numbers 8 times their size as
    // f32. Fixed part: paths, messages, maps, and the frames of the thread pool.
    let bound = 64 * bytes.len() + (256 << 10);
    assert!(
        peak <= bound,
        "{} bytes of file took {peak} bytes of memory",
        bytes.len()
    );
}

#[derive(Debug, Clone)]
enum Damage {
    Flip(usize, u8),
    Number(usize, u64),
    Cut(usize),
    Repeat(usize, usize),
}

fn damages() -> impl Strategy<Value = Vec<Damage>> {
    let number = prop_oneof![
        Just(u64::MAX),
        Just(1 << 63),
        Just(u64::MAX / 4),
        Just(1 << 32),
        Just(0),
        0u64..4096,
        any::<u64>(),
    ];
    let damage = prop_oneof![
        4 => (any::<usize>(), 1u8..).prop_map(|(at, bits)| Damage::Flip(at, bits)),
        3 => (any::<usize>(), number).prop_map(|(at, number)| Damage::Number(at, number)),
        1 => any::<usize>().prop_map(Damage::Cut),
        1 => (any::<usize>(), 1usize..64).prop_map(|(at, len)| Damage::Repeat(at, len)),
    ];
    prop::collection::vec(damage, 1..4)
}

fn damaged(mut bytes: Vec<u8>, damages: &[Damage]) -> Vec<u8> {
    for damage in damages {
        let len = bytes.len().max(1);
        match *damage {
            Damage::Flip(at, bits) => {
                if let Some(byte) = bytes.get_mut(at % len) {
                    *byte ^= bits;
                }
            }
            Damage::Number(at, number) => {
                let at = at % len;
                for (byte, new) in bytes[at.min(len - 1)..]
                    .iter_mut()
                    .zip(number.to_le_bytes())
                {
                    *byte = new;
                }
            }
            Damage::Cut(at) => bytes.truncate(at % len),
            Damage::Repeat(at, count) => {
                let at = at % len;
                let end = (at + count).min(bytes.len());
                let part = bytes[at.min(end)..end].to_vec();
                bytes.splice(at.min(end)..at.min(end), part);
            }
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_gguf_files_are_survived(damages in damages()) {
        survive(&Place::gguf(), &damaged(gguf_file(), &damages));
    }

    #[test]
    fn damaged_safetensors_files_are_survived(damages in damages()) {
        survive(&Place::safetensors(), &damaged(safetensors_file(), &damages));
    }
}

#[test]
fn every_eight_bytes_may_be_the_largest_number() {
    let place = Place::gguf();
    let bytes = gguf_file();
    for at in 0..bytes.len() {
        for number in [u64::MAX, 1 << 20] {
            survive(
                &place,
                &damaged(bytes.clone(), &[Damage::Number(at, number)]),
            );
        }
    }
}

#[test]
fn many_tensors_may_not_share_the_same_bytes() {
    let mut file = GgufFile::model("llama", 4, 2, 8);
    for index in 0..40 {
        file = file.tensor(&format!("t{index}"), &[256], &[0.5; 256]);
        file.tensors[index].offset = Some(0);
    }
    let place = Place::gguf();
    assert!(place.open(&file.bytes()).is_none());
    assert!(Path::new(&place.file).exists());
}
