//! A trace against the simulation of its own load: how well a calibration predicts an engine that it was not fitted to.

use std::io::{BufRead, Seek, SeekFrom};

use serde::Serialize;

use super::Calibration;
use crate::engine::{Observer, run};
use crate::error::SimError;
use crate::replay::{RecordedTiming, ReplayObserver, Replayed, replay, wrong};
use crate::results::RequestRecord;
use crate::workload::recorded::Recorded;

/// A distribution of seconds, exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Mean.
    pub mean: f64,
    /// Half are at most this.
    pub p50: f64,
    /// 90 % are.
    pub p90: f64,
    /// 99 % are.
    pub p99: f64,
}

impl Percentiles {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |percent: f64| {
            let place = (percent / 100.0 * values.len() as f64).ceil() as usize;
            values.get(place.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        let mean = if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 };
        Self { mean, p50: at(50.0), p90: at(90.0), p99: at(99.0) }
    }
}

/// What requests saw, measured or simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Observed {
    /// Requests that ended well.
    pub requests: u64,
    /// From the first arrival to the last token.
    pub seconds: f64,
    /// Requests in a second of that.
    pub requests_per_second: f64,
    /// Generated tokens in a second of that.
    pub tokens_per_second: f64,
    /// Time to first token.
    pub ttft: Percentiles,
    /// End-to-end latency.
    pub e2e: Percentiles,
    /// Loads of adapters.
    pub loads: u64,
}

/// Both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What the replay of the trace came to.
    pub replayed: Replayed,
    /// Requests of the trace that were not simulated: they failed, compose adapters, or their end is not in it.
    pub left_out: u64,
    /// The engine, by its own clock.
    pub measured: Observed,
    /// The simulation of the same requests.
    pub simulated: Observed,
}

/// Times of requests.
#[derive(Default)]
struct Timings {
    ttft: Vec<f64>,
    e2e: Vec<f64>,
    first: Option<f64>,
    last: f64,
    tokens: u64,
}

impl Timings {
    fn add(&mut self, arrival: f64, first_token: f64, last_token: f64, tokens: u64) {
        self.ttft.push(first_token - arrival);
        self.e2e.push(last_token - arrival);
        self.first = Some(self.first.map_or(arrival, |first| first.min(arrival)));
        self.last = self.last.max(last_token);
        self.tokens += tokens;
    }

    fn observed(self, loads: u64) -> Observed {
        let requests = self.ttft.len() as u64;
        let seconds = self.last - self.first.unwrap_or(self.last);
        let each_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        Observed {
            requests,
            seconds,
            requests_per_second: each_second(requests),
            tokens_per_second: each_second(self.tokens),
            ttft: Percentiles::of(self.ttft),
            e2e: Percentiles::of(self.e2e),
            loads,
        }
    }
}

impl ReplayObserver for Timings {
    fn request(&mut self, timing: &RecordedTiming) {
        self.add(timing.arrival, timing.first_token, timing.last_token, timing.tokens);
    }
}

impl Observer for Timings {
    fn ended(&mut self, record: &RequestRecord) {
        if let (None, Some(first_token)) = (&record.failure, record.first_token) {
            self.add(record.arrival, first_token, record.end, u64::from(record.tokens));
        }
    }
}

/// Replays a trace, and simulates its load.
pub fn compare(mut source: impl BufRead + Seek, calibration: &Calibration) -> Result<Comparison, SimError> {
    let mut measured = Timings::default();
    let replayed = replay(&mut source, &mut measured)?;
    let rewind = |error: std::io::Error| wrong(1, "", format!("the trace cannot be read from its start: {error}"));
    source.seek(SeekFrom::Start(0)).map_err(rewind)?;
    let recorded = Recorded::read(source)?;
    if recorded.header.dimensions != calibration.dimensions {
        let message = format!("the trace is of {}; calibrate that model", recorded.header.model.join(", "));
        return Err(SimError::field("calibration.model", calibration.model.join(", "), message));
    }
    let mut simulated = Timings::default();
    let requests = recorded.trace.requests.iter().copied();
    let totals = run(recorded.engine(), &calibration.cost()?, requests, &mut simulated)?;
    let loads = totals.shelf.disk_loads + totals.shelf.host_loads;
    Ok(Comparison {
        measured: measured.observed(replayed.loads),
        simulated: simulated.observed(loads),
        left_out: recorded.left_out,
        replayed,
    })
}
