//! Lines of a recorded trace, one by one: read, bounded, and given up when nobody wants to know any more.
//!
//! No line may make its reader take more memory than the engine that it comes from could have had: counts have limits, and a
//! line beyond them is an error that shows it.

use std::io::BufRead;

use manylora_core::trace::{TRACE_FORMAT, TRACE_VERSION, TraceHeader, TraceLine, TracedLoadResult};
use manylora_core::{Event, LARGEST_COUNT};

use crate::error::SimError;
use crate::run::Watch;

/// More KV blocks than any machine has memory for.
const MOST_BLOCKS: u64 = 1 << 26;
/// An adapter of more bytes than any machine has.
const MOST_BYTES: u64 = 1 << 50;
/// Lines between two looks at whether to go on.
const LOOK: usize = 256;

/// An error in a line of a trace.
pub(crate) fn wrong(number: usize, line: &str, message: impl Into<String>) -> SimError {
    SimError::field(format!("trace line {number}"), line.chars().take(80).collect::<String>(), message)
}

/// Lines with their numbers, from 1; empty ones are passed over.
pub(crate) struct Lines<'a, R> {
    source: R,
    watch: &'a Watch,
    number: usize,
    text: String,
    /// Of the header, which comes first.
    max_model_len: usize,
}

impl<'a, R: BufRead> Lines<'a, R> {
    pub(crate) fn new(source: R, watch: &'a Watch) -> Self {
        Self { source, watch, number: 0, text: String::new(), max_model_len: 0 }
    }

    /// The next line's text.
    pub(crate) fn text(&mut self) -> Result<Option<(usize, &str)>, SimError> {
        loop {
            self.text.clear();
            if self.number.is_multiple_of(LOOK) {
                self.watch.check()?;
            }
            self.number += 1;
            let read = self.source.read_line(&mut self.text);
            let read = read.map_err(|error| wrong(self.number, "", format!("it cannot be read: {error}")))?;
            if read == 0 {
                return Ok(None);
            }
            if !self.text.trim().is_empty() {
                return Ok(Some((self.number, &self.text)));
            }
        }
    }

    /// The next line. The last one may be cut, where the engine that wrote it was killed: it is no line then.
    pub(crate) fn line(&mut self) -> Result<Option<(usize, TraceLine)>, SimError> {
        let max_model_len = self.max_model_len;
        let Some((number, text)) = self.text()? else { return Ok(None) };
        if !text.ends_with('\n') {
            return Ok(None);
        }
        let line = parse(number, text)?;
        bounded(number, &line, max_model_len)?;
        Ok(Some((number, line)))
    }

    /// The first line, which must be a header.
    pub(crate) fn header(&mut self) -> Result<TraceHeader, SimError> {
        let Some((number, text)) = self.text()? else {
            return Err(wrong(1, "", "the trace is empty; record one with --record-trace"));
        };
        let TraceLine::Header(header) = parse(number, text)? else {
            return Err(wrong(number, text, "a recorded trace begins with its header; record one with --record-trace"));
        };
        let header = check(number, *header)?;
        self.max_model_len = header.config.max_model_len;
        Ok(header)
    }
}

pub(super) fn parse(number: usize, text: &str) -> Result<TraceLine, SimError> {
    serde_json::from_str(text).map_err(|error| wrong(number, text.trim_end(), error.to_string()))
}

fn check(number: usize, header: TraceHeader) -> Result<TraceHeader, SimError> {
    let TraceHeader { format, version, .. } = &header;
    if format != TRACE_FORMAT || *version != TRACE_VERSION {
        let message =
            format!("this version reads `{TRACE_FORMAT}` of version {TRACE_VERSION}; record it again with this one");
        return Err(wrong(number, &format!("{format} {version}"), message));
    }
    let config = &header.config;
    let counts = [
        ("config.max_num_seqs", config.max_num_seqs),
        ("config.max_num_batched_tokens", config.max_num_batched_tokens),
        ("config.max_model_len", config.max_model_len),
        ("config.block_size", config.block_size),
        ("config.max_loras", config.max_loras.unwrap_or(1)),
        ("config.max_cpu_loras", config.max_cpu_loras.unwrap_or(1)),
        ("config.max_loading", config.max_loading.unwrap_or(1)),
        ("loader_threads", header.loader_threads),
    ];
    if let Some((name, value)) = counts.iter().find(|(_, value)| !(1..=LARGEST_COUNT).contains(value)) {
        let message = format!("`{name}` is from 1 to {LARGEST_COUNT} in an engine: the trace was changed");
        return Err(wrong(number, &value.to_string(), message));
    }
    let blocks = config.ledger_bytes / config.block_bytes.max(1);
    if config.block_bytes == 0 || blocks > MOST_BLOCKS {
        let message = format!(
            "`config.ledger_bytes` over `config.block_bytes` is at most {MOST_BLOCKS} KV blocks here: the trace was changed"
        );
        return Err(wrong(number, &format!("{} over {}", config.ledger_bytes, config.block_bytes), message));
    }
    Ok(header)
}

/// Refuses numbers that no engine writes and that would be made room for.
fn bounded(number: usize, line: &TraceLine, max_model_len: usize) -> Result<(), SimError> {
    let tokens = |name: &str, tokens: u32| {
        let message = format!("`{name}` is at most the engine's max_model_len, {max_model_len}: the trace was changed");
        if tokens as usize <= max_model_len { Ok(()) } else { Err(wrong(number, &tokens.to_string(), message)) }
    };
    let bytes = |bytes: u64| {
        let message = format!("`bytes` is at most {MOST_BYTES}: the trace was changed");
        if bytes <= MOST_BYTES { Ok(()) } else { Err(wrong(number, &bytes.to_string(), message)) }
    };
    match line {
        TraceLine::Submit(request) => tokens("prompt_tokens", request.prompt_tokens),
        TraceLine::Outcome(outcome) => outcome.others.iter().try_for_each(|&(_, count)| tokens("others", count)),
        TraceLine::Adapter(adapter) => bytes(adapter.bytes),
        TraceLine::Event { event: Event::Register { bytes: registered, .. }, .. } => bytes(*registered),
        TraceLine::Event { event: Event::Submit(_) | Event::Outcome(_) | Event::LoadFinished { .. }, .. } => {
            Err(wrong(number, "event", "requests, outcomes and loads have lines of their own: the trace was changed"))
        }
        TraceLine::Load(load) => match load.result {
            TracedLoadResult::Loaded { bytes: loaded, .. } => bytes(loaded),
            TracedLoadResult::Failed { .. } => Ok(()),
        },
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_ends_when_nobody_wants_it() {
        let text = "{\"kind\":\"idle\",\"time\":0.5}\n".repeat(3 * LOOK);
        let watch = Watch::default();
        let mut lines = Lines::new(text.as_bytes(), &watch);
        for _ in 0..LOOK {
            assert!(lines.line().unwrap().is_some());
        }
        watch.interrupt();
        assert_eq!(lines.line(), Err(SimError::Interrupted));
    }
}
