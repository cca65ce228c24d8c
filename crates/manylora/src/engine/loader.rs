//! The loader thread: re-reads adapters that were evicted, off the step loop (promise P7).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use manylora_core::{Digest, RegistrationId};
use manylora_model::AdapterPacker;
use manylora_model::adapter::{self, AdapterPolicy, LoadReport};

use super::command::{Command, ReadAdapter, Reread};
use crate::error::EngineError;
use crate::registry::AdapterSource;

/// One read that the control plane ordered.
pub(crate) struct Job {
    pub(crate) registration: RegistrationId,
    pub(crate) source: AdapterSource,
    pub(crate) expected: Digest,
}

/// Reads, validates and packs an adapter.
pub(crate) fn read(
    source: &AdapterSource,
    policy: &AdapterPolicy,
    packer: &dyn AdapterPacker,
) -> Result<ReadAdapter, EngineError> {
    let prepared = adapter::inspect(&source.name, &source.path, policy)?.read()?;
    let packed = packer.pack(&prepared)?;
    // What it takes here, padding included: the number that the ledger charges.
    let report = Arc::new(LoadReport { bytes: packed.bytes, ..prepared.report.clone() });
    Ok(ReadAdapter { source: source.clone(), version: Digest(prepared.digest), report, packed })
}

/// Serves jobs until the engine thread hangs up.
pub(crate) fn run(
    jobs: &Receiver<Job>,
    commands: &Sender<Command>,
    policy: &AdapterPolicy,
    packer: &dyn AdapterPacker,
) {
    while let Ok(job) = jobs.recv() {
        // A panic while reading is a bug, and fails this adapter's requests only.
        let outcome = catch_unwind(AssertUnwindSafe(|| read(&job.source, policy, packer)));
        let outcome = outcome.unwrap_or_else(|_| {
            Err(EngineError::AdapterOperation {
                name: job.source.name.clone(),
                message: "reading it failed unexpectedly; please report this with the adapter's files".to_owned(),
            })
        });
        let result = outcome.and_then(|read| {
            if read.version == job.expected {
                Ok(Reread { version: read.version, packed: read.packed })
            } else {
                Err(EngineError::AdapterOperation {
                    name: job.source.name.clone(),
                    message: format!(
                        "`{}` changed on disk: it was registered as version {} and now holds {}; load it again to serve the new content",
                        job.source.path.display(),
                        job.expected,
                        read.version
                    ),
                })
            }
        });
        if commands.send(Command::Reread { registration: job.registration, result }).is_err() {
            return;
        }
    }
}
