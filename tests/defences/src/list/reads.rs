//! Lookups and reads without a lock: whole batches, logged ones, and bytes of one version (docs of
//! `src/versions`).

use super::{Defence, Test, defence, it, refusal, unit};

const VERSIONS: &str = "src/versions/mod.rs";
const STAYS: Test = unit("versions::tests::a_page_whose_bytes_change_stays_where_it_is");
const VIEWS: Test = unit("versions::tests::what_a_view_wants_stays_and_all_else_is_cut_off");

pub const LIST: &[Defence] = &[
    defence(
        "numbers that a reader wants are not overwritten",
        VERSIONS,
        "newest_lsn <= *floor",
        "true",
        STAYS,
    ),
    defence("a batch is seen once it is logged (I1)", VERSIONS, "installed.min(logged)", "installed", STAYS),
    defence(
        "what a view wants is not cut off",
        VERSIONS,
        "views.keys().next().map_or(visible, |oldest| visible.min(*oldest))",
        "visible",
        VIEWS,
    ),
    refusal(
        "bytes are of one version of their page",
        "src/store/bytes.rs",
        "!versions.is_at(info.page, info.lsn)",
        it("reads::bytes_and_what_is_known_of_them_are_of_one_batch"),
    ),
];
