//! Tests of templates: what they render, and what they refuse.

use serde_json::json;

use super::*;

fn template(source: &str) -> ChatTemplate {
    let special = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    ChatTemplate::compile([(DEFAULT.to_owned(), source.to_owned())], special).unwrap()
}

fn render(source: &str, messages: &Value) -> Result<String, String> {
    let options = RenderOptions { now: Some(1_767_323_045), ..RenderOptions::default() };
    template(source).render(messages, &options).map_err(|error| error.to_string())
}

fn hello() -> Value {
    json!([{"role": "user", "content": "hello"}])
}

#[test]
fn python_printing_and_json() {
    let messages =
        json!([{"role": "user", "content": "x", "data": {"b": [1, true, null, 0.5, 1e20, "é<'\n"], "a": {}}}]);
    let data = "{{ messages[0].data";
    assert_eq!(
        render(&format!("{data} }}}}"), &messages).unwrap(),
        r#"{'b': [1, True, None, 0.5, 1e+20, "é<'\n"], 'a': {}}"#
    );
    assert_eq!(
        render(&format!("{data}|tojson }}}}"), &messages).unwrap(),
        r#"{"b": [1, true, null, 0.5, 1e+20, "é<'\n"], "a": {}}"#
    );
    assert_eq!(
        render(&format!("{data}|tojson(indent=2, sort_keys=true, ensure_ascii=true) }}}}"), &messages).unwrap(),
        "{\n  \"a\": {},\n  \"b\": [\n    1,\n    true,\n    null,\n    0.5,\n    1e+20,\n    \"\\u00e9<'\\n\"\n  ]\n}"
    );
    assert_eq!(
        render(&format!("{data}.b|tojson(separators=(',', ':')) }}}}"), &messages).unwrap(),
        r#"[1,true,null,0.5,1e+20,"é<'\n"]"#
    );
    assert!(render("{{ nothing|tojson }}", &messages).unwrap_err().contains("undefined"));
    assert_eq!(render("{{ true }} {{ none }} {{ nothing }}.", &messages).unwrap(), "True None .");
}

#[test]
fn dates_come_from_the_clock_that_is_given() {
    assert_eq!(
        render("{{ strftime_now('%d %b %Y, %A %-d %H:%M:%S %I%p %j %y %F') }}", &hello()).unwrap(),
        "02 Jan 2026, Friday 2 03:04:05 03AM 002 26 2026-01-02"
    );
    assert!(render("{{ strftime_now('%Q') }}", &hello()).unwrap_err().contains("%Q"));
    assert_eq!(clock::format(-86_400 * 365, "%F").unwrap(), "1969-01-01");
    assert_eq!(clock::format(951_782_400, "%F %j").unwrap(), "2000-02-29 060");
}

#[test]
fn templates_speak_for_themselves_and_never_loop_for_ever() {
    let error = render("{{ raise_exception('roles must alternate') }}", &hello()).unwrap_err();
    assert!(error.ends_with("roles must alternate"), "{error}");
    let endless = "{% for a in range(90000) %}{% for b in range(90000) %}{{ b }}{% endfor %}{% endfor %}";
    assert!(render(endless, &hello()).unwrap_err().contains("too many steps"));
    assert!(ChatTemplate::missing().to_string().contains("no chat template"));
    let broken = ChatTemplate::compile([(DEFAULT.to_owned(), "{% if %}".to_owned())], BTreeMap::new());
    assert!(broken.unwrap_err().to_string().contains("compiled"));
}

#[test]
fn blocks_and_variables() {
    let source = "{%- for message in messages %}\n    {%- generation -%}\n{{ message.content }}\n{%- endgeneration %}\n{%- \
                  endfor %}\n{{ bos_token }}{{ mood }}{{ tools is none }}{% if add_generation_prompt %}+{% endif %}";
    let kwargs = json!({"mood": "calm"}).as_object().unwrap().clone();
    let options = RenderOptions { kwargs, ..RenderOptions::default() };
    assert_eq!(template(source).render(&hello(), &options).unwrap(), "hello<s>calmTrue+");
    let kwargs = json!({"messages": []}).as_object().unwrap().clone();
    let options = RenderOptions { kwargs, ..RenderOptions::default() };
    assert!(template(source).render(&hello(), &options).is_err());
}

#[test]
fn content_parts_become_what_the_template_takes() {
    let parts =
        json!([{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]);
    assert_eq!(render("{{ messages[0].content }}", &parts).unwrap(), "one\ntwo");
    let iterating = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}";
    assert_eq!(render(iterating, &parts).unwrap(), "[one][two]");
    let options = RenderOptions { content_format: ContentFormat::Parts, ..RenderOptions::default() };
    assert_eq!(template(iterating).render(&hello(), &options).unwrap(), "[hello]");
    let picture = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    assert!(render(iterating, &picture).unwrap_err().contains("`image_url`"));
    for wrong in [json!([]), json!("hi"), json!([{"content": "x"}]), json!([{"role": "user", "content": 3}])] {
        assert!(render("{{ messages }}", &wrong).is_err(), "{wrong}");
    }
    let calls = json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]}]);
    let print = "{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments.a }}";
    assert_eq!(render(print, &calls).unwrap(), "1");
}

#[test]
fn the_last_message_can_stay_open() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}";
    let continued = |content: &str| {
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]);
        let options =
            RenderOptions { add_generation_prompt: false, continue_final_message: true, ..RenderOptions::default() };
        template(source).render(&messages, &options).unwrap()
    };
    assert_eq!(continued("The answer"), "<user>a</><assistant>The answer");
    assert_eq!(continued("The answer "), "<user>a</><assistant>The answer");
    let both = RenderOptions { continue_final_message: true, ..RenderOptions::default() };
    assert!(template(source).render(&hello(), &both).unwrap_err().to_string().contains("exclude each other"));
}

#[test]
fn a_47_templates_of_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let base = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama/base");
    let tokenizer = Tokenizer::from_directory(&base).unwrap();
    assert!(ChatTemplate::from_directory(folder.path(), &tokenizer).unwrap().is_none());
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let read = |tools: Option<Value>| {
        let options = RenderOptions { tools, ..RenderOptions::default() };
        ChatTemplate::from_directory(folder.path(), &tokenizer).unwrap().unwrap().render(&hello(), &options)
    };
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "D{{ eos_token }}"}, {"name": "tool_use", "template": "T"}]}"#,
    );
    assert_eq!(read(None).unwrap(), "D<|im_end|>");
    assert_eq!(read(Some(json!([]))).unwrap(), "T");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}]}"#,
    );
    assert!(read(None).unwrap_err().to_string().contains("a, b"));
    write("chat_template.jinja", "J");
    assert_eq!(read(None).unwrap(), "J");
    write("tokenizer_config.json", "[");
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    assert!(ChatTemplate::from_directory(folder.path(), &tokenizer).is_err());
}

#[test]
fn what_clients_fill_in_with_null_is_not_there() {
    let messages =
        json!([{"role": "assistant", "content": null, "tool_calls": null, "reasoning": "so", "refusal": null}]);
    let source = "{{ messages[0] | tojson }}";
    assert_eq!(
        render(source, &messages).unwrap(),
        r#"{"role": "assistant", "content": "", "reasoning": "so", "reasoning_content": "so"}"#
    );
}

#[test]
fn templates_are_searched_for_signs() {
    assert!(template("a <tool_call> b").mentions("<tool_call>"));
    assert!(!template("a").mentions("<tool_call>"));
}
