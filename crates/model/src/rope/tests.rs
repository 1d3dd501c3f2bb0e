//! Expected values not worked out here come from Hugging Face transformers 5.24, which computes in f32.

use serde_json::json;

use super::*;

fn read(config: Value, max_position_embeddings: usize) -> Result<RopeConfig, ConfigError> {
    RopeConfig::from_config(&config, max_position_embeddings)
}

fn frequencies(config: Value, head_dim: usize, max_position_embeddings: usize) -> RopeFrequencies {
    let rope = read(config, max_position_embeddings).unwrap();
    rope.frequencies(head_dim, rope.max_positions()).unwrap()
}

#[track_caller]
fn assert_close(found: f64, expected: f64) {
    let error = (found - expected).abs();
    assert!(
        error <= 2e-6 * expected.abs(),
        "found {found:.9e}, expected {expected:.9e}"
    );
}

#[track_caller]
fn assert_all_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    found
        .iter()
        .zip(expected)
        .for_each(|(found, expected)| assert_close(*found, *expected));
}

fn llama3() -> Value {
    json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192})
}

#[test]
fn llama3_scales_low_frequencies_and_blends_the_middle_band() {
    let config = json!({"rope_theta": 500000.0, "rope_scaling": llama3()});
    let small = frequencies(config.clone(), 8, 131_072);
    let expected = [1.0, 0.0376060309, 0.000524846161, 6.64786987e-06];
    assert_all_close(&small.inv_freq, &expected);
    assert_eq!(small.attention_factor, 1.0);

    let large = frequencies(config, 128, 131_072).inv_freq;
    let trained = inverse_frequencies(500_000.0, 128);
    assert_eq!(large[28], trained[28]);
    assert_close(large[28], 0.00321144611);
    assert_close(large[29], 0.00216657076);
    assert_close(large[31], 0.000856751413);
    assert_close(large[34], 0.000178507813);
    assert_eq!(large[35], trained[35] / 8.0);
    assert_close(large[63], 3.06892588e-07);
}

#[test]
fn linear_divides_all_frequencies_under_either_key() {
    for key in ["type", "rope_type"] {
        let config = json!({"rope_scaling": {key: "linear", "factor": 2.0}});
        let expected = [0.5, 0.05, 0.005, 0.0005];
        assert_all_close(&frequencies(config.clone(), 8, 128).inv_freq, &expected);
        assert_eq!(read(config, 128).unwrap().max_positions(), 256);
    }
}

#[test]
fn absent_null_and_default_leave_the_frequencies_as_trained() {
    let trained = inverse_frequencies(10_000.0, 16);
    let configs = [
        json!({}),
        json!({"rope_scaling": null}),
        json!({"rope_scaling": {"rope_type": "default"}}),
        json!({"rope_scaling": {"type": null}}),
        json!({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
        json!({"rope_parameters": {"rope_theta": 10000.0}, "rope_theta": 77.0}),
    ];
    for config in configs {
        assert_eq!(
            frequencies(config.clone(), 16, 128).inv_freq,
            trained,
            "{config}"
        );
        assert_eq!(read(config, 128).unwrap().max_positions(), 128);
    }
}

#[test]
fn the_newer_object_holds_base_and_scaling() {
    let mut fields = llama3();
    fields["rope_theta"] = json!(500000.0);
    let newer = frequencies(json!({"rope_parameters": fields}), 8, 131_072);
    let older = json!({"rope_theta": 500000.0, "rope_scaling": llama3()});
    assert_eq!(newer, frequencies(older, 8, 131_072));
}

#[test]
fn a_part_of_the_head_is_rotated() {
    let config = json!({"partial_rotary_factor": 0.5});
    assert_eq!(
        frequencies(config, 16, 128).inv_freq,
        inverse_frequencies(10_000.0, 8)
    );
    let odd = read(json!({"partial_rotary_factor": 0.4}), 128)
        .unwrap()
        .frequencies(8, 128);
    assert_eq!(odd.unwrap_err().field, "head_dim");
}

#[test]
fn yarn_blends_over_dimensions_and_lengthens_vectors() {
    let config = json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}});
    let small = frequencies(config, 16, 256);
    let expected = [
        1.0,
        0.237170815,
        0.05,
        0.00790569466,
        0.0025,
        0.000790569466,
        0.00025,
        7.90569466e-05,
    ];
    assert_all_close(&small.inv_freq, &expected);
    assert_close(small.attention_factor, 1.138629436111989);

    let config = json!({"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}});
    let large = frequencies(config, 128, 4096);
    let expected = [
        (0, 1.0),
        (10, 0.237137362),
        (19, 0.0649381652),
        (20, 0.0562341288),
        (21, 0.0469408594),
        (30, 0.00852684397),
        (40, 0.000881788961),
        (45, 0.000151771645),
        (46, 8.33450904e-05),
        (47, 7.21738761e-05),
        (63, 7.21738706e-06),
    ];
    expected
        .iter()
        .for_each(|(at, freq)| assert_close(large.inv_freq[*at], *freq));
    assert_close(large.attention_factor, 1.2772588722239782);
}

#[test]
fn yarn_options_are_honoured() {
    let config = json!({"rope_theta": 1e6, "rope_scaling": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
        "mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2}});
    let weighed = frequencies(config, 32, 163_840);
    assert_close(weighed.attention_factor, 1.0857263992561355);
    assert_close(weighed.inv_freq[5], 0.00900126994);
    assert_close(weighed.inv_freq[6], 0.0019681945);

    let config = json!({"rope_theta": 1e6, "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": false,
        "attention_factor": 1.25}});
    let exact = frequencies(config, 32, 32_768);
    assert_eq!(exact.attention_factor, 1.25);
    let expected = [0.0281120818, 0.00894767046, 0.00254728831, 0.000557219435];
    assert_all_close(&exact.inv_freq[4..8], &expected);
}

#[test]
fn yarn_supports_the_stretched_length_wherever_it_is_written() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let max_positions = |max_position_embeddings| {
        read(json!({"rope_scaling": yarn}), max_position_embeddings)
            .unwrap()
            .max_positions()
    };
    assert_eq!(max_positions(64), 256);
    assert_eq!(max_positions(256), 256);
}

#[test]
fn dynamic_has_one_base_for_the_length_that_the_model_is_loaded_for() {
    let rope = read(
        json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        128,
    )
    .unwrap();
    assert_eq!(rope.max_positions(), 256);
    let stretched = rope.frequencies(16, 256).unwrap().inv_freq;
    let expected = [
        1.0,
        0.270296127,
        0.0730599985,
        0.0197478328,
        0.00533776265,
        0.00144277664,
        0.000389976922,
        0.000105409257,
    ];
    assert_all_close(&stretched, &expected);
    let short = rope.frequencies(16, 100).unwrap().inv_freq;
    assert_eq!(short, inverse_frequencies(10_000.0, 16));
    assert_eq!(rope.frequencies(2, 256).unwrap_err().field, "rope_scaling");
}

#[test]
fn unknown_kinds_are_refused_by_name() {
    for (key, kind) in [
        ("rope_type", "abc"),
        ("type", "longrope"),
        ("rope_type", "su"),
    ] {
        let error = read(json!({"rope_scaling": {key: kind, "factor": 2.0}}), 128).unwrap_err();
        assert_eq!(error.field, format!("rope_scaling.{key}"));
        assert!(error.reason.contains(kind), "{error}");
    }
    let per_layer = json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}});
    assert_eq!(read(per_layer, 128).unwrap_err().field, "rope_parameters");
    let nameless = json!({"rope_scaling": {"factor": 2.0}});
    assert_eq!(read(nameless, 128).unwrap_err().field, "rope_scaling");
}

#[test]
fn faulty_numbers_are_refused_with_their_field() {
    let cases = [
        (json!({"rope_theta": "x"}), "rope_theta"),
        (json!({"rope_theta": 0.0}), "rope_theta"),
        (
            json!({"partial_rotary_factor": 1.5}),
            "partial_rotary_factor",
        ),
        (
            json!({"rope_scaling": {"type": "linear"}}),
            "rope_scaling.factor",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 0.5}}),
            "rope_scaling.factor",
        ),
        (json!({"rope_scaling": {"type": 3}}), "rope_scaling.type"),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}),
            "rope_scaling.high_freq_factor",
        ),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                                    "high_freq_factor": 4.0}}),
            "rope_scaling.high_freq_factor",
        ),
        (
            json!({"rope_parameters": {"rope_type": "yarn", "factor": 2.0,
                                       "original_max_position_embeddings": 0}}),
            "rope_parameters.original_max_position_embeddings",
        ),
    ];
    for (config, field) in cases {
        assert_eq!(
            read(config.clone(), 128).unwrap_err().field,
            field,
            "{config}"
        );
    }
}

#[test]
fn factors_of_a_gguf_file_divide_the_frequencies() {
    let mut rope = frequencies(json!({}), 8, 128);
    rope.divide_by(&[1.0, 2.0, 4.0, 8.0]).unwrap();
    assert_all_close(&rope.inv_freq, &[1.0, 0.05, 0.0025, 0.000125]);
    assert_eq!(
        rope.divide_by(&[1.0, 0.0, 1.0, 1.0]).unwrap_err().field,
        "rope_freqs.weight"
    );
}
