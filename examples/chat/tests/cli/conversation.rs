//! A conversation over a pipe: one message or command per line.

use std::io::{Read, Write};
use std::process::{Child, Stdio};

use crate::run::{Run, chat, model};

fn start(args: &[&str]) -> Child {
    model();
    let mut command = chat(args);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Sends the lines, then the end of the input.
fn converse(args: &[&str], lines: &str) -> Run {
    let mut child = start(args);
    child
        .stdin
        .take()
        .unwrap()
        .write_all(lines.as_bytes())
        .unwrap();
    child.wait_with_output().unwrap().into()
}

/// The number before `words` in a line of `/stats`.
fn count(line: &str, words: &str) -> u32 {
    let before = line.split(words).next().unwrap();
    before.split_whitespace().last().unwrap().parse().unwrap()
}

#[test]
fn turns_hit_the_prefix_cache_and_stats_show_it() {
    let lines = "What is the capital of France?\n/stats\nAnd of Italy?\n/stats\n";
    let run = converse(&["--max-tokens", "24"], lines);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(
        run.stdout.starts_with("The capital of France is Paris.\n"),
        "{run:?}"
    );
    let last: Vec<_> = run
        .stdout
        .lines()
        .filter(|line| line.starts_with("last answer:"))
        .collect();
    let [first, second] = last[..] else {
        panic!("{run:?}")
    };
    assert_eq!(count(first, " of them from the prefix cache"), 0);
    // The second prompt begins with the first one; all its full blocks of 16 tokens are there.
    let prompt = count(first, " prompt tokens");
    assert!(
        count(second, " of them from the prefix cache") >= prompt / 16 * 16,
        "{run:?}"
    );
    assert!(count(second, " prompt tokens") > prompt);
    assert!(run.stdout.contains("all 2 answers: "), "{run:?}");
}

#[test]
fn commands_are_answered_by_the_program() {
    let lines = "/stats\n/help\n/system\n/system Be brief.\n/system\n/nonsense\n\n/reset\n/exit\nnot read\n";
    let run = converse(&["--system", "You are kind."], lines);
    assert_eq!(run.code, Some(0), "{run:?}");
    let mut at = 0;
    for part in [
        "nothing has been answered yet",
        "/reset ",
        "You are kind.\n",
        "the system message is replaced\nBe brief.\n",
        "unknown command /nonsense",
        "the conversation is forgotten\n",
    ] {
        let found = run.stdout[at..]
            .find(part)
            .unwrap_or_else(|| panic!("{part:?}: {run:?}"));
        at += found + part.len();
    }
    assert_eq!(&run.stdout[at..], "", "{run:?}");
}

#[test]
fn reset_forgets_the_history() {
    let lines = "My name is Zebulon.\n/stats\n/reset\nMy name is Zebulon.\n/stats\n";
    let run = converse(&["--max-tokens", "4"], lines);
    let last: Vec<_> = run
        .stdout
        .lines()
        .filter(|line| line.starts_with("last answer:"))
        .collect();
    let [first, second] = last[..] else {
        panic!("{run:?}")
    };
    assert_eq!(
        count(first, " prompt tokens"),
        count(second, " prompt tokens")
    );
}

#[test]
fn a_message_beyond_the_context_is_refused_and_the_conversation_goes_on() {
    let long = "word ".repeat(200);
    let run = converse(
        &["--context", "128", "--max-tokens", "8"],
        &format!("{long}\nWhat is the capital of France?\n"),
    );
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains("not answered: prompt of "), "{run:?}");
    assert!(
        run.stdout.ends_with("The capital of France is Paris.\n"),
        "{run:?}"
    );
}

#[cfg(unix)]
mod signals {
    use super::*;

    fn interrupt(child: &Child) {
        let id = child.id().to_string();
        let status = std::process::Command::new("kill")
            .args(["-INT", &id])
            .status()
            .unwrap();
        assert!(status.success());
    }

    #[test]
    fn an_interrupt_stops_the_answer_and_not_the_program() {
        let mut child = start(&["--max-tokens", "2000"]);
        let mut stdin = child.stdin.take().unwrap();
        stdin
            .write_all(b"Write a very long story about a ship.\n")
            .unwrap();
        let mut first = [0];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut first)
            .unwrap();
        interrupt(&child);
        stdin.write_all(b"/stats\n").unwrap();
        drop(stdin);
        let run = Run::from(child.wait_with_output().unwrap());
        assert_eq!(run.code, Some(0), "{run:?}");
        assert!(run.stdout.contains("ended by abort"), "{run:?}");
        assert!(run.stdout.contains("all 1 answers: "), "{run:?}");
    }

    #[test]
    fn an_interrupt_between_answers_ends_a_piped_conversation() {
        let mut child = start(&[]);
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"/help\n").unwrap();
        // Once this is there, the model is loaded and the handler is in place.
        let mut first = [0];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut first)
            .unwrap();
        interrupt(&child);
        let run = Run::from(child.wait_with_output().unwrap());
        assert_eq!(run.code, Some(130), "{run:?}");
        drop(stdin);
    }
}
