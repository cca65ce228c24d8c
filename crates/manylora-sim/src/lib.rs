//! Answers without a card or a model: what fits ([`plan`]).
//!
//! Bytes come from [`manylora_core::budget`], the arithmetic that an engine decides by at its start, so planner and engine
//! cannot disagree. Reading order: [`model`] and [`card`] (what is known of models and cards, as data), then [`plan`].

pub mod card;
mod error;
pub mod model;
pub mod plan;

pub use error::SimError;
