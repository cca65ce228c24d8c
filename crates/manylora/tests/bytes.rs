//! Promise P8: the formulas that the control plane, planner and simulator ask are those of what is really allocated.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{Oracle, engine, load};
use manylora_core::budget::{self, WeightPacking};
use manylora_kernels::cpu::{
    CpuBackend, CpuOptions, HeldBytes, SimdLevel, kv_block_bytes, packed_adapter_bytes, packed_weight_bytes,
};
use manylora_kernels::{Backend, KvShape, Module, Site, SiteShape, StorageType};

const TYPES: [StorageType; 2] = [StorageType::Bf16, StorageType::F32];

/// Tests that count the bytes of the process take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn formulas_equal_the_packed_sizes() {
    for dtype in TYPES {
        let number = dtype.bytes() as u64;
        for (output, input) in [(16, 32), (36, 12), (1, 1), (33, 7), (4864, 896), (50, 4864)] {
            for level in [SimdLevel::Portable, SimdLevel::Avx2, SimdLevel::Avx512Bf16, SimdLevel::Amx] {
                let pairs = level >= SimdLevel::Avx512Bf16 && dtype == StorageType::Bf16;
                let packing = if pairs { WeightPacking::Panels32Pairs } else { WeightPacking::Panels16 };
                assert_eq!(
                    budget::linear_bytes(output, input, number, packing),
                    packed_weight_bytes(level, dtype, output as usize, input as usize) as u64,
                    "{output}x{input} {dtype:?} {level}"
                );
            }
            for rank in [1, 2, 3, 5, 8, 12, 16, 64, 512] {
                for site in [Site::layer(0, Module::Q), Site::EMBED, Site::HEAD] {
                    let (rank, input, output) = (rank as u32, input as u32, output as u32);
                    let shape = SiteShape { site, rank, input, output, scale: 1.0 };
                    assert_eq!(
                        budget::adapter_site_bytes(u64::from(rank), u64::from(input), u64::from(output), number),
                        packed_adapter_bytes(&[shape], dtype) as u64,
                        "rank {rank} {output}x{input} {dtype:?} {site:?}"
                    );
                }
            }
        }
        for block_size in [1, 4, 16, 32] {
            let shape = KvShape { layers: 3, kv_heads: 2, head_dim: 12, block_size, blocks: 7, dtype };
            let formula = budget::kv_block_bytes(3, 2, 12, block_size as u64, number);
            assert_eq!(formula, kv_block_bytes(&shape) as u64);
        }
    }
}

/// neither `max_loras` nor `max_lora_rank` reserves anything; KV blocks fall by exactly the bytes of what is
/// resident, in whole blocks.
#[test]
fn a_54_only_resident_adapters_take_bytes() {
    let _turn = alone();
    let oracle = Oracle::open("llama");
    let mut blocks = Vec::new();
    for max_loras in [None, Some(1), Some(8), Some(64)] {
        for max_lora_rank in [8, 64] {
            let engine = engine(&oracle, |config| {
                config.max_loras = max_loras;
                config.max_lora_rank = max_lora_rank;
            });
            blocks.push(engine.stats().expect("stats").total_blocks);
            assert_eq!(engine.info().kv_blocks, blocks[0]);
        }
    }
    assert!(blocks.iter().all(|&count| count == blocks[0]), "{blocks:?}");

    let engine = engine(&oracle, |_| {});
    let info = engine.info().clone();
    load(&engine, &oracle, &["rank64", "rank1", "sub-q"]);
    let stats = engine.stats().expect("stats");
    let bytes: u64 = stats.adapters.iter().map(|adapter| adapter.bytes).sum();
    assert_eq!(stats.adapter_bytes, bytes);
    assert_eq!(stats.total_blocks as u64, (info.ledger_bytes - bytes) / info.block_bytes);
    for adapter in engine.list_adapters() {
        let resident =
            stats.adapters.iter().find(|resident| Some(resident.digest) == adapter.version).expect("resident");
        assert_eq!(resident.bytes, adapter.report.bytes, "{}", adapter.name);
    }
}

/// What an engine says it holds is what it holds: weights, KV cache, working memory, and its adapters' own bytes.
#[test]
fn an_engine_holds_what_it_says() {
    let _turn = alone();
    let oracle = Oracle::open("llama");
    for (rows, max_lora_rank, enable_lora) in [(64, 64, true), (700, 512, true), (700, 512, false)] {
        let before = HeldBytes::now().total();
        let engine = engine(&oracle, |config| {
            config.max_num_batched_tokens = Some(rows);
            config.max_lora_rank = max_lora_rank;
            config.enable_lora = enable_lora;
        });
        let info = engine.info().clone();
        let kv = info.kv_blocks * info.block_bytes as usize;
        let held = || HeldBytes::now().total() - before;
        // Two lists are vectors of the allocator's: adapter segments, and the first task of each sequence.
        let backend = CpuBackend::new(CpuOptions { num_threads: Some(2), ..CpuOptions::default() }).expect("a backend");
        let entries = if enable_lora { rows } else { 0 };
        let lists = backend.reserved_bytes(rows, entries, 0, 8) - backend.reserved_bytes(rows, 0, 0, 8)
            + info.kv_blocks * size_of::<usize>();
        // Address space for contexts beyond max_model_len, up to all blocks, is reserved and never used.
        let shape = KvShape {
            layers: 1,
            kv_heads: 1,
            head_dim: oracle_head_dim(&oracle),
            block_size: info.block_size,
            blocks: info.kv_blocks,
            dtype: StorageType::F32,
        };
        let unused = backend.attention_bytes(&shape, info.kv_blocks * info.block_size)
            - backend.attention_bytes(&shape, info.max_model_len);
        assert_eq!(held(), info.weight_bytes as usize + kv + info.working_bytes as usize - lists + unused);
        if enable_lora {
            let empty = held();
            load(&engine, &oracle, &["rank64", "rank1"]);
            let stats = engine.stats().expect("stats");
            assert_eq!(held(), empty + stats.adapter_bytes as usize, "an adapter takes its own bytes and no others");
        }
    }
}

fn oracle_head_dim(oracle: &Oracle) -> usize {
    manylora_model::checkpoint::Checkpoint::open(&oracle.base_folder()).expect("the base opens").spec.head_dim
}
