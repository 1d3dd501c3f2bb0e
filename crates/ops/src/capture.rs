//! Recording what a step launches, so that the device runs it again as one piece.

use burn::backend::{Backend, BackendGraph, Dispatch};
use burn::tensor::Device;

use crate::ops::on_device_thread;

/// Runs of a step before it is recorded. With fusion the first builds the fused kernels and takes other memory than
/// those after it; the last must find everything as the recording will.
const WARM_UPS: usize = 3;

/// Why a step was not recorded, or a recording not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The device or its backend records nothing.
    #[error("the device does not capture: {reason}")]
    Unsupported {
        /// In the backend's words.
        reason: String,
    },
    /// A recording began and could not be finished. What the step writes is lost: reads of it fail.
    #[error("the capture failed: {reason}")]
    Failed {
        /// In the backend's words.
        reason: String,
    },
    /// A recording could not be run again.
    #[error("the replay failed: {reason}")]
    Replay {
        /// In the backend's words.
        reason: String,
    },
}

/// Whether `device` records launches, by recording none.
///
/// # Errors
/// [`CaptureError::Unsupported`] with the reason if it does not.
pub fn supports_capture(device: &Device) -> Result<(), CaptureError> {
    record(device, || ()).map(|_| ()).map_err(|error| {
        let reason = error.to_string();
        CaptureError::Unsupported { reason }
    })
}

/// What a step launched, recorded by [`capture`].
#[derive(Debug)]
pub struct CapturedStep<T> {
    device: Device,
    /// There until the step is dropped.
    graph: Option<BackendGraph<Dispatch>>,
    output: T,
}

/// Records what `step` launches, after running it three times.
///
/// Burn's own `burn::tensor::capture` runs the step anew where nothing can be recorded, and does not say why; this
/// reports it.
///
/// The step must do the same on every run, and what changes between replays must be in buffers that stay where they
/// are ([`StepWords`](crate::StepWords), [`PagedKvCache`](crate::PagedKvCache)). It may not read back, upload, or choose by
/// a value on the device. Calls from other threads that allocate or synchronize may break a recording on CUDA.
///
/// # Errors
/// [`CaptureError::Unsupported`] if nothing was recorded; the step has run and nothing is lost.
/// [`CaptureError::Failed`] if the recording broke: whatever the step writes must be made anew.
pub fn capture<T>(
    device: &Device,
    mut step: impl FnMut() -> T,
) -> Result<CapturedStep<T>, CaptureError> {
    // A recording keeps the memory that it touched to itself: whole pages of the pools that steps take from, which are as
    // large as the largest prompt made them; of the persistent pool, what it uses.
    let run = |OnThisThread(step)| OnThisThread(warm_up_and_record(device, step));
    let recorded = device.memory_persistent_allocations(OnThisThread(&mut step), run);
    let (graph, output) = recorded.0?;
    Ok(CapturedStep {
        device: device.clone(),
        graph: Some(graph),
        output,
    })
}

/// Runs `work`, which queues something for `device`, so that it waits for the device's thread once, not with each read and replay in
/// it: on CUDA that thread sleeps while a step runs, and takes tens of microseconds to wake.
///
/// On Flex, and with fusion, it runs where it is called, and nothing is saved. Calls may be nested.
///
/// Until `work` is done, nobody else queues anything there: it must not wait for a thread that does, nor for a lock that such a thread
/// holds, and should not wait for results.
///
/// # Panics
/// If `work` does, or the device's thread is gone.
pub fn queue_together<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    on_device_thread(device, work)
}

impl<T> Drop for CapturedStep<T> {
    /// Waits until the device has let the recording go: it does so on a thread of its own, and a program that ends before
    /// would have it call a driver that is gone.
    fn drop(&mut self) {
        self.graph = None;
        // A device that fails here has nothing left to say to anyone.
        let _ = Dispatch::sync(self.device.as_dispatch());
    }
}

/// What Burn asks to be `Send` although it stays on the thread that calls.
struct OnThisThread<T>(T);

// SAFETY: `memory_persistent_allocations` calls its function before it returns, on the thread that called it: that is how
// the memory of this thread's stream is what it speaks of.
unsafe impl<T> Send for OnThisThread<T> {}

fn warm_up_and_record<T>(
    device: &Device,
    step: &mut impl FnMut() -> T,
) -> Result<(BackendGraph<Dispatch>, T), CaptureError> {
    let dispatch = device.as_dispatch();
    Dispatch::graph_prepare(dispatch).map_err(|error| CaptureError::Unsupported {
        reason: error.to_string(),
    })?;
    for _ in 0..WARM_UPS {
        // With fusion, a result that is dropped before the queue runs is never computed.
        let output = step();
        let synced = Dispatch::sync(dispatch);
        drop(output);
        if let Err(error) = synced {
            // Closes what was prepared; there is no recording to keep.
            let _ = Dispatch::graph_stop_capture(dispatch);
            let reason = error.to_string();
            return Err(CaptureError::Failed { reason });
        }
    }
    record_prepared(device, step)
}

fn record<T>(
    device: &Device,
    step: impl FnMut() -> T,
) -> Result<(BackendGraph<Dispatch>, T), CaptureError> {
    Dispatch::graph_prepare(device.as_dispatch()).map_err(|error| CaptureError::Unsupported {
        reason: error.to_string(),
    })?;
    record_prepared(device, step)
}

fn record_prepared<T>(
    device: &Device,
    mut step: impl FnMut() -> T,
) -> Result<(BackendGraph<Dispatch>, T), CaptureError> {
    let dispatch = device.as_dispatch();
    Dispatch::graph_start_capture(dispatch).map_err(|error| CaptureError::Unsupported {
        reason: error.to_string(),
    })?;
    let output = step();
    match Dispatch::graph_stop_capture(dispatch) {
        Ok(graph) => Ok((graph, output)),
        Err(error) => Err(CaptureError::Failed {
            reason: error.to_string(),
        }),
    }
}

impl<T> CapturedStep<T> {
    /// What the step gave while it was recorded. Only a [replay](Self::replay) fills it.
    pub fn output(&self) -> &T {
        &self.output
    }

    /// Queues everything that was recorded, behind what this thread queued before.
    ///
    /// # Errors
    /// [`CaptureError::Replay`] if the device takes no more work.
    ///
    /// # Safety
    /// The recording holds addresses. Until the device is done with the replay, every tensor that the step read or wrote
    /// must be alive where it was: weights, caches, words. Replays, writes to those tensors and reads of the output must
    /// come from the thread that captured, or from work that it gives to [`queue_together`]: its stream is what orders them.
    pub unsafe fn replay(&self) -> Result<(), CaptureError> {
        let Some(graph) = &self.graph else {
            unreachable!("only a drop takes the recording");
        };
        // SAFETY: the caller's promise is the one that Burn asks for.
        unsafe { Dispatch::graph_replay(self.device.as_dispatch(), graph) }.map_err(|error| {
            CaptureError::Replay {
                reason: error.to_string(),
            }
        })
    }
}
