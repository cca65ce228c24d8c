//! Adapters that do not lie on this machine: which may be fetched over HTTP calls, and by whom.
//!
//! The server only decides what is allowed: a URL below one of the operator's prefixes. Fetching is the embedding program's, which
//! has the clients and the credentials.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{ApiError, ServerError};

/// Why an adapter could not be fetched; the text is for whoever asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// It is not there.
    #[error("{0}")]
    NotFound(String),
    /// Everything else: unreachable, forbidden, not the content that was asked for.
    #[error("{0}")]
    Failed(String),
}

/// Brings the adapter (its name, then its URL) to this machine and returns its folder, whose content never changes again. Called on
/// a thread that may block.
pub type Fetch = dyn Fn(&str, &str) -> Result<PathBuf, FetchError> + Send + Sync;

/// Where adapters may be fetched from.
#[derive(Clone)]
pub struct Sources {
    prefixes: Vec<String>,
    fetch: Arc<Fetch>,
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources").field("prefixes", &self.prefixes).finish_non_exhaustive()
    }
}

impl Sources {
    /// Allows what lies below `prefixes`, such as `s3://bucket/adapters`, `https://host/folder`, `hf://owner` (its hub ids) or `hf://`.
    ///
    /// # Errors
    ///
    /// One of them is no URL, or a whole scheme other than the hub's.
    pub fn new(prefixes: &[String], fetch: Arc<Fetch>) -> Result<Self, ServerError> {
        let checked = prefixes.iter().map(|given| {
            let wrong = |why| ServerError::InvalidSetting(format!("lora_sources: `{given}` {why}"));
            if given == HUB {
                return Ok(given.clone());
            }
            let prefix = given.trim_end_matches('/');
            match scheme(prefix) {
                None => Err(wrong("is no URL such as s3://bucket/folder or hf://owner")),
                Some((_, "")) => Err(wrong("names nothing below its scheme")),
                Some(_) => plain(prefix).map(|()| prefix.to_owned()).map_err(wrong),
            }
        });
        Ok(Self { prefixes: checked.collect::<Result<_, _>>()?, fetch })
    }

    /// Whether `given` can only be a URL, good or bad.
    pub(crate) fn is_url(given: &str) -> bool {
        given.contains("://")
    }

    /// The URL of what is `given`, if it may be fetched: itself, or a hub id's.
    pub(crate) fn allowed(&self, name: &str, given: &str) -> Result<String, ApiError> {
        let url = if Self::is_url(given) { given.to_owned() } else { format!("{HUB}{given}") };
        let refused = |why: &str| ApiError::forbidden(format!("lora_path `{given}` of `{name}` {why}"));
        plain(&url).map_err(refused)?;
        if let Some(repository) = url.strip_prefix(HUB)
            && !is_repository(repository.split('#').next().unwrap_or_default())
        {
            return Err(refused("is not an adapter of the hub, which are hf://owner/name"));
        }
        let below = |prefix: &String| {
            let rest = url.strip_prefix(prefix.as_str());
            rest.is_some_and(|rest| prefix == HUB || rest.is_empty() || rest.starts_with(['/', '#']))
        };
        if self.prefixes.iter().any(below) {
            return Ok(url);
        }
        Err(refused("is not below a place that adapters may be fetched from (--lora-sources)"))
    }

    /// Whether `given` is a hub id, and such may be fetched at all.
    pub(crate) fn may_be_on_hub(&self, given: &str) -> bool {
        is_repository(given) && self.prefixes.iter().any(|prefix| prefix.starts_with(HUB))
    }

    /// Fetches; may block.
    pub(crate) fn fetch(&self, name: &str, url: &str) -> Result<PathBuf, ApiError> {
        (self.fetch)(name, url).map_err(|error| match error {
            FetchError::NotFound(message) => ApiError::not_found(format!("Loading lora {name} failed: {message}")),
            FetchError::Failed(message) => ApiError::bad_request(message).about("lora_path"),
        })
    }
}

const HUB: &str = "hf://";

/// Whether this is `owner/name`.
fn is_repository(text: &str) -> bool {
    let good = |part: &str| {
        let begins = part.starts_with(|first: char| first.is_ascii_alphanumeric());
        begins && part.chars().all(|letter| letter.is_ascii_alphanumeric() || "._-".contains(letter))
    };
    text.split_once('/').is_some_and(|(owner, name)| good(owner) && good(name))
}

/// A URL's scheme, and what follows.
fn scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let mut letters = scheme.chars();
    let first = letters.next().is_some_and(|first| first.is_ascii_alphabetic());
    (first && letters.all(|letter| letter.is_ascii_alphanumeric() || "+.-".contains(letter))).then_some((scheme, rest))
}

/// Refuses what could mean another place than it says, or says a secret: this URL is shown by `/v1/models`.
fn plain(url: &str) -> Result<(), &'static str> {
    let place = url.split('#').next().unwrap_or_default();
    let odd = |letter: char| letter.is_control() || letter.is_whitespace() || "\\%?@*[]{}|~".contains(letter);
    if place.contains("::") || place.chars().any(odd) {
        return Err("may have no spaces, queries, credentials, wildcards or escapes");
    }
    let rest = scheme(place).map_or(place, |(_, rest)| rest);
    let mut parts = rest.trim_end_matches('/').split('/');
    if parts.any(|part| part == "." || part == ".." || part.is_empty()) && !rest.is_empty() {
        return Err("may have no empty parts, `.` or `..`");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(prefixes: &[&str]) -> Result<Sources, ServerError> {
        let prefixes: Vec<String> = prefixes.iter().map(ToString::to_string).collect();
        Sources::new(&prefixes, Arc::new(|_, url| Ok(PathBuf::from(url))))
    }

    #[test]
    fn only_what_lies_below_a_prefix_is_allowed() {
        let some = sources(&["s3://bucket/adapters/", "https://host", "hf://owner", "hf://other/one"]).unwrap();
        for (given, url) in [
            ("s3://bucket/adapters", "s3://bucket/adapters"),
            ("s3://bucket/adapters/a/b/", "s3://bucket/adapters/a/b/"),
            ("https://host/x#sha256=00", "https://host/x#sha256=00"),
            ("https://host", "https://host"),
            ("owner/name", "hf://owner/name"),
            ("hf://other/one", "hf://other/one"),
        ] {
            assert_eq!(some.allowed("a", given).unwrap(), url);
        }
        for given in [
            "s3://bucket/adapters2/a",
            "s3://bucket",
            "s3://bucket/adapters/../x",
            "s3://bucket/adapters/./x",
            "s3://bucket/adapters//x",
            "s3://bucket/adapters/%2e%2e/x",
            "s3://bucket/adapters/a?x=y",
            "https://host.evil/x",
            "https://host@evil/x",
            "https://host:80/x",
            "http://host/x",
            "HTTPS://host/x",
            "file:///etc",
            "simplecache::https://host/x",
            "https://host/x y",
            "https://host\\evil",
            "owner2/name",
            "other/two",
            "other/one2",
            "/etc",
            "../owner/name",
            "owner/*",
        ] {
            assert!(some.allowed("a", given).is_err(), "{given}");
        }
        assert!(sources(&["hf://"]).unwrap().allowed("a", "any/one").is_ok());
        assert!(sources(&["hf://"]).unwrap().allowed("a", "s3://b/any/one").is_err());
        assert!(sources(&[]).unwrap().allowed("a", "any/one").is_err());
    }

    #[test]
    fn prefixes_that_say_too_little_or_too_much_are_refused() {
        for wrong in [
            "",
            "bucket/x",
            "https://",
            "s3://",
            "https:///x",
            "s3://b/../c",
            "s3://b?x",
            "1s://b",
            "://x",
            "https://u:p@h",
        ] {
            let told = sources(&[wrong]).unwrap_err().to_string();
            assert!(told.contains(&format!("lora_sources: `{wrong}`")), "{told}");
        }
    }
}
