//! Stop strings on streamed text.

/// Finds stop strings in a text that arrives in pieces, and holds back whatever could still become one.
///
/// The match that is complete first wins (of two that end together, the longer), so that the outcome does not depend on
/// how the text was cut into pieces. Empty stop strings never match.
#[derive(Clone, Debug)]
pub struct StopChecker {
    stops: Vec<String>,
    include_stop: bool,
    held: String,
    /// Bytes at the front of `held` in which no match may end.
    exempt: usize,
    released: String,
    matched: Option<usize>,
}

/// What [`StopChecker::push`] lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Released<'a> {
    /// Text that is certain now.
    pub text: &'a str,
    /// Index of the stop string that ended the text, if one did.
    pub stop: Option<usize>,
}

impl StopChecker {
    /// `include_stop_str_in_output`: the text ends after the match, not before it.
    pub fn new(stops: Vec<String>, include_stop_str_in_output: bool) -> Self {
        Self {
            stops,
            include_stop: include_stop_str_in_output,
            held: String::new(),
            exempt: 0,
            released: String::new(),
            matched: None,
        }
    }

    /// Takes the next piece. With `check` false (fewer than `min_tokens` tokens so far) no match may end in this
    /// piece, but one may begin in it. After a match everything further is dropped.
    pub fn push(&mut self, piece: &str, check: bool) -> Released<'_> {
        self.released.clear();
        if self.matched.is_some() {
            return Released { text: "", stop: self.matched };
        }
        self.held.push_str(piece);
        if !check {
            self.exempt = self.held.len();
        }
        if let Some((index, start, end)) = self.first_match() {
            self.matched = Some(index);
            self.released.push_str(&self.held[..if self.include_stop { end } else { start }]);
            self.held.clear();
        } else {
            let keep_from = self.first_possible_beginning();
            self.released.push_str(&self.held[..keep_from]);
            self.held.drain(..keep_from);
            self.exempt = self.exempt.saturating_sub(keep_from);
        }
        Released { text: &self.released, stop: self.matched }
    }

    /// Ends the text: what was held back in vain.
    pub fn finish(&mut self) -> String {
        self.exempt = 0;
        std::mem::take(&mut self.held)
    }

    /// The stop string that ended the text.
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|index| self.stops[index].as_str())
    }

    /// Index, start and end of the match that ends first.
    fn first_match(&self) -> Option<(usize, usize, usize)> {
        let mut best: Option<(usize, usize, usize)> = None;
        for (index, stop) in self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty()) {
            let mut from = 0;
            while let Some(found) = self.held[from..].find(stop.as_str()) {
                let (start, end) = (from + found, from + found + stop.len());
                if end > self.exempt {
                    if best.is_none_or(|(_, s, e)| (end, start) < (e, s)) {
                        best = Some((index, start, end));
                    }
                    break;
                }
                from = start + self.held[start..].chars().next().map_or(1, char::len_utf8);
            }
        }
        best
    }

    /// Where the longest end of `held` that begins a stop string starts.
    fn first_possible_beginning(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let mut start = self.held.len().saturating_sub(longest.saturating_sub(1));
        while start < self.held.len() {
            if self.held.is_char_boundary(start)
                && self
                    .stops
                    .iter()
                    .any(|stop| stop.len() > self.held.len() - start && stop.starts_with(&self.held[start..]))
            {
                return start;
            }
            start += 1;
        }
        self.held.len()
    }
}
