//! `loaf chat` as a person meets it: the program on a terminal, keys in, text out.
#![cfg(all(unix, feature = "default-model"))]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longest wait for what must come; a test that passes never takes it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program on a terminal of its own.
struct Terminal {
    child: Child,
    keys: File,
    text: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    fn start(args: &[&str], env: &[(&str, &str)]) -> Terminal {
        let (mut ours, mut theirs) = (-1, -1);
        let none = std::ptr::null_mut();
        // SAFETY: both pointers are to live integers; name, settings and size may be null.
        let opened = unsafe { libc::openpty(&mut ours, &mut theirs, none, none.cast(), none.cast()) };
        assert_eq!(opened, 0, "a terminal");
        // SAFETY: openpty gave two descriptors that nobody else owns.
        let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        // A width, or the editor does not know where lines end.
        let size = libc::winsize { ws_row: 24, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the descriptor is open and the size lives.
        assert_eq!(unsafe { libc::ioctl(theirs.as_raw_fd(), libc::TIOCSWINSZ, &size) }, 0, "a size");
        let mut command = Command::new(env!("CARGO_BIN_EXE_loaf"));
        command
            .args(args)
            .env_remove("LOAF_MODEL")
            .env_remove("NO_COLOR")
            .env("TERM", "xterm")
            .envs(env.iter().copied());
        command.env("LOAF_HOME", env!("CARGO_TARGET_TMPDIR"));
        let stream = || Stdio::from(theirs.try_clone().expect("a descriptor"));
        command.stdin(stream()).stdout(stream()).stderr(stream());
        // SAFETY: both calls are async-signal-safe; the child gets the terminal as its own, so that
        // keys raise signals.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY as _, 0);
                Ok(())
            });
        }
        let child = command.spawn().expect("the program");
        drop((command, theirs));
        let (keys, mut screen) = (File::from(ours.try_clone().expect("a descriptor")), File::from(ours));
        let (send, text) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut buffer) {
                if send.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal { child, keys, text, seen: String::new() }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("a terminal");
    }

    /// Waits until `part` is on the screen, and forgets the screen up to there; gives what was
    /// before.
    fn wait(&mut self, part: &str) -> String {
        let start = Instant::now();
        loop {
            if let Some(at) = self.seen.find(part) {
                let before = self.seen[..at].to_owned();
                self.seen.drain(..at + part.len());
                return before;
            }
            let left = PATIENCE.saturating_sub(start.elapsed());
            match self.text.recv_timeout(left) {
                Ok(bytes) => self.seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(e) => panic!("{part:?} did not come ({e}); the screen: {:?}", self.seen),
            }
        }
    }

    fn end(mut self) -> i32 {
        let start = Instant::now();
        loop {
            match self.child.try_wait().expect("our child") {
                Some(status) => return status.code().unwrap_or(-1),
                None if start.elapsed() > PATIENCE => panic!("it does not end; the screen: {:?}", self.seen),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // One that has ended already is no longer there to be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const COMMAND: &str = "find src -type f -printf '%s %p\\n' | sort -rn | head -n 10";

#[test]
fn lines_are_edited_and_remembered() {
    let mut chat = Terminal::start(&["chat"], &[]);
    chat.wait("> ");
    // A slip, taken back with the backspace key.
    chat.press("show the ten largest files under srx\x7fc\r");
    chat.wait(COMMAND);
    chat.wait("> ");
    // The arrow key brings the line back.
    chat.press("\x1b[A\r");
    chat.wait(COMMAND);
    chat.wait("> ");
    // Ctrl-C at the prompt drops the line and nothing else; a line that ends in a backslash goes
    // on.
    chat.press("never mind\x03");
    chat.wait("> ");
    chat.press("/save /nonexistent/\\\r");
    chat.wait("error: ");
    chat.wait("> ");
    chat.press("/stats\r");
    chat.wait("4 messages");
    chat.wait("> ");
    chat.press("/he\t\r");
    chat.wait("/regen");
    chat.wait("> ");
    chat.press("\x04");
    assert_eq!(chat.end(), 0);
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    // So hot that an end is not chosen soon.
    let mut chat = Terminal::start(&["chat", "--seed", "1"], &[]);
    chat.wait("> ");
    chat.press("show the ten largest files under src\r");
    chat.wait(COMMAND);
    chat.wait("> ");
    chat.press("/set temperature 100\r");
    chat.wait("> ");
    chat.press("/regen\r");
    chat.wait("\n");
    chat.wait(" ");
    chat.press("\x03");
    chat.wait("loaf: interrupted");
    chat.wait("the answer before stays");
    chat.wait("> ");
    chat.press("\x03");
    chat.wait("> ");
    let saved = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("regen.json");
    chat.press(&format!("/save {}\r", saved.display()));
    chat.wait("2 messages saved");
    let text = std::fs::read_to_string(saved).expect("saved");
    assert!(text.contains("head -n 10"), "{text}");
    chat.press("/exit\r");
    assert_eq!(chat.end(), 0);
}

#[test]
fn colour_is_for_terminals_and_can_be_refused() {
    let error = |env: &[(&str, &str)]| {
        let mut ran = Terminal::start(&["run", "-m", "/nonexistent", "x"], env);
        let before = ran.wait("/nonexistent");
        ran.end();
        before
    };
    assert_eq!(error(&[]), "loaf: \x1b[1;31merror: \x1b[0m");
    assert_eq!(error(&[("NO_COLOR", "1")]), "loaf: error: ");
}

#[test]
fn nothing_asked_is_a_short_help() {
    let mut ran = Terminal::start(&[], &[]);
    ran.wait("loaf show the largest files");
    ran.wait("--help");
    assert_eq!(ran.end(), 0);
}
