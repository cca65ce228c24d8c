//! Lines of a recorded trace, one by one.

use std::io::BufRead;

use manylora_core::trace::{TRACE_FORMAT, TRACE_VERSION, TraceHeader, TraceLine};

use crate::error::SimError;

/// An error in a line of a trace.
pub(crate) fn wrong(number: usize, line: &str, message: impl Into<String>) -> SimError {
    SimError::field(format!("trace line {number}"), line.chars().take(80).collect::<String>(), message)
}

/// Lines with their numbers, from 1; empty ones are passed over.
pub(crate) struct Lines<R> {
    source: R,
    number: usize,
    text: String,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(source: R) -> Self {
        Self { source, number: 0, text: String::new() }
    }

    /// The next line's text.
    pub(crate) fn text(&mut self) -> Result<Option<(usize, &str)>, SimError> {
        loop {
            self.text.clear();
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
        let Some((number, text)) = self.text()? else { return Ok(None) };
        if !text.ends_with('\n') {
            return Ok(None);
        }
        Ok(Some((number, parse(number, text)?)))
    }

    /// The first line, which must be a header.
    pub(crate) fn header(&mut self) -> Result<TraceHeader, SimError> {
        let Some((number, text)) = self.text()? else {
            return Err(wrong(1, "", "the trace is empty; record one with --record-trace"));
        };
        match parse(number, text)? {
            TraceLine::Header(header) => check(number, *header),
            _ => Err(wrong(number, text, "a recorded trace begins with its header; record one with --record-trace")),
        }
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
    Ok(header)
}
