//! An engine without numbers. The "forward pass" folds every token, with the adapters active at its position, into a
//! running hash that lives in KV cells addressed through the plan's block tables and slots. A next token is a function of
//! that hash, so that a single wrong block, slot, position or cache hit anywhere changes what a request says; what it must
//! say is computed apart, from the request alone ([`Wanted::tokens`]).

use std::collections::{BTreeMap, BTreeSet};

use manylora_core::plan::PLACEHOLDER;
use manylora_core::{
    AdapterUse, ControlPlane, CoreConfig, Digest, Effect, Event, EvictionPolicyKind, FailureReason, FinishReason,
    LoadedAdapter, LoraMemory, NewRequest, RegistrationId, RequestId, SchedulingPolicy, SequenceOutcome, StepOutcome,
    StepPlan, Time, UnloadMode,
};

pub(crate) const BLOCK_SIZE: usize = 4;
pub(crate) const BLOCK_BYTES: u64 = 100;

/// A configuration with room for `blocks` KV blocks.
pub(crate) fn config(blocks: usize) -> CoreConfig {
    CoreConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: (blocks * BLOCK_SIZE).min(64),
        block_size: BLOCK_SIZE,
        block_bytes: BLOCK_BYTES,
        ledger_bytes: blocks as u64 * BLOCK_BYTES,
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        policy: SchedulingPolicy::Fcfs,
        max_loras: None,
        max_cpu_loras: None,
        lora_memory: LoraMemory::Elastic,
        eviction: EvictionPolicyKind::Lru,
        base_digest: Digest([1; 32]),
        max_deferred_steps: 20,
        max_loading: None,
    }
}

pub(crate) fn digest(content: u32) -> Digest {
    let mut digest = [7; 32];
    digest[..4].copy_from_slice(&content.to_le_bytes());
    Digest(digest)
}

fn mix(state: u64, value: u64) -> u64 {
    let mixed = (state ^ value.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    mixed ^ (mixed >> 32)
}

fn fold(state: u64, token: u32, position: usize, adapters: impl Iterator<Item = (Digest, f32, u32)>) -> u64 {
    let mut state = mix(mix(state, u64::from(token)), position as u64);
    for (digest, scale, first_active) in adapters {
        if position >= first_active as usize {
            let content = u32::from_le_bytes([digest.0[0], digest.0[1], digest.0[2], digest.0[3]]);
            state = mix(mix(state, u64::from(content) + 1000), u64::from(scale.to_bits()));
        }
    }
    state
}

fn next_token(state: u64) -> u32 {
    (state % 1000) as u32
}

fn stops(token: u32) -> bool {
    token.is_multiple_of(41)
}

/// What a request must say.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    prompt: Vec<u32>,
    adapters: Vec<(Digest, f32, u32)>,
    length_limit: usize,
}

impl Wanted {
    fn next(&self, tokens: &[u32]) -> u32 {
        let states = tokens.iter().enumerate();
        next_token(
            states.fold(0, |state, (position, &token)| fold(state, token, position, self.adapters.iter().copied())),
        )
    }

    pub(crate) fn tokens(&self) -> Vec<u32> {
        let mut all = self.prompt.clone();
        while all.len() < self.length_limit {
            all.push(self.next(&all));
            if stops(all[all.len() - 1]) {
                break;
            }
        }
        all.split_off(self.prompt.len())
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ending {
    Finished(FinishReason),
    Failed(FailureReason),
}

/// A request under way or ended.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    pub(crate) wanted: Option<Wanted>,
    pub(crate) request: NewRequest,
    pub(crate) output: Vec<u32>,
    pub(crate) bound: bool,
    pub(crate) first_step: Option<u64>,
    pub(crate) cached_tokens: u32,
    pub(crate) ending: Option<Ending>,
}

/// How many tokens a sampling sequence brings: one, unless a test says otherwise.
pub(crate) type TokenCount = fn(u64, RequestId) -> u32;

pub(crate) struct Driver {
    pub(crate) core: ControlPlane,
    pub(crate) plan: StepPlan,
    pub(crate) requests: BTreeMap<RequestId, Progress>,
    /// What a load of a registration finds: content and bytes, or nothing.
    pub(crate) contents: BTreeMap<RegistrationId, Option<(u32, u64)>>,
    pub(crate) table: BTreeMap<u32, Digest>,
    /// What the first read of each registration found: its version for good.
    versions: BTreeMap<RegistrationId, Digest>,
    /// Loads that were ordered and not answered.
    pub(crate) loads: Vec<(RegistrationId, Option<Digest>)>,
    /// Answer loads at once.
    pub(crate) instant_loads: bool,
    pub(crate) effects: Vec<Effect>,
    pub(crate) plans: Vec<StepPlan>,
    pub(crate) token_count: TokenCount,
    pub(crate) steps: u64,
    /// Given from memory or replaced, and not unloaded: must never be evicted.
    anchored: BTreeSet<RegistrationId>,
    /// Replaced and not unloaded.
    pub(crate) replaced: BTreeSet<RegistrationId>,
    /// Those that were resident then: requests that name them can always be served.
    outgoing: BTreeSet<RegistrationId>,
    /// Whether plans and effects are kept.
    pub(crate) keeps_log: bool,
    /// Whether the end of all requests is checked thoroughly.
    pub(crate) checks_end: bool,
    /// What reading a content takes.
    pub(crate) load_seconds: fn(u32) -> Option<f64>,
    cells: Vec<u64>,
    /// Executed and not committed.
    uncommitted: Vec<(StepPlan, StepOutcome)>,
    sampled: BTreeMap<RequestId, u32>,
    void: BTreeSet<(u64, RequestId)>,
    next_request: u64,
    cap: usize,
}

impl Driver {
    pub(crate) fn new(config: CoreConfig) -> Self {
        let blocks = (config.ledger_bytes / config.block_bytes) as usize;
        let most = |limit: Option<usize>| limit.unwrap_or(usize::MAX);
        Self {
            cap: most(config.max_loras).min(most(config.max_cpu_loras)),
            cells: vec![u64::MAX; blocks * config.block_size],
            core: ControlPlane::new(config).unwrap(),
            plan: StepPlan::default(),
            requests: BTreeMap::new(),
            contents: BTreeMap::new(),
            table: BTreeMap::new(),
            versions: BTreeMap::new(),
            loads: Vec::new(),
            instant_loads: true,
            effects: Vec::new(),
            plans: Vec::new(),
            token_count: |_, _| 1,
            steps: 0,
            anchored: BTreeSet::new(),
            replaced: BTreeSet::new(),
            outgoing: BTreeSet::new(),
            keeps_log: true,
            checks_end: true,
            load_seconds: |_| None,
            uncommitted: Vec::new(),
            sampled: BTreeMap::new(),
            void: BTreeSet::new(),
            next_request: 0,
        }
    }

    pub(crate) fn handle(&mut self, event: Event) {
        self.core.handle(Time(self.steps as f64), event);
        self.absorb();
    }

    /// Registers content on disk.
    pub(crate) fn register(&mut self, content: u32, bytes: u64) -> RegistrationId {
        self.register_as(content, bytes, true)
    }

    /// Registers content given from memory.
    pub(crate) fn give(&mut self, content: u32, bytes: u64) -> RegistrationId {
        self.register_as(content, bytes, false)
    }

    fn register_as(&mut self, content: u32, bytes: u64, rereadable: bool) -> RegistrationId {
        let registration = self.core.next_registration();
        self.contents.insert(registration, Some((content, bytes)));
        if !rereadable {
            self.anchored.insert(registration);
        }
        self.handle(Event::Register { registration, bytes, rereadable });
        registration
    }

    /// What the last failure of a registration said.
    pub(crate) fn failure(&self, registration: RegistrationId) -> String {
        let mut messages = self.effects.iter().filter_map(|effect| match effect {
            Effect::RegistrationFailed { registration: one, message } if *one == registration => Some(message.clone()),
            _ => None,
        });
        messages.next_back().unwrap_or_default()
    }

    pub(crate) fn submit(&mut self, prompt: &[u32], max_tokens: usize, adapters: &[RegistrationId]) -> RequestId {
        let adapters = adapters.iter().map(|&registration| whole(registration)).collect();
        self.submit_request(NewRequest { adapters, ..request(prompt, max_tokens) })
    }

    /// Submits a request of a tenant.
    pub(crate) fn submit_for(&mut self, tenant: &str, prompt: &[u32], max_tokens: usize) -> RequestId {
        self.submit_request(NewRequest { tenant: Some(tenant.to_owned()), ..request(prompt, max_tokens) })
    }

    /// Submits under a fresh id.
    pub(crate) fn submit_request(&mut self, mut request: NewRequest) -> RequestId {
        request.id = RequestId(self.next_request);
        self.next_request += 1;
        let progress = Progress {
            wanted: None,
            request: request.clone(),
            output: Vec::new(),
            bound: false,
            first_step: None,
            cached_tokens: 0,
            ending: None,
        };
        self.requests.insert(request.id, progress);
        let id = request.id;
        self.handle(Event::Submit(request));
        id
    }

    pub(crate) fn answer_load(&mut self, position: usize) {
        let (registration, expected) = self.loads.remove(position);
        assert_eq!(expected, self.versions.get(&registration).copied());
        // The loader reports other content than expected as it is: the control plane must notice.
        let result = match self.contents.get(&registration).copied().flatten() {
            Some((content, bytes)) => Ok(LoadedAdapter {
                load_seconds: (self.load_seconds)(content),
                ..LoadedAdapter::new(digest(content), bytes)
            }),
            None => Err("file is gone".to_owned().into()),
        };
        let read = result.as_ref().ok().map(|loaded| loaded.digest);
        self.handle(Event::LoadFinished { registration, result });
        // A first read may be refused for its size; otherwise it is the version for good.
        if let Some(bound) = self.core.registration(registration).and_then(|status| status.digest) {
            let version = *self.versions.entry(registration).or_insert(bound);
            assert!(version == bound && (expected.is_some() || read == Some(bound)));
        }
    }

    fn absorb(&mut self) {
        let effects: Vec<_> = self.core.drain_effects().collect();
        for effect in &effects {
            match effect {
                Effect::Load { registration, expected } => {
                    assert!(self.loads.iter().all(|(other, _)| other != registration), "two loads of {registration:?}");
                    self.loads.push((*registration, *expected));
                }
                Effect::Install { slot, digest } => {
                    assert_eq!(self.table.insert(slot.0, *digest), None, "slot taken");
                    assert!(slot.0 as usize <= self.table.len(), "slots are dense");
                }
                Effect::Evict { slot, digest } => {
                    assert_eq!(self.table.remove(&slot.0), Some(*digest), "slot holds something else");
                    let in_use = |plan: &StepPlan| plan.adapters.iter().any(|adapter| adapter.slot == *slot);
                    assert!(!self.uncommitted.iter().any(|(plan, _)| in_use(plan)), "evicted under a step in flight");
                    let kept = self
                        .anchored
                        .iter()
                        .find(|id| self.versions.get(id) == Some(digest) && self.core.registration(**id).is_some());
                    assert_eq!(kept, None, "evicted although it cannot be read again");
                }
                Effect::LeaseBound(request) => {
                    let progress = self.requests.get_mut(request).unwrap();
                    assert!(!progress.bound && progress.ending.is_none());
                    progress.bound = true;
                }
                Effect::RequestFailed { request, reason } => {
                    let named = &self.requests[request].request.adapters;
                    let served = named.len() == 1 && self.outgoing.contains(&named[0].registration);
                    let lost = served && matches!(reason, FailureReason::AdapterLoad(_));
                    assert!(!lost, "{request:?} named a version that was replaced while it served: {reason}");
                    self.end(*request, Ending::Failed(reason.clone()));
                }
                Effect::Unloaded(registration) => {
                    self.anchored.remove(registration);
                    self.outgoing.remove(registration);
                    self.replaced.remove(registration);
                }
                Effect::Replaced { old, new } => {
                    assert!(self.core.registration(*new).is_some_and(|status| status.digest.is_some()));
                    self.anchored.insert(*old);
                    self.replaced.insert(*old);
                    if self.core.registration(*old).is_some_and(|status| status.slot.is_some()) {
                        self.outgoing.insert(*old);
                        // Its path holds the new content now.
                        self.contents.insert(*old, self.contents[new]);
                    }
                }
                Effect::Finished { request, reason } => self.end(*request, Ending::Finished(*reason)),
                Effect::RegistrationFailed { .. } | Effect::Resident(_) | Effect::OnDemand(_) => {}
            }
        }
        if self.keeps_log {
            self.effects.extend(effects);
        }
        while self.instant_loads && !self.loads.is_empty() {
            self.answer_load(0);
        }
    }

    fn end(&mut self, request: RequestId, ending: Ending) {
        let progress = self.requests.get_mut(&request).unwrap();
        assert_eq!(progress.ending, None, "{request:?} ended twice");
        if let Some(wanted) = &progress.wanted {
            // Tokens of a draft beyond the limit do not count.
            progress.output.truncate(wanted.length_limit - wanted.prompt.len());
            let wanted = wanted.tokens();
            match ending {
                Ending::Finished(FinishReason::Abort) | Ending::Failed(_) => {
                    assert!(wanted.starts_with(&progress.output), "{request:?} went astray before its abort");
                }
                Ending::Finished(reason) => {
                    assert_eq!(progress.output, wanted, "{request:?}");
                    let stopped = wanted.last().is_some_and(|&token| stops(token));
                    assert_eq!(reason == FinishReason::Stop, stopped);
                }
            }
        } else {
            assert!(!matches!(ending, Ending::Finished(FinishReason::Stop | FinishReason::Length)));
        }
        progress.ending = Some(ending);
    }

    /// Plans and executes a step; its outcome stays uncommitted.
    pub(crate) fn plan(&mut self) -> bool {
        let mut planned = self.core.plan(Time(self.steps as f64), &mut self.plan);
        if !planned {
            // A load that the plan ordered may be answered by now.
            self.absorb();
            planned = self.core.plan(Time(self.steps as f64), &mut self.plan);
        }
        if planned {
            self.steps += 1;
            self.check_plan();
        }
        self.absorb();
        if planned {
            let plan = self.plan.clone();
            let outcome = self.execute(&plan);
            if self.keeps_log {
                self.plans.push(plan.clone());
            }
            self.uncommitted.push((plan, outcome));
        }
        planned
    }

    fn check_plan(&self) {
        let (plan, config) = (&self.plan, self.core.config());
        assert!(plan.tokens.len() <= config.max_num_batched_tokens);
        assert!(plan.sequences.len() <= config.max_num_seqs);
        let distinct: BTreeSet<_> = plan.adapters.iter().map(|adapter| adapter.slot).collect();
        assert!(distinct.len() <= self.cap, "{} adapters in a step", distinct.len());
        let requests: BTreeSet<_> = plan.sequences.iter().map(|sequence| sequence.request).collect();
        assert_eq!(requests.len(), plan.sequences.len());
        let rows: u32 = plan.sequences.iter().map(|sequence| sequence.rows).sum();
        assert_eq!(rows as usize, plan.tokens.len());
        let retired: BTreeSet<_> = self.core.retired_blocks().collect();
        assert!(plan.blocks.iter().all(|block| !retired.contains(block)));
    }

    fn execute(&mut self, plan: &StepPlan) -> StepOutcome {
        let mut outcome = StepOutcome { step: plan.step, ..StepOutcome::default() };
        for sequence in &plan.sequences {
            let blocks = &plan.blocks[sequence.first_block as usize..][..sequence.blocks as usize];
            let cell = |position: usize| blocks[position / BLOCK_SIZE].0 as usize * BLOCK_SIZE + position % BLOCK_SIZE;
            let adapters = &plan.adapters[sequence.first_adapter as usize..][..sequence.adapters as usize];
            let adapters: Vec<_> =
                adapters.iter().map(|one| (self.table[&one.slot.0], one.scale, one.first_active)).collect();
            let progress = self.requests.get_mut(&sequence.request).unwrap();
            progress.first_step.get_or_insert(plan.step);
            progress.cached_tokens = sequence.cached_tokens;
            let named = progress.request.adapters.iter().filter(|adapter| adapter.scale != 0.0);
            progress.wanted.get_or_insert_with(|| Wanted {
                prompt: progress.request.prompt.to_vec(),
                adapters: named
                    .map(|adapter| (self.versions[&adapter.registration], adapter.scale, adapter.first_active))
                    .collect(),
                length_limit: progress.request.prompt.len()
                    + progress
                        .request
                        .max_tokens
                        .min((self.core.config().max_model_len - progress.request.prompt.len()).max(1)),
            });
            let mut state = 0;
            for row in 0..sequence.rows as usize {
                let position = sequence.first_position as usize + row;
                let token = match plan.tokens[sequence.first_token as usize + row] {
                    PLACEHOLDER => self.sampled[&sequence.request],
                    token => token,
                };
                let before = if position == 0 { 0 } else { self.cells[cell(position - 1)] };
                state = fold(before, token, position, adapters.iter().copied());
                self.cells[cell(position)] = state;
            }
            let first_token = outcome.tokens.len() as u32;
            if sequence.samples {
                let token = next_token(state);
                self.sampled.insert(sequence.request, token);
                let count = (self.token_count)(plan.step, sequence.request);
                if count > 0 {
                    outcome.tokens.push(token);
                }
                if count > 1 && !stops(token) {
                    let position = (sequence.first_position + sequence.rows) as usize;
                    outcome.tokens.push(next_token(fold(state, token, position, adapters.iter().copied())));
                }
            }
            let new = &outcome.tokens[first_token as usize..];
            outcome.sequences.push(SequenceOutcome {
                request: Some(sequence.request),
                first_token,
                tokens: new.len() as u32,
                stopped: new.last().is_some_and(|&token| stops(token)),
            });
        }
        outcome
    }

    /// Commits the oldest executed step.
    pub(crate) fn commit(&mut self) {
        if self.uncommitted.is_empty() {
            return;
        }
        let (plan, mut outcome) = self.uncommitted.remove(0);
        for (sequence, result) in plan.sequences.iter().zip(&mut outcome.sequences) {
            if self.void.remove(&(plan.step, sequence.request)) {
                // Planned on a token that did not come: an engine has nothing to say here.
                *result = SequenceOutcome { request: result.request, ..SequenceOutcome::default() };
                continue;
            }
            let new = &outcome.tokens[result.first_token as usize..][..result.tokens as usize];
            let progress = self.requests.get_mut(&sequence.request).unwrap();
            if progress.ending.is_none() {
                progress.output.extend_from_slice(new);
            }
            if sequence.samples && new.len() != 1 {
                let ahead = self.uncommitted.iter().map(|(plan, _)| plan);
                self.void.extend(ahead.map(|plan| (plan.step, sequence.request)));
            }
        }
        self.core.commit(Time(self.steps as f64), &outcome);
        self.absorb();
    }

    /// Reports a step as lost: no results at all.
    pub(crate) fn lose(&mut self) {
        if self.uncommitted.is_empty() {
            return;
        }
        let (plan, _) = self.uncommitted.remove(0);
        let ahead = self.uncommitted.iter().map(|(plan, _)| plan.step);
        let ahead: Vec<_> = ahead.collect();
        for sequence in &plan.sequences {
            if !self.void.remove(&(plan.step, sequence.request)) {
                self.void.extend(ahead.iter().map(|&step| (step, sequence.request)));
            }
        }
        let outcome = StepOutcome { step: plan.step, ..StepOutcome::default() };
        self.core.commit(Time(self.steps as f64), &outcome);
        self.absorb();
    }

    pub(crate) fn step(&mut self) -> bool {
        let planned = self.plan();
        self.commit();
        planned
    }

    /// Steps until all requests ended.
    pub(crate) fn finish(&mut self) {
        let limit = self.steps + 20_000;
        while self.core.has_work() {
            let waiting = self.core.stats().waiting;
            let mut advanced = self.plan() || !self.uncommitted.is_empty() || self.core.stats().waiting < waiting;
            self.commit();
            if !advanced {
                // Nobody is on the way any more who means the old version by its name.
                for registration in std::mem::take(&mut self.replaced) {
                    self.handle(Event::Unload { registration, mode: UnloadMode::Drain });
                    advanced = true;
                }
            }
            if !advanced && !self.loads.is_empty() {
                self.answer_load(0);
                advanced = true;
            }
            assert!(advanced, "stuck: {:?}", self.core.stats());
            assert!(self.steps < limit, "no end: {:?}", self.core.stats());
        }
        while !self.uncommitted.is_empty() {
            self.commit();
        }
        if self.checks_end {
            self.core.check_invariants().unwrap();
        }
    }

    pub(crate) fn ending(&self, request: RequestId) -> Option<&Ending> {
        self.requests[&request].ending.as_ref()
    }

    pub(crate) fn is_running(&self, request: RequestId) -> bool {
        self.plan.sequences.iter().any(|sequence| sequence.request == request)
    }
}

/// A plain request to the base.
pub(crate) fn request(prompt: &[u32], max_tokens: usize) -> NewRequest {
    NewRequest {
        id: RequestId(0),
        prompt: prompt.into(),
        max_tokens,
        priority: 0,
        cache_salt: None,
        tenant: None,
        adapters: Vec::new(),
        read_prefix_cache: true,
        all_prompt_logits: false,
    }
}

/// An adapter on the whole sequence with its own strength.
pub(crate) fn whole(registration: RegistrationId) -> AdapterUse {
    AdapterUse { registration, scale: 1.0, first_active: 0 }
}

/// A prompt of `length` tokens; prompts of different seeds differ from the first token on.
pub(crate) fn prompt(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|position| seed * 10_000 + position + 1).collect()
}
