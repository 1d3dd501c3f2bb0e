//! The engine over a fake model whose logits are a function of what it reads back from the cache: exact and fast.

mod abort;
mod common;
mod equivalence;
mod limits;
mod prefix;
mod random;
mod requests;
mod sampling;
mod stopping;
mod tokenizer;
