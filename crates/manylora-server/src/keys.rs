//! Users' keys: which adapters each may name, how much it may ask for at once and per minute, and its share of the service.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::error::{ApiError, ServerError};
use crate::metrics::Rejection;

/// A user's key and what it may do: an entry of a keys file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiKey {
    /// Whose it is: the tenant that its requests are charged to in a fair service.
    pub name: String,
    /// The key itself.
    pub key: String,
    /// Adapters that it may name and see, `*` at the end of one for all that begin so; None = all.
    #[serde(default)]
    pub adapters: Option<Vec<String>>,
    /// Whether it may ask the base.
    #[serde(default = "yes")]
    pub base: bool,
    /// Requests per minute, in bursts of as many; None = no limit.
    #[serde(default)]
    pub requests_per_minute: Option<f64>,
    /// Sequences at once - each prompt of a request, as often as its `n`; None = no limit.
    #[serde(default)]
    pub max_concurrent: Option<usize>,
    /// Its share of a fair service, where others have 1.
    #[serde(default)]
    pub weight: Option<f64>,
}

fn yes() -> bool {
    true
}

impl ApiKey {
    fn check(&self) -> Result<(), ServerError> {
        let wrong = |what: String| Err(ServerError::InvalidSetting(format!("key of `{}`: {what}", self.name)));
        if self.name.trim().is_empty() {
            return wrong("its name is blank; say whose it is".to_owned());
        }
        if self.key.trim().is_empty() {
            return wrong("the key is blank".to_owned());
        }
        if let Some(rate) = self.requests_per_minute.filter(|rate| !(rate.is_finite() && *rate > 0.0)) {
            return wrong(format!("requests_per_minute must be positive, got `{rate}`; leave it out for no limit"));
        }
        if self.max_concurrent == Some(0) {
            return wrong("max_concurrent must be at least 1; leave it out for no limit".to_owned());
        }
        if let Some(weight) = self.weight.filter(|weight| !(weight.is_finite() && *weight > 0.0)) {
            return wrong(format!("weight must be positive, got `{weight}`"));
        }
        Ok(())
    }
}

/// Digest of a key: comparing digests tells nothing of keys by the time that it takes.
pub(crate) fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// Compares all of it whatever the first difference.
pub(crate) fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// A key in use.
#[derive(Debug)]
pub(crate) struct User {
    /// None for a key that is only a key.
    named: Option<ApiKey>,
    running: Arc<AtomicUsize>,
    allowance: Arc<Mutex<Allowance>>,
}

/// Requests that may be made now, and when that was so.
#[derive(Debug)]
struct Allowance {
    left: f64,
    since: Instant,
}

impl User {
    /// A key that may do all that users may.
    pub(crate) fn plain() -> Self {
        Self { named: None, running: Arc::default(), allowance: Self::fresh(0.0) }
    }

    /// A key of a keys file. What its owner has running, and has used up, stays from `before`, which is theirs.
    pub(crate) fn named(key: ApiKey, before: Option<&Self>) -> Result<Self, ServerError> {
        key.check()?;
        let running = before.map(|user| Arc::clone(&user.running)).unwrap_or_default();
        // Who had no limit has used up nothing of it.
        let limited = before.filter(|user| user.named.as_ref().is_some_and(|key| key.requests_per_minute.is_some()));
        let fresh = || Self::fresh(key.requests_per_minute.map_or(0.0, |rate| rate.max(1.0)));
        let allowance = limited.map_or_else(fresh, |user| Arc::clone(&user.allowance));
        Ok(Self { named: Some(key), running, allowance })
    }

    fn fresh(left: f64) -> Arc<Mutex<Allowance>> {
        Arc::new(Mutex::new(Allowance { left, since: Instant::now() }))
    }

    /// Whom its requests are charged to.
    pub(crate) fn tenant(&self) -> Option<&str> {
        self.named.as_ref().map(|key| key.name.as_str())
    }

    pub(crate) fn weight(&self) -> Option<f64> {
        self.named.as_ref().and_then(|key| key.weight)
    }

    fn may_name(&self, adapter: &str) -> bool {
        let Some(allowed) = self.named.as_ref().and_then(|key| key.adapters.as_ref()) else { return true };
        allowed.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(beginning) => adapter.starts_with(beginning),
            None => adapter == pattern,
        })
    }

    /// Whether it may know of all adapters.
    pub(crate) fn sees_all(&self) -> bool {
        self.named.as_ref().is_none_or(|key| key.adapters.is_none())
    }

    /// Counts so many sequences more, if there may be. One that may not run is not counted for a moment either: two that come
    /// at once would keep each other out.
    fn run(&self, sequences: usize, most: usize) -> Option<Running> {
        let more = |running: usize| running.checked_add(sequences).filter(|all| *all <= most);
        self.running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Running { of: Arc::clone(&self.running), sequences })
    }

    /// Lets one more request run, with so many sequences, or says how long to wait.
    fn admit(self: &Arc<Self>, sequences: usize) -> Result<Running, ApiError> {
        let (name, most) = match &self.named {
            Some(key) => (key.name.as_str(), key.max_concurrent.unwrap_or(usize::MAX)),
            None => ("", usize::MAX),
        };
        if sequences > most {
            return Err(ApiError::bad_request(format!(
                "the request has `{sequences}` sequences (its prompts, each n times), and `{name}` may have `{most}` at once \
                 (max_concurrent)"
            )));
        }
        let too_many = || {
            let message = format!("`{name}` may have `{most}` sequences at once; try again in a moment");
            ApiError::too_many(Rejection::MaxConcurrent, message, 1)
        };
        let running = self.run(sequences, most).ok_or_else(too_many)?;
        let Some(key) = &self.named else { return Ok(running) };
        if let Some(rate) = key.requests_per_minute {
            let mut allowance = self.allowance.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let earned = now.duration_since(allowance.since).as_secs_f64() * rate / 60.0;
            // A rate below one request a minute still allows one.
            *allowance = Allowance { left: (allowance.left + earned).min(rate.max(1.0)), since: now };
            if allowance.left < 1.0 {
                let seconds = ((1.0 - allowance.left) * 60.0 / rate).ceil();
                return Err(ApiError::too_many(
                    Rejection::RateLimit,
                    format!("`{}` may make `{rate}` requests per minute; the next one in {seconds} s", key.name),
                    seconds as u32,
                ));
            }
            allowance.left -= 1.0;
        }
        Ok(running)
    }
}

/// A request of a user that runs, until this is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    of: Arc<AtomicUsize>,
    sequences: usize,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.of.fetch_sub(self.sequences, Ordering::Relaxed);
    }
}

/// Who sends a request: None where no key is asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller(pub(crate) Option<Arc<User>>);

impl Caller {
    /// Whether an adapter exists for it.
    pub(crate) fn may_name(&self, adapter: &str) -> bool {
        self.0.as_ref().is_none_or(|user| user.may_name(adapter))
    }

    /// Whether it may know of all adapters, and so of what all requests together do.
    pub(crate) fn sees_all(&self) -> bool {
        self.0.as_ref().is_none_or(|user| user.sees_all())
    }

    /// Whether the base does.
    pub(crate) fn may_ask_base(&self) -> bool {
        self.0.as_ref().and_then(|user| user.named.as_ref()).is_none_or(|key| key.base)
    }

    /// Whom its requests are charged to.
    pub(crate) fn tenant(&self) -> Option<String> {
        self.0.as_ref().and_then(|user| user.tenant()).map(str::to_owned)
    }

    /// See [`User::admit`].
    pub(crate) fn admit(&self, sequences: usize) -> Result<Option<Running>, ApiError> {
        self.0.as_ref().map(|user| user.admit(sequences)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(key: &str) -> Arc<User> {
        let key: ApiKey = serde_json::from_str(key).expect("a key");
        Arc::new(User::named(key, None).expect("a good key"))
    }

    #[test]
    fn names_are_whole_or_beginnings() {
        let caller = Caller(Some(user(r#"{"name": "a", "key": "k", "adapters": ["sql", "team-*"], "base": false}"#)));
        assert!(caller.may_name("sql") && caller.may_name("team-") && caller.may_name("team-x"));
        assert!(!caller.may_name("sql2") && !caller.may_name("tea") && !caller.may_ask_base());
        assert!(Caller::default().may_name("any") && Caller::default().may_ask_base());
        let all = Caller(Some(user(r#"{"name": "a", "key": "k"}"#)));
        assert!(all.may_name("any") && all.may_ask_base());
    }

    #[test]
    fn what_runs_at_once_is_counted_and_given_back() {
        let user = user(r#"{"name": "a", "key": "k", "max_concurrent": 2}"#);
        let first = user.admit(1).expect("one");
        let second = user.admit(1).expect("two");
        assert_eq!(user.admit(1).expect_err("three").to_json()["error"]["code"], 429);
        drop(first);
        let third = user.admit(1).expect("two again");
        drop((second, third));
        drop(user.admit(2).expect("two in one"));
        // What can never be is not put off.
        assert_eq!(user.admit(3).expect_err("three in one").to_json()["error"]["code"], 400);
        assert_eq!(user.running.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn of_two_at_once_one_may_run() {
        let user = user(r#"{"name": "a", "key": "k", "max_concurrent": 1}"#);
        let both = std::sync::Barrier::new(2);
        let ask = || {
            let round = |_| {
                both.wait();
                let admitted = user.admit(1).ok();
                both.wait();
                admitted.is_some()
            };
            (0..20_000).map(round).collect::<Vec<bool>>()
        };
        let (one, two) = std::thread::scope(|scope| {
            let (one, two) = (scope.spawn(ask), scope.spawn(ask));
            (one.join().expect("answers"), two.join().expect("answers"))
        });
        assert!(one.iter().zip(&two).all(|(one, two)| one ^ two), "none of two, or both");
    }

    #[test]
    fn a_minute_has_so_many_requests_and_a_reload_gives_no_more() {
        let user = user(r#"{"name": "a", "key": "k", "requests_per_minute": 3}"#);
        for _ in 0..3 {
            user.admit(1).expect("within the limit");
        }
        let told = user.admit(1).expect_err("the fourth").to_json();
        assert_eq!(told["error"]["code"], 429);
        let again: ApiKey =
            serde_json::from_str(r#"{"name": "a", "key": "new", "requests_per_minute": 3}"#).expect("a key");
        let reloaded = Arc::new(User::named(again, Some(&user)).expect("a good key"));
        assert!(reloaded.admit(1).is_err());
        let entry = |key: &str, before: &User| {
            let key: ApiKey = serde_json::from_str(key).expect("a key");
            Arc::new(User::named(key, Some(before)).expect("a good key"))
        };
        let unlimited = entry(r#"{"name": "a", "key": "new"}"#, &reloaded);
        let limited = entry(r#"{"name": "a", "key": "new", "requests_per_minute": 0.5}"#, &unlimited);
        limited.admit(1).expect("nothing was used up of a limit that was not there");
        assert!(limited.admit(1).is_err());
    }

    #[test]
    fn wrong_entries_are_named() {
        for wrong in [
            r#"{"name": " ", "key": "k"}"#,
            r#"{"name": "a", "key": ""}"#,
            r#"{"name": "a", "key": "k", "max_concurrent": 0}"#,
            r#"{"name": "a", "key": "k", "requests_per_minute": 0}"#,
            r#"{"name": "a", "key": "k", "weight": -1}"#,
        ] {
            let key: ApiKey = serde_json::from_str(wrong).expect("a key");
            assert!(User::named(key, None).is_err(), "{wrong}");
        }
        assert!(serde_json::from_str::<ApiKey>(r#"{"name": "a", "key": "k", "adaptors": []}"#).is_err());
    }
}
