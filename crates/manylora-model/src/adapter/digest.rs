//! An adapter version's identity: a digest of what it does, not of how it is spelled.
//!
//! BLAKE3 over a tag, the number of sites, and per site in order of its index: index, rank, columns of A, rows of B,
//! the bits of the f32 scale, the formats of A and B, and BLAKE3 over the values of A and then of B, row-major and
//! little-endian in their formats, each the first of bfloat16, float16 and float32 that holds all of them exactly. So the
//! same values have one digest however they were stored, under whatever key spelling, file layout, name or path; any other
//! value, rank, scale or module gives another one; and what is hashed is mostly the file's own bytes, in runs that are long
//! enough for the hash to be fast. Keys of the configuration that do not change the result do not enter.

use blake3::Hasher;
use half::{bf16, f16};
use manylora_kernels::{FactorType, SiteShape, StoredFactor};

const TAG: &[u8] = b"manylora adapter 4\n";

/// Values that are widened at a time.
const BLOCK: usize = 4096;

/// What one site's factors are: their formats and the hash of their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FactorsDigest {
    formats: [FactorType; 2],
    values: [u8; 32],
}

impl FactorsDigest {
    /// Digest of A and B. `joined` are the bytes of both, one after the other, if they lie so.
    pub fn new(a: StoredFactor<'_>, b: StoredFactor<'_>, joined: Option<&[u8]>) -> Self {
        let formats = [narrowest(a), narrowest(b)];
        let values = if let Some(bytes) = joined.filter(|_| formats == [a.dtype, b.dtype]) {
            blake3::hash(bytes)
        } else {
            let mut hasher = Hasher::new();
            for (stored, format) in [a, b].into_iter().zip(formats) {
                hash_values(&mut hasher, stored, format);
            }
            hasher.finalize()
        };
        Self { formats, values: values.into() }
    }
}

/// Hashes the values in a format that holds all of them exactly.
fn hash_values(hasher: &mut Hasher, stored: StoredFactor<'_>, format: FactorType) {
    if format == stored.dtype {
        hasher.update(stored.bytes);
        return;
    }
    let mut bytes = Vec::with_capacity(BLOCK * format.bytes());
    for_each_block(stored, |values| {
        bytes.clear();
        match format {
            FactorType::Bf16 => bytes.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes())),
            FactorType::F16 => bytes.extend(values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes())),
            FactorType::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        }
        hasher.update(&bytes);
        true
    });
}

/// The first of bfloat16, float16 and float32 that holds all values exactly.
fn narrowest(stored: StoredFactor<'_>) -> FactorType {
    let is_bf16 = |value: &f32| value.to_bits().trailing_zeros() >= 16;
    let is_f16 = |value: &f32| f16::from_f32(*value).to_f32().to_bits() == value.to_bits();
    if stored.dtype == FactorType::Bf16 || for_each_block(stored, |values| values.iter().all(is_bf16)) {
        FactorType::Bf16
    } else if stored.dtype == FactorType::F16 || for_each_block(stored, |values| values.iter().all(is_f16)) {
        FactorType::F16
    } else {
        FactorType::F32
    }
}

/// Calls `see` with the values, block by block, until it is false; whether it never was.
fn for_each_block(stored: StoredFactor<'_>, mut see: impl FnMut(&[f32]) -> bool) -> bool {
    let mut values = vec![0.0; BLOCK.min(stored.len())];
    (0..stored.len()).step_by(BLOCK).all(|first| {
        let part = stored.part(first..(first + BLOCK).min(stored.len()));
        let values = &mut values[..part.len()];
        part.widen(values);
        see(values)
    })
}

/// Digest of an adapter: its sites, sorted by index, and the digests of their factors.
pub fn adapter_digest(sites: &[SiteShape], factors: &[FactorsDigest]) -> [u8; 32] {
    let mut hasher = Hasher::new();
    hasher.update(TAG);
    hasher.update(&(sites.len() as u64).to_le_bytes());
    for (shape, factors) in sites.iter().zip(factors) {
        for number in [shape.site.0, shape.rank, shape.input, shape.output, shape.scale.to_bits()] {
            hasher.update(&number.to_le_bytes());
        }
        for format in factors.formats {
            hasher.update(match format {
                FactorType::Bf16 => b"BF16",
                FactorType::F16 => b"F16 ",
                FactorType::F32 => b"F32 ",
            });
        }
        hasher.update(&factors.values);
    }
    hasher.finalize().into()
}

/// A digest as 64 lower-case hex digits.
pub fn hex(digest: &[u8; 32]) -> String {
    digest
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|nibble| char::from_digit(nibble.into(), 16))
        .collect()
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use manylora_kernels::{FactorType, StoredFactor};

    use super::FactorsDigest;

    fn bytes(values: &[f32], dtype: FactorType) -> Vec<u8> {
        match dtype {
            FactorType::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            FactorType::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            FactorType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    fn digest(values: &[f32], dtype: FactorType) -> FactorsDigest {
        let (a, b) = (bytes(values, dtype), bytes(&values[1..], dtype));
        let (stored_a, stored_b) = (StoredFactor { dtype, bytes: &a }, StoredFactor { dtype, bytes: &b });
        let apart = FactorsDigest::new(stored_a, stored_b, None);
        assert_eq!(apart, FactorsDigest::new(stored_a, stored_b, Some(&[&a[..], &b].concat())));
        apart
    }

    #[test]
    fn the_same_values_have_one_digest_however_they_are_stored() {
        let both: Vec<f32> = (0..9000).map(|index| (index % 255) as f32 / 64.0 - 2.0).collect();
        let of_both = digest(&both, FactorType::F32);
        assert_eq!(of_both, digest(&both, FactorType::Bf16));
        assert_eq!(of_both, digest(&both, FactorType::F16));
        // More digits than bfloat16 has, and more than float16 has.
        let half: Vec<f32> =
            both.iter().map(|value| value + 1.0 / 512.0).map(|value| f16::from_f32(value).to_f32()).collect();
        let of_half = digest(&half, FactorType::F32);
        assert_eq!(of_half, digest(&half, FactorType::F16));
        let single: Vec<f32> = both.iter().map(|value| value * 1.000_001).collect();
        let wide = [3e38_f32.to_bits() & 0xFFFF_0000, 0x8000_0000].map(f32::from_bits);
        assert_eq!(digest(&wide, FactorType::F32), digest(&wide, FactorType::Bf16), "a minus before zero counts");
        let different = [of_both, of_half, digest(&single, FactorType::F32), digest(&wide, FactorType::F32)];
        for (index, one) in different.iter().enumerate() {
            assert!(different[..index].iter().all(|other| other != one));
        }
    }
}
