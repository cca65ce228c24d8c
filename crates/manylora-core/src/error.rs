//! Everything the control plane and sampling parameters can refuse.

/// An error of this crate. The message names the value and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreError {
    /// Settings that cannot work, alone or together.
    #[error("{0}")]
    InvalidConfig(String),
    /// The longest sequence does not fit the KV cache.
    #[error(
        "one sequence of max_model_len (`{max_model_len}`) needs `{needed_bytes}` bytes of KV cache and there are \
         `{ledger_bytes}`; lower max_model_len to `{fits}` or raise kv_cache_memory_bytes"
    )]
    LedgerTooSmall {
        /// Longest sequence in tokens.
        max_model_len: usize,
        /// Bytes of its KV blocks.
        needed_bytes: u64,
        /// Bytes that KV blocks and adapters share.
        ledger_bytes: u64,
        /// The longest sequence that does fit, in tokens.
        fits: usize,
    },
    /// A parameter of a request is out of its range.
    #[error("{message}")]
    InvalidArgument {
        /// Name of the parameter.
        parameter: &'static str,
        /// What is wrong with it.
        message: String,
    },
}
