//! Compiles grammars on threads of their own, and keeps them.
//!
//! What compiles a grammar goes down as deep as the grammar does, so its thread has a stack for the deepest that words of
//! [`LONGEST_WORDS`] can say. It may take long, so few run at once, and whoever submits a request waits for [`PATIENCE`].

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

use manylora_core::sampling::StructuredOutputs;

use super::Grammar;
use crate::error::EngineError;
use crate::monitor::Monitor;

/// Bytes of a grammar's words.
pub(super) const LONGEST_WORDS: usize = 128 << 10;
/// A chain of as many rules as fit the words takes less than half of it.
const STACK: usize = 256 << 20;
/// Grammars that are compiled at the same time.
const AT_ONCE: usize = 2;
/// Requests that wait for one.
const MOST_WAITING: usize = 64;
/// How long they wait.
const PATIENCE: Duration = Duration::from_secs(10);
/// Compiled grammars that are kept for further requests with the same words, and the bytes of their words.
const KEPT: usize = 64;
const KEPT_BYTES: usize = 512 << 10;

type Outcome = Result<Arc<Grammar>, String>;

/// A grammar that is being compiled.
struct Flight {
    words: StructuredOutputs,
    outcome: OnceLock<Outcome>,
}

#[derive(Default)]
struct State {
    /// The latest last.
    kept: VecDeque<(StructuredOutputs, Arc<Grammar>)>,
    flights: Vec<Arc<Flight>>,
    waiting: usize,
}

impl State {
    fn known(&mut self, words: &StructuredOutputs) -> Option<Arc<Grammar>> {
        let place = self.kept.iter().position(|(known, _)| known == words)?;
        let found = self.kept.remove(place)?;
        let grammar = Arc::clone(&found.1);
        self.kept.push_back(found);
        Some(grammar)
    }

    fn keep(&mut self, words: StructuredOutputs, grammar: Arc<Grammar>) {
        self.kept.push_back((words, grammar));
        let mut bytes: usize = self.kept.iter().map(|(words, _)| bytes(words)).sum();
        while self.kept.len() > KEPT || bytes > KEPT_BYTES {
            let Some((words, _)) = self.kept.pop_front() else { break };
            bytes -= self::bytes(&words);
        }
    }
}

impl Monitor<State> {
    /// Tells everybody what has come of a flight.
    fn land(&self, flight: &Arc<Flight>, outcome: Outcome) {
        let mut state = self.lock();
        state.flights.retain(|other| !Arc::ptr_eq(other, flight));
        if let Ok(grammar) = &outcome {
            state.keep(flight.words.clone(), Arc::clone(grammar));
        }
        // Nobody else sets it.
        let _ = flight.outcome.set(outcome);
        self.notify_all();
    }
}

/// Compiles grammars, and keeps them.
pub(super) struct Compiler {
    shared: Arc<Monitor<State>>,
    patience: Duration,
}

impl Default for Compiler {
    fn default() -> Self {
        Self { shared: Arc::default(), patience: PATIENCE }
    }
}

impl Compiler {
    /// The grammar of these words: known, or made by `compile` on a thread of its own. Several calls with the same words at
    /// once are one.
    pub(super) fn compile(
        &self,
        words: &StructuredOutputs,
        compile: impl FnOnce() -> Outcome + Send + 'static,
    ) -> Result<Arc<Grammar>, EngineError> {
        let mut state = self.shared.lock();
        if let Some(known) = state.known(words) {
            return Ok(known);
        }
        let size = bytes(words);
        if size > LONGEST_WORDS {
            return refuse(format!(
                "structured_outputs has `{size}` bytes, and what has more than `{LONGEST_WORDS}` is not compiled; say it in fewer words"
            ));
        }
        if state.waiting >= MOST_WAITING {
            return Err(EngineError::Busy(format!(
                "`{MOST_WAITING}` requests wait for their structured outputs to be compiled; try again in a moment"
            )));
        }
        state.waiting += 1;
        let (mut state, compiled) = self.wait(state, words, compile);
        state.waiting -= 1;
        drop(state);
        compiled.and_then(|outcome| outcome.or_else(refuse))
    }

    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        words: &StructuredOutputs,
        compile: impl FnOnce() -> Outcome + Send + 'static,
    ) -> (MutexGuard<'a, State>, Result<Outcome, EngineError>) {
        let until = Instant::now() + self.patience;
        let mut compile = Some(compile);
        let mut joined: Option<Arc<Flight>> = None;
        loop {
            if let Some(outcome) = joined.as_ref().and_then(|flight| flight.outcome.get()) {
                return (state, Ok(outcome.clone()));
            }
            if joined.is_none() {
                if let Some(known) = state.known(words) {
                    return (state, Ok(Ok(known)));
                }
                joined = state.flights.iter().find(|flight| flight.words == *words).cloned();
                if joined.is_none()
                    && state.flights.len() < AT_ONCE
                    && let Some(compile) = compile.take()
                {
                    match self.start(words, compile) {
                        Ok(flight) => {
                            state.flights.push(Arc::clone(&flight));
                            joined = Some(flight);
                        }
                        Err(error) => return (state, Err(error)),
                    }
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let seconds = self.patience.as_secs();
                let message = if joined.is_some() {
                    format!("compiling structured_outputs takes more than {seconds} s; simplify it, or try again later")
                } else {
                    format!(
                        "structured_outputs has waited more than {seconds} s for others to be compiled; try again in a moment"
                    )
                };
                // How much of the time was its own is up to what else the machine does.
                return (state, Err(EngineError::Busy(message)));
            }
            state = self.shared.wait_timeout(state, left);
        }
    }

    /// Starts to compile; the caller holds the state until the flight is in it.
    fn start(
        &self,
        words: &StructuredOutputs,
        compile: impl FnOnce() -> Outcome + Send + 'static,
    ) -> Result<Arc<Flight>, EngineError> {
        let flight = Arc::new(Flight { words: words.clone(), outcome: OnceLock::new() });
        let (shared, flown) = (Arc::clone(&self.shared), Arc::clone(&flight));
        let body = move || {
            // A grammar that the library does not bear must not keep others waiting.
            let outcome = catch_unwind(AssertUnwindSafe(compile)).unwrap_or_else(|_| {
                Err("structured_outputs cannot be used: compiling it failed unexpectedly; please report it".to_owned())
            });
            shared.land(&flown, outcome);
        };
        match Builder::new().name("manylora-grammar".to_owned()).stack_size(STACK).spawn(body) {
            Ok(_) => Ok(flight),
            Err(error) => Err(EngineError::Busy(format!(
                "structured_outputs cannot be compiled now: no thread could be started: {error}; try again in a moment"
            ))),
        }
    }
}

fn refuse<T>(message: String) -> Result<T, EngineError> {
    Err(EngineError::StructuredOutputs(message))
}

/// Bytes of what a request says.
fn bytes(words: &StructuredOutputs) -> usize {
    let StructuredOutputs { json, regex, choice, grammar, whitespace_pattern, after, opening, .. } = words;
    let texts = [json, regex, grammar, whitespace_pattern, after, opening];
    let choices = choice.iter().flatten().map(|choice| choice.len() + 1).sum::<usize>();
    texts.into_iter().flatten().map(String::len).sum::<usize>() + choices
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn words(text: &str) -> StructuredOutputs {
        StructuredOutputs { regex: Some(text.to_owned()), ..StructuredOutputs::default() }
    }

    #[test]
    fn the_same_words_at_once_are_compiled_once() {
        let (compiler, calls) = (Compiler::default(), Arc::new(AtomicUsize::new(0)));
        let all = Arc::new(Barrier::new(8));
        let compile = |text: &str| {
            let calls = Arc::clone(&calls);
            compiler.compile(&words(text), move || {
                calls.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(300));
                Err("no such thing".to_owned())
            })
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    all.wait();
                    let refusal = compile("a").err().expect("refused").to_string();
                    assert_eq!(refusal, "no such thing");
                });
            }
        });
        // What was refused is not kept.
        assert!(compile("a").is_err());
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn few_are_compiled_at_once_and_a_panic_is_an_error() {
        let (compiler, now) = (Compiler::default(), Arc::new(AtomicUsize::new(0)));
        std::thread::scope(|scope| {
            for index in 0..6 {
                let (compiler, now) = (&compiler, Arc::clone(&now));
                scope.spawn(move || {
                    let told = compiler.compile(&words(&index.to_string()), move || {
                        assert!(now.fetch_add(1, Ordering::SeqCst) < AT_ONCE, "too many at once");
                        std::thread::sleep(Duration::from_millis(50));
                        now.fetch_sub(1, Ordering::SeqCst);
                        Err("done".to_owned())
                    });
                    assert_eq!(told.err().expect("refused").to_string(), "done");
                });
            }
        });
        let told = compiler.compile(&words("x"), || panic!("a fault of the library"));
        assert!(told.err().expect("refused").to_string().contains("failed unexpectedly"));
        let told = compiler.compile(&words("x"), || Err("done".to_owned()));
        assert_eq!(told.err().expect("refused").to_string(), "done");
    }

    #[test]
    fn who_would_wait_behind_many_is_sent_away_for_a_moment() {
        let compiler = Compiler::default();
        compiler.shared.lock().waiting = MOST_WAITING;
        let told = compiler.compile(&words("a"), || unreachable!("it is not compiled"));
        assert!(matches!(told, Err(EngineError::Busy(_))));
        compiler.shared.lock().waiting -= 1;
        let told = compiler.compile(&words("a"), || Err("no such thing".to_owned()));
        assert!(matches!(told, Err(EngineError::StructuredOutputs(_))));
    }

    #[test]
    fn what_takes_longer_than_its_requests_wait_may_be_asked_for_again() {
        let compiler = Compiler { patience: Duration::from_millis(100), ..Compiler::default() };
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let refused = compiler.compile(&words("x"), move || {
            let _ = wait.recv();
            Err("done".to_owned())
        });
        assert!(matches!(refused, Err(EngineError::Busy(_))));
        // It goes on, and whoever asks again waits for the same.
        assert_eq!(compiler.shared.lock().flights.len(), 1);
        drop(go);
        let told = compiler.compile(&words("x"), || Err("anew".to_owned()));
        assert!(told.is_err());
    }

    #[test]
    fn too_many_words_are_refused_with_the_numbers() {
        let long = words(&"a".repeat(LONGEST_WORDS + 1));
        let told = Compiler::default().compile(&long, || unreachable!("it is not compiled"));
        let told = told.err().expect("refused").to_string();
        assert!(told.contains("`131073` bytes") && told.contains("`131072`"), "{told}");
    }
}
