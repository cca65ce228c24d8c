//! numpy's legacy random numbers (`numpy.random.seed`), draw for draw: published loads were made with them, and the load of a
//! seed is then the very same load.
//!
//! After numpy's `random/src/legacy/legacy-distributions.c` and `random/src/distributions/distributions.c`; tests compare
//! with numbers that numpy printed.

use rand_mt::Mt;

/// `numpy.random.RandomState(seed)`.
#[derive(Clone, Debug)]
pub struct RandomState {
    words: Mt,
    /// The second of a pair of normal numbers.
    gauss: Option<f64>,
}

impl RandomState {
    /// As `numpy.random.seed(seed)` leaves it.
    pub fn new(seed: u32) -> Self {
        Self { words: Mt::new(seed), gauss: None }
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn random(&mut self) -> f64 {
        let (high, low) = (self.words.next_u32() >> 5, self.words.next_u32() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// Uniform in `low..high`, by rejection under a mask.
    pub fn randint(&mut self, low: u32, high: u32) -> u32 {
        let range = high - 1 - low;
        if range == 0 {
            return low;
        }
        let mask = u32::MAX >> range.leading_zeros();
        loop {
            let value = self.words.next_u32() & mask;
            if value <= range {
                return low + value;
            }
        }
    }

    /// Exponential of mean 1.
    pub fn standard_exponential(&mut self) -> f64 {
        -(1.0 - self.random()).ln()
    }

    /// Normal of mean 0 and variance 1, by the polar method.
    pub fn standard_normal(&mut self) -> f64 {
        if let Some(gauss) = self.gauss.take() {
            return gauss;
        }
        loop {
            let (x, y) = (2.0 * self.random() - 1.0, 2.0 * self.random() - 1.0);
            let squared = x * x + y * y;
            if squared < 1.0 && squared != 0.0 {
                let factor = (-2.0 * squared.ln() / squared).sqrt();
                self.gauss = Some(factor * x);
                return factor * y;
            }
        }
    }

    /// `U^(1/a)`: density `a x^(a-1)` on [0, 1].
    pub fn power(&mut self, a: f64) -> f64 {
        (1.0 - (-self.standard_exponential()).exp()).powf(1.0 / a)
    }

    /// Gamma of this shape and scale.
    pub fn gamma(&mut self, shape: f64, scale: f64) -> f64 {
        scale * self.standard_gamma(shape)
    }

    fn standard_gamma(&mut self, shape: f64) -> f64 {
        if shape == 1.0 {
            return self.standard_exponential();
        }
        if shape < 1.0 {
            loop {
                let u = self.random();
                let v = self.standard_exponential();
                if u <= 1.0 - shape {
                    let x = u.powf(1.0 / shape);
                    if x <= v {
                        return x;
                    }
                } else {
                    let y = -((1.0 - u) / shape).ln();
                    let x = (1.0 - shape + shape * y).powf(1.0 / shape);
                    if x <= v + y {
                        return x;
                    }
                }
            }
        }
        let b = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * b).sqrt();
        loop {
            let (x, v) = loop {
                let x = self.standard_normal();
                let v = 1.0 + c * x;
                if v > 0.0 {
                    break (x, v * v * v);
                }
            };
            let u = self.random();
            if u < 1.0 - 0.0331 * (x * x) * (x * x) || u.ln() < 0.5 * x * x + b * (1.0 - v + v.ln()) {
                return b * v;
            }
        }
    }

    /// Log-normal: the exponential of a normal of this mean and deviation.
    pub fn lognormal(&mut self, mean: f64, sigma: f64) -> f64 {
        (mean + sigma * self.standard_normal()).exp()
    }
}
