//! An adapter's folder: links resolved, roots kept, only regular files opened. Whoever may write there may change it between
//! any two looks: what counts is what has been opened.

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
        // Before it is opened, which some devices take note of, and of what was opened.
        let is_file = |found: io::Result<fs::Metadata>| match found {
            Ok(metadata) if metadata.is_file() => Ok(metadata.len()),
            Ok(_) => Err(Fault::invalid(format!("`{name}` is not a regular file"))),
            Err(error) => Err(Fault::io(&path, &error)),
        };
        is_file(fs::metadata(&resolved))?;
        let file = open_resolved(&resolved, self.root.as_deref()).map_err(|error| match error.kind() {
            io::ErrorKind::NotADirectory => Fault::forbidden(format!(
                "`{name}`, or a folder on the way to it, became a link while it was opened; load the adapter again once its \
                 files are in place"
            ))
            .key(name),
            _ => Fault::io(&path, &error),
        })?;
        let length = is_file(file.metadata())?;
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

/// Opens what lies at a resolved path, waiting for nobody: opening a pipe would wait for its writer. Below a root no link is
/// followed, because a resolved path has none: one that is there was put there since, and is an error as where no folder is.
#[cfg(unix)]
fn open_resolved(resolved: &Path, root: Option<&Path>) -> io::Result<File> {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    use rustix::io::Errno;

    #[cfg(target_os = "linux")]
    const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
    #[cfg(not(target_os = "linux"))]
    const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let Some((root, below)) = root.and_then(|root| Some((root, resolved.strip_prefix(root).ok()?))) else {
        return Ok(openat(CWD, resolved, flags, Mode::empty())?.into());
    };
    let followed =
        |error| if error == Errno::LOOP { io::ErrorKind::NotADirectory.into() } else { io::Error::from(error) };
    let mut folder = openat(CWD, root, FOLDER, Mode::empty())?;
    for name in below.parent().into_iter().flatten() {
        folder = openat(&folder, name, FOLDER | OFlags::NOFOLLOW, Mode::empty()).map_err(followed)?;
    }
    let name = below.file_name().unwrap_or_default();
    openat(&folder, name, flags | OFlags::NOFOLLOW, Mode::empty()).map(File::from).map_err(followed)
}

#[cfg(not(unix))]
fn open_resolved(resolved: &Path, _root: Option<&Path>) -> io::Result<File> {
    File::open(resolved)
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

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A resolved root with `adapter/file`, and `outside/file`.
    fn places() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let resolved = folder.path().canonicalize().expect("a folder");
        let (root, outside) = (resolved.join("root"), resolved.join("outside"));
        for place in [&root.join("adapter"), &outside] {
            fs::create_dir_all(place).expect("a folder");
            fs::write(place.join("file"), place.to_string_lossy().as_bytes()).expect("a file");
        }
        (folder, root, outside)
    }

    #[test]
    fn a_48_what_became_a_link_since_is_not_followed() {
        let (_folder, root, outside) = places();
        let file = root.join("adapter/file");
        let opened = |root| open_resolved(&file, root).map(|mut file| io::read_to_string(&mut file).expect("text"));
        assert!(opened(Some(root.as_path())).expect("a file").ends_with("adapter"));
        fs::remove_file(&file).expect("it is there");
        symlink(outside.join("file"), &file).expect("a link");
        let refused = || opened(Some(root.as_path())).expect_err("a link").kind();
        assert_eq!(refused(), io::ErrorKind::NotADirectory);
        assert!(opened(None).expect("no root keeps it in").ends_with("outside"));
        fs::remove_dir_all(root.join("adapter")).expect("it is there");
        symlink(&outside, root.join("adapter")).expect("a link");
        assert_eq!(refused(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn a_48_what_became_a_pipe_since_is_not_waited_for() {
        let (_folder, root, _) = places();
        let pipe = root.join("adapter/pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
        for root in [None, Some(root.as_path())] {
            assert!(!open_resolved(&pipe, root).expect("it is opened").metadata().expect("told").is_file());
        }
        let told = Folder::find(&root.join("adapter"), None).expect("a folder").open("pipe").err().expect("a pipe");
        assert!(format!("{told:?}").contains("not a regular file"), "{told:?}");
    }
}
