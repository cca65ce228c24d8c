//! Reading adapters off the step loop (promise P7): a few threads that open, check, digest and pack what the engine
//! thread orders.
//!
//! They share the machine with the threads that decode, so they are few and their work is not spread any further. What a
//! load computes goes on a core that the steps leave to it (`AdapterPacker::lend_core`): a load takes one core from
//! decoding for as long as it works, and no step waits for a thread that lost its core in the middle of its part.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use manylora_core::{Digest, RegistrationId};
use manylora_model::adapter::{self, AdapterHeader, AdapterPolicy, LoadReport, LoadedContent, PreparedAdapter};
use manylora_model::{AdapterPacker, ModelError};

use super::command::{Command, Given, GivenAdapter, Identified, Order, ReadAdapter};
use super::meters::LoadFailures;
use super::stamp::Stamp;
use crate::config::ReadHook;
use crate::error::EngineError;
use crate::registry::{AdapterOrigin, AdapterSource};

/// What the engine thread wants done elsewhere.
pub(crate) enum Job {
    /// Read, check and pack an adapter, for which so many bytes are set aside; of one that was read before it is known what
    /// it must be.
    Read { registration: RegistrationId, source: AdapterSource, known: Option<Known>, set_aside: u64 },
    /// Pack an adapter that was given in memory and checked before.
    Pack { registration: RegistrationId, name: String, prepared: Box<PreparedAdapter> },
    /// Read and check an adapter, and say what its content is.
    Identify { identify: Identify, source: AdapterSource },
}

/// What an earlier read found.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) version: Digest,
    pub(crate) report: Arc<LoadReport>,
}

/// For whom content is identified.
#[derive(Clone, Debug)]
pub(crate) enum Identify {
    /// A name that may stand for this content already.
    Name(String),
    /// A registration that there is no room for just now.
    Registration(RegistrationId),
}

/// Everything that reading needs.
#[derive(Clone)]
pub(crate) struct Reader {
    pub(crate) policy: Arc<AdapterPolicy>,
    pub(crate) packer: Arc<dyn AdapterPacker>,
    pub(crate) hook: Option<ReadHook>,
    pub(crate) failures: Arc<LoadFailures>,
}

impl Reader {
    /// Looks at an adapter's configuration and header, and at no tensor: enough to register it. Given tensors are read at
    /// once, for nothing else keeps them.
    pub(crate) fn inspect(&self, source: &AdapterSource) -> Result<Order, EngineError> {
        self.order(source).inspect_err(|error| self.failures.count(error))
    }

    fn order(&self, source: &AdapterSource) -> Result<Order, EngineError> {
        let stamp = source.origin.path().and_then(Stamp::take);
        let (bytes, report, read) = match &source.origin {
            AdapterOrigin::Directory(path) => {
                let header = self.open(source, path)?;
                let bytes = self.packer.bytes(header.sites());
                (bytes, Arc::new(LoadReport { bytes, ..header.report().clone() }), None)
            }
            AdapterOrigin::Memory(_) => {
                let prepared = self.prepare(source)?;
                let bytes = self.packer.bytes(&prepared.sites);
                let report = Arc::new(LoadReport { bytes, ..prepared.report.clone() });
                let version = Digest(prepared.digest);
                let content = if self.packer.has_own_memory() {
                    Given::Checked(Box::new(prepared))
                } else {
                    Given::Packed(self.packer.pack(&prepared)?)
                };
                (bytes, report, Some(GivenAdapter { version, content }))
            }
        };
        Ok(Order {
            source: source.registered(),
            bytes,
            report,
            stamp,
            expected: None,
            lazy: false,
            read,
            registration: None,
            replies: Vec::new(),
        })
    }

    /// Reads, checks and packs an adapter.
    fn read(&self, source: &AdapterSource, known: Option<&Known>, set_aside: u64) -> Result<ReadAdapter, EngineError> {
        let start = Instant::now();
        let stamp = source.origin.path().and_then(Stamp::take);
        let LoadedContent { digest, report, packed } = match &source.origin {
            // In one pass, a run of the file at a time.
            AdapterOrigin::Directory(path) => {
                self.call_hook(source)?;
                let room = self.packer.lend_core();
                let header = self.open(source, path)?;
                drop(room);
                self.check_fits(source, self.packer.bytes(header.sites()), set_aside)?;
                match known {
                    None => header.load(self.packer.as_ref())?,
                    Some(known) => match header.load_again(self.packer.as_ref(), &known.report) {
                        Err(ModelError::OtherContent { found }) => {
                            return Err(changed_on_disk(source, known.version, Digest(found)));
                        }
                        content => content?,
                    },
                }
            }
            AdapterOrigin::Memory(_) => {
                let prepared = self.prepare(source)?;
                let packed = self.packer.pack(&prepared)?;
                LoadedContent { digest: prepared.digest, report: prepared.report, packed }
            }
        };
        // What it takes here, padding included: the number that the ledger charges.
        let report = Arc::new(LoadReport { bytes: packed.bytes, ..report });
        let seconds = start.elapsed().as_secs_f64();
        Ok(ReadAdapter { version: Digest(digest), report, packed, stamp, seconds })
    }

    /// On a device, where what is packed is placed at once, no adapter may take what was set aside for others.
    fn check_fits(&self, source: &AdapterSource, bytes: u64, set_aside: u64) -> Result<(), EngineError> {
        if bytes <= set_aside || !self.packer.has_own_memory() {
            return Ok(());
        }
        Err(EngineError::AdapterOperation {
            name: source.name.clone(),
            message: format!(
                "{} changed on disk: it takes `{bytes}` bytes now and took `{set_aside}` when it was registered; load it \
                 again to serve the new content",
                source.origin
            ),
        })
    }

    /// Opens a folder, where the source may have one.
    fn open(&self, source: &AdapterSource, path: &Path) -> Result<AdapterHeader, EngineError> {
        let header = match &source.confined_to {
            None => adapter::inspect(&source.name, path, &self.policy),
            Some(root) => adapter::inspect(&source.name, path, &self.policy.within(root)),
        };
        Ok(header?)
    }

    fn call_hook(&self, source: &AdapterSource) -> Result<(), EngineError> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook.call(source))
    }

    fn prepare(&self, source: &AdapterSource) -> Result<PreparedAdapter, EngineError> {
        self.call_hook(source)?;
        match &source.origin {
            AdapterOrigin::Directory(path) => Ok(self.open(source, path)?.read()?),
            AdapterOrigin::Memory(Some(given)) => {
                Ok(PreparedAdapter::from_tensors(&source.name, &given.config, &given.tensors, &self.policy)?)
            }
            AdapterOrigin::Memory(None) => Err(EngineError::AdapterOperation {
                name: source.name.clone(),
                message: "its tensors were given in memory and are no longer there; load it again".to_owned(),
            }),
        }
    }

    /// A panic while reading is a bug, and fails this adapter's requests only.
    fn guarded<T>(&self, name: &str, read: impl FnOnce() -> Result<T, EngineError>) -> Result<T, EngineError> {
        let result = catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
            Err(EngineError::AdapterOperation {
                name: name.to_owned(),
                message: "reading it failed unexpectedly; please report this with the adapter's files".to_owned(),
            })
        });
        result.inspect_err(|error| self.failures.count(error))
    }

    /// The answer to a job.
    pub(crate) fn carry_out(&self, job: Job) -> Command {
        match job {
            Job::Read { registration, source, known, set_aside } => {
                let result = self.guarded(&source.name, || self.read(&source, known.as_ref(), set_aside));
                Command::Read { registration, result }
            }
            Job::Pack { registration, name, prepared } => {
                let result = self.guarded(&name, || {
                    let start = Instant::now();
                    let packed = self.packer.pack(&prepared)?;
                    let report = Arc::new(LoadReport { bytes: packed.bytes, ..prepared.report.clone() });
                    let seconds = start.elapsed().as_secs_f64();
                    Ok(ReadAdapter { version: Digest(prepared.digest), report, packed, stamp: None, seconds })
                });
                Command::Read { registration, result }
            }
            Job::Identify { identify, source } => {
                let result = self.guarded(&source.name, || {
                    let stamp = source.origin.path().and_then(Stamp::take);
                    let prepared = self.prepare(&source)?;
                    let bytes = self.packer.bytes(&prepared.sites);
                    let report = Arc::new(LoadReport { bytes, ..prepared.report });
                    Ok(Identified { version: Digest(prepared.digest), report, stamp })
                });
                Command::Identified { identify, result }
            }
        }
    }
}

/// The error for content that is not what its name was registered with.
pub(crate) fn changed_on_disk(source: &AdapterSource, registered: Digest, found: Digest) -> EngineError {
    EngineError::AdapterOperation {
        name: source.name.clone(),
        message: format!(
            "{} changed on disk: it was registered as version {registered} and now holds {found}; load it again to serve \
             the new content",
            source.origin
        ),
    }
}

/// Serves jobs until the engine thread hangs up. Several threads may share `jobs`.
pub(crate) fn run(jobs: &Mutex<Receiver<Job>>, commands: &Sender<Command>, reader: &Reader) {
    loop {
        let next = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = next else { return };
        if commands.send(reader.carry_out(job)).is_err() {
            return;
        }
    }
}
