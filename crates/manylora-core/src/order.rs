//! The order in which waiting requests are looked at: one key for all policies.

use std::cmp::Ordering;

/// A number with a total order, for keys.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ordered(pub(crate) f64);

impl PartialEq for Ordered {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ordered {}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Where a request stands among those that wait; the order of the fields is the order of admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Order {
    /// 0 for everyone unless the policy is `Priority`.
    pub(crate) priority: i64,
    /// What the request's client was served so far; 0 for everyone unless the policy is `Fair`. Preempted requests come
    /// before all others of their priority.
    pub(crate) service: Ordered,
    pub(crate) arrival: u64,
}

impl Order {
    /// Before everyone.
    pub(crate) const FIRST: Self = Self { priority: i64::MIN, service: Ordered(f64::NEG_INFINITY), arrival: 0 };
    /// Behind everyone.
    pub(crate) const LAST: Self = Self { priority: i64::MAX, service: Ordered(f64::INFINITY), arrival: u64::MAX };

    /// Place of a preempted request.
    pub(crate) const fn preempted(priority: i64, arrival: u64) -> Self {
        Self { priority, service: Ordered(f64::NEG_INFINITY), arrival }
    }
}
