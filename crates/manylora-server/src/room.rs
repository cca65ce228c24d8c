//! Room for what requests take of memory: so much of each kind there is for all of them together, beside a little that each may
//! have. It is given back as soon as what it was for is gone, not when its request has ended.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory that a request has been given; it is given back when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// For bytes of the body, and of what is made of it.
    pub(crate) bytes: Held,
    /// For values of the body's JSON.
    pub(crate) values: Held,
    /// For tokens that the logprobs of its prompts list.
    pub(crate) listed: Held,
}

impl Room {
    /// Whether the request has more of anything than everybody may have.
    pub(crate) fn is_any(&self) -> bool {
        [&self.bytes, &self.values, &self.listed].iter().any(|held| held.0.is_some())
    }

    /// The body's values are gone, and of all its bytes no more than these are kept.
    pub(crate) fn keep(&mut self, bytes: usize) {
        self.values = Held::default();
        self.bytes.reduce(bytes);
    }
}

/// What a request has taken of a store.
#[derive(Debug, Default)]
pub(crate) struct Held(Option<(OwnedSemaphorePermit, Store)>);

impl Held {
    fn steps(&self) -> usize {
        self.0.as_ref().map_or(0, |(permit, _)| permit.num_permits())
    }

    /// Gives back what so much does not need.
    fn reduce(&mut self, needed: usize) {
        let Some((permit, store)) = &mut self.0 else { return };
        let needed = store.steps(needed);
        if needed == 0 {
            self.0 = None;
        } else {
            drop(permit.num_permits().checked_sub(needed).and_then(|spare| permit.split(spare)));
        }
    }
}

/// Something of which there is so much for all requests together, beside a little that each may have.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// In steps.
    left: Arc<Semaphore>,
    step: usize,
    everybodys: usize,
}

impl Store {
    /// Of `all`, who needs more than `everybodys` takes `step` at a time.
    pub(crate) fn new(all: usize, step: usize, everybodys: usize) -> Self {
        Self { left: Arc::new(Semaphore::new((all / step).min(Semaphore::MAX_PERMITS))), step, everybodys }
    }

    /// Steps that so much takes.
    fn steps(&self, wanted: usize) -> usize {
        wanted.saturating_sub(self.everybodys).div_ceil(self.step)
    }

    /// Steps that are left.
    #[cfg(test)]
    pub(crate) fn left(&self) -> usize {
        self.left.available_permits()
    }

    /// Takes what `wanted` needs beyond what everybody and this one has; false if it is not there.
    pub(crate) fn take(&self, held: &mut Held, wanted: usize) -> bool {
        let lacks = self.steps(wanted).saturating_sub(held.steps());
        if lacks == 0 {
            return true;
        }
        let taken =
            u32::try_from(lacks).ok().and_then(|lacks| Arc::clone(&self.left).try_acquire_many_owned(lacks).ok());
        let Some(more) = taken else { return false };
        match &mut held.0 {
            Some((permit, _)) => permit.merge(more),
            None => held.0 = Some((more, self.clone())),
        }
        true
    }

    /// Waits for what `wanted` needs, which must not be more than there is, behind those who came before.
    pub(crate) async fn wait(&self, wanted: usize) -> Held {
        let steps = self.steps(wanted);
        if steps == 0 {
            return Held::default();
        }
        let taken = Arc::clone(&self.left).acquire_many_owned(u32::try_from(steps).unwrap_or(u32::MAX)).await;
        // It is closed by nobody.
        Held(taken.ok().map(|permit| (permit, self.clone())))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn what_is_not_kept_is_given_back() {
        let (bytes, values) = (Store::new(100, 10, 20), Store::new(50, 10, 0));
        let mut room = Room::default();
        assert!(bytes.take(&mut room.bytes, 20) && !room.is_any());
        assert!(bytes.take(&mut room.bytes, 75) && values.take(&mut room.values, 50) && room.is_any());
        assert_eq!((bytes.left(), values.left()), (4, 0));
        // It is not there, and what was taken stays.
        assert!(!bytes.take(&mut room.bytes, 121) && !values.take(&mut Held::default(), 1));
        for (kept, left) in [(200, 4), (75, 4), (41, 7), (60, 7), (20, 10)] {
            room.keep(kept);
            assert_eq!((bytes.left(), values.left()), (left, 5), "{kept}");
        }
        assert!(!room.is_any());
        // What was given back can be taken again, by the same one, too.
        assert!(bytes.take(&mut room.bytes, 120));
        assert_eq!(bytes.left(), 0);
        drop(room);
        assert_eq!(bytes.left(), 10);
    }

    #[tokio::test]
    async fn who_waits_gets_it_when_it_is_there() {
        let store = Store::new(100, 10, 20);
        let first = store.wait(70).await;
        let second = store.wait(80);
        tokio::pin!(second);
        assert!(second.as_mut().now_or_never().is_none());
        assert!(store.wait(20).await.0.is_none(), "what everybody may have");
        drop(first);
        let second = second.await;
        assert_eq!((second.steps(), store.left()), (6, 4));
        drop(second);
        assert_eq!(store.left(), 10);
    }
}
