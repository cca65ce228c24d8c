//! Structured output: which tokens may come next, so that an answer is what its request says - JSON of a schema, a regular
//! expression, one of some choices, the language of a grammar.
//!
//! A grammar is compiled on the thread of whoever submits the request ([`Structure::compile`]), where everything that is
//! wrong with it is found. Each sequence then has a [`Constraint`] of its own, which sees the tokens that were chosen and
//! nothing else: the answer is the same whatever shares its batch, and after a preemption.
//!
//! Reading order: this file, `vocabulary` (tokens as a trie of bytes), `grammar` (from a request's words to a grammar),
//! [`lark`] and `ebnf` (how grammars are written), `constraint` (one sequence).

mod constraint;
mod ebnf;
mod grammar;
pub mod lark;
mod vocabulary;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::ParserFactory;
use manylora_core::sampling::StructuredOutputs;
use manylora_model::tokenizer::Tokenizer;

pub(crate) use constraint::Constraint;
pub(crate) use grammar::Grammar;

use crate::error::EngineError;

/// Compiled grammars that are kept for further requests with the same words.
const KEPT: usize = 64;

/// Compiles grammars for one model, and keeps them. What it needs of the vocabulary is made for the first request that has
/// one.
pub(crate) struct Structure {
    vocab_size: usize,
    end_tokens: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, String>>,
    /// The latest last.
    compiled: Mutex<VecDeque<(StructuredOutputs, Arc<Grammar>)>>,
}

impl Structure {
    /// `vocab_size` is the length of a row of logits.
    pub(crate) fn new(vocab_size: usize, end_tokens: &[u32]) -> Self {
        Self {
            vocab_size,
            end_tokens: end_tokens.to_vec(),
            factory: OnceLock::new(),
            compiled: Mutex::new(VecDeque::new()),
        }
    }

    /// The grammar that a request's words stand for.
    pub(crate) fn compile(
        &self,
        tokenizer: &Tokenizer,
        outputs: &StructuredOutputs,
    ) -> Result<Arc<Grammar>, EngineError> {
        if let Some(known) = self.known(outputs) {
            return Ok(known);
        }
        let factory = self
            .factory
            .get_or_init(|| vocabulary::factory(tokenizer, self.vocab_size, &self.end_tokens))
            .as_ref()
            .map_err(|reason| {
                EngineError::InvalidArgument(format!("structured output is not possible with this tokenizer: {reason}"))
            })?;
        let grammar = Arc::new(Grammar::compile(factory, outputs)?);
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        compiled.push_back((outputs.clone(), Arc::clone(&grammar)));
        if compiled.len() > KEPT {
            compiled.pop_front();
        }
        Ok(grammar)
    }

    fn known(&self, outputs: &StructuredOutputs) -> Option<Arc<Grammar>> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let place = compiled.iter().position(|(words, _)| words == outputs)?;
        let found = compiled.remove(place)?;
        let grammar = Arc::clone(&found.1);
        compiled.push_back(found);
        Some(grammar)
    }
}
