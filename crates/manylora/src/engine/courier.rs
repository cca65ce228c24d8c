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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};
    use std::task::{Context, Poll, Wake, Waker};
    use std::thread;

    use futures_core::Stream;

    use super::*;
    use crate::stream::tests::{Noting, ends, poll};
    use crate::stream::{RequestStream, StreamSender};

    /// Streams that somebody waits for, each with a waker of its own.
    fn waiting(count: usize) -> Vec<(StreamSender, RequestStream, Arc<Noting>)> {
        let one = |_| {
            let (sender, mut stream, _) = ends();
            let waker = Arc::new(Noting::default());
            assert_eq!(poll(&mut stream, &waker), Poll::Pending);
            (sender, stream, waker)
        };
        (0..count).map(one).collect()
    }

    fn tell(courier: &mut Courier, streams: &[(StreamSender, RequestStream, Arc<Noting>)]) {
        for (sender, ..) in streams {
            courier.add(sender.send_token(0, 1, 0));
        }
        courier.wake();
    }

    fn is_woken_once((_, _, waker): &(StreamSender, RequestStream, Arc<Noting>)) -> bool {
        waker.threads().len() == 1
    }

    /// Somebody who waits with a waker of another kind.
    fn sleeper(waker: &Waker) -> (RequestStream, Option<Sleeper>) {
        let (sender, mut stream, _) = ends();
        assert!(std::pin::pin!(&mut stream).poll_next(&mut Context::from_waker(waker)).is_pending());
        let sleeper = sender.send_token(0, 1, 0);
        (stream, sleeper)
    }

    #[test]
    fn a_few_are_woken_at_once_and_more_elsewhere() {
        let (mut courier, sleepers) = Courier::new();
        let few = waiting(FEW);
        tell(&mut courier, &few);
        let here = thread::current().id();
        assert!(few.iter().all(|(_, _, waker)| waker.threads() == [here]));
        assert!(sleepers.try_recv().is_err());
        let more = waiting(FEW + 1);
        tell(&mut courier, &more);
        assert!(more.iter().all(|(_, _, waker)| waker.threads().is_empty()));
        // It ends after the last ones, once there is no engine.
        drop(courier);
        let elsewhere = thread::spawn(move || run(sleepers));
        let there = elsewhere.thread().id();
        elsewhere.join().expect("no panic");
        assert!(more.iter().all(|(_, _, waker)| waker.threads() == [there]));
    }

    #[test]
    fn without_its_thread_all_are_woken_at_once() {
        let (mut courier, sleepers) = Courier::new();
        drop(sleepers);
        let streams = waiting(FEW + 1);
        tell(&mut courier, &streams);
        assert!(streams.iter().all(is_woken_once));
    }

    #[test]
    fn nobody_waits_for_a_waker_that_waits() {
        struct Waits(Barrier);
        impl Wake for Waits {
            fn wake(self: Arc<Self>) {
                self.0.wait();
            }
        }
        let (mut courier, sleepers) = Courier::new();
        let thread = thread::spawn(move || run(sleepers));
        let waits = Arc::new(Waits(Barrier::new(2)));
        let (_stream, slow) = sleeper(&Arc::clone(&waits).into());
        let streams = waiting(FEW);
        courier.add(slow);
        tell(&mut courier, &streams);
        // It is back while nobody is at the barrier, and may be asked again.
        let others = waiting(FEW + 1);
        tell(&mut courier, &others);
        waits.0.wait();
        drop(courier);
        thread.join().expect("no panic");
        assert!(streams.iter().chain(&others).all(is_woken_once));
    }

    #[test]
    fn a_waker_that_panics_leaves_the_others_to_be_woken() {
        struct Panics;
        impl Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("an executor that is gone");
            }
        }
        let panics = || sleeper(&Arc::new(Panics).into());
        let (mut courier, sleepers) = Courier::new();
        let (few, many) = (waiting(1), waiting(FEW));
        let (_first, bad) = panics();
        courier.add(bad);
        tell(&mut courier, &few);
        assert!(few.iter().all(is_woken_once));
        let (_second, bad) = panics();
        courier.add(bad);
        tell(&mut courier, &many);
        drop(courier);
        thread::spawn(move || run(sleepers)).join().expect("the thread lives");
        assert!(many.iter().all(is_woken_once));
    }
}
