//! What is compiled into the kernel, and the sizes that follow from it.

use super::e4m3::CONVERTERS;
use super::work::DRAWN;
use crate::attention::keys::KeySource;
use crate::attention::mma::MmaSpec;
use crate::attention::plan::HopperTile;
use crate::hopper::{HalfType, shared, wgmma};

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::attention) struct HopperSpec {
    pub(in crate::attention) tile: HopperTile,
    pub(in crate::attention) mma: MmaSpec,
    /// The type of the products.
    pub(in crate::attention) kind: HalfType,
    /// The type of queries and output.
    pub(in crate::attention) query: HalfType,
    /// Keys that come by one copy: those of a block, or packed ones; at most the share of a cube in a tile.
    pub(in crate::attention) piece_keys: usize,
    /// Whether keys come by [`tma::load_slots`](crate::hopper::tma::load_slots), all columns at once.
    pub(in crate::attention) by_slots: bool,
    /// Whether the output is a part in f32, to be put together with others.
    pub(in crate::attention) in_parts: bool,
}

impl HopperSpec {
    /// The scores of a warpgroup: 64 rows by the keys of a tile.
    pub(super) fn scores(self) -> wgmma::Sums {
        wgmma::Sums {
            prefix: "score",
            columns: self.tile.keys,
        }
    }

    /// Their exponentials.
    pub(super) fn weights(self) -> wgmma::Rows {
        wgmma::Rows {
            prefix: "weight",
            depth: self.tile.keys,
        }
    }

    /// Its output, before it is divided by the sums of the weights.
    pub(super) fn output(self) -> wgmma::Sums {
        wgmma::Sums {
            prefix: "output",
            columns: self.mma.head_dim,
        }
    }

    /// Warpgroups that multiply.
    pub(super) fn consumers(self) -> u32 {
        self.tile.warpgroups as u32
    }

    /// Registers of a unit that only asks for tiles, or converts them, and of one that multiplies. All share what a cube starts
    /// with, 168 for each unit of 384 or 128 of 512: who takes more waits for ever.
    pub(super) fn producer_registers(self) -> u32 {
        match (self.tile.warpgroups, self.mma.fp8) {
            (2, false) => 40,
            (2, true) => 56,
            _ => 32,
        }
    }

    pub(super) fn consumer_registers(self) -> u32 {
        match (self.tile.warpgroups, self.mma.fp8) {
            (2, false) => 232,
            (2, true) => 224,
            _ => 160,
        }
    }

    /// Cubes of a cluster.
    pub(super) fn cubes(self) -> u32 {
        self.tile.cluster as u32
    }

    /// Whether units that multiply ask ahead of need if the next tiles are there. Over codes of eight bits with three warpgroups, they have
    /// no registers left to keep the answers.
    pub(super) fn asks_ahead(self) -> bool {
        self.tile.warpgroups < 3 || !self.mma.fp8
    }

    /// Whether the largest score of a unit's second row is searched for once the first power of its first row is taken, and not before. With
    /// heads of up to 64, whose three warpgroups fill each other's gaps, packed keys take 3 % longer with it; others were not measured.
    pub(super) fn searches_late(self) -> bool {
        self.tile.columns == 2 && !self.mma.fp8
    }

    /// Pieces of a tile of keys, each brought by one copy.
    pub(super) fn pieces(self) -> u32 {
        (self.tile.keys / self.piece_keys) as u32
    }

    /// Whether entries of the block table are read ahead of need. Over codes of eight bits, units have no registers left to keep them.
    pub(super) fn looks_ahead(self) -> bool {
        self.is_paged() && !self.mma.fp8
    }

    /// Tiles of keys whose pieces the units of a warp look up at once, each one of them.
    pub(super) fn tiles_at_once(self) -> u32 {
        32 / self.pieces()
    }

    /// Bytes of 64 columns of the queries.
    pub(super) fn query_bytes(self) -> u32 {
        self.tile.rows() as u32 * shared::SWIZZLE_BYTES
    }

    /// The barrier at which the first warpgroup waits for its turn; the next ones wait at the next. Those before are for the
    /// units of one warpgroup.
    pub(super) fn first_turn(self) -> u32 {
        self.consumers() + 1
    }

    /// Blocks of 64 columns of a head.
    pub(super) fn columns(self) -> u32 {
        self.tile.columns as u32
    }

    /// Bytes from 64 columns of a tile of keys to the next 64.
    pub(super) fn column_bytes(self) -> u32 {
        match self.by_slots {
            true => shared::SWIZZLE_ALIGN,
            false => self.tile.keys as u32 * shared::SWIZZLE_BYTES,
        }
    }

    /// Bytes from eight keys of a tile to the next eight.
    pub(super) fn eight_keys_bytes(self) -> u32 {
        match self.by_slots {
            true => self.columns() * shared::SWIZZLE_ALIGN,
            false => shared::SWIZZLE_ALIGN,
        }
    }

    /// Bytes of a tile of keys or of values.
    pub(super) fn key_bytes(self) -> u32 {
        self.columns() * self.tile.keys as u32 * shared::SWIZZLE_BYTES
    }

    /// Barriers of a cube.
    pub(super) fn barriers(self) -> usize {
        4 * self.tile.stages + 2 + 2 * DRAWN as usize + 2 * self.tile.codes
    }

    /// Tiles that are on their way at a time.
    pub(super) fn asked_stages(self) -> u32 {
        match self.mma.fp8 {
            true => self.tile.codes as u32,
            false => self.tile.stages as u32,
        }
    }

    /// Arrivals that fill a stage: of the unit that names the bytes to come, or of the warps that convert.
    pub(super) fn fillers(self) -> u32 {
        match self.mma.fp8 {
            true => CONVERTERS,
            false => 1,
        }
    }

    /// Warpgroups that give a stage back: those of all cubes that its tile comes to.
    pub(super) fn givers(self) -> u32 {
        self.cubes() * self.consumers()
    }

    /// Warps that take the numbers of drawn tiles: those that multiply, the one that asks for values, and, where another cube of the
    /// cluster draws, the one that asks for keys.
    pub(super) fn ticket_takers(self) -> u32 {
        let in_each = 4 * self.consumers() + u32::from(!self.mma.fp8);
        self.cubes() * (in_each + 1) - 1
    }

    /// Bytes of a row of a tile of codes, over which it is swizzled: half of what its elements take.
    pub(super) fn code_span(self) -> u32 {
        self.columns() * shared::SWIZZLE_BYTES / 2
    }

    /// Elements of 16 bits in a row of a tile of codes, two codes each.
    pub(in crate::attention) fn code_columns(self) -> usize {
        self.code_span() as usize / 2
    }

    /// Bytes of the codes of a tile of keys or of values.
    pub(super) fn code_bytes(self) -> u32 {
        self.tile.keys as u32 * self.code_span()
    }

    /// Whether queries must be brought into another type.
    pub(super) fn narrows_queries(self) -> bool {
        self.query != self.kind
    }

    /// Bytes of the queries of a tile.
    pub(super) fn all_query_bytes(self) -> u32 {
        self.columns() * self.query_bytes()
    }

    pub(super) fn is_paged(self) -> bool {
        self.mma.keys == KeySource::Paged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warpgroups_take_no_more_registers_than_a_cube_starts_with() {
        for (head_dim, kv_bytes) in [(64, 2), (128, 2), (256, 2), (64, 1), (128, 1)] {
            for tile in HopperTile::all(head_dim, kv_bytes) {
                let spec = HopperSpec {
                    tile,
                    mma: MmaSpec {
                        keys: KeySource::Paged,
                        head_dim,
                        softcapped: false,
                        scaled_first: false,
                        inline_ptx: true,
                        by_shift: true,
                        fp8: kv_bytes == 1,
                    },
                    kind: HalfType::F16,
                    query: HalfType::F16,
                    piece_keys: 16,
                    by_slots: false,
                    in_parts: false,
                };
                let groups = spec.consumers() + 1;
                // A unit starts with a multiple of eight.
                let start = 65_536 / tile.units() / 8 * 8 * groups;
                let consumers = spec.consumers() * spec.consumer_registers();
                assert!(spec.producer_registers() + consumers <= start, "{spec:?}");
            }
        }
    }
}
