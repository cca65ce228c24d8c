//! A port before its model is there: whoever asks is told to come back, instead of waiting for an answer that may take minutes.

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::IntoResponse;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::sync::{oneshot, watch};

use crate::body;
use crate::config::ServerConfig;
use crate::connection;
use crate::error::{ApiError, ServerError};
use crate::tls::Tls;

/// How long those who are being told are waited for in the end, and when to accept again after that could not be done.
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
    /// Begins to answer on a port that is bound, encrypted if `config` says so.
    ///
    /// # Errors
    ///
    /// The certificate cannot be used; the system has no descriptor or no thread left.
    pub fn open(listener: TcpListener, config: &ServerConfig) -> Result<Self, ServerError> {
        let failed = |source| ServerError::Io { what: "preparing the port", source };
        let tls = Tls::open(&config.tls)?.map(Arc::new);
        let theirs = listener.try_clone().map_err(failed)?;
        theirs.set_nonblocking(true).map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, stopped) = oneshot::channel();
        let most_bytes = config.max_body_bytes;
        let thread = spawn(move || {
            if let Err(error) = runtime.block_on(answer(theirs, tls, stopped, most_bytes)) {
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

async fn answer(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    mut stopped: oneshot::Receiver<Infallible>,
    most_bytes: usize,
) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let graceful = GracefulShutdown::new();
    let (running, stopping) = watch::channel(());
    let router = Router::new().fallback(async move |request: Request| {
        // A client that still sends would lose the answer.
        body::discard(request.into_body(), most_bytes).await;
        let error = ApiError::unavailable("the model is being loaded; try again in a moment", RETRY_AFTER);
        let mut answer = error.into_response();
        // Who comes back is to find the server.
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        answer
    });
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut stopped => break,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(PATIENCE).await;
            continue;
        };
        let (router, tls, watcher) = (router.clone(), tls.clone(), graceful.watcher());
        tokio::spawn(connection::serve(stream, peer, router, watcher, tls, stopping.clone()));
    }
    drop((running, listener));
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
        let room = WaitingRoom::open(TcpListener::bind("127.0.0.1:0").unwrap(), &ServerConfig::default()).unwrap();
        let address = room.listener.local_addr().unwrap();
        // One that says nothing holds nobody up.
        let _silent = TcpStream::connect(address).unwrap();
        for _ in 0..3 {
            let told = asked(address);
            assert!(told.starts_with("HTTP/1.1 503"), "{told}");
            assert!(told.contains("retry-after: 5") && told.contains("connection: close"), "{told}");
        }
        // Nor is the answer lost where a body comes with the question, and goes on for long.
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", 8 << 20).unwrap();
        stream.write_all(&vec![b' '; 8 << 20]).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 503"), "{text}");
        let listener = room.close();
        listener.set_nonblocking(false).unwrap();
        let waiting = TcpStream::connect(address).unwrap();
        assert_eq!(listener.accept().unwrap().1, waiting.local_addr().unwrap());
    }
}
