//! Values that have a short form: a name in place of a description, a number in place of a list, lengths and popularities as
//! `manylora bench serve` writes them.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Error, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::workload::lengths::{AzureService, Lengths};
use crate::workload::popularity::Popularity;

/// Something by its name, or all that there is to know of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Described<T> {
    /// By name.
    Name(String),
    /// Its figures.
    Is(T),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Described<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = Described<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a name, or a table of figures")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
                Ok(Described::Name(name.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Described::Is)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }
}

/// Numbers, of which one needs no brackets.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct OneOrMany<T>(pub Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = OneOrMany<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a number or a list of numbers")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
                T::deserialize(serde::de::value::U64Deserializer::new(value)).map(|one| OneOrMany(vec![one]))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
                T::deserialize(serde::de::value::F64Deserializer::new(value)).map(|one| OneOrMany(vec![one]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(OneOrMany)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }
}

/// How long prompts or outputs are: `128`, `64:256` (both ends are possible, as in `manylora bench serve`),
/// `lognormal:MEDIAN:MEAN` or `lognormal:MEDIAN:MEAN:MOST`, `azure_conversation`, `azure_code`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LengthChoice {
    /// Always the same.
    Fixed(u32),
    /// Uniform, from the first to the second.
    Uniform(u32, u32),
    /// Log-normal: median, mean, and what is cut off; None = what fits beside the other side.
    LogNormal(f64, f64, Option<u32>),
    /// As in Azure's traces.
    Azure(AzureService),
}

/// What lengths may look like.
const LENGTHS: &str =
    "a length such as 128, a range such as 64:256, lognormal:MEDIAN:MEAN[:MOST], azure_conversation or azure_code";

impl LengthChoice {
    /// The distributions of prompts and outputs in an engine of this context. What has no end of its own ends where prompts
    /// take three quarters of the context and outputs a quarter, so that every request fits.
    pub fn both(input: Self, output: Self, max_model_len: usize) -> [Lengths; 2] {
        let context = u32::try_from(max_model_len).unwrap_or(u32::MAX);
        let most = [context - context.div_ceil(4), context / 4].map(|most| most.max(1));
        [(input, 0), (output, 1)].map(|(choice, side)| match choice {
            Self::Fixed(tokens) => Lengths::Fixed(tokens),
            Self::Uniform(low, high) => Lengths::Uniform { low, high: high.saturating_add(1) },
            Self::LogNormal(median, mean, own) => Lengths::LogNormal { median, mean, most: own.unwrap_or(most[side]) },
            Self::Azure(service) => service.lengths(most[0], most[1])[side],
        })
    }
}

impl Display for LengthChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(tokens) => write!(f, "{tokens}"),
            Self::Uniform(low, high) => write!(f, "{low}:{high}"),
            Self::LogNormal(median, mean, None) => write!(f, "lognormal:{median}:{mean}"),
            Self::LogNormal(median, mean, Some(most)) => write!(f, "lognormal:{median}:{mean}:{most}"),
            Self::Azure(AzureService::Conversation) => f.write_str("azure_conversation"),
            Self::Azure(AzureService::Code) => f.write_str("azure_code"),
        }
    }
}

impl FromStr for LengthChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts: Vec<&str> = text.split(':').collect();
        let whole = |text: &str| text.parse::<u32>().ok().filter(|&tokens| tokens > 0);
        let number = |text: &str| text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0);
        let read = match parts[..] {
            ["azure_conversation"] => Some(Self::Azure(AzureService::Conversation)),
            ["azure_code"] => Some(Self::Azure(AzureService::Code)),
            ["lognormal", median, mean] => Some((median, mean, None))
                .and_then(|(median, mean, most)| Some(Self::LogNormal(number(median)?, number(mean)?, most))),
            ["lognormal", median, mean, most] => number(median)
                .zip(number(mean))
                .zip(whole(most))
                .map(|((median, mean), most)| Self::LogNormal(median, mean, Some(most))),
            [tokens] => whole(tokens).map(Self::Fixed),
            [low, high] => whole(low)
                .zip(whole(high))
                .filter(|(low, high)| low <= high)
                .map(|(low, high)| Self::Uniform(low, high)),
            _ => None,
        };
        read.ok_or(LENGTHS)
    }
}

/// Which adapters requests ask for: `uniform`, `zipf:1.1`, `power:0.3`, `ycsb:0.9`, `bimodal:0.8`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PopularityChoice(pub Popularity);

/// What a popularity may look like.
const POPULARITIES: &str =
    "uniform, zipf:S, power:ALPHA (S-LoRA's power law), ycsb:THETA or bimodal:RATIO, with a number behind the colon";

impl Display for PopularityChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Popularity::Uniform => f.write_str("uniform"),
            Popularity::Zipf { s } => write!(f, "zipf:{s}"),
            Popularity::PowerLaw { alpha } => write!(f, "power:{alpha}"),
            Popularity::Ycsb { theta } => write!(f, "ycsb:{theta}"),
            Popularity::Bimodal { ratio } => write!(f, "bimodal:{ratio}"),
        }
    }
}

impl FromStr for PopularityChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "uniform" {
            return Ok(Self(Popularity::Uniform));
        }
        let (name, number) = text.split_once(':').ok_or(POPULARITIES)?;
        let number: f64 = number.parse().map_err(|_| POPULARITIES)?;
        Ok(Self(match name {
            "zipf" => Popularity::Zipf { s: number },
            "power" => Popularity::PowerLaw { alpha: number },
            "ycsb" => Popularity::Ycsb { theta: number },
            "bimodal" => Popularity::Bimodal { ratio: number },
            _ => return Err(POPULARITIES),
        }))
    }
}

/// Reads what is written as text, or as a number.
fn from_text<'de, D, T>(deserializer: D, expected: &'static str) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr,
{
    struct Text<T>(&'static str, PhantomData<T>);
    impl<T: FromStr> Visitor<'_> for Text<T> {
        type Value = T;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str(self.0)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
        }

        fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
            number.to_string().parse().map_err(|_| E::invalid_value(Unexpected::Unsigned(number), &self))
        }
    }
    deserializer.deserialize_any(Text(expected, PhantomData))
}

impl<'de> Deserialize<'de> for LengthChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer, LENGTHS)
    }
}

impl Serialize for LengthChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Fixed(tokens) => serializer.serialize_u32(*tokens),
            other => serializer.collect_str(other),
        }
    }
}

impl<'de> Deserialize<'de> for PopularityChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer, POPULARITIES)
    }
}

impl Serialize for PopularityChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
