//! Promise P8: the formulas that the control plane, planner and simulator ask are those of what is really allocated.

mod common;

use common::{Oracle, engine, load};
use manylora_core::budget::{self, WeightPacking};
use manylora_kernels::cpu::{SimdLevel, kv_block_bytes, packed_adapter_bytes, packed_weight_bytes};
use manylora_kernels::{KvShape, Module, Site, SiteShape, StorageType};

const TYPES: [StorageType; 2] = [StorageType::Bf16, StorageType::F32];

#[test]
fn formulas_equal_the_packed_sizes() {
    for dtype in TYPES {
        let number = dtype.bytes() as u64;
        for (output, input) in [(16, 32), (36, 12), (1, 1), (33, 7), (4864, 896), (50, 4864)] {
            for level in [SimdLevel::Portable, SimdLevel::Avx2, SimdLevel::Avx512Bf16] {
                let pairs = level == SimdLevel::Avx512Bf16 && dtype == StorageType::Bf16;
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
        let resident = stats.adapters.iter().find(|resident| resident.digest == adapter.version).expect("resident");
        assert_eq!(resident.bytes, adapter.report.bytes, "{}", adapter.name);
    }
}
