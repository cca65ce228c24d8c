//! The published name table: which names and integer ids lead to which registration.
//!
//! Readers are callers' threads; only the engine thread changes it, in one step after everything was validated
//! (promise P7), so a name never leads to nothing while its adapter is being replaced.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use manylora_core::{Digest, RegistrationId};
use manylora_model::adapter::{LoadReport, MemoryTensor};
use serde_json::Value;

use crate::error::EngineError;

/// Where an adapter comes from and what it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSource {
    /// Name that requests use.
    pub name: String,
    /// Integer id of vLLM's `LoRARequest`, if the caller keeps such ids.
    pub int_id: Option<u64>,
    /// What it is made from.
    pub origin: AdapterOrigin,
    /// Whether other content under the same name replaces the old version for requests admitted from then on.
    pub replace: bool,
    /// What people named it by (a relative path, a hub id), if not by the folder itself.
    pub root: Option<String>,
    /// Where its folder and each of its files must lie once links are followed, at every read; None = where all adapters may
    /// (`lora_roots`).
    pub confined_to: Option<PathBuf>,
}

impl AdapterSource {
    /// A PEFT folder under a name.
    pub fn directory(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        let origin = AdapterOrigin::Directory(path.into());
        Self { name: name.into(), int_id: None, origin, replace: false, root: None, confined_to: None }
    }

    /// An adapter in memory under a name: what `adapter_config.json` would say, and the tensors that
    /// `adapter_model.safetensors` would hold, by its keys ([`manylora_model::adapter::candle_tensors`] makes them from
    /// candle's). It is refused or applied as one from a folder is, and has the same version.
    pub fn memory(name: impl Into<String>, config: Value, tensors: BTreeMap<String, MemoryTensor>) -> Self {
        let origin = AdapterOrigin::Memory(Some(Arc::new(AdapterTensors { config, tensors })));
        Self { name: name.into(), int_id: None, origin, replace: false, root: None, confined_to: None }
    }

    /// The same, confined to a folder.
    #[must_use]
    pub fn confined_to(self, root: impl Into<PathBuf>) -> Self {
        Self { confined_to: Some(root.into()), ..self }
    }

    /// What stays of it once its content is packed: a folder can be read again, given tensors are not kept.
    pub(crate) fn registered(&self) -> Self {
        let origin = match &self.origin {
            AdapterOrigin::Directory(path) => AdapterOrigin::Directory(path.clone()),
            AdapterOrigin::Memory(_) => AdapterOrigin::Memory(None),
        };
        Self { origin, ..self.clone() }
    }
}

/// What an adapter is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterOrigin {
    /// A PEFT folder, which is read again after an eviction.
    Directory(PathBuf),
    /// Tensors given by the caller. None once they are packed: the packed form is then the only copy.
    Memory(Option<Arc<AdapterTensors>>),
}

impl AdapterOrigin {
    /// The folder, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Directory(path) => Some(path),
            Self::Memory(_) => None,
        }
    }

    /// Whether the content can be had again after the packed form was dropped.
    pub fn is_rereadable(&self) -> bool {
        !matches!(self, Self::Memory(None))
    }
}

impl fmt::Display for AdapterOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "`{}`", path.display()),
            Self::Memory(_) => f.write_str("tensors in memory"),
        }
    }
}

/// An adapter in memory.
#[derive(Clone, PartialEq, Eq)]
pub struct AdapterTensors {
    /// What `adapter_config.json` would say.
    pub config: Value,
    /// Tensors by the keys of `adapter_model.safetensors`.
    pub tensors: BTreeMap<String, MemoryTensor>,
}

impl fmt::Debug for AdapterTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdapterTensors").field("tensors", &self.tensors.len()).finish_non_exhaustive()
    }
}

/// What is known of a registered adapter.
#[derive(Clone, Debug)]
pub struct AdapterInfo {
    /// Its name.
    pub name: String,
    /// Its integer ids (several when one content was given several).
    pub int_ids: Vec<u64>,
    /// Where it came from; of given tensors nothing is kept here.
    pub origin: AdapterOrigin,
    /// What it was named by, where that was not its folder.
    pub root: Option<String>,
    /// Its version: the digest of tensors and effective configuration; None until its tensors were read once.
    pub version: Option<Digest>,
    /// When this content was put under its name.
    pub created: SystemTime,
    /// Its load report; what only the tensors tell is missing until they were read.
    pub report: Arc<LoadReport>,
}

impl AdapterInfo {
    /// The highest rank of its factors.
    pub fn rank(&self) -> u32 {
        self.report.modules.values().map(|module| module.rank).max().unwrap_or(0)
    }
}

/// A registration as the table publishes it. Every clone is a hold: while a request that resolved the name is still on
/// its way to the engine thread, an unload of the registration waits (promise P6).
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) info: AdapterInfo,
    pub(crate) registration: RegistrationId,
    hold: Arc<()>,
}

impl Entry {
    pub(crate) fn new(info: AdapterInfo, registration: RegistrationId) -> Self {
        Self { info, registration, hold: Arc::new(()) }
    }

    /// Whether this is the only clone left.
    pub(crate) fn is_free(&self) -> bool {
        Arc::strong_count(&self.hold) == 1
    }
}

/// Shared between callers and the engine thread.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    table: RwLock<Table>,
}

#[derive(Debug, Default)]
struct Table {
    by_name: BTreeMap<String, Entry>,
    name_of_id: HashMap<u64, String>,
}

impl Table {
    /// Makes `name` the one owner of `id`.
    fn own_id(&mut self, id: u64, name: &str) {
        if let Some(previous) = self.name_of_id.insert(id, name.to_owned())
            && previous != name
            && let Some(entry) = self.by_name.get_mut(&previous)
        {
            entry.info.int_ids.retain(|other| *other != id);
        }
    }
}

impl Registry {
    fn read<T>(&self, f: impl FnOnce(&Table) -> T) -> T {
        f(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, f: impl FnOnce(&mut Table) -> T) -> T {
        f(&mut self.table.write().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn resolve(&self, name: &str) -> Result<Entry, EngineError> {
        self.get(name).ok_or_else(|| EngineError::UnknownAdapter {
            name: name.to_owned(),
            loaded: self.read(|table| {
                let names: Vec<&str> = table.by_name.keys().take(20).map(String::as_str).collect();
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            }),
        })
    }

    pub(crate) fn get(&self, name: &str) -> Option<Entry> {
        self.read(|table| table.by_name.get(name).cloned())
    }

    pub(crate) fn name_of_id(&self, id: u64) -> Option<String> {
        self.read(|table| table.name_of_id.get(&id).cloned())
    }

    pub(crate) fn len(&self) -> usize {
        self.read(|table| table.by_name.len())
    }

    /// Looks at each adapter, by name.
    pub(crate) fn each(&self, mut look: impl FnMut(&AdapterInfo)) {
        self.read(|table| table.by_name.values().for_each(|entry| look(&entry.info)));
    }

    pub(crate) fn list(&self) -> Vec<AdapterInfo> {
        self.read(|table| table.by_name.values().map(|entry| entry.info.clone()).collect())
    }

    /// Whether `source` may be registered with this content: Ok(Some) = the same content is there already.
    pub(crate) fn check(&self, source: &AdapterSource, version: Digest) -> Result<Option<AdapterInfo>, EngineError> {
        self.check_id(source, Some(version))?;
        self.read(|table| match table.by_name.get(&source.name) {
            Some(entry) if entry.info.version == Some(version) => Ok(Some(entry.info.clone())),
            Some(entry) if !source.replace => Err(conflict(format!("name `{}`", source.name), &entry.info)),
            _ => Ok(None),
        })
    }

    /// Whether the integer id of `source` may lead to this content (None = not known yet, which is like no other).
    pub(crate) fn check_id(&self, source: &AdapterSource, version: Option<Digest>) -> Result<(), EngineError> {
        self.read(|table| {
            if let Some(id) = source.int_id
                && let Some(holder) = table.name_of_id.get(&id)
                && let Some(entry) = table.by_name.get(holder)
                && (version.is_none() || entry.info.version != version)
                && *holder != source.name
            {
                return Err(conflict(format!("id {id}"), &entry.info));
            }
            Ok(())
        })
    }

    /// Notes what the content of a registration is, if its name still leads to it.
    pub(crate) fn identify(&self, name: &str, registration: RegistrationId, version: Digest, report: &Arc<LoadReport>) {
        self.write(|table| {
            if let Some(entry) = table.by_name.get_mut(name).filter(|entry| entry.registration == registration) {
                entry.info.version = Some(version);
                entry.info.report = Arc::clone(report);
            }
        });
    }

    /// Publishes an entry under its name and ids; returns the entry that the name led to before. Ids of the old version
    /// lead to the new one.
    pub(crate) fn publish(&self, mut entry: Entry) -> Option<Entry> {
        self.write(|table| {
            let name = entry.info.name.clone();
            if let Some(old) = table.by_name.get(&name) {
                for id in &old.info.int_ids {
                    if !entry.info.int_ids.contains(id) {
                        entry.info.int_ids.push(*id);
                    }
                }
            }
            for id in entry.info.int_ids.clone() {
                table.own_id(id, &name);
            }
            table.by_name.insert(name, entry)
        })
    }

    /// Lets a further integer id lead to an adapter that is there.
    pub(crate) fn add_id(&self, name: &str, id: u64) {
        self.write(|table| {
            table.own_id(id, name);
            if let Some(entry) = table.by_name.get_mut(name)
                && !entry.info.int_ids.contains(&id)
            {
                entry.info.int_ids.push(id);
            }
        });
    }

    pub(crate) fn remove(&self, name: &str) -> Option<Entry> {
        self.write(|table| {
            let entry = table.by_name.remove(name)?;
            table.name_of_id.retain(|_, holder| holder != name);
            Some(entry)
        })
    }
}

fn conflict(what: String, existing: &AdapterInfo) -> EngineError {
    EngineError::AdapterConflict {
        what,
        existing: existing.name.clone(),
        origin: existing.origin.clone(),
        version: existing.version.map_or_else(|| "not read yet".to_owned(), |version| version.to_string()),
    }
}
