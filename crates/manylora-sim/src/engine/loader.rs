//! The loader: so many threads, first come first served, and what the host's memory keeps of what they read.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use manylora_core::RegistrationId;

use crate::cost::Tier;

/// A load that will end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Load {
    pub(super) registration: RegistrationId,
    pub(super) adapter: u32,
    /// Seconds that it takes a thread.
    pub(super) seconds: f64,
}

/// A time that is never negative nor NaN, by its bits: these are ordered as the times are.
fn key(time: f64) -> u64 {
    (time + 0.0).to_bits()
}

#[derive(Debug)]
pub(super) struct Loader {
    /// When each thread is free.
    threads: BinaryHeap<Reverse<u64>>,
    /// Loads by their end; the second number keeps those of one moment in order.
    ending: BinaryHeap<Reverse<(u64, u64)>>,
    loads: BTreeMap<u64, Load>,
    ordered: u64,
}

impl Loader {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads: (0..threads).map(|_| Reverse(key(0.0))).collect(),
            ending: BinaryHeap::new(),
            loads: BTreeMap::new(),
            ordered: 0,
        }
    }

    /// Orders a load now.
    pub(super) fn order(&mut self, now: f64, load: Load) {
        let free = self.threads.pop().map_or(now, |Reverse(free)| f64::from_bits(free));
        let end = key(free.max(now) + load.seconds);
        self.threads.push(Reverse(end));
        self.ending.push(Reverse((end, self.ordered)));
        self.loads.insert(self.ordered, load);
        self.ordered += 1;
    }

    /// When the next load ends.
    pub(super) fn next_end(&self) -> Option<f64> {
        self.ending.peek().map(|Reverse((end, _))| f64::from_bits(*end))
    }

    /// The next load.
    pub(super) fn take(&mut self) -> Option<Load> {
        let Reverse((_, number)) = self.ending.pop()?;
        self.loads.remove(&number)
    }
}

/// Adapters' files in the host's memory.
#[derive(Debug)]
pub(super) struct HostCache {
    limit: Option<u64>,
    bytes: u64,
    uses: u64,
    /// Last use and bytes of each adapter that is there.
    there: BTreeMap<u32, (u64, u64)>,
    by_use: BTreeMap<u64, u32>,
}

impl HostCache {
    pub(super) fn new(limit: Option<u64>) -> Self {
        Self { limit, bytes: 0, uses: 0, there: BTreeMap::new(), by_use: BTreeMap::new() }
    }

    /// Where an adapter is read from; afterwards it is there, if it has room.
    pub(super) fn read(&mut self, adapter: u32, bytes: u64) -> Tier {
        self.uses += 1;
        let found = self.there.remove(&adapter);
        if let Some((used, held)) = found {
            self.by_use.remove(&used);
            self.bytes -= held;
        }
        let limit = self.limit.unwrap_or(u64::MAX);
        if bytes <= limit {
            while self.bytes > limit - bytes {
                let Some((_, oldest)) = self.by_use.pop_first() else { break };
                self.bytes -= self.there.remove(&oldest).map_or(0, |(_, held)| held);
            }
            self.bytes += bytes;
            self.there.insert(adapter, (self.uses, bytes));
            self.by_use.insert(self.uses, adapter);
        }
        if found.is_some() { Tier::Host } else { Tier::Disk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(adapter: u32, seconds: f64) -> Load {
        Load { registration: RegistrationId { index: adapter, generation: 0 }, adapter, seconds }
    }

    #[test]
    fn loads_beyond_the_threads_wait() {
        let mut loader = Loader::new(2);
        for (number, seconds) in [(0, 3.0), (1, 1.0), (2, 1.0), (3, 1.0)] {
            loader.order(10.0, load(number, seconds));
        }
        let mut ends = Vec::new();
        while let Some(end) = loader.next_end() {
            ends.push((loader.take().unwrap().adapter, end));
        }
        assert_eq!(ends, [(1, 11.0), (2, 12.0), (0, 13.0), (3, 13.0)]);
    }

    #[test]
    fn the_host_keeps_what_was_read_last() {
        let mut cache = HostCache::new(Some(20));
        let tiers = [0, 1, 0, 2, 1, 0].map(|adapter| cache.read(adapter, 10));
        // 2 drops 1, which drops 0.
        assert_eq!(tiers, [Tier::Disk, Tier::Disk, Tier::Host, Tier::Disk, Tier::Disk, Tier::Disk]);
        assert_eq!(cache.read(9, 21), Tier::Disk);
        assert_eq!(cache.read(9, 21), Tier::Disk);
        let mut all = HostCache::new(None);
        assert_eq!([5, 5].map(|adapter| all.read(adapter, 1 << 40)), [Tier::Disk, Tier::Host]);
    }
}
