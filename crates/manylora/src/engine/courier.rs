//! Waking those who read. To wake a reader takes longer than all else that the engine's thread does for a token, and the
//! reader that wakes may want its processor: where many have news, a thread of its own wakes them, while the next step begins.

use std::sync::mpsc::{Receiver, SendError, Sender, channel};

use crate::stream::Sleeper;

/// So many are woken at once, without a thread between: one stream's news take no detour.
const FEW: usize = 4;

/// Those who have news, until they are woken.
pub(crate) struct Courier {
    sleepers: Vec<Sleeper>,
    sender: Sender<Vec<Sleeper>>,
}

impl Courier {
    /// One, and what [`run`] takes.
    pub(crate) fn new() -> (Self, Receiver<Vec<Sleeper>>) {
        let (sender, receiver) = channel();
        (Self { sleepers: Vec::new(), sender }, receiver)
    }

    /// Somebody who waits has news.
    pub(crate) fn add(&mut self, sleeper: Option<Sleeper>) {
        self.sleepers.extend(sleeper);
    }

    /// Has all of them woken.
    pub(crate) fn wake(&mut self) {
        if self.sleepers.len() <= FEW {
            return self.sleepers.drain(..).for_each(Sleeper::wake);
        }
        let room = Vec::with_capacity(self.sleepers.len());
        if let Err(SendError(sleepers)) = self.sender.send(std::mem::replace(&mut self.sleepers, room)) {
            sleepers.into_iter().for_each(Sleeper::wake);
        }
    }
}

/// The courier's thread: until there is no engine.
pub(crate) fn run(sleepers: Receiver<Vec<Sleeper>>) {
    sleepers.into_iter().flatten().for_each(Sleeper::wake);
}
