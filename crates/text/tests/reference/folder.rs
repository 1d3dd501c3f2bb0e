//! Hugging Face folders. The `tokenizers` crate reads the same `tokenizer.json` as the oracle.

use std::fs;
use std::path::Path;

use burn_paged_text::{TextError, TextModel};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Random, byte_alphabet};

/// Byte-level BPE with added tokens of every kind.
fn tokenizer_json() -> Value {
    let merges = [["h", "i"], ["Ġ", "a"], ["a", "b"], ["Ġ", "Ġ"]];
    let spellings = byte_alphabet().into_iter().map(String::from);
    let merged = merges.iter().map(|pair| pair.concat());
    let vocab: serde_json::Map<String, Value> = spellings
        .chain(merged)
        .enumerate()
        .map(|(id, token)| (token, id.into()))
        .collect();
    let added = |id: u32, content: &str, flags: [bool; 5]| {
        let [special, single_word, lstrip, rstrip, normalized] = flags;
        json!({"id": id, "content": content, "special": special, "single_word": single_word,
               "lstrip": lstrip, "rstrip": rstrip, "normalized": normalized})
    };
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
        "added_tokens": [
            added(260, "<s>", [true, false, false, false, false]),
            added(261, "</s>", [true, false, false, false, false]),
            added(262, "<call>", [false, false, false, false, false]),
            added(263, "word", [false, true, false, false, false]),
            added(264, "<left>", [true, false, true, false, false]),
            added(265, "<right>", [true, false, false, true, false]),
            added(266, "NORM", [false, false, false, false, true]),
            added(267, "<s><s>", [true, false, false, false, false]),
        ],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [260], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": merges}
    })
}

fn folder(files: &[(&str, String)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

fn load(folder: &TempDir) -> TextModel {
    TextModel::from_folder(folder.path(), &json!({}), None).unwrap()
}

fn with_config(config: &Value) -> TempDir {
    folder(&[
        ("tokenizer.json", tokenizer_json().to_string()),
        ("tokenizer_config.json", config.to_string()),
    ])
}

#[test]
fn ids_equal_those_of_the_tokenizers_crate() {
    let model = load(&folder(&[("tokenizer.json", tokenizer_json().to_string())]));
    let mut oracle: tokenizers::Tokenizer = tokenizer_json().to_string().parse().unwrap();
    oracle.with_truncation(None).unwrap().with_padding(None);
    let mut plain = oracle.clone();
    plain.set_encode_special_tokens(true);
    let pieces = [
        "Hi",
        " a",
        "ab",
        "<s>",
        "</s>",
        "<call>",
        "word",
        " word ",
        "xword",
        "<left>",
        "  <left>",
        "<right>  ",
        "NORM",
        "norm",
        "\n",
        "é",
        "<",
        ">",
        "s>",
        "İ",
        "🙂",
        "  ",
        "<s><s>",
        "<s><s><s>",
        "WORD",
    ];
    let mut random = Random(3);
    for _ in 0..3000 {
        let text = random.text(&pieces, 8);
        let expected = |oracle: &tokenizers::Tokenizer, special| {
            oracle
                .encode(text.as_str(), special)
                .unwrap()
                .get_ids()
                .to_vec()
        };
        assert_eq!(
            model.tokenizer.encode(&text, false).unwrap(),
            expected(&oracle, false),
            "{text:?}"
        );
        assert_eq!(
            model.tokenizer.encode(&text, true).unwrap(),
            expected(&oracle, true),
            "{text:?}"
        );
        assert_eq!(
            model.tokenizer.encode_plain(&text).unwrap(),
            expected(&plain, false),
            "{text:?}"
        );
        let ids = expected(&oracle, true);
        for skip in [false, true] {
            assert_eq!(
                model.tokenizer.decode(&ids, skip),
                oracle.decode(&ids, skip).unwrap(),
                "{text:?}"
            );
        }
    }
}

#[test]
fn truncation_and_padding_of_the_file_are_not_used() {
    let model = load(&folder(&[("tokenizer.json", tokenizer_json().to_string())]));
    assert_eq!(model.tokenizer.encode("hi", false).unwrap().len(), 1);
    assert_eq!(
        model.tokenizer.encode("zzzzzzzzzzzz", false).unwrap().len(),
        12
    );
}

#[test]
fn the_configuration_decides_about_bos_and_eos() {
    let tokens = |config: Value| {
        let model = load(&with_config(&config));
        (
            model.tokenizer.encode("hi", true).unwrap(),
            model.tokenizer.add_bos(),
        )
    };
    let named = |add_bos: Value, add_eos: Value| {
        json!({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false},
               "add_bos_token": add_bos, "add_eos_token": add_eos})
    };
    assert_eq!(
        tokens(named(Value::Null, Value::Null)),
        (vec![260, 256], true)
    );
    assert_eq!(
        tokens(named(json!(true), json!(true))),
        (vec![260, 256, 261], true)
    );
    assert_eq!(
        tokens(named(json!(false), json!(false))),
        (vec![256], false)
    );
    // Without a name for it, the post-processor is followed and nothing is called BOS.
    assert_eq!(tokens(json!({})), (vec![260, 256], false));
}

#[test]
fn the_configuration_makes_control_tokens() {
    let model = load(&with_config(&json!({
        "eos_token": "<call>",
        "additional_special_tokens": ["word", {"content": "ab"}],
        "added_tokens_decoder": {
            "266": {"content": "NORM", "special": true},
            "300": {"content": "<new>", "special": true},
            "301": {"content": "<plain>", "special": false},
        },
    })));
    let tokenizer = &model.tokenizer;
    for (token, id) in [
        ("<call>", 262),
        ("word", 263),
        ("ab", 258),
        ("NORM", 266),
        ("<new>", 300),
    ] {
        assert_eq!(tokenizer.id(token), Some(id), "{token}");
        assert!(tokenizer.is_special(id), "{token}");
        assert_eq!(tokenizer.encode(token, false).unwrap(), [id], "{token}");
        // `ab` is also what the merges make of its letters.
        assert_eq!(
            tokenizer.encode_plain(token).unwrap().contains(&id),
            token == "ab",
            "{token}"
        );
    }
    assert!(!tokenizer.is_special(301));
    assert_eq!(tokenizer.encode_plain("<plain>").unwrap(), [301]);
    assert_eq!(
        (tokenizer.vocab_size(), tokenizer.eos_id()),
        (302, Some(262))
    );
    assert_eq!(tokenizer.decode(&[299, 300, 256], true), "hi");
}

#[test]
fn end_tokens_come_from_every_file() {
    let folder = with_config(&json!({"eos_token": "</s>"}));
    let stop = |config: Value, generation: Option<Value>| {
        let model = TextModel::from_folder(folder.path(), &config, generation.as_ref()).unwrap();
        model.stop_tokens.iter().collect::<Vec<_>>()
    };
    assert_eq!(
        stop(json!({}), Some(json!({"eos_token_id": [264, 261]}))),
        [261, 264]
    );
    assert_eq!(stop(json!({"eos_token_id": 264}), None), [261, 264]);
    assert_eq!(
        stop(json!({"text_config": {"eos_token_id": [265]}}), None),
        [261, 265]
    );
    assert_eq!(
        stop(json!({"eos_token_id": 1_000_000}), Some(json!({}))),
        [261]
    );
    assert_eq!(stop(json!({}), None), [261]);
}

#[test]
fn chat_templates_are_found_in_every_place() {
    let names = |files: &[(&str, String)]| {
        let mut all = vec![("tokenizer.json", tokenizer_json().to_string())];
        all.extend_from_slice(files);
        let model = load(&folder(&all));
        let sources = |name: &str| {
            let mut options = burn_paged_text::ChatOptions::default();
            options.template = Some(name.into());
            model
                .chat_templates
                .select(&options)
                .unwrap()
                .source()
                .to_owned()
        };
        model
            .chat_templates
            .names()
            .map(|name| format!("{name}={}", sources(name)))
            .collect::<Vec<_>>()
    };
    let config = |template: Value| {
        (
            "tokenizer_config.json",
            json!({ "chat_template": template }).to_string(),
        )
    };
    assert_eq!(names(&[]), Vec::<String>::new());
    assert_eq!(names(&[config(json!("one"))]), ["default=one"]);
    let list =
        json!([{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]);
    assert_eq!(
        names(&[config(list.clone())]),
        ["default=one", "tool_use=two"]
    );
    let file = ("chat_template.jinja", "three".to_owned());
    let other = ("additional_chat_templates/rag.jinja", "four".to_owned());
    assert_eq!(
        names(&[config(list), file, other]),
        ["default=three", "rag=four", "tool_use=two"]
    );
    assert_eq!(
        names(&[("chat_template.json", r#"{"chat_template": "five"}"#.into())]),
        ["default=five"]
    );
}

#[test]
fn what_is_missing_or_broken_is_named() {
    let error = |files: &[(&str, String)]| {
        let folder = folder(files);
        let error = TextModel::from_folder(folder.path(), &json!({}), None).unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with(&folder.path().display().to_string()),
            "{message}"
        );
        (error, message)
    };
    let (kind, message) = error(&[]);
    assert!(
        matches!(kind, TextError::MissingTokenizer { .. }),
        "{message}"
    );
    assert!(
        message.ends_with("has no tokenizer: tokenizer.json is missing"),
        "{message}"
    );
    let good = ("tokenizer.json", tokenizer_json().to_string());
    let cut = tokenizer_json().to_string();
    for files in [
        vec![("tokenizer.json", cut[..cut.len() / 2].to_owned())],
        vec![("tokenizer.json", "{}".to_owned())],
        vec![("tokenizer.json", "[1]".to_owned())],
        vec![good.clone(), ("tokenizer_config.json", "{".to_owned())],
        vec![
            good.clone(),
            (
                "tokenizer_config.json",
                r#"{"chat_template": 7}"#.to_owned(),
            ),
        ],
        vec![
            good.clone(),
            (
                "tokenizer_config.json",
                r#"{"chat_template": [{"name": "a"}]}"#.to_owned(),
            ),
        ],
        vec![
            good.clone(),
            (
                "tokenizer_config.json",
                r#"{"added_tokens_decoder": {"x": {"content": "a"}}}"#.to_owned(),
            ),
        ],
        vec![
            good,
            (
                "tokenizer_config.json",
                r#"{"added_tokens_decoder": {"4000000000": {"content": "a"}}}"#.to_owned(),
            ),
        ],
    ] {
        let (kind, message) = error(&files);
        assert!(matches!(kind, TextError::Json { .. }), "{message}");
    }
}

#[test]
fn a_metaspace_tokenizer_decodes_and_streams_its_spaces() {
    let vocab =
        json!({"<unk>": 0, "▁": 1, "G": 2, "o": 3, "d": 4, "▁Go": 5, "▁do": 6, "▁G": 7, "▁d": 8});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true},
        "post_processor": null,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": false, "dropout": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null, "vocab": vocab,
                  "merges": [["▁", "G"], ["▁G", "o"], ["▁", "d"], ["▁d", "o"]]}
    });
    let config = r#"{"additional_special_tokens": []}"#.to_owned();
    let model = load(&folder(&[
        ("tokenizer.json", json.to_string()),
        ("tokenizer_config.json", config),
    ]));
    let oracle: tokenizers::Tokenizer = json.to_string().parse().unwrap();
    let mut random = Random(5);
    for _ in 0..500 {
        let text = random.text(&["Go", "do", " ", "  ", "x", "G", "d"], 6);
        let ids = oracle
            .encode(text.as_str(), false)
            .unwrap()
            .get_ids()
            .to_vec();
        assert_eq!(
            model.tokenizer.encode(&text, false).unwrap(),
            ids,
            "{text:?}"
        );
        assert_eq!(
            model.tokenizer.decode(&ids, true),
            oracle.decode(&ids, true).unwrap(),
            "{text:?}"
        );
    }
    assert_eq!(model.tokenizer.encode("Go do", false).unwrap(), [5, 6]);
}

#[test]
fn a_path_without_a_model_is_refused() {
    assert!(matches!(
        TextModel::from_path(Path::new("no/such/model")),
        Err(TextError::Checkpoint(_))
    ));
}
