//! The memory of adapters: blobs of many sizes that come and go, below KV blocks that do.
//!
//! Adapters lie at the low end of what both share, up to a limit that moves (see `kv`): up when blocks are given up for an
//! adapter that is to come, down when a step needs more of them.
//!
//! Whoever decides what is resident counts bytes, not holes. So a blob that fits by its bytes is placed: where holes keep it
//! out, the others are moved together, on the compute stream, behind the steps that are queued and before those that come.
//! Steps find blobs through the table of adapters, whose rows are written anew on the same stream, so a step may be
//! half queued meanwhile. Blobs are given back on threads of their own, a little after they were counted out; whoever needs
//! the room waits for them.
#![expect(unsafe_code, reason = "queues copies from memory that stays until they are done")]

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::super::arena::{Arena, ArenaUsage, DeviceSlice, Holding};
use super::super::error::CudaError;
use super::super::staging::{Upload, Uploader};
use super::super::stream::Stream;
use super::adapter::DeviceTable;

/// How long to wait for what was counted out and is not given back yet: much longer than that ever takes.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes through which content is moved over short ways.
pub(super) const BETWEEN: usize = 1 << 20;

/// Locks, also after a panic elsewhere: what is locked here is changed in single steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts what may have made room.
#[derive(Debug, Default)]
struct Changes {
    count: Mutex<u64>,
    happened: Condvar,
}

impl Changes {
    fn announce(&self) {
        *lock(&self.count) += 1;
        self.happened.notify_all();
    }

    /// Waits for a change after `seen`; false if there is none in time.
    fn wait(&self, seen: u64, deadline: Instant) -> bool {
        let mut count = lock(&self.count);
        while *count == seen {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            count = self.happened.wait_timeout(count, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// An adapter's bytes on the card. They may be moved, except during [`Blob::with`].
#[derive(Debug)]
pub(super) struct Blob {
    /// Taken by `drop` only.
    memory: Mutex<Option<DeviceSlice<u8>>>,
    /// When its content has arrived.
    pub(super) upload: Upload,
    pub(super) id: u64,
    /// Sites and where their A and B start.
    factors: Vec<(u32, usize, usize)>,
    /// Sites of the model.
    sites: usize,
    bytes: usize,
    changes: Arc<Changes>,
}

impl Blob {
    /// What it takes.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Works with its memory while that stays where it is.
    pub(super) fn with<T>(&self, work: impl FnOnce(&DeviceSlice<u8>) -> T) -> Option<T> {
        lock(&self.memory).as_ref().map(work)
    }

    /// The first two columns of its rows of the table: addresses of A and of B, as they are now.
    fn addresses(&self, memory: &DeviceSlice<u8>) -> Vec<u8> {
        let mut bytes = vec![0; 2 * size_of::<u64>() * self.sites];
        let (a_column, b_column) = bytes.split_at_mut(size_of::<u64>() * self.sites);
        for &(site, a, b) in &self.factors {
            for (column, offset) in [(&mut *a_column, a), (&mut *b_column, b)] {
                let address = memory.pointer().add(offset).address();
                column[site as usize * size_of::<u64>()..][..size_of::<u64>()].copy_from_slice(&address.to_le_bytes());
            }
        }
        bytes
    }
}

impl Drop for Blob {
    fn drop(&mut self) {
        drop(lock(&self.memory).take());
        self.changes.announce();
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct AdapterRegion {
    arena: Arena,
    /// Blobs whose content is there or on its way, hence can be moved. Whoever places or moves holds it.
    blobs: Mutex<Vec<Weak<Blob>>>,
    changes: Arc<Changes>,
    between: DeviceSlice<u8>,
}

impl AdapterRegion {
    /// A region of `bytes` bytes of an arena, all of them adapters' at first.
    pub(super) fn new(arena: &Arena, bytes: usize) -> Result<Self, CudaError> {
        let between = arena.allocate(Holding::Buffers, "room for moving adapters", BETWEEN)?;
        let region = arena.region(Holding::Shared, "the memory of KV blocks and adapters", bytes)?;
        Ok(Self { arena: region, blobs: Mutex::default(), changes: Arc::default(), between })
    }

    /// What adapters hold of what they can have now.
    pub(super) fn usage(&self) -> ArenaUsage {
        self.arena.usage()
    }

    /// What adapters share with KV blocks.
    pub(super) fn shared(&self) -> &Arena {
        &self.arena
    }

    /// Lets adapters have all bytes up to `limit`, unless they have more. What lies there is free: whatever still works on
    /// it is queued on the compute stream, which uploads wait for.
    pub(super) fn raise(&self, limit: usize) {
        // Nothing is ever in the way of a later end.
        if limit > self.arena.usage().capacity && self.arena.resize(limit) {
            self.changes.announce();
        }
    }

    /// Takes all bytes from `limit` on away from adapters. Those that lie there are moved down by `gather`, as in
    /// [`Self::place`]; they fit below by their bytes, once all have gone that were counted out.
    pub(super) fn lower(
        &self,
        limit: usize,
        gather: &dyn Fn(&mut Gather<'_>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = *lock(&self.changes.count);
            {
                let mut blobs = lock(&self.blobs);
                let ArenaUsage { capacity, free, .. } = self.arena.usage();
                if limit >= capacity || self.arena.resize(limit) {
                    return Ok(());
                }
                if free >= capacity - limit {
                    blobs.retain(|blob| blob.strong_count() > 0);
                    gather(&mut Gather { region: self, blobs: &blobs })?;
                    if self.arena.resize(limit) {
                        return Ok(());
                    }
                }
            }
            if !self.changes.wait(seen, deadline) {
                let ArenaUsage { capacity, free, largest, .. } = self.arena.usage();
                let what = "KV blocks in place of adapters".to_owned();
                return Err(CudaError::OutOfMemory { what, bytes: capacity.saturating_sub(limit), free, largest });
            }
        }
    }

    /// Tells whoever waits for room that memory was given back without ever having been a blob's.
    pub(super) fn announce(&self) {
        self.changes.announce();
    }

    /// Places `bytes` bytes. `gather` makes one hole of all, by calling what it is given under the step's lock.
    pub(super) fn place(
        &self,
        bytes: usize,
        gather: &dyn Fn(&mut Gather<'_>) -> Result<(), CudaError>,
    ) -> Result<DeviceSlice<u8>, CudaError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = *lock(&self.changes.count);
            let error = {
                let mut blobs = lock(&self.blobs);
                match self.arena.allocate(Holding::Adapters, "an adapter", bytes) {
                    Err(CudaError::OutOfMemory { free, .. }) if free >= bytes => {
                        blobs.retain(|blob| blob.strong_count() > 0);
                        gather(&mut Gather { region: self, blobs: &blobs })?;
                        match self.arena.allocate(Holding::Adapters, "an adapter", bytes) {
                            Err(error @ CudaError::OutOfMemory { .. }) => error,
                            placed => return placed,
                        }
                    }
                    Err(error @ CudaError::OutOfMemory { .. }) => error,
                    placed => return placed,
                }
            };
            // What others hold is on its way out, or is being uploaded and cannot be moved yet.
            if bytes > self.arena.extent() || !self.changes.wait(seen, deadline) {
                return Err(error);
            }
        }
    }

    /// Takes memory whose content is on its way: it may be moved from now on.
    pub(super) fn settle(
        &self,
        memory: DeviceSlice<u8>,
        upload: Upload,
        id: u64,
        (factors, sites): (Vec<(u32, usize, usize)>, usize),
    ) -> Arc<Blob> {
        let bytes = memory.taken();
        let changes = Arc::clone(&self.changes);
        let blob = Arc::new(Blob { memory: Mutex::new(Some(memory)), upload, id, factors, sites, bytes, changes });
        let mut blobs = lock(&self.blobs);
        blobs.retain(|blob| blob.strong_count() > 0);
        blobs.push(Arc::downgrade(&blob));
        drop(blobs);
        self.changes.announce();
        blob
    }
}

/// Moves blobs together, at the low end.
pub(super) struct Gather<'a> {
    region: &'a AdapterRegion,
    blobs: &'a [Weak<Blob>],
}

impl Gather<'_> {
    /// Moves all that can be moved down, and lets `table` find them. `stream` is the compute stream. After an error nobody
    /// knows where content lies.
    pub(super) fn run(
        &mut self,
        stream: &Stream,
        uploader: &Uploader,
        table: &mut DeviceTable,
    ) -> Result<(), CudaError> {
        // Where somebody's upload may still arrive that was given back meanwhile.
        uploader.before(stream)?;
        let mut blobs: Vec<(u64, Arc<Blob>)> = self
            .blobs
            .iter()
            .filter_map(Weak::upgrade)
            .filter_map(|blob| Some((blob.with(|memory| memory.pointer().address())?, blob)))
            .collect();
        blobs.sort_unstable_by_key(|(address, _)| *address);
        let mut written = Vec::new();
        let moved = blobs.iter().try_for_each(|(_, blob)| self.slide(blob, stream, table, &mut written));
        // Also where queueing failed: nothing may read `written` any more.
        let done = stream.drain();
        moved.and(done)
    }

    fn slide(
        &self,
        blob: &Blob,
        stream: &Stream,
        table: &mut DeviceTable,
        written: &mut Vec<Vec<u8>>,
    ) -> Result<(), CudaError> {
        let mut memory = lock(&blob.memory);
        let Some(memory) = memory.as_mut() else { return Ok(()) };
        let Some(from) = memory.slide_down() else { return Ok(()) };
        blob.upload.before(stream)?;
        memory.follow(stream, from, &self.region.between)?;
        written.push(blob.addresses(memory));
        let addresses = written.last().map_or(&[][..], Vec::as_slice);
        // SAFETY: the caller keeps what is written until the stream has done it; a vector's bytes stay where they are.
        unsafe { memory.send(stream, 0, addresses) }?;
        table.moved(stream, blob.id, memory)
    }
}
