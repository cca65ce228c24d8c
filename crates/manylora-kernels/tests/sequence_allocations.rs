//! A steady decode step allocates nothing in attention, rope and the smaller operations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use manylora_kernels::cpu::{CpuBackend, CpuOptions, SimdLevel};
use manylora_kernels::{AttentionShape, Backend, HeadInputs, KvShape, SequenceRows, Site, StepBatch, StorageType};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "an allocator cannot be written without")]
// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_decode_step_allocates_nothing() {
    let (heads, kv_heads, head_dim, block_size, rows) = (9, 3, 64, 16, 6_usize);
    let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.125, window: None };
    for level in SimdLevel::available() {
        let options = CpuOptions { num_threads: Some(2), level: Some(level), ..CpuOptions::default() };
        let backend = CpuBackend::new(options).unwrap();
        let kv = KvShape { layers: 1, kv_heads, head_dim, block_size, blocks: rows * 20, dtype: StorageType::Bf16 };
        let mut cache = backend.kv_cache(kv).unwrap();
        let cos = backend.vector(&vec![1.0; 320 * 32]).unwrap();
        let sin = backend.vector(&vec![0.0; 320 * 32]).unwrap();
        let weight = backend.vector(&[1.0; 64]).unwrap();
        let mut q = backend.buffer(rows, heads * head_dim).unwrap();
        let mut k = backend.buffer(rows, kv_heads * head_dim).unwrap();
        let v = backend.buffer(rows, kv_heads * head_dim).unwrap();
        let mut out = backend.buffer(rows, heads * head_dim).unwrap();
        let mut activated = backend.buffer(rows, heads * head_dim).unwrap();
        let logits = backend.buffer(rows, 50_000).unwrap();
        let heads = HeadInputs { q_norm: Some(&weight), k_norm: Some(&weight), epsilon: 1e-5, ..HeadInputs::NONE };
        let mut tokens = vec![0; rows];
        let mut batch = StepBatch::default();
        // Positions grow from step to step, over block borders. A worker thread that starts late allocates in what is its
        // warm-up, so the first rounds may count something; what allocates in every step never reaches 0.
        let (mut fewest, mut count) = (usize::MAX, 0);
        for step in 0..100_u32 {
            batch.clear();
            for row in 0..rows as u32 {
                let position = 200 + step;
                batch.tokens.push(0);
                batch.positions.push(position);
                let first = batch.block_tables.len() as u32;
                let blocks = position / 16 + 1;
                batch.block_tables.extend((0..blocks).map(|block| row * 20 + block));
                batch.slot_mapping.push((row * 20 + blocks - 1) * 16 + position % 16);
                batch.sequences.push(SequenceRows {
                    first_row: row,
                    rows: 1,
                    first_position: position,
                    table_first: first,
                    table_len: blocks,
                });
            }
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            backend.rope_kv_write(&batch, 0, &shape, &heads, &cos, &sin, &mut q, &mut k, &v, &mut cache);
            backend.attention(&batch, 0, &shape, &q, &cache, &mut out);
            backend.rms_norm(rows, &out, &weight, 1e-5, Site::FINAL_NORM, &mut q);
            backend.gated_activation(rows, &q, &out, &mut activated);
            backend.gather_rows(&[0, 5], &activated, &mut out);
            backend.argmax(rows, &logits, &mut tokens).unwrap();
            count += ALLOCATIONS.load(Ordering::Relaxed) - before;
            if step % 25 == 24 {
                fewest = fewest.min(count);
                count = 0;
            }
        }
        assert_eq!(fewest, 0, "{level}: allocations in 25 steps");
    }
}
