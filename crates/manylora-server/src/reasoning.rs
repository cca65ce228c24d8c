//! What a model thinks before it answers, apart from the answer: the text between `<think>` and `</think>`.
//!
//! The text comes in pieces of any size; what is told does not depend on where they are cut. White space around the tags
//! belongs to neither part.

use manylora::StructuredOutputs;

/// The tag that reasoning begins with.
pub(crate) const OPEN: &str = "<think>";
/// The tag that it ends with.
pub(crate) const CLOSE: &str = "</think>";

/// How models mark their reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Between tags, of which the template may have written the first; a model that writes none does not reason.
    Qwen3,
    /// From the beginning to the closing tag, whether or not there is an opening one.
    DeepseekR1,
}

impl ReasoningFormat {
    /// By the name of vLLM's `--reasoning-parser`.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "qwen3" => Some(Self::Qwen3),
            "deepseek_r1" => Some(Self::DeepseekR1),
            _ => None,
        }
    }
}

/// Whether the answer to a prompt may begin with reasoning. Where the template has ended it, it does not; where the answer
/// goes on with a message (`continues`), it does if that message was in the middle of it.
fn may_begin(prompt: &str, continues: bool) -> bool {
    if continues {
        return prompt.rfind(OPEN).is_some_and(|open| prompt.rfind(CLOSE).is_none_or(|close| close < open));
    }
    !prompt.trim_end().ends_with(CLOSE)
}

/// A part of what a model said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Reasoning,
    Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space yet, and an opening tag decides.
    Undecided,
    /// At the beginning of the reasoning, where an opening tag is left out.
    Begins,
    /// After that, before the first word.
    Starts,
    Reasons,
    /// After the closing tag, before the answer.
    Closed,
    Answers,
}

/// Tells reasoning and answer of one sample apart.
#[derive(Clone, Debug)]
pub(crate) struct Splitter {
    state: State,
    /// What is not told yet.
    held: String,
}

impl Splitter {
    /// For the answer to a prompt, see [`may_begin`].
    pub(crate) fn after(format: ReasoningFormat, prompt: &str, continues: bool) -> Self {
        let state = match format {
            _ if !may_begin(prompt, continues) => State::Answers,
            _ if continues => State::Reasons,
            _ if prompt.trim_end().ends_with(OPEN) => State::Begins,
            ReasoningFormat::Qwen3 => State::Undecided,
            ReasoningFormat::DeepseekR1 => State::Begins,
        };
        Self { state, held: String::new() }
    }

    /// Lets what the output must be begin after the reasoning, where there may be some.
    pub(crate) fn put_off(&self, outputs: &mut StructuredOutputs) {
        let opening = match self.state {
            State::Answers => return,
            // Where the first thing said is no opening tag, it is the answer.
            State::Undecided => Some(OPEN.to_owned()),
            _ => None,
        };
        outputs.opening = opening;
        outputs.after = Some(CLOSE.to_owned());
    }

    /// Takes the next piece.
    pub(crate) fn push(&mut self, text: &str, told: &mut impl FnMut(Part, &str)) {
        self.held.push_str(text);
        while self.step(told) {}
    }

    /// Goes on by one state, if that is possible already.
    fn step(&mut self, told: &mut impl FnMut(Part, &str)) -> bool {
        let begun = self.held.trim_start();
        self.state = match self.state {
            State::Undecided | State::Begins if begun.starts_with(OPEN) => {
                self.held = begun[OPEN.len()..].to_owned();
                State::Starts
            }
            State::Undecided | State::Begins if OPEN.starts_with(begun) => return false,
            State::Undecided => State::Answers,
            State::Begins => State::Starts,
            State::Starts | State::Closed if begun.is_empty() => {
                self.held.clear();
                return false;
            }
            State::Starts => {
                self.held = begun.to_owned();
                State::Reasons
            }
            State::Reasons => {
                let Some(at) = self.held.find(CLOSE) else {
                    let certain = self.held[..beginning_of(CLOSE, &self.held)].trim_end().len();
                    self.tell(Part::Reasoning, certain, told);
                    return false;
                };
                let rest = self.held.split_off(at + CLOSE.len());
                let length = self.held[..at].trim_end().len();
                self.tell(Part::Reasoning, length, told);
                self.held = rest;
                State::Closed
            }
            State::Closed => {
                self.held = begun.to_owned();
                State::Answers
            }
            State::Answers => {
                self.tell(Part::Answer, self.held.len(), told);
                return false;
            }
        };
        true
    }

    /// Ends the text.
    pub(crate) fn finish(&mut self, told: &mut impl FnMut(Part, &str)) {
        let part = match self.state {
            State::Undecided | State::Closed | State::Answers => Part::Answer,
            State::Begins | State::Starts | State::Reasons => Part::Reasoning,
        };
        let length = if part == Part::Answer { self.held.len() } else { self.held.trim_end().len() };
        self.tell(part, length, told);
        self.held.clear();
    }

    fn tell(&mut self, part: Part, length: usize, told: &mut impl FnMut(Part, &str)) {
        if length > 0 {
            told(part, &self.held[..length]);
            self.held.drain(..length);
        }
    }
}

/// Where the longest end of a text that a mark may begin with starts; its end, if none may.
pub(crate) fn beginning_of(mark: &str, text: &str) -> usize {
    let mut start = text.len().saturating_sub(mark.len() - 1);
    while start < text.len() && !(text.is_char_boundary(start) && mark.starts_with(&text[start..])) {
        start += 1;
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reasoning and answer of a text that comes in pieces.
    fn split(format: ReasoningFormat, prompt: &str, pieces: &[&str]) -> (String, String) {
        let (mut reasoning, mut answer) = (String::new(), String::new());
        let mut splitter = Splitter::after(format, prompt, false);
        let mut told = |part: Part, text: &str| match part {
            Part::Reasoning => reasoning.push_str(text),
            Part::Answer => answer.push_str(text),
        };
        for piece in pieces {
            splitter.push(piece, &mut told);
        }
        splitter.finish(&mut told);
        (reasoning, answer)
    }

    const CASES: [(ReasoningFormat, &str, &str, &str, &str); 14] = [
        (ReasoningFormat::Qwen3, "<|assistant|>\n", "<think>\nwell, a < b\n</think>\n\nyes\n", "well, a < b", "yes\n"),
        (ReasoningFormat::Qwen3, "", " \n<think>so </ thin</think>no", "so </ thin", "no"),
        (ReasoningFormat::Qwen3, "", "plain <think> text</think>", "", "plain <think> text</think>"),
        (ReasoningFormat::Qwen3, "", " <thin", "", " <thin"),
        (ReasoningFormat::Qwen3, "a<think>\n", "well</think>yes", "well", "yes"),
        (ReasoningFormat::Qwen3, "a<think>\n\n</think>\n\n", "<think>yes", "", "<think>yes"),
        (ReasoningFormat::Qwen3, "", "<think>\n\n</think>\n\nyes", "", "yes"),
        (ReasoningFormat::Qwen3, "", "<think>cut off \n </think", "cut off \n </think", ""),
        (ReasoningFormat::DeepseekR1, "", "well\n\nthen\n</think>\n\nyes</think>", "well\n\nthen", "yes</think>"),
        (ReasoningFormat::DeepseekR1, "<think>\n", "<think>\nwell</think>yes", "well", "yes"),
        (ReasoningFormat::DeepseekR1, "", "never ending \n", "never ending", ""),
        (ReasoningFormat::DeepseekR1, "", "", "", ""),
        (ReasoningFormat::DeepseekR1, "</think>", "yes", "", "yes"),
        (ReasoningFormat::DeepseekR1, "", "\u{e9}<\u{e9}</think>\u{e9} ", "\u{e9}<\u{e9}", "\u{e9} "),
    ];

    #[test]
    fn reasoning_and_answer_are_told_apart() {
        for (format, prompt, text, reasoning, answer) in CASES {
            let split = split(format, prompt, &[text]);
            assert_eq!(split, (reasoning.to_owned(), answer.to_owned()), "{text:?} after {prompt:?}");
        }
    }

    #[test]
    fn an_answer_that_goes_on_reasons_if_the_message_did() {
        for (prompt, reasons) in [("a<think>so", true), ("a<think>so</think>b", false), ("a", false)] {
            assert_eq!(may_begin(prompt, true), reasons, "{prompt}");
            let mut told = Vec::new();
            Splitter::after(ReasoningFormat::DeepseekR1, prompt, true).push(" x", &mut |part, _: &str| told.push(part));
            assert_eq!(told, [if reasons { Part::Reasoning } else { Part::Answer }], "{prompt}");
        }
    }

    #[test]
    fn what_must_be_waits_for_reasoning_where_there_is_some() {
        let opened = Some("</think>".to_owned());
        for (format, prompt, after, opening) in [
            (ReasoningFormat::Qwen3, "a", opened.clone(), Some("<think>".to_owned())),
            (ReasoningFormat::Qwen3, "a<think>\n", opened.clone(), None),
            (ReasoningFormat::Qwen3, "a<think>\n\n</think>\n\n", None, None),
            (ReasoningFormat::DeepseekR1, "a", opened, None),
        ] {
            let mut outputs = StructuredOutputs::default();
            Splitter::after(format, prompt, false).put_off(&mut outputs);
            assert_eq!((outputs.after, outputs.opening), (after, opening), "{prompt:?}");
        }
    }

    #[test]
    fn where_the_pieces_are_cut_does_not_matter() {
        for (format, prompt, text, ..) in CASES {
            let whole = split(format, prompt, &[text]);
            let places: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
            for &first in &places {
                for &second in places.iter().filter(|&&at| at >= first) {
                    let pieces = [&text[..first], &text[first..second], &text[second..]];
                    assert_eq!(split(format, prompt, &pieces), whole, "{pieces:?} after {prompt:?}");
                }
            }
            let single: Vec<&str> = places.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            assert_eq!(split(format, prompt, &single), whole, "{text:?}, one by one");
        }
    }

    #[test]
    fn what_is_certain_is_told_at_once() {
        let mut splitter = Splitter::after(ReasoningFormat::Qwen3, "", false);
        let mut last = |text: &str| {
            let mut told = Vec::new();
            splitter.push(text, &mut |part, text| told.push((part, text.to_owned())));
            told
        };
        assert_eq!(last("<think>"), []);
        assert_eq!(last("one two"), [(Part::Reasoning, "one two".to_owned())]);
        assert_eq!(last(" three </"), [(Part::Reasoning, " three".to_owned())]);
        assert_eq!(last("think>\nfour"), [(Part::Answer, "four".to_owned())]);
        assert_eq!(last(" "), [(Part::Answer, " ".to_owned())]);
    }
}
