//! Which parts of a block of memory are in use: best fit over a list of free holes, neighbours merged.
//!
//! Pure bookkeeping over offsets; it knows no device.

use std::collections::{BTreeMap, BTreeSet};

/// Every part starts at, and takes, a multiple of this: what the driver aligns to, and enough for any vector load and
/// for cuBLASLt's fastest algorithms.
pub const GRANULE: usize = 256;

/// Bytes that a part of `bytes` bytes takes.
pub const fn granules(bytes: usize) -> usize {
    if bytes == 0 { GRANULE } else { bytes.div_ceil(GRANULE).saturating_mul(GRANULE) }
}

/// A part in use. It is given back by value, so that this cannot happen twice.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Span {
    start: usize,
    bytes: usize,
}

impl Span {
    /// Where it starts.
    pub(super) const fn start(&self) -> usize {
        self.start
    }

    /// What it takes: a multiple of [`GRANULE`].
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The free holes of a block.
#[derive(Debug)]
pub(super) struct FreeList {
    capacity: usize,
    free: usize,
    /// Length of each hole by its start.
    by_start: BTreeMap<usize, usize>,
    /// The holes, smallest first, and lowest first among equals.
    by_size: BTreeSet<(usize, usize)>,
}

impl FreeList {
    /// A block of `capacity` bytes (whole granules count), all free.
    pub(super) fn new(capacity: usize) -> Self {
        let capacity = capacity / GRANULE * GRANULE;
        let mut list = Self { capacity, free: capacity, by_start: BTreeMap::new(), by_size: BTreeSet::new() };
        if capacity > 0 {
            list.insert(0, capacity);
        }
        list
    }

    /// Takes a part from the smallest hole that holds it, at its low end. `None` if no hole does.
    pub(super) fn allocate(&mut self, bytes: usize) -> Option<Span> {
        let bytes = granules(bytes);
        let &(length, start) = self.by_size.range((bytes, 0)..).next()?;
        self.remove(start, length);
        if length > bytes {
            self.insert(start + bytes, length - bytes);
        }
        self.free -= bytes;
        Some(Span { start, bytes })
    }

    /// Gives a part back and merges it with free neighbours.
    #[expect(clippy::needless_pass_by_value, reason = "what is given back is gone, so it cannot be given back twice")]
    pub(super) fn release(&mut self, span: Span) {
        let Span { mut start, mut bytes } = span;
        self.free += bytes;
        if let Some((&before, &length)) = self.by_start.range(..start).next_back()
            && before + length == start
        {
            self.remove(before, length);
            start = before;
            bytes += length;
        }
        if let Some(&length) = self.by_start.get(&(start + bytes)) {
            self.remove(start + bytes, length);
            bytes += length;
        }
        self.insert(start, bytes);
    }

    /// Moves a part down over the hole that ends where it starts, if there is one; the hole is behind it then.
    pub(super) fn slide_down(&mut self, span: &mut Span) -> bool {
        let before = self.by_start.range(..span.start).next_back().map(|(&start, &length)| (start, length));
        let Some((start, length)) = before.filter(|(start, length)| start + length == span.start) else { return false };
        self.remove(start, length);
        span.start = start;
        let (hole, mut bytes) = (start + span.bytes, length);
        if let Some(&next) = self.by_start.get(&(hole + bytes)) {
            self.remove(hole + bytes, next);
            bytes += next;
        }
        self.insert(hole, bytes);
        true
    }

    /// Makes the block longer or shorter, in whole granules. False, and nothing is changed, if a part is in the way.
    pub(super) fn resize(&mut self, capacity: usize) -> bool {
        let capacity = capacity / GRANULE * GRANULE;
        let last = self.by_start.last_key_value().map(|(&start, &length)| (start, length));
        let last = last.filter(|(start, length)| start + length == self.capacity);
        let used = last.map_or(self.capacity, |(start, _)| start);
        if capacity < used {
            return false;
        }
        if let Some((start, length)) = last {
            self.remove(start, length);
        }
        if capacity > used {
            self.insert(used, capacity - used);
        }
        // In this order, so that nothing is ever below 0.
        self.free = self.free + capacity - self.capacity;
        self.capacity = capacity;
        true
    }

    /// Size of the block.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes in no part.
    pub(super) fn free(&self) -> usize {
        self.free
    }

    /// The longest hole: what can be had in one piece.
    pub(super) fn largest(&self) -> usize {
        self.by_size.last().map_or(0, |&(length, _)| length)
    }

    /// The holes, in order: where each starts and how long it is.
    pub(super) fn holes(&self) -> impl ExactSizeIterator<Item = (usize, usize)> + '_ {
        self.by_start.iter().map(|(&start, &length)| (start, length))
    }

    fn insert(&mut self, start: usize, length: usize) {
        self.by_start.insert(start, length);
        self.by_size.insert((length, start));
    }

    fn remove(&mut self, start: usize, length: usize) {
        self.by_start.remove(&start);
        self.by_size.remove(&(length, start));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sliding_down_leaves_one_hole() {
        let mut list = FreeList::new(10 * GRANULE);
        let mut spans: Vec<Span> = (0..5).map(|_| list.allocate(2 * GRANULE).unwrap()).collect();
        list.release(spans.remove(2));
        list.release(spans.remove(0));
        // _ _ b b _ _ d d e e
        assert_eq!((list.holes().len(), list.largest()), (2, 2 * GRANULE));
        let moved: Vec<bool> = spans.iter_mut().map(|span| list.slide_down(span)).collect();
        assert_eq!(moved, [true; 3]);
        assert_eq!(spans.iter().map(Span::start).collect::<Vec<_>>(), [0, 2 * GRANULE, 4 * GRANULE]);
        assert_eq!((list.holes().len(), list.largest(), list.free()), (1, 4 * GRANULE, 4 * GRANULE));
        assert!(!list.slide_down(&mut spans[0]));
        for span in spans {
            list.release(span);
        }
        assert_eq!((list.holes().len(), list.free()), (1, 10 * GRANULE));
    }

    #[test]
    fn the_smallest_hole_that_fits_is_taken() {
        let mut list = FreeList::new(10 * GRANULE);
        let parts: Vec<Span> = [2, 1, 4, 1, 1].iter().map(|n| list.allocate(n * GRANULE).unwrap()).collect();
        let mut parts = parts.into_iter();
        list.release(parts.next().unwrap());
        let _between = parts.next().unwrap();
        list.release(parts.next().unwrap());
        // Holes of 2 (at 0), 4 (at 3) and 1 (at 9).
        assert_eq!(list.holes().len(), 3);
        assert_eq!(list.allocate(1).unwrap().start(), 9 * GRANULE);
        assert_eq!(list.allocate(GRANULE + 1).unwrap().start(), 0);
        assert_eq!(list.allocate(3 * GRANULE).unwrap().start(), 3 * GRANULE);
        assert!(list.allocate(2 * GRANULE).is_none());
        assert_eq!((list.free(), list.largest()), (GRANULE, GRANULE));
    }

    #[test]
    fn sizes_that_overflow_do_not_fit() {
        let mut list = FreeList::new(1 << 20);
        assert!(list.allocate(usize::MAX).is_none());
        assert!(list.allocate((1 << 20) + 1).is_none());
        assert_eq!(list.allocate(1 << 20).unwrap().bytes(), 1 << 20);
        assert_eq!(FreeList::new(GRANULE - 1).capacity(), 0);
    }

    proptest! {
        #[test]
        fn parts_never_overlap_and_nothing_is_lost(
            capacity in 0usize..200,
            // A number below 128 asks for so many half granules; others give a part back, or move the end.
            actions in proptest::collection::vec((0u8..=255, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut list = FreeList::new(capacity * GRANULE);
            let (mut live, mut capacity): (Vec<Span>, usize) = (Vec::new(), capacity);
            for (action, index) in actions {
                if action < 128 {
                    let bytes = action as usize * GRANULE / 2;
                    let largest = list.largest();
                    match list.allocate(bytes) {
                        Some(span) => {
                            prop_assert_eq!(span.bytes(), granules(bytes));
                            live.push(span);
                        }
                        None => prop_assert!(largest < granules(bytes)),
                    }
                } else if action >= 224 {
                    let wanted = (action - 224) as usize * 7;
                    let used = live.iter().map(|span| (span.start() + span.bytes()) / GRANULE).max().unwrap_or(0);
                    prop_assert_eq!(list.resize(wanted * GRANULE + 1), wanted >= used);
                    capacity = if wanted >= used { wanted } else { capacity };
                    prop_assert_eq!(list.capacity(), capacity * GRANULE);
                } else if !live.is_empty() {
                    let span = live.swap_remove(index.index(live.len()));
                    list.release(span);
                }
                let mut used: Vec<(usize, usize)> = live.iter().map(|s| (s.start(), s.bytes())).collect();
                used.sort_unstable();
                let mut end = 0;
                let (mut free, mut holes, mut largest) = (0, 0, 0);
                for (start, bytes) in used.into_iter().chain([(capacity * GRANULE, 0)]) {
                    prop_assert!(start >= end && start % GRANULE == 0);
                    if start > end {
                        free += start - end;
                        holes += 1;
                        largest = largest.max(start - end);
                    }
                    end = start + bytes;
                }
                prop_assert!(end <= capacity * GRANULE);
                // Neighbours are merged exactly if there are as many holes as gaps.
                prop_assert_eq!((list.free(), list.holes().len(), list.largest()), (free, holes, largest));
            }
            for span in live {
                list.release(span);
            }
            prop_assert_eq!((list.free(), list.largest()), (capacity * GRANULE, capacity * GRANULE));
            prop_assert!(list.holes().len() <= 1);
        }
    }
}
