//! Which tokens come next: what a step's rows of logits are asked for, and the choosing.
//!
//! Greedy tokens and lists of the largest values come from the backend. Where tokens are drawn from whole rows, that takes
//! longer than a vocabulary takes to read, so rows are shared out among the threads that have just computed; so are the
//! masks of structured outputs. What is chosen from one row depends on no other (promise P3).

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use manylora_model::ModelError;

use super::phases::Phase;
use super::running::RunningSequence;
use super::sequences::Place;
use super::worker::Worker;
use crate::sampler::RowNeed;

/// A token of the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    /// Index of its sequence in the plan.
    sequence: u32,
    token: u32,
}

/// A sequence that draws from a whole row, on whatever thread takes it.
pub(super) struct Draw {
    place: Place,
    /// Its row in the chunk.
    row: usize,
    /// Index of its token in the list of those chosen.
    chosen: usize,
    sequence: Mutex<Box<RunningSequence>>,
    token: AtomicU32,
}

impl Draw {
    /// Its sequence, whatever became of the draw.
    pub(super) fn into_sequence(self) -> Box<RunningSequence> {
        self.sequence.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the sequences of a chunk need of its rows.
#[derive(Clone, Copy, Debug, Default)]
struct ChunkNeeds {
    /// The greedy token of one or more.
    greedy: bool,
    /// So many largest values of one or more.
    largest: Option<usize>,
    /// Whole rows, to draw from.
    rows: bool,
    /// Rows of prompts, to look at.
    prompts: bool,
}

impl Worker {
    /// Chooses the tokens of the step, chunk by chunk of its rows.
    pub(super) fn choose_tokens(&mut self) -> Result<(), ModelError> {
        self.prepare_constraints();
        self.chosen.clear();
        let wanted = self.step.sample_rows.len();
        let chunk = self.runner.max_logit_rows();
        for first in (0..wanted).step_by(chunk) {
            self.choose_of_chunk(first, chunk.min(wanted - first))?;
        }
        Ok(())
    }

    /// Finds out which tokens may come next where outputs are structured: while a card computes, or on the threads that have
    /// just computed. What one sequence's constraint finds depends on no other's.
    fn prepare_constraints(&mut self) {
        for sample in self.step.sample_rows.iter().filter(|sample| sample.samples) {
            let place = self.members[sample.sequence as usize].1;
            if let Some(constraint) = self.sequences.at_mut(place).and_then(RunningSequence::take_unprepared) {
                self.constraints.push((place, Mutex::new(constraint)));
            }
        }
        let (constraints, next) = (&self.constraints, AtomicUsize::new(0));
        // Some take a hundred times as long as others: whoever is done takes the next one.
        let work = |_, _| {
            while let Some((_, constraint)) = constraints.get(next.fetch_add(1, Ordering::Relaxed)) {
                constraint.lock().unwrap_or_else(PoisonError::into_inner).prepare();
            }
        };
        match constraints.len() {
            0 => {}
            1 => work(0, 1),
            _ => self.runner.run_parts(&work),
        }
        for (place, constraint) in self.constraints.drain(..) {
            if let Some(sequence) = self.sequences.at_mut(place) {
                sequence.put_back(constraint.into_inner().unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    fn choose_of_chunk(&mut self, first: usize, count: usize) -> Result<(), ModelError> {
        self.spent(Phase::Sample);
        self.runner.logits(&self.step.batch, first, count)?;
        let mut needs = self.chunk_needs(first, count);
        if needs.greedy {
            self.runner.argmax(count, &mut self.greedy[..count])?;
        }
        // Rows may have to be fetched from a device. Where any is, lists are not: the row gives the same tokens.
        self.largest.clear();
        if let (Some(k), false) = (needs.largest, needs.rows || needs.prompts) {
            needs.rows = !(self.runner.largest(count, k, &mut self.largest)? && self.all_listed(first, count));
        }
        self.spent(Phase::Forward);
        if needs.prompts {
            self.see_prompts(first, count)?;
        }
        for (row, sample) in self.step.sample_rows[first..first + count].iter().enumerate() {
            let place = self.members[sample.sequence as usize].1;
            let Some(sequence) = self.sequences.at_mut(place).filter(|_| sample.samples) else { continue };
            let token = match (sequence.need(), self.largest.row(row)) {
                (RowNeed::Greedy, _) => sequence.accept_greedy(self.greedy[row]),
                (RowNeed::Largest(_), Some(listed)) => sequence
                    .sample_listed(listed, &mut self.scratches.get_mut().unwrap_or_else(PoisonError::into_inner)[0]),
                _ => {
                    let Some(sequence) = self.sequences.take(place) else { continue };
                    let (chosen, token) = (self.chosen.len(), AtomicU32::default());
                    self.draws.push(Draw { place, row, chosen, sequence: Mutex::new(sequence), token });
                    // Until it is drawn.
                    u32::MAX
                }
            };
            self.chosen.push(Chosen { sequence: sample.sequence, token });
        }
        if self.draws.is_empty() { Ok(()) } else { self.draw(count) }
    }

    /// Lets requests that want the logits of their prompts look at them.
    fn see_prompts(&mut self, first: usize, count: usize) -> Result<(), ModelError> {
        let logits = self.runner.read_logits(count)?;
        let scratch = &mut self.scratches.get_mut().unwrap_or_else(PoisonError::into_inner)[0];
        let rows = logits.chunks_exact(logits.len() / count);
        for (sample, row) in self.step.sample_rows[first..first + count].iter().zip(rows) {
            if let Some(sequence) = self.sequences.at_mut(self.members[sample.sequence as usize].1) {
                sequence.see_row(sample.position as usize, row, scratch);
            }
        }
        Ok(())
    }

    /// Draws tokens from whole rows.
    fn draw(&mut self, count: usize) -> Result<(), ModelError> {
        let (draws, scratches, next) = (&self.draws, &self.scratches, AtomicUsize::new(0));
        let work = |logits: &[f32]| {
            let width = logits.len() / count;
            let mut scratch = locked(scratches).pop().unwrap_or_default();
            while let Some(draw) = draws.get(next.fetch_add(1, Ordering::Relaxed)) {
                let row = &logits[draw.row * width..(draw.row + 1) * width];
                let token = locked(&draw.sequence).sample(row, &mut scratch);
                draw.token.store(token, Ordering::Relaxed);
            }
            locked(scratches).push(scratch);
        };
        match draws.len() {
            1 => work(self.runner.read_logits(count)?),
            _ => self.runner.share_logits(count, &|_, _, logits| work(logits))?,
        }
        for draw in self.draws.drain(..) {
            self.chosen[draw.chosen].token = draw.token.load(Ordering::Relaxed);
            self.sequences.put_back(draw.place, draw.into_sequence());
        }
        Ok(())
    }

    /// Hands the tokens that were chosen to their sequences, and notes them for the scheduler.
    pub(super) fn push_tokens(&mut self) {
        let now = Instant::now();
        for &Chosen { sequence: index, token } in &self.chosen {
            let Some(sequence) = self.sequences.at_mut(self.members[index as usize].1) else { continue };
            sequence.set_cached_tokens(self.plan.sequences[index as usize].cached_tokens as usize);
            let outcome = &mut self.outcome.sequences[index as usize];
            outcome.first_token = self.outcome.tokens.len() as u32;
            outcome.tokens = 1;
            outcome.stopped = sequence.push_token(token);
            sequence.course.token(now, &mut self.meters);
            self.outcome.tokens.push(token);
        }
    }

    /// What a chunk's sequences need of its rows.
    fn chunk_needs(&self, first: usize, count: usize) -> ChunkNeeds {
        let mut needs = ChunkNeeds::default();
        for sample in &self.step.sample_rows[first..first + count] {
            let Some(sequence) = self.sequences.at(self.members[sample.sequence as usize].1) else { continue };
            needs.prompts |= sequence.looks_at(sample.position as usize);
            if sample.samples {
                match sequence.need() {
                    RowNeed::Greedy => needs.greedy = true,
                    RowNeed::Largest(k) => needs.largest = needs.largest.max(Some(k)),
                    RowNeed::Row => needs.rows = true,
                }
            }
        }
        needs
    }

    /// Whether there is a list for each row of a chunk whose sequence chooses from one.
    fn all_listed(&self, first: usize, count: usize) -> bool {
        self.step.sample_rows[first..first + count].iter().enumerate().all(|(offset, sample)| {
            let sequence = self.sequences.at(self.members[sample.sequence as usize].1);
            let chooses = sequence.is_some_and(|it| sample.samples && matches!(it.need(), RowNeed::Largest(_)));
            !chooses || self.largest.row(offset).is_some()
        })
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
