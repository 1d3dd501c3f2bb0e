//! What can be loaded, in every form that checkpoints come in.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::tensor::DType;
use burn_paged_checkpoint::Checkpoint;
use burn_paged_llama::{FAMILY, Llama};
use burn_paged_model::{CausalLm, LoadError, LoadOptions, ModelDType, load_model, load_with};
use safetensors::Dtype;
use serde_json::json;

use crate::common::allocator::peak_of;
use crate::common::files::{self, Tensors};
use crate::common::oracle::Oracle;
use crate::common::run::{Rows, Runner, Sequence};
use crate::common::tiny::{HostTensor, Tiny, prompt};
use crate::common::{assert_rows_close, device, gguf, log_capture};

const NUM_TOKENS: usize = 21;

pub(crate) fn load(path: &Path) -> Result<Llama, LoadError> {
    load_as(path, &LoadOptions::new(device()))
}

pub(crate) fn load_as(path: &Path, options: &LoadOptions) -> Result<Llama, LoadError> {
    load_with(&Checkpoint::open(path)?, options, Llama::load)
}

/// Logits of every token of one prompt.
pub(crate) fn logits(model: &dyn CausalLm) -> Vec<Vec<f32>> {
    let mut sequence = Sequence::new(&prompt(NUM_TOKENS, 5));
    Runner::new(model, 4, 1, NUM_TOKENS).step(&mut [(&mut sequence, NUM_TOKENS)], Rows::All)
}

fn logits_of(path: &Path) -> Vec<Vec<f32>> {
    logits(&load(path).unwrap())
}

#[test]
fn tied_embeddings_load_in_every_form() {
    let tied = Tiny::tied();
    let form1 = tied.weights();
    let expected = logits_of(files::write(&tied).path());

    let mut with_copy = form1.clone();
    with_copy.insert(
        "lm_head.weight".into(),
        form1["model.embed_tokens.weight"].clone(),
    );
    let form2 = files::write_with(&tied.config(), &with_copy);
    assert_eq!(
        logits_of(form2.path()),
        expected,
        "tied, and a copy is stored"
    );

    let untied = Tiny {
        tied: false,
        ..tied.clone()
    };
    let form3 = files::write_with(&untied.config(), &with_copy);
    assert_eq!(
        logits_of(form3.path()),
        expected,
        "not tied, the stored copy is used"
    );

    let form4 = files::write_with(&untied.config(), &form1);
    let error = load(form4.path()).unwrap_err().to_string();
    assert!(
        error.contains("1 tensor missing: lm_head.weight"),
        "{error}"
    );

    let mut with_buffer = form1.clone();
    let inv_freq = HostTensor {
        shape: vec![5],
        values: vec![7.0; 5],
    };
    with_buffer.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        inv_freq,
    );
    let form5 = files::write_with(&tied.config(), &with_buffer);
    assert_eq!(
        logits_of(form5.path()),
        expected,
        "a stored inv_freq is left alone"
    );

    let form6 = files::write_sharded(&tied.config(), &form1);
    assert_eq!(logits_of(form6.path()), expected, "two shards");
    let [first, second] = files::shard_names();
    for shard in [second, first] {
        std::fs::remove_file(form6.path().join(&shard)).unwrap();
        let error = load(form6.path()).unwrap_err().to_string();
        assert!(error.contains(&shard), "{error}");
    }
}

#[test]
fn an_untied_output_layer_is_the_stored_one() {
    let untied = Tiny::grouped();
    let mut tensors = untied.weights();
    let expected = logits_of(files::write(&untied).path());
    // Tied, the stored output layer must not matter; untied, it must.
    tensors.get_mut("lm_head.weight").unwrap().values[0] += 1.0;
    let changed = files::write_with(&untied.config(), &tensors);
    assert_ne!(logits_of(changed.path()), expected);
    let tied = Tiny {
        tied: true,
        ..untied
    };
    let with_changed_head = files::write_with(&tied.config(), &tensors);
    tensors.remove("lm_head.weight");
    let without_head = files::write_with(&tied.config(), &tensors);
    assert_eq!(
        logits_of(with_changed_head.path()),
        logits_of(without_head.path())
    );
}

#[test]
fn gguf_and_safetensors_give_the_same_bits() {
    for tiny in [Tiny::grouped(), Tiny::tied(), Tiny::biased()] {
        let tensors = tiny.weights();
        let folder = files::write(&tiny);
        let gguf_folder = tempfile::tempdir().unwrap();
        let file = gguf_folder.path().join("tiny.gguf");
        gguf::write(&file, &tiny, &tensors, &Tensors::new());
        assert_eq!(logits_of(&file), logits_of(folder.path()), "{tiny:?}");
    }
}

#[test]
fn rope_freqs_of_a_gguf_file_are_the_llama3_scaling_of_a_folder() {
    let scaling = json!({"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}});
    let scaled = Tiny::grouped().with(scaling);
    let expected = logits_of(files::write(&scaled).path());

    let plain = Tiny::grouped();
    let rope = |tiny: &Tiny| {
        let rope = burn_paged_model::RopeConfig::from_config(&tiny.config(), 256).unwrap();
        rope.frequencies(tiny.head_dim, 256).unwrap().inv_freq
    };
    let factors = rope(&plain)
        .into_iter()
        .zip(rope(&scaled))
        .map(|(plain, scaled)| (plain / scaled) as f32);
    let factors = HostTensor {
        shape: vec![plain.head_dim / 2],
        values: factors.collect(),
    };
    assert!(factors.values.contains(&8.0) && factors.values[0] == 1.0);
    let more = Tensors::from([("rope_freqs.weight".to_owned(), factors)]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    gguf::write(&file, &plain, &plain.weights(), &more);
    assert_rows_close(&logits_of(&file), &expected, 1e-5, "rope_freqs");
    gguf::write(&file, &plain, &plain.weights(), &Tensors::new());
    assert_ne!(
        logits_of(&file),
        expected,
        "the scaling matters at this length"
    );
}

/// The weights as a half precision file holds them.
fn rounded(mut tensors: Tensors, dtype: Dtype) -> Tensors {
    let round = |value: f32| match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_f32(),
        _ => half::bf16::from_f32(value).to_f32(),
    };
    for tensor in tensors.values_mut() {
        tensor
            .values
            .iter_mut()
            .for_each(|value| *value = round(*value));
    }
    tensors
}

#[test]
fn half_precision_checkpoints_load_in_every_dtype() {
    let tiny = Tiny {
        sharpness: 1.0,
        ..Tiny::grouped()
    };
    for stored in [Dtype::F16, Dtype::BF16] {
        let folder = files::write(&tiny);
        let file = folder.path().join("model.safetensors");
        files::write_safetensors(&file, &tiny.weights(), stored);
        let oracle = Oracle::new(&tiny, &rounded(tiny.weights(), stored));
        let expected = oracle.logits(&prompt(NUM_TOKENS, 5));
        // Activations of three layers rounded to 11 and to 8 bits.
        let cases = [
            (ModelDType::Auto, DType::F32, 5e-5),
            (ModelDType::F32, DType::F32, 5e-5),
            (ModelDType::F16, DType::F16, 0.01),
            (ModelDType::BF16, DType::BF16, 0.08),
        ];
        for (wanted, dtype, tolerance) in cases {
            let options = LoadOptions::new(device()).with_dtype(wanted);
            let model = load_as(folder.path(), &options).unwrap();
            assert_eq!(
                model.spec().dtype,
                dtype,
                "f32 is the choice on this device"
            );
            let what = format!("{stored:?} as {wanted}");
            assert_rows_close(&logits(&model), &expected, tolerance, &what);
        }
    }
}

#[test]
fn weights_too_large_for_f16_are_refused_by_name() {
    let tiny = Tiny::grouped();
    let mut tensors = tiny.weights();
    let name = "model.layers.1.mlp.down_proj.weight";
    tensors.get_mut(name).unwrap().values[3] = 1e5;
    let folder = files::write_with(&tiny.config(), &tensors);
    let options = LoadOptions::new(device()).with_dtype(ModelDType::F16);
    let error = load_as(folder.path(), &options).unwrap_err().to_string();
    assert!(error.contains(name) && error.contains("f16"), "{error}");
    load(folder.path()).unwrap();
}

#[test]
fn progress_counts_every_byte_once() {
    let tiny = Tiny::biased();
    let folder = files::write(&tiny);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let options = LoadOptions::new(device()).with_progress(move |progress| {
        sink.lock()
            .unwrap()
            .push((progress.bytes, progress.tensors))
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    load_with(&checkpoint, &options, Llama::load).unwrap();
    let seen = seen.lock().unwrap();
    assert!(seen.is_sorted() && seen.len() > 10, "{seen:?}");
    let total = (checkpoint.total_bytes(), checkpoint.num_tensors());
    // The last tensor completes the count by itself: nothing is left over and nothing counted twice.
    assert_eq!(seen[seen.len() - 2..], [total, total]);
}

#[test]
fn unused_tensors_are_named_in_one_warning() {
    let tiny = Tiny::grouped();
    let mut tensors = tiny.weights();
    let one = HostTensor {
        shape: vec![1],
        values: vec![1.0],
    };
    tensors.insert("model.layers.1.self_attn.q_norm.weight".into(), one.clone());
    tensors.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        one.clone(),
    );
    tensors.insert("left_over".into(), one);
    let folder = files::write_with(&tiny.config(), &tensors);
    let warnings =
        log_capture::warnings_about(folder.path(), || drop(load(folder.path()).unwrap()));
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("2 tensors of"), "{warnings:?}");
    assert!(
        warnings[0].contains("left_over, model.layers.1.self_attn.q_norm.weight"),
        "{warnings:?}"
    );

    let clean = files::write(&Tiny::tied());
    let warnings = log_capture::warnings_about(clean.path(), || drop(load(clean.path()).unwrap()));
    assert_eq!(warnings, [""; 0]);
}

#[test]
fn the_registry_finds_the_family_and_fills_the_spec() {
    let tiny = Tiny::grouped();
    let folder = files::write(&tiny);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let options = LoadOptions::new(device()).with_max_positions(40);
    let model = load_model(&[FAMILY], &checkpoint, &options).unwrap();
    let spec = model.spec();
    assert_eq!(spec.architecture, "LlamaForCausalLM");
    assert_eq!(
        (spec.num_layers, spec.num_kv_heads, spec.head_dim),
        (3, 2, 10)
    );
    assert_eq!((spec.vocab_size, spec.max_positions), (67, 40));
    assert_eq!(logits(model.as_ref()), logits_of(folder.path()));
}

/// On Flex the model itself is host memory, and the buffer that a tensor is read into becomes the tensor. The output layer is
/// read last and is the largest tensor: a copy of it, or of everything, would show.
#[test]
fn loading_holds_no_second_copy_in_host_memory() {
    let large = Tiny {
        hidden_size: 96,
        intermediate_size: 224,
        vocab_size: 5000,
        ..Tiny::grouped()
    };
    let weights = large.weights();
    let values: usize = weights.values().map(|tensor| tensor.values.len()).sum();
    for dtype in [Dtype::F32, Dtype::BF16] {
        let folder = files::write_with(&large.config(), &Tensors::new());
        files::write_safetensors(&folder.path().join("model.safetensors"), &weights, dtype);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let options = LoadOptions::new(device());
        let (model, peak) = peak_of(|| load_with(&checkpoint, &options, Llama::load).unwrap());
        assert_eq!(model.spec().dtype, DType::F32);
        let model = 4 * values;
        assert!(
            (model..model + model / 10).contains(&peak),
            "{peak} bytes for a model of {model}, stored as {dtype:?}"
        );
    }
}
