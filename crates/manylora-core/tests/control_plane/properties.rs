//! Random interleavings of everything that can happen, with tiny pools: what must always hold holds after every event,
//! every request ends exactly once with exactly its own answer, and all bytes return.

use std::collections::BTreeMap;

use manylora_core::{
    AdapterUse, CoreConfig, Effect, Event, LoraMemory, NewRequest, RegistrationId, RequestId, SchedulingPolicy,
    StepPlan, UnloadMode,
};
use proptest::prelude::*;

use crate::driver::{BLOCK_BYTES, Driver, config};

#[derive(Clone, Debug)]
enum Action {
    Submit {
        family: u32,
        length: usize,
        max_tokens: usize,
        priority: i64,
        salt: bool,
        adapters: Vec<(usize, u8, u32)>,
        logits: bool,
    },
    Abort(usize),
    Register {
        content: u8,
        bytes: u64,
    },
    Prefetch(usize),
    Pin(usize),
    Unpin(usize),
    Unload {
        which: usize,
        abort: bool,
    },
    AnswerLoad(usize),
    Break(usize),
    Repair(usize),
    Plan,
    Commit,
    Lose,
    Reset,
}

fn action() -> impl Strategy<Value = Action> {
    let adapters = prop::collection::vec((0..6usize, 0..3u8, prop_oneof![3 => Just(0), 1 => 0..12u32]), 0..3);
    let submit =
        (0..4u32, 1..30usize, 0..12usize, -1..2i64, prop::bool::weighted(0.1), adapters, prop::bool::weighted(0.1))
            .prop_map(|(family, length, max_tokens, priority, salt, adapters, logits)| Action::Submit {
                family,
                length,
                max_tokens,
                priority,
                salt,
                adapters,
                logits,
            });
    prop_oneof![
        10 => submit,
        2 => (0..20usize).prop_map(Action::Abort),
        2 => (0..5u8, 1..700u64).prop_map(|(content, bytes)| Action::Register { content, bytes }),
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
    let switches = (any::<bool>(), prop::bool::weighted(0.8), any::<bool>());
    let adapters = (prop::option::of(1..4usize), prop::option::of(0..3usize), prop::option::of(200..2000u64));
    (sizes, switches, adapters).prop_map(
        |((blocks, seqs, rows, deferred), (cache, chunks, fcfs), (slots, host, bytes))| {
            let max_model_len = 34;
            CoreConfig {
                max_num_seqs: seqs,
                max_num_batched_tokens: if chunks { seqs + rows } else { max_model_len + rows },
                max_model_len,
                enable_prefix_caching: cache,
                enable_chunked_prefill: chunks,
                policy: if fcfs { SchedulingPolicy::Fcfs } else { SchedulingPolicy::Priority },
                max_loras: slots,
                max_cpu_loras: host.map(|more| slots.unwrap_or(1) + more),
                lora_memory: bytes.map_or(LoraMemory::Elastic, LoraMemory::Bytes),
                max_deferred_steps: deferred,
                ..config(blocks)
            }
        },
    )
}

/// Sizes by content, so that equal content has equal bytes.
type Sizes = BTreeMap<u8, u64>;

struct World {
    driver: Driver,
    registrations: Vec<RegistrationId>,
    sizes: Sizes,
}

impl World {
    fn new(config: CoreConfig, token_count: bool) -> Self {
        let mut driver = Driver::new(config);
        driver.instant_loads = false;
        if token_count {
            driver.token_count = |step, request| [1, 1, 2, 1, 0][((step + request.0) % 5) as usize];
        }
        Self { driver, registrations: Vec::new(), sizes: Sizes::new() }
    }

    fn pick(&self, which: usize) -> Option<RegistrationId> {
        let known = self.registrations.len().min(6);
        (known > 0).then(|| self.registrations[self.registrations.len() - 1 - which % known])
    }

    fn act(&mut self, action: &Action) {
        match action {
            Action::Submit { family, length, max_tokens, priority, salt, adapters, logits } => {
                let adapters = adapters.iter().filter_map(|&(which, scale, first_active)| {
                    let scale = f32::from(scale) * 0.5;
                    Some(AdapterUse { registration: self.pick(which)?, scale, first_active })
                });
                let request = NewRequest {
                    id: RequestId(0),
                    prompt: (0..*length as u32).map(|position| family * 100 + position / 3 + 1).collect(),
                    max_tokens: *max_tokens,
                    priority: *priority,
                    cache_salt: salt.then(|| "salt".to_owned()),
                    adapters: adapters.collect(),
                    read_prefix_cache: true,
                    all_prompt_logits: *logits,
                };
                self.driver.submit_request(request);
            }
            Action::Abort(back) => {
                let last = self.driver.requests.len() as u64;
                self.driver.handle(Event::Abort(RequestId(last.saturating_sub(*back as u64))));
            }
            Action::Register { content, bytes } => {
                let bytes = *self.sizes.entry(*content).or_insert(*bytes);
                let id = self.driver.register(*content, bytes);
                self.registrations.push(id);
            }
            Action::Prefetch(which) => self.with(*which, Event::Prefetch),
            Action::Pin(which) => self.with(*which, Event::Pin),
            Action::Unpin(which) => self.with(*which, Event::Unpin),
            Action::Unload { which, abort } => {
                let mode = if *abort { UnloadMode::Abort } else { UnloadMode::Drain };
                self.with(*which, |registration| Event::Unload { registration, mode });
            }
            Action::AnswerLoad(which) => {
                if !self.driver.loads.is_empty() {
                    self.driver.answer_load(which % self.driver.loads.len());
                }
            }
            Action::Break(which) => {
                if let Some(id) = self.pick(*which) {
                    self.driver.contents.insert(id, (*which > 2).then_some((77, 300)));
                }
            }
            Action::Repair(which) => {
                if let (Some(id), Some((&content, &bytes))) = (self.pick(*which), self.sizes.first_key_value()) {
                    self.driver.contents.insert(id, Some((content, bytes)));
                }
            }
            Action::Plan => {
                self.driver.plan();
            }
            Action::Commit => self.driver.commit(),
            Action::Lose => self.driver.lose(),
            Action::Reset => {
                self.driver.core.reset_prefix_cache();
            }
        }
        if let Err(problem) = self.driver.core.check_invariants() {
            panic!("{problem} after {action:?}");
        }
        let stats = self.driver.core.stats();
        let resident: u64 = stats.adapters.iter().map(|adapter| adapter.bytes).sum();
        assert_eq!(resident, stats.adapter_bytes);
        let left = stats.ledger_bytes - stats.adapter_bytes - stats.loading_bytes;
        assert_eq!(stats.total_blocks as u64, left / BLOCK_BYTES);
    }

    fn with(&mut self, which: usize, event: impl FnOnce(RegistrationId) -> Event) {
        if let Some(id) = self.pick(which) {
            self.driver.handle(event(id));
        }
    }

    fn run(mut self, actions: &[Action]) -> (Vec<StepPlan>, Vec<Effect>) {
        for action in actions {
            self.act(action);
        }
        // Everything ends: loads are answered, nothing is stuck.
        self.driver.finish();
        assert!(self.driver.requests.values().all(|request| request.ending.is_some()));
        // Everything returns.
        for id in std::mem::take(&mut self.registrations) {
            self.driver.handle(Event::Unload { registration: id, mode: UnloadMode::Drain });
        }
        while !self.driver.loads.is_empty() {
            self.driver.answer_load(0);
        }
        self.driver.core.check_invariants().unwrap();
        let stats = self.driver.core.stats();
        assert_eq!((stats.adapter_bytes, stats.loading_bytes), (0, 0));
        assert_eq!(stats.free_blocks as u64, stats.ledger_bytes / BLOCK_BYTES);
        assert!(self.driver.core.reset_prefix_cache());
        (self.driver.plans, self.driver.effects)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3 * ProptestConfig::default().cases, failure_persistence: None, max_shrink_iters: 3000, ..ProptestConfig::default() })]

    #[test]
    fn everything_holds_under_any_interleaving(
        config in limits(),
        draft in prop::bool::weighted(0.3),
        actions in prop::collection::vec(action(), 1..160),
    ) {
        let first = World::new(config.clone(), draft).run(&actions);
        let second = World::new(config, draft).run(&actions);
        prop_assert!(first == second, "the same events gave other plans or effects");
    }
}
