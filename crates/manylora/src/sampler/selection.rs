//! Drawing a token from a row of logits under min_p, top_k and top_p, without sorting the vocabulary.
//!
//! min_p and top_k are thresholds on the logit: the first is known from the maximum, the second comes from a partial
//! selection. Only what passes both is gathered. top_p needs the mass of the most likely tokens: of the whole row, the
//! tokens near the most likely one are gathered, further down as long as they have too little of the row's mass, and the
//! exact boundary is found among those by bisection over partial selections. One uniform number then picks a token by
//! inverting the cumulative mass of what is left.
//!
//! Under top_k everything that follows depends on the k largest values and their ties alone, in the order of their tokens:
//! a list of these gives the same candidates, the same sums and the same token as the row, to the last bit.

use std::cmp::Ordering;

use super::arithmetic::{BLOCK, EXP_LOWEST, block_mass, exp, maximum};

/// Values that are looked at together: most chunks hold nothing of interest, and saying so takes no branch.
const CHUNK: usize = 16;
/// Up to this many candidates, sorting is cheaper than selecting.
const SORTED: usize = 256;
/// How far below the most likely token those with `top_p` of the mass are looked for first: e^-6 is 1/400 of its probability.
const NUCLEUS_REACH: f32 = 6.0;

/// A token that may be drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) logit: f32,
    /// Its probability relative to that of the most likely token.
    weight: f32,
    pub(super) token: u32,
}

impl Candidate {
    /// Most likely first; of equally likely ones the lowest id first.
    fn order(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.token.cmp(&other.token))
    }
}

/// Temperature and the three filters of a random request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filters {
    pub(super) inverse_temperature: f32,
    /// ln(min_p), minus infinity when off.
    pub(super) min_p_logarithm: f32,
    /// Less than the vocabulary has tokens.
    pub(super) top_k: Option<usize>,
    /// 1 when off.
    pub(super) top_p: f64,
}

/// Memory that one draw after the other uses.
#[derive(Clone, Debug, Default)]
pub(super) struct SelectionScratch {
    candidates: Vec<Candidate>,
    values: Vec<f32>,
    /// Of blocks of the row.
    masses: Vec<f64>,
}

impl SelectionScratch {
    pub(super) fn for_vocabulary(vocab_size: usize) -> Self {
        Self {
            candidates: Vec::with_capacity(SORTED),
            values: Vec::with_capacity(4 * SORTED),
            masses: Vec::with_capacity(vocab_size.div_ceil(BLOCK)),
        }
    }

    /// Memory for [`kth_largest`].
    pub(super) fn values(&mut self) -> &mut Vec<f32> {
        &mut self.values
    }
}

fn count(chunk: &[f32], condition: impl Fn(&f32) -> bool) -> u32 {
    chunk.iter().map(|value| u32::from(condition(value))).sum()
}

/// The `k`-th largest value of a row (k >= 1); minus infinity when fewer than `k` values are above it. NaN never counts.
pub(super) fn kth_largest(logits: &[f32], k: usize, values: &mut Vec<f32>) -> f32 {
    let descending = |a: &f32, b: &f32| b.total_cmp(a);
    let capacity = 2 * k + 4 * CHUNK;
    let mut threshold = f32::NEG_INFINITY;
    values.clear();
    // Once `values` holds k values that are at least `threshold`, no smaller or equal one can change the answer.
    for chunk in logits.chunks(CHUNK) {
        if count(chunk, |&value| value > threshold) == 0 {
            continue;
        }
        values.extend(chunk.iter().copied().filter(|&value| value > threshold));
        if values.len() + CHUNK > capacity {
            threshold = *values.select_nth_unstable_by(k - 1, descending).1;
            values.truncate(k);
        }
    }
    if values.len() < k { f32::NEG_INFINITY } else { *values.select_nth_unstable_by(k - 1, descending).1 }
}

impl Filters {
    fn exponent(&self, logit: f32, top: f32) -> f32 {
        // Equality first: infinity minus infinity is not a number.
        if logit == top { 0.0 } else { (logit - top) * self.inverse_temperature }
    }

    /// Gathers, in the order of their ids, the tokens with a weight above 0, a logit of at least `threshold` and an
    /// exponent of at least `lowest_exponent`.
    fn gather(&self, logits: &[f32], top: f32, threshold: f32, lowest_exponent: f32, candidates: &mut Vec<Candidate>) {
        let passes = |&logit: &f32| logit >= threshold && self.exponent(logit, top) >= lowest_exponent;
        candidates.clear();
        for (index, chunk) in logits.chunks(CHUNK).enumerate() {
            if count(chunk, passes) == 0 {
                continue;
            }
            for (offset, &logit) in chunk.iter().enumerate().filter(|(_, logit)| passes(logit)) {
                let weight = exp(self.exponent(logit, top));
                if weight > 0.0 {
                    candidates.push(Candidate { logit, weight, token: (index * CHUNK + offset) as u32 });
                }
            }
        }
    }

    /// Gathers what all filters leave. False when the row has no logit above minus infinity.
    fn support(&self, logits: &[f32], scratch: &mut SelectionScratch) -> bool {
        let top = maximum(logits);
        if top == f32::NEG_INFINITY {
            return false;
        }
        let threshold = match self.top_k {
            // All others are infinitely less likely.
            _ if top == f32::INFINITY => top,
            Some(k) => kth_largest(logits, k, &mut scratch.values),
            None => f32::NEG_INFINITY,
        };
        let lowest_exponent = self.min_p_logarithm;
        let total = if self.top_p < 1.0 && threshold == f32::NEG_INFINITY && lowest_exponent == f32::NEG_INFINITY {
            self.gather_nucleus(logits, top, scratch)
        } else {
            self.gather(logits, top, threshold, lowest_exponent, &mut scratch.candidates);
            mass_of(&scratch.candidates)
        };
        if self.top_p < 1.0 {
            let kept = boundary_by_bisection(&mut scratch.candidates, self.top_p * total);
            scratch.candidates.truncate(kept);
        }
        true
    }

    /// Gathers, in the order of their ids, tokens that have `top_p` of the row's mass together, the most likely ones; returns
    /// that mass. How many more than needed depends on the row alone.
    fn gather_nucleus(&self, logits: &[f32], top: f32, scratch: &mut SelectionScratch) -> f64 {
        let total = self.block_masses(logits, top, &mut scratch.masses);
        let mut reach = NUCLEUS_REACH;
        loop {
            self.gather(logits, top, f32::NEG_INFINITY, -reach, &mut scratch.candidates);
            if -reach <= EXP_LOWEST || mass_of(&scratch.candidates) >= self.top_p * total {
                return total;
            }
            reach *= 2.0;
        }
    }

    /// Masses of the row's blocks; returns their sum.
    fn block_masses(&self, logits: &[f32], top: f32, masses: &mut Vec<f64>) -> f64 {
        masses.clear();
        masses.extend(logits.chunks(BLOCK).map(|block| block_mass(block, top, self.inverse_temperature)));
        masses.iter().sum()
    }

    /// Draws a token with a uniform number in [0, 1); None when the row has no logit above minus infinity.
    pub(super) fn draw(&self, logits: &[f32], uniform: f64, scratch: &mut SelectionScratch) -> Option<u32> {
        let open = self.top_k.is_none() && self.top_p >= 1.0;
        if open && self.min_p_logarithm == f32::NEG_INFINITY {
            let top = maximum(logits);
            if top.is_finite() {
                return Some(self.draw_from_whole_row(logits, top, uniform, &mut scratch.masses));
            }
        }
        self.draw_from_support(logits, uniform, scratch)
    }

    /// The token that [`Self::draw`] gives for a row of which `values`, in the order of `tokens`, are all that is above minus
    /// infinity and at least the n-th largest, with some n >= `top_k`. There must be a `top_k`.
    pub(super) fn draw_listed(
        &self,
        values: &[f32],
        tokens: &[u32],
        uniform: f64,
        scratch: &mut SelectionScratch,
    ) -> Option<u32> {
        let place = self.draw_from_support(values, uniform, scratch)?;
        tokens.get(place as usize).copied()
    }

    fn draw_from_support(&self, logits: &[f32], uniform: f64, scratch: &mut SelectionScratch) -> Option<u32> {
        if !self.support(logits, scratch) {
            return None;
        }
        let candidates = &scratch.candidates;
        let total = mass_of(candidates);
        let target = uniform * total;
        let mut sum = 0.0;
        let chosen = candidates.iter().find(|candidate| {
            sum += f64::from(candidate.weight);
            sum > target
        });
        chosen.or(candidates.last()).map(|candidate| candidate.token)
    }

    fn draw_from_whole_row(&self, logits: &[f32], top: f32, uniform: f64, masses: &mut Vec<f64>) -> u32 {
        let target = uniform * self.block_masses(logits, top, masses);
        let (mut block, mut sum, mut before) = (0, 0.0, 0.0);
        for (index, &mass) in masses.iter().enumerate() {
            if mass > 0.0 {
                (block, sum) = (index, before);
            }
            before += mass;
            if before > target {
                break;
            }
        }
        // The lanes of a block's mass round differently from this sum, so the target can lie behind the last token.
        let first = block * BLOCK;
        let mut chosen = first;
        for (token, &logit) in (first..).zip(logits[first..].iter().take(BLOCK)) {
            let weight = f64::from(exp((logit - top) * self.inverse_temperature));
            if weight > 0.0 {
                chosen = token;
                sum += weight;
                if sum > target {
                    break;
                }
            }
        }
        chosen as u32
    }

    /// What can be drawn, with probabilities, by token id.
    pub(super) fn probabilities(&self, logits: &[f32], scratch: &mut SelectionScratch) -> Option<Vec<(u32, f64)>> {
        if !self.support(logits, scratch) {
            return None;
        }
        let total = mass_of(&scratch.candidates);
        let share = |candidate: &Candidate| (candidate.token, f64::from(candidate.weight) / total);
        let mut probabilities: Vec<_> = scratch.candidates.iter().map(share).collect();
        probabilities.sort_unstable_by_key(|&(token, _)| token);
        Some(probabilities)
    }
}

fn mass_of(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}

/// How many of the sorted candidates have the needed mass together; None when all of them have less.
fn prefix_with_mass(sorted: &[Candidate], needed: f64) -> Option<usize> {
    let mut sum = 0.0;
    sorted
        .iter()
        .position(|candidate| {
            sum += f64::from(candidate.weight);
            sum >= needed
        })
        .map(|last| last + 1)
}

/// Moves the fewest most likely candidates with the needed mass to the front and returns their number (at least 1).
fn boundary_by_bisection(candidates: &mut [Candidate], mut needed: f64) -> usize {
    let (mut start, mut end) = (0, candidates.len());
    while end - start > SORTED {
        let middle = start + (end - start) / 2;
        candidates[start..end].select_nth_unstable_by(middle - start, Candidate::order);
        let mass = mass_of(&candidates[start..middle]);
        if mass >= needed {
            end = middle;
        } else {
            needed -= mass;
            start = middle;
        }
    }
    candidates[start..end].sort_unstable_by(Candidate::order);
    start + prefix_with_mass(&candidates[start..end], needed).unwrap_or(end - start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Steps between values are so small that sums round, and a value in another place would show.
    fn rows() -> impl Strategy<Value = Vec<f32>> {
        let value = prop_oneof![
            12 => (-500_i32..500).prop_map(|units| units as f32 * 0.0123),
            1 => Just(f32::NEG_INFINITY),
            1 => Just(f32::NAN),
        ];
        prop_oneof![1_usize..40, 200_usize..800].prop_flat_map(move |size| prop::collection::vec(value.clone(), size))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        /// All that a draw is made from, weights and order included.
        #[test]
        fn a_list_gives_the_candidates_of_the_row(
            logits in rows(),
            k in 1_usize..300,
            top_p in prop_oneof![Just(1.0), 0.01_f64..1.0],
            min_p_logarithm in prop_oneof![Just(f32::NEG_INFINITY), -6.0_f32..0.0],
            inverse_temperature in 0.5_f32..3.0,
        ) {
            let filters = Filters { inverse_temperature, min_p_logarithm, top_k: Some(k), top_p };
            let mut values = Vec::new();
            let least = kth_largest(&logits, k, &mut values);
            let tokens: Vec<u32> = (0..logits.len() as u32)
                .filter(|&token| logits[token as usize] >= least && logits[token as usize] > f32::NEG_INFINITY)
                .collect();
            let listed: Vec<f32> = tokens.iter().map(|&token| logits[token as usize]).collect();
            let candidates = |logits: &[f32]| {
                let mut scratch = SelectionScratch::default();
                filters.support(logits, &mut scratch).then_some(scratch.candidates)
            };
            let bits = |it: &Candidate, token| (it.logit.to_bits(), it.weight.to_bits(), token);
            let wanted = candidates(&logits)
                .map(|all| all.iter().map(|it| bits(it, it.token)).collect::<Vec<_>>());
            let found = candidates(&listed)
                .map(|all| all.iter().map(|it| bits(it, tokens[it.token as usize])).collect::<Vec<_>>());
            prop_assert_eq!(found, wanted);
        }
    }
}
