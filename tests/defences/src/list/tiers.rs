//! Defences of tiers, of eviction policies, and of block layouts.

use super::{Defence, Test, check, defence, it, refusal, unit};

const RESIDENTS: &str = "src/tiers/residents.rs";
const KEEPER: &str = "src/tiers/keeper.rs";
const MOVER: &str = "src/tiers/mover.rs";
const LRU: &str = "src/eviction/lru.rs";
const S3_FIFO: &str = "src/eviction/s3_fifo.rs";
const LAYOUT: &str = "src/layout/mod.rs";

const MANY_MOVED: Test = it("moves::ensure_of_many_pages_uses_several_batches");
const HELD: Test = unit("tiers::residents::tests::pages_held_or_in_use_are_chosen_later");
const BY_LIST: Test = unit("eviction::tests::the_least_recently_used_page_leaves_first");
const QUEUES: Test = unit("eviction::tests::each_page_leaves_queues_once");
const NAMED: Test = unit("layout::tests::invalid_layouts_are_refused_by_name");
const COPIED: Test = unit("layout::tests::run_wise_block_copy_equals_naive_copy");
const FINGERPRINT: Test = unit("layout::tests::fingerprint_round_trips_and_any_bytes_decode_or_fail");

pub const LIST: &[Defence] = &[
    // The choice of pages to evict.
    refusal(
        "a page that a call moves in is not evicted meanwhile",
        RESIDENTS,
        "self.held.contains(page)",
        HELD,
    ),
    refusal(
        "a page that a read-ahead needs is evicted last",
        RESIDENTS,
        "self.kept.contains(page)",
        unit("tiers::residents::tests::kept_pages_are_chosen_last"),
    ),
    check(
        "a page that was not evicted can be evicted later",
        RESIDENTS,
        "staying.into_iter().for_each(|page| self.return_to_policy(page));",
        HELD,
    ),
    check(
        "a page in caller-owned memory is not evicted",
        KEEPER,
        "pages.retain(|(page, _)| !lent.contains(page));",
        it("tiers::room::lent_page_stays_in_place"),
    ),
    defence(
        "pages can grow after a demotion",
        MOVER,
        "moved.map(|point| point.is_some())",
        "moved.map(|_| false)",
        it("tiers::growing::demoted_pages_may_grow_and_be_cloned"),
    ),
    defence(
        "the thread frees all the space that commits request",
        KEEPER,
        "self.free_up(at, tier.free_bytes.max(requested))?",
        "self.free_up(at, tier.free_bytes)?",
        it("tiers::calls::allocations_of_one_request_are_all_or_nothing"),
    ),
    check(
        "pages that other calls move in are not evicted meanwhile",
        MOVER,
        "keeper.iter().for_each(|keeper| keeper.hold(pages));",
        it("tiers::calls::allocations_of_one_request_are_all_or_nothing"),
    ),
    defence(
        "a call without space for all of its pages moves none",
        MOVER,
        "to == Place::Disk || self.engine.arena.room(to).free_soon() >= bytes",
        "true",
        MANY_MOVED,
    ),
    defence(
        "a call waits for the last of its batches",
        MOVER,
        "points.into_iter().max_by_key(|point| point.lsn)",
        "points.into_iter().min_by_key(|point| point.lsn)",
        MANY_MOVED,
    ),
    check("a page is listed only by its last use", LRU, "self.by_use.remove(&before);", BY_LIST),
    check("a page that left the place is not selected again", LRU, "self.by_use.remove(&used);", BY_LIST),
    check("a selected page is no longer tracked", LRU, "self.uses.remove(&page);", BY_LIST),
    check("a page that arrives again is counted once", S3_FIFO, "self.left(page);", QUEUES),
    check(
        "a selected page is no longer counted",
        S3_FIFO,
        "self.queue(is_in_main).forget(resident.len);",
        QUEUES,
    ),
    check(
        "queues do not grow with pages that left the place",
        S3_FIFO,
        "self.tidy(resident.is_in_main);",
        QUEUES,
    ),
    refusal("the number of remembered evicted pages is bounded", S3_FIFO, "self.order.len() > limit", QUEUES),
    // The addresses of a block's bytes.
    refusal("no dimension of a layout is zero", LAYOUT, "*count == 0", NAMED),
    refusal(
        "the alignment of a layout is a power of two",
        LAYOUT,
        "!align.is_power_of_two() || align > ALIGN_MAX",
        NAMED,
    ),
    defence(
        "the length of a layout does not overflow",
        LAYOUT,
        "factors.into_iter().try_fold(1_u64, u64::checked_mul)",
        "Some(factors.into_iter().fold(1_u64, u64::wrapping_mul))",
        NAMED,
    ),
    defence("an index of a block, layer or part is within its limit", LAYOUT, "index < count", "true", NAMED),
    refusal("blocks of another shape are not copied", LAYOUT, "self.shape != to.shape", NAMED),
    defence(
        "ranges are joined only if adjacent on both sides",
        LAYOUT,
        "last.from.is_right_before(&from) && last.to.is_right_before(&to)",
        "last.from.is_right_before(&from)",
        COPIED,
    ),
    refusal("a layout has all of its regions", LAYOUT, "found != expected", NAMED),
    refusal("a layout fits into its regions", LAYOUT, "*found < expected", NAMED),
    refusal("a layout fingerprint has the right magic", LAYOUT, "bytes[0..2] != MAGIC", FINGERPRINT),
    refusal(
        "a layout fingerprint has a known version",
        LAYOUT,
        "bytes[2..4] != VERSION.to_le_bytes()",
        FINGERPRINT,
    ),
    refusal(
        "reserved bytes of a layout fingerprint are zero",
        LAYOUT,
        "bytes[28..32] != [0; 4]",
        FINGERPRINT,
    ),
];
