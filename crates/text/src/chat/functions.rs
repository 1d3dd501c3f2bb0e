//! What chat templates may call beyond what Jinja has.

use std::fmt;

use jiff::Zoned;
use minijinja::value::{Kwargs, Rest, Value, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

use super::python_json::Style;

/// Adds the functions and filters of the Hugging Face templates.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: &str| {
        strftime(format, &Zoned::now())
    });
    environment.add_function("cycler", minijinja_contrib::globals::cycler);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
}

/// The message of a template that refuses its conversation, found in the source of the error.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// The methods of Python's strings, lists and maps. Those of strings that `minijinja_contrib` lacks or does differently are
/// here.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
    match name {
        "title" => {
            let () = from_args(args)?;
            Ok(Value::from(title(text)))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "rsplit" => {
            let (separator, most): (&str, Option<usize>) = from_args(args)?;
            let pieces = most.map_or(usize::MAX, |most| most.saturating_add(1));
            let mut pieces: Vec<&str> = text.rsplitn(pieces, separator).collect();
            pieces.reverse();
            Ok(pieces.into_iter().collect())
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// A letter is a capital unless it follows another letter.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut after_letter = false;
    for character in text.chars() {
        match after_letter {
            true => out.extend(character.to_lowercase()),
            false => out.extend(character.to_uppercase()),
        }
        after_letter = character.is_alphabetic();
    }
    out
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let raised = Raised(message.to_string());
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception was called").with_source(raised))
}

fn strftime(format: &str, now: &Zoned) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now).map_err(|error| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now({format:?}): {error}"),
        )
    })
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn to_json(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let arguments = arguments.into_values();
    let (positional, named): (&[Value], Kwargs) = from_args(&arguments)?;
    let mut given = [const { None }; 4];
    if positional.len() > given.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    for (slot, value) in given.iter_mut().zip(positional) {
        *slot = Some(value.clone());
    }
    for (slot, name) in given
        .iter_mut()
        .zip(["ensure_ascii", "indent", "separators", "sort_keys"])
    {
        if named.has(name) {
            *slot = Some(named.get(name)?);
        }
    }
    named.assert_all_used()?;
    let [ensure_ascii, indent, separators, sort_keys] = given;
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let indent = indent
        .filter(|indent| !indent.is_none())
        .map(indentation)
        .transpose()?;
    let (item_separator, key_separator) = match separators.filter(|pair| !pair.is_none()) {
        Some(pair) => (separator(&pair, 0)?, separator(&pair, 1)?),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style {
        ensure_ascii: is_true(ensure_ascii),
        indent,
        item_separator,
        key_separator,
        sort_keys: is_true(sort_keys),
    };
    style.write(value).map(Value::from)
}

/// A number of spaces, or the text itself.
fn indentation(indent: Value) -> Result<String, Error> {
    /// More than any template means; keeps a broken one from asking for much memory.
    const MOST: usize = 64;
    match indent.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => {
            let spaces = usize::try_from(indent)?;
            if spaces > MOST {
                let detail = format!("an indent of {spaces} is too large");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
            Ok(" ".repeat(spaces))
        }
    }
}

fn separator(pair: &Value, index: usize) -> Result<String, Error> {
    let item = pair.get_item_by_index(index)?;
    item.as_str().map(str::to_owned).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOperation,
            "separators must be a pair of strings",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, Error> {
        let mut environment = Environment::new();
        add_to(&mut environment);
        let value = Value::from_pairs([("k", Value::from("<é>")), ("a", Value::from(1))]);
        environment.render_str(source, Value::from_pairs([("value", value)]))
    }

    #[test]
    fn tojson_takes_the_arguments_of_the_reference() {
        assert_eq!(
            render("{{ value|tojson }}").unwrap(),
            r#"{"k": "<é>", "a": 1}"#
        );
        assert_eq!(
            render("{{ value|tojson(true) }}").unwrap(),
            r#"{"k": "<\u00e9>", "a": 1}"#
        );
        assert_eq!(
            render("{{ value|tojson(indent=1) }}").unwrap(),
            "{\n \"k\": \"<é>\",\n \"a\": 1\n}"
        );
        assert_eq!(
            render("{{ value|tojson(separators=(',', ':'), sort_keys=true) }}").unwrap(),
            r#"{"a":1,"k":"<é>"}"#
        );
        assert_eq!(
            render("{{ value|tojson(ensure_ascii=False, indent=None) }}").unwrap(),
            r#"{"k": "<é>", "a": 1}"#
        );
        assert!(render("{{ value|tojson(colour=1) }}").is_err());
        assert!(render("{{ value|tojson(indent=100000000000) }}").is_err());
    }

    #[test]
    fn strftime_formats_as_python_does() {
        let time: Zoned = {
            let time = jiff::civil::date(2024, 7, 5).at(8, 9, 10, 0);
            time.to_zoned(jiff::tz::TimeZone::UTC).unwrap()
        };
        assert_eq!(strftime("%d %b %Y", &time).unwrap(), "05 Jul 2024");
        assert_eq!(
            strftime("%A, %B %d, %Y %H:%M:%S %j", &time).unwrap(),
            "Friday, July 05, 2024 08:09:10 187"
        );
        assert!(strftime("%!", &time).is_err());
    }

    #[test]
    fn methods_of_strings_are_those_of_python() {
        assert_eq!(
            render(r#"{{ "<b>a</b> iT's".title() }}"#).unwrap(),
            "<B>A</B> It'S"
        );
        assert_eq!(
            render("{{ 'a,b,c'.rsplit(',', 1) }}").unwrap(),
            "['a,b', 'c']"
        );
        assert_eq!(render("{{ 'a,b,c'.rsplit(',')[-1] }}").unwrap(), "c");
        assert_eq!(render("{{ 'abab'.removeprefix('ab') }}").unwrap(), "ab");
        assert_eq!(render("{{ 'abab'.removesuffix('x') }}").unwrap(), "abab");
        assert_eq!(
            render("{{ value.get('k') }}{{ value.get('x', 7) }}").unwrap(),
            "<é>7"
        );
        assert!(render("{{ 'a'.no_such_method() }}").is_err());
    }

    #[test]
    fn the_clock_is_that_of_the_machine() {
        let year: i32 = render("{{ strftime_now('%Y') }}").unwrap().parse().unwrap();
        assert!(year >= 2024, "{year}");
    }
}
