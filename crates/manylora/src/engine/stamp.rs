//! Whether an adapter's files are still those that were read, without reading them: as build tools and version control
//! do, by where they lie, how large they are and when they were written.
//!
//! A clock ticks in steps, and a file may be written twice within one: a stamp counts only if the files had been left alone
//! for a while when it was taken. Whoever is in doubt reads the content, which is what decides.

use std::path::Path;
use std::time::{Duration, SystemTime};

/// How long files must have been left alone.
const SETTLED: Duration = Duration::from_secs(2);

/// Files that make an adapter.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// State of an adapter's files at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp([FileState; FILES.len()]);

#[derive(Clone, Debug, PartialEq, Eq)]
struct FileState {
    place: (u64, u64),
    length: u64,
    written: SystemTime,
    changed: (i64, i64),
}

impl Stamp {
    /// The stamp of an adapter's folder; None where it would not tell.
    pub(super) fn take(folder: &Path) -> Option<Self> {
        let now = SystemTime::now();
        let [config, tensors] = FILES.map(|name| FileState::of(&folder.join(name), now));
        Some(Self([config?, tensors?]))
    }
}

impl FileState {
    #[cfg(unix)]
    fn of(path: &Path, now: SystemTime) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;

        let metadata = std::fs::metadata(path).ok()?;
        let written = metadata.modified().ok()?;
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(metadata.ctime()).ok()?);
        let settled = |time: SystemTime| now.duration_since(time).is_ok_and(|age| age >= SETTLED);
        (settled(written) && settled(changed)).then(|| Self {
            place: (metadata.dev(), metadata.ino()),
            length: metadata.len(),
            written,
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    #[cfg(not(unix))]
    fn of(_path: &Path, _now: SystemTime) -> Option<Self> {
        None
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn only_settled_files_have_a_stamp_and_a_change_shows() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in FILES {
            fs::write(folder.path().join(name), name).expect("written");
        }
        assert_eq!(Stamp::take(folder.path()), None, "just written");
        let state = |now| FileState::of(&folder.path().join(FILES[0]), now);
        let later = SystemTime::now() + Duration::from_secs(60);
        let before = state(later).expect("left alone for a minute");
        assert_eq!(state(later), Some(before.clone()));
        let file = File::options().write(true).open(folder.path().join(FILES[0])).expect("open");
        file.set_modified(SystemTime::UNIX_EPOCH).expect("set");
        assert_ne!(state(later), Some(before), "the time of the change cannot be set");
        assert_eq!(Stamp::take(Path::new("nowhere")), None);
    }
}
