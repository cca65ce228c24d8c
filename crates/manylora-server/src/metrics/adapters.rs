//! What was served for whom: series for each adapter that requests name, as long as it is registered, and never for more
//! adapters than a limit. Those beyond it share one.

use std::collections::BTreeMap;

use manylora::{Distribution, FinishReason, Timing};

/// The name of what adapters beyond the limit share.
pub(super) const OTHER: &str = "other";

/// Bounds of seconds, fewer than those over all adapters: they are there for each.
const SECONDS: &[f64] = &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];

/// While the table is full, one newcomer in so many is a reason to look whether somebody left.
const NEWCOMERS: u64 = 64;

/// A sample that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Served {
    pub(super) prompt_tokens: usize,
    pub(super) generation_tokens: usize,
    /// None = an error ended it.
    pub(super) reason: Option<FinishReason>,
    pub(super) timing: Option<Timing>,
}

/// What was served for one adapter, or for the base.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) stop: u64,
    pub(super) length: u64,
    pub(super) abort: u64,
    pub(super) error: u64,
    pub(super) prompt_tokens: u64,
    pub(super) generation_tokens: u64,
    /// Samples whose adapters were resident when they came, of those that got a token.
    pub(super) hits: u64,
    pub(super) first_token: Distribution,
    pub(super) whole: Distribution,
    pub(super) queue: Distribution,
}

impl Series {
    fn new() -> Self {
        let seconds = || Distribution::new(SECONDS);
        Self {
            stop: 0,
            length: 0,
            abort: 0,
            error: 0,
            prompt_tokens: 0,
            generation_tokens: 0,
            hits: 0,
            first_token: seconds(),
            whole: seconds(),
            queue: seconds(),
        }
    }

    fn add(&mut self, served: Served) {
        match served.reason {
            Some(FinishReason::Stop) => self.stop += 1,
            Some(FinishReason::Length) => self.length += 1,
            Some(FinishReason::Abort) => self.abort += 1,
            None => self.error += 1,
        }
        self.prompt_tokens += served.prompt_tokens as u64;
        self.generation_tokens += served.generation_tokens as u64;
        if let Some(timing) = served.timing {
            self.hits += u64::from(timing.resident);
            self.first_token.observe(timing.first_token);
            self.whole.observe(timing.last_token);
            self.queue.observe(timing.scheduled);
        }
    }

    fn requests(&self) -> u64 {
        self.stop + self.length + self.abort + self.error
    }
}

/// Series by adapter.
#[derive(Clone, Debug)]
pub(super) struct AdapterTable {
    base_name: String,
    base: Series,
    by_name: BTreeMap<String, Series>,
    other: Series,
    most: usize,
    /// Adapters that found no place.
    turned_away: u64,
}

impl AdapterTable {
    pub(super) fn new(base_name: &str, most: usize) -> Self {
        Self {
            base_name: base_name.to_owned(),
            base: Series::new(),
            by_name: BTreeMap::new(),
            other: Series::new(),
            most,
            turned_away: 0,
        }
    }

    /// Takes a sample that an adapter, or the base under its name, served.
    pub(super) fn add(&mut self, name: &str, served: Served, is_registered: impl Fn(&str) -> bool) {
        self.series(name, is_registered).add(served);
    }

    fn series(&mut self, name: &str, is_registered: impl Fn(&str) -> bool) -> &mut Series {
        if name == OTHER {
            return &mut self.other;
        }
        if name == self.base_name {
            return &mut self.base;
        }
        if !self.by_name.contains_key(name) && self.by_name.len() >= self.most {
            if self.turned_away.is_multiple_of(NEWCOMERS) {
                self.forget(&is_registered);
            }
            if self.by_name.len() >= self.most {
                self.turned_away += 1;
                return &mut self.other;
            }
        }
        self.by_name.entry(name.to_owned()).or_insert_with(Series::new)
    }

    /// Drops the series of adapters that are gone.
    pub(super) fn forget(&mut self, is_registered: impl Fn(&str) -> bool) {
        self.by_name.retain(|name, _| is_registered(name));
    }

    /// All series, each under its adapter's name.
    pub(super) fn series_by_name(&self) -> impl Iterator<Item = (&str, &Series)> + '_ {
        let base = (self.base_name != OTHER).then_some((self.base_name.as_str(), &self.base));
        let other = (self.other.requests() > 0).then_some((OTHER, &self.other));
        let named = self.by_name.iter().map(|(name, series)| (name.as_str(), series));
        base.into_iter().chain(named).chain(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Served =
        Served { prompt_tokens: 5, generation_tokens: 8, reason: Some(FinishReason::Stop), timing: None };

    fn requests(table: &AdapterTable) -> Vec<(&str, u64)> {
        table.series_by_name().map(|(name, series)| (name, series.requests())).collect()
    }

    #[test]
    fn whoever_is_beyond_the_limit_shares_a_series() {
        let mut table = AdapterTable::new("base", 2);
        for name in ["base", "a", "b", "c", "a", "d", "other"] {
            table.add(name, ONE, |_| true);
        }
        assert_eq!(requests(&table), [("base", 1), ("a", 2), ("b", 1), ("other", 3)]);
        let tokens: u64 = table.series_by_name().map(|(_, series)| series.prompt_tokens).sum();
        assert_eq!(tokens, 35);
    }

    #[test]
    fn a_49_places_of_adapters_that_left_are_given_away() {
        let mut table = AdapterTable::new("base", 16);
        for number in 0..2000 {
            let name = format!("adapter-{number}");
            table.add(&name, ONE, |registered| registered == name);
            assert!(table.by_name.len() <= 16);
        }
        table.forget(|name| name == "adapter-1999");
        assert_eq!(requests(&table), [("base", 0), ("adapter-1999", 1)]);
    }

    #[test]
    fn nobody_can_pose_as_another_series() {
        let mut table = AdapterTable::new("other", 2);
        table.add("other", ONE, |_| true);
        assert_eq!(requests(&table), [("other", 1)]);
    }
}
