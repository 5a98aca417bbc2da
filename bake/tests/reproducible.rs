//! Every published artifact, baked again by the program these tests are built with, in surroundings
//! that differ in all a process can be told.
//!
//! The ids in `artifacts/lock.toml` are the meeting point of builds: this test holds the debug
//! profile to them, `make verify-artifacts` (part of `make test`) the release profile, and whoever
//! else runs `bake lock --check` their machine. A bake chooses no instructions of its own by what
//! the processor can do. What it calls may: the C library picks its `pow` so, the hash and the f16
//! conversions likewise. The first can be told to forget instructions, which is done here; the
//! others are exact.

use std::path::Path;
use std::process::Command;

/// Surroundings: a umask, then variables. Nothing is inherited.
const SURROUNDINGS: [(&str, &[(&str, &str)]); 2] = [
    (
        "000",
        &[
            ("TZ", "Pacific/Kiritimati"),
            ("LC_ALL", "tr_TR.UTF-8"),
            ("RAYON_NUM_THREADS", "7"),
            ("SOURCE_DATE_EPOCH", "1"),
        ],
    ),
    (
        "077",
        &[
            ("TZ", "America/Los_Angeles"),
            ("LANG", "C"),
            ("RAYON_NUM_THREADS", "1"),
            ("HOME", "/nonexistent"),
            ("COLUMNS", "20"),
            ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2,-AVX512F,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable"),
        ],
    ),
];

#[test]
fn published_artifacts_come_out_the_same_in_any_surroundings() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let locked = std::fs::read_to_string(root.join("artifacts/lock.toml")).expect("committed");
    let ids: Vec<&str> = locked.lines().filter_map(|l| l.strip_prefix("id = \"")?.strip_suffix('"')).collect();
    assert!(ids.len() >= 5, "{ids:?}");
    for (umask, variables) in SURROUNDINGS {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "umask $1; exec \"$0\" lock --check", env!("CARGO_BIN_EXE_bake"), umask]);
        let output = shell.current_dir(&root).env_clear().envs(variables.iter().copied()).output().expect("a shell");
        assert!(output.status.success(), "{variables:?}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout);
        let baked: Vec<&str> = text.lines().filter_map(|l| l.split_whitespace().next()).collect();
        assert_eq!(baked, ids, "{variables:?}");
    }
}
