//! What a step's time is fitted to: quantities of its work that a time can be a sum of.

use crate::cost::StepWork;

/// Rows between which the time of a step goes straight: matrix products have another slope while weights come from memory than
/// where arithmetic is what takes long, and kernels take rows a few at a time.
const KNOTS: [f64; 13] = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0];

/// Names of the quantities, in the order of [`features`], after one for each stretch of rows.
const OTHERS: [&str; 10] = [
    "step",
    "sequence",
    "started_sequence",
    "sampled_row",
    "context_position",
    "attention_pair",
    "adapter",
    "adapter_byte",
    "adapter_row_parameter",
    // What reading takes from steps: a core, the memory's bandwidth, the engine thread's time to install it.
    "load_under_way",
];

/// How many stretches of rows there are; they come first.
pub(super) const STRETCHES: usize = KNOTS.len();

/// How many there are.
pub(super) const COUNT: usize = KNOTS.len() + OTHERS.len();

/// The name of each quantity: `rows_above_N` are rows beyond N, up to the next of these.
pub(super) fn names() -> impl Iterator<Item = String> {
    let rows = KNOTS.iter().map(|knot| format!("rows_above_{knot}"));
    rows.chain(OTHERS.iter().map(|&name| name.to_owned()))
}

/// The quantities of a step.
pub(super) fn features(work: &StepWork) -> [f64; COUNT] {
    let mut all = [0.0; COUNT];
    let rows = work.rows as f64;
    for (place, &knot) in KNOTS.iter().enumerate() {
        let end = KNOTS.get(place + 1).copied().unwrap_or(f64::INFINITY);
        all[place] = (rows - knot).clamp(0.0, end - knot);
    }
    let others = [
        1,
        work.sequences,
        work.started,
        work.sampled_rows,
        work.context,
        work.attention_pairs,
        work.adapters,
        work.adapter_bytes,
        work.adapter_row_parameters,
        work.loads,
    ];
    for (place, value) in all[KNOTS.len()..].iter_mut().zip(others) {
        *place = value as f64;
    }
    all
}
