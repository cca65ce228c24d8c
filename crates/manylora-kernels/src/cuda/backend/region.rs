//! The memory of adapters: blobs of many sizes that come and go, below KV blocks that do.
//!
//! Adapters lie at the low end of what both share, up to a limit that moves (see `kv`): up when blocks are given up for an
//! adapter that is to come, down when a step needs more of them.
//!
//! Whoever decides what is resident counts bytes, not holes. So a blob that fits by its bytes is placed: where holes keep it
//! out, others are moved together, on the compute stream, behind the steps that are queued and before those that come.
//! Steps find blobs through the table of adapters, whose rows are written anew on the same stream, so a step may be
//! half queued meanwhile. Blobs are given back on threads of their own, a little after they were counted out; whoever needs
//! the room waits for them.
//!
//! Only what has to move for the hole is moved ([`together`](super::together)). Where that is for an adapter that is to come,
//! it is moved in pieces of at most [`PIECE_BLOBS`] blobs and [`PIECE_BYTES`] bytes (or one blob, if that is longer), and a
//! step that waits goes first: it waits for one piece, not for all. For the blocks of a step itself all is moved at once.
#![expect(unsafe_code, reason = "queues copies from memory that stays until they are done")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::super::arena::{Arena, ArenaUsage, DeviceSlice, Holding};
use super::super::error::CudaError;
use super::super::free_list::granules;
use super::super::staging::{Upload, Uploader};
use super::super::stream::Stream;
use super::adapter::DeviceTable;
use super::together::{self, Place};

/// How long to wait for what was counted out and is not given back yet: much longer than that ever takes.
const PATIENCE: Duration = Duration::from_secs(10);
/// What is moved at a time while a step may be waiting: copying so many bytes takes a card about as long as a small step.
const PIECE_BLOBS: usize = 16;
const PIECE_BYTES: usize = 64 << 20;
/// How long to make way at most, so that a stream of others holds up nobody for good.
const MAKE_WAY: Duration = Duration::from_millis(10);
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

/// Tells of a change when it is dropped.
#[derive(Debug)]
struct Announcement(Arc<Changes>);

impl Drop for Announcement {
    fn drop(&mut self) {
        self.0.announce();
    }
}

/// Memory for an adapter whose content is still to come. Whether it becomes one's or is given back, also because whoever
/// fills it panics, that is announced: nobody waits for it in vain.
#[derive(Debug)]
pub(super) struct Placing {
    /// Before the announcement, so that it goes first.
    memory: DeviceSlice<u8>,
    announcement: Announcement,
}

/// Who waits for a lock that is taken again and again. A lock alone is free to come back to who had it last.
#[derive(Debug, Default)]
pub(super) struct Queue(AtomicUsize);

impl Queue {
    /// Somebody waits, as long as what is returned lives.
    pub(super) fn wait(&self) -> Waiting<'_> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Waiting(&self.0)
    }

    /// Lets those go first that wait.
    fn make_way(&self) {
        let deadline = Instant::now() + MAKE_WAY;
        while self.0.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }
}

/// Counted as waiting as long as it lives.
pub(super) struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct AdapterRegion {
    arena: Arena,
    /// Blobs whose content is there or on its way, hence can be moved. Whoever places or moves holds it.
    blobs: Mutex<Vec<Weak<Blob>>>,
    changes: Arc<Changes>,
    /// Who waits for a lock that moving takes.
    pub(super) queue: Queue,
    between: DeviceSlice<u8>,
}

impl AdapterRegion {
    /// A region of `bytes` bytes of an arena, all of them adapters' at first.
    pub(super) fn new(arena: &Arena, bytes: usize) -> Result<Self, CudaError> {
        let between = arena.allocate(Holding::Buffers, "room for moving adapters", BETWEEN)?;
        let region = arena.region(Holding::Shared, "the memory of KV blocks and adapters", bytes)?;
        Ok(Self { arena: region, blobs: Mutex::default(), changes: Arc::default(), queue: Queue::default(), between })
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
        gather: &dyn Fn(&Gather<'_>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = *lock(&self.changes.count);
            {
                let waiting = self.queue.wait();
                let mut blobs = lock(&self.blobs);
                drop(waiting);
                let ArenaUsage { capacity, free, .. } = self.arena.usage();
                if limit >= capacity || self.arena.resize(limit) {
                    return Ok(());
                }
                let (most, wanted) = ((usize::MAX, usize::MAX), capacity - limit);
                if free >= wanted
                    && self.gather(&mut blobs, wanted, Some(capacity), most, gather)?
                    && self.arena.resize(limit)
                {
                    return Ok(());
                }
            }
            if !self.changes.wait(seen, deadline) {
                let ArenaUsage { capacity, free, largest, .. } = self.arena.usage();
                let what = "KV blocks in place of adapters".to_owned();
                return Err(CudaError::OutOfMemory { what, bytes: capacity.saturating_sub(limit), free, largest });
            }
        }
    }

    /// Places `bytes` bytes. `gather` makes one hole of several, by calling what it is given under the step's lock.
    pub(super) fn place(
        &self,
        bytes: usize,
        gather: &dyn Fn(&Gather<'_>) -> Result<(), CudaError>,
    ) -> Result<Placing, CudaError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = *lock(&self.changes.count);
            let (error, moved) = {
                let mut blobs = lock(&self.blobs);
                match self.arena.allocate(Holding::Adapters, "an adapter", bytes) {
                    Ok(memory) => {
                        let announcement = Announcement(Arc::clone(&self.changes));
                        return Ok(Placing { memory, announcement });
                    }
                    Err(error @ CudaError::OutOfMemory { .. }) => {
                        let CudaError::OutOfMemory { free, .. } = error else { return Err(error) };
                        let fits = free >= bytes;
                        let most = (PIECE_BLOBS, PIECE_BYTES);
                        (error, fits && self.gather(&mut blobs, granules(bytes), None, most, gather)?)
                    }
                    Err(error) => return Err(error),
                }
            };
            if moved {
                self.queue.make_way();
                continue;
            }
            // What others hold is on its way out, or is being uploaded and cannot be moved yet.
            if bytes > self.arena.extent() || !self.changes.wait(seen, deadline) {
                return Err(error);
            }
        }
    }

    /// Moves the first blobs, up to `most` of them and of their bytes, of those that stand in the way of a hole of `wanted`
    /// bytes, ending at `end` if that is given. False if no moving makes it.
    fn gather(
        &self,
        blobs: &mut Vec<Weak<Blob>>,
        wanted: usize,
        end: Option<usize>,
        most: (usize, usize),
        gather: &dyn Fn(&Gather<'_>) -> Result<(), CudaError>,
    ) -> Result<bool, CudaError> {
        blobs.retain(|blob| blob.strong_count() > 0);
        let mut held: Vec<(Place, Arc<Blob>)> = blobs
            .iter()
            .filter_map(Weak::upgrade)
            .filter_map(|blob| Some(((blob.with(|memory| self.arena.offset(memory))?, blob.bytes()), blob)))
            .collect();
        held.sort_unstable_by_key(|(place, _)| *place);
        let places: Vec<Place> = held.iter().map(|(place, _)| *place).collect();
        let Some(chosen) = together::fewest(&places, &self.arena.holes(), wanted, end) else { return Ok(false) };
        let mut bytes = 0;
        let count = held[chosen.clone()].iter().take_while(|(_, blob)| {
            bytes += blob.bytes();
            bytes <= most.1
        });
        let count = count.count().min(most.0).max(1).min(chosen.len());
        let blobs = held.drain(chosen).take(count).map(|(_, blob)| blob).collect();
        gather(&Gather { region: self, blobs })?;
        Ok(true)
    }
}

impl Placing {
    /// Its memory, which stays where it is until it is settled.
    pub(super) fn memory(&mut self) -> &mut DeviceSlice<u8> {
        &mut self.memory
    }

    /// Content is on its way: from now on it may be moved.
    pub(super) fn settle(
        self,
        region: &AdapterRegion,
        upload: Upload,
        id: u64,
        (factors, sites): (Vec<(u32, usize, usize)>, usize),
    ) -> Arc<Blob> {
        let Self { memory, announcement: _announced } = self;
        let bytes = memory.taken();
        let changes = Arc::clone(&region.changes);
        let blob = Arc::new(Blob { memory: Mutex::new(Some(memory)), upload, id, factors, sites, bytes, changes });
        let mut blobs = lock(&region.blobs);
        blobs.retain(|blob| blob.strong_count() > 0);
        blobs.push(Arc::downgrade(&blob));
        blob
    }
}

/// Slides blobs down, the lowest first.
pub(super) struct Gather<'a> {
    region: &'a AdapterRegion,
    blobs: Vec<Arc<Blob>>,
}

impl Gather<'_> {
    /// Moves them, and lets `table` find them. `stream` is the compute stream. After an error nobody knows where content lies.
    pub(super) fn run(&self, stream: &Stream, uploader: &Uploader, table: &mut DeviceTable) -> Result<(), CudaError> {
        // Where somebody's upload may still arrive that was given back meanwhile.
        uploader.before(stream)?;
        let mut written = Vec::new();
        let moved = self.blobs.iter().try_for_each(|blob| self.slide(blob, stream, table, &mut written));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Who moves pieces lets a step go first that waits, and waits for nobody if nobody does, or for ever.
    #[test]
    fn those_that_wait_go_first() {
        let queue = Queue::default();
        let went = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = queue.wait();
            scope.spawn(|| {
                went.store(true, Ordering::SeqCst);
                drop(waiting);
            });
            let began = Instant::now();
            queue.make_way();
            assert!(went.load(Ordering::SeqCst) || began.elapsed() >= MAKE_WAY);
        });
        let began = Instant::now();
        let never = queue.wait();
        queue.make_way();
        assert!((MAKE_WAY..PATIENCE).contains(&began.elapsed()));
        drop(never);
        assert_eq!(queue.0.load(Ordering::SeqCst), 0);
    }

    /// Whoever fills what was placed panics: those that wait for a change wake up.
    #[test]
    fn a_panic_is_a_change() {
        let changes = Arc::new(Changes::default());
        let waiting = std::thread::spawn({
            let changes = Arc::clone(&changes);
            move || changes.wait(0, Instant::now() + PATIENCE)
        });
        let announcement = Announcement(Arc::clone(&changes));
        let filling = std::thread::spawn(move || {
            let _announcement = announcement;
            std::panic::resume_unwind(Box::new("while it is filled"));
        });
        assert!(filling.join().is_err());
        assert!(waiting.join().unwrap(), "nobody was told");
    }
}
