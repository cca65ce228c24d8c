//! A step allocates nothing: `linear` with adapters after its working memory was announced, and what was announced is
//! what is taken.
#![expect(unsafe_code, reason = "a counting allocator is an allocator")]

mod linear_cases;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use linear_cases::{Case, Packed, backend, variants};
use manylora_kernels::cpu::{CpuBackend, HeldBytes, SimdLevel, kv_block_bytes};
use manylora_kernels::{Backend, KvShape, RowAdapterPlan, StorageType};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Worker threads allocate while they start: waits until they have all run a part themselves.
fn wait_for_workers(backend: &CpuBackend) {
    let caller = std::thread::current().id();
    let started = AtomicUsize::new(0);
    while started.load(Ordering::Relaxed) < backend.pool().threads() - 1 {
        started.store(0, Ordering::Relaxed);
        backend.pool().run(&|_, _| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            started.fetch_add(usize::from(std::thread::current().id() != caller), Ordering::Relaxed);
        });
    }
}

/// What `work` made, and the bytes it took from the allocator and as mappings.
fn taken_by<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = BYTES.load(Ordering::Relaxed) + HeldBytes::now().mapped;
    let made = work();
    (made, BYTES.load(Ordering::Relaxed) + HeldBytes::now().mapped - before)
}

/// Sizes at which blocks are mappings of their own, and small ones.
fn bytes_are_those_announced(backend: &CpuBackend, dtype: StorageType) {
    for (rows, rank, width) in [(1, 1, 8), (3000, 128, 5000)] {
        let fresh = self::backend(backend.level(), 2);
        let ((), taken) = taken_by(|| fresh.reserve(rows, rows, rank, width).expect("memory"));
        assert_eq!(taken, fresh.reserved_bytes(rows, rows, rank, width), "{rows} rows, rank {rank}");
        // Once more, and less, is nothing.
        assert_eq!(taken_by(|| fresh.reserve(rows, rows, rank, width / 2).expect("memory")).1, 0);
    }
    for (blocks, block_size) in [(3, 16), (40_000, 16)] {
        let shape = KvShape { layers: 2, kv_heads: 3, head_dim: 40, block_size, blocks, dtype };
        let (_cache, taken) = taken_by(|| backend.kv_cache(shape).expect("memory"));
        let announced = backend.attention_bytes(&shape, blocks * block_size);
        assert_eq!(taken, blocks * kv_block_bytes(&shape) + announced, "{blocks} blocks");
        let short = backend.attention_bytes(&shape, block_size);
        if backend.level() == SimdLevel::Amx && dtype == StorageType::Bf16 {
            assert_eq!(short, announced, "positions are taken in chunks, however many they are");
        } else {
            assert!(short < announced, "a short context takes less");
        }
    }
}

#[test]
fn linear_allocates_nothing_after_reserve() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        let rows = 40;
        let case = Case::random(1, rows, 900, &[96, 32, 32], dtype, &[16, 5, 64]);
        let packed = Packed::new(&case, &backend);
        let input = backend.buffer(rows, case.inputs).unwrap();
        let mut outs: Vec<_> = [96, 32, 32].map(|width| backend.buffer(rows, width).unwrap()).into();
        let mut plan = RowAdapterPlan::with_capacity(rows, 2 * rows);
        wait_for_workers(&backend);
        let reserved = || backend.reserve(rows, 2 * rows, 64, 900).unwrap();
        assert_eq!(taken_by(reserved).1, backend.reserved_bytes(rows, 2 * rows, 64, 900), "{level} {dtype:?}");
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for step in 0..6 {
            plan.clear();
            let count = rows - 3 * step;
            for row in 0..count {
                if row % 4 != step {
                    plan.push(row as u32, (row % 3) as u32, 1.0);
                    plan.push(row as u32, ((row + step) % 3) as u32, 0.5);
                }
            }
            plan.finish(count);
            packed.call(&case, &backend, count, &plan, &input, &mut outs);
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "{level} {dtype:?}");
        bytes_are_those_announced(&backend, dtype);
    }
}
