//! What the benches of single kernels share; nothing in here knows Burn, but for the rows of its Flex backend.
//!
//! - `args.rs`: the command line
//! - `shapes.rs`: the cases, from `shapes.json`, and what each costs
//! - `dtype.rs`, `values.rs`: numbers that device and host compute alike, so that no input travels
//! - `device.rs`: devices by name, buffers, the copy ceiling
//! - `flex.rs`: tensors of Burn's Flex backend, for rows beside the kernels
//! - `timing.rs`: device time and host time of a launch
//! - `session.rs`: check, then time, then report, case by case
//! - `rows.rs`: results as a table and as JSON
//! - `bf16.rs`: a conversion that the CPU runtime calls by name

mod args;
mod bf16;
mod device;
mod dtype;
#[cfg(feature = "flex")]
pub mod flex;
mod rows;
mod session;
mod shapes;
mod timing;
mod values;

pub use args::KernelArgs;
pub use device::{CubeDevice, Target, compiled_name, ints};
pub use dtype::Dtype;
pub use rows::{Bound, CaseName, KernelReport, KernelRow};
pub use session::{Session, Work, header};
pub use shapes::{AttentionCase, CacheShapes, Heads, Model, ModelCase, Shapes, Sizes};
pub use timing::{Effort, Times};
pub use values::{Filled, Values, relative_error, shuffled};
