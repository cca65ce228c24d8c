//! How well a calibration fits what it was fitted to, by kind of step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Calibrated;
use super::fit::{LoadSample, StepSample};
use crate::cost::{AdapterShape, CostModel, StepWork, Tier};

/// How well it fits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Steps by kind.
    pub steps: BTreeMap<String, Residuals>,
    /// Loads by kind.
    pub loads: BTreeMap<String, Residuals>,
}

/// Measured against fitted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// How many.
    pub count: u64,
    /// Seconds that they took in all.
    pub seconds: f64,
    /// Those that are fitted, over those.
    pub fitted_over_measured: f64,
    /// Half of all deviate by less, relative to what was measured.
    pub median_deviation: f64,
    /// 90 % do.
    pub p90_deviation: f64,
}

impl Residuals {
    fn of(pairs: &mut [(f64, f64)]) -> Self {
        let (measured, fitted) = pairs.iter().fold((0.0, 0.0), |(a, b), pair| (a + pair.0, b + pair.1));
        let deviation = |pair: &(f64, f64)| if pair.0 > 0.0 { (pair.1 / pair.0 - 1.0).abs() } else { 0.0 };
        pairs.sort_by(|a, b| deviation(a).total_cmp(&deviation(b)));
        let at =
            |share: f64| pairs.get(((pairs.len() as f64 * share) as usize).min(pairs.len() - 1)).map_or(0.0, deviation);
        Self {
            count: pairs.len() as u64,
            seconds: measured,
            fitted_over_measured: if measured > 0.0 { fitted / measured } else { 1.0 },
            median_deviation: at(0.5),
            p90_deviation: at(0.9),
        }
    }
}

/// What a step is, in words: whether prompts are in it, and adapters.
fn kind(work: &StepWork) -> &'static str {
    match (work.prefill_rows > 0, work.prefill_rows < work.rows, work.adapters > 0) {
        (true, true, true) => "decode and prefill, adapters",
        (true, true, false) => "decode and prefill, base",
        (true, false, true) => "prefill, adapters",
        (true, false, false) => "prefill, base",
        (false, _, true) => "decode, adapters",
        (false, _, false) => "decode, base",
    }
}

impl Fit {
    /// Whether steps with adapters were among what it was fitted to.
    pub(super) fn has_adapters(&self) -> bool {
        self.steps.iter().any(|(kind, one)| kind.ends_with(" adapters") && one.count > 0)
    }

    pub(super) fn of(cost: &Calibrated, steps: &[StepSample], loads: &[LoadSample]) -> Self {
        let mut by_kind: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for StepSample { work, seconds } in steps {
            by_kind.entry(kind(work)).or_default().push((*seconds, cost.step(work)));
        }
        let mut by_tier: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for &LoadSample { bytes, again, seconds } in loads {
            let (tier, name) = if again { (Tier::Host, "later") } else { (Tier::Disk, "first") };
            let shape = AdapterShape { bytes, parameters: 0, rank: 0 };
            by_tier.entry(name).or_default().push((seconds, cost.load(&shape, tier)));
        }
        let residuals = |all: BTreeMap<&str, Vec<(f64, f64)>>| {
            all.into_iter().map(|(kind, mut pairs)| (kind.to_owned(), Residuals::of(&mut pairs))).collect()
        };
        Self { steps: residuals(by_kind), loads: residuals(by_tier) }
    }
}
