//! Which rows of a batch share an adapter: the four mixes of Punica (Chen et al., 2023).

/// How rows are spread over adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Popularity {
    /// All rows have the same adapter.
    Identical,
    /// The square root of the rows' number of adapters, each for as many rows.
    Uniform,
    /// Adapter i is 1.5 times as popular as adapter i + 1.
    Skewed,
    /// Every row has its own.
    Distinct,
}

impl Popularity {
    pub(crate) const ALL: [Self; 4] = [Self::Identical, Self::Uniform, Self::Skewed, Self::Distinct];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Identical => "identical",
            Self::Uniform => "uniform",
            Self::Skewed => "skewed",
            Self::Distinct => "distinct",
        }
    }

    /// The adapter of each row.
    pub(crate) fn adapters(self, rows: usize) -> Vec<u32> {
        let share = |sizes: &[usize]| {
            let each = sizes.iter().enumerate().flat_map(|(adapter, &size)| std::iter::repeat_n(adapter as u32, size));
            each.take(rows).collect()
        };
        match self {
            Self::Identical => vec![0; rows],
            Self::Distinct => (0..rows as u32).collect(),
            Self::Uniform => {
                let adapters = (rows as f64).sqrt().ceil() as usize;
                let sizes: Vec<usize> = (0..adapters).map(|index| (rows + index) / adapters).collect();
                share(&sizes)
            }
            Self::Skewed => {
                // Geometric sizes, largest first; the smallest has one row.
                let mut sizes = Vec::new();
                let (mut left, mut size) = (rows, 1.0);
                while left > 0 {
                    let next = (f64::round(size) as usize).clamp(1, left);
                    sizes.push(next);
                    left -= next;
                    size *= 1.5;
                }
                sizes.sort_unstable_by(|a, b| b.cmp(a));
                share(&sizes)
            }
        }
    }

    /// Number of adapters in a batch.
    pub(crate) fn distinct(self, rows: usize) -> usize {
        self.adapters(rows).iter().max().map_or(0, |&last| last as usize + 1)
    }
}
