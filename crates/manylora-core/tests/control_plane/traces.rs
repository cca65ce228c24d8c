//! Long random traces: 10^5 steps of traffic with aborts, samples that fan out, chunks, preemption, tiny budgets,
//! replacements, unloads, pins and adapters from memory, under every policy.

use manylora_core::{CoreConfig, EvictionPolicyKind, LoraMemory, SchedulingPolicy};

use crate::driver::config;
use crate::world::{Action, World};

/// A small generator of random numbers (SplitMix64), the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % limit
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn which(&mut self) -> usize {
        self.below(6) as usize
    }

    fn request(&mut self) -> Action {
        let adapters = (0..self.below(3)).map(|_| {
            let first_active = if self.chance(75) { 0 } else { self.below(12) as u32 };
            (self.which(), self.below(3) as u8, first_active)
        });
        let adapters = adapters.collect();
        Action::Submit {
            family: self.below(4) as u32,
            length: 1 + self.below(29) as usize,
            max_tokens: self.below(12) as usize,
            priority: self.below(3) as i64 - 1,
            salt: self.chance(10),
            adapters,
            logits: self.chance(10),
            tenant: self.chance(20).then(|| self.below(3) as u8),
        }
    }

    /// What happens between two steps.
    fn actions(&mut self, waiting: usize) -> Vec<Action> {
        let mut actions = Vec::new();
        if waiting < 30 && self.chance(35) {
            // Several samples are several requests.
            let request = self.request();
            for _ in 0..=self.below(3) {
                actions.push(request.clone());
            }
        }
        let content = self.below(6) as u32;
        let bytes = 1 + self.below(699);
        let abort = self.chance(50);
        match self.below(100) {
            0..6 => actions.push(Action::Abort(self.below(20) as usize)),
            6..9 => actions.push(Action::Register { content, bytes, given: self.chance(15) }),
            9..11 => actions.push(Action::Prefetch(self.which())),
            11..12 => actions.push(Action::Pin(self.which())),
            12..14 => actions.push(Action::Unpin(self.which())),
            14..16 => actions.push(Action::Unload { which: self.which(), abort }),
            16..17 => actions.push(Action::Break(self.which())),
            17..18 => actions.push(Action::Repair(self.which())),
            18..19 => actions.push(Action::Lose),
            19..22 => {
                let expect = self.chance(50).then(|| self.chance(80));
                actions.push(Action::Replace { which: self.which(), content, bytes, given: self.chance(15), expect });
            }
            22..24 => actions.push(Action::Retire),
            24..25 => actions.push(Action::SetWeight { which: Some(self.which()), weight: 0.5 }),
            _ => {}
        }
        if self.chance(60) {
            actions.push(Action::AnswerLoad(self.which()));
        }
        actions.push(Action::Plan);
        if self.chance(10) {
            actions.push(Action::Plan);
        }
        actions.push(Action::Commit);
        actions
    }
}

fn limits(random: &mut Random, policy: SchedulingPolicy) -> CoreConfig {
    let slots = random.chance(60).then(|| 1 + random.below(3) as usize);
    let seqs = 1 + random.below(5) as usize;
    let chunks = random.chance(70);
    let rows = random.below(20) as usize;
    CoreConfig {
        max_num_seqs: seqs,
        max_num_batched_tokens: if chunks { seqs + rows } else { 34 + rows },
        max_model_len: 34,
        enable_chunked_prefill: chunks,
        enable_prefix_caching: random.chance(70),
        policy,
        eviction: if random.chance(50) { EvictionPolicyKind::CostAware } else { EvictionPolicyKind::Lru },
        max_loras: slots,
        max_cpu_loras: random.chance(60).then(|| slots.unwrap_or(1) + random.below(3) as usize),
        lora_memory: match random.below(5) {
            0 | 1 => LoraMemory::Bytes(200 + random.below(1800)),
            _ => LoraMemory::Elastic,
        },
        max_deferred_steps: random.below(12),
        max_loading: random.chance(50).then(|| 1 + random.below(3) as usize),
        ..config(9 + random.below(15) as usize)
    }
}

/// Plays `steps` steps of a trace and returns what is left to compare: the last plans and effects.
fn play(seed: u64, policy: SchedulingPolicy, steps: u64, check_every: u64, keeps_log: bool) -> World {
    let mut random = Random(seed);
    let mut world = World::new(limits(&mut random, policy), seed.is_multiple_of(3), check_every);
    world.driver.keeps_log = keeps_log;
    let target = world.driver.steps + steps;
    let mut turns = 0;
    while world.driver.steps < target && turns < 4 * steps {
        turns += 1;
        let waiting = world.driver.core.stats().waiting;
        for action in random.actions(waiting) {
            world.act(&action);
        }
    }
    world
}

#[test]
fn everything_holds_over_a_hundred_thousand_steps_of_each_policy() {
    for (number, policy) in
        [SchedulingPolicy::Fair, SchedulingPolicy::Fcfs, SchedulingPolicy::Priority].into_iter().enumerate()
    {
        let mut steps = 0;
        for seed in 0..24 {
            let world = play(1000 * number as u64 + seed, policy, 5_000, 101, false);
            steps += world.driver.steps;
            world.end();
        }
        assert!(steps >= 100_000, "{policy:?}: only {steps} steps were planned");
    }
}

#[test]
fn a_trace_gives_the_same_plans_and_effects_again() {
    for (seed, policy) in [(7, SchedulingPolicy::Fair), (8, SchedulingPolicy::Fcfs), (9, SchedulingPolicy::Priority)] {
        let [first, second] = [(); 2].map(|()| play(seed, policy, 1_500, 1, true).end());
        assert!(first == second, "{policy:?}: other plans or effects");
        assert!(first.0.len() >= 700 && !first.1.is_empty());
    }
}
