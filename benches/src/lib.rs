//! What the benches share: models with random weights of a real shape, timing in turns, and the roofline that results are
//! read against.

pub mod agreement;
#[cfg(feature = "cuda")]
pub mod card;
pub mod decode;
pub mod roofline;
pub mod synthetic;

use std::error::Error;
use std::process::ExitCode;

/// How a bench ends: an error is told as it reads, not as its fields.
#[expect(clippy::print_stderr, reason = "a bench tells what went wrong")]
pub fn exit_code(result: Result<(), Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
