//! Series as text: families with their labels, in the two formats that are asked for.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use manylora::Distribution;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::Seen;

/// Labels of a series beside those of its page. Values are escaped by [`label`].
pub(super) type Labels = Vec<(&'static str, String)>;

/// A label with its value as the format wants it.
pub(super) fn label(name: &'static str, value: &str) -> (&'static str, String) {
    (name, escaped(value))
}

fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

/// Writes families.
pub(super) struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    pub(super) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, f64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        series.into_iter().try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    /// Counters; the format adds `_total` to the name.
    pub(super) fn counters(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        series.into_iter().try_for_each(|(labels, value)| {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)
        })
    }

    /// Seconds, summed up.
    pub(super) fn seconds(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, f64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        series.into_iter().try_for_each(|(labels, value)| {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)
        })
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        family.encode_counter::<NoLabelSet, _, u64>(&value, None)
    }

    pub(super) fn histograms<'d>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, &'d Distribution)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        series.into_iter().try_for_each(|(labels, values)| {
            let (sum, count, buckets) = parts(values);
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }

    pub(super) fn histogram(&mut self, name: &str, help: &str, values: &Distribution) -> fmt::Result {
        let (sum, count, buckets) = parts(values);
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        family.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }
}

/// A distribution as the encoder takes it: the greatest number stands for infinity.
fn parts(values: &Distribution) -> (f64, u64, Vec<(f64, u64)>) {
    let buckets = values.buckets().map(|(bound, count)| (if bound.is_finite() { bound } else { f64::MAX }, count));
    (values.sum(), values.count(), buckets.collect())
}

type Write = fn(&mut Page<'_>, &Seen) -> fmt::Result;

#[derive(Debug)]
struct Section {
    seen: Arc<Seen>,
    write: Write,
}

impl Collector for Section {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        (self.write)(&mut Page(encoder), &self.seen)
    }
}

/// Writes a section whose series all have `labels`.
pub(super) fn write(page: &mut String, labels: &[(&'static str, &str)], seen: &Arc<Seen>, write: Write) -> fmt::Result {
    let labels = labels.iter().map(|&(name, value)| (Cow::Borrowed(name), Cow::Owned(escaped(value))));
    let mut registry = Registry::with_labels(labels);
    registry.register_collector(Box::new(Section { seen: Arc::clone(seen), write }));
    encode_registry(page, &registry)
}

/// The same page in the older text format, where a counter's family has the name of its series.
pub(super) fn plain(page: &str) -> String {
    let mut plain = String::with_capacity(page.len());
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("EOF"), ..) => continue,
            (Some("#"), Some(kind @ ("HELP" | "TYPE")), Some(name), Some(rest)) => {
                // A family's help comes before its type.
                let told = if kind == "HELP" { lines.peek().copied().unwrap_or_default() } else { line };
                let counter = told.ends_with(" counter");
                let suffix = if counter { "_total" } else { "" };
                plain.extend(["# ", kind, " ", name, suffix, " ", rest]);
            }
            _ => plain.push_str(line),
        }
        plain.push('\n');
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_labels_cannot_end_them() {
        assert_eq!(label("name", "a\"} 1\nb\\").1, r#"a\"} 1\nb\\"#);
    }

    #[test]
    fn counters_are_named_as_each_format_wants() {
        let open =
            "# HELP a:b Some help.\n# TYPE a:b counter\na:b_total 3\n# HELP c Other.\n# TYPE c gauge\nc 1.0\n# EOF\n";
        let old = "# HELP a:b_total Some help.\n# TYPE a:b_total counter\na:b_total 3\n# HELP c Other.\n# TYPE c gauge\nc 1.0\n";
        assert_eq!(plain(open), old);
    }
}
