//! The bytes of every token, and how a list of tokens becomes text.

/// What happens to the space that some tokenizers put before the first word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextStart {
    /// The text is kept as it is. Also the state after the start.
    Keep,
    /// Up to so many spaces at the start of the text are dropped.
    DropSpaces(usize),
    /// All spaces of the first token are dropped, unless it is an added token.
    DropSpacesOfFirstToken,
}

/// How one token decodes.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenEntry {
    pub(crate) bytes: Vec<u8>,
    /// An end-of-text, turn or other control token.
    pub(crate) special: bool,
    /// Found in the text as it is; never changed by the decoder.
    pub(crate) literal: bool,
}

/// The bytes of every token id, in one piece of memory.
#[derive(Debug)]
pub(crate) struct TokenTable {
    bytes: Vec<u8>,
    /// Token `id` is `bytes[offsets[id]..offsets[id + 1]]`.
    offsets: Vec<usize>,
    special: Vec<bool>,
    literal: Vec<bool>,
    start: TextStart,
}

impl TokenTable {
    pub(crate) fn new(entries: &[TokenEntry], start: TextStart) -> Self {
        let mut offsets = vec![0];
        let mut bytes = Vec::new();
        for entry in entries {
            bytes.extend_from_slice(&entry.bytes);
            offsets.push(bytes.len());
        }
        Self {
            bytes,
            offsets,
            special: entries.iter().map(|entry| entry.special).collect(),
            literal: entries.iter().map(|entry| entry.literal).collect(),
            start,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.special.len()
    }

    pub(crate) fn start(&self) -> TextStart {
        self.start
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The bytes of a token; `None` for an id that is not in the vocabulary.
    pub(crate) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        (index < self.len()).then(|| &self.bytes[self.offsets[index]..self.offsets[index + 1]])
    }

    /// Appends what `id` adds to a text that is in state `start`. An id that is not in the vocabulary adds nothing.
    pub(crate) fn append(
        &self,
        id: u32,
        skip_special: bool,
        start: &mut TextStart,
        out: &mut Vec<u8>,
    ) {
        let Some(bytes) = self.bytes(id) else { return };
        if skip_special && self.is_special(id) {
            return;
        }
        match *start {
            TextStart::Keep => out.extend_from_slice(bytes),
            TextStart::DropSpacesOfFirstToken => {
                let keep_all = self.literal[id as usize];
                out.extend(bytes.iter().filter(|&&byte| keep_all || byte != b' '));
                *start = TextStart::Keep;
            }
            TextStart::DropSpaces(limit) => {
                let spaces = bytes
                    .iter()
                    .take(limit)
                    .take_while(|&&byte| byte == b' ')
                    .count();
                out.extend_from_slice(&bytes[spaces..]);
                let done = spaces < bytes.len() || spaces == limit;
                *start = if done {
                    TextStart::Keep
                } else {
                    TextStart::DropSpaces(limit - spaces)
                };
            }
        }
    }

    /// The text of `ids`. Bytes that are no UTF-8 become U+FFFD, one for each piece that cannot be the start of a
    /// character.
    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        let mut start = self.start;
        for &id in ids {
            self.append(id, skip_special, &mut start, &mut bytes);
        }
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(start: TextStart) -> TokenTable {
        let entry = |text: &str, special| TokenEntry {
            bytes: text.as_bytes().to_vec(),
            special,
            literal: special,
        };
        TokenTable::new(
            &[
                entry(" a", false),
                entry("  b", false),
                entry("< s>", true),
                entry(" ", false),
            ],
            start,
        )
    }

    #[test]
    fn spaces_are_dropped_at_the_start_only() {
        let one = table(TextStart::DropSpaces(1));
        assert_eq!(one.decode(&[0, 0], true), "a a");
        assert_eq!(one.decode(&[1], true), " b");
        assert_eq!(one.decode(&[3, 0], true), " a");
        assert_eq!(one.decode(&[2, 0], true), "a");
        assert_eq!(one.decode(&[2, 0], false), "< s> a");
        let two = table(TextStart::DropSpaces(2));
        assert_eq!(two.decode(&[3, 0, 0], true), "a a");
        assert_eq!(two.decode(&[3, 1], true), " b");
        assert_eq!(table(TextStart::Keep).decode(&[0], true), " a");
    }

    #[test]
    fn the_first_token_may_lose_all_its_spaces() {
        let first = table(TextStart::DropSpacesOfFirstToken);
        assert_eq!(first.decode(&[1, 1], true), "b  b");
        assert_eq!(first.decode(&[2, 1], false), "< s>  b");
        assert_eq!(first.decode(&[3, 1], true), "  b");
    }

    #[test]
    fn unknown_ids_add_nothing() {
        assert_eq!(table(TextStart::Keep).decode(&[4, 0, u32::MAX], true), " a");
    }
}
