//! The inner form of a refusal, before it is given the adapter's name and report.

use std::io;
use std::path::Path;

use super::report::LoadReport;
use crate::error::{AdapterRefusal, RefusalKind};

/// Keys named in a refusal; all of them are in its report.
const KEYS_SHOWN: usize = 8;

/// Why loading stopped.
#[derive(Debug)]
pub(super) struct Fault {
    kind: RefusalKind,
    keys: Vec<String>,
    reason: String,
    /// Of keys that have one of their own.
    reasons: Vec<(String, String)>,
}

impl Fault {
    pub(super) fn invalid(reason: impl Into<String>) -> Self {
        Self { kind: RefusalKind::Invalid, keys: Vec::new(), reason: reason.into(), reasons: Vec::new() }
    }

    pub(super) fn not_found(reason: impl Into<String>) -> Self {
        Self { kind: RefusalKind::NotFound, ..Self::invalid(reason) }
    }

    pub(super) fn forbidden(reason: impl Into<String>) -> Self {
        Self { kind: RefusalKind::Forbidden, ..Self::invalid(reason) }
    }

    /// A failed file operation.
    pub(super) fn io(path: &Path, error: &io::Error) -> Self {
        use io::ErrorKind::{
            FileTooLarge, InvalidData, InvalidFilename, InvalidInput, IsADirectory, NotADirectory, NotFound,
            PermissionDenied, UnexpectedEof,
        };
        let reason = format!("`{}` could not be read: {error}", path.display());
        match error.kind() {
            NotFound => Self::not_found(reason),
            PermissionDenied => Self::forbidden(reason),
            // What is there is not what it should be.
            FileTooLarge | InvalidData | InvalidFilename | InvalidInput | IsADirectory | NotADirectory
            | UnexpectedEof => Self::invalid(reason),
            _ => Self { kind: RefusalKind::Unavailable, ..Self::invalid(reason) },
        }
    }

    pub(super) fn key(mut self, key: impl Into<String>) -> Self {
        self.keys.push(key.into());
        self
    }

    pub(super) fn keys<K: Into<String>>(mut self, keys: impl IntoIterator<Item = K>) -> Self {
        self.keys.extend(keys.into_iter().map(Into::into));
        self
    }

    /// Several things are wrong, each with a key: all of them together are the reason.
    pub(super) fn several(each: impl IntoIterator<Item = (String, String)>) -> Self {
        let reasons: Vec<(String, String)> = each.into_iter().collect();
        let joined = reasons.iter().map(|(_, reason)| reason.as_str()).collect::<Vec<_>>().join("; ");
        let keys = reasons.iter().map(|(key, _)| key.clone()).collect();
        Self { keys, reasons, ..Self::invalid(joined) }
    }

    /// The refusal as the outside sees it. Keys without a reason of their own in the report get this one.
    pub(super) fn into_refusal(self, mut report: LoadReport) -> AdapterRefusal {
        for (key, reason) in self.reasons {
            report.refused.entry(key).or_insert(reason);
        }
        for key in &self.keys {
            report.refused.entry(key.clone()).or_insert_with(|| self.reason.clone());
        }
        let mut keys = self.keys;
        keys.truncate(KEYS_SHOWN);
        AdapterRefusal {
            adapter: report.adapter.clone(),
            keys,
            reason: self.reason,
            kind: self.kind,
            report: Some(Box::new(report.to_json())),
        }
    }
}

/// `a`, `b`, `c` and 4 more
pub(super) fn listed<S: AsRef<str>>(items: &[S], shown: usize) -> String {
    let text = items.iter().take(shown).map(|item| format!("`{}`", item.as_ref())).collect::<Vec<_>>().join(", ");
    if items.len() > shown { format!("{text} and {} more", items.len() - shown) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_decides_the_kind() {
        let kind = |error: io::Error| Fault::io(Path::new("x"), &error).kind;
        assert_eq!(kind(io::ErrorKind::NotFound.into()), RefusalKind::NotFound);
        assert_eq!(kind(io::ErrorKind::PermissionDenied.into()), RefusalKind::Forbidden);
        assert_eq!(kind(io::ErrorKind::NotADirectory.into()), RefusalKind::Invalid);
        // EIO and EMFILE: a failing disk, too many open files.
        for code in [5, 24] {
            assert_eq!(kind(io::Error::from_raw_os_error(code)), RefusalKind::Unavailable, "{code}");
        }
    }
}
