//! Memory from the system: anonymous mappings that can be in huge pages.
#![expect(unsafe_code, reason = "owns raw memory so that it can be lazily committed and huge-page backed")]

use std::ptr::NonNull;

pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Zeroed memory of its own, given back when it is dropped.
pub(super) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory; whoever writes to it has parts of it to itself.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `bytes` that are committed when they are written to. None: the system has not so many.
    pub(super) fn anonymous(bytes: usize) -> Option<Self> {
        // SAFETY: a fresh private anonymous mapping; no existing memory is touched.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        NonNull::new(start.cast()).map(|start| Self { start, bytes })
    }

    /// The first address that lies `before` bytes in front of a multiple of 2 MiB. Up to 2 MiB are in front of it.
    pub(super) fn aligned(&self, before: usize) -> NonNull<u8> {
        let offset = self.start.as_ptr().wrapping_add(before).align_offset(HUGE_PAGE);
        assert!(offset < self.bytes, "{} bytes have no multiple of {HUGE_PAGE}", self.bytes);
        // SAFETY: it lies in the mapping.
        unsafe { self.start.add(offset) }
    }

    /// Asks for huge pages from a multiple of 2 MiB on.
    pub(super) fn advise_huge(&self, from: NonNull<u8>, bytes: usize) {
        let offset = from.as_ptr() as usize - self.start.as_ptr() as usize;
        assert!(offset + bytes <= self.bytes, "{bytes} bytes from {offset} on, of {}", self.bytes);
        if bytes > 0 {
            // SAFETY: the range lies in the mapping. Failing is harmless: it is advice.
            unsafe { libc::madvise(from.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `anonymous`, unmapped once.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
