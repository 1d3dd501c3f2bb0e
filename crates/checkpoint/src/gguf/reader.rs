//! A cursor over the bytes of a GGUF file that checks every length before it is used.

use std::path::Path;

use crate::error::CheckpointError;

/// Reads little-endian values from the front of a file.
///
/// No read can pass the end of the file, and no count is believed before the bytes that it promises
/// could be there; so the memory that a file can make a caller allocate is bounded by a multiple of
/// its own size.
pub(super) struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self {
            path,
            bytes,
            position: 0,
        }
    }

    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn error(&self, field: &str, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::gguf(self.path, field, reason)
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: usize, field: &str) -> Result<&'a [u8], CheckpointError> {
        let left = self.bytes.len() - self.position;
        if len > left {
            return Err(self.error(
                field,
                format!(
                    "needs {len} bytes at offset {}, \
                     but the file ends after {left} (it has {} bytes)",
                    self.position,
                    self.bytes.len()
                ),
            ));
        }
        let bytes = &self.bytes[self.position..self.position + len];
        self.position += len;
        Ok(bytes)
    }

    /// The next `N` bytes by value.
    pub(super) fn array<const N: usize>(
        &mut self,
        field: &str,
    ) -> Result<[u8; N], CheckpointError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, field)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, field: &str) -> Result<u32, CheckpointError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &str) -> Result<u64, CheckpointError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A count of entries that take at least `min_bytes` each in the rest of the file.
    pub(super) fn count(
        &mut self,
        min_bytes: usize,
        field: &str,
    ) -> Result<usize, CheckpointError> {
        let count = self.u64(field)?;
        let left = self.bytes.len() - self.position;
        match usize::try_from(count) {
            Ok(fits) if fits <= left / min_bytes => Ok(fits),
            _ => Err(self.error(
                field,
                format!(
                    "{count} entries of at least {min_bytes} bytes do not fit \
                     in the {left} bytes that follow"
                ),
            )),
        }
    }

    /// A string: its length in bytes, then UTF-8.
    pub(super) fn string(&mut self, field: &str) -> Result<&'a str, CheckpointError> {
        let len = self.count(1, field)?;
        let bytes = self.take(len, field)?;
        std::str::from_utf8(bytes).map_err(|error| self.error(field, error.to_string()))
    }
}
