//! GGUF files: what is read from sound ones, the order of rotary rows, and what is refused.

use burn_paged_checkpoint::{Checkpoint, CheckpointError, FloatKind, GgufArray, GgufValue};
use half::f16;

use crate::write_gguf::{F16, GgufFile, Q8_0, string};
use crate::{assert_names, read_f32, refusal, varied, write_safetensors};

/// Writes the file and opens it.
fn open(file: &GgufFile) -> Result<Checkpoint, CheckpointError> {
    let (_folder, path) = file.write();
    // The file stays mapped after its folder is gone.
    Checkpoint::open(&path)
}

fn refused(file: &GgufFile) -> String {
    let (_folder, path) = file.write();
    refusal(&path)
}

/// A file with one tensor, for faults elsewhere.
fn small() -> GgufFile {
    GgufFile::model("llama", 2, 1, 8).tensor("output_norm.weight", &[8], &varied(8, 1))
}

#[test]
fn names_and_shapes_are_those_of_hugging_face_in_both_versions() {
    for version in [2, 3] {
        let mut file = GgufFile::model("llama", 2, 1, 8)
            .tensor("token_embd.weight", &[5, 8], &varied(40, 1))
            .stored("blk.0.ffn_up.weight", &[24, 8], F16, vec![0x3c; 24 * 8 * 2])
            .tensor("rope_freqs.weight", &[2], &[1.0, 8.0]);
        file.version = version;
        let checkpoint = open(&file).unwrap();
        let names: Vec<_> = checkpoint.names().collect();
        let up = "model.layers.0.mlp.up_proj.weight";
        assert_eq!(
            names,
            ["model.embed_tokens.weight", up, "rope_freqs.weight"]
        );
        assert_eq!(
            checkpoint.info("model.embed_tokens.weight").unwrap().shape,
            [5, 8]
        );
        assert_eq!(checkpoint.info(up).unwrap().shape, [24, 8]);
        assert_eq!(
            read_f32(&checkpoint, "model.embed_tokens.weight"),
            varied(40, 1)
        );
        assert_eq!(
            read_f32(&checkpoint, up),
            [f16::from_bits(0x3c3c).to_f32(); 192]
        );
        assert_eq!(checkpoint.total_bytes(), 160 + 384 + 8);
    }
}

/// Row `r` of a matrix holds the value `r` in Hugging Face's order; this is the order of a llama
/// file.
fn alternating_rows(heads: usize, head_dim: usize, columns: usize) -> Vec<f32> {
    let half = head_dim / 2;
    (0..heads * head_dim)
        .map(|row| (row / head_dim * head_dim + row % 2 * half + row % head_dim / 2) as f32)
        .flat_map(|value| std::iter::repeat_n(value, columns))
        .collect()
}

fn rows_in_order(rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| (i / columns) as f32).collect()
}

/// 8 query heads and 2 key heads of 8, hidden size 3, with biases.
fn rotary_model(architecture: &str) -> GgufFile {
    let k = alternating_rows(2, 8, 1);
    assert_eq!(
        k,
        [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15].map(|row| row as f32)
    );
    GgufFile::model(architecture, 8, 2, 3)
        .u32(&format!("{architecture}.attention.key_length"), 8)
        .tensor("blk.0.attn_q.weight", &[64, 3], &alternating_rows(8, 8, 3))
        .tensor("blk.0.attn_k.weight", &[16, 3], &alternating_rows(2, 8, 3))
        .tensor("blk.0.attn_v.weight", &[16, 3], &alternating_rows(2, 8, 3))
        .tensor("blk.0.attn_output.weight", &[3, 64], &varied(192, 5))
        .tensor("blk.0.attn_q.bias", &[64], &alternating_rows(8, 8, 1))
        .tensor("blk.0.attn_k.bias", &[16], &k)
        .tensor("blk.0.attn_k_norm.weight", &[8], &alternating_rows(1, 8, 1))
}

#[test]
fn query_and_key_rows_of_llama_files_are_put_back_in_order() {
    let checkpoint = open(&rotary_model("llama")).unwrap();
    let read = |name: &str| read_f32(&checkpoint, &format!("model.layers.0.self_attn.{name}"));
    assert_eq!(read("q_proj.weight"), rows_in_order(64, 3));
    assert_eq!(read("k_proj.weight"), rows_in_order(16, 3));
    assert_eq!(read("q_proj.bias"), rows_in_order(64, 1));
    assert_eq!(read("k_proj.bias"), rows_in_order(16, 1));
    assert_eq!(read("v_proj.weight"), alternating_rows(2, 8, 3));
    assert_eq!(read("o_proj.weight"), varied(192, 5));
    assert_eq!(read("k_norm.weight"), alternating_rows(1, 8, 1));
    let raw = checkpoint
        .read_raw("model.layers.0.self_attn.k_proj.weight")
        .unwrap();
    assert_eq!(*raw.bytes, crate::f32_bytes(&rows_in_order(16, 3)));
    let names = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
        .map(|name| format!("model.layers.0.self_attn.{name}"));
    let packed = checkpoint
        .read_stacked(&names.each_ref().map(String::as_str), FloatKind::F32)
        .expect("equal columns");
    assert_eq!(packed.shape, [96, 3]);
}

#[test]
fn rows_of_other_architectures_are_left_in_order() {
    let checkpoint = open(&rotary_model("qwen2")).unwrap();
    let read = |name: &str| read_f32(&checkpoint, &format!("model.layers.0.self_attn.{name}"));
    assert_eq!(read("q_proj.weight"), alternating_rows(8, 8, 3));
    assert_eq!(read("k_proj.weight"), alternating_rows(2, 8, 3));
    assert_eq!(read("k_proj.bias"), alternating_rows(2, 8, 1));
}

#[test]
fn quantised_rows_are_put_back_in_order() {
    // One Q8_0 block per row, scale 1, every value the number of the row.
    let blocks: Vec<u8> = alternating_rows(2, 8, 1)
        .into_iter()
        .flat_map(|row| [&[0x00, 0x3c][..], &[row as u8; 32][..]].concat())
        .collect();
    let file =
        GgufFile::model("llama", 8, 2, 32).stored("blk.0.attn_k.weight", &[16, 32], Q8_0, blocks);
    let checkpoint = open(&file).unwrap();
    let name = "model.layers.0.self_attn.k_proj.weight";
    assert_eq!(read_f32(&checkpoint, name), rows_in_order(16, 32));
    let raw = checkpoint.read_raw(name).unwrap();
    let rows: Vec<u8> = raw.bytes.chunks(34).map(|block| block[33]).collect();
    assert_eq!(rows, (0..16).collect::<Vec<u8>>());
}

#[test]
fn rows_that_are_not_whole_heads_are_refused() {
    for rows in [15, 7, 18] {
        let values = varied(rows * 3, 1);
        let file = GgufFile::model("llama", 4, 2, 3).tensor(
            "blk.0.attn_k.weight",
            &[rows as u64, 3],
            &values,
        );
        assert_names(
            &refused(&file),
            &["blk.0.attn_k.weight", &format!("{rows} rows"), "2 heads"],
        );
    }
    for (heads, kv_heads) in [(0, 0), (4, 0), (3, 2)] {
        let file = GgufFile::model("llama", heads, kv_heads, 3).tensor("x", &[1], &[0.0]);
        assert_names(
            &refused(&file),
            &["llama.attention.head_count_kv", &kv_heads.to_string()],
        );
    }
}

#[test]
fn a_gguf_file_gives_the_same_tensors_as_a_safetensors_folder() {
    let (q, k) = (varied(48, 1), varied(24, 2));
    let names = ["q_proj", "k_proj"].map(|name| format!("model.layers.0.self_attn.{name}.weight"));
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        write_safetensors::tensor(&names[0], &[16, 3], &q),
        write_safetensors::tensor(&names[1], &[8, 3], &k),
    ];
    write_safetensors::write_single(folder.path(), &tensors);
    // Heads of 4: the file has rows 0, 2, 1, 3 of each.
    let swap = |values: &[f32]| -> Vec<f32> {
        values
            .chunks(4 * 3)
            .flat_map(|head| [&head[..3], &head[6..9], &head[3..6], &head[9..]].concat())
            .collect()
    };
    let file = GgufFile::model("llama", 4, 2, 3)
        .tensor("blk.0.attn_q.weight", &[16, 3], &swap(&q))
        .tensor("blk.0.attn_k.weight", &[8, 3], &swap(&k));
    let (gguf, folder) = (
        open(&file).unwrap(),
        Checkpoint::open(folder.path()).unwrap(),
    );
    for name in &names {
        for kind in [FloatKind::F32, FloatKind::F16, FloatKind::BF16] {
            assert_eq!(
                gguf.read(name, kind).unwrap(),
                folder.read(name, kind).unwrap()
            );
        }
    }
}

#[test]
fn metadata_of_every_type_is_read() {
    let nested = [&0u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[1, 2]].concat();
    let file = small()
        .raw("u8", 0, vec![200])
        .raw("i8", 1, vec![200])
        .raw("u16", 2, vec![0, 200])
        .raw("i16", 3, vec![0, 200])
        .raw("i32", 5, (-7i32).to_le_bytes().to_vec())
        .raw("bool", 7, vec![1])
        .raw("u64", 10, u64::MAX.to_le_bytes().to_vec())
        .raw("i64", 11, i64::MIN.to_le_bytes().to_vec())
        .raw("f64", 12, 0.1f64.to_le_bytes().to_vec())
        .strings("strings", &["a", "", "ü"])
        .array(
            "i32s",
            5,
            2,
            [3i32, -1].iter().flat_map(|i| i.to_le_bytes()).collect(),
        )
        .array("f32s", 6, 2, crate::f32_bytes(&[0.5, -2.0]))
        .array("bools", 7, 3, vec![0, 1, 0])
        .array("arrays", 9, 1, nested);
    let checkpoint = open(&file).unwrap();
    let metadata = checkpoint.gguf_metadata().unwrap();
    let value = |key| metadata.get(key).unwrap().clone();
    assert_eq!(value("u8"), GgufValue::Unsigned(200));
    assert_eq!(value("i8"), GgufValue::Signed(-56));
    assert_eq!(value("u16"), GgufValue::Unsigned(51_200));
    assert_eq!(value("i16"), GgufValue::Signed(-14_336));
    assert_eq!(value("i32"), GgufValue::Signed(-7));
    assert_eq!(value("u64"), GgufValue::Unsigned(u64::MAX));
    assert_eq!(value("i64"), GgufValue::Signed(i64::MIN));
    assert_eq!(value("f64"), GgufValue::Float64(0.1));
    assert_eq!(metadata.optional_bool("bool").unwrap(), Some(true));
    assert_eq!(
        metadata.optional_strings("strings").unwrap().unwrap(),
        ["a", "", "ü"]
    );
    assert_eq!(
        metadata.optional_integers("i32s").unwrap().unwrap(),
        [3, -1]
    );
    assert_eq!(
        metadata.optional_f32s("f32s").unwrap().unwrap(),
        [0.5, -2.0]
    );
    assert_eq!(
        value("bools"),
        GgufValue::Array(GgufArray::Bool(vec![false, true, false]))
    );
    let inner = vec![GgufArray::Unsigned(vec![1, 2])];
    assert_eq!(value("arrays"), GgufValue::Array(GgufArray::Array(inner)));
    assert_eq!(metadata.architecture().unwrap(), "llama");
    assert!(metadata.keys().any(|key| key == "llama.block_count"));
}

#[test]
fn broken_metadata_names_the_key() {
    let utf8 = [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat();
    let mut deep = vec![];
    for _ in 0..6 {
        deep.extend(9u32.to_le_bytes());
        deep.extend(1u64.to_le_bytes());
    }
    let huge = u64::MAX.to_le_bytes().to_vec();
    let cases = [
        (
            small().raw("k", 13, vec![0; 8]),
            "value type 13 does not exist",
        ),
        (small().raw("k", 7, vec![2]), "boolean has the value 2"),
        (small().raw("k", 8, utf8), "utf-8"),
        (
            small().raw("k", 8, huge.clone()),
            "18446744073709551615 entries",
        ),
        (
            small().array("k", 8, u64::MAX, vec![]),
            "18446744073709551615 entries",
        ),
        (
            small().array("k", 4, 1 << 40, vec![]),
            "1099511627776 entries",
        ),
        (small().raw("k", 9, deep), "nest deeper than 4"),
        (small().u32("k", 1).raw_again("k", 4, vec![0; 4]), "twice"),
    ];
    for (file, reason) in cases {
        assert_names(
            &refused(&file),
            &["tiny.gguf is not a valid GGUF file: k: ", reason],
        );
    }
}

#[test]
fn absurd_counts_are_refused_before_anything_is_allocated() {
    for count in [1 << 20, 1 << 40, u64::MAX / 24, u64::MAX] {
        let mut file = small();
        file.num_tensors = Some(count);
        assert_names(&refused(&file), &["tensor count", &count.to_string()]);
        let mut file = small();
        file.num_entries = Some(count);
        assert_names(&refused(&file), &["metadata count", &count.to_string()]);
    }
    assert_names(
        &refused(&GgufFile::model("llama", 2, 1, 8)),
        &["tensor count: is 0"],
    );
}

#[test]
fn other_formats_and_versions_are_refused_in_clear_text() {
    let mut other = small();
    other.magic = *b"ggjt";
    assert_names(&refused(&other), &["begins with \"GGUF\""]);
    for (version, reason) in [
        (1, "version 1"),
        (4, "version 4"),
        (3u32.swap_bytes(), "big-endian"),
    ] {
        let mut file = small();
        file.version = version;
        assert_names(&refused(&file), &["tiny.gguf", reason]);
    }
    let split = small().raw("split.count", 2, vec![3, 0]);
    assert_names(&refused(&split), &["split into 3 files"]);
    let nameless = small().without("general.architecture");
    assert_names(&refused(&nameless), &["general.architecture is missing"]);
}

#[test]
fn alignment_is_honoured_and_checked() {
    let mut file = small()
        .u32("general.alignment", 256)
        .tensor("x", &[3], &[1.0, 2.0, 3.0]);
    file.alignment = 256;
    assert_eq!(read_f32(&open(&file).unwrap(), "x"), [1.0, 2.0, 3.0]);
    for alignment in [0, 3, 48] {
        let file = small().u32("general.alignment", alignment);
        assert_names(
            &refused(&file),
            &["general.alignment", &format!("is {alignment}")],
        );
    }
    let file = small().raw("general.alignment", 10, (1u64 << 63).to_le_bytes().to_vec());
    assert_names(&refused(&file), &["tensor data", "9223372036854775808"]);
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let with = |shape: &[u64], dtype: u32, offset: Option<u64>| {
        let mut file = small().stored("x", shape, dtype, vec![0; 64]);
        file.tensors[1].offset = offset;
        refused(&file)
    };
    let cases = [
        (with(&[17], 0, None), "ends at 100, but only 96 bytes"),
        (with(&[16], 0, Some(64)), "ends at 128"),
        (with(&[16], 0, Some(33)), "no multiple of the alignment 32"),
        (with(&[4], 0, Some(0)), "inside tensor"),
        (with(&[8], 0, Some(u64::MAX - 31)), "too many elements"),
        (with(&[1 << 32, 1 << 32], 0, None), "too many elements"),
        (with(&[0, 1 << 40, 1 << 40], 0, None), "too many elements"),
        (with(&[0, 1 << 40, 1 << 40], 99, None), "too many elements"),
        (with(&[u64::MAX], 8, None), "not whole blocks of 32 (Q8_0)"),
        (
            with(&[2, 48], 8, None),
            "rows of 48 elements are not whole blocks of 32",
        ),
        (with(&[4], 99, Some(1 << 40)), "ends at 1099511627776"),
        (with(&[1, 1, 1, 1, 1], 0, None), "has 5 dimensions"),
    ];
    for (message, reason) in cases {
        assert_names(&message, &["tiny.gguf", reason]);
        assert!(
            message.contains("tensor x") || message.contains("output_norm"),
            "{message}"
        );
    }
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let file = small().tensor("output_norm.weight", &[8], &varied(8, 2));
    assert_names(&refused(&file), &["model.norm.weight is stored twice"]);
    let file = small().tensor("model.norm.weight", &[8], &varied(8, 2));
    assert_names(&refused(&file), &["model.norm.weight is stored twice"]);
}

#[test]
fn text_in_a_file_is_written_as_length_and_bytes() {
    assert_eq!(string("ab"), [2, 0, 0, 0, 0, 0, 0, 0, b'a', b'b']);
}
