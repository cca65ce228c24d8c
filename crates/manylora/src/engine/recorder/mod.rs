//! Recording: all that goes into the control plane and comes out of it, on its way to a file, without the engine's thread
//! ever waiting for a disk.
//!
//! [`Plane`] is the control plane as the engine's thread has it. With a [`Recorder`] it takes note of every input and every
//! decision, in memory, and hands notes over by the batch; a thread of its own makes lines of them (`writer`). If the disk does
//! not follow, notes beyond [`MOST_PENDING`] bytes are dropped, and the trace says how many. Prompts go as far as that thread,
//! which names their blocks (`names`), and no further.

mod file;
mod names;
mod plane;
mod writer;

use std::mem::size_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use manylora_core::trace::{Decision, TraceLine, TracedOutcome, TracedRequest, TracedSequence, TracedStep};
use manylora_core::{Effect, NewRequest, RequestId, StepOutcome, StepPlan, Time};

use super::phases::{Phase, PhaseSeconds};

pub(crate) use file::TraceFile;
pub(crate) use plane::Plane;
pub(crate) use writer::Writer;

/// Bytes of notes that wait for the disk at most.
const MOST_PENDING: usize = 64 << 20;

/// Bytes of notes that are handed over together.
const BATCH: usize = 64 << 10;

/// What the writer's thread makes a line of.
#[derive(Debug)]
enum Note {
    /// It is one.
    Line(TraceLine),
    /// A request whose blocks have no names yet.
    Submit { line: Box<TracedRequest>, prompt: Arc<[u32]>, salt: Option<String> },
    /// Results of a step, and the tokens that sequences got.
    Outcome { line: TracedOutcome, tokens: Vec<(RequestId, u32)> },
    /// A decision.
    Decided { time: Time, decision: Decision },
    /// So many notes were dropped here.
    Dropped(u64),
}

impl Note {
    /// About the bytes that it holds, here or in the writer.
    fn bytes(&self) -> usize {
        let more = match self {
            Self::Line(TraceLine::Step(step)) => step.sequences.len() * size_of::<TracedSequence>(),
            Self::Line(_) => 256,
            Self::Submit { prompt, .. } => size_of::<TracedRequest>() + prompt.len() * 4,
            Self::Outcome { tokens, .. } => tokens.len() * size_of::<(RequestId, u32)>(),
            Self::Decided { .. } | Self::Dropped(_) => 0,
        };
        size_of::<Self>() + more
    }
}

/// Notes on their way to the writer.
#[derive(Debug)]
struct Batch {
    notes: Vec<Note>,
    bytes: usize,
}

/// The engine thread's end.
#[derive(Debug)]
pub(crate) struct Recorder {
    clock: Instant,
    batch: Batch,
    batches: Sender<Batch>,
    pending: Arc<AtomicUsize>,
    most_pending: usize,
    dropped: u64,
    /// Seconds by phase when the last step had ended, and that step.
    before: PhaseSeconds,
    step: Option<u64>,
    slots: Vec<u32>,
}

impl Recorder {
    /// The two ends. Times are since `clock`.
    fn new(clock: Instant, most_pending: usize) -> (Self, Receiver<Batch>, Arc<AtomicUsize>) {
        let (batches, received) = channel();
        let pending = Arc::new(AtomicUsize::new(0));
        let recorder = Self {
            clock,
            batch: Batch { notes: Vec::new(), bytes: 0 },
            batches,
            pending: Arc::clone(&pending),
            most_pending,
            dropped: 0,
            before: PhaseSeconds::default(),
            step: None,
            slots: Vec::new(),
        };
        (recorder, received, pending)
    }

    fn now(&self) -> Time {
        Time(self.clock.elapsed().as_secs_f64())
    }

    fn note(&mut self, note: Note) {
        self.batch.bytes += note.bytes();
        self.batch.notes.push(note);
        if self.batch.bytes >= BATCH {
            self.hand_over();
        }
    }

    fn line(&mut self, line: TraceLine) {
        self.note(Note::Line(line));
    }

    /// Gives the writer what there is, or drops it, if too much waits there.
    fn hand_over(&mut self) {
        if self.batch.notes.is_empty() {
            return;
        }
        let Batch { mut notes, bytes } = std::mem::replace(&mut self.batch, Batch { notes: Vec::new(), bytes: 0 });
        if self.pending.load(Ordering::Relaxed) + bytes > self.most_pending {
            self.dropped += notes.len() as u64;
            return;
        }
        if self.dropped > 0 {
            notes.insert(0, Note::Dropped(std::mem::take(&mut self.dropped)));
        }
        self.pending.fetch_add(bytes, Ordering::Relaxed);
        // The writer goes last: it ends when this end is dropped.
        let _ = self.batches.send(Batch { notes, bytes });
    }

    fn submitted(&mut self, now: Time, request: &NewRequest, submitted: Instant, resident: Vec<bool>) {
        let arrival = submitted.saturating_duration_since(self.clock).as_secs_f64();
        let line = Box::new(TracedRequest::of(now, arrival, request, resident));
        self.note(Note::Submit { line, prompt: Arc::clone(&request.prompt), salt: request.cache_salt.clone() });
    }

    fn planned(&mut self, now: Time, plan: &StepPlan) {
        self.step = Some(plan.step);
        let step = TracedStep::of(now, plan, &mut self.slots);
        self.line(TraceLine::Step(step));
    }

    fn committed(&mut self, now: Time, plan: &StepPlan, outcome: &StepOutcome) {
        let line = TracedOutcome::of(now, plan, outcome);
        let mut tokens = Vec::with_capacity(outcome.tokens.len());
        for (planned, result) in plan.sequences.iter().zip(&outcome.sequences) {
            let first = result.first_token as usize;
            let own = outcome.tokens.get(first..first + result.tokens as usize).unwrap_or(&[]);
            tokens.extend(own.iter().map(|&token| (planned.request, token)));
        }
        self.note(Note::Outcome { line, tokens });
    }

    fn decided(&mut self, effect: &Effect) {
        let time = self.now();
        self.note(Note::Decided { time, decision: effect.into() });
    }

    /// A turn of the engine's loop is over.
    fn turned(&mut self, seconds: &PhaseSeconds) {
        if let Some(step) = self.step.take() {
            let taken = Phase::ALL.map(|phase| seconds.of(phase) - self.before.of(phase)).to_vec();
            self.before = *seconds;
            self.line(TraceLine::Took { step, seconds: taken });
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.hand_over();
        if self.dropped > 0 {
            let notes = vec![Note::Dropped(self.dropped)];
            let _ = self.batches.send(Batch { notes, bytes: 0 });
        }
    }
}

#[cfg(test)]
mod tests;
