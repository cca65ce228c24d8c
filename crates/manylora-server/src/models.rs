//! `/v1/models`: the base under each of its names, then the adapters in the order in which they were loaded.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Response;
use manylora::AdapterInfo;
use serde_json::{Value, json};

use crate::answer;
use crate::app::App;
use crate::error::ApiError;
use crate::keys::Caller;
use crate::target;

fn permission(created: u64) -> Value {
    json!([{
        "id": answer::fresh_id("modelperm-"), "object": "model_permission", "created": created,
        "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true, "allow_search_indices": false,
        "allow_view": true, "allow_fine_tuning": false, "organization": "*", "group": null, "is_blocking": false,
    }])
}

fn base(app: &App, name: &str) -> Value {
    let root = if app.config.model_root.is_empty() { name } else { &app.config.model_root };
    json!({
        "id": name, "object": "model", "created": app.started, "owned_by": "manylora",
        "root": root, "parent": null,
        "max_model_len": app.engine.info().max_model_len, "permission": permission(app.started),
    })
}

fn adapter(app: &App, info: &AdapterInfo) -> Value {
    let created = info.created.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let folder = || info.origin.path().map(|path| path.display().to_string());
    let root = info.root.clone().or_else(folder);
    json!({
        "id": info.name, "object": "model", "created": created, "owned_by": "manylora",
        "root": root, "parent": app.base_name(),
        "max_model_len": app.engine.info().max_model_len, "permission": permission(created),
        "version": info.version.map(|version| version.to_string()),
    })
}

/// The list.
pub(crate) async fn list(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Response {
    let mut adapters = app.engine.list_adapters();
    adapters.retain(|info| caller.may_name(&info.name));
    adapters.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    let names = if caller.may_ask_base() { app.names.as_slice() } else { &[] };
    let bases = names.iter().map(|name| base(&app, name));
    let data: Vec<Value> = bases.chain(adapters.iter().map(|info| adapter(&app, info))).collect();
    answer::json(&json!({"object": "list", "data": data}))
}

/// One of them. Names may have slashes.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) = name.map_err(|_| ApiError::bad_request("the name in the path is not UTF-8").about("name"))?;
    let found = if app.names.contains(&name) && caller.may_ask_base() {
        base(&app, &name)
    } else {
        let info = app.engine.adapter(&name).ok().filter(|_| caller.may_name(&name));
        let info = info.ok_or_else(|| target::unknown(&app, &caller, &name))?;
        adapter(&app, &info)
    };
    Ok(answer::json(&found))
}
