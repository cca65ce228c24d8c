//! Prefill as a fraction of the roofline: one prompt, many at once, with an adapter, and a long one.

use std::error::Error;

use manylora_benches::decode::{Batch, Turns};
use manylora_benches::roofline::Work;

use super::setup::{Bench, RANK, SHAPE, base, in_turn};

const PROMPT: usize = 512;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let mut prefill = |what: &str, rows: usize, prompt: usize, adapter: &dyn Fn(usize) -> Option<String>, rank| {
        let work = Work::prefill(&SHAPE, rows, prompt, rank);
        bench.fraction(what, rows * prompt, work, &mut |engine, round| {
            vec![Batch { engine, rows, prompt, adapter }.seconds(round, 1)]
        })
    };
    prefill("prefill, 512 base tokens", 1, PROMPT, &base, 0)?;
    prefill("prefill, 8 x 512 base tokens", 8, PROMPT, &base, 0)?;
    prefill("prefill, 8192 base tokens", 1, 16 * PROMPT, &base, 0)?;
    let what = "prefill, 512 tokens: one adapter of rank 16 / base";
    if bench.options.wants(what) {
        bench.load(1, RANK)?;
        let adapter = in_turn(1, RANK);
        let with = Batch { prompt: PROMPT, ..bench.batch(1, &adapter) };
        let without = Batch { prompt: PROMPT, ..bench.batch(1, &base) };
        let turns = Turns::take(
            3 * bench.options.rounds,
            &mut [&mut |round| without.seconds(round, 1), &mut |round| with.seconds(round, 1)],
        );
        bench.compare(what, &turns, 1, 0);
    }
    Ok(())
}
