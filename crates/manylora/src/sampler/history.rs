//! What a sequence has said so far, as far as its next token depends on it: penalties and bad words.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use manylora_core::CoreError;
use manylora_core::sampling::SamplingParams;

/// The tokens of a prompt, each once: what a repetition penalty applies to from the start. The samples of a request share
/// them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptTokens(Option<Arc<[u32]>>);

impl PromptTokens {
    /// Of an empty prompt, or of one that no penalty asks for.
    pub const NONE: Self = Self(None);

    /// Those that samplers with these parameters need of a prompt.
    pub fn new(params: &SamplingParams, prompt: &[u32]) -> Self {
        if params.repetition_penalty == 1.0 {
            return Self::NONE;
        }
        let distinct: BTreeSet<u32> = prompt.iter().copied().collect();
        Self(Some(distinct.into_iter().collect()))
    }

    /// In order.
    fn as_slice(&self) -> &[u32] {
        self.0.as_deref().unwrap_or_default()
    }

    fn contains(&self, token: u32) -> bool {
        self.as_slice().binary_search(&token).is_ok()
    }
}

/// The three penalties, and the tokens that they apply to.
#[derive(Clone, Debug)]
pub(super) struct Penalties {
    repetition: f32,
    frequency: f32,
    presence: f32,
    prompt: PromptTokens,
    /// How often a token occurred in the output.
    output: BTreeMap<u32, u32>,
}

impl Penalties {
    /// None when no penalty has an effect.
    pub(super) fn new(params: &SamplingParams, prompt: &PromptTokens) -> Option<Self> {
        if !params.has_penalties() {
            return None;
        }
        // A positive number can round to 0 or infinity on its way to f32, and neither may meet a logit of 0.
        let repetition = (params.repetition_penalty as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
        let (frequency, presence) = (params.frequency_penalty as f32, params.presence_penalty as f32);
        Some(Self { repetition, frequency, presence, prompt: prompt.clone(), output: BTreeMap::new() })
    }

    pub(super) fn count(&mut self, token: u32) {
        let occurrences = self.output.entry(token).or_default();
        *occurrences = occurrences.saturating_add(1);
    }

    /// Repetition first, over prompt and output; then frequency and presence, over the output.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        let repeated = |logit: f32| if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        for &token in self.prompt.as_slice() {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = repeated(*logit);
            }
        }
        for (&token, &occurrences) in &self.output {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            if !self.prompt.contains(token) {
                *logit = repeated(*logit);
            }
            *logit -= self.frequency * occurrences as f32;
            *logit -= self.presence;
        }
    }
}

/// Token sequences that must not be completed by the output.
#[derive(Clone, Debug, Default)]
pub(super) struct BadWords {
    single: Vec<u32>,
    /// Longer ones by the token before their last one, which is the output's last where they can be completed.
    longer: HashMap<u32, Vec<Vec<u32>>>,
    /// The end of the output, as long as the longest sequence without its last token.
    recent: VecDeque<u32>,
    longest_prefix: usize,
}

impl BadWords {
    pub(super) fn new(sequences: &[Vec<u32>]) -> Self {
        let mut words = Self::default();
        for sequence in sequences {
            match sequence.as_slice() {
                [] => {}
                [token] => words.single.push(*token),
                [.., before, _] => {
                    words.longest_prefix = words.longest_prefix.max(sequence.len() - 1);
                    words.longer.entry(*before).or_default().push(sequence.clone());
                }
            }
        }
        words
    }

    pub(super) fn is_empty(&self) -> bool {
        self.single.is_empty() && self.longer.is_empty()
    }

    pub(super) fn record(&mut self, token: u32) {
        if self.longest_prefix == 0 {
            return;
        }
        if self.recent.len() == self.longest_prefix {
            self.recent.pop_front();
        }
        self.recent.push_back(token);
    }

    /// The tokens that would complete a word now.
    pub(super) fn banned(&self) -> impl Iterator<Item = u32> {
        let begun = self.recent.back().and_then(|token| self.longer.get(token)).into_iter().flatten();
        let completing = begun.filter_map(|word| {
            let (last, prefix) = word.split_last()?;
            let since = self.recent.len().checked_sub(prefix.len())?;
            self.recent.iter().skip(since).eq(prefix).then_some(*last)
        });
        self.single.iter().copied().chain(completing)
    }
}

/// The token sequences that stand for bad words: each word as it stands at the start of a text and, where the tokenizer
/// makes that something else, as it stands after a space.
///
/// `encode` gives a text's tokens without special tokens.
pub fn bad_word_sequences(
    words: &[String],
    mut encode: impl FnMut(&str) -> Vec<u32>,
) -> Result<Vec<Vec<u32>>, CoreError> {
    let mut sequences = BTreeSet::new();
    for word in words {
        let bare = word.trim_start();
        let at_start = encode(bare);
        if at_start.is_empty() {
            return Err(CoreError::InvalidArgument {
                parameter: "bad_words",
                message: format!("bad_words entries must tokenize to at least one token, got {word:?}."),
            });
        }
        let after_space = encode(&format!(" {bare}"));
        if !after_space.is_empty() {
            sequences.insert(after_space);
        }
        sequences.insert(at_start);
    }
    Ok(sequences.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_words_those_are_looked_at_that_can_end_now() {
        let words: Vec<Vec<u32>> = (0..4000).map(|word| vec![word, word + 1, word + 2, 9]).collect();
        let mut bad = BadWords::new(&words);
        assert!(bad.longer.values().all(|begun| begun.len() == 1));
        for (token, banned) in [(7, vec![]), (8, vec![]), (9, vec![9]), (10, vec![9]), (1, vec![])] {
            bad.record(token);
            assert_eq!(bad.banned().collect::<Vec<_>>(), banned, "{token}");
        }
    }

    #[test]
    fn samples_share_what_penalties_need_of_their_prompt() {
        let params = SamplingParams { repetition_penalty: 2.0, frequency_penalty: 0.5, ..SamplingParams::default() };
        let prompt = PromptTokens::new(&params, &[3, 1, 3, 1, 9]);
        let mut samples = [(); 3].map(|()| Penalties::new(&params, &prompt).expect("penalties"));
        let shared = prompt.0.as_ref().expect("a penalty needs them");
        assert_eq!((&**shared, Arc::strong_count(shared)), (&[1, 3, 9][..], 4));
        for sample in &mut samples {
            sample.count(3);
            sample.count(2);
        }
        let mut logits = [1.0_f32, 1.0, 1.0, -1.0, 1.0];
        samples[0].apply(&mut logits);
        assert_eq!(logits, [1.0, 0.5, 0.0, -2.5, 1.0]);
        // Where no penalty applies to a prompt nothing of it is kept.
        let other = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
        assert_eq!(PromptTokens::new(&other, &[3, 1]), PromptTokens::NONE);
    }
}
