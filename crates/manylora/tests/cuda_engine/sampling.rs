//! Random sampling on a card: what is fetched of rows of logits, and that it makes no difference to tokens.

use std::fs;
use std::path::Path;

use manylora::{Engine, EngineConfig, GenerateRequest, SamplingParams, StructuredOutputs};
use safetensors::SafeTensors;

use crate::common::{Oracle, answers, engine, load, request};
use crate::serving::on_card;
use crate::stand_in::StandIn;

const LENGTH: usize = 7;

fn random(top_k: i64, seed: i64) -> SamplingParams {
    SamplingParams {
        temperature: 0.7,
        top_p: 0.8,
        top_k,
        seed: Some(seed),
        max_tokens: Some(LENGTH),
        ignore_eos: true,
        ..SamplingParams::default()
    }
}

fn tokens(engine: &Engine, requests: Vec<GenerateRequest>) -> Vec<Vec<u32>> {
    answers(engine, requests).into_iter().map(|(tokens, _)| tokens).collect()
}

/// Counts from now on, where that can be done: not on a card.
fn count() {
    if let Some(device) = StandIn::counting() {
        device.reset_counts();
    }
}

/// Checks launches of the greedy search and of the lists, and copies from the card, since [`count`].
fn check_fetched(right: impl FnOnce(u64, u64, u64) -> bool) {
    let Some(device) = StandIn::counting() else { return };
    let (argmax, lists) = (device.launches("argmax_f32"), device.launches("largest_f32"));
    let copies = device.calls("cuMemcpyDtoHAsync_v2");
    assert!(right(argmax, lists, copies), "{argmax} greedy searches, {lists} lists, {copies} copies");
}

/// Under top_k the host fetches lists and no rows, as long as no neighbour needs rows: tokens are the same in all cases.
pub(crate) fn lists_give_the_tokens_of_rows() {
    let oracle = Oracle::open("llama");
    let engine = on_card(&oracle, |config| {
        config.batch_invariant = true;
        // All prompts fit one step, so that most requests decode together.
        config.max_num_batched_tokens = Some(512);
    });
    load(&engine, &oracle, &["alpha", "beta"]);
    let top_k = [1, 2, 20, 50, 200, 256];
    let prompt = oracle.prompt("mid");
    let adapter = |index: usize| [None, Some("alpha"), Some("beta")][index % 3];
    let listed = |index: usize| request(&prompt, adapter(index), random(top_k[index], index as i64));
    // Logprobs are of whole rows.
    let whole = |index: usize| {
        request(&prompt, adapter(index), SamplingParams { logprobs: Some(1), ..random(top_k[index], index as i64) })
    };
    let greedy = || request(&prompt, None, SamplingParams { temperature: 0.0, ..random(0, 0) });
    count();
    let wanted = tokens(&engine, (0..top_k.len()).map(whole).collect());
    assert!(wanted.iter().all(|tokens| tokens.len() == LENGTH));
    assert!(wanted.iter().any(|tokens| tokens != &wanted[0]), "one text for all");
    check_fetched(|argmax, lists, copies| (argmax, lists) == (0, 0) && copies >= LENGTH as u64);
    let wanted_greedy = tokens(&engine, vec![greedy()]).remove(0);

    count();
    assert_eq!(tokens(&engine, (0..top_k.len()).map(listed).collect()), wanted);
    check_fetched(|argmax, lists, copies| (argmax, copies) == (0, lists) && lists >= LENGTH as u64);

    // Beside greedy rows both small results are fetched, and still no row.
    count();
    let with_greedy = (0..top_k.len()).map(listed).chain([greedy()]).collect();
    let found = tokens(&engine, with_greedy);
    assert_eq!((&found[..top_k.len()], &found[top_k.len()]), (&wanted[..], &wanted_greedy));
    let least = LENGTH as u64;
    check_fetched(|argmax, lists, copies| argmax >= least && lists >= least && copies == argmax + lists);

    // Rows that one needs are fetched for all, and lists are not; one that does without top_k is such a one.
    for open in [0, 257] {
        count();
        let mixed = (0..top_k.len()).map(listed).chain([request(&prompt, None, random(open, 3))]).collect();
        assert_eq!(tokens(&engine, mixed)[..top_k.len()], wanted, "top_k {open}");
        // Those that arrive before it, or go on after it, are not kept from lists.
        check_fetched(|argmax, lists, copies| (argmax, copies - lists) == (0, LENGTH as u64));
    }
    // Neighbours that come and go: the longer ones run on with lists.
    let long = |index: usize| {
        request(
            &prompt,
            adapter(index),
            SamplingParams { max_tokens: Some(3 * LENGTH), ..random(top_k[index], index as i64) },
        )
    };
    let alone = tokens(&engine, vec![long(2)]).remove(0);
    assert_eq!(alone[..LENGTH], wanted[2]);
    assert_eq!(tokens(&engine, vec![whole(0), long(2), greedy(), listed(1)])[1], alone);
}

/// The base with a head of zeros: all logits are 0.
fn without_a_head(oracle: &Oracle, folder: &Path) {
    for entry in fs::read_dir(oracle.base_folder()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let path = folder.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let head = SafeTensors::deserialize(&file).unwrap().tensor("lm_head.weight").unwrap().data().as_ptr_range();
    let start = head.start.addr() - file.as_ptr().addr();
    let end = head.end.addr() - file.as_ptr().addr();
    file[start..end].fill(0);
    fs::write(path, file).unwrap();
}

/// Where more tokens tie than a list takes, rows are fetched.
pub(crate) fn ties_that_fill_a_list_are_read_from_rows() {
    let oracle = Oracle::open("llama");
    let folder = tempfile::tempdir().unwrap();
    without_a_head(&oracle, folder.path());
    let base = |config: &mut EngineConfig| config.model = EngineConfig::new(folder.path()).model;
    let card = on_card(&oracle, base);
    let processor = engine(&oracle, base);
    let requests = || (0..4).map(|index| request(&oracle.prompt("few"), None, random(20, index))).collect::<Vec<_>>();
    count();
    let found = tokens(&card, requests());
    check_fetched(|argmax, lists, copies| argmax == 0 && lists >= LENGTH as u64 && copies == 2 * lists);
    assert_eq!(found, tokens(&processor, requests()));
    let distinct: std::collections::BTreeSet<u32> = found.into_iter().flatten().collect();
    assert!(distinct.len() > 20, "all tokens are as likely: {distinct:?}");
}

/// Rows of a structured output are fetched and masked; what runs beside them gets the tokens that it gets alone.
pub(crate) fn structured_output_is_masked_on_the_host() {
    let oracle = Oracle::open("llama");
    let engine = on_card(&oracle, |config| config.batch_invariant = true);
    let expression = || StructuredOutputs { regex: Some("[a-d]{9}".to_owned()), ..StructuredOutputs::default() };
    let structured = |params: SamplingParams| {
        let params = SamplingParams { max_tokens: Some(3 * LENGTH), structured_outputs: Some(expression()), ..params };
        request(&oracle.prompt("few"), None, params)
    };
    let greedy = || SamplingParams { temperature: 0.0, ..random(0, 0) };
    let listed = || request(&oracle.prompt("few"), None, random(20, 1));
    let alone = tokens(&engine, vec![listed()]).remove(0);
    count();
    let found = tokens(&engine, vec![structured(greedy()), structured(random(20, 2)), listed()]);
    check_fetched(|_, _, copies| copies >= 9);
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    for tokens in &found[..2] {
        let text = tokenizer.decode(tokens, true, true).expect("text");
        assert!(text.len() == 9 && text.bytes().all(|byte| b"abcd".contains(&byte)), "{text}");
    }
    assert_eq!(found[2], alone);
}
