//! Reads the `decoder` of `tokenizer.json` as a rule that gives the bytes of one token.

use serde_json::Value;
use tokenizers::DecoderWrapper;

use super::byte_level;
use super::token_table::TextStart;
use crate::error::TextError;

/// One step of a decoder, applied to a token by itself.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    /// The characters stand for bytes.
    ByteLevel,
    /// `<0x0A>` is the byte 10.
    ByteFallback,
    /// Every `from` becomes `to`.
    Replace { from: String, to: String },
    /// Up to so many `content` are removed at each end of the token.
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
}

/// How the tokens of a vocabulary become text.
///
/// Every step works on one token, so that the text of a list is its tokens' bytes one after the other and streaming needs
/// no look back. That holds for all byte-level and SentencePiece decoders; others are refused.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DecodeRule {
    steps: Vec<Step>,
    pub(crate) start: TextStart,
}

impl DecodeRule {
    /// The rule of a decoder.
    ///
    /// # Errors
    /// `UnsupportedDecoder` if there is none, or it joins tokens in another way than by their bytes.
    pub(crate) fn new(decoder: Option<&DecoderWrapper>) -> Result<Self, TextError> {
        let Some(decoder) = decoder else {
            return Err(TextError::UnsupportedDecoder("there is none".into()));
        };
        let json = serde_json::to_value(decoder)
            .map_err(|error| TextError::UnsupportedDecoder(error.to_string()))?;
        let mut rule = Self {
            steps: Vec::new(),
            start: TextStart::Keep,
        };
        let mut fused = false;
        rule.add(&json, &mut fused)?;
        Ok(rule)
    }

    fn add(&mut self, json: &Value, fused: &mut bool) -> Result<(), TextError> {
        let unsupported = || TextError::UnsupportedDecoder(json.to_string());
        match json["type"].as_str() {
            Some("Sequence") => {
                let parts = json["decoders"].as_array().ok_or_else(unsupported)?;
                parts.iter().try_for_each(|part| self.add(part, fused))?;
            }
            Some("ByteLevel") => self.steps.push(Step::ByteLevel),
            Some("ByteFallback") => self.steps.push(Step::ByteFallback),
            Some("Fuse") => *fused = true,
            Some("Replace") => {
                let from = json["pattern"]["String"].as_str().ok_or_else(unsupported)?;
                let to = json["content"].as_str().ok_or_else(unsupported)?;
                self.steps.push(Step::Replace {
                    from: from.to_owned(),
                    to: to.to_owned(),
                });
            }
            Some("Metaspace") => {
                let from = json["replacement"].as_str().ok_or_else(unsupported)?;
                self.steps.push(Step::Replace {
                    from: from.to_owned(),
                    to: " ".to_owned(),
                });
                if json["prepend_scheme"] != "never" {
                    self.start = TextStart::DropSpacesOfFirstToken;
                }
            }
            Some("Strip") => self.add_strip(json, *fused)?,
            _ => return Err(unsupported()),
        }
        Ok(())
    }

    fn add_strip(&mut self, json: &Value, fused: bool) -> Result<(), TextError> {
        let unsupported = || TextError::UnsupportedDecoder(json.to_string());
        let content = json["content"]
            .as_str()
            .and_then(|text| text.chars().next());
        let content = content.ok_or_else(unsupported)?;
        let number = |key: &str| {
            json[key]
                .as_u64()
                .and_then(|number| usize::try_from(number).ok())
        };
        let start = number("start").ok_or_else(unsupported)?;
        let stop = number("stop").ok_or_else(unsupported)?;
        match (fused, content, stop) {
            (false, _, _) => self.steps.push(Step::Strip {
                content,
                start,
                stop,
            }),
            (true, ' ', 0) => self.start = TextStart::DropSpaces(start),
            // The end of a text is not known while it streams.
            (true, _, _) => return Err(unsupported()),
        }
        Ok(())
    }

    /// The bytes of a token of the model's vocabulary.
    pub(crate) fn bytes(&self, token: &str) -> Vec<u8> {
        let mut text = token.to_owned();
        for step in &self.steps {
            match step {
                Step::ByteLevel => {
                    return byte_level::decode(&text).unwrap_or_else(|| text.into_bytes());
                }
                Step::ByteFallback => {
                    if let Some(byte) = fallback_byte(&text) {
                        return vec![byte];
                    }
                }
                Step::Replace { from, to } => text = text.replace(from.as_str(), to),
                Step::Strip {
                    content,
                    start,
                    stop,
                } => text = strip(&text, *content, *start, *stop),
            }
        }
        text.into_bytes()
    }

    /// The bytes of an added token that is no control token. A byte-level vocabulary spells these as they are.
    pub(crate) fn added_bytes(&self, token: &str) -> Vec<u8> {
        if self.steps.contains(&Step::ByteLevel) {
            token.into()
        } else {
            self.bytes(token)
        }
    }
}

/// The byte that a token like `<0x0A>` stands for.
pub(crate) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let hexadecimal = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    hexadecimal
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

fn strip(text: &str, content: char, start: usize, stop: usize) -> String {
    let skip = text
        .chars()
        .take(start)
        .take_while(|&c| c == content)
        .count();
    let rest: Vec<char> = text.chars().skip(skip).collect();
    let cut = rest
        .iter()
        .rev()
        .take(stop)
        .take_while(|&&c| c == content)
        .count();
    rest[..rest.len() - cut].iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(json: &str) -> Result<DecodeRule, TextError> {
        let decoder: DecoderWrapper = serde_json::from_str(json).unwrap();
        DecodeRule::new(Some(&decoder))
    }

    #[test]
    fn a_sentencepiece_decoder() {
        let rule = rule(
            r#"{"type":"Sequence","decoders":[
                {"type":"Replace","pattern":{"String":"▁"},"content":" "},
                {"type":"ByteFallback"},{"type":"Fuse"},
                {"type":"Strip","content":" ","start":1,"stop":0}]}"#,
        )
        .unwrap();
        assert_eq!(rule.start, TextStart::DropSpaces(1));
        assert_eq!(rule.bytes("▁day▁"), b" day ");
        assert_eq!(rule.bytes("<0xF0>"), [0xF0]);
        assert_eq!(rule.bytes("<0xF0"), b"<0xF0");
        assert_eq!(rule.bytes("<0x+1>"), b"<0x+1>");
    }

    #[test]
    fn a_metaspace_and_a_byte_level_decoder() {
        let metaspace = rule(
            r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"first","split":false}"#,
        )
        .unwrap();
        assert_eq!(metaspace.start, TextStart::DropSpacesOfFirstToken);
        assert_eq!(metaspace.bytes("▁▁x"), b"  x");
        let byte_level = rule(
            r#"{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#,
        )
        .unwrap();
        assert_eq!(byte_level.bytes("ĠÃ©"), " é".as_bytes());
        assert_eq!(byte_level.added_bytes("é"), "é".as_bytes());
    }

    #[test]
    fn strip_before_fuse_works_on_each_token() {
        let rule = rule(r#"{"type":"Strip","content":"_","start":1,"stop":2}"#).unwrap();
        assert_eq!(rule.bytes("__a___"), b"_a_");
        assert_eq!(rule.bytes("_"), b"");
    }

    #[test]
    fn decoders_that_look_beyond_a_token_are_refused() {
        for json in [
            r###"{"type":"WordPiece","prefix":"##","cleanup":true}"###,
            r#"{"type":"Replace","pattern":{"Regex":"a+"},"content":"b"}"#,
            r#"{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":" ","start":0,"stop":1}]}"#,
        ] {
            assert!(
                matches!(rule(json), Err(TextError::UnsupportedDecoder(_))),
                "{json}"
            );
        }
        assert!(DecodeRule::new(None).is_err());
    }
}
