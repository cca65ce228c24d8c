//! Decode steps of the base, and of rows with adapters of their own, as fractions of their rooflines.

use std::error::Error;

use super::setup::{ADAPTERS, Bench, RANK, base, in_turn};

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    for rows in [1, 8, 32] {
        bench.decode(&format!("decode, {rows} base rows"), rows, (0, RANK), &base)?;
    }
    for (rows, rank) in [(8, RANK), (32, RANK), (8, 8), (8, 64), (8, 128)] {
        let what = format!("decode, {rows} rows on {ADAPTERS} adapters of rank {rank}");
        if bench.options.wants(&what) {
            bench.load(ADAPTERS, rank)?;
            bench.decode(&what, rows, (ADAPTERS, rank), &in_turn(ADAPTERS, rank))?;
        }
    }
    Ok(())
}
