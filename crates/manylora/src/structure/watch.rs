//! An eye on work that may take too long: some grammars are short and ask for seconds per token, on the thread that everybody
//! waits for.
//!
//! What counts is the time that the work has had a processor, so that whether a request succeeds does not depend on what
//! else the machine does. Only if next to nothing of a long time was the work's is it given up for that: then nobody else
//! is to wait for it any longer.
//!
//! One thread per engine, which sleeps while there is nothing to watch. While there is, it wakes once per limit, so that the
//! engine thread seldom has to wake it.

use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;
use manylora_kernels::cpu::ThreadClock;

use crate::monitor::Monitor;

/// The longest that a grammar may work in one go.
pub(super) const LIMIT: Duration = Duration::from_millis(300);
/// The longest that everybody may wait for it, whatever it has worked.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Between two looks at one clock.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// What time some work has taken on its thread.
#[derive(Clone, Copy)]
struct Taken {
    clock: ThreadClock,
    /// What the clock said at the beginning; None where there is no such clock.
    begun: Option<Duration>,
    since: Instant,
}

impl Taken {
    fn nothing() -> Self {
        let clock = ThreadClock::of_this_thread();
        Self { clock, begun: clock.now(), since: Instant::now() }
    }

    /// The time that it has had a processor; where there is no clock for that, the time that has gone by.
    fn time(&self) -> Duration {
        let worked = self.clock.now().zip(self.begun).map(|(now, begun)| now.saturating_sub(begun));
        worked.unwrap_or_else(|| self.since.elapsed())
    }
}

struct Watched {
    number: u64,
    taken: Taken,
    look_at: Instant,
    work: CancellationHandle,
}

#[derive(Default)]
struct State {
    watched: Vec<Watched>,
    next: u64,
    is_asleep: bool,
    has_ended: bool,
}

impl Monitor<State> {
    fn run(&self, longest_wait: Duration) {
        let mut state = self.lock();
        while !state.has_ended {
            let now = Instant::now();
            state.watched.retain_mut(|watched| {
                if watched.look_at > now {
                    return true;
                }
                let left = LIMIT.saturating_sub(watched.taken.time());
                if left.is_zero() || watched.taken.since.elapsed() >= longest_wait {
                    watched.work.cancel();
                    return false;
                }
                watched.look_at = (now + left.max(LEAST_PAUSE)).min(watched.taken.since + longest_wait);
                true
            });
            let Some(next) = state.watched.iter().map(|watched| watched.look_at).min() else {
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
    pub(super) fn start(longest_wait: Duration) -> std::io::Result<Self> {
        let watch = Self::default();
        let shared = Arc::clone(&watch.shared);
        Builder::new().name("manylora-watch".to_owned()).spawn(move || shared.run(longest_wait))?;
        Ok(watch)
    }

    /// Does some work, which is cancelled when it takes too long; and says how long it has worked.
    pub(super) fn within<T>(&self, work: Option<CancellationHandle>, does: impl FnOnce() -> T) -> (T, Duration) {
        let taken = Taken::nothing();
        let Some(work) = work else { return (does(), taken.time()) };
        let number = {
            let mut state = self.shared.lock();
            state.next += 1;
            let number = state.next;
            state.watched.push(Watched { number, taken, look_at: taken.since + LIMIT, work });
            if state.is_asleep {
                self.shared.notify_one();
            }
            number
        };
        let done = does();
        self.shared.lock().watched.retain(|watched| watched.number != number);
        (done, taken.time())
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

    /// Works, or does nothing, until it is cancelled or so much time has gone by; whether it was.
    fn until_cancelled(watch: &Watch, most: Duration, pause: Option<Duration>) -> (bool, Duration) {
        let work = CancellationHandle::default();
        let begun = Instant::now();
        watch.within(Some(work.clone()), || {
            while !work.is_cancelled() && begun.elapsed() < most {
                if let Some(pause) = pause {
                    std::thread::sleep(pause);
                }
            }
            work.is_cancelled()
        })
    }

    #[test]
    fn what_works_too_long_is_cancelled_and_nothing_else() {
        let watch = Watch::start(LONGEST_WAIT).unwrap();
        let quick = CancellationHandle::default();
        for _ in 0..2 {
            assert_eq!(watch.within(Some(quick.clone()), || 7).0, 7);
        }
        let (cancelled, worked) = until_cancelled(&watch, Duration::from_secs(60), None);
        assert!(cancelled && worked >= LIMIT, "{worked:?}");
        assert!(!quick.is_cancelled());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn work_that_has_no_processor_is_not_held_to_the_time_of_others() {
        let watch = Watch::start(LONGEST_WAIT).unwrap();
        let pause = Some(Duration::from_millis(20));
        let (cancelled, worked) = until_cancelled(&watch, LIMIT * 4, pause);
        assert!(!cancelled && worked < LIMIT / 2, "{worked:?}");
        // Unless it is for so long that others must not wait for it.
        let watch = Watch::start(LIMIT * 3).unwrap();
        let (cancelled, worked) = until_cancelled(&watch, Duration::from_secs(60), pause);
        assert!(cancelled && worked < LIMIT, "{worked:?}");
    }
}
