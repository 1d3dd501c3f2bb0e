//! The compute device: its name on the command line, and starting it without a crash.

use std::fmt;
use std::panic::{self, PanicHookInfo};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Device, Tensor};

/// A device as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    Flex,
    Cpu,
    Cuda(usize),
    Rocm(usize),
    Vulkan,
    Metal,
    Wgpu,
}

/// Why there is no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DeviceError {
    /// This binary was built without it.
    #[error(
        "device {device} is not compiled into this binary: build it with `--features {}`, \
         or run `cargo xtask chat --device {device}`",
        device.feature()
    )]
    NotCompiledIn { device: DeviceChoice },
    /// Its driver is missing or broken.
    #[error("device {device} does not start; it needs {}: {reason}", device.needs())]
    DoesNotStart {
        device: DeviceChoice,
        /// What the driver, or who looked for it, said first; one line.
        reason: String,
    },
}

impl DeviceChoice {
    /// The forms that are understood.
    pub(crate) const FORMS: &str = "flex|cpu|cuda[:N]|rocm[:N]|vulkan|metal|wgpu";

    /// Name of the cargo feature that compiles the device in.
    fn feature(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cpu => "cpu",
            Self::Cuda(_) => "cuda",
            Self::Rocm(_) => "rocm",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
            Self::Wgpu => "wgpu",
        }
    }

    /// What has to be on the machine.
    fn needs(self) -> &'static str {
        match self {
            Self::Flex => "nothing but a processor",
            Self::Cpu => "a processor that LLVM compiles for",
            Self::Cuda(_) if cfg!(feature = "cuda-hopper") => {
                "an NVIDIA GPU, its driver (libcuda), and of the CUDA toolkit NVRTC (libnvrtc) and the headers"
            }
            Self::Cuda(_) => "an NVIDIA GPU and its driver (libcuda)",
            Self::Rocm(_) => "an AMD GPU and ROCm (libamdhip64)",
            Self::Vulkan => "a Vulkan driver and its loader (libvulkan)",
            Self::Metal => "a GPU of Apple's",
            Self::Wgpu => "a driver for Vulkan, Metal or Direct3D",
        }
    }

    /// Starts the device and lets it compute once, so that a missing driver shows here and not in the middle of an
    /// answer.
    ///
    /// # Errors
    /// [`DeviceError`]; its message is one line.
    pub(crate) fn start(self) -> Result<Device, DeviceError> {
        let Some(make) = self.constructor() else {
            return Err(DeviceError::NotCompiledIn { device: self });
        };
        quietly(|| {
            let device = make();
            probe(&device).map(|()| device)
        })
        .and_then(|result| result)
        .map_err(|reason| DeviceError::DoesNotStart {
            device: self,
            reason,
        })
    }

    /// How to make the device; `None` if it is not compiled in.
    #[allow(
        clippy::unnecessary_wraps,
        reason = "with every feature on, nothing is missing"
    )]
    fn constructor(self) -> Option<Box<dyn FnOnce() -> Device + panic::UnwindSafe>> {
        match self {
            #[cfg(feature = "flex")]
            Self::Flex => Some(Box::new(Device::flex)),
            #[cfg(feature = "cpu")]
            Self::Cpu => Some(Box::new(Device::cpu)),
            #[cfg(feature = "cuda")]
            Self::Cuda(index) => Some(Box::new(move || Device::cuda(index))),
            #[cfg(feature = "rocm")]
            Self::Rocm(index) => Some(Box::new(move || Device::rocm(index))),
            #[cfg(feature = "vulkan")]
            Self::Vulkan => Some(Box::new(|| Device::vulkan(Default::default()))),
            #[cfg(feature = "metal")]
            Self::Metal => Some(Box::new(|| Device::metal(Default::default()))),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Some(Box::new(|| Device::wgpu(Default::default()))),
            #[allow(
                unreachable_patterns,
                reason = "with every feature on, nothing is missing"
            )]
            _ => None,
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(index) | Self::Rocm(index) => write!(f, "{}:{index}", self.feature()),
            _ => f.write_str(self.feature()),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("expected {}", Self::FORMS);
        let (name, index) = match text.split_once(':') {
            None => (text, None),
            Some((name, index)) => (name, Some(index.parse::<usize>().map_err(|_| unknown())?)),
        };
        match (name, index) {
            ("flex", None) => Ok(Self::Flex),
            ("cpu", None) => Ok(Self::Cpu),
            ("cuda", index) => Ok(Self::Cuda(index.unwrap_or(0))),
            ("rocm", index) => Ok(Self::Rocm(index.unwrap_or(0))),
            ("vulkan", None) => Ok(Self::Vulkan),
            ("metal", None) => Ok(Self::Metal),
            ("wgpu", None) => Ok(Self::Wgpu),
            _ => Err(unknown()),
        }
    }
}

/// Adds two numbers on the device and reads the sum: opens the driver, compiles a kernel, runs it.
fn probe(device: &Device) -> Result<(), String> {
    let sum = Tensor::<1>::from_floats([1.5, 2.5], device) + 1.0;
    match sum.into_data().try_to_vec::<f32>() {
        Ok(values) if values == [2.5, 3.5] => Ok(()),
        Ok(values) => Err(format!("it computes [1.5, 2.5] + 1 = {values:?}")),
        Err(error) => Err(format!("its result cannot be read: {error:?}")),
    }
}

/// Runs `work`; a panic becomes the first line of its message. Drivers that are not there make Burn panic, and a back
/// trace helps nobody who merely has no such device.
///
/// A runtime looks for its driver on a thread of its own, whose panic is the cause, and all that reaches `work` is that the
/// thread has gone. So the first panic of any thread counts.
fn quietly<T>(work: impl FnOnce() -> T + panic::UnwindSafe) -> Result<T, String> {
    // The hook belongs to the process.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let first = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&first);
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let mut first = seen.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| first_line(panic));
    }));
    let result = panic::catch_unwind(work);
    panic::set_hook(hook);
    result.map_err(|_| {
        let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
        first
            .take()
            .unwrap_or_else(|| "its driver gave no reason".to_owned())
    })
}

fn first_line(panic: &PanicHookInfo<'_>) -> String {
    let message = panic.payload_as_str().unwrap_or_default();
    let mut lines = message.lines().map(str::trim);
    let line = lines.find(|line| !line.is_empty());
    line.unwrap_or("its driver gave no reason").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_as_they_are_written() {
        for name in [
            "flex", "cpu", "cuda:0", "cuda:3", "rocm:1", "vulkan", "metal", "wgpu",
        ] {
            assert_eq!(name.parse::<DeviceChoice>().unwrap().to_string(), name);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for name in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA"] {
            assert!(name.parse::<DeviceChoice>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_panic_becomes_the_first_line_of_the_first_message_on_any_thread() {
        assert_eq!(
            quietly(|| -> () { panic!("\n no driver \n at line {}", 3) }),
            Err("no driver".into())
        );
        assert_eq!(quietly(|| 5), Ok(5));
        let looked_for_elsewhere = || {
            let thread = std::thread::spawn(|| panic!("cannot load libcuda"));
            thread.join().expect("the thread answers");
        };
        assert_eq!(
            quietly(looked_for_elsewhere),
            Err("cannot load libcuda".into())
        );
    }

    #[test]
    fn a_device_that_does_not_start_says_what_it_needs() {
        let error = DeviceError::DoesNotStart {
            device: DeviceChoice::Cuda(1),
            reason: "no such library".into(),
        };
        let message = error.to_string();
        assert!(message.starts_with("device cuda:1 does not start; it needs an NVIDIA GPU"));
        assert!(message.ends_with("(libcuda): no such library") || cfg!(feature = "cuda-hopper"));
    }

    /// On a machine without the driver, the message has the name of the library that was looked for.
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    #[test]
    #[allow(clippy::print_stderr)] // Says why there is nothing to test.
    fn a_missing_driver_is_named() {
        if std::path::Path::new("/dev/nvidiactl").exists() {
            eprintln!("skipped: this machine has an NVIDIA driver");
            return;
        }
        let message = DeviceChoice::Cuda(0).start().unwrap_err().to_string();
        assert!(message.contains("libcuda"), "{message}");
        assert!(!message.contains("RecvError"), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }

    #[cfg(feature = "flex")]
    #[test]
    fn flex_starts() {
        assert!(DeviceChoice::Flex.start().is_ok());
    }

    #[cfg(not(feature = "rocm"))]
    #[test]
    fn a_device_that_is_not_compiled_in_names_its_feature() {
        let message = DeviceChoice::Rocm(1).start().unwrap_err().to_string();
        assert!(message.contains("--features rocm"), "{message}");
        assert!(!message.contains('\n'));
    }
}
