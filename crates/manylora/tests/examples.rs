//! The two examples run as a reader would run them: one from a plain thread, one as an HTTP service.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Cargo builds examples before it runs tests, beside the folder of the test binaries.
fn example(name: &str) -> Command {
    let this = std::env::current_exe().expect("this test");
    let folder = this.parent().and_then(Path::parent).expect("the target folder").join("examples");
    let oracle = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama");
    let mut command = Command::new(folder.join(name));
    command.arg(oracle.join("base"));
    for adapter in ["alpha", "beta"] {
        command.arg(format!("{adapter}={}", oracle.join("adapters").join(adapter).display()));
    }
    command
}

#[test]
fn blocking() {
    let output = example("blocking").output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for line in ["alpha is version ", "base: ", "alpha: ", "beta: "] {
        assert!(text.lines().any(|written| written.starts_with(line)), "`{line}` in {text}");
    }
}

#[test]
fn axum_service() {
    let mut service =
        example("axum_service").env("LISTEN", "127.0.0.1:0").stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(service.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("listening on http://").expect("the address").to_owned();
    let post = |body: &str| {
        let mut connection = TcpStream::connect(&address).expect("it listens");
        write!(
            connection,
            "POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("sent");
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer).expect("an answer");
        String::from_utf8_lossy(&answer).into_owned()
    };
    let good = post(r#"{"prompt": "The river", "adapter": "alpha", "max_tokens": 4}"#);
    let bad = post(r#"{"prompt": "The river", "adapter": "nope"}"#);
    service.kill().expect("killed");
    service.wait().expect("ended");
    assert!(good.starts_with("HTTP/1.1 200"), "{good}");
    assert!(bad.starts_with("HTTP/1.1 400") && bad.contains("`nope` is not loaded"), "{bad}");
}
