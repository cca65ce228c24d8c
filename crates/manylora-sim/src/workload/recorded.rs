//! The load that an engine recorded: who asked when for which adapter, with how many tokens, and what came out.

use std::collections::HashMap;
use std::io::BufRead;

use manylora_core::trace::{BlockName, TraceHeader, TraceLine, TracedAdapter, TracedReason, TracedRequest};
use manylora_core::{RegistrationId, RequestId};

use super::trace::Trace;
use super::{SharedPrefix, SimRequest};
use crate::cost::AdapterShape;
use crate::engine::EngineSettings;
use crate::error::SimError;
use crate::replay::{Lines, wrong};

/// A recorded load, and the engine that it was for.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// The requests, from the first one's arrival on; adapters by the order in which they were registered. A request that was
    /// cancelled counts with the tokens that it had by then; one that failed, or composes adapters, does not count.
    pub trace: Trace,
    /// The engine.
    pub header: TraceHeader,
    /// The adapters' shapes.
    pub shapes: Vec<AdapterShape>,
    /// Requests that do not count: those above, and those whose end was not recorded.
    pub left_out: u64,
}

impl Recorded {
    /// Reads a recorded trace.
    pub fn read(source: impl BufRead) -> Result<Self, SimError> {
        let mut lines = Lines::new(source);
        let header = lines.header()?;
        let mut reader = Reader::new(header);
        while let Some((number, line)) = lines.line()? {
            reader.take(number, line)?;
        }
        Ok(reader.finish())
    }

    /// The engine that was recorded, to be simulated: every adapter is there from the start, and read when it is asked for.
    pub fn engine(&self) -> EngineSettings {
        EngineSettings {
            core: self.header.config.clone(),
            adapters: self.shapes.clone(),
            loader_threads: self.header.loader_threads,
            host_cache_bytes: None,
        }
    }
}

/// A recorded trace, as far as it was read.
pub(super) struct Reader {
    header: TraceHeader,
    numbers: HashMap<RegistrationId, u32>,
    names: Vec<String>,
    shapes: Vec<AdapterShape>,
    tenants: Vec<String>,
    live: HashMap<RequestId, (SimRequest, Vec<BlockName>)>,
    ended: Vec<(SimRequest, Vec<BlockName>)>,
    left_out: u64,
}

impl Reader {
    pub(super) fn new(header: TraceHeader) -> Self {
        Self {
            header,
            numbers: HashMap::new(),
            names: Vec::new(),
            shapes: Vec::new(),
            tenants: Vec::new(),
            live: HashMap::new(),
            ended: Vec::new(),
            left_out: 0,
        }
    }

    pub(super) fn take(&mut self, number: usize, line: TraceLine) -> Result<(), SimError> {
        match line {
            TraceLine::Adapter(adapter) => self.adapter(adapter),
            TraceLine::Submit(request) => return self.submit(number, request),
            TraceLine::End(end) | TraceLine::Unfinished(end) => {
                let Some((request, blocks)) = self.live.remove(&end.id) else { return Ok(()) };
                match end.tokens {
                    Some(tokens) if tokens > 0 && end.reason != TracedReason::Failed => {
                        let output_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
                        self.ended.push((SimRequest { output_tokens, ..request }, blocks));
                    }
                    _ => self.left_out += 1,
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn adapter(&mut self, adapter: TracedAdapter) {
        self.numbers.insert(adapter.registration, self.names.len() as u32);
        self.shapes.push(crate::replay::shape(&self.header, &adapter));
        self.names.push(adapter.name);
    }

    fn submit(&mut self, number: usize, request: TracedRequest) -> Result<(), SimError> {
        if request.adapters.len() > 1 || request.all_prompt_logits {
            self.left_out += 1;
            return Ok(());
        }
        let find = |registration: &RegistrationId| {
            let found = self.numbers.get(registration).copied();
            found.ok_or_else(|| wrong(number, &format!("{registration:?}"), "no line before it registers this adapter"))
        };
        let adapter = request.adapters.first().map(|one| find(&one.registration)).transpose()?;
        let tenant = request.tenant.map(|name| {
            let known = self.tenants.iter().position(|known| *known == name);
            known.unwrap_or_else(|| {
                self.tenants.push(name);
                self.tenants.len() - 1
            }) as u32
        });
        let known = SimRequest {
            tenant,
            priority: request.priority,
            ..SimRequest::new(request.arrival, adapter, request.prompt_tokens, 0)
        };
        self.live.insert(request.id, (known, request.blocks));
        Ok(())
    }

    pub(super) fn finish(self) -> Recorded {
        let Self { header, names, shapes, tenants, live, ended, left_out, .. } = self;
        let prefixes = prefixes(&ended, header.config.block_size as u32);
        let first = ended.iter().map(|(request, _)| request.arrival).fold(f64::INFINITY, f64::min);
        let mut requests: Vec<SimRequest> = ended
            .into_iter()
            .zip(prefixes)
            .map(|((request, _), prefix)| SimRequest { arrival: request.arrival - first, prefix, ..request })
            .collect();
        requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
        let left_out = left_out + live.len() as u64;
        Recorded { trace: Trace { requests, adapters: names, tenants }, header, shapes, left_out }
    }
}

/// What prompts begin with that others begin with, too: as far as their blocks are somebody else's as well. A simulated prompt
/// has one group only, so that prompts which part ways later count as if they did where the first of them does.
fn prefixes(requests: &[(SimRequest, Vec<BlockName>)], block_size: u32) -> Vec<Option<SharedPrefix>> {
    let mut users: HashMap<BlockName, u32> = HashMap::new();
    for block in requests.iter().flat_map(|(_, blocks)| blocks) {
        *users.entry(*block).or_default() += 1;
    }
    let mut groups: HashMap<BlockName, SharedPrefix> = HashMap::new();
    let shared = |blocks: &[BlockName]| blocks.iter().take_while(|block| users[block] > 1).count() as u32;
    for (request, blocks) in requests {
        let tokens = (shared(blocks) * block_size).min(request.prompt_tokens.saturating_sub(1));
        let Some(&first) = blocks.first().filter(|_| tokens > 0) else { continue };
        let group = groups.len() as u32;
        groups
            .entry(first)
            .and_modify(|one| one.tokens = one.tokens.min(tokens))
            .or_insert(SharedPrefix { group, tokens });
    }
    requests.iter().map(|(_, blocks)| blocks.first().and_then(|first| groups.get(first)).copied()).collect()
}
