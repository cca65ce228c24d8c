//! What can go wrong between a folder on disk and a model or adapter in memory.

use std::path::PathBuf;

use manylora_kernels::KernelError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// An adapter that was loaded before has other content now.
    #[error("the adapter's content changed since it was loaded first; load it again")]
    OtherContent {
        /// Digest of what is there now.
        found: [u8; 32],
    },
    /// A file or folder is missing.
    #[error("`{path}` was not found: {what}")]
    NotFound {
        /// What was looked for.
        path: PathBuf,
        /// What it should have been.
        what: String,
    },
    /// A file could not be read.
    #[error("`{path}` could not be read: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file's content is broken (truncated, not JSON, a wrong shape).
    #[error("`{path}` is damaged: {message}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        message: String,
    },
    /// The model or format is not one that is supported.
    #[error("{message}")]
    Unsupported {
        /// What is not supported, with the value, and what is.
        message: String,
    },
    /// The model does not fit the memory there is.
    #[error("the model needs {needed} bytes and {available} are free: {message}")]
    DoesNotFit {
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        available: u64,
        /// What to do.
        message: String,
    },
    /// What was to be made cannot be written where it was to go.
    #[error("`{path}`: {message}")]
    Output {
        /// The file or folder.
        path: PathBuf,
        /// Why, and what to do.
        message: String,
    },
    /// Whoever was told of the progress asked to stop.
    #[error("it was interrupted, and nothing was written")]
    Interrupted,
    /// Text could not be turned into tokens or back.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template could not be rendered.
    #[error("chat template: {0}")]
    ChatTemplate(String),
    /// An adapter was refused.
    #[error(transparent)]
    Adapter(#[from] Box<AdapterRefusal>),
    /// The kernel layer failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Why an adapter was refused: names the adapter, the offending keys and the reason (promise P1).
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("adapter `{adapter}` was refused: {reason}")]
pub struct AdapterRefusal {
    /// Name or path of the adapter.
    pub adapter: String,
    /// Offending tensor or configuration keys, the first few of them when there are many.
    pub keys: Vec<String>,
    /// The reason, complete with values and what to do.
    pub reason: String,
    /// What kind of failure it is, for exception classes and HTTP statuses.
    pub kind: RefusalKind,
    /// What was found so far, as the load report's JSON.
    pub report: Option<Box<serde_json::Value>>,
}

impl From<AdapterRefusal> for ModelError {
    fn from(refusal: AdapterRefusal) -> Self {
        Self::Adapter(Box::new(refusal))
    }
}

/// Kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// The folder or its files do not exist.
    NotFound,
    /// They exist and may not be read, or lie outside the allowed roots.
    Forbidden,
    /// They are broken, not LoRA, made for another base, or ask for something not supported.
    Invalid,
    /// The system could not read them just now, and may well another time.
    Unavailable,
}
