//! A run's report: what is printed, plotted, swept over and searched by.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Latency, ShelfCounts, Slo};

/// What a run came to. Times are seconds; rates are per second of the run, which ends with its last request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Requests that arrived.
    pub requests: u64,
    /// That ended well.
    pub completed: u64,
    /// That failed.
    pub failed: u64,
    /// Why they did, and how many.
    pub failures: BTreeMap<String, u64>,
    /// Seconds until the last request had ended.
    pub seconds: f64,
    /// Share of that time in which a replica's step ran, in the mean over replicas.
    pub busy_share: f64,
    /// Steps of all replicas.
    pub steps: u64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens that were generated.
    pub output_tokens: u64,
    /// Requests that ended well, a second.
    pub request_throughput: f64,
    /// Tokens that were generated, a second.
    pub output_throughput: f64,
    /// Time to first token.
    pub ttft: Latency,
    /// Time from a token to the next.
    pub itl: Latency,
    /// From arrival to end.
    pub e2e: Latency,
    /// From arrival to the first step.
    pub waiting: Latency,
    /// What was promised.
    pub slo: Slo,
    /// Share of all requests, failed ones included, to whom it was kept.
    pub slo_attainment: f64,
    /// Jain's index over the adapters' mean tokens a second of a request; None without adapters.
    pub jain_index: Option<f64>,
    /// The worst adapter's mean time to first token over the mean of all adapters'.
    pub worst_over_mean_ttft: Option<f64>,
    /// How often adapters were found where.
    pub shelf: ShelfCounts,
    /// Share of requests with adapters that found theirs resident when a replica took them.
    pub hit_rate: f64,
    /// Share of loads that the host's memory served; 1 if there were none.
    pub host_hit_rate: f64,
    /// How often a running request lost its KV blocks.
    pub preemptions: u64,
    /// Share of prompt tokens that were in the prefix cache.
    pub prefix_cache_hit_rate: f64,
    /// Points of the distributions of `ttft`, `itl` and `e2e`: seconds, and the share of all that are at most these.
    pub distributions: BTreeMap<&'static str, Vec<[f64; 2]>>,
    /// Adapters with requests, the base last.
    pub adapters: Vec<AdapterReport>,
    /// The replicas.
    pub replicas: Vec<ReplicaReport>,
    /// How unlike these are; None if there is one.
    pub spread: Option<Spread>,
    /// What was decided for the engine at its start.
    pub notes: Vec<String>,
    /// Settings that will hurt, each named.
    pub warnings: Vec<String>,
}

/// One adapter's requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdapterReport {
    /// Its number; None = the base.
    pub adapter: Option<u32>,
    /// What a trace calls it.
    pub name: Option<String>,
    /// Requests that ended well.
    pub completed: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Tokens that they generated.
    pub output_tokens: u64,
    /// Mean time to first token, in seconds.
    pub mean_ttft: f64,
    /// Mean of its requests' tokens a second, from arrival to end.
    pub mean_rate: f64,
}

/// One replica.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ReplicaReport {
    /// Requests that it was given.
    pub requests: u64,
    /// That ended well.
    pub completed: u64,
    /// Tokens that it generated.
    pub output_tokens: u64,
    /// Share of the run in which its steps ran.
    pub busy_share: f64,
    /// Mean time to first token of its requests, in seconds.
    pub mean_ttft: f64,
    /// Share of its requests with adapters that found theirs resident.
    pub hit_rate: f64,
    /// Adapters that it read.
    pub loads: u64,
    /// Distinct adapters that it was asked for.
    pub adapters: u64,
}

/// How unlike the replicas are: the largest over the mean, 1 if all are alike or there was nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Of requests.
    pub requests: f64,
    /// Of generated tokens.
    pub output_tokens: f64,
    /// Of the share of time in which steps ran.
    pub busy_share: f64,
    /// Of mean times to first token.
    pub mean_ttft: f64,
    /// Of distinct adapters.
    pub adapters: f64,
}

impl Spread {
    pub(crate) fn of(replicas: &[ReplicaReport]) -> Self {
        let spread = |of: &dyn Fn(&ReplicaReport) -> f64| {
            let values = replicas.iter().map(of);
            let mean = values.clone().sum::<f64>() / replicas.len() as f64;
            if mean > 0.0 { values.fold(0.0, f64::max) / mean } else { 1.0 }
        };
        Self {
            requests: spread(&|one| one.requests as f64),
            output_tokens: spread(&|one| one.output_tokens as f64),
            busy_share: spread(&|one| one.busy_share),
            mean_ttft: spread(&|one| one.mean_ttft),
            adapters: spread(&|one| one.adapters as f64),
        }
    }
}

impl Report {
    /// Everything that is one number, by name: what sweeps tell and searches ask for. What there is none of is NaN.
    pub fn metrics(&self) -> Vec<(String, f64)> {
        let mut all: Vec<(String, f64)> = Vec::new();
        for (name, one) in [("ttft", &self.ttft), ("itl", &self.itl), ("e2e", &self.e2e), ("waiting", &self.waiting)] {
            let none = one.count == 0;
            let values =
                [("mean", one.mean), ("p50", one.p50), ("p90", one.p90), ("p99", one.p99), ("largest", one.largest)];
            all.extend(values.map(|(which, value)| (format!("{name}_{which}"), if none { f64::NAN } else { value })));
        }
        let spread = |of: fn(&Spread) -> f64| self.spread.as_ref().map_or(1.0, of);
        let others = [
            ("request_throughput", self.request_throughput),
            ("output_throughput", self.output_throughput),
            ("slo_attainment", self.slo_attainment),
            ("hit_rate", self.hit_rate),
            ("host_hit_rate", self.host_hit_rate),
            ("host_loads", self.shelf.host_loads as f64),
            ("disk_loads", self.shelf.disk_loads as f64),
            ("evictions", self.shelf.evictions as f64),
            ("preemptions", self.preemptions as f64),
            ("prefix_cache_hit_rate", self.prefix_cache_hit_rate),
            ("jain_index", self.jain_index.unwrap_or(f64::NAN)),
            ("worst_over_mean_ttft", self.worst_over_mean_ttft.unwrap_or(f64::NAN)),
            ("busy_share", self.busy_share),
            ("completed", self.completed as f64),
            ("failed", self.failed as f64),
            ("seconds", self.seconds),
            ("replica_requests_spread", spread(|one| one.requests)),
            ("replica_ttft_spread", spread(|one| one.mean_ttft)),
        ];
        all.extend(others.map(|(name, value)| (name.to_owned(), value)));
        all
    }
}
