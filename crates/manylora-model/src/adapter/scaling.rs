//! Ranks and scales per module: the one place where a scale is computed.
//!
//! Patterns match as in PEFT: a key is a regular expression that must match the module's path from a dot boundary to
//! its end, and the first key that matches wins.

use regex::{RegexBuilder, RegexSet, RegexSetBuilder};

use super::fault::Fault;

/// Most keys that need the regular expression engine.
const MAX_EXPRESSIONS: usize = 1024;
/// Bytes that one of them, and all of a pattern together, may take compiled: a few characters of a file can ask for
/// megabytes.
const MAX_EXPRESSION_BYTES: usize = 256 << 10;
const MAX_PATTERN_BYTES: usize = 16 << 20;

/// A key of a pattern.
#[derive(Clone, Debug)]
enum Key {
    /// Letters, digits, `_`, `-`, and dots, which match any character.
    Plain(String),
    /// The index of an expression in the pattern's set.
    Expression(usize),
}

/// Whether a plain key matches from a dot boundary to the end of a module's path.
fn matches_plain(key: &str, module: &str) -> bool {
    let Some(start) = module.len().checked_sub(key.len()) else {
        return false;
    };
    let (before, tail) = module.as_bytes().split_at(start);
    matches!(before.last(), None | Some(b'.')) && key.bytes().zip(tail).all(|(key, &byte)| key == b'.' || key == byte)
}

/// `rank_pattern` or `alpha_pattern`.
#[derive(Clone, Debug)]
pub(super) struct Pattern<T> {
    entries: Vec<(Key, T)>,
    expressions: RegexSet,
}

impl<T: Copy> Pattern<T> {
    /// Compiles the keys, in order. `field` names the configuration key in errors.
    pub(super) fn new(field: &str, entries: Vec<(String, T)>) -> Result<Self, Fault> {
        let mut compiled = Vec::with_capacity(entries.len());
        let mut expressions = Vec::new();
        for (key, value) in entries {
            if key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
                compiled.push((Key::Plain(key), value));
                continue;
            }
            let expression = format!(r"^(?:.*\.)?(?:{key})$");
            let tried = RegexBuilder::new(&expression).size_limit(MAX_EXPRESSION_BYTES).build();
            if let Err(error) = tried {
                let why = match error {
                    regex::Error::CompiledTooBig(_) => "it is too large; name the modules instead",
                    _ => "write it without look-around and back references",
                };
                let reason = format!("key `{key}` of `{field}` is not a pattern that can be evaluated; {why}");
                return Err(Fault::invalid(reason).key(field));
            }
            compiled.push((Key::Expression(expressions.len()), value));
            expressions.push(expression);
            if expressions.len() > MAX_EXPRESSIONS {
                let reason = format!("`{field}` has more than {MAX_EXPRESSIONS} regular expressions");
                return Err(Fault::invalid(reason).key(field));
            }
        }
        let expressions = RegexSetBuilder::new(expressions).size_limit(MAX_PATTERN_BYTES).build().map_err(|_| {
            let reason = format!("the regular expressions of `{field}` are too large; name the modules instead");
            Fault::invalid(reason).key(field)
        })?;
        Ok(Self { entries: compiled, expressions })
    }

    fn get(&self, module: &str) -> Option<T> {
        let matching = self.expressions.matches(module);
        let matches = |key: &Key| match key {
            Key::Plain(key) => matches_plain(key, module),
            Key::Expression(index) => matching.matched(*index),
        };
        self.entries.iter().find(|(key, _)| matches(key)).map(|(_, value)| *value)
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

    /// Alpha of a module by its path in the base.
    pub fn alpha(&self, module: &str) -> f64 {
        self.alpha_pattern.get(module).unwrap_or(self.alpha)
    }

    /// Whether scales are alpha/sqrt(r).
    pub const fn rank_stabilized(&self) -> bool {
        self.rank_stabilized
    }

    /// alpha/r, or alpha/sqrt(r) for rank-stabilized adapters (Kalajdzievski 2023).
    pub fn scale(&self, module: &str) -> f32 {
        let rank = f64::from(self.rank(module));
        let alpha = self.alpha(module);
        let divisor = if self.rank_stabilized { rank.sqrt() } else { rank };
        (alpha / divisor) as f32
    }

    /// The largest rank that the configuration names.
    pub fn max_rank(&self) -> u32 {
        self.rank_pattern.values().fold(self.rank, u32::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(keys: impl IntoIterator<Item = String>) -> Result<Pattern<usize>, String> {
        let entries = keys.into_iter().enumerate().map(|(index, key)| (key, index)).collect();
        Pattern::new("rank_pattern", entries).map_err(|fault| format!("{fault:?}"))
    }

    #[test]
    fn the_first_key_that_matches_wins_whatever_its_kind() {
        let keys = [r"layers\.[01]\.mlp\.up_proj", "up_proj", r".*\.(up|down)_proj", "^lm_head$"];
        let pattern = pattern(keys.map(str::to_owned)).unwrap();
        for (module, expected) in [
            ("model.layers.1.mlp.up_proj", Some(0)),
            ("model.layers.2.mlp.up_proj", Some(1)),
            ("model.layers.0.mlp.down_proj", Some(2)),
            ("model.layers.0.mlp.gate_proj", None),
            ("lm_head", Some(3)),
        ] {
            assert_eq!(pattern.get(module), expected, "{module}");
        }
        assert_eq!(self::pattern([]).unwrap().get("lm_head"), None);
    }

    #[test]
    fn expressions_of_every_module_of_a_large_model_fit() {
        let keys = (0..126).flat_map(|layer| {
            ["q", "k", "v", "o", "x", "y", "z"].map(|name| format!(r"^model\.layers\.{layer}\.self_attn\.{name}_proj"))
        });
        assert_eq!(pattern(keys).unwrap().get("model.layers.125.self_attn.o_proj"), Some(125 * 7 + 3));
        assert!(pattern([r"(\w+\.){2}layers\.\d+\.\w+".to_owned()]).is_ok());
    }

    #[test]
    fn expressions_that_take_much_memory_are_refused() {
        assert!(pattern([r"\pL{200}".to_owned()]).unwrap_err().contains("it is too large"));
        assert!(pattern((0..1000).map(|i| format!(r"\w{{3}}{i}+"))).unwrap_err().contains("too large"));
        assert!(pattern((0..1025).map(|i| format!("{i}+"))).unwrap_err().contains("more than 1024"));
        assert!(pattern([r"(?!q)".to_owned()]).unwrap_err().contains("look-around"));
    }
}
