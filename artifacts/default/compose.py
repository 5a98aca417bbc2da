"""Tasks that are put together from parts: sets of files with something done to them, and filters behind a pipe.

`FileSet` describes files by up to three attributes ("python files larger than 2 MB modified this week under src");
`CONSUMERS` say what to do with them; `MODIFIERS` are pipe stages that follow anything that prints lines.

What always holds: one meaning has one command, with find's tests in one order; every part has an id, so that a
pair of parts can be held out of training. What it does not do: choose splits (generate.py).
"""

from grammar import parse

# id, place in the command, command, noun phrases. "N:" puts the words before the head, "R:" after it, "H:" is the head itself.
ATTRIBUTES = [
    ("ext", 10, "-name '*.{ext}'", ["H:{ext} files", "H:{ext} files", "H:{ext} files", "R:(ending in|ending with|with the extension|with extension|with the suffix) {ext:dotext}",
                                    "R:(that end in|that end with|whose names end in) {ext:dotext}"]),
    ("ext2", 10, "\\( -name '*.{xa}' -o -name '*.{xb}' \\)", ["H:{xa:ext} and {xb:ext} files", "H:{xa:ext} or {xb:ext} files"]),
    ("notext", 10, "-not -name '*.{ext}'", ["R:(that are not|other than|except) {ext} files", "R:(not ending in|without the extension) {ext:dotext}"]),
    ("exact", 10, "-name {fn}", ["R:<named> {fn:file}", "R:with the exact name {fn:file}"]),
    ("iname", 10, "-iname {fn}", ["R:<named> {fn:file} (ignoring case|in any case|regardless of case)"]),
    ("part", 10, "-name '*{fs}*'", ["R:(with|having) {fs:stem} in (the|their) (name|names)", "R:whose (name contains|names contain) {fs:stem}", "R:with names containing {fs:stem}"]),
    ("prefix", 10, "-name \"{fs}*\"", ["R:(whose names start|that start|starting|beginning) with {fs:stem}", "R:whose (name starts|name begins) with {fs:stem}"]),
    ("hidden", 10, "-name '.*'", ["N:hidden"]),
    ("larger", 20, "-size +{size}", ["R:(larger|bigger) than {size}", "R:over {size}", "R:(of more than|exceeding|above) {size}", "R:that are (larger|bigger) than {size}"]),
    ("smaller", 20, "-size -{size}", ["R:smaller than {size}", "R:(of less than|below) {size}", "R:that are smaller than {size}"]),
    ("empty", 20, "-empty", ["N:empty", "R:that are empty"]),
    ("recent", 30, "-mtime -{age}", ["R:(modified|changed|edited|updated) (in|within|during) the (last|past) {age}", "R:that (were modified|have changed|were changed) in the (last|past) {age}"]),
    ("today", 30, "-mtime -1", ["R:(modified|changed|edited) today", "R:that (were modified|changed) today"]),
    ("minutes", 30, "-mmin -{mins}", ["R:(modified|changed|edited|updated) (in|within) the (last|past) {mins}", "R:that changed in the (last|past) {mins}"]),
    ("old", 30, "-mtime +{agea}", ["R:older than {agea}", "R:(modified|changed) more than {agea} ago", "R:(not modified|not changed|unchanged|untouched) (for|in) (more than|over) {agea}"]),
    ("read", 31, "-atime -{age}", ["R:(accessed|read|opened) (in|within) the (last|past) {age}"]),
    ("unread", 31, "-atime +{agea}", ["R:not (accessed|read|opened) (for|in) (more than|over) {agea}"]),
    ("newer", 32, "-newer {fw}", ["R:newer than (the file|) {fw:file}", "R:(modified|changed) (after|more recently than) (the file|) {fw:file}"]),
    ("owner", 40, "-user {user}", ["R:(owned by|belonging to) (user|the user|) {user}", "R:that belong to {user}"]),
    ("group", 41, "-group {group}", ["R:(of|owned by|belonging to) (the group|group) {group}"]),
    ("mode", 42, "-perm {mode}", ["R:with (mode|permissions|permission|the mode) {mode}"]),
    ("open", 42, "-perm -o+w", ["N:world writable", "N:world-writable", "R:(writable by|that are writable by) (everyone|everybody)"]),
    ("exec", 43, "-executable", ["N:executable", "R:that are executable"]),
    ("outside", 50, "-not -path '*/{nd}/*'", ["R:(outside|not in|excluding|ignoring|skipping) (the directory|the folder|directories named|directory) {nd:name}", "R:(but not|except those) (in|under) (the folder|the directory) {nd:name}"]),
]
ATTRIBUTES = [(i, place, cmd, [(t[0], parse(t[2:])) for t in texts]) for i, place, cmd, texts in ATTRIBUTES]

# Heads other than plain files.
TYPES = [
    ("dirs", "d", parse("(directories|folders|directories|subdirectories)")),
    ("links", "l", parse("(symlinks|symbolic links)")),
]
DIR_ATTRIBUTES = {"exact", "part", "prefix", "hidden", "empty", "recent", "old", "owner", "mode", "open", "outside", "newer"}

# id, text behind the find expression, does it print lines, verb phrases; "@" is the set, "@@" the set after "every"/"each".
CONSUMERS = [
    ("list", "", True, ["<find> @", "<find> @", "<find> @", "(get|gather|search for|look for|hunt for|I need|I want|show me a list of|list of|pull up|see) @", "@", "(what|which) ~ (are there|do I have|exist)", "(is|are) there any ~", "(do I|do we) have any ~", "(what are|which are) @", "(are there|do I have) @", "where are @"]),
    ("delete", " -delete", False, ["<delete> @", "<delete> @@", "clean up @", "(<find>|take|look for|get|pick) @ (and|then|and then) <delete> (them|those|them all|all of them)", "(find and delete|find and remove|search and delete|throw away|wipe) @", "<delete> (all of|) @", "(I want|we want|I need) @ (gone|deleted|removed)", "(drop|trash|purge|throw out) @"]),
    ("copy", " -exec cp -t {to} {} +", False, ["copy @ (to|into) {to:path}", "copy @@ (to|into) {to:path}", "put (a copy|copies) of @ (in|into) {to:path}", "(<find>|take|look for|get|pick) @ (and|then|and then) copy (them|those|them all) (to|into) {to:path}", "put @ (also|) (in|into) {to:path} as (a copy|copies)", "(duplicate|back up) @ (to|into|in) {to:path}"]),
    ("move", " -exec mv -t {to} {} +", False, ["move @ (to|into) {to:path}", "move @@ (to|into) {to:path}", "(collect|put) @ (in|into) {to:path}", "(<find>|take|look for|get|pick) @ (and|then|and then) (move|put) (them|those|them all) (to|into) {to:path}", "(shift|transfer|gather) @ (to|into|in) {to:path}"]),
    ("gzip", " -exec gzip {} +", False, ["(gzip|compress) @", "(gzip|compress) @@", "compress @ with gzip", "(<find>|take|look for|get|pick) @ (and|then|and then) (gzip|compress) (them|those|each of them|every one of them)", "gzip (all of|) @"]),
    ("chmod", " -exec chmod {mo} {} +", False, ["<change> the (permissions|mode) of @ to {mo:mode}", "<change> the (permissions|mode) of @@ to {mo:mode}", "chmod @ to {mo:mode}", "(<find>|take|look for|get|pick) @ (and|then|and then) (chmod them to|set their (permissions|mode) to|change their permissions to) {mo:mode}", "(give|set) @ (the|) (mode|permissions|permission) {mo:mode}"]),
    ("chmodx", " -exec chmod +x {} +", False, ["make @ executable", "make @@ executable", "mark @ as executable", "(<find>|take|look for|get|pick) @ (and|then|and then) make (them|those|them all|each) executable"]),
    ("chown", " -exec chown {ow} {} +", False, ["<change> the owner of @ to {ow:user}", "make {ow:user} the owner of @", "chown @ to {ow:user}", "(<find>|take|look for|get|pick) @ (and|then|and then) (give them to|change their owner to|make them belong to|chown them to) {ow:user}"]),
    ("replace", " -exec sed -i 's/{ra}/{rb}/g' {} +", False, [
        "replace {ra:rep} (with|by) {rb:rep} in @", "replace {ra:rep} (with|by) {rb:rep} in @@", "(change|substitute) {ra:rep} (to|with) {rb:rep} in @",
        "(change|rename) {ra:rep} to {rb:rep} in @@", "replace (all|every|every occurrence of|all occurrences of) {ra:rep} (with|by) {rb:rep} in @", "find and replace {ra:rep} (with|by) {rb:rep} in @", "search and replace {ra:rep} (with|by) {rb:rep} in @", "(<find>|take|look for|get|pick) @ (and|then|and then) replace {ra:rep} (with|by) {rb:rep} in (them|those|all of them|each of them)", "(swap|exchange) {ra:rep} (for|with) {rb:rep} in @", "(change|turn) (every|all|each) {ra:rep} (to|into) {rb:rep} in @", "in @, (replace|change) {ra:rep} (with|by|to) {rb:rep}", "(use|write) {rb:rep} instead of {ra:rep} in @"]),
    ("dellines", " -exec sed -i '/{ra}/d' {} +", False, ["<delete> (all|the|) lines (containing|with|matching) {ra:rep} (from|in) @", "<delete> (all|the|) lines (containing|with) {ra:rep} (from|in) @@", "(<find>|take|look for|get|pick) @ (and|then|and then) <delete> (the|all|) lines (with|containing) {ra:rep} (from|in) (them|those)"]),
    ("trailing", " -exec sed -i 's/[ \\t]*$//' {} +", False, ["<delete> (the|) trailing (whitespace|spaces) (from|in) @", "strip trailing (whitespace|spaces) (from|in) @@"]),
    ("crlf", " -exec sed -i 's/\\r$//' {} +", False, ["convert @ to unix line endings", "<delete> (carriage returns|windows line endings) (from|in) @"]),
    ("touch", " -exec touch {} +", False, ["touch @", "touch @@", "update the (timestamps|modification times) of @", "(<find>|take|look for|get|pick) @ (and|then|and then) touch (them|those|each of them)"]),
    ("tar", " -print0 | tar -czf {ar}.tar.gz --null -T -", False, ["(pack|archive|tar|put) @ (into|in|to) {ar:stem}.tar.gz", "(create|make) (a tarball|the archive) {ar:stem}.tar.gz (of|from|with) @", "(<find>|take|look for|get|pick) @ (and|then|and then) (pack|tar|put|archive|bundle) (them|those|them all) (up|) (into|in|to) {ar:stem}.tar.gz", "(bundle|compress|back up) @ (into|in|to|as) {ar:stem}.tar.gz"]),
    ("zip", " -exec zip {ar}.zip {} +", False, ["(pack|archive|zip|put) @ (into|in|to) {ar:stem}.zip", "(create|make) (a zip file|the zip) {ar:stem}.zip (of|from|with) @", "(<find>|take|look for|get|pick) @ (and|then|and then) (zip|pack|put) (them|those|them all) (into|in|to) {ar:stem}.zip", "(bundle|compress) @ (into|in|to|as) {ar:stem}.zip"]),
    ("grep", " -exec grep -Hn {gp} {} +", True, ["(search|grep|look) for {gp:pat} in @", "(search|grep|look) for {gp:pat} in @@", "(find|search for) {gp:pat} in @", "(<find>|take|look for|get|pick) @ (and|then|and then) (search them for|grep them for|look in them for|look for|search for|grep for) {gp:pat}( in them|)", "(which|what) lines (in|of) @ (contain|mention|have) {gp:pat}", "(search|grep|scan) @ for {gp:pat}"]),
    ("grepl", " -exec grep -l {gp} {} +", True, ["(list|show|find) (which of|) @ contain {gp:pat}", "which of @ (contain|mention) {gp:pat}", "(find|show|list) @ (that contain|containing|that mention|mentioning|with the text|with the word) {gp:pat}"]),
    ("loc", " -exec cat {} + | wc -l", False, ["count the (total|) lines (in|of) @", "count (the|) lines of code (in|of) @", "how many lines of code are (there|) in @", "lines of code (in|of) @", "how many lines are (there|) in @", "(print|show) the total number of lines (in|of) @", "total (number of lines|line count) (in|of) @", "(<find>|take|look for|get|pick) @ (and|then|and then) count (their|the|the total|all their) lines", "(sum|add) up the lines (in|of) @", "(lines|line count|number of lines) (in|of) @ (together|in total|)"]),
    ("words", " -exec cat {} + | wc -w", False, ["count the words (in|of) @", "how many words are (there|) in @", "(<find>|take|look for|get|pick) @ (and|then|and then) count (their|the|all) words"]),
    ("cat", " -exec cat {} +", True, ["(print|show|display|output) the contents of @", "(concatenate|cat) @", "(<find>|take|look for|get|pick) @ (and|then|and then) (print|show|cat|display) (their contents|them|what is in them)"]),
    ("head", " -exec head -n {hk} {} +", True, ["(print|show) the first {hk:small} lines of @@", "(print|show) the first {hk:small} lines of each of @", "(<find>|take|look for|get|pick) @ (and|then|and then) (print|show) the first {hk:small} lines (of each|of each of them|of every one)"]),
    ("long", " -exec ls -lh {} +", True, ["(list|show) @ with (details|sizes and dates)", "(long listing|detailed listing) of @", "(list|show) the details of @", "(<find>|take|look for|get|pick) @ (and|then|and then) (show|list) (their details|them with details|details)"]),
    ("sizes", " -printf '%s %p\\n'", True, ["(list|show|print) @ with (their sizes|sizes in bytes|the size of each)", "(list|show|print) the sizes of @", "(<find>|take|look for|get|pick) @ (and|then|and then) (show|print|list) (their sizes|the size of each|how big they are)"]),
    ("bysize", " -printf '%s %p\\n' | sort -rn", True, ["(list|show) @ (sorted by|ordered by|by) size", "(list|show) @, (largest|biggest) first", "sort @ by size", "(<find>|take|look for|get|pick) @ (and|then|and then) (sort|order) (them|those|the results) by size", "@ (sorted|ordered) by size", "@, (largest|biggest) first"]),
    ("bydate", " -printf '%T@ %p\\n' | sort -rn", True, ["(list|show) @ (sorted by|ordered by|by) (date|modification time|time)", "(list|show) @, newest first", "sort @ by (date|modification time)", "(<find>|take|look for|get|pick) @ (and|then|and then) (sort|order) (them|those|the results) by (date|time|modification time)", "@ (sorted|ordered) by (date|time|modification time)", "@, newest first"]),
    ("largest", " -printf '%s %p\\n' | sort -rn | head -n {tk}", True, [
        "<show> the {tk:small} <largest> ~", "<show> the {tk:small} <largest> ~", "(what|which) are the {tk:small} <largest> ~", "{tk:small} <largest> ~", "top {tk:small} <largest> ~", "the {tk:small} <largest> ~", "(<find>|take|look for|get|pick) @ (and|then|and then) (show|keep|list|print) (only|) the {tk:small} <largest> (ones|of them|)", "the {tk:small} <largest> of @", "{tk:small} <largest> of @"]),
    ("smallest", " -printf '%s %p\\n' | sort -n | head -n {tk}", True, ["<show> the {tk:small} smallest ~", "(what|which) are the {tk:small} smallest ~", "{tk:small} smallest ~"]),
    ("newest", " -printf '%T@ %p\\n' | sort -rn | head -n {tk}", True, [
        "<show> the {tk:small} (newest|most recent|most recently modified|latest) ~", "(what|which) are the {tk:small} (newest|most recent|most recently changed) ~", "{tk:small} (newest|most recent|latest) ~", "(<find>|take|look for|get|pick) @ (and|then|and then) (show|keep|list|print) (only|) the {tk:small} (newest|latest|most recent) (ones|of them|)"]),
    ("oldest", " -printf '%T@ %p\\n' | sort -n | head -n {tk}", True, ["<show> the {tk:small} oldest ~", "(what|which) are the {tk:small} oldest ~", "{tk:small} oldest ~"]),
    ("largest10", " -printf '%s %p\\n' | sort -rn | head -n 10", True, ["<show> the <largest> ~", "(what|which) are the <largest> ~", "<largest> ~", "top <largest> ~"]),
    ("newest10", " -printf '%T@ %p\\n' | sort -rn | head -n 10", True, ["<show> the (newest|most recent|most recently modified|latest) ~", "(what|which) are the (newest|most recent|latest) ~", "(newest|most recent|latest) ~"]),
    ("largest1", " -printf '%s %p\\n' | sort -rn | head -n 1", False, ["<show> the <largest> ~1", "(what|which) is the <largest> ~1", "<largest> ~1"]),
    ("newest1", " -printf '%T@ %p\\n' | sort -rn | head -n 1", False, ["<show> the (newest|most recent|most recently modified|latest) ~1", "(what|which) is the (newest|most recent|latest) ~1"]),
    ("oldest1", " -printf '%T@ %p\\n' | sort -n | head -n 1", False, ["<show> the oldest ~1", "(what|which) is the oldest ~1"]),
    ("total", " -print0 | du -ch --files0-from=- | tail -n 1", False, ["(show|print|compute) the total size of @", "how (big|large) are @ (in total|together|altogether)", "how much (disk space|space) do @ (use|take|take up)", "(<find>|take|look for|get|pick) @ (and|then|and then) (add up their sizes|sum their sizes|show their total size|show how much space they (use|take) together)", "(total|combined) size of @"]),
    ("sha", " -exec sha256sum {} +", True, ["(compute|calculate|print|show) the (sha256|sha256 checksums|sha256 hashes) of @", "(checksum|hash) @ with sha256", "(<find>|take|look for|get|pick) @ (and|then|and then) (hash them|compute their (checksums|sha256)|show their sha256 (sums|checksums))", "(sha256|checksums|sha256 checksums) of @"]),
    ("xargs", " -print0 | xargs -0 -n 1 {xp}", False, ["(run|call|execute) {xp:proc} on @@", "(run|call|execute) {xp:proc} (once for|for) each of @"]),
    ("rmdir", " -exec rm -r {} +", False, ["<delete> @ (and everything in them|with everything inside|and all their contents)", "(<find>|take|look for|get|pick) @ (and|then|and then) <delete> (them|those|them all) (with everything in them|and all they contain|recursively)"]),
    ("cpdir", " -exec cp -r -t {to} {} +", False, ["copy @ (and everything in them|with everything inside|and all their contents) (to|into) {to:path}", "(<find>|take|look for|get|pick) @ (and|then|and then) copy (them|those) (with everything in them|recursively) (to|into) {to:path}"]),
    ("du", " -exec du -sh {} +", True, ["(show|print) the disk usage of @", "how (big|large) is each of @", "(<find>|take|look for|get|pick) @ (and|then|and then) (show|print|check) (their disk usage|how big each is)"]),
]
CONSUMERS = [(i, cmd, lines, [parse(t) for t in texts]) for i, cmd, lines, texts in CONSUMERS]
FOR_DIRS = {"list", "move", "chmod", "chown", "touch", "long", "bydate", "newest", "oldest", "newest1", "oldest1", "rmdir", "cpdir", "du"}
ONLY_DIRS = {"rmdir", "cpdir", "du"}
FOR_LINKS = {"list", "delete", "long", "move"}
# A bare "files" needs one of these (a plain listing means ls).
FOR_BARE = {"largest", "largest10", "newest10", "smallest", "newest", "oldest", "largest1", "newest1", "oldest1", "loc", "total", "replace", "chmod", "chown", "sha", "tar", "touch", "trailing", "crlf", "dellines"}

# id, order, pipe stage, suffixes of a verb phrase, whole requests around a noun phrase ("#" is the noun phrase).
MODIFIERS = [
    ("match", 1, " | grep {mp}", ["but only (those|the ones|lines) (containing|with|matching) {mp:pat}", "and keep only (those|lines) (containing|with|matching) {mp:pat}", "(and|then) (filter|grep) for {mp:pat}", "(and|then) (show|keep|list|pick) only (those|the ones|lines) (with|containing|that contain|that mention|matching) {mp:pat}", "that (contain|mention|match) {mp:pat}", "and (search|look) (in it|in them|there|) for {mp:pat}"], []),
    ("exclude", 1, " | grep -v {mp}", ["but (not|without) (those|the ones|lines) (containing|with|matching) {mp:pat}", "(and|then) (filter out|exclude|leave out) (those with|lines with|) {mp:pat}", "except (those|the ones|lines) (containing|with) {mp:pat}", "(and|then) (drop|hide|skip|remove) (those|the ones|lines|all lines) (with|containing|that contain|matching) {mp:pat}"], []),
    ("field", 2, " | awk '{print ${mc}}'", ["but only the {mc:col}", "and (print|show|keep) only the {mc:col}", "and (print|show|take) just the {mc:col}"], []),
    ("upper", 3, " | tr a-z A-Z", ["in (upper case|uppercase|capitals)", "and (convert|turn|change) (it|them|the output) to (upper case|uppercase)", "(and|then) (print|show|make) (it|them|everything) (all|) in (capitals|upper case|uppercase)"], []),
    ("lower", 3, " | tr A-Z a-z", ["in (lower case|lowercase)", "and (convert|turn|change) (it|them|the output) to (lower case|lowercase)", "(and|then) (print|show|make) (it|them|everything) (all|) in (small letters|lower case|lowercase)"], []),
    ("sort", 4, " | sort", ["sorted", "sorted alphabetically", "in alphabetical order", "(and|then) sort (them|the results|the output|the lines)", "(and|then) (sort|order) (it|everything|that)", "(and|then) (put|bring) (them|it) in (alphabetical|) order", "in order", "(sort|order) (them|it) alphabetically", "(from a to z|a to z|in abc order|alphabetically)", "(and|then) (alphabetize|alphabetise|sort) (the lot|them all|what comes out)"], ["<show> the sorted #", "sort #"]),
    ("sortr", 4, " | sort -r", ["sorted in reverse", "in reverse alphabetical order", "(sorted|ordered|) from z to a", "(and|then) sort (them|the results|the output) in (reverse|descending order)", "(and|then) sort (it|them|that) (backwards|from z to a|in reverse)"], []),
    ("sortn", 4, " | sort -n", ["sorted numerically", "(sorted|ordered|) (from small to large|smallest first|from lowest to highest)", "(and|then) sort (them|the results|the output) (numerically|by number)", "(and|then) sort (it|that|them) by (value|number)"], []),
    ("unique", 4, " | sort -u", ["without (duplicates|repetitions|dupes|repeats)", "(no|but no) (duplicates|dupes|repeats)", "(only|just) the (unique|distinct|different) ones", "(but|) (each one|every one|each) (only|just) once", "(and|then) (throw|weed|kick) out (the|any) (duplicates|dupes|repeats)", "(and|then) (remove|drop|delete) (the|) duplicates", "but each only once", "(and|then) (deduplicate|dedupe) (them|the results|)", "(and|then) (show|list|print|keep) (each|every one|every line) (only|just) once", "(and|then) (only|) (keep|show) (the|) (unique|distinct) (ones|lines|values)"], ["<show> the (unique|distinct) #"]),
    ("freq", 4, " | sort | uniq -c | sort -rn", ["and count how often each (line|one|) (occurs|appears), most frequent first", "ranked by (frequency|how often they occur)", "(and|then) count (how many of each|each of them|the duplicates|each) (there are|), most (common|frequent) first"], []),
    ("shuffle", 4, " | shuf", ["in random order", "(and|then) (mix|jumble) (them|the lines|it) up", "(and|then) shuffle (them|the results|the lines)"], []),
    ("reverse", 5, " | tac", ["in reverse order", "(and|then) reverse the (order|order of the lines)", "from (last to first|bottom to top)", "(upside down|last one first|last line first)", "(and|then) (flip|turn) (them|it|the list) (over|around|upside down)"], []),
    ("first", 6, " | head -n {mk}", ["but only the first {mk:small}", "and (show|print|keep|give me) only the first {mk:small}", "(only|just) the first {mk:small} (results|lines)", "limited to {mk:small} (results|lines)", "(and|then) (take|keep|show) the first {mk:small}", "(and|then) (show|give me|print|list) (me|) (only|just) (the|) (top|first) {mk:small}", "(only|just) (the|) top {mk:small}", "(and|then) (show|take|pick|print) (the|) first {mk:small} (of them|lines|results|)", "but (stop after|at most|no more than) {mk:small}"], ["<show> the first {mk:small} #", "<show> the first {mk:small} of the #", "first {mk:small} #"]),
    ("last", 6, " | tail -n {mk}", ["but only the last {mk:small}", "and (show|print|keep|give me) only the last {mk:small}", "(only|just) the last {mk:small} (results|lines)", "(and|then) (take|keep|show) the last {mk:small}", "(and|then) (show|give me|print|take) (me|) (only|just|) the (bottom|last|final) {mk:small} (of them|lines|)"], ["<show> the last {mk:small} #", "<show> the last {mk:small} of the #", "last {mk:small} #"]),
    ("random", 6, " | shuf -n {mk}", ["and (pick|choose) {mk:small} at random"], ["(pick|choose|show) {mk:small} random #", "{mk:small} random #"]),
    ("number", 7, " | nl", ["and number (them|the lines|the results)", "(numbered|each with a number|with a number in front)", "with (numbered lines|a number before each|numbers)", "(and|then) number (each|every) (one|line|)"], []),
    ("commas", 7, " | paste -sd,", ["joined (by|with) commas", "(and|then) (glue|string) (them|the lines) together with commas", "with commas between them", "(as a|in one) comma separated (list|line)", "(and|then) join (them|the lines|the results) with commas", "(and|then) (put|print|show) (them|it) on one line (separated by|with) commas"], []),
    ("table", 7, " | column -t", ["as (a|an aligned) table", "with aligned columns", "(and|then) align the columns"], []),
    ("count", 8, " | wc -l", ["(and|then) count (them|the results|the lines)", "and tell me how many (there are|)", "but only (print|show) (the number|how many)", "(and|then) (tell me|say|show|print) (the number|how many|their number|how many there are|how many that is|how many lines that is)", "and how many are (there|they|that)", "(and|then) (tally|total) (them|those|the lines)", "but just (the count|the number|a number|how many)", "(and|then) (just|only) (give me|tell me|print) (the count|the number|how many)", "(and|then) (count|give me the number of) (how many|the lines|the matches|the entries|those|all of them)"], [
        "count #", "count all (the|) #", "how many # (are there|exist|do I have)", "how many #", "(the|) number of #", "(show|print|get|find) the number of #", "count the #", "(count|tell me|show) how many # there are"]),
    ("save", 9, " > {mf}", ["(and|then) (save|write|put) (it|them|the result|the results|the output|the list) (to|in|into) {mf:file}", "into {mf:file}", "and redirect (the output|it) to {mf:file}", "(and|then) (save|write|put|store|dump|export) (it|them|that|this|the result|the results|everything|the list) (as|to|in|into) (a file called|the file|a file named|) {mf:file}", "to (the file|a file called|) {mf:file}", "and (keep|store) (the result|the list|it) in {mf:file}", "(and|then) (make|create) {mf:file} (from|with|out of) (it|that|them)"], ["(save|write) (the list of|the|all|) # (to|in|into) {mf:file}"]),
    ("append", 9, " >> {mf}", ["(and|then) (append|add) (it|them|the result|the results|the output) to {mf:file}", "(and|then) (append|add|attach) (that|everything|the list|the lines) (to|at) (the end of|the file|) {mf:file}"], ["append (the|all|) # to {mf:file}"]),
    ("tee", 9, " | tee {mf}", ["(and|then) also (save|write) (it|them|the result|the output) (to|in) {mf:file}", "on the screen and also (in|into) {mf:file}"], []),
    ("pager", 9, " | less", ["in (a pager|less)", "(page by page|one page at a time)", "(and|then) page through (it|them|the results|the output)"], []),
    ("clip", 9, " | xclip -selection clipboard", ["(and|then) copy (it|them|the result|the output) to the clipboard", "(and|then) (put|send) (it|them|the result) (on|in|to) (the|my) clipboard"], ["copy (the|all|) # to the clipboard"]),
]
MODIFIERS = [(i, o, c, [parse(t) for t in s], [parse(t) for t in w]) for i, o, c, s, w in MODIFIERS]
