//! Cards as data: what their memory holds, how fast it is read, and how fast they multiply.

use serde::{Deserialize, Serialize};

use crate::error::SimError;

/// A card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardSpec {
    /// What it is called on command lines: `rtx4090`.
    pub name: String,
    /// Bytes that its driver tells a program that there are (`cuMemGetInfo`): some less than what it is sold as.
    pub memory_bytes: u64,
    /// Bytes that it reads from its memory in a second, at best.
    pub memory_bandwidth: f64,
    /// Multiplications and additions of bf16 in a second, summed in f32, dense, at best.
    pub peak_flops: f64,
    /// Bytes that it takes from the host's memory in a second, at best: those of its bus in one direction.
    pub host_bandwidth: f64,
    /// First number of its compute capability.
    pub capability_major: u32,
}

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;
/// PCIe in one direction with 16 lanes, in bytes a second: generation 4 and 5.
const PCIE4: f64 = 31.5e9;
const PCIE5: f64 = 63.0e9;

/// Names and aliases; GiB of memory as programs see it (what PyTorch reports as total capacity; drivers differ by some tens
/// of MiB); GB/s of memory; TFLOP/s of bf16; bus; compute capability.
type Row = (&'static [&'static str], f64, f64, f64, f64, u32);

const CARDS: [Row; 9] = [
    // NVIDIA Ada GPU architecture whitepaper, appendix A: 1008 GB/s, 165.2 TFLOPS with FP32 accumulate.
    (&["rtx4090", "4090"], 23.64, 1008.0, 165.2, PCIE4, 8),
    // NVIDIA L4 datasheet: 300 GB/s, 242 TFLOPS with sparsity, half of it dense.
    (&["l4"], 22.03, 300.0, 121.0, PCIE4, 8),
    // NVIDIA A10G (AWS G5): 600 GB/s, 70 TFLOPS of tensor cores.
    (&["a10g"], 22.20, 600.0, 70.0, PCIE4, 8),
    // NVIDIA A40 datasheet: 696 GB/s, 149.7 TFLOPS.
    (&["a40"], 44.35, 696.0, 149.7, PCIE4, 8),
    // NVIDIA A100 datasheet: 1555 GB/s (40 GB), 2039 GB/s (80 GB SXM), 312 TFLOPS.
    (&["a100-40", "a100-40gb"], 39.39, 1555.0, 312.0, PCIE4, 8),
    (&["a100-80", "a100-80gb", "a100"], 79.15, 2039.0, 312.0, PCIE4, 8),
    // NVIDIA H100 datasheet (SXM): 3.35 TB/s, 1979 TFLOPS with sparsity, half of it dense.
    (&["h100", "h100-80"], 79.10, 3350.0, 989.5, PCIE5, 9),
    // NVIDIA H200 datasheet (SXM): 4.8 TB/s, as H100 otherwise.
    (&["h200"], 139.72, 4800.0, 989.5, PCIE5, 9),
    // NVIDIA DGX B200 datasheet, an eighth of it: 8 TB/s, 2.25 PFLOPS dense.
    (&["b200"], 178.36, 8000.0, 2250.0, PCIE5, 10),
];

impl CardSpec {
    /// A card that is known by name: `rtx4090`, `l4`, `a10g`, `a40`, `a100-40`, `a100-80`, `h100`, `h200`, `b200`. Capitals,
    /// spaces and underscores make no difference.
    pub fn named(name: &str) -> Result<Self, SimError> {
        let wanted = name.trim().to_lowercase().replace([' ', '_'], "-");
        let found =
            CARDS.iter().find(|(names, ..)| names.iter().any(|one| *one == wanted || one.replace('-', "") == wanted));
        let Some((names, gib, bandwidth, tflops, bus, capability)) = found else {
            let known = Self::names().collect::<Vec<_>>().join(", ");
            return Err(SimError::field("gpu", name, format!("no such card is known; known are {known}, and cpu")));
        };
        Ok(Self {
            name: names[0].to_owned(),
            memory_bytes: (gib * GIB) as u64,
            memory_bandwidth: bandwidth * 1e9,
            peak_flops: tflops * 1e12,
            host_bandwidth: *bus,
            capability_major: *capability,
        })
    }

    /// The names of the cards that are known.
    pub fn names() -> impl Iterator<Item = &'static str> {
        CARDS.iter().map(|(names, ..)| names[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_by_any_spelling() {
        for name in CardSpec::names() {
            let card = CardSpec::named(name).unwrap();
            assert_eq!(card.name, name);
            assert!(card.memory_bytes > 20 << 30 && card.peak_flops > card.memory_bandwidth);
        }
        assert_eq!(CardSpec::named("RTX 4090").unwrap_or(CardSpec::named("4090").unwrap()).name, "rtx4090");
        assert_eq!(CardSpec::named("A100_80GB").unwrap().name, "a100-80");
        let error = CardSpec::named("gtx9").unwrap_err().to_string();
        assert!(error.starts_with("gpu `gtx9`: no such card is known; known are rtx4090, l4,"), "{error}");
    }
}
