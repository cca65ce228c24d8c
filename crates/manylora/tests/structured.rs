//! Structured output on the oracle's tiny bases, whose random weights would say anything: what comes is what was asked for,
//! alone and in a batch, with every way of sampling.

mod common;

use common::{Answer, Oracle, answers, engine, greedy, load, request};
use manylora::{Delta, Engine, EngineConfig, FinishReason, GenerateRequest, SamplingParams, StructuredOutputs};
use serde_json::Value;

const SCHEMA: &str = r##"{
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 2},
        "owner": {"oneOf": [{"type": "null"}, {"type": "boolean"}]}
    },
    "required": ["kind", "age", "name", "tags", "owner"],
    "additionalProperties": false,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-c]{2}$"}}
}"##;

fn json(schema: &str) -> StructuredOutputs {
    StructuredOutputs { json: Some(schema.to_owned()), ..StructuredOutputs::default() }
}

fn regex(expression: &str) -> StructuredOutputs {
    StructuredOutputs { regex: Some(expression.to_owned()), ..StructuredOutputs::default() }
}

fn grammar(text: &str) -> StructuredOutputs {
    StructuredOutputs { grammar: Some(text.to_owned()), ..StructuredOutputs::default() }
}

fn choice(items: &[&str]) -> StructuredOutputs {
    let choice = items.iter().map(ToString::to_string).collect();
    StructuredOutputs { choice: Some(choice), ..StructuredOutputs::default() }
}

/// Greedy without a seed, otherwise hot enough for a random model to try everything.
fn params(outputs: StructuredOutputs, seed: Option<i64>) -> SamplingParams {
    SamplingParams {
        temperature: if seed.is_some() { 1.5 } else { 0.0 },
        seed,
        max_tokens: Some(400),
        structured_outputs: Some(outputs),
        ..SamplingParams::default()
    }
}

fn run(engine: &Engine, adapter: Option<&str>, params: SamplingParams) -> Vec<Delta> {
    let request = request(&[5, 40, 99, 7], adapter, params);
    engine.submit(request).expect("a good request").collect_all().expect("it finishes")
}

#[expect(clippy::needless_pass_by_value, reason = "callers build what they ask for on the spot")]
fn text(engine: &Engine, outputs: StructuredOutputs, seed: Option<i64>) -> String {
    let sample = run(engine, None, params(outputs.clone(), seed)).remove(0);
    assert_eq!(sample.finish_reason, Some(FinishReason::Stop), "{outputs:?}, seed {seed:?}: `{}`", sample.text);
    sample.text
}

fn refusal(engine: &Engine, params: SamplingParams) -> String {
    engine.submit(GenerateRequest::tokens([5]).params(params)).expect_err("refused").to_string()
}

/// By hand what the schema says.
fn assert_follows_the_schema(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: `{text}`"));
    let object = value.as_object().expect("an object");
    assert_eq!(object.len(), 5, "{text}");
    assert!(["cat", "dog"].contains(&object["kind"].as_str().expect("text")), "{text}");
    assert!((0..=30).contains(&object["age"].as_i64().expect("an integer")), "{text}");
    assert!((1..=6).contains(&object["name"].as_str().expect("text").chars().count()), "{text}");
    let tags = object["tags"].as_array().expect("an array");
    assert!((1..=2).contains(&tags.len()), "{text}");
    for tag in tags {
        let tag = tag.as_str().expect("text");
        assert!(tag.len() == 2 && tag.chars().all(|character| ('a'..='c').contains(&character)), "{text}");
    }
    assert!(object["owner"].is_null() || object["owner"].is_boolean(), "{text}");
}

#[test]
fn any_model_answers_in_json_of_the_schema() {
    for base in ["llama", "qwen3", "qwen2-padded"] {
        let oracle = Oracle::open(base);
        let engine = engine(&oracle, |_| {});
        let seeds = [None].into_iter().chain((0..12).map(Some));
        for seed in seeds {
            let loose = StructuredOutputs { whitespace_pattern: Some("[ \\n]{1,3}".to_owned()), ..json(SCHEMA) };
            assert_follows_the_schema(&text(&engine, loose, seed));
            let tight = StructuredOutputs { disable_any_whitespace: true, ..json(SCHEMA) };
            let tight = text(&engine, tight, seed);
            assert_follows_the_schema(&tight);
            let mut inside = false;
            for (before, byte) in format!(" {tight}").bytes().zip(tight.bytes()) {
                inside ^= byte == b'"' && before != b'\\';
                assert!(inside || !byte.is_ascii_whitespace(), "{tight}");
            }
        }
    }
}

#[test]
fn white_space_between_the_parts_of_json_has_an_end() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let space = engine.tokenizer().expect("a tokenizer").id_of("\u{120}").expect("a token");
    let schema = r#"{"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}"#;
    let params = SamplingParams { logit_bias: [(space, 100.0)].into(), ..params(json(schema), None) };
    let sample = run(&engine, None, params).remove(0);
    let spaces = " ".repeat(40);
    assert_eq!(sample.text, format!("[{spaces}1{spaces},{spaces}1{spaces}]"));
    assert_eq!(sample.finish_reason, Some(FinishReason::Stop));
}

#[test]
fn an_object_of_any_shape_is_an_object() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let outputs = StructuredOutputs { json_object: Some(true), ..StructuredOutputs::default() };
    // A random model seldom ends one by itself: nudged to the closing signs.
    let mut params = params(outputs, Some(3));
    params.logit_bias = [("\"", 4.0), ("}", 6.0), ("]", 4.0), ("{", -3.0), ("[", -3.0)]
        .into_iter()
        .map(|(sign, bias)| (engine.tokenizer().expect("a tokenizer").id_of(sign).expect("a token"), bias))
        .collect();
    let ended = (0..20)
        .filter(|&seed| {
            params.seed = Some(seed);
            let sample = run(&engine, None, params.clone()).remove(0);
            if sample.finish_reason == Some(FinishReason::Stop) {
                let value: Value = serde_json::from_str(&sample.text).expect("JSON");
                assert!(value.is_object(), "{}", sample.text);
            }
            sample.finish_reason == Some(FinishReason::Stop)
        })
        .count();
    assert!(ended >= 10, "{ended} of 20 ended");
}

#[test]
fn expressions_choices_and_grammars_are_followed() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let lark = "start: \"x\" pair (\", \" pair){1,3}\npair: /[a-z]{2}/ \"=\" NUMBER\nNUMBER: /[0-9]{1,3}/";
    let ebnf = "root ::= \"x\" Pair (\", \" Pair){1,3}\nPair ::= [a-z] [a-z] \"=\" [0-9] | [A-C]+ \"!\"";
    for seed in [None].into_iter().chain((0..10).map(Some)) {
        let date = text(&engine, regex(r"^20\d\d-[01]\d$"), seed);
        assert!(date.len() == 7 && date.starts_with("20") && &date[4..5] == "-", "{date}");
        assert!(date.bytes().enumerate().all(|(at, byte)| at == 4 || byte.is_ascii_digit()), "{date}");
        let chosen = text(&engine, choice(&["the \"first\"", "\u{e9}t\u{e9}\n", "the third/\\"]), seed);
        assert!(["the \"first\"", "\u{e9}t\u{e9}\n", "the third/\\"].contains(&chosen.as_str()), "{chosen}");
        let said = text(&engine, grammar(lark), seed);
        let pairs: Vec<&str> = said.strip_prefix('x').expect(&said).split(", ").collect();
        assert!((2..=4).contains(&pairs.len()) && pairs.iter().all(|pair| pair.as_bytes()[2] == b'='), "{said}");
        let said = text(&engine, grammar(ebnf), seed);
        let pairs: Vec<&str> = said.strip_prefix('x').expect(&said).split(", ").collect();
        assert!((2..=4).contains(&pairs.len()), "{said}");
        for pair in pairs {
            let letters = pair.strip_suffix('!');
            let capital = letters.is_some_and(|it| !it.is_empty() && it.chars().all(|it| ('A'..='C').contains(&it)));
            assert!(capital || (pair.len() == 4 && pair.as_bytes()[2] == b'='), "{said}");
        }
    }
}

#[test]
fn the_output_ends_with_its_structure() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let end = engine.tokenizer().expect("a tokenizer").eos().expect("an end token");
    let closed = run(&engine, None, params(regex("[ab]{5}"), None)).remove(0);
    assert_eq!((closed.token_ids.len(), closed.finish_reason), (5, Some(FinishReason::Stop)));
    assert_eq!(closed.stop_reason, None);
    assert!(!closed.token_ids.contains(&end));
    // One that could go on ends with the model's end token, also where end tokens are to be ignored.
    for ignore_eos in [false, true] {
        let params = SamplingParams { ignore_eos, ..params(regex("[ab]{3,}"), Some(1)) };
        let open = run(&engine, None, SamplingParams { logit_bias: [(end, 8.0)].into(), ..params }).remove(0);
        assert_eq!((open.token_ids.last(), open.finish_reason), (Some(&end), Some(FinishReason::Stop)));
        assert!(open.text.len() >= 3 && open.text.bytes().all(|byte| b"ab".contains(&byte)), "{}", open.text);
    }
    // What is cut off says so.
    let cut = SamplingParams { max_tokens: Some(3), ..params(regex("[ab]{5}"), None) };
    let cut = run(&engine, None, cut).remove(0);
    assert_eq!((cut.text.len(), cut.finish_reason), (3, Some(FinishReason::Length)));
}

#[test]
fn the_structure_counts_more_than_other_masks() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    let [a, b, x] = ["a", "b", "x"].map(|token| tokenizer.id_of(token).expect("a token"));
    let base = || params(regex("[ab]{4}"), Some(5));
    let said = |params: SamplingParams| run(&engine, None, params).remove(0);
    let only_b = said(SamplingParams { allowed_token_ids: Some(vec![b, x]), ..base() });
    assert_eq!(only_b.text, "bbbb");
    // No token is allowed by both.
    let none = said(SamplingParams { allowed_token_ids: Some(vec![x]), ..base() });
    assert_eq!((none.text.len(), none.finish_reason), (4, Some(FinishReason::Stop)), "{}", none.text);
    let banned = said(SamplingParams { bad_words: vec!["a".to_owned()], ..base() });
    assert_eq!(banned.text, "bbbb");
    let biased = said(SamplingParams { logit_bias: [(a, 100.0)].into(), ..base() });
    assert_eq!(biased.text, "aaaa");
    // More tokens than the structure has: it ends all the same.
    for min_tokens in [4, 50] {
        let ended = said(SamplingParams { min_tokens, ..base() });
        assert_eq!((ended.text.len(), ended.finish_reason), (4, Some(FinishReason::Stop)));
    }
}

#[test]
fn samples_of_one_request_have_a_structure_each() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let samples = run(&engine, None, SamplingParams { n: 6, ..params(json(SCHEMA), Some(9)) });
    assert_eq!(samples.len(), 6);
    for sample in &samples {
        assert_follows_the_schema(&sample.text);
    }
    assert!(samples.iter().any(|sample| sample.text != samples[0].text));
}

#[test]
fn what_comes_first_is_free() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let [angle, slash] = ["<", "/"].map(|token| engine.tokenizer().expect("").id_of(token).expect("a token"));
    for (outputs, seed) in [(json(SCHEMA), 1), (regex("[xy]{3}"), 2), (grammar("start: \"x\" \"y\"+ \"z\""), 3)] {
        let after = StructuredOutputs { after: Some("</".to_owned()), ..outputs.clone() };
        let params = SamplingParams { logit_bias: [(angle, 12.0), (slash, 12.0)].into(), ..params(after, Some(seed)) };
        let sample = run(&engine, None, params).remove(0);
        let (_, rest) = sample.text.split_once("</").expect("its mark");
        let rest = rest.trim_start();
        if sample.finish_reason == Some(FinishReason::Stop) {
            match (&outputs.json, &outputs.regex) {
                (Some(_), _) => assert_follows_the_schema(rest),
                (_, Some(_)) => assert!(rest.len() == 3 && rest.bytes().all(|byte| b"xy".contains(&byte)), "{rest}"),
                _ => assert!(rest.starts_with("xy") && rest.ends_with('z'), "{rest}"),
            }
        } else {
            assert!(outputs.regex.is_none(), "{}", sample.text);
        }
    }
}

/// A mixed load: structured and free, greedy and random, base and adapters.
fn mixed() -> Vec<GenerateRequest> {
    let outputs = [json(SCHEMA), regex("[a-f]{8,24}"), choice(&["one", "two", "three"]), grammar("start: /[xy]/{20}")];
    (0..16)
        .map(|index| {
            let prompt: Vec<u32> = (0..4 + index).map(|at| 3 + (at * 7 + index * 31) % 250).collect();
            let outputs = outputs.get(index as usize % 5).cloned();
            let seed = (index % 2 == 0).then_some(i64::from(index));
            let structured = SamplingParams {
                structured_outputs: outputs,
                temperature: if seed.is_some() { 1.2 } else { 0.0 },
                seed,
                ignore_eos: false,
                ..greedy(30)
            };
            request(&prompt, [None, Some("alpha"), Some("beta")][index as usize % 3], structured)
        })
        .collect()
}

#[test]
fn structured_solo_equals_batched_bit_for_bit() {
    let oracle = Oracle::open("llama");
    let with_adapters = |configure: &dyn Fn(&mut EngineConfig)| {
        let engine = engine(&oracle, configure);
        load(&engine, &oracle, &["alpha", "beta"]);
        engine
    };
    let reference = with_adapters(&|config| config.enable_prefix_caching = false);
    let alone: Vec<Answer> = mixed().into_iter().flat_map(|request| answers(&reference, vec![request])).collect();
    let adapter_bytes = reference.stats().expect("stats").adapter_bytes;
    let small = with_adapters(&|config| {
        config.max_model_len = Some(52);
        config.kv_cache_memory_bytes = Some(adapter_bytes + 20 * 1024);
    });
    let chunked = with_adapters(&|config| {
        config.max_num_batched_tokens = Some(5);
        config.max_num_seqs = 4;
    });
    for engine in [&reference, &small, &chunked] {
        assert_eq!(answers(engine, mixed()), alone);
    }
    assert!(small.stats().expect("stats").preemptions > 0);
}

#[test]
fn what_cannot_be_compiled_is_refused_with_its_fault() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let cases = [
        (json("{"), "structured_outputs.json cannot be used: the schema is not JSON"),
        (json("[1]"), "a JSON Schema is an object, got `[1]`"),
        (json(r#"{"type": "things"}"#), "things"),
        (json(r#"{"uniqueItems": true}"#), "leave uniqueItems out"),
        (json(r##"{"$ref": "#/$defs/nope"}"##), "nope"),
        (json(r#"{"type": "integer", "minimum": 3, "maximum": 2}"#), "minimum"),
        (regex("[a"), "structured_outputs.regex cannot be used"),
        (regex("(?=a)b"), "look-around"),
        (grammar("start: item"), "item"),
        (grammar("root ::= item"), "the rule `item` is used and not defined"),
        (StructuredOutputs::default(), "none are specified"),
        (StructuredOutputs { regex: Some("a".to_owned()), ..json("{}") }, "multiple are specified: json, regex"),
        (choice(&[]), "choice cannot be empty"),
    ];
    for (outputs, words) in cases {
        let refusal = refusal(&engine, params(outputs, None));
        assert!(refusal.contains(words), "`{refusal}` says `{words}`");
        assert!(refusal.len() < 600 && !refusal.contains("verbose"), "{refusal}");
    }
    assert_eq!(text(&engine, choice(&["still"]), None), "still");
}

#[test]
fn what_turns_out_to_have_no_end_fails_alone() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    // After the first letter nothing can follow, and nothing but something may.
    let dead = params(grammar("start: \"a\" NOTHING\nNOTHING: /[b-y]/ & /[c-z]/ & /[b-z]{2}/"), None);
    let request = GenerateRequest::tokens([5, 40]).params(dead);
    let other = GenerateRequest::tokens([5, 40]).params(params(regex("[ab]{9}"), None));
    let mut streams = engine.submit_all(vec![request, other], true).expect("good requests");
    let failed = streams[0].collect_all().expect_err("it cannot go on").to_string();
    assert!(failed.contains("cannot go on"), "{failed}");
    assert_eq!(streams[1].collect_all().expect("it goes on")[0].text.len(), 9);
}

/// Definitions `d0` to `d{count}`, each made by the next one's name, and `d0` itself.
fn chained(count: usize, link: impl Fn(String) -> String) -> StructuredOutputs {
    let link = |index: usize| format!(r#""d{index}": {}"#, link(format!(r##"{{"$ref": "#/$defs/d{}"}}"##, index + 1)));
    let links: Vec<String> = (0..count).map(link).collect();
    json(&format!(
        r##"{{"$ref": "#/$defs/d0", "$defs": {{{}, "d{count}": {{"type": "integer"}}}}}}"##,
        links.join(", ")
    ))
}

fn rules(count: usize, name: &str, last: &str) -> String {
    let rules: Vec<String> = (0..count).map(|index| format!("{name}{index}: {name}{}\n", index + 1)).collect();
    format!("start: {name}0\n{}{name}{count}: {last}\n", rules.concat())
}

#[test]
fn no_depth_of_a_grammar_ends_the_process() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let ebnf: Vec<String> = (0..5000).map(|index| format!("r{index} ::= r{}\n", index + 1)).collect();
    let cases = [
        grammar(&rules(8000, "r", "\"a\"")),
        grammar(&rules(200, "T", "\"a\"")),
        grammar(&format!("root ::= r0\n{}r5000 ::= \"a\"", ebnf.concat())),
        chained(2500, |next| next),
        chained(1500, |next| format!(r#"{{"type": "array", "items": {next}}}"#)),
        chained(1500, |next| format!(r#"{{"allOf": [{next}, {{"maximum": 5}}]}}"#)),
        chained(1000, |next| format!(r#"{{"anyOf": [{next}, {{"type": "null"}}]}}"#)),
        json(&format!(r#"{{"allOf": [{}{{}}]}}"#, r#"{"type": "integer"}, "#.repeat(5000))),
        grammar(&format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000))),
        grammar(&format!("start: A\nA: {}\"a\"", "~".repeat(50_000))),
        regex(&format!("{}a{}", "(".repeat(20_000), ")".repeat(20_000))),
        json(&format!("{}{{}}{}", r#"{"items": "#.repeat(5000), "}".repeat(5000))),
    ];
    for outputs in cases {
        let asked = params(outputs.clone(), None);
        // Followed or refused: both are answers.
        match engine.submit(GenerateRequest::tokens([5]).params(SamplingParams { max_tokens: Some(3), ..asked })) {
            Ok(mut stream) => drop(stream.collect_all().expect("it is followed")),
            Err(error) => assert!(error.to_string().contains("structured_outputs"), "{error}"),
        }
    }
    assert_eq!(text(&engine, choice(&["still"]), None), "still");
    assert_eq!(text(&engine, grammar(&rules(3000, "r", "\"ab\"")), None), "ab");
    let deep = refusal(&engine, params(grammar(&rules(5000, "T", "\"a\"")), None));
    assert!(deep.contains("`5001`") && deep.contains("`500`"), "{deep}");
    let long = refusal(&engine, params(grammar(&rules(20_000, "r", "\"a\"")), None));
    assert!(long.contains("bytes") && long.contains("131072"), "{long}");
}

#[test]
fn many_choices_are_no_more_than_few() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let words: Vec<String> = (0..2500).map(|index| format!("w{index}x")).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let said = text(&engine, choice(&words), Some(1));
    assert!(words.contains(&said.as_str()), "{said}");
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    let said = text(&engine, json(&format!(r#"{{"enum": [{}]}}"#, quoted.join(", "))), Some(2));
    assert!(quoted.contains(&said), "{said}");
    for keyword in ["oneOf", "anyOf"] {
        let kinds: Vec<String> = (0..300)
            .map(|index| {
                format!(
                    r#"{{"type": "object", "properties": {{"kind": {{"const": "k{index}"}}, "n": {{"type": "boolean"}}}},
                    "required": ["kind", "n"], "additionalProperties": false}}"#
                )
            })
            .collect();
        let schema = json(&format!(r#"{{"{keyword}": [{}]}}"#, kinds.join(", ")));
        let tight = StructuredOutputs { disable_any_whitespace: true, ..schema };
        let value: Value = serde_json::from_str(&text(&engine, tight, Some(3))).expect("JSON");
        assert!(value["kind"].as_str().is_some_and(|kind| kind.starts_with('k')) && value["n"].is_boolean(), "{value}");
    }
}

#[test]
fn a_grammar_that_takes_too_long_fails_alone() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let ambiguous = "start: a\na: a a | b\nb: /[a-z ]/ | /[a-z]/ | \" \"";
    let endless =
        SamplingParams { max_tokens: Some(500), min_tokens: 500, n: 2, ..params(grammar(ambiguous), Some(1)) };
    let slow = GenerateRequest::tokens([5, 40]).params(endless);
    let other = GenerateRequest::tokens([5, 40]).params(params(regex("[ab]{9}"), None));
    let mut streams = engine.submit_all(vec![slow, other], true).expect("good requests");
    assert_eq!(streams[1].collect_all().expect("it goes on")[0].text.len(), 9);
    let failed = streams[0].collect_all().expect_err("it takes too long").to_string();
    assert!(failed.contains("what may come next takes more than"), "{failed}");
    assert!(engine.check_health().is_ok());
}

#[test]
fn formats_that_nobody_knows_are_notes() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let schema = r#"{"type": "array", "items": {"type": "string", "format": "binary", "maxLength": 2}, "minItems": 1, "maxItems": 1,
        "uniqueItems": false}"#;
    let value: Value = serde_json::from_str(&text(&engine, json(schema), Some(4))).expect("JSON");
    assert!(value[0].is_string(), "{value}");
    let dated = StructuredOutputs { disable_any_whitespace: true, ..json(r#"{"type": "string", "format": "date"}"#) };
    assert_eq!(text(&engine, dated, Some(4)).len(), "\"2000-01-01\"".len());
}

#[test]
fn what_need_not_come_first_may_be_left_out() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let optional =
        || StructuredOutputs { after: Some("</t>".to_owned()), opening: Some("<t>".to_owned()), ..regex("[xy]{3}") };
    let token = |sign: &str| engine.tokenizer().expect("a tokenizer").id_of(sign).expect("a token");
    let said = |biases: &[(&str, f32)]| {
        let logit_bias = biases.iter().map(|&(sign, bias)| (token(sign), bias)).collect();
        run(&engine, None, SamplingParams { logit_bias, ..params(optional(), None) }).remove(0)
    };
    let plain = said(&[("x", 50.0)]);
    assert_eq!((plain.text.as_str(), plain.finish_reason), ("xxx", Some(FinishReason::Stop)));
    // It begins with the mark, and goes on after the other one. (Nothing but `<`, `/`, `t` and `>` is likely.)
    let thinks = said(&[("<", 60.0), ("t", 50.0), ("/", 40.0)]);
    assert!(thinks.text.trim_start().starts_with("<t>"), "{}", thinks.text);
}

#[test]
fn structure_needs_a_tokenizer() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| config.skip_tokenizer_init = true);
    let refusal = refusal(&engine, params(choice(&["a"]), None));
    assert!(refusal.contains("skip_tokenizer_init"), "{refusal}");
}
