//! What the benches share: models with random weights of a real shape, timing in turns, and the roofline that results are
//! read against.

#[cfg(feature = "cuda")]
pub mod card;
pub mod decode;
pub mod roofline;
pub mod synthetic;
