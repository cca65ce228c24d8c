//! Aligned, zeroed memory: what weights, activations, adapters and the KV cache live in.
//!
//! Large blocks are mappings aligned to 2 MiB and advised to use huge pages: reading bandwidth from huge pages is up to half
//! as high again as from small ones, and pages that are never touched are never committed. Weights share theirs.
#![expect(unsafe_code, reason = "owns raw memory so that it can be aligned, lazily committed and huge-page backed")]

use std::alloc::Layout;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
#[cfg(target_os = "linux")]
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(target_os = "linux")]
use super::mapping::{HUGE_PAGE, Mapping};
use crate::error::KernelError;

/// Alignment of every block: one cache line, and the widest vector.
pub(super) const ALIGNMENT: usize = 64;

/// From this size on a block is its own mapping.
#[cfg(target_os = "linux")]
const MAPPED_FROM: usize = 1 << 20;
/// Lines of one way of a second-level cache (64 KiB), after which its sets repeat.
#[cfg(target_os = "linux")]
const WAY_LINES: usize = 1024;

/// Bytes of the blocks that are alive in this process: on the heap, and in mappings.
static ON_HEAP: AtomicUsize = AtomicUsize::new(0);
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// Bytes of all [`AlignedVec`]s of the process, which is where weights, adapters, KV caches, activations and the
/// working memory of kernels are. Pages of mapped blocks that were never written are counted and not committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldBytes {
    /// In blocks of the allocator.
    pub heap: usize,
    /// In mappings, which no allocator sees.
    pub mapped: usize,
}

impl HeldBytes {
    /// What is held now.
    pub fn now() -> Self {
        Self { heap: ON_HEAP.load(Ordering::Relaxed), mapped: MAPPED.load(Ordering::Relaxed) }
    }

    /// Both together.
    pub const fn total(&self) -> usize {
        self.heap + self.mapped
    }
}

/// Element types of which all-zero bytes are a value, and every byte pattern is one.
///
/// # Safety
/// Implementors are plain numbers without padding.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: plain numbers.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

enum Origin {
    Empty,
    Heap(Layout),
    /// A mapping of its own.
    #[cfg(target_os = "linux")]
    Mapping {
        _own: Mapping,
    },
    /// A mapping that others lie in, too: it goes with the last of them.
    #[cfg(target_os = "linux")]
    Shared {
        _mapping: Arc<Mapping>,
    },
}

/// A fixed-length, zeroed vector whose first element is aligned to [`ALIGNMENT`].
pub struct AlignedVec<T: Plain> {
    pointer: NonNull<T>,
    length: usize,
    origin: Origin,
    elements: PhantomData<T>,
}

// SAFETY: it owns its memory as a `Vec` does, and its elements are plain numbers.
unsafe impl<T: Plain> Send for AlignedVec<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Plain> Sync for AlignedVec<T> {}

impl<T: Plain> AlignedVec<T> {
    /// `length` zeroed elements. `what` names the block in the error.
    pub fn zeroed(what: &str, length: usize) -> Result<Self, KernelError> {
        let out_of_memory =
            || KernelError::OutOfMemory { what: what.to_owned(), bytes: length.saturating_mul(size_of::<T>()) };
        let bytes = length.checked_mul(size_of::<T>()).ok_or_else(out_of_memory)?;
        if bytes == 0 {
            return Ok(Self::empty());
        }
        #[cfg(target_os = "linux")]
        if bytes >= MAPPED_FROM {
            return Self::apart(length, bytes, 0).ok_or_else(out_of_memory);
        }
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| out_of_memory())?;
        // SAFETY: the layout has a non-zero size.
        let pointer = unsafe { std::alloc::alloc_zeroed(layout) };
        let pointer = NonNull::new(pointer.cast::<T>()).ok_or_else(out_of_memory)?;
        ON_HEAP.fetch_add(bytes, Ordering::Relaxed);
        Ok(Self { pointer, length, origin: Origin::Heap(layout), elements: PhantomData })
    }

    /// As [`Self::zeroed`], for blocks of which many are read side by side at the same distance from their beginnings. Were
    /// all large blocks aligned to 2 MiB, those places would share a set of the caches, which holds eight of them; so each
    /// begins at another line.
    pub fn zeroed_apart(what: &str, length: usize) -> Result<Self, KernelError> {
        #[cfg(target_os = "linux")]
        if let Some(bytes) = length.checked_mul(size_of::<T>())
            && bytes >= MAPPED_FROM
        {
            static BLOCKS: AtomicUsize = AtomicUsize::new(0);
            // Multiples of the golden ratio of a way's lines: however many blocks there are, they lie evenly.
            let line = BLOCKS.fetch_add(1, Ordering::Relaxed).wrapping_mul(633) % WAY_LINES;
            let apart = Self::apart(length, bytes, line * ALIGNMENT);
            return apart.ok_or_else(|| KernelError::OutOfMemory { what: what.to_owned(), bytes });
        }
        Self::zeroed(what, length)
    }

    /// No elements.
    pub const fn empty() -> Self {
        // A dangling pointer of the promised alignment.
        let pointer = NonNull::without_provenance(std::num::NonZero::new(ALIGNMENT).expect("not zero"));
        Self { pointer, length: 0, origin: Origin::Empty, elements: PhantomData }
    }

    /// A mapping whose first `before` bytes lie in front of a multiple of 2 MiB.
    #[cfg(target_os = "linux")]
    fn apart(length: usize, bytes: usize, before: usize) -> Option<Self> {
        let mapping = Mapping::anonymous(bytes.checked_add(HUGE_PAGE)?)?;
        let pointer = mapping.aligned(before);
        // Whole huge pages only: neither end of a block may commit more than it holds.
        let whole = bytes.saturating_sub(before) / HUGE_PAGE * HUGE_PAGE;
        if whole > 0 {
            // SAFETY: `bytes` of the mapping are behind the pointer.
            mapping.advise_huge(unsafe { pointer.add(before) }, whole);
        }
        MAPPED.fetch_add(length * size_of::<T>(), Ordering::Relaxed);
        Some(Self { pointer: pointer.cast(), length, origin: Origin::Mapping { _own: mapping }, elements: PhantomData })
    }

    /// A block of a mapping.
    ///
    /// # Safety
    /// From `pointer` on, which is aligned to [`ALIGNMENT`], the mapping has `length` elements that are zero and belong to nobody.
    #[cfg(target_os = "linux")]
    pub(super) unsafe fn shared(mapping: Arc<Mapping>, pointer: NonNull<T>, length: usize) -> Self {
        MAPPED.fetch_add(length * size_of::<T>(), Ordering::Relaxed);
        Self { pointer, length, origin: Origin::Shared { _mapping: mapping }, elements: PhantomData }
    }

    /// Address of the first element.
    pub const fn as_ptr(&self) -> *const T {
        self.pointer.as_ptr()
    }

    /// Address of the first element, to write through.
    pub const fn as_mut_ptr(&mut self) -> *mut T {
        self.pointer.as_ptr()
    }
}

impl<T: Plain> Drop for AlignedVec<T> {
    fn drop(&mut self) {
        match &self.origin {
            Origin::Empty => {}
            &Origin::Heap(layout) => {
                ON_HEAP.fetch_sub(layout.size(), Ordering::Relaxed);
                // SAFETY: allocated in `zeroed` with this layout.
                unsafe { std::alloc::dealloc(self.pointer.as_ptr().cast(), layout) }
            }
            #[cfg(target_os = "linux")]
            Origin::Mapping { .. } | Origin::Shared { .. } => {
                MAPPED.fetch_sub(self.length * size_of::<T>(), Ordering::Relaxed);
            }
        }
    }
}

impl<T: Plain> Deref for AlignedVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `length` initialised (zeroed) elements, owned by self.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.length) }
    }
}

impl<T: Plain> DerefMut for AlignedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.length) }
    }
}

impl<T: Plain> std::fmt::Debug for AlignedVec<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "AlignedVec({} x {} bytes)", self.length, size_of::<T>())
    }
}

/// An activation matrix: row-major f32 `[rows, width]`.
#[derive(Debug)]
pub struct Buffer {
    /// Rows it has room for.
    pub rows: usize,
    /// Columns.
    pub width: usize,
    /// The values.
    pub data: AlignedVec<f32>,
}

impl Buffer {
    /// A zeroed matrix.
    pub fn zeroed(rows: usize, width: usize) -> Result<Self, KernelError> {
        let elements = rows.saturating_mul(width);
        Ok(Self { rows, width, data: AlignedVec::zeroed("an activation buffer", elements)? })
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..(row + 1) * self.width]
    }

    /// One row, to write to.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        let width = self.width;
        &mut self.data[row * width..(row + 1) * width]
    }

    /// Address of the first value.
    pub const fn as_ptr(&self) -> *const f32 {
        self.data.as_ptr()
    }

    /// Address of the first value, to write through.
    pub const fn as_mut_ptr(&mut self) -> *mut f32 {
        self.data.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIGNMENT, AlignedVec, Buffer};

    #[test]
    fn blocks_are_aligned_and_zeroed() {
        for length in [0, 1, 100, 300_000, 3_000_000] {
            let block = AlignedVec::<f32>::zeroed("a test", length).unwrap();
            assert_eq!(block.as_ptr() as usize % ALIGNMENT, 0);
            assert_eq!(block.len(), length);
            assert!(block.iter().all(|&value| value.to_bits() == 0));
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let message = AlignedVec::<f32>::zeroed("the thing", usize::MAX / 2).unwrap_err().to_string();
        assert!(message.contains("the thing"), "{message}");
        assert!(Buffer::zeroed(usize::MAX, 2).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn untouched_memory_costs_nothing() {
        let resident = || -> usize {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let before = resident();
        let block = AlignedVec::<u8>::zeroed("a reserve", 64 << 30).unwrap();
        assert_eq!(block.len(), 64 << 30);
        assert!(resident() < before + (256 << 20));
    }
}
