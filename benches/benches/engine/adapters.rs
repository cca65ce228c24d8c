//! What adapters cost rows that use them, in turns with the base.

use std::error::Error;

use manylora_benches::decode::Turns;

use super::setup::{ADAPTERS, Bench, RANK, base, in_turn};

const ROWS: usize = 8;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    if !bench.options.wants("8 rows:") {
        return Ok(());
    }
    bench.load(ADAPTERS, RANK)?;
    let tokens = bench.options.tokens;
    let counts = [1, 2, 4, ADAPTERS];
    let mixes: Vec<_> = counts.iter().map(|&count| in_turn(count, RANK)).collect();
    let without = bench.batch(ROWS, &base);
    let batches: Vec<_> = mixes.iter().map(|mix| bench.batch(ROWS, mix)).collect();
    let mut base = |round| without.step(round, tokens);
    let mut ways: Vec<_> = batches.iter().map(|batch| |round| batch.step(round, tokens)).collect();
    let mut all: Vec<&mut dyn FnMut(usize) -> f64> = vec![&mut base];
    all.extend(ways.iter_mut().map(|way| way as &mut dyn FnMut(usize) -> f64));
    let turns = Turns::take(2 * bench.options.rounds, &mut all);
    for (way, count) in counts.iter().enumerate() {
        bench.compare(&format!("8 rows: {count} adapters of rank {RANK} / base"), &turns, way + 1, 0);
    }
    bench.compare("8 rows: 8 adapters / one adapter", &turns, counts.len(), 1);
    Ok(())
}
