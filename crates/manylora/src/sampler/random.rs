//! Random numbers that are a function of what they are for, not of when they are asked for.
//!
//! A generator with a running state would make a draw depend on the draws before it, and so on the batch. Philox4x32-10
//! (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter and a key into
//! random bits at once. Here the key is the seed, and the counter is (position in the output, sample of the request,
//! submission): a row gets the same number whatever runs beside it, and again after preemption.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Names the stream of random numbers of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RandomKey {
    seed: u64,
    /// 0 for a request with its own seed; otherwise one more than the request's submission index.
    stream: u64,
    sample: u32,
}

impl RandomKey {
    /// The stream of sequence `sample` (0..n) of a request that brought its own seed.
    pub fn of_request(seed: i64, sample: u32) -> Self {
        Self { seed: seed.cast_unsigned(), stream: 0, sample }
    }

    /// The stream of sequence `sample` (0..n) of the request that was submitted as number `submission` to an engine
    /// with this seed.
    pub fn of_submission(engine_seed: u64, submission: u64, sample: u32) -> Self {
        Self { seed: engine_seed, stream: submission.wrapping_add(1), sample }
    }

    /// A number in [0, 1) with 53 random bits, for the output token at `position`.
    pub(super) fn uniform(self, position: u32) -> f64 {
        let counter = [position, self.sample, self.stream as u32, (self.stream >> 32) as u32];
        let [low, high, ..] = philox(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
        bits as f64 / (1_u64 << 53) as f64
    }
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_its_authors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let digits_of_pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let expected = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox(digits_of_pi, [0xa409_3822, 0x299f_31d0]), expected);
    }

    #[test]
    fn every_part_of_the_key_matters() {
        let keys = [
            RandomKey::of_request(1, 0),
            RandomKey::of_request(1, 1),
            RandomKey::of_request(2, 0),
            RandomKey::of_request(1 << 32 | 1, 0),
            RandomKey::of_submission(1, 0, 0),
            RandomKey::of_submission(1, 1, 0),
            RandomKey::of_submission(1, 1 << 32, 0),
        ];
        let mut drawn: Vec<f64> = keys.iter().flat_map(|key| [key.uniform(0), key.uniform(1)]).collect();
        drawn.sort_by(f64::total_cmp);
        assert!(drawn.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn uniform_numbers_fill_the_unit_interval_evenly() {
        let key = RandomKey::of_request(7, 0);
        let mut bins = [0_u32; 64];
        let draws = 64_000;
        for position in 0..draws {
            let number = key.uniform(position);
            assert!((0.0..1.0).contains(&number));
            bins[(number * 64.0) as usize] += 1;
        }
        let expected = f64::from(draws) / 64.0;
        let chi_square: f64 = bins.iter().map(|&count| (f64::from(count) - expected).powi(2) / expected).sum();
        // The 0.999 quantile for 63 degrees of freedom.
        assert!(chi_square < 103.4, "{chi_square}");
    }
}
