//! Where packed weights lie: one behind the other, in huge pages that they share.
//!
//! A huge page holds 2 MiB. Were each matrix a block of its own, those that are smaller, and the ends of larger ones, would lie
//! in small pages: of a model of 135 million parameters all but the embedding, at up to a third less bandwidth.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "shares out raw memory"))]

#[cfg(target_os = "linux")]
mod linux {
    use std::ptr::NonNull;
    use std::sync::{Arc, Mutex, PoisonError};

    use crate::cpu::mapping::{HUGE_PAGE, Mapping};
    use crate::cpu::memory::{ALIGNMENT, AlignedVec, Plain};
    use crate::error::KernelError;

    /// Addresses that are asked for at once. They cost nothing until they are written to.
    const STRETCH: usize = 1 << 30;

    /// Where weights go: behind one another, so that only the last of many ends within a huge page. The memory goes back to the
    /// system when all that lie in it are dropped; single ones leave a hole.
    pub(in crate::cpu) struct WeightMemory {
        stretch: Mutex<Option<Stretch>>,
    }

    struct Stretch {
        mapping: Arc<Mapping>,
        next: NonNull<u8>,
        free: usize,
    }

    // SAFETY: the address is one of the mapping's, which may move between threads.
    unsafe impl Send for Stretch {}

    impl Stretch {
        fn new(bytes: usize) -> Option<Self> {
            let mapping = Mapping::anonymous(bytes.checked_add(HUGE_PAGE)?)?;
            let next = mapping.aligned(0);
            mapping.advise_huge(next, bytes);
            Some(Self { mapping: Arc::new(mapping), next, free: bytes })
        }
    }

    impl WeightMemory {
        pub(in crate::cpu) const fn new() -> Self {
            Self { stretch: Mutex::new(None) }
        }

        /// As [`AlignedVec::zeroed`].
        pub(in crate::cpu) fn zeroed<T: Plain>(&self, what: &str, length: usize) -> Result<AlignedVec<T>, KernelError> {
            let out_of_memory =
                || KernelError::OutOfMemory { what: what.to_owned(), bytes: length.saturating_mul(size_of::<T>()) };
            let bytes = length.checked_mul(size_of::<T>()).ok_or_else(out_of_memory)?;
            if bytes == 0 {
                return Ok(AlignedVec::empty());
            }
            let room = bytes.checked_next_multiple_of(ALIGNMENT).ok_or_else(out_of_memory)?;
            let mut current = self.stretch.lock().unwrap_or_else(PoisonError::into_inner);
            if current.as_ref().is_none_or(|stretch| stretch.free < room) {
                // Where addresses are limited (`ulimit -v`) what is needed now may still be there.
                let pages = room.checked_next_multiple_of(HUGE_PAGE).ok_or_else(out_of_memory)?;
                let stretch = Stretch::new(pages.max(STRETCH)).or_else(|| Stretch::new(pages));
                *current = Some(stretch.ok_or_else(out_of_memory)?);
            }
            let stretch = current.as_mut().ok_or_else(out_of_memory)?;
            let first = stretch.next;
            // SAFETY: so many bytes are left of the mapping.
            stretch.next = unsafe { first.add(room) };
            stretch.free -= room;
            // SAFETY: nobody else was given these bytes, they are zero, and aligned as the stretch and all rooms are.
            Ok(unsafe { AlignedVec::shared(Arc::clone(&stretch.mapping), first.cast(), length) })
        }
    }

    #[cfg(test)]
    mod tests {
        use super::{ALIGNMENT, HUGE_PAGE, STRETCH, WeightMemory};

        #[test]
        fn weights_lie_behind_one_another_and_are_their_own() {
            let memory = WeightMemory::new();
            let mut all: Vec<_> = [1, 63, 64, 65, 4096, 700_000, 3 << 20]
                .map(|length| memory.zeroed::<u8>("a weight", length).unwrap())
                .into_iter()
                .collect();
            assert_eq!(all[0].as_ptr() as usize % HUGE_PAGE, 0);
            for pair in all.windows(2) {
                let end = pair[0].as_ptr() as usize + pair[0].len();
                assert_eq!(end.next_multiple_of(ALIGNMENT), pair[1].as_ptr() as usize);
            }
            for (index, weight) in all.iter_mut().enumerate() {
                assert!(weight.iter().all(|&byte| byte == 0));
                weight.fill(index as u8 + 1);
            }
            // What is dropped takes nothing from the others, nor does the end of what gave them.
            all.remove(3);
            drop(memory);
            for (weight, value) in all.iter().zip([1, 2, 3, 5, 6, 7]) {
                assert!(weight.iter().all(|&byte| byte == value));
            }
        }

        #[test]
        fn more_than_a_stretch_is_a_stretch_of_its_own() {
            let memory = WeightMemory::new();
            let small = memory.zeroed::<u8>("a weight", 100).unwrap();
            let mut large = memory.zeroed::<u32>("a weight", STRETCH / 4 + 1).unwrap();
            *large.last_mut().unwrap() = 7;
            let next = memory.zeroed::<u8>("a weight", HUGE_PAGE).unwrap();
            assert_eq!((small.len(), large.len(), next[0]), (100, STRETCH / 4 + 1, 0));
            assert!(memory.zeroed::<u32>("none", 0).unwrap().is_empty());
            let error = memory.zeroed::<u32>("the thing", usize::MAX / 2).unwrap_err().to_string();
            assert!(error.contains("the thing"), "{error}");
        }
    }
}

#[cfg(target_os = "linux")]
pub(super) use linux::WeightMemory;

/// Where there are no mappings: each by itself.
#[cfg(not(target_os = "linux"))]
pub(super) struct WeightMemory;

#[cfg(not(target_os = "linux"))]
impl WeightMemory {
    pub(super) const fn new() -> Self {
        Self
    }

    /// As [`AlignedVec::zeroed`].
    pub(super) fn zeroed<T: super::memory::Plain>(
        &self,
        what: &str,
        length: usize,
    ) -> Result<super::memory::AlignedVec<T>, crate::error::KernelError> {
        super::memory::AlignedVec::zeroed(what, length)
    }
}
