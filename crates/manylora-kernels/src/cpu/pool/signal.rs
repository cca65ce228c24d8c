//! A word that threads wait on: spinning for a while, then parked.
#![cfg_attr(all(target_os = "linux", not(all(loom, test))), expect(unsafe_code, reason = "parks on a futex"))]

use std::sync::OnceLock;
#[cfg(any(not(target_os = "linux"), all(loom, test)))]
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::sync::{AtomicU32, fence_of_model, spin_loop};
#[cfg(any(not(target_os = "linux"), all(loom, test)))]
use super::sync::{Condvar, Mutex};

/// How long a thread spins before it parks.
pub(super) const SPIN: Duration = Duration::from_micros(50);

/// What threads wait for: its value differs from one they have seen.
#[repr(align(64))]
pub(super) struct Signal {
    pub(super) value: AtomicU32,
    sleepers: AtomicU32,
    #[cfg(any(not(target_os = "linux"), all(loom, test)))]
    gate: (Mutex<()>, Condvar),
}

impl Signal {
    /// With a first value.
    pub(super) fn new(value: u32) -> Self {
        Self {
            value: AtomicU32::new(value),
            sleepers: AtomicU32::new(0),
            #[cfg(any(not(target_os = "linux"), all(loom, test)))]
            gate: (Mutex::new(()), Condvar::new()),
        }
    }

    /// Waits until the value is not `seen`, and returns it: parked once `spins` looks were in vain (None = never).
    pub(super) fn wait_while(&self, seen: u32, spins: Option<u32>) -> u32 {
        self.spin_while(seen, spins).unwrap_or_else(|| self.park_while(seen))
    }

    /// Spins until the value is not `seen`; None if it still is after `spins` looks.
    pub(super) fn spin_while(&self, seen: u32, spins: Option<u32>) -> Option<u32> {
        let mut left = spins;
        loop {
            let value = self.value.load(Ordering::Acquire);
            if value != seen {
                return Some(value);
            }
            match &mut left {
                Some(0) => return None,
                Some(count) => *count -= 1,
                None => {}
            }
            spin_loop();
        }
    }

    /// Sleeps until the value is not `seen`, and returns it.
    pub(super) fn park_while(&self, seen: u32) -> u32 {
        loop {
            if let Some(value) = self.park(seen, None) {
                return value;
            }
        }
    }

    /// Sleeps until the value is not `seen`, but for no longer than about `limit`: then None.
    pub(super) fn park_while_for(&self, seen: u32, limit: Duration) -> Option<u32> {
        self.park(seen, Some(limit))
    }

    #[cold]
    fn park(&self, seen: u32, limit: Option<Duration>) -> Option<u32> {
        let start = Instant::now();
        // Sequentially consistent on both sides: either the sleeper sees the new value or the waker sees the sleeper.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        fence_of_model();
        let result = loop {
            let value = self.value.load(Ordering::SeqCst);
            if value != seen {
                break Some(value);
            }
            let left = limit.map(|limit| limit.saturating_sub(start.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                break None;
            }
            self.sleep(seen, left);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Wakes the sleepers, if there are any, after the value was changed (sequentially consistent).
    pub(super) fn wake(&self) {
        fence_of_model();
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            self.wake_sleepers();
        }
    }

    #[cfg(all(target_os = "linux", not(all(loom, test))))]
    fn sleep(&self, seen: u32, limit: Option<Duration>) {
        let limit = limit.map(|limit| libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
        });
        // SAFETY: the word and the limit outlive the call; the kernel sleeps only while the word equals `seen`.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.value.as_ptr(),
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                seen,
                limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
            );
        }
    }

    #[cfg(all(target_os = "linux", not(all(loom, test))))]
    #[cold]
    fn wake_sleepers(&self) {
        // SAFETY: the word outlives the call.
        unsafe {
            libc::syscall(libc::SYS_futex, self.value.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
        }
    }

    #[cfg(any(not(target_os = "linux"), all(loom, test)))]
    fn sleep(&self, seen: u32, limit: Option<Duration>) {
        let guard = self.gate.0.lock().unwrap_or_else(PoisonError::into_inner);
        if self.value.load(Ordering::SeqCst) == seen {
            // Whoever wakes up looks again: early is as good as late.
            let limit = limit.unwrap_or(Duration::from_secs(1));
            drop(self.gate.1.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner));
        }
    }

    #[cfg(any(not(target_os = "linux"), all(loom, test)))]
    #[cold]
    fn wake_sleepers(&self) {
        drop(self.gate.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.gate.1.notify_all();
    }
}

/// How many spins take [`SPIN`] on this machine (a pause takes 4 to 140 cycles), so that waiting reads no clock.
pub(super) fn calibrated_spins() -> u32 {
    static CALIBRATED: OnceLock<u32> = OnceLock::new();
    *CALIBRATED.get_or_init(|| {
        const TRIAL: u32 = 2000;
        let signal = Signal::new(0);
        // The quickest of three: an interruption must not shorten the spin.
        let quickest = (0..3).map(|_| {
            let start = Instant::now();
            for _ in 0..TRIAL {
                std::hint::black_box(signal.value.load(Ordering::Acquire));
                spin_loop();
            }
            start.elapsed()
        });
        let nanos = quickest.min().unwrap_or(SPIN).as_nanos().max(1);
        (SPIN.as_nanos() * u128::from(TRIAL) / nanos).clamp(100, 1_000_000) as u32
    })
}
