//! The page at `/`: what is on the shelf and who runs, a playground, and the management of adapters.
//!
//! It is a few static files in this binary, without anything from elsewhere. It knows nothing but what the API tells the key
//! that its user gives it, so that anyone may have the files; browsers are told to run nothing else beside them.

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use sha2::{Digest as _, Sha256};

use crate::app::App;
use crate::error::ApiError;

pub(crate) const PATH: &str = "/";
pub(crate) const FILES: &str = "/page/{*name}";

/// What the page may do: use its own files and this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'self'; form-action 'none'; frame-ancestors 'none'";
/// Before which the document gets to know the path that it is served under.
const HEAD: &str = "<meta charset=\"utf-8\">";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

const DOCUMENT: &str = include_str!("../page/index.html");

/// Names, kinds and contents.
const CONTENTS: &[(&str, &str, &str)] = &[
    ("style.css", STYLE, include_str!("../page/style.css")),
    ("parts.css", STYLE, include_str!("../page/parts.css")),
    ("icon.svg", IMAGE, include_str!("../page/icon.svg")),
    ("main.js", SCRIPT, include_str!("../page/main.js")),
    ("api.js", SCRIPT, include_str!("../page/api.js")),
    ("format.js", SCRIPT, include_str!("../page/format.js")),
    ("history.js", SCRIPT, include_str!("../page/history.js")),
    ("picture.js", SCRIPT, include_str!("../page/picture.js")),
    ("rows.js", SCRIPT, include_str!("../page/rows.js")),
    ("list.js", SCRIPT, include_str!("../page/list.js")),
    ("keys.js", SCRIPT, include_str!("../page/keys.js")),
    ("management.js", SCRIPT, include_str!("../page/management.js")),
    ("playground.js", SCRIPT, include_str!("../page/playground.js")),
];

/// The page.
pub(crate) async fn document(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    answer(&headers, HTML, under(&app.routing.prefix))
}

/// One of its files.
pub(crate) async fn file(headers: HeaderMap, name: Result<Path<String>, PathRejection>) -> Result<Response, ApiError> {
    let name = name.map(|Path(name)| name).unwrap_or_default();
    let found = CONTENTS.iter().find(|(known, ..)| *known == name);
    let (_, kind, text) = found.ok_or_else(|| ApiError::not_found(format!("the page has no file `{name}`")))?;
    Ok(answer(&headers, kind, Cow::Borrowed(text)))
}

/// The document for a server that is found under a path: what it names is relative to that.
fn under(prefix: &str) -> Cow<'static, str> {
    if prefix.is_empty() {
        return Cow::Borrowed(DOCUMENT);
    }
    let escaped = prefix.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;");
    Cow::Owned(DOCUMENT.replacen(HEAD, &format!("{HEAD}\n<base href=\"{escaped}/\">"), 1))
}

fn answer(asked: &HeaderMap, kind: &'static str, text: Cow<'static, str>) -> Response {
    let digest = Sha256::digest(text.as_bytes());
    let tag = digest[..16].iter().fold("\"".to_owned(), |tag, byte| format!("{tag}{byte:02x}")) + "\"";
    let known = asked.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let is_known = known.flat_map(|value| value.split(',')).any(|one| one.trim().trim_start_matches("W/") == tag);
    let mut response = match (is_known, text) {
        (true, _) => Response::new(Body::empty()),
        (false, Cow::Borrowed(text)) => Response::new(Body::from(text)),
        (false, Cow::Owned(text)) => Response::new(Body::from(text)),
    };
    if is_known {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let headers = response.headers_mut();
    let mut set = |name: HeaderName, value: &'static str| headers.insert(name, HeaderValue::from_static(value));
    set(header::CONTENT_TYPE, kind);
    set(header::CONTENT_SECURITY_POLICY, POLICY);
    set(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(header::REFERRER_POLICY, "no-referrer");
    // A new version of the server brings new files under the old names.
    set(header::CACHE_CONTROL, "no-cache");
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_knows_its_path() {
        assert!(DOCUMENT.contains(HEAD) && !DOCUMENT.contains("<base"));
        assert_eq!(under(""), DOCUMENT);
        assert!(under("/models/one").contains("<base href=\"/models/one/\">"));
        assert!(under("/a\"b").contains("<base href=\"/a&quot;b/\">"));
    }

    #[test]
    fn what_is_known_is_not_sent_again() {
        let first = answer(&HeaderMap::new(), HTML, under(""));
        assert_eq!(first.status(), StatusCode::OK);
        let tag = first.headers()[header::ETAG].to_str().expect("text").to_owned();
        for (given, status) in [(tag.clone(), 304), (format!("\"x\", W/{tag}"), 304), ("\"x\"".to_owned(), 200)] {
            let mut asked = HeaderMap::new();
            asked.insert(header::IF_NONE_MATCH, HeaderValue::from_str(&given).expect("a value"));
            let again = answer(&asked, HTML, under(""));
            assert_eq!(again.status().as_u16(), status, "{given}");
            assert!(again.headers().contains_key(header::CONTENT_SECURITY_POLICY));
        }
        assert_ne!(tag, answer(&HeaderMap::new(), HTML, under("/a")).headers()[header::ETAG]);
    }

    #[test]
    fn every_file_there_is_has_a_name_and_none_is_named_in_vain() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("page");
        let names = std::fs::read_dir(folder).expect("the folder").map(|it| it.expect("a file").file_name());
        let mut names: Vec<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        names.retain(|name| name != "index.html");
        names.sort_unstable();
        let mut known: Vec<_> = CONTENTS.iter().map(|(name, ..)| (*name).to_owned()).collect();
        known.sort_unstable();
        assert_eq!(names, known);
        for (name, kind, text) in CONTENTS {
            let expected = match name.rsplit_once('.').map_or("", |(_, ending)| ending) {
                "js" => SCRIPT,
                "css" => STYLE,
                "svg" => IMAGE,
                _ => "",
            };
            assert_eq!(*kind, expected, "{name}");
            assert!(text.lines().count() < 300, "{name} is two ideas");
        }
    }
}
