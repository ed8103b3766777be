//! A suggestion for a misspelled name.

/// The maximum length of compared names; the cost grows with the square of the length.
const LEN_MAX: usize = 256;

/// Returns the name in `known` that is most similar to `wanted`. A name that ends with `wanted` after a separator comes
/// first, such as `model/bias` for `bias`. Otherwise returns the name with the smallest edit distance, up to a third of
/// the letters.
///
/// ```
/// # use remanent::error::nearest;
/// assert_eq!(nearest("wram", ["warm", "cold"]), Some("warm"));
/// assert_eq!(nearest("bias", ["model/weight", "model/bias"]), Some("model/bias"));
/// assert_eq!(nearest("gamma", ["warm", "cold"]), None);
/// ```
#[doc(hidden)]
pub fn nearest<'n>(wanted: &str, known: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    if wanted.is_empty() || wanted.len() > LEN_MAX {
        return None;
    }
    let wanted_letters: Vec<char> = wanted.chars().collect();
    let cost_max = wanted_letters.len().div_ceil(3);
    let cost = |name: &str| match name.strip_suffix(wanted) {
        Some(start) if start.ends_with(['/', '.', ':', ' ']) => Some(0),
        _ if name.len() > LEN_MAX => None,
        _ => Some(edits(&wanted_letters, name)).filter(|edits| *edits <= cost_max),
    };
    let costs = known.into_iter().filter_map(|name| Some((cost(name)?, name)));
    costs.min_by_key(|(cost, _)| *cost).map(|(_, name)| name)
}

/// Returns the edit distance between two texts: insertions, deletions, replacements and swaps of neighbors.
fn edits(left: &[char], right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut rows = [vec![0; right.len() + 1], vec![0; right.len() + 1], (0..=right.len()).collect()];
    for at in 1..=left.len() {
        rows.rotate_left(1);
        let [before, last, row] = &mut rows;
        row[0] = at;
        for to in 1..=right.len() {
            let replaced = last[to - 1] + usize::from(left[at - 1] != right[to - 1]);
            row[to] = replaced.min(last[to] + 1).min(row[to - 1] + 1);
            let is_swap = at > 1 && to > 1 && left[at - 1] == right[to - 2] && left[at - 2] == right[to - 1];
            if is_swap {
                row[to] = row[to].min(before[to - 2] + 1);
            }
        }
    }
    rows[2][right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_name_is_the_one_with_fewest_edits() {
        let known = ["start", "warm", "step 10", "step 120", "model/w", "model/pos"];
        for (wanted, expected) in [
            ("strat", Some("start")),
            ("war", Some("warm")),
            ("step 11", Some("step 10")),
            ("pos", Some("model/pos")),
            ("Warm", Some("warm")),
            ("", None),
            ("something else", None),
        ] {
            assert_eq!(nearest(wanted, known), expected, "{wanted}");
        }
        assert_eq!(nearest(&"x".repeat(LEN_MAX + 1), ["x"]), None);
    }
}
