//! JSON as Python's `json.dumps` writes it, which is what models saw in training.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The arguments of `json.dumps` that templates use.
pub(super) struct Style {
    pub(super) ensure_ascii: bool,
    /// What one level of depth is indented by; everything is on one line without.
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) sort_keys: bool,
}

impl Style {
    /// The text of `value`.
    pub(super) fn write(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.value(value, 0, &mut out)?;
        Ok(out)
    }

    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.collect::<Vec<_>>();
                self.block(['[', ']'], items, depth, out, |item, out| {
                    self.value(&item, depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut keys = value.try_iter()?.collect::<Vec<_>>();
                if self.sort_keys {
                    keys.sort();
                }
                self.block(['{', '}'], keys, depth, out, |key, out| {
                    self.key(&key, out)?;
                    out.push_str(&self.key_separator);
                    self.value(&value.get_item(&key)?, depth + 1, out)
                })?;
            }
            kind => {
                let detail = format!("a value of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, detail));
            }
        }
        Ok(())
    }

    fn block(
        &self,
        [open, close]: [char; 2],
        items: Vec<Value>,
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        let empty = items.is_empty();
        out.push(open);
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            new_line(depth + 1, out);
            write(item, out)?;
        }
        if !empty {
            new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default(), out),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                out.push('"');
                self.value(key, 0, out)?;
                out.push('"');
            }
            kind => {
                let detail = format!("a key of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, detail));
            }
        }
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => out.push_str(&format!("\\u{:04x}", u32::from(character))),
                // Noncharacters are kept: one of them may be a mark of the guard, which has to be found again.
                '\u{fdd0}'..='\u{fdef}' => out.push(character),
                _ if self.ensure_ascii && !(' '..='~').contains(&character) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => float(number),
        _ => value.to_string(),
    }
}

/// Python's `repr` of a float: the shortest digits that give the number back, with an exponent outside 1e-4 to 1e16.
fn float(number: f64) -> String {
    if !number.is_finite() {
        return match number {
            _ if number.is_nan() => "NaN".into(),
            _ if number > 0.0 => "Infinity".into(),
            _ => "-Infinity".into(),
        };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => format!("{number:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn style(indent: Option<&str>) -> Style {
        Style {
            ensure_ascii: false,
            indent: indent.map(str::to_owned),
            item_separator: if indent.is_some() { "," } else { ", " }.into(),
            key_separator: ": ".into(),
            sort_keys: false,
        }
    }

    #[test]
    fn strings_are_escaped_as_python_does() {
        let text = Value::from("a\"b\\c\n\t\u{1}\u{7f}<é>'🙂/");
        let plain = style(None).write(&text).unwrap();
        assert_eq!(plain, "\"a\\\"b\\\\c\\n\\t\\u0001\u{7f}<é>'🙂/\"");
        let ascii = Style {
            ensure_ascii: true,
            ..style(None)
        }
        .write(&text)
        .unwrap();
        assert_eq!(ascii, r#""a\"b\\c\n\t\u0001\u007f<\u00e9>'\ud83d\ude42/""#);
    }

    #[test]
    fn numbers_are_written_as_python_does() {
        let cases = [
            (1.0, "1.0"),
            (-0.5, "-0.5"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-10, "1.5e-10"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (number, text) in cases {
            assert_eq!(style(None).write(&Value::from(number)).unwrap(), text);
        }
        assert_eq!(
            style(None).write(&Value::from(u64::MAX)).unwrap(),
            "18446744073709551615"
        );
    }

    #[test]
    fn nested_values_are_laid_out_as_python_does() {
        let value = Value::from_pairs([
            ("b", Value::from(vec![1, 2])),
            ("a", Value::from_pairs([("x", Value::from(()))])),
            ("e", Value::from(Vec::<Value>::new())),
        ]);
        let line = style(None).write(&value).unwrap();
        assert_eq!(line, r#"{"b": [1, 2], "a": {"x": null}, "e": []}"#);
        let block = style(Some("  ")).write(&value).unwrap();
        assert_eq!(
            block,
            "{\n  \"b\": [\n    1,\n    2\n  ],\n  \"a\": {\n    \"x\": null\n  },\n  \"e\": []\n}"
        );
        let sorted = Style {
            sort_keys: true,
            ..style(None)
        }
        .write(&value)
        .unwrap();
        assert_eq!(sorted, r#"{"a": {"x": null}, "b": [1, 2], "e": []}"#);
    }

    #[test]
    fn an_undefined_value_is_refused() {
        assert!(style(None).write(&Value::UNDEFINED).is_err());
    }
}
