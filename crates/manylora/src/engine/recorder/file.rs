//! The file that a trace goes to: made at the start, so that what is wrong with it is said then.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::EngineError;

/// A new file. If nothing becomes of the engine, it goes again.
#[derive(Debug)]
pub(crate) struct TraceFile {
    path: PathBuf,
    file: Option<File>,
}

impl TraceFile {
    /// Makes it; a file that is there already is left alone.
    pub(crate) fn create(path: &Path) -> Result<Self, EngineError> {
        let file = File::create_new(path).map_err(|error| {
            let what = match error.kind() {
                std::io::ErrorKind::AlreadyExists => {
                    "it is there already, and traces are not written over; move it, or give another path".to_owned()
                }
                std::io::ErrorKind::NotFound => "its folder does not exist; make it, or give another path".to_owned(),
                _ => format!("{error}; give a path that can be written"),
            };
            EngineError::InvalidArgument(format!("record_trace `{}` cannot be written: {what}", path.display()))
        })?;
        Ok(Self { path: path.to_owned(), file: Some(file) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The open file, which stays from now on.
    pub(crate) fn take(mut self) -> Option<File> {
        self.file.take()
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            // It is empty; that it could not be removed matters to nobody.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
