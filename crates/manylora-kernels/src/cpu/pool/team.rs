//! Which workers take part in regions: all, but those whose core another process was seen to hold.
//!
//! A worker that kept a region waiting for [`LATE`] lost its core in the middle of its part. That goes on, a time slice
//! here and a time slice there, for as long as the other process is busy, and half of the time nobody gets anything done.
//! So the worker is left out and its part goes to the others, which costs its core and nothing else; after a while it is
//! tried again, and left out for twice as long if it is late soon again.

use std::time::{Duration, Instant};

/// What a seat holds while its worker is left out.
pub(super) const AWAY: u32 = u32::MAX;

/// How long others must have waited for a worker's part: less than a time slice of any scheduler, more than the parts of
/// a region usually differ by.
pub(super) const LATE: Duration = Duration::from_micros(500);

/// How long a worker is left out the first time, and at most.
const FIRST_ABSENCE: Duration = Duration::from_millis(4);
const LONGEST_ABSENCE: Duration = Duration::from_millis(100);

/// Being late after this long back in the team counts as the first time.
const FORGIVEN: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug)]
struct Worker {
    away_until: Option<Instant>,
    back_since: Instant,
    absence: Duration,
}

/// The workers of a pool.
#[derive(Debug)]
pub(super) struct Team {
    workers: Vec<Worker>,
    away: usize,
    /// Somebody was left out since the parts were last given out.
    changed: bool,
}

impl Team {
    pub(super) fn new(workers: usize) -> Self {
        let worker = Worker { away_until: None, back_since: Instant::now(), absence: Duration::ZERO };
        Self { workers: vec![worker; workers], away: 0, changed: false }
    }

    /// Nobody is left out, and nobody is to be.
    pub(super) const fn is_settled(&self) -> bool {
        self.away == 0 && !self.changed
    }

    pub(super) fn is_away(&self, worker: usize) -> bool {
        self.workers[worker].away_until.is_some()
    }

    /// Leaves a worker out for a while from now on.
    pub(super) fn leave_out(&mut self, worker: usize, now: Instant) {
        let worker = &mut self.workers[worker];
        if worker.away_until.is_some() {
            return;
        }
        let soon = worker.absence > Duration::ZERO && now.duration_since(worker.back_since) < FORGIVEN;
        worker.absence = if soon { (worker.absence * 2).min(LONGEST_ABSENCE) } else { FIRST_ABSENCE };
        worker.away_until = Some(now + worker.absence);
        self.away += 1;
        self.changed = true;
    }

    /// Lets those come back whose time is over; true if the team is another than when this was last asked.
    pub(super) fn change(&mut self, now: Instant) -> bool {
        let mut changed = std::mem::take(&mut self.changed);
        for worker in &mut self.workers {
            if worker.away_until.is_some_and(|until| until <= now) {
                worker.away_until = None;
                worker.back_since = now;
                self.away -= 1;
                changed = true;
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_is_late_again_stays_away_longer() {
        let start = Instant::now();
        let mut team = Team::new(2);
        assert!(team.is_settled() && !team.change(start));
        let mut now = start;
        let mut absences = Vec::new();
        for _ in 0..8 {
            team.leave_out(1, now);
            // Being late twice in one region is being late once.
            team.leave_out(1, now);
            assert!(team.change(now) && team.is_away(1) && !team.is_away(0));
            assert!(!team.change(now), "nothing has changed since");
            let left = now;
            while team.is_away(1) {
                now += Duration::from_millis(1);
                team.change(now);
            }
            absences.push((now - left).as_millis());
            now += Duration::from_millis(10);
        }
        assert_eq!(absences, [4, 8, 16, 32, 64, 100, 100, 100]);
        assert!(team.is_settled());
        team.leave_out(1, now + FORGIVEN);
        team.change(now + FORGIVEN + FIRST_ABSENCE);
        assert!(team.is_settled(), "after a good while it counts as the first time");
    }
}
