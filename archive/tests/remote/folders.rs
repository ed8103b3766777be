//! A local folder as a bucket.

use std::fs;
use std::os::unix::fs::symlink;

use remanent_archive::bucket::{Bucket, Creation, FailureClass};
use remanent_archive::object::{Folder, ObjectKey};
use remanent_archive::remote::{OpenError, RemoteBucket, RemoteOptions};
use tempfile::TempDir;

use crate::life::whole_life;

const KEY: ObjectKey = ObjectKey::Line(1);

fn folder() -> (TempDir, RemoteBucket) {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().display());
    let bucket = RemoteBucket::open(&url, RemoteOptions::default()).unwrap();
    (folder, bucket)
}

#[test]
fn archive_operations_work_in_a_folder() {
    let (folder, bucket) = folder();
    bucket.block_on(whole_life(&bucket)).unwrap();
    assert!(!folder.path().join("line/0000000000000001").exists(), "the sweep has removed the first object");
    assert!(folder.path().join("bound/0000000000000001").exists());
}

#[test]
fn folder_supports_every_operation() {
    let (_folder, bucket) = folder();
    bucket.block_on(async {
        assert_eq!(bucket.get(KEY, None).await.unwrap(), None);
        assert_eq!(bucket.list(Folder::Line).await.unwrap(), Vec::<String>::new());
        assert_eq!(bucket.create(KEY, b"first").await.unwrap(), Creation::Created);
        assert_eq!(bucket.create(KEY, b"second").await.unwrap(), Creation::Exists);
        assert_eq!(bucket.get(KEY, None).await.unwrap(), Some(b"first".to_vec()));
        assert_eq!(bucket.get(KEY, Some(1..3)).await.unwrap(), Some(b"ir".to_vec()));
        assert_eq!(bucket.get(KEY, Some(3..900)).await.unwrap(), Some(b"st".to_vec()));
        assert_eq!(bucket.list(Folder::Line).await.unwrap(), ["line/0000000000000001"]);
        bucket.put(ObjectKey::Newest, b"old").await.unwrap();
        bucket.put(ObjectKey::Newest, b"new").await.unwrap();
        assert_eq!(bucket.get(ObjectKey::Newest, None).await.unwrap(), Some(b"new".to_vec()));
        bucket.delete(KEY).await.unwrap();
        bucket.delete(KEY).await.unwrap();
        assert_eq!(bucket.get(KEY, None).await.unwrap(), None);
    });
}

#[test]
fn ranges_of_an_empty_file_are_empty() {
    let (folder, bucket) = folder();
    fs::create_dir(folder.path().join("line")).unwrap();
    fs::write(folder.path().join("line/0000000000000001"), b"").unwrap();
    let found = bucket.block_on(bucket.get(KEY, Some(0..128))).unwrap();
    assert_eq!(found, Some(Vec::new()));
}

#[test]
fn symbolic_links_are_refused() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("0000000000000001"), b"outside").unwrap();
    // First the folder `line` is a symbolic link out of the root, then only the object.
    for is_folder in [true, false] {
        let (folder, bucket) = folder();
        let line = folder.path().join("line");
        if is_folder {
            symlink(outside.path(), &line).unwrap();
        } else {
            fs::create_dir(&line).unwrap();
            symlink(outside.path().join("0000000000000001"), line.join("0000000000000001")).unwrap();
        }
        bucket.block_on(async {
            let is_refused = |class| class == FailureClass::Denied;
            assert!(is_refused(bucket.get(KEY, None).await.unwrap_err().class));
            assert!(is_refused(bucket.create(KEY, b"x").await.unwrap_err().class));
            assert!(is_refused(bucket.put(KEY, b"x").await.unwrap_err().class));
            assert!(is_refused(bucket.delete(KEY).await.unwrap_err().class));
            assert_eq!(bucket.list(Folder::Line).await.is_err(), is_folder);
        });
        assert_eq!(fs::read(outside.path().join("0000000000000001")).unwrap(), b"outside");
    }
}

#[test]
fn removed_folder_is_not_created_again() {
    let (folder, bucket) = folder();
    let path = folder.path().to_owned();
    fs::remove_dir(&path).unwrap();
    let error = bucket.block_on(bucket.create(KEY, b"x")).unwrap_err();
    assert_eq!(error.class, FailureClass::Unreachable, "{error}");
    assert!(!path.exists());
    // After an unmount, another folder has the same path.
    fs::create_dir(&path).unwrap();
    let error = bucket.block_on(bucket.get(KEY, None)).unwrap_err();
    assert_eq!(error.class, FailureClass::Unreachable, "{error}");
}

#[test]
fn absent_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/absent", folder.path().display());
    let error = RemoteBucket::open(&url, RemoteOptions::default()).unwrap_err();
    assert!(matches!(error, OpenError::Folder { .. }), "{error}");
    assert!(!folder.path().join("absent").exists());
}

#[test]
fn unfinished_files_are_reported_as_unknown_names() {
    let (folder, bucket) = folder();
    fs::create_dir(folder.path().join("line")).unwrap();
    fs::write(folder.path().join("line/0000000000000001#1"), b"x").unwrap();
    let unknown = bucket.block_on(async { crate::life::line(&bucket).unknown_names().await }).unwrap();
    assert_eq!(unknown, ["line/0000000000000001#1"]);
}
