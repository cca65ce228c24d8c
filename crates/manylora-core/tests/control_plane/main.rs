//! The control plane as an engine sees it: events in, plans executed on a model of KV memory, outcomes back.

#![expect(clippy::unwrap_used, reason = "tests")]

mod adapters;
mod driver;
mod eviction;
mod fairness;
mod memory;
mod prefix_cache;
mod properties;
mod replacement;
mod scheduling;
mod step_cost;
mod traces;
mod world;
