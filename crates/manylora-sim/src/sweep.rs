//! Runs of one configuration with parameters changed: every combination of their values, in parallel, each as it would be
//! alone. The seed is the same for all, so that they differ in nothing else.

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::config::Config;
use crate::error::SimError;
use crate::run::{Watch, play};

/// Combinations beyond this are a mistake.
const MOST_POINTS: usize = 10_000;

/// A parameter and its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Its name, as [`Config::with`] takes it.
    pub parameter: String,
    /// Its values.
    pub values: Vec<Value>,
}

/// One run of many.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The values of the parameters that were changed, by name.
    pub parameters: Map<String, Value>,
    /// Its report's metrics, by name; what there is none of is null.
    #[serde(serialize_with = "as_table")]
    pub metrics: Vec<(String, f64)>,
}

impl Point {
    /// A metric by name.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }
}

fn as_table<S: Serializer>(metrics: &[(String, f64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(metrics.iter().map(|(name, value)| (name, value)))
}

/// Runs every combination, the last parameter changing fastest. All configurations are checked before the first is run.
pub fn sweep(config: &Config, axes: &[Axis], watch: &Watch) -> Result<Vec<Point>, SimError> {
    let mut points: Vec<(Config, Map<String, Value>)> = vec![(config.clone(), Map::new())];
    for (place, axis) in axes.iter().enumerate() {
        if axis.values.is_empty() {
            return Err(SimError::field("sweep", &axis.parameter, "at least one value is needed"));
        }
        if axes[..place].iter().any(|other| other.parameter == axis.parameter) {
            return Err(SimError::field("sweep", &axis.parameter, "it is swept twice"));
        }
        if points.len() * axis.values.len() > MOST_POINTS {
            let message = format!("that makes more than {MOST_POINTS} runs; give fewer values");
            return Err(SimError::field("sweep", &axis.parameter, message));
        }
        let with = |(config, told): &(Config, Map<String, Value>)| {
            let one = |value: &Value| {
                let mut told = told.clone();
                told.insert(axis.parameter.clone(), value.clone());
                Ok((config.with(&axis.parameter, value.clone())?, told))
            };
            axis.values.iter().map(one).collect::<Result<Vec<_>, SimError>>()
        };
        points = points.iter().map(with).collect::<Result<Vec<_>, _>>()?.concat();
    }
    for (config, told) in &points {
        let prepared = config.prepare().map_err(|error| at(told, error))?;
        watch.expect(prepared.load.count as u64);
    }
    let one = |(config, told): &(Config, Map<String, Value>)| {
        watch.check()?;
        let report = play(config, watch).map_err(|error| at(told, error))?;
        Ok(Point { parameters: told.clone(), metrics: report.metrics() })
    };
    points.par_iter().map(one).collect()
}

/// An error of one point, which names the point.
fn at(told: &Map<String, Value>, error: SimError) -> SimError {
    if error == SimError::Interrupted || told.is_empty() {
        return error;
    }
    let told: Vec<String> = told.iter().map(|(name, value)| format!("{name}={value}")).collect();
    SimError::Point { point: told.join(" "), error: Box::new(error) }
}
