//! What a run came to: a record of each request, totals, and a [`Summary`] that takes no more memory the longer a run is.

mod histogram;
mod recorder;
mod report;
mod slo;
mod summary;

use serde::Serialize;

pub use histogram::Histogram;
pub(crate) use recorder::Recorder;
pub use recorder::Records;
pub use report::{AdapterReport, ReplicaReport, Report, Spread};
pub use slo::Slo;
pub use summary::{AdapterSummary, Latency, Summary, SummaryOptions};

/// A request that ended. Times are seconds from the run's start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestRecord {
    /// How many arrived before it.
    pub number: u64,
    /// Its adapter.
    pub adapter: Option<u32>,
    /// Its tenant.
    pub tenant: Option<u32>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// When it arrived.
    pub arrival: f64,
    /// When its first step began.
    pub admitted: Option<f64>,
    /// When its first token came.
    pub first_token: Option<f64>,
    /// When it ended.
    pub end: f64,
    /// Tokens that it generated.
    pub tokens: u32,
    /// Longest time between two of them.
    pub longest_gap: f64,
    /// Tokens of its prompt that were found in the prefix cache.
    pub cached_tokens: u32,
    /// How often it lost its KV blocks.
    pub preemptions: u32,
    /// Why it failed, if it did.
    pub failure: Option<String>,
}

impl RequestRecord {
    /// Time to first token, in seconds.
    pub fn ttft(&self) -> Option<f64> {
        Some(self.first_token? - self.arrival)
    }

    /// Mean time between its tokens, in seconds; None if there were not two.
    pub fn tpot(&self) -> Option<f64> {
        (self.tokens > 1).then_some(())?;
        Some((self.end - self.first_token?) / f64::from(self.tokens - 1))
    }

    /// End-to-end latency, in seconds.
    pub fn e2e(&self) -> f64 {
        self.end - self.arrival
    }
}

/// How often requests found their adapters where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ShelfCounts {
    /// Requests that found theirs resident when they arrived.
    pub hits: u64,
    /// Requests that did not.
    pub misses: u64,
    /// Loads that the host's memory served.
    pub host_loads: u64,
    /// Loads that a disk did.
    pub disk_loads: u64,
    /// Adapters that went to make room.
    pub evictions: u64,
}

impl ShelfCounts {
    /// Share of requests with adapters that found theirs resident; 1 if there were none.
    pub fn hit_rate(&self) -> f64 {
        let all = self.hits + self.misses;
        if all == 0 { 1.0 } else { self.hits as f64 / all as f64 }
    }
}

/// Totals of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    /// Seconds until the last request had ended.
    pub seconds: f64,
    /// Seconds in which a step ran.
    pub busy_seconds: f64,
    /// Steps.
    pub steps: u64,
    /// Requests that ended well.
    pub completed: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Tokens that were generated.
    pub output_tokens: u64,
    /// The shelf.
    pub shelf: ShelfCounts,
    /// How often a running request lost its KV blocks.
    pub preemptions: u64,
    /// Tokens that were looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Tokens that were found there.
    pub prefix_cache_hits: u64,
}
