//! What is compiled into the kernel, and the sizes that follow from it.

use crate::attention::keys::KeySource;
use crate::attention::mma::MmaSpec;
use crate::attention::plan::DecodeTile;
use crate::hopper::HalfType;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::attention) struct DecodeSpec {
    pub(in crate::attention) tile: DecodeTile,
    pub(in crate::attention) mma: MmaSpec,
    /// Tokens of a block, up to the keys of a tile; with packed keys, those of a tile.
    pub(in crate::attention) piece_keys: usize,
    /// Halves of the 16 rows of a product that hold query heads.
    pub(in crate::attention) halves: usize,
    /// The type of the queries.
    pub(in crate::attention) query: HalfType,
    /// Whether several clusters share the keys of a token, and another launch puts together what they find.
    pub(in crate::attention) in_parts: bool,
}

impl DecodeSpec {
    /// Copies that fill one column block of a tile.
    pub(super) fn pieces(self) -> u32 {
        (self.tile.keys / self.piece_keys) as u32
    }

    /// A bit for each of them.
    pub(super) fn piece_bits(self) -> u32 {
        ((1u64 << self.pieces()) - 1) as u32
    }

    /// Bytes of an element of a key.
    fn kv_bytes(self) -> usize {
        if self.mma.fp8 { 1 } else { 2 }
    }

    /// Elements of 16 bits in a row of a copy.
    pub(in crate::attention) fn copy_columns(self) -> usize {
        self.row_span() as usize / 2
    }

    /// Bytes of a row of a tile, over which it is swizzled.
    pub(super) fn row_span(self) -> u32 {
        DecodeTile::row_bytes(self.mma.head_dim, self.kv_bytes()).min(128) as u32
    }

    /// Vectors of a row of a tile.
    pub(super) fn row_vectors(self) -> u32 {
        self.row_span() / 16
    }

    /// Rows of a tile that make a row of all banks, within which the swizzle does not change.
    pub(super) fn rows_of_banks(self) -> u32 {
        128 / self.row_span()
    }

    /// Blocks of columns that a row of a tile holds.
    pub(super) fn columns(self) -> u32 {
        DecodeTile::row_bytes(self.mma.head_dim, self.kv_bytes()) as u32 / self.row_span()
    }

    /// Copies that fill a stage, keys and values: each is asked for by a unit of its own.
    pub(super) fn copies(self) -> u32 {
        2 * self.columns() * self.pieces()
    }

    /// Bytes of a block of columns of a tile.
    pub(super) fn column_bytes(self) -> u32 {
        self.tile.keys as u32 * self.row_span()
    }

    /// Whether queries must be brought into another type.
    pub(super) fn converts_queries(self) -> bool {
        self.mma.fp8 && self.query == HalfType::Bf16
    }

    /// Bytes of a tile of keys or of values.
    pub(super) fn tile_bytes(self) -> u32 {
        self.columns() * self.column_bytes()
    }

    pub(super) fn stage_bytes(self) -> u32 {
        2 * self.tile_bytes()
    }

    pub(super) fn ring_bytes(self) -> u32 {
        self.tile.ring_bytes(self.mma.head_dim, self.kv_bytes()) as u32
    }

    /// Pairs of rows of 16 bytes that hold a key: what `ldmatrix` loads of 16 keys at a time.
    pub(super) fn row_pairs(self) -> usize {
        (self.mma.head_dim * self.kv_bytes()).div_ceil(32)
    }

    pub(super) fn is_paged(self) -> bool {
        self.mma.keys == KeySource::Paged
    }

    /// Rows that hold query heads.
    pub(super) fn rows(self) -> u32 {
        8 * self.halves as u32
    }

    /// Bytes from a row of partial output to the next.
    pub(super) fn row_bytes(self) -> u32 {
        4 * DecodeTile::row_words(self.mma.head_dim) as u32
    }

    /// Bytes of the partial output of a warp.
    pub(super) fn output_bytes(self) -> u32 {
        self.rows() * self.row_bytes()
    }
}
