//! What other threads ask of the engine thread.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use manylora_core::{Digest, NewRequest, RegistrationId, RequestId, UnloadMode};
use manylora_model::PackedHandle;
use manylora_model::adapter::LoadReport;

use super::running::RunningSequence;
use crate::error::EngineError;
use crate::registry::{AdapterInfo, AdapterSource, Entry};

/// Where the answer to a command goes; its owner waits for exactly one.
pub(crate) type Reply<T> = SyncSender<Result<T, EngineError>>;

/// An adapter that was read and packed, ready to be registered.
pub(crate) struct ReadAdapter {
    pub(crate) source: AdapterSource,
    pub(crate) report: Arc<LoadReport>,
    pub(crate) version: Digest,
    pub(crate) packed: PackedHandle,
}

/// What a (re-)read brought.
pub(crate) struct Reread {
    pub(crate) version: Digest,
    pub(crate) packed: PackedHandle,
}

pub(crate) enum Command {
    /// The sequences of one request, and the holds on the registrations they name, kept until core has them.
    Submit(Vec<(NewRequest, RunningSequence)>, Vec<Entry>),
    Abort(Vec<RequestId>),
    Register(Box<ReadAdapter>, Reply<AdapterInfo>),
    Reread {
        registration: RegistrationId,
        result: Result<Reread, EngineError>,
    },
    Unload {
        name: String,
        mode: UnloadMode,
        reply: Reply<()>,
    },
    Pin {
        name: String,
        pinned: bool,
        reply: Reply<()>,
    },
    Stats(Reply<super::EngineStats>),
    ResetPrefixCache(Reply<bool>),
    Shutdown,
}
