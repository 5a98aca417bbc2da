use super::*;
use std::io::Write;

/// A folder of its own, removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("loaf-output-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const NONE: &[&Path] = &[];

fn write(path: &Path, content: &str) {
    let output = Output::create(path, NONE).unwrap();
    output.file().write_all(content.as_bytes()).unwrap();
    output.finish().unwrap();
}

#[test]
fn a_file_gets_its_name_when_it_is_whole_and_nothing_else_stays() {
    let folder = Folder::new("whole");
    let path = folder.file("x", "older");
    let output = Output::create(&path, NONE).unwrap();
    output.file().write_all(b"newer").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"older");
    assert_eq!(folder.names().len(), 2);
    output.finish().unwrap();
    assert_eq!((fs::read(&path).unwrap(), folder.names()), (b"newer".to_vec(), vec!["x".to_string()]));
    drop(Output::create(&path, NONE).unwrap());
    assert_eq!((fs::read(&path).unwrap(), folder.names()), (b"newer".to_vec(), vec!["x".to_string()]));
    let unnamed = Output::unnamed().unwrap();
    let temporary = unnamed.temporary.clone();
    assert!(temporary.exists());
    unnamed.finish().unwrap();
    assert!(!temporary.exists());
}

#[test]
fn an_input_is_never_replaced() {
    let folder = Folder::new("input");
    let (input, other) = (folder.file("in", "input"), folder.file("other", "other"));
    let absent = folder.0.join("absent");
    let mut names = vec![input.clone(), folder.0.join(".").join("in")];
    #[cfg(unix)]
    {
        let (soft, hard) = (folder.0.join("soft"), folder.0.join("hard"));
        std::os::unix::fs::symlink(&input, &soft).unwrap();
        fs::hard_link(&input, &hard).unwrap();
        names.extend([soft, hard]);
    }
    let before = folder.names();
    for name in names {
        let error = Output::create(&name, &[&absent, &other, &input]).unwrap_err().to_string();
        assert!(error.contains("expected another file than the input"), "{error}");
    }
    assert_eq!((folder.names(), fs::read(&input).unwrap()), (before, b"input".to_vec()));
    Output::create(&other, &[&input]).unwrap().finish().unwrap();
}

#[cfg(unix)]
#[test]
fn what_is_no_file_is_refused_and_links_are_followed() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new("kinds");
    let at = |name: &str| folder.0.join(name);
    let refused = |path: &Path| Output::create(path, NONE).unwrap_err().to_string();
    let fifo = std::ffi::CString::new(at("fifo").as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a C string that lives through the call.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    fs::create_dir(at("dir")).unwrap();
    for (name, to) in [("null", "/dev/null"), ("nowhere", "absent"), ("loop", "loop")] {
        std::os::unix::fs::symlink(to, at(name)).unwrap();
    }
    let before = folder.names();
    for (path, found) in [
        (at("fifo"), "found a FIFO"),
        (at("socket"), "found a socket"),
        (at("dir"), "found a folder"),
        (at("null"), "found a device"),
        (PathBuf::from("/dev/null"), "found a device"),
        (at("nowhere"), "found a link that leads nowhere"),
        (at("loop"), "cannot follow the link"),
        (PathBuf::from("/"), "found a folder"),
        (PathBuf::from(".."), "found a folder"),
    ] {
        let error = refused(&path);
        assert!(error.contains(found), "{error}");
    }
    assert_eq!(folder.names(), before);

    let file = folder.file("file", "older");
    std::os::unix::fs::symlink("file", at("link")).unwrap();
    write(&at("link"), "newer");
    assert!(at("link").is_symlink());
    assert_eq!(fs::read(file).unwrap(), b"newer");
}

#[test]
fn leftovers_go_and_what_is_in_use_or_not_ours_stays() {
    let folder = Folder::new("leftovers");
    let mine = [".x.12-0.loaf-tmp", ".a.b.c.4000000-7.loaf-tmp"];
    let others =
        [".x.12-0.tmp", "x.12-0.loaf-tmp", ".12-0.loaf-tmp", ".x.12.loaf-tmp", ".x.a-0.loaf-tmp", ".x..loaf-tmp"];
    mine.iter().chain(&others).for_each(|name| drop(folder.file(name, "")));
    fs::create_dir(folder.0.join(".dir.1-1.loaf-tmp")).unwrap();
    let held = File::create(folder.0.join(".held.1-1.loaf-tmp")).unwrap();
    held.lock().unwrap();
    let writing = Output::create(&folder.0.join("long"), NONE).unwrap();
    write(&folder.0.join("y"), "");
    let names = folder.names();
    assert!(mine.iter().all(|name| !names.contains(&name.to_string())), "{names:?}");
    assert!(others.iter().all(|name| names.contains(&name.to_string())), "{names:?}");
    assert!(names.contains(&".held.1-1.loaf-tmp".to_string()) && names.contains(&".dir.1-1.loaf-tmp".to_string()));
    assert!(writing.temporary.exists());
    writing.finish().unwrap();
    assert!(folder.0.join("long").exists());
}

#[test]
fn a_name_as_long_as_the_system_allows_can_be_written() {
    let folder = Folder::new("long");
    write(&folder.0.join("n".repeat(255)), "x");
    write(&folder.0.join("a b\u{1b}\n"), "x");
    assert_eq!(folder.names().len(), 2);
}

#[cfg(unix)]
#[test]
fn more_than_the_file_system_holds_is_refused_with_both_sizes() {
    let folder = Folder::new("room");
    let output = Output::create(&folder.0.join("x"), NONE).unwrap();
    let error = output.reserve(1 << 62).unwrap_err().to_string();
    assert!(error.contains("room for 4611686018427387904 bytes, found "), "{error}");
    output.reserve(1000).unwrap();
    assert_eq!(output.file().metadata().unwrap().len(), 1000);
}

#[test]
fn files_are_dated_in_order_and_nothing_else_stays() {
    let folder = Folder::new("dated");
    let (a, b) = (folder.file("a", "a"), folder.file("b", "b"));
    let dates = [("a", 0), ("b", 3), ("absent", 5)];
    Output::date(&folder.0, dates.into_iter()).unwrap();
    let of = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    assert_eq!(of(&a).duration_since(of(&b)).unwrap().as_secs(), 3);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 2);
}

/// Bytes of the first 8 MB of a file in memory that a mapping of it has in large pages.
#[cfg(target_os = "linux")]
fn in_large_pages(file: &File) -> u64 {
    use std::os::fd::AsRawFd;
    const LEN: usize = 8 << 20;
    let nothing = std::ptr::null_mut();
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the second mapping takes the place of a part of the first, which nobody else knows;
    // it is populated by the system and read by nobody.
    let start = unsafe {
        let room = libc::mmap(nothing, LEN + LARGE_PAGE as usize, libc::PROT_NONE, private, -1, 0);
        assert_ne!(room, libc::MAP_FAILED);
        let at = room.map_addr(|a| a.next_multiple_of(LARGE_PAGE as usize));
        let how = libc::MAP_SHARED | libc::MAP_FIXED;
        assert_ne!(libc::mmap(at, LEN, libc::PROT_READ, how, file.as_raw_fd(), 0), libc::MAP_FAILED);
        libc::madvise(at, LEN, libc::MADV_HUGEPAGE);
        libc::madvise(at, LEN, libc::MADV_POPULATE_READ);
        at.addr()
    };
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    // SAFETY: the mapping made above.
    unsafe { libc::munmap(std::ptr::without_provenance_mut(start), LEN) };
    let ours = maps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
    let line = ours.map(str::trim).find_map(|line| line.strip_prefix("FilePmdMapped:"));
    line.map_or(0, |kb| kb.trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10)
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_written_in_pieces_lies_in_large_pages_where_the_system_has_them() {
    const LEN: u64 = 8 << 20;
    let folder = Folder::new("large");
    let bytes: Vec<u8> = (0..LEN as u32).map(|i| ((i * 7) >> 3) as u8).collect();
    // A file of holes, as a page fault finds it.
    let holes = Output::create(&folder.0.join("holes"), NONE).unwrap();
    holes.file().set_len(LEN).unwrap();
    let can = in_large_pages(holes.file());
    let output = Output::create(&folder.0.join("pieces"), NONE).unwrap();
    output.reserve(LEN).unwrap();
    for (i, piece) in bytes.chunks(100_000).enumerate() {
        output.write_all_at(piece, i as u64 * 100_000).unwrap();
    }
    assert_eq!(in_large_pages(output.file()), can);
    let mut read = vec![0; LEN as usize];
    output.read_exact_at(&mut read, 0).unwrap();
    assert!(read == bytes);
}
