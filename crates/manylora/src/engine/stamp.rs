//! Whether an adapter's files are still those that were read, without reading them: as build tools and version control
//! do, by where they lie, how large they are and when they were written.
//!
//! A clock ticks in steps, and a file may be written twice within one: a stamp says that files are unchanged only if they
//! had been left alone for a while when it was taken. Whoever is in doubt reads the content, which is what decides.

use std::path::Path;
use std::time::{Duration, SystemTime};

/// How long files must have been left alone.
const SETTLED: Duration = Duration::from_secs(2);

/// Files that make an adapter.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// State of an adapter's files at one time.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    files: [FileState; FILES.len()],
    settled: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FileState {
    place: (u64, u64),
    length: u64,
    written: SystemTime,
    changed: (i64, i64),
}

impl Stamp {
    /// The stamp of an adapter's folder; None where files have no such state.
    pub(super) fn take(folder: &Path) -> Option<Self> {
        Self::taken_at(folder, SystemTime::now())
    }

    fn taken_at(folder: &Path, now: SystemTime) -> Option<Self> {
        let [config, tensors] = FILES.map(|name| FileState::of(&folder.join(name)));
        let files = [config?, tensors?];
        let settled = files.iter().all(|file| file.is_older_than(SETTLED, now));
        Some(Self { files, settled })
    }

    /// Bytes of the file with the tensors.
    pub(super) fn bytes(&self) -> u64 {
        self.files[1].length
    }

    /// Whether both were taken of the same state, as far as the clock's ticks tell.
    pub(super) fn agrees(&self, other: &Self) -> bool {
        self.files == other.files
    }

    /// Whether the files that this was taken of, and then read, are still the same now that `later` was taken.
    pub(super) fn still_holds(&self, later: &Self) -> bool {
        self.settled && self.agrees(later)
    }
}

impl FileState {
    #[cfg(unix)]
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;

        let metadata = std::fs::metadata(path).ok()?;
        Some(Self {
            place: (metadata.dev(), metadata.ino()),
            length: metadata.len(),
            written: metadata.modified().ok()?,
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    #[cfg(not(unix))]
    fn of(_path: &Path) -> Option<Self> {
        None
    }

    fn is_older_than(&self, age: Duration, now: SystemTime) -> bool {
        let changed =
            u64::try_from(self.changed.0).map(|seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        let old = |time: SystemTime| now.duration_since(time).is_ok_and(|since| since >= age);
        old(self.written) && changed.is_ok_and(old)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn only_settled_files_are_known_to_be_unchanged() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in FILES {
            fs::write(folder.path().join(name), name).expect("written");
        }
        let fresh = Stamp::take(folder.path()).expect("files");
        let later = Stamp::taken_at(folder.path(), SystemTime::now() + Duration::from_secs(60)).expect("files");
        assert!(fresh.agrees(&later) && later.still_holds(&fresh));
        assert!(!fresh.still_holds(&later), "they had just been written");
        let file = File::options().write(true).open(folder.path().join(FILES[0])).expect("open");
        file.set_modified(SystemTime::UNIX_EPOCH).expect("set");
        let changed = Stamp::take(folder.path()).expect("files");
        assert!(!later.agrees(&changed), "the time of the change cannot be set");
        assert!(Stamp::take(Path::new("nowhere")).is_none());
    }
}
