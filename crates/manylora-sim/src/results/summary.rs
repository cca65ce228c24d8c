//! A run in some hundred numbers: latencies, how many requests met what was promised, and how alike adapters were served.

use serde::Serialize;

use super::{Histogram, RequestRecord, Totals};
use crate::engine::Observer;

/// What a summary is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SummaryOptions {
    /// Adapters that there are.
    pub adapters: u32,
    /// Time to first token that is promised, in seconds.
    pub slo_ttft: f64,
}

/// A distribution of latencies, in seconds: exact mean and largest, percentiles within half a percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Half are at most this.
    pub p50: f64,
    /// 90 % are.
    pub p90: f64,
    /// 99 % are.
    pub p99: f64,
    /// All are.
    pub largest: f64,
}

impl From<&Histogram> for Latency {
    fn from(histogram: &Histogram) -> Self {
        let [p50, p90, p99] = [50.0, 90.0, 99.0].map(|percent| histogram.percentile(percent));
        Self { count: histogram.count(), mean: histogram.mean(), p50, p90, p99, largest: histogram.largest() }
    }
}

/// One adapter's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AdapterSummary {
    /// That ended well.
    pub completed: u64,
    /// That failed.
    pub failed: u64,
    /// Tokens that they generated.
    pub output_tokens: u64,
    /// Sum of their times to first token, in seconds.
    pub ttft_sum: f64,
    /// Sum of their tokens a second, from arrival to end.
    pub rate_sum: f64,
}

/// An [`Observer`] that sums up. Its memory grows with the adapters only.
#[derive(Clone, Debug)]
pub struct Summary {
    options: SummaryOptions,
    ttft: Histogram,
    gaps: Histogram,
    e2e: Histogram,
    waiting: Histogram,
    within_slo: u64,
    /// By adapter, the base last.
    by_adapter: Vec<AdapterSummary>,
}

impl Summary {
    /// Before a run.
    pub fn new(options: SummaryOptions) -> Self {
        Self {
            options,
            ttft: Histogram::default(),
            gaps: Histogram::default(),
            e2e: Histogram::default(),
            waiting: Histogram::default(),
            within_slo: 0,
            by_adapter: vec![AdapterSummary::default(); options.adapters as usize + 1],
        }
    }

    /// Time to first token.
    pub fn ttft(&self) -> Latency {
        (&self.ttft).into()
    }

    /// Inter-token latency.
    pub fn itl(&self) -> Latency {
        (&self.gaps).into()
    }

    /// End-to-end latency.
    pub fn e2e(&self) -> Latency {
        (&self.e2e).into()
    }

    /// All three, by name.
    pub(crate) const fn histograms(&self) -> [(&'static str, &Histogram); 3] {
        [("ttft", &self.ttft), ("itl", &self.gaps), ("e2e", &self.e2e)]
    }

    /// Time from arrival to the first step.
    pub fn waiting(&self) -> Latency {
        (&self.waiting).into()
    }

    /// Share of all requests, failed ones included, whose first token came in the time that was promised; 1 if there were none.
    pub fn slo_attainment(&self) -> f64 {
        let all: u64 = self.by_adapter.iter().map(|one| one.completed + one.failed).sum();
        if all == 0 { 1.0 } else { self.within_slo as f64 / all as f64 }
    }

    /// Adapters' requests, by number; the base's are the last.
    pub fn by_adapter(&self) -> &[AdapterSummary] {
        &self.by_adapter
    }

    /// Jain's index over the adapters' mean tokens a second of a request: 1 if all were served alike, 1/n if one alone was.
    /// None if no adapter had a request.
    pub fn jain_index(&self) -> Option<f64> {
        let rates = self.adapters().map(|one| one.rate_sum / one.completed as f64);
        let (count, sum, squares) =
            rates.fold((0.0, 0.0, 0.0), |(count, sum, squares), rate| (count + 1.0, sum + rate, squares + rate * rate));
        (squares > 0.0).then(|| sum * sum / (count * squares))
    }

    /// The worst adapter's mean time to first token over the mean of all adapters'. None if no adapter had a request.
    pub fn worst_over_mean_ttft(&self) -> Option<f64> {
        let means: Vec<f64> = self.adapters().map(|one| one.ttft_sum / one.completed as f64).collect();
        let mean = means.iter().sum::<f64>() / means.len() as f64;
        (mean > 0.0).then(|| means.iter().copied().fold(0.0, f64::max) / mean)
    }

    /// Adapters with requests that ended well.
    fn adapters(&self) -> impl Iterator<Item = &AdapterSummary> {
        let adapters = self.options.adapters as usize;
        self.by_adapter[..adapters].iter().filter(|one| one.completed > 0)
    }

    /// Requests that ended well in a second of the run.
    pub fn request_throughput(&self, totals: &Totals) -> f64 {
        if totals.seconds > 0.0 { totals.completed as f64 / totals.seconds } else { 0.0 }
    }

    /// Tokens that were generated in a second of the run.
    pub fn token_throughput(&self, totals: &Totals) -> f64 {
        if totals.seconds > 0.0 { totals.output_tokens as f64 / totals.seconds } else { 0.0 }
    }
}

impl Observer for Summary {
    fn ended(&mut self, record: &RequestRecord) {
        let place = record.adapter.map_or(self.options.adapters, |adapter| adapter.min(self.options.adapters));
        let one = &mut self.by_adapter[place as usize];
        if record.failure.is_some() {
            one.failed += 1;
            return;
        }
        one.completed += 1;
        one.output_tokens += u64::from(record.tokens);
        if record.e2e() > 0.0 {
            one.rate_sum += f64::from(record.tokens) / record.e2e();
        }
        self.e2e.add(record.e2e());
        if let Some(ttft) = record.ttft() {
            one.ttft_sum += ttft;
            self.ttft.add(ttft);
            self.within_slo += u64::from(ttft <= self.options.slo_ttft);
        }
        if let Some(admitted) = record.admitted {
            self.waiting.add(admitted - record.arrival);
        }
    }

    fn token_gap(&mut self, seconds: f64) {
        self.gaps.add(seconds);
    }
}
