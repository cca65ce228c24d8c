//! What adapters cost that are loaded while no row uses them.

use std::error::Error;

use manylora_benches::decode::Turns;

use super::setup::{ADAPTERS, Bench, RANK, base};

/// New tokens of a run.
const TOKENS: usize = 8;

/// A hundredth is to be seen on a machine that drifts by tens: many short runs in turns, on one engine, so that both read
/// the same pages of memory. Apart from what it lets be loaded, an engine with LoRA is one without.
pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    for rows in [1, 8] {
        let what = format!("{rows} base rows: {ADAPTERS} idle adapters / none loaded");
        if !bench.options.wants(&what) {
            continue;
        }
        bench.load(0, RANK)?;
        let batch = bench.batch(rows, &base);
        let with = |loaded: usize, round: usize| {
            bench.load(loaded, RANK).expect("the adapters are good");
            batch.seconds(round, TOKENS)
        };
        let turns = Turns::take(
            8 * bench.options.rounds,
            &mut [&mut |round| with(0, round), &mut |round| with(ADAPTERS, round)],
        );
        bench.compare(&what, &turns, 1, 0);
    }
    Ok(())
}
