//! Tensors on the device, in any layout, with poison in every gap.

use burn_paged_kernels::{DeviceFacts, Launcher, TensorRef};
use cubecl::ir::{ElemType, IntKind};
use cubecl::server::Handle;

use crate::arith::Dtype;

/// How a tensor lies in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Without gaps.
    Dense,
    /// Every row along the last axis padded to a multiple of 32 elements, as CUDA allocates.
    Pitched,
    /// Some columns of a wider row, as slices of one projection are: the first axis is strided and
    /// the start lies inside the buffer.
    Slice,
    /// Axes 0 and 1 exchanged in memory.
    Transposed,
    /// As `Slice`, starting at an odd element.
    OddSlice,
}

impl Layout {
    pub(crate) const ALL: [Self; 5] = [
        Self::Dense,
        Self::Pitched,
        Self::Slice,
        Self::Transposed,
        Self::OddSlice,
    ];

    /// A layout with other strides, so that two tensors of one shape can be told apart.
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Dense => Self::Pitched,
            Self::Pitched | Self::Transposed => Self::Slice,
            Self::Slice | Self::OddSlice => Self::Dense,
        }
    }

    /// Strides and start, in elements.
    fn place(self, shape: &[usize]) -> (Vec<usize>, usize) {
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            let pitch = match self {
                Self::Pitched if axis + 1 == shape.len() => shape[axis].next_multiple_of(32),
                _ => shape[axis],
            };
            strides[axis - 1] = strides[axis] * pitch;
        }
        match self {
            Self::Dense | Self::Pitched => (strides, 0),
            Self::Slice => {
                let row = strides[0];
                strides[0] = 3 * row;
                (strides, row)
            }
            Self::OddSlice => {
                strides[0] += 5;
                (strides, 3)
            }
            Self::Transposed if shape.len() > 2 => {
                strides[0] = strides[1];
                strides[1] = strides[0] * shape[0];
                (strides, 0)
            }
            Self::Transposed => (strides, 0),
        }
    }
}

/// The launcher of the device under test.
pub(crate) fn launcher() -> Launcher {
    Launcher::new(cubecl::Device::default().client())
}

/// The forms of a launch: as the device's own facts plan it, and as a GPU without plane operations
/// would, in small cubes with narrow vectors, wherever the test runs.
pub(crate) fn launchers() -> [Launcher; 2] {
    let own = launcher();
    let facts = DeviceFacts {
        num_cpu_cores: None,
        plane_ops: false,
        max_units_per_cube: own.facts().max_units_per_cube.min(4),
        max_cube_count: (7, 5, 65_535),
        vector_size_16_bit: 4,
        vector_size_32_bit: 2,
        mma_f16: false,
        mma_bf16: false,
        ..own.facts().clone()
    };
    let fine = Launcher::with_facts(own.client().clone(), facts);
    [own, fine]
}

/// Whether the device stores `dtype`; says so if not.
pub(crate) fn runs(launcher: &Launcher, dtype: Dtype) -> bool {
    let runs = launcher.facts().supports(dtype.elem());
    if !runs {
        println!("skipped {dtype:?}: the device cannot store it");
    }
    runs
}

/// A tensor on the device and what is needed to read it back.
pub(crate) struct Placed {
    pub(crate) tensor: TensorRef,
    buffer: Handle,
    start: usize,
    dtype: Dtype,
}

impl Placed {
    /// Writes `values`, in row-major order of `shape`, with NaN in the gaps.
    pub(crate) fn new(
        launcher: &Launcher,
        dtype: Dtype,
        shape: &[usize],
        layout: Layout,
        values: &[f64],
    ) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        let (strides, start) = layout.place(shape);
        let mut bytes = dtype.encode(f64::NAN).repeat(start + span(shape, &strides));
        for (index, &value) in offsets(shape, &strides).zip(values) {
            let at = (start + index) * dtype.size();
            bytes[at..at + dtype.size()].copy_from_slice(&dtype.encode(value));
        }
        let buffer = launcher.client().create_from_slice(&bytes);
        let handle = buffer.clone().offset_start((start * dtype.size()) as u64);
        let tensor = TensorRef::new(handle, shape.to_vec(), strides, dtype.elem());
        Self {
            tensor,
            buffer,
            start,
            dtype,
        }
    }

    pub(crate) fn dense(
        launcher: &Launcher,
        dtype: Dtype,
        shape: &[usize],
        values: &[f64],
    ) -> Self {
        Self::new(launcher, dtype, shape, Layout::Dense, values)
    }

    /// An output: NaN everywhere.
    pub(crate) fn poison(
        launcher: &Launcher,
        dtype: Dtype,
        shape: &[usize],
        layout: Layout,
    ) -> Self {
        let values = vec![f64::NAN; shape.iter().product()];
        Self::new(launcher, dtype, shape, layout, &values)
    }

    /// Reads the values back, in row-major order, and checks that the gaps are still NaN.
    pub(crate) fn read(&self, launcher: &Launcher) -> Vec<f64> {
        if self.tensor.num_elements() == 0 {
            return Vec::new();
        }
        let bytes = launcher
            .client()
            .read_one(self.buffer.clone())
            .expect("readable output");
        let mut all: Vec<f64> = bytes
            .chunks_exact(self.dtype.size())
            .map(|b| self.dtype.decode(b))
            .collect();
        let mut values = Vec::with_capacity(self.tensor.num_elements());
        for index in offsets(self.tensor.shape(), self.tensor.strides()) {
            values.push(std::mem::replace(&mut all[self.start + index], f64::NAN));
        }
        assert!(
            all.iter().all(|x| x.is_nan()),
            "a gap between rows was written"
        );
        values
    }
}

/// A contiguous i32 tensor.
pub(crate) fn ints(launcher: &Launcher, shape: &[usize], values: &[i32]) -> TensorRef {
    assert_eq!(values.len(), shape.iter().product::<usize>());
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let handle = launcher.client().create_from_slice(&bytes);
    TensorRef::contiguous(handle, shape.to_vec(), ElemType::Int(IntKind::I32))
}

pub(crate) fn read_ints(launcher: &Launcher, tensor: &TensorRef) -> Vec<i32> {
    let bytes = launcher
        .client()
        .read_one(tensor.handle().clone())
        .expect("readable output");
    bytes
        .chunks_exact(4)
        .map(|b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

fn span(shape: &[usize], strides: &[usize]) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    shape
        .iter()
        .zip(strides)
        .map(|(size, stride)| (size - 1) * stride)
        .sum::<usize>()
        + 1
}

/// The place of every element in row-major order.
fn offsets(shape: &[usize], strides: &[usize]) -> impl Iterator<Item = usize> {
    let count = shape.iter().product();
    (0..count).map(move |mut index| {
        let mut offset = 0;
        for (&size, &stride) in shape.iter().zip(strides).rev() {
            offset += index % size * stride;
            index /= size;
        }
        offset
    })
}
