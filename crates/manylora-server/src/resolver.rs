//! Adapters by name at first use: any good folder below one root is served under its path from there.
//!
//! A name that leads nowhere is not looked for again for a moment, so that a client that keeps asking costs no disk; then it
//! is, so that a folder that was still being written is found once it is whole.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use manylora::{AdapterSource, EngineError, EngineHandle};

use crate::error::{ApiError, ServerError};

/// How long a name that led nowhere is not looked for again.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(2);
/// Names that are remembered as leading nowhere.
const MOST_REMEMBERED: usize = 1024;

/// What was found under a name.
#[derive(Clone, Debug)]
enum Miss {
    /// Nothing.
    Missing,
    /// Something that cannot be served, and why.
    Refused(String),
}

impl Miss {
    fn error(self, name: &str) -> Option<ApiError> {
        match self {
            // Whoever looks for the name then says that it does not exist.
            Self::Missing => None,
            Self::Refused(reason) => Some(
                ApiError::bad_request(format!("LoRA adapter '{name}' was found but could not be loaded. {reason}"))
                    .about("model"),
            ),
        }
    }
}

/// The root, and what led nowhere lately.
#[derive(Debug)]
pub(crate) struct Resolver {
    root: PathBuf,
    missed: Mutex<HashMap<String, (Instant, Miss)>>,
}

impl Resolver {
    pub(crate) fn new(root: &Path) -> Result<Self, ServerError> {
        let usable = root.canonicalize().ok().filter(|root| root.is_dir());
        let root = usable.ok_or_else(|| {
            ServerError::InvalidSetting(format!(
                "lora_resolve_root `{}` is not a folder that can be read",
                root.display()
            ))
        })?;
        Ok(Self { root, missed: Mutex::default() })
    }

    /// Registers the adapter of a name, if there is one. Looks at files: not for the threads that serve.
    pub(crate) fn resolve(&self, engine: &EngineHandle, name: &str) -> Result<(), ApiError> {
        if let Some(miss) = self.remembered(name) {
            return miss.error(name).map_or(Ok(()), Err);
        }
        let miss = match self.find(name) {
            Ok(path) => match engine
                .register_adapter(AdapterSource { root: Some(name.to_owned()), ..AdapterSource::directory(name, path) })
            {
                Ok(_) => {
                    self.lock().remove(name);
                    return Ok(());
                }
                // Somebody else was first, with a folder or by hand: the name leads somewhere.
                Err(EngineError::AdapterConflict { .. }) => return Ok(()),
                Err(EngineError::Stopped(reason)) => return Err(EngineError::Stopped(reason).into()),
                Err(error) => Miss::Refused(error.to_string()),
            },
            Err(miss) => miss,
        };
        self.remember(name, miss.clone());
        miss.error(name).map_or(Ok(()), Err)
    }

    /// The real folder of a name, if it lies below the root.
    fn find(&self, name: &str) -> Result<PathBuf, Miss> {
        let relative = Path::new(name);
        let plain = relative.components().all(|part| matches!(part, Component::Normal(_)));
        if name.trim().is_empty() || !plain {
            return Err(Miss::Missing);
        }
        let path = self.root.join(relative).canonicalize().map_err(|_| Miss::Missing)?;
        if !path.starts_with(&self.root) || path == self.root || !path.is_dir() {
            return Err(Miss::Missing);
        }
        let config = path.join("adapter_config.json");
        let text = match std::fs::read(&config) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(Miss::Missing),
            Err(error) => return Err(Miss::Refused(format!("adapter_config.json cannot be read: {error}"))),
        };
        let parsed: serde_json::Value = serde_json::from_slice(&text)
            .map_err(|error| Miss::Refused(format!("adapter_config.json is not JSON: {error}")))?;
        match parsed.get("peft_type").and_then(serde_json::Value::as_str) {
            Some(kind) if kind.eq_ignore_ascii_case("lora") => Ok(path),
            Some(kind) => Err(Miss::Refused(format!("its peft_type is `{kind}`, only LORA is served"))),
            None => Err(Miss::Refused("adapter_config.json says no peft_type; it should say \"LORA\"".to_owned())),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, (Instant, Miss)>> {
        self.missed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remembered(&self, name: &str) -> Option<Miss> {
        let missed = self.lock();
        missed.get(name).filter(|(since, _)| since.elapsed() < FORGOTTEN_AFTER).map(|(_, miss)| miss.clone())
    }

    fn remember(&self, name: &str, miss: Miss) {
        let mut missed = self.lock();
        if missed.len() >= MOST_REMEMBERED {
            missed.retain(|_, (since, _)| since.elapsed() < FORGOTTEN_AFTER);
        }
        if missed.len() < MOST_REMEMBERED {
            missed.insert(name.to_owned(), (Instant::now(), miss));
        }
    }
}
