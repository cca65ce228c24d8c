//! What the benches share: models with random weights of a real shape, and the roofline that results are read against.

pub mod roofline;
pub mod synthetic;
