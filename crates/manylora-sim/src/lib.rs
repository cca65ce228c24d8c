//! Answers without a card or a model: what fits ([`plan`]), and how it would run ([`engine`]).
//!
//! Bytes come from [`manylora_core::budget`], the arithmetic that an engine decides by at its start, and what runs when comes
//! from [`manylora_core::ControlPlane`], the scheduler and shelf that engines run: planner, simulator and engine cannot
//! disagree. The forward pass alone is replaced, by a [`cost`] model, and the clock by one that jumps.
//!
//! Reading order: [`model`] and [`card`] (what is known of models and cards, as data), [`plan`], [`cost`], [`workload`] (who
//! asks when for what), [`engine`], [`fleet`] (several behind a router), [`results`]; [`config`] says all of it in one table, and
//! [`run()`] runs that, [`sweep`] many of them, and [`search`] finds where one holds what was asked.

pub mod calibrate;
pub mod card;
pub mod config;
pub mod cost;
pub mod engine;
mod error;
pub mod fleet;
pub mod model;
pub mod plan;
pub mod replay;
pub mod results;
mod run;
pub mod search;
pub mod sweep;
pub mod workload;

pub use config::Config;
pub use error::SimError;
pub use results::Report;
pub use run::{Watch, run, run_recorded, run_watched};
