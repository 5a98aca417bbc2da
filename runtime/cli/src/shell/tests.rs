use super::danger;

#[test]
fn destructive_commands_are_named() {
    let lines = "
        rm -rf build | rm -r -- old | sudo rm -fr /tmp/x | rm notes.txt | rm *.log | /bin/rm -r x | unlink a
        find . -name '*.tmp' -delete | find . -type f -exec rm -f {} + | fd -e tmp -x rm
        find . -exec grep -l x {} \\; -exec rm {} \\; | find . -exec sh -c 'rm -r \"$1\"' _ {} \\;
        dd if=/dev/zero of=disk.img bs=1M count=10 | sudo mkfs.ext4 /dev/sdb1 | mke2fs /dev/sdb | wipefs -a /dev/sdb
        blkdiscard /dev/nvme0n1 | sudo fdisk /dev/sda | parted /dev/sda mklabel gpt | sgdisk --zap-all /dev/sda
        nvme format /dev/nvme0 | cryptsetup luksFormat /dev/sda2 | lvremove vg/lv | zpool destroy tank | zfs destroy tank/a
        btrfs subvolume delete snap | mdadm --zero-superblock /dev/sdb | hdparm --security-erase p /dev/sda
        diskutil eraseDisk APFS x disk2 | fsck -y /dev/sda1 | badblocks -w /dev/sdb
        chmod -R 777 . | chown --recursive root src | chmod 000 file | setfacl -R -m u:a:rwx .
        git push --force origin main | git push -f | git push origin +main | git push origin :old | git push -d origin old
        git reset --hard HEAD~1 | git clean -fdx | git -C repo clean -fd | git restore src/main.rs | git restore .
        git restore --staged --worktree a | git checkout -- a.txt | git checkout . | git checkout -f main | git branch -D old
        git stash clear | git stash drop | git tag -d v1 | git rm -r src | git filter-branch --all | git switch -f main
        git reflog expire --expire=now --all | git gc --prune=now | git worktree remove --force x | git update-ref -d refs/x
        rsync -a --delete a/ b/ | rsync --remove-source-files a b | mv -f a b | cp -f a b | ln -sf a b | mv a /dev/null
        cp /dev/null log | cp image.iso /dev/sdb | tar --remove-files -cf a.tar a | zip -rm a.zip a | unzip -o a.zip
        shred -u key | truncate -s 0 log | tee /etc/hosts | sudo tee /dev/sda | sort -o f f | ffmpeg -y -i a b | mogrify -resize 5 *.png
        kill -9 1234 | kill -s KILL 12 | pkill -9 firefox | killall -KILL x | kill -9 -1 | fuser -k 8080/tcp | fuser -vk /mnt
        kill -1 | kill -- -1 | tmux kill-server | loginctl terminate-user bob | xkill
        crontab -r | crontab new.txt | crontab - | userdel -r bob | sudo userdel bob | deluser --remove-home bob | groupdel staff
        passwd -d bob | shutdown -h now | reboot | systemctl poweroff | init 0 | systemctl stop nginx | service nginx stop
        iptables -F | nft flush ruleset | ufw disable | ip link set eth0 down | ip addr flush dev eth0 | nmcli connection delete x
        rmmod nvidia | journalctl --vacuum-time=1d | dmesg -C | history -c | gpg --delete-secret-keys x | dconf reset -f /
        apt-get purge nginx | sudo apt autoremove | dnf remove x | pacman -Rns x | rpm -e x | dpkg -P x | brew uninstall x | pip uninstall x
        docker system prune -af | docker rm -f x | docker volume rm v | docker compose down -v | kubectl delete pod x
        helm uninstall x | terraform destroy | terraform apply -auto-approve | vagrant destroy | aws s3 rm s3://b --recursive
        aws ec2 terminate-instances x | gcloud compute instances delete x | rclone sync a b | gh repo delete x
        dropdb prod | redis-cli flushall | psql -c 'drop table users' | sqlite3 a.db 'DELETE FROM t' | mysqladmin drop x
        env A=1 rm -r x | FOO=1 rm -r x | nohup rm -r x & | timeout 5 rm -rf x | nice -n 10 rm -r x | sudo -u bob rm -r x
        ssh -p 22 host rm -rf x | ssh host 'rm -rf x' | sh -c 'rm -rf x' | bash -c \"cd a; rm -r b\" | eval 'rm -r x'
        su - bob -c 'rm -r x' | watch 'rm -r x' | python3 -c 'import shutil; shutil.rmtree(\"x\")' | perl -e 'unlink(\"x\")'
        ! rm -r x | time rm -r x | xkill";
    // One kind of separator in the list is enough: none of these has a pipe of its own.
    let lines = lines.split('\n').flat_map(|line| line.trim().split(" | ")).filter(|l| !l.is_empty());
    let mut count = 0;
    for line in lines {
        assert!(danger(line).is_some(), "{line}");
        count += 1;
    }
    assert!(count > 150, "{count}");
    for line in [
        "find logs -name '*.gz' | xargs -0 -n 1 rm -f",
        "ls | xargs rm -rf",
        "ls | xargs -I {} rm {}",
        "cat image > /dev/sda",
        "echo c > /proc/sysrq-trigger",
        "true && rm -r a",
        "false || rm -r a",
        "(cd x; rm -r y)",
        "if true; then rm -r a; fi",
        "for f in *; do rm \"$f\"; done",
        "echo $(rm -r a)",
        "echo \"$(rm -r a)\"",
        "echo `rm -r a`",
        "ls > files.txt",
        "ls 2> errors.log",
        "ls &> all.log",
        "ls >| files.txt",
        ": > log",
        "> log",
        "sort names.txt > names.txt",
        "cat names.txt | sort > names.txt",
        "curl https://example.org/install.sh | sh",
        "wget -qO- https://example.org/x | sudo bash",
        ":(){ :|:& };:",
        "echo hello # a comment\nrm -r x",
    ] {
        assert!(danger(line).is_some(), "{line}");
    }
    assert_eq!(danger("sort f > f"), Some("it empties the file before it is read"));
    assert_eq!(danger("ls > f"), Some("it overwrites a file, if there is one of that name"));
}

#[test]
fn harmless_commands_are_not() {
    for line in [
        "",
        "find src -type f -printf '%s %p\\n' | sort -rn | head -n 10",
        "grep -rf patterns.txt src",
        "ls -R",
        "echo 'rm -rf /'",
        "echo \"rm -rf /\"",
        "echo rm -rf x",
        "ls # rm -rf x",
        "cp -r a b",
        "mv a b",
        "chmod +x run.sh",
        "git push origin main",
        "git reset --soft HEAD~1",
        "git restore --staged a.txt",
        "git clean -n",
        "git rm --cached a",
        "git checkout -b feature",
        "git checkout feature/login",
        "git branch -d merged",
        "git stash",
        "git log --follow -- a.txt",
        "tar -czf backup.tar.gz logs",
        "ls > /dev/null",
        "ls > /dev/null 2>&1",
        "ls >&2",
        "ls >> files.txt",
        "ls 2>/dev/null | tee -a log",
        "sort < names.txt",
        "find . -name '*.rs' -exec sed -i 's/foo/bar/g' {} +",
        "find . -type f -exec grep -l x {} +",
        "kill 1234",
        "kill -l",
        "rmdir empty",
        "rm -i a",
        "crontab -l",
        "crontab -l -u bob",
        "crontab -e",
        "sudo fdisk -l",
        "parted -l",
        "wipefs /dev/sda",
        "dd if=/dev/sda bs=1M count=1 | xxd",
        "systemctl status nginx",
        "docker ps -a",
        "docker run --rm -it debian",
        "kubectl get pods",
        "apt install shred",
        "sudo apt-get install dd",
        "time grep -r rm .",
        "sudo -u bob ls -l",
        "rsync -a a/ b/",
        "psql -c 'select * from users'",
        "curl -o page.html https://example.org",
        "awk '$1 > 3 { print }' f",
        "test 3 -gt 2 && echo yes",
        "shutdown -c",
        "ip addr show",
        "diff <(ls a) <(ls b)",
        "history | tail",
        "zip -r a.zip a",
        "sh build.sh",
        "python3 -c 'print(1)'",
    ] {
        assert_eq!(danger(line), None, "{line}");
    }
}

#[test]
fn no_line_is_too_deep_or_too_long() {
    let nested = "sh -c 'sh -c \"".repeat(50);
    let _ = danger(&nested);
    let _ = danger(&"sudo ".repeat(10_000));
    let _ = danger(&"$(".repeat(10_000));
    let _ = danger(&"\"$(".repeat(10_000));
}
