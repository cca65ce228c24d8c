//! A distribution of durations in fixed memory: buckets that grow with the values, so that any percentile is right within half
//! a percent, whatever there was between a microsecond and weeks.

/// Buckets of an octave: a bucket is `2^(1/128)` wide, 0.54 %.
const PER_OCTAVE: f64 = 128.0;
/// The first bucket ends here, in seconds.
const LEAST: f64 = 1e-6;
const OCTAVES: usize = 44;
const BUCKETS: usize = OCTAVES * PER_OCTAVE as usize + 1;

/// Counts of durations, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: f64,
    largest: f64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS], count: 0, sum: 0.0, largest: 0.0 }
    }
}

impl Histogram {
    /// Counts a duration.
    pub fn add(&mut self, seconds: f64) {
        let bucket = if seconds <= LEAST { 0 } else { 1 + ((seconds / LEAST).log2() * PER_OCTAVE) as usize };
        self.buckets[bucket.min(BUCKETS - 1)] += 1;
        self.count += 1;
        self.sum += seconds;
        self.largest = self.largest.max(seconds);
    }

    /// How many were counted.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Their mean; 0 if there were none.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    /// The largest.
    pub const fn largest(&self) -> f64 {
        self.largest
    }

    /// The value that `percent` of all are at most, within half a percent: the middle of its bucket; 0 if there were none.
    pub fn percentile(&self, percent: f64) -> f64 {
        let wanted = ((percent / 100.0 * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (bucket, &count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                let middle = if bucket == 0 { LEAST } else { LEAST * ((bucket as f64 - 0.5) / PER_OCTAVE).exp2() };
                return middle.min(self.largest);
            }
        }
        0.0
    }

    /// So many points of the distribution: values, and the share of all that are at most these; none if nothing was counted.
    pub fn points(&self, count: u32) -> Vec<[f64; 2]> {
        if self.count == 0 {
            return Vec::new();
        }
        let shares = (1..=count).map(|number| f64::from(number) / f64::from(count));
        shares.map(|share| [self.percentile(100.0 * share), share]).collect()
    }

    /// Share of all that are at most `seconds`; 1 if there were none.
    pub fn share_within(&self, seconds: f64) -> f64 {
        if self.count == 0 {
            return 1.0;
        }
        let bucket = if seconds <= LEAST { 0 } else { 1 + ((seconds / LEAST).log2() * PER_OCTAVE) as usize };
        let within: u64 = self.buckets[..bucket.min(BUCKETS)].iter().sum();
        within as f64 / self.count as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_within_half_a_percent() {
        let mut histogram = Histogram::default();
        let values: Vec<f64> = (0..10_000).map(|number| 1e-4 * 1.002_f64.powi(number)).collect();
        values.iter().rev().for_each(|&value| histogram.add(value));
        for (percent, place) in [(0.01, 0), (1.0, 99), (50.0, 4999), (90.0, 8999), (99.0, 9899), (100.0, 9999)] {
            let (got, want) = (histogram.percentile(percent), values[place]);
            assert!((got / want - 1.0).abs() < 0.005, "p{percent}: {got} for {want}");
        }
        assert_eq!(histogram.largest(), values[9999]);
        let within = histogram.share_within(values[4999] * 1.01);
        assert!((within - 0.5).abs() < 0.001, "{within}");
        let empty = Histogram::default();
        assert_eq!((empty.percentile(99.0), empty.mean(), empty.share_within(1.0)), (0.0, 0.0, 1.0));
    }
}
