//! Adapters' factors as pairs, for tile products, in as many bytes as they have values.
//!
//! A: for each group of 16 ranks (fewer in the last one), `[input/2][ranks][2]`; an odd last input lies as `[ranks]`
//! behind. B: for each 16 outputs, `[rank/2][16][2]`; an odd last rank lies as `[16]` behind.
#![expect(unsafe_code, reason = "tiles are read through pointers, rows transposed by vector instructions")]

use super::amx::{TILE_COLUMNS, TILE_LINE, TILE_PAIRS};

/// Packs `rows` (row-major, `columns` bf16 values each, no more rows than `width`) as pairs of columns, `width` rows wide.
pub(in crate::cpu) fn pack_pairs(rows: &[u8], columns: usize, width: usize, out: &mut [u8]) {
    let row_bytes = 2 * columns;
    let count = rows.len() / row_bytes;
    assert!(rows.len() == count * row_bytes && count <= width && out.len() >= width * row_bytes);
    let pairs = columns / 2;
    // SAFETY: a processor with tiles has AVX2.
    let done = unsafe {
        match (width, count == width) {
            (16, true) => super::super::x86::avx2_words::transpose::<16>(rows, row_bytes, out),
            (8, true) => super::super::x86::avx2_words::transpose::<8>(rows, row_bytes, out),
            _ => 0,
        }
    };
    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
        for pair in done..pairs {
            out[(pair * width + lane) * 4..][..4].copy_from_slice(&row[pair * 4..][..4]);
        }
        if columns % 2 == 1 {
            out[pairs * width * 4 + lane * 2..][..2].copy_from_slice(&row[pairs * 4..][..2]);
        }
    }
}

/// The last step of a factor of `columns` columns, `width` rows wide: where its pairs are, an odd one filled up with
/// zeros in `spare` (a tile).
///
/// # Safety
/// `start` points to the step's first pair; the factor is as [`pack_pairs`] made it.
pub(in crate::cpu) unsafe fn last_step(start: *const u8, columns: usize, width: usize, spare: *mut u8) -> *const u8 {
    debug_assert!(width <= TILE_COLUMNS && columns < 2 * TILE_PAIRS);
    if columns.is_multiple_of(2) {
        return start;
    }
    let whole = columns / 2 * width * 4;
    // SAFETY: a tile has room for 16 pairs of 16; the odd column is `width` values.
    unsafe {
        std::ptr::copy_nonoverlapping(start, spare, whole);
        let odd: *const u16 = start.add(whole).cast();
        let out: *mut u32 = spare.add(whole).cast();
        for lane in 0..width {
            out.add(lane).write_unaligned(u32::from(odd.add(lane).read_unaligned()));
        }
    }
    spare
}

const _: () = assert!(TILE_LINE == TILE_COLUMNS * 4);

#[cfg(test)]
mod tests {
    use super::{last_step, pack_pairs};

    #[test]
    fn pairs_are_where_the_layout_says() {
        for (count, width, columns) in
            [(16, 16, 40), (8, 8, 33), (5, 5, 7), (3, 16, 9), (1, 1, 2), (1, 1, 1), (16, 16, 5)]
        {
            let value = |row: usize, column: usize| (1 + row * 100 + column) as u16;
            let rows: Vec<u8> = (0..count)
                .flat_map(|row| (0..columns).flat_map(move |column| value(row, column).to_ne_bytes()))
                .collect();
            let mut out = vec![0u8; 2 * width * columns];
            pack_pairs(&rows, columns, width, &mut out);
            for row in 0..count {
                for column in 0..columns {
                    let at = if column / 2 < columns / 2 {
                        (column / 2 * width + row) * 2 + column % 2
                    } else {
                        columns / 2 * width * 2 + row
                    };
                    let found = u16::from_ne_bytes([out[2 * at], out[2 * at + 1]]);
                    assert_eq!(found, value(row, column), "{count} of {width} x {columns}: {row} {column}");
                }
            }
            if columns < 32 {
                let mut spare = [0xFFu8; 1024];
                // SAFETY: the factor has these columns.
                let step = unsafe { last_step(out.as_ptr(), columns, width, spare.as_mut_ptr()) };
                for row in 0..count {
                    for column in 0..columns.next_multiple_of(2) {
                        let at = (column / 2 * width + row) * 2 + column % 2;
                        // SAFETY: within the last step's pairs.
                        let found = unsafe { [*step.add(2 * at), *step.add(2 * at + 1)] };
                        let found = u16::from_ne_bytes(found);
                        let wanted = if column < columns { value(row, column) } else { 0 };
                        assert_eq!(found, wanted, "{count} of {width} x {columns}: {row} {column}");
                    }
                }
            }
        }
    }
}
