//! Stand-ins that make an engine exact, fast and small: for this crate's tests, for examples, and for the tests of
//! whoever builds on the engine.
//!
//! - `fake_model.rs`: [`FakeModel`], a model whose logits are a function of the tokens that it finds in the cache
//! - `pieces.rs`: [`PieceDetokenizer`], text from a table of byte pieces

mod fake_model;
mod pieces;

pub use fake_model::{FakeModel, hashed_logits};
pub use pieces::PieceDetokenizer;
