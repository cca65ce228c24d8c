//! Random interleavings of everything that can happen, with tiny pools: what must always hold holds after every event,
//! every request ends exactly once with exactly its own answer, and all bytes return.

use manylora_core::{CoreConfig, EvictionPolicyKind, LoraMemory, SchedulingPolicy};
use proptest::prelude::*;

use crate::driver::config;
use crate::world::{Action, World};

fn action() -> impl Strategy<Value = Action> {
    let adapters = prop::collection::vec((0..6usize, 0..3u8, prop_oneof![3 => Just(0), 1 => 0..12u32]), 0..3);
    let submit =
        (
            (0..4u32, 1..30usize, 0..12usize, -1..2i64),
            prop::bool::weighted(0.1),
            adapters,
            prop::bool::weighted(0.1),
            prop::option::weighted(0.2, 0..3u8),
        )
            .prop_map(|((family, length, max_tokens, priority), salt, adapters, logits, tenant)| {
                Action::Submit { family, length, max_tokens, priority, salt, adapters, logits, tenant }
            });
    prop_oneof![
        10 => submit,
        2 => (0..20usize).prop_map(Action::Abort),
        2 => (0..5u32, 1..700u64, prop::bool::weighted(0.2))
            .prop_map(|(content, bytes, given)| Action::Register { content, bytes, given }),
        2 => (0..6usize, 0..5u32, 1..700u64, prop::bool::weighted(0.2), prop::option::of(any::<bool>())).prop_map(
            |(which, content, bytes, given, expect)| Action::Replace { which, content, bytes, given, expect }
        ),
        1 => Just(Action::Retire),
        1 => (prop::option::of(0..6usize), 0..4u8)
            .prop_map(|(which, weight)| Action::SetWeight { which, weight: f64::from(weight) * 0.5 }),
        1 => (0..6usize).prop_map(Action::Prefetch),
        1 => (0..6usize).prop_map(Action::Pin),
        1 => (0..6usize).prop_map(Action::Unpin),
        1 => (0..6usize, any::<bool>()).prop_map(|(which, abort)| Action::Unload { which, abort }),
        4 => (0..6usize).prop_map(Action::AnswerLoad),
        1 => (0..6usize).prop_map(Action::Break),
        1 => (0..6usize).prop_map(Action::Repair),
        14 => Just(Action::Plan),
        12 => Just(Action::Commit),
        1 => Just(Action::Lose),
        1 => Just(Action::Reset),
    ]
}

fn limits() -> impl Strategy<Value = CoreConfig> {
    let sizes = (9..24usize, 1..5usize, 0..20usize, 0..12u64);
    let switches = (any::<bool>(), prop::bool::weighted(0.8), 0..3usize, any::<bool>(), prop::option::of(1..4usize));
    let adapters = (prop::option::of(1..4usize), prop::option::of(0..3usize), prop::option::of(200..2000u64));
    (sizes, switches, adapters).prop_map(
        |((blocks, seqs, rows, deferred), (cache, chunks, policy, cost_aware, loading), (slots, host, bytes))| {
            let max_model_len = 34;
            CoreConfig {
                max_num_seqs: seqs,
                max_num_batched_tokens: if chunks { seqs + rows } else { max_model_len + rows },
                max_model_len,
                enable_prefix_caching: cache,
                enable_chunked_prefill: chunks,
                policy: [SchedulingPolicy::Fair, SchedulingPolicy::Fcfs, SchedulingPolicy::Priority][policy],
                eviction: if cost_aware { EvictionPolicyKind::CostAware } else { EvictionPolicyKind::Lru },
                max_loras: slots,
                max_cpu_loras: host.map(|more| slots.unwrap_or(1) + more),
                lora_memory: bytes.map_or(LoraMemory::Elastic, LoraMemory::Bytes),
                max_deferred_steps: deferred,
                max_loading: loading,
                ..config(blocks)
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3 * ProptestConfig::default().cases, failure_persistence: None, max_shrink_iters: 3000, ..ProptestConfig::default() })]

    #[test]
    fn everything_holds_under_any_interleaving(
        config in limits(),
        draft in prop::bool::weighted(0.3),
        actions in prop::collection::vec(action(), 1..160),
    ) {
        let first = World::new(config.clone(), draft, 1).run(&actions);
        let second = World::new(config, draft, 1).run(&actions);
        prop_assert!(first == second, "the same events gave other plans or effects");
    }
}
