//! Barriers in shared memory, eight bytes each. All take the address of the barrier.

use cubecl::prelude::*;

/// Makes a barrier whose phases each end after `arrivals`. One unit; then [`fence_init`] and a barrier of the cube.
#[cube]
pub(crate) fn init(barrier: u32, #[comptime] arrivals: u32) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{}], {arrivals};", in(_) barrier);
}

/// Makes new barriers visible to the copy engine and to the other cubes of the cluster.
#[cube]
pub(crate) fn fence_init() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Arrives, and lets the phase wait for `bytes` of copies, too.
#[cube]
pub(crate) fn arrive_expect(barrier: u32, bytes: u32) {
    gpu_asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(_) barrier, in(_) bytes);
}

/// Arrives.
#[cube]
pub(crate) fn arrive(barrier: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(_) barrier);
}

/// Arrives at a barrier of a cube of the cluster, by an address of [`address_in`](super::cluster::address_in). What this unit wrote
/// before, that cube need not see: a release for the whole cluster would wait for all memory, 0.7 us on an H200.
#[cube]
pub(crate) fn arrive_in(barrier: u32) {
    gpu_asm!("mbarrier.arrive.shared::cluster.b64 _, [{}];", in(_) barrier);
}

/// 1 if a phase of parity `parity` has ended, or 0: for who asks ahead of need, and waits then.
#[cube]
pub(crate) fn has_ended(barrier: u32, parity: u32) -> u32 {
    // As values, not as addresses of variables.
    let (barrier, parity) = (barrier + 0, parity & 1);
    let ended: u32;
    gpu_asm!(
        "{{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [{}], {}; selp.u32 {}, 1, 0, done; }}",
        in(_) barrier, in(_) parity, out(_) ended
    );
    ended + 0
}

/// Waits until a phase of parity `parity` has ended.
#[cube]
pub(crate) fn wait(barrier: u32, parity: u32) {
    // A variable would reach the text as its address; what is computed from it is a value.
    let parity = parity & 1;
    gpu_asm!(
        "{{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [{}], {}; @done bra DONE; bra AGAIN; DONE: }}",
        in(_) barrier, in(_) parity
    );
}
