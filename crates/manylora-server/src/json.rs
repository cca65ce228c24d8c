//! JSON of strangers: read with bounds on what it becomes in memory. A value of a tree takes forty times the bytes that it is
//! written with, so room is taken for values as they come, and one body may have so many of them; token ids, of which a prompt
//! may well have millions, are no tree. Reading takes time in proportion to the bytes, whatever they say.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Values that a body may have beside its token ids.
pub(crate) const MOST_VALUES: usize = 1 << 20;
/// An object takes as much as so many values beside its own.
const OF_AN_OBJECT: usize = 3;

/// Token ids of one prompt or of several.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ids {
    /// An array.
    One(Vec<u32>),
    /// An array of arrays.
    Many(Vec<Vec<u32>>),
}

impl Ids {
    /// The same as a tree.
    pub(crate) fn to_value(&self) -> Value {
        match self {
            Self::One(ids) => Value::from(ids.as_slice()),
            Self::Many(all) => all.iter().map(|ids| Value::from(ids.as_slice())).collect(),
        }
    }

    fn into_values(self) -> Vec<Value> {
        match self {
            Self::One(ids) => ids.into_iter().map(Value::from).collect(),
            Self::Many(all) => all.into_iter().map(Value::from).collect(),
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::One(ids) => ids.len(),
            Self::Many(all) => all.iter().map(Vec::len).sum(),
        }
    }

    /// How it begins, for errors.
    pub(crate) fn beginning(&self) -> Value {
        let few = |ids: &[u32]| ids[..ids.len().min(64)].to_vec();
        match self {
            Self::One(ids) => Self::One(few(ids)),
            Self::Many(all) => Self::Many(all.iter().take(64).map(|ids| few(ids)).collect()),
        }
        .to_value()
    }
}

/// What a body holds.
#[derive(Debug)]
pub(crate) enum Document {
    /// An object: its fields, and those that are token ids and nothing else.
    Object(Map<String, Value>, Vec<(String, Ids)>),
    /// Something else.
    Other,
}

/// Why a body could not be read.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It is not JSON.
    Syntax(serde_json::Error),
    /// It has too many values.
    TooMany,
    /// There is no room for its values now.
    NoRoom,
}

/// Reads a body. Fields of these names are looked at for token ids; `make_room` is asked for room for so many values in all,
/// before they are made.
pub(crate) fn read(bytes: &[u8], of_ids: &[&str], make_room: &mut dyn FnMut(usize) -> bool) -> Result<Document, Fault> {
    let (mut values, mut refused) = (0_usize, None);
    let take = RefCell::new(|more: usize| {
        values = values.saturating_add(more);
        if values > MOST_VALUES {
            refused = Some(Fault::TooMany);
        } else if !make_room(values) {
            refused = Some(Fault::NoRoom);
        }
        refused.is_none()
    });
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let top = Top { left: Left(&take), of_ids };
    let read = deserializer.deserialize_any(top).and_then(|document| deserializer.end().map(|()| document));
    read.map_err(|error| refused.unwrap_or(Fault::Syntax(error)))
}

/// Takes room for so many values; false where they may not be.
#[derive(Clone, Copy)]
struct Left<'a>(&'a RefCell<dyn FnMut(usize) -> bool + 'a>);

impl Left<'_> {
    fn take<E: serde::de::Error>(self, values: usize) -> Result<(), E> {
        if (self.0.borrow_mut())(values) { Ok(()) } else { Err(E::custom("no more values")) }
    }
}

struct Top<'a> {
    left: Left<'a>,
    of_ids: &'a [&'a str],
}

impl<'de> Visitor<'de> for Top<'_> {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Document, A::Error> {
        let (mut map, mut all) = (Map::new(), Vec::<(String, Ids)>::new());
        while let Some(name) = access.next_key::<String>()? {
            self.left.take(1)?;
            // Of fields that come twice the last one counts.
            if self.of_ids.contains(&name.as_str()) {
                all.retain(|(known, _)| *known != name);
                match access.next_value_seed(Either { left: self.left, depth: 2 })? {
                    Element::Ids(ids) => {
                        // Not one that keeps the order of the others: it would look at all of them.
                        map.swap_remove(&name);
                        all.push((name, ids));
                    }
                    Element::Id(id) => {
                        map.insert(name, Value::from(id));
                    }
                    Element::Value(value) => {
                        map.insert(name, value);
                    }
                }
            } else {
                map.insert(name, access.next_value_seed(Tree(self.left))?);
            }
        }
        Ok(Document::Object(map, all))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Document, A::Error> {
        while access.next_element_seed(Tree(self.left))?.is_some() {}
        Ok(Document::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Document, E> {
        Ok(Document::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Document, E> {
        Ok(Document::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Document, E> {
        Ok(Document::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Document, E> {
        Ok(Document::Other)
    }

    fn visit_str<E>(self, _: &str) -> Result<Document, E> {
        Ok(Document::Other)
    }

    fn visit_unit<E>(self) -> Result<Document, E> {
        Ok(Document::Other)
    }
}

/// A value as `serde_json` makes it.
#[derive(Clone, Copy)]
struct Tree<'a>(Left<'a>);

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.0.take(1)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(self)? {
            items.push(item);
        }
        // Of one it would have room for four.
        items.shrink_to_fit();
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = access.next_key::<String>()? {
            // The first has room made for some more, and a table.
            self.0.take(if map.is_empty() { 1 + OF_AN_OBJECT } else { 1 })?;
            map.insert(name, access.next_value_seed(self)?);
        }
        Ok(Value::Object(map))
    }
}

/// A value of a field that may be token ids.
enum Element {
    Id(u32),
    Ids(Ids),
    Value(Value),
}

/// Reads token ids where a value is that, and a tree otherwise.
#[derive(Clone, Copy)]
struct Either<'a> {
    left: Left<'a>,
    /// Arrays in one another that are looked into.
    depth: usize,
}

impl Either<'_> {
    fn value<E: serde::de::Error>(self, element: Element) -> Result<Value, E> {
        match element {
            Element::Id(id) => self.left.take(1).map(|()| Value::from(id)),
            Element::Ids(ids) => self.left.take(ids.count()).map(|()| ids.to_value()),
            Element::Value(value) => Ok(value),
        }
    }

    fn scalar<E: serde::de::Error>(self, value: Value) -> Result<Element, E> {
        self.left.take(1).map(|()| Element::Value(value))
    }
}

impl<'de> DeserializeSeed<'de> for Either<'_> {
    type Value = Element;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Element, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Either<'_> {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Element, E> {
        u32::try_from(value).map_or_else(|_| self.scalar(value.into()), |id| Ok(Element::Id(id)))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Element, E> {
        self.scalar(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Element, E> {
        self.scalar(value.into())
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Element, E> {
        self.scalar(value.into())
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Element, E> {
        self.scalar(value.into())
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Element, E> {
        self.scalar(Value::Null)
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Element, A::Error> {
        Tree(self.left).visit_map(access).map(Element::Value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Element, A::Error> {
        self.left.take(1)?;
        let Some(depth) = self.depth.checked_sub(1) else {
            return Tree(self.left).visit_seq(access).map(Element::Value);
        };
        // What has come so far: ids as long as nothing else is among them.
        let (mut ids, mut items) = (None, Vec::new());
        while let Some(element) = access.next_element_seed(Self { depth, ..self })? {
            match (&mut ids, element) {
                (None, Element::Id(id)) if items.is_empty() => ids = Some(Ids::One(vec![id])),
                (None, Element::Ids(Ids::One(first))) if items.is_empty() => ids = Some(Ids::Many(vec![first])),
                (Some(Ids::One(all)), Element::Id(id)) => all.push(id),
                (Some(Ids::Many(all)), Element::Ids(Ids::One(next))) => all.push(next),
                (_, element) => {
                    if let Some(before) = ids.take() {
                        self.left.take(before.count())?;
                        items = before.into_values();
                    }
                    items.push(self.value(element)?);
                }
            }
        }
        Ok(ids.map_or_else(|| Element::Value(Value::Array(items)), Element::Ids))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn fields(text: &str) -> (Map<String, Value>, Vec<(String, Ids)>) {
        match read(text.as_bytes(), &["prompt", "tokens"], &mut |_| true) {
            Ok(Document::Object(map, ids)) => (map, ids),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn ids_are_no_tree_and_all_else_is_what_it_was() {
        let (map, ids) =
            fields(r#"{"a": [1, 2], "prompt": [3, 4294967295], "b": {"c": null}, "tokens": [[5], [6, 7]]}"#);
        assert_eq!(Value::Object(map), json!({"a": [1, 2], "b": {"c": null}}));
        let tokens = Ids::Many(vec![vec![5], vec![6, 7]]);
        assert_eq!(ids, [("prompt".to_owned(), Ids::One(vec![3, u32::MAX])), ("tokens".to_owned(), tokens)]);
        for prompt in [
            json!("text"),
            json!(["a", "b"]),
            json!([]),
            json!([[]]),
            json!([1, "x"]),
            json!([[1], "x"]),
            json!([[1], []]),
            json!([1, [2]]),
            json!([-1]),
            json!([4_294_967_296_u64]),
            json!([1.5]),
            json!([[[1]]]),
            json!({"a": 1}),
            json!(7),
            json!(null),
            json!([[1], [2, null]]),
            json!(["x", 1, [2]]),
        ] {
            let (map, ids) = fields(&json!({"prompt": prompt}).to_string());
            assert_eq!((&map["prompt"], ids), (&prompt, Vec::new()));
        }
        // The last one counts.
        assert_eq!(fields(r#"{"prompt": [1], "prompt": "x"}"#).1, []);
        let (map, ids) = fields(r#"{"prompt": "x", "prompt": [1]}"#);
        assert_eq!((map.len(), ids.len()), (0, 1));
    }

    #[test]
    fn there_may_be_so_many_values_and_no_more() {
        let zeros = |count: usize| vec!["0"; count].join(",");
        let most = MOST_VALUES - 2;
        assert!(matches!(
            read(format!(r#"{{"a":[{}]}}"#, zeros(most)).as_bytes(), &[], &mut |_| true),
            Ok(Document::Object(..))
        ));
        for text in [
            format!(r#"{{"a":[{}]}}"#, zeros(most + 1)),
            format!(r#"{{"prompt":[{},"x"]}}"#, zeros(most + 1)),
            format!(r#"{{"prompt":[{}]}}"#, vec!["[0]"; most + 1].join(",")),
            format!(r#"{{"prompt":[[[{}]]]}}"#, zeros(most + 1)),
            format!(r#"{{"a":{{{}}}}}"#, vec![r#""":0"#; most].join(",")),
            format!("[{}]", zeros(MOST_VALUES + 1)),
        ] {
            assert!(
                matches!(read(text.as_bytes(), &["prompt"], &mut |_| true), Err(Fault::TooMany)),
                "{}",
                &text[..20]
            );
        }
        let (_, ids) = fields(&format!(r#"{{"prompt":[{}]}}"#, zeros(3 * MOST_VALUES)));
        assert_eq!(ids[0].1.count(), 3 * MOST_VALUES);
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u32>().prop_map(Value::from),
            (-1e9..1e9).prop_map(Value::from),
            ".{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec((".{0,3}", inner), 0..5)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn values_are_those_of_serde_json(prompt in any_json(), other in any_json()) {
            let text = json!({"prompt": prompt, "other": other}).to_string();
            let (map, ids) = fields(&text);
            let read = ids.first().map_or_else(|| map["prompt"].clone(), |(_, ids)| ids.to_value());
            // Numbers as the text has them.
            let expected: Value = serde_json::from_str(&text).expect("JSON");
            prop_assert_eq!((&read, &map["other"]), (&expected["prompt"], &expected["other"]));
        }
    }
}
