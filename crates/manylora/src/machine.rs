//! What there is on this machine and in this build: what a report of a mistake needs.

use manylora_kernels::cpu::{LEVEL_VARIABLE, Processors, SimdLevel};
use manylora_model::checkpoint::memory;
use serde::Serialize;

/// Processors, memory and cards as an engine finds them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Operating system and architecture that this was built for.
    pub platform: String,
    /// Instructions.
    pub simd: Simd,
    /// Logical processors that this process may run on.
    pub logical_processors: usize,
    /// Physical cores of those.
    pub physical_cores: usize,
    /// Processors' worth of time that the cgroup grants; None = no limit.
    pub cgroup_cpus: Option<f64>,
    /// Threads that an engine computes with by itself.
    pub default_threads: usize,
    /// Bytes that the cgroup allows; None = no limit.
    pub cgroup_memory_bytes: Option<u64>,
    /// Bytes that can still be had; None where the system does not tell.
    pub available_bytes: Option<u64>,
    /// Cards.
    pub cuda: Cuda,
}

/// Instructions that kernels use.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Simd {
    /// What an engine would use; None where the variable names what there is not.
    pub level: Option<String>,
    /// What this processor offers, from the plainest to the fastest.
    pub available: Vec<String>,
    /// The environment variable that forces one.
    pub variable: &'static str,
    /// What it is set to.
    pub forced: Option<String>,
    /// What is wrong with that.
    pub error: Option<String>,
}

/// What there is for cards.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cuda {
    /// Whether this build can use cards.
    pub built: bool,
    /// What its kernels were compiled for, such as `sm_80 sm_90`; None where it has none.
    pub kernels: Option<String>,
    /// The driver's library.
    pub driver: Option<String>,
    /// The newest CUDA version that the driver offers.
    pub driver_version: Option<String>,
    /// The library of base products, and its version.
    pub cublaslt: Option<String>,
    /// Cards that the driver lists.
    pub cards: Vec<FoundCard>,
    /// Why there is none, or what is missing.
    pub notes: Vec<String>,
}

/// A card.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FoundCard {
    /// Its number, as in `cuda:0`.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability, such as `9.0`.
    pub capability: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
}

impl Machine {
    /// Looks, and takes nothing. `cuda_library_folders` are those in which cuBLASLt may lie.
    pub fn look(cuda_library_folders: &[std::path::PathBuf]) -> Self {
        let processors = Processors::here();
        Self {
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            simd: Simd::look(),
            logical_processors: processors.logical,
            physical_cores: processors.physical,
            cgroup_cpus: processors.quota,
            default_threads: processors.default_threads(),
            cgroup_memory_bytes: memory::limit_bytes(),
            available_bytes: memory::available_bytes(),
            cuda: Cuda::look(cuda_library_folders),
        }
    }
}

impl Simd {
    fn look() -> Self {
        let (level, error) = match SimdLevel::from_environment() {
            Ok(level) => (Some(level.to_string()), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Self {
            level,
            available: SimdLevel::available().iter().map(ToString::to_string).collect(),
            variable: LEVEL_VARIABLE,
            forced: std::env::var(LEVEL_VARIABLE).ok().filter(|value| !value.is_empty()),
            error,
        }
    }
}

impl Cuda {
    #[cfg(not(feature = "cuda"))]
    fn look(_folders: &[std::path::PathBuf]) -> Self {
        Self { notes: vec!["this build has no support for cards".to_owned()], ..Self::default() }
    }

    #[cfg(feature = "cuda")]
    fn look(folders: &[std::path::PathBuf]) -> Self {
        use manylora_kernels::cuda::{
            BlasLibrary, DeviceProperties, DriverLibrary, device_count, embedded_architectures,
        };

        let mut found = Self { built: true, kernels: embedded_architectures().map(str::to_owned), ..Self::default() };
        if found.kernels.is_none() {
            found.notes.push("this build has no kernels for cards".to_owned());
        }
        let listed = DriverLibrary::load().and_then(|library| {
            let emulated = if library.is_emulated() { " (emulated)" } else { "" };
            found.driver = Some(format!("{}{emulated}", library.path()));
            let (major, minor) = library.version()?;
            found.driver_version = Some(format!("{major}.{minor}"));
            let count = device_count()?;
            (0..count).map(DeviceProperties::read).collect::<Result<Vec<_>, _>>()
        });
        match listed {
            Err(error) => found.notes.push(error.to_string()),
            Ok(cards) => {
                found.cards.extend(cards.into_iter().map(|card| FoundCard {
                    ordinal: card.ordinal,
                    name: card.name,
                    capability: format!("{}.{}", card.capability.0, card.capability.1),
                    memory_bytes: card.memory as u64,
                }));
                // Large, and of no use without a card.
                match BlasLibrary::load(folders) {
                    Ok(library) => {
                        let version = library.version();
                        let parts = [version / 10_000, version / 100 % 100, version % 100].map(|part| part.to_string());
                        found.cublaslt = Some(format!("{} ({})", parts.join("."), library.path()));
                    }
                    Err(error) => found.notes.push(error.to_string()),
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::Machine;

    #[test]
    fn every_machine_has_something_to_say() {
        let machine = Machine::look(&[]);
        assert!(machine.default_threads >= 1 && machine.logical_processors >= machine.physical_cores);
        assert_eq!(machine.simd.available[0], "portable");
        assert!(machine.simd.level.is_some() != machine.simd.error.is_some());
        assert!(!machine.cuda.cards.is_empty() || !machine.cuda.notes.is_empty(), "no card, and no word why");
    }
}
