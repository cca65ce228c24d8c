//! One case of the bench, what came out of it, and the floor it is compared with.

use manylora_benches::roofline::{Limits, Work};

use crate::popularity::Popularity;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// Inputs and outputs.
    pub(crate) shape: (usize, usize),
    pub(crate) rank: usize,
    pub(crate) rows: usize,
    /// The same weights and adapters in every call; else ones that were not used for long.
    pub(crate) warm: bool,
}

/// What came out of a case for the base (no popularity) or for one mix of adapters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Result {
    pub(crate) popularity: Option<Popularity>,
    /// Of one call, the median.
    pub(crate) seconds: f64,
    /// The floor over the time.
    pub(crate) fraction: f64,
    /// Time over the base's time.
    pub(crate) times_base: f64,
    /// What the adapters add over the floor of what they add; None for the base.
    pub(crate) extra: Option<f64>,
}

impl Case {
    /// Bytes and operations of the base.
    pub(crate) fn base(&self) -> Work {
        let weights = (self.shape.0 * self.shape.1) as f64;
        Work { bytes: 2.0 * weights, flops: 2.0 * weights * self.rows as f64 }
    }

    /// Bytes and operations that adapters add.
    pub(crate) fn delta(&self, popularity: Popularity) -> Work {
        let adapter = (self.rank * (self.shape.0 + self.shape.1)) as f64;
        Work { bytes: 2.0 * adapter * popularity.distinct(self.rows) as f64, flops: 2.0 * adapter * self.rows as f64 }
    }

    /// The result with these adapters: `times_base` as long as the base, which took `base` seconds.
    pub(crate) fn result(&self, limits: &Limits, popularity: Option<Popularity>, base: f64, times_base: f64) -> Result {
        let delta = popularity.map_or(Work { bytes: 0.0, flops: 0.0 }, |popularity| self.delta(popularity));
        let whole = self.base();
        let floor = limits.floor(Work { bytes: whole.bytes + delta.bytes, flops: whole.flops + delta.flops });
        let seconds = base * times_base;
        Result {
            popularity,
            seconds,
            fraction: floor / seconds,
            times_base,
            extra: popularity.map(|_| (seconds - base) / limits.floor(delta)),
        }
    }
}
