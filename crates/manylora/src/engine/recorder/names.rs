//! Names of blocks of tokens: equal for equal beginnings, and saying nothing else.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use manylora_core::RequestId;
use manylora_core::trace::BlockName;

/// Names have so many bits, which JSON's numbers hold in every language.
const BITS: u32 = 52;

/// A sequence whose names are not all known yet.
#[derive(Debug, Default)]
struct Named {
    last: Option<BlockName>,
    /// Tokens of the block that is not full.
    rest: Vec<u32>,
    /// Tokens that were generated.
    generated: u64,
}

/// Gives names, under a key that is drawn here and kept nowhere.
#[derive(Debug)]
pub(super) struct Names {
    /// None where prefixes are not cached, so that content decides nothing.
    block_size: Option<usize>,
    key: RandomState,
    live: HashMap<RequestId, Named>,
}

impl Names {
    pub(super) fn new(block_size: Option<usize>) -> Self {
        Self { block_size, key: RandomState::new(), live: HashMap::new() }
    }

    fn name(&self, what: impl std::hash::Hash) -> BlockName {
        BlockName(self.key.hash_one(what) >> (u64::BITS - BITS))
    }

    pub(super) fn of_salt(&self, salt: &str) -> BlockName {
        self.name(salt)
    }

    /// A sequence begins; names of the full blocks of its prompt.
    pub(super) fn begin(&mut self, id: RequestId, prompt: &[u32]) -> Vec<BlockName> {
        let mut named = Named::default();
        let mut blocks = Vec::new();
        if let Some(size) = self.block_size {
            let full = prompt.chunks_exact(size);
            named.rest.extend_from_slice(full.remainder());
            for block in full {
                let name = self.name((named.last.map(|last| last.0), block));
                named.last = Some(name);
                blocks.push(name);
            }
        }
        self.live.insert(id, named);
        blocks
    }

    /// A sequence got a token; the name of the block that is full by that.
    pub(super) fn push(&mut self, id: RequestId, token: u32) -> Option<BlockName> {
        let mut named = self.live.remove(&id)?;
        let mut filled = None;
        named.generated += 1;
        if let Some(size) = self.block_size {
            named.rest.push(token);
            if named.rest.len() == size {
                let name = self.name((named.last.map(|last| last.0), named.rest.as_slice()));
                named.last = Some(name);
                named.rest.clear();
                filled = Some(name);
            }
        }
        self.live.insert(id, named);
        filled
    }

    /// A sequence ended; tokens that it generated. None if it is not known: lines of it were lost.
    pub(super) fn end(&mut self, id: RequestId) -> Option<u64> {
        self.live.remove(&id).map(|named| named.generated)
    }

    /// All that have not ended, by id, and tokens that they generated.
    pub(super) fn take_all(&mut self) -> Vec<(RequestId, u64)> {
        let mut all: Vec<_> = self.live.drain().map(|(id, named)| (id, named.generated)).collect();
        all.sort_unstable_by_key(|&(id, _)| id);
        all
    }
}
