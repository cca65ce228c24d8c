//! The barrier pool: every part exactly once, panics, taking turns, and its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use manylora_kernels::cpu::{Pool, PoolOptions, SimdLevel};
use proptest::prelude::*;

#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
fn pool(threads: usize) -> Pool {
    Pool::new(PoolOptions { threads: Some(threads), ..PoolOptions::default() }).unwrap()
}

#[test]
fn every_part_runs_once_in_every_region() {
    for threads in [1, 2, 3, 8] {
        let pool = pool(threads);
        let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..=2000 {
            let said = AtomicUsize::new(0);
            pool.run(&|part, parts| {
                assert!(parts <= threads);
                said.store(parts, Ordering::Relaxed);
                counts[part].fetch_add(1, Ordering::Relaxed);
            });
            // What the parts wrote is seen as soon as the region is over.
            let counted: Vec<usize> = counts.iter().map(|count| count.swap(0, Ordering::Relaxed)).collect();
            let expected: Vec<usize> =
                (0..threads).map(|part| usize::from(part < said.load(Ordering::Relaxed))).collect();
            assert_eq!(counted, expected, "round {round}");
        }
    }
}

#[test]
fn parked_threads_wake_up() {
    let pool = pool(3);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        let left = AtomicIsize::new(0);
        pool.run(&|part, parts| {
            left.fetch_add(if part == 0 { parts as isize - 1 } else { -1 }, Ordering::Relaxed);
        });
        assert_eq!(left.into_inner(), 0);
    }
}

#[test]
fn a_worker_that_lost_its_core_is_left_out_and_comes_back() {
    let pool = pool(3);
    let region = |work: &(dyn Fn(usize) + Sync)| {
        let (said, ran) = (AtomicUsize::new(0), AtomicUsize::new(0));
        pool.run(&|part, parts| {
            said.store(parts, Ordering::Relaxed);
            ran.fetch_add(1, Ordering::Relaxed);
            work(part);
        });
        assert_eq!(said.load(Ordering::Relaxed), ran.into_inner());
        said.into_inner()
    };
    // A thread other than the caller that sleeps for long in its part, as if its core were taken.
    let caller = std::thread::current().id();
    let mut smaller = false;
    for _ in 0..100 {
        let late = AtomicUsize::new(0);
        region(&|_| {
            if std::thread::current().id() != caller {
                if late.fetch_add(1, Ordering::Relaxed) == 0 {
                    std::thread::sleep(Duration::from_millis(20));
                }
                return;
            }
            // The caller takes what nobody has begun: give the others time to wake up.
            let since = Instant::now();
            while late.load(Ordering::Relaxed) == 0 && since.elapsed() < Duration::from_millis(100) {
                std::thread::yield_now();
            }
        });
        smaller = region(&|_| {}) < 3;
        if smaller {
            break;
        }
    }
    assert!(smaller, "a late worker is left out");
    let deadline = Instant::now() + Duration::from_secs(60);
    while region(&|_| {}) < 3 {
        assert!(Instant::now() < deadline, "a worker that was left out comes back");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn who_never_parks_leaves_nobody_out() {
    let pool = Pool::new(PoolOptions { threads: Some(2), park: false, ..PoolOptions::default() }).unwrap();
    for _ in 0..3 {
        pool.run(&|part, parts| {
            assert_eq!(parts, 2);
            if part == 1 {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    }
}

#[test]
fn a_late_part_is_waited_for() {
    let pool = pool(2);
    let done = AtomicUsize::new(0);
    for late in [0, 1] {
        pool.run(&|part, _| {
            if part == late {
                std::thread::sleep(Duration::from_millis(20));
            }
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.swap(0, Ordering::Relaxed), 2);
    }
}

#[test]
fn a_panic_reaches_the_caller_after_all_parts_ended() {
    // Nobody is left out, whoever is late: each part comes to panic.
    let pool = Pool::new(PoolOptions { threads: Some(3), park: false, ..PoolOptions::default() }).unwrap();
    for guilty in 0..3 {
        let others = AtomicUsize::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|part, _| {
                assert!(part != guilty, "part {guilty} fails");
                std::thread::sleep(Duration::from_millis(2));
                others.fetch_add(1, Ordering::Relaxed);
            });
        }));
        let message = *outcome.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains(&format!("part {guilty} fails")), "{message}");
        assert_eq!(others.into_inner(), 2);
        let after = AtomicUsize::new(0);
        pool.run(&|_, _| {
            after.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(after.into_inner(), 3);
    }
}

#[test]
fn concurrent_callers_take_turns() {
    let pool = Arc::new(pool(2));
    let inside = AtomicUsize::new(0);
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..300 {
                    pool.run(&|part, parts| {
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < parts, "two regions at once");
                        total.fetch_add(usize::from(part == 0), Ordering::Relaxed);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    });
                }
            });
        }
    });
    assert_eq!(total.into_inner(), 3 * 300);
}

#[test]
fn equal_options_share_one_pool() {
    let options = PoolOptions { threads: Some(5), ..PoolOptions::default() };
    let (first, second) = (Pool::shared(options).unwrap(), Pool::shared(options).unwrap());
    assert!(Arc::ptr_eq(&first, &second));
    let other = Pool::shared(PoolOptions { threads: Some(6), ..options }).unwrap();
    assert!(!Arc::ptr_eq(&first, &other));
    assert_eq!((first.threads(), other.threads()), (5, 6));
    let weak = Arc::downgrade(&first);
    drop((first, second));
    assert!(weak.upgrade().is_none(), "the process keeps no pool that nobody uses");
}

#[test]
fn shared_pools_of_different_sizes_take_turns() {
    let inside = AtomicUsize::new(0);
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for threads in [2, 3, 4] {
            let pool = Pool::shared(PoolOptions { threads: Some(threads), ..PoolOptions::default() }).unwrap();
            let (inside, total) = (&inside, &total);
            scope.spawn(move || {
                for _ in 0..300 {
                    pool.run(&|part, _| {
                        // Whoever is inside belongs to one region: a team of its own size, and no other.
                        let before = inside.fetch_add(1 << (8 * threads), Ordering::SeqCst);
                        assert_eq!(before & !(0xFF << (8 * threads)), 0, "two regions at once");
                        total.fetch_add(usize::from(part == 0), Ordering::Relaxed);
                        inside.fetch_sub(1 << (8 * threads), Ordering::SeqCst);
                    });
                }
            });
        }
    });
    assert_eq!(total.into_inner(), 3 * 300);
}

#[test]
fn one_thread_does_not_wait_for_the_others() {
    let one = Pool::shared(PoolOptions { threads: Some(1), ..PoolOptions::default() }).unwrap();
    let two = Pool::shared(PoolOptions { threads: Some(2), ..PoolOptions::default() }).unwrap();
    let count = AtomicUsize::new(0);
    two.run(&|part, _| {
        if part == 0 {
            one.run(&|_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(count.into_inner(), 1);
}

#[test]
fn dropping_joins_even_without_parking() {
    let pool = Pool::new(PoolOptions { threads: Some(2), pin_threads: true, park: false }).unwrap();
    pool.run(&|_, _| {});
    drop(pool);
}

#[test]
fn some_level_is_always_available() {
    assert_eq!(SimdLevel::available().first(), Some(&SimdLevel::Portable));
    assert!(SimdLevel::available().contains(&SimdLevel::detect()));
}

proptest! {
    #[test]
    fn splits_cover_everything_once(total in 0usize..10_000, granularity in 1usize..40, parts in 1usize..20) {
        let mut next = 0;
        let mut sizes = Vec::new();
        for part in 0..parts {
            let share = Pool::split(total, granularity, part, parts);
            prop_assert_eq!(share.start, next);
            prop_assert!(share.start.is_multiple_of(granularity) || share.start == total);
            next = share.end;
            sizes.push(share.len().div_ceil(granularity));
        }
        prop_assert_eq!(next, total);
        prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
    }
}

/// A load that began to compute in the middle of a region would take its worker's core, and everybody would wait for that
/// worker.
#[test]
fn a_core_is_lent_once_the_region_that_runs_is_over() {
    let parts_of_region = |pool: &Pool, millis: u64, began: &AtomicUsize, ended: &AtomicUsize| {
        let said = AtomicUsize::new(0);
        pool.run(&|_, parts| {
            said.store(parts, Ordering::SeqCst);
            began.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(millis));
            ended.fetch_add(1, Ordering::SeqCst);
        });
        said.into_inner()
    };
    for _ in 0..3 {
        // A new one: a core that was lent stays so for a moment.
        let pool = pool(2);
        let (began, ended, lent, parts) = std::array::from_fn::<_, 4, _>(|_| AtomicUsize::new(0)).into();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                parts_of_region(&pool, 10, &began, &ended);
                while lent.load(Ordering::SeqCst) == 0 {
                    std::hint::spin_loop();
                }
                let (began, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
                parts.store(parts_of_region(&pool, 0, &began, &ended), Ordering::SeqCst);
            });
            while began.load(Ordering::SeqCst) == 0 {
                std::hint::spin_loop();
            }
            let loan = pool.lend_core();
            let over = ended.load(Ordering::SeqCst) == began.load(Ordering::SeqCst);
            lent.store(1, Ordering::SeqCst);
            while parts.load(Ordering::SeqCst) == 0 {
                std::hint::spin_loop();
            }
            drop(loan);
            assert!(over, "a region ran when the core was lent");
        });
        assert_eq!(parts.into_inner(), 1, "the next region has a core less");
    }
    // While regions follow each other closely, it is the next one that leaves.
    let (pool, stop) = (pool(2), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while stop.load(Ordering::SeqCst) == 0 {
                pool.run(&|_, _| std::hint::spin_loop());
            }
        });
        (0..100).for_each(|_| drop(pool.lend_core()));
        stop.store(1, Ordering::SeqCst);
    });
}
