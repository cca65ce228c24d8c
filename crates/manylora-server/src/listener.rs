//! The port: accepting connections, and an orderly end.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use manylora::EngineHandle;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::app::App;
use crate::config::ServerConfig;
use crate::connection;
use crate::error::ServerError;
use crate::keys::ApiKey;
use crate::metrics;
use crate::routes::routes;
use crate::tls::Tls;

/// How often to look whether the engine is still there.
const LOOK_AT_ENGINE: Duration = Duration::from_millis(250);
/// How long to wait before accepting again when the system has no descriptor left.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// Changes a server that runs.
#[derive(Clone, Debug)]
pub struct Control {
    app: Arc<App>,
}

impl Control {
    /// Takes `keys` in place of [`ServerConfig::keys`]; if one is wrong nothing changes. Requests that run go on.
    pub fn replace_keys(&self, keys: Vec<ApiKey>) -> Result<(), ServerError> {
        self.app.replace_keys(keys)
    }
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<Arc<Tls>>,
}

impl Server {
    /// Binds the port. Requests are answered once [`Self::run`] runs.
    pub async fn bind(engine: EngineHandle, config: ServerConfig) -> Result<Self, ServerError> {
        let (host, port) = (config.host.clone(), config.port);
        let bound = tokio::task::spawn_blocking(move || bind(&host, port)).await;
        let listener = bound.map_err(|error| ServerError::Io { what: "binding a port", source: error.into() })??;
        Self::on(listener, engine, config)
    }

    /// A server on a port that is bound already. Call it where a tokio runtime is at hand.
    pub fn on(
        listener: std::net::TcpListener,
        engine: EngineHandle,
        config: ServerConfig,
    ) -> Result<Self, ServerError> {
        let tls = Tls::open(&config.tls)?.map(Arc::new);
        let prepared = || {
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok((TcpListener::from_std(listener)?, address))
        };
        let (listener, address) =
            prepared().map_err(|source| ServerError::Io { what: "preparing the port", source })?;
        // Who may manage adapters without a key depends on it.
        let app = App::new(engine, config, Some(address.ip()))?;
        Ok(Self { app, listener, address, tls })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Lines that whoever starts a server should see.
    pub fn notes(&self) -> Vec<String> {
        let app = &self.app;
        let mut notes = Vec::new();
        if app.engine.config().enable_lora {
            let ranks = app.engine.list_adapters().into_iter().map(|info| info.rank());
            let highest = match ranks.max() {
                None => "no adapter is registered yet".to_owned(),
                Some(0) => "no adapter has been read yet".to_owned(),
                Some(rank) => format!("highest registered rank {rank}"),
            };
            let most = app.engine.config().max_lora_rank;
            notes.push(format!("max_lora_rank={most}: a limit, reserves 0 B; {highest}"));
        }
        if app.config.allow_runtime_lora_updating {
            if let Some(folder) = app.lora_root.folder() {
                notes.push(format!("adapters can be loaded over HTTP from {}", folder.display()));
            }
            if app.keys.loopback_rule {
                notes.push(
                    "managing them needs no key from this machine; a proxy on this host needs --admin-api-key"
                        .to_owned(),
                );
            }
            if let Some(key) = &app.keys.generated {
                notes.push(format!(
                    "managing them needs this admin key, made for this run: {key}\n  curl -X POST {}://{}/v1/load_lora_adapter -H \
                     'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d '{{\"lora_name\": \"NAME\", \
                     \"lora_path\": \"FOLDER\"}}'",
                    self.scheme(),
                    self.address
                ));
            }
        }
        notes
    }

    /// What changes a server that runs.
    pub fn control(&self) -> Control {
        Control { app: Arc::clone(&self.app) }
    }

    /// Answers requests until `stop` resolves, then takes no new ones and waits for those that run, up to
    /// `shutdown_timeout`. Connections end with this, also where it is dropped.
    ///
    /// # Errors
    ///
    /// The engine has ended by itself, so that nothing is left to wait for.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), ServerError> {
        let graceful = GracefulShutdown::new();
        let mut connections = JoinSet::new();
        let router = routes(&self.app);
        let mut reporter = JoinSet::new();
        if let Some(every) = self.app.config.log_stats_interval {
            reporter.spawn(metrics::report(Arc::clone(&self.app), every));
        }
        let (running, stopping) = watch::channel(());
        let mut stop = std::pin::pin!(stop);
        let mut refreshed = std::pin::pin!(async {
            match &self.tls {
                Some(tls) => tls.follow().await,
                None => std::future::pending().await,
            }
        });
        let mut looks = tokio::time::interval(LOOK_AT_ENGINE);
        let mut ended = Ok(());
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = &mut stop => break,
                never = &mut refreshed => match never {},
                Some(_) = connections.join_next() => continue,
                _ = looks.tick() => match self.app.engine.check_health() {
                    Ok(()) => continue,
                    Err(error) => {
                        tracing::error!("{error}: nothing can be served any more");
                        ended = Err(ServerError::EngineStopped(error));
                        break;
                    }
                }
            };
            match accepted {
                Ok((stream, peer)) => {
                    let (router, tls) = (router.clone(), self.tls.clone());
                    let watcher = graceful.watcher();
                    connections.spawn(connection::serve(stream, peer, router, watcher, tls, stopping.clone()));
                }
                Err(error) => {
                    // A connection that ended before it was taken is none; without descriptors, wait for some.
                    if !matches!(
                        error.kind(),
                        std::io::ErrorKind::ConnectionAborted | std::io::ErrorKind::ConnectionReset
                    ) {
                        tracing::warn!("a connection could not be accepted: {error}");
                        tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
                    }
                }
            }
        }
        self.app.drain();
        drop((running, reporter, self.listener));
        let (running, timeout) = (self.app.load(), self.app.config.shutdown_timeout);
        if running > 0 {
            tracing::info!("shutting down: waiting for {running} requests, up to {} s", timeout.as_secs_f64());
        }
        if tokio::time::timeout(timeout, graceful.shutdown()).await.is_err() {
            tracing::warn!("requests that still ran after {} s were ended", timeout.as_secs_f64());
        }
        connections.shutdown().await;
        ended
    }
}

/// Binds a port, before anything that takes long: port 0 is any free one.
pub fn bind(host: &str, port: u16) -> Result<std::net::TcpListener, ServerError> {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    std::net::TcpListener::bind((plain, port))
        .map_err(|source| ServerError::Bind { address: format!("{host}:{port}"), source })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use manylora::{Device, Engine, EngineConfig};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn engine() -> Engine {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama/base");
        Engine::start(EngineConfig {
            device: Device::Cpu,
            kv_cache_memory_bytes: Some(32 << 20),
            num_threads: Some(1),
            ..EngineConfig::new(base)
        })
        .expect("an engine")
    }

    async fn server(engine: &Engine) -> Server {
        let config = ServerConfig { port: 0, shutdown_timeout: Duration::ZERO, ..ServerConfig::default() };
        Server::bind(engine.handle(), config).await.expect("a server")
    }

    /// A stream that has begun and takes long.
    async fn long_stream(address: SocketAddr) -> TcpStream {
        let prompts = vec!["[5, 40, 99]"; 64].join(", ");
        let body = format!(r#"{{"prompt": [{prompts}], "max_tokens": 500, "ignore_eos": true, "stream": true}}"#);
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: ";
        stream.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).await.expect("a request");
        let mut beginning = [0; 12];
        stream.read_exact(&mut beginning).await.expect("an answer");
        assert_eq!(&beginning, b"HTTP/1.1 200");
        stream
    }

    /// It was cut off, and what made it is gone.
    async fn ends_early(mut stream: TcpStream, engine: &Engine) {
        let mut rest = Vec::new();
        // A connection that is closed with something unread is an error.
        let _ = timeout(SOON, stream.read_to_end(&mut rest)).await.expect("an end");
        assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
        let idle = async {
            while engine.handle().stats().expect("an engine").core.running > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(SOON, idle).await.expect("nothing that runs on");
    }

    #[tokio::test]
    async fn connections_end_with_the_server() {
        let engine = engine();
        let server = server(&engine).await;
        let (stop, stopped) = oneshot::channel::<()>();
        let address = server.address();
        let running = tokio::spawn(server.run(async { drop(stopped.await) }));
        let stream = long_stream(address).await;
        stop.send(()).expect("a server");
        timeout(SOON, running).await.expect("an end").expect("no panic").expect("an engine");
        ends_early(stream, &engine).await;
    }

    #[tokio::test]
    async fn connections_end_with_a_server_that_is_dropped() {
        let engine = engine();
        let server = server(&engine).await;
        let address = server.address();
        let running = tokio::spawn(server.run(std::future::pending()));
        let stream = long_stream(address).await;
        running.abort();
        ends_early(stream, &engine).await;
    }

    #[tokio::test]
    async fn a_server_ends_with_its_engine() {
        let engine = engine();
        let server = server(&engine).await;
        let running = tokio::spawn(server.run(std::future::pending()));
        tokio::task::spawn_blocking(move || drop(engine)).await.expect("an end");
        let ended = timeout(SOON, running).await.expect("an end").expect("no panic");
        assert!(matches!(ended, Err(ServerError::EngineStopped(_))), "{ended:?}");
    }
}
