//! SIMD levels: which instructions the kernels of this process use, chosen at run time and never at compile time.
//!
//! Results of one level are bit-identical to themselves whatever the batch; between levels they agree within the
//! tolerances of float64 references.

use std::fmt;

use crate::error::KernelError;

/// Environment variable that forces a level: `portable`, `avx2`, `avx512` or `amx`.
pub const LEVEL_VARIABLE: &str = "MANYLORA_SIMD";

/// A set of instructions that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SimdLevel {
    /// Plain Rust, on any processor: the readable reference.
    Portable,
    /// AVX2 with FMA: most desktop processors.
    Avx2,
    /// AVX-512 with BF16 dot products.
    Avx512Bf16,
    /// Tile registers with BF16 products (AMX), beside AVX-512 with BF16.
    Amx,
}

impl SimdLevel {
    /// The levels this processor offers, from the plainest to the fastest.
    pub fn available() -> Vec<Self> {
        let mut levels = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if super::x86::has_avx2() {
                levels.push(Self::Avx2);
                if super::x86::has_avx512_bf16() {
                    levels.push(Self::Avx512Bf16);
                    if super::x86::has_amx_bf16() {
                        levels.push(Self::Amx);
                    }
                }
            }
        }
        levels
    }

    /// The fastest level this processor offers.
    pub fn detect() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// The level that `MANYLORA_SIMD` names, or the fastest one when it is not set or empty.
    pub fn from_environment() -> Result<Self, KernelError> {
        match std::env::var(LEVEL_VARIABLE) {
            Ok(name) if !name.is_empty() => Self::parse(&name),
            _ => Ok(Self::detect()),
        }
    }

    /// The level called `name`, if this processor has it.
    pub fn parse(name: &str) -> Result<Self, KernelError> {
        let level = match name {
            "portable" => Some(Self::Portable),
            "avx2" => Some(Self::Avx2),
            "avx512" => Some(Self::Avx512Bf16),
            "amx" => Some(Self::Amx),
            _ => None,
        };
        level.ok_or_else(|| Self::unavailable(name)).and_then(Self::require)
    }

    /// The level itself if this processor has it.
    pub fn require(self) -> Result<Self, KernelError> {
        if Self::available().contains(&self) { Ok(self) } else { Err(Self::unavailable(&self.to_string())) }
    }

    fn unavailable(name: &str) -> KernelError {
        let names: Vec<String> = Self::available().iter().map(ToString::to_string).collect();
        KernelError::SimdLevel { level: name.to_owned(), available: names.join(", ") }
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512Bf16 => "avx512",
            Self::Amx => "amx",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::SimdLevel;

    #[test]
    fn names_round_trip() {
        for level in SimdLevel::available() {
            assert_eq!(SimdLevel::parse(&level.to_string()).unwrap(), level);
        }
    }

    #[test]
    fn unknown_level_is_named_with_the_choices() {
        let message = SimdLevel::parse("sse9").unwrap_err().to_string();
        assert!(message.contains("`sse9`") && message.contains("portable"), "{message}");
    }
}
