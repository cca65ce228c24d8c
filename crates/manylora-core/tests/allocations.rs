//! A steady decode step (plan and commit, nobody starts, nobody ends) allocates nothing, and samples that wait share their
//! prompt.

#![expect(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use manylora_core::{
    AdapterUse, ControlPlane, CoreConfig, Digest, Effect, Event, EvictionPolicyKind, LoadedAdapter, LoraMemory,
    NewRequest, RequestId, SchedulingPolicy, SequenceOutcome, StepOutcome, StepPlan, Time,
};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        BYTES.set(BYTES.get() + layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NOW: Time = Time(0.0);

fn outcome(plan: &StepPlan, outcome: &mut StepOutcome) {
    outcome.step = plan.step;
    outcome.sequences.clear();
    outcome.tokens.clear();
    for sequence in &plan.sequences {
        let first_token = outcome.tokens.len() as u32;
        if sequence.samples {
            outcome.tokens.push(plan.step as u32);
        }
        let tokens = u32::from(sequence.samples);
        let request = Some(sequence.request);
        outcome.sequences.push(SequenceOutcome { request, first_token, tokens, stopped: false });
    }
}

fn control_plane() -> ControlPlane {
    ControlPlane::new(CoreConfig {
        max_num_seqs: 16,
        max_num_batched_tokens: 64,
        max_model_len: 2000,
        block_size: 4,
        block_bytes: 100,
        ledger_bytes: 800_000,
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        policy: SchedulingPolicy::Fcfs,
        max_loras: Some(4),
        max_cpu_loras: None,
        lora_memory: LoraMemory::Elastic,
        eviction: EvictionPolicyKind::Lru,
        base_digest: Digest([1; 32]),
        max_deferred_steps: 20,
        max_loading: None,
    })
    .expect("the limits are good")
}

#[test]
fn samples_that_wait_share_their_prompt() {
    let mut core = control_plane();
    let prompt: Arc<[u32]> = (0..1900).collect();
    let before = BYTES.get();
    let samples = 2000;
    for id in 0..samples {
        let request = NewRequest {
            id: RequestId(id),
            prompt: Arc::clone(&prompt),
            max_tokens: 10,
            priority: 0,
            cache_salt: None,
            tenant: None,
            adapters: Vec::new(),
            read_prefix_cache: true,
            all_prompt_logits: false,
        };
        core.handle(NOW, Event::Submit(request));
    }
    let each = (BYTES.get() - before) / samples as usize;
    assert!(each < size_of_val(&*prompt) / 4, "{each} bytes for each sample");
    let (mut plan, mut results) = (StepPlan::default(), StepOutcome::default());
    assert!(core.plan(NOW, &mut plan));
    // One runs, and has all of it.
    assert_eq!(plan.tokens, prompt[..64]);
    outcome(&plan, &mut results);
    core.commit(NOW, &results);
    assert_eq!(core.stats().waiting, samples as usize - 1);
}

#[test]
fn steady_decode_allocates_nothing() {
    let mut core = control_plane();
    let adapters: Vec<_> = (0..4u8)
        .map(|content| {
            let registration = core.next_registration();
            core.handle(NOW, Event::Register { registration, bytes: 50, rereadable: true });
            core.handle(NOW, Event::Prefetch(registration));
            assert!(matches!(core.drain_effects().last(), Some(Effect::Load { .. })));
            let result = Ok(LoadedAdapter::new(Digest([content; 32]), 50));
            core.handle(NOW, Event::LoadFinished { registration, result });
            registration
        })
        .collect();
    // Sixteen run, four wait: the queue is looked at, too.
    for id in 0..20u32 {
        let registration = adapters[id as usize % 4];
        core.handle(
            NOW,
            Event::Submit(NewRequest {
                id: RequestId(u64::from(id)),
                prompt: (0..10).map(|token| id * 100 + token).collect(),
                max_tokens: 1000,
                priority: 0,
                cache_salt: None,
                tenant: None,
                adapters: vec![AdapterUse { registration, scale: 1.0, first_active: 0 }],
                read_prefix_cache: true,
                all_prompt_logits: false,
            }),
        );
    }
    let (mut plan, mut results) = (StepPlan::default(), StepOutcome::default());
    for _ in 0..8 {
        assert!(core.plan(NOW, &mut plan));
        outcome(&plan, &mut results);
        core.commit(NOW, &results);
        core.drain_effects().for_each(drop);
    }
    assert_eq!(plan.sequences.len(), 16);
    let before = ALLOCATIONS.get();
    for _ in 0..500 {
        assert!(core.plan(NOW, &mut plan));
        outcome(&plan, &mut results);
        core.commit(NOW, &results);
        core.drain_effects().for_each(drop);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert_eq!(plan.sequences.len(), 16);
    // The counter counts.
    drop(std::hint::black_box(vec![1]));
    assert_eq!(ALLOCATIONS.get() - before, 1);
}
