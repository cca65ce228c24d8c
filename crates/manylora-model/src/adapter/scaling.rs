//! Ranks and scales per module: the one place where a scale is computed.
//!
//! Patterns match as in PEFT: a key is a regular expression that must match the module's path from a dot boundary to
//! its end, and the first key that matches wins.

use regex::Regex;

use super::fault::Fault;

/// Most keys that need the regular expression engine; each takes memory, and a file could hold thousands.
const MAX_EXPRESSIONS: usize = 1024;

/// A key of a pattern.
#[derive(Clone, Debug)]
enum Key {
    /// Letters, digits, `_`, `-`, and dots, which match any character.
    Plain(String),
    Expression(Regex),
}

impl Key {
    fn matches(&self, module: &str) -> bool {
        match self {
            Self::Expression(regex) => regex.is_match(module),
            Self::Plain(key) => {
                let Some(start) = module.len().checked_sub(key.len()) else {
                    return false;
                };
                let (before, tail) = module.as_bytes().split_at(start);
                matches!(before.last(), None | Some(b'.'))
                    && key.bytes().zip(tail).all(|(key, &byte)| key == b'.' || key == byte)
            }
        }
    }
}

/// `rank_pattern` or `alpha_pattern`.
#[derive(Clone, Debug, Default)]
pub(super) struct Pattern<T> {
    entries: Vec<(Key, T)>,
}

impl<T: Copy> Pattern<T> {
    /// Compiles the keys, in order. `field` names the configuration key in errors.
    pub(super) fn new(field: &str, entries: Vec<(String, T)>) -> Result<Self, Fault> {
        let mut compiled = Vec::with_capacity(entries.len());
        let mut expressions = 0;
        for (key, value) in entries {
            if key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
                compiled.push((Key::Plain(key), value));
                continue;
            }
            expressions += 1;
            if expressions > MAX_EXPRESSIONS {
                let reason = format!("`{field}` has more than {MAX_EXPRESSIONS} regular expressions");
                return Err(Fault::invalid(reason).key(field));
            }
            let regex = Regex::new(&format!(r"^(?:.*\.)?(?:{key})$")).map_err(|_| {
                Fault::invalid(format!(
                    "key `{key}` of `{field}` is not a pattern that can be evaluated; write it without look-around and \
                     back references"
                ))
                .key(field)
            })?;
            compiled.push((Key::Expression(regex), value));
        }
        Ok(Self { entries: compiled })
    }

    fn get(&self, module: &str) -> Option<T> {
        self.entries.iter().find(|(key, _)| key.matches(module)).map(|(_, value)| *value)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = T> {
        self.entries.iter().map(|(_, value)| *value)
    }
}

/// Rank and alpha of every module of an adapter.
#[derive(Clone, Debug)]
pub struct Scaling {
    pub(super) rank: u32,
    pub(super) alpha: f64,
    pub(super) rank_stabilized: bool,
    pub(super) rank_pattern: Pattern<u32>,
    pub(super) alpha_pattern: Pattern<f64>,
}

impl Scaling {
    /// Rank of a module by its path in the base, for example `model.layers.1.self_attn.q_proj`.
    pub fn rank(&self, module: &str) -> u32 {
        self.rank_pattern.get(module).unwrap_or(self.rank)
    }

    /// alpha/r, or alpha/sqrt(r) for rank-stabilized adapters (Kalajdzievski 2023).
    pub fn scale(&self, module: &str) -> f32 {
        let rank = f64::from(self.rank(module));
        let alpha = self.alpha_pattern.get(module).unwrap_or(self.alpha);
        let divisor = if self.rank_stabilized { rank.sqrt() } else { rank };
        (alpha / divisor) as f32
    }

    /// The largest rank that the configuration names.
    pub fn max_rank(&self) -> u32 {
        self.rank_pattern.values().fold(self.rank, u32::max)
    }
}
