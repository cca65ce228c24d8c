//! The largest logits of sampled rows, listed on the card and fetched in one small copy.
#![expect(unsafe_code, reason = "launches a kernel over buffers that were checked")]

use super::super::arena::{Arena, DeviceSlice, Holding};
use super::super::arguments::Largest;
use super::super::error::CudaError;
use super::super::launch::Grid;
use super::super::staging::Readback;
use super::super::stream::Stream;
use super::CudaBackend;
use super::buffer::CudaBuffer;
use super::linear::count_of;
use super::step::StepState;
use crate::largest::LargestValues;

const THREADS: u32 = 1024;
/// Numbers of all lists of one call: 64 rows with the most values that can be asked for, each with as many ties.
pub(super) const LISTED: usize = 1 << 16;
/// Places that the shortest list has for values and ties.
const SHORTEST: usize = 32;

/// Memory for lists, on the card and page-locked.
#[derive(Debug)]
pub(super) struct Lists {
    device: DeviceSlice<u32>,
    fetched: Readback<u32>,
}

impl Lists {
    /// For `len` numbers.
    pub(super) fn new(arena: &Arena, len: usize) -> Result<Self, CudaError> {
        Ok(Self {
            device: arena.allocate(Holding::Buffers, "lists of the largest logits", len)?,
            fetched: Readback::new(arena.context(), len)?,
        })
    }

    /// Makes room for [`LISTED`] numbers, where there is less.
    pub(super) fn grow(&mut self, arena: &Arena, stream: &Stream) -> Result<(), CudaError> {
        if self.device.len() < LISTED {
            stream.synchronize()?;
            *self = Self::new(arena, LISTED)?;
        }
        Ok(())
    }
}

/// Places of each of the lists of so many rows: twice those asked for, or what there is room for. None if that is too
/// little.
fn places(rows: usize, k: usize) -> Option<usize> {
    let room = (LISTED / rows.max(1)).saturating_sub(1) / 2;
    let places = (2 * k).max(SHORTEST).min(room);
    (places >= k).then_some(places)
}

/// See [`crate::Backend::largest`].
pub(super) fn largest(
    backend: &CudaBackend,
    state: &mut StepState,
    rows: usize,
    k: usize,
    logits: &CudaBuffer,
    out: &mut LargestValues,
) -> Result<bool, CudaError> {
    assert!(rows <= logits.rows, "{rows} rows do not fit");
    assert!((1..=LargestValues::MOST).contains(&k), "{k} values cannot be listed");
    let Some(places) = places(rows, k) else { return Ok(false) };
    state.lists.grow(&backend.arena, &state.stream)?;
    let block = state.rows(logits.set);
    assert_eq!(rows, block.rows, "the step began with other rows");
    let arguments = Largest {
        header: block.pointer(block.sections.header),
        count: count_of(logits.set),
        logits: logits.sums(),
        stride: logits.stride as i32,
        vocabulary: logits.width as i32,
        k: k as i32,
        capacity: places as i32,
        out: state.lists.device.pointer(),
    };
    // SAFETY: rows, columns and the lists' places were checked.
    unsafe { backend.kernels.largest.launch(&state.stream, Grid::new(rows as u32, 1, THREADS), &arguments) }?;
    let numbers = 1 + 2 * places;
    let StepState { lists: Lists { device, fetched }, stream, .. } = state;
    fetched.fetch(stream, device, 0, rows * numbers)?;
    out.clear();
    for list in fetched.wait()?.chunks_exact(numbers) {
        let count = list[0] as usize;
        if count > places {
            out.push_none();
            continue;
        }
        let (values, tokens) = list[1..].split_at(places);
        out.push(values[..count].iter().map(|&bits| f32::from_bits(bits)), &tokens[..count]);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_room_for_ties_until_there_are_too_many_rows() {
        assert_eq!(places(1, 1), Some(SHORTEST));
        assert_eq!(places(256, 20), Some(40));
        assert_eq!(places(63, LargestValues::MOST), Some(2 * LargestValues::MOST));
        assert_eq!(places(127, LargestValues::MOST), Some(257));
        assert_eq!(places(128, LargestValues::MOST), None);
        for rows in 1..5000 {
            for k in [1, 20, LargestValues::MOST] {
                let places = places(rows, k);
                assert!(places.is_none_or(|it| it >= k && rows * (1 + 2 * it) <= LISTED), "{rows} {k} {places:?}");
            }
        }
    }
}
