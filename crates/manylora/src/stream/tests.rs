//! The two ends of a stream without an engine: nobody who waits misses news, and nobody is woken twice for the same.

use std::pin::pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;
use std::thread::{self, ThreadId};

use futures_core::Stream;

use super::*;

/// A waker that notes the threads it was called on.
#[derive(Default)]
pub(crate) struct Noting(Mutex<Vec<ThreadId>>);

impl Wake for Noting {
    fn wake(self: Arc<Self>) {
        self.0.lock().expect("no panic").push(thread::current().id());
    }
}

impl Noting {
    pub(crate) fn threads(&self) -> Vec<ThreadId> {
        self.0.lock().expect("no panic").clone()
    }

    fn count(&self) -> usize {
        self.threads().len()
    }
}

/// Both ends of a stream of one sample, and how often its drop was told.
pub(crate) fn ends() -> (StreamSender, RequestStream, Arc<AtomicUsize>) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let told = Arc::clone(&dropped);
    let (sender, stream) = channel(1, Vec::new(), [5].into(), Vec::new(), move || {
        told.fetch_add(1, Ordering::Relaxed);
    });
    (sender, stream, dropped)
}

/// Polls with a waker; the tokens that were there.
pub(crate) fn poll(stream: &mut RequestStream, waker: &Arc<Noting>) -> Poll<Option<Result<Vec<u32>, String>>> {
    let waker = Arc::clone(waker).into();
    let polled = pin!(stream).poll_next(&mut Context::from_waker(&waker));
    polled.map(|news| news.map(|news| news.map(|delta| delta.token_ids).map_err(|error| error.to_string())))
}

fn token(token: u32) -> Poll<Option<Result<Vec<u32>, String>>> {
    Poll::Ready(Some(Ok(vec![token])))
}

fn error() -> EngineError {
    EngineError::Stopped("a reason".to_owned())
}

#[test]
fn who_waits_is_to_be_woken_once() {
    let (sender, mut stream, _) = ends();
    let waker = Arc::new(Noting::default());
    assert!(sender.send_token(0, 1, 0).is_none(), "nobody waits yet");
    assert_eq!(poll(&mut stream, &waker), token(1));
    assert_eq!(poll(&mut stream, &waker), Poll::Pending);
    let sleeper = sender.send_token(0, 2, 0).expect("somebody waits");
    assert!(sender.send_token(0, 3, 0).is_none(), "it is to be woken anyway");
    sleeper.wake();
    assert_eq!(waker.count(), 1);
    assert_eq!(poll(&mut stream, &waker), token(2));
    assert_eq!(poll(&mut stream, &waker), token(3));
    assert_eq!(poll(&mut stream, &waker), Poll::Pending);
    sender.send_token(0, 4, 0).expect("it waits again").wake();
    assert_eq!((waker.count(), poll(&mut stream, &waker)), (2, token(4)));
}

#[test]
fn who_is_woken_late_or_in_another_order_misses_nothing() {
    let (sender, mut stream, _) = ends();
    let waker = Arc::new(Noting::default());
    assert_eq!(poll(&mut stream, &waker), Poll::Pending);
    let first = sender.send_token(0, 1, 0).expect("somebody waits");
    // It looks by itself, before it is woken, and waits again.
    assert_eq!(poll(&mut stream, &waker), token(1));
    assert_eq!(poll(&mut stream, &waker), Poll::Pending);
    let second = sender.send_token(0, 2, 0).expect("somebody waits");
    second.wake();
    first.wake();
    assert_eq!((waker.count(), poll(&mut stream, &waker)), (2, token(2)));
    assert_eq!(poll(&mut stream, &waker), Poll::Pending);
}

#[test]
fn a_thread_that_waits_is_woken() {
    let (sender, mut stream, _) = ends();
    // Who has given up waiting is not to be woken.
    assert!(stream.next_timeout(Duration::ZERO).is_err());
    assert!(sender.send_token(0, 1, 0).is_none());
    thread::scope(|scope| {
        let reader = scope.spawn(|| [stream.next_delta(), stream.next_delta()]);
        while !sender.0.lock().is_awaited {
            thread::yield_now();
        }
        sender.send_token(0, 2, 0).expect("a thread waits").wake();
        let read = reader.join().expect("no panic").map(|news| news.expect("news").expect("no error").token_ids);
        assert_eq!(read, [vec![1], vec![2]]);
    });
}

#[test]
fn an_error_comes_after_what_was_sent_and_ends_it() {
    let (sender, mut stream, dropped) = ends();
    let waker = Arc::new(Noting::default());
    assert_eq!(poll(&mut stream, &waker), Poll::Pending);
    let sleepers = [sender.send_token(0, 1, 0), sender.send_token(0, 2, 0)];
    sender.fail(error());
    assert!(sender.send_token(0, 3, 0).is_none(), "nothing comes after an error");
    sender.fail(EngineError::Stopped("another".to_owned()));
    sleepers.into_iter().flatten().for_each(Sleeper::wake);
    assert_eq!([poll(&mut stream, &waker), poll(&mut stream, &waker)], [token(1), token(2)]);
    let Poll::Ready(Some(Err(told))) = poll(&mut stream, &waker) else { panic!("no error") };
    assert!(told.contains("a reason"), "{told}");
    assert_eq!(poll(&mut stream, &waker), Poll::Ready(None));
    assert_eq!(waker.count(), 1);
    // Others of its samples may still run.
    drop(stream);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
}

#[test]
fn who_has_gone_may_still_be_woken() {
    let (sender, mut stream, dropped) = ends();
    let waker = Arc::new(Noting::default());
    assert_eq!(poll(&mut stream, &waker), Poll::Pending);
    let sleeper = sender.send_token(0, 1, 0).expect("somebody waits");
    drop(stream);
    sleeper.wake();
    assert!(sender.send_token(0, 2, 0).is_none());
    sender.fail(error());
    assert_eq!((waker.count(), dropped.load(Ordering::Relaxed)), (1, 1));
}
