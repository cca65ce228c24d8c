//! Calls are the same however the text that has them is cut into pieces, and what is no call stays text.

use super::*;

/// Content and calls of a text that comes in pieces.
fn parse(format: ToolFormat, pieces: &[&str], most: usize, whole: bool) -> (String, Vec<(String, String)>) {
    let mut parser = CallParser::new(format, ["f".to_owned(), "g".to_owned()].into(), most, whole);
    let mut told = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut told);
    }
    parser.finish(&mut told);
    let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for piece in told {
        match piece {
            Piece::Text(more) => text.push_str(&more),
            Piece::Call(name) => calls.push((name, String::new())),
            Piece::Arguments(more) => calls.last_mut().expect("a call before its arguments").1.push_str(&more),
        }
    }
    (text, calls)
}

/// Format, what is said, the text of it, and its calls.
type Case = (ToolFormat, &'static str, &'static str, &'static [(&'static str, &'static str)]);

const HERMES: ToolFormat = ToolFormat::Hermes;
const LLAMA: ToolFormat = ToolFormat::LlamaJson;

/// What means the same in a stream and as a whole.
const GOOD: [Case; 22] = [
    (HERMES, "just text < with <tool signs ", "just text < with <tool signs ", &[]),
    (HERMES, "", "", &[]),
    (HERMES, " \n", " \n", &[]),
    (HERMES, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>", "", &[("f", "{\"a\": 1}")]),
    (
        HERMES,
        "Sure.\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>\n{\"arguments\": {\"b\": [{}]}, \"name\": \"g\"}\n</tool_call>\n",
        "Sure.",
        &[("f", "{}"), ("g", "{\"b\": [{}]}")],
    ),
    (
        HERMES,
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"t\": \"</tool_call> }\\\" {\"}}</tool_call> done",
        " done",
        &[("f", "{\"t\": \"</tool_call> }\\\" {\"}")],
    ),
    (HERMES, "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>", "", &[("other", "{}")]),
    (
        HERMES,
        "<tool_call>{\"name\": \"\\u0066\", \"parameters\": {\"\u{e9}\": \"\u{1f600}\"}}",
        "",
        &[("f", "{\"\u{e9}\": \"\u{1f600}\"}")],
    ),
    (HERMES, "<tool_call>{\"name\": \"f\"}</tool_call>", "", &[("f", "{}")]),
    (HERMES, "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>", "", &[("f", "{\"a\": 1}")]),
    (HERMES, "<tool_call>f(1)</tool_call> and", "<tool_call>f(1)</tool_call> and", &[]),
    (HERMES, "x <tool_call>\n{\"name\": 1}\n</tool_call>", "x <tool_call>\n{\"name\": 1}\n</tool_call>", &[]),
    (
        HERMES,
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        &[],
    ),
    (HERMES, "<tool_call> {\"name\": \"f\", \"arg", "<tool_call> {\"name\": \"f\", \"arg", &[]),
    (
        HERMES,
        "<tool_call>f <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
        "<tool_call>f",
        &[("f", "{}")],
    ),
    (LLAMA, " {\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", &[("f", "{\"a\": 1}")]),
    (
        LLAMA,
        "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"x\": 2}}",
        "",
        &[("f", "{}"), ("g", "{\"x\": 2}")],
    ),
    (LLAMA, "{\"name\": \"unknown\", \"parameters\": {}}", "{\"name\": \"unknown\", \"parameters\": {}}", &[]),
    (LLAMA, "text {\"name\": \"f\", \"parameters\": {}}", "text {\"name\": \"f\", \"parameters\": {}}", &[]),
    (LLAMA, "{\"answer\": 1} ", "{\"answer\": 1} ", &[]),
    (LLAMA, "<|pyth", "<|pyth", &[]),
    (LLAMA, "{\"name\": \"f\", \"parameters\": {}} and so on", " and so on", &[("f", "{}")]),
];

fn expected(case: &Case) -> (String, Vec<(String, String)>) {
    (case.2.to_owned(), case.3.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect())
}

#[test]
fn calls_and_text_are_told_apart() {
    for case in &GOOD {
        for whole in [false, true] {
            assert_eq!(parse(case.0, &[case.1], usize::MAX, whole), expected(case), "{:?}, whole {whole}", case.1);
        }
    }
}

/// What a stream and a whole answer make differently of: the stream has told the call already.
const BROKEN: [&str; 3] = [
    "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1",
    "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": nothing}}</tool_call> on",
    "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}, }</tool_call>",
];

#[test]
fn a_broken_call_stays_text_unless_it_was_told() {
    for text in BROKEN {
        assert_eq!(parse(HERMES, &[text], usize::MAX, true), (text.to_owned(), Vec::new()));
    }
    let streamed = |text| parse(HERMES, &[text], usize::MAX, false);
    assert_eq!(streamed(BROKEN[0]), (String::new(), vec![("f".to_owned(), "{\"a\": 1".to_owned())]));
    assert_eq!(streamed(BROKEN[1]), (" on".to_owned(), vec![("f".to_owned(), "{\"a\": nothing}".to_owned())]));
    assert_eq!(streamed(BROKEN[2]), (String::new(), vec![("f".to_owned(), "{\"a\": 1}".to_owned())]));
}

#[test]
fn where_the_pieces_are_cut_does_not_matter() {
    let texts = GOOD.iter().map(|case| (case.0, case.1)).chain(BROKEN.iter().map(|text| (HERMES, *text)));
    for (format, text) in texts {
        for whole in [false, true] {
            let at_once = parse(format, &[text], usize::MAX, whole);
            let places: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
            for &first in &places {
                for &second in places.iter().filter(|&&at| at >= first) {
                    let pieces = [&text[..first], &text[first..second], &text[second..]];
                    assert_eq!(parse(format, &pieces, usize::MAX, whole), at_once, "{pieces:?}, whole {whole}");
                }
            }
            let single: Vec<&str> = places.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            assert_eq!(parse(format, &single, usize::MAX, whole), at_once, "{text:?}, one by one");
        }
    }
}

#[test]
fn arguments_are_told_as_they_come() {
    let mut parser = CallParser::new(HERMES, Arc::new([]), usize::MAX, false);
    let mut pushed = |text: &str| {
        let mut told = Vec::new();
        parser.push(text, &mut told);
        told
    };
    assert_eq!(pushed("Well.\n\n"), [Piece::Text("Well.".to_owned())]);
    assert_eq!(pushed("<tool_call>\n{\"name\": \"f\", \"argu"), []);
    assert_eq!(pushed("ments\": {\"a"), [Piece::Call("f".to_owned()), Piece::Arguments("{\"a".to_owned())]);
    assert_eq!(pushed("\": 1"), [Piece::Arguments("\": 1".to_owned())]);
    assert_eq!(pushed("}}\n</tool"), [Piece::Arguments("}".to_owned())]);
    assert_eq!(pushed("_call>"), []);
}

#[test]
fn no_more_calls_are_told_than_may_be() {
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}</tool_call>";
    for whole in [false, true] {
        let (text, calls) = parse(HERMES, &[call, "\n", call, " end"], 1, whole);
        assert_eq!((text.as_str(), calls.as_slice()), (" end", &[("f".to_owned(), "{\"n\": 1}".to_owned())][..]));
    }
}
