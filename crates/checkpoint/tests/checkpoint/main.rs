//! Model files made in code, sound and broken, read through the public interface.

mod config;
mod gguf;
mod hostile;
mod model_folder;
mod quantised;
mod safetensors;
mod tracking_allocator;
mod write_gguf;
mod write_safetensors;

use burn_paged_checkpoint::{Checkpoint, CheckpointError, FloatData, FloatKind};

#[global_allocator]
static ALLOCATOR: tracking_allocator::TrackingAllocator = tracking_allocator::TrackingAllocator;

/// Reads a tensor as f32.
fn read_f32(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    match checkpoint
        .read(name, FloatKind::F32)
        .expect("readable tensor")
        .data
    {
        FloatData::F32(values) => values,
        other => panic!("asked for f32, got {}", other.kind()),
    }
}

/// Opens a path that must be refused, and returns the message.
fn refusal(path: &std::path::Path) -> String {
    match Checkpoint::open(path) {
        Ok(_) => panic!("{} was accepted", path.display()),
        Err(error) => error.to_string(),
    }
}

/// Fails unless `message` holds all of `parts`.
fn assert_names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

/// The bytes of f32 values as both formats store them.
fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Values that differ from each other, reproducible, between -1 and 1.
fn varied(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn is_send_and_sync<T: Send + Sync>() {}

#[test]
fn a_checkpoint_may_be_shared_between_threads() {
    is_send_and_sync::<Checkpoint>();
    is_send_and_sync::<CheckpointError>();
}
