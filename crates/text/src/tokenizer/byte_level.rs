//! The alphabet of byte-level vocabularies: each byte has a printable character that stands for it.

use std::sync::LazyLock;

/// The first character for bytes that have no printable character of their own.
const FIRST_SUBSTITUTE: u32 = 256;

/// The character that stands for each byte: itself where it is printable and no space in Latin-1, otherwise the next free
/// one from U+0100 on.
///
/// # Source
/// The GPT-2 encoder.
static CHARACTERS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = FIRST_SUBSTITUTE;
    std::array::from_fn(|byte| match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte as u8),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    })
});

/// The byte behind each character up to the last substitute.
static BYTES: LazyLock<Vec<Option<u8>>> = LazyLock::new(|| {
    let last = CHARACTERS
        .iter()
        .map(|&character| character as usize)
        .max()
        .unwrap_or(0);
    let mut bytes = vec![None; last + 1];
    for (byte, &character) in CHARACTERS.iter().enumerate() {
        bytes[character as usize] = Some(byte as u8);
    }
    bytes
});

/// The bytes that `token` spells, or `None` if a character of it is not in the alphabet.
pub(crate) fn decode(token: &str) -> Option<Vec<u8>> {
    token
        .chars()
        .map(|character| BYTES.get(character as usize).copied().flatten())
        .collect()
}

/// The spelling of `text` in the alphabet.
#[cfg(test)]
pub(crate) fn encode(text: &[u8]) -> String {
    text.iter()
        .map(|&byte| CHARACTERS[usize::from(byte)])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
    }

    #[test]
    fn known_spellings() {
        assert_eq!(decode("ĠHi"), Some(b" Hi".to_vec()));
        assert_eq!(decode("Ċ"), Some(b"\n".to_vec()));
        assert_eq!(decode("Ã©"), Some("é".as_bytes().to_vec()));
        assert_eq!(decode("a b"), None);
        assert_eq!(decode("｜"), None);
    }
}
