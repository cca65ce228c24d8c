//! What threads meet on: the standard library's, or in tests under `--cfg loom` that of a model checker, which takes
//! small teams through the orders in which their threads may act, and through the stale values that they may see.

#[cfg(all(loom, test))]
pub(super) use self::model::{AtomicBool, AtomicU32, Condvar, Mutex, UnsafeCell, caught, fence_of_model, spin_loop};
#[cfg(not(all(loom, test)))]
pub(super) use self::real::{AtomicBool, AtomicU32, UnsafeCell, caught, fence_of_model, spin_loop};
#[cfg(not(any(target_os = "linux", all(loom, test))))]
pub(super) use std::sync::{Condvar, Mutex};

#[cfg(not(all(loom, test)))]
mod real {
    pub(in super::super) use std::hint::spin_loop;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    pub(in super::super) use std::sync::atomic::{AtomicBool, AtomicU32};
    use std::thread::Result;

    /// The standard cell, accessed as the checker's is.
    pub(in super::super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(in super::super) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        pub(in super::super) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        pub(in super::super) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }

    /// Calls a part, whose panic is the caller's of the region.
    pub(in super::super) fn caught(part: impl FnOnce()) -> Result<()> {
        catch_unwind(AssertUnwindSafe(part))
    }

    pub(in super::super) const fn fence_of_model() {}
}

#[cfg(all(loom, test))]
mod model {
    use std::thread::Result;

    pub(in super::super) use loom::cell::UnsafeCell;
    pub(in super::super) use loom::hint::spin_loop;
    pub(in super::super) use loom::sync::atomic::{AtomicBool, AtomicU32};
    use loom::sync::atomic::{Ordering, fence};
    pub(in super::super) use loom::sync::{Condvar, Mutex};

    /// Calls a part, whose panic is a failed check: it fails the model.
    pub(in super::super) fn caught(part: impl FnOnce()) -> Result<()> {
        part();
        Ok(())
    }

    /// Stands between two sequentially consistent accesses, which the checker takes for no more than acquiring and
    /// releasing ones.
    pub(in super::super) fn fence_of_model() {
        fence(Ordering::SeqCst);
    }
}
