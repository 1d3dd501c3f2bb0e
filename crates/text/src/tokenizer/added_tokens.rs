//! Tokens that are found in the text as they are, before it is split into words: control tokens and user-defined ones.

use std::collections::HashMap;
use std::ops::Range;

use serde::Deserialize;

/// One token of `added_tokens` in `tokenizer.json`, or of type control or user-defined in a GGUF file.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct AddedToken {
    #[serde(default)]
    pub(crate) id: u32,
    pub(crate) content: String,
    /// Control tokens; the others are ordinary text that is always one token.
    #[serde(default)]
    pub(crate) special: bool,
    /// Found only between characters that are no letters or digits.
    #[serde(default)]
    pub(crate) single_word: bool,
    /// Takes the white space before it along.
    #[serde(default)]
    pub(crate) lstrip: bool,
    /// Takes the white space after it along.
    #[serde(default)]
    pub(crate) rstrip: bool,
    /// Looked for in the normalized text. Control tokens are looked for in the raw text whatever this says.
    #[serde(default)]
    pub(crate) normalized: bool,
}

impl AddedToken {
    pub(crate) fn new(id: u32, content: impl Into<String>, special: bool) -> Self {
        Self {
            id,
            content: content.into(),
            special,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
        }
    }
}

/// A place where a token was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) range: Range<usize>,
    pub(crate) id: u32,
}

/// Finds a set of tokens in text: the leftmost, and of those the longest.
#[derive(Debug, Default)]
pub(crate) struct TokenFinder {
    tokens: Vec<AddedToken>,
    by_content: HashMap<Vec<u8>, usize>,
    /// For each first byte, the lengths that tokens with it have, longest first. Empty for most bytes, which is what
    /// makes the scan fast.
    lengths: Vec<Vec<usize>>,
}

impl TokenFinder {
    /// `tokens` with the spelling under which each is looked for. Empty spellings never match.
    pub(crate) fn new(tokens: impl IntoIterator<Item = (AddedToken, String)>) -> Self {
        let mut finder = Self {
            lengths: vec![Vec::new(); 256],
            ..Self::default()
        };
        for (token, spelling) in tokens {
            let Some(&first) = spelling.as_bytes().first() else {
                continue;
            };
            let lengths = &mut finder.lengths[usize::from(first)];
            if !lengths.contains(&spelling.len()) {
                lengths.push(spelling.len());
                lengths.sort_unstable_by(|a, b| b.cmp(a));
            }
            finder
                .by_content
                .insert(spelling.into_bytes(), finder.tokens.len());
            finder.tokens.push(token);
        }
        finder
    }

    /// All tokens in `text`, in order and apart. A place that `allowed` refuses (it gets the token and the bytes of its
    /// spelling, without stripped space) is looked at again for shorter tokens and for tokens that begin further right.
    pub(crate) fn find(
        &self,
        text: &str,
        allowed: impl Fn(&AddedToken, &Range<usize>) -> bool,
    ) -> Vec<Found> {
        let mut found: Vec<Found> = Vec::new();
        let (mut position, mut free_from) = (0, 0);
        while position < text.len() {
            match self.token_at(text, position, &allowed) {
                None => position += 1,
                Some((token, spelled)) => {
                    position = spelled.end;
                    let range = stripped(token, text, spelled, free_from);
                    free_from = range.end;
                    // Space that the token took along cannot be part of the next one.
                    position = position.max(free_from);
                    found.push(Found {
                        range,
                        id: token.id,
                    });
                }
            }
        }
        found
    }

    fn token_at(
        &self,
        text: &str,
        start: usize,
        allowed: &impl Fn(&AddedToken, &Range<usize>) -> bool,
    ) -> Option<(&AddedToken, Range<usize>)> {
        let bytes = text.as_bytes();
        let lengths = self.lengths.get(usize::from(bytes[start]))?;
        lengths.iter().find_map(|&length| {
            let range = start..start + length;
            let index = *self.by_content.get(bytes.get(range.clone())?)?;
            let token = &self.tokens[index];
            let whole_word = !token.single_word || stands_alone(text, &range);
            (whole_word && allowed(token, &range)).then_some((token, range))
        })
    }

    /// Every position where a spelling begins, also inside of another.
    pub(crate) fn starts(&self, text: &str) -> Vec<usize> {
        let begins = |&start: &usize| self.token_at(text, start, &|_, _| true).is_some();
        (0..text.len()).filter(begins).collect()
    }

    /// The tokens, in no order.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = &AddedToken> {
        self.tokens.iter()
    }
}

/// The range of `spelled` with the white space that the token takes along; not before `free_from`.
fn stripped(
    token: &AddedToken,
    text: &str,
    spelled: Range<usize>,
    free_from: usize,
) -> Range<usize> {
    let Range { mut start, mut end } = spelled;
    if token.lstrip {
        start = text[..start].trim_end().len().max(free_from);
    }
    if token.rstrip {
        end = text.len() - text[end..].trim_start().len();
    }
    start..end
}

fn stands_alone(text: &str, range: &Range<usize>) -> bool {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    !text[..range.start].ends_with(is_word) && !text[range.end..].starts_with(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finder(tokens: &[AddedToken]) -> TokenFinder {
        TokenFinder::new(
            tokens
                .iter()
                .map(|token| (token.clone(), token.content.clone())),
        )
    }

    fn ids(found: &[Found]) -> Vec<(u32, Range<usize>)> {
        found
            .iter()
            .map(|found| (found.id, found.range.clone()))
            .collect()
    }

    #[test]
    fn the_longest_of_the_leftmost_wins() {
        let finder = finder(&[
            AddedToken::new(1, "<a>", true),
            AddedToken::new(2, "<a><b>", true),
            AddedToken::new(3, "<b>", true),
        ]);
        let found = finder.find("x<a><b><b>é<a>", |_, _| true);
        assert_eq!(ids(&found), [(2, 1..7), (3, 7..10), (1, 12..15)]);
    }

    #[test]
    fn a_refused_match_gives_way_to_shorter_and_later_ones() {
        let finder = finder(&[
            AddedToken::new(1, "<a>", true),
            AddedToken::new(2, "x<a>", true),
        ]);
        let found = finder.find("x<a>", |token, _| token.id != 2);
        assert_eq!(ids(&found), [(1, 1..4)]);
    }

    #[test]
    fn stripping_takes_white_space_but_not_that_of_the_token_before() {
        let mut left = AddedToken::new(1, "<l>", true);
        left.lstrip = true;
        let mut right = AddedToken::new(2, "<r>", true);
        right.rstrip = true;
        let finder = finder(&[left, right]);
        let found = finder.find("a  <l> b <r>  <l>c", |_, _| true);
        assert_eq!(ids(&found), [(1, 1..6), (2, 9..14), (1, 14..17)]);
    }

    #[test]
    fn a_single_word_token_needs_room() {
        let mut word = AddedToken::new(1, "ab", false);
        word.single_word = true;
        let finder = finder(&[word]);
        let found = finder.find("ab xab ab_ (ab) äab", |_, _| true);
        assert_eq!(ids(&found), [(1, 0..2), (1, 12..14)]);
    }
}
