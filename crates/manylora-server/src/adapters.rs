//! Loading, replacing, unloading and pinning adapters over HTTP: vLLM's calls and answers, for whoever may manage.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use manylora::{AdapterSource, Digest, EngineError, UnloadMode};

use crate::answer;
use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::sources::Sources;

async fn fields(app: &App, headers: &HeaderMap, body: Body) -> Result<Fields, ApiError> {
    app.read(headers, body).await
}

fn version(fields: &mut Fields) -> Result<Option<Digest>, ApiError> {
    let Some(text) = fields.text("expected_version")? else { return Ok(None) };
    let parsed = Digest::try_from(text);
    parsed
        .map(Some)
        .map_err(|error| ApiError::bad_request(format!("`expected_version`: {error}")).about("expected_version"))
}

/// `POST /v1/load_lora_adapter`: `lora_name`, `lora_path`, `load_inplace` (replace other content), `expected_version` (replace
/// only that).
pub(crate) async fn load(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let mut fields = fields(&app, &headers, body).await?;
    let missing = |name: &str| {
        ApiError::bad_request(format!("1 validation error: `{name}` is missing")).about(format!("body.{name}"))
    };
    let name = fields.text("lora_name")?.ok_or_else(|| missing("lora_name"))?;
    let given = fields.text("lora_path")?.ok_or_else(|| missing("lora_path"))?;
    let (replace, expected) = (fields.flag("load_inplace")?.unwrap_or(false), version(&mut fields)?);
    fields.refuse("is_3d_lora_weight", "there are no mixture-of-experts models")?;
    if name.is_empty() || given.is_empty() {
        return Err(ApiError::invalid_user_input("Both 'lora_name' and 'lora_path' must be provided."));
    }
    if app.names.contains(&name) {
        return Err(ApiError::invalid_user_input(format!(
            "The lora adapter '{name}' conflicts with a served base model."
        )));
    }
    if !replace && expected.is_some() {
        return Err(ApiError::bad_request(
            "`expected_version` goes with `load_inplace`: it says what is to be replaced",
        )
        .about("expected_version"));
    }
    let found = find(&app, &name, &given).await?;
    let source = AdapterSource { replace, root: Some(given), ..found };
    let before = app.engine.adapter(&name).ok().and_then(|info| info.version);
    let outcome = {
        let app = Arc::clone(&app);
        tokio::task::spawn_blocking(move || match (replace, expected) {
            (true, Some(expected)) => app.engine.replace_adapter(source, Some(expected)),
            _ => app.engine.load_adapter(source),
        })
        .await
        .map_err(|_| ApiError::internal("the load failed unexpectedly; please report this"))?
    };
    match outcome {
        Ok(info) if before.is_some() && before == info.version => Ok(answer::text(format!(
            "Success: LoRA adapter '{name}' is loaded with this content already; nothing was changed."
        ))),
        Ok(_) => Ok(answer::text(format!("Success: LoRA adapter '{name}' added successfully."))),
        Err(EngineError::AdapterConflict { .. }) => Err(ApiError::invalid_user_input(format!(
            "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set \
             'load_inplace' to True."
        ))),
        Err(error) => Err(error.into()),
    }
}

/// `POST /v1/unload_lora_adapter`: `lora_name`, `mode` (`drain` or `abort`), `timeout` in seconds.
pub(crate) async fn unload(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let mut fields = fields(&app, &headers, body).await?;
    let name = known(&app, &mut fields, "unload")?;
    let mode = match fields.text("mode")?.as_deref() {
        None | Some("drain") => UnloadMode::Drain,
        Some("abort") => UnloadMode::Abort,
        Some(other) => {
            return Err(ApiError::bad_request(format!("`mode` must be drain or abort, got `{other}`")).about("mode"));
        }
    };
    let timeout = match fields.number("timeout")? {
        None => None,
        Some(seconds) => Some(Duration::try_from_secs_f64(seconds).map_err(|_| {
            ApiError::bad_request(format!("`timeout` must be seconds of 0 or more, got `{seconds}`")).about("timeout")
        })?),
    };
    change(&app, name, "removed", move |app, name| match timeout {
        Some(timeout) => app.engine.unload_adapter_within(name, mode, timeout),
        None => app.engine.unload_adapter(name, mode),
    })
    .await
}

/// `POST /v1/pin_lora_adapter`: `lora_name`, `pinned` (default true): whether it stays resident whatever comes.
pub(crate) async fn pin(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let mut fields = fields(&app, &headers, body).await?;
    let name = known(&app, &mut fields, "pin")?;
    if fields.flag("pinned")?.unwrap_or(true) {
        change(&app, name, "pinned", |app, name| app.engine.pin_adapter(name)).await
    } else {
        change(&app, name, "unpinned", |app, name| app.engine.unpin_adapter(name)).await
    }
}

/// What is to be loaded: below the root, with all its files, or fetched where that is allowed.
async fn find(app: &Arc<App>, name: &str, given: &str) -> Result<AdapterSource, ApiError> {
    let here = (!Sources::is_url(given)).then(|| app.lora_root.resolve(name, given));
    let sources = app.config.lora_sources.clone();
    let (sources, url) = match (here, sources) {
        (Some(Ok(source)), _) => return Ok(source),
        // What is not here may be on the hub.
        (Some(Err(error)), Some(sources)) if error.is_not_found() && sources.may_be_on_hub(given) => {
            let url = sources.allowed(name, given)?;
            (sources, url)
        }
        (Some(Err(error)), _) => return Err(error),
        (None, Some(sources)) => {
            let url = sources.allowed(name, given)?;
            (sources, url)
        }
        (None, None) => {
            return Err(ApiError::forbidden(format!(
                "lora_path `{given}` of `{name}` is not on this machine, and the server may fetch from nowhere (--lora-sources)"
            )));
        }
    };
    let name = name.to_owned();
    app.blocking(move |_| Ok(AdapterSource::directory(name.as_str(), sources.fetch(&name, &url)?))).await
}

/// The adapter that is to be changed.
fn known(app: &App, fields: &mut Fields, change: &str) -> Result<String, ApiError> {
    let name = fields.text("lora_name")?.unwrap_or_default();
    if name.is_empty() {
        let message = format!("'lora_name' needs to be provided to {change} a LoRA adapter.");
        return Err(ApiError::invalid_user_input(message));
    }
    if app.engine.adapter(&name).is_err() {
        return Err(ApiError::not_found(format!("The lora adapter '{name}' cannot be found.")));
    }
    Ok(name)
}

async fn change(
    app: &Arc<App>,
    name: String,
    done: &str,
    change: impl FnOnce(&App, &str) -> Result<(), EngineError> + Send + 'static,
) -> Result<Response, ApiError> {
    let subject = name.clone();
    app.blocking(move |app| change(app, &subject).map_err(ApiError::from)).await?;
    Ok(answer::text(format!("Success: LoRA adapter '{name}' {done} successfully.")))
}
