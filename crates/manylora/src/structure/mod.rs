//! Structured output: which tokens may come next, so that an answer is what its request says - JSON of a schema, a regular
//! expression, one of some choices, the language of a grammar.
//!
//! A grammar is compiled when a request is submitted ([`Structure::compile`]), where everything that is wrong with it is
//! found. Each sequence then has a [`Constraint`] of its own, which sees the tokens that were chosen and nothing else: the
//! answer is the same whatever shares its batch, and after a preemption.
//!
//! Words come from strangers, and short ones can mean deep recursion or seconds of work per token. `compiler` has the stack
//! and the limits for the first, `watch` and the [`Constraint`]'s own account those for the second: a sequence whose grammar
//! takes too long fails alone.
//!
//! Reading order: this file, `vocabulary` (tokens as a trie of bytes), `compiler` (where and how long grammars are compiled),
//! `grammar` (from a request's words to a grammar), [`lark`], `schema` and `ebnf` (how grammars are written), `constraint` (one
//! sequence), `watch`.

mod compiler;
mod constraint;
mod ebnf;
mod grammar;
pub mod lark;
mod schema;
mod vocabulary;
mod watch;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use llguidance::ParserFactory;
use manylora_core::sampling::StructuredOutputs;
use manylora_model::tokenizer::Tokenizer;

use compiler::Compiler;
use watch::Watch;

pub(crate) use constraint::{Constraint, Fault};
pub(crate) use grammar::Grammar;

use crate::error::EngineError;

/// What all grammars of an engine need.
struct Tools {
    factory: ParserFactory,
    watch: Arc<Watch>,
}

/// What grammars need to know of a model.
struct Model {
    vocab_size: usize,
    end_tokens: Vec<u32>,
    tools: OnceLock<Result<Tools, String>>,
}

/// Compiles grammars for one model, and keeps them. What it needs of the vocabulary is made for the first request that has
/// one, or before ([`Self::prepare`]).
pub(crate) struct Structure {
    model: Arc<Model>,
    compiler: Compiler,
}

impl Structure {
    /// `vocab_size` is the length of a row of logits.
    pub(crate) fn new(vocab_size: usize, end_tokens: &[u32]) -> Self {
        let model = Model { vocab_size, end_tokens: end_tokens.to_vec(), tools: OnceLock::new() };
        Self { model: Arc::new(model), compiler: Compiler::default() }
    }

    /// Makes what grammars need of the vocabulary, unless it is there.
    pub(crate) fn prepare(&self, tokenizer: &Tokenizer) {
        if self.model.tools.get().is_some() {
            return;
        }
        let begun = Instant::now();
        let tools = self.model.make_tools(tokenizer);
        let seconds = begun.elapsed().as_secs_f64();
        // A request that came meanwhile has not waited, and made them for itself.
        if self.model.tools.set(tools).is_ok() {
            tracing::debug!("the vocabulary was made ready for structured outputs in {seconds:.2} s");
        }
    }

    /// The grammar that a request's words stand for.
    pub(crate) fn compile(
        &self,
        tokenizer: &Tokenizer,
        outputs: &StructuredOutputs,
    ) -> Result<Arc<Grammar>, EngineError> {
        outputs.constraint().map_err(|error| EngineError::StructuredOutputs(error.to_string()))?;
        let preface =
            grammar::preface(outputs, |mark| tokenizer.id_of(mark).is_some_and(|token| tokenizer.is_special(token)));
        // Where the tools are not there yet they are made as part of it, so that this has the same bounds: how long a request
        // waits, and how many do.
        let (model, tokenizer, words) = (Arc::clone(&self.model), tokenizer.clone(), outputs.clone());
        self.compiler.compile(outputs, move || {
            let tools = model
                .tools
                .get_or_init(|| model.make_tools(&tokenizer))
                .as_ref()
                .map_err(|reason| format!("structured output is not possible with this tokenizer: {reason}"))?;
            Grammar::compile(tools, &words, preface).map(Arc::new)
        })
    }
}

impl Model {
    fn make_tools(&self, tokenizer: &Tokenizer) -> Result<Tools, String> {
        let factory = vocabulary::factory(tokenizer, self.vocab_size, &self.end_tokens)?;
        let watch =
            Watch::start(watch::LONGEST_WAIT).map_err(|error| format!("no thread could be started: {error}"))?;
        Ok(Tools { factory, watch: Arc::new(watch) })
    }
}
