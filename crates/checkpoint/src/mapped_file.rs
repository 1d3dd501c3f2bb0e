//! A file mapped into memory, read-only.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::CheckpointError;

/// Ranges shorter than this are not worth the system call that gives their pages back.
const MIN_RELEASE_BYTES: usize = 64 << 10;

/// A file whose bytes are read from the disk when they are touched.
///
/// The file must not be changed while it is mapped: a shortened file makes the operating system end
/// the process.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
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
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
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
