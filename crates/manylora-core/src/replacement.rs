//! A new version in an old one's place: compare, load, swap.
//!
//! The old registration serves until the new one is resident, then both change roles in one step (promise P7): a pin moves
//! over without being refused for want of a place, the line's head changes, and the old registration is *superseded*
//! ([`crate::shelf`]). There is never a moment without a version, and none with two.
//!
//! # Room
//!
//! The new version takes over the old one's place under `max_cpu_loras`, so a refresh works where every place is taken. Its
//! bytes are needed beside the old one's, because requests finish on the version that they started with. If both can fit
//! (beside what must stay), the old one is not evicted for the new one, which waits for room like any load. If they can
//! never fit, the replacement fails with the numbers while requests hold the old version or it is pinned; if nobody holds
//! it, it is evicted for the new one and read again should a request name it before the swap.
//!
//! # Several at once
//!
//! Replacements of one line are carried out in the order of their events: one that is resident early waits for those before
//! it. Each compares again when its turn comes, so of two that expect the same version the first wins and the second
//! fails, and one that expects nothing replaces whatever serves then.

use crate::control::ControlPlane;
use crate::event::Effect;
use crate::identity::{Digest, RegistrationId};
use crate::memory::Memory;
use crate::shelf::VersionIndex;

/// A replacement under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replacement {
    line: RegistrationId,
    pub(crate) new: RegistrationId,
    expected: Option<Digest>,
}

impl Memory {
    /// The registration whose place `new` takes as soon as it is resident: its turn has come and the swap will succeed.
    fn next_replaced_by(&self, new: RegistrationId) -> Option<RegistrationId> {
        let own = self.replacements.iter().find(|replacement| replacement.new == new)?;
        let first = self.replacements.iter().find(|replacement| replacement.line == own.line)?;
        let next = first.new == new && self.can_swap(own.line, own.expected).is_ok();
        next.then(|| self.shelf.lines.get(&own.line).map(|line| line.head)).flatten()
    }

    /// Whether the head of a line is there to be replaced and is what is expected.
    fn can_swap(&self, line: RegistrationId, expected: Option<Digest>) -> Result<(), String> {
        let head = self.shelf.lines.get(&line).and_then(|line| self.shelf.registrations.get(&line.head));
        let Some(head) = head else {
            return Err("the adapter to replace is not registered any more; register it anew".to_owned());
        };
        if head.unloading {
            return Err("the adapter to replace is being unloaded; register it anew".to_owned());
        }
        let serving = head.version.map(|version| self.shelf.version(version).digest);
        if expected.is_some() && expected != serving {
            let digest = |digest: Option<Digest>| digest.map_or("unread".to_owned(), |digest| digest.to_string());
            return Err(format!(
                "version `{}` was to be replaced and `{}` serves; look again and decide anew",
                digest(expected),
                digest(serving)
            ));
        }
        Ok(())
    }

    /// Places under `max_cpu_loras` that a registration takes when it becomes resident with this version, if it is known.
    pub(crate) fn places_for(&self, id: RegistrationId, version: Option<VersionIndex>) -> usize {
        let superseded = self.shelf.registrations.get(&id).is_some_and(|registration| registration.superseded);
        if superseded && version.is_none_or(|version| self.shelf.version(version).live == 0) {
            return 0;
        }
        let old = self.next_replaced_by(id).and_then(|head| self.shelf.version_of(head));
        let takes_over = old.is_some_and(|old| {
            let old = self.shelf.version(old);
            old.is_resident() && old.live == 1
        });
        usize::from(!takes_over)
    }

    /// The version that must not be evicted for a registration's load: the one that it replaces, if both can be there.
    pub(crate) fn spared_for(&self, id: RegistrationId) -> Option<VersionIndex> {
        let old = self.shelf.version_of(self.next_replaced_by(id)?)?;
        self.check_beside(id, old).is_ok().then_some(old)
    }

    /// Whether a load that is under way counts on the place of this version.
    pub(crate) fn is_awaited(&self, version: VersionIndex) -> bool {
        self.replacements.iter().any(|replacement| {
            let new = self.shelf.registrations.get(&replacement.new);
            new.is_some_and(|new| matches!(new.loading, Some((_, 0))))
                && self.next_replaced_by(replacement.new).and_then(|head| self.shelf.version_of(head)) == Some(version)
        })
    }

    /// Whether a registration can ever be resident beside what must stay and a version that is resident now.
    fn check_beside(&self, new: RegistrationId, old: VersionIndex) -> Result<(), String> {
        let (mut count, mut bytes) = self.shelf.with_fixed(&std::iter::once(new));
        let entry = self.shelf.version(old);
        if entry.is_resident() && !entry.is_fixed() && self.shelf.version_of(new) != Some(old) {
            count += 1;
            bytes = bytes.saturating_add(entry.bytes);
        }
        self.fits(bytes)?;
        // The place of the version that it replaces is enough.
        if self.places_for(new, self.shelf.version_of(new)) > 0 { self.has_places(count) } else { Ok(()) }
    }

    /// Whether what is wanted without a request can ever be resident.
    pub(crate) fn check_wanted(&self, id: RegistrationId) -> Result<(), String> {
        let old = self.next_replaced_by(id).and_then(|head| self.shelf.version_of(head));
        match old {
            Some(old) if self.shelf.version(old).leases > 0 => self.check_beside(id, old),
            Some(_) if self.places_for(id, self.shelf.version_of(id)) == 0 => {
                self.fits(self.shelf.with_fixed(&std::iter::once(id)).1)
            }
            _ => self.can_ever_fit(&std::iter::once(id)),
        }
    }

    /// Gives up what was wanted without a request.
    pub(crate) fn fail_wanted(&mut self, id: RegistrationId, message: String, effects: &mut Vec<Effect>) {
        self.wanted.remove(&id);
        self.shelf.set_pinned(id, false);
        effects.push(Effect::RegistrationFailed { registration: id, message });
        let before = self.replacements.len();
        self.replacements.retain(|replacement| replacement.new != id);
        if self.replacements.len() < before {
            if let Some(registration) = self.shelf.registrations.get_mut(&id) {
                registration.unloading = true;
            }
            // Should somebody use it already, it takes no place while it drains.
            self.shelf.retire(id);
            self.depart(id, effects);
        }
    }

    /// What is to take the place of the line that this registration heads.
    pub(crate) fn replacements_of(&self, head: RegistrationId) -> Vec<RegistrationId> {
        let line = self.shelf.registrations.get(&head).map(|registration| registration.line);
        let heads = line.and_then(|line| self.shelf.lines.get(&line)).is_some_and(|line| line.head == head);
        let all = self.replacements.iter().filter(|replacement| heads && Some(replacement.line) == line);
        all.map(|replacement| replacement.new).collect()
    }
}

impl ControlPlane {
    pub(crate) fn replace(&mut self, old: RegistrationId, new: RegistrationId, expected: Option<Digest>) {
        if !self.is_usable(new) {
            return;
        }
        let shelf = &mut self.memory.shelf;
        let Some(line) = shelf.registrations.get(&old).map(|registration| registration.line) else {
            let message = format!("adapter `{}.{}` is not registered; register it first", old.index, old.generation);
            return self.give_up(new, message);
        };
        if !shelf.join_line(new, old) {
            let message = "a registration can replace another one only before it serves itself; register it anew";
            return self.refuse(new, message.to_owned());
        }
        self.memory.replacements.push(Replacement { line, new, expected });
        if let Err(message) = self.check_replacement(line, new, expected) {
            return self.memory.fail_wanted(new, message, &mut self.effects);
        }
        if !self.memory.shelf.is_resident(new) {
            self.memory.wanted.entry(new).or_default();
        }
        self.swap_ready();
    }

    /// A registration that is nobody's replacement yet goes.
    fn give_up(&mut self, new: RegistrationId, message: String) {
        self.memory.replacements.push(Replacement { line: new, new, expected: None });
        self.memory.fail_wanted(new, message, &mut self.effects);
    }

    fn check_replacement(
        &self,
        line: RegistrationId,
        new: RegistrationId,
        expected: Option<Digest>,
    ) -> Result<(), String> {
        self.memory.can_swap(line, expected)?;
        let shelf = &self.memory.shelf;
        let Some(head) = shelf.lines.get(&line).map(|line| line.head) else { return Ok(()) };
        let more = shelf.bytes_of(new).saturating_sub(shelf.bytes_of(head));
        if more > 0 && shelf.registrations.get(&head).is_some_and(|head| head.pinned) {
            self.pins_leave_room(shelf.fixed_bytes.saturating_add(more), shelf.largest_other(new))?;
        }
        Ok(())
    }

    /// Carries out the replacements whose turn it is and whose new version is resident.
    pub(crate) fn swap_ready(&mut self) {
        let mut position = 0;
        while let Some(&Replacement { line, new, expected }) = self.memory.replacements.get(position) {
            let earlier = self.memory.replacements[..position].iter().any(|replacement| replacement.line == line);
            if earlier || !self.memory.shelf.is_resident(new) {
                position += 1;
                continue;
            }
            if let Err(message) = self.memory.can_swap(line, expected) {
                self.memory.fail_wanted(new, message, &mut self.effects);
            } else {
                self.memory.replacements.remove(position);
                if let Some(old) = self.memory.shelf.supersede(new) {
                    self.effects.push(Effect::Replaced { old, new });
                }
            }
            position = 0;
        }
    }
}
