//! The shelf under load, on SmolLM2-135M: more adapters than room, thousands of adapters, loads while others decode,
//! loading and unloading for hours, what a registered adapter costs, and what
//! somebody who looks.
//!
//! `cargo bench --bench shelf -- [cliff] [many] [gaps] [cycles] [registered] [look] [--json FILE] [--model PATH] [--adapters N]`
//!
//! The model is the GGUF file or folder named by `--model`, else by `MANYLORA_SMOLLM2`.

mod cliff;
mod cycles;
mod gaps;
mod look;
mod many;
mod registered;
mod setup;

use std::error::Error;

use setup::{Bench, Options};

type Part = fn(&mut Bench) -> Result<(), Box<dyn Error>>;

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    let parts: [(&str, Part); 6] = [
        ("cycles", cycles::run),
        ("gaps", gaps::run),
        ("cliff", cliff::run),
        ("registered", registered::run),
        ("look", look::run),
        ("many", many::run),
    ];
    if let Some(unknown) = options.parts.iter().find(|part| parts.iter().all(|(name, _)| name != part)) {
        return Err(
            format!("unknown part `{unknown}`; there are cliff, many, gaps, cycles, registered and look").into()
        );
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
