//! From `model` and its relatives to adapters: names are opaque, and a name that nobody has is an error, never the base.

use std::sync::Arc;

use manylora::AdapterSelection;
use serde_json::Value;

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::keys::Caller;

/// Whom a request is for.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// The name that answers echo.
    pub(crate) name: String,
    /// Adapters, with their strengths; none = the base.
    pub(crate) adapters: Vec<AdapterSelection>,
}

/// The error for a name that nobody has.
pub(crate) fn unknown(app: &App, caller: &Caller, name: &str) -> ApiError {
    let aliases = if caller.may_ask_base() { app.names.join(", ") } else { "none for this key".to_owned() };
    ApiError::not_found(format!("The model `{name}` does not exist. Valid aliases: {aliases}.")).about("model")
}

/// Looks for the adapters that a request names and nobody knows yet, where such are served at first use.
pub(crate) async fn resolve(app: &Arc<App>, caller: &Caller, fields: &Fields) -> Result<(), ApiError> {
    if app.resolver.is_none() {
        return Ok(());
    }
    for field in ["model", "adapter_id", "lora_path", "lora_name"] {
        let given = fields.peek(field).and_then(Value::as_str);
        let unknown = |name: &&str| caller.may_name(name) && find(app, caller, name).is_none();
        let Some(name) = given.filter(unknown) else { continue };
        let (app, name) = (Arc::clone(app), name.to_owned());
        let looked = tokio::task::spawn_blocking(move || match &app.resolver {
            Some(resolver) => resolver.resolve(&app.engine, &name),
            None => Ok(()),
        });
        looked.await.map_err(|_| ApiError::internal("looking for an adapter failed; please report this"))??;
    }
    Ok(())
}

/// Reads `model`, `lora_scale`, and what other servers call the same.
pub(crate) fn read(app: &App, caller: &Caller, fields: &mut Fields) -> Result<Target, ApiError> {
    let target = named(app, caller, fields)?;
    let target = selected(app, caller, target, fields)?;
    if target.adapters.is_empty() && !caller.may_ask_base() {
        return Err(unknown(app, caller, &target.name));
    }
    match fields.number("lora_scale")? {
        None => at_strength(caller, target),
        Some(_) if target.adapters.is_empty() => Err(ApiError::bad_request(format!(
            "`lora_scale` is given and `{}` is the base, which has nothing to scale; name an adapter in `model`",
            target.name
        ))
        .about("lora_scale")),
        Some(scale) if !(scale as f32).is_finite() => {
            Err(ApiError::bad_request(format!("`lora_scale` must be finite, got `{scale}`")).about("lora_scale"))
        }
        Some(scale) => {
            let adapters = target.adapters.into_iter();
            let scaled = |it: AdapterSelection| AdapterSelection { scale: it.scale * scale as f32, ..it };
            at_strength(caller, Target { adapters: adapters.map(scaled).collect(), ..target })
        }
    }
}

/// An adapter with little strength is the base, whatever it is called.
fn at_strength(caller: &Caller, target: Target) -> Result<Target, ApiError> {
    if !caller.may_ask_base() && target.adapters.iter().any(|adapter| adapter.scale != 1.0) {
        return Err(ApiError::forbidden(
            "this key may not ask the base, so it has adapters at their own strength only: leave scales out",
        ));
    }
    Ok(target)
}

/// What `model` says.
fn named(app: &App, caller: &Caller, fields: &mut Fields) -> Result<Target, ApiError> {
    let Some(name) = fields.text("model")? else {
        return Ok(Target { name: app.base_name().to_owned(), adapters: Vec::new() });
    };
    find(app, caller, &name).ok_or_else(|| unknown(app, caller, &name))
}

/// Whom a name leads to.
pub(crate) fn find(app: &App, caller: &Caller, name: &str) -> Option<Target> {
    let exists = |adapter: &str| caller.may_name(adapter) && app.engine.adapter(adapter).is_ok();
    if app.names.iter().any(|base| base == name) {
        return Some(Target { name: name.to_owned(), adapters: Vec::new() });
    }
    let adapter = |adapter: &str| {
        let selection = AdapterSelection { name: adapter.to_owned(), scale: 1.0 };
        Target { name: name.to_owned(), adapters: vec![selection] }
    };
    if exists(name) {
        return Some(adapter(name));
    }
    // `base:adapter`, as SGLang has it. Both may have colons of their own.
    let ends = name.match_indices(':').map(|(at, _)| (&name[..at], &name[at + 1..]));
    let mut pairs = ends.filter(|(base, _)| app.names.iter().any(|name| name == base));
    pairs.find(|(_, named)| exists(named)).map(|(_, named)| adapter(named))
}

/// The selectors of other servers: the same names in other fields. They may not say something else than `model` does.
fn selected(app: &App, caller: &Caller, target: Target, fields: &mut Fields) -> Result<Target, ApiError> {
    let mut chosen: Option<(&str, Vec<AdapterSelection>)> = None;
    for field in ["adapter_id", "lora_path", "lora_name"] {
        if let Some(name) = fields.text(field)? {
            let adapter = one(app, caller, field, &name, 1.0)?;
            chosen = Some((field, vec![adapter]));
        }
    }
    if let Some(list) = fields.array("lora")? {
        let adapters = list.iter().map(|item| of_list(app, caller, item)).collect::<Result<Vec<_>, _>>()?;
        chosen = Some(("lora", adapters));
    }
    let Some((field, adapters)) = chosen else { return Ok(target) };
    if target.adapters.is_empty() || target.adapters == adapters {
        let name =
            if target.adapters.is_empty() && adapters.len() == 1 { adapters[0].name.clone() } else { target.name };
        return Ok(Target { name, adapters });
    }
    Err(ApiError::bad_request(format!(
        "`model` names adapter `{}` and `{field}` says something else; name the adapter once",
        target.name
    ))
    .about(field))
}

fn one(app: &App, caller: &Caller, field: &str, name: &str, scale: f32) -> Result<AdapterSelection, ApiError> {
    if !caller.may_name(name) || app.engine.adapter(name).is_err() {
        return Err(ApiError::not_found(format!(
            "`{field}` names `{name}`, and no adapter has that name; adapters are selected by the names that /v1/models lists, best in \
             `model`"
        ))
        .about(field));
    }
    Ok(AdapterSelection { name: name.to_owned(), scale })
}

/// An item of llama.cpp's list, with a name for its id.
fn of_list(app: &App, caller: &Caller, item: &Value) -> Result<AdapterSelection, ApiError> {
    let wrong = || {
        ApiError::bad_request(format!(
            "an item of `lora` must be {{\"id\": NAME, \"scale\": NUMBER}} with a name that /v1/models lists, got `{item}`"
        ))
        .about("lora")
    };
    let name = item.get("id").and_then(Value::as_str).ok_or_else(wrong)?;
    let scale = match item.get("scale") {
        None | Some(Value::Null) => 1.0,
        Some(scale) => scale.as_f64().ok_or_else(wrong)? as f32,
    };
    one(app, caller, "lora", name, scale)
}
