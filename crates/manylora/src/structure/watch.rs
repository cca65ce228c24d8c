//! An eye on work that may take too long: some grammars are short and ask for seconds per token, on the thread that everybody
//! waits for.
//!
//! One thread per engine, which sleeps while there is nothing to watch. While there is, it wakes once per limit, so that the
//! engine thread seldom has to wake it.

use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

use crate::monitor::Monitor;

/// The longest that a grammar may take in one go.
pub(super) const LIMIT: Duration = Duration::from_millis(300);

#[derive(Default)]
struct State {
    /// What is done now, by a number, and when it is cancelled.
    watched: Vec<(u64, Instant, CancellationHandle)>,
    next: u64,
    is_asleep: bool,
    has_ended: bool,
}

impl Monitor<State> {
    fn run(&self) {
        let mut state = self.lock();
        while !state.has_ended {
            let now = Instant::now();
            state.watched.retain(|(_, until, work)| {
                let may_go_on = *until > now;
                if !may_go_on {
                    work.cancel();
                }
                may_go_on
            });
            let Some(next) = state.watched.iter().map(|(_, until, _)| *until).min() else {
                state.is_asleep = true;
                state = self.wait(state);
                state.is_asleep = false;
                continue;
            };
            state = self.wait_timeout(state, next.saturating_duration_since(now));
        }
    }
}

/// Cancels what takes longer than [`LIMIT`].
#[derive(Default)]
pub(super) struct Watch {
    shared: Arc<Monitor<State>>,
}

impl Watch {
    /// Starts its thread.
    pub(super) fn start() -> std::io::Result<Self> {
        let watch = Self::default();
        let shared = Arc::clone(&watch.shared);
        Builder::new().name("manylora-watch".to_owned()).spawn(move || shared.run())?;
        Ok(watch)
    }

    /// Does some work, which is cancelled when it takes too long.
    pub(super) fn within<T>(&self, work: Option<CancellationHandle>, does: impl FnOnce() -> T) -> T {
        let Some(work) = work else { return does() };
        let number = {
            let mut state = self.shared.lock();
            state.next += 1;
            let number = state.next;
            state.watched.push((number, Instant::now() + LIMIT, work));
            if state.is_asleep {
                self.shared.notify_one();
            }
            number
        };
        let done = does();
        self.shared.lock().watched.retain(|(other, ..)| *other != number);
        done
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.lock().has_ended = true;
        self.shared.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_too_long_is_cancelled_and_nothing_else() {
        let watch = Watch::start().unwrap();
        let (quick, slow) = (CancellationHandle::default(), CancellationHandle::default());
        for _ in 0..2 {
            assert_eq!(watch.within(Some(quick.clone()), || 7), 7);
        }
        watch.within(Some(slow.clone()), || {
            let begun = Instant::now();
            while !slow.is_cancelled() {
                assert!(begun.elapsed() < Duration::from_secs(20), "it is not cancelled");
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(begun.elapsed() >= LIMIT / 2);
        });
        assert!(!quick.is_cancelled());
    }
}
