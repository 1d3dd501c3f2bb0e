//! A device without hardware: it has the properties of an H200 and a compiler, and no memory.
//!
//! Ops plan and launch on it as on the real one; a launch compiles the kernel as the CUDA runtime
//! would, records the source, and runs nothing. Buffers are names with a size, so the largest
//! tensors are free.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use cubecl::cmma::MatrixLayout;
use cubecl::future::DynFut;
use cubecl::ir::features::{Plane, Tma};
use cubecl::ir::{
    ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, MmaProperties, OpaqueType, TargetProperties, VectorSize,
    features::TypeUsage,
};
use cubecl::prelude::{Client, CubeCount, CubeKernel};
use cubecl::server::{
    BufferBinding, CopyDescriptor, Handle, IoError, KernelArguments, MemoryLayout,
    MemoryLayoutDescriptor, MemoryLayoutPolicy, ProfileError, ProfilingToken, Server,
    ServerCommunication, ServerError, ServerStorage, ServerUtilities,
};
use cubecl::{Compiler, StreamMemoryReport, define_kernel};
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId};
use cubecl_common::profile::{ProfileDuration, TimingMethod};
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::{CudaCmmaCompiler, manual::contiguous_elements_cuda};
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features,
    register_supported_types, register_wmma_features,
};
use cubecl_cpp::target::Cuda;
use cubecl_environment::backtrace::BackTrace;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::dry_run::LaunchMode;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{ManagedMemoryHandle, MemoryAllocationMode};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId};

/// Compute capability of the device, times ten.
const ARCHITECTURE: u32 = 90;

/// What one launch would have run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launched {
    /// Name of the kernel function in the source.
    pub(crate) entry: String,
    pub(crate) source: String,
    /// Units of one cube.
    pub(crate) units: u32,
    /// Shared memory that the launch reserves.
    pub(crate) shared_bytes: usize,
}

impl Launched {
    /// The kernel, its dtype and its vectors: the entry without the hash of its instance.
    pub(crate) fn kernel(&self) -> &str {
        let name = self.entry.rsplit_once('_');
        name.map_or(self.entry.as_str(), |(name, _hash)| name)
    }

    /// Whether this is an instance of the kernel function `name`.
    pub(crate) fn is(&self, name: &str) -> bool {
        let rest = self.entry.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with('_'))
    }
}

/// What was launched since last taken, or why a launch would have failed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Launches(Arc<Mutex<Vec<Result<Launched, String>>>>);

impl Launches {
    /// All launches of `client` so far.
    pub(crate) fn take(&self, client: &Client) -> Vec<Result<Launched, String>> {
        // Launches are queued to a thread of the device.
        client.flush().expect("a device without hardware flushes");
        std::mem::take(&mut self.0.lock().expect("no panic while recording"))
    }

    fn push(&self, launch: Result<Launched, String>) {
        self.0
            .lock()
            .expect("no panic while recording")
            .push(launch);
    }
}

/// A client of a new device, and the list of what is launched on it.
pub(crate) fn client() -> (Client, Launches) {
    let launches = Launches::default();
    let id = DeviceId {
        type_id: 0,
        index_id: 0,
    };
    let server = OfflineServer::new(id, launches.clone());
    (Client::init(id, server), launches)
}

#[derive(Debug)]
struct OfflineServer {
    utilities: Arc<ServerUtilities>,
    options: CompilationOptions,
    launches: Launches,
}

impl OfflineServer {
    fn new(id: DeviceId, launches: Launches) -> Self {
        let (utilities, _captures) = ServerUtilities::init(
            ServiceId::of::<Self>(id),
            "cuda",
            properties(),
            target_properties(),
            Arc::new(ServerLogger::default()),
            OneBuffer,
        );
        Self {
            utilities: Arc::new(utilities),
            options: options(),
            launches,
        }
    }

    fn compile(&self, kernel: &dyn CubeKernel, count: &CubeCount) -> Result<Launched, String> {
        let hardware = &self.utilities.properties.hardware;
        let id = kernel.id();
        let units = id.cube_dim.num_elems();
        if units > hardware.max_units_per_cube {
            return Err(format!("{units} units in a cube"));
        }
        if let CubeCount::Static(x, y, z) = *count {
            let (max_x, max_y, max_z) = hardware.max_cube_count;
            if x > max_x || y > max_y || z > max_z {
                return Err(format!("{x} x {y} x {z} cubes"));
            }
        }
        let definition = define_kernel(kernel).map_err(|error| error.to_string())?;
        let entry = definition.settings.kernel_name.clone();
        let compiled = CppCompiler::<Cuda>::default()
            .compile(definition, &self.options)
            .map_err(|error| error.to_string())?;
        let shared_bytes = compiled.shared_memory_size;
        if shared_bytes > hardware.max_shared_memory_size {
            return Err(format!("{shared_bytes} bytes of shared memory"));
        }
        Ok(Launched {
            entry,
            source: compiled.source,
            units,
            shared_bytes,
        })
    }
}

/// The options that `cubecl-cuda` compiles with on this architecture.
fn options() -> CompilationOptions {
    CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            fast_math: true,
            dp4a: true,
            grid_constants: true,
            fast_tanh: true,
            clusters: true,
            elect_sync: true,
        },
        ..Default::default()
    }
}

/// The properties that `cubecl-cuda` reports of an H200, as far as ops can ask for them.
fn properties() -> DeviceProperties {
    let architecture = CudaArchitecture {
        version: ARCHITECTURE,
        tensor_cores: true,
    };
    let memory_bytes = 141 << 30;
    let mut properties = DeviceProperties::new(
        Default::default(),
        MemoryDeviceProperties::new(memory_bytes / 4, 512).with_max_memory(memory_bytes),
        HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: 227 * 1024,
            max_cube_count: (i32::MAX as u32, 65_535, 65_535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(132),
            num_tensor_cores: Some(4),
            min_tensor_cores_dim: Some(8),
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        },
        TimingMethod::Device,
        DeviceIdentity {
            name: "H200, offline".to_owned(),
            fingerprint: format!("ptx_sm{ARCHITECTURE}"),
            physical: None,
        },
    );
    register_supported_types(&mut properties);
    properties.register_opaque_type(OpaqueType::Barrier);
    properties.register_opaque_type(OpaqueType::TensorMap);
    properties.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    let features = &mut properties.features;
    for half in [FloatKind::F16, FloatKind::BF16] {
        features.matmul.ldmatrix.insert(ElemType::Float(half));
        features.matmul.stmatrix.insert(ElemType::Float(half));
    }
    features.copy_async = true;
    features.tma.insert(Tma::Base);
    features.cube_cluster = true;
    features.memory_reinterpret = true;
    features.alignment = true;
    features.device_memory_scope = true;
    features.plane.insert(Plane::Sync);
    features.plane.insert(Plane::Ops);
    features.plane.insert(Plane::NonUniformControlFlow);
    let wmma = CudaCmmaCompiler::Cpp.supported_cmma_combinations(&architecture);
    register_wmma_features(wmma, &mut properties);
    let mma = cubecl_cpp::cuda::supported_mma_combinations(&architecture);
    register_mma_features(mma, &mut properties);
    properties
}

fn target_properties() -> TargetProperties {
    TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: 32,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    }
}

/// Gives each request a handle of its own, contiguous.
struct OneBuffer;

impl MemoryLayoutPolicy for OneBuffer {
    fn apply(
        &self,
        service: ServiceId,
        stream_id: StreamId,
        descriptors: &[MemoryLayoutDescriptor],
    ) -> (Handle, Vec<MemoryLayout>) {
        let bytes = |descriptor: &MemoryLayoutDescriptor| {
            descriptor.shape.iter().product::<usize>() * descriptor.elem_size
        };
        let base = Handle::new(
            service,
            stream_id,
            descriptors.iter().map(bytes).sum::<usize>() as u64,
        );
        let layouts = descriptors
            .iter()
            .map(|descriptor| {
                let mut strides = vec![1; descriptor.shape.len()];
                for axis in (1..strides.len()).rev() {
                    strides[axis - 1] = strides[axis] * descriptor.shape[axis];
                }
                let handle = Handle::new(service, stream_id, bytes(descriptor) as u64);
                MemoryLayout::new(handle, strides)
            })
            .collect();
        (base, layouts)
    }
}

fn no_memory() -> ServerError {
    ServerError::from(IoError::UnsupportedIoOperation {
        backtrace: BackTrace::capture(),
    })
}

impl DeviceService for OfflineServer {
    fn init(id: DeviceId) -> Self {
        Self::new(id, Launches::default())
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for OfflineServer {}

impl Server for OfflineServer {
    fn initialize_memory(
        &mut self,
        _memory: ManagedMemoryHandle,
        _size: u64,
        _stream_id: StreamId,
    ) -> Result<(), ServerError> {
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        _descriptors: Vec<CopyDescriptor>,
        _stream_id: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        Box::pin(async { Err(no_memory()) })
    }

    fn write(&mut self, _descriptors: Vec<(CopyDescriptor, Bytes)>, _stream_id: StreamId) {}

    fn sync(
        &mut self,
        _handles: Vec<BufferBinding>,
        _stream_id: StreamId,
    ) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn check(
        &mut self,
        _handles: Vec<BufferBinding>,
        _stream_id: StreamId,
    ) -> Result<(), ServerError> {
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        _bindings: KernelArguments,
        _stream_id: StreamId,
        _launch_mode: LaunchMode,
    ) {
        // The thread of the device would log a panic of the compiler and forget it.
        let launched = catch_unwind(AssertUnwindSafe(|| self.compile(&*kernel, &count)));
        let launched = launched.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Err(text.unwrap_or_else(|| "the compiler panicked".to_owned()))
        });
        let named = launched.map_err(|error| format!("{}: {error}", kernel.name()));
        self.launches.push(named);
    }

    fn flush(&mut self, _stream_id: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _stream_id: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _stream_id: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _stream_id: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(no_memory())
    }

    fn end_profile(
        &mut self,
        _stream_id: StreamId,
        _token: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered {
            backtrace: BackTrace::capture(),
        })
    }

    fn allocation_mode(&mut self, _mode: MemoryAllocationMode, _stream_id: StreamId) {}
}

impl ServerStorage for OfflineServer {
    type Storage = NoStorage;

    fn get_resource(
        &mut self,
        _binding: BufferBinding,
        _stream_id: StreamId,
    ) -> Result<ManagedResource<()>, ServerError> {
        Err(no_memory())
    }
}

/// A storage that cannot exist.
enum NoStorage {}

impl ComputeStorage for NoStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        match *self {}
    }

    fn get(&mut self, _handle: &StorageHandle) -> Result<(), IoError> {
        match *self {}
    }

    fn alloc(&mut self, _size: u64) -> Result<StorageHandle, IoError> {
        match *self {}
    }

    fn dealloc(&mut self, _id: StorageId) {
        match *self {}
    }

    fn flush(&mut self) {
        match *self {}
    }

    fn bytes_allocated(&self) -> u64 {
        match *self {}
    }
}
