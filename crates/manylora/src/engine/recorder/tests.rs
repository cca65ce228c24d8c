//! What a trace says when the disk does not follow.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use manylora_core::budget::{ModelDimensions, NumberFormat};
use manylora_core::trace::{BlockName, TraceHeader, TraceLine, TracedReason};
use manylora_core::{
    CoreConfig, Digest, Effect, EvictionPolicyKind, FinishReason, LoraMemory, NewRequest, PlannedSequence, RequestId,
    SchedulingPolicy, SequenceOutcome, StepOutcome, StepPlan, Time,
};

use super::{BATCH, Recorder, TraceFile, Writer};

fn header() -> TraceHeader {
    let config = CoreConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 64,
        block_size: 4,
        block_bytes: 1,
        ledger_bytes: 1000,
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        policy: SchedulingPolicy::Fcfs,
        max_loras: None,
        max_cpu_loras: None,
        lora_memory: LoraMemory::Elastic,
        eviction: EvictionPolicyKind::Lru,
        base_digest: Digest([0; 32]),
        max_deferred_steps: 1,
        max_loading: None,
    };
    let dimensions = ModelDimensions {
        layers: 1,
        hidden: 1,
        intermediate: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        vocabulary: 1,
        tied: true,
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        head_norm: false,
    };
    TraceHeader::new(config, dimensions, NumberFormat::F32)
}

/// Keeps what it is given, once it may: each write waits for a word.
struct Disk {
    words: Option<Receiver<()>>,
    kept: Arc<Mutex<Vec<u8>>>,
    full: bool,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(words) = &self.words {
            // Whoever has no more to say lets it run.
            let _ = words.recv();
        }
        if self.full {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.kept.lock().expect("nobody failed").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Started = (Recorder, std::thread::JoinHandle<()>, Arc<Mutex<Vec<u8>>>, Sender<()>);

fn start(waits: bool, full: bool, most_pending: usize) -> Started {
    let (word, words) = channel();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let disk = Disk { words: waits.then_some(words), kept: Arc::clone(&kept), full };
    let (recorder, writer) = Writer::with(Box::new(disk), PathBuf::from("trace"), header(), most_pending);
    (recorder, std::thread::spawn(move || writer.run()), kept, word)
}

fn lines(kept: &Mutex<Vec<u8>>) -> Vec<TraceLine> {
    let text = String::from_utf8(kept.lock().expect("nobody failed").clone()).expect("text");
    text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect()
}

fn request(id: u64) -> NewRequest {
    NewRequest {
        id: RequestId(id),
        prompt: (0..10).collect(),
        max_tokens: 20,
        priority: 0,
        cache_salt: None,
        tenant: None,
        adapters: Vec::new(),
        read_prefix_cache: true,
        all_prompt_logits: false,
    }
}

/// A step that brings a request one token.
fn step(recorder: &mut Recorder, id: u64, number: u64, token: u32) {
    let planned = PlannedSequence {
        request: RequestId(id),
        first_token: 0,
        rows: 1,
        first_position: 0,
        first_block: 0,
        blocks: 0,
        first_adapter: 0,
        adapters: 0,
        samples: true,
        all_logits: false,
        cached_tokens: 0,
        preemptions: 0,
    };
    let plan = StepPlan { step: number, sequences: vec![planned], tokens: vec![0], ..StepPlan::default() };
    recorder.planned(Time(0.0), &plan);
    let result = SequenceOutcome { request: Some(RequestId(id)), first_token: 0, tokens: 1, stopped: false };
    let outcome = StepOutcome { step: number, sequences: vec![result], tokens: vec![token] };
    recorder.committed(Time(0.0), &plan, &outcome);
}

#[test]
fn a_slow_disk_holds_nobody_up_and_what_is_lost_is_counted() {
    let (mut recorder, writer, kept, word) = start(true, false, 4 * BATCH);
    recorder.submitted(Time(0.0), &request(1), Instant::now(), Vec::new());
    recorder.hand_over();
    let noted = 20_000;
    for number in 0..noted {
        // The disk waits for a word all the while; this must not.
        step(&mut recorder, 1, number, 7);
    }
    drop(word);
    // What could be taken is written by now; what comes next finds room again.
    while recorder.pending.load(std::sync::atomic::Ordering::Relaxed) > 0 {
        std::thread::yield_now();
    }
    recorder.decided(&Effect::Finished { request: RequestId(1), reason: FinishReason::Length });
    drop(recorder);
    writer.join().expect("it ends");
    let lines = lines(&kept);
    let TraceLine::Close { lost, .. } = lines[lines.len() - 1] else { panic!("it is closed") };
    assert!(lost > 0);
    let said: u64 = lines.iter().map(|line| if let TraceLine::Lost { lines } = line { *lines } else { 0 }).sum();
    assert_eq!(said, lost);
    // Header, request, its state when lines were lost, the loss, the end, the close; and a step and an outcome for the others.
    let known = lines.iter().filter(|line| matches!(line, TraceLine::Step(_) | TraceLine::Outcome(_))).count() as u64;
    assert_eq!(known + lost, 2 * noted);
    let before: Vec<_> = lines.iter().take_while(|line| !matches!(line, TraceLine::Lost { .. })).collect();
    let Some(TraceLine::Unfinished(unfinished)) = before.last() else {
        panic!("what was known is said before the loss")
    };
    let outcomes = before.iter().filter(|line| matches!(line, TraceLine::Outcome(_))).count() as u64;
    assert_eq!((unfinished.id, unfinished.tokens), (RequestId(1), Some(outcomes)));
    // The prompt has ten tokens, so its third block takes two more.
    assert_eq!(filled(&before).len() as u64, (outcomes + 2) / 4);
    let TraceLine::End(end) = &lines[lines.len() - 2] else { panic!("the end is there") };
    assert_eq!((end.reason, end.tokens), (TracedReason::Length, None));
}

#[test]
fn a_full_disk_ends_the_recording_and_nothing_else() {
    let (mut recorder, writer, kept, _word) = start(false, true, 2 * BATCH);
    for number in 0..20_000 {
        step(&mut recorder, 1, number, 7);
    }
    drop(recorder);
    writer.join().expect("it ends");
    assert!(kept.lock().expect("nobody failed").is_empty());
}

#[test]
fn blocks_have_equal_names_for_equal_beginnings_only() {
    let (mut recorder, writer, kept, _word) = start(false, false, usize::MAX / 2);
    let mut other = request(2);
    other.prompt = [1, 1, 1, 1, 4, 5, 6, 7].into();
    recorder.submitted(Time(0.0), &request(1), Instant::now(), Vec::new());
    recorder.submitted(Time(0.0), &other, Instant::now(), Vec::new());
    // Goes on as the first one's prompt and answer.
    for (number, token) in [(0, 50), (1, 51)] {
        step(&mut recorder, 1, number, token);
    }
    let mut third = request(3);
    third.prompt = (0..10).chain([50, 51]).collect();
    recorder.submitted(Time(0.0), &third, Instant::now(), Vec::new());
    drop(recorder);
    writer.join().expect("it ends");
    let lines = lines(&kept);
    let mut prompts =
        lines.iter().filter_map(|line| if let TraceLine::Submit(one) = line { Some(&one.blocks) } else { None });
    let [first, second, third] = [0; 3].map(|_| prompts.next().expect("three"));
    assert_eq!((first.len(), second.len(), third.len()), (2, 2, 3));
    assert_eq!(first[..], third[..2]);
    // The second block's tokens are equal, and what comes before them is not.
    assert!(first.iter().all(|name| !second.contains(name)));
    let all: Vec<&TraceLine> = lines.iter().collect();
    assert_eq!(filled(&all), third[2..]);
}

/// Names of the blocks that were filled.
fn filled(lines: &[&TraceLine]) -> Vec<BlockName> {
    let outcomes =
        lines.iter().filter_map(|line| if let TraceLine::Outcome(one) = line { Some(&one.filled) } else { None });
    outcomes.flatten().map(|&(_, name)| name).collect()
}

#[test]
fn a_file_of_no_engine_goes_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace");
    let file = TraceFile::create(&path).expect("made");
    assert!(path.exists() && TraceFile::create(&path).is_err());
    drop(file);
    assert!(!path.exists());
}
