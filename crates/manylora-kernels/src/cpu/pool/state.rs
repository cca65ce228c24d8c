//! What the threads of a pool share, and the protocol between them: who opens a region, who takes which part, and how
//! everybody learns that it is over. Nothing here starts a thread or reads a clock, so that a model checker can run it.
#![expect(unsafe_code, reason = "lends a borrowed closure to other threads for the length of a region")]

use std::any::Any;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::locked;
use super::signal::Signal;
use super::sync::{AtomicBool, AtomicU32, UnsafeCell, caught};
use super::team::AWAY;

type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The last region that a part was taken of, and the last that it was done in; one cache line each, so that threads do
/// not collide.
#[repr(align(64))]
struct Part {
    claimed: AtomicU32,
    done: AtomicU32,
}

pub(super) struct State {
    /// Number of the current region.
    region: Signal,
    /// Parts of the current region that are not done.
    pub(super) remaining: Signal,
    parts: Vec<Part>,
    /// Which part each worker takes, or [`AWAY`]; changed between regions only.
    seats: Vec<Signal>,
    /// Parts of the current region.
    count: AtomicU32,
    work: UnsafeCell<*const Work<'static>>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    panicked: AtomicBool,
    /// Looks in vain before a thread parks; None = it never does.
    pub(super) spins: Option<u32>,
}

// SAFETY: `work` is written only between regions, by the caller that holds the pool's turn, and read only by threads
// that hold a claim on a part of the current region, which keeps that region from ending.
unsafe impl Send for State {}
// SAFETY: as above.
unsafe impl Sync for State {}

impl State {
    /// For `threads` threads, the caller of regions included.
    pub(super) fn new(threads: usize, spins: Option<u32>) -> Self {
        Self {
            region: Signal::new(0),
            remaining: Signal::new(0),
            parts: (0..threads).map(|_| Part { claimed: AtomicU32::new(0), done: AtomicU32::new(0) }).collect(),
            seats: (1..threads).map(|part| Signal::new(part as u32)).collect(),
            count: AtomicU32::new(threads as u32),
            work: UnsafeCell::new(&raw const NOTHING),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            panicked: AtomicBool::new(false),
            spins,
        }
    }

    /// Number of threads, the caller of regions included.
    pub(super) fn threads(&self) -> usize {
        self.parts.len()
    }

    /// Number of the region that runs or was the last to.
    pub(super) fn last_region(&self) -> u32 {
        self.region.value.load(Ordering::Relaxed)
    }

    /// Parts that the next region has, as the seats were last given.
    pub(super) fn parts_at_hand(&self) -> usize {
        self.count.load(Ordering::Relaxed) as usize
    }

    /// Takes `part` of `region`, unless somebody has.
    fn claim(&self, part: usize, region: u32) -> bool {
        let claimed = &self.parts[part].claimed;
        claimed.compare_exchange(region.wrapping_sub(1), region, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Runs a part that was claimed, and keeps its panic for the caller.
    fn execute(&self, work: &Work<'_>, part: usize, region: u32) {
        let count = self.count.load(Ordering::Relaxed) as usize;
        if let Err(payload) = caught(|| work(part, count)) {
            locked(&self.panic).get_or_insert(payload);
            self.panicked.store(true, Ordering::Release);
        }
        self.parts[part].done.store(region, Ordering::Relaxed);
        if self.remaining.value.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.remaining.wake();
        }
    }

    /// The life of a worker: takes its part of region after region, until [`Self::end`].
    pub(super) fn work(&self, worker: usize) {
        let seat = &self.seats[worker];
        let mut seen = 0;
        loop {
            seen = self.region.wait_while(seen, self.spins);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let part = seat.value.load(Ordering::Acquire);
            if part == AWAY {
                seat.park_while(AWAY);
            } else if self.claim(part as usize, seen) {
                // SAFETY: the claim keeps the region alive until the part is done, so nobody writes the pointer.
                let work = self.work.with(|work| unsafe { *work });
                // SAFETY: and with the region the closure.
                self.execute(unsafe { &*work }, part as usize, seen);
            }
        }
    }

    /// Calls `work(part, parts)` for every part of a region, on this thread and those of the workers that come by, and
    /// returns when all are done. Only for the one caller whose turn it is. `park(region, left)` sleeps while the last
    /// `left` parts are not done, after spinning was in vain; it may return early.
    pub(super) fn run_parts(&self, parts: usize, work: &Work<'_>, park: impl Fn(u32, u32)) {
        #[expect(clippy::transmute_ptr_to_ptr, reason = "nothing else changes the lifetime of a trait object")]
        // SAFETY: only the lifetime is changed. No thread uses the pointer after this function returns: a part is
        // claimed before it is read, and all claimed parts are waited for below.
        let lent = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(&raw const *work) };
        // SAFETY: no region is running (the turn is the caller's), so nobody reads it.
        self.work.with_mut(|work| unsafe { *work = lent });
        self.remaining.value.store(parts as u32, Ordering::Relaxed);
        let region = self.region.value.load(Ordering::Relaxed).wrapping_add(1);
        self.parts[0].claimed.store(region, Ordering::Relaxed);
        self.region.value.store(region, Ordering::SeqCst);
        self.region.wake();

        self.execute(work, 0, region);
        for part in 1..parts {
            if self.claim(part, region) {
                self.execute(work, part, region);
            }
        }
        let mut left = self.remaining.value.load(Ordering::Acquire);
        while left != 0 {
            left = self.remaining.spin_while(left, self.spins).unwrap_or_else(|| {
                park(region, left);
                self.remaining.value.load(Ordering::Acquire)
            });
        }
    }

    /// What a part of the last region panicked with.
    pub(super) fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        if self.panicked.swap(false, Ordering::AcqRel) { locked(&self.panic).take() } else { None }
    }

    /// Workers whose part of `region`, of `parts` parts, is not done.
    pub(super) fn late_workers(&self, parts: usize, region: u32) -> impl Iterator<Item = usize> {
        self.seats.iter().enumerate().filter_map(move |(worker, seat)| {
            let part = seat.value.load(Ordering::Relaxed) as usize;
            (part < parts && self.parts[part].done.load(Ordering::Relaxed) != region).then_some(worker)
        })
    }

    /// Gives the parts to the workers that are not away, between regions, and returns how many the next region has.
    pub(super) fn give_seats(&self, is_away: impl Fn(usize) -> bool) -> usize {
        // Parts that nobody took lately count as taken in the last region: before the seats change, so that a worker that
        // sees its new seat sees this too, and cannot take a part of a region that is over.
        let region = self.region.value.load(Ordering::Relaxed);
        self.parts.iter().for_each(|part| part.claimed.store(region, Ordering::Relaxed));
        let mut parts = 1;
        for (worker, seat) in self.seats.iter().enumerate() {
            let away = is_away(worker);
            let part = if away { AWAY } else { parts };
            parts += u32::from(!away);
            if seat.value.swap(part, Ordering::SeqCst) == AWAY && !away {
                seat.wake();
            }
        }
        self.count.store(parts, Ordering::Relaxed);
        parts as usize
    }

    /// Ends all workers, wherever they wait.
    pub(super) fn end(&self) {
        self.stop.store(true, Ordering::Release);
        for seat in &self.seats {
            // Whoever is left out wakes up and sees that it is over; the number means nothing any more.
            seat.value.store(0, Ordering::SeqCst);
            seat.wake();
        }
        self.region.value.fetch_add(1, Ordering::SeqCst);
        self.region.wake();
    }
}

static NOTHING: fn(usize, usize) = |_, _| {};
