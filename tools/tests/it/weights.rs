//! Import and export: files of weights are restored byte for byte, a version costs only its changes, and it
//! exists completely or not at all.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use remanent::{Key, Metadata, Place, Store, Value};

use crate::command::{Scratch, command, run};

/// A tensor of a generated file.
#[derive(Clone)]
pub struct Tensor {
    /// The tensor's name.
    pub name: String,
    /// Its dtype and shape, as they are in the header.
    pub kind: (&'static str, &'static str),
    /// The tensor's bytes.
    pub bytes: Vec<u8>,
}

/// Creates one tensor.
pub fn tensor(name: &str, dtype: &'static str, shape: &'static str, bytes: impl Into<Vec<u8>>) -> Tensor {
    Tensor { name: name.to_owned(), kind: (dtype, shape), bytes: bytes.into() }
}

/// Creates a file of tensors. The header names them last to first, with unusual spaces in it and after it.
pub fn file(tensors: &[Tensor]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut data = Vec::new();
    for Tensor { name, kind: (dtype, shape), bytes } in tensors {
        let (start, name) = (data.len(), serde_json::to_string(name).unwrap());
        data.extend_from_slice(bytes);
        let end = data.len();
        entries.push(format!(
            "{name}:\t{{\"shape\":{shape} ,\"data_offsets\":[{start}, {end}],\"dtype\":\"{dtype}\"}}"
        ));
    }
    entries.push("\"__metadata__\":{\"format\":\"pt\",\"caf\\u00e9\":\"\\n\"}".to_owned());
    entries.reverse();
    let header = format!("{{ {} }}   \n ", entries.join(", "));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// Returns pseudorandom bytes.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let words = std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
    });
    words.flat_map(u64::to_le_bytes).take(len).collect()
}

/// Returns one tensor of every dtype, and all other parts of a header.
fn all_kinds() -> Vec<Tensor> {
    let long = "model.layers.".repeat(9);
    let dtypes = [
        ("BOOL", 8),
        ("U8", 8),
        ("I8", 8),
        ("F8_E5M2", 8),
        ("F8_E4M3", 8),
        ("F8_E8M0", 8),
        ("I16", 16),
        ("U16", 16),
        ("F16", 16),
        ("BF16", 16),
        ("I32", 32),
        ("U32", 32),
        ("F32", 32),
        ("C64", 64),
        ("F64", 64),
        ("I64", 64),
        ("U64", 64),
        ("F4", 4),
        ("F6_E2M3", 6),
    ];
    let mut tensors: Vec<Tensor> = dtypes
        .iter()
        .zip(0..)
        .map(|(&(dtype, bits), seed)| {
            tensor(&format!("of {dtype}"), dtype, "[4, 100]", noise(seed, 400 * bits / 8))
        })
        .collect();
    tensors.insert(3, tensor("empty", "F32", "[0, 7]", []));
    tensors.insert(4, tensor("empty too", "I64", "[3,0]", []));
    tensors.push(tensor("scalar", "F32", "[]", 1.5f32.to_le_bytes()));
    tensors.push(tensor("zeros", "F32", "[64]", [0; 256]));
    tensors.push(tensor("", "U8", "[3]", [1, 2, 3]));
    tensors.push(tensor("safetensors header", "U8", "[1]", [9]));
    tensors.push(tensor("größe \"quoted\"\n", "U8", "[2]", [4, 5]));
    for end in ["a", "b"] {
        tensors.push(tensor(&format!("{long}{end}"), "BF16", "[64]", noise(99, 128)));
    }
    tensors.push(tensor("last and empty", "U8", "[0]", []));
    tensors
}

/// A directory with a store, and files to import into it.
pub struct Weights {
    /// The temporary directory.
    pub scratch: Scratch,
}

impl Weights {
    /// Creates an empty directory.
    pub fn new() -> Self {
        Self { scratch: Scratch::new() }
    }

    /// Writes a file.
    pub fn write(&self, bytes: &[u8]) -> String {
        let path = self.scratch.path("model.safetensors");
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Imports a file and returns the command's output.
    #[track_caller]
    pub fn import(&self, bytes: &[u8], more: &[&str]) -> serde_json::Value {
        let path = self.write(bytes);
        let store = self.scratch.store();
        run(&[&["import", &store, &path, "--json"], more].concat()).expect(0).json().remove(0)
    }

    /// Exports a version and returns the file's bytes.
    #[track_caller]
    pub fn export(&self, more: &[&str]) -> Vec<u8> {
        let (store, path) = (self.scratch.store(), self.scratch.path("exported"));
        run(&[&["export", &store, &path], more].concat()).expect(0);
        fs::read(path).unwrap()
    }
}

#[test]
fn file_round_trips_byte_for_byte() {
    let weights = Weights::new();
    let whole = file(&all_kinds());
    let imported = weights.import(&whole, &["--note", "first", "--root", "step=120", "--root", "run=a"]);
    assert_eq!((&imported["lsn"], &imported["created"]), (&1.into(), &29.into()), "{imported}");
    assert!(weights.export(&[]) == whole, "the exported file differs");

    let info = run(&["info", &weights.scratch.store(), "--json"]).expect(0).json().remove(0);
    assert_eq!(info["root"], serde_json::json!({ "run": "a", "step": 120 }));
    assert_eq!(info["pages"], 30);
    let again = weights.import(&whole, &["--note", "again", "--root", "step=120"]);
    assert_eq!((&again["lsn"], &again["is_new"]), (&1.into(), &false.into()), "nothing was there to commit");
    let stepped = weights.import(&whole, &["--root", "step=121"]);
    assert_eq!((&stepped["lsn"], &stepped["is_new"]), (&2.into(), &true.into()));
    assert!(weights.export(&["--at", "lsn:2"]) == whole);
}

#[test]
fn empty_files_round_trip() {
    for bytes in [file(&[]), [&2u64.to_le_bytes()[..], b"{}"].concat()] {
        let weights = Weights::new();
        weights.import(&bytes, &[]);
        assert_eq!(weights.export(&[]), bytes);
    }
}

#[test]
fn version_logs_only_changes_and_stays_available() {
    let weights = Weights::new();
    let mut tensors = all_kinds();
    tensors.push(tensor("big", "F32", "[100000]", noise(7, 400_000)));
    let mut versions = vec![file(&tensors)];
    weights.import(&versions[0], &[]);
    let log_end = || {
        let log = run(&["log", &weights.scratch.store(), "--json"]).expect(0);
        log.json().iter().rfind(|frame| frame["kind"] == "batch").unwrap()["bytes"].as_u64().unwrap()
    };
    assert!(log_end() > 400_000);

    // One element in a hundred, scattered, and two bytes of one element.
    let big = tensors.last_mut().unwrap();
    (0..1000).for_each(|index| big.bytes[index * 400 + 3] ^= 0x41);
    big.bytes[1] ^= 0x41;
    versions.push(file(&tensors));
    let second = weights.import(&versions[1], &[]);
    assert_eq!((&second["changed"], &second["changed_elements"]), (&1.into(), &1000.into()), "{second}");
    let allowed = 1000 * 8 + 4096;
    assert!(log_end() < allowed, "{} bytes of log", log_end());

    // Tensors are added and removed, and change length, shape and dtype.
    let big = tensors.pop().unwrap();
    tensors.remove(0);
    tensors[0].kind = ("I8", "[20,20]");
    tensors[1].kind.1 = "[500]";
    tensors[1].bytes.resize(500, 0);
    tensors.push(tensor("new", "F16", "[10]", noise(3, 20)));
    versions.push(file(&tensors));
    let third = weights.import(&versions[2], &[]);
    for (field, expected) in [("created", 1), ("deleted", 2), ("resized", 1), ("changed_elements", 0)] {
        assert_eq!(third[field], expected, "{field} in {third}");
    }
    // The first file again: a removed name may be used again.
    tensors.push(big);
    tensors[1].bytes.truncate(3);
    tensors[1].kind.1 = "[3]";
    versions.push(file(&tensors));
    weights.import(&versions[3], &[]);

    for (version, lsn) in versions.iter().zip(1..) {
        assert!(weights.export(&["--at", &format!("lsn:{lsn}")]) == *version, "version {lsn} differs");
    }
    let store = weights.scratch.store();
    let none = run(&["export", &store, &weights.scratch.path("none"), "--at", "lsn:5"]).expect(2);
    assert!(none.err.contains("the last batch is lsn 4"), "{}", none.err);
    let none = run(&["export", &store, &weights.scratch.path("none"), "--at", "lsn:0"]).expect(2);
    assert!(none.err.contains("there are no weights up to lsn 0"), "{}", none.err);
    run(&["export", &store, &weights.scratch.path("none"), "--at", "snapshot:1"]).expect(2);
    run(&["export", &store, &format!("{store}/out"), "--at", "lsn:1"]).expect(2);
    assert!(!Path::new(&weights.scratch.path("none")).exists());
}

#[test]
fn tensors_are_created_at_the_given_place() {
    let weights = Weights::new();
    let of = |names: &[&str]| {
        file(&names.iter().map(|name| tensor(name, "U8", "[2]", [9, 4])).collect::<Vec<_>>())
    };
    weights.import(&of(&["b"]), &["--place", "pinned"]);
    weights.import(&of(&["a", "b"]), &[]);
    weights.import(&of(&["a", "b", "c"]), &["--place", "disk"]);
    let store = weights.scratch.store();
    let pages = run(&["pages", &store, "--json"]).expect(0).json();
    let place = |key: &str| pages.iter().find(|page| page["key"] == key).unwrap()["place"].clone();
    assert_eq!(["a", "b", "c"].map(place), ["host", "pinned", "disk"].map(serde_json::Value::from));

    let another = weights.write(&of(&["a", "b", "c", "d"]));
    let refused = run(&["import", &store, &another, "--place", "vram"]).expect(2);
    assert!(refused.err.contains("unknown place \"vram\""), "{}", refused.err);
    assert_eq!(weights.export(&[]), of(&["a", "b", "c"]));
}

#[test]
fn export_reports_a_dtype_unknown_to_safetensors() {
    let weights = Weights::new();
    let store = Store::open(weights.scratch.store()).unwrap();
    let mut batch = store.batch();
    let said = [("name", Value::from("phase")), ("dtype", Value::from("C128"))];
    let metadata = Metadata::from(said.map(|(key, value)| (key.to_owned(), value)));
    batch.create(16, Place::Host).key(Key::new("phase").unwrap()).metadata(metadata);
    store.commit(batch).unwrap();
    store.close().unwrap();
    let (store, file) = (weights.scratch.store(), weights.scratch.path("none"));
    let refused = run(&["export", &store, &file]).expect(2);
    assert!(
        refused.err.contains("tensor \"phase\" has dtype C128, which safetensors does not"),
        "{}",
        refused.err
    );
    assert!(!Path::new(&file).exists());
}

#[test]
fn foreign_pages_are_unchanged() {
    let weights = Weights::new();
    let store = Store::open(weights.scratch.store()).unwrap();
    let mut batch = store.batch();
    let key = Key::new("w").unwrap();
    let page = batch.create(4, Place::Host).key(key.clone()).page();
    batch.write(page, 0, b"mine");
    store.commit(batch).unwrap();
    store.close().unwrap();
    for content in [[1, 2], [3, 4]] {
        let bytes = file(&[tensor("w", "U8", "[2]", content)]);
        weights.import(&bytes, &[]);
        assert_eq!(weights.export(&[]), bytes);
    }
    weights.import(&file(&[]), &[]);
    let store = Store::open(weights.scratch.store()).unwrap();
    let mut mine = [0; 4];
    store.read(store.page_by_key(&key).unwrap().page, 0, &mut mine).unwrap();
    assert_eq!(&mine, b"mine");
}

#[test]
fn invalid_safetensors_file_leaves_no_store() {
    let weights = Weights::new();
    let good = file(&all_kinds());
    let header =
        |json: &str, data: &[u8]| [&(json.len() as u64).to_le_bytes(), json.as_bytes(), data].concat();
    let u8s = |name: &str, start: u64, end: u64| {
        let len = end.wrapping_sub(start);
        format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{start},{end}]}}")
    };
    for (bytes, reason) in [
        (vec![], "not a safetensors file: only 0 bytes long"),
        (good[..7].to_vec(), "only 7 bytes long"),
        (good[..200].to_vec(), "not a safetensors file: header of"),
        (good[..good.len() - 1].to_vec(), "header describes a file of"),
        ([&good[..], &[0]].concat(), "header describes a file of"),
        ([&u64::MAX.to_le_bytes()[..], &good[8..]].concat(), "header of 18446744073709551615 bytes"),
        (header("{\"a\":", &[]), "header cannot be parsed"),
        (header("[1]", &[]), "header cannot be parsed"),
        (header("{\"a\":\u{1}}", &[]), "header cannot be parsed"),
        (header(&format!("{{{},{}}}", u8s("a", 0, 4), u8s("b", 2, 6)), &[0; 6]), "`b`"),
        (header(&format!("{{{},{}}}", u8s("a", 0, 4), u8s("b", 5, 6)), &[0; 6]), "`b`"),
        (header(&format!("{{{}}}", u8s("a", 1 << 63, u64::MAX)), &[]), "`a`"),
        (header(&format!("{{{}}}", u8s("a", 4, 0)), &[0; 4]), "`a`"),
    ] {
        let path = weights.write(&bytes);
        let refused = run(&["import", &weights.scratch.store(), &path]).expect(2);
        assert!(refused.err.contains(reason), "{reason:?} is not in {}", refused.err);
        assert!(!Path::new(&weights.scratch.store()).exists(), "a rejected import created a store");
    }
    for path in ["/dev/null", "/", &weights.scratch.path("missing")] {
        run(&["import", &weights.scratch.store(), path]).expect(2);
    }
    run(&["import", &weights.scratch.store(), &weights.write(&good), "--root", "step"]).expect(2);
}

/// Returns the number of files in the store's log.
fn log_files(store: &str) -> usize {
    fs::read_dir(Path::new(store).join("log")).map_or(0, Iterator::count)
}

#[test]
fn killed_import_leaves_whole_version_and_next_resumes() {
    let weights = Weights::new();
    let store = weights.scratch.store();
    let mut tensors: Vec<Tensor> =
        (0..6).map(|seed| tensor(&format!("t{seed}"), "F32", "[1000000]", noise(seed, 4_000_000))).collect();
    let mut before: Option<Vec<u8>> = None;
    let mut found_before = 0;
    // An import creates files in the log as it proceeds: the kill comes after this number of new ones.
    for (round, more_files) in [0, 1, 2, 3, 4, 1, 2, 3].into_iter().enumerate() {
        // Everything, then one element in ten.
        let step = if round == 0 { 1 } else { 40 };
        for tensor in &mut tensors {
            tensor.bytes.iter_mut().step_by(step).for_each(|byte| *byte = byte.wrapping_add(1));
        }
        let after = file(&tensors);
        let path = weights.write(&after);
        let files = log_files(&store);
        let mut child = command(&["import", &store, &path]).stdout(Stdio::null()).spawn().unwrap();
        while log_files(&store) < files + more_files && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();

        let exported = weights.scratch.path("exported");
        let export = run(&["export", &store, &exported]);
        match &before {
            None if export.code == 2 => found_before += 1,
            _ => {
                let bytes = fs::read(&exported).unwrap();
                assert!(
                    bytes == after || before.as_ref() == Some(&bytes),
                    "round {round}: a version between"
                );
                assert_eq!(export.code, 0, "round {round}: {}", export.err);
                found_before += usize::from(bytes != after);
            }
        }
        let imported = weights.import(&after, &[]);
        assert!(weights.export(&[]) == after, "round {round}: {imported}");
        before = Some(after);
    }
    assert!(found_before > 0, "no kill came before the end");
}

#[test]
fn diff_counts_and_measures_changed_elements() {
    let weights = Weights::new();
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let first = [
        tensor("moved", "F32", "[4]", floats(&[1.0, 2.0, 3.0, 4.0])),
        tensor("half", "BF16", "[2]", [0x80, 0x3f, 0x80, 0x3f]),
        tensor("count", "I32", "[2]", noise(1, 8)),
        tensor("same", "U8", "[2]", [1, 2]),
        tensor("gone", "U8", "[2]", [3, 4]),
        tensor("shaped", "U8", "[2,3]", [0; 6]),
        tensor("longer", "F32", "[2]", floats(&[5.0, 6.0])),
    ];
    let second = [
        tensor("moved", "F32", "[4]", floats(&[1.0, 2.5, 3.0, 3.75])),
        tensor("half", "BF16", "[2]", [0x80, 0x3f, 0xc0, 0x7f]),
        tensor("count", "I32", "[2]", noise(2, 8)),
        tensor("same", "U8", "[2]", [1, 2]),
        tensor("shaped", "U8", "[6]", [0; 6]),
        tensor("longer", "F32", "[3]", floats(&[5.0, 7.0, 8.0])),
        tensor("new", "U8", "[0]", []),
    ];
    weights.import(&file(&first), &["--root", "step=1"]);
    weights.import(&file(&second), &["--root", "step=2"]);
    let store = weights.scratch.store();
    let lines = run(&["diff", &store, "--from", "lsn:1", "--json"]).expect(1).json();
    let (total, lines) = lines.split_last().unwrap();
    let pages: Vec<_> = lines.iter().filter(|line| line["page"].is_u64()).collect();
    assert_eq!((&total["change"], &total["pages"]), (&"total".into(), &pages.len().into()), "{total}");
    assert_eq!(total["root_entries"], 1, "{total}");
    // The header's page has no dtype, so its elements are bytes.
    let header = lines.iter().find(|line| line["name"] == "safetensors header").unwrap();
    let of = |name: &str| header[name].as_u64().unwrap_or(header["len"].as_u64().unwrap());
    let header_bytes = of("changed") + of("len").abs_diff(of("len_before"));
    assert_eq!(total["bytes"], 8 + 2 + 8 + 2 + 8 + header_bytes, "{total}");
    let shown: Vec<String> = lines
        .iter()
        .filter(|line| line["name"] != "safetensors header")
        .map(|line| {
            let field = |name: &str| line[name].to_string();
            let fields = ["name", "change", "elements", "changed", "share", "largest", "nans", "len_before"];
            fields.map(field).join(" ")
        })
        .collect();
    assert_eq!(
        shown,
        [
            r#""moved" "changed" 4 2 0.5 0.5 0 null"#,
            r#""half" "changed" 2 1 0.5 "NaN" 1 null"#,
            r#""count" "changed" 2 2 1.0 null null null"#,
            r#""gone" "deleted" null null null null null null"#,
            r#""shaped" "metadata" 6 0 0.0 null null null"#,
            r#""longer" "resized" 2 1 0.5 1.0 0 8"#,
            r#""new" "created" null null null null null null"#,
            r#""step" "root" null null null null null null"#,
        ]
    );
    let text = run(&["diff", &store, "--from", "lsn:1", "--to", "lsn:2"]).expect(1).out;
    assert!(text.contains("50.000 %") && text.contains("root step: 1 -> 2"), "{text}");
    let expected =
        format!("total: {} pages changed, {} bytes; 1 root entry changed", total["pages"], total["bytes"]);
    assert_eq!(text.lines().last(), Some(&expected[..]));
    // Content that changed and changed back is not a difference, whatever the epochs are.
    weights.import(&file(&first[..3]), &["--root", "step=1"]);
    weights.import(&file(&first), &[]);
    let mut back = run(&["diff", &store, "--from", "lsn:1", "--json"]).expect(1).json();
    assert_eq!(back.pop().unwrap()["root_entries"], 0);
    assert!(back.iter().all(|line| line["change"] == "created" || line["change"] == "deleted"), "{back:?}");
    let same = run(&["diff", &store, "--from", "lsn:4"]).expect(0);
    assert_eq!(same.out, "total: 0 pages changed, 0 bytes\n");
    run(&["diff", &store, "--from", "lsn:9"]).expect(2);
    run(&["diff", &store, "--from", "step:1"]).expect(2);
}
