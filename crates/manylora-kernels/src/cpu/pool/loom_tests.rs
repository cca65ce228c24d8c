//! Models of the pool's protocol: the threads of small teams, in the orders that they may act in.
//!
//! `make test-loom` runs them. Every sleep is one that nothing but [`Signal::wake`](super::signal::Signal::wake) ends, so
//! that a wake-up that gets lost is a deadlock, which fails the model as a failed assertion does.
#![expect(unsafe_code, reason = "reads and writes cells that the model checker watches over")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::thread;

use super::state::State;

/// Threads that park at once, and threads that never do.
const PARKING: Option<u32> = Some(0);
const SPINNING: Option<u32> = None;

/// A region's closure, which lives as long as the model: whoever calls it too late is found out, not undefined.
struct Region {
    open: AtomicBool,
    parts: usize,
    /// How often each part was run. A cell, because nothing but the pool may order its accesses.
    runs: Vec<UnsafeCell<u32>>,
}

// SAFETY: the model checker reports accesses to the cells that nothing orders.
unsafe impl Sync for Region {}
// SAFETY: as above.
unsafe impl Send for Region {}

impl Region {
    fn run_part(&self, part: usize, parts: usize) {
        assert!(self.open.load(Ordering::SeqCst), "part `{part}` was run outside of its region");
        assert_eq!(parts, self.parts);
        // SAFETY: the model checker watches over the cell.
        self.runs[part].with_mut(|runs| unsafe { *runs += 1 });
    }
}

/// A team in a model, and the closures of its regions.
struct Model {
    state: Arc<State>,
    workers: Vec<thread::JoinHandle<()>>,
    regions: Vec<Arc<dyn Fn(usize, usize) + Send + Sync>>,
}

impl Model {
    fn new(threads: usize, spins: Option<u32>) -> Self {
        let state = Arc::new(State::new(threads, spins));
        let workers = (1..threads).map(|part| {
            let state = Arc::clone(&state);
            thread::spawn(move || state.work(part - 1))
        });
        Self { workers: workers.collect(), state, regions: Vec::new() }
    }

    /// Runs a region as the pool does, and looks at what it leaves.
    fn run(&mut self, parts: usize) {
        let runs = (0..self.state.threads()).map(|_| UnsafeCell::new(0)).collect();
        let region = Arc::new(Region { open: AtomicBool::new(true), parts, runs });
        let work = Arc::new({
            let region = Arc::clone(&region);
            move |part, parts| region.run_part(part, parts)
        });
        self.regions.push(Arc::clone(&work) as _);
        self.state.run_parts(parts, &*work, |_, left| {
            self.state.remaining.park_while(left);
        });
        region.open.store(false, Ordering::SeqCst);
        for (part, runs) in region.runs.iter().enumerate() {
            // SAFETY: the model checker watches over the cell.
            assert_eq!(runs.with(|runs| unsafe { *runs }), u32::from(part < parts), "runs of part `{part}`");
        }
    }

    /// Gives the seats to all workers but those that are `away`.
    fn change(&self, away: &[usize], parts: usize) {
        assert_eq!(self.state.give_seats(|worker| away.contains(&worker)), parts);
    }

    /// Ends the workers: what they may still be at when it is called was explored, the end itself was not.
    fn end_unexplored(self) {
        loom::stop_exploring();
        self.end();
    }

    fn end(self) {
        self.state.end();
        for worker in self.workers {
            worker.join().expect("a worker ends");
        }
    }
}

/// Runs the model in all orders that suspend running threads `preemptions` times or less.
fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let (start, orders) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&orders);
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{} orders in {:?}", orders.load(Ordering::Relaxed), start.elapsed());
}

#[test]
fn every_part_runs_once_and_its_effects_are_seen() {
    check(3, || {
        let mut model = Model::new(2, PARKING);
        model.run(2);
        model.run(2);
        model.end_unexplored();
    });
}

#[test]
fn every_part_runs_once_where_threads_only_spin() {
    check(2, || {
        let mut model = Model::new(2, SPINNING);
        model.run(2);
        model.run(2);
        model.end_unexplored();
    });
}

#[test]
fn a_worker_is_left_out() {
    check(2, || {
        let mut model = Model::new(3, PARKING);
        model.run(3);
        model.change(&[0], 2);
        model.run(2);
        model.end_unexplored();
    });
}

#[test]
fn a_worker_is_called_back() {
    check(2, || {
        let mut model = Model::new(3, PARKING);
        model.change(&[0], 2);
        model.run(2);
        model.change(&[], 3);
        model.run(3);
        model.end_unexplored();
    });
}

#[test]
fn a_worker_is_left_out_and_called_back() {
    check(1, || {
        let mut model = Model::new(3, PARKING);
        model.run(3);
        model.change(&[0], 2);
        model.run(2);
        model.change(&[], 3);
        model.run(3);
        model.end_unexplored();
    });
}

#[test]
fn all_end_wherever_they_wait() {
    check(2, || {
        let mut model = Model::new(3, PARKING);
        model.change(&[0], 2);
        model.run(2);
        model.end();
    });
}

#[test]
fn all_end_where_threads_only_spin() {
    check(2, || {
        let mut model = Model::new(2, SPINNING);
        model.run(2);
        model.end();
    });
}
