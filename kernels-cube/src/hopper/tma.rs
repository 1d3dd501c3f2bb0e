//! The copy engine: tiles between tensors in memory and shared memory.
//!
//! A tensor map, made by the runtime at each launch, tells the engine where the tensor lies and how large a tile is. What
//! of a tile lies outside of the tensor reads as zero and is not written.

use cubecl::prelude::*;
use cubecl::zspace::{Shape, Strides};
use cubecl_cpp::cuda::ptx::tensor_map_address;

use crate::tensor::TensorRef;

/// Elements of 16 bits in a row of a tile: the span of the swizzle.
pub(crate) const TILE_COLUMNS: usize = 64;

/// What the engine brings into the L2 cache when it loads a row of a tile.
///
/// Measured on an H200: where nobody else reads the tiles, as when keys and weights are streamed, [`Row`](Self::Row) takes 2 to
/// 19 % less time; where other cubes read them too, [`Two`](Self::Two) takes 1 % less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Promotion {
    /// The row.
    Row,
    /// 256 bytes: the row and what lies beside it in memory.
    Two,
}

impl Promotion {
    fn prefetch(self) -> TensorMapPrefetch {
        match self {
            Self::Row => TensorMapPrefetch::None,
            Self::Two => TensorMapPrefetch::B256,
        }
    }
}

/// The map of a matrix `[rows, columns]` for tiles of `tile_rows` by [`TILE_COLUMNS`], swizzled over 128 bytes.
///
/// Rows must start at multiples of 16 bytes, and sizes fit an i32.
///
/// # Safety
/// The matrix must lie in its buffer.
pub(crate) unsafe fn matrix_map(
    tensor: &TensorRef,
    tile_rows: usize,
    promotion: Promotion,
) -> TensorMapArg<Tiled> {
    let mut strides = tensor.strides().to_vec();
    if tensor.shape()[0] == 1 {
        // The stride of a single row may be anything, and the engine wants one it could step by.
        strides[0] = strides[0].max(tensor.shape()[1].next_multiple_of(8));
    }
    // SAFETY: the caller promises that the matrix lies in its buffer.
    let matrix = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle().clone(),
            Strides::from(strides),
            Shape::from(tensor.shape().to_vec()),
        )
    };
    let tile_size = Shape::from(vec![tile_rows, TILE_COLUMNS]);
    TensorMapArg::new(TiledArgs { tile_size }, matrix, tensor.dtype())
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(promotion.prefetch())
}

/// The map of heads `[tokens, heads, columns]`, or `[blocks, tokens, heads, columns]`, for tiles of some tokens by some heads
/// by [`TILE_COLUMNS`], swizzled over 128 bytes. Copies name four coordinates; without blocks, the last one is 0.
///
/// Heads must start at multiples of 16 bytes, and sizes fit an i32.
///
/// # Safety
/// The tensor must lie in its buffer.
pub(crate) unsafe fn heads_map(
    tensor: &TensorRef,
    tile_tokens: usize,
    tile_heads: usize,
) -> TensorMapArg<Tiled> {
    let promotion = Promotion::Two;
    // SAFETY: the caller promises the same.
    unsafe { narrow_heads_map(tensor, tile_tokens, tile_heads, TILE_COLUMNS, promotion) }
}

/// The same for tiles of `tile_columns`, 64 or 32, swizzled over 128 or 64 bytes.
///
/// # Safety
/// As [`heads_map`].
pub(crate) unsafe fn narrow_heads_map(
    tensor: &TensorRef,
    tile_tokens: usize,
    tile_heads: usize,
    tile_columns: usize,
    promotion: Promotion,
) -> TensorMapArg<Tiled> {
    let mut shape = tensor.shape().to_vec();
    let mut strides = tensor.strides().to_vec();
    if shape.len() == 3 {
        shape.insert(0, 1);
        strides.insert(0, 1);
    }
    for axis in 0..3 {
        if shape[axis] == 1 {
            // Nobody steps along this axis, and the engine wants a stride that it could step by.
            strides[axis] = shape[3].next_multiple_of(8);
        }
    }
    // SAFETY: the caller promises that the tensor lies in its buffer.
    let heads = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle().clone(),
            Strides::from(strides),
            Shape::from(shape),
        )
    };
    let tile_size = Shape::from(vec![1, tile_tokens, tile_heads, tile_columns]);
    let swizzle = match tile_columns {
        TILE_COLUMNS => TensorMapSwizzle::B128,
        _ => TensorMapSwizzle::B64,
    };
    TensorMapArg::new(TiledArgs { tile_size }, heads, tensor.dtype())
        .with_swizzle(swizzle)
        .with_prefetch(promotion.prefetch())
}

/// The map of the slots of a cache, `[blocks, tokens, heads, columns]`, for tiles of `tile_slots` neighbouring slots of one head
/// with all its columns, swizzled over 128 bytes. Of a tile come eight slots of the first [`TILE_COLUMNS`], the same slots of the
/// next ones, and so on, then the next eight slots. Slots are counted over all blocks, in eights.
///
/// The tensor is contiguous, its columns a multiple of [`TILE_COLUMNS`], its slots and `tile_slots` multiples of eight, and
/// the number of eights fits an i32.
///
/// # Safety
/// The tensor must lie in its buffer.
pub(crate) unsafe fn slots_map(tensor: &TensorRef, tile_slots: usize) -> TensorMapArg<Tiled> {
    let [blocks, tokens, heads, columns] = [0, 1, 2, 3].map(|axis| tensor.shape()[axis]);
    let blocks_of_columns = columns / TILE_COLUMNS;
    let slot = heads * columns;
    let shape = vec![
        heads,
        blocks * tokens / 8,
        blocks_of_columns,
        8,
        TILE_COLUMNS,
    ];
    let strides = vec![columns, 8 * slot, TILE_COLUMNS, slot, 1];
    // SAFETY: the caller promises that the tensor lies in its buffer.
    let slots = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle().clone(),
            Strides::from(strides),
            Shape::from(shape),
        )
    };
    let tile_size = Shape::from(vec![1, tile_slots / 8, blocks_of_columns, 8, TILE_COLUMNS]);
    TensorMapArg::new(TiledArgs { tile_size }, slots, tensor.dtype())
        .with_swizzle(TensorMapSwizzle::B128)
        .with_prefetch(Promotion::Two.prefetch())
}

/// How long what is loaded should stay in the L2 cache.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// Nobody else reads it.
    Never,
    /// Others will.
    Often,
}

impl Reuse {
    /// The policy as `createpolicy.fractional.L2` makes it for all of the data, with `evict_first` or `evict_last`.
    fn policy(self) -> u64 {
        match self {
            Self::Never => 0x12f0_0000_0000_0000,
            Self::Often => 0x14f0_0000_0000_0000,
        }
    }
}

/// The address of a map, as the copies take it.
#[cube]
pub(crate) fn map_address<F: Float>(map: &TensorMap<F, Tiled>) -> u64 {
    tensor_map_address::<F, Tiled>(map)
}

/// Fetches a map into the cache of descriptors.
#[cube]
pub(crate) fn prefetch_map(map: u64) {
    gpu_asm!("prefetch.tensormap [{}];", in(_) map);
}

/// Loads the tile whose first element is (`row`, `column`) to `target`; its bytes count for the phase of `barrier`.
#[cube]
pub(crate) fn load(
    target: u32,
    map: u64,
    column: u32,
    row: u32,
    barrier: u32,
    #[comptime] reuse: Reuse,
) {
    let policy = comptime!(reuse.policy()).runtime();
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [{}], [{}, {{{}, {}}}], [{}], {};",
        in(_) target, in(_) map, in(_) column, in(_) row, in(_) barrier, in(_) policy
    );
}

/// Loads a tile as [`load`] does, to the same place in the shared memory of every cube of the cluster whose bit is set in `cubes`;
/// in each, its bytes count for the barrier in the place of `barrier`.
#[cube]
pub(crate) fn load_for(
    target: u32,
    map: u64,
    column: u32,
    row: u32,
    barrier: u32,
    cubes: u32,
    #[comptime] reuse: Reuse,
) {
    let policy = comptime!(reuse.policy()).runtime();
    let cubes = u16::cast_from(cubes);
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [{}], [{}, {{{}, {}}}], [{}], {}, {};",
        in(_) target, in(_) map, in(_) column, in(_) row, in(_) barrier, in(_) cubes, in(_) policy
    );
}

/// Loads the tile of a [`heads_map`] whose first element is (`block`, `token`, `head`, `column`), as [`load`]; where a cluster has several
/// `cubes`, to the same place in each, as [`load_for`].
#[cube]
pub(crate) fn load_heads(
    target: u32,
    map: u64,
    column: u32,
    head: u32,
    token: i32,
    block: i32,
    barrier: u32,
    #[comptime] reuse: Reuse,
    #[comptime] cubes: u32,
) {
    let policy = comptime!(reuse.policy()).runtime();
    let form = comptime!(multicast(cubes).form);
    let declared = comptime!(multicast(cubes).declared);
    let mask = comptime!(multicast(cubes).mask);
    // As values, not as addresses of variables.
    let token = token + 0;
    let block = block + 0;
    gpu_asm!(
        "{{ {declared} cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{form}.L2::cache_hint [{}], [{}, {{{}, {}, {}, {}}}], [{}], {mask}{}; }}",
        in(_) target, in(_) map, in(_) column, in(_) head, in(_) token, in(_) block, in(_) barrier, in(_) policy
    );
}

/// Loads the tile of a [`slots_map`] whose first eight slots are the `eight`-th, as [`load_heads`].
#[cube]
pub(crate) fn load_slots(
    target: u32,
    map: u64,
    eight: i32,
    head: u32,
    barrier: u32,
    #[comptime] reuse: Reuse,
    #[comptime] cubes: u32,
) {
    let policy = comptime!(reuse.policy()).runtime();
    let form = comptime!(multicast(cubes).form);
    let declared = comptime!(multicast(cubes).declared);
    let mask = comptime!(multicast(cubes).mask);
    // As a value, not as the address of a variable.
    let eight = eight + 0;
    gpu_asm!(
        "{{ {declared} cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{form}.L2::cache_hint [{}], [{}, {{0, 0, 0, {}, {}}}], [{}], {mask}{}; }}",
        in(_) target, in(_) map, in(_) eight, in(_) head, in(_) barrier, in(_) policy
    );
}

/// What an instruction that loads for all cubes of a cluster has more than one for a single cube.
#[derive(Default)]
struct Multicast {
    /// A word of its name.
    form: &'static str,
    /// A register with a bit for each cube.
    declared: String,
    /// That register as an operand.
    mask: &'static str,
}

fn multicast(cubes: u32) -> Multicast {
    match cubes {
        1 => Multicast::default(),
        _ => Multicast {
            form: ".multicast::cluster",
            declared: format!(".reg .b16 cubes; mov.b16 cubes, {};", (1u32 << cubes) - 1),
            mask: "cubes, ",
        },
    }
}

/// Stores the tile at `source` with its first element at (`row`, `column`). [`commit`] closes a group of stores.
#[cube]
pub(crate) fn store(map: u64, column: u32, row: u32, source: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{}, {{{}, {}}}], [{}];",
        in(_) map, in(_) column, in(_) row, in(_) source
    );
}

/// Closes a group of stores of this unit.
#[cube]
pub(crate) fn commit() {
    gpu_asm!("cp.async.bulk.commit_group;");
}

/// Waits until all but the last `pending` groups of this unit have read their shared memory.
#[cube]
pub(crate) fn wait_read(#[comptime] pending: u32) {
    gpu_asm!("cp.async.bulk.wait_group.read {pending};");
}
