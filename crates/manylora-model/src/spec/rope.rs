//! The rotary embedding's part of a configuration: `rope_theta` at top level with `rope_scaling`, or everything under
//! `rope_parameters` (transformers 5).

use super::config::Config;
use super::parse::MAX_POSITIONS;
use super::{RopeScaling, RopeSpec};
use crate::error::ModelError;

/// Reads the rotary embedding and the context that goes with it: yarn and linear scaling extend it by their factor,
/// as vLLM derives it; llama3 configurations name the extended context already.
pub(super) fn parse(config: &Config<'_>, declared: usize) -> Result<(RopeSpec, usize), ModelError> {
    let scaling = config.object("rope_scaling", "rope_scaling.")?;
    let parameters = config.object("rope_parameters", "rope_parameters.")?;
    let theta_bounds = "a number above 1 is needed";
    let theta_of = |config: &Config<'_>| config.optional_number("rope_theta", theta_bounds, |theta| theta > 1.0);
    let mut theta = None;
    for source in [parameters.as_ref(), scaling.as_ref(), Some(config)].into_iter().flatten() {
        theta = match theta {
            None => theta_of(source)?,
            found => found,
        };
    }
    let theta = theta.unwrap_or(10_000.0);
    // `rope_scaling` wins where both are given, as in transformers.
    let Some(chosen) = scaling.or(parameters) else {
        return Ok((RopeSpec { theta, scaling: RopeScaling::Default }, declared));
    };
    let kind = match chosen.text("rope_type")? {
        Some(kind) => kind,
        None => chosen.text("type")?.unwrap_or("default"),
    };
    if chosen.keys().any(|key| key == "full_attention" || key == "sliding_attention") {
        return Err(ModelError::Unsupported {
            message: "rope parameters per layer type are not supported; one set for all layers is".to_owned(),
        });
    }
    if let Some(factor) =
        chosen.optional_number("partial_rotary_factor", "a number is needed", |_| true)?.filter(|factor| *factor != 1.0)
    {
        return Err(ModelError::Unsupported {
            message: format!("partial_rotary_factor `{factor}` is not supported; only 1.0 is"),
        });
    }
    let factor_bounds = "a number from 1 to 1048576 is needed";
    let holds = |factor: f64| (1.0..=1_048_576.0).contains(&factor);
    let positive = "a number above 0 is needed";
    let above_zero = |number: f64| number > 0.0;
    let original = || chosen.optional_size("original_max_position_embeddings", 1..=MAX_POSITIONS);
    let (scaling, context) = match kind {
        "default" => (RopeScaling::Default, declared),
        "linear" => {
            let factor = chosen.number("factor", factor_bounds, holds)?;
            (RopeScaling::Linear { factor }, extended(declared, factor))
        }
        "llama3" => {
            let low_freq_factor = chosen.number("low_freq_factor", positive, above_zero)?;
            let high_freq_factor = chosen.number("high_freq_factor", positive, above_zero)?;
            if high_freq_factor <= low_freq_factor {
                return Err(chosen.damaged(format!(
                    "`high_freq_factor` is `{high_freq_factor}`, which is not above `low_freq_factor`, \
                     `{low_freq_factor}`"
                )));
            }
            let scaling = RopeScaling::Llama3 {
                factor: chosen.number("factor", factor_bounds, holds)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position: chosen.size("original_max_position_embeddings", 1..=MAX_POSITIONS)?,
            };
            (scaling, declared)
        }
        "yarn" => {
            let original_max_position = original()?.unwrap_or(declared);
            let factor = match chosen.optional_number("factor", factor_bounds, holds)? {
                Some(factor) => factor,
                None if holds(declared as f64 / original_max_position as f64) => {
                    declared as f64 / original_max_position as f64
                }
                None => chosen.number("factor", factor_bounds, holds)?,
            };
            let mscale_bounds = "a number from 0 to 1000 is needed";
            let mscale_of = |key: &str| {
                let given = chosen.optional_number(key, mscale_bounds, |it| (0.0..=1000.0).contains(&it))?;
                // Zero means "not given" to transformers.
                Ok::<_, ModelError>(given.filter(|it| *it != 0.0))
            };
            let magnitude = |number: f64| number > 0.0 && number <= 1000.0;
            let bounds = "a number above 0, up to 1000, is needed";
            let attention_factor = match chosen.optional_number("attention_factor", bounds, magnitude)? {
                Some(attention_factor) => attention_factor,
                None => match (mscale_of("mscale")?, mscale_of("mscale_all_dim")?) {
                    (Some(mscale), Some(all)) => magnitude_scale(factor, mscale) / magnitude_scale(factor, all),
                    _ => magnitude_scale(factor, 1.0),
                },
            };
            // Zero means "not given" to transformers.
            let beta = |key: &str, default: f64| -> Result<f64, ModelError> {
                let needed = "0 or a number from 0.000001 to 1000000 is needed";
                let given = chosen.optional_number(key, needed, |it| it == 0.0 || (1e-6..=1e6).contains(&it))?;
                Ok(given.filter(|beta| *beta != 0.0).unwrap_or(default))
            };
            let scaling = RopeScaling::Yarn {
                factor,
                original_max_position,
                beta_fast: beta("beta_fast", 32.0)?,
                beta_slow: beta("beta_slow", 1.0)?,
                attention_factor,
                truncate: chosen.flag("truncate", true)?,
            };
            (scaling, extended(original_max_position, factor))
        }
        other => {
            return Err(ModelError::Unsupported {
                message: format!(
                    "rope type `{other}` is not supported; supported are default, linear, llama3 and yarn"
                ),
            });
        }
    };
    Ok((RopeSpec { theta, scaling }, context))
}

fn extended(positions: usize, factor: f64) -> usize {
    ((positions as f64 * factor) as usize).clamp(1, MAX_POSITIONS)
}

/// YaRN's temperature as a factor on cos and sin (Peng et al. 2023, section 3.4; `mscale` as DeepSeek writes it).
fn magnitude_scale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}
