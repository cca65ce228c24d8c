//! One sequence under a grammar: which tokens may come next, and whether it is complete.

use std::sync::Arc;

use llguidance::Matcher;
use toktrie::SimpleVob;

use super::Grammar;

/// Tokens of a word of the mask.
const WORD: usize = 32;

/// The state of one sequence. It sees the tokens that were accepted, in their order.
pub(crate) struct Constraint {
    grammar: Arc<Grammar>,
    /// Made with the first token, so that requests that wait do not have one.
    matcher: Option<Matcher>,
    /// The tokens that may come next, once it is known.
    permitted: Option<SimpleVob>,
    fault: Option<String>,
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint").field("fault", &self.fault).finish_non_exhaustive()
    }
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        Self {
            grammar: Arc::clone(&self.grammar),
            matcher: self.matcher.as_ref().map(Matcher::deep_clone),
            permitted: self.permitted.clone(),
            fault: self.fault.clone(),
        }
    }
}

impl Constraint {
    /// At the beginning of the text.
    pub(crate) fn new(grammar: Arc<Grammar>) -> Self {
        Self { grammar, matcher: None, permitted: None, fault: None }
    }

    fn matcher(&mut self) -> &mut Matcher {
        self.matcher.get_or_insert_with(|| self.grammar.matcher())
    }

    /// Finds out which tokens may come next. Until then, and after a fault, any may.
    pub(crate) fn prepare(&mut self) {
        if self.permitted.is_some() || self.fault.is_some() || self.is_complete() {
            return;
        }
        match self.matcher().compute_mask() {
            Ok(permitted) => self.permitted = Some(permitted),
            Err(error) => self.fail(&error.to_string()),
        }
    }

    /// Whether a token may come next.
    pub(crate) fn permits(&self, token: u32) -> bool {
        self.permitted.as_ref().is_none_or(|permitted| {
            let word = permitted.as_slice().get(token as usize / WORD);
            word.is_some_and(|word| word >> (token as usize % WORD) & 1 == 1)
        })
    }

    /// Takes the logits of tokens that must not come next to minus infinity.
    pub(crate) fn mask(&self, logits: &mut [f32]) {
        let Some(permitted) = &self.permitted else { return };
        let words = permitted.as_slice();
        for (index, logits) in logits.chunks_mut(WORD).enumerate() {
            match words.get(index).copied().unwrap_or(0) {
                0 => logits.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                word => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }

    /// Takes note of a token that was chosen.
    pub(crate) fn accept(&mut self, token: u32) {
        self.permitted = None;
        if self.fault.is_some() || self.is_complete() {
            return;
        }
        if let Err(error) = self.matcher().consume_token(token) {
            self.fail(&error.to_string());
        }
    }

    /// Whether nothing can follow: the sequence has ended.
    pub(crate) fn is_complete(&self) -> bool {
        self.fault.is_none() && self.matcher.as_ref().is_some_and(Matcher::is_stopped)
    }

    /// Why the grammar can be followed no further, if it cannot.
    pub(crate) fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    fn fail(&mut self, reason: &str) {
        self.fault = Some(reason.replace("<non-verbose/>", "").trim().to_owned());
        self.matcher = None;
    }
}
