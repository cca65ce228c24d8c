//! Files with weights, mapped read-only: the one module of this crate that needs `unsafe`.
#![expect(unsafe_code, reason = "a memory map is unsafe to make because other processes may change the file")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use super::not_found_or_io;
use crate::error::ModelError;

/// A file mapped read-only.
///
/// Like every program that maps weights, this relies on the file not being truncated while it is mapped.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    file: File,
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps a file. An empty file maps to no bytes.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = File::open(path).map_err(|source| not_found_or_io(path, "a file with weights", source))?;
        let io = |source| ModelError::Io { path: path.to_path_buf(), source };
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(ModelError::Malformed {
                path: path.to_path_buf(),
                message: "it is not a regular file".to_owned(),
            });
        }
        if metadata.len() == 0 {
            return Ok(Self { path: path.to_path_buf(), file, map: None });
        }
        // SAFETY: the map is read-only and private; its bytes are only ever read as integers and floats, for which
        // every bit pattern is valid, so a concurrent writer can change values and not memory safety. A concurrent
        // truncation stops the process with SIGBUS, as documented above.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { path: path.to_path_buf(), file, map: Some(map) })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Reads bytes from `start` on into memory of the caller's: for what is looked at once, that costs less than mapping its
    /// pages, and they do not count as this process's memory.
    pub fn read(&self, start: usize, out: &mut [u8]) -> io::Result<()> {
        #[cfg(unix)]
        {
            std::os::unix::fs::FileExt::read_exact_at(&self.file, out, start as u64)
        }
        #[cfg(not(unix))]
        {
            let range = self.bytes().get(start..start + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            out.copy_from_slice(range);
            Ok(())
        }
    }

    /// Asks the system to read a range ahead, because it will be read in order soon.
    pub fn will_need(&self, range: Range<usize>) {
        if let Some(map) = self.map.as_ref().filter(|map| range.end <= map.len() && range.start < range.end) {
            // Advice only: failing to read ahead changes nothing but speed.
            let _ = map.advise_range(Advice::WillNeed, range.start, range.len());
        }
    }

    /// Tells the system that the pages of a range are not needed in this process for now. They come back from the
    /// file when they are read again.
    pub fn discard(&self, range: Range<usize>) {
        let Some(map) = self.map.as_ref().filter(|map| range.end <= map.len() && range.start < range.end) else {
            return;
        };
        // SAFETY: dropping pages of a read-only file-backed map loses nothing, they are read from the file again on
        // the next access; the range was checked against the map above.
        let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discarded_pages_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let content: Vec<u8> = (0..100_000u32).map(|value| (value % 251) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        mapped.will_need(0..content.len());
        mapped.discard(4000..90_000);
        mapped.discard(0..content.len() + 1);
        assert_eq!(mapped.bytes(), content);
    }

    #[test]
    fn what_is_read_is_what_is_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, (0..10_000u32).map(|value| (value % 251) as u8).collect::<Vec<u8>>()).unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        let mut part = vec![0; 7001];
        mapped.read(2999, &mut part).unwrap();
        assert_eq!(part, mapped.bytes()[2999..]);
        assert_eq!(mapped.read(3000, &mut part).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn empty_files_folders_and_missing_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("empty");
        std::fs::write(&path, b"").unwrap();
        assert!(MappedFile::open(&path).unwrap().bytes().is_empty());
        assert!(matches!(MappedFile::open(folder.path()), Err(ModelError::Malformed { .. } | ModelError::Io { .. })));
        assert!(matches!(MappedFile::open(&folder.path().join("absent")), Err(ModelError::NotFound { .. })));
    }
}
