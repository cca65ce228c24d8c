//! A configuration becomes a report.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::config::{Config, Prepared};
use crate::engine::Observer;
use crate::error::SimError;
use crate::fleet::{self, Router};
use crate::results::{Recorder, Records, Report, RequestRecord};

/// How far a run is, seen and ended from another thread.
#[derive(Debug, Default)]
pub struct Watch {
    done: AtomicU64,
    total: AtomicU64,
    ended: AtomicBool,
}

impl Watch {
    /// Requests that ended, and requests in all as far as it is known.
    pub fn progress(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Whoever works ends soon, with [`SimError::Interrupted`].
    pub fn interrupt(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Result<(), SimError> {
        if self.ended.load(Ordering::Relaxed) { Err(SimError::Interrupted) } else { Ok(()) }
    }

    pub(crate) fn advance(&self, requests: u64) {
        if requests > 0 {
            self.done.fetch_add(requests, Ordering::Relaxed);
        }
    }

    /// So many requests more will be run.
    pub(crate) fn expect(&self, requests: u64) {
        self.total.fetch_add(requests, Ordering::Relaxed);
    }
}

/// Runs a configuration.
pub fn run(config: &Config) -> Result<Report, SimError> {
    run_watched(config, &Watch::default())
}

/// Runs a configuration while somebody watches.
pub fn run_watched(config: &Config, watch: &Watch) -> Result<Report, SimError> {
    watched(config, false, watch).map(|(report, _)| report)
}

/// Runs a configuration while somebody watches, and keeps a record of every request: memory grows with them.
pub fn run_recorded(config: &Config, watch: &Watch) -> Result<(Report, Records), SimError> {
    watched(config, true, watch).map(|(report, records)| (report, records.unwrap_or_default()))
}

fn watched(config: &Config, keep: bool, watch: &Watch) -> Result<(Report, Option<Records>), SimError> {
    let prepared = config.prepare()?;
    watch.expect(prepared.load.count as u64);
    play_prepared(config, prepared, keep, watch)
}

/// One replica's way to the recorder that all share.
struct Tap<'a> {
    replica: usize,
    recorder: &'a RefCell<Recorder>,
}

impl Observer for Tap<'_> {
    fn ended(&mut self, record: &RequestRecord) {
        self.recorder.borrow_mut().ended(self.replica, record);
    }

    fn token_gap(&mut self, seconds: f64) {
        self.recorder.borrow_mut().token_gap(seconds);
    }
}

/// Runs a configuration whose requests are expected already.
pub(crate) fn play(config: &Config, watch: &Watch) -> Result<Report, SimError> {
    play_prepared(config, config.prepare()?, false, watch).map(|(report, _)| report)
}

fn play_prepared(
    config: &Config,
    Prepared { settings, plan, cost, load }: Prepared,
    keep: bool,
    watch: &Watch,
) -> Result<(Report, Option<Records>), SimError> {
    let replicas = config.replicas as usize;
    let mut router = Router::new(config.router, replicas, config.router_load_bound, config.seed);
    let recorder = RefCell::new(Recorder::new(settings.adapters.len() as u32, replicas, config.slo, keep));
    let mut taps: Vec<Tap<'_>> = (0..replicas).map(|replica| Tap { replica, recorder: &recorder }).collect();
    let mut delivered = |replica: usize, request: &_| recorder.borrow_mut().delivered(replica, request);
    let requests = (&mut router, load.requests);
    let totals = fleet::run(&settings, cost.as_ref(), requests, &mut taps, &mut delivered, watch)?;
    drop(taps);
    Ok(recorder.into_inner().report(&totals, &plan, load.names))
}
