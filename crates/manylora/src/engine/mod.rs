//! The engine: one thread that plans, runs and delivers steps, a few loader threads for adapters, and the handle that
//! callers hold.
//!
//! The way of a request: [`EngineHandle::submit`] validates, tokenizes and resolves adapter names on the caller's
//! thread; the command channel carries it to `worker`, which feeds `manylora_core`'s control plane, lowers each plan to
//! a kernel batch (`lower`), runs the decoder, chooses tokens (`choice`, `running`), commits, and delivers deltas, whose
//! readers `courier` wakes where there are many. Readers make the text of what they read, unless a stop string may end it.
//! No file is touched on the engine's thread: `library` orders what is to be read, and the threads of `loader` read and
//! pack it.

#[cfg(feature = "cuda")]
mod card;
mod choice;
mod command;
mod courier;
mod device;
#[cfg(test)]
mod failed_steps;
mod handle;
mod inspection;
mod library;
mod loader;
mod lower;
pub mod meters;
mod phases;
mod processor;
mod recorder;
mod running;
mod sequences;
mod sizes;
mod stamp;
mod startup;
#[cfg(test)]
mod steady_step;
mod submit;
mod worker;

use std::ops::Deref;
use std::thread::JoinHandle;

pub use handle::{EngineHandle, Logits, Share};
pub use inspection::{InspectedModule, Inspection, inspect_adapter};
use manylora_core::{AdapterUsers, CoreStats, Digest};
use manylora_kernels::MemoryUse;
pub use meters::{Distribution, LoadFailureCounts, Meters, Timing};
pub use phases::{Phase, PhaseSeconds};
pub use processor::ProcessorBytes;
pub use sizes::model_dimensions;
pub use startup::{CardMemory, EngineInfo, LoadProgress};
pub use submit::CheckedRequests;

use crate::config::EngineConfig;
use crate::error::EngineError;
use command::Command;

/// What a card's memory is used for now, in bytes, rounding included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceMemory {
    /// All that the engine has reserved.
    pub reserved: u64,
    /// Weights and rotary tables.
    pub weights: u64,
    /// Activations, what steps tell the kernels, and the kernels' working memory.
    pub working: u64,
    /// What KV blocks have of what they share with adapters.
    pub kv_cache: u64,
    /// The rest of it: what adapters can have now.
    pub adapter_room: u64,
    /// What they have.
    pub adapters: u64,
}

impl From<MemoryUse> for DeviceMemory {
    fn from(used: MemoryUse) -> Self {
        let MemoryUse { reserved, weights, working, kv_cache, adapter_room, adapters } = used;
        Self { reserved, weights, working, kv_cache, adapter_room, adapters }
    }
}

/// A resident version, and the adapters whose names lead to it (none for one that was replaced and is still in use).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct NamedResident {
    /// Names.
    pub names: Vec<String>,
    /// The version.
    pub version: Digest,
    /// Its packed bytes.
    pub bytes: u64,
    /// Whether it stays whatever comes.
    pub pinned: bool,
    /// Highest rank of its factors; 0 where no name leads to it.
    pub rank: u32,
}

/// Rows of the engine that are for one adapter.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct NamedUsers {
    /// Its name.
    pub name: String,
    /// Live requests that name it.
    #[serde(flatten)]
    pub users: AdapterUsers,
}

/// Counters and levels of a running engine.
#[derive(Clone, Debug, serde::Serialize)]
pub struct EngineStats {
    /// Those of the control plane.
    #[serde(flatten)]
    pub core: CoreStats,
    /// Adapters read from their folders so far, whatever came of it.
    pub adapter_reads: u64,
    /// Packed bytes of those that were good.
    pub loaded_bytes: u64,
    /// Bytes of adapters that steps have read: each distinct adapter of a step once.
    pub streamed_bytes: u64,
    /// Steps so far.
    pub steps: u64,
    /// Seconds of the engine's thread, by what it did.
    pub phase_seconds: PhaseSeconds,
    /// What a card's memory is used for.
    pub device_memory: Option<DeviceMemory>,
    /// Live requests that name no adapter.
    pub base_users: AdapterUsers,
    /// Adapters that live requests name, by name: what such a request is for counts for each of its adapters.
    pub adapter_users: Vec<NamedUsers>,
    /// Names of adapters that are being read, sorted.
    pub loading: Vec<String>,
    /// Registered adapters.
    pub registered: usize,
    /// Resident versions, by slot.
    pub residents: Vec<NamedResident>,
    /// Adapters that could not be loaded.
    pub load_failures: LoadFailureCounts,
    /// What was counted and timed step by step.
    #[serde(skip)]
    pub meters: Meters,
}

impl EngineStats {
    /// Names of adapters with admitted requests, sorted.
    pub fn running_adapters(&self) -> impl Iterator<Item = &str> {
        self.adapter_users.iter().filter(|one| one.users.running > 0).map(|one| one.name.as_str())
    }

    /// Names of adapters with requests that wait - for a load, for their turn, or preempted -, sorted.
    pub fn waiting_adapters(&self) -> impl Iterator<Item = &str> {
        self.adapter_users.iter().filter(|one| one.users.waiting > 0).map(|one| one.name.as_str())
    }

    /// Sorts what the engine's thread tells as it finds it. Registrations of one name, as there are where one replaces another,
    /// are told together.
    fn sort_names(&mut self) {
        self.loading.sort_unstable();
        self.loading.dedup();
        self.adapter_users.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        self.adapter_users.dedup_by(|later, first| {
            let same = later.name == first.name;
            if same {
                first.users.running += later.users.running;
                first.users.waiting += later.users.waiting;
            }
            same
        });
    }
}

impl Deref for EngineStats {
    type Target = CoreStats;

    fn deref(&self) -> &CoreStats {
        &self.core
    }
}

/// A running engine. Dropping it stops and joins its threads; requests that still run end with an error.
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    threads: Vec<JoinHandle<()>>,
}

impl Engine {
    /// Loads the base and starts the threads.
    pub fn start(config: EngineConfig) -> Result<Self, EngineError> {
        Self::start_with_progress(config, &mut |_| {})
    }

    /// As [`Self::start`], reporting how far loading has come.
    pub fn start_with_progress(
        config: EngineConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        let (handle, threads) = startup::start(config, progress)?;
        Ok(Self { handle, threads })
    }

    /// A handle that can be cloned and sent to other threads.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}

impl Deref for Engine {
    type Target = EngineHandle;

    fn deref(&self) -> &EngineHandle {
        &self.handle
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A send error means that the thread is gone already; joining is all that is left to do.
        let _ = self.handle.send(Command::Shutdown);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
