//! The port: accepting connections, and an orderly end.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use manylora::EngineHandle;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::app::App;
use crate::config::ServerConfig;
use crate::connection;
use crate::error::ServerError;
use crate::keys::ApiKey;
use crate::metrics;
use crate::routes::routes;
use crate::tls::Tls;

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
        let app = App::new(engine, config)?;
        let prepared = || {
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok((TcpListener::from_std(listener)?, address))
        };
        let (listener, address) =
            prepared().map_err(|source| ServerError::Io { what: "preparing the port", source })?;
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
    /// `shutdown_timeout`.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let graceful = GracefulShutdown::new();
        let router = routes(&self.app);
        let interval = self.app.config.log_stats_interval;
        let reporter = interval.map(|every| tokio::spawn(metrics::report(Arc::clone(&self.app), every)));
        let (running, stopping) = watch::channel(());
        let mut stop = std::pin::pin!(stop);
        let mut refreshed = std::pin::pin!(async {
            match &self.tls {
                Some(tls) => tls.follow().await,
                None => std::future::pending().await,
            }
        });
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = &mut stop => break,
                never = &mut refreshed => match never {},
            };
            match accepted {
                Ok((stream, peer)) => {
                    let (router, tls) = (router.clone(), self.tls.clone());
                    let watcher = graceful.watcher();
                    tokio::spawn(connection::serve(stream, peer, router, watcher, tls, stopping.clone()));
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
        if let Some(reporter) = reporter {
            reporter.abort();
        }
        drop(running);
        drop(self.listener);
        let (running, timeout) = (self.app.load(), self.app.config.shutdown_timeout);
        if running > 0 {
            tracing::info!("shutting down: waiting for {running} requests, up to {} s", timeout.as_secs_f64());
        }
        if tokio::time::timeout(timeout, graceful.shutdown()).await.is_err() {
            tracing::warn!("requests that still ran after {} s were ended", timeout.as_secs_f64());
        }
    }
}

/// Binds a port, before anything that takes long: port 0 is any free one.
pub fn bind(host: &str, port: u16) -> Result<std::net::TcpListener, ServerError> {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    std::net::TcpListener::bind((plain, port))
        .map_err(|source| ServerError::Bind { address: format!("{host}:{port}"), source })
}
