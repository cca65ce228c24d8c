//! Timing an engine's steps, so that two ways of running can be compared on a machine whose speed drifts: they take
//! turns, and what counts is the median of the ratios of neighbours in time.

use std::time::Instant;

use manylora::{Engine, GenerateRequest, SamplingParams};

/// A batch to time: rows, the tokens of their prompts, and the adapter of each row.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// Engine it runs on.
    pub engine: &'a Engine,
    /// Sequences.
    pub rows: usize,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// The adapter of each row; None = the base.
    pub adapter: &'a dyn Fn(usize) -> Option<String>,
}

impl Batch<'_> {
    /// Seconds from submitting all rows to the last of their `tokens` new tokens.
    ///
    /// # Panics
    ///
    /// When a request fails.
    pub fn seconds(&self, round: usize, tokens: usize) -> f64 {
        let requests = (0..self.rows).map(|row| self.request(row, round, tokens)).collect();
        let start = Instant::now();
        let streams = self.engine.submit_all(requests, false).expect("the requests are good");
        for mut stream in streams {
            stream.collect_all().expect("the request finishes");
        }
        start.elapsed().as_secs_f64()
    }

    /// Seconds of a decode step: prefill and start-up cancel out between a long and a short run.
    pub fn step(&self, round: usize, tokens: usize) -> f64 {
        let short = self.seconds(round, 1);
        let long = self.seconds(round, tokens);
        (long - short) / (tokens - 1) as f64
    }

    /// Seconds of each decode step of a run of `tokens` new tokens, as the first row's tokens arrive; the first token, which
    /// ends the prefill, and the second, whose step the others' prefill may share, begin none.
    ///
    /// # Panics
    ///
    /// When a request fails.
    pub fn steps(&self, round: usize, tokens: usize) -> Vec<f64> {
        let requests = (0..self.rows).map(|row| self.request(row, round, tokens)).collect();
        let mut streams = self.engine.submit_all(requests, true).expect("the requests are good");
        let mut arrivals = Vec::with_capacity(tokens);
        while let Some(delta) = streams[0].next_delta() {
            delta.expect("the request goes on");
            arrivals.push(Instant::now());
        }
        for stream in &mut streams[1..] {
            stream.collect_all().expect("the request finishes");
        }
        arrivals.windows(2).skip(1).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()
    }

    fn request(&self, row: usize, round: usize, tokens: usize) -> GenerateRequest {
        // Prompts differ from each other and from round to round: no prefix is found in a cache.
        let prompt: Vec<u32> =
            (0..self.prompt).map(|at| ((at * 131 + row * 7919 + round * 104_729) % 40_000) as u32 + 1).collect();
        greedy_request(prompt, tokens, (self.adapter)(row).as_deref())
    }
}

/// Exactly `tokens` greedy tokens, without text.
pub fn greedy_params(tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        max_tokens: Some(tokens),
        ignore_eos: true,
        detokenize: false,
        ..SamplingParams::default()
    }
}

/// A request for exactly `tokens` greedy tokens, without text.
pub fn greedy_request(prompt: Vec<u32>, tokens: usize, adapter: Option<&str>) -> GenerateRequest {
    let request = GenerateRequest::tokens(prompt).params(greedy_params(tokens));
    match adapter {
        Some(name) => request.adapter(name),
        None => request,
    }
}

/// The middle of some values.
///
/// # Panics
///
/// When there are none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) }
}

/// Where the median lies in 95 of 100 cases, by the order statistics of `sorted` values; with few values their range.
///
/// # Panics
///
/// When there are none.
pub fn interval_of_median(sorted: &[f64]) -> (f64, f64) {
    let count = sorted.len() as f64;
    let rank = (count / 2.0 - 0.98 * count.sqrt()).floor().max(0.0) as usize;
    (sorted[rank], sorted[sorted.len() - 1 - rank])
}

/// Times several ways of running in turns, `rounds` times each, and compares each with the first.
pub struct Turns {
    /// Measured values: per way, one per round.
    pub values: Vec<Vec<f64>>,
}

impl Turns {
    /// Takes turns; whoever goes first changes from round to round.
    pub fn take(rounds: usize, ways: &mut [&mut dyn FnMut(usize) -> f64]) -> Self {
        let mut values = vec![Vec::with_capacity(rounds); ways.len()];
        for round in 0..rounds {
            for turn in 0..ways.len() {
                let way = if round % 2 == 0 { turn } else { ways.len() - 1 - turn };
                values[way].push(ways[way](round));
            }
        }
        Self { values }
    }

    /// Median of what `way` took.
    pub fn median(&self, way: usize) -> f64 {
        median(&self.values[way])
    }

    /// Median, over the rounds, of what `way` took over what `reference` took in the same round.
    pub fn ratio(&self, way: usize, reference: usize) -> f64 {
        median(&self.ratios(way, reference))
    }

    /// The ratios of all rounds, smallest first.
    pub fn ratios(&self, way: usize, reference: usize) -> Vec<f64> {
        let mut ratios: Vec<f64> =
            self.values[way].iter().zip(&self.values[reference]).map(|(way, reference)| way / reference).collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_within_a_round() {
        // A machine that gets slower: the second way always takes a tenth longer than the first.
        let slower = |round: usize| (1 + round) as f64;
        let turns = Turns::take(5, &mut [&mut |round| slower(round), &mut |round| 1.1 * slower(round)]);
        assert!((turns.ratio(1, 0) - 1.1).abs() < 1e-12);
        assert!((turns.median(0) - 3.0).abs() < 1e-12);
        assert_eq!(turns.ratios(0, 0), [1.0; 5]);
        let hundred: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!(interval_of_median(&hundred), (40.0, 59.0));
        assert_eq!(interval_of_median(&hundred[..3]), (0.0, 2.0));
    }
}
