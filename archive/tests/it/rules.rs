//! Leaves out each rule of the protocol in turn and checks that a test detects it. The test is a campaign of random
//! schedules, or a separate schedule if the failure is rare.

use std::collections::BTreeSet;

use remanent_archive::rules::{Rule, Rules};
use remanent_archive::testing::process::Stop;
use remanent_archive::testing::run;

use crate::schedules;

/// The test that detects the omission of a rule.
enum Detection {
    /// A campaign of this number of random schedules, of which at least one violates a promise.
    Campaign(u64),
    /// The same as `Campaign`, but deletes do not lag either, because the lag would hide the failure.
    WithoutLag(u64),
    /// A schedule that violates a promise without the rule.
    Schedule(fn(Rules) -> Result<(), Stop>),
}

const TABLE: &[(Rule, Detection)] = &[
    (Rule::Nonce, Detection::Campaign(100)),
    (Rule::Reread, Detection::Campaign(100)),
    (Rule::Frozen, Detection::Campaign(1000)),
    (Rule::Fence, Detection::Campaign(100)),
    (Rule::Lineage, Detection::Campaign(100)),
    (Rule::Pred, Detection::Schedule(schedules::unproven_copy_returns)),
    (Rule::Durable, Detection::Campaign(100)),
    (Rule::Mark, Detection::Campaign(500)),
    (Rule::IFirst, Detection::Campaign(100)),
    (Rule::Mend, Detection::Campaign(100)),
    (Rule::Dedup, Detection::Schedule(schedules::copy_remembers_deleted_parts)),
    (Rule::Recheck, Detection::Schedule(schedules::boundary_passes_shared_parts)),
    (Rule::UKeys, Detection::Schedule(schedules::late_delete_of_a_key)),
    (Rule::BLine, Detection::WithoutLag(3000)),
    (Rule::BFirst, Detection::Campaign(100)),
    (Rule::Chain, Detection::Campaign(100)),
    (Rule::BComp, Detection::WithoutLag(500)),
    (Rule::Check, Detection::Campaign(4000)),
    (Rule::Redo, Detection::WithoutLag(100)),
    (Rule::Names, Detection::Campaign(500)),
    (Rule::Lag, Detection::Schedule(schedules::reader_meets_one_boundary)),
    (Rule::Exact, Detection::Schedule(schedules::stalled_pruner_meets_a_boundary)),
    (Rule::Unnamed, Detection::Campaign(2000)),
    (Rule::RCheck, Detection::Campaign(2000)),
];

/// Returns true if a test with these rules detects a violation of a promise.
fn is_detected(detection: &Detection, rules: Rules) -> bool {
    let any = |count: u64, rules| (0..count).any(|seed| run(seed, rules, false).violation.is_some());
    match detection {
        Detection::Campaign(count) => any(*count, rules),
        Detection::WithoutLag(count) => any(*count, rules.without(Rule::Lag)),
        Detection::Schedule(play) => play(rules).is_err(),
    }
}

#[test]
fn every_rule_has_a_row() {
    let rows: BTreeSet<Rule> = TABLE.iter().map(|(rule, _)| *rule).collect();
    assert_eq!(rows, Rule::ALL.into_iter().collect());
    assert_eq!(TABLE.len(), Rule::ALL.len());
}

#[test]
fn each_omitted_rule_is_detected() {
    let undetected: Vec<Rule> = TABLE
        .iter()
        .filter(|(rule, detection)| !is_detected(detection, Rules::default().without(*rule)))
        .map(|(rule, _)| *rule)
        .collect();
    assert_eq!(undetected, []);
}

#[test]
fn schedules_of_the_table_pass_with_all_rules() {
    for (rule, detection) in TABLE {
        if let Detection::Schedule(play) = detection {
            assert_eq!(play(Rules::default()), Ok(()), "{rule:?}");
        }
    }
}

/// All promises hold even if deletes do not lag, because the other rules suffice.
#[test]
fn deletes_without_lag_keep_all_promises() {
    for seed in 0..1000 {
        let outcome = run(seed, Rules::default().without(Rule::Lag), false);
        assert_eq!(outcome.violation, None, "seed {seed}");
    }
}
