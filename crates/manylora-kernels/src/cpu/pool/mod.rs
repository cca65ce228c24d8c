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
#![expect(unsafe_code, reason = "lends a borrowed closure to other threads for the length of a region")]

pub(super) mod affinity;
mod signal;
mod team;

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use self::signal::{Signal, calibrated_spins};
use self::team::{LATE, Team};
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

type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The last region that a part was taken of, and the last that it was done in; one cache line each, so that threads do
/// not collide.
#[repr(align(64))]
struct Part {
    claimed: AtomicU32,
    done: AtomicU32,
}

struct State {
    /// Number of the current region.
    region: Signal,
    /// Parts of the current region that are not done.
    remaining: Signal,
    parts: Vec<Part>,
    /// Which part each worker takes, or [`team::AWAY`]; changed between regions only.
    seats: Vec<Signal>,
    /// Parts of the current region.
    count: AtomicU32,
    work: UnsafeCell<*const Work<'static>>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    panicked: AtomicBool,
    spins: Option<u32>,
}

// SAFETY: `work` is written only between regions, by the caller that holds the pool's turn, and read only by threads
// that hold a claim on a part of the current region, which keeps that region from ending.
unsafe impl Send for State {}
// SAFETY: as above.
unsafe impl Sync for State {}

impl State {
    /// Takes `part` of `region`, unless somebody has.
    fn claim(&self, part: usize, region: u32) -> bool {
        let claimed = &self.parts[part].claimed;
        claimed.compare_exchange(region.wrapping_sub(1), region, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Runs a part that was claimed, and keeps its panic for the caller.
    fn execute(&self, work: &Work<'_>, part: usize, region: u32) {
        let count = self.count.load(Ordering::Relaxed) as usize;
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(part, count))) {
            locked(&self.panic).get_or_insert(payload);
            self.panicked.store(true, Ordering::Release);
        }
        self.parts[part].done.store(region, Ordering::Relaxed);
        if self.remaining.value.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.remaining.wake();
        }
    }

    fn worker(&self, seat: &Signal) {
        let mut seen = 0;
        loop {
            seen = self.region.wait_while(seen, self.spins);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let part = seat.value.load(Ordering::Acquire);
            if part == team::AWAY {
                seat.park_while(team::AWAY);
            } else if self.claim(part as usize, seen) {
                // SAFETY: the claim keeps the region, and with it the closure, alive until the part is done.
                let work = unsafe { &**self.work.get() };
                self.execute(work, part as usize, seen);
            }
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A team of threads that runs one region at a time.
pub struct Pool {
    state: Arc<State>,
    turn: Arc<Mutex<()>>,
    /// Who is left out for now; locked by whoever has the turn.
    team: Mutex<Team>,
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
        let state = Arc::new(State {
            region: Signal::new(0),
            remaining: Signal::new(0),
            parts: (0..threads).map(|_| Part { claimed: AtomicU32::new(0), done: AtomicU32::new(0) }).collect(),
            seats: (1..threads).map(|part| Signal::new(part as u32)).collect(),
            count: AtomicU32::new(threads as u32),
            work: UnsafeCell::new(&raw const NOTHING),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            panicked: AtomicBool::new(false),
            spins: options.park.then(calibrated_spins),
        });
        let cores = if options.pin_threads {
            topology::first_of_each_core(&topology::allowed_cpus(), std::path::Path::new("/sys/devices/system/cpu"))
        } else {
            Vec::new()
        };
        let team = Mutex::new(Team::new(threads - 1));
        let mut pool = Self { state, turn, team, workers: Vec::with_capacity(threads - 1), options };
        for part in 1..threads {
            let state = Arc::clone(&pool.state);
            let core = (!cores.is_empty()).then(|| cores[part % cores.len()]);
            let worker = std::thread::Builder::new()
                .name(format!("manylora-{part}"))
                .spawn(move || {
                    if let Some(core) = core {
                        affinity::pin(core);
                    }
                    state.worker(&state.seats[part - 1]);
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
        self.state.parts.len()
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
        self.run_parts(parts, work);
        let state = &*self.state;
        let payload = if state.panicked.swap(false, Ordering::AcqRel) { locked(&state.panic).take() } else { None };
        drop(turn);
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }

    fn run_parts(&self, parts: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        let state = &*self.state;
        #[expect(clippy::transmute_ptr_to_ptr, reason = "nothing else changes the lifetime of a trait object")]
        // SAFETY: only the lifetime is changed. No thread uses the pointer after this function returns: a part is
        // claimed before it is read, and all claimed parts are waited for below.
        let lent = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(&raw const *work) };
        // SAFETY: no region is running (the turn is ours), so nobody reads it.
        unsafe { *state.work.get() = lent };
        // Without parking nobody is ever left out, and no clock is read.
        let start = state.spins.map(|_| Instant::now());
        state.remaining.value.store(parts as u32, Ordering::Relaxed);
        let region = state.region.value.load(Ordering::Relaxed).wrapping_add(1);
        state.parts[0].claimed.store(region, Ordering::Relaxed);
        state.region.value.store(region, Ordering::SeqCst);
        state.region.wake();

        state.execute(work, 0, region);
        for part in 1..parts {
            if state.claim(part, region) {
                state.execute(work, part, region);
            }
        }
        let mut left = state.remaining.value.load(Ordering::Acquire);
        while left != 0 {
            left = match state.remaining.spin_while(left, state.spins) {
                Some(left) => left,
                None => self.park_for_others(parts, region, left, start),
            };
        }
    }

    /// Sleeps until another part is done. Workers whose parts are not done after [`LATE`] are left out from the next region
    /// on.
    #[cold]
    fn park_for_others(&self, parts: usize, region: u32, left: u32, start: Option<Instant>) -> u32 {
        let state = &*self.state;
        let since = Instant::now();
        if let Some(left) = state.remaining.park_while_for(left, LATE) {
            return left;
        }
        let now = Instant::now();
        // Parts of long regions may be uneven without anybody being kept from work.
        let worked = start.map_or(LATE, |start| since - start);
        if now - since >= worked / 2 {
            let mut team = locked(&self.team);
            for (worker, seat) in state.seats.iter().enumerate() {
                let part = seat.value.load(Ordering::Relaxed) as usize;
                if part < parts && state.parts[part].done.load(Ordering::Relaxed) != region {
                    team.leave_out(worker, now);
                }
            }
        }
        state.remaining.park_while(left)
    }

    /// Parts of the next region: this thread's and those of the workers that are not left out.
    fn parts_at_hand(&self) -> usize {
        let state = &*self.state;
        if state.spins.is_none() {
            return self.threads();
        }
        let mut team = locked(&self.team);
        if team.is_settled() || !team.change(Instant::now()) {
            return state.count.load(Ordering::Relaxed) as usize;
        }
        // Parts that nobody took lately count as taken in the last region: before the seats change, so that a worker that
        // sees its new seat sees this too, and cannot take a part of a region that is over.
        let region = state.region.value.load(Ordering::Relaxed);
        state.parts.iter().for_each(|part| part.claimed.store(region, Ordering::Relaxed));
        let mut parts = 1;
        for (worker, seat) in state.seats.iter().enumerate() {
            let away = team.is_away(worker);
            let part = if away { team::AWAY } else { parts };
            parts += u32::from(!away);
            if seat.value.swap(part, Ordering::SeqCst) == team::AWAY && !away {
                seat.wake();
            }
        }
        state.count.store(parts, Ordering::Relaxed);
        parts as usize
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

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Release);
        for seat in &self.state.seats {
            // Whoever is left out wakes up and sees that it is over; the number means nothing any more.
            seat.value.store(0, Ordering::SeqCst);
            seat.wake();
        }
        self.state.region.value.fetch_add(1, Ordering::SeqCst);
        self.state.region.wake();
        for worker in self.workers.drain(..) {
            // A worker cannot panic: parts are caught.
            let _ = worker.join();
        }
    }
}

static NOTHING: fn(usize, usize) = |_, _| {};
