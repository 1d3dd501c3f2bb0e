//! What a device can do, as plain data: plans are pure functions of a problem and of these facts.

use cubecl::features::{MmaConfig, Plane, Tma, TypeUsage};
use cubecl::ir::{DeviceProperties, ElemType, FloatKind};
use cubecl::prelude::{AddressType, Client};

/// The facts about a device that plans depend on.
///
/// Read from the properties of a client, or written by hand in a test of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The smallest number of units that a plane may have.
    pub plane_size_min: u32,
    /// The largest number of units that a plane may have.
    pub plane_size_max: u32,
    /// Whether kernels may use plane operations.
    pub plane_ops: bool,
    /// The most units of one cube.
    pub max_units_per_cube: u32,
    /// The most cubes of one launch along x, y and z.
    pub max_cube_count: (u32, u32, u32),
    /// Bytes of shared memory that one cube may use.
    pub max_shared_memory_bytes: usize,
    /// Cores of the processor, where the kernels run on it; `None` on a GPU.
    pub num_cpu_cores: Option<u32>,
    /// Widest vector, in elements, that one access of 2-byte elements is sized to.
    pub vector_size_16_bit: usize,
    /// Widest vector, in elements, that one access of 4-byte elements is sized to.
    pub vector_size_32_bit: usize,
    /// Whether f16 can be stored and converted.
    pub f16: bool,
    /// Whether bf16 can be stored and converted.
    pub bf16: bool,
    /// Whether kernels may index with 64 bits.
    pub wide_addresses: bool,
    /// Multiprocessors of a GPU that says so.
    pub num_multiprocessors: Option<u32>,
    /// Whether planes multiply 16 by 16 by 8 elements of f16, with sums in f32 and fragments as on CUDA, and load such
    /// fragments from shared memory.
    pub mma_f16: bool,
    /// As `mma_f16`, for bf16.
    pub mma_bf16: bool,
    /// Whether kernels may contain instructions of NVIDIA GPUs as text: only CubeCL's CUDA C++ compiler takes them.
    pub inline_ptx: bool,
    /// Whether the kernels for Hopper run: compute capability 9.0, that compiler, and the feature `hopper`.
    pub hopper: bool,
}

impl DeviceFacts {
    /// Whether a buffer may begin at any multiple of its vectors: where memory is addressed by pointers, which is where
    /// multiprocessors are counted (CUDA, ROCm). Elsewhere bindings of buffers have an alignment of their own.
    pub fn takes_any_offset(&self) -> bool {
        self.num_multiprocessors.is_some() && !self.is_cpu()
    }

    /// Multiprocessors, one where they are not counted.
    pub(crate) fn multiprocessors(&self) -> usize {
        self.num_multiprocessors.unwrap_or(1) as usize
    }

    /// Reads the facts of the device behind `client`.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        Self {
            plane_size_min: hardware.plane_size_min,
            plane_size_max: hardware.plane_size_max,
            plane_ops: properties.features.plane.contains(Plane::Ops),
            max_units_per_cube: hardware.max_units_per_cube,
            max_cube_count: hardware.max_cube_count,
            max_shared_memory_bytes: hardware.max_shared_memory_size,
            num_cpu_cores: hardware.num_cpu_cores,
            vector_size_16_bit: widest_vector(properties, 2),
            vector_size_32_bit: widest_vector(properties, 4),
            f16: stores(properties, FloatKind::F16),
            bf16: stores(properties, FloatKind::BF16),
            wide_addresses: properties.supports_address(AddressType::U64),
            num_multiprocessors: hardware.num_streaming_multiprocessors,
            mma_f16: multiplies(properties, FloatKind::F16),
            mma_bf16: multiplies(properties, FloatKind::BF16),
            // There is no property of its own; the bulk copies of CUDA come with the same compiler alone.
            inline_ptx: properties.features.tma.contains(Tma::Base),
            hopper: cfg!(feature = "hopper")
                && properties.features.tma.contains(Tma::Base)
                && properties.identity.fingerprint == "ptx_sm90",
        }
    }

    /// Whether the tensor-core kernels run, for `dtype`.
    pub fn has_mma(&self, dtype: ElemType) -> bool {
        let supported = match dtype {
            ElemType::Float(FloatKind::F16) => self.mma_f16,
            ElemType::Float(FloatKind::BF16) => self.mma_bf16,
            _ => false,
        };
        supported && self.plane_size() == Some(32)
    }

    /// Whether units run one after the other on cores, so that a unit should be given whole rows.
    pub fn is_cpu(&self) -> bool {
        self.num_cpu_cores.is_some()
    }

    /// The number of units of every plane, where it is known and plane operations may be used.
    pub fn plane_size(&self) -> Option<u32> {
        let fixed = self.plane_size_min == self.plane_size_max && self.plane_size_min > 1;
        (self.plane_ops && fixed).then_some(self.plane_size_min)
    }

    /// Whether kernels can read and write `dtype`, one of f32, f16 and bf16.
    pub fn supports(&self, dtype: ElemType) -> bool {
        match dtype {
            ElemType::Float(FloatKind::F32) => true,
            ElemType::Float(FloatKind::F16) => self.f16,
            ElemType::Float(FloatKind::BF16) => self.bf16,
            _ => false,
        }
    }

    /// The widest power of two that divides `alignment` and is a good width for one access of
    /// `element_size`-byte elements.
    pub fn vector_size(&self, element_size: usize, alignment: usize) -> usize {
        let widest = match element_size {
            2 => self.vector_size_16_bit,
            _ => self.vector_size_32_bit,
        };
        let aligned = match alignment {
            0 => widest,
            _ => 1 << alignment.trailing_zeros().min(16),
        };
        aligned.min(prev_power_of_two(widest))
    }
}

fn prev_power_of_two(value: usize) -> usize {
    1 << value.max(1).ilog2()
}

fn widest_vector(properties: &DeviceProperties, element_size: usize) -> usize {
    properties
        .io_optimized_vector_sizes(element_size)
        .max()
        .unwrap_or(1)
}

fn stores(properties: &DeviceProperties, kind: FloatKind) -> bool {
    properties
        .type_usage(ElemType::Float(kind))
        .is_superset(TypeUsage::Buffer | TypeUsage::Conversion)
}

/// Only CUDA has this shape, with known fragments.
fn multiplies(properties: &DeviceProperties, kind: FloatKind) -> bool {
    let config = MmaConfig {
        a_type: ElemType::Float(kind),
        b_type: ElemType::Float(kind),
        cd_type: ElemType::Float(FloatKind::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let matmul = &properties.features.matmul;
    matmul.mma.contains(&config) && matmul.ldmatrix.contains(&ElemType::Float(kind))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A GPU with planes of 32 units and the grid limits of CUDA.
    pub(crate) fn gpu() -> DeviceFacts {
        DeviceFacts {
            plane_size_min: 32,
            plane_size_max: 32,
            plane_ops: true,
            max_units_per_cube: 1024,
            max_cube_count: (i32::MAX as u32, 65_535, 65_535),
            max_shared_memory_bytes: 227 * 1024,
            num_cpu_cores: None,
            vector_size_16_bit: 8,
            vector_size_32_bit: 4,
            f16: true,
            bf16: true,
            wide_addresses: true,
            num_multiprocessors: Some(132),
            mma_f16: true,
            mma_bf16: true,
            inline_ptx: true,
            hopper: true,
        }
    }

    /// A processor with two cores, without planes.
    pub(crate) fn cpu() -> DeviceFacts {
        DeviceFacts {
            plane_size_min: 1,
            plane_size_max: 1,
            plane_ops: false,
            max_units_per_cube: 2,
            max_cube_count: (u32::MAX, u32::MAX, u32::MAX),
            max_shared_memory_bytes: 32 * 1024,
            num_cpu_cores: Some(2),
            vector_size_16_bit: 32,
            vector_size_32_bit: 16,
            f16: true,
            bf16: true,
            wide_addresses: true,
            num_multiprocessors: None,
            mma_f16: false,
            mma_bf16: false,
            inline_ptx: false,
            hopper: false,
        }
    }

    #[test]
    fn vector_size_divides_the_alignment_and_keeps_to_the_device() {
        assert_eq!(gpu().vector_size(2, 128), 8);
        assert_eq!(gpu().vector_size(4, 128), 4);
        assert_eq!(gpu().vector_size(2, 12), 4);
        assert_eq!(gpu().vector_size(2, 33), 1);
        assert_eq!(gpu().vector_size(2, 0), 8);
        assert_eq!(cpu().vector_size(4, 80), 16);
        assert_eq!(cpu().vector_size(4, 72), 8);
    }

    #[test]
    fn plane_size_is_unknown_where_it_varies_or_planes_are_absent() {
        assert_eq!(gpu().plane_size(), Some(32));
        assert_eq!(cpu().plane_size(), None);
        let varying = DeviceFacts {
            plane_size_min: 8,
            ..gpu()
        };
        assert_eq!(varying.plane_size(), None);
        let without_ops = DeviceFacts {
            plane_ops: false,
            ..gpu()
        };
        assert_eq!(without_ops.plane_size(), None);
    }

    #[test]
    fn only_the_three_float_types_are_supported() {
        assert!(gpu().supports(ElemType::Float(FloatKind::BF16)));
        let without = DeviceFacts {
            bf16: false,
            ..gpu()
        };
        assert!(!without.supports(ElemType::Float(FloatKind::BF16)));
        assert!(without.supports(ElemType::Float(FloatKind::F32)));
        assert!(!without.supports(ElemType::Float(FloatKind::F64)));
        assert!(!without.supports(ElemType::Bool));
    }
}
