//! Fetching ahead: lines of many short streams, a few at a time between other work.
//!
//! The B of a batch's adapters is as many streams as it has adapters, each too short for the processor to foresee. Fetched
//! all at once they would keep the core waiting, because only some tens of lines can be under way; fetched when they are
//! needed, each stream would be waited for. So the base's kernels fetch a few after each of their blocks.
#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "prefetches by address"))]

use std::cell::Cell;

const LINE: usize = 64;
/// Bytes of all streams together: what the second-level cache holds beside the rest.
const MOST_BYTES: usize = 192 << 10;

/// A stream: `bytes` from `address` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    pub(super) address: *const u8,
    /// Bytes from one panel to the next, all of which will be read.
    pub(super) panel_bytes: usize,
}

impl Stream {
    /// Nothing.
    pub(super) const NONE: Self = Self { address: std::ptr::null(), panel_bytes: 0 };
}

/// The lines of some panels of streams, fetched a few at a time.
pub(super) struct Ahead<'a> {
    streams: &'a [Stream],
    panel: usize,
    panels: usize,
    most_bytes: usize,
    /// Lines for one gap.
    lines: usize,
    /// The next stream and offset.
    next: Cell<(usize, usize)>,
}

impl<'a> Ahead<'a> {
    /// `panels` panels of each stream from `panel` on, over `gaps` gaps in the work.
    pub(super) fn new(streams: &'a [Stream], (panel, panels): (usize, usize), gaps: usize) -> Self {
        let most_bytes = MOST_BYTES / streams.len().max(1);
        let lines: usize =
            streams.iter().map(|stream| (panels * stream.panel_bytes).min(most_bytes).div_ceil(LINE)).sum();
        // The last quarter of the gaps is left free: what is fetched there would come too late.
        let lines = lines.div_ceil((gaps - gaps / 4).max(1));
        Self { streams, panel, panels, most_bytes, lines, next: Cell::new((0, 0)) }
    }

    /// Fetches one gap's lines.
    #[inline]
    pub(super) fn gap(&self) {
        let (mut stream, mut offset) = self.next.get();
        let mut left = self.lines;
        while left > 0 && stream < self.streams.len() {
            let Stream { address, panel_bytes } = self.streams[stream];
            let end = (self.panels * panel_bytes).min(self.most_bytes);
            let address = address.wrapping_add(self.panel * panel_bytes);
            while left > 0 && offset < end {
                prefetch_second_level(address.wrapping_add(offset));
                offset += LINE;
                left -= 1;
            }
            if offset >= end {
                (stream, offset) = (stream + 1, 0);
            }
        }
        self.next.set((stream, offset));
    }
}

/// Fetches a line to the first-level cache; any address will do.
#[inline]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch may point anywhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// As [`prefetch`], to the second level.
#[inline]
fn prefetch_second_level(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch may point anywhere.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
