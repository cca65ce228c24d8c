//! Decode and prefill of a 0.5B-shaped bf16 model as fractions of what the machine can do, measured around each case, and
//! what adapters, idle adapters and a busy neighbour cost, measured in turns with the case they are compared with.
//!
//! `cargo bench --bench engine -- [decode] [prefill] [adapters] [idle] [neighbour] [--json FILE] [--tokens N] [--rounds N]
//! [--threads N] [--only WORDS]`: `--only "8 rows"` takes the cases whose names contain the words.

mod adapters;
mod decode;
mod idle;
mod neighbour;
mod prefill;
mod setup;

use std::error::Error;

use setup::{Bench, Options};

type Part = fn(&mut Bench) -> Result<(), Box<dyn Error>>;

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    let parts: [(&str, Part); 5] = [
        ("decode", decode::run),
        ("prefill", prefill::run),
        ("adapters", adapters::run),
        ("idle", idle::run),
        ("neighbour", neighbour::run),
    ];
    if let Some(unknown) = options.parts.iter().find(|part| parts.iter().all(|(name, _)| name != part)) {
        return Err(format!("unknown part `{unknown}`; there are decode, prefill, adapters, idle and neighbour").into());
    }
    let mut bench = Bench::new(options)?;
    for (name, run) in parts {
        if bench.options.parts.is_empty() || bench.options.parts.iter().any(|part| part == name) {
            run(&mut bench)?;
        }
    }
    bench.write()
}
