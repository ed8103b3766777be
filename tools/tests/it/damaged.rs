//! The inspecting commands on a damaged store, wherever the damage is.
//!
//! The commands exit with 0 or 1 for any damage, never with a panic, a signal or a usage error. `verify` exits with 0
//! only if no output of the other commands has changed. The damaged store is never modified.

use std::fs;
use std::num::NonZero;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::command::{Scratch, command};
use crate::inspect::{copy, files, small_store};

/// Number of damages, spread evenly over the written bytes.
const DAMAGES: usize = 2000;
/// One damage in this number removes a whole file; the others flip a bit, zero a sector or truncate a file,
/// in turn.
const MISSING_OF: usize = 50;
const SECTOR_LEN: usize = 512;

/// Every damage is checked by `verify`, and by one of these commands in turn.
const COMMANDS: [&[&str]; 7] = [
    &["info", "--json"],
    &["pages", "--json"],
    &["log", "--json"],
    &["snapshots", "--json"],
    &["versions", "--json"],
    &["dump", "1", "-o", "-"],
    &["diff", "--from", "snapshot:1", "--json"],
];

fn inspect(args: &[&str], store: &str) -> Output {
    command(&[&args[..1], &[store], &args[1..]].concat()).output().unwrap()
}

/// Returns the offsets of 64-byte lines that are not all zero; the others were never written.
fn written(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let lines = bytes.chunks(64).enumerate().filter(|(_, line)| line.iter().any(|byte| *byte != 0));
    lines.flat_map(|(number, line)| (0..line.len()).map(move |at| number * 64 + at))
}

/// Damages a file and returns how.
fn damage(number: usize, path: &Path, sound: &[u8], offset: usize) -> String {
    if number.is_multiple_of(MISSING_OF) {
        fs::remove_file(path).unwrap();
        return "gone".to_owned();
    }
    let mut bytes = sound.to_vec();
    let how = match number % 3 {
        0 => {
            bytes[offset] ^= 1 << (number % 8);
            "a bit flipped"
        }
        1 => {
            let sector = offset - offset % SECTOR_LEN;
            let end = bytes.len().min(sector + SECTOR_LEN);
            bytes[sector..end].fill(0);
            "a sector zeroed"
        }
        _ => {
            bytes.truncate(offset);
            "cut"
        }
    };
    fs::write(path, bytes).unwrap();
    format!("{how} at {offset}")
}

#[test]
fn commands_terminate_on_any_damage() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let sound_files = files(&scratch.store());
    let places: Vec<_> = sound_files
        .iter()
        .flat_map(|(path, (bytes, _))| {
            let name = path.strip_prefix(scratch.store()).unwrap();
            written(bytes).map(move |offset| (name, bytes, offset))
        })
        .filter(|(name, ..)| *name != Path::new("LOCK"))
        .collect();
    let (next, found) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let check = |store: &str, sound: &[Output], number: usize| {
        let (name, bytes, offset) = places[number * places.len() / DAMAGES];
        let path = Path::new(store).join(name);
        let how = damage(number, &path, bytes, offset);
        let before = files(store);
        let verified = inspect(&["verify", "--json"], store);
        let (args, sound) = (COMMANDS[number % COMMANDS.len()], &sound[number % COMMANDS.len()]);
        let shown = inspect(args, store);
        for (command, output) in [("verify", &verified), (args[0], &shown)] {
            let message = String::from_utf8_lossy(&output.stderr);
            let code = output.status.code();
            assert!(matches!(code, Some(0 | 1)), "{command}: {}, {how}: {code:?}: {message}", name.display());
        }
        // `log` also prints frames that no state needs any more, and `info` counts their files. `versions`
        // prints notes of versions before the oldest start.
        if verified.status.code() == Some(0) && !matches!(args[0], "log" | "info" | "versions") {
            assert!(
                shown.stdout == sound.stdout,
                "{}: {}, {how}, but `verify` is clean",
                args[0],
                name.display()
            );
        }
        found.fetch_add(usize::from(verified.status.code() == Some(1)), Ordering::Relaxed);
        assert!(files(store) == before, "{}: the damaged store was changed", name.display());
        fs::write(&path, bytes).unwrap();
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                let own = Scratch::new();
                copy(&scratch.store(), &own.store());
                let sound = COMMANDS.map(|args| inspect(args, &own.store()));
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= DAMAGES {
                        return;
                    }
                    check(&own.store(), &sound, number);
                }
            });
        }
    });
    let found = found.into_inner();
    assert!(found > DAMAGES / 2, "`verify` found {found} of {DAMAGES}");
}
