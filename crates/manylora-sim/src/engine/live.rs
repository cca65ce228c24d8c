//! The requests that are under way, found by their id without a search.

use manylora_core::RequestId;

use crate::results::RequestRecord;
use crate::workload::SimRequest;

/// A request that is under way.
#[derive(Clone, Debug)]
pub(super) struct Live {
    number: u64,
    request: SimRequest,
    admitted: Option<f64>,
    first_token: Option<f64>,
    last_token: f64,
    longest_gap: f64,
    tokens: u32,
    cached_tokens: u32,
    preemptions: u32,
}

impl Live {
    /// It was planned into a step that began at this time.
    pub(super) fn planned(&mut self, begun: f64, cached_tokens: u32, preemptions: u32) {
        if self.admitted.is_none() {
            self.admitted = Some(begun);
            self.cached_tokens = cached_tokens;
        }
        self.preemptions = preemptions;
    }

    /// It brought a token; the seconds since the one before.
    pub(super) fn token(&mut self, now: f64) -> Option<f64> {
        self.tokens += 1;
        let before = std::mem::replace(&mut self.last_token, now);
        if self.first_token.is_none() {
            self.first_token = Some(now);
            return None;
        }
        self.longest_gap = self.longest_gap.max(now - before);
        Some(now - before)
    }

    /// A token that no other request has.
    pub(super) fn word(&self) -> u32 {
        word(self.number)
    }
}

/// Placeholders have the largest number.
fn word(number: u64) -> u32 {
    OWN_WORDS + (number % u64::from(u32::MAX - OWN_WORDS)) as u32
}

/// Tokens below this are those of shared prefixes, by their group.
const OWN_WORDS: u32 = 1 << 24;

/// Requests under way. An id is a place and how many requests came before, so that none is used twice.
#[derive(Debug, Default)]
pub(super) struct LiveRequests {
    places: Vec<Option<Box<Live>>>,
    vacant: Vec<u32>,
    arrived: u64,
}

const PLACE_BITS: u32 = 32;

fn place(id: RequestId) -> usize {
    (id.0 & ((1 << PLACE_BITS) - 1)) as usize
}

impl LiveRequests {
    pub(super) fn insert(&mut self, request: &SimRequest) -> RequestId {
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.places.push(None);
            (self.places.len() - 1) as u32
        });
        let number = self.arrived;
        self.arrived += 1;
        self.places[place as usize] = Some(Box::new(Live {
            number,
            request: *request,
            admitted: None,
            first_token: None,
            last_token: 0.0,
            longest_gap: 0.0,
            tokens: 0,
            cached_tokens: 0,
            preemptions: 0,
        }));
        RequestId(number << PLACE_BITS | u64::from(place))
    }

    /// Tokens of a request's prompt: its group's first, then its own.
    pub(super) fn prompt(id: RequestId, request: &SimRequest) -> Vec<u32> {
        let own = word(id.0 >> PLACE_BITS);
        let mut prompt = vec![own; request.prompt_tokens as usize];
        if let Some(prefix) = request.prefix {
            let shared = (prefix.tokens as usize).min(prompt.len());
            prompt[..shared].fill(prefix.group % OWN_WORDS);
        }
        prompt
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> &mut Live {
        self.places[place(id)].as_deref_mut().expect("only live requests are planned")
    }

    pub(super) fn remove(&mut self, id: RequestId, now: f64, failure: Option<String>) -> RequestRecord {
        let live = self.places[place(id)].take().expect("a request ends once");
        self.vacant.push(place(id) as u32);
        RequestRecord {
            number: live.number,
            adapter: live.request.adapter,
            tenant: live.request.tenant,
            prompt_tokens: live.request.prompt_tokens,
            arrival: live.request.arrival,
            admitted: live.admitted,
            first_token: live.first_token,
            end: now,
            tokens: live.tokens,
            longest_gap: live.longest_gap,
            cached_tokens: live.cached_tokens,
            preemptions: live.preemptions,
            failure,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.vacant.len()
    }
}
