//! What wakes a Python event loop: a stream that has news rings a bell, whose descriptor the loop watches. The engine's
//! thread never waits for the GIL, and writes once however many streams it has news for.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

use pyo3::prelude::*;

/// Which streams have news. Readable while there are any that were not taken.
#[pyclass(frozen, module = "manylora._core")]
pub(crate) struct Bell {
    reader: UnixStream,
    rung: Arc<Rung>,
}

struct Rung {
    keys: Mutex<Vec<u64>>,
    writer: UnixStream,
}

struct Ringer {
    key: u64,
    rung: Arc<Rung>,
}

impl Wake for Ringer {
    fn wake(self: Arc<Self>) {
        let mut keys = self.rung.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = keys.is_empty();
        keys.push(self.key);
        drop(keys);
        if is_first {
            // It can only fail when it is full, and then it is readable already.
            let _ = (&self.rung.writer).write(&[1]);
        }
    }
}

impl Bell {
    /// What rings it with a key.
    pub(crate) fn waker(&self, key: u64) -> Waker {
        Arc::new(Ringer { key, rung: Arc::clone(&self.rung) }).into()
    }
}

#[pymethods]
impl Bell {
    #[new]
    fn new() -> PyResult<Self> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        Ok(Self { reader, rung: Arc::new(Rung { keys: Mutex::default(), writer }) })
    }

    /// The descriptor that is readable while keys can be taken.
    fn fileno(&self) -> i32 {
        self.reader.as_raw_fd()
    }

    /// The keys that it was rung with since the last time.
    fn take(&self) -> Vec<u64> {
        let mut bytes = [0; 64];
        while (&self.reader).read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
        // After reading: who rings now finds keys, or writes again.
        std::mem::take(&mut self.rung.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
