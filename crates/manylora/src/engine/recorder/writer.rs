//! The thread that writes a trace.

use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Instant;

use manylora_core::Time;
use manylora_core::trace::{Decision, TraceHeader, TraceLine, TracedEnd, TracedReason};

use super::names::Names;
use super::{Batch, MOST_PENDING, Note, Recorder, TraceFile};

/// What makes lines of notes.
pub(crate) struct Writer {
    path: PathBuf,
    out: BufWriter<Box<dyn Write + Send>>,
    batches: Receiver<Batch>,
    pending: Arc<AtomicUsize>,
    names: Names,
    clock: Instant,
    lost: u64,
}

impl Writer {
    /// The two ends of a trace whose header is this.
    pub(crate) fn new(file: TraceFile, header: TraceHeader) -> Option<(Recorder, Self)> {
        let path = file.path().to_owned();
        Some(Self::with(Box::new(file.take()?), path, header, MOST_PENDING))
    }

    pub(super) fn with(
        out: Box<dyn Write + Send>,
        path: PathBuf,
        header: TraceHeader,
        most_pending: usize,
    ) -> (Recorder, Self) {
        let clock = Instant::now();
        let (mut recorder, batches, pending) = Recorder::new(clock, most_pending);
        let names = Names::new(header.config.enable_prefix_caching.then_some(header.config.block_size));
        recorder.line(TraceLine::Header(Box::new(header)));
        let out = BufWriter::with_capacity(1 << 18, out);
        (recorder, Self { path, out, batches, pending, names, clock, lost: 0 })
    }

    /// Until the engine has ended.
    pub(crate) fn run(mut self) {
        if let Err(error) = self.write_all() {
            tracing::error!("recording ended: trace `{}` cannot be written: {error}", self.path.display());
            // What comes is taken and dropped, so that nothing piles up.
            for Batch { bytes, .. } in self.batches {
                self.pending.fetch_sub(bytes, Ordering::Relaxed);
            }
        }
    }

    fn write_all(&mut self) -> io::Result<()> {
        while let Ok(Batch { notes, bytes }) = self.batches.recv() {
            let written = notes.into_iter().try_for_each(|note| self.write(note));
            self.pending.fetch_sub(bytes, Ordering::Relaxed);
            written?;
            // Batches are large, or nothing else happens.
            self.out.flush()?;
        }
        self.unfinished()?;
        let time = Time(self.clock.elapsed().as_secs_f64());
        self.put(&TraceLine::Close { time, lost: self.lost })?;
        self.out.flush()
    }

    fn write(&mut self, note: Note) -> io::Result<()> {
        match note {
            Note::Line(line) => self.put(&line),
            Note::Submit { mut line, prompt, salt } => {
                line.salt = salt.map(|salt| self.names.of_salt(&salt));
                line.blocks = self.names.begin(line.id, &prompt);
                self.put(&TraceLine::Submit(*line))
            }
            Note::Outcome { mut line, tokens } => {
                let filled = tokens.into_iter().filter_map(|(id, token)| Some((id, self.names.push(id, token)?)));
                line.filled = filled.collect();
                self.put(&TraceLine::Outcome(line))
            }
            Note::Decided { time, decision: Decision::Effect(effect) } => self.put(&TraceLine::Effect { time, effect }),
            Note::Decided { time, decision: Decision::End(id, reason) } => {
                let tokens = self.names.end(id);
                self.put(&TraceLine::End(TracedEnd { time, id, reason, tokens }))
            }
            Note::Dropped(lines) => {
                tracing::warn!(
                    "trace `{}` lost {lines} lines: the disk does not follow; it cannot be replayed beyond this point",
                    self.path.display()
                );
                self.lost += lines;
                // Tokens of theirs are among what was lost, so nothing is known of them from here on.
                self.unfinished()?;
                self.put(&TraceLine::Lost { lines })
            }
        }
    }

    fn unfinished(&mut self) -> io::Result<()> {
        let time = Time(self.clock.elapsed().as_secs_f64());
        for (id, tokens) in self.names.take_all() {
            let (reason, tokens) = (TracedReason::Unfinished, Some(tokens));
            self.put(&TraceLine::Unfinished(TracedEnd { time, id, reason, tokens }))?;
        }
        Ok(())
    }

    fn put(&mut self, line: &TraceLine) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, line)?;
        self.out.write_all(b"\n")
    }
}
