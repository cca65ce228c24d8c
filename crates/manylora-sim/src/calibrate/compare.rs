//! A trace against the simulation of its own load: how well a calibration predicts an engine that it was not fitted to.

use std::collections::HashMap;
use std::io::{BufRead, Seek};

use manylora_core::RequestId;
use serde::Serialize;

use super::Calibration;
use crate::engine::{Observer, run_watched};
use crate::error::SimError;
use crate::replay::{RecordedTiming, ReplayObserver, Replayed, replay, rewind};
use crate::results::RequestRecord;
use crate::run::Watch;
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
    /// Requests: the same ones on both sides.
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
    /// Requests of the trace that are on neither side, see [`compare`].
    pub left_out: u64,
    /// The engine, by its own clock.
    pub measured: Observed,
    /// The simulation of the same requests.
    pub simulated: Observed,
}

/// When things happened to a request, in seconds.
#[derive(Clone, Copy)]
struct Times {
    arrival: f64,
    first_token: f64,
    last_token: f64,
    tokens: u64,
}

fn observed(all: &[Times], loads: u64) -> Observed {
    let requests = all.len() as u64;
    let first = all.iter().map(|one| one.arrival).fold(f64::INFINITY, f64::min);
    let last = all.iter().map(|one| one.last_token).fold(0.0, f64::max);
    let seconds = (last - first).max(0.0);
    let each_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
    Observed {
        requests,
        seconds,
        requests_per_second: each_second(requests),
        tokens_per_second: each_second(all.iter().map(|one| one.tokens).sum()),
        ttft: Percentiles::of(all.iter().map(|one| one.first_token - one.arrival).collect()),
        e2e: Percentiles::of(all.iter().map(|one| one.last_token - one.arrival).collect()),
        loads,
    }
}

/// Requests of the engine that ended well.
#[derive(Default)]
struct Measured(HashMap<RequestId, Times>);

impl ReplayObserver for Measured {
    fn request(&mut self, timing: &RecordedTiming) {
        let RecordedTiming { id, arrival, first_token, last_token, tokens, .. } = *timing;
        self.0.insert(id, Times { arrival, first_token, last_token, tokens });
    }
}

/// Requests of the simulation that ended well, by number.
struct Simulated(Vec<Option<Times>>);

impl Observer for Simulated {
    fn ended(&mut self, record: &RequestRecord) {
        if let (None, Some(first_token)) = (&record.failure, record.first_token) {
            let (arrival, last_token, tokens) = (record.arrival, record.end, u64::from(record.tokens));
            self.0[record.number as usize] = Some(Times { arrival, first_token, last_token, tokens });
        }
    }
}

/// Replays a trace, and simulates its load. Requests that were cancelled, or that had not ended, are simulated with the tokens that they
/// got, because others had to share the engine with them; but what is compared are those requests that ended well in
/// both. All others are left out of both sides: those too that failed, that compose adapters or want logits of their prompts,
/// and what came after lines were lost.
pub fn compare(
    mut source: impl BufRead + Seek,
    calibration: &Calibration,
    watch: &Watch,
) -> Result<Comparison, SimError> {
    let mut measured = Measured::default();
    let replayed = replay(&mut source, &mut measured, watch)?;
    rewind(&mut source)?;
    let recorded = Recorded::read_replayable(source, watch)?;
    if recorded.header.dimensions != calibration.dimensions {
        let message = format!("the trace is of {}; calibrate that model", recorded.header.model.join(", "));
        return Err(SimError::field("calibration.model", calibration.model.join(", "), message));
    }
    let requests = &recorded.trace.requests;
    if requests.iter().any(|request| request.adapter.is_some()) {
        calibration.check_adapters()?;
    }
    let mut simulated = Simulated(vec![None; requests.len()]);
    let (engine, cost) = (recorded.engine(), calibration.cost()?);
    let totals = run_watched(engine, &cost, requests.iter().copied(), &mut simulated, watch)?;
    let pairs = recorded.ids.iter().zip(&simulated.0);
    let pairs = pairs.filter_map(|(id, simulated)| Some((*measured.0.get(id)?, (*simulated)?)));
    let (measured, simulated): (Vec<Times>, Vec<Times>) = pairs.unzip();
    Ok(Comparison {
        left_out: recorded.submitted - measured.len() as u64,
        measured: observed(&measured, replayed.loads),
        simulated: observed(&simulated, totals.shelf.disk_loads + totals.shelf.host_loads),
        replayed,
    })
}
