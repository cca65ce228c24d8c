//! One connection: how long a client may take for each of its parts, encrypted or not.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulConnection, Watcher};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Sleep, timeout};
use tower_service::Service;

use crate::tls::Tls;

/// How long a client may take to send the head of a request, or to keep an idle connection.
const HEAD_PATIENCE: Duration = Duration::from_secs(75);
/// How long a client may take to agree on encryption.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a client may read nothing of what is sent to it.
const READER_PATIENCE: Duration = Duration::from_secs(60);
/// What the first byte of encrypted connections is.
const HANDSHAKE: u8 = 22;
const NOT_ENCRYPTED: &str = "this port speaks HTTPS; ask with https:// in the address\n";

/// Serves a connection until it ends. One that is still agreeing on encryption ends with `stopping`.
pub(crate) async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    watcher: Watcher,
    tls: Option<Arc<Tls>>,
    mut stopping: watch::Receiver<()>,
) {
    // Tokens go out as they come.
    let _ = stream.set_nodelay(true);
    let served = match tls {
        None => watcher.watch(http(Patient::new(stream), peer, router)).await,
        Some(tls) => {
            let agreed = tokio::select! {
                agreed = timeout(HANDSHAKE_PATIENCE, encrypted(&tls, stream)) => agreed,
                // An error: whoever could have sent something is gone, which is the sign.
                _ = stopping.changed() => return,
            };
            match agreed.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(stream) => watcher.watch(http(stream, peer, router)).await,
                Err(error) => {
                    tracing::debug!("no encryption was agreed on with {peer}: {error}");
                    return;
                }
            }
        }
    };
    if let Err(error) = served {
        tracing::debug!("a connection ended: {error}");
    }
}

async fn encrypted(tls: &Tls, mut stream: TcpStream) -> io::Result<impl AsyncRead + AsyncWrite + Unpin + use<>> {
    let mut first = [0];
    if stream.peek(&mut first).await? == 1 && first[0] != HANDSHAKE {
        let length = NOT_ENCRYPTED.len();
        let answer = format!(
            "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\nConnection: \
             close\r\n\r\n{NOT_ENCRYPTED}"
        );
        stream.write_all(answer.as_bytes()).await?;
        return Err(io::Error::other("it was not asked for"));
    }
    tls.accept(Patient::new(stream)).await
}

fn http<S: AsyncRead + AsyncWrite + Unpin + 'static>(
    stream: S,
    peer: SocketAddr,
    router: Router,
) -> impl GracefulConnection<Error = hyper::Error> {
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(ConnectInfo(peer));
        router.clone().call(request.map(axum::body::Body::new))
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE)
        .serve_connection(TokioIo::new(stream), service)
}

/// A stream whose writes fail once nobody has read for a while.
#[derive(Debug)]
struct Patient<S> {
    stream: S,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    fn new(stream: S) -> Self {
        Self { stream, waiting: None }
    }

    fn watched<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let timer = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(READER_PATIENCE)));
        timer.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watched(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watched(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watched(shut, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watched(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::body::{Body, Bytes};
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, DuplexStream};
    use tokio::time::Instant;

    use super::*;

    const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1);

    /// A connection's other end, over a pipe that holds few bytes.
    fn connect() -> (DuplexStream, tokio::task::JoinHandle<Result<(), hyper::Error>>) {
        let endless = || futures_util::stream::repeat_with(|| Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 1000])));
        let router = Router::new()
            .route("/", get(async || "there"))
            .route("/endless", get(async move || Body::from_stream(endless())));
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        (ours, tokio::spawn(http(Patient::new(theirs), PEER, router)))
    }

    // Time passes when nothing else happens.
    #[tokio::test(start_paused = true)]
    async fn a_head_that_never_ends_is_waited_for_only_so_long() {
        for sent in ["", "GET / HTTP/1.1\r\nHost: x\r\n", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"] {
            let (mut ours, served) = connect();
            let start = Instant::now();
            let mut read = Vec::new();
            ours.write_all(sent.as_bytes()).await.expect("a connection");
            ours.read_to_end(&mut read).await.expect("an end");
            assert!(start.elapsed() >= HEAD_PATIENCE && start.elapsed() < 2 * HEAD_PATIENCE, "{sent:?}");
            assert_eq!(sent.ends_with("\r\n\r\n"), String::from_utf8_lossy(&read).ends_with("there"), "{sent:?}");
            drop(served.await.expect("no panic"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drop_a_minute_makes_no_head() {
        let (mut ours, served) = connect();
        let start = Instant::now();
        while ours.write_all(b"X").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(20)).await;
            assert!(start.elapsed() < 2 * HEAD_PATIENCE, "it goes on");
        }
        assert!(served.await.expect("no panic").is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn who_never_reads_is_left() {
        let (mut ours, served) = connect();
        let start = Instant::now();
        ours.write_all(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("a connection");
        assert!(served.await.expect("no panic").is_err());
        assert!(start.elapsed() >= READER_PATIENCE && start.elapsed() < 2 * READER_PATIENCE);
    }

    #[tokio::test(start_paused = true)]
    async fn who_reads_slowly_is_served() {
        let (mut ours, served) = connect();
        ours.write_all(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("a connection");
        let start = Instant::now();
        let mut buffer = vec![0; 1 << 16];
        while start.elapsed() < 4 * READER_PATIENCE {
            assert!(ours.read(&mut buffer).await.expect("an answer") > 0);
            tokio::time::sleep(READER_PATIENCE / 2).await;
        }
        assert!(!served.is_finished());
    }
}
