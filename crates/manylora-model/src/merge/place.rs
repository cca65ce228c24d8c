//! The folder that a merge makes: filled under another name beside its place, and put there by a rename.

use std::fs;
use std::path::{Path, PathBuf};

use super::shards::output_error;
use crate::error::ModelError;

/// A folder that is being filled. Dropped before [`Self::finish`], it is gone.
#[derive(Debug)]
pub(super) struct Place {
    output: PathBuf,
    partial: PathBuf,
    overwrite: bool,
}

impl Place {
    /// Checks where the output goes, and makes the folder beside it. `base` and `adapters` must not lie in what is replaced,
    /// nor it in them.
    pub(super) fn prepare(output: &Path, base: &Path, adapters: &[&Path], overwrite: bool) -> Result<Self, ModelError> {
        let refuse = |message: String| ModelError::Output { path: output.to_path_buf(), message };
        let (Some(parent), Some(name)) = (parent_of(output), output.file_name()) else {
            return Err(refuse("a folder's name is needed".to_owned()));
        };
        let Ok(parent) = parent.canonicalize() else {
            return Err(refuse(format!("there is no folder `{}`", parent.display())));
        };
        let place = parent.join(name);
        // What is there under this name may be a link to somewhere else.
        let real = place.canonicalize().unwrap_or_else(|_| place.clone());
        for source in [base].iter().chain(adapters) {
            let Ok(source) = source.canonicalize() else { continue };
            if source.starts_with(&real) || (source.is_dir() && real.starts_with(&source)) {
                return Err(refuse(format!("it must lie apart from `{}`, which is read", source.display())));
            }
        }
        if fs::symlink_metadata(&place).is_ok() {
            let empty = fs::read_dir(&place).is_ok_and(|mut entries| entries.next().is_none());
            if !empty && !overwrite {
                return Err(refuse("it is there already; give another name, or overwrite".to_owned()));
            }
            // Whatever else has this name is nobody's to delete.
            if !empty && (place.is_symlink() || !place.join("config.json").is_file()) {
                return Err(refuse("it is there already and is no checkpoint; give another name".to_owned()));
            }
        }
        let hidden = format!(".{}.merging-{}", name.to_string_lossy(), std::process::id());
        let partial = parent.join(hidden);
        fs::create_dir(&partial).map_err(|error| output_error(&partial, &error))?;
        Ok(Self { output: place, partial, overwrite })
    }

    /// The folder to fill.
    pub(super) fn folder(&self) -> &Path {
        &self.partial
    }

    /// Refuses where so many bytes have no room.
    pub(super) fn check_room(&self, bytes: u64) -> Result<(), ModelError> {
        match free_bytes(&self.partial) {
            Some(free) if free < bytes => Err(ModelError::Output {
                path: self.output.clone(),
                message: format!("it takes {bytes} bytes and {free} are free there"),
            }),
            _ => Ok(()),
        }
    }

    /// Puts it in its place.
    pub(super) fn finish(self) -> Result<(), ModelError> {
        let error = |error: std::io::Error| output_error(&self.output, &error);
        let hidden = self.partial.file_name().unwrap_or_default().to_string_lossy();
        let old = self.partial.with_file_name(format!("{hidden}.old"));
        let mut replaced = false;
        if self.overwrite && fs::symlink_metadata(&self.output).is_ok() {
            fs::rename(&self.output, &old).map_err(error)?;
            replaced = true;
        }
        // An empty folder of this name is replaced by the rename itself.
        if let Err(failed) = fs::rename(&self.partial, &self.output) {
            if replaced {
                fs::rename(&old, &self.output).map_err(error)?;
            }
            return Err(error(failed));
        }
        if replaced { fs::remove_dir_all(&old).map_err(error) } else { Ok(()) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // After the rename there is nothing of this name.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

fn parent_of(path: &Path) -> Option<PathBuf> {
    let parent = path.parent()?;
    Some(if parent.as_os_str().is_empty() { PathBuf::from(".") } else { parent.to_path_buf() })
}

#[cfg(unix)]
fn free_bytes(folder: &Path) -> Option<u64> {
    let told = rustix::fs::statvfs(folder).ok()?;
    Some(told.f_bavail.saturating_mul(told.f_frsize))
}

#[cfg(not(unix))]
fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(result: Result<Place, ModelError>) -> String {
        result.expect_err("a refusal").to_string()
    }

    #[test]
    fn it_appears_whole_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let (base, output) = (root.path().join("base"), root.path().join("out"));
        fs::create_dir(&base).unwrap();
        let listed = || fs::read_dir(root.path()).unwrap().count();
        let place = Place::prepare(&output, &base, &[], false).unwrap();
        fs::write(place.folder().join("config.json"), "1").unwrap();
        assert!(!output.exists());
        drop(place);
        assert_eq!(listed(), 1);

        for overwrite in [false, true] {
            let place = Place::prepare(&output, &base, &[], overwrite).unwrap();
            fs::write(place.folder().join("config.json"), overwrite.to_string()).unwrap();
            place.finish().unwrap();
            assert_eq!(fs::read_to_string(output.join("config.json")).unwrap(), overwrite.to_string());
            assert_eq!(listed(), 2);
        }
        assert!(refusal(Place::prepare(&output, &base, &[], false)).contains("there already"));
    }

    #[test]
    fn nothing_that_is_read_or_is_no_checkpoint_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().join("base");
        let adapter = base.join("adapters/one");
        fs::create_dir_all(&adapter).unwrap();
        fs::write(base.join("config.json"), "{}").unwrap();
        let other = root.path().join("photographs");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("cat.jpg"), "cat").unwrap();
        let prepare = |output: &Path| Place::prepare(output, &base, &[&adapter], true);
        for output in [&base, &base.join("inside"), &adapter, root.path()] {
            assert!(refusal(prepare(output)).contains("must lie apart"), "{}", output.display());
        }
        assert!(refusal(prepare(&other)).contains("no checkpoint"));
        assert!(refusal(prepare(&root.path().join("no/such/place"))).contains("no folder"));
        assert!(refusal(prepare(Path::new("/"))).contains("name is needed"));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    }

    #[test]
    fn too_little_room_is_told_in_bytes() {
        let root = tempfile::tempdir().unwrap();
        let place = Place::prepare(&root.path().join("out"), &root.path().join("base"), &[], false).unwrap();
        place.check_room(1).unwrap();
        let message = place.check_room(u64::MAX).unwrap_err().to_string();
        assert!(message.contains("takes 18446744073709551615 bytes"), "{message}");
    }
}
