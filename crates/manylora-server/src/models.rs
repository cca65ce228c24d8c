//! `/v1/models`: the base under each of its names, then the adapters in the order in which they were loaded.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::extract::{Path, State};
use axum::response::Response;
use manylora::AdapterInfo;
use serde_json::{Value, json};

use crate::answer;
use crate::app::App;
use crate::error::ApiError;
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
pub(crate) async fn list(State(app): State<Arc<App>>) -> Response {
    let mut adapters = app.engine.list_adapters();
    adapters.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    let bases = app.names.iter().map(|name| base(&app, name));
    let data: Vec<Value> = bases.chain(adapters.iter().map(|info| adapter(&app, info))).collect();
    answer::json(&json!({"object": "list", "data": data}))
}

/// One of them. Names may have slashes.
pub(crate) async fn get(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    let found = if app.names.contains(&name) {
        base(&app, &name)
    } else {
        let info = app.engine.adapter(&name).map_err(|_| target::unknown(&app, &name))?;
        adapter(&app, &info)
    };
    Ok(answer::json(&found))
}
