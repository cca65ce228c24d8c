//! What pages of other origins may do, where somebody allows it: nothing by default, and never the management of adapters.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method, Uri};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::answer::VERSION_HEADER;
use crate::config::CorsConfig;
use crate::error::ServerError;
use crate::routes::REQUEST_ID;

/// How long a browser may remember what it was told.
const REMEMBERED: Duration = Duration::from_secs(600);

/// What answers the questions of browsers, if any origin is allowed.
pub(crate) fn layer(config: &CorsConfig) -> Result<Option<CorsLayer>, ServerError> {
    let refuse = |message: String| Err(ServerError::InvalidSetting(message));
    if config.origins.is_empty() {
        if config.methods.is_some() || config.headers.is_some() || config.credentials {
            return refuse(
                "--allowed-methods, --allowed-headers and --allow-credentials say what pages of allowed origins may do, and no \
                 origin is allowed; give --allowed-origins too"
                    .to_owned(),
            );
        }
        return Ok(None);
    }
    let any = is_any(&config.origins);
    if any && config.credentials {
        return refuse(
            "--allow-credentials with --allowed-origins `*` would let every page use what a browser knows of its user; name the \
             origins"
                .to_owned(),
        );
    }
    let origins = if any {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(config.origins.iter().map(|it| origin(it)).collect::<Result<Vec<_>, _>>()?)
    };
    // A literal `*` would not cover the header Authorization, nor anything where credentials are allowed.
    let methods = match &config.methods {
        Some(methods) if !is_any(methods) => {
            AllowMethods::list(read(methods, "method", |it| Method::from_bytes(it.as_bytes()).ok())?)
        }
        _ => AllowMethods::mirror_request(),
    };
    let headers = match &config.headers {
        Some(headers) if !is_any(headers) => {
            AllowHeaders::list(read(headers, "header", |it| HeaderName::try_from(it).ok())?)
        }
        _ => AllowHeaders::mirror_request(),
    };
    let layer = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods(methods)
        .allow_headers(headers)
        .allow_credentials(config.credentials)
        .expose_headers([REQUEST_ID, VERSION_HEADER])
        .max_age(REMEMBERED);
    Ok(Some(layer))
}

fn is_any(values: &[String]) -> bool {
    values.iter().any(|value| value == "*")
}

/// An origin as browsers send it.
fn origin(given: &str) -> Result<HeaderValue, ServerError> {
    let wrong = || {
        ServerError::InvalidSetting(format!(
            "--allowed-origins `{given}` is no origin: it must be SCHEME://HOST or SCHEME://HOST:PORT in lower case, without a path, \
             or *"
        ))
    };
    let parsed: Uri = given.parse().map_err(|_| wrong())?;
    let (Some(scheme), Some(authority)) = (parsed.scheme_str(), parsed.authority()) else { return Err(wrong()) };
    if format!("{scheme}://{authority}") != given
        || given != given.to_ascii_lowercase()
        || authority.as_str().contains('@')
    {
        return Err(wrong());
    }
    HeaderValue::from_str(given).map_err(|_| wrong())
}

fn read<T>(values: &[String], kind: &str, read: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, ServerError> {
    let one = |value: &String| {
        read(value)
            .ok_or_else(|| ServerError::InvalidSetting(format!("--allowed-{kind}s `{value}` is no {kind} of HTTP")))
    };
    values.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(origins: &[&str]) -> CorsConfig {
        CorsConfig { origins: origins.iter().map(|&it| it.to_owned()).collect(), ..CorsConfig::default() }
    }

    #[test]
    fn only_origins_are_taken() {
        for good in ["*", "https://a.example", "http://localhost:3000", "http://[::1]:3000", "chrome-extension://abc"] {
            assert!(layer(&config(&[good])).expect(good).is_some());
        }
        for bad in
            ["a.example", "https://a.example/", "https://a.example/x", "https://A.example", "null", "https://u@a", ""]
        {
            let error = layer(&config(&["https://a.example", bad])).expect_err(bad);
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
    }

    #[test]
    fn what_has_no_effect_or_too_much_is_refused() {
        assert!(layer(&CorsConfig::default()).expect("nothing").is_none());
        let methods = Some(vec!["GET".to_owned()]);
        assert!(layer(&CorsConfig { methods, ..CorsConfig::default() }).is_err());
        assert!(layer(&CorsConfig { credentials: true, ..CorsConfig::default() }).is_err());
        assert!(layer(&CorsConfig { credentials: true, ..config(&["*"]) }).is_err());
        assert!(layer(&CorsConfig { credentials: true, ..config(&["https://a.example"]) }).is_ok());
        assert!(layer(&CorsConfig { headers: Some(vec!["a b".to_owned()]), ..config(&["*"]) }).is_err());
    }
}
