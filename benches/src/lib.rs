//! What the benches share: models with random weights of a real shape, timing in turns, and the roofline that results are
//! read against.

pub mod decode;
pub mod roofline;
pub mod synthetic;
