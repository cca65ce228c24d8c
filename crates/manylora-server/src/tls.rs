//! TLS: a certificate and its key from PEM files, perhaps certificates of clients, and the same files read again when they
//! change.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, InconsistentKeys, RootCertStore};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::config::TlsConfig;
use crate::error::ServerError;

/// How often files are looked at that may change.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What connections are encrypted with.
#[derive(Debug)]
pub(crate) struct Tls {
    files: TlsConfig,
    current: RwLock<Current>,
}

#[derive(Clone, Debug)]
struct Current {
    read: Contents,
    settings: Arc<rustls::ServerConfig>,
}

/// The files' bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Contents {
    certificate: Vec<u8>,
    /// None = it is in the certificate's file.
    key: Option<Vec<u8>>,
    authorities: Option<Vec<u8>>,
}

fn wrong(flag: &str, file: &Path, reason: impl std::fmt::Display) -> ServerError {
    ServerError::InvalidSetting(format!("{flag} `{}` cannot be used: {reason}", file.display()))
}

fn read(flag: &str, file: &Path) -> Result<Vec<u8>, ServerError> {
    std::fs::read(file).map_err(|error| wrong(flag, file, error))
}

impl Contents {
    fn read(files: &TlsConfig, certificate: &Path) -> Result<Self, ServerError> {
        let optional =
            |flag, file: &Option<std::path::PathBuf>| file.as_deref().map(|file| read(flag, file)).transpose();
        Ok(Self {
            certificate: read("ssl_certfile", certificate)?,
            key: optional("ssl_keyfile", &files.keyfile)?,
            authorities: optional("ssl_ca_certs", &files.ca_certs)?,
        })
    }

    fn settings(&self, files: &TlsConfig, certificate: &Path) -> Result<rustls::ServerConfig, ServerError> {
        let provider = Arc::new(ring::default_provider());
        let chain = certificates("ssl_certfile", certificate, &self.certificate)?;
        let (flag, file, bytes) = match (&files.keyfile, &self.key) {
            (Some(file), Some(bytes)) => ("ssl_keyfile", file.as_path(), bytes),
            _ => ("ssl_certfile", certificate, &self.certificate),
        };
        let key = private_key(flag, file, bytes)?;
        let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong("ssl_certfile", certificate, error))?;
        let builder = match (&files.ca_certs, &self.authorities) {
            (Some(file), Some(bytes)) => builder.with_client_cert_verifier(verifier(files, file, bytes, provider)?),
            _ => builder.with_no_client_auth(),
        };
        let mut settings = builder.with_single_cert(chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => wrong(
                flag,
                file,
                format!("it is not the key of the first certificate in ssl_certfile `{}`", certificate.display()),
            ),
            error => wrong(flag, file, error),
        })?;
        settings.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(settings)
    }
}

fn certificates(flag: &str, file: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, ServerError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    let found = found.map_err(|error| wrong(flag, file, format!("it is not PEM: {error}")))?;
    if found.is_empty() {
        return Err(wrong(flag, file, "there is no PEM certificate in it (-----BEGIN CERTIFICATE-----)"));
    }
    Ok(found)
}

fn private_key(flag: &str, file: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, ServerError> {
    let text = String::from_utf8_lossy(bytes);
    if text.contains("BEGIN ENCRYPTED PRIVATE KEY") || text.contains("Proc-Type: 4,ENCRYPTED") {
        let reason = "the key in it is encrypted; give one without a passphrase (openssl pkey -in KEY -out PLAIN)";
        return Err(wrong(flag, file, reason));
    }
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| match error {
        rustls::pki_types::pem::Error::NoItemsFound => {
            wrong(flag, file, "there is no PEM private key in it (-----BEGIN PRIVATE KEY-----)")
        }
        error => wrong(flag, file, format!("it is not PEM: {error}")),
    })
}

fn verifier(
    files: &TlsConfig,
    file: &Path,
    bytes: &[u8],
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, ServerError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("ssl_ca_certs", file, bytes)? {
        roots.add(certificate).map_err(|error| wrong("ssl_ca_certs", file, error))?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let builder = if files.cert_reqs == 1 { builder.allow_unauthenticated() } else { builder };
    builder.build().map_err(|error| wrong("ssl_ca_certs", file, error))
}

impl Tls {
    /// Reads the files; None where none are given.
    pub(crate) fn open(files: &TlsConfig) -> Result<Option<Self>, ServerError> {
        let refuse = |message: &str| Err(ServerError::InvalidSetting(message.to_owned()));
        let Some(certificate) = &files.certfile else {
            return match files {
                TlsConfig { keyfile: None, ca_certs: None, cert_reqs: 0, refresh: false, .. } => Ok(None),
                _ => refuse("TLS needs a certificate: give --ssl-certfile too"),
            };
        };
        match (&files.ca_certs, files.cert_reqs) {
            (Some(_), 1 | 2) | (None, 0) => {}
            (Some(_), 0) => {
                return refuse(
                    "ssl_ca_certs is given and ssl_cert_reqs is 0, so that no client would be asked for a certificate; give \
                     --ssl-cert-reqs 2 (1: those without one come in too), or leave out --ssl-ca-certs",
                );
            }
            (None, 1 | 2) => return refuse("ssl_cert_reqs asks clients for certificates: give --ssl-ca-certs too"),
            (_, other) => {
                return refuse(&format!("ssl_cert_reqs must be 0 (none), 1 (optional) or 2 (required), got `{other}`"));
            }
        }
        let read = Contents::read(files, certificate)?;
        let settings = Arc::new(read.settings(files, certificate)?);
        Ok(Some(Self { files: files.clone(), current: RwLock::new(Current { read, settings }) }))
    }

    /// The server's part of a handshake.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        let settings = Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).settings);
        TlsAcceptor::from(settings).accept(stream).await
    }

    /// Takes what the files hold by now; false = nothing new.
    fn look_again(&self) -> Result<bool, ServerError> {
        let Some(certificate) = &self.files.certfile else { return Ok(false) };
        let read = Contents::read(&self.files, certificate)?;
        if self.current.read().unwrap_or_else(PoisonError::into_inner).read == read {
            return Ok(false);
        }
        let settings = Arc::new(read.settings(&self.files, certificate)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Current { read, settings };
        Ok(true)
    }

    /// Follows the files for as long as it is polled, if that is wished. Where they cannot be used, what was read before
    /// stays: somebody may be writing them.
    pub(crate) async fn follow(self: &Arc<Self>) -> Infallible {
        if !self.files.refresh {
            return std::future::pending().await;
        }
        let mut told = String::new();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let tls = Arc::clone(self);
            match tokio::task::spawn_blocking(move || tls.look_again()).await {
                Ok(Ok(true)) => {
                    tracing::info!("new connections are encrypted with the certificate that was put in place");
                    told.clear();
                }
                Ok(Ok(false)) => told.clear(),
                Ok(Err(error)) => {
                    let error = error.to_string();
                    if told != error {
                        tracing::warn!("{error}; the certificate from before stays");
                        told = error;
                    }
                }
                Err(_) => tracing::warn!("looking at the certificate's files failed unexpectedly"),
            }
        }
    }
}
