//! Whether two devices compute the same model: their greedy tokens, as far as the numbers decide which token is best.
//!
//! Two devices that round to bfloat16 at different places differ a little in every logit. Where the best two candidates are
//! closer than that, either may be taken, and what follows is another text.

use std::fmt;

/// A greedy choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// How much larger its logit is than that of the second best.
    pub margin: f32,
}

/// How far two devices agree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// Equal tokens before the first other one.
    pub equal: usize,
    /// How many of them were certain.
    pub certain: usize,
    /// The reference's margin where the first other token is; None where there is none.
    pub near_tie: Option<f32>,
    /// Largest difference of a log-probability of equal tokens.
    pub furthest: f32,
}

/// Compares choices with those of a reference. A token is certain where the reference's margin is `blur` or more: that one must
/// be equal, and log-probabilities of equal tokens are nearer than `blur`.
///
/// # Errors
///
/// What differs that may not.
pub fn agreement(got: &[Choice], reference: &[Choice], blur: f32) -> Result<Agreement, String> {
    if got.len() != reference.len() {
        return Err(format!("{} tokens came, and {} from the reference", got.len(), reference.len()));
    }
    let mut found = Agreement { equal: 0, certain: 0, near_tie: None, furthest: 0.0 };
    for (position, (got, reference)) in got.iter().zip(reference).enumerate() {
        let certain = reference.margin >= blur;
        if got.token != reference.token {
            if certain {
                return Err(format!(
                    "token {position} is {}, and {} from the reference, by a margin of {:.3} (less than {blur} may go either way)",
                    got.token, reference.token, reference.margin
                ));
            }
            found.near_tie = Some(reference.margin);
            return Ok(found);
        }
        let apart = (got.logprob - reference.logprob).abs();
        if apart.is_nan() || apart >= blur {
            return Err(format!(
                "token {position} has log-probability {:.3}, and {:.3} from the reference (they may be {blur} apart)",
                got.logprob, reference.logprob
            ));
        }
        found.equal += 1;
        found.certain += usize::from(certain);
        found.furthest = found.furthest.max(apart);
    }
    Ok(found)
}

impl fmt::Display for Agreement {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} equal ({} of them certain)", self.equal, self.certain)?;
        if let Some(margin) = self.near_tie {
            write!(out, ", then another at a margin of {margin:.3}")?;
        }
        write!(out, ", log-probabilities at most {:.3} apart", self.furthest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(given: &[(u32, f32, f32)]) -> Vec<Choice> {
        given.iter().map(|&(token, logprob, margin)| Choice { token, logprob, margin }).collect()
    }

    #[test]
    fn near_ties_may_go_either_way_and_nothing_else() {
        let reference = choices(&[(5, -0.1, 3.0), (7, -0.9, 0.1), (9, -0.2, 2.0)]);
        let got = choices(&[(5, -0.15, 2.9), (7, -0.8, 0.2), (9, -0.2, 2.0)]);
        let all = agreement(&got, &reference, 0.25).unwrap();
        assert_eq!((all.equal, all.certain, all.near_tie), (3, 2, None));
        assert!((all.furthest - 0.1).abs() < 1e-6);
        // Another token at a near tie ends the comparison: what follows is another text.
        let other = choices(&[(5, -0.1, 3.0), (8, -0.9, 0.1), (1, -7.0, 2.0)]);
        let until = agreement(&other, &reference, 0.25).unwrap();
        assert_eq!((until.equal, until.certain, until.near_tie), (1, 1, Some(0.1)));
        let wrong = choices(&[(5, -0.1, 3.0), (7, -0.9, 0.1), (1, -0.2, 2.0)]);
        let said = agreement(&wrong, &reference, 0.25).unwrap_err();
        assert!(said.contains("token 2 is 1, and 9") && said.contains("2.000"), "{said}");
        // As certain as the bound asks for.
        assert!(agreement(&other, &reference, 0.1).is_err());
    }

    #[test]
    fn far_probabilities_and_missing_tokens_are_errors() {
        let reference = choices(&[(5, -0.1, 3.0)]);
        assert!(agreement(&choices(&[(5, -0.4, 3.0)]), &reference, 0.25).unwrap_err().contains("-0.400, and -0.100"));
        assert!(agreement(&choices(&[(5, f32::NAN, 3.0)]), &reference, 0.25).is_err());
        assert!(agreement(&[], &reference, 0.25).unwrap_err().contains("0 tokens"));
    }
}
