//! Cubes that run at the same time and see each other's shared memory.

use cubecl::prelude::*;

use super::{mbarrier, warpgroup};

/// This cube's place in its cluster.
#[cube]
pub(crate) fn rank() -> u32 {
    let rank: u32;
    gpu_asm!("mov.u32 {}, %%cluster_ctarank;", out(_) rank, options(pure, nomem));
    rank + 0
}

/// Waits for every unit of the cluster; what each wrote before, all see after.
#[cube]
pub(crate) fn sync() {
    gpu_asm!("barrier.cluster.arrive.release.aligned;");
    gpu_asm!("barrier.cluster.wait.acquire.aligned;");
}

/// Waits for every unit of the cluster, and for none of its writes: enough for new barriers of [`mbarrier`](super::mbarrier), after
/// their own fence.
#[cube]
pub(crate) fn meet() {
    gpu_asm!("barrier.cluster.arrive.relaxed.aligned;");
    gpu_asm!("barrier.cluster.wait.aligned;");
}

/// The same place in the shared memory of cube `rank` of the cluster.
#[cube]
pub(crate) fn address_in(address: u32, rank: u32) -> u32 {
    let there: u32;
    gpu_asm!("mapa.shared::cluster.u32 {}, {}, {};", out(_) there, in(_) address, in(_) rank, options(pure, nomem));
    there + 0
}

/// Writes a word to an address of [`address_in`]; its four bytes count for the phase of the barrier at `barrier`, an address in the same
/// cube.
#[cube]
pub(crate) fn send(address: u32, word: u32, barrier: u32) {
    gpu_asm!(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [{}], {}, [{}];",
        in(_) address, in(_) word, in(_) barrier
    );
}

/// Says that a warpgroup has used a stage, whose barrier is `empty`, to each cube that copies into it: every `step`-th of the cluster from
/// `first` on, `cubes` of them. A cube without others tells itself. For all units of the warpgroup.
#[cube]
pub(crate) fn give_back(
    empty: u32,
    unit: u32,
    first: u32,
    #[comptime] step: u32,
    #[comptime] cubes: u32,
) {
    let nth = unit % warpgroup::UNITS;
    if comptime!(cubes > 1) {
        if nth < cubes {
            mbarrier::arrive_in(address_in(empty, nth * step + first));
        }
    } else if nth == 0 {
        mbarrier::arrive(empty);
    }
}

/// Four words from an address of [`address_in`].
#[cube]
pub(crate) fn load_f32x4(address: u32) -> Vector<f32, Const<4>> {
    let words: Vector<f32, Const<4>>;
    gpu_asm!("ld.shared::cluster.v4.f32 {}, [{}];", out(_) words, in(_) address);
    words
}
