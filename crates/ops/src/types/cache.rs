//! The paged KV cache: one K and one V tensor per layer, with one owner.

use burn::tensor::{DType, Device, Tensor};

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
    /// The device does not compute in this dtype.
    #[error("device {device} does not support a cache of dtype {dtype:?}")]
    UnsupportedDType {
        /// The device.
        device: String,
        /// The dtype.
        dtype: DType,
    },
}

/// K and V of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`.
///
/// This value is the only owner of both tensors while [`store_kv`](crate::store_kv) runs: a second handle (a clone, a
/// view) would turn the write into a copy of the cache, so it is refused.
#[derive(Debug)]
pub struct LayerKv {
    /// K and V; `None` only while a store is under way, or after one was refused.
    kv: Option<(Tensor<4>, Tensor<4>)>,
    geometry: CacheGeometry,
    dtype: DType,
}

impl LayerKv {
    /// Takes over a user's own K and V tensors.
    ///
    /// # Panics
    /// If the shapes, dtypes or devices of the two differ.
    pub fn new(k: Tensor<4>, v: Tensor<4>) -> Self {
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
        let [num_blocks, block_size, num_kv_heads, head_dim] = k.dims();
        let geometry = CacheGeometry {
            num_blocks,
            block_size,
            num_kv_heads,
            head_dim,
        };
        let dtype = k.dtype();
        Self {
            kv: Some((k, v)),
            geometry,
            dtype,
        }
    }

    /// The sizes.
    pub fn geometry(&self) -> CacheGeometry {
        self.geometry
    }

    /// The dtype of K and V.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The K tensor. A clone of it that lives on makes the next store panic.
    ///
    /// # Panics
    /// If an earlier store on this layer was refused.
    pub fn k(&self) -> &Tensor<4> {
        &self.kv().0
    }

    /// The V tensor, as [`k`](Self::k).
    ///
    /// # Panics
    /// If an earlier store on this layer was refused.
    pub fn v(&self) -> &Tensor<4> {
        &self.kv().1
    }

    /// Gives the tensors back to the caller.
    ///
    /// # Panics
    /// If an earlier store on this layer was refused.
    pub fn into_parts(self) -> (Tensor<4>, Tensor<4>) {
        self.kv
            .expect("the layer's cache was lost in a refused store")
    }

    fn kv(&self) -> &(Tensor<4>, Tensor<4>) {
        self.kv
            .as_ref()
            .expect("the layer's cache was lost in a refused store")
    }

    /// Hands both tensors to `op` and keeps what it returns.
    pub(crate) fn update(
        &mut self,
        op: impl FnOnce(Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<4>),
    ) {
        let (k, v) = self
            .kv
            .take()
            .expect("the layer's cache was lost in a refused store");
        self.kv = Some(op(k, v));
    }
}

/// The cache of all layers.
#[derive(Debug)]
pub struct PagedKvCache {
    layers: Vec<LayerKv>,
    geometry: CacheGeometry,
    dtype: DType,
}

impl PagedKvCache {
    /// Allocates a cache of zeros, one K and one V tensor per layer.
    ///
    /// # Errors
    /// [`CacheError`] if a size is zero, the slots cannot be numbered by i32, or the device lacks the dtype.
    pub fn new(
        num_layers: usize,
        geometry: CacheGeometry,
        dtype: DType,
        device: &Device,
    ) -> Result<Self, CacheError> {
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
        if !device.supports_dtype(dtype) {
            return Err(CacheError::UnsupportedDType {
                device: format!("{device:?}"),
                dtype,
            });
        }
        let zeros = || Tensor::zeros(geometry.shape(), (device, dtype));
        // The cache lives as long as the engine: the persistent pool keeps it out of the way of a step's allocations.
        let layers = device.memory_persistent_allocations((), |()| {
            (0..num_layers)
                .map(|_| LayerKv::new(zeros(), zeros()))
                .collect()
        });
        Ok(Self {
            layers,
            geometry,
            dtype,
        })
    }

    /// Bytes of K and V that one block takes over all layers.
    pub fn bytes_per_block(num_layers: usize, geometry: CacheGeometry, dtype: DType) -> usize {
        2 * num_layers
            * geometry.block_size
            * geometry.num_kv_heads
            * geometry.head_dim
            * dtype.size()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The sizes of each layer.
    pub fn geometry(&self) -> CacheGeometry {
        self.geometry
    }

    /// The dtype of all layers.
    pub fn dtype(&self) -> DType {
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
