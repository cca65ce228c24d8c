//! Times steps of the control plane, alone: steady decoding with few and many registered adapters, with a long queue, and
//! evictions among few and many residents.

#![expect(clippy::print_stdout, reason = "a program that prints its results")]

use std::time::{Duration, Instant};

use manylora_core::{
    AdapterUse, ControlPlane, CoreConfig, CoreError, Digest, Effect, Event, EvictionPolicyKind, LoadedAdapter,
    LoraMemory, NewRequest, RegistrationId, RequestId, SchedulingPolicy, SequenceOutcome, StepOutcome, StepPlan, Time,
};

const ADAPTER_BYTES: u64 = 1_000;
const NOW: Time = Time(0.0);

struct Bench {
    core: ControlPlane,
    plan: StepPlan,
    outcome: StepOutcome,
    requests: u64,
    loads: u32,
}

impl Bench {
    fn new(residents: u64, policy: SchedulingPolicy, eviction: EvictionPolicyKind) -> Result<Self, CoreError> {
        let core = ControlPlane::new(CoreConfig {
            max_num_seqs: 32,
            max_num_batched_tokens: 512,
            max_model_len: 4_096,
            block_size: 16,
            block_bytes: 100,
            ledger_bytes: 1_000_000 + residents * ADAPTER_BYTES,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            policy,
            max_loras: None,
            max_cpu_loras: None,
            lora_memory: LoraMemory::Bytes(residents * ADAPTER_BYTES),
            eviction,
            base_digest: Digest([1; 32]),
            max_deferred_steps: 1_000,
            max_loading: None,
        })?;
        Ok(Self { core, plan: StepPlan::default(), outcome: StepOutcome::default(), requests: 0, loads: 0 })
    }

    fn register(&mut self) -> RegistrationId {
        let registration = self.core.next_registration();
        self.core.handle(NOW, Event::Register { registration, bytes: ADAPTER_BYTES, rereadable: true });
        registration
    }

    fn submit(&mut self, adapter: RegistrationId, tokens: usize) {
        self.requests += 1;
        let request = NewRequest {
            id: RequestId(self.requests),
            prompt: (0..8).map(|token| token + self.requests as u32).collect(),
            max_tokens: tokens,
            priority: 0,
            cache_salt: None,
            tenant: None,
            adapters: vec![AdapterUse { registration: adapter, scale: 1.0, first_active: 0 }],
            read_prefix_cache: true,
            all_prompt_logits: false,
        };
        self.core.handle(NOW, Event::Submit(request));
    }

    /// Answers the loads that were ordered.
    fn load(&mut self) {
        let ordered: Vec<_> = self.core.drain_effects().collect();
        for effect in ordered {
            let Effect::Load { registration, expected } = effect else { continue };
            self.loads += 1;
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&(u64::from(registration.index) + 1).to_le_bytes());
            let result = Ok(LoadedAdapter::new(expected.unwrap_or(Digest(digest)), ADAPTER_BYTES));
            self.core.handle(NOW, Event::LoadFinished { registration, result });
        }
    }

    fn step(&mut self) -> bool {
        if !self.core.plan(NOW, &mut self.plan) {
            return false;
        }
        self.outcome.step = self.plan.step;
        self.outcome.sequences.clear();
        self.outcome.tokens.clear();
        for sequence in &self.plan.sequences {
            let (first_token, tokens) = (self.outcome.tokens.len() as u32, u32::from(sequence.samples));
            self.outcome.tokens.extend((0..tokens).map(|_| self.plan.step as u32));
            let request = Some(sequence.request);
            self.outcome.sequences.push(SequenceOutcome { request, first_token, tokens, stopped: false });
        }
        self.core.commit(NOW, &self.outcome);
        true
    }
}

/// Median time of a steady step of 32 sequences.
fn steady(registered: usize, waiting: usize, policy: SchedulingPolicy) -> Result<Duration, CoreError> {
    let mut bench = Bench::new(4, policy, EvictionPolicyKind::Lru)?;
    let adapters: Vec<_> = (0..registered).map(|_| bench.register()).collect();
    for number in 0..32 {
        bench.submit(adapters[number % 2], 3_000);
    }
    for _ in 0..4 {
        bench.load();
        bench.step();
    }
    for number in 0..waiting {
        bench.submit(adapters[number % registered], 10);
    }
    let mut times: Vec<_> = (0..2_000)
        .map(|_| {
            let start = Instant::now();
            bench.step();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Mean time of an event that evicts one adapter among `residents` and orders a load.
fn eviction(residents: usize, policy: EvictionPolicyKind) -> Result<Duration, CoreError> {
    let mut bench = Bench::new(residents as u64, SchedulingPolicy::Fair, policy)?;
    let adapters: Vec<_> = (0..residents + 500).map(|_| bench.register()).collect();
    let (mut spent, mut count) = (Duration::ZERO, 0);
    for (number, &adapter) in adapters.iter().enumerate() {
        let start = Instant::now();
        bench.submit(adapter, 1);
        if number >= residents {
            spent += start.elapsed();
            count += 1;
        }
        bench.load();
        while bench.step() {}
    }
    Ok(spent / count)
}

fn main() -> Result<(), CoreError> {
    for policy in [SchedulingPolicy::Fair, SchedulingPolicy::Fcfs, SchedulingPolicy::Priority] {
        for (registered, waiting) in [(2, 0), (100, 0), (10_000, 0), (10_000, 5_000)] {
            let time = steady(registered, waiting, policy)?;
            println!("step: {policy:?}, {registered} registered, {waiting} waiting: {} ns", time.as_nanos());
        }
    }
    for policy in [EvictionPolicyKind::Lru, EvictionPolicyKind::CostAware] {
        for residents in [20, 2_000] {
            let time = eviction(residents, policy)?;
            println!("submit with eviction: {policy:?}, {residents} residents: {} ns", time.as_nanos());
        }
    }
    Ok(())
}
