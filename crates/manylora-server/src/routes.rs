//! The router: which path leads where, who may go there, and what every answer has.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{ConnectInfo, Request, State};
use axum::handler::Handler;
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{self, MethodRouter};
use manylora::EngineHandle;
use tower_http::cors::CorsLayer;

use crate::app::App;
use crate::config::ServerConfig;
use crate::error::{ApiError, ServerError};
use crate::{
    adapters, answer, body, chat, completions, cors, metrics, models, openapi, page, prefix, shelf, status, tokens,
};

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Bytes of a body that are read although nobody wants them.
const MOST_DISCARDED: usize = 1 << 20;

/// Who may go somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Whoever watches the server.
    Anyone,
    /// Who may use the API.
    Users,
    /// Who may change which adapters there are.
    Managers,
}

/// A path of the surface.
pub(crate) struct Route {
    pub(crate) path: &'static str,
    pub(crate) access: Access,
    /// In lower case.
    pub(crate) methods: Vec<&'static str>,
    service: MethodRouter<Arc<App>>,
}

fn get<T: 'static>(access: Access, path: &'static str, handler: impl Handler<T, Arc<App>>) -> Route {
    Route { path, access, methods: vec!["get"], service: routing::get(handler) }
}

fn post<T: 'static>(access: Access, path: &'static str, handler: impl Handler<T, Arc<App>>) -> Route {
    Route { path, access, methods: vec!["post"], service: routing::post(handler) }
}

impl Route {
    fn and_post<T: 'static>(mut self, handler: impl Handler<T, Arc<App>>) -> Self {
        self.methods.push("post");
        Self { service: self.service.post(handler), ..self }
    }
}

/// All there is. `openapi.json` describes each of them.
pub(crate) fn table() -> Vec<Route> {
    use Access::{Anyone, Managers, Users};
    vec![
        get(Anyone, page::PATH, page::document),
        get(Anyone, page::FILES, page::file),
        get(Anyone, "/health", status::health),
        get(Anyone, "/ping", status::health).and_post(status::health),
        get(Anyone, "/version", status::version),
        get(Anyone, "/load", status::load),
        get(Anyone, "/metrics", metrics::show),
        get(Anyone, openapi::PATH, openapi::show),
        get(Users, "/shelf", shelf::show),
        get(Users, "/v1/models", models::list),
        get(Users, "/v1/models/{*name}", models::get),
        post(Users, "/v1/completions", completions::create),
        post(Users, "/v1/chat/completions", chat::create),
        post(Users, "/tokenize", tokens::tokenize),
        post(Users, "/detokenize", tokens::detokenize),
        post(Managers, "/v1/load_lora_adapter", adapters::load),
        post(Managers, "/v1/unload_lora_adapter", adapters::unload),
        post(Managers, "/v1/pin_lora_adapter", adapters::pin),
    ]
}

/// What settings say of routes.
#[derive(Clone, Debug)]
pub(crate) struct Routing {
    /// The path that a proxy serves this server under.
    pub(crate) prefix: String,
    cors: Option<CorsLayer>,
}

impl Routing {
    pub(crate) fn new(config: &ServerConfig) -> Result<Self, ServerError> {
        let prefix = prefix::read(&config.root_path, table().iter().map(|route| route.path))?;
        Ok(Self { prefix, cors: cors::layer(&config.cors)? })
    }
}

/// The whole surface over a running engine, for mounting in another service. Who asks from where is that service's to know,
/// so that managing adapters needs an admin key.
pub fn router(engine: EngineHandle, config: ServerConfig) -> Result<Router, ServerError> {
    if config.allow_runtime_lora_updating && config.admin_api_key.is_none() {
        return Err(ServerError::InvalidSetting(
            "allow_runtime_lora_updating needs admin_api_key where another service listens: give one".to_owned(),
        ));
    }
    Ok(routes(&App::new(engine, config, None)?))
}

/// Whether the settings leave a route in.
fn is_wanted(path: &str, config: &ServerConfig) -> bool {
    match path {
        openapi::PATH => config.describe_routes,
        page::PATH | page::FILES => config.page,
        _ => true,
    }
}

pub(crate) fn routes(app: &Arc<App>) -> Router {
    let (mut open, mut users, mut managers) = (Router::new(), Router::new(), Router::new());
    for Route { path, access, service, .. } in table() {
        if !is_wanted(path, &app.config) {
            continue;
        }
        let group = match access {
            Access::Anyone => &mut open,
            Access::Users => &mut users,
            Access::Managers => &mut managers,
        };
        *group = std::mem::take(group).route(path, service);
    }
    // Before the layers: a wrong method is no way around them, nor are the questions of browsers a wrong method.
    let [open, users, managers] = [open, users, managers].map(|group| group.method_not_allowed_fallback(wrong_method));
    let mut others = open.merge(users.layer(from_fn_with_state(Arc::clone(app), only_users)));
    // Inside of it nobody is let in: browsers ask without keys. Management is not for pages, whoever allows what.
    if let Some(cors) = &app.routing.cors {
        others = others.layer(cors.clone());
    }
    let router = others
        .merge(managers.layer(from_fn_with_state(Arc::clone(app), only_managers)))
        .fallback(nowhere)
        .layer(from_fn_with_state(Arc::clone(app), metrics::count_http))
        .layer(from_fn(with_request_id))
        .with_state(Arc::clone(app));
    prefix::under(&app.routing.prefix, router)
}

async fn only_users(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    match app.keys.identify(request.headers()) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => refuse(request, error).await,
    }
}

async fn only_managers(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
    let allowed = if app.config.allow_runtime_lora_updating {
        app.keys.check_admin(request.headers(), peer)
    } else {
        // As if the route were not there.
        Err(ApiError::not_found("Not Found"))
    };
    match allowed {
        Ok(()) => next.run(request).await,
        Err(error) => refuse(request, error).await,
    }
}

async fn nowhere(request: Request) -> Response {
    let error = ApiError::not_found(format!("Not Found: there is no {} {}", request.method(), request.uri().path()));
    refuse(request, error).await
}

async fn wrong_method(request: Request) -> Response {
    let error =
        ApiError::method_not_allowed(format!("Method Not Allowed: {} {}", request.method(), request.uri().path()));
    refuse(request, error).await
}

/// Answers whoever gets no further. Clients send a request's body without waiting, and go on with the connection.
async fn refuse(request: Request, error: ApiError) -> Response {
    let whole = body::discard(request.into_body(), MOST_DISCARDED).await;
    let mut response = error.into_response();
    if !whole {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Gives the answer the request's id, or a fresh one.
async fn with_request_id(request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).cloned();
    let Some(id) = given.or_else(|| HeaderValue::from_str(&answer::fresh_id("")).ok()) else {
        return next.run(request).await;
    };
    let mut response = answer::REQUEST_ID.scope(id.clone(), next.run(request)).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
