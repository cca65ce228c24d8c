//! What is fetched of the logits of sampled rows in place of the rows: greedy tokens, or lists of the largest. One search and
//! one small copy.
#![expect(unsafe_code, reason = "launches kernels over buffers that were checked")]

use super::super::arena::{Arena, DeviceSlice, Holding};
use super::super::arguments::{Argmax, Largest};
use super::super::error::CudaError;
use super::super::launch::{Grid, Kernel, KernelArguments};
use super::super::memory::DevicePointer;
use super::super::staging::Readback;
use super::super::stream::Stream;
use super::CudaBackend;
use super::buffer::CudaBuffer;
use super::linear::count_of;
use super::step::StepState;
use crate::largest::LargestValues;

const THREADS: u32 = 1024;
/// Numbers of all lists of one call: 64 rows with the most values that can be asked for, each with as many ties.
const LISTED: usize = 1 << 16;
/// Places that the shortest list has for values and ties.
const SHORTEST: usize = 32;

/// Numbers that there has to be room for in steps of so many rows: their tokens, or lists.
pub(super) fn numbers(rows: usize) -> usize {
    rows.max(LISTED)
}

/// Memory for what was found, on the card and page-locked.
#[derive(Debug)]
pub(super) struct Found {
    device: DeviceSlice<u32>,
    fetched: Readback<u32>,
}

impl Found {
    /// For so many numbers.
    pub(super) fn new(arena: &Arena, numbers: usize) -> Result<Self, CudaError> {
        Ok(Self {
            device: arena.allocate(Holding::Buffers, "tokens and lists of the largest logits", numbers)?,
            fetched: Readback::new(arena.context(), numbers)?,
        })
    }

    /// Makes room for so many numbers, where there is less.
    pub(super) fn grow(&mut self, arena: &Arena, stream: &Stream, numbers: usize) -> Result<(), CudaError> {
        if self.device.len() < numbers {
            stream.synchronize()?;
            *self = Self::new(arena, numbers)?;
        }
        Ok(())
    }
}

/// What both searches read.
struct Searched {
    header: DevicePointer<i32>,
    count: i32,
    logits: DevicePointer<f32>,
    stride: i32,
    vocabulary: i32,
    out: DevicePointer<u32>,
}

/// Searches the first `rows` rows of the logits by a kernel, and fetches the `each` numbers that it finds in each of them.
fn search<'a, A: KernelArguments>(
    backend: &CudaBackend,
    state: &'a mut StepState,
    (rows, each): (usize, usize),
    logits: &CudaBuffer,
    kernel: &Kernel<A>,
    arguments: impl FnOnce(Searched) -> A,
) -> Result<&'a [u32], CudaError> {
    assert!(rows <= logits.rows, "{rows} rows do not fit");
    state.found.grow(&backend.arena, &state.stream, numbers(rows))?;
    let block = state.rows(logits.set);
    assert_eq!(rows, block.rows, "the step began with other rows");
    assert!(rows * each <= state.found.device.len(), "{rows} x {each} numbers do not fit");
    let arguments = arguments(Searched {
        header: block.pointer(block.sections.header),
        count: count_of(logits.set),
        logits: logits.sums(),
        stride: logits.stride as i32,
        vocabulary: logits.width as i32,
        out: state.found.device.pointer(),
    });
    // SAFETY: rows, columns and the places of what is found were checked.
    unsafe { kernel.launch(&state.stream, Grid::new(rows as u32, 1, THREADS), &arguments) }?;
    let Found { device, fetched } = &mut state.found;
    fetched.fetch(&state.stream, device, 0, rows * each)?;
    fetched.wait()
}

/// See [`crate::Backend::argmax`].
pub(super) fn argmax(
    backend: &CudaBackend,
    state: &mut StepState,
    rows: usize,
    logits: &CudaBuffer,
    out: &mut [u32],
) -> Result<(), CudaError> {
    assert!(rows <= out.len(), "{rows} rows do not fit");
    let arguments = |Searched { header, count, logits, stride, vocabulary, out }| Argmax {
        header,
        count,
        logits,
        stride,
        vocabulary,
        out,
    };
    let tokens = search(backend, state, (rows, 1), logits, &backend.kernels.argmax, arguments)?;
    out[..rows].copy_from_slice(tokens);
    Ok(())
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
    assert!((1..=LargestValues::MOST).contains(&k), "{k} values cannot be listed");
    let Some(places) = places(rows, k) else { return Ok(false) };
    let each = 1 + 2 * places;
    let (k, capacity) = (k as i32, places as i32);
    let arguments = |Searched { header, count, logits, stride, vocabulary, out }| Largest {
        header,
        count,
        logits,
        stride,
        vocabulary,
        k,
        capacity,
        out,
    };
    let lists = search(backend, state, (rows, each), logits, &backend.kernels.largest, arguments)?;
    out.clear();
    for list in lists.chunks_exact(each) {
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
