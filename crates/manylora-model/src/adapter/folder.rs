//! An adapter's folder: links resolved, roots kept, only regular files opened.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::fault::Fault;

/// A folder whose real place was found and allowed.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    resolved: PathBuf,
    /// The allowed root it lies in, resolved.
    root: Option<PathBuf>,
}

/// An open regular file.
pub(super) struct OpenFile {
    pub(super) file: File,
    pub(super) length: u64,
    pub(super) path: PathBuf,
}

impl Folder {
    /// Finds the folder. With roots, its real place must lie in one of them.
    pub(super) fn find(path: &Path, roots: Option<&[PathBuf]>) -> Result<Self, Fault> {
        if path.as_os_str().is_empty() {
            return Err(Fault::invalid("the adapter's path is empty"));
        }
        let outside = || {
            Fault::forbidden(format!("`{}` lies outside the folders that adapters may be loaded from", path.display()))
        };
        let resolved = match fs::canonicalize(path) {
            Ok(resolved) => resolved,
            Err(error) => {
                if let Some(roots) = roots
                    && enclosing_root(&existing_ancestor(path), roots).is_none()
                {
                    return Err(outside());
                }
                return Err(match error.kind() {
                    io::ErrorKind::NotFound => {
                        Fault::not_found(format!("No adapter found for `{}`: there is no such folder", path.display()))
                    }
                    io::ErrorKind::NotADirectory => Fault::invalid(format!(
                        "`{}` leads through a file; an adapter is a folder with `adapter_config.json`",
                        path.display()
                    )),
                    _ => Fault::io(path, &error),
                });
            }
        };
        let root = match roots {
            None => None,
            Some(roots) => Some(enclosing_root(&resolved, roots).ok_or_else(outside)?),
        };
        let metadata = fs::metadata(&resolved).map_err(|error| Fault::io(path, &error))?;
        if !metadata.is_dir() {
            return Err(Fault::invalid(format!(
                "`{}` is a file; an adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`",
                path.display()
            )));
        }
        Ok(Self { resolved, root })
    }

    /// Opens a file of the folder; None when there is none of that name.
    pub(super) fn open(&self, name: &str) -> Result<Option<OpenFile>, Fault> {
        let path = self.resolved.join(name);
        let resolved = match fs::canonicalize(&path) {
            Ok(resolved) => resolved,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return match fs::symlink_metadata(&path) {
                    Ok(_) => Err(Fault::not_found(format!("`{name}` is a link to a file that does not exist"))),
                    Err(_) => Ok(None),
                };
            }
            Err(error) => return Err(Fault::io(&path, &error)),
        };
        if self.root.as_ref().is_some_and(|root| !resolved.starts_with(root)) {
            return Err(Fault::forbidden(format!(
                "`{name}` is a link that leaves the folder adapters may be loaded from"
            ))
            .key(name));
        }
        // Asked before opening, because opening a pipe would wait for its writer.
        let metadata = fs::metadata(&resolved).map_err(|error| Fault::io(&path, &error))?;
        if !metadata.is_file() {
            return Err(Fault::invalid(format!("`{name}` is not a regular file")));
        }
        let file = File::open(&resolved).map_err(|error| Fault::io(&path, &error))?;
        let length = file.metadata().map_err(|error| Fault::io(&path, &error))?.len();
        Ok(Some(OpenFile { file, length, path }))
    }

    /// The content of a file of at most `limit` bytes; None when there is none of that name.
    pub(super) fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, Fault> {
        let Some(OpenFile { file, length, path }) = self.open(name)? else {
            return Ok(None);
        };
        if length > limit {
            return Err(Fault::invalid(format!("`{name}` is {length} bytes long; at most {limit} are read")));
        }
        let mut content = Vec::with_capacity(length as usize);
        file.take(limit).read_to_end(&mut content).map_err(|error| Fault::io(&path, &error))?;
        Ok(Some(content))
    }

    /// Whether the folder has an entry of that name.
    pub(super) fn has(&self, name: &str) -> bool {
        fs::symlink_metadata(self.resolved.join(name)).is_ok()
    }
}

/// The root that a resolved path lies in. Roots that do not exist hold nothing.
fn enclosing_root(resolved: &Path, roots: &[PathBuf]) -> Option<PathBuf> {
    roots.iter().filter_map(|root| fs::canonicalize(root).ok()).find(|root| resolved.starts_with(root))
}

/// The real place of the deepest part of a path that exists: a path that does not exist must not tell what lies
/// outside the roots.
fn existing_ancestor(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.ancestors().find_map(|ancestor| fs::canonicalize(ancestor).ok()).unwrap_or_default()
}
