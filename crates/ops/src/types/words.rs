//! Words at a fixed place on a device.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::ops;

/// i32 words that stay where they are on a device, so that a captured step finds new values where it read the old ones.
///
/// All index tensors of a step are [views](Self::view) of one such buffer, and one [write](Self::write) brings them up to
/// date: one upload per step, and no allocation on the device.
#[derive(Debug)]
pub struct StepWords {
    /// `None` only while a write is under way.
    words: Option<Tensor<1, Int>>,
    len: usize,
}

impl StepWords {
    /// Views begin at multiples of this many words: 512 bytes, the strictest that a device asks for.
    pub const ALIGNMENT: usize = 128;

    /// At least `len` zeros.
    pub fn new(len: usize, device: &Device) -> Self {
        let len = len.next_multiple_of(Self::ALIGNMENT);
        // The persistent pool does not move what it holds.
        let words = device
            .memory_persistent_allocations((), |()| Tensor::zeros([len], (device, DType::I32)));
        Self {
            words: Some(words),
            len,
        }
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no words.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Overwrites the first words with `values`, in place. Whoever holds a view sees the new values: what was queued
    /// before reads the old ones.
    ///
    /// On backends without an implementation of their own, views that were taken before keep the old values.
    ///
    /// # Panics
    /// If there are more values than words.
    pub fn write(&mut self, values: Vec<i32>) {
        self.write_from(0, values);
    }

    /// [`write`](Self::write) of the words from `start` on.
    ///
    /// # Panics
    /// If `start` is no multiple of [`ALIGNMENT`](Self::ALIGNMENT), or there are more values than words from there on.
    pub fn write_from(&mut self, start: usize, values: Vec<i32>) {
        assert!(
            start.is_multiple_of(Self::ALIGNMENT) && start + values.len() <= self.len,
            "{} values for {} words, from word {start} on",
            values.len(),
            self.len
        );
        if values.is_empty() {
            return;
        }
        let words = self.words.take().expect("a write is under way");
        let device = words.device();
        self.words = Some(match ops::has_implementation(&device) {
            true => ops::write_words(words, start, values),
            false => {
                let range = start..start + values.len();
                let data = TensorData::new(values, [range.len()]);
                words.slice_assign([range], Tensor::from_data(data, (&device, DType::I32)))
            }
        });
    }

    /// Overwrites the words from `start` on with sampled ids, in place and without the host: the tokens of the next step. A
    /// row that could not be sampled, with a negative id, gets token 0.
    ///
    /// With `blocks`, the block of each token's slot also goes where the block table has the block of its position, so that the
    /// table of the step before need not be written again: a decode comes into one block more at most. Rows without a slot are
    /// left out.
    ///
    /// The ids also set out for the host, ahead of all that is queued from now on: a step that was captured may be replayed,
    /// and give other ids in the same place, before these [arrive](PendingIds::wait).
    ///
    /// # Panics
    /// If `start`, or where a part of `blocks` begins, is no multiple of [`ALIGNMENT`](Self::ALIGNMENT), the ids or such a part end
    /// past the last word, what is written overlaps what is read, a block has no tokens, or the device has no implementation of its
    /// own.
    pub fn feed_back(
        &mut self,
        start: usize,
        ids: Tensor<1, Int>,
        blocks: Option<NextBlocks>,
    ) -> PendingIds {
        let (device, num_rows) = (ids.device(), ids.dims()[0]);
        assert!(
            start.is_multiple_of(Self::ALIGNMENT) && start + num_rows <= self.len,
            "{num_rows} ids for {} words, from word {start} on",
            self.len
        );
        assert!(
            ops::has_implementation(&device),
            "feed_back: {device:?} has no implementation of its own"
        );
        if let Some(blocks) = &blocks {
            blocks.check(start, num_rows, self.len);
        }
        let words = self.words.take().expect("a write is under way");
        let arriving = ArrivingIds::default();
        self.words = Some(ops::feed_back(words, start, ids, blocks, arriving.clone()));
        PendingIds { device, arriving }
    }

    /// The words from `start` on, as a tensor of the given shape; no copy on backends with an implementation of their
    /// own, besides Flex.
    ///
    /// # Panics
    /// If `start` is no multiple of [`ALIGNMENT`](Self::ALIGNMENT), the shape is empty, or the view ends past the last
    /// word.
    pub fn view<const D: usize>(&self, start: usize, shape: [usize; D]) -> Tensor<D, Int> {
        let count: usize = shape.iter().product();
        assert!(
            start.is_multiple_of(Self::ALIGNMENT) && count > 0 && start + count <= self.len,
            "a view of shape {shape:?} from word {start} on, of {} words in pieces of {}",
            self.len,
            Self::ALIGNMENT
        );
        let words = self.words.as_ref().expect("a write is under way");
        match ops::has_implementation(&words.device()) {
            true => ops::view_words(words, start, shape),
            false => words
                .clone()
                .narrow(0, start, count)
                .reshape(shape.map(|size| size as i64)),
        }
    }
}

/// Where the parts of a decode begin among its words, from which the blocks of its tokens are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextBlocks {
    /// The position of each token in its sequence, a word each.
    pub positions: usize,
    /// The slot that it is stored in, or -1 for none, a word each.
    pub slots: usize,
    /// Blocks of each sequence, `max_blocks` words each.
    pub table: usize,
    /// Width of the table.
    pub max_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

impl NextBlocks {
    #[track_caller]
    fn check(&self, tokens: usize, num_rows: usize, num_words: usize) {
        let tokens = tokens..tokens + num_rows;
        let table = self.table..self.table + num_rows * self.max_blocks;
        let read = [self.positions, self.slots].map(|start| start..start + num_rows);
        let fit = |part: &Range<usize>| {
            part.start.is_multiple_of(StepWords::ALIGNMENT) && part.end <= num_words
        };
        let apart = |a: &Range<usize>, b: &Range<usize>| a.end <= b.start || b.end <= a.start;
        let are_apart = apart(&tokens, &table)
            && (read.iter()).all(|part| apart(part, &tokens) && apart(part, &table));
        assert!(
            fit(&table) && read.iter().all(fit) && are_apart && self.block_size > 0,
            "{self:?} for {num_rows} ids from word {} on, of {num_words} words",
            tokens.start
        );
    }
}

/// Ids on their way to the host, as [`StepWords::feed_back`] sent them.
#[derive(Debug)]
pub struct PendingIds {
    device: Device,
    arriving: ArrivingIds,
}

impl PendingIds {
    /// The ids, once they are here. Work that was queued after they set out is not waited for.
    ///
    /// # Errors
    /// In the backend's words, if the device could not give them.
    pub fn wait(self) -> Result<Vec<i32>, String> {
        if let Some(wait) = self.arriving.take() {
            return wait();
        }
        // With fusion, the op that sends them may be queued still.
        self.device.flush().map_err(|error| error.to_string())?;
        let wait = self.arriving.take();
        wait.ok_or_else(|| "the ids were never sent".to_owned())?()
    }
}

/// Waits for ids.
type Wait = Box<dyn FnOnce() -> Result<Vec<i32>, String> + Send>;

/// Where an op, which fusion may run later, leaves how to wait for the ids that it sent.
#[derive(Clone, Default)]
pub struct ArrivingIds(Arc<Mutex<Option<Wait>>>);

impl ArrivingIds {
    pub(crate) fn set(&self, wait: impl FnOnce() -> Result<Vec<i32>, String> + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(wait));
    }

    fn take(&self) -> Option<Wait> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl fmt::Debug for ArrivingIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ArrivingIds")
    }
}
