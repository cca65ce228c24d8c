//! Stop strings on streamed text.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Stop strings, made ready for finding them all in one pass over a text (Aho and Corasick, 1975): what a byte of text
/// costs does not depend on how many there are. Empty ones never match.
#[derive(Debug, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    /// From a state, by a byte, to the state of one byte more.
    longer: HashMap<(u32, u8), u32>,
    /// Bytes that stop strings begin with, one bit each: most of a text is not even looked up.
    beginnings: [u64; 4],
    /// The first is that of no text.
    states: Vec<State>,
}

/// A beginning of a stop string, which the text ends with.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// The longest shorter end of it that is a beginning too.
    shorter: u32,
    /// The longest stop string that it ends with; of equal ones the first.
    stop: Option<u32>,
    /// Bytes of its longest end that could still become a stop string.
    open: usize,
}

impl StopStrings {
    /// Time and memory grow with their bytes.
    pub fn new(strings: Vec<String>) -> Self {
        let mut all = Self { strings, states: vec![State::default()], ..Self::default() };
        // What leads to each state, in the order in which they were made.
        let mut lengths = vec![0];
        let mut is_open = vec![false];
        for (index, string) in all.strings.iter().enumerate().filter(|(_, string)| !string.is_empty()) {
            let mut state = 0;
            let first = string.as_bytes()[0];
            all.beginnings[usize::from(first / 64)] |= 1 << (first % 64);
            for byte in string.bytes() {
                is_open[state as usize] = true;
                let next = all.states.len() as u32;
                let length = lengths[state as usize] + 1;
                state = *all.longer.entry((state, byte)).or_insert(next);
                if state == next {
                    all.states.push(State::default());
                    lengths.push(length);
                    is_open.push(false);
                }
            }
            all.states[state as usize].stop.get_or_insert(index as u32);
        }
        all.link(&lengths, &is_open);
        all
    }

    /// Whether none can match.
    pub fn is_empty(&self) -> bool {
        self.states.len() <= 1
    }

    /// Fills in what follows from shorter states, the shortest first.
    fn link(&mut self, lengths: &[usize], is_open: &[bool]) {
        let mut children: Vec<Vec<(u8, u32)>> = vec![Vec::new(); self.states.len()];
        for (&(from, byte), &to) in &self.longer {
            children[from as usize].push((byte, to));
        }
        let mut queue = VecDeque::from([0_u32]);
        while let Some(state) = queue.pop_front() {
            let at = state as usize;
            let shorter = self.states[self.states[at].shorter as usize];
            if state != 0 {
                self.states[at].stop = self.states[at].stop.or(shorter.stop);
                self.states[at].open = if is_open[at] { lengths[at] } else { shorter.open };
            }
            for &(byte, child) in &children[at] {
                if state != 0 {
                    self.states[child as usize].shorter = self.next(self.states[at].shorter, byte);
                }
                queue.push_back(child);
            }
        }
    }

    /// The state after one byte more.
    fn next(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            if state == 0 && self.beginnings[usize::from(byte / 64)] & (1 << (byte % 64)) == 0 {
                return 0;
            }
            match self.longer.get(&(state, byte)) {
                Some(&longer) => return longer,
                None if state == 0 => return 0,
                None => state = self.states[state as usize].shorter,
            }
        }
    }
}

/// Finds stop strings in a text that arrives in pieces, and holds back whatever could still become one.
///
/// The match that is complete first wins (of two that end together, the longer), so that the outcome does not depend on
/// how the text was cut into pieces.
#[derive(Clone, Debug)]
pub struct StopChecker {
    stops: Arc<StopStrings>,
    include_stop: bool,
    state: u32,
    held: String,
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
    pub fn new(stops: Arc<StopStrings>, include_stop_str_in_output: bool) -> Self {
        Self {
            stops,
            include_stop: include_stop_str_in_output,
            state: 0,
            held: String::new(),
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
        let held = self.held.len();
        self.held.push_str(piece);
        for (at, byte) in piece.bytes().enumerate() {
            self.state = self.stops.next(self.state, byte);
            let Some(stop) = self.stops.states[self.state as usize].stop.filter(|_| check) else { continue };
            self.matched = Some(stop as usize);
            let end = held + at + 1;
            let kept = if self.include_stop { end } else { end - self.stops.strings[stop as usize].len() };
            self.released.push_str(&self.held[..kept]);
            self.held.clear();
            return Released { text: &self.released, stop: self.matched };
        }
        let keep_from = self.held.len() - self.stops.states[self.state as usize].open;
        self.released.push_str(&self.held[..keep_from]);
        self.held.drain(..keep_from);
        Released { text: &self.released, stop: None }
    }

    /// Ends the text: what was held back in vain.
    pub fn finish(&mut self) -> String {
        self.state = 0;
        std::mem::take(&mut self.held)
    }

    /// The stop string that ended the text.
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|index| self.stops.strings[index].as_str())
    }
}
