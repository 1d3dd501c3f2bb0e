use super::portable::{SHARED_BYTES, sample_kernel};
use super::tally::MAX_TERMS;
use crate::check::{Check, I32};
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::reduce::RowUnits;
use crate::tensor::TensorRef;

/// Words that hold the options of one row, see [`sample`].
pub const SAMPLE_WORDS: usize = 8;

/// The most columns that [`sample`] takes: more would pass the range of its sums.
pub const SAMPLE_MAX_VOCAB: usize = MAX_TERMS;

/// Draws a token from each row: the argmax of `logit / temperature + gumbel` over the tokens that
/// the filters keep, the lowest id among equals.
///
/// Filters apply in this order: top-k keeps the k largest logits and those that equal the k-th;
/// top-p keeps the smallest set of the most probable of these whose probabilities reach the sum,
/// lowest ids first among equals; min-p keeps those of at least a fraction of the highest
/// probability. The Gumbel noise of a token is a hash of (seed, draw, token), so that a row's
/// token depends on its own logits and options alone.
///
/// A row that holds NaN or plus infinity, or nothing above minus infinity, gives −1.
///
/// # Shapes
/// - `logits`: `[num_rows, vocab_size]`, f32 | f16 | bf16, last axis contiguous, 1 to
///   [`SAMPLE_MAX_VOCAB`] columns
/// - `options`: `[num_rows, SAMPLE_WORDS]`, i32, contiguous. The words of a row are, floats by
///   their f32 bits:
///   0. temperature, which divides the logits; 0 and below take the largest logit
///   1. top-k; 1 takes the largest logit, 0 and below keep all
///   2. top-p; 0 and below take the largest logit, 1 and above keep all
///   3. min-p; 0 and below keep all
///   4. the low half of the seed
///   5. the high half of the seed
///   6. the draw under this seed, modulo 2³²
///   7. not read
/// - `ids`: `[num_rows]`, i32
///
/// The options lie on the device, so that a captured launch draws anew after they are rewritten.
///
/// # Numerics
/// In f32, with the maximum subtracted before the division. Probabilities are summed as integers
/// of 64 bits, so that the number of units that share a row changes nothing. The sign of a zero is
/// not looked at.
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device or the kernel cannot
/// serve them.
///
/// # Source
/// Gumbel-max: Maddison, Tarlow and Minka 2014, arXiv:1411.0030.
pub fn sample(
    launcher: &Launcher,
    logits: &TensorRef,
    options: &TensorRef,
    ids: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("sample");
    let [num_rows, vocab_size] = check.sizes("logits", logits)?;
    let dtype = check.float(launcher.facts(), "logits", logits)?;
    check.rows("logits", logits, &[num_rows, vocab_size], dtype)?;
    check.contiguous("options", options, &[num_rows, SAMPLE_WORDS], I32)?;
    check.contiguous("ids", ids, &[num_rows], I32)?;
    check.output("ids", ids, &[("logits", logits), ("options", options)])?;
    if num_rows == 0 {
        return Ok(());
    }
    if vocab_size == 0 {
        return check.invalid("0 columns to choose an id from".to_string());
    }
    if vocab_size > SAMPLE_MAX_VOCAB {
        return check.unsupported(format!("{vocab_size} columns, at most {SAMPLE_MAX_VOCAB}"));
    }

    let n = launcher.vector_size(dtype, &[vocab_size], &[logits]);
    let form = RowUnits::for_long_rows(launcher.facts(), vocab_size / n, SHARED_BYTES);
    let grid = form.grid(launcher.facts(), num_rows);
    let (count, dim, address) = launcher.topology(check, grid, n, &[logits])?;
    // SAFETY: every tensor lies in its buffer, the output overlaps nothing, surplus units end
    // first, and all units of a cube do so together.
    unsafe {
        sample_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            logits.buffer_arg(n),
            options.buffer_arg(1),
            ids.buffer_arg(1),
            num_rows,
            logits.strides()[0] / n,
            vocab_size / n,
            form,
            dtype,
        );
    }
    Ok(())
}
