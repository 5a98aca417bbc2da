//! The destructive forms of commands, by name.

use super::{inner, is_device};

/// Commands that run the command that follows them, and how many words of their own go before it,
/// flags aside.
const PREFIXES: [(&str, usize); 34] = [
    ("sudo", 0),
    ("doas", 0),
    ("env", 0),
    ("nohup", 0),
    ("nice", 0),
    ("ionice", 0),
    ("time", 0),
    ("exec", 0),
    ("command", 0),
    ("builtin", 0),
    ("xargs", 0),
    ("parallel", 0),
    ("setsid", 0),
    ("stdbuf", 0),
    ("strace", 0),
    ("busybox", 0),
    ("systemd-run", 0),
    ("caffeinate", 0),
    ("watch", 0),
    ("entr", 0),
    ("timeout", 1),
    ("chroot", 1),
    ("flock", 1),
    ("taskset", 1),
    ("ssh", 1),
    ("su", 1),
    ("if", 0),
    ("then", 0),
    ("else", 0),
    ("elif", 0),
    ("while", 0),
    ("until", 0),
    ("do", 0),
    ("{", 0),
];

/// Programs that run a text they are given.
const INTERPRETERS: [&str; 16] = [
    "sh", "bash", "zsh", "dash", "ksh", "fish", "eval", "python", "python3", "perl", "ruby", "node", "php", "pwsh",
    "ash", "source",
];

pub(super) fn is_interpreter(name: &str) -> bool {
    INTERPRETERS.contains(&name)
}

fn base(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or_default()
}

fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map_or("", |(name, _)| name);
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Where commands may begin behind a prefix: a flag's value may stand between, so there can be
/// several places.
fn behind<'w, 's>(words: &'w [&'s str], own: usize) -> impl Iterator<Item = &'w [&'s str]> {
    let mut left = own + 1;
    let start = move |i: &usize| {
        let word = words[*i];
        // Each flag may have one more word before the command.
        left += usize::from(left > 0 && word.starts_with('-'));
        let plain = left > 0 && !word.starts_with('-') && !is_assignment(word);
        left -= usize::from(plain);
        plain
    };
    (0..words.len()).filter(start).map(move |i| &words[i..])
}

/// Name of the command that words run, prefixes passed over.
pub(super) fn command_name(mut words: &[&str]) -> String {
    loop {
        words = &words[words.iter().take_while(|w| is_assignment(w) || **w == "!").count()..];
        let Some((name, rest)) = words.split_first().map(|(w, rest)| (base(w), rest)) else { return String::new() };
        let Some((_, own)) = PREFIXES.iter().find(|(prefix, _)| *prefix == name) else { return name.to_owned() };
        words = behind(rest, *own).next().unwrap_or_default();
    }
}

/// The arguments of a simple command.
#[derive(Clone, Copy)]
struct Arguments<'w, 's>(&'w [&'s str]);

impl<'s> Arguments<'_, 's> {
    /// A short flag, alone or among others.
    fn short(self, flag: char) -> bool {
        self.0.iter().any(|w| w.starts_with('-') && !w.starts_with("--") && w[1..].contains(flag))
    }

    /// A word, or a long flag with or without a value.
    fn has(self, word: &str) -> bool {
        self.0.iter().any(|w| *w == word || w.strip_prefix(word).is_some_and(|rest| rest.starts_with('=')))
    }

    fn any(self, words: &[&str]) -> bool {
        words.iter().any(|w| self.has(w))
    }

    /// Words other than flags.
    fn plain(self) -> impl Iterator<Item = &'s str> {
        self.0.iter().copied().filter(|w| !w.starts_with('-'))
    }

    /// The first word other than a flag.
    fn sub(self) -> &'s str {
        self.plain().next().unwrap_or_default()
    }

    /// The word after a flag.
    fn after(self, flags: &[&str]) -> Option<&'s str> {
        let at = self.0.iter().position(|w| flags.contains(w))?;
        self.0.get(at + 1).copied()
    }
}

/// Why one simple command needs care.
pub(super) fn simple(words: &[&str], depth: u32) -> Option<&'static str> {
    let depth = depth.checked_sub(1)?;
    let words = &words[words.iter().take_while(|w| is_assignment(w) || **w == "!").count()..];
    let (first, rest) = words.split_first()?;
    let name = base(first);
    if let Some((_, own)) = PREFIXES.iter().find(|(prefix, _)| *prefix == name) {
        // What is quoted for another shell is one word.
        let whole = rest.iter().filter(|w| w.contains(' ')).find_map(|line| inner(line, depth));
        return whole.or_else(|| behind(rest, *own).find_map(|words| simple(words, depth)));
    }
    let args = Arguments(rest);
    if is_interpreter(name) {
        return rest.iter().filter(|w| w.contains([' ', '(', ';'])).find_map(|line| inner(line, depth).or(code(line)));
    }
    files(name, args, depth)
        .or_else(|| disks(name, args))
        .or_else(|| machine(name, args))
        .or_else(|| packages(name, args))
        .or_else(|| services(name, args))
        .or_else(|| (name == "git").then(|| git(args)).flatten())
}

/// Programs in other languages: calls that remove files.
fn code(text: &str) -> Option<&'static str> {
    const CALLS: [&str; 9] =
        ["rmtree", "rm_rf", "unlink", "os.remove", "rmSync", "FileUtils.rm", "rmdirSync", "os.system", "system("];
    CALLS.iter().any(|call| text.contains(call)).then_some("it runs code that may remove files")
}

fn files(name: &str, a: Arguments<'_, '_>, depth: u32) -> Option<&'static str> {
    match name {
        "rm" if a.short('r') || a.short('R') || a.has("--recursive") => {
            Some("it removes folders with everything in them")
        }
        "rm" if a.short('f') || a.has("--force") || a.plain().any(|w| w.contains(['*', '?'])) => {
            Some("it removes files without asking")
        }
        "rm" if a.short('i') || a.short('I') => None,
        "rm" | "unlink" | "del" => Some("it removes files for good"),
        "shred" | "srm" | "wipe" | "scrub" => Some("it destroys what it is given"),
        "truncate" => Some("it cuts files to a length"),
        "trash-empty" => Some("it empties the trash"),
        "tee" if !a.short('a') && !a.has("--append") && a.plain().any(is_device) => Some("it writes to a device"),
        "tee" | "sponge" if !a.short('a') && !a.has("--append") && a.plain().any(|f| !f.starts_with("/dev/")) => {
            Some("it overwrites a file, if there is one of that name")
        }
        "sort" if a.short('o') || a.has("--output") => Some("it overwrites a file, if there is one of that name"),
        "mv" if a.plain().last() == Some("/dev/null") => Some("it throws files away"),
        "cp" if a.sub() == "/dev/null" => Some("it empties a file"),
        "cp" | "mv" | "install" if a.plain().last().is_some_and(is_device) => Some("it writes to a device"),
        "mv" | "cp" if a.short('f') || a.any(&["--force", "--remove-destination"]) => {
            Some("it overwrites without asking")
        }
        "ln" if a.short('f') || a.has("--force") => Some("it replaces what has the link's name"),
        "chmod" | "chown" | "chgrp" | "setfacl" | "chattr" if a.short('R') || a.has("--recursive") => {
            Some("it changes owners or permissions of a whole tree")
        }
        "chmod" if a.plain().any(|w| w == "000" || w == "0") => Some("it takes every permission away"),
        "find" | "fd" | "fdfind" => find(a, depth),
        "rsync" if a.0.iter().any(|w| w.starts_with("--delete")) => Some("it deletes files that the source lacks"),
        "rsync" if a.has("--remove-source-files") => Some("it removes the files that it has copied"),
        "tar" if a.any(&["--remove-files"]) => Some("it removes the files that it has packed"),
        "tar" if a.any(&["--overwrite", "--unlink-first", "--recursive-unlink"]) => {
            Some("it overwrites without asking")
        }
        "zip" if a.short('m') || a.has("--move") => Some("it removes the files that it has packed"),
        "zip" if a.short('d') || a.has("--delete") => Some("it removes files from an archive"),
        "7z" | "7za" if a.sub() == "d" => Some("it removes files from an archive"),
        "unzip" if a.short('o') => Some("it overwrites without asking"),
        "ffmpeg" if a.has("-y") => Some("it overwrites without asking"),
        "mogrify" => Some("it overwrites the originals"),
        "exiftool" if a.any(&["-overwrite_original"]) => Some("it overwrites the originals"),
        "awk" | "gawk" | "mawk" if a.0.iter().any(|w| w.contains("system(") && w.contains("rm")) => {
            Some("it runs code that may remove files")
        }
        "history" if a.short('c') => Some("it erases the history of this shell"),
        _ => None,
    }
}

fn find(a: Arguments<'_, '_>, depth: u32) -> Option<&'static str> {
    if a.has("-delete") {
        return Some("it deletes every match");
    }
    if a.any(&["-fprint", "-fprintf", "-fls", "-fprint0"]) {
        return Some("it overwrites a file, if there is one of that name");
    }
    let flags = ["-exec", "-execdir", "-ok", "-okdir", "-x", "-X", "--exec", "--exec-batch"];
    let starts = (0..a.0.len()).filter(|&i| flags.contains(&a.0[i]));
    starts.into_iter().find_map(|i| simple(&a.0[i + 1..], depth))
}

fn disks(name: &str, a: Arguments<'_, '_>) -> Option<&'static str> {
    let lists =
        a.short('l') || a.any(&["--list", "print", "-p", "--print", "-d", "--dump", "-n", "--no-act", "--noheadings"]);
    match name {
        "dd" | "dcfldd" | "ddrescue" if a.0.iter().any(|w| w.starts_with("of=")) || name == "ddrescue" => {
            Some("it writes raw blocks over its target")
        }
        "fdisk" | "sfdisk" | "cfdisk" | "parted" | "gdisk" | "sgdisk" | "cgdisk" if !lists => {
            Some("it changes partitions")
        }
        "wipefs" if a.short('a') || a.short('o') || a.any(&["--all", "--offset"]) => Some("it erases a file system"),
        "blkdiscard" | "badblocks" if name == "blkdiscard" || a.short('w') => Some("it destroys what it is given"),
        "hdparm" if a.0.iter().any(|w| w.starts_with("--security-erase") || w.starts_with("--trim")) => {
            Some("it destroys what it is given")
        }
        "nvme" if matches!(a.sub(), "format" | "sanitize" | "delete-ns") => Some("it erases a drive"),
        "cryptsetup" if a.any(&["luksFormat", "luksErase", "erase", "reencrypt", "luksRemoveKey", "luksKillSlot"]) => {
            Some("it can make an encrypted drive unreadable")
        }
        "pvremove" | "vgremove" | "lvremove" | "lvreduce" | "vgreduce" => Some("it removes a volume or a part of one"),
        "mdadm" if a.any(&["--zero-superblock", "--remove", "--create"]) => Some("it takes a disk array apart"),
        "zpool" if matches!(a.sub(), "destroy" | "labelclear" | "remove") => Some("it destroys a pool"),
        "zfs" if matches!(a.sub(), "destroy" | "rollback") => Some("it destroys data or snapshots"),
        "btrfs" if a.has("delete") || a.has("del") => Some("it deletes a subvolume or device"),
        "diskutil"
            if a.0.iter().any(|w| w.starts_with("erase") || w.starts_with("delete") || w.contains("artition")) =>
        {
            Some("it erases or changes a disk")
        }
        "diskutil" if a.any(&["zeroDisk", "randomDisk", "secureErase", "reformat"]) => {
            Some("it erases or changes a disk")
        }
        "resize2fs" | "xfs_repair" | "debugfs" => Some("it changes a file system"),
        "fsck" | "e2fsck" if a.short('y') => Some("it changes a file system without asking"),
        "flashrom" | "flash_erase" => Some("it writes firmware"),
        "mke2fs" | "mkswap" | "newfs" => Some("it erases a file system"),
        _ if name.starts_with("mkfs") || name.starts_with("fsck.") && a.short('y') => Some("it erases a file system"),
        _ => None,
    }
}

fn machine(name: &str, a: Arguments<'_, '_>) -> Option<&'static str> {
    let kill = || {
        a.any(&["-9", "-KILL", "-SIGKILL", "-kill"])
            || matches!(a.after(&["-s", "--signal", "-n"]), Some("9" | "KILL" | "SIGKILL"))
            || a.any(&["--signal=9", "--signal=KILL", "--signal=SIGKILL"])
    };
    match name {
        "kill" | "pkill" | "killall" | "skill" if kill() => Some("it kills processes without letting them save"),
        "kill" if a.0.last() == Some(&"-1") => Some("it ends every process there is"),
        "fuser" if a.short('k') || a.has("--kill") => Some("it kills the processes that use a file or port"),
        "xkill" => Some("it kills a program without letting it save"),
        "tmux" if matches!(a.sub(), "kill-server" | "kill-session" | "kill-window" | "kill-pane") => {
            Some("it ends sessions and what runs in them")
        }
        "screen" if a.has("quit") => Some("it ends sessions and what runs in them"),
        "loginctl" if a.sub().starts_with("terminate") || a.sub().starts_with("kill") => {
            Some("it ends sessions and what runs in them")
        }
        "crontab" if a.short('r') => Some("it removes all scheduled jobs"),
        "crontab" if a.0.contains(&"-") || a.plain().next().is_some() && !a.short('u') && !a.short('l') => {
            Some("it replaces all scheduled jobs")
        }
        "atrm" => Some("it removes scheduled jobs"),
        "userdel" | "deluser" if a.short('r') || a.any(&["--remove", "--remove-home", "--remove-all-files"]) => {
            Some("it removes a user with the home folder")
        }
        "userdel" | "deluser" | "groupdel" | "delgroup" => Some("it removes a user or group"),
        "passwd" if a.short('d') || a.short('l') || a.any(&["--delete", "--lock"]) => Some("it takes a password away"),
        "usermod" if a.short('L') || a.has("--lock") => Some("it locks a user out"),
        "shutdown" if a.short('c') => None,
        "shutdown" | "reboot" | "poweroff" | "halt" => Some("it stops the machine"),
        "init" | "telinit" if matches!(a.sub(), "0" | "6") => Some("it stops the machine"),
        "systemctl" => match a.sub() {
            "poweroff" | "reboot" | "halt" | "kexec" | "rescue" | "emergency" => Some("it stops the machine"),
            "stop" | "kill" | "disable" | "mask" | "isolate" => Some("it stops a service"),
            _ => None,
        },
        "service" if a.has("stop") => Some("it stops a service"),
        "launchctl" if matches!(a.sub(), "unload" | "bootout" | "remove" | "kill") => Some("it stops a service"),
        "iptables" | "ip6tables" if a.short('F') || a.short('X') || a.any(&["--flush", "--delete-chain"]) => {
            Some("it removes the firewall's rules")
        }
        "nft" if a.any(&["flush", "delete"]) => Some("it removes the firewall's rules"),
        "ufw" if a.any(&["reset", "disable"]) => Some("it removes the firewall's rules"),
        "ip" if a.any(&["flush", "delete", "del"]) || a.has("down") => Some("it can cut this machine off"),
        "ifconfig" | "ifdown" if name == "ifdown" || a.has("down") => Some("it can cut this machine off"),
        "nmcli" if a.any(&["delete", "down", "off"]) => Some("it can cut this machine off"),
        "rmmod" => Some("it removes a part of the kernel"),
        "modprobe" if a.short('r') || a.has("--remove") => Some("it removes a part of the kernel"),
        "journalctl" if a.0.iter().any(|w| w.starts_with("--vacuum")) => Some("it deletes logs"),
        "dmesg" if a.short('C') || a.short('c') || a.any(&["--clear", "--read-clear"]) => Some("it deletes logs"),
        "gpg" | "gpg2" if a.0.iter().any(|w| w.starts_with("--delete")) => Some("it deletes keys"),
        "security" | "defaults" if a.sub().starts_with("delete") => Some("it deletes keys or settings"),
        "dconf" if a.sub() == "reset" => Some("it deletes settings"),
        "gsettings" if a.sub() == "reset-recursively" => Some("it deletes settings"),
        "tmutil" if a.sub().starts_with("delete") => Some("it deletes backups"),
        _ => None,
    }
}

fn packages(name: &str, a: Arguments<'_, '_>) -> Option<&'static str> {
    const WHY: Option<&str> = Some("it removes packages");
    match name {
        "apt" | "apt-get" | "aptitude" if a.any(&["remove", "purge", "autoremove", "autopurge"]) => WHY,
        "dnf" | "yum" | "zypper" if a.any(&["remove", "erase", "autoremove", "rm"]) => WHY,
        "pacman" | "yay" | "paru" if a.0.iter().any(|w| w.starts_with("-R") || *w == "--remove") => WHY,
        "rpm" if a.short('e') || a.has("--erase") => WHY,
        "dpkg" if a.short('r') || a.short('P') || a.any(&["--remove", "--purge"]) => WHY,
        "apk" if a.sub() == "del" => WHY,
        "brew" | "snap" | "flatpak" | "port" if matches!(a.sub(), "remove" | "uninstall" | "rm") => WHY,
        "conda" | "mamba" if a.any(&["remove", "uninstall"]) => WHY,
        "pip" | "pip3" if a.sub() == "uninstall" => WHY,
        "nix-collect-garbage" => WHY,
        _ => None,
    }
}

fn services(name: &str, a: Arguments<'_, '_>) -> Option<&'static str> {
    let sql = || {
        a.0.iter()
            .map(|w| w.to_uppercase())
            .any(|w| ["DROP ", "TRUNCATE ", "DELETE FROM", "DROPDATABASE"].iter().any(|verb| w.contains(verb)))
    };
    match name {
        "docker" | "podman" | "nerdctl" => match a.sub() {
            _ if a.has("prune") => Some("it removes everything that is not in use"),
            "rm" | "rmi" | "container" | "image" | "volume" | "network" if a.any(&["rm", "rmi", "remove"]) => {
                Some("it removes containers, images or volumes")
            }
            "kill" => Some("it kills processes without letting them save"),
            "compose" if a.has("down") && (a.short('v') || a.has("--volumes")) => {
                Some("it removes volumes with their data")
            }
            "compose" if a.has("rm") => Some("it removes containers, images or volumes"),
            _ => None,
        },
        "docker-compose" | "podman-compose" if a.has("down") && (a.short('v') || a.has("--volumes")) => {
            Some("it removes volumes with their data")
        }
        "kubectl" | "oc" if matches!(a.sub(), "delete" | "drain") || a.has("--force") => {
            Some("it deletes from a cluster")
        }
        "helm" if matches!(a.sub(), "uninstall" | "delete" | "rollback") => Some("it deletes from a cluster"),
        "terraform" | "tofu" | "pulumi" if a.any(&["destroy", "-destroy", "-auto-approve", "--yes"]) => {
            Some("it destroys or changes what it manages without asking")
        }
        "vagrant" | "virsh" | "lxc" | "multipass" | "VBoxManage"
            if a.any(&["destroy", "undefine", "delete", "unregistervm", "purge"]) =>
        {
            Some("it removes a virtual machine")
        }
        "aws"
            if a.0
                .iter()
                .any(|w| w.starts_with("delete") || w.starts_with("terminate") || *w == "rm" || *w == "rb") =>
        {
            Some("it deletes from the cloud")
        }
        "aws" | "gsutil" | "s3cmd" if a.any(&["--delete", "rm", "rb", "del", "--delete-removed"]) => {
            Some("it deletes from the cloud")
        }
        "gcloud" | "az" | "doctl" | "heroku" if a.0.iter().any(|w| w.contains("delete") || w.contains("destroy")) => {
            Some("it deletes from the cloud")
        }
        "rclone" if matches!(a.sub(), "sync" | "delete" | "purge" | "deletefile" | "move" | "rmdirs") => {
            Some("it deletes files at its target")
        }
        "gh" | "glab" if a.has("delete") => Some("it deletes from a server"),
        "dropdb" | "dropuser" => Some("it deletes a database or user"),
        "mysqladmin" if a.has("drop") => Some("it deletes a database or user"),
        "redis-cli" if a.0.iter().any(|w| w.to_lowercase().starts_with("flush")) => Some("it deletes every key"),
        "psql" | "mysql" | "mariadb" | "sqlite3" | "mongo" | "mongosh" | "clickhouse-client" | "duckdb" if sql() => {
            Some("it deletes from a database")
        }
        _ => None,
    }
}

fn git(a: Arguments<'_, '_>) -> Option<&'static str> {
    // Flags of git itself stand before the command, two of them with a value.
    let mut rest = a.0;
    while let Some((flag, after)) = rest.split_first().filter(|(w, _)| w.starts_with('-')) {
        rest = if matches!(*flag, "-C" | "-c") { after.get(1..).unwrap_or_default() } else { after };
    }
    let (sub, rest) = rest.split_first()?;
    let a = Arguments(rest);
    let force = a.short('f') || a.has("--force");
    match *sub {
        "push" if force || a.any(&["--force-with-lease", "--mirror"]) || a.plain().any(|w| w.starts_with('+')) => {
            Some("it rewrites history others may have")
        }
        "push" if a.short('d') || a.any(&["--delete", "--prune"]) || a.plain().any(|w| w.starts_with(':')) => {
            Some("it deletes a remote branch")
        }
        "reset" if a.any(&["--hard", "--merge", "--keep"]) => Some("it throws away changes that are not committed"),
        "clean" if a.short('n') || a.has("--dry-run") => None,
        "clean" if force || a.short('d') || a.short('x') || a.short('X') => {
            Some("it removes files that git does not know")
        }
        "checkout" if force || a.any(&[".", "--", "--ours", "--theirs"]) || a.plain().any(|w| w.contains('*')) => {
            Some("it throws away changes that are not committed")
        }
        "switch" if force || a.any(&["--discard-changes", "-C"]) => {
            Some("it throws away changes that are not committed")
        }
        "restore" if !a.has("--staged") && !a.short('S') || a.has("--worktree") || a.short('W') => {
            Some("it throws away changes that are not committed")
        }
        "rm" if !a.has("--cached") => Some("it removes files for good"),
        "branch" if a.short('D') || force && (a.short('d') || a.has("--delete")) => {
            Some("it deletes a branch, merged or not")
        }
        "tag" if a.short('d') || a.has("--delete") => Some("it deletes a tag"),
        "stash" if a.any(&["clear", "drop"]) => Some("it throws away stashed changes"),
        "worktree" if a.has("remove") && force => Some("it throws away changes that are not committed"),
        "filter-branch" | "filter-repo" => Some("it rewrites history"),
        "update-ref" if a.short('d') => Some("it deletes a branch, merged or not"),
        "reflog" if a.any(&["expire", "delete"]) => Some("it deletes what could still be recovered"),
        "gc" | "prune" if *sub == "prune" || a.has("--prune") => Some("it deletes what could still be recovered"),
        "submodule" if a.has("deinit") && force => Some("it throws away changes that are not committed"),
        _ => None,
    }
}
