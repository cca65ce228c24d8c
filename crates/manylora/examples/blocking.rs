//! Three prompts in one batch, each with another adapter or none, from a plain thread.
//!
//! `cargo run --release -p manylora --example blocking -- BASE NAME=ADAPTER_DIR [NAME=ADAPTER_DIR ...]`

#![expect(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;

use manylora::{AdapterSource, Engine, EngineConfig, GenerateRequest, SamplingParams};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let base = arguments.next().ok_or("usage: blocking BASE NAME=ADAPTER_DIR ...")?;
    let mut config = EngineConfig::new(base);
    config.max_lora_rank = 64;
    let engine = Engine::start(config)?;
    let mut names = vec![None];
    for argument in arguments {
        let (name, path) = argument.split_once('=').ok_or("an adapter is NAME=ADAPTER_DIR")?;
        let info = engine.load_adapter(AdapterSource::directory(name, path))?;
        let version = info.version.ok_or("a loaded adapter was read")?;
        println!("{} is version {version}", info.name);
        names.push(Some(name.to_owned()));
    }

    // All requests are queued before the first answer is read: they share the engine's batch.
    let params = SamplingParams { temperature: 0.0, max_tokens: Some(32), ..SamplingParams::default() };
    let requests = names
        .iter()
        .map(|name| {
            let request = GenerateRequest::text("List the email of all customers.").params(params.clone());
            match name {
                Some(name) => request.adapter(name),
                None => request,
            }
        })
        .collect();
    for (name, stream) in names.iter().zip(engine.submit_all(requests, true)?) {
        print!("{}: ", name.as_deref().unwrap_or("base"));
        for delta in stream {
            print!("{}", delta?.text);
        }
        println!();
    }
    Ok(())
}
