//! Which blobs to move so that holes become one: those next to each other that are the fewest bytes.
//!
//! Pure bookkeeping over offsets; it knows no device. Whatever is neither a blob nor a hole stays where it is, and blobs are
//! not moved past it.

use std::ops::Range;

/// What lies somewhere: where it starts and how long it is.
pub(super) type Place = (usize, usize);

/// A piece of a region, in the order of addresses.
#[derive(Clone, Copy)]
struct Piece {
    start: usize,
    bytes: usize,
    /// Its number, if it is a blob; else it is a hole.
    blob: Option<usize>,
}

impl Piece {
    const fn hole(self) -> usize {
        if self.blob.is_none() { self.bytes } else { 0 }
    }

    const fn moved(self) -> usize {
        if self.blob.is_none() { 0 } else { self.bytes }
    }
}

/// The blobs that have to slide down, the lowest first, each over the hole before it, for a hole of `wanted` bytes behind the
/// last of them. With `end`, that hole has to end there. Both lists are in the order of addresses. None: there are no such.
pub(super) fn fewest(blobs: &[Place], holes: &[Place], wanted: usize, end: Option<usize>) -> Option<Range<usize>> {
    let movable = blobs.iter().enumerate().map(|(blob, &(start, bytes))| Piece { start, bytes, blob: Some(blob) });
    let mut pieces: Vec<Piece> = movable.collect();
    pieces.extend(holes.iter().map(|&(start, bytes)| Piece { start, bytes, blob: None }));
    pieces.sort_unstable_by_key(|piece| piece.start);
    let (mut first, mut hole, mut moved) = (0, 0, 0);
    let mut best: Option<(usize, Range<usize>)> = None;
    for (last, piece) in pieces.iter().enumerate() {
        if last > 0 && pieces[last - 1].start + pieces[last - 1].bytes != piece.start {
            (first, hole, moved) = (last, 0, 0);
        }
        hole += piece.hole();
        moved += piece.moved();
        // What is not needed at the low end, and blobs before which there is no hole.
        while first <= last && (pieces[first].blob.is_some() || hole - pieces[first].bytes >= wanted) {
            hole -= pieces[first].hole();
            moved -= pieces[first].moved();
            first += 1;
        }
        let ends = end.is_none_or(|end| last + 1 == pieces.len() && piece.start + piece.bytes == end);
        if hole >= wanted && ends && best.as_ref().is_none_or(|(bytes, _)| moved < *bytes) {
            let mut window = pieces[first..=last].iter().filter_map(|piece| piece.blob);
            let lowest = window.next().unwrap_or(0);
            let count = if moved == 0 { 0 } else { 1 + window.count() };
            best = Some((moved, lowest..lowest + count));
        }
    }
    best.map(|(_, blobs)| blobs)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// In place of a blob: what stays where it is.
    const STAYS: usize = usize::MAX;

    /// Slides blobs down, and says which holes there are then.
    fn holes_after(layout: &[(char, usize)], chosen: &Range<usize>) -> Vec<Place> {
        // Bytes by what holds them, if it is no hole.
        let (mut bytes, mut number): (Vec<Option<usize>>, usize) = (Vec::new(), 0);
        for &(kind, length) in layout {
            let holder = match kind {
                'b' => {
                    number += 1;
                    Some(number - 1)
                }
                '#' => Some(STAYS),
                _ => None,
            };
            bytes.extend(std::iter::repeat_n(holder, length));
        }
        for blob in chosen.clone() {
            let start = bytes.iter().position(|holder| *holder == Some(blob)).unwrap();
            let length = bytes.iter().filter(|holder| **holder == Some(blob)).count();
            let mut to = start;
            while to > 0 && bytes[to - 1].is_none() {
                to -= 1;
            }
            bytes[start..start + length].fill(None);
            bytes[to..to + length].fill(Some(blob));
        }
        let mut holes: Vec<Place> = Vec::new();
        for (at, holder) in bytes.iter().enumerate() {
            match (holder, holes.last_mut()) {
                (None, Some((start, length))) if *start + *length == at => *length += 1,
                (None, _) => holes.push((at, 1)),
                _ => {}
            }
        }
        holes
    }

    /// Blobs and holes of a layout.
    fn places(layout: &[(char, usize)]) -> (Vec<Place>, Vec<Place>) {
        let mut at = 0;
        let (mut blobs, mut holes): (Vec<Place>, Vec<Place>) = (Vec::new(), Vec::new());
        for &(kind, length) in layout {
            match (kind, holes.last_mut()) {
                ('b', _) => blobs.push((at, length)),
                ('.', Some((start, bytes))) if *start + *bytes == at => *bytes += length,
                ('.', _) => holes.push((at, length)),
                _ => {}
            }
            at += length;
        }
        (blobs, holes)
    }

    proptest! {
        /// What is chosen gives the hole, and no other choice of neighbours gives it for fewer bytes.
        #[test]
        fn the_fewest_bytes_make_the_hole(
            layout in proptest::collection::vec((prop_oneof![Just('b'), Just('.'), Just('b'), Just('#')], 1usize..6), 1..14),
            wanted in 1usize..16,
            at_the_end in any::<bool>(),
        ) {
            let (blobs, holes) = places(&layout);
            let all: usize = layout.iter().map(|(_, length)| length).sum();
            let does = |chosen: &Range<usize>| {
                let holes = holes_after(&layout, chosen);
                holes.iter().any(|&(start, length)| length >= wanted && (!at_the_end || start + length == all))
            };
            let cost = |chosen: &Range<usize>| blobs[chosen.clone()].iter().map(|(_, bytes)| bytes).sum::<usize>();
            let every = (0..=blobs.len()).flat_map(|first| (first..=blobs.len()).map(move |last| first..last));
            let best = every.filter(|chosen| does(chosen)).map(|chosen| cost(&chosen)).min();
            let chosen = fewest(&blobs, &holes, wanted, at_the_end.then_some(all));
            prop_assert_eq!(chosen.as_ref().map(&cost), best);
            prop_assert!(chosen.is_none_or(|chosen| does(&chosen)));
        }
    }
}
