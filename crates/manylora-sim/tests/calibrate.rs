//! Calibration on traces that were made by hand from a known cost model: it must be found again.

mod common;

use std::io::Cursor;

use common::{Made, bytes, load_seconds, step_seconds};
use manylora_sim::calibrate::{Calibration, calibrate, compare};
use manylora_sim::cost::{AdapterShape, CostModel, StepWork, Tier};
use manylora_sim::{SimError, Watch};

type Noise = fn(u64, bool, usize) -> f64;

const NONE: Noise = |_, _, _| 1.0;
/// Somebody else had the machine.
const DISTURBED: Noise = |step, _, _| if step.is_multiple_of(25) { 6.0 } else { 1.0 };

fn trace(requests: u64, gap: f64, noise: Noise) -> Cursor<String> {
    Cursor::new(common::trace(Made { noise, ..Made::new(requests, gap) }))
}

fn fit(traces: impl IntoIterator<Item = Cursor<String>>) -> Result<Calibration, SimError> {
    calibrate(traces, &Watch::default())
}

fn fitted(noise: Noise) -> Calibration {
    fit([trace(400, 0.05, noise), trace(200, 0.01, noise)]).expect("it fits")
}

#[test]
fn a_known_cost_is_found_again() {
    let calibration = fitted(NONE);
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
    let (quiet, disturbed) = (fitted(NONE), fitted(DISTURBED));
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
    let calibration = fitted(NONE);
    for gap in [0.2, 0.06, 0.02] {
        let answer = compare(trace(300, gap, NONE), &calibration, &Watch::default()).expect("the same decisions");
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
    assert_eq!(field(fit([])), "traces");
    assert_eq!(field(fit([trace(5, 0.1, NONE)])), "steps of the traces");
    let good = trace(100, 0.05, NONE).into_inner();
    let other = good.replacen("\"layers\":1", "\"layers\":2", 1);
    assert_eq!(field(fit([Cursor::new(good.clone()), Cursor::new(other.clone())])), "traces[1]");
    let later = good.replacen("\"version\":1", "\"version\":9", 1);
    assert_eq!(field(fit([Cursor::new(later)])), "trace line 1");
    let text = fitted(NONE).to_json();
    assert_eq!(field(Calibration::from_json(&text.replace("\"step\"", "\"stride\""))), "step_seconds.stride");
    assert_eq!(field(Calibration::from_json(&text.replacen("\"each\": 0", "\"each\": -1", 1))), "first_load.each");
    assert_eq!(field(Calibration::from_json("{}")), "calibration");
    let calibration = Calibration::from_json(&text).expect("good");
    match compare(Cursor::new(other), &calibration, &Watch::default()) {
        Err(SimError::Field { field, .. }) => assert_eq!(field, "calibration.model"),
        other => panic!("{other:?}"),
    }
}

/// Kinds of steps whose times vary are fitted to their mean, as all others are.
#[test]
fn what_varies_is_not_taken_for_faster() {
    let uneven: Noise = |step, prefill, _| match (prefill, step % 3) {
        (false, _) => 1.0,
        (true, 0) => 1.6,
        (true, _) => 0.7,
    };
    let calibration = fitted(uneven);
    for kind in ["decode, adapters", "decode and prefill, adapters"] {
        let one = calibration.fit.steps[kind];
        assert!((one.fitted_over_measured - 1.0).abs() < 0.03, "{kind}: {one:?}");
    }
    assert!(calibration.fit.steps["decode, adapters"].median_deviation < 0.05);
}

/// A step that runs beside loads takes longer, if it did so when it was measured.
#[test]
fn loads_take_from_steps() {
    let noise: Noise = |_, _, loads| 1.0 + 0.3 * loads as f64;
    let cost = fitted(noise).cost().expect("good numbers");
    let base =
        StepWork { sequences: 6, rows: 6, sampled_rows: 6, context: 150, attention_pairs: 150, ..StepWork::default() };
    let slowed = cost.step(&StepWork { loads: 1, ..base }) / cost.step(&base);
    assert!((1.1..1.6).contains(&slowed), "{slowed}");
    assert!(fitted(NONE).step_seconds.get("load_under_way").is_none_or(|&seconds| seconds < 1e-9));
}

/// Without a step that has adapters, nothing is known of what they take.
#[test]
fn a_calibration_without_adapters_is_for_loads_without() {
    let without = |requests, gap| Cursor::new(common::trace(Made { adapters: false, ..Made::new(requests, gap) }));
    let calibration = fit([without(300, 0.04)]).expect("it fits");
    let answer = compare(without(100, 0.05), &calibration, &Watch::default()).expect("a load of the base");
    assert_eq!(answer.simulated.requests, 100);
    let error = compare(trace(100, 0.05, NONE), &calibration, &Watch::default()).unwrap_err().to_string();
    assert!(error.starts_with("calibration `made up`: no step of its traces had an adapter"), "{error}");
    assert!(fitted(NONE).adapter_note().is_none());
}
