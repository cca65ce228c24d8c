//! What somebody who looks (`/shelf`, `/metrics`) costs the engine's thread of the control plane: however many wait, next to
//! nothing.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use manylora_core::event::AdapterUse;
use manylora_core::{
    ControlPlane, CoreConfig, Digest, Effect, Event, LoadedAdapter, LoraMemory, NewRequest, RegistrationId, RequestId,
    SchedulingPolicy, StepPlan, Time,
};

use super::setup::Bench;

const ADAPTERS: u32 = 2000;
const FEW: u32 = 2000;
const MANY: u32 = 10_000;
const ROUNDS: usize = 200;

/// A control plane with so many resident adapters, and as many requests for them that wait.
fn plane(waiting: u32) -> Result<ControlPlane, Box<dyn Error>> {
    let mut plane = ControlPlane::new(CoreConfig {
        max_num_seqs: 64,
        max_num_batched_tokens: 2048,
        max_model_len: 1024,
        block_size: 16,
        block_bytes: 1 << 10,
        ledger_bytes: 1 << 30,
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        policy: SchedulingPolicy::Fair,
        max_loras: None,
        max_cpu_loras: None,
        lora_memory: LoraMemory::Elastic,
        eviction: manylora::EvictionPolicyKind::Lru,
        base_digest: Digest([0; 32]),
        max_deferred_steps: 256,
        max_loading: None,
    })?;
    let now = Time(0.0);
    let mut registrations: Vec<RegistrationId> = Vec::new();
    for number in 0..ADAPTERS {
        let registration = plane.next_registration();
        plane.handle(now, Event::Register { registration, bytes: 1 << 16, rereadable: true });
        plane.handle(now, Event::Prefetch(registration));
        let mut digest = Digest([1; 32]);
        digest.0[..4].copy_from_slice(&number.to_le_bytes());
        let result = Ok(LoadedAdapter::new(digest, 1 << 16));
        plane.handle(now, Event::LoadFinished { registration, result });
        registrations.push(registration);
    }
    for number in 0..waiting + 64 {
        let registration = registrations[(number % ADAPTERS) as usize];
        let request = NewRequest {
            id: RequestId(u64::from(number)),
            prompt: Arc::from([1; 8]),
            max_tokens: 16,
            priority: 0,
            cache_salt: None,
            tenant: None,
            adapters: vec![AdapterUse { registration, scale: 1.0, first_active: 0 }],
            read_prefix_cache: true,
            all_prompt_logits: false,
        };
        plane.handle(now, Event::Submit(request));
    }
    if plane.drain_effects().any(|effect| matches!(effect, Effect::RequestFailed { .. })) {
        return Err("a request failed".into());
    }
    plane.plan(now, &mut StepPlan::default());
    let stats = plane.stats();
    if (stats.running, stats.waiting, stats.adapters.len()) != (64, waiting as usize, ADAPTERS as usize) {
        return Err(format!("`{}` run and `{}` wait", stats.running, stats.waiting).into());
    }
    Ok(plane)
}

/// Seconds of a look: the least disturbed ones.
fn look(plane: &ControlPlane) -> f64 {
    let begin = Instant::now();
    black_box((plane.stats(), plane.users(), plane.loading().count()));
    begin.elapsed().as_secs_f64()
}

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let (few, many) = (plane(FEW)?, plane(MANY)?);
    let (mut short, mut long) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        short = short.min(look(&few));
        long = long.min(look(&many));
    }
    bench.result("a look beside 2000 adapters with requests and 10000 that wait, microseconds", long * 1e6);
    bench.result("that look / one beside 2000 that wait", long / short);
    Ok(())
}
