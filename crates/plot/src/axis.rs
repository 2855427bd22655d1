//! Axes: the positions of values, the marks, and the format of values.

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use std::ops::Range;

/// The largest number of marks on an axis.
const MARKS_MAX: usize = 12;

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal distances for equal differences. The axis always includes 0.
    Linear,
    /// Equal distances for equal factors. Only values above 0 can be shown.
    Log,
}

/// An axis of a chart.
#[derive(Clone, Debug)]
pub struct Axis {
    /// The label, with the unit.
    pub label: String,
    /// The scale.
    pub scale: Scale,
    /// Formats the value of a mark.
    pub write: fn(f64) -> String,
}

impl Axis {
    /// Makes an axis whose marks are formatted by [`decimal`].
    pub fn new(label: impl Into<String>, scale: Scale) -> Self {
        Self { label: label.into(), scale, write: decimal }
    }

    /// Returns whether the axis can show `value`.
    pub(crate) fn shows(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }
}

/// Formats the number `value` for a person: `0.5`, `20`, `1,500`, `2.5M`, `3G`.
pub fn decimal(value: f64) -> String {
    let trim = |text: String| {
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    };
    let size = value.abs();
    if size >= 1e9 {
        trim(format!("{:.2}", value / 1e9)) + "G"
    } else if size >= 1e6 {
        trim(format!("{:.2}", value / 1e6)) + "M"
    } else if size >= 1000.0 {
        let whole = value.abs().round() as u64;
        let sign = if value < 0.0 { "-" } else { "" };
        format!("{sign}{},{:03}", whole / 1000, whole % 1000)
    } else {
        trim(format!("{value:.3}"))
    }
}

/// An axis with its ends, for plotters.
#[derive(Clone)]
pub(crate) struct Ruler {
    from: f64,
    to: f64,
    scale: Scale,
    write: fn(f64) -> String,
}

impl Ruler {
    /// Makes a ruler that covers all `values` that `axis` can show.
    pub fn over(axis: &Axis, values: impl Iterator<Item = f64>) -> Self {
        let (mut from, mut to) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|v| axis.shows(*v)) {
            from = from.min(value);
            to = to.max(value);
        }
        if from > to {
            (from, to) = (1.0, 1.0);
        }
        match axis.scale {
            Scale::Linear => {
                let (low, high) = (from.min(0.0), to.max(0.0));
                let room = if high > low { (high - low) * 0.06 } else { 1.0 };
                from = if low < 0.0 { low - room } else { 0.0 };
                to = if high > 0.0 || low == 0.0 { high + room } else { 0.0 };
            }
            Scale::Log => {
                // The range has a mark even if there is only one value.
                let room = if to > from * 4.0 { 1.25 } else { 2.5 };
                from = (from / room).max(f64::MIN_POSITIVE);
                to = (to * room).min(f64::MAX);
            }
        }
        Self { from, to, scale: axis.scale, write: axis.write }
    }

    /// Makes a linear ruler from `from` to `to`, if these are numbers in this order.
    pub fn between(axis: &Axis, from: f64, to: f64) -> Self {
        let is_range = from.is_finite() && to.is_finite() && from < to;
        let (from, to) = if is_range { (from, to) } else { (0.0, 1.0) };
        Self { from, to, scale: Scale::Linear, write: axis.write }
    }

    /// Returns `value`, limited to the range of the ruler.
    pub fn clamp(&self, value: f64) -> f64 {
        value.clamp(self.from, self.to)
    }

    /// Returns the position of `value`: 0 at the beginning of the ruler, 1 at its end.
    fn position(&self, value: f64) -> f64 {
        let along =
            |v: f64| if self.scale == Scale::Log { v.max(f64::MIN_POSITIVE).ln() } else { v };
        let (from, to) = (along(self.from), along(self.to));
        if to > from { (along(value) - from) / (to - from) } else { 0.5 }
    }

    /// Returns marks with a step of 1, 2 or 5 times a power of ten, the smallest step that gives at
    /// most `count_max` marks.
    fn linear_marks(&self, count_max: usize) -> Vec<f64> {
        let least = (self.to - self.from) / count_max.max(1) as f64;
        let power = 10f64.powf(least.log10().floor());
        let step =
            [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= least * 0.999);
        let step = step.unwrap_or(10.0 * power);
        let first = (self.from / step).ceil();
        (0..=count_max).map(|k| (first + k as f64) * step).filter(|v| *v <= self.to).collect()
    }

    /// Returns marks at 1, 2 and 5 times each power of ten. If these are more than `count_max`,
    /// returns powers of ten alone, with equal gaps if necessary.
    fn log_marks(&self, count_max: usize) -> Vec<f64> {
        let (low, high) = (self.from.log10().floor() as i32, self.to.log10().ceil() as i32);
        let inside = |v: &f64| (self.from..=self.to).contains(v);
        let fine = (low..=high).flat_map(|p| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(p)));
        let fine: Vec<f64> = fine.filter(inside).collect();
        if fine.len() <= count_max {
            return fine;
        }
        let powers: Vec<f64> = (low..=high).map(|p| 10f64.powi(p)).filter(inside).collect();
        let every = powers.len().div_ceil(count_max.max(1)).max(1);
        powers.into_iter().step_by(every).collect()
    }
}

impl Ranged for Ruler {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        limit.0 + (self.position(*value) * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<H: KeyPointHint>(&self, hint: H) -> Vec<f64> {
        let count_max = hint.bold_points().clamp(2, MARKS_MAX);
        match self.scale {
            Scale::Linear => self.linear_marks(count_max),
            Scale::Log => self.log_marks(count_max),
        }
    }

    fn range(&self) -> Range<f64> {
        self.from..self.to
    }
}

impl ValueFormatter<f64> for Ruler {
    fn format_ext(&self, value: &f64) -> String {
        (self.write)(*value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plotters::coord::ranged1d::BoldPoints;

    fn marks(scale: Scale, values: &[f64]) -> Vec<String> {
        let ruler = Ruler::over(&Axis::new("", scale), values.iter().copied());
        ruler.key_points(BoldPoints(10)).iter().map(|v| ruler.format_ext(v)).collect()
    }

    #[test]
    fn marks_are_round_numbers_inside_the_axis() {
        assert_eq!(
            marks(Scale::Log, &[10.0, 2000.0]),
            ["10", "20", "50", "100", "200", "500", "1,000", "2,000"]
        );
        assert_eq!(marks(Scale::Linear, &[0.0, 2000.0]), ["0", "500", "1,000", "1,500", "2,000"]);
        assert_eq!(marks(Scale::Log, &[1.0, 1e9]).first().unwrap(), "1");
        for values in
            [&[][..], &[0.0], &[-5.0], &[7.0], &[1e-9, 1e12], &[f64::MIN_POSITIVE, f64::MAX]]
        {
            for scale in [Scale::Linear, Scale::Log] {
                let count = marks(scale, values).len();
                assert!((1..=MARKS_MAX + 1).contains(&count), "{scale:?} {values:?}: {count}");
            }
        }
    }

    #[test]
    fn numbers_are_formatted_for_a_person() {
        let written: Vec<_> = [0.0, 0.25, 20.0, 1500.0, 20_000.0, 2.5e6, 3e9, -1500.0]
            .iter()
            .map(|v| decimal(*v))
            .collect();
        assert_eq!(written, ["0", "0.25", "20", "1,500", "20,000", "2.5M", "3G", "-1,500"]);
    }

    #[test]
    fn a_larger_value_has_a_larger_position() {
        for scale in [Scale::Linear, Scale::Log] {
            let ruler = Ruler::over(&Axis::new("", scale), [3.0, 4000.0].into_iter());
            let at: Vec<_> =
                [3.0, 30.0, 300.0, 4000.0].iter().map(|v| ruler.map(v, (500, 0))).collect();
            assert!(at.windows(2).all(|w| w[0] > w[1]) && at[0] <= 500 && at[3] >= 0, "{at:?}");
        }
    }
}
