//! Chat templates against Hugging Face transformers.

use burn_paged_text::{ChatOptions, ChatTemplate, ChatTemplates, Message, TextError};
use serde_json::{Value, json};

use crate::common::{fixture, with_template};

fn messages(json: Value) -> Vec<Message> {
    serde_json::from_value(json).unwrap()
}

#[test]
fn rendered_texts_and_refusals_equal_the_reference() {
    let fixture = fixture("templates.json");
    let named = fixture["named_tokens"].as_object().unwrap();
    let named: Vec<(&str, String)> = named
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str().unwrap().to_owned()))
        .collect();
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() >= 30);
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let source = fixture["templates"][name].as_str().unwrap();
        let template = ChatTemplate::new(name, source).unwrap();
        let mut options = ChatOptions::default();
        options.add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap_or(false);
        options.tools = case["tools"].as_array().cloned();
        let result = template.render(&messages(case["messages"].clone()), &options, &named);
        match (case["text"].as_str(), result) {
            (Some(text), result) => assert_eq!(result.unwrap(), text, "{case}"),
            (None, Err(TextError::TemplateRaised { message })) => {
                assert_eq!(message, case["error"])
            }
            // What the engines say about a missing element differs.
            (None, result) => assert!(
                matches!(result, Err(TextError::TemplateFailed { .. })),
                "{case}"
            ),
        }
    }
}

#[test]
fn a_template_that_does_not_parse_is_refused_with_its_place() {
    let error = ChatTemplate::new("tool_use", "a\n{% for %}")
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("chat template \"tool_use\" does not parse: line 2: "),
        "{error}"
    );
}

#[test]
fn a_failing_template_says_what_and_where() {
    let template = ChatTemplate::new("default", "\n{{ missing.field }}").unwrap();
    let error = template
        .render(&[], &ChatOptions::default(), &[])
        .unwrap_err();
    assert!(
        matches!(&error, TextError::TemplateFailed { reason } if reason.starts_with("line 2: ")),
        "{error}"
    );
}

#[test]
fn variables_reach_the_template_but_not_in_place_of_the_conversation() {
    let template = ChatTemplate::new("default", "{{ enable_thinking }}{{ documents }}").unwrap();
    let mut options = ChatOptions::default();
    options
        .variables
        .insert("enable_thinking".into(), json!(false));
    assert_eq!(template.render(&[], &options, &[]).unwrap(), "FalseNone");
    options.variables.insert("messages".into(), json!([]));
    let error = template.render(&[], &options, &[]).unwrap_err();
    assert!(matches!(error, TextError::ReservedVariable { name } if name == "messages"));
}

#[test]
fn the_template_is_chosen_by_name_and_by_tools() {
    let named = |name: &str| (name.to_owned(), name.to_owned());
    let both = ChatTemplates::new([named("default"), named("tool_use")]).unwrap();
    let mut options = ChatOptions::default();
    assert_eq!(both.select(&options).unwrap().source(), "default");
    options.tools = Some(vec![]);
    assert_eq!(both.select(&options).unwrap().source(), "tool_use");
    options.template = Some("default".into());
    assert_eq!(both.select(&options).unwrap().source(), "default");
    options.template = Some("rag".into());
    let error = both.select(&options).unwrap_err().to_string();
    assert_eq!(
        error,
        "the model has no chat template \"rag\" (it has: default, tool_use)"
    );
    let none = ChatTemplates::default();
    assert!(matches!(
        none.select(&options),
        Err(TextError::NoChatTemplate)
    ));
}

#[test]
fn content_parts_reach_templates_that_show_them_and_are_joined_for_others() {
    let parts = messages(json!([{"role": "user", "content": [
        {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]));
    let options = ChatOptions::default();
    let plain = ChatTemplate::new(
        "default",
        "{% for m in messages %}{{ m.content }};{% endfor %}",
    );
    assert_eq!(
        plain.unwrap().render(&parts, &options, &[]).unwrap(),
        "one\ntwo;"
    );
    let walking =
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}";
    let walking = ChatTemplate::new("default", walking).unwrap();
    assert_eq!(walking.render(&parts, &options, &[]).unwrap(), "[one][two]");
    let image =
        messages(json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]));
    let error = with_template("{{ messages[0].content }}")
        .encode_chat(&image, &options)
        .unwrap_err();
    assert!(
        matches!(error, TextError::UnsupportedContent { kind, index: 0 } if kind == "image_url")
    );
}
