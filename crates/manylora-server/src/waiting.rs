//! A port before its model is there: whoever asks is told to come back, instead of waiting for an answer that may take minutes.

use std::convert::Infallible;
use std::net::TcpListener;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use axum::response::IntoResponse;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::sync::oneshot;

use crate::error::{ApiError, ServerError};

/// How long a client may take to say what it wants, and how long those that are being told are waited for in the end.
const PATIENCE: Duration = Duration::from_secs(1);
/// When to ask again, in seconds.
const RETRY_AFTER: u32 = 5;

/// Answers every request on a port with 503 until it is closed, on a thread of its own. Dropping it closes it.
#[derive(Debug)]
pub struct WaitingRoom {
    listener: TcpListener,
    /// Dropping it ends the thread.
    stop: oneshot::Sender<Infallible>,
    thread: JoinHandle<()>,
}

impl WaitingRoom {
    /// Begins to answer on a port that is bound.
    ///
    /// # Errors
    ///
    /// The system has no descriptor or no thread left.
    pub fn open(listener: TcpListener) -> Result<Self, ServerError> {
        let failed = |source| ServerError::Io { what: "preparing the port", source };
        let theirs = listener.try_clone().map_err(failed)?;
        theirs.set_nonblocking(true).map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, stopped) = oneshot::channel();
        let thread = spawn(move || {
            if let Err(error) = runtime.block_on(answer(theirs, stopped)) {
                tracing::warn!("the port cannot be answered on while the model loads: {error}");
            }
        });
        Ok(Self { listener, stop, thread })
    }

    /// Ends it and gives the port back, with those who have come since in its queue.
    pub fn close(self) -> TcpListener {
        drop(self.stop);
        // An error is a panic, which was told when it happened.
        let _ = self.thread.join();
        self.listener
    }
}

async fn answer(listener: TcpListener, mut stopped: oneshot::Receiver<Infallible>) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut stopped => break,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(PATIENCE).await;
            continue;
        };
        let service = service_fn(|_| async {
            let error = ApiError::unavailable("the model is being loaded; try again in a moment", RETRY_AFTER);
            Ok::<_, Infallible>(error.into_response())
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(PATIENCE)
            // Who comes back is to find the server.
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(graceful.watch(connection));
    }
    drop(listener);
    // What is not told by then sees its connection end.
    let _ = tokio::time::timeout(PATIENCE, graceful.shutdown()).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    fn asked(address: std::net::SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn everybody_is_told_to_come_back_and_the_port_goes_on() {
        let room = WaitingRoom::open(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        let address = room.listener.local_addr().unwrap();
        // One that says nothing holds nobody up.
        let _silent = TcpStream::connect(address).unwrap();
        for _ in 0..3 {
            let told = asked(address);
            assert!(told.starts_with("HTTP/1.1 503"), "{told}");
            assert!(told.contains("retry-after: 5") && told.contains("connection: close"), "{told}");
        }
        let listener = room.close();
        listener.set_nonblocking(false).unwrap();
        let waiting = TcpStream::connect(address).unwrap();
        assert_eq!(listener.accept().unwrap().1, waiting.local_addr().unwrap());
    }
}
