//! A date and time as a template may ask for it. The caller gives it: nothing here reads a clock.

use crate::error::Result;
use crate::paid::{Buf, Text};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
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

/// A date and time of day, without a time zone, for `strftime_now`.
///
/// The default is 26 July 2024, 00:00:00: the date that the templates which ask for the current one
/// fall back to when there is no clock. A prompt is reproducible unless a caller asks otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time {
    /// Days since 1 January 1970.
    days: i64,
    /// Seconds since midnight, below 86,400.
    seconds: u32,
}

impl Default for Time {
    fn default() -> Time {
        Time::from_unix(1_721_952_000)
    }
}

impl Time {
    /// The time at this many seconds since 1 January 1970, in UTC. For local time, add the offset
    /// of the zone.
    pub fn from_unix(seconds: i64) -> Time {
        // Years of up to nine digits, so that no computation below overflows.
        let seconds = seconds.clamp(-(1 << 54), 1 << 54);
        Time { days: seconds.div_euclid(86_400), seconds: seconds.rem_euclid(86_400) as u32 }
    }

    /// A date of the Gregorian calendar and a time of day; `None` if there is no such day or time.
    pub fn new(year: i32, month: u32, day: u32, hour: u32, minute: u32, second: u32) -> Option<Time> {
        if !(1..=12).contains(&month) || day == 0 || hour > 23 || minute > 59 || second > 59 {
            return None;
        }
        // Years start in March, so that a leap day is the last of its year; an era has 400 of them.
        let year = i64::from(year) - i64::from(month <= 2);
        let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
        let day_of_year = (153 * ((i64::from(month) + 9) % 12) + 2) / 5 + i64::from(day) - 1;
        let days = era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468;
        let time = Time { days, seconds: hour * 3600 + minute * 60 + second };
        // A day that the month does not have is one of the next.
        (time.date().2 == day).then_some(time)
    }

    /// Year, month, day.
    fn date(self) -> (i64, u32, u32) {
        // The way back, as in `new`.
        let days = self.days + 719_468;
        let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        (year, month as u32, (day_of_year - (153 * march_month + 2) / 5 + 1) as u32)
    }

    /// Days since the first of January.
    fn day_of_year(self) -> i64 {
        let (year, ..) = self.date();
        let first = i32::try_from(year).ok().and_then(|year| Time::new(year, 1, 1, 0, 0, 0));
        first.map_or(0, |first| self.days - first.days)
    }

    /// Days since Sunday.
    fn weekday(self) -> usize {
        (self.days + 4).rem_euclid(7) as usize
    }

    /// What `strftime` makes of one directive in the C locale; `None` for one that it does not
    /// know.
    fn directive(self, directive: char) -> Option<String> {
        let (year, month, day) = self.date();
        let (hour, minute, second) = (self.seconds / 3600, self.seconds / 60 % 60, self.seconds % 60);
        let hour12 = (hour + 11) % 12 + 1;
        let (weekday, month_name) = (DAYS[self.weekday()], MONTHS[month as usize - 1]);
        let week = |first: usize| (self.day_of_year() + 7 - ((self.weekday() + 7 - first) % 7) as i64) / 7;
        Some(match directive {
            'a' => weekday[..3].to_owned(),
            'A' => weekday.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'B' => month_name.to_owned(),
            'c' => {
                format!("{} {} {day:>2} {hour:02}:{minute:02}:{second:02} {year:04}", &weekday[..3], &month_name[..3])
            }
            'd' => format!("{day:02}"),
            'D' | 'x' => format!("{month:02}/{day:02}/{:02}", year.rem_euclid(100)),
            'e' => format!("{day:>2}"),
            'f' => "000000".to_owned(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour12:02}"),
            'j' => format!("{:03}", self.day_of_year() + 1),
            'm' => format!("{month:02}"),
            'M' => format!("{minute:02}"),
            'n' => "\n".to_owned(),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'R' => format!("{hour:02}:{minute:02}"),
            's' => (self.days * 86_400 + i64::from(self.seconds)).to_string(),
            'S' => format!("{second:02}"),
            't' => "\t".to_owned(),
            'T' | 'X' => format!("{hour:02}:{minute:02}:{second:02}"),
            'u' => ((self.weekday() + 6) % 7 + 1).to_string(),
            'U' => format!("{:02}", week(0)),
            'w' => self.weekday().to_string(),
            'W' => format!("{:02}", week(1)),
            'y' => format!("{:02}", year.rem_euclid(100)),
            'Y' => year.to_string(),
            'z' | 'Z' => String::new(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }

    /// Writes the time as `format` says. A directive that is not known stays as it is.
    pub(crate) fn strftime(self, format: &Text, out: &mut Buf) -> Result<()> {
        let mut plain = 0;
        let mut chars = format.chars()?;
        while let Some(start) = chars.next() {
            if start.c != '%' {
                continue;
            }
            let Some(mut last) = chars.next() else { break };
            // A minus drops leading zeros and blanks.
            let short = last.c == '-';
            if short {
                match chars.next() {
                    Some(c) => last = c,
                    None => break,
                }
            }
            let Some(text) = self.directive(last.c) else { continue };
            out.push_part(format, plain..start.at)?;
            let droppable = if short { text.len().saturating_sub(1) } else { 0 };
            let skipped = text.bytes().take(droppable).take_while(|b| matches!(b, b'0' | b' ')).count();
            out.push_str(&text[skipped..], start.typed)?;
            plain = last.end();
        }
        out.push_part(format, plain..format.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paid::{Budget, Limits};

    fn shown(time: Time, format: &str) -> String {
        let budget = Budget::new(Limits::default());
        let mut out = Buf::new(&budget).unwrap();
        time.strftime(&Text::given(format, false, &budget).unwrap(), &mut out).unwrap();
        out.into_parts().0
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(shown(Time::default(), "%d %b %Y|%A %H:%M:%S"), "26 Jul 2024|Friday 00:00:00");
        // From Python's datetime.
        assert_eq!(shown(Time::from_unix(951_827_696), "%Y-%m-%d %T %j %a %U %W"), "2000-02-29 12:34:56 060 Tue 09 09");
        assert_eq!(shown(Time::from_unix(-1), "%c|%I %p|%u%w"), "Wed Dec 31 23:59:59 1969|11 PM|33");
        assert_eq!(shown(Time::new(2026, 3, 5, 7, 8, 9).unwrap(), "%-d %-m %e %-H %y%%%Q%"), "5 3  5 7 26%%Q%");
        assert_eq!(Time::new(2023, 2, 29, 0, 0, 0), None);
        assert_eq!(Time::new(2024, 2, 29, 0, 0, 0).map(|t| t.date()), Some((2024, 2, 29)));
        for seconds in [i64::MIN, i64::MAX] {
            shown(Time::from_unix(seconds), "%c %U %j %s");
        }
    }

    #[test]
    fn every_day_goes_there_and_back() {
        for days in (-800_000..800_000).step_by(13) {
            let time = Time::from_unix(days * 86_400);
            let (year, month, day) = time.date();
            assert_eq!(Time::new(year as i32, month, day, 0, 0, 0), Some(time));
        }
    }
}
