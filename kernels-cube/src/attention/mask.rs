//! The keys that a row sees: always a range of positions.

use cubecl::prelude::*;

/// Positions `first..first + len` of a sequence.
#[derive(CubeType, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyRange {
    pub(super) first: i32,
    pub(super) len: i32,
}

/// What bounds the keys of a row. Known when a kernel runs, so that one kernel serves all masks: a row asks once.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
pub(super) struct MaskBounds {
    /// Whether later keys are hidden: 0 or 1.
    pub(super) causal: u32,
    /// Positions that a row sees, its own included; [`NO_WINDOW`] for all.
    pub(super) window: i32,
}

/// A window that hides nothing, and that positions less it do not wrap.
pub(super) const NO_WINDOW: i32 = 1 << 30;

/// The keys that row `row` of a sequence sees.
///
/// The last row of a sequence stands at its last key, whatever the number of rows: the mask is
/// aligned at the bottom right. Rows may stand before the first key; causal ones then see nothing.
#[cube]
pub(super) fn visible_keys(row: i32, q_len: i32, kv_len: i32, bounds: &MaskBounds) -> KeyRange {
    let position = row + kv_len - q_len;
    let mut first = 0i32.runtime();
    let mut end = kv_len;
    if bounds.causal != 0 && position + 1 < end {
        end = position + 1;
    }
    if position - bounds.window + 1 > first {
        first = position - bounds.window + 1;
    }
    let mut len = end - first;
    if len < 0 {
        len = 0i32.runtime();
    }
    KeyRange { first, len }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(row: i32, q_len: i32, kv_len: i32, window: i32, causal: bool) -> Vec<i32> {
        let bounds = MaskBounds {
            causal: u32::from(causal),
            window: if window > 0 { window } else { NO_WINDOW },
        };
        let range = visible_keys(row, q_len, kv_len, &bounds);
        (range.first..range.first + range.len).collect()
    }

    #[test]
    fn the_last_row_stands_at_the_last_key() {
        assert_eq!(seen(0, 2, 6, 0, true), [0, 1, 2, 3, 4]);
        assert_eq!(seen(1, 2, 6, 0, true), [0, 1, 2, 3, 4, 5]);
        assert_eq!(seen(0, 1, 1, 0, true), [0]);
    }

    #[test]
    fn rows_before_the_first_key_see_nothing() {
        assert!(seen(0, 4, 2, 0, true).is_empty());
        assert!(seen(1, 4, 2, 0, true).is_empty());
        assert_eq!(seen(2, 4, 2, 0, true), [0]);
        assert_eq!(seen(0, 4, 2, 0, false), [0, 1]);
        assert!(seen(0, 3, 0, 0, false).is_empty());
    }

    #[test]
    fn a_window_counts_the_own_position() {
        assert_eq!(seen(0, 2, 6, 1, true), [4]);
        assert_eq!(seen(1, 2, 6, 3, true), [3, 4, 5]);
        assert_eq!(seen(0, 2, 6, 3, false), [2, 3, 4, 5]);
        assert_eq!(seen(0, 2, 6, 1 << 30, true), [0, 1, 2, 3, 4]);
    }
}
