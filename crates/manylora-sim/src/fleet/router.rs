//! Which replica a request goes to. Loads are requests that a replica was given and that have not ended.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::workload::SimRequest;
use crate::workload::numpy::RandomState;

/// A way to choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterKind {
    /// One after the other.
    #[default]
    RoundRobin,
    /// Who has the least load; of several, who was chosen longest ago.
    LeastLoaded,
    /// The less loaded of two that are drawn (Mitzenmacher 2001).
    RandomTwoChoices,
    /// Consistent hashing of the adapter with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016, arXiv:1608.01350): the
    /// first replica on a ring from the adapter's place on that has less than `ceil(bound x mean load)`, the request counted.
    /// Requests for the base go to the least loaded.
    ConsistentHashing,
}

/// Places of each replica on the ring.
const PLACES: u32 = 128;

/// A router and what it knows.
#[derive(Debug)]
pub struct Router {
    kind: RouterKind,
    bound: f64,
    random: RandomState,
    /// Load, and when it was chosen last, of each replica.
    replicas: Vec<(u64, u64)>,
    /// The same in order.
    ordered: BTreeSet<(u64, u64, usize)>,
    /// Places, and whose they are.
    ring: Vec<(u64, u32)>,
    routed: u64,
    load: u64,
}

fn place(kind: u8, number: u32, copy: u32) -> u64 {
    let mut key = [0; 9];
    key[0] = kind;
    key[1..5].copy_from_slice(&number.to_le_bytes());
    key[5..].copy_from_slice(&copy.to_le_bytes());
    let hash = blake3::hash(&key);
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("a digest has 32 bytes"))
}

impl Router {
    /// Before the first request. There is at least one replica, and `bound` is above 1.
    pub fn new(kind: RouterKind, replicas: usize, bound: f64, seed: u32) -> Self {
        let mut ring = Vec::new();
        if kind == RouterKind::ConsistentHashing {
            let all = (0..replicas as u32).flat_map(|replica| (0..PLACES).map(move |copy| (replica, copy)));
            ring = all.map(|(replica, copy)| (place(0, replica, copy), replica)).collect();
            ring.sort_unstable();
        }
        Self {
            kind,
            bound,
            random: RandomState::new(seed),
            replicas: vec![(0, 0); replicas],
            ordered: (0..replicas).map(|replica| (0, 0, replica)).collect(),
            ring,
            routed: 0,
            load: 0,
        }
    }

    /// Chooses, and counts the request there.
    pub fn route(&mut self, request: &SimRequest) -> usize {
        let count = self.replicas.len();
        let chosen = match (self.kind, request.adapter) {
            (RouterKind::RoundRobin, _) => (self.routed % count as u64) as usize,
            (RouterKind::RandomTwoChoices, _) => {
                let [one, other] = [0, 0].map(|low| self.random.randint(low, count as u32) as usize);
                if self.replicas[other].0 < self.replicas[one].0 { other } else { one }
            }
            (RouterKind::ConsistentHashing, Some(adapter)) => self.on_the_ring(adapter),
            (RouterKind::LeastLoaded | RouterKind::ConsistentHashing, _) => self.least_loaded(),
        };
        self.routed += 1;
        self.load += 1;
        let routed = self.routed;
        self.change(chosen, |(load, last)| {
            *load += 1;
            *last = routed;
        });
        chosen
    }

    /// So many requests of a replica ended.
    pub fn ended(&mut self, replica: usize, requests: u64) {
        if requests > 0 {
            self.load -= requests;
            self.change(replica, |(load, _)| *load -= requests);
        }
    }

    /// Requests that a replica has.
    pub fn load(&self, replica: usize) -> u64 {
        self.replicas[replica].0
    }

    fn change(&mut self, replica: usize, change: impl FnOnce(&mut (u64, u64))) {
        let one = &mut self.replicas[replica];
        self.ordered.remove(&(one.0, one.1, replica));
        change(one);
        self.ordered.insert((one.0, one.1, replica));
    }

    fn least_loaded(&self) -> usize {
        self.ordered.first().map_or(0, |&(_, _, replica)| replica)
    }

    /// Loads add up to less than all bounds together, so somebody is below theirs.
    fn on_the_ring(&self, adapter: u32) -> usize {
        let most = (self.bound * (self.load + 1) as f64 / self.replicas.len() as f64).ceil() as u64;
        let from = place(1, adapter, 0);
        let start = self.ring.partition_point(|&(place, _)| place < from);
        let around = self.ring[start..].iter().chain(&self.ring[..start]);
        let found = around.map(|&(_, replica)| replica as usize).find(|&replica| self.replicas[replica].0 < most);
        found.unwrap_or_else(|| self.least_loaded())
    }
}
