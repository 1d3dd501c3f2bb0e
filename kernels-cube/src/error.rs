//! Why a launch was refused.

use thiserror::Error;

/// A refused launch: nothing was queued, and no buffer was touched.
///
/// Launches are asynchronous. A fault that happens on the device later is not reported here; it
/// comes back from the next read of a buffer that the launch would have written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The arguments contradict each other or the contract of the op: a fault of the caller.
    #[error("{op}: {reason}")]
    Invalid {
        /// The op that refused.
        op: &'static str,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// The arguments are legal, but this device or this kernel cannot serve them.
    #[error("{op} is not supported here: {reason}")]
    Unsupported {
        /// The op that refused.
        op: &'static str,
        /// What is missing, with the numbers.
        reason: String,
    },
    /// The work does not fit into one launch on this device.
    #[error("{op} cannot be launched: {reason}")]
    Launch {
        /// The op that refused.
        op: &'static str,
        /// Which limit is passed, with the numbers.
        reason: String,
    },
}
