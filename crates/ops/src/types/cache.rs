//! The paged KV cache: one K and one V tensor per layer, with one owner.

use burn::tensor::{DType, Device, Int, Tensor};

use crate::{check, ops};

/// Sizes that all layers of a cache share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheGeometry {
    /// Number of physical blocks.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Number of key/value heads.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl CacheGeometry {
    /// Number of token slots.
    pub fn num_slots(&self) -> usize {
        self.num_blocks * self.block_size
    }

    /// Elements of the K and of the V tensor of a layer. As one axis it has no gaps: some devices allocate rows of odd lengths
    /// further apart than they are long.
    pub(crate) fn num_elements(&self) -> usize {
        self.num_slots() * self.num_kv_heads * self.head_dim
    }

    /// Shape of the K and of the V tensor of a layer.
    pub fn shape(&self) -> [usize; 4] {
        [
            self.num_blocks,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
        ]
    }
}

/// Why a cache could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// A size is zero.
    #[error("{what} must be at least 1")]
    Zero {
        /// The size.
        what: &'static str,
    },
    /// Slots are numbered by i32.
    #[error("{num_blocks} blocks of {block_size} tokens exceed 2147483647 slots")]
    TooManySlots {
        /// Number of blocks.
        num_blocks: usize,
        /// Tokens per block.
        block_size: usize,
    },
    /// The device reads and writes several codes of e4m3 at a time.
    #[error(
        "on device {device}, a cache of e4m3 takes heads of a multiple of {multiple} elements, not of {head_dim}"
    )]
    HeadDim {
        /// The device.
        device: String,
        /// Elements per head.
        head_dim: usize,
        /// What they must be a multiple of.
        multiple: usize,
    },
    /// The device failed while the cache was made.
    #[error("device {device} could not make the cache: {reason}")]
    Device {
        /// The device.
        device: String,
        /// In the backend's words.
        reason: String,
    },
    /// The device does not compute in this dtype.
    #[error("device {device} does not support a cache of dtype {dtype:?}")]
    UnsupportedDType {
        /// The device.
        device: String,
        /// The dtype.
        dtype: DType,
    },
}

/// What K and V of a cache are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheDType {
    /// As they come: f32, f16 or bf16.
    Float(DType),
    /// In 8 bits, of which four are exponent and three are mantissa (e4m3), times a scale for each key/value head. They come
    /// and go in the dtype named here. On CubeCL devices, which are GPUs and `cpu`, heads have a multiple of 8 elements.
    E4m3(DType),
}

impl CacheDType {
    /// The dtype in which K and V come and go, which is that of queries and outputs.
    pub fn float(self) -> DType {
        match self {
            Self::Float(dtype) | Self::E4m3(dtype) => dtype,
        }
    }

    /// The dtype of the tensors of a cache: u8 for e4m3.
    pub fn stored(self) -> DType {
        match self {
            Self::Float(dtype) => dtype,
            Self::E4m3(_) => DType::U8,
        }
    }
}

impl From<DType> for CacheDType {
    fn from(dtype: DType) -> Self {
        Self::Float(dtype)
    }
}

/// What an e4m3 code of a head is multiplied by: the number stored is the value over the scale, saturated at 448.
///
/// A scale that makes the largest values of a head some 100 to 400 loses least; 1 suits most models.
#[derive(Debug, Clone)]
pub struct CacheScales {
    pub(crate) k: Tensor<1>,
    pub(crate) v: Tensor<1>,
}

impl CacheScales {
    /// Scales for K and V, each `[num_kv_heads]` f32.
    ///
    /// # Panics
    /// If shapes, dtypes or devices disagree.
    pub fn new(k: Tensor<1>, v: Tensor<1>) -> Self {
        assert_eq!(k.dims(), v.dims(), "K and V must have as many scales");
        assert_eq!(
            (k.dtype(), v.dtype()),
            (DType::F32, DType::F32),
            "scales must be F32"
        );
        assert_eq!(k.device(), v.device(), "scales must be on one device");
        Self { k, v }
    }

    /// Scales of 1.
    pub fn ones(num_kv_heads: usize, device: &Device) -> Self {
        let ones = || Tensor::ones([num_kv_heads], (device, DType::F32));
        Self::new(ones(), ones())
    }

    /// The scales of K, `[num_kv_heads]`.
    pub fn k(&self) -> &Tensor<1> {
        &self.k
    }

    /// The scales of V, `[num_kv_heads]`.
    pub fn v(&self) -> &Tensor<1> {
        &self.v
    }
}

/// The two tensors of a layer.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one for each layer, handed from one op to the next"
)]
pub(crate) enum KvTensors {
    Float(Tensor<4>, Tensor<4>),
    Codes(Tensor<4, Int>, Tensor<4, Int>, CacheScales),
}

/// K and V of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`.
///
/// This value is the only owner of both tensors while [`store_kv`](crate::store_kv) runs: a second handle (a clone, a
/// view) would turn the write into a copy of the cache, so it is refused.
#[derive(Debug)]
pub struct LayerKv {
    /// K and V; `None` only while a store is under way, or after one was refused.
    kv: Option<KvTensors>,
    geometry: CacheGeometry,
    dtype: CacheDType,
}

impl LayerKv {
    /// Takes over a user's own K and V tensors; they are copied if their rows have gaps between them.
    ///
    /// # Panics
    /// If the shapes, dtypes or devices of the two differ, or the device fails.
    pub fn new(k: Tensor<4>, v: Tensor<4>) -> Self {
        Self::of_floats(k, v).settled()
    }

    /// Takes over K and V as e4m3 codes in u8, whose values come and go in `dtype`, as [`new`](Self::new).
    ///
    /// # Panics
    /// If the shapes, dtypes or devices differ, `dtype` is no float, the device does not take the heads
    /// ([`CacheError::HeadDim`]), there is not a scale for each head, or the device fails.
    pub fn e4m3(k: Tensor<4, Int>, v: Tensor<4, Int>, scales: CacheScales, dtype: DType) -> Self {
        Self::of_codes(k, v, scales, dtype).settled()
    }

    fn of_floats(k: Tensor<4>, v: Tensor<4>) -> Self {
        assert_eq!(k.dims(), v.dims(), "K and V of a layer must have one shape");
        assert_eq!(
            k.dtype(),
            v.dtype(),
            "K and V of a layer must have one dtype"
        );
        assert_eq!(
            k.device(),
            v.device(),
            "K and V of a layer must be on one device"
        );
        let geometry = geometry(k.dims());
        let (len, shape) = (geometry.num_elements(), geometry.shape());
        let (k, v) = (
            k.reshape([len]).reshape(shape),
            v.reshape([len]).reshape(shape),
        );
        Self {
            geometry,
            dtype: CacheDType::Float(k.dtype()),
            kv: Some(KvTensors::Float(k, v)),
        }
    }

    fn of_codes(k: Tensor<4, Int>, v: Tensor<4, Int>, scales: CacheScales, dtype: DType) -> Self {
        assert_eq!(k.dims(), v.dims(), "K and V of a layer must have one shape");
        assert_eq!(
            (k.dtype(), v.dtype()),
            (DType::U8, DType::U8),
            "codes of K and V must be U8"
        );
        check::float_dtype("LayerKv::e4m3", "what is stored", dtype);
        assert!(
            k.device() == v.device() && k.device() == scales.k.device(),
            "K, V and their scales must be on one device"
        );
        let geometry = geometry(k.dims());
        if let Err(error) = check_e4m3_heads(geometry.head_dim, &k.device()) {
            panic!("{error}");
        }
        assert_eq!(
            scales.k.dims(),
            [geometry.num_kv_heads],
            "K and V must have a scale for each head"
        );
        let (len, shape) = (geometry.num_elements(), geometry.shape());
        let (k, v) = (
            k.reshape([len]).reshape(shape),
            v.reshape([len]).reshape(shape),
        );
        Self {
            geometry,
            dtype: CacheDType::E4m3(dtype),
            kv: Some(KvTensors::Codes(k, v, scales)),
        }
    }

    fn settled(self) -> Self {
        match settle(&self.device()) {
            Ok(()) => self,
            Err(error) => panic!("{error}"),
        }
    }

    /// The sizes.
    pub fn geometry(&self) -> CacheGeometry {
        self.geometry
    }

    /// The dtype in which K and V come and go.
    pub fn dtype(&self) -> DType {
        self.dtype.float()
    }

    /// What K and V are stored as.
    pub fn cache_dtype(&self) -> CacheDType {
        self.dtype
    }

    /// The device.
    ///
    /// # Panics
    /// If an earlier store on this layer was refused.
    pub fn device(&self) -> Device {
        match self.tensors() {
            KvTensors::Float(k, _) => k.device(),
            KvTensors::Codes(k, ..) => k.device(),
        }
    }

    /// The K tensor. A clone of it that lives on makes the next store panic.
    ///
    /// # Panics
    /// If an earlier store on this layer was refused, or K is stored as e4m3.
    pub fn k(&self) -> &Tensor<4> {
        self.floats().0
    }

    /// The V tensor, as [`k`](Self::k).
    ///
    /// # Panics
    /// As [`k`](Self::k).
    pub fn v(&self) -> &Tensor<4> {
        self.floats().1
    }

    /// The codes of K and V and their scales, if they are stored as e4m3. A clone of them that lives on makes the next store
    /// panic.
    ///
    /// # Panics
    /// If an earlier store on this layer was refused.
    pub fn codes(&self) -> Option<(&Tensor<4, Int>, &Tensor<4, Int>, &CacheScales)> {
        match self.tensors() {
            KvTensors::Float(..) => None,
            KvTensors::Codes(k, v, scales) => Some((k, v, scales)),
        }
    }

    /// Gives the tensors back to the caller.
    ///
    /// # Panics
    /// As [`k`](Self::k).
    pub fn into_parts(self) -> (Tensor<4>, Tensor<4>) {
        match self.kv.expect(LOST) {
            KvTensors::Float(k, v) => (k, v),
            KvTensors::Codes(..) => panic!("{CODES}"),
        }
    }

    /// Whether nobody else holds the tensors, as far as can be seen here.
    pub(crate) fn can_mut(&self) -> bool {
        match self.tensors() {
            KvTensors::Float(k, v) => k.can_mut() && v.can_mut(),
            KvTensors::Codes(k, v, _) => k.can_mut() && v.can_mut(),
        }
    }

    pub(crate) fn tensors(&self) -> &KvTensors {
        self.kv.as_ref().expect(LOST)
    }

    fn floats(&self) -> (&Tensor<4>, &Tensor<4>) {
        match self.tensors() {
            KvTensors::Float(k, v) => (k, v),
            KvTensors::Codes(..) => panic!("{CODES}"),
        }
    }

    /// Hands the tensors to `op` and keeps what it returns.
    pub(crate) fn update(&mut self, op: impl FnOnce(KvTensors) -> KvTensors) {
        let tensors = self.kv.take().expect(LOST);
        self.kv = Some(op(tensors));
    }
}

/// Why a layer has no tensors.
const LOST: &str = "the layer's cache was lost in a refused store";

/// Why a layer has no tensors of floats.
const CODES: &str = "the layer's cache holds e4m3 codes; see `LayerKv::codes`";

/// Waits until the device has let go of what made a cache: until then, a handle that it holds looks like one of somebody's.
fn settle(device: &Device) -> Result<(), CacheError> {
    device.sync().map_err(|error| CacheError::Device {
        device: format!("{device:?}"),
        reason: error.to_string(),
    })
}

fn check_e4m3_heads(head_dim: usize, device: &Device) -> Result<(), CacheError> {
    let multiple = ops::e4m3_head_multiple(device);
    match head_dim.is_multiple_of(multiple) {
        true => Ok(()),
        false => Err(CacheError::HeadDim {
            device: format!("{device:?}"),
            head_dim,
            multiple,
        }),
    }
}

fn geometry([num_blocks, block_size, num_kv_heads, head_dim]: [usize; 4]) -> CacheGeometry {
    CacheGeometry {
        num_blocks,
        block_size,
        num_kv_heads,
        head_dim,
    }
}

/// The cache of all layers.
#[derive(Debug)]
pub struct PagedKvCache {
    layers: Vec<LayerKv>,
    geometry: CacheGeometry,
    dtype: CacheDType,
}

impl PagedKvCache {
    /// Allocates a cache of zeros, one K and one V tensor per layer; e4m3 has scales of 1.
    ///
    /// # Errors
    /// [`CacheError`] if a size is zero, the slots cannot be numbered by i32, e4m3 does not take the heads, or the device lacks
    /// the dtype or fails.
    pub fn new(
        num_layers: usize,
        geometry: CacheGeometry,
        dtype: impl Into<CacheDType>,
        device: &Device,
    ) -> Result<Self, CacheError> {
        let dtype = dtype.into();
        let sizes = [
            ("num_layers", num_layers),
            ("num_blocks", geometry.num_blocks),
            ("block_size", geometry.block_size),
            ("num_kv_heads", geometry.num_kv_heads),
            ("head_dim", geometry.head_dim),
        ];
        if let Some((what, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(CacheError::Zero { what });
        }
        let CacheGeometry {
            num_blocks,
            block_size,
            ..
        } = geometry;
        let slots = num_blocks.checked_mul(block_size);
        if slots.is_none_or(|slots| i32::try_from(slots).is_err()) {
            return Err(CacheError::TooManySlots {
                num_blocks,
                block_size,
            });
        }
        if matches!(dtype, CacheDType::E4m3(_)) {
            check_e4m3_heads(geometry.head_dim, device)?;
        }
        let is_float = check::is_float(dtype.float());
        for dtype in [dtype.float(), dtype.stored()] {
            if !is_float || !device.supports_dtype(dtype) {
                return Err(CacheError::UnsupportedDType {
                    device: format!("{device:?}"),
                    dtype,
                });
            }
        }
        let num_elements = geometry.num_elements();
        let layer = || match dtype {
            CacheDType::Float(dtype) => {
                let zeros = || Tensor::<1>::zeros([num_elements], (device, dtype));
                let zeros = || zeros().reshape(geometry.shape());
                LayerKv::of_floats(zeros(), zeros())
            }
            CacheDType::E4m3(dtype) => {
                let zeros = || Tensor::<1, Int>::zeros([num_elements], (device, DType::U8));
                let zeros = || zeros().reshape(geometry.shape());
                let scales = CacheScales::ones(geometry.num_kv_heads, device);
                LayerKv::of_codes(zeros(), zeros(), scales, dtype)
            }
        };
        // The cache lives as long as the engine: the persistent pool keeps it out of the way of a step's allocations.
        let (layers, settled) = device.memory_persistent_allocations((), |()| {
            let layers = (0..num_layers).map(|_| layer()).collect();
            (layers, settle(device))
        });
        settled?;
        Ok(Self {
            layers,
            geometry,
            dtype,
        })
    }

    /// Bytes of K and V that one block takes over all layers.
    pub fn bytes_per_block(
        num_layers: usize,
        geometry: CacheGeometry,
        dtype: impl Into<CacheDType>,
    ) -> usize {
        2 * num_layers
            * geometry.block_size
            * geometry.num_kv_heads
            * geometry.head_dim
            * dtype.into().stored().size()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The sizes of each layer.
    pub fn geometry(&self) -> CacheGeometry {
        self.geometry
    }

    /// What all layers are stored as.
    pub fn dtype(&self) -> CacheDType {
        self.dtype
    }

    /// One layer.
    ///
    /// # Panics
    /// If `layer` is not below [`num_layers`](Self::num_layers).
    pub fn layer(&self, layer: usize) -> &LayerKv {
        &self.layers[layer]
    }

    /// One layer, to store into.
    ///
    /// # Panics
    /// If `layer` is not below [`num_layers`](Self::num_layers).
    pub fn layer_mut(&mut self, layer: usize) -> &mut LayerKv {
        &mut self.layers[layer]
    }
}
