//! The barrier pool: one parallel region after the other, a few microseconds apart, without a lock or a system call.
//!
//! A region has as many parts as the pool has threads. Each worker takes its own part; a part whose worker has not come
//! by when the caller is done (it was parked, or another process has its core) is taken by the caller. Waiting spins
//! for some tens of microseconds and then parks, so that a busy neighbour costs its share and no more.
//!
//! Engines of one process share its pool ([`Pool::shared`]): there is one team per set of options, and all teams take
//! turns, a region at a time, so that two engines never have more threads at work than the larger of them asked for.
//! Usually all engines ask for the same and there is one team. Engines that ask for different numbers of threads get
//! teams of their own rather than a part of one that grew: a region must reach exactly the threads that it is for by
//! one store to one cache line, and threads that it is not for would be woken, or spin, for nothing. The team that is
//! not at work is parked and costs a stack each. A single thread needs no team and no turn: it runs beside the others.
#![expect(unsafe_code, reason = "lends a borrowed closure to other threads for the length of a region")]

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::topology;
use crate::error::KernelError;

/// How long a thread spins before it parks.
const SPIN: Duration = Duration::from_micros(50);

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

/// What threads wait for: its value differs from one they have seen.
#[repr(align(64))]
struct Signal {
    value: AtomicU32,
    sleepers: AtomicU32,
    #[cfg(not(target_os = "linux"))]
    gate: (Mutex<()>, std::sync::Condvar),
}

impl Signal {
    const fn new() -> Self {
        Self {
            value: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            #[cfg(not(target_os = "linux"))]
            gate: (Mutex::new(()), std::sync::Condvar::new()),
        }
    }

    /// Waits until the value is not `seen`, and returns it.
    fn wait_while(&self, seen: u32, spins: Option<u32>) -> u32 {
        let mut left = spins;
        loop {
            let value = self.value.load(Ordering::Acquire);
            if value != seen {
                return value;
            }
            match &mut left {
                Some(0) => return self.park_while(seen),
                Some(count) => *count -= 1,
                None => {}
            }
            std::hint::spin_loop();
        }
    }

    #[cold]
    fn park_while(&self, seen: u32) -> u32 {
        // Sequentially consistent on both sides: either the sleeper sees the new value or the waker sees the sleeper.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let value = loop {
            let value = self.value.load(Ordering::SeqCst);
            if value != seen {
                break value;
            }
            self.sleep(seen);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        value
    }

    /// Wakes the sleepers, if there are any, after the value was changed (sequentially consistent).
    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            self.wake_sleepers();
        }
    }

    #[cfg(target_os = "linux")]
    fn sleep(&self, seen: u32) {
        // SAFETY: the word outlives the call; the kernel sleeps only while it equals `seen`.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.value.as_ptr(),
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                seen,
                std::ptr::null::<libc::timespec>(),
            );
        }
    }

    #[cfg(target_os = "linux")]
    #[cold]
    fn wake_sleepers(&self) {
        // SAFETY: the word outlives the call.
        unsafe {
            libc::syscall(libc::SYS_futex, self.value.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn sleep(&self, seen: u32) {
        let guard = locked(&self.gate.0);
        if self.value.load(Ordering::SeqCst) == seen {
            drop(self.gate.1.wait(guard).unwrap_or_else(PoisonError::into_inner));
        }
    }

    #[cfg(not(target_os = "linux"))]
    #[cold]
    fn wake_sleepers(&self) {
        drop(locked(&self.gate.0));
        self.gate.1.notify_all();
    }
}

/// The number of the last region whose part was taken; one cache line each, so that claims do not collide.
#[repr(align(64))]
struct Claim(AtomicU32);

struct State {
    /// Number of the current region.
    region: Signal,
    /// Parts of the current region that workers may still hold.
    remaining: Signal,
    claims: Vec<Claim>,
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
        self.claims[part]
            .0
            .compare_exchange(region.wrapping_sub(1), region, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Runs a part and keeps its panic for the caller.
    fn execute(&self, work: &Work<'_>, part: usize) {
        let threads = self.claims.len();
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(part, threads))) {
            locked(&self.panic).get_or_insert(payload);
            self.panicked.store(true, Ordering::Release);
        }
    }

    fn finish_part(&self) {
        if self.remaining.value.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.remaining.wake();
        }
    }

    fn worker(&self, part: usize) {
        let mut seen = 0;
        loop {
            seen = self.region.wait_while(seen, self.spins);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if self.claim(part, seen) {
                // SAFETY: the claim keeps the region, and with it the closure, alive until `finish_part`.
                let work = unsafe { &**self.work.get() };
                self.execute(work, part);
                self.finish_part();
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
            region: Signal::new(),
            remaining: Signal::new(),
            claims: (0..threads).map(|_| Claim(AtomicU32::new(0))).collect(),
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
        let mut pool = Self { state, turn, workers: Vec::with_capacity(threads - 1), options };
        for part in 1..threads {
            let state = Arc::clone(&pool.state);
            let core = (!cores.is_empty()).then(|| cores[part % cores.len()]);
            let worker = std::thread::Builder::new()
                .name(format!("manylora-{part}"))
                .spawn(move || {
                    if let Some(core) = core {
                        pin(core);
                    }
                    state.worker(part);
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
        self.state.claims.len()
    }

    /// Calls `work(part, threads)` once for every part in `0..threads`, in parallel, and returns when all are done. A
    /// panic of any part is raised here, after all parts have ended. Concurrent callers take turns; `work` must not
    /// call `run`.
    pub fn run(&self, work: &(dyn Fn(usize, usize) + Sync)) {
        let state = &*self.state;
        let threads = self.threads();
        if threads == 1 {
            work(0, 1);
            return;
        }
        let turn = locked(&self.turn);
        #[expect(clippy::transmute_ptr_to_ptr, reason = "nothing else changes the lifetime of a trait object")]
        // SAFETY: only the lifetime is changed. No thread uses the pointer after this function returns: a part is
        // claimed before it is read, and all claimed parts are waited for below.
        let lent = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(&raw const *work) };
        // SAFETY: no region is running (the turn is ours), so nobody reads it.
        unsafe { *state.work.get() = lent };
        state.remaining.value.store(threads as u32, Ordering::Relaxed);
        let region = state.region.value.load(Ordering::Relaxed).wrapping_add(1);
        state.claims[0].0.store(region, Ordering::Relaxed);
        state.region.value.store(region, Ordering::SeqCst);
        state.region.wake();

        state.execute(work, 0);
        state.finish_part();
        for part in 1..threads {
            if state.claim(part, region) {
                state.execute(work, part);
                state.finish_part();
            }
        }
        let mut left = state.remaining.value.load(Ordering::Acquire);
        while left != 0 {
            left = state.remaining.wait_while(left, state.spins);
        }
        let payload = if state.panicked.swap(false, Ordering::AcqRel) { locked(&state.panic).take() } else { None };
        drop(turn);
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
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
        self.state.region.value.fetch_add(1, Ordering::SeqCst);
        self.state.region.wake();
        for worker in self.workers.drain(..) {
            // A worker cannot panic: parts are caught.
            let _ = worker.join();
        }
    }
}

static NOTHING: fn(usize, usize) = |_, _| {};

/// How many spins take [`SPIN`] on this machine (a pause takes 4 to 140 cycles), so that waiting reads no clock.
fn calibrated_spins() -> u32 {
    static CALIBRATED: OnceLock<u32> = OnceLock::new();
    *CALIBRATED.get_or_init(|| {
        const TRIAL: u32 = 2000;
        let signal = Signal::new();
        // The quickest of three: an interruption must not shorten the spin.
        let quickest = (0..3).map(|_| {
            let start = Instant::now();
            for _ in 0..TRIAL {
                std::hint::black_box(signal.value.load(Ordering::Acquire));
                std::hint::spin_loop();
            }
            start.elapsed()
        });
        let nanos = quickest.min().unwrap_or(SPIN).as_nanos().max(1);
        (SPIN.as_nanos() * u128::from(TRIAL) / nanos).clamp(100, 1_000_000) as u32
    })
}

/// The processors in this thread's affinity mask.
#[cfg(target_os = "linux")]
pub(super) fn affinity() -> Option<Vec<usize>> {
    // SAFETY: all-zero is a valid mask.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the mask is ours and as large as said.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut mask) } != 0 {
        return None;
    }
    let limit = 8 * size_of::<libc::cpu_set_t>();
    // SAFETY: every index is within the mask.
    Some((0..limit).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &mask) }).collect())
}

#[cfg(target_os = "linux")]
fn pin(cpu: usize) {
    // SAFETY: all-zero is a valid mask.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the index came from such a mask. Failing to pin is harmless.
    unsafe {
        libc::CPU_SET(cpu, &mut mask);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const mask);
    }
}

#[cfg(not(target_os = "linux"))]
fn pin(_cpu: usize) {}
