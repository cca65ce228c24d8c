//! What loading costs beside what it cannot do without: a checkpoint in Qwen2.5-0.5B's shape until the engine is ready,
//! in turns with reading and copying its bytes; the memory that this takes at its peak, against the packed weights; and
//! the packing of an adapter, in turns with copying its bytes.
//!
//! `cargo bench --bench loading -- [checkpoint] [memory] [adapter] [--rounds N] [--threads N] [--json FILE]`
//!
//! Files are in the page cache: each is read once before anything is timed.

mod adapter;
mod checkpoint;
mod memory;
mod setup;

use std::error::Error;
use std::process::ExitCode;

use setup::{Bench, Options};

type Part = fn(&mut Bench) -> Result<(), Box<dyn Error>>;

fn main() -> ExitCode {
    manylora_benches::exit_code(run())
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn run() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    if let Some(model) = &options.child {
        return memory::child(model, options.threads);
    }
    let parts: [(&str, Part); 3] =
        [("checkpoint", checkpoint::run), ("memory", memory::run), ("adapter", adapter::run)];
    if let Some(unknown) = options.parts.iter().find(|part| parts.iter().all(|(name, _)| name != part)) {
        return Err(format!("unknown part `{unknown}`; there are checkpoint, memory and adapter").into());
    }
    let mut bench = Bench::new(options)?;
    for (name, run) in parts {
        if bench.options.parts.is_empty() || bench.options.parts.iter().any(|part| part == name) {
            println!("\n{name}");
            run(&mut bench)?;
        }
    }
    bench.write()
}
