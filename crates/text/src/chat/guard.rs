//! Keeps text of the user from forging control tokens.
//!
//! A prompt is rendered to text and then encoded, and in that text `<|im_end|>` is a control token whoever wrote it. To
//! tell the template's from the user's, each spelling of a control token in a text of the user gets a mark after its first
//! character: a private-use character that occurs nowhere else. The template is rendered with the marked text, the marks
//! are taken out again, and a control token that had one inside is encoded as plain text.
//!
//! Halves of a spelling at the ends of a text are marked too, because what the template or another text puts beside them
//! may complete it.
//!
//! So the prompt is letter for letter what the reference renders, as long as the template does not itself look for control
//! tokens in the text of the user. If it does, it does not find the marked ones; the text may differ then, but it is safe.

use std::collections::{BTreeSet, HashSet};

use serde_json::Value;

use crate::error::TextError;
use crate::tokenizer::{AddedToken, TokenFinder};

/// Characters without a meaning of their own: noncharacters, which no sensible text holds, then the private-use areas.
const MARKS: [std::ops::RangeInclusive<char>; 4] = [
    '\u{FDD0}'..='\u{FDEF}',
    '\u{E000}'..='\u{F8FF}',
    '\u{F0000}'..='\u{FFFFD}',
    '\u{100000}'..='\u{10FFFD}',
];

/// Knows the spellings of a model's control tokens.
#[derive(Debug)]
pub(crate) struct Guard {
    finder: TokenFinder,
    /// Everything that a spelling may begin with, without the spelling itself.
    beginnings: Fragments,
    /// Everything that a spelling may end with.
    endings: Fragments,
}

/// A set of texts that is asked for the ends of other texts.
#[derive(Debug, Default)]
struct Fragments {
    texts: HashSet<String>,
    longest: usize,
}

/// A rendered prompt without its marks, and where they were.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unmarked {
    pub(crate) text: String,
    /// Byte positions in `text`, sorted.
    pub(crate) marks: Vec<usize>,
}

impl Guard {
    pub(crate) fn new<'a>(spellings: impl Iterator<Item = &'a str>) -> Self {
        let spellings: Vec<&str> = spellings.collect();
        let finder = TokenFinder::new(spellings.iter().map(|&spelling| {
            let token = AddedToken::new(0, spelling, true);
            (token, spelling.to_owned())
        }));
        let (mut beginnings, mut endings) = (Fragments::default(), Fragments::default());
        for spelling in spellings {
            let inner = spelling.char_indices().skip(1).map(|(at, _)| at);
            // A spelling that begins (or ends) with a letter is left out: its fragments are words, and templates compare
            // words such as roles and types.
            if !spelling.starts_with(char::is_alphanumeric) {
                inner
                    .clone()
                    .for_each(|at| beginnings.insert(&spelling[..at]));
            }
            if !spelling.ends_with(char::is_alphanumeric) {
                inner.for_each(|at| endings.insert(&spelling[at..]));
            }
        }
        Self {
            finder,
            beginnings,
            endings,
        }
    }

    /// Marks all texts in the variables of a template. `others` are further texts that end up in the prompt. Gives the
    /// mark, or `None` if there was nothing to mark.
    ///
    /// # Errors
    /// `NoMarkLeft` if the texts hold every possible mark.
    pub(crate) fn mark(
        &self,
        context: &mut Value,
        others: &[&str],
    ) -> Result<Option<char>, TextError> {
        let mut used = BTreeSet::new();
        for text in others {
            collect_marks(text, &mut used);
        }
        visit(context, &mut |text| collect_marks(text, &mut used));
        let mark = MARKS
            .into_iter()
            .flatten()
            .find(|mark| !used.contains(mark));
        let mark = mark.ok_or(TextError::NoMarkLeft)?;
        let mut found = false;
        self.mark_value(context, mark, &mut found);
        Ok(found.then_some(mark))
    }

    fn mark_value(&self, value: &mut Value, mark: char, found: &mut bool) {
        match value {
            Value::String(text) => self.mark_text(text, true, mark, found),
            Value::Array(items) => {
                items
                    .iter_mut()
                    .for_each(|item| self.mark_value(item, mark, found));
            }
            Value::Object(fields) => {
                // Templates look fields up by name, so only whole spellings are marked there.
                let marked = std::mem::take(fields)
                    .into_iter()
                    .map(|(mut key, mut value)| {
                        self.mark_text(&mut key, false, mark, found);
                        self.mark_value(&mut value, mark, found);
                        (key, value)
                    });
                *fields = marked.collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn mark_text(&self, text: &mut String, with_ends: bool, mark: char, found: &mut bool) {
        let first_length = |at: usize| text[at..].chars().next().map_or(0, char::len_utf8);
        let starts = self.finder.starts(text).into_iter();
        let mut positions: BTreeSet<usize> = starts.map(|at| at + first_length(at)).collect();
        if with_ends {
            // Templates trim text, and a mark must not keep them from it: it goes inside the white space.
            for end in [text.trim_end().len(), text.len()] {
                if self.beginnings.end(&text[..end]) {
                    positions.insert(end);
                }
            }
            for start in [text.len() - text.trim_start().len(), 0] {
                if self.endings.start(&text[start..]) {
                    positions.insert(start);
                }
            }
        }
        *found |= !positions.is_empty();
        for &position in positions.iter().rev() {
            text.insert(position, mark);
        }
    }
}

impl Fragments {
    fn insert(&mut self, fragment: &str) {
        self.longest = self.longest.max(fragment.len());
        self.texts.insert(fragment.to_owned());
    }

    /// Whether `text` ends with a fragment.
    fn end(&self, text: &str) -> bool {
        let starts = text.char_indices().rev().map(|(at, _)| &text[at..]);
        starts
            .take_while(|end| end.len() <= self.longest)
            .any(|end| self.texts.contains(end))
    }

    /// Whether `text` starts with a fragment.
    fn start(&self, text: &str) -> bool {
        let ends = text
            .char_indices()
            .map(|(at, first)| &text[..at + first.len_utf8()]);
        ends.take_while(|start| start.len() <= self.longest)
            .any(|start| self.texts.contains(start))
    }
}

/// Takes the marks out of a prompt.
pub(crate) fn unmark(text: &str, mark: char) -> Unmarked {
    let mut unmarked = Unmarked {
        text: String::with_capacity(text.len()),
        marks: Vec::new(),
    };
    for piece in text.split_inclusive(mark) {
        match piece.strip_suffix(mark) {
            Some(piece) => {
                unmarked.text.push_str(piece);
                unmarked.marks.push(unmarked.text.len());
            }
            None => unmarked.text.push_str(piece),
        }
    }
    unmarked
}

fn collect_marks(text: &str, used: &mut BTreeSet<char>) {
    let is_mark = |character: &char| MARKS.iter().any(|range| range.contains(character));
    used.extend(text.chars().filter(is_mark));
}

/// Calls `each` with every text and every key.
fn visit(value: &Value, each: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => each(text),
        Value::Array(items) => items.iter().for_each(|item| visit(item, each)),
        Value::Object(fields) => {
            for (key, value) in fields {
                each(key);
                visit(value, each);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MARK: char = '\u{FDD0}';

    fn marked(text: &str) -> String {
        let guard = Guard::new(["<|end|>", "<|end|><b>", "[INST]", "IMG"].into_iter());
        let mut context = json!({ "text": text });
        guard.mark(&mut context, &[]).unwrap();
        context["text"].as_str().unwrap().replace(MARK, "#")
    }

    #[test]
    fn spellings_are_marked_after_their_first_character() {
        assert_eq!(marked("a<|end|>b"), "a<#|end|>b");
        assert_eq!(marked("<|end|><b>[INST]"), "<#|end|><b>[#INST]");
        assert_eq!(marked("an IMG here"), "an I#MG here");
        assert_eq!(marked("nothing here"), "nothing here");
    }

    #[test]
    fn halves_at_the_ends_are_marked_inside_the_white_space() {
        assert_eq!(marked("a <|en \n"), "a <|en# \n");
        assert_eq!(marked("  d|> a"), "  #d|> a");
        assert_eq!(marked("<"), "<#");
        assert_eq!(marked(">"), "#>");
        // Halves in the middle cannot be completed.
        assert_eq!(marked("a <|en b"), "a <|en b");
        // Halves of words are left alone: templates compare words.
        assert_eq!(marked("I"), "I");
        assert_eq!(marked("G"), "G");
    }

    #[test]
    fn keys_are_marked_only_if_they_hold_a_whole_spelling() {
        let guard = Guard::new(["<|end|>"].into_iter());
        let mut context = json!({"<": {"x<|end|>": ["<|end|>", 1, null]}});
        assert_eq!(guard.mark(&mut context, &[]).unwrap(), Some(MARK));
        let text = context.to_string().replace(MARK, "#");
        assert_eq!(text, r##"{"<":{"x<#|end|>":["<#|end|>",1,null]}}"##);
    }

    #[test]
    fn the_mark_occurs_nowhere_else() {
        let guard = Guard::new(["<|end|>"].into_iter());
        let mut context = json!({"\u{FDD0}": "\u{FDD1}<|end|>"});
        assert_eq!(
            guard.mark(&mut context, &["\u{FDD2}"]).unwrap(),
            Some('\u{FDD3}')
        );
        let mut clean = json!({"text": "clean"});
        assert_eq!(guard.mark(&mut clean, &[]).unwrap(), None);
        let every: String = MARKS.into_iter().flatten().collect();
        let mut full = json!({ "text": every });
        assert!(matches!(
            guard.mark(&mut full, &[]),
            Err(TextError::NoMarkLeft)
        ));
    }

    #[test]
    fn marks_are_taken_out_again() {
        let Unmarked { text, marks } = unmark("é#b##c#", '#');
        assert_eq!((text.as_str(), marks), ("ébc", vec![2, 3, 3, 4]));
        assert_eq!(
            unmark("", '#'),
            Unmarked {
                text: String::new(),
                marks: vec![]
            }
        );
    }
}
