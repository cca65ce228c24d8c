//! What a server can be told at start. Names and defaults are vLLM's where it has them.

use std::path::PathBuf;
use std::time::Duration;

use crate::auth::Keys;
use crate::error::ServerError;
use crate::keys::ApiKey;
use crate::reasoning::ReasoningFormat;
use crate::resolver::Resolver;
use crate::roots::LoraRoot;
use crate::routes::Routing;
use crate::sources::Sources;
use crate::tls::Tls;
use crate::tools::ToolFormat;

/// Configuration of a [`crate::Server`] or [`crate::router`].
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 = any free one.
    pub port: u16,
    /// Encryption of connections.
    pub tls: TlsConfig,
    /// What pages of other origins may do.
    pub cors: CorsConfig,
    /// Path that a proxy serves this server under; routes are found with and without it.
    pub root_path: String,
    /// Whether `/openapi.json` describes the routes.
    pub describe_routes: bool,
    /// Whether there is a page at `/`, which shows what `/shelf` tells and sends requests.
    pub page: bool,
    /// Names that the base answers to in `model`, the first of which it is called in answers; empty = the model's path.
    pub served_model_names: Vec<String>,
    /// What `/v1/models` says the base was made from; empty = the name that it is served under.
    pub model_root: String,
    /// Keys of which every request but those to `/health`, `/ping`, `/version`, `/load`, `/metrics`, `/openapi.json` and
    /// those for the page's files needs one;
    /// empty = none is needed.
    /// With [`Self::keys`], `/metrics` needs one that is not confined to some adapters, or the admin key.
    pub api_keys: Vec<String>,
    /// Keys with names and limits of their own, beside `api_keys`; they can be replaced while the server runs. None = there are
    /// none, an empty list lets nobody in.
    pub keys: Option<Vec<ApiKey>>,
    /// Key that loading, unloading and pinning need.
    pub admin_api_key: Option<String>,
    /// Whether adapters can be loaded, unloaded and pinned over HTTP at all.
    pub allow_runtime_lora_updating: bool,
    /// Folder that adapters loaded over HTTP must lie in, after links are followed; None = the one that the server was started
    /// in.
    pub lora_root: Option<PathBuf>,
    /// Places elsewhere that adapters loaded over HTTP may be fetched from; None = none.
    pub lora_sources: Option<Sources>,
    /// Folder in which adapters are looked for by name when a request first names them; None = nowhere.
    pub lora_resolve_root: Option<PathBuf>,
    /// Whether sampling defaults come from the model's `generation_config.json`.
    pub use_generation_config: bool,
    /// Whether requests may bring a chat template of their own.
    pub trust_request_chat_template: bool,
    /// How the model writes calls of tools; None = as its chat template says.
    pub tool_format: Option<ToolFormat>,
    /// Whether the template does not see the tools of requests that rule calls out.
    pub exclude_tools_when_tool_choice_none: bool,
    /// How the model marks its reasoning, which answers then have apart; None = it is text like any other.
    pub reasoning_format: Option<ReasoningFormat>,
    /// Most bytes of a request's body. Large bodies may come to twice as many at once, those beyond are answered 503.
    pub max_body_bytes: usize,
    /// Sequences that may wait or run before further requests are answered 503; None = no limit.
    pub max_pending: Option<usize>,
    /// Most adapters that have series of their own among the metrics; those beyond share the series `other`.
    pub max_adapter_series: usize,
    /// Whether there is a line of the log for each request that has ended: its id, adapter and version, tokens and times. Prompts
    /// and answers are never in it.
    pub log_requests: bool,
    /// How often the log says what the engine does, while it does something; None = never.
    pub log_stats_interval: Option<Duration>,
    /// How long what runs may go on after the server was told to stop.
    pub shutdown_timeout: Duration,
}

/// Files of TLS, in PEM format. Without a certificate connections are not encrypted.
#[derive(Clone, Debug, Default)]
pub struct TlsConfig {
    /// The server's certificate, and after it those between it and its authority.
    pub certfile: Option<PathBuf>,
    /// Its key, not encrypted; None = it is in `certfile`.
    pub keyfile: Option<PathBuf>,
    /// Authorities that clients' certificates must come from.
    pub ca_certs: Option<PathBuf>,
    /// Whether clients need certificates, as Python's `ssl` counts: 0 = they are not asked for any, 1 = those that have none
    /// come in too, 2 = they need one.
    pub cert_reqs: u8,
    /// Whether the files are read again when they change.
    pub refresh: bool,
}

/// What browsers let pages of other origins do with the API, the management of adapters excepted.
#[derive(Clone, Debug, Default)]
pub struct CorsConfig {
    /// `SCHEME://HOST[:PORT]`, or `*` for all; empty = none.
    pub origins: Vec<String>,
    /// Methods; None or `*` = all.
    pub methods: Option<Vec<String>>,
    /// Headers of requests; None or `*` = all.
    pub headers: Option<Vec<String>>,
    /// Whether browsers send what they know of their user along.
    pub credentials: bool,
}

impl ServerConfig {
    /// Whether a server could be made of this, as far as that can be said without an engine.
    pub fn check(&self) -> Result<(), ServerError> {
        Keys::new(self, None)?;
        LoraRoot::new(self)?;
        self.lora_resolve_root.as_deref().map(Resolver::new).transpose()?;
        Tls::open(&self.tls)?;
        Routing::new(self)?;
        Ok(())
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            tls: TlsConfig::default(),
            cors: CorsConfig::default(),
            root_path: String::new(),
            describe_routes: true,
            page: true,
            served_model_names: Vec::new(),
            model_root: String::new(),
            api_keys: Vec::new(),
            keys: None,
            admin_api_key: None,
            allow_runtime_lora_updating: false,
            lora_root: None,
            lora_sources: None,
            lora_resolve_root: None,
            use_generation_config: true,
            trust_request_chat_template: false,
            tool_format: None,
            exclude_tools_when_tool_choice_none: false,
            reasoning_format: None,
            max_body_bytes: 32 << 20,
            max_pending: Some(4096),
            max_adapter_series: 512,
            log_requests: false,
            log_stats_interval: Some(Duration::from_secs(10)),
            shutdown_timeout: Duration::from_secs(30),
        }
    }
}
