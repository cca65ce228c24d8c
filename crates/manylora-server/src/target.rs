//! From `model` and its relatives to adapters: names are opaque, and a name that nobody has is an error, never the base.

use std::sync::Arc;

use manylora::AdapterSelection;
use serde_json::Value;

use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, shown};
use crate::keys::Caller;

/// Fields of other servers that name one adapter.
const SINGLE: [&str; 3] = ["adapter_id", "lora_path", "lora_name"];
/// Adapters that a request may list.
const MOST_LISTED: usize = 64;

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
    let sought: Vec<String> = given_names(fields).filter(|name| find(app, caller, name).is_none()).collect();
    if sought.is_empty() {
        return Ok(());
    }
    let (app, caller) = (Arc::clone(app), caller.clone());
    let looked = tokio::task::spawn_blocking(move || {
        let Some(resolver) = &app.resolver else { return Ok(()) };
        for given in sought {
            for name in readings(&app, &given).filter(|name| caller.may_name(name)) {
                resolver.resolve(&app.engine, name)?;
                if app.engine.adapter(name).is_ok() {
                    break;
                }
            }
        }
        Ok(())
    });
    looked.await.map_err(|_| ApiError::internal("looking for an adapter failed; please report this"))?
}

/// The names in a request that may be adapters', as they are given; of a list no more than any request may combine.
fn given_names(fields: &Fields) -> impl Iterator<Item = String> {
    let single = SINGLE.iter().filter_map(|field| fields.peek(field)?.as_str());
    let list = fields.peek("lora").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let listed = list.iter().take(MOST_LISTED).filter_map(|item| item.get("id")?.as_str());
    fields.peek("model").and_then(Value::as_str).into_iter().chain(single).chain(listed).map(str::to_owned)
}

/// The adapters that `name` can stand for, the first of them that there is: itself, and what follows the base's name in
/// `base:adapter`, as SGLang has it. Both may have colons of their own.
fn readings<'a>(app: &'a App, name: &'a str) -> impl Iterator<Item = &'a str> {
    let ends = name.match_indices(':').map(|(at, _)| (&name[..at], &name[at + 1..]));
    let pairs = ends.filter(|(base, _)| app.names.iter().any(|name| name == base));
    std::iter::once(name).chain(pairs.map(|(_, adapter)| adapter))
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
    readings(app, name).find(|adapter| exists(adapter)).map(|adapter| {
        let selection = AdapterSelection { name: adapter.to_owned(), scale: 1.0 };
        Target { name: name.to_owned(), adapters: vec![selection] }
    })
}

/// The selectors of other servers: the same names in other fields. They may not say something else than `model` does.
fn selected(app: &App, caller: &Caller, target: Target, fields: &mut Fields) -> Result<Target, ApiError> {
    let mut chosen: Option<(&str, Vec<AdapterSelection>)> = None;
    for field in SINGLE {
        if let Some(name) = fields.text(field)? {
            let adapter = one(app, caller, field, &name, 1.0)?;
            chosen = Some((field, vec![adapter]));
        }
    }
    if let Some(list) = fields.array("lora")? {
        if list.len() > MOST_LISTED {
            return Err(ApiError::bad_request(format!(
                "`lora` lists `{}` adapters, one request may combine {MOST_LISTED} at most",
                list.len()
            ))
            .about("lora"));
        }
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
            "an item of `lora` must be {{\"id\": NAME, \"scale\": NUMBER}} with a name that /v1/models lists, got `{}`",
            shown(item)
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
