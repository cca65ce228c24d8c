//! Sharing independent units of work among threads, for the operations whose result does not depend on who does what.
#![expect(unsafe_code, reason = "lends one buffer to threads that write disjoint parts of it")]

use std::ops::Range;

use super::pool::Pool;

/// An address that several threads write through, each to parts of its own.
#[derive(Debug)]
pub(super) struct Shared<T>(*mut T);

// SAFETY: whoever dereferences the address answers for disjointness; the address itself can be known to all.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Of the start of a buffer.
    pub(super) const fn new(address: *mut T) -> Self {
        Self(address)
    }

    /// The address.
    pub(super) const fn get(&self) -> *mut T {
        self.0
    }
}

/// Calls `work` for ranges that together are `0..units`. With fewer than two `grain`s of units it is one call on this
/// thread: waiting for others would cost more.
pub(super) fn run_units(pool: &Pool, units: usize, grain: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
    if units == 0 {
        return;
    }
    if units < 2 * grain.max(1) || pool.threads() == 1 {
        work(0..units);
        return;
    }
    pool.run(&|part, parts| {
        let share = Pool::split(units, grain.max(1), part, parts);
        if !share.is_empty() {
            work(share);
        }
    });
}

/// As [`run_units`] for units that are consecutive `width` values of `values`: `work` gets the index of its first unit
/// and its values.
pub(super) fn run_rows(
    pool: &Pool,
    values: &mut [f32],
    width: usize,
    grain: usize,
    work: &(dyn Fn(usize, &mut [f32]) + Sync),
) {
    let units = values.len() / width;
    let shared = Shared::new(values.as_mut_ptr());
    run_units(pool, units, grain, &|share| {
        // SAFETY: shares are disjoint ranges of `0..units`, and `values` has `units * width` values.
        let part =
            unsafe { std::slice::from_raw_parts_mut(shared.get().add(share.start * width), share.len() * width) };
        work(share.start, part);
    });
}
