//! The barrier pool: every part exactly once, panics, taking turns, and its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

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
            pool.run(&|part, parts| {
                assert_eq!(parts, threads);
                counts[part].fetch_add(1, Ordering::Relaxed);
            });
            // What the parts wrote is seen as soon as the region is over.
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == round), "round {round}");
        }
    }
}

#[test]
fn parked_threads_wake_up() {
    let pool = pool(3);
    let count = AtomicUsize::new(0);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        pool.run(&|_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        });
    }
    assert_eq!(count.into_inner(), 60);
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
    let pool = pool(3);
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
                    pool.run(&|_, parts| {
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < parts, "two regions at once");
                        total.fetch_add(1, Ordering::Relaxed);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    });
                }
            });
        }
    });
    assert_eq!(total.into_inner(), 3 * 300 * 2);
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
                    pool.run(&|_, parts| {
                        // Whoever is inside belongs to one region: a team of its own size, and no other.
                        let before = inside.fetch_add(1 << (8 * parts), Ordering::SeqCst);
                        assert_eq!(before & !(0xFF << (8 * parts)), 0, "two regions at once");
                        total.fetch_add(1, Ordering::Relaxed);
                        inside.fetch_sub(1 << (8 * parts), Ordering::SeqCst);
                    });
                }
            });
        }
    });
    assert_eq!(total.into_inner(), 300 * (2 + 3 + 4));
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
