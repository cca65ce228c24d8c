//! The largest values of rows of logits: what random sampling under `top_k` needs of them, so that a host need not fetch
//! whole rows from a device.

/// What [`crate::Backend::largest`] found, row by row. One serves step after step.
#[derive(Clone, Debug, Default)]
pub struct LargestValues {
    values: Vec<f32>,
    tokens: Vec<u32>,
    /// Where each row's list starts and ends; None of rows that have no list.
    rows: Vec<Option<(usize, usize)>>,
}

/// The largest values of one row, in the order of their tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ListedValues<'a> {
    /// As they stand in the row.
    pub values: &'a [f32],
    /// The token of each.
    pub tokens: &'a [u32],
}

impl LargestValues {
    /// Most values that can be asked for, ties apart.
    pub const MOST: usize = 256;

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.values.clear();
        self.tokens.clear();
        self.rows.clear();
    }

    /// Adds the next row's list.
    pub fn push(&mut self, values: impl IntoIterator<Item = f32>, tokens: &[u32]) {
        let first = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.values.extend(values);
        debug_assert_eq!(self.values.len(), self.tokens.len(), "each value has a token");
        self.rows.push(Some((first, self.tokens.len())));
    }

    /// Says that the next row has no list, because too many values tie with the last one.
    pub fn push_none(&mut self) {
        self.rows.push(None);
    }

    /// The list of a row; None where it has none.
    pub fn row(&self, row: usize) -> Option<ListedValues<'_>> {
        let (first, end) = (*self.rows.get(row)?)?;
        Some(ListedValues { values: &self.values[first..end], tokens: &self.tokens[first..end] })
    }
}
