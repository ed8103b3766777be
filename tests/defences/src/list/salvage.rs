//! Defences of salvage: a batch or image that is not proven is ignored, wherever it is located.

use super::{Defence, Test, check, defence, it, refusal, stores};

const KNOWN: &str = "format/src/salvage/known_log.rs";
const PAGES: &str = "format/src/salvage/pages.rs";
const GUARDS: Test = stores("salvage::salvage_invents_no_state");
const MANY: Test = it("salvage::lost_sectors_and_files_yield_no_wrong_bytes");

pub const LIST: &[Defence] = &[
    // The three guards: no batch that a recovery cut off, no version that lacks a change, and no table of a
    // restore that was never logged.
    defence(
        "batches that a recovery cut off are ignored",
        KNOWN,
        "!is_past_end(&header, &openings)",
        "true",
        GUARDS,
    ),
    refusal("an epoch identifies the version of a page", PAGES, "info.epoch != wanted.epoch", MANY),
    defence(
        "a table counts only if a known restore names it",
        PAGES,
        "for of_page in known_versions.values_mut() {\n        of_page.sort_by_key(|known_version| std::cmp::Reverse(known_version.info.lsn));\n    }",
        "for name in source.list(crate::names::Folder::Pages).unwrap_or_default() {
            if let Some(file @ FileName::Table(_)) = FileName::parse(crate::names::Folder::Pages, &name)
                && let Ok((table, _)) = crate::state::survey::read_manifest(source, file, &survey.store)
            {
                table.entries.iter().for_each(&mut note);
            }
        }
        for of_page in known_versions.values_mut() {
            of_page.sort_by_key(|known_version| std::cmp::Reverse(known_version.info.lsn));
        }",
        GUARDS,
    ),
    // The other checks.
    check("checksum of a salvaged payload", KNOWN, "check_payload(header, &payload)?;", MANY),
    refusal("a known frame is durable or follows a known frame", KNOWN, "!is_durable && !follows", GUARDS),
    defence("a mark above its own frame is ignored", KNOWN, "header.durable <= header.lsn", "true", GUARDS),
    defence("known batches stop before a restore", KNOWN, "reach.min(Lsn(restore.0 - 1))", "reach", MANY),
    defence(
        "a page is exact only if the state is that of one batch",
        PAGES,
        "self.state.is_whole",
        "true",
        stores("salvage::salvage_without_known_state_reports_no_exact_page"),
    ),
];
