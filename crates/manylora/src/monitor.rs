//! State that several threads change, and wait for: a lock with what wakes those that wait. A thread that failed while it
//! held the lock left the state as good as it was: nothing here is half changed.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A value under a lock, and those who wait for it to change.
#[derive(Debug, Default)]
pub(crate) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a notice; one may also come for nothing.
    pub(crate) fn wait<'a>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Self::wait`], no longer than `most`.
    pub(crate) fn wait_timeout<'a>(&self, guard: MutexGuard<'a, T>, most: Duration) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(guard, most).unwrap_or_else(PoisonError::into_inner).0
    }

    pub(crate) fn notify_one(&self) {
        self.changed.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.changed.notify_all();
    }
}
