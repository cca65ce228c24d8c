//! An adapter version's identity: a digest of what it does, not of how it is spelled.
//!
//! SHA-256 over a tag, the number of sites, and per site in order of its index: index, rank, columns of A, rows of B,
//! the bits of the f32 scale, and the SHA-256 of A's and then B's values, row-major and little-endian, each factor in the
//! first of bfloat16, float16 and float32 that holds all of its values exactly, behind the name of that format. So the same
//! values have one digest however they were stored, under whatever key spelling, file layout, name or path; any other
//! value, rank, scale or module gives another one; and what is hashed is mostly the file's own bytes. Keys of the
//! configuration that do not change the result do not enter.

use half::{bf16, f16};
use manylora_kernels::SiteShape;
use safetensors::Dtype;
use sha2::{Digest, Sha256};

const TAG: &[u8] = b"manylora adapter 2\n";

/// A factor's bytes as a file has them, little-endian.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// Their format.
    pub dtype: Dtype,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// Digest of one site's factors A and B: values, and the bytes that they were read from.
pub fn factors_digest(a: (&[f32], Stored<'_>), b: (&[f32], Stored<'_>)) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for (values, stored) in [a, b] {
        let format = narrowest(values, stored.dtype);
        hasher.update(match format {
            Dtype::BF16 => b"BF16",
            Dtype::F16 => b"F16 ",
            _ => b"F32 ",
        });
        if format == stored.dtype {
            hasher.update(stored.bytes);
            continue;
        }
        let mut block = Vec::with_capacity(4096);
        for chunk in values.chunks(1024) {
            block.clear();
            match format {
                Dtype::BF16 => block.extend(chunk.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes())),
                Dtype::F16 => block.extend(chunk.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes())),
                _ => block.extend(chunk.iter().flat_map(|value| value.to_le_bytes())),
            }
            hasher.update(&block);
        }
    }
    hasher.finalize().into()
}

/// The first of bfloat16, float16 and float32 that holds all values exactly; `stored` is one that does.
fn narrowest(values: &[f32], stored: Dtype) -> Dtype {
    let is_bf16 = |value: &f32| value.to_bits().trailing_zeros() >= 16;
    let is_f16 = |value: &f32| f16::from_f32(*value).to_f32().to_bits() == value.to_bits();
    if stored == Dtype::BF16 || values.iter().all(is_bf16) {
        Dtype::BF16
    } else if stored == Dtype::F16 || values.iter().all(is_f16) {
        Dtype::F16
    } else {
        Dtype::F32
    }
}

/// Digest of an adapter: its sites, sorted by index, and the digests of their factors.
pub fn adapter_digest(sites: &[SiteShape], factors: &[[u8; 32]]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(TAG);
    hasher.update((sites.len() as u64).to_le_bytes());
    for (shape, factors) in sites.iter().zip(factors) {
        for number in [shape.site.0, shape.rank, shape.input, shape.output, shape.scale.to_bits()] {
            hasher.update(number.to_le_bytes());
        }
        hasher.update(factors);
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
    use safetensors::Dtype;

    use super::{Stored, factors_digest};

    fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
        match dtype {
            Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    fn digest(values: &[f32], dtype: Dtype) -> [u8; 32] {
        let bytes = bytes(values, dtype);
        let stored = Stored { dtype, bytes: &bytes };
        factors_digest((values, stored), (&values[1..], Stored { dtype, bytes: &bytes[bytes.len() / values.len()..] }))
    }

    #[test]
    fn the_same_values_have_one_digest_however_they_are_stored() {
        let both: Vec<f32> = (0..3000).map(|index| (index % 255) as f32 / 64.0 - 2.0).collect();
        let of_both = digest(&both, Dtype::F32);
        assert_eq!(of_both, digest(&both, Dtype::BF16));
        assert_eq!(of_both, digest(&both, Dtype::F16));
        // More digits than bfloat16 has, and more than float16 has.
        let half: Vec<f32> =
            both.iter().map(|value| value + 1.0 / 512.0).map(|value| f16::from_f32(value).to_f32()).collect();
        let of_half = digest(&half, Dtype::F32);
        assert_eq!(of_half, digest(&half, Dtype::F16));
        let single: Vec<f32> = both.iter().map(|value| value * 1.000_001).collect();
        let wide = [3e38_f32.to_bits() & 0xFFFF_0000, 0x8000_0000].map(f32::from_bits);
        assert_eq!(digest(&wide, Dtype::F32), digest(&wide, Dtype::BF16), "a minus before zero counts");
        let different = [of_both, of_half, digest(&single, Dtype::F32), digest(&wide, Dtype::F32)];
        for (index, one) in different.iter().enumerate() {
            assert!(different[..index].iter().all(|other| other != one));
        }
    }
}
