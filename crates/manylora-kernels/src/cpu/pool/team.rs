//! Which workers take part in regions: all, but those whose core another process was seen to hold.
//!
//! A worker that kept a region waiting for [`LATE`] lost its core in the middle of its part. That goes on, a time slice
//! here and a time slice there, for as long as the other process is busy, and half of the time nobody gets anything done.
//! So the worker is left out and its part goes to the others, which costs its core and nothing else; after a while it is
//! tried again, and left out for twice as long if it is late soon again, measured by how long it was away.
//!
//! Work of this process that goes on beside the regions would do the same to them. It borrows a core instead
//! ([`super::Pool::lend_core`]): a worker stands back for it, from a region's end on, and nobody has to be late first.

use std::time::{Duration, Instant};

/// What a seat holds while its worker is left out.
pub(super) const AWAY: u32 = u32::MAX;

/// How long others must have waited for a worker's part: less than a time slice of any scheduler, more than the parts of
/// a region usually differ by.
pub(super) const LATE: Duration = Duration::from_micros(500);

/// How long a worker is left out the first time, and at most.
const FIRST_ABSENCE: Duration = Duration::from_millis(4);
const LONGEST_ABSENCE: Duration = Duration::from_millis(100);

/// Being late after so many times the last absence counts as the first time: a process that comes now and then for a moment
/// is not one that stays.
const FORGIVEN: u32 = 3;

#[derive(Clone, Copy, Debug)]
struct Worker {
    away_until: Option<Instant>,
    back_since: Instant,
    absence: Duration,
}

/// How long a lent core stays lent after it was given back: whoever had it may soon want it again.
const LINGER: Duration = Duration::from_micros(300);

/// No regions are run when none was for so long.
pub(super) const IDLE: Duration = Duration::from_millis(2);

/// The workers of a pool.
#[derive(Debug)]
pub(super) struct Team {
    workers: Vec<Worker>,
    away: usize,
    /// Cores that are lent now, how many stand back for them as the seats were last given, and until when one does that
    /// was given back.
    lent: usize,
    standing_back: usize,
    linger: Option<Instant>,
    /// When seats were last asked for while the team was not settled.
    asked: Option<Instant>,
    /// The last region that a lender saw, and when it first did.
    seen: Option<(u32, Instant)>,
    /// Somebody was left out since the parts were last given out.
    changed: bool,
}

impl Team {
    pub(super) fn new(workers: usize) -> Self {
        let worker = Worker { away_until: None, back_since: Instant::now(), absence: Duration::ZERO };
        Self {
            workers: vec![worker; workers],
            away: 0,
            lent: 0,
            standing_back: 0,
            linger: None,
            asked: None,
            seen: None,
            changed: false,
        }
    }

    /// Nobody is left out, and nobody is to be.
    pub(super) const fn is_settled(&self) -> bool {
        self.away == 0 && !self.changed && self.lent == 0 && self.standing_back == 0
    }

    pub(super) fn is_away(&self, worker: usize) -> bool {
        self.workers[worker].away_until.is_some() || worker >= self.workers.len() - self.standing_back
    }

    /// Lends a core, if fewer are lent than a quarter of all (one always may be), or no regions are run just now. `region`
    /// is the number of the last one.
    pub(super) fn lend(&mut self, region: u32, now: Instant) -> bool {
        let idle = self.is_idle(region, now);
        let may = idle || self.lent < self.workers.len().div_ceil(4).max(1);
        self.lent += usize::from(may);
        may
    }

    /// Whether workers stand back for all cores that are lent (up to a quarter of all).
    pub(super) fn stands_back(&self) -> bool {
        self.lent > 0 && self.standing_back >= self.lent.min(self.workers.len().div_ceil(4))
    }

    /// Whether no region was begun for a while. `region` is the number of the last one.
    pub(super) fn is_idle(&mut self, region: u32, now: Instant) -> bool {
        let since = match self.seen {
            Some((seen, since)) if seen == region => since,
            _ => now,
        };
        self.seen = Some((region, since));
        // A region of one part has no number, but somebody asks for its seats.
        let since = self.asked.map_or(since, |asked| asked.max(since));
        now.duration_since(since) >= IDLE
    }

    /// Takes a lent core back.
    pub(super) fn take_back(&mut self, now: Instant) {
        self.lent -= 1;
        self.linger = Some(now + LINGER);
    }

    /// Leaves a worker out for a while from now on.
    pub(super) fn leave_out(&mut self, worker: usize, now: Instant) {
        let worker = &mut self.workers[worker];
        if worker.away_until.is_some() {
            return;
        }
        let soon = worker.absence > Duration::ZERO && now.duration_since(worker.back_since) < FORGIVEN * worker.absence;
        worker.absence = if soon { (worker.absence * 2).min(LONGEST_ABSENCE) } else { FIRST_ABSENCE };
        worker.away_until = Some(now + worker.absence);
        self.away += 1;
        self.changed = true;
    }

    /// Lets those come back whose time is over; true if the team is another than when this was last asked.
    pub(super) fn change(&mut self, now: Instant) -> bool {
        let mut changed = std::mem::take(&mut self.changed);
        self.asked = Some(now);
        let lingers = self.linger.is_some_and(|until| now < until);
        let least = if lingers { self.standing_back } else { 0 };
        let standing_back = self.lent.max(least).min(self.workers.len().div_ceil(4));
        changed |= std::mem::replace(&mut self.standing_back, standing_back) != standing_back;
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
    fn workers_stand_back_for_cores_that_are_lent() {
        let start = Instant::now();
        let mut team = Team::new(7);
        let away = |team: &Team| (0..7).filter(|&worker| team.is_away(worker)).count();
        assert!(team.lend(0, start) && !team.is_settled() && team.change(start));
        assert!(team.lend(0, start) && !team.lend(0, start), "a quarter");
        assert!(!team.stands_back(), "one of two");
        assert!(team.change(start) && !team.change(start));
        assert!(team.stands_back());
        assert_eq!(away(&team), 2);
        team.take_back(start);
        // Whoever reads a file a piece at a time does not make workers come and go.
        assert!(!team.change(start) && team.lend(0, start) && !team.change(start));
        team.take_back(start);
        team.take_back(start);
        assert!(!team.change(start + LINGER / 2) && !team.is_settled());
        assert!(team.change(start + LINGER) && team.is_settled());
        assert_eq!(away(&team), 0);
        let mut alone = Team::new(1);
        assert!(alone.lend(0, start) && !alone.lend(0, start) && !alone.is_idle(0, start + IDLE / 2));
        assert!(alone.lend(0, start + IDLE) && alone.lend(0, start + IDLE), "nothing else runs");
        assert!(!alone.is_idle(1, start + IDLE) && alone.is_idle(1, start + 2 * IDLE), "a region ran meanwhile");
        assert!(alone.change(start) && alone.is_away(0) && !alone.lend(0, start) && alone.lend(0, start + IDLE));
        alone.leave_out(0, start);
        (0..4).for_each(|_| alone.take_back(start));
        alone.change(start + LINGER);
        assert!(alone.is_away(0), "still left out for another reason");
    }

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
        now += FORGIVEN * LONGEST_ABSENCE;
        for _ in 0..20 {
            team.leave_out(1, now);
            now += FIRST_ABSENCE;
            team.change(now);
            assert!(team.is_settled(), "after a good while it counts as the first time");
            now += FORGIVEN * FIRST_ABSENCE;
        }
    }
}
