//! Words at a fixed place on a device.

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
        assert!(
            values.len() <= self.len,
            "{} values for {} words",
            values.len(),
            self.len
        );
        if values.is_empty() {
            return;
        }
        let words = self.words.take().expect("a write is under way");
        let device = words.device();
        self.words = Some(match ops::has_implementation(&device) {
            true => ops::write_words(words, values),
            false => {
                let range = 0..values.len();
                let data = TensorData::new(values, [range.len()]);
                words.slice_assign([range], Tensor::from_data(data, (&device, DType::I32)))
            }
        });
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
