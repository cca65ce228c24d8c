//! Where a condition begins to hold: the smallest value of a parameter that meets it, or the largest. By bisection, which is right where
//! more of the parameter is better (or worse) throughout; what was run is told, point by point.

use std::fmt::{self, Display};
use std::str::FromStr;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::config::Config;
use crate::error::SimError;
use crate::run::{Watch, run_watched};
use crate::sweep::Point;

/// How a metric is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Below,
    AtMost,
    Above,
    AtLeast,
}

/// What must hold: `ttft_p99 < 0.5`, `slo_attainment >= 0.99`.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    metric: String,
    comparison: Comparison,
    limit: f64,
}

impl FromStr for Condition {
    type Err = SimError;

    fn from_str(text: &str) -> Result<Self, SimError> {
        let wrong = || {
            let message = "a metric, one of < <= > >=, and a number: `ttft_p99 < 0.5`, `slo_attainment >= 0.99`";
            SimError::field("condition", text, message)
        };
        let place = text.find(['<', '>']).ok_or_else(wrong)?;
        let (metric, rest) = text.split_at(place);
        let (comparison, limit) = match (rest.strip_prefix("<="), rest.strip_prefix(">=")) {
            (Some(limit), _) => (Comparison::AtMost, limit),
            (_, Some(limit)) => (Comparison::AtLeast, limit),
            _ if rest.starts_with('<') => (Comparison::Below, &rest[1..]),
            _ => (Comparison::Above, &rest[1..]),
        };
        let limit = limit.trim().parse().ok().filter(|limit: &f64| limit.is_finite()).ok_or_else(wrong)?;
        let metric = metric.trim().to_owned();
        if metric.is_empty() {
            return Err(wrong());
        }
        Ok(Self { metric, comparison, limit })
    }
}

impl Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = match self.comparison {
            Comparison::Below => "<",
            Comparison::AtMost => "<=",
            Comparison::Above => ">",
            Comparison::AtLeast => ">=",
        };
        write!(f, "{} {sign} {}", self.metric, self.limit)
    }
}

impl Condition {
    /// Whether it holds; what there is none of holds nothing.
    fn holds(&self, point: &Point) -> Result<bool, SimError> {
        let Some(value) = point.metric(&self.metric) else {
            let known = point.metrics.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
            return Err(SimError::field("condition", &self.metric, format!("no such metric; there are {known}")));
        };
        Ok(match self.comparison {
            Comparison::Below => value < self.limit,
            Comparison::AtMost => value <= self.limit,
            Comparison::Above => value > self.limit,
            Comparison::AtLeast => value >= self.limit,
        })
    }
}

/// Which end is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The smallest value, where larger ones hold, too.
    Smallest,
    /// The largest value, where smaller ones hold, too.
    Largest,
}

/// What is looked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    /// Which end.
    pub which: Which,
    /// The parameter, as [`Config::with`] takes it.
    pub parameter: String,
    /// Least value that is tried.
    pub low: f64,
    /// Most.
    pub high: f64,
    /// How near, as a share of the value; None = to the next whole number, or one percent where there are fractions.
    pub tolerance: Option<f64>,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// The parameter.
    pub parameter: String,
    /// What must hold.
    pub conditions: Vec<String>,
    /// The value where all hold; None if they hold nowhere in the range.
    pub value: Option<Value>,
    /// The nearest value that was run and where they do not; None if they hold in the whole range.
    pub beyond: Option<Value>,
    /// Every run, by value.
    pub trials: Vec<Trial>,
}

/// One run of a search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Whether all conditions held.
    pub holds: bool,
    /// The value and the metrics.
    #[serde(flatten)]
    pub point: Point,
}

struct Search<'a> {
    config: &'a Config,
    goal: &'a Goal,
    /// Whether the parameter counts.
    whole: bool,
    conditions: &'a [Condition],
    watch: &'a Watch,
    trials: Vec<(f64, Trial)>,
}

impl Search<'_> {
    fn value(&self, at: f64) -> Value {
        if self.whole { Value::from(at as u64) } else { Value::from(at) }
    }

    fn holds(&mut self, at: f64) -> Result<bool, SimError> {
        self.watch.check()?;
        let (parameter, value) = (&self.goal.parameter, self.value(at));
        let config = self.config.with(parameter, value.clone())?;
        let parameters = Map::from_iter([(parameter.clone(), value)]);
        let point = Point { parameters, metrics: run_watched(&config, self.watch)?.metrics() };
        let mut holds = true;
        for condition in self.conditions {
            holds &= condition.holds(&point)?;
        }
        self.trials.push((at, Trial { holds, point }));
        Ok(holds)
    }

    /// Where it holds, and the nearest place that was run and where it does not.
    fn ends(&mut self) -> Result<(Option<f64>, Option<f64>), SimError> {
        let Goal { which, low, high, tolerance, .. } = *self.goal;
        let (mut holds, mut fails) = if which == Which::Largest { (low, high) } else { (high, low) };
        if !self.holds(holds)? {
            return Ok((None, Some(holds)));
        }
        if holds == fails || self.holds(fails)? {
            return Ok((Some(fails), None));
        }
        let least: f64 = if self.whole { 1.0 } else { 0.0 };
        let tolerance = tolerance.unwrap_or(if self.whole { 0.0 } else { 0.01 });
        while (fails - holds).abs() > least.max(tolerance * holds.max(fails)) {
            let middle = f64::midpoint(holds, fails);
            let middle = if self.whole { middle.floor() } else { middle };
            if self.holds(middle)? {
                holds = middle;
            } else {
                fails = middle;
            }
        }
        Ok((Some(holds), Some(fails)))
    }
}

/// Finds it. The value that is returned was run and holds, and the one beyond it was run and does not.
pub fn find(config: &Config, goal: &Goal, conditions: &[Condition], watch: &Watch) -> Result<Found, SimError> {
    let Goal { parameter, low, high, tolerance, .. } = goal;
    if conditions.is_empty() {
        return Err(SimError::field("condition", "", "at least one is needed: `ttft_p99 < 0.5`"));
    }
    if let Some(tolerance) = tolerance.filter(|one| !(*one > 0.0 && *one < 1.0)) {
        return Err(SimError::field("tolerance", tolerance, "a share above 0 and below 1"));
    }
    if !(low.is_finite() && high.is_finite() && *low >= 0.0 && low <= high && *high < 1e15) {
        return Err(SimError::field("range", format!("{low}:{high}"), "from the least, from 0 up, to the most"));
    }
    // A name that there is none of is no matter of fractions.
    config.parameter(parameter)?;
    // What counts takes no fractions, by its type.
    let whole = config.with(parameter, Value::from(0.5)).is_err();
    if whole && (low.fract() != 0.0 || high.fract() != 0.0) {
        let message = format!("`{parameter}` takes whole numbers");
        return Err(SimError::field("range", format!("{low}:{high}"), message));
    }
    let mut search = Search { config, goal, whole, conditions, watch, trials: Vec::new() };
    let (found, beyond) = search.ends()?;
    let [value, beyond] = [found, beyond].map(|at| at.map(|at| search.value(at)));
    let mut trials = search.trials;
    trials.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(Found {
        parameter: parameter.clone(),
        conditions: conditions.iter().map(ToString::to_string).collect(),
        value,
        beyond,
        trials: trials.into_iter().map(|(_, trial)| trial).collect(),
    })
}
