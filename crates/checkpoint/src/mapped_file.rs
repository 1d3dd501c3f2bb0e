//! A file mapped into memory, read-only.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::Mmap;

use crate::error::CheckpointError;

/// Ranges shorter than this are not worth the system call that gives their pages back.
const MIN_RELEASE_BYTES: usize = 64 << 10;

/// How far the disk runs ahead of the reader: enough to keep it busy while a tensor is converted and uploaded, little enough
/// not to push what others need out of memory.
const READ_AHEAD_BYTES: usize = 256 << 20;

/// A file whose bytes are read from the disk when they are touched.
///
/// The file must not be changed while it is mapped: a shortened file makes the operating system end
/// the process.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
    /// Where the last request to read ahead ended.
    asked: AtomicUsize,
}

impl MappedFile {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |error| CheckpointError::io(path, error);
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(CheckpointError::not_a_checkpoint(
                path,
                "it is not a regular file",
            ));
        }
        // SAFETY: the map is read-only and private to this value. That nobody writes to a model
        // file that is in use is the documented condition of this crate; the bytes are treated as
        // untrusted either way.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self {
            path: path.to_path_buf(),
            map,
            asked: AtomicUsize::new(0),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Asks the system to read what lies behind `start` before it is touched. Touching pages one by one reads them in small
    /// pieces, each of which the reader waits for.
    pub(crate) fn read_ahead(&self, start: usize) {
        let asked = self.asked.load(Ordering::Relaxed);
        let Some(range) = ahead(start, asked, self.map.len()) else {
            return;
        };
        self.asked.store(range.end, Ordering::Relaxed);
        #[cfg(unix)]
        {
            let advised =
                self.map
                    .advise_range(memmap2::Advice::WillNeed, range.start, range.len());
            // A system that refuses the advice only reads later.
            drop(advised);
        }
    }

    /// Tells the system that the pages of `range` are not needed soon, so that a model that is
    /// being loaded does not count twice, once as tensors and once as resident pages of its file.
    pub(crate) fn release(&self, range: Range<usize>) {
        if range.len() < MIN_RELEASE_BYTES {
            return;
        }
        #[cfg(unix)]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the map is shared and read-only, so that a page given back is read from the
            // same file again when it is next touched; borrowed bytes keep their values.
            let advised = unsafe {
                self.map
                    .unchecked_advise_range(DontNeed, range.start, range.len())
            };
            // A system that refuses the advice only keeps the pages longer.
            drop(advised);
        }
    }
}

/// What to ask for when the reader is at `start`, the last request ended at `asked`, and the file has `len` bytes; `None`
/// while most of what lies ahead has been asked for.
fn ahead(start: usize, asked: usize, len: usize) -> Option<Range<usize>> {
    let end = start.saturating_add(READ_AHEAD_BYTES).min(len);
    // A reader that jumps begins anew.
    let from = if (start..=end).contains(&asked) {
        asked
    } else {
        start
    };
    let is_worth_it = end - from.min(end) >= READ_AHEAD_BYTES / 4 || end == len;
    (from < end && is_worth_it).then_some(from..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_stays_ahead_without_being_asked_twice() {
        const STEP: usize = READ_AHEAD_BYTES / 8;
        const LEN: usize = 3 * READ_AHEAD_BYTES;
        let (mut asked, mut requests) = (0, Vec::new());
        for start in (0..LEN).step_by(STEP) {
            if let Some(range) = ahead(start, asked, LEN) {
                asked = range.end;
                requests.push(range);
            }
            assert!(asked >= LEN.min(start + READ_AHEAD_BYTES * 3 / 4));
        }
        let total: usize = requests.iter().map(Range::len).sum();
        assert_eq!(total, LEN, "{requests:?}");
        assert!(requests.windows(2).all(|pair| pair[0].end == pair[1].start));
    }

    #[test]
    fn a_reader_that_jumps_begins_anew() {
        const LEN: usize = 10 * READ_AHEAD_BYTES;
        let back = ahead(5, 9 * READ_AHEAD_BYTES, LEN);
        assert_eq!(back, Some(5..5 + READ_AHEAD_BYTES));
        let forth = ahead(4 * READ_AHEAD_BYTES, 7, LEN);
        assert_eq!(forth, Some(4 * READ_AHEAD_BYTES..5 * READ_AHEAD_BYTES));
        assert_eq!(ahead(LEN, LEN, LEN), None);
    }
}
