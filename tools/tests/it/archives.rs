//! `archive` and `restore --from`, with local folders and with a small S3 server on loopback.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use remanent::options::{LogOptions, SnapshotSchedule};
use remanent::{Options, Place, Retention, Store};
use remanent_archive::object::{Content, Kind, LineObject, decode_header};
use remanent_tools::{Ending, Failure};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::CapabilitySet;
use serde_json::Value;

use crate::command::{Run, Scratch, command, finished, run};
use crate::server::{Fault, Server};
use crate::weights::{Weights, file, noise, tensor};

/// A store, and a folder for its archive.
struct Bed {
    weights: Weights,
    /// URL of the folder.
    url: String,
}

impl Bed {
    fn new() -> Self {
        let weights = Weights::new();
        let folder = weights.scratch.path("archive");
        fs::create_dir(&folder).unwrap();
        Self { weights, url: format!("file://{folder}") }
    }

    fn folder(&self) -> PathBuf {
        self.weights.scratch.path("archive").into()
    }

    fn store(&self) -> String {
        self.weights.scratch.store()
    }

    fn push(&self) -> Run {
        run(&["archive", "push", &self.store(), &self.url, "--json"])
    }

    /// Imports a version, takes a snapshot if asked to, and pushes.
    fn push_version(&self, seed: u64, has_snapshot: bool) -> Value {
        self.weights.import(&version(seed), &[]);
        if has_snapshot {
            run(&["snapshot", &self.store()]).expect(0);
        }
        self.push().expect(0).json().remove(0)
    }

    /// Restores into a new directory and returns its path.
    fn restore(&self, name: &str) -> String {
        let dir = self.weights.scratch.path(name);
        run(&["restore", "--from", &self.url, &dir]).expect(0);
        dir
    }

    /// Runs `archive COMMAND URL` within this process.
    fn archive(&self, args: &[&str]) -> (Result<Ending, Failure>, Vec<Value>) {
        in_process(&[&["archive", args[0], &self.url, "--json"], &args[1..]].concat())
    }
}

fn in_process(args: &[&str]) -> (Result<Ending, Failure>, Vec<Value>) {
    let mut out = Vec::new();
    let outcome = remanent_tools::run(args, &mut out);
    let text = String::from_utf8(out).unwrap();
    (outcome, text.lines().map(|line| serde_json::from_str(line).expect(line)).collect())
}

fn version(seed: u64) -> Vec<u8> {
    file(&[tensor("w", "F32", "[1000]", noise(seed, 4000)), tensor("v", "U8", "[64]", noise(1, 64))])
}

fn exported(store: &str) -> Vec<u8> {
    let path = format!("{store}.safetensors");
    run(&["export", store, &path]).expect(0);
    fs::read(path).unwrap()
}

/// Returns the files below a folder with their contents.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            let bytes = fs::read(&path).unwrap();
            found.insert(path, bytes);
        }
    }
    found
}

/// Returns the last object of the line.
fn last_of_line(files: &BTreeMap<PathBuf, Vec<u8>>) -> PathBuf {
    files.keys().rfind(|path| path.parent().unwrap().ends_with("line")).unwrap().clone()
}

/// Copies the files of a folder that [`files`] returned into another folder.
fn write_files(found: &BTreeMap<PathBuf, Vec<u8>>, from: &Path, to: &Path) {
    for (path, bytes) in found {
        let target = to.join(path.strip_prefix(from).unwrap());
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(target, bytes).unwrap();
    }
}

#[test]
fn pushed_store_is_restored_and_continues() {
    let bed = Bed::new();
    let first = bed.push_version(1, true);
    assert_eq!(
        (&first["lsn"], &first["snapshot"], &first["runs"]),
        (&1.into(), &1.into(), &1.into()),
        "{first}"
    );
    let second = bed.push_version(2, false);
    assert_eq!((&second["lsn"], &second["snapshot"]), (&2.into(), &Value::Null), "{second}");
    let nothing = bed.push().expect(0).json().remove(0);
    assert_eq!((&nothing["lsn"], &nothing["term"]), (&2.into(), &Value::Null), "{nothing}");

    let status = run(&["archive", "status", &bed.url, "--json"]).expect(0).json().remove(0);
    assert_eq!((&status["store"], &status["lsn"]), (&first["store"], &2.into()), "{status}");
    assert_eq!(status["manifest"]["end"], 1, "{status}");
    assert_eq!(status["after_manifest"], 3, "a boundary, a fence and a run: {status}");
    let text = run(&["archive", "status", &bed.url]).expect(0).out;
    assert!(text.contains("archived   lsn 2 ") && text.contains("snapshot   1: lsn 1 to 1"), "{text}");
    run(&["archive", "verify", &bed.url]).expect(0);

    let restored = bed.restore("restored");
    assert!(exported(&restored) == version(2));
    run(&["verify", &restored]).expect(0);
    let pages = |dir: &str| run(&["pages", dir, "--json"]).expect(0).out;
    assert_eq!(pages(&restored), pages(&bed.store()));
    let info = |dir: &str| run(&["info", dir, "--json"]).expect(0).json().remove(0)["store"].clone();
    assert_eq!(info(&restored), info(&bed.store()));

    // The restored directory continues. The old one is refused, even if it may take over.
    let path = bed.weights.write(&version(3));
    run(&["import", &restored, &path]).expect(0);
    run(&["archive", "push", &restored, &bed.url]).expect(0);
    bed.weights.import(&version(4), &[]);
    let before = files(&bed.folder());
    for more in [&[][..], &["--takeover"]] {
        let refused = run(&[&["archive", "push", &bed.store(), &bed.url], more].concat()).expect(2);
        assert!(refused.err.contains("the archive ends at lsn 3"), "{}", refused.err);
        assert!(refused.err.contains("remanent fork DIR NEWDIR"), "{}", refused.err);
        assert!(files(&bed.folder()) == before, "a refused push changed the archive");
    }
    assert!(exported(&bed.restore("again")) == version(3));

    // A fork of the old directory is a store of its own, with an archive of its own.
    let (fork, other) = (bed.weights.scratch.path("fork"), bed.weights.scratch.path("other"));
    run(&["fork", &bed.store(), &fork]).expect(0);
    fs::create_dir(&other).unwrap();
    let refused = run(&["archive", "push", &fork, &bed.url]).expect(2).err;
    assert!(refused.contains("belongs to store"), "{refused}");
    run(&["archive", "push", &fork, &format!("file://{other}")]).expect(0);
}

/// Named snapshots are pushed, listed, kept below boundaries and restored. An earlier state becomes a store of its own.
#[test]
fn named_snapshots_are_pushed_and_restored() {
    let bed = Bed::new();
    bed.weights.import(&version(1), &[]);
    run(&["snapshot", &bed.store(), "--name", "before-tuning"]).expect(0);
    let pushed = bed.push().expect(0).json().remove(0);
    assert_eq!(pushed["named"], 1, "{pushed}");
    for seed in 2..6 {
        bed.push_version(seed, true);
    }
    bed.push_version(6, false);
    let status = run(&["archive", "status", &bed.url, "--json"]).expect(0).json().remove(0);
    let named = &status["named"][0];
    assert_eq!((&named["name"], &named["lsn"]), (&"before-tuning".into(), &1.into()), "{status}");
    let text = run(&["archive", "status", &bed.url]).expect(0).out;
    assert!(text.contains("named      before-tuning: snapshot 1, lsn 1, "), "{text}");
    run(&["archive", "verify", &bed.url]).expect(0);

    let before = files(&bed.folder());
    for (at, seed) in [("name:before-tuning", 1), ("before-tuning", 1), ("lsn:5", 5), ("lsn:6", 6)] {
        let copy = bed.weights.scratch.path(&format!("copy-{seed}-{}", at.len()));
        run(&["restore", "--from", &bed.url, "--at", at, &copy]).expect(0);
        assert!(exported(&copy) == version(seed), "{at}");
        run(&["verify", &copy]).expect(0);
    }
    let gone = bed.weights.scratch.path("gone");
    for at in ["lsn:3", "lsn:7", "name:other"] {
        run(&["restore", "--from", &bed.url, "--at", at, &gone]).expect(2);
        assert!(!Path::new(&gone).exists(), "{at}");
    }
    assert!(files(&bed.folder()) == before, "a restore of an earlier state changed the archive");

    let restored = bed.restore("restored");
    assert!(exported(&restored) == version(6));
    run(&["verify", &restored]).expect(0);
    run(&["restore", &restored, "--at", "before-tuning"]).expect(0);
    assert!(exported(&restored) == version(1));
    // The name is given up there, and then in the archive.
    run(&["prune", &restored, "--snapshots", "1", "--name", "before-tuning", "--yes"]).expect(0);
    run(&["archive", "push", &restored, &bed.url]).expect(0);
    let status = run(&["archive", "status", &bed.url, "--json"]).expect(0).json().remove(0);
    assert_eq!(status["named"], serde_json::json!([]), "{status}");
}

#[test]
fn takeover_waives_an_unknown_fence() {
    let bed = Bed::new();
    bed.push_version(1, true);
    // A claim whose directory is lost.
    let lost = bed.restore("lost");
    fs::remove_dir_all(lost).unwrap();
    bed.weights.import(&version(2), &[]);
    let refused = bed.push().expect(2).err;
    assert!(refused.contains("--takeover"), "{refused}");
    run(&["archive", "push", &bed.store(), &bed.url, "--takeover"]).expect(0);
    assert!(exported(&bed.restore("restored")) == version(2));
}

/// Each kind of object is named, by whatever damage: verify finds all damage that a restore would find.
#[test]
fn verify_names_damage_to_every_kind_of_object() {
    let bed = Bed::new();
    for seed in 1..5 {
        bed.push_version(seed, true);
    }
    bed.push_version(5, false);
    let folder = bed.folder();
    let sound = files(&folder);
    let (outcome, lines) = bed.archive(&["verify"]);
    assert_eq!((outcome, lines.len()), (Ok(Ending::Fine), 1), "{lines:?}");
    let last = last_of_line(&sound);
    let mut named = BTreeSet::new();
    for (path, bytes) in &sound {
        let name = path.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned();
        let kind = decode_header(bytes).unwrap().kind;
        for at in [Some(9), Some(70), Some(bytes.len() / 2), Some(bytes.len() - 1), None] {
            if at.is_none() && *path == last {
                continue; // Nothing shows the loss of the last object.
            }
            match at {
                Some(at) => {
                    let mut flipped = bytes.clone();
                    flipped[at] ^= 4;
                    fs::write(path, flipped).unwrap();
                }
                None => fs::remove_file(path).unwrap(),
            }
            let (outcome, lines) = bed.archive(&["verify"]);
            let findings: Vec<&Value> = lines.iter().filter(|line| line["kind"] == "finding").collect();
            if outcome == Ok(Ending::Difference) {
                assert!(
                    findings.iter().any(|found| found["object"] == name.as_str()),
                    "{name}: {findings:?}"
                );
                assert!(
                    findings.iter().all(|found| found["object"] == name.as_str()),
                    "{name}: {findings:?}"
                );
                let is_missing = findings[0]["defect"].as_str().unwrap().starts_with("missing");
                assert_eq!(is_missing, at.is_none(), "{findings:?}");
                named.insert(kind);
            } else {
                assert_eq!(outcome, Ok(Ending::Fine), "{name} at {at:?}: {lines:?}");
                // A restore does not need the object.
                let copy = tempfile::tempdir().unwrap();
                write_files(&files(&folder), &folder, copy.path());
                let (dir, from) = (copy.path().join("dir"), format!("file://{}", copy.path().display()));
                let dir = dir.to_str().unwrap();
                assert_eq!(in_process(&["restore", "--from", &from, dir, "--json"]).0, Ok(Ending::Fine));
                assert!(exported(dir) == version(5), "{name} at {at:?}");
            }
            fs::write(path, bytes).unwrap();
        }
    }
    let expected = [Kind::Fence, Kind::Run, Kind::Manifest, Kind::Boundary, Kind::Bound, Kind::Data];
    assert!(expected.iter().all(|kind| named.contains(kind)), "{named:?}");
}

#[test]
fn verify_lists_all_damage_and_a_sample_leaves_out_data() {
    let bed = Bed::new();
    bed.push_version(1, true);
    bed.push_version(2, false);
    let folder = bed.folder();
    let sound = files(&folder);
    // Without the last object of the line, nothing leads to the data objects.
    let last = last_of_line(&sound);
    for (path, bytes) in sound.iter().filter(|(path, _)| **path != last) {
        let mut flipped = bytes.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(path, flipped).unwrap();
    }
    let verified = run(&["archive", "verify", &bed.url]).expect(1).out;
    for path in sound.keys().filter(|path| **path != last && !path.parent().unwrap().ends_with("data")) {
        let name = path.strip_prefix(&folder).unwrap().to_str().unwrap();
        assert!(verified.contains(&format!("{name}: at offset")), "{name} is not in:\n{verified}");
    }
    write_files(&sound, &folder, &folder);
    let data: Vec<&PathBuf> = sound.keys().filter(|path| path.parent().unwrap().ends_with("data")).collect();
    data.iter().for_each(|path| fs::write(path, b"short").unwrap());
    let (outcome, lines) = bed.archive(&["verify"]);
    assert_eq!((outcome, lines.len()), (Ok(Ending::Difference), data.len() + 1), "{lines:?}");
    let (outcome, lines) = bed.archive(&["verify", "--sample", "0.0000001"]);
    assert_eq!(outcome, Ok(Ending::Fine), "{lines:?}");
    assert_eq!(lines[0]["left_out"], data.len(), "{lines:?}");
    for share in ["0", "2", "half"] {
        run(&["archive", "verify", &bed.url, "--sample", share]).expect(2);
    }
}

/// Names of other programs are reported. One with a huge number causes no long search.
#[test]
fn foreign_names_are_reported() {
    let bed = Bed::new();
    bed.push_version(1, true);
    fs::write(bed.folder().join("line/notes"), b"x").unwrap();
    let (outcome, lines) = bed.archive(&["verify"]);
    assert_eq!(outcome, Ok(Ending::Fine));
    assert_eq!(lines[0]["unknown_names"], serde_json::json!(["line/notes"]));
    for folder in ["line", "bound"] {
        fs::write(bed.folder().join(folder).join("2fffffffffffffff"), b"x").unwrap();
    }
    let (outcome, lines) = bed.archive(&["verify"]);
    assert_eq!(outcome, Ok(Ending::Difference));
    assert!(lines.len() < 140, "{}", lines.len());
    assert!(lines.iter().any(|line| line["object"] == "bound/2fffffffffffffff"), "{lines:?}");
    assert!(exported(&bed.restore("restored")) == version(1));
}

/// Removes the newest boundary and its copy, and puts back what was deleted for it: the archive is as a push leaves it that
/// is killed after its manifest. `before` is the archive before the push.
fn cut_short(before: &BTreeMap<PathBuf, Vec<u8>>, folder: &Path) {
    let after = files(folder);
    write_files(before, folder, folder);
    write_files(&after, folder, folder);
    for of in ["line", "bound"] {
        fs::remove_file(files(&folder.join(of)).into_keys().next_back().unwrap()).unwrap();
    }
}

#[test]
fn prune_completes_a_push_that_was_cut_short() {
    let bed = Bed::new();
    for seed in 1..4 {
        bed.push_version(seed, true);
    }
    let folder = bed.folder();
    let third = files(&folder);
    bed.push_version(4, true);
    cut_short(&third, &folder);
    let before = files(&folder);
    let (outcome, lines) = bed.archive(&["prune"]);
    let would = &lines[0];
    assert_eq!((outcome, &would["removed"]), (Ok(Ending::Fine), &false.into()), "{would}");
    assert!(files(&folder) == before, "without --yes, a prune changed the archive");
    let text = run(&["archive", "prune", &bed.url]).expect(0).out;
    assert!(text.contains("would append boundary 4") && text.contains("--yes"), "{text}");

    let (outcome, lines) = bed.archive(&["prune", "--yes"]);
    let did = &lines[0];
    assert_eq!((outcome, &did["removed"]), (Ok(Ending::Fine), &true.into()), "{did}");
    for field in ["boundary", "start", "line_objects", "data_objects"] {
        assert_eq!(would[field], did[field], "{field}: {would} {did}");
    }
    let removed = before.len() + 2 - files(&folder).len();
    let counted = did["line_objects"].as_u64().unwrap() + did["data_objects"].as_u64().unwrap();
    assert_eq!(removed as u64, counted, "a boundary and its copy were added: {did}");
    assert!(counted > 3, "{did}");
    assert_eq!(bed.archive(&["verify"]).0, Ok(Ending::Fine));
    assert!(exported(&bed.restore("restored")) == version(4));
    let text = run(&["archive", "prune", &bed.url, "--yes"]).expect(0).out;
    assert!(text.contains("nothing to prune"), "{text}");
}

#[test]
fn archive_is_never_pruned_to_a_damaged_snapshot() {
    let bed = Bed::new();
    for seed in 1..3 {
        bed.push_version(seed, true);
    }
    let folder = bed.folder();
    let second = files(&folder);
    bed.push_version(3, true);
    cut_short(&second, &folder);
    let data = files(&folder.join("data")).into_keys().last().unwrap();
    fs::write(&data, b"short").unwrap();
    let before = files(&folder);
    let refused = run(&["archive", "prune", &bed.url, "--yes"]).expect(1).err;
    assert!(refused.contains(data.strip_prefix(&folder).unwrap().to_str().unwrap()), "{refused}");
    assert!(files(&folder) == before);
}

#[test]
fn wrong_urls_and_directories_are_refused_without_changes() {
    let bed = Bed::new();
    bed.weights.import(&version(1), &[]);
    let (store, new, url) = (bed.store(), bed.weights.scratch.path("new"), bed.url.clone());
    let foreign = bed.weights.scratch.path("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(format!("{foreign}/notes.txt"), b"mine").unwrap();
    let absent = format!("{url}/absent");
    let before = files(Path::new(&bed.weights.scratch.path(".")));
    for (args, word) in [
        (&["archive", "push", &store, "ftp://host/a"][..], "its scheme is not supported"),
        (&["archive", "push", &store, "s3://bucket/a/../b"], "`.` or `..`"),
        (&["archive", "push", &store, "/srv/archive"], "it has no scheme"),
        (&["archive", "push", &store, &absent], "create it first"),
        (&["archive", "push", &foreign, &url], "there is no store in"),
        (&["archive", "push", &new, &url], "cannot read"),
        (&["archive", "status", &url], "the archive is empty; check the URL"),
        (&["archive", "verify", &url], "the archive is empty; check the URL"),
        (&["archive", "prune", &url], "the archive is empty; check the URL"),
        (&["archive", "prune", &url, "--yes"], "the archive is empty; check the URL"),
        (&["restore", "--from", &url, &new], "the archive is empty; check the URL"),
        (&["restore", "--from", &url, &store], "restore into an empty directory"),
        (&["restore", "--from", &url, &foreign], "contains notes.txt"),
        (&["restore", &new], "--at"),
        (&["restore", "--from", &url, "--at", "lsn:1", &new], "the archive is empty; check the URL"),
    ] {
        let refused = run(args).expect(2);
        assert!(refused.err.contains(word) && refused.out.is_empty(), "{args:?}: {}", refused.err);
        assert!(files(Path::new(&bed.weights.scratch.path("."))) == before, "{args:?} changed something");
    }
    assert!(!Path::new(&new).exists());
}

#[test]
fn open_store_is_not_pushed() {
    let bed = Bed::new();
    let store = Store::open(bed.store()).unwrap();
    let refused = bed.push().expect(3).err;
    assert!(refused.contains("locked") || refused.contains("open"), "{refused}");
    store.close().unwrap();
    bed.push().expect(0);
}

#[test]
fn emptied_archive_is_not_restarted() {
    let bed = Bed::new();
    bed.push_version(1, true);
    for folder in ["line", "bound", "data"] {
        fs::remove_dir_all(bed.folder().join(folder)).unwrap();
    }
    bed.weights.import(&version(2), &[]);
    let refused = bed.push().expect(1).err;
    assert!(refused.contains("lifecycle rules"), "{refused}");
    assert!(files(&bed.folder()).is_empty());
}

/// A snapshot with a damaged image is reported, and nothing that a restore needs is lost.
#[test]
fn damaged_snapshot_of_the_store_is_reported() {
    let bed = Bed::new();
    bed.push_version(1, true);
    bed.weights.import(&version(2), &[]);
    run(&["snapshot", &bed.store()]).expect(0);
    let image = files(&Path::new(&bed.store()).join("pages")).into_iter().next_back().unwrap();
    let (path, mut bytes) = image;
    bytes[4096..].iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(path, bytes).unwrap();
    let pushed = bed.push().expect(1).json().remove(0);
    assert!(pushed["damage"][0].as_str().unwrap().contains("pages/"), "{pushed}");
    assert_eq!((&pushed["lsn"], &pushed["snapshot"]), (&2.into(), &Value::Null), "{pushed}");
    assert!(exported(&bed.restore("restored")) == version(2));
}

/// Returns the objects of the line.
fn line_objects(folder: &Path) -> Vec<(PathBuf, LineObject)> {
    let decode = |(path, bytes): (PathBuf, Vec<u8>)| {
        let position = u64::from_str_radix(path.file_name().unwrap().to_str().unwrap(), 16).unwrap();
        (path, LineObject::decode(&bytes, position, None).unwrap())
    };
    files(&folder.join("line")).into_iter().map(decode).collect()
}

/// An object whose checksum is valid, but which contradicts another object, is reported as defective.
#[test]
fn verify_compares_objects_with_each_other() {
    let bed = Bed::new();
    bed.push_version(1, true);
    bed.push_version(2, false);
    let check = |name: &Path, word: &str| {
        let (outcome, lines) = bed.archive(&["verify"]);
        assert_eq!((outcome, lines.len()), (Ok(Ending::Difference), 2), "{lines:?}");
        let object = name.strip_prefix(bed.folder()).unwrap().to_str().unwrap();
        assert_eq!(lines[0]["object"], object);
        assert!(lines[0]["defect"].as_str().unwrap().contains(word), "{lines:?}");
    };
    let sound = files(&bed.folder());
    let start = bed.archive(&["status"]).1[0]["start"].as_u64().unwrap();
    let kept = line_objects(&bed.folder()).into_iter().filter(|(_, object)| object.position >= start);
    for (path, mut object) in kept {
        let word = match &mut object.content {
            Content::Run(run) => {
                run.before.chain ^= 1;
                "its frames continue"
            }
            Content::Manifest(manifest) => {
                manifest.end.lsn.0 += 1000;
                "the snapshot needs the log up to"
            }
            Content::Fence(_) => {
                object.nonce_before.0[3] ^= 1;
                "the nonce that it states for the preceding object"
            }
            Content::Boundary(_) | Content::Catalog(_) => continue,
        };
        fs::write(&path, object.encode().unwrap()).unwrap();
        check(&path, word);
        fs::remove_dir_all(bed.folder()).unwrap();
        write_files(&sound, &bed.folder(), &bed.folder());
    }
}

/// A snapshot that is longer than the free disk space is rejected before the archive is claimed.
#[test]
fn restore_without_space_does_not_claim_archive() {
    let bed = Bed::new();
    bed.push_version(1, true);
    let folder = bed.folder();
    let objects = line_objects(&folder);
    let is_manifest = |(_, object): &(PathBuf, LineObject)| object.content.kind() == Kind::Manifest;
    let (path, mut manifest) = objects.into_iter().find(is_manifest).unwrap();
    let mut entry = manifest.data[0];
    entry.part.len = 8_000_000;
    manifest.data = vec![entry; 65_000];
    let needed = 65_000 * entry.part.len;
    let system = rustix::fs::statvfs(&folder).unwrap();
    if system.f_bavail * system.f_frsize > needed {
        println!("SKIPPED: {needed} bytes are free");
        return;
    }
    fs::write(path, manifest.encode().unwrap()).unwrap();
    let before = files(&folder);
    let refused = run(&["restore", "--from", &bed.url, &bed.weights.scratch.path("new")]).expect(2).err;
    assert!(refused.contains(&format!("needs more than {needed} bytes")), "{refused}");
    assert!(files(&folder) == before);
}

#[test]
fn denied_folder_is_named_with_a_remedy() {
    let bed = Bed::new();
    bed.push_version(1, true);
    bed.weights.import(&version(2), &[]);
    let folder = bed.folder();
    let before = files(&folder);
    let denied = |args: &[&str]| {
        let failure = in_process(args).0.unwrap_err();
        let Failure::Environment(message) = failure else { panic!("{args:?}: {failure:?}") };
        assert!(message.contains("access denied") && message.contains(&bed.url), "{args:?}: {message}");
        assert!(message.contains("grant get, put, list and delete"), "{message}");
        message
    };
    // Root ignores permissions, unless a thread gives up that right.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut sets = rustix::thread::capabilities(None).unwrap();
            for right in [CapabilitySet::DAC_OVERRIDE, CapabilitySet::DAC_READ_SEARCH] {
                sets.effective.remove(right);
            }
            rustix::thread::set_capabilities(None, sets).unwrap();
            let set =
                |folder: &Path, mode| fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
            let store = bed.store();
            set(&folder.join("line"), 0o555);
            let message = denied(&["archive", "push", &store, &bed.url]);
            assert!(message.contains("line/") || message.contains("probe/"), "{message}");
            set(&folder.join("line"), 0o000);
            denied(&["archive", "status", &bed.url]);
            let new = bed.weights.scratch.path("new");
            denied(&["restore", "--from", &bed.url, &new]);
            assert!(!Path::new(&new).exists());
            set(&folder.join("line"), 0o755);
        });
        thread.join().unwrap();
    });
    // A symbolic link is not followed out of the folder.
    fs::rename(folder.join("bound"), folder.join("elsewhere")).unwrap();
    symlink("elsewhere", folder.join("bound")).unwrap();
    let message = denied(&["archive", "status", &bed.url]);
    assert!(message.contains("symbolic link"), "{message}");
    fs::remove_file(folder.join("bound")).unwrap();
    fs::rename(folder.join("elsewhere"), folder.join("bound")).unwrap();
    assert!(files(&folder) == before);
}

/// Prepares a command that reaches the server.
fn with_server(server: &Server, args: &[&str]) -> Command {
    let mut command = command(args);
    command
        .env("AWS_ENDPOINT", server.url())
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_REGION", "us-east-1")
        .env("AWS_ACCESS_KEY_ID", "test")
        .env("AWS_SECRET_ACCESS_KEY", "hunter2hunter2");
    command
}

const S3: &str = "s3://bucket/run";

/// Commits some pages with the engine.
fn commit(store: &str, batches: u64) {
    let keep = Retention::new().snapshots_kept(usize::MAX).log_kept(u64::MAX);
    let log = LogOptions::new().segment_len(64 << 10);
    let store =
        Options::new().retention(keep).log(log).snapshots(SnapshotSchedule::never()).open(store).unwrap();
    for _ in 0..batches {
        let mut batch = store.batch();
        // With short segments, the second page goes to an image file, which the run lists as data.
        batch.create_from(noise(store.lsn().0, 3000), Place::Host);
        batch.create_from(noise(store.lsn().0, 200_000), Place::Disk);
        store.commit(batch).unwrap();
    }
    store.close().unwrap();
}

#[test]
fn status_sends_few_requests() {
    let server = Server::start();
    let scratch = Scratch::new();
    let store = scratch.store();
    let requests = |pushes: u64| {
        for _ in 0..pushes {
            commit(&store, 1);
            finished(with_server(&server, &["archive", "push", &store, S3])).expect(0);
        }
        server.take_received();
        finished(with_server(&server, &["archive", "status", S3])).expect(0);
        let received = server.take_received();
        assert!(received.iter().all(|request| request.method == "GET"), "{received:?}");
        received.len()
    };
    commit(&store, 1);
    run(&["snapshot", &store]).expect(0);
    let (short, long) = (requests(3), requests(17));
    assert!(long <= 48 && long <= short + 16, "{short} requests for 8 objects, {long} for 42");
}

#[test]
fn server_failures_are_named_by_class() {
    let server = Server::start();
    let scratch = Scratch::new();
    let store = scratch.store();
    commit(&store, 2);
    finished(with_server(&server, &["archive", "push", &store, S3])).expect(0);
    for (status, code, words) in [
        (403, "AccessDenied", ["access denied", "grant get, put, list and delete"]),
        (400, "ExpiredToken", ["credential expired", "renew the credential"]),
        (403, "RequestTimeTooSkewed", ["clock skew", "set the clock of this machine"]),
        (507, "XMinioStorageFull", ["bucket full", "free space in the bucket"]),
        (404, "NoSuchBucket", ["NoSuchBucket", "HTTP status 404"]),
    ] {
        server.fail(std::iter::repeat_n(Fault::code(status, code), 600));
        let failed = finished(with_server(&server, &["archive", "status", S3])).expect(2);
        server.recover();
        for word in words.into_iter().chain([S3, "bound/0000000000000001"]) {
            assert!(failed.err.contains(word), "{word} is not in: {}", failed.err);
        }
        assert!(!failed.err.contains("hunter2"), "{}", failed.err);
    }
    // A bucket that replaces objects does not support archives.
    server.ignore_conditions();
    commit(&store, 1);
    let failed = finished(with_server(&server, &["archive", "push", &store, S3])).expect(2);
    assert!(failed.err.contains("the bucket does not support archives"), "{}", failed.err);
}

/// A server that is away or limits the rate is shown while the command tries again, and Ctrl-C ends it.
#[test]
fn delays_are_shown_and_interrupted() {
    let server = Server::start();
    for (fault, word) in [
        (Some(Fault::code(503, "SlowDown")), "throttled"),
        (Some(Fault::Status(500, String::new())), "request in doubt"),
        (None, "bucket unreachable"),
    ] {
        let mut command = with_server(&server, &["archive", "status", S3]);
        match fault {
            Some(fault) => server.fail(std::iter::repeat_n(fault, 1000)),
            None => _ = command.env("AWS_ENDPOINT", "http://127.0.0.1:9"),
        }
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains(word) && line.contains("trying again"), "{line}");
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        server.recover();
    }
}

/// Starts a command, lets the server hang after `count` requests, and sends a signal. Returns the exit code, and whether
/// the command was still running.
fn signal_after(server: &Server, args: &[&str], count: usize, signal: Signal) -> (Option<i32>, bool) {
    server.take_received();
    server.hang_after(count);
    let mut child = with_server(server, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    let mut is_running = true;
    while !server.is_hanging() {
        is_running = child.try_wait().unwrap().is_none();
        if !is_running {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "neither a hanging request nor an end");
        std::thread::yield_now();
    }
    if is_running {
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    let code = child.wait().unwrap().code();
    server.recover();
    (code, is_running)
}

#[test]
fn interrupted_pushes_and_restores_are_repeated() {
    let server = Server::start();
    let scratch = Scratch::new();
    let store = scratch.store();
    let mut interrupted = BTreeSet::new();
    let mut total = 40;
    for (round, share) in [0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98].into_iter().enumerate() {
        let count = (f64::from(total) * share) as usize;
        let signal = if round % 2 == 0 { Signal::INT } else { Signal::KILL };
        commit(&store, 2);
        run(&["snapshot", &store]).expect(0);
        let push = ["archive", "push", &store, S3];
        let (code, is_running) = signal_after(&server, &push, count, signal);
        if is_running {
            assert_eq!(code, if signal == Signal::INT { Some(130) } else { None });
            interrupted.insert("push");
        }
        finished(with_server(&server, &push)).expect(0);
        finished(with_server(&server, &["archive", "verify", S3])).expect(0);

        let new = scratch.path(&format!("new-{round}"));
        let restore = ["restore", "--from", S3, &new];
        let (code, is_running) = signal_after(&server, &restore, count, signal);
        if is_running {
            assert_eq!(code, if signal == Signal::INT { Some(130) } else { None });
            interrupted.insert("restore");
            if Path::new(&new).join("ARCHIVE").exists() {
                interrupted.insert("claimed restore");
                let refused = Store::open(&new).unwrap_err().to_string();
                assert!(refused.contains("STORE"), "{refused}");
            }
            server.take_received();
            finished(with_server(&server, &restore)).expect(0);
            total = server.take_received().len() as u32;
        }
        let pages = |dir: &str| run(&["pages", dir, "--json"]).expect(0).out;
        assert_eq!(pages(&new), pages(&store));
        run(&["verify", &new]).expect(0);
        // The old directory continues only by a takeover: its batches are all that were archived.
        commit(&store, 1);
        finished(with_server(&server, &push)).expect(2);
        finished(with_server(&server, &[&push[..], &["--takeover"]].concat())).expect(0);
    }
    assert_eq!(interrupted.len(), 3, "{interrupted:?}");
}
