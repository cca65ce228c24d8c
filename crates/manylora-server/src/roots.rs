//! Where adapters that are named over HTTP may lie: in one folder, after links are followed.

use std::path::{Path, PathBuf};

use manylora::AdapterSource;

use crate::config::ServerConfig;
use crate::error::{ApiError, ServerError};

/// The folder.
#[derive(Debug)]
pub(crate) struct LoraRoot {
    /// None where nothing can be loaded.
    folder: Option<PathBuf>,
}

impl LoraRoot {
    pub(crate) fn new(config: &ServerConfig) -> Result<Self, ServerError> {
        if !config.allow_runtime_lora_updating {
            return Ok(Self { folder: None });
        }
        let given = match &config.lora_root {
            Some(given) => given.clone(),
            None => std::env::current_dir()
                .map_err(|source| ServerError::Io { what: "finding the current folder", source })?,
        };
        let folder = given.canonicalize().map_err(|source| {
            ServerError::InvalidSetting(format!("lora_root `{}` cannot be used: {source}", given.display()))
        })?;
        if !folder.is_dir() {
            return Err(ServerError::InvalidSetting(format!("lora_root `{}` is not a folder", given.display())));
        }
        let home = std::env::var_os("HOME").map(PathBuf::from).and_then(|home| home.canonicalize().ok());
        if config.lora_root.is_none() && (folder.parent().is_none() || home.as_ref() == Some(&folder)) {
            return Err(ServerError::InvalidSetting(format!(
                "adapters can be loaded over HTTP from the folder that the server is started in, and that is `{}`; say with \
                 --lora-root which folder they may come from",
                folder.display()
            )));
        }
        Ok(Self { folder: Some(folder) })
    }

    /// The folder, for people.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// An adapter, if its folder lies inside; each of its files must, too, whenever it is read. A relative path counts from
    /// the folder.
    pub(crate) fn resolve(&self, name: &str, given: &str) -> Result<AdapterSource, ApiError> {
        let Some(folder) = &self.folder else { return Err(ApiError::forbidden("management of adapters is off")) };
        let outside = || {
            ApiError::forbidden(format!(
                "lora_path `{given}` of `{name}` does not lie in the folder that adapters may be loaded from (--lora-root)"
            ))
        };
        let missing = || ApiError::not_found(format!("Loading lora {name} failed: No adapter found for {given}"));
        // What cannot lie inside is not looked for, so that nobody learns what exists elsewhere.
        let joined = folder.join(given);
        if plain(&joined).is_none_or(|path| !path.starts_with(folder)) {
            return Err(outside());
        }
        let real = joined.canonicalize().map_err(|error| match error.kind() {
            std::io::ErrorKind::PermissionDenied => {
                ApiError::forbidden(format!("lora_path `{given}` of `{name}` may not be read by the server"))
            }
            _ => missing(),
        })?;
        if !real.starts_with(folder) {
            return Err(outside());
        }
        if real.is_file() {
            return Err(ApiError::bad_request(format!(
                "lora_path `{given}` of `{name}` is a file; give the folder with adapter_config.json"
            ))
            .about("lora_path"));
        }
        Ok(AdapterSource::directory(name, real).confined_to(folder))
    }
}

/// The path without `.` and `..`, as it is written; None where it climbs beyond its root.
fn plain(path: &Path) -> Option<PathBuf> {
    use std::path::Component;
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                if !plain.pop() {
                    return None;
                }
            }
            other => plain.push(other),
        }
    }
    Some(plain)
}
