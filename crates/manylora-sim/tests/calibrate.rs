//! Calibration on traces that were made by hand from a known cost model: it must be found again.

use std::io::Cursor;
use std::time::Duration;

use manylora_core::budget::{ModelDimensions, NumberFormat};
use manylora_core::trace::{
    Decision, TRACE_FORMAT, TRACE_VERSION, TraceHeader, TraceLine, TracedAdapter, TracedEnd, TracedLoad,
    TracedLoadResult, TracedOutcome, TracedRequest, TracedSequence, TracedStep,
};
use manylora_core::{
    AdapterUse, ControlPlane, CoreConfig, Digest, Effect, Event, EvictionPolicyKind, LoadedAdapter, LoraMemory,
    NewRequest, RegistrationId, RequestId, SchedulingPolicy, SequenceOutcome, StepOutcome, StepPlan, Time,
};
use manylora_sim::SimError;
use manylora_sim::calibrate::{Calibration, calibrate, compare};
use manylora_sim::cost::{AdapterShape, CostModel, StepWork, Tier};

const ADAPTERS: u32 = 5;

fn header() -> TraceHeader {
    TraceHeader {
        format: TRACE_FORMAT.to_owned(),
        version: TRACE_VERSION,
        program: "0".to_owned(),
        started: 0.0,
        config: CoreConfig {
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_model_len: 256,
            block_size: 4,
            block_bytes: 1000,
            ledger_bytes: 1_000_000,
            enable_prefix_caching: false,
            enable_chunked_prefill: true,
            policy: SchedulingPolicy::Fcfs,
            max_loras: Some(2),
            max_cpu_loras: Some(3),
            lora_memory: LoraMemory::Elastic,
            eviction: EvictionPolicyKind::Lru,
            base_digest: Digest([0; 32]),
            max_deferred_steps: 256,
            max_loading: Some(4),
        },
        loader_threads: 4,
        model: vec!["made up".to_owned()],
        dimensions: ModelDimensions {
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
        },
        number: NumberFormat::Bf16,
        device: "cpu".to_owned(),
        backend: "by hand".to_owned(),
        phases: vec!["forward".to_owned()],
    }
}

fn bytes(adapter: u32) -> u64 {
    2000 + 1000 * u64::from(adapter)
}

/// What steps take: rows are dear up to 16, and cheaper from there.
fn step_seconds(rows: u64, sequences: u64, context: u64, adapters: u64) -> f64 {
    0.004
        + 0.001 * rows.min(16) as f64
        + 0.0005 * rows.saturating_sub(16) as f64
        + 0.0002 * sequences as f64
        + 0.000_01 * context as f64
        + 0.0008 * adapters as f64
}

fn load_seconds(adapter: u32, again: bool) -> f64 {
    0.002 + 1e-6 * bytes(adapter) as f64 * if again { 0.5 } else { 1.0 }
}

/// An engine of one thread that takes these times, and writes what happens.
struct Maker {
    core: ControlPlane,
    now: f64,
    lines: Vec<TraceLine>,
    loads: Vec<(f64, RegistrationId)>,
    read: [bool; ADAPTERS as usize],
    slow: bool,
}

impl Maker {
    fn effects(&mut self) {
        let effects: Vec<Effect> = self.core.drain_effects().collect();
        for effect in effects {
            let time = Time(self.now);
            self.lines.push(match Decision::from(&effect) {
                Decision::Effect(effect) => TraceLine::Effect { time, effect },
                Decision::End(id, reason) => {
                    let tokens = Some(4 + id.0 % 9);
                    TraceLine::End(TracedEnd { time, id, reason, tokens })
                }
            });
            if let Effect::Load { registration, .. } = effect {
                let seconds = load_seconds(registration.index, self.read[registration.index as usize]);
                self.loads.push((self.now + seconds, registration));
            }
        }
    }

    fn arrive(&mut self, id: u64) {
        let registration = RegistrationId { index: (id * id % 7) as u32, generation: 0 };
        let adapters = if registration.index < ADAPTERS {
            vec![AdapterUse { registration, scale: 1.0, first_active: 0 }]
        } else {
            Vec::new()
        };
        let prompt_tokens = 1 + (id * 37 % 50) as u32;
        let max_tokens = 4 + id % 9;
        self.lines.push(TraceLine::Submit(TracedRequest {
            time: Time(self.now),
            arrival: self.now,
            id: RequestId(id),
            resident: adapters.iter().map(|one| self.core.is_resident(one.registration)).collect(),
            adapters: adapters.clone(),
            prompt_tokens,
            max_tokens,
            priority: 0,
            tenant: None,
            salt: None,
            read_prefix_cache: true,
            all_prompt_logits: false,
            blocks: Vec::new(),
        }));
        self.core.handle(
            Time(self.now),
            Event::Submit(NewRequest {
                id: RequestId(id),
                prompt: vec![id as u32; prompt_tokens as usize].into(),
                max_tokens: max_tokens as usize,
                priority: 0,
                cache_salt: None,
                tenant: None,
                adapters,
                read_prefix_cache: true,
                all_prompt_logits: false,
            }),
        );
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
        let mut slots: Vec<u32> = plan.adapters.iter().map(|one| one.slot.0).collect();
        slots.sort_unstable();
        slots.dedup();
        let (rows, adapters) = (plan.tokens.len() as u64, slots.len() as u64);
        let sequences: Vec<TracedSequence> = plan.sequences.iter().map(TracedSequence::from).collect();
        let context = plan.sequences.iter().map(|one| u64::from(one.first_position + one.rows)).sum();
        let mut seconds = step_seconds(rows, sequences.len() as u64, context, adapters);
        if self.slow && plan.step.is_multiple_of(25) {
            // Somebody else had the machine.
            seconds *= 6.0;
        }
        self.lines.push(TraceLine::Step(TracedStep { time, step: plan.step, rows, adapters, sequences }));
        self.effects();
        self.now += seconds;
        let mut outcome = StepOutcome { step: plan.step, ..StepOutcome::default() };
        for planned in &plan.sequences {
            let (first_token, tokens) = (outcome.tokens.len() as u32, u32::from(planned.samples));
            outcome.tokens.extend(planned.samples.then_some(1));
            outcome.sequences.push(SequenceOutcome {
                request: Some(planned.request),
                first_token,
                tokens,
                stopped: false,
            });
        }
        let time = Time(self.now);
        self.lines.push(TraceLine::Outcome(TracedOutcome {
            time,
            step: plan.step,
            stopped: Vec::new(),
            others: Vec::new(),
            filled: Vec::new(),
        }));
        self.core.commit(time, &outcome);
        self.effects();
        self.lines.push(TraceLine::Took { step: plan.step, seconds: vec![seconds] });
        true
    }
}

/// A trace of that engine under requests that come `gap` apart.
fn trace(requests: u64, gap: f64, slow: bool) -> String {
    let mut maker = Maker {
        core: ControlPlane::new(header().config).expect("settings"),
        now: 0.0,
        lines: vec![TraceLine::Header(Box::new(header()))],
        loads: Vec::new(),
        read: [false; ADAPTERS as usize],
        slow,
    };
    for index in 0..ADAPTERS {
        let registration = maker.core.next_registration();
        let name = format!("adapter-{index}");
        let adapter = TracedAdapter { registration, name, rank: 8, bytes: bytes(index), file_bytes: None };
        maker.lines.push(TraceLine::Adapter(adapter));
        let event = Event::Register { registration, bytes: bytes(index), rereadable: true };
        maker.lines.push(TraceLine::Event { time: Time(0.0), event: event.clone() });
        maker.core.handle(Time(0.0), event);
    }
    let (mut arrived, mut plan) = (0, StepPlan::default());
    loop {
        while arrived < requests && arrived as f64 * gap <= maker.now {
            maker.arrive(arrived);
            arrived += 1;
        }
        maker.finish_loads();
        if maker.step(&mut plan) {
            continue;
        }
        let arrival = (arrived < requests).then_some(arrived as f64 * gap);
        let load = maker.loads.iter().map(|load| load.0).reduce(f64::min);
        match [arrival, load].into_iter().flatten().reduce(f64::min) {
            Some(next) => maker.now = next.max(maker.now),
            None => break,
        }
    }
    maker.lines.push(TraceLine::Close { time: Time(maker.now), lost: 0 });
    maker.lines.iter().map(|line| serde_json::to_string(line).expect("JSON") + "\n").collect()
}

fn fitted(slow: bool) -> Calibration {
    calibrate([Cursor::new(trace(400, 0.05, slow)), Cursor::new(trace(200, 0.01, slow))]).expect("it fits")
}

#[test]
fn a_known_cost_is_found_again() {
    let calibration = fitted(false);
    let cost = calibration.cost().expect("good numbers");
    for (kind, one) in &calibration.fit.steps {
        assert!(one.p90_deviation < 0.01, "{kind}: {one:?}");
        assert!((one.fitted_over_measured - 1.0).abs() < 0.01, "{kind}: {one:?}");
    }
    assert!(calibration.fit.steps.contains_key("decode and prefill, adapters"));
    // A step that was not seen: four sequences of 100 positions that decode with two adapters.
    let work = StepWork {
        sequences: 4,
        rows: 4,
        sampled_rows: 4,
        context: 200,
        attention_pairs: 200,
        adapters: 2,
        adapter_bytes: 2 * bytes(2),
        adapter_rows: 4,
        adapter_row_parameters: 4 * bytes(2) / 2,
        ..StepWork::default()
    };
    let (wanted, found) = (step_seconds(4, 4, 200, 2), cost.step(&work));
    assert!((found / wanted - 1.0).abs() < 0.03, "{found} {wanted}");
    for (tier, again) in [(Tier::Disk, false), (Tier::Host, true)] {
        let shape = AdapterShape { bytes: bytes(3), parameters: 0, rank: 8 };
        assert!((cost.load(&shape, tier) / load_seconds(3, again) - 1.0).abs() < 0.01, "{again}");
    }
    // More rows than any step had go on at the slope of the last ones.
    let prefill = |rows| cost.step(&StepWork { rows, prefill_rows: rows, sequences: 1, ..StepWork::default() });
    let slope = (prefill(4000) - prefill(100)) / 3900.0;
    assert!((0.0003..0.0007).contains(&slope), "{slope}");
    let text = calibration.to_json();
    let read = Calibration::from_json(&text).expect("a file").cost().expect("good numbers");
    assert!((read.step(&work) / found - 1.0).abs() < 1e-12);
}

#[test]
fn disturbed_steps_do_not_bend_it_and_are_paid_for() {
    let (quiet, disturbed) = (fitted(false), fitted(true));
    let work =
        StepWork { sequences: 4, rows: 4, sampled_rows: 4, context: 200, attention_pairs: 200, ..StepWork::default() };
    let ratio = disturbed.cost().expect("good").step(&work) / quiet.cost().expect("good").step(&work);
    // One step in 25 takes six times as long: a fifth more in all.
    assert!((1.1..1.3).contains(&ratio), "{ratio}");
    let (measured, fitted) = disturbed.fit.steps.values().fold((0.0, 0.0), |(measured, fitted), one| {
        (measured + one.seconds, fitted + one.seconds * one.fitted_over_measured)
    });
    assert!((fitted / measured - 1.0).abs() < 1e-9);
}

#[test]
fn another_load_of_the_engine_is_predicted() {
    let calibration = fitted(false);
    for gap in [0.2, 0.06, 0.02] {
        let answer = compare(Cursor::new(trace(300, gap, false)), &calibration).expect("the same decisions");
        let (measured, simulated) = (answer.measured, answer.simulated);
        assert_eq!((measured.requests, simulated.requests, answer.left_out), (300, 300, 0));
        for (what, a, b, tolerated) in [
            ("requests", measured.requests_per_second, simulated.requests_per_second, 0.02),
            ("ttft", measured.ttft.p50, simulated.ttft.p50, 0.1),
            ("ttft", measured.ttft.p99, simulated.ttft.p99, 0.1),
            ("e2e", measured.e2e.p50, simulated.e2e.p50, 0.05),
            ("e2e", measured.e2e.p99, simulated.e2e.p99, 0.05),
        ] {
            assert!((b / a - 1.0).abs() < tolerated, "{gap}: {what} {a} {b}");
        }
        assert_eq!(measured.loads, answer.replayed.loads);
    }
}

#[test]
fn what_is_wrong_is_named() {
    let field = |result: Result<Calibration, SimError>| match result {
        Err(SimError::Field { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(calibrate(Vec::<Cursor<String>>::new())), "traces");
    assert_eq!(field(calibrate([Cursor::new(trace(5, 0.1, false))])), "steps of the traces");
    let good = trace(100, 0.05, false);
    let other = good.replacen("\"layers\":1", "\"layers\":2", 1);
    assert_eq!(field(calibrate([Cursor::new(good.clone()), Cursor::new(other.clone())])), "traces[1]");
    let later = good.replacen("\"version\":1", "\"version\":9", 1);
    assert_eq!(field(calibrate([Cursor::new(later)])), "trace line 1");
    let text = fitted(false).to_json();
    assert_eq!(field(Calibration::from_json(&text.replace("\"step\"", "\"stride\""))), "step_seconds.stride");
    assert_eq!(field(Calibration::from_json(&text.replacen("\"each\": 0", "\"each\": -1", 1))), "first_load.each");
    assert_eq!(field(Calibration::from_json("{}")), "calibration");
    let calibration = Calibration::from_json(&text).expect("good");
    match compare(Cursor::new(other), &calibration) {
        Err(SimError::Field { field, .. }) => assert_eq!(field, "calibration.model"),
        other => panic!("{other:?}"),
    }
}
