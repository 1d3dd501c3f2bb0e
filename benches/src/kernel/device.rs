//! Devices by name, and what is made on them.

use burn_paged_kernels::{Launcher, TensorRef};
use cubecl::device::WgpuDeviceKind;
use cubecl::future::block_on;
use cubecl::ir::{ElemType, IntKind};
use cubecl::prelude::*;

use super::{Dtype, Effort, Values, bf16, timing};

/// Bytes of the buffers of the copy that is the ceiling, on a GPU and on a processor.
const COPY_BYTES: [usize; 2] = [2 << 30, 128 << 20];

/// Vectors that one unit copies.
const COPY_VECTORS: usize = 4;

/// A CubeCL device with its client.
pub struct CubeDevice {
    name: String,
    launcher: Launcher,
}

/// What cases run on.
pub enum Target {
    /// A device of a CubeCL runtime.
    Cube(CubeDevice),
    /// Burn's Flex backend.
    #[cfg(feature = "flex")]
    Flex(burn::tensor::Device),
}

/// What reports call a device: CUDA has two compilers, of which a program links one, and rows of both may meet in a table.
pub fn compiled_name(name: &str) -> &str {
    match name {
        "cuda" if cfg!(feature = "cuda-hopper") => "cuda-hopper",
        name => name,
    }
}

impl Target {
    /// The target that `name` stands for: cpu, cuda, cuda-hopper, vulkan, metal, wgpu, rocm or flex.
    ///
    /// # Errors
    /// If there is none of that name, this build does not link its runtime, or the machine has no such device.
    pub fn open(name: &str) -> Result<Self, String> {
        match name {
            #[cfg(feature = "flex")]
            "flex" => Ok(Self::Flex(burn::tensor::Device::flex())),
            #[cfg(not(feature = "flex"))]
            "flex" => Err("flex needs the feature flex".into()),
            name => CubeDevice::open(name).map(Self::Cube),
        }
    }

    /// Whether cases run on the host's own cores.
    pub fn is_cpu(&self) -> bool {
        match self {
            Self::Cube(device) => device.is_cpu(),
            #[cfg(feature = "flex")]
            Self::Flex(_) => true,
        }
    }

    /// The device as it names itself.
    pub fn description(&self) -> String {
        match self {
            Self::Cube(device) => device.description(),
            #[cfg(feature = "flex")]
            Self::Flex(_) => cpu_name(),
        }
    }
}

impl CubeDevice {
    /// The device that `name` stands for.
    ///
    /// # Errors
    /// As [`Target::open`].
    pub fn open(name: &str) -> Result<Self, String> {
        bf16::keep();
        let kind = WgpuDeviceKind::default;
        let device = match name {
            "cpu" => cubecl::Device::cpu(),
            "cuda" => cubecl::Device::cuda(0),
            "cuda-hopper" if cfg!(feature = "cuda-hopper") => cubecl::Device::cuda(0),
            "cuda-hopper" => {
                return Err("cuda-hopper needs the feature cuda-hopper".into());
            }
            "rocm" => cubecl::Device::rocm(0),
            "vulkan" => cubecl::Device::vulkan(kind()),
            "metal" => cubecl::Device::metal_msl(kind()),
            "wgpu" => cubecl::Device::wgpu(kind()),
            other => {
                return Err(format!(
                    "no device {other:?}; devices: cpu, cuda, cuda-hopper, rocm, vulkan, metal, wgpu, flex"
                ));
            }
        };
        let device = device.map_err(|error| format!("{name}: {error}"))?;
        Ok(Self {
            name: compiled_name(name).to_owned(),
            launcher: Launcher::new(device.client()),
        })
    }

    /// What kernels are launched on.
    pub fn launcher(&self) -> &Launcher {
        &self.launcher
    }

    /// The client behind the launcher.
    pub fn client(&self) -> &Client {
        self.launcher.client()
    }

    /// Whether kernels run on the host's own cores.
    pub fn is_cpu(&self) -> bool {
        self.launcher.facts().is_cpu()
    }

    /// Whether launches can be recorded and replayed as one.
    pub fn has_graphs(&self) -> bool {
        matches!(self.name.as_str(), "cuda" | "cuda-hopper" | "rocm")
    }

    fn description(&self) -> String {
        let identity = &self.client().properties().identity;
        match (self.is_cpu(), identity.name.is_empty()) {
            (true, _) => cpu_name(),
            (false, false) => format!("{} ({})", identity.name, identity.fingerprint),
            (false, true) => identity.fingerprint.clone(),
        }
    }

    /// A contiguous tensor of whatever the memory holds. The buffer has whole words of 4 bytes.
    pub fn empty(&self, shape: &[usize], dtype: Dtype) -> TensorRef {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let handle = self.client().empty(bytes.next_multiple_of(4));
        TensorRef::contiguous(handle, shape.to_vec(), dtype.elem())
    }

    /// Elements `from .. from + len` of a contiguous tensor.
    ///
    /// # Errors
    /// If a launch that was to write the tensor failed, or the device did.
    pub fn read(
        &self,
        tensor: &TensorRef,
        dtype: Dtype,
        from: usize,
        len: usize,
    ) -> Result<Vec<f64>, String> {
        if from + len > tensor.num_elements() {
            return Err(format!(
                "no elements {from} to {} of {}",
                from + len,
                tensor.num_elements()
            ));
        }
        // Whole words at both ends: devices copy no less.
        let size = dtype.size();
        let total = (tensor.num_elements() * size).next_multiple_of(4);
        let start = from * size / 4 * 4;
        let end = ((from + len) * size).next_multiple_of(4);
        let handle = tensor.handle().clone();
        let handle = handle
            .offset_start(start as u64)
            .offset_end((total - end) as u64);
        let bytes = self
            .client()
            .read_one(handle)
            .map_err(|error| one_line(&error))?;
        Ok(dtype.decode(&bytes[from * size - start..][..len * size]))
    }

    /// Waits for everything queued.
    ///
    /// # Errors
    /// If the device failed.
    pub fn sync(&self) -> Result<(), String> {
        block_on(self.client().sync()).map_err(|error| one_line(&error))
    }

    /// Waits for everything queued and asks whether `tensors` were written.
    ///
    /// # Errors
    /// If a launch that was to write one of them failed, or the device did.
    pub fn settle(&self, tensors: &[TensorRef]) -> Result<(), String> {
        let handles = tensors.iter().map(TensorRef::handle);
        block_on(self.client().sync_buffers(handles)).map_err(|error| one_line(&error))
    }

    /// A grid with at least one unit for each of `units`, none of whose axes passes 65535 cubes, and the width of
    /// positions in it.
    pub(super) fn elementwise(&self, units: usize) -> (CubeCount, CubeDim, AddressType) {
        let dim = self.launcher.facts().num_cpu_cores.unwrap_or(256);
        let cubes = units.div_ceil(dim as usize);
        let x = cubes.clamp(1, 65_535);
        let y = cubes.div_ceil(x).max(1);
        (
            CubeCount::Static(x as u32, y as u32, 1),
            CubeDim::new_1d(dim),
            AddressType::from_len(x * y * dim as usize),
        )
    }

    /// Bytes read and written per second by a copy that no cache holds.
    ///
    /// # Errors
    /// If the device cannot be timed or has not the memory.
    pub fn copy_bytes_per_second(&self, effort: &Effort) -> Result<f64, String> {
        let largest = self.client().properties().memory.max_page_size;
        let largest = usize::try_from(largest).unwrap_or(usize::MAX) / 2;
        let width = self.launcher.facts().vector_size_32_bit;
        let dim = self.launcher.facts().num_cpu_cores.unwrap_or(256) as usize;
        let cubes_per_plane = 1 << 10;
        // Whole cubes, so that the kernel tests no end.
        let step = dim * COPY_VECTORS * width * 4 * cubes_per_plane;
        let bytes = COPY_BYTES[usize::from(self.is_cpu())].min(largest) / step * step;
        if bytes == 0 {
            return Err("no memory for a copy".into());
        }
        let words = [bytes / 4];
        let from = self.filled(&words, Dtype::F32, 1).tensor;
        let to = self.poisoned(&words, Dtype::F32);
        let vectors = words[0] / width;
        let planes = vectors / (dim * COPY_VECTORS * cubes_per_plane);
        let launch = |_: usize| -> Result<(), String> {
            // SAFETY: both buffers hold `vectors` vectors, and the grid covers them exactly.
            unsafe {
                copy_kernel::launch_unchecked(
                    self.client(),
                    CubeCount::Static(cubes_per_plane as u32, planes as u32, 1),
                    CubeDim::new_1d(dim as u32),
                    width,
                    BufferArg::from_raw_parts(from.handle().clone(), vectors),
                    BufferArg::from_raw_parts(to.handle().clone(), vectors),
                    COPY_VECTORS,
                );
            }
            Ok(())
        };
        let times = timing::measure(self, 1, &launch, effort)?;
        for at in [0, words[0] / 2, words[0] - 8] {
            if self.read(&to, Dtype::F32, at, 8)? != Values::new(1).range(at, 8) {
                return Err(format!("the copy is wrong at word {at}"));
            }
        }
        Ok(2.0 * bytes as f64 / (times.us * 1e-6))
    }
}

#[cube(launch_unchecked)]
fn copy_kernel<N: Size>(
    from: &[Vector<u32, N>],
    to: &mut [Vector<u32, N>],
    #[comptime] per_unit: usize,
) {
    let stride = CUBE_DIM as usize;
    let first = CUBE_POS * stride * per_unit + UNIT_POS as usize;
    #[unroll]
    for i in 0..per_unit {
        to[first + i * stride] = from[first + i * stride];
    }
}

/// A contiguous i32 tensor.
pub fn ints(device: &CubeDevice, shape: &[usize], values: &[i32]) -> TensorRef {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let handle = device.client().create_from_slice(&bytes);
    TensorRef::contiguous(handle, shape.to_vec(), ElemType::Int(IntKind::I32))
}

/// An error of the runtime without its line breaks, cut to a length that a table takes.
pub(super) fn one_line(error: &dyn std::fmt::Debug) -> String {
    let text = format!("{error:?}");
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().take(300).collect()
}

/// The processor's own name, where the system tells.
fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .and_then(|line| line.split_once(':'))
        .map_or("a processor", |(_, name)| name.trim());
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    format!("{name}, {threads} threads")
}
