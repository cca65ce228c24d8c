//! Requests from a file, one JSON object a line:
//! `{"arrival": 0.25, "adapter": "sql", "prompt_tokens": 120, "output_tokens": 40}`, and optionally `tenant`, `priority` and
//! `prefix` (`{"group": 3, "tokens": 64}`). Adapters and tenants are names, or numbers; null or none is the base. What an engine
//! recorded (`--record-trace`) is read as well: it is known by its first line.

use std::collections::HashMap;
use std::io::BufRead;

use serde::{Deserialize, Serialize};

use super::recorded::Recorded;
use super::{SharedPrefix, SimRequest};
use crate::error::SimError;
use crate::replay::wrong;

/// A name, or a number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
enum Name {
    Number(u32),
    Text(String),
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    arrival: f64,
    #[serde(default)]
    adapter: Option<Name>,
    prompt_tokens: u32,
    output_tokens: u32,
    #[serde(default)]
    tenant: Option<Name>,
    #[serde(default)]
    priority: i64,
    #[serde(default)]
    prefix: Option<SharedPrefix>,
}

/// Names in the order in which they were first met.
#[derive(Clone, Debug, Default)]
struct Names {
    numbers: HashMap<Name, u32>,
    names: Vec<String>,
}

impl Names {
    fn number(&mut self, name: Name) -> u32 {
        let next = self.names.len() as u32;
        *self.numbers.entry(name).or_insert_with_key(|name| {
            self.names.push(name.to_string());
            next
        })
    }
}

/// A trace that was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Its requests, by arrival.
    pub requests: Vec<SimRequest>,
    /// Names of the adapters, by number.
    pub adapters: Vec<String>,
    /// Names of the tenants, by number.
    pub tenants: Vec<String>,
    /// What of it is not simulated, in words.
    pub notes: Vec<String>,
}

impl Trace {
    /// Reads a trace; empty lines are passed over. Lines out of order are put in order. Of a recorded trace see
    /// [`super::recorded::Recorded`], which has more of it.
    pub fn read(source: impl BufRead) -> Result<Self, SimError> {
        let mut source = source;
        let begun = source.fill_buf().map_err(|error| wrong(1, "", format!("it cannot be read: {error}")))?;
        if begun.trim_ascii_start().starts_with(b"{\"kind\"") {
            return Ok(Recorded::read(source)?.trace);
        }
        let (mut adapters, mut tenants) = (Names::default(), Names::default());
        let mut requests = Vec::new();
        for (number, line) in source.lines().enumerate() {
            let wrong = |value: String, message: String| wrong(number + 1, &value, message);
            let line = line.map_err(|error| wrong(String::new(), format!("it cannot be read: {error}")))?;
            if line.trim().is_empty() {
                continue;
            }
            let shown = || line.chars().take(80).collect::<String>();
            let parsed: Line = serde_json::from_str(&line).map_err(|error| wrong(shown(), error.to_string()))?;
            if !parsed.arrival.is_finite() || parsed.arrival < 0.0 {
                return Err(wrong(parsed.arrival.to_string(), "`arrival` is seconds from 0 up".to_owned()));
            }
            for (field, tokens) in [("prompt_tokens", parsed.prompt_tokens), ("output_tokens", parsed.output_tokens)] {
                if tokens == 0 {
                    return Err(wrong(shown(), format!("`{field}` is at least 1")));
                }
            }
            if parsed.prefix.is_some_and(|prefix| prefix.tokens >= parsed.prompt_tokens) {
                return Err(wrong(shown(), "`prefix.tokens` is less than `prompt_tokens`".to_owned()));
            }
            requests.push(SimRequest {
                // A -0 is a 0.
                arrival: parsed.arrival + 0.0,
                adapter: parsed.adapter.map(|name| adapters.number(name)),
                prompt_tokens: parsed.prompt_tokens,
                output_tokens: parsed.output_tokens,
                tenant: parsed.tenant.map(|name| tenants.number(name)),
                priority: parsed.priority,
                prefix: parsed.prefix,
            });
        }
        requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
        Ok(Self { requests, adapters: adapters.names, tenants: tenants.names, notes: Vec::new() })
    }
}
