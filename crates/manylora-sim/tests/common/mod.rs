//! Traces that are made by hand: an engine of one thread whose steps and loads take what a known formula says.
#![allow(dead_code, reason = "each test has its own use for it")]

use std::time::Duration;

use manylora_core::budget::{ModelDimensions, NumberFormat};
use manylora_core::trace::{
    Decision, TraceHeader, TraceLine, TracedAdapter, TracedEnd, TracedLoad, TracedLoadResult, TracedOutcome,
    TracedRequest, TracedStep,
};
use manylora_core::{
    AdapterUse, ControlPlane, CoreConfig, Digest, Effect, Event, EvictionPolicyKind, LoadedAdapter, LoraMemory,
    NewRequest, RegistrationId, RequestId, SchedulingPolicy, SequenceOutcome, StepOutcome, StepPlan, Time,
};

pub(crate) const ADAPTERS: u32 = 5;

/// Settings of a small engine.
pub(crate) fn config() -> CoreConfig {
    CoreConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 256,
        block_size: 4,
        block_bytes: 1000,
        ledger_bytes: 1_000_000,
        enable_prefix_caching: false,
        enable_chunked_prefill: true,
        policy: SchedulingPolicy::Fcfs,
        max_loras: None,
        max_cpu_loras: None,
        lora_memory: LoraMemory::Elastic,
        eviction: EvictionPolicyKind::Lru,
        base_digest: Digest([0; 32]),
        max_deferred_steps: 256,
        max_loading: Some(4),
    }
}

pub(crate) fn header() -> TraceHeader {
    let dimensions = ModelDimensions {
        layers: 1,
        hidden: 1,
        intermediate: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        vocabulary: 1,
        tied: true,
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        head_norm: false,
    };
    let config = CoreConfig { max_loras: Some(2), max_cpu_loras: Some(3), ..config() };
    TraceHeader {
        loader_threads: 4,
        model: vec!["made up".to_owned()],
        backend: "by hand".to_owned(),
        phases: vec!["forward".to_owned()],
        ..TraceHeader::new(config, dimensions, NumberFormat::Bf16)
    }
}

pub(crate) fn bytes(adapter: u32) -> u64 {
    2000 + 1000 * u64::from(adapter)
}

/// What steps take: rows are dear up to 16, and cheaper from there.
pub(crate) fn step_seconds(rows: u64, sequences: u64, context: u64, adapters: u64) -> f64 {
    0.004
        + 0.001 * rows.min(16) as f64
        + 0.0005 * rows.saturating_sub(16) as f64
        + 0.0002 * sequences as f64
        + 0.000_01 * context as f64
        + 0.0008 * adapters as f64
}

pub(crate) fn load_seconds(adapter: u32, again: bool) -> f64 {
    0.002 + 1e-6 * bytes(adapter) as f64 * if again { 0.5 } else { 1.0 }
}

/// What is made.
#[derive(Clone, Copy)]
pub(crate) struct Made {
    pub(crate) requests: u64,
    /// Seconds between two requests.
    pub(crate) gap: f64,
    /// Whether requests name adapters.
    pub(crate) adapters: bool,
    /// Every so many requests one is cancelled before its end; 0 = none.
    pub(crate) cancelled: u64,
    /// What a step takes of what it should, by its number, whether it has prompts in it, and the loads under way.
    pub(crate) noise: fn(u64, bool, usize) -> f64,
}

impl Made {
    /// Requests that come `gap` apart, and steps that take what they should.
    pub(crate) fn new(requests: u64, gap: f64) -> Self {
        Self { requests, gap, adapters: true, cancelled: 0, noise: |_, _, _| 1.0 }
    }
}

/// An engine of one thread that takes these times, and writes what happens.
struct Maker {
    made: Made,
    core: ControlPlane,
    now: f64,
    lines: Vec<TraceLine>,
    loads: Vec<(f64, RegistrationId)>,
    read: [bool; ADAPTERS as usize],
    /// Tokens of each request so far.
    tokens: Vec<u64>,
}

impl Maker {
    fn effects(&mut self) {
        let effects: Vec<Effect> = self.core.drain_effects().collect();
        for effect in effects {
            let time = Time(self.now);
            self.lines.push(match Decision::from(&effect) {
                Decision::Effect(effect) => TraceLine::Effect { time, effect },
                Decision::End(id, reason) => {
                    let tokens = Some(self.tokens[id.0 as usize]);
                    TraceLine::End(TracedEnd { time, id, reason, tokens })
                }
            });
            if let Effect::Load { registration, .. } = effect {
                let seconds = load_seconds(registration.index, self.read[registration.index as usize]);
                self.loads.push((self.now + seconds, registration));
            }
        }
    }

    fn handle(&mut self, event: Event) {
        self.lines.push(TraceLine::Event { time: Time(self.now), event: event.clone() });
        self.core.handle(Time(self.now), event);
        self.effects();
    }

    fn arrive(&mut self, id: u64) {
        let registration = RegistrationId { index: (id * id % 7) as u32, generation: 0 };
        let named = self.made.adapters && registration.index < ADAPTERS;
        let adapters = named.then_some(AdapterUse { registration, scale: 1.0, first_active: 0 });
        let request = NewRequest {
            id: RequestId(id),
            prompt: vec![id as u32; 1 + (id * 37 % 50) as usize].into(),
            max_tokens: (4 + id % 9) as usize,
            priority: 0,
            cache_salt: None,
            tenant: None,
            adapters: adapters.into_iter().collect(),
            read_prefix_cache: true,
            all_prompt_logits: false,
        };
        let resident = request.adapters.iter().map(|one| self.core.is_resident(one.registration)).collect();
        let line = TracedRequest::of(Time(self.now), id as f64 * self.made.gap, &request, resident);
        self.lines.push(TraceLine::Submit(line));
        self.tokens.push(0);
        self.core.handle(Time(self.now), Event::Submit(request));
        self.effects();
    }

    fn finish_loads(&mut self) {
        self.loads.sort_by(|a, b| a.0.total_cmp(&b.0));
        while self.loads.first().is_some_and(|load| load.0 <= self.now) {
            let (_, registration) = self.loads.remove(0);
            let index = registration.index;
            let again = std::mem::replace(&mut self.read[index as usize], true);
            let seconds = Duration::from_secs_f64(load_seconds(index, again)).as_secs_f64();
            let digest = Digest([index as u8; 32]);
            let loaded = LoadedAdapter { digest, bytes: bytes(index), load_seconds: Some(seconds) };
            let result = TracedLoadResult::loaded(&loaded);
            self.lines.push(TraceLine::Load(TracedLoad { time: Time(self.now), registration, result }));
            self.core.handle(Time(self.now), Event::LoadFinished { registration, result: Ok(loaded) });
            self.effects();
        }
    }

    fn step(&mut self, plan: &mut StepPlan) -> bool {
        let time = Time(self.now);
        if !self.core.plan(time, plan) {
            self.lines.push(TraceLine::Idle { time });
            self.effects();
            return false;
        }
        let line = TracedStep::of(time, plan, &mut Vec::new());
        let context = plan.sequences.iter().map(|one| u64::from(one.first_position + one.rows)).sum();
        let prefill = plan.sequences.iter().any(|one| one.rows > 1);
        let noise = (self.made.noise)(plan.step, prefill, self.core.loading().len());
        let seconds = noise * step_seconds(line.rows, line.sequences.len() as u64, context, line.adapters);
        self.lines.push(TraceLine::Step(line));
        self.effects();
        self.now += seconds;
        let mut outcome = StepOutcome { step: plan.step, ..StepOutcome::default() };
        for planned in &plan.sequences {
            let (first_token, tokens) = (outcome.tokens.len() as u32, u32::from(planned.samples));
            outcome.tokens.extend(planned.samples.then_some(1));
            self.tokens[planned.request.0 as usize] += u64::from(tokens);
            outcome.sequences.push(SequenceOutcome {
                request: Some(planned.request),
                first_token,
                tokens,
                stopped: false,
            });
        }
        let time = Time(self.now);
        self.lines.push(TraceLine::Outcome(TracedOutcome::of(time, plan, &outcome)));
        self.core.commit(time, &outcome);
        self.effects();
        self.lines.push(TraceLine::Took { step: plan.step, seconds: vec![seconds] });
        let cancelled = self.made.cancelled;
        let due = |id: u64| cancelled > 0 && id % cancelled == 1;
        for planned in plan.sequences.clone() {
            if due(planned.request.0) && self.tokens[planned.request.0 as usize] == 2 {
                self.handle(Event::Abort(planned.request));
            }
        }
        true
    }
}

/// Lines of a trace of that engine.
pub(crate) fn lines(made: Made) -> Vec<TraceLine> {
    let mut maker = Maker {
        made,
        core: ControlPlane::new(header().config).expect("settings"),
        now: 0.0,
        lines: vec![TraceLine::Header(Box::new(header()))],
        loads: Vec::new(),
        read: [false; ADAPTERS as usize],
        tokens: Vec::new(),
    };
    for index in 0..ADAPTERS {
        let registration = maker.core.next_registration();
        let name = format!("adapter-{index}");
        let adapter = TracedAdapter { registration, name, rank: 8, bytes: bytes(index), file_bytes: None };
        maker.lines.push(TraceLine::Adapter(adapter));
        maker.handle(Event::Register { registration, bytes: bytes(index), rereadable: true });
    }
    let (mut arrived, mut plan) = (0, StepPlan::default());
    loop {
        while arrived < made.requests && arrived as f64 * made.gap <= maker.now {
            maker.arrive(arrived);
            arrived += 1;
        }
        maker.finish_loads();
        if maker.step(&mut plan) {
            continue;
        }
        let arrival = (arrived < made.requests).then_some(arrived as f64 * made.gap);
        let load = maker.loads.iter().map(|load| load.0).reduce(f64::min);
        match [arrival, load].into_iter().flatten().reduce(f64::min) {
            Some(next) => maker.now = next.max(maker.now),
            None => break,
        }
    }
    maker.lines.push(TraceLine::Close { time: Time(maker.now), lost: 0 });
    maker.lines
}

/// A trace's text.
pub(crate) fn text(lines: &[TraceLine]) -> String {
    lines.iter().map(|line| serde_json::to_string(line).expect("JSON") + "\n").collect()
}

/// A trace of that engine.
pub(crate) fn trace(made: Made) -> String {
    text(&lines(made))
}
