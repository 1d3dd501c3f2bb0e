//! Recording and replaying. A binary of its own with one test, because on CUDA a recording breaks if another thread of the
//! process allocates meanwhile.

use burn::tensor::{Device, Int, Tensor};
use burn_paged::{CaptureError, StepWords, capture, queue_together, supports_capture};

/// Devices of this build, and whether they must record.
fn devices() -> Vec<(&'static str, Device, bool)> {
    let devices: Vec<(&'static str, Device, bool)> = vec![
        #[cfg(feature = "flex")]
        ("flex", Device::flex(), false),
        #[cfg(feature = "cpu")]
        ("cpu", Device::cpu(), false),
        #[cfg(feature = "cuda")]
        ("cuda", Device::cuda(0), true),
    ];
    assert!(
        !devices.is_empty(),
        "the tests need a backend feature, for example flex"
    );
    devices
}

fn ints(tensor: &Tensor<1, Int>) -> Vec<i32> {
    tensor.clone().into_data().iter::<i32>().collect()
}

/// A device either records, and then a replay reads what was written after the recording, or says why it does not.
#[test]
fn a_device_records_or_says_why_not() {
    for (name, device, records) in devices() {
        let supported = supports_capture(&device);
        assert_eq!(supported.is_ok(), records, "{name}: {supported:?}");
        let mut words = StepWords::new(128, &device);
        words.write(vec![1; 128]);
        let mut runs = 0;
        let step = || {
            runs += 1;
            words.view(0, [128]).mul_scalar(3)
        };
        match capture(&device, step) {
            Ok(graph) => {
                assert!(records && runs > 1, "{name}: {runs} runs");
                for value in [2, 5] {
                    words.write(vec![value; 128]);
                    // SAFETY: the words and the graph are alive, and all of it happens on this thread.
                    unsafe { graph.replay() }.unwrap();
                    assert_eq!(ints(graph.output()), [3 * value; 128], "{name}");
                }
                // Launched ahead: each replay reads what the one before it gave, and nobody waits in between.
                let pending = [false, true, false, true].map(|is_together| {
                    let mut queue = || {
                        let pending = words.feed_back(0, graph.output().clone(), None);
                        // SAFETY: as above; this thread waits for whichever runs it.
                        unsafe { graph.replay() }.unwrap();
                        pending
                    };
                    match is_together {
                        true => queue_together(&device, queue),
                        false => queue(),
                    }
                });
                for (pending, value) in pending.into_iter().zip([15, 45, 135, 405]) {
                    assert_eq!(pending.wait().unwrap(), [value; 128], "{name}");
                }
                assert_eq!(ints(graph.output()), [1215; 128], "{name}");
            }
            Err(CaptureError::Unsupported { reason }) => {
                assert!(!records && !reason.is_empty(), "{name}");
                // Nothing is lost.
                assert_eq!(ints(&words.view(0, [3])), [1; 3], "{name}");
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
}
