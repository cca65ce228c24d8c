//! Tokens in place of those that a trace does not have: equal where the recorded blocks were equal, and nowhere else.

use std::collections::HashMap;
use std::io::BufRead;

use manylora_core::RequestId;
use manylora_core::trace::{BlockName, TraceLine};

use super::lines::Lines;
use crate::error::SimError;
use crate::run::Watch;

/// Stands in for the tokens of all requests.
#[derive(Debug)]
pub(super) struct Tokens {
    block_size: usize,
    numbers: HashMap<BlockName, u32>,
    /// Blocks that sequences filled with what they generated: known when they are full, needed before.
    generated: HashMap<RequestId, Vec<BlockName>>,
    next: u32,
}

/// The tokens of one request.
#[derive(Debug)]
pub(super) struct Sequence {
    /// A number for each full block.
    blocks: Vec<u32>,
    length: usize,
    /// For blocks that have no name: nobody else's.
    own: u32,
}

impl Tokens {
    /// Looks through a trace for the blocks that sequences come to.
    pub(super) fn of_trace(source: impl BufRead, block_size: usize, watch: &Watch) -> Result<Self, SimError> {
        let mut lines = Lines::new(source, watch);
        let mut generated: HashMap<RequestId, Vec<BlockName>> = HashMap::new();
        while let Some((number, text)) = lines.text()? {
            // Most lines are of no interest here, and need not be understood.
            if !(text.starts_with("{\"kind\":\"outcome\"") && text.contains("\"filled\"")) {
                continue;
            }
            if !text.ends_with('\n') {
                break;
            }
            if let TraceLine::Outcome(outcome) = super::lines::parse(number, text)? {
                for (id, name) in outcome.filled {
                    generated.entry(id).or_default().push(name);
                }
            }
        }
        Ok(Self { block_size, numbers: HashMap::new(), generated, next: 0 })
    }

    fn number(&mut self, name: BlockName) -> u32 {
        let next = &mut self.next;
        *self.numbers.entry(name).or_insert_with(|| {
            *next += 1;
            *next
        })
    }

    /// A request, and its prompt.
    pub(super) fn begin(&mut self, id: RequestId, prompt_tokens: usize, prompt: &[BlockName]) -> (Sequence, Vec<u32>) {
        let generated = self.generated.remove(&id).unwrap_or_default();
        let blocks = prompt.iter().chain(&generated).map(|&name| self.number(name)).collect();
        self.next += 1;
        let mut sequence = Sequence { blocks, length: 0, own: self.next };
        let prompt = (0..prompt_tokens).map(|_| sequence.push(self.block_size)).collect();
        (sequence, prompt)
    }

    /// The next token of a request.
    pub(super) fn push(&self, sequence: &mut Sequence) -> u32 {
        sequence.push(self.block_size)
    }
}

impl Sequence {
    fn push(&mut self, block_size: usize) -> u32 {
        let block = self.length / block_size;
        self.length += 1;
        self.blocks.get(block).copied().unwrap_or(self.own)
    }
}
