//! A request's life inside the control plane, and the table of all live ones.

use std::collections::HashMap;
use std::ops::{Deref, Index, IndexMut};
use std::sync::Arc;

use crate::block_pool::{BlockAdapter, block_hash};
use crate::fairness::AccountIndex;
use crate::identity::{BlockId, Digest, RegistrationId, RequestId};
use crate::queue::LaneIndex;
use crate::shelf::{Shelf, VersionIndex};

/// Place of a live request in [`Requests`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestIndex(u32);

/// One adapter of a request, bound to a version as soon as the version is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestAdapter {
    pub(crate) registration: RegistrationId,
    pub(crate) scale: f32,
    pub(crate) first_active: u32,
    /// The version whose lease the request holds.
    pub(crate) version: Option<VersionIndex>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not admitted yet.
    Waiting,
    Running,
    /// Was running, lost its blocks, keeps its adapters.
    Preempted,
}

/// The tokens of a request. As long as it waits they are the prompt's, which its siblings share: thousands of samples of one
/// prompt may wait, and few of them run.
#[derive(Debug)]
pub(crate) struct Tokens {
    /// The prompt's.
    shared: Arc<[u32]>,
    /// All of them, once it runs.
    own: Vec<u32>,
}

impl Tokens {
    pub(crate) fn of_prompt(prompt: Arc<[u32]>) -> Self {
        Self { shared: prompt, own: Vec::new() }
    }

    /// Makes them its own, with room for `most`.
    pub(crate) fn own(&mut self, most: usize) -> &mut Vec<u32> {
        if self.own.is_empty() {
            self.own.reserve(most.max(self.shared.len()));
            self.own.extend_from_slice(&self.shared);
        }
        &mut self.own
    }
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        if self.own.is_empty() { &self.shared } else { &self.own }
    }
}

/// A live request.
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each named where it is set")]
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) phase: Phase,
    /// Prompt, then the tokens that were generated and committed.
    pub(crate) tokens: Tokens,
    pub(crate) prompt_length: usize,
    /// Length at which it ends; the last token needs no KV.
    pub(crate) length_limit: usize,
    /// 0 unless the policy is `Priority`.
    pub(crate) priority: i64,
    pub(crate) arrival: u64,
    /// Who is charged for it.
    pub(crate) account: AccountIndex,
    /// Where it waits, until it is admitted.
    pub(crate) lane: LaneIndex,
    pub(crate) cache_salt: Option<String>,
    pub(crate) adapters: Vec<RequestAdapter>,
    pub(crate) read_prefix_cache: bool,
    pub(crate) all_prompt_logits: bool,
    /// Whether [`crate::Effect::LeaseBound`] was given.
    pub(crate) announced: bool,
    pub(crate) blocks: Vec<BlockId>,
    /// Hashes of its full blocks, as far as they were needed.
    pub(crate) hashes: Vec<Digest>,
    /// Leading blocks whose content was offered to the prefix cache.
    pub(crate) named: usize,
    /// Positions planned, those in flight included.
    pub(crate) computed: usize,
    /// Positions whose results came back.
    pub(crate) committed: usize,
    /// Tokens that steps in flight will bring.
    pub(crate) placeholders: usize,
    /// Steps in flight that contain it.
    pub(crate) in_flight: usize,
    /// Results of steps in flight to throw away, because they were planned on tokens that did not come.
    pub(crate) void_outcomes: usize,
    /// Counts losses of its blocks: results from before one do not count as computed positions.
    pub(crate) epoch: u32,
    /// Once this many positions are computed it counts as decoding.
    pub(crate) prefill_end: usize,
    /// Tokens found in the prefix cache at its first admission.
    pub(crate) cached_tokens: Option<u32>,
    /// Whether the whole prompt was computed once.
    pub(crate) prompt_done: bool,
    /// Last step it was planned in.
    pub(crate) planned_step: u64,
}

impl Request {
    /// The registrations that it names, each once.
    pub(crate) fn registrations(&self) -> impl Iterator<Item = RegistrationId> + '_ {
        let named = self.adapters.iter().map(|adapter| adapter.registration).enumerate();
        named
            .filter(|&(position, registration)| {
                self.adapters[..position].iter().all(|earlier| earlier.registration != registration)
            })
            .map(|(_, registration)| registration)
    }

    /// Known and expected tokens.
    pub(crate) fn length(&self) -> usize {
        self.tokens.len() + self.placeholders
    }

    /// Rows that it could use in the next step.
    pub(crate) fn wanted_rows(&self) -> usize {
        if self.placeholders > 0 && self.length() >= self.length_limit {
            return 0;
        }
        self.length() - self.computed
    }

    pub(crate) fn is_decoding(&self) -> bool {
        self.computed >= self.prefill_end
    }

    /// Makes sure that the hashes of its first `blocks` blocks are known. Its tokens and versions must be.
    pub(crate) fn hash_blocks(&mut self, blocks: usize, block_size: usize, base: &Digest, shelf: &Shelf) {
        while self.hashes.len() < blocks {
            let start = self.hashes.len() * block_size;
            let Some(tokens) = self.tokens.get(start..start + block_size) else { return };
            let active = |adapter: &&RequestAdapter| (adapter.first_active as usize) < start + block_size;
            let count = self.adapters.iter().filter(active).count();
            let adapters = self.adapters.iter().filter(active).map(|adapter| BlockAdapter {
                digest: adapter.version.map_or(Digest([0; 32]), |version| shelf.version(version).digest),
                scale: adapter.scale,
                first_row: (adapter.first_active as usize).saturating_sub(start) as u32,
            });
            let salt = self.cache_salt.as_deref();
            self.hashes.push(block_hash(self.hashes.last(), tokens, salt, base, count, adapters));
        }
    }
}

/// All live requests. An index is reused only after its request ended.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    slots: Vec<Option<Box<Request>>>,
    vacant: Vec<u32>,
    by_id: HashMap<RequestId, RequestIndex>,
}

impl Requests {
    pub(crate) fn insert(&mut self, request: Request) -> RequestIndex {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.by_id.insert(request.id, RequestIndex(slot));
        self.slots[slot as usize] = Some(Box::new(request));
        RequestIndex(slot)
    }

    pub(crate) fn remove(&mut self, index: RequestIndex) -> Option<Request> {
        let request = self.slots.get_mut(index.0 as usize)?.take()?;
        self.by_id.remove(&request.id);
        self.vacant.push(index.0);
        Some(*request)
    }

    /// Whether a request is still there, at its place: the same as [`Self::find`], without looking for it.
    pub(crate) fn holds(&self, index: RequestIndex, id: RequestId) -> bool {
        self.slots.get(index.0 as usize).and_then(Option::as_deref).is_some_and(|request| request.id == id)
    }

    pub(crate) fn find(&self, id: RequestId) -> Option<RequestIndex> {
        self.by_id.get(&id).copied()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (RequestIndex, &Request)> {
        let numbered = self.slots.iter().enumerate();
        numbered.filter_map(|(slot, request)| Some((RequestIndex(slot as u32), request.as_deref()?)))
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }
}

impl Index<RequestIndex> for Requests {
    type Output = Request;

    fn index(&self, index: RequestIndex) -> &Request {
        self.slots[index.0 as usize].as_deref().expect("queues hold live requests only")
    }
}

impl IndexMut<RequestIndex> for Requests {
    fn index_mut(&mut self, index: RequestIndex) -> &mut Request {
        self.slots[index.0 as usize].as_deref_mut().expect("queues hold live requests only")
    }
}
