//! From the EBNF of llama.cpp and xgrammar to Lark: `root ::= "a" | [b-d]+ rest`.
//!
//! Both notations have alternatives, groups and repetitions, written alike. What differs is how rules are named, how
//! characters are written, and that a class of characters is a regular expression in Lark.

use std::collections::{HashMap, HashSet};
use std::iter::Peekable;
use std::str::Chars;

use super::lark::{self, code};

/// Whether a grammar is written in EBNF: one of its lines begins a rule with `::=`.
pub(super) fn is_ebnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        line.split_once("::=").is_some_and(|(name, _)| {
            let name = name.trim();
            !name.is_empty() && name.chars().all(is_of_name)
        })
    })
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-')
}

enum Piece {
    Name(String),
    Defines,
    /// Written in Lark.
    Lark(String),
}

/// The same grammar in Lark. Its first rule is `root`.
pub(super) fn to_lark(grammar: &str) -> Result<String, String> {
    let pieces = Reader { rest: grammar.chars().peekable() }.pieces()?;
    let begins = |index: usize| matches!(pieces.get(index + 1), Some(Piece::Defines));
    let mut names = Names::default();
    let mut out = String::new();
    for (index, piece) in pieces.iter().enumerate() {
        match piece {
            Piece::Name(name) if begins(index) => {
                if !names.define(name) {
                    return Err(format!("the rule `{name}` is defined twice"));
                }
                out.extend(["\n", &names.of(name), ":"]);
            }
            _ if out.is_empty() => return Err("the grammar does not begin with a rule, `name ::= ...`".to_owned()),
            Piece::Name(name) => out.extend([" ", &names.of(name)]),
            Piece::Defines if index > 0 && matches!(pieces[index - 1], Piece::Name(_)) => {}
            Piece::Defines => return Err("`::=` without a name before it".to_owned()),
            // Repetitions stand right behind what they repeat.
            Piece::Lark(text) if text.starts_with(['*', '+', '?', '{']) => out.push_str(text),
            Piece::Lark(text) => out.extend([" ", text]),
        }
    }
    match names.undefined() {
        Some(name) => Err(format!("the rule `{name}` is used and not defined")),
        None if !names.defined.contains("root") => Err("there is no rule `root`".to_owned()),
        None => Ok(out),
    }
}

/// Names of rules in Lark: small letters, `start` for `root`.
#[derive(Default)]
struct Names {
    known: HashMap<String, String>,
    defined: HashSet<String>,
}

impl Names {
    fn of(&mut self, name: &str) -> String {
        if name == "root" {
            return "start".to_owned();
        }
        let next = self.known.len();
        // Numbered, since names may differ in the case of letters alone.
        self.known.entry(name.to_owned()).or_insert_with(|| format!("rule-{next}")).clone()
    }

    fn define(&mut self, name: &str) -> bool {
        self.defined.insert(name.to_owned())
    }

    fn undefined(&self) -> Option<&str> {
        let mut undefined: Vec<&String> = self.known.keys().filter(|name| !self.defined.contains(*name)).collect();
        undefined.sort();
        undefined.first().map(|name| name.as_str())
    }
}

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
}

impl Reader<'_> {
    fn pieces(mut self) -> Result<Vec<Piece>, String> {
        let mut pieces = Vec::new();
        while let Some(&next) = self.rest.peek() {
            match next {
                '#' => while self.rest.next_if(|&character| character != '\n').is_some() {},
                '"' => pieces.push(Piece::Lark(lark::text(&self.string()?))),
                '[' => pieces.push(Piece::Lark(format!("/{}/", self.class()?))),
                '{' => pieces.push(Piece::Lark(self.count()?)),
                ':' => {
                    let sign: String = std::iter::from_fn(|| self.rest.next_if(|&it| it == ':' || it == '=')).collect();
                    if sign != "::=" {
                        return Err(format!("`{sign}` is no sign of EBNF"));
                    }
                    pieces.push(Piece::Defines);
                }
                '.' => {
                    self.rest.next();
                    pieces.push(Piece::Lark("/(?s:.)/".to_owned()));
                }
                '(' | ')' | '|' | '*' | '+' | '?' => {
                    self.rest.next();
                    pieces.push(Piece::Lark(next.to_string()));
                }
                space if space.is_whitespace() => drop(self.rest.next()),
                name if is_of_name(name) => {
                    let name = std::iter::from_fn(|| self.rest.next_if(|&character| is_of_name(character)));
                    pieces.push(Piece::Name(name.collect()));
                }
                other => return Err(format!("`{other}` is no sign of EBNF")),
            }
        }
        Ok(pieces)
    }

    fn string(&mut self) -> Result<String, String> {
        self.rest.next();
        let mut text = String::new();
        loop {
            match self.rest.next() {
                None | Some('\n') => return Err(format!("the text `\"{text}` has no end")),
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escaped()?),
                Some(character) => text.push(character),
            }
        }
    }

    /// What follows a backslash.
    fn escaped(&mut self) -> Result<char, String> {
        let digits = match self.rest.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(other) if !other.is_ascii_alphanumeric() => return Ok(other),
            other => return Err(format!("`\\{}` is no character", other.unwrap_or_default())),
        };
        let code: String = self.rest.by_ref().take(digits).collect();
        u32::from_str_radix(&code, 16)
            .ok()
            .filter(|_| code.len() == digits)
            .and_then(char::from_u32)
            .ok_or_else(|| format!("`{code}` is no code of a character"))
    }

    fn class(&mut self) -> Result<String, String> {
        self.rest.next();
        let mut class = String::from(if self.rest.next_if_eq(&'^').is_some() { "[^" } else { "[" });
        let begun = class.len();
        loop {
            let first = match self.rest.next() {
                None | Some('\n') => return Err(format!("the class `{class}` has no end")),
                Some(']') if class.len() == begun => return Err("a class of characters is empty".to_owned()),
                Some(']') => return Ok(class + "]"),
                Some('\\') => self.escaped()?,
                Some(character) => character,
            };
            class.push_str(&code("\\x{", first, "}"));
            if self.rest.next_if_eq(&'-').is_some() {
                let last = match self.rest.peek() {
                    // A hyphen at the end is one.
                    Some(']') | None => {
                        class.push_str("\\x{2d}");
                        continue;
                    }
                    Some('\\') => {
                        self.rest.next();
                        self.escaped()?
                    }
                    Some(&character) => {
                        self.rest.next();
                        character
                    }
                };
                class.push_str(&code("-\\x{", last, "}"));
            }
        }
    }

    /// `{2}`, `{2,}` or `{2,5}`.
    fn count(&mut self) -> Result<String, String> {
        let mut count = String::new();
        for character in self.rest.by_ref() {
            match character {
                '}' => return Ok(count + "}"),
                '{' | ',' | '0'..='9' => count.push(character),
                ' ' => {}
                other => return Err(format!("`{count}{other}` is no number of repetitions")),
            }
        }
        Err(format!("`{count}` has no end"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_larks() {
        let lark = to_lark("root ::= Item (\", \" Item)* # list\nItem ::= [a-c^\\-\\]]{2,3} |\n  \"\\x41\\\"\" | .\n")
            .unwrap();
        assert_eq!(
            lark,
            "\nstart: rule-0 ( \", \" rule-0 )*\nrule-0: /[\\x{0061}-\\x{0063}\\x{005e}\\x{002d}\\x{005d}]/{2,3} | \"A\\\"\" | /(?s:.)/"
        );
        assert!(to_lark("root ::= [^\"]+").unwrap().contains("/[^\\x{0022}]/+"));
        assert!(to_lark("root ::= [a-]").unwrap().contains("/[\\x{0061}\\x{2d}]/"));
    }

    #[test]
    fn faults_are_named() {
        for (grammar, words) in [
            ("root ::= item", "`item` is used and not defined"),
            ("item ::= \"a\"", "no rule `root`"),
            ("root ::= \"a", "has no end"),
            ("root ::= [a", "has no end"),
            ("root ::= []", "empty"),
            ("root ::= \"\\q\"", "`\\q` is no character"),
            ("root ::= \"\\ud800\"", "`d800` is no code"),
            ("root ::= \"a\"{x}", "no number of repetitions"),
            ("root ::= \"a\" ::= \"b\"", "without a name"),
            ("root ::= \"a\"\nroot ::= \"b\"", "defined twice"),
            ("\"a\" root ::= \"b\"", "does not begin with a rule"),
            ("root ::= $", "`$` is no sign"),
        ] {
            let refusal = to_lark(grammar).unwrap_err();
            assert!(refusal.contains(words), "{grammar}: {refusal}");
        }
    }

    #[test]
    fn the_notation_is_recognised() {
        assert!(is_ebnf("# a\nroot ::= \"x\""));
        assert!(!is_ebnf("start: \"::=\"") && !is_ebnf("start: \"a ::= b\" | \"c\""));
    }
}
