//! Adapters by name at first use: any good folder below one root is served under its path from there.
//!
//! A name that leads nowhere is not looked for again for a moment, so that a client that keeps asking costs no disk; then it
//! is, so that a folder that was still being written is found once it is whole.
//!
//! Whoever may ask may name anything, and what is found stays registered: each way to a folder is one name, links that lead in
//! a circle lead nowhere, and there is a bound on how many adapters are registered in this way.

use std::collections::{HashMap, HashSet};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use manylora::{AdapterSource, EngineError, EngineHandle};

use crate::error::{ApiError, ServerError, without_paths};

/// How long a name that led nowhere is not looked for again.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(2);
/// Names that are remembered as leading nowhere.
const MOST_REMEMBERED: usize = 1024;
/// Adapters that are registered by being asked for.
const MOST_FOUND: usize = 65_536;

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
    found: Mutex<Found>,
}

/// Names that were registered here, no more than so many at a time.
#[derive(Debug)]
struct Found {
    most: usize,
    names: HashSet<String>,
}

impl Found {
    /// Whether one more may be registered, where `exists` says which of the others still are.
    fn has_room(&mut self, exists: impl Fn(&str) -> bool) -> bool {
        if self.names.len() >= self.most {
            self.names.retain(|name| exists(name));
        }
        self.names.len() < self.most
    }
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
        Ok(Self {
            root,
            missed: Mutex::default(),
            found: Mutex::new(Found { most: MOST_FOUND, names: HashSet::new() }),
        })
    }

    /// Registers the adapter of a name, if there is one. Looks at files: not for the threads that serve.
    pub(crate) fn resolve(&self, engine: &EngineHandle, name: &str) -> Result<(), ApiError> {
        if let Some(miss) = self.remembered(name) {
            return miss.error(name).map_or(Ok(()), Err);
        }
        let miss = match self.find(name).and_then(|path| self.check_room(engine).map(|()| path)) {
            Ok(path) => match engine.register_adapter(self.source(name, path)) {
                Ok(_) => {
                    self.lock().remove(name);
                    self.found().names.insert(name.to_owned());
                    return Ok(());
                }
                // Somebody else was first, with a folder or by hand: the name leads somewhere.
                Err(EngineError::AdapterConflict { .. }) => return Ok(()),
                Err(EngineError::Stopped(reason)) => return Err(EngineError::Stopped(reason).into()),
                Err(error) => Miss::Refused(without_paths(&error.to_string())),
            },
            Err(miss) => miss,
        };
        self.remember(name, miss.clone());
        miss.error(name).map_or(Ok(()), Err)
    }

    /// The adapter of a folder: none of its files may lie elsewhere.
    fn source(&self, name: &str, path: PathBuf) -> AdapterSource {
        let source = AdapterSource::directory(name, path).confined_to(&self.root);
        AdapterSource { root: Some(name.to_owned()), ..source }
    }

    fn check_room(&self, engine: &EngineHandle) -> Result<(), Miss> {
        let mut found = self.found();
        if found.has_room(|name| engine.adapter(name).is_ok()) {
            return Ok(());
        }
        Err(Miss::Refused(format!(
            "`{}` adapters were found by being asked for, and no more are; unload some of them, or register this one",
            found.most
        )))
    }

    /// The real folder of a name, if it lies below the root.
    fn find(&self, name: &str) -> Result<PathBuf, Miss> {
        let relative = Path::new(name);
        // `a//b`, `a/./b` and `a/` would be further names of the same folder.
        let parts: Option<Vec<&str>> = relative
            .components()
            .map(|part| if let Component::Normal(part) = part { part.to_str() } else { None })
            .collect();
        let Some(parts) = parts.filter(|parts| !name.trim().is_empty() && parts.join("/") == name) else {
            return Err(Miss::Missing);
        };
        let (mut path, mut passed) = (self.root.clone(), HashSet::from([self.root.clone()]));
        for part in parts {
            path = path.join(part).canonicalize().map_err(|_| Miss::Missing)?;
            // Where a link leads back to a folder that was passed, the way could be gone round and round.
            if !path.starts_with(&self.root) || !passed.insert(path.clone()) {
                return Err(Miss::Missing);
            }
        }
        if !path.is_dir() {
            return Err(Miss::Missing);
        }
        // Without one it is no adapter; what it says is for those to read who know how much of it, and whether they may.
        let is_there = path.join("adapter_config.json").symlink_metadata().is_ok();
        if is_there { Ok(path) } else { Err(Miss::Missing) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, (Instant, Miss)>> {
        self.missed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_are_found_and_what_was_unloaded_makes_room() {
        let mut found = Found { most: 2, names: HashSet::new() };
        for name in ["a", "b"] {
            assert!(found.has_room(|_| true));
            found.names.insert(name.to_owned());
        }
        assert!(!found.has_room(|_| true));
        assert!(found.has_room(|name| name == "b"));
        assert_eq!(found.names.len(), 1);
    }
}
