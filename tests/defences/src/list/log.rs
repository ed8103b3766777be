//! Defences on the read path of the log and the snapshots: the order of frames, the marks, the line of
//! incarnations, and the chain of snapshot links.

use super::{Defence, check, defence, it, refusal, stores};

const ORDER: &str = "format/src/log/order.rs";
const WALK: &str = "format/src/log/walk.rs";
const MAP: &str = "format/src/log/map.rs";
const READER: &str = "format/src/log/reader.rs";
const SURVEY: &str = "format/src/state/survey.rs";
const FOLLOW: &str = "format/src/state/follow.rs";
const REPLAY: &str = "format/src/state/replay.rs";
const CHAIN: &str = "format/src/manifest/chain.rs";

pub const LIST: &[Defence] = &[
    // The choice of the next frame.
    refusal(
        "a group starts at a boundary",
        ORDER,
        "header.group_start && !offset.is_multiple_of(GROUP_ALIGN)",
        stores("frames_of_one_group_are_validated_separately"),
    ),
    refusal(
        "a frame inside a group directly follows the previous one",
        ORDER,
        "!header.group_start && (segment, offset) != next_locations(before)[0]",
        stores("log_end_decisions_match_table"),
    ),
    check(
        "a payload is checked before its frame is used (I3)",
        WALK,
        "check_payload_crc(&header, payload_crc)?;",
        stores("log_end_decisions_match_table"),
    ),
    refusal(
        "a walk past the predecessor's end is refused (I5)",
        WALK,
        "passed || self.point.lsn > last.lsn",
        stores("changed_opening_record_is_detected"),
    ),
    refusal(
        "chain hash at the end of an incarnation (I5)",
        WALK,
        "(self.point.lsn, self.point.chain) != (last.lsn, last.chain)",
        stores("changed_opening_record_is_detected"),
    ),
    defence(
        "frames also identify the newest incarnation (I5)",
        MAP,
        "segment.opening().map(|opening| opening.incarnation).or(segment.frames)",
        "segment.opening().map(|opening| opening.incarnation)",
        it("crash::lies::lying_medium_is_harmless_or_detected"),
    ),
    defence(
        "a frame identifies an incarnation only at its own location",
        READER,
        "frame.is_at(store, number, here)",
        "true",
        stores("log_end_decisions_match_table"),
    ),
    // Marks (I4): invalid frames that a mark covers are damage, not a torn tail.
    check(
        "mark of a valid frame (I4)",
        WALK,
        "self.mark = self.mark.max(header.durable);",
        it("damage::file_damage_after_kill_loses_only_unmarked_batches"),
    ),
    check(
        "mark of an opening (I4)",
        WALK,
        "self.mark = self.mark.max(opening.accepted);",
        stores("changed_opening_record_is_detected"),
    ),
    check(
        "mark of a frame beyond the damage (I4)",
        WALK,
        "*mark = (*mark).max(frame.durable);",
        stores("log_end_decisions_match_table"),
    ),
    defence(
        "a mark inside a group counts (I4)",
        MAP,
        "header.is_ok() && first.is_none()",
        "header.is_ok() && frames.is_none()",
        stores("mark_inside_a_group_counts_without_the_group_start"),
    ),
    defence(
        "an unreadable segment does not count as empty (I4)",
        MAP,
        "reader.all_is_readable()",
        "true",
        stores("segment_is_used_once_it_becomes_readable"),
    ),
    defence(
        "mark of a manifest (I4)",
        SURVEY,
        "self.readable().map(|manifest| manifest.end).max().unwrap_or_default()",
        "Lsn(0)",
        stores("snapshots::manifest_end_is_a_durable_mark"),
    ),
    defence(
        "beyond the end, only marks of the newest incarnation count (I4)",
        WALK,
        "Some(frame.incarnation) == self.map.newest && frame.lsn > self.point.lsn",
        "frame.lsn > self.point.lsn",
        stores("only_marks_of_the_newest_incarnation_count"),
    ),
    refusal(
        "damage under a mark is refused (I4)",
        WALK,
        "mark >= lost",
        stores("log_end_decisions_match_table"),
    ),
    refusal(
        "an unreadable location does not end the log (I4)",
        WALK,
        "at_break.defect.is_unreadable()",
        it("recovery::log::unreadable_log_is_refused"),
    ),
    defence(
        "old bytes of a recycled segment are not a torn tail",
        "format/src/frame.rs",
        "!is_earlier && matches.into_iter().filter(|matches| *matches).count() >= 2",
        "matches.into_iter().filter(|matches| *matches).count() >= 2",
        it("fuzz_inputs::inputs_of_the_repository_pass_the_target_for_histories"),
    ),
    // Segments that must exist (I8).
    defence(
        "an older incarnation extends to its recorded end (I5)",
        WALK,
        "Some(self.point.incarnation) != self.map.newest",
        "false",
        stores("changed_opening_record_is_detected"),
    ),
    defence(
        "a missing segment between two others is refused (I8)",
        WALK,
        "return Err(Defect::Missing.at_lsn(file, 0, lost))",
        "continue",
        stores("log_end_decisions_match_table"),
    ),
    refusal(
        "a bad header of a segment with frames is refused (I8)",
        WALK,
        "number < highest || frames.is_some()",
        stores("log_end_decisions_match_table"),
    ),
    defence(
        "a missing newest segment is refused (I8)",
        WALK,
        "return Err(Defect::Missing.at_lsn(FileName::Segment(number + 1), 0, lost));",
        "",
        stores("log_end_decisions_match_table"),
    ),
    // Snapshots.
    refusal(
        "manifest of another store",
        SURVEY,
        "manifest.store != store.store",
        stores("snapshots::damaged_snapshot_is_skipped_without_data_loss"),
    ),
    refusal(
        "manifest under another number",
        SURVEY,
        "manifest.snapshot.0 != number",
        stores("snapshots::damaged_snapshot_is_skipped_without_data_loss"),
    ),
    check(
        "links of a chain follow each other",
        SURVEY,
        "check_link(change, link, health.header_crc).map_err(at)?;",
        stores("snapshots::damaged_snapshot_is_skipped_without_data_loss"),
    ),
    check(
        "checksum of the previous link",
        CHAIN,
        r#"check_equal("checksum of the previous link", previous_crc.into(), named_crc.into())?;"#,
        stores("snapshots::damaged_snapshot_is_skipped_without_data_loss"),
    ),
    check(
        "a change begins after the previous link, or at its redo",
        CHAIN,
        r#"check_limit("end of the previous link", previous.end.0, reached.0)?;"#,
        stores("snapshots::thin_snapshot_begins_at_previous_link"),
    ),
    defence(
        "tombstones of a snapshot",
        REPLAY,
        "!caught && self.tombstones.get(&page).is_none_or(|deleted| *deleted < lsn)",
        "!caught",
        stores("snapshots::pages_deleted_while_a_snapshot_was_taken_stay_deleted"),
    ),
    defence(
        "batches that a captured page may include are checked",
        REPLAY,
        "lsn > self.caught_newest",
        "true",
        stores("snapshots::pages_deleted_while_a_snapshot_was_taken_stay_deleted"),
    ),
    refusal(
        "checksum of a restored table",
        FOLLOW,
        "health.header_crc != table_crc",
        stores("snapshots::restore_replaces_pages_and_root_with_its_table"),
    ),
    check(
        "page bytes within the budget (I10)",
        FOLLOW,
        "resolution.check_page_bytes(page_bytes_max)?;",
        stores("rebuild_refuses_pages_over_the_limit"),
    ),
    // The pure rebuild, whose results are the reference for recovery.
    defence(
        "a rebuild starts nowhere below the floor",
        "format/src/state/rebuild.rs",
        "Reach::follow(self.survey, self.source, base)",
        "self.survey.resolve(self.source, base, None)",
        stores("snapshots::rebuild_never_starts_below_floor"),
    ),
    check(
        "a rebuild of an earlier state starts nowhere below the floor",
        "format/src/state/rebuild.rs",
        "reach.check_state(base.map(AsRef::as_ref), until)?;",
        stores("snapshots::rebuild_never_starts_below_floor"),
    ),
    defence(
        "one unreadable location rules out a torn tail",
        WALK,
        "(of.defect.is_unreadable(), of.is_frame_like)",
        "(false, of.is_frame_like)",
        stores("statements::unreadable_location_next_to_torn_frame_is_corruption"),
    ),
    // The judge.
    check(
        "images that later batches replace are proven",
        "format/src/judge/gaps.rs",
        "found.extend(damaged.map(|damage| Gap { first: lsn, last: lsn, damage }));",
        stores("verdicts::states_between_starts_are_proven"),
    ),
    defence(
        "a lost beginning of the log is reported",
        "format/src/judge/mod.rs",
        "lost_beginning(survey, &record).filter(|_| is_end_known)",
        "None::<Damage>",
        stores("verdicts::a_lost_beginning_of_the_log_is_reported"),
    ),
];
