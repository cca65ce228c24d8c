//! `strftime_now`: dates in prompts, from a clock that callers can fix.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// The variable that carries the time of a rendering to `strftime_now`.
pub(super) const VARIABLE: &str = "__now__";

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Seconds since 1970, UTC.
pub(super) fn system() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs() as i64)
}

/// Python's `strftime` in the C locale; None for a directive that is not known.
pub(super) fn format(seconds: i64, pattern: &str) -> Option<String> {
    let days = seconds.div_euclid(86_400);
    let second_of_day = seconds.rem_euclid(86_400);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let (year, month, day) = civil(days);
    let weekday = (days + 4).rem_euclid(7) as usize;
    let day_of_year = days - days_before(year, 1, 1) + 1;
    let half_day_hour = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next()?;
        let unpadded = directive == '-';
        if unpadded {
            directive = characters.next()?;
        }
        let mut number = |value: i64, width: usize| {
            let width = if unpadded { 0 } else { width };
            write!(out, "{value:0width$}").ok()
        };
        match directive {
            'Y' => number(year, 4)?,
            'm' => number(month, 2)?,
            'd' => number(day, 2)?,
            'H' => number(hour, 2)?,
            'I' => number(half_day_hour, 2)?,
            'M' => number(minute, 2)?,
            'S' => number(second, 2)?,
            'j' => number(day_of_year, 3)?,
            'y' => number(year.rem_euclid(100), 2)?,
            'w' => number(weekday as i64, 1)?,
            's' => number(seconds, 1)?,
            'e' => write!(out, "{day:>2}").ok()?,
            'B' => out.push_str(MONTHS[month as usize - 1]),
            'b' | 'h' => out.push_str(&MONTHS[month as usize - 1][..3]),
            'A' => out.push_str(DAYS[weekday]),
            'a' => out.push_str(&DAYS[weekday][..3]),
            'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            'F' => write!(out, "{year:04}-{month:02}-{day:02}").ok()?,
            'T' | 'X' => write!(out, "{hour:02}:{minute:02}:{second:02}").ok()?,
            'R' => write!(out, "{hour:02}:{minute:02}").ok()?,
            'D' | 'x' => write!(out, "{month:02}/{day:02}/{:02}", year.rem_euclid(100)).ok()?,
            // A naive time has no zone, as `datetime.now()` has none.
            'z' | 'Z' => {}
            '%' => out.push('%'),
            _ => return None,
        }
    }
    Some(out)
}

/// Days from 1970-01-01 to a date of the proleptic Gregorian calendar (years counted from March).
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let shifted = if month <= 2 { year - 1 } else { year };
    let era = shifted.div_euclid(400);
    let year_of_era = shifted.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// Year, month and day of a day number; the inverse of [`days_before`].
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}
