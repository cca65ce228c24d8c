//! Traces as input: what is read of them, what of them is compared, and what is refused with its line.

mod common;

use std::io::Cursor;

use common::{Made, header, lines, text, trace};
use manylora_core::RegistrationId;
use manylora_core::trace::{TraceHeader, TraceLine, TracedEnd, TracedReason};
use manylora_sim::calibrate::{Calibration, calibrate, compare};
use manylora_sim::replay::{Gap, replay};
use manylora_sim::workload::recorded::Recorded;
use manylora_sim::workload::trace::Trace;
use manylora_sim::{Config, SimError, Watch, run};
use serde_json::json;

fn calibration() -> Calibration {
    calibrate([Cursor::new(trace(Made::new(300, 0.04)))], &Watch::default()).expect("it fits")
}

fn compared(text: String) -> manylora_sim::calibrate::Comparison {
    compare(Cursor::new(text), &calibration(), &Watch::default()).expect("the same decisions")
}

/// A -0 is a time like 0: its requests are served, by one engine and by several.
#[test]
fn an_arrival_of_minus_zero_is_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.jsonl");
    let request = "\"prompt_tokens\": 20, \"output_tokens\": 5}\n";
    std::fs::write(
        &path,
        format!("{{\"arrival\": -0.0, {request}{{\"arrival\": 0.0, {request}{{\"arrival\": 1, {request}"),
    )
    .expect("written");
    for replicas in [1, 3] {
        let config = json!({
            "model": "SmolLM2-135M", "gpu": "l4", "replicas": replicas, "workload": {"trace": {"path": path}},
        });
        let report = run(&Config::from_value(config).expect("a run")).expect("it runs");
        assert_eq!((report.requests, report.completed), (3, 3), "{replicas}");
    }
}

/// Cancelled requests are simulated, because others shared the engine with them, and compared on neither side.
#[test]
fn both_sides_have_the_same_requests() {
    let made = Made { cancelled: 4, ..Made::new(200, 0.03) };
    let answer = compared(trace(made));
    let cancelled = lines(made).iter().filter(|line| is_end(line, TracedReason::Abort)).count() as u64;
    assert!(cancelled > 20, "{cancelled}");
    assert_eq!((answer.measured.requests, answer.simulated.requests), (200 - cancelled, 200 - cancelled));
    assert_eq!(answer.left_out, cancelled);
    let ratio = answer.simulated.tokens_per_second / answer.measured.tokens_per_second;
    assert!((ratio - 1.0).abs() < 0.03, "{ratio}");
}

fn is_end(line: &TraceLine, wanted: TracedReason) -> bool {
    matches!(line, TraceLine::End(TracedEnd { reason, .. }) if *reason == wanted)
}

/// What comes after lost lines is on neither side, and every place of them is told.
#[test]
fn lost_lines_end_the_comparison_and_are_all_told() {
    let mut all = lines(Made::new(150, 0.05));
    let steps: Vec<usize> = places(&all, |line| matches!(line, TraceLine::Step(_)));
    let (first, second) = (steps[steps.len() / 2], steps[steps.len() * 3 / 4]);
    // A loss is told between two turns of the loop, after the requests that had not ended.
    all.splice(second..second + 3, [TraceLine::Lost { lines: 3 }]);
    all.splice(first..first + 5, [TraceLine::Lost { lines: 5 }]);
    let answer = compared(text(&all));
    let replayed = &answer.replayed;
    assert_eq!((replayed.lost, replayed.gap_count, replayed.closed), (8, 2, true));
    assert_eq!(replayed.gaps, [Gap { line: first + 1, lines: 5 }, Gap { line: second - 3, lines: 3 }]);
    assert!(answer.measured.requests > 20 && answer.measured.requests == answer.simulated.requests);
    assert_eq!(answer.left_out + answer.measured.requests, 150);
}

fn places(lines: &[TraceLine], wanted: impl Fn(&TraceLine) -> bool) -> Vec<usize> {
    lines.iter().enumerate().filter(|(_, line)| wanted(line)).map(|(place, _)| place).collect()
}

/// Where an adapter's line is lost, the load of the others is simulated, and it is said what is missing.
#[test]
fn a_lost_adapter_leaves_its_requests_out() {
    let mut all = lines(Made::new(100, 0.05));
    let of = |line: &TraceLine, index: u32| match line {
        TraceLine::Submit(request) => request.adapters.iter().any(|one| one.registration.index == index),
        _ => false,
    };
    let missing = all.iter().filter(|line| of(line, 2)).count() as u64;
    assert!(missing > 5);
    let gone = RegistrationId { index: 2, generation: 0 };
    all.retain(|line| !matches!(line, TraceLine::Adapter(adapter) if adapter.registration == gone));
    let recorded = Recorded::read(text(&all).as_bytes()).expect("the others");
    assert_eq!((recorded.submitted, recorded.left_out), (100, missing));
    assert_eq!(recorded.trace.requests.len() as u64, 100 - missing);
    let notes = recorded.trace.notes.join("; ");
    assert!(notes.contains(&format!("{missing} of the trace's 100 requests are left out")), "{notes}");
    assert!(notes.contains("the lines of 1 adapters were lost (registrations 2.0)"), "{notes}");
    assert!(Trace::read(trace(Made::new(20, 0.05)).as_bytes()).expect("whole").notes.is_empty());
}

/// Numbers that no engine has are errors with their line, and make nobody take memory for them.
#[test]
fn numbers_beyond_all_bounds_are_refused_with_their_line() {
    let good = trace(Made::new(20, 0.05));
    let line_of = |kind: &str| 1 + good.lines().position(|line| line.contains(kind)).expect("one");
    let submit = line_of("\"kind\":\"submit\"");
    let (adapter, load) = (line_of("\"kind\":\"adapter\""), line_of("\"kind\":\"load\""));
    let outcome = line_of("\"kind\":\"outcome\"");
    let cases = [
        ("\"max_num_seqs\":8", "\"max_num_seqs\":1000000000000000000", 1, "1000000000000000000"),
        ("\"max_num_batched_tokens\":64", "\"max_num_batched_tokens\":1000000000000000", 1, "1000000000000000"),
        ("\"max_model_len\":256", "\"max_model_len\":0", 1, "0"),
        ("\"loader_threads\":4", "\"loader_threads\":4000000000000", 1, "4000000000000"),
        ("\"ledger_bytes\":1000000", "\"ledger_bytes\":1000000000000000000", 1, "1000000000000000000 over 1000"),
        ("\"prompt_tokens\":1,", "\"prompt_tokens\":4294967295,", submit, "4294967295"),
        ("\"bytes\":2000", "\"bytes\":18446744073709551615", adapter, "18446744073709551615"),
        ("\"step\":1}", "\"step\":1,\"others\":[[0,4000000000]]}", outcome, "4000000000"),
    ];
    for (from, to, line, value) in cases {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good, "{from}");
        let error = replay(Cursor::new(text), &mut (), &Watch::default()).expect_err(to).to_string();
        assert!(error.starts_with(&format!("trace line {line} `{value}`: ")), "{error}");
    }
    let error = replay(Cursor::new(change_load(&good)), &mut (), &Watch::default()).expect_err("too many").to_string();
    assert!(error.starts_with(&format!("trace line {load} `9000000000000000000`: ")), "{error}");
    let wrong =
        TraceHeader { config: manylora_core::CoreConfig { max_num_batched_tokens: 4, ..header().config }, ..header() };
    let error = replay(Cursor::new(text(&[TraceLine::Header(Box::new(wrong))])), &mut (), &Watch::default());
    let error = error.expect_err("fewer rows than sequences").to_string();
    assert!(error.starts_with("trace line 1 `config`: "), "{error}");
}

/// The first load brings more bytes than there are.
fn change_load(text: &str) -> String {
    let change = |line: &str| {
        let place = line.find("\"bytes\":").expect("bytes") + 8;
        let end = place + line[place..].find(',').expect("more");
        format!("{}9000000000000000000{}", &line[..place], &line[end..])
    };
    let mut done = false;
    let each = text.lines().map(|line| {
        if done || !line.starts_with("{\"kind\":\"load\"") {
            return line.to_owned() + "\n";
        }
        done = true;
        change(line) + "\n"
    });
    each.collect()
}

#[test]
fn reading_can_be_interrupted() {
    let watch = Watch::default();
    watch.interrupt();
    let text = trace(Made::new(20, 0.05));
    assert_eq!(replay(Cursor::new(text.clone()), &mut (), &watch).unwrap_err(), SimError::Interrupted);
    assert_eq!(calibrate([Cursor::new(text.clone())], &watch).unwrap_err(), SimError::Interrupted);
    assert_eq!(compare(Cursor::new(text), &calibration(), &watch).unwrap_err(), SimError::Interrupted);
}
