//! The control plane as an engine sees it: events in, plans executed on a model of KV memory, outcomes back.

#![expect(clippy::unwrap_used, reason = "tests")]

mod adapters;
mod driver;
mod prefix_cache;
mod properties;
mod scheduling;
