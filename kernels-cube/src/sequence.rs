//! From a packed row to the sequence that it belongs to, on the device.

use cubecl::prelude::*;

/// The sequence `s` with `cu_seqlens[s] <= row < cu_seqlens[s + 1]`, found by bisection.
///
/// `cu_seqlens` holds `num_seqs + 1` entries, starts at 0 and never falls; `row` lies before its
/// last entry. Empty sequences are skipped. The answer lies before `num_seqs` whatever the entries
/// are, so that a wrong table gives wrong rows and no stray access.
#[cube]
pub(crate) fn sequence_of(cu_seqlens: &[i32], num_seqs: usize, row: i32) -> usize {
    let mut first = 0;
    let mut last = num_seqs;
    while first + 1 < last {
        let middle = (first + last) / 2;
        if cu_seqlens[middle] <= row {
            first = middle;
        } else {
            last = middle;
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_find_their_sequence_and_skip_empty_ones() {
        let cu_seqlens = [0, 0, 2, 2, 2, 7, 8, 8];
        let found: Vec<usize> = (0..8).map(|row| sequence_of(&cu_seqlens, 7, row)).collect();
        assert_eq!(found, [1, 1, 4, 4, 4, 4, 4, 5]);
    }

    #[test]
    fn one_sequence_takes_every_row() {
        assert_eq!(sequence_of(&[0, 3], 1, 0), 0);
        assert_eq!(sequence_of(&[0, 3], 1, 2), 0);
    }
}
