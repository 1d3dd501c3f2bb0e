//! Exactly one BOS, and every end token.

use burn_paged_text::{ChatOptions, GgufTokenizerData, Message, StopTokens, TextModel, TokenType};

use crate::common::{BOS, END, MESSAGE, START_HEADER, TURN, llama3, llama3_data, with_template};

fn hi() -> Vec<Message> {
    vec![Message::new("user", "Hi")]
}

#[test]
fn a_chat_prompt_has_the_one_bos_of_its_template() {
    let model = llama3();
    let tokens = model.encode_chat(&hi(), &ChatOptions::default()).unwrap();
    let bos = model.tokenizer.id(BOS).unwrap();
    assert_eq!(
        tokens[..2],
        [bos, model.tokenizer.id(START_HEADER).unwrap()]
    );
    assert_eq!(tokens.iter().filter(|&&id| id == bos).count(), 1);
    assert!(model.tokenizer.add_bos());
}

#[test]
fn a_plain_prompt_gets_one_bos() {
    let model = llama3();
    let tokens = model.tokenizer.encode("Hi", true).unwrap();
    assert_eq!(
        tokens,
        [
            model.tokenizer.id(BOS).unwrap(),
            model.tokenizer.id("Hi").unwrap()
        ]
    );
}

#[test]
fn a_template_without_bos_gets_none() {
    let model = with_template("{% for m in messages %}{{ m.content }}{% endfor %}");
    let tokens = model.encode_chat(&hi(), &ChatOptions::default()).unwrap();
    assert_eq!(tokens, [model.tokenizer.id("Hi").unwrap()]);
}

#[test]
fn a_base_model_refuses_chat() {
    let data = GgufTokenizerData {
        chat_templates: vec![],
        ..llama3_data()
    };
    let error = TextModel::from_gguf(&data)
        .unwrap()
        .encode_chat(&hi(), &ChatOptions::default());
    assert_eq!(
        error.unwrap_err().to_string(),
        "the model has no chat template"
    );
}

#[test]
fn every_end_token_of_a_gguf_file_counts() {
    let model = llama3();
    let expected: StopTokens = [END, TURN, MESSAGE]
        .iter()
        .map(|token| model.tokenizer.id(token).unwrap())
        .collect();
    assert_eq!(model.stop_tokens, expected);
    assert!(!model.stop_tokens.contains(model.tokenizer.id(BOS).unwrap()));
}

#[test]
fn end_tokens_are_named_by_role_and_are_control_tokens_whatever_their_type() {
    let mut data = llama3_data();
    let last = data.tokens.len() as u32;
    data.tokens.push("[stop]".into());
    data.token_types.push(TokenType::Normal);
    data.eot_id = Some(last);
    data.eom_id = Some(9999);
    let model = TextModel::from_gguf(&data).unwrap();
    assert!(model.stop_tokens.contains(last));
    assert!(!model.stop_tokens.contains(9999));
    assert!(model.tokenizer.is_special(last));
    assert_eq!(model.tokenizer.encode("[stop]", false).unwrap(), [last]);
    assert_eq!(model.tokenizer.encode_plain("[stop]").unwrap().len(), 6);
}
