//! The engine's side of all live requests. A step looks each of its sequences up once; from there on they are found by
//! place, without hashing, however many others wait.

use std::collections::HashMap;

use manylora_core::RequestId;

use super::running::RunningSequence;

/// Where a sequence is, until it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(u32);

impl Place {
    /// Nobody's.
    const NONE: Self = Self(u32::MAX);
}

/// The table. Sequences are boxed: growing with what waits moves pointers, not them.
#[derive(Default)]
pub(crate) struct Sequences {
    slots: Vec<Option<Box<RunningSequence>>>,
    vacant: Vec<u32>,
    by_id: HashMap<RequestId, Place>,
}

impl Sequences {
    /// Adds a sequence. Its id must be new.
    pub(crate) fn insert(&mut self, id: RequestId, sequence: RunningSequence) {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.slots[slot as usize] = Some(Box::new(sequence));
        self.by_id.insert(id, Place(slot));
    }

    /// Takes a sequence out.
    pub(crate) fn remove(&mut self, id: RequestId) -> Option<Box<RunningSequence>> {
        let Place(slot) = self.by_id.remove(&id)?;
        self.vacant.push(slot);
        self.slots[slot as usize].take()
    }

    /// Where a sequence is; a place where none is found if it is not there.
    pub(crate) fn place(&self, id: RequestId) -> Place {
        self.by_id.get(&id).copied().unwrap_or(Place::NONE)
    }

    /// The sequence at a place.
    pub(crate) fn at(&self, place: Place) -> Option<&RunningSequence> {
        self.slots.get(place.0 as usize)?.as_deref()
    }

    /// As [`Self::at`], to change it.
    pub(crate) fn at_mut(&mut self, place: Place) -> Option<&mut RunningSequence> {
        self.slots.get_mut(place.0 as usize)?.as_deref_mut()
    }

    /// Takes a sequence to work on it elsewhere; its place stays its own until [`Self::put_back`].
    pub(crate) fn take(&mut self, place: Place) -> Option<Box<RunningSequence>> {
        self.slots.get_mut(place.0 as usize)?.take()
    }

    /// See [`Self::take`].
    pub(crate) fn put_back(&mut self, place: Place, sequence: Box<RunningSequence>) {
        if let Some(slot) = self.slots.get_mut(place.0 as usize) {
            *slot = Some(sequence);
        }
    }

    /// Takes all out.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Box<RunningSequence>> {
        let Self { slots, .. } = std::mem::take(self);
        slots.into_iter().flatten()
    }
}
