//! Takes down what happens in a fleet, for its report.

use std::collections::BTreeMap;

use super::report::{AdapterReport, ReplicaReport, Report, Spread};
use super::{RequestRecord, ShelfCounts, Slo, Summary, SummaryOptions, Totals};
use crate::engine::Observer;
use crate::fleet::ReplicaTotals;
use crate::plan::Plan;
use crate::workload::SimRequest;

/// Reasons of failures that are told apart; the others are one.
const MOST_REASONS: usize = 16;
/// Points of a distribution.
const POINTS: u32 = 200;

/// Every request of a run, a column each, in the order of arrival. Times are seconds, NaN where there was none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Records {
    /// When it arrived.
    pub arrival: Vec<f64>,
    /// When its first step began.
    pub admitted: Vec<f64>,
    /// When its first token came.
    pub first_token: Vec<f64>,
    /// When it ended.
    pub end: Vec<f64>,
    /// Its adapter; -1 is the base.
    pub adapter: Vec<i64>,
    /// The replica that had it.
    pub replica: Vec<i64>,
    /// Tokens of its prompt.
    pub prompt_tokens: Vec<i64>,
    /// Tokens that it generated.
    pub output_tokens: Vec<i64>,
    /// Tokens of its prompt that were in the prefix cache.
    pub cached_tokens: Vec<i64>,
    /// How often it lost its KV blocks.
    pub preemptions: Vec<i64>,
    /// 1 if it failed.
    pub failed: Vec<i64>,
}

impl Records {
    fn arrived(&mut self, replica: usize, request: &SimRequest) {
        for times in [&mut self.admitted, &mut self.first_token, &mut self.end] {
            times.push(f64::NAN);
        }
        for counts in [&mut self.output_tokens, &mut self.cached_tokens, &mut self.preemptions, &mut self.failed] {
            counts.push(0);
        }
        self.arrival.push(request.arrival);
        self.adapter.push(request.adapter.map_or(-1, i64::from));
        self.replica.push(replica as i64);
        self.prompt_tokens.push(i64::from(request.prompt_tokens));
    }

    fn ended(&mut self, place: usize, record: &RequestRecord) {
        self.admitted[place] = record.admitted.unwrap_or(f64::NAN);
        self.first_token[place] = record.first_token.unwrap_or(f64::NAN);
        self.end[place] = record.end;
        self.output_tokens[place] = i64::from(record.tokens);
        self.cached_tokens[place] = i64::from(record.cached_tokens);
        self.preemptions[place] = i64::from(record.preemptions);
        self.failed[place] = i64::from(record.failure.is_some());
    }
}

#[derive(Clone, Debug, Default)]
struct Tally {
    requests: u64,
    ttft_sum: f64,
    ttft_count: u64,
    /// Places of its requests among all, if records are kept.
    places: Vec<usize>,
}

/// Sums of a fleet. Its memory grows with adapters and replicas, and with requests only if records are kept.
#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    summary: Summary,
    slo: Slo,
    requests: u64,
    attained: u64,
    prompt_tokens: u64,
    failures: BTreeMap<String, u64>,
    replicas: Vec<Tally>,
    records: Option<Records>,
}

impl Recorder {
    pub(crate) fn new(adapters: u32, replicas: usize, slo: Slo, keep: bool) -> Self {
        let options = SummaryOptions { adapters, slo_ttft: slo.ttft.unwrap_or(f64::INFINITY) };
        Self {
            summary: Summary::new(options),
            slo,
            requests: 0,
            attained: 0,
            prompt_tokens: 0,
            failures: BTreeMap::new(),
            replicas: vec![Tally::default(); replicas],
            records: keep.then(Records::default),
        }
    }

    pub(crate) fn delivered(&mut self, replica: usize, request: &SimRequest) {
        let place = self.requests as usize;
        self.requests += 1;
        self.prompt_tokens += u64::from(request.prompt_tokens);
        self.replicas[replica].requests += 1;
        if let Some(records) = &mut self.records {
            records.arrived(replica, request);
            self.replicas[replica].places.push(place);
        }
    }

    pub(crate) fn ended(&mut self, replica: usize, record: &RequestRecord) {
        self.summary.ended(record);
        self.attained += u64::from(self.slo.attained(record));
        let tally = &mut self.replicas[replica];
        if let Some(records) = &mut self.records {
            records.ended(tally.places[record.number as usize], record);
        }
        if let Some(reason) = &record.failure {
            let known = self.failures.contains_key(reason) || self.failures.len() < MOST_REASONS;
            let reason = if known { reason.clone() } else { "other reasons".to_owned() };
            *self.failures.entry(reason).or_default() += 1;
        } else if let Some(ttft) = record.ttft() {
            tally.ttft_sum += ttft;
            tally.ttft_count += 1;
        }
    }

    pub(crate) fn token_gap(&mut self, seconds: f64) {
        self.summary.token_gap(seconds);
    }

    pub(crate) fn report(self, fleet: &[ReplicaTotals], plan: &Plan, names: Vec<String>) -> (Report, Option<Records>) {
        let totals = add_up(fleet);
        let summary = &self.summary;
        let share = |part: u64, all: u64| if all == 0 { 1.0 } else { part as f64 / all as f64 };
        let shelf = totals.shelf;
        let replicas: Vec<ReplicaReport> =
            fleet.iter().zip(&self.replicas).map(|(one, tally)| replica(one, tally, totals.seconds)).collect();
        let adapters = adapters(summary, names);
        let queried = totals.prefix_cache_queries;
        let report = Report {
            requests: self.requests,
            completed: totals.completed,
            failed: totals.failed,
            failures: self.failures,
            seconds: totals.seconds,
            busy_share: replicas.iter().map(|one| one.busy_share).sum::<f64>() / replicas.len() as f64,
            steps: totals.steps,
            prompt_tokens: self.prompt_tokens,
            output_tokens: totals.output_tokens,
            request_throughput: summary.request_throughput(&totals),
            output_throughput: summary.token_throughput(&totals),
            ttft: summary.ttft(),
            itl: summary.itl(),
            e2e: summary.e2e(),
            waiting: summary.waiting(),
            slo: self.slo,
            slo_attainment: share(self.attained, self.requests),
            jain_index: summary.jain_index(),
            worst_over_mean_ttft: summary.worst_over_mean_ttft(),
            shelf,
            hit_rate: shelf.hit_rate(),
            host_hit_rate: share(shelf.host_loads, shelf.host_loads + shelf.disk_loads),
            preemptions: totals.preemptions,
            prefix_cache_hit_rate: if queried == 0 { 0.0 } else { share(totals.prefix_cache_hits, queried) },
            distributions: summary.histograms().map(|(name, one)| (name, one.points(POINTS))).into_iter().collect(),
            spread: (replicas.len() > 1).then(|| Spread::of(&replicas)),
            replicas,
            adapters,
            notes: plan.notes.clone(),
            warnings: plan.warnings.clone(),
        };
        (report, self.records)
    }
}

fn add_up(fleet: &[ReplicaTotals]) -> Totals {
    let mut all = Totals::default();
    for ReplicaTotals { totals: one, .. } in fleet {
        all.seconds = all.seconds.max(one.seconds);
        all.busy_seconds += one.busy_seconds;
        all.steps += one.steps;
        all.completed += one.completed;
        all.failed += one.failed;
        all.output_tokens += one.output_tokens;
        all.shelf = ShelfCounts {
            hits: all.shelf.hits + one.shelf.hits,
            misses: all.shelf.misses + one.shelf.misses,
            host_loads: all.shelf.host_loads + one.shelf.host_loads,
            disk_loads: all.shelf.disk_loads + one.shelf.disk_loads,
            evictions: all.shelf.evictions + one.shelf.evictions,
        };
        all.preemptions += one.preemptions;
        all.prefix_cache_queries += one.prefix_cache_queries;
        all.prefix_cache_hits += one.prefix_cache_hits;
    }
    all
}

fn replica(one: &ReplicaTotals, tally: &Tally, seconds: f64) -> ReplicaReport {
    let ReplicaTotals { totals, adapters } = one;
    ReplicaReport {
        requests: tally.requests,
        completed: totals.completed,
        output_tokens: totals.output_tokens,
        busy_share: if seconds > 0.0 { totals.busy_seconds / seconds } else { 0.0 },
        mean_ttft: if tally.ttft_count > 0 { tally.ttft_sum / tally.ttft_count as f64 } else { 0.0 },
        hit_rate: totals.shelf.hit_rate(),
        loads: totals.shelf.host_loads + totals.shelf.disk_loads,
        adapters: *adapters as u64,
    }
}

fn adapters(summary: &Summary, mut names: Vec<String>) -> Vec<AdapterReport> {
    let all = summary.by_adapter();
    names.truncate(all.len() - 1);
    let row = |(number, one): (usize, &super::AdapterSummary)| {
        let is_base = number + 1 == all.len();
        let mean = |sum: f64| if one.completed > 0 { sum / one.completed as f64 } else { 0.0 };
        AdapterReport {
            adapter: (!is_base).then_some(number as u32),
            name: names.get(number).cloned(),
            completed: one.completed,
            failed: one.failed,
            output_tokens: one.output_tokens,
            mean_ttft: mean(one.ttft_sum),
            mean_rate: mean(one.rate_sum),
        }
    };
    all.iter().enumerate().filter(|(_, one)| one.completed + one.failed > 0).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Histogram;

    #[test]
    fn reasons_beyond_some_are_one() {
        let mut recorder = Recorder::new(0, 1, Slo::default(), false);
        for number in 0..40 {
            let record = RequestRecord {
                number,
                adapter: None,
                tenant: None,
                prompt_tokens: 1,
                arrival: 0.0,
                admitted: None,
                first_token: None,
                end: 0.0,
                tokens: 0,
                longest_gap: 0.0,
                cached_tokens: 0,
                preemptions: 0,
                failure: Some(format!("reason {number}")),
            };
            recorder.ended(0, &record);
        }
        assert_eq!(recorder.failures.len(), MOST_REASONS + 1);
        assert_eq!(recorder.failures["other reasons"], 40 - MOST_REASONS as u64);
        assert_eq!(recorder.attained, 0);
    }

    #[test]
    fn a_distribution_ends_with_the_largest() {
        let mut histogram = Histogram::default();
        assert!(histogram.points(10).is_empty());
        for seconds in [0.1, 0.2, 0.4] {
            histogram.add(seconds);
        }
        let points = histogram.points(3);
        assert!(points.is_sorted() && points.len() == 3);
        assert!((points[2][0] / 0.4 - 1.0).abs() < 0.006 && points[2][1] == 1.0);
    }
}
