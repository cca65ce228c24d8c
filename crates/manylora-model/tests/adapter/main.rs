//! Adapters as they come: the oracle's, broken ones, and cases that people reported. Every one is applied completely
//! or refused with its keys and a reason.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[cfg(feature = "candle")]
mod candle;
mod cases;
mod fixtures;
mod loading;
mod malformed;
mod messages;
mod mutations;
mod oracle;
mod places;
