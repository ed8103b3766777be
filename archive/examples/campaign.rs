//! Runs random schedules of the simulated archive, and prints violations of its promises.
//!
//! ```text
//! cargo run --release -p remanent-archive --features testing --example campaign -- FIRST COUNT [RULE…]
//! cargo run --release -p remanent-archive --features testing --example campaign -- trace SEED [RULE…]
//! ```
//!
//! If rules are named, the processes do not follow them. The names are those of `Rule`: `Nonce`, `Check` and so on.
#![expect(clippy::print_stdout, reason = "a command prints its result")]

use std::collections::BTreeMap;
use std::time::Instant;

use remanent_archive::rules::{Rule, Rules};
use remanent_archive::testing::run;

/// Returns the text of a violation without names and numbers, for counting.
fn kind_of(violation: &str) -> String {
    let is_plain =
        |word: &&str| !word.contains(['/', '-', '(']) && !word.contains(|c: char| c.is_ascii_digit());
    violation.split(' ').filter(is_plain).take(14).collect::<Vec<_>>().join(" ")
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [first, second, rest @ ..] = arguments.as_slice() else {
        println!("usage: campaign FIRST COUNT [RULE…] | trace SEED [RULE…]");
        std::process::exit(2);
    };
    let rules = rest.iter().fold(Rules::default(), |rules, name| {
        let rule = Rule::ALL.into_iter().find(|rule| format!("{rule:?}") == *name);
        rules.without(rule.expect("the name of a rule"))
    });
    let number: u64 = second.parse().expect("a number");
    if first == "trace" {
        let outcome = run(number, rules, true);
        outcome.trace.iter().for_each(|event| println!("{event}"));
        println!("{:?}", outcome.violation);
        return;
    }
    let first: u64 = first.parse().expect("a number");
    let started = Instant::now();
    let mut violations: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut acknowledged = 0;
    for seed in first..first + number {
        let outcome = run(seed, rules, false);
        acknowledged += outcome.acknowledged;
        if let Some(violation) = outcome.violation {
            violations.entry(kind_of(&violation)).or_insert((0, seed)).0 += 1;
        }
    }
    let total: u64 = violations.values().map(|(count, _)| count).sum();
    println!(
        "seeds {first} to {}: {total} violations, {acknowledged} batches acknowledged, {:.1} s",
        first + number - 1,
        started.elapsed().as_secs_f64()
    );
    for (kind, (count, seed)) in violations {
        println!("  {count} (first: seed {seed}): {kind}");
    }
}
