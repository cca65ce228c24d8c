//! Who may do what. Users' keys open the API, the admin key opens the management of adapters, and neither opens the other.
//!
//! Without any key, on a loopback address, management is answered where the request can only come from this machine and
//! not from a page in its browser: peer and Host are loopback, Origin is absent or loopback, and no header of a proxy is
//! there.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::config::ServerConfig;
use crate::error::{ApiError, ServerError};
use crate::keys::{ApiKey, Caller, User, digest, same};
use axum::http::{HeaderMap, header};

/// Headers that only a proxy adds.
const OF_PROXIES: [&str; 3] = ["forwarded", "x-real-ip", "via"];
const OF_PROXIES_PREFIX: &str = "x-forwarded-";

/// Keys that are only keys, and those of the keys file.
#[derive(Debug, Default)]
struct Users {
    /// By digests of keys, so that the time of a look-up tells nothing of the keys there are.
    by_key: HashMap<[u8; 32], Arc<User>>,
    /// Those of the keys file.
    by_name: HashMap<String, Arc<User>>,
}

/// The keys.
#[derive(Debug)]
pub(crate) struct Keys {
    users: RwLock<Arc<Users>>,
    /// One change after the other.
    changing: Mutex<()>,
    /// Whether users need one, also where a keys file has none left.
    needed: bool,
    /// Whether there is a keys file: what is told of all adapters is then for keys that may see all, whoever is in it now.
    has_file: bool,
    admin: Option<[u8; 32]>,
    /// Whether the admin key was made here, because none was given and the address is not only for this machine.
    pub(crate) generated: Option<String>,
    /// Whether management goes without a key, by the loopback rule.
    pub(crate) loopback_rule: bool,
}

/// Whether a host name or address means this machine only.
pub(crate) fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The host of a `Host` header or of an origin's authority.
fn host_of(authority: &str) -> &str {
    match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, _)) => host,
        None => authority.split_once(':').map_or(authority, |(host, _)| host),
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Shares of a fair service, by tenant.
pub(crate) type Weights = HashMap<String, f64>;

impl Users {
    fn weights(&self) -> Weights {
        self.by_name.iter().map(|(name, user)| (name.clone(), user.weight().unwrap_or(1.0))).collect()
    }
}

impl Keys {
    /// `bound`: the address that the server listens on, None where somebody else listens.
    pub(crate) fn new(config: &ServerConfig, bound: Option<IpAddr>) -> Result<Self, ServerError> {
        let blank = config.api_keys.iter().chain(&config.admin_api_key).any(|key| key.trim().is_empty());
        if blank {
            return Err(ServerError::InvalidSetting("a key is blank: give a key, or leave it out".to_owned()));
        }
        if let Some(admin) = &config.admin_api_key
            && config.api_keys.contains(admin)
        {
            return Err(ServerError::InvalidSetting(
                "the admin key is also a user's key, so that every user could load adapters; give two keys".to_owned(),
            ));
        }
        let loopback_rule = config.allow_runtime_lora_updating
            && config.admin_api_key.is_none()
            && config.api_keys.is_empty()
            && config.keys.is_none()
            && bound.is_some_and(|address| address.to_canonical().is_loopback());
        let mut generated = None;
        if config.allow_runtime_lora_updating && config.admin_api_key.is_none() && bound.is_some() && !loopback_rule {
            generated = Some(random_key()?);
        }
        let admin = config.admin_api_key.as_deref().or(generated.as_deref()).map(digest);
        let plain = config.api_keys.iter().map(|key| (digest(key), Arc::new(User::plain())));
        let users = Users { by_key: plain.collect(), by_name: HashMap::new() };
        let has_file = config.keys.is_some();
        let needed = !users.by_key.is_empty() || has_file;
        let (users, changing) = (RwLock::new(Arc::new(users)), Mutex::new(()));
        let keys = Self { users, changing, needed, has_file, admin, generated, loopback_rule };
        keys.replace(config.keys.clone().unwrap_or_default(), |_, _| Ok(()))?;
        Ok(keys)
    }

    fn users(&self) -> Arc<Users> {
        Arc::clone(&self.users.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the keys of a keys file in place of those that it had before; if one is wrong nothing changes. Returns the shares
    /// of a fair service, by tenant, before and now. Requests are let in by those before meanwhile.
    pub(crate) fn replace(
        &self,
        keys: Vec<ApiKey>,
        then: impl FnOnce(&Weights, &Weights) -> Result<(), ServerError>,
    ) -> Result<(), ServerError> {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.users();
        let plain = before.by_key.iter().filter(|(_, user)| user.tenant().is_none());
        let mut next =
            Users { by_key: plain.map(|(key, user)| (*key, Arc::clone(user))).collect(), ..Users::default() };
        for key in keys {
            let (name, given) = (key.name.clone(), digest(&key.key));
            if next.by_name.contains_key(&name) {
                return Err(ServerError::InvalidSetting(format!(
                    "`{name}` has two keys; give each key a name of its own"
                )));
            }
            if self.admin.as_ref().is_some_and(|admin| same(admin, &given)) || next.by_key.contains_key(&given) {
                return Err(ServerError::InvalidSetting(format!(
                    "the key of `{name}` is also another's, or the admin's; give each a key of its own"
                )));
            }
            let user = Arc::new(User::named(key, before.by_name.get(&name).map(Arc::as_ref))?);
            next.by_key.insert(given, Arc::clone(&user));
            next.by_name.insert(name, user);
        }
        let weights = (before.weights(), next.weights());
        *self.users.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
        then(&weights.0, &weights.1)
    }

    /// Shares of a fair service, by tenant.
    pub(crate) fn weights(&self) -> Weights {
        self.users().weights()
    }

    /// Who sends a request, if whoever that is may use the API.
    pub(crate) fn identify(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if !self.needed {
            return Ok(Caller::default());
        }
        let Some(given) = bearer(headers) else {
            return Err(ApiError::unauthorized("the header `Authorization: Bearer KEY` is missing"));
        };
        let given = digest(given);
        let unknown = || ApiError::unauthorized("the key in the header `Authorization` is not known");
        self.users().by_key.get(&given).map(|user| Caller(Some(Arc::clone(user)))).ok_or_else(unknown)
    }

    /// Whether somebody may see what is told of all adapters. Where there is a keys file, that needs a key which is not
    /// confined to some.
    pub(crate) fn check_watcher(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.has_file {
            return Ok(());
        }
        if let (Some(admin), Some(given)) = (&self.admin, bearer(headers))
            && same(admin, &digest(given))
        {
            return Ok(());
        }
        match self.identify(headers)? {
            Caller(Some(user)) if user.sees_all() => Ok(()),
            _ => Err(ApiError::forbidden(
                "the key may see some adapters, and this tells of all; use a key without `adapters`, or the admin key",
            )),
        }
    }

    /// Whether somebody may change which adapters there are.
    pub(crate) fn check_admin(&self, headers: &HeaderMap, peer: Option<SocketAddr>) -> Result<(), ApiError> {
        if self.loopback_rule {
            return check_local(headers, peer);
        }
        let Some(admin) = &self.admin else {
            return Err(ApiError::forbidden("management of adapters is off"));
        };
        match bearer(headers) {
            Some(given) if same(admin, &digest(given)) => Ok(()),
            Some(_) => Err(ApiError::unauthorized(
                "the key in the header `Authorization` is not the admin key, which this call needs",
            )),
            None => Err(ApiError::unauthorized(
                "the header `Authorization: Bearer ADMIN_KEY` is missing: this call needs the admin key",
            )),
        }
    }
}

fn random_key() -> Result<String, ServerError> {
    let mut bytes = [0; 24];
    getrandom::fill(&mut bytes)
        .map_err(|error| ServerError::Io { what: "making a random admin key", source: error.into() })?;
    Ok(bytes.iter().fold("mlr-".to_owned(), |key, byte| format!("{key}{byte:02x}")))
}

/// See the module.
fn check_local(headers: &HeaderMap, peer: Option<SocketAddr>) -> Result<(), ApiError> {
    let refuse = |what: &str| {
        Err(ApiError::unauthorized(format!(
            "{what}, and without an admin key adapters are managed from this machine only; start the server with --admin-api-key and \
             send it in the header `Authorization: Bearer ADMIN_KEY`"
        )))
    };
    if !peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback()) {
        return refuse("the request does not come from a loopback address");
    }
    let header = |name: header::HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    match header(header::HOST) {
        Some(host) if is_loopback(host_of(host)) => {}
        Some(host) => return refuse(&format!("the header Host is `{host}`")),
        None => return refuse("the header Host is missing"),
    }
    if let Some(origin) = header(header::ORIGIN) {
        let authority = origin.split_once("://").map_or("?", |(_, authority)| authority);
        if !is_loopback(host_of(authority)) {
            return refuse(&format!("the header Origin is `{origin}`"));
        }
    }
    let of_proxy = |name: &str| OF_PROXIES.contains(&name) || name.starts_with(OF_PROXIES_PREFIX);
    if let Some(name) = headers.keys().find(|name| of_proxy(name.as_str())) {
        return refuse(&format!("the header {name} says that a proxy passed it on"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&str, &str)| {
            (HeaderName::try_from(*name).expect("a name"), HeaderValue::from_str(value).expect("a value"))
        };
        pairs.iter().map(pair).collect()
    }

    fn keys(configure: impl FnOnce(&mut ServerConfig)) -> Keys {
        let mut config = ServerConfig { allow_runtime_lora_updating: true, ..ServerConfig::default() };
        configure(&mut config);
        Keys::new(&config, Some(address(&config.host))).expect("good settings")
    }

    fn address(host: &str) -> IpAddr {
        host.parse().expect("an address")
    }

    const LOCAL: Option<SocketAddr> = Some(SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 5000));

    #[test]
    fn without_keys_only_this_machine_manages() {
        let keys = keys(|_| {});
        assert!(keys.loopback_rule && keys.generated.is_none());
        let fine = [
            vec![("host", "localhost:8000")],
            vec![("host", "127.0.0.1")],
            vec![("host", "[::1]:8000"), ("origin", "http://localhost:3000")],
        ];
        for good in fine {
            assert!(keys.check_admin(&headers(&good), LOCAL).is_ok(), "{good:?}");
        }
        let refused = [
            vec![],
            vec![("host", "evil.example")],
            vec![("host", "localhost.evil.example:8000")],
            vec![("host", "localhost"), ("origin", "https://evil.example")],
            vec![("host", "localhost"), ("origin", "null")],
            vec![("host", "localhost"), ("x-forwarded-for", "127.0.0.1")],
            vec![("host", "localhost"), ("x-forwarded-host", "x")],
            vec![("host", "localhost"), ("forwarded", "for=1.2.3.4")],
            vec![("host", "localhost"), ("x-real-ip", "1.2.3.4")],
            vec![("host", "localhost"), ("via", "1.1 proxy")],
        ];
        for bad in refused {
            assert!(keys.check_admin(&headers(&bad), LOCAL).is_err(), "{bad:?}");
        }
        let far = Some(SocketAddr::from(([10, 0, 0, 7], 5000)));
        let local_host = headers(&[("host", "localhost")]);
        assert!(keys.check_admin(&local_host, far).is_err() && keys.check_admin(&local_host, None).is_err());
    }

    #[test]
    fn the_rule_is_for_where_it_listens_whatever_the_settings_say() {
        let config = ServerConfig { allow_runtime_lora_updating: true, ..ServerConfig::default() };
        for (bound, rule) in [("127.0.0.1", true), ("::1", true), ("::ffff:127.0.0.1", true), ("0.0.0.0", false)] {
            let keys = Keys::new(&config, Some(address(bound))).expect("good settings");
            assert_eq!((keys.loopback_rule, keys.generated.is_some()), (rule, !rule), "{bound}");
        }
        // Where somebody else listens nobody would read a key that was made here.
        let mounted = Keys::new(&config, None).expect("good settings");
        assert!(!mounted.loopback_rule && mounted.generated.is_none());
        assert!(mounted.check_admin(&headers(&[("host", "localhost")]), LOCAL).is_err());
    }

    #[test]
    fn what_is_told_of_all_adapters_needs_a_key_as_long_as_there_is_a_keys_file() {
        let keys = keys(|config| {
            config.keys =
                Some(vec![serde_json::from_str(r#"{"name": "a", "key": "k", "adapters": ["x"]}"#).expect("a key")]);
        });
        let with = |key: &str| headers(&[("authorization", &format!("Bearer {key}"))]);
        assert!(keys.check_watcher(&headers(&[])).is_err() && keys.check_watcher(&with("k")).is_err());
        keys.replace(Vec::new(), |_, _| Ok(())).expect("no keys");
        assert!(keys.check_watcher(&headers(&[])).is_err() && keys.check_watcher(&with("k")).is_err());
        let all = serde_json::from_str(r#"{"name": "b", "key": "all"}"#).expect("a key");
        keys.replace(vec![all], |_, _| Ok(())).expect("a key");
        assert!(keys.check_watcher(&headers(&[])).is_err() && keys.check_watcher(&with("all")).is_ok());
        let open = super::Keys::new(&ServerConfig::default(), None).expect("good settings");
        assert!(open.check_watcher(&headers(&[])).is_ok());
    }

    #[test]
    fn many_keys_are_taken_at_once() {
        let key = |number: usize| format!(r#"{{"name": "user-{number}", "key": "key-{number}"}}"#);
        // So many that looking at all others for each of them would take minutes.
        let most = 300_000;
        let many: Vec<ApiKey> = (0..most).map(|it| serde_json::from_str(&key(it)).expect("a key")).collect();
        let keys = keys(|config| config.keys = Some(many.clone()));
        let compare = |before: &Weights, now: &Weights| {
            assert_eq!((before.len(), now.len()), (most, most));
            Ok(())
        };
        keys.replace(many, compare).expect("good keys");
        let last = format!("Bearer key-{}", most - 1);
        assert!(keys.identify(&headers(&[("authorization", &last)])).is_ok());
    }

    #[test]
    fn neither_key_opens_what_the_other_does() {
        let keys = keys(|config| {
            config.api_keys = vec!["user".to_owned(), "other".to_owned()];
            config.admin_api_key = Some("admin".to_owned());
        });
        let with = |key: &str| headers(&[("authorization", &format!("Bearer {key}")), ("host", "localhost")]);
        assert!(keys.identify(&with("user")).is_ok() && keys.identify(&with("other")).is_ok());
        assert!(keys.identify(&with("admin")).is_err() && keys.identify(&headers(&[])).is_err());
        assert!(keys.check_admin(&with("admin"), LOCAL).is_ok());
        assert!(keys.check_admin(&with("user"), LOCAL).is_err());
        assert!(keys.check_admin(&headers(&[("host", "localhost")]), LOCAL).is_err());
    }

    #[test]
    fn a_key_is_made_where_the_rule_does_not_hold() {
        for configure in
            [(|config: &mut ServerConfig| config.host = "0.0.0.0".to_owned()) as fn(&mut ServerConfig), |config| {
                config.api_keys = vec!["user".to_owned()];
            }]
        {
            let keys = keys(configure);
            let made = keys.generated.clone().expect("a key");
            assert!(made.len() > 40 && !keys.loopback_rule);
            let with = headers(&[("authorization", &format!("bearer {made}"))]);
            assert!(keys.check_admin(&with, None).is_ok());
        }
    }

    #[test]
    fn one_key_cannot_be_both() {
        let config = ServerConfig {
            api_keys: vec!["same".to_owned()],
            admin_api_key: Some("same".to_owned()),
            ..ServerConfig::default()
        };
        assert!(Keys::new(&config, None).is_err());
    }
}
