//! The barrier pool: one parallel region after the other, a few microseconds apart, without a lock or a system call.
//!
//! A region has a part for each thread that is at hand. Each worker takes its own part; a part whose worker has not come
//! by when the caller is done (it was parked, or another process has its core) is taken by the caller. Waiting spins
//! for some tens of microseconds and then parks. A part that its worker has begun cannot be taken over: if another
//! process gets the worker's core in the middle of one, everybody waits until the core comes back. A worker that this
//! happened to is left out for a while ([`team`]), so that a busy neighbour costs its core and no more.
//!
//! Engines of one process share its pool ([`Pool::shared`]): there is one team per set of options, and all teams take
//! turns, a region at a time, so that two engines never have more threads at work than the larger of them asked for.
//! Usually all engines ask for the same and there is one team. Engines that ask for different numbers of threads get
//! teams of their own rather than a part of one that grew: a region must reach exactly the threads that it is for by
//! one store to one cache line, and threads that it is not for would be woken, or spin, for nothing. The team that is
//! not at work is parked and costs a stack each. A single thread needs no team and no turn: it runs beside the others.

pub(super) mod affinity;
#[cfg(all(loom, test))]
mod loom_tests;
mod signal;
mod state;
mod sync;
mod team;

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

pub use self::affinity::take_what_is_left;
use self::signal::calibrated_spins;
use self::state::State;
use self::team::{IDLE, LATE, Team};
use super::topology;
use crate::error::KernelError;

/// What a pool is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Number of threads, the caller of [`Pool::run`] included; None = [`topology::default_threads`].
    pub threads: Option<usize>,
    /// Bind each worker to one core.
    pub pin_threads: bool,
    /// Park after spinning. Off, threads spin for ever: no system calls at all.
    pub park: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { threads: None, pin_threads: false, park: true }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A team of threads that runs one region at a time.
pub struct Pool {
    state: Arc<State>,
    turn: Arc<Mutex<()>>,
    /// Who is left out for now.
    team: Mutex<Team>,
    /// A lent core was given back, or left.
    moved: Condvar,
    workers: Vec<JoinHandle<()>>,
    options: PoolOptions,
}

impl Pool {
    /// A pool of its own. See [`Self::shared`] for the one that engines use.
    pub fn new(options: PoolOptions) -> Result<Self, KernelError> {
        Self::taking_turns(options, Arc::default())
    }

    /// A team that runs its regions while it holds `turn`.
    fn taking_turns(options: PoolOptions, turn: Arc<Mutex<()>>) -> Result<Self, KernelError> {
        let threads = options.threads.unwrap_or_else(topology::default_threads).max(1);
        let state = Arc::new(State::new(threads, options.park.then(calibrated_spins)));
        let cores = if options.pin_threads {
            topology::first_of_each_core(&topology::allowed_cpus(), std::path::Path::new("/sys/devices/system/cpu"))
        } else {
            Vec::new()
        };
        let team = Mutex::new(Team::new(threads - 1));
        let (moved, workers) = (Condvar::new(), Vec::with_capacity(threads - 1));
        let mut pool = Self { state, turn, team, moved, workers, options };
        for part in 1..threads {
            let state = Arc::clone(&pool.state);
            let core = (!cores.is_empty()).then(|| cores[part % cores.len()]);
            let worker = std::thread::Builder::new()
                .name(format!("manylora-{part}"))
                .spawn(move || {
                    if let Some(core) = core {
                        affinity::pin(core);
                    }
                    state.work(part - 1);
                })
                // Dropping the pool joins those that did start.
                .map_err(|error| KernelError::Source(format!("cannot start worker thread `{part}`: {error}")))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// The process's pool: engines that ask for the same options share a team, and all teams take turns.
    pub fn shared(options: PoolOptions) -> Result<Arc<Self>, KernelError> {
        static POOLS: Mutex<Vec<Weak<Pool>>> = Mutex::new(Vec::new());
        static TURN: OnceLock<Arc<Mutex<()>>> = OnceLock::new();
        let threads = options.threads.unwrap_or_else(topology::default_threads).max(1);
        let options = PoolOptions { threads: Some(threads), ..options };
        let mut pools = locked(&POOLS);
        pools.retain(|pool| pool.strong_count() > 0);
        if let Some(pool) = pools.iter().filter_map(Weak::upgrade).find(|pool| pool.options == options) {
            return Ok(pool);
        }
        let pool = Arc::new(Self::taking_turns(options, Arc::clone(TURN.get_or_init(Arc::default)))?);
        pools.push(Arc::downgrade(&pool));
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.state.threads()
    }

    /// Calls `work(part, parts)` once for every part in `0..parts`, in parallel, and returns when all are done; `parts`
    /// is [`Self::threads`] or less. A panic of any part is raised here, after all parts have ended. Concurrent callers
    /// take turns; `work` must not call `run`.
    pub fn run(&self, work: &(dyn Fn(usize, usize) + Sync)) {
        if self.threads() == 1 {
            work(0, 1);
            return;
        }
        let turn = locked(&self.turn);
        let parts = self.parts_at_hand();
        if parts == 1 {
            // Nothing is lent to anybody: a panic may leave by itself.
            work(0, 1);
            return;
        }
        // Without parking nobody is ever left out, and no clock is read.
        let start = self.state.spins.map(|_| Instant::now());
        self.state.run_parts(parts, work, |region, left| self.park_for_others(parts, region, left, start));
        let payload = self.state.take_panic();
        drop(turn);
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }

    /// Takes a core from the regions that run meanwhile, for work on the calling thread, until what is returned is dropped.
    /// While regions are run at most a quarter of the cores are lent at once, and always one; whoever wants more waits here,
    /// and everybody until the region that runs now is over: its parts need all cores. A pool of one thread, or one that
    /// never parks, has none to lend.
    pub fn lend_core(&self) -> CoreLoan<'_> {
        if self.threads() == 1 || self.state.spins.is_none() {
            return CoreLoan { pool: None };
        }
        let wait = |team| self.moved.wait_timeout(team, IDLE).unwrap_or_else(PoisonError::into_inner).0;
        let last_region = || self.state.last_region();
        let mut team = locked(&self.team);
        while !team.lend(last_region(), Instant::now()) {
            team = wait(team);
        }
        // When no region has begun for a while, one that began before may still be running.
        while !team.stands_back() && (!team.is_idle(last_region(), Instant::now()) || self.turn.try_lock().is_err()) {
            team = wait(team);
        }
        drop(team);
        CoreLoan { pool: Some(self) }
    }

    /// Sleeps until another part is done. Workers whose parts are not done after [`LATE`] are left out from the next region
    /// on.
    #[cold]
    fn park_for_others(&self, parts: usize, region: u32, left: u32, start: Option<Instant>) {
        let state = &*self.state;
        let since = Instant::now();
        if state.remaining.park_while_for(left, LATE).is_some() {
            return;
        }
        let now = Instant::now();
        // Parts of long regions may be uneven without anybody being kept from work.
        let worked = start.map_or(LATE, |start| since - start);
        if now - since >= worked / 2 {
            let mut team = locked(&self.team);
            state.late_workers(parts, region).for_each(|worker| team.leave_out(worker, now));
        }
        state.remaining.park_while(left);
    }

    /// Parts of the next region: this thread's and those of the workers that are not left out.
    fn parts_at_hand(&self) -> usize {
        let state = &*self.state;
        if state.spins.is_none() {
            return self.threads();
        }
        let mut team = locked(&self.team);
        if team.is_settled() || !team.change(Instant::now()) {
            return state.parts_at_hand();
        }
        let parts = state.give_seats(|worker| team.is_away(worker));
        if team.stands_back() {
            self.moved.notify_all();
        }
        parts
    }

    /// The contiguous share of `0..total` that belongs to `part` of `parts`, in whole multiples of `granularity` (the
    /// last one may be shorter). Shares differ by at most one multiple.
    pub fn split(total: usize, granularity: usize, part: usize, parts: usize) -> Range<usize> {
        let units = total.div_ceil(granularity);
        let (each, extra) = (units / parts, units % parts);
        let first = part * each + part.min(extra);
        let last = first + each + usize::from(part < extra);
        (first * granularity).min(total)..(last * granularity).min(total)
    }
}

/// A core that regions leave alone.
#[must_use]
pub struct CoreLoan<'p> {
    pool: Option<&'p Pool>,
}

impl Drop for CoreLoan<'_> {
    fn drop(&mut self) {
        if let Some(pool) = self.pool {
            locked(&pool.team).take_back(Instant::now());
            pool.moved.notify_all();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.end();
        for worker in self.workers.drain(..) {
            // A worker cannot panic: parts are caught.
            let _ = worker.join();
        }
    }
}
