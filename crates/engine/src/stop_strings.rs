//! Finds stop strings in a stream of text, and holds back what could be the beginning of one.

/// Searches text that comes in pieces.
///
/// The result does not depend on how the text is cut: it is that of feeding it character by character. So of several
/// matches the one that ends first counts, and of those that end together the longest.
#[derive(Debug, Default)]
pub(crate) struct StopStrings {
    stops: Vec<String>,
    /// Text that was not let go: the longest end of it that is a beginning of a stop string. Never holds a match.
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Scan {
    /// Text that is certain not to belong to a stop string.
    pub(crate) text: String,
    /// The stop string that was found; its text, and everything behind it, is gone.
    pub(crate) stop: Option<String>,
}

impl StopStrings {
    /// A search for these strings, none of which may be empty.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        debug_assert!(
            stops.iter().all(|stop| !stop.is_empty()),
            "an empty stop string"
        );
        Self {
            stops,
            held: String::new(),
        }
    }

    /// Adds a piece of text.
    pub(crate) fn push(&mut self, piece: &str) -> Scan {
        if self.stops.is_empty() {
            return Scan {
                text: piece.to_owned(),
                stop: None,
            };
        }
        self.held.push_str(piece);
        if let Some((start, stop)) = self.first_match() {
            let stop = Some(stop.to_owned());
            self.held.truncate(start);
            return Scan {
                text: std::mem::take(&mut self.held),
                stop,
            };
        }
        let keep_from = self.held.len() - self.longest_open_end();
        let rest = self.held.split_off(keep_from);
        Scan {
            text: std::mem::replace(&mut self.held, rest),
            stop: None,
        }
    }

    /// Lets the held text go: no more will come.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The match that ends first, the longest of those that end together.
    fn first_match(&self) -> Option<(usize, &str)> {
        let found = |stop: &String| {
            self.held
                .find(stop.as_str())
                .map(|start| (start, stop.len()))
        };
        let matches = self
            .stops
            .iter()
            .filter_map(|stop| Some((found(stop)?, stop.as_str())));
        matches
            .min_by_key(|((start, len), _)| (start + len, *start))
            .map(|((start, _), stop)| (start, stop))
    }

    /// Bytes at the end of the held text that are a beginning of a stop string; the most of them.
    fn longest_open_end(&self) -> usize {
        let open_end = |stop: &String| {
            let prefixes = stop.char_indices().map(|(end, _)| &stop[..end]).rev();
            prefixes
                .map(str::len)
                .find(|len| self.held.ends_with(&stop[..*len]))
                .unwrap_or(0)
        };
        self.stops.iter().map(open_end).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole streamed text and the stop string.
    fn run(pieces: &[&str], stops: &[&str]) -> (String, Option<String>) {
        let mut search = StopStrings::new(stops.iter().map(|stop| stop.to_string()).collect());
        let mut text = String::new();
        for piece in pieces {
            let scan = search.push(piece);
            text.push_str(&scan.text);
            if scan.stop.is_some() {
                return (text, scan.stop);
            }
        }
        text.push_str(&search.finish());
        (text, None)
    }

    #[track_caller]
    fn assert_run(pieces: &[&str], stops: &[&str], text: &str, stop: Option<&str>) {
        assert_eq!(
            run(pieces, stops),
            (text.to_owned(), stop.map(str::to_owned))
        );
    }

    #[test]
    fn stop_strings_across_pieces() {
        assert_run(&["LM", "N", "OP", "Q"], &["LMNOPQ"], "", Some("LMNOPQ"));
        assert_run(&["LM", "N", "OX"], &["LMNOPQ"], "LMNOX", None);
        assert_run(
            &["the l", "ate", " train"],
            &["ate tr"],
            "the l",
            Some("ate tr"),
        );
        assert_run(&["red green blue"], &["green"], "red ", Some("green"));
        assert_run(&["a", "b", "c", "d"], &["cd", "bcd"], "a", Some("bcd"));
        assert_run(&["a", "b"], &[], "ab", None);
    }

    #[test]
    fn what_cannot_be_a_stop_string_is_not_held() {
        let mut search = StopStrings::new(vec!["abab!".to_owned(), "ü?".to_owned()]);
        let texts =
            ["xa", "b", "ab", "ab", "c", "ü", "ü", "z"].map(|piece| search.push(piece).text);
        assert_eq!(texts, ["x", "", "", "ab", "ababc", "", "ü", "üz"]);
        assert_eq!(search.finish(), "");
    }

    #[test]
    fn pieces_do_not_matter() {
        let alphabet = ["a", "b", "é"];
        let stop_sets: [&[&str]; 5] = [
            &["ab"],
            &["aab", "ba"],
            &["éa", "aéab"],
            &["bab", "abab"],
            &["aa"],
        ];
        let mut state = 1u64;
        let mut next = |bound: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % bound
        };
        for round in 0..2000 {
            let letters: Vec<&str> = (0..next(12)).map(|_| alphabet[next(3)]).collect();
            let mut pieces: Vec<String> = Vec::new();
            for letter in &letters {
                match pieces.last_mut() {
                    Some(last) if next(2) == 0 => last.push_str(letter),
                    _ => pieces.push((*letter).to_owned()),
                }
            }
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let stops = stop_sets[round % stop_sets.len()];
            let found = run(&pieces, stops);
            assert_eq!(found, run(&letters, stops), "{pieces:?} with {stops:?}");
            // Against the definition: the shortest beginning of the text that ends with a stop string.
            let whole: String = letters.concat();
            let ends = whole
                .char_indices()
                .map(|(at, letter)| at + letter.len_utf8());
            let cut = ends.map(|end| &whole[..end]).find_map(|begin| {
                let stop = stops
                    .iter()
                    .filter(|stop| begin.ends_with(**stop))
                    .max_by_key(|s| s.len());
                stop.map(|stop| {
                    (
                        begin[..begin.len() - stop.len()].to_owned(),
                        Some(stop.to_string()),
                    )
                })
            });
            assert_eq!(
                found,
                cut.unwrap_or((whole, None)),
                "{pieces:?} with {stops:?}"
            );
        }
    }
}
