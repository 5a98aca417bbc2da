//! The session cache on disk where there is little room: which sessions stay.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use loaf_serve::cache::account::Account;
use loaf_serve::cache::disk::{Disk, Sizes};
use loaf_serve::cache::tree::{Item, Kind, State, chain};

const SEED: [u8; 32] = [7; 32];

fn open(folder: &Path, budget: u64) -> Disk {
    let sizes = Sizes { block: 16, row: 4, heads: [4].into(), recurrent: 8, logits: 12 };
    Disk::open(folder, "artifact", SEED, sizes, budget).expect("a folder")
}

/// A session's tokens: the first block is one of all sessions.
fn session(n: u32) -> Vec<u32> {
    (0..40).map(|i| if i < 16 { i } else { n * 100 + i }).collect()
}

/// Writes parts of a session: blocks, and a snapshot at its end.
fn write(disk: &Disk, n: u32, parts: &[Range<usize>]) {
    let (ids, mut before, account) = (session(n), SEED, Account::new(1 << 20));
    disk.next_use();
    for part in parts {
        let keep = |bytes: usize| Arc::new(account.take(bytes).expect("room"));
        let (rows, pos, snap) = (Some(keep(part.len() * 4)), part.end as u32, part.len() < 16);
        let state = snap.then(|| State { recurrent: Some(keep(8)), logits: None, kind: Kind::Turn });
        let item = Item { before, pos, ids: ids[part.clone()].into(), rows, state };
        before = chain(&before, &item.ids);
        if !disk.touch(&item) {
            disk.put(item, true);
        }
    }
}

const ALL: [Range<usize>; 3] = [0..16, 16..32, 32..40];

fn usable(folder: &Path) -> [u32; 4] {
    let disk = open(folder, u64::MAX);
    [1, 2, 3, 4].map(|n| disk.find(&[&session(n)[..], &[0]].concat()).usable)
}

/// Bytes of so many sessions, or of parts of one.
fn bytes_of(sessions: u32, parts: &[Range<usize>]) -> u64 {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut disk = open(folder.path(), u64::MAX);
    (0..sessions).for_each(|n| write(&disk, n, parts));
    disk.finish(&[]);
    disk.bytes()
}

#[test]
fn where_not_all_sessions_have_room_the_last_ones_are_whole() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let two = bytes_of(2, &ALL);
    // All of them in a row, as a server that stops writes what lies in its slots.
    let mut disk = open(folder.path(), two);
    (1..5).for_each(|n| write(&disk, n, &ALL));
    disk.finish(&[]);
    assert!(disk.bytes() <= two);
    assert_eq!(usable(folder.path()), [0, 0, 40, 40]);
    // Another one takes the place of the one that was of use before the other.
    let mut disk = open(folder.path(), two);
    write(&disk, 2, &ALL);
    disk.finish(&[]);
    assert!(disk.bytes() <= two);
    assert_eq!(usable(folder.path()), [0, 40, 0, 40]);
}

#[test]
fn a_session_for_which_there_is_no_room_keeps_its_beginning() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let blocks = bytes_of(1, &ALL[..2]);
    let mut disk = open(folder.path(), blocks);
    write(&disk, 1, &ALL);
    disk.finish(&[]);
    assert_eq!((disk.bytes(), disk.written()), (blocks, 2), "both blocks, and no snapshot");
}
