//! The compute device: its name on the command line, and starting it without a crash.

use std::fmt;
use std::panic;
use std::str::FromStr;

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

    /// Starts the device and lets it compute once, so that a missing driver shows here and not in the middle of an
    /// answer.
    ///
    /// # Errors
    /// If the device is not compiled in, or does not start; the message is one line.
    pub(crate) fn start(self) -> Result<Device, String> {
        let Some(make) = self.constructor() else {
            let feature = self.feature();
            return Err(format!(
                "device {self} is not compiled into this binary: build it with `--features {feature}`, \
                 or run `cargo xtask chat --device {self}`"
            ));
        };
        quietly(|| {
            let device = make();
            probe(&device).map(|()| device)
        })
        .and_then(|result| result)
        .map_err(|reason| format!("device {self} does not start: {reason}"))
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
fn quietly<T>(work: impl FnOnce() -> T + panic::UnwindSafe) -> Result<T, String> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let result = panic::catch_unwind(work);
    panic::set_hook(hook);
    result.map_err(|payload| {
        let message = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("its driver gave no reason");
        message
            .lines()
            .map(str::trim)
            .find(|line| !line.is_empty())
            .unwrap_or("no reason")
            .to_owned()
    })
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
    fn a_panic_becomes_its_first_line() {
        assert_eq!(
            quietly(|| -> () { panic!("\n no driver \n at line {}", 3) }),
            Err("no driver".into())
        );
        assert_eq!(quietly(|| 5), Ok(5));
    }

    #[cfg(feature = "flex")]
    #[test]
    fn flex_starts() {
        assert!(DeviceChoice::Flex.start().is_ok());
    }

    #[cfg(not(feature = "rocm"))]
    #[test]
    fn a_device_that_is_not_compiled_in_names_its_feature() {
        let message = DeviceChoice::Rocm(1).start().unwrap_err();
        assert!(message.contains("--features rocm"), "{message}");
        assert!(!message.contains('\n'));
    }
}
