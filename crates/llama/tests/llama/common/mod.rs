//! What the tests share.
//!
//! - `tiny`: configurations and random weights; `files`, `gguf`: checkpoints of them on disk;
//! - `oracle`: the same model as host loops in f64; `run`: steps of a loaded model; `log_capture`: warnings;
//! - `smollm2`: the real model and its reference; `allocator`: how much memory loading takes.

pub(crate) mod allocator;
pub(crate) mod files;
pub(crate) mod gguf;
pub(crate) mod log_capture;
pub(crate) mod oracle;
pub(crate) mod run;
pub(crate) mod smollm2;
pub(crate) mod tiny;

/// The device of the tests.
pub(crate) fn device() -> burn::tensor::Device {
    burn::tensor::Device::flex()
}

/// The GPU of a build that has one compiled in; where there is none, a line says why the test ends.
pub(crate) fn gpu() -> Option<burn::tensor::Device> {
    match gpus().into_iter().next() {
        None => println!("skipped: no GPU runtime is compiled in"),
        Some(_) if !std::path::Path::new("/dev/nvidiactl").exists() => {
            println!("skipped: this machine has no NVIDIA driver");
        }
        Some(make) => return Some(make()),
    }
    None
}

fn gpus() -> Vec<fn() -> burn::tensor::Device> {
    vec![
        #[cfg(feature = "cuda")]
        || burn::tensor::Device::cuda(0),
    ]
}

/// The largest magnitude of a row.
pub(crate) fn largest(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |most, value| most.max(value.abs()))
}

/// The index of the largest value, the first of several.
pub(crate) fn argmax(row: &[f32]) -> usize {
    (0..row.len()).fold(0, |best, at| if row[at] > row[best] { at } else { best })
}

/// Every value within `tolerance` times the largest magnitude of the expected row.
#[track_caller]
pub(crate) fn assert_rows_close(
    found: &[Vec<f32>],
    expected: &[Vec<f32>],
    tolerance: f32,
    what: &str,
) {
    assert_eq!(found.len(), expected.len(), "{what}: number of rows");
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.len(), expected.len(), "{what}: columns of row {row}");
        let bound = tolerance * largest(expected);
        for (column, (a, b)) in found.iter().zip(expected).enumerate() {
            // Written so that a NaN fails.
            let is_close = (a - b).abs() <= bound;
            assert!(
                is_close,
                "{what}: row {row}, column {column}: {a} instead of {b} (within {bound})"
            );
        }
    }
}
