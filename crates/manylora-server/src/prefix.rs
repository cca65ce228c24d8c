//! The path that a proxy serves this server under: it may take it off, or leave it on.

use axum::Router;
use axum::extract::Request;
use axum::http::Uri;
use axum::http::uri::PathAndQuery;
use tower_service::Service;

use crate::error::ServerError;

/// The prefix without a slash at its end; empty where there is none. It must not be where routes begin themselves.
pub(crate) fn read(given: &str, mut routes: impl Iterator<Item = &'static str>) -> Result<String, ServerError> {
    let wrong = |why: &str| Err(ServerError::InvalidSetting(format!("--root-path `{given}` {why}")));
    let prefix = given.trim_end_matches('/');
    if prefix.is_empty() {
        return Ok(String::new());
    }
    let plain = prefix.parse::<PathAndQuery>().is_ok_and(|parsed| parsed.path() == prefix);
    if !prefix.starts_with('/') || !plain || prefix.contains("//") {
        return wrong("must be a path such as /models/one");
    }
    match routes.find(|route| below(route, prefix).is_some()) {
        Some(route) => wrong(&format!("is where {route} is; give another one")),
        None => Ok(prefix.to_owned()),
    }
}

/// What of a path comes after the prefix.
fn below<'a>(path: &'a str, prefix: &str) -> Option<&'a str> {
    path.strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The same router, with and without the prefix.
pub(crate) fn under(prefix: &str, router: Router) -> Router {
    if prefix.is_empty() {
        return router;
    }
    let prefix = prefix.to_owned();
    // Before the routes are looked at, so that they and what is counted by route know nothing of it.
    Router::new().fallback(move |mut request: Request| {
        let mut router = router.clone();
        if let Some(uri) = without(request.uri(), &prefix) {
            *request.uri_mut() = uri;
        }
        async move { router.call(request).await }
    })
}

fn without(uri: &Uri, prefix: &str) -> Option<Uri> {
    let rest = below(uri.path(), prefix)?;
    let slash = if rest.is_empty() { "/" } else { "" };
    let query = uri.query().map_or_else(String::new, |query| format!("?{query}"));
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(format!("{slash}{rest}{query}").parse().ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_their_own_are_taken() {
        let routes = || ["/health", "/v1/models"].into_iter();
        for (given, expected) in
            [("", ""), ("/", ""), ("/a", "/a"), ("/a/b/", "/a/b"), ("/v", "/v"), ("/healthy", "/healthy")]
        {
            assert_eq!(read(given, routes()).expect(given), expected);
        }
        for bad in ["a", "/a?b", "/a b", "/a//b", "/v1", "/v1/models/", "/health", "https://a/b"] {
            let error = read(bad, routes()).expect_err(bad);
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
    }

    #[test]
    fn the_rest_of_an_address_stays() {
        let cases = [
            ("/a/v1/models?x=1", Some("/v1/models?x=1")),
            ("/a", Some("/")),
            ("/a?x", Some("/?x")),
            ("/ab/v1", None),
            ("/v1/a", None),
            ("/a/a/b%20c", Some("/a/b%20c")),
        ];
        for (given, expected) in cases {
            let stripped = without(&given.parse().expect("an address"), "/a");
            assert_eq!(stripped.map(|uri| uri.to_string()).as_deref(), expected, "{given}");
        }
    }
}
