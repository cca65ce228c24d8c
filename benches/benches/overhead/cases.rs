//! What runs and what waits.

/// Requests that run.
pub(crate) const RUNNING: usize = 256;

/// One situation.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Rows of the embedding. Few: the backend leaves caches as they are. Many: each step writes all logits over them.
    pub(crate) vocabulary: usize,
    /// Requests that wait.
    pub(crate) waiting: usize,
    /// Adapters that are registered beside those in use.
    pub(crate) registered: usize,
    /// Distinct adapters of the running requests; 0 = the base.
    pub(crate) adapters: usize,
    /// Whether tokens are drawn, with a seed, a temperature and top_p.
    pub(crate) sampled: bool,
    /// Whether those that wait ask for the adapters that are not in use, for which there is no place.
    pub(crate) cold: bool,
    /// Tokens of each request, up to twice as many: few make some end, and others start, in every step.
    pub(crate) tokens: usize,
}

/// SmolLM2's.
const MANY: usize = 49_152;

const STEADY: Case = Case {
    name: "8 adapters",
    vocabulary: 1_024,
    waiting: 0,
    registered: 0,
    adapters: 8,
    sampled: false,
    cold: false,
    tokens: 3000,
};

/// The first is what the others are compared with.
pub(crate) const CASES: &[Case] = &[
    STEADY,
    Case { name: "1,000 waiting", waiting: 1_000, ..STEADY },
    Case { name: "10,000 waiting", waiting: 10_000, ..STEADY },
    Case { name: "2,000 registered", registered: 2_000, ..STEADY },
    Case { name: "10,000 waiting, 2,000 registered", waiting: 10_000, registered: 2_000, ..STEADY },
    Case { name: "10,000 waiting for 2,000 without a place", waiting: 10_000, registered: 2_000, cold: true, ..STEADY },
    Case { name: "base", adapters: 0, ..STEADY },
    Case { name: "1 adapter", adapters: 1, ..STEADY },
    Case { name: "64 adapters", adapters: 64, ..STEADY },
    Case { name: "8 adapters, logits of 50 MB", vocabulary: MANY, ..STEADY },
    Case { name: "sampled, logits of 50 MB", vocabulary: MANY, sampled: true, ..STEADY },
    Case { name: "turnover, 5,000 waiting", waiting: 5_000, tokens: 64, ..STEADY },
    Case { name: "turnover, 10,000 waiting", waiting: 10_000, tokens: 64, ..STEADY },
];
