//! One sequence under a grammar: which tokens may come next, and whether it is complete.

use std::sync::Arc;
use std::time::Duration;

use llguidance::Matcher;
use toktrie::SimpleVob;

use super::{Grammar, watch};

/// Tokens of a word of the mask.
const WORD: usize = 32;
/// What a token may cost in the long run, on the thread that everybody waits for: time that the work has had a processor.
const PER_TOKEN: Duration = Duration::from_millis(15);
/// What may be spent beyond that before the sequence fails.
const BEYOND: Duration = Duration::from_millis(500);

/// Why a grammar can be followed no further.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// It is the grammar's.
    Grammar(String),
    /// The machine had no time for it.
    Machine(String),
}

/// The state of one sequence. It sees the tokens that were accepted, in their order.
pub(crate) struct Constraint {
    grammar: Arc<Grammar>,
    /// Made with the first token, so that requests that wait do not have one.
    matcher: Option<Matcher>,
    /// The tokens that may come next, once it is known.
    permitted: Option<SimpleVob>,
    fault: Option<Fault>,
    /// What was spent beyond [`PER_TOKEN`] and not saved since.
    overspent: Duration,
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
            overspent: self.overspent,
        }
    }
}

impl Constraint {
    /// At the beginning of the text.
    pub(crate) fn new(grammar: Arc<Grammar>) -> Self {
        Self { grammar, matcher: None, permitted: None, fault: None, overspent: Duration::ZERO }
    }

    /// Lets the matcher do something, for as long as one may.
    fn work<T, E: std::fmt::Display>(&mut self, does: impl FnOnce(&mut Matcher) -> Result<T, E>) -> Option<T> {
        let matcher = self.matcher.get_or_insert_with(|| self.grammar.matcher());
        let (done, worked) = self.grammar.watch.within(matcher.cancellation_handle(), || does(matcher));
        self.overspent += worked;
        let fault = match done {
            Ok(done) => return Some(done),
            Err(_) if matcher.is_cancelled() && worked >= watch::LIMIT => {
                Fault::Grammar(format!("what may come next takes more than {} ms to find", watch::LIMIT.as_millis()))
            }
            Err(_) if matcher.is_cancelled() => Fault::Machine(format!(
                "the machine had {} ms in {} s to find what may come next",
                worked.as_millis(),
                watch::LONGEST_WAIT.as_secs()
            )),
            Err(error) => Fault::Grammar(error.to_string().replace("<non-verbose/>", "").trim().to_owned()),
        };
        self.fail(fault);
        None
    }

    /// Whether it is not known which tokens may come next.
    pub(crate) fn is_unprepared(&self) -> bool {
        self.permitted.is_none() && self.fault.is_none() && !self.is_complete()
    }

    /// Finds out which tokens may come next. Until then, and after a fault, any may.
    pub(crate) fn prepare(&mut self) {
        if self.is_unprepared() {
            self.permitted = self.work(Matcher::compute_mask);
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
        self.work(|matcher| matcher.consume_token(token));
        self.overspent = self.overspent.saturating_sub(PER_TOKEN);
        if self.overspent > BEYOND {
            self.fail(Fault::Grammar(format!(
                "what may come next takes more than {} ms to find, time after time",
                PER_TOKEN.as_millis()
            )));
        }
    }

    /// Whether nothing can follow: the sequence has ended.
    pub(crate) fn is_complete(&self) -> bool {
        self.fault.is_none() && self.matcher.as_ref().is_some_and(Matcher::is_stopped)
    }

    /// Why the grammar can be followed no further, if it cannot.
    pub(crate) fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    fn fail(&mut self, fault: Fault) {
        self.fault = Some(fault);
        self.matcher = None;
    }
}
