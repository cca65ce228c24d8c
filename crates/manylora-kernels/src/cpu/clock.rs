//! The time that one thread has had a processor: what work costs, whatever else the machine does meanwhile.
#![expect(unsafe_code, reason = "reads the clock of a thread")]

use std::time::Duration;

/// A thread's clock, which all threads of the process can read.
#[derive(Clone, Copy, Debug)]
pub struct ThreadClock {
    #[cfg(target_os = "linux")]
    id: Option<libc::clockid_t>,
}

#[cfg(target_os = "linux")]
impl ThreadClock {
    /// The calling thread's.
    pub fn of_this_thread() -> Self {
        let mut id = 0;
        // SAFETY: this thread lives, and the id is ours to write.
        let found = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut id) };
        Self { id: (found == 0).then_some(id) }
    }

    /// None once the thread has ended.
    pub fn now(self) -> Option<Duration> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the time is ours to write; the id of a thread that has ended is an error.
        let read = unsafe { libc::clock_gettime(self.id?, &raw mut time) };
        (read == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}

#[cfg(not(target_os = "linux"))]
impl ThreadClock {
    /// The calling thread's.
    pub fn of_this_thread() -> Self {
        Self {}
    }

    /// None: here no thread can read another one's.
    pub fn now(self) -> Option<Duration> {
        None
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    #[test]
    fn it_goes_on_while_the_thread_works_and_for_all_to_see() {
        let clock = ThreadClock::of_this_thread();
        let before = clock.now().expect("this thread lives");
        std::thread::sleep(Duration::from_millis(100));
        let slept = clock.now().expect("it lives").saturating_sub(before);
        assert!(slept < Duration::from_millis(50), "{slept:?}");
        let (told, tell) = channel();
        let (stop, stopped) = channel::<()>();
        let busy = std::thread::spawn(move || {
            told.send(ThreadClock::of_this_thread()).expect("somebody listens");
            while stopped.try_recv().is_err() {}
        });
        let other = tell.recv().expect("told");
        let begun = Instant::now();
        while other.now().expect("it lives") < Duration::from_millis(50) {
            assert!(begun.elapsed() < Duration::from_secs(20), "it stands still");
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.send(()).expect("it listens");
        busy.join().expect("no panic");
        // It has gone some time after it was waited for.
        let ended = Instant::now();
        while other.now().is_some() {
            assert!(ended.elapsed() < Duration::from_secs(20), "it goes on for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
