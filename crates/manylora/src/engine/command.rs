//! What other threads ask of the engine thread.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use manylora_core::{Client, Digest, NewRequest, RegistrationId, RequestId, UnloadMode};
use manylora_model::PackedHandle;
use manylora_model::adapter::{LoadReport, PreparedAdapter};

use super::loader::Identify;
use super::running::RunningSequence;
use super::stamp::Stamp;
use crate::error::EngineError;
use crate::registry::{AdapterInfo, AdapterSource, Entry};

/// Where the answer to a command goes; its owner waits for exactly one.
pub(crate) type Reply<T> = SyncSender<Result<T, EngineError>>;

/// An adapter that is to be put on the shelf, and what its header says.
pub(crate) struct Order {
    pub(crate) source: AdapterSource,
    /// Packed bytes that the header implies.
    pub(crate) bytes: u64,
    pub(crate) report: Arc<LoadReport>,
    /// State of its files before anything of them was read.
    pub(crate) stamp: Option<Stamp>,
    /// The version that the name must stand for, if it is to be replaced.
    pub(crate) expected: Option<Digest>,
    /// Register now, read when a request asks for it.
    pub(crate) lazy: bool,
    /// Its content, where it was given in memory.
    pub(crate) read: Option<GivenAdapter>,
    /// The registration that was made for it, once it is under way.
    pub(crate) registration: Option<RegistrationId>,
    /// Who waits for it.
    pub(crate) replies: Vec<Reply<AdapterInfo>>,
}

/// An adapter that was given in memory, checked.
pub(crate) struct GivenAdapter {
    pub(crate) version: Digest,
    pub(crate) content: Given,
}

/// Content that was given in memory, until the control plane asks for it.
pub(crate) enum Given {
    Packed(PackedHandle),
    /// For a device whose memory is counted: packed when it has room.
    Checked(Box<PreparedAdapter>),
}

/// An adapter that was read and packed.
pub(crate) struct ReadAdapter {
    pub(crate) report: Arc<LoadReport>,
    pub(crate) version: Digest,
    pub(crate) packed: PackedHandle,
    /// State of its files before they were read.
    pub(crate) stamp: Option<Stamp>,
    /// What reading and packing took.
    pub(crate) seconds: f64,
}

/// What an adapter's content was found to be.
pub(crate) struct Identified {
    pub(crate) version: Digest,
    pub(crate) report: Arc<LoadReport>,
    /// State of its files before they were read.
    pub(crate) stamp: Option<Stamp>,
}

pub(crate) enum Command {
    /// The sequences of one request, and the holds on the registrations they name, kept until core has them.
    Submit(Vec<(NewRequest, RunningSequence)>, Vec<Entry>),
    Abort(Vec<RequestId>),
    /// Adapters to put on the shelf, each with its replies.
    Shelve(Vec<Order>),
    /// What the read of a registration brought.
    Read {
        registration: RegistrationId,
        result: Result<ReadAdapter, EngineError>,
    },
    /// What content was found to be.
    Identified {
        identify: Identify,
        result: Result<Identified, EngineError>,
    },
    Unload {
        name: String,
        mode: UnloadMode,
        reply: Reply<()>,
    },
    /// How many requests still hold versions that this name stood for.
    Holders {
        name: String,
        reply: Reply<usize>,
    },
    Pin {
        name: String,
        pinned: bool,
        reply: Reply<()>,
    },
    SetWeight(Client, f64),
    Stats(Reply<super::EngineStats>),
    ResetPrefixCache(Reply<bool>),
    Shutdown,
}
