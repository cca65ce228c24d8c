//! The load that an engine recorded: who asked when for which adapter, with how many tokens, and what came out.

use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;

use manylora_core::trace::{BlockName, TraceHeader, TraceLine, TracedAdapter, TracedReason, TracedRequest};
use manylora_core::{RegistrationId, RequestId};

use super::trace::Trace;
use super::{SharedPrefix, SimRequest};
use crate::cost::AdapterShape;
use crate::engine::EngineSettings;
use crate::error::SimError;
use crate::replay::Lines;
use crate::run::Watch;

/// A recorded load, and the engine that it was for.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// The requests, from the first one's arrival on; adapters by the order in which they were registered. A request that was
    /// cancelled counts with the tokens that it had by then. One that failed, that composes adapters or wants logits of its
    /// prompt does not count, and neither does one for an adapter whose line is missing, because lines were lost: what can be
    /// simulated is, and the trace's notes say what cannot.
    pub trace: Trace,
    /// The requests' ids, in their order.
    pub ids: Vec<RequestId>,
    /// The engine.
    pub header: TraceHeader,
    /// The adapters' shapes.
    pub shapes: Vec<AdapterShape>,
    /// Requests that were submitted.
    pub submitted: u64,
    /// Those of them that do not count: the above, and those whose end was not recorded.
    pub left_out: u64,
}

impl Recorded {
    /// Reads a recorded trace.
    pub fn read(source: impl BufRead) -> Result<Self, SimError> {
        Self::read_until(source, &Watch::default(), |_| false)
    }

    /// Reads a recorded trace as far as it can be replayed: what was submitted after lines were lost does not count.
    pub(crate) fn read_replayable(source: impl BufRead, watch: &Watch) -> Result<Self, SimError> {
        Self::read_until(source, watch, |line| matches!(line, TraceLine::Lost { .. }))
    }

    fn read_until(source: impl BufRead, watch: &Watch, is_end: impl Fn(&TraceLine) -> bool) -> Result<Self, SimError> {
        let mut lines = Lines::new(source, watch);
        let mut reader = Reader::new(lines.header()?);
        let mut ended = false;
        while let Some((_, line)) = lines.line()? {
            ended = ended || is_end(&line);
            match line {
                TraceLine::Submit(_) if ended => reader.leave_out(),
                _ if ended => {}
                line => reader.take(line),
            }
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
struct Reader {
    header: TraceHeader,
    numbers: HashMap<RegistrationId, u32>,
    names: Vec<String>,
    shapes: Vec<AdapterShape>,
    tenants: Vec<String>,
    live: HashMap<RequestId, (SimRequest, Vec<BlockName>)>,
    ended: Vec<Ended>,
    submitted: u64,
    left_out: u64,
    /// Requests for each adapter that no line describes.
    undescribed: BTreeMap<RegistrationId, u64>,
}

/// A request that counts.
struct Ended {
    id: RequestId,
    request: SimRequest,
    blocks: Vec<BlockName>,
}

impl Reader {
    fn new(header: TraceHeader) -> Self {
        Self {
            header,
            numbers: HashMap::new(),
            names: Vec::new(),
            shapes: Vec::new(),
            tenants: Vec::new(),
            live: HashMap::new(),
            ended: Vec::new(),
            submitted: 0,
            left_out: 0,
            undescribed: BTreeMap::new(),
        }
    }

    fn take(&mut self, line: TraceLine) {
        match line {
            TraceLine::Adapter(adapter) => self.adapter(adapter),
            TraceLine::Submit(request) => self.submit(request),
            TraceLine::End(end) | TraceLine::Unfinished(end) => {
                let Some((request, blocks)) = self.live.remove(&end.id) else { return };
                match end.tokens {
                    Some(tokens) if tokens > 0 && end.reason != TracedReason::Failed => {
                        let output_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
                        let request = SimRequest { output_tokens, ..request };
                        self.ended.push(Ended { id: end.id, request, blocks });
                    }
                    _ => self.left_out += 1,
                }
            }
            _ => {}
        }
    }

    /// A request was submitted that does not count.
    fn leave_out(&mut self) {
        self.submitted += 1;
        self.left_out += 1;
    }

    fn adapter(&mut self, adapter: TracedAdapter) {
        self.numbers.insert(adapter.registration, self.names.len() as u32);
        self.shapes.push(crate::replay::shape(&self.header, &adapter));
        self.names.push(adapter.name);
    }

    fn submit(&mut self, request: TracedRequest) {
        if request.adapters.len() > 1 || request.all_prompt_logits {
            return self.leave_out();
        }
        let mut adapter = None;
        if let Some(one) = request.adapters.first() {
            adapter = self.numbers.get(&one.registration).copied();
            if adapter.is_none() {
                *self.undescribed.entry(one.registration).or_default() += 1;
                return self.leave_out();
            }
        }
        self.submitted += 1;
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
    }

    fn finish(self) -> Recorded {
        let Self { header, names, shapes, tenants, live, ended, submitted, left_out, undescribed, .. } = self;
        let prefixes = prefixes(&ended, header.config.block_size as u32);
        let first = ended.iter().map(|one| one.request.arrival).fold(f64::INFINITY, f64::min);
        let mut requests: Vec<(SimRequest, RequestId)> = ended
            .into_iter()
            .zip(prefixes)
            .map(|(Ended { id, request, .. }, prefix)| {
                (SimRequest { arrival: request.arrival - first + 0.0, prefix, ..request }, id)
            })
            .collect();
        requests.sort_by(|(a, _), (b, _)| a.arrival.total_cmp(&b.arrival));
        let (requests, ids) = requests.into_iter().unzip();
        let left_out = left_out + live.len() as u64;
        let notes = notes(submitted, left_out, &undescribed);
        Recorded {
            trace: Trace { requests, adapters: names, tenants, notes },
            ids,
            header,
            shapes,
            submitted,
            left_out,
        }
    }
}

/// What of a trace is not simulated.
fn notes(submitted: u64, left_out: u64, undescribed: &BTreeMap<RegistrationId, u64>) -> Vec<String> {
    let mut notes = Vec::new();
    if left_out > 0 {
        notes.push(format!(
            "{left_out} of the trace's {submitted} requests are left out: they failed, compose adapters, want logits of their \
             prompts, name an adapter that the trace does not describe, or their end is not in it"
        ));
    }
    if !undescribed.is_empty() {
        let requests: u64 = undescribed.values().sum();
        let shown = undescribed.keys().take(8).map(|id| format!("{}.{}", id.index, id.generation));
        let more = if undescribed.len() > 8 { ", ..." } else { "" };
        notes.push(format!(
            "the lines of {} adapters were lost (registrations {}{more}), and with them {requests} requests; record the trace on \
             a faster disk to have them",
            undescribed.len(),
            shown.collect::<Vec<_>>().join(", ")
        ));
    }
    notes
}

/// What prompts begin with that others begin with, too: as far as their blocks are somebody else's as well. A simulated prompt
/// has one group only, so that prompts which part ways later count as if they did where the first of them does.
fn prefixes(requests: &[Ended], block_size: u32) -> Vec<Option<SharedPrefix>> {
    let mut users: HashMap<BlockName, u32> = HashMap::new();
    for block in requests.iter().flat_map(|one| &one.blocks) {
        *users.entry(*block).or_default() += 1;
    }
    let mut groups: HashMap<BlockName, SharedPrefix> = HashMap::new();
    let shared = |blocks: &[BlockName]| blocks.iter().take_while(|block| users[block] > 1).count() as u32;
    for Ended { request, blocks, .. } in requests {
        let tokens = (shared(blocks).saturating_mul(block_size)).min(request.prompt_tokens.saturating_sub(1));
        let Some(&first) = blocks.first().filter(|_| tokens > 0) else { continue };
        let group = groups.len() as u32;
        groups
            .entry(first)
            .and_modify(|one| one.tokens = one.tokens.min(tokens))
            .or_insert(SharedPrefix { group, tokens });
    }
    requests.iter().map(|one| one.blocks.first().and_then(|first| groups.get(first)).copied()).collect()
}
