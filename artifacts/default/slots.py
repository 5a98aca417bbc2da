"""Slots: the parts of a request that the model must copy (names, paths, numbers) or translate (sizes, ages).

Each kind is a function `(rng) -> (request text, command text)`. Open kinds draw from a space far larger than
the training set (dictionary words, invented words, identifiers, digits), so that nothing is left but to copy.

What always holds: an open value belongs to exactly one side, training or held-out (`HELD` by CRC-32 of the
command text); command texts need no further quoting, except where the template says so.
What it does not do: typos (never inside a slot) and sentence structure.
"""

import base64
import re

from grammar import CLOSE, OPEN, bucket

WORDS = """account action active adapter address admin agent album alert alpha amber anchor angle answer apple april
archive arena arrow asset atlas audio audit august author autumn avatar backup badge balance banana banner barrel base basic
basket batch beacon bean bear bench beta billing bird black blade blank block blog blue board boat bonus book border bottle
branch brave bread breeze brick bridge bright broker browser brush bucket budget buffer bug bundle burst button cabin cable
cache calendar camera campaign canal candle canvas capital carbon card cargo carrot cart case castle catalog cedar cell center
chain chair channel chapter chart chat check cherry chess chrome circle city claim class clean client clock cloud cluster coach
coast code coffee coin college color column comet command comment common compass config connect console contact content contract
control cookie copper coral core corner count country course cover crane credit crystal cube current cursor custom customer cycle
daily dashboard data day deal debug decimal deck deer default delta demo deploy depot desert design desk detail device dialog
diary digest digital direct disk display doc dock domain door draft dragon drama drawer dream drift driver drum dump dust eagle
early earth east echo edge editor effect eight elastic element elm email ember empire empty engine entry epoch error estate event
example exit export extra fabric face factor falcon family farm feature feed fence fern field figure filter final finance fire fish
fixture flag flame flash fleet flight float flood floor flow flower focus folder font forest fork form format fox frame fresh friend
frog front frost fruit fuel function future galaxy game garden gate gateway gear general ghost giant glass global globe gold grade
grain grant grape graph gravel gray green grid group guard guest guide guitar habit hammer handle handler harbor hash hawk header
health heart heat helmet helper hero hidden hill history hobby holiday home honey hook horizon horse host hotel hour house hub human
ice icon idea image import inbox index info init input insect invoice iris iron island item ivory jacket january jazz jewel job
journal judge juice july jump june jungle junior kernel kettle key keyboard kit kitchen kite label lab ladder lake lamp landing laser
launch layer layout leader leaf lemon lesson letter level library license light lime limit line link lion list local lock lodge log
logger login logo loop lunch lynx machine magic magnet mail main manager mango manual map maple marble march margin market mask
master match matrix meadow media meeting member memo memory menu merge message metal meter metric micro middle migration milk mill
mint minute mirror mobile mock model module monday money monitor monkey month moon morning motor mountain mouse movie museum music
mystery native nav needle nest network news night node noise north note notebook november null number oak object ocean october office
olive onion open option orange orbit orchid order origin otter output oven owl owner oxygen package paint palace palm panda panel
paper parade parcel parent park parser partner party patch path pattern payment peach pearl pencil people pepper permit person phase
phone photo piano picture pilot pine pipe pixel pizza place plain plan planet plant plate player plot plugin pocket poem point polar
policy pond pool popular port portal post powder power preset press price prime print prism private process product profile program
project prompt proof proto proxy public pulse pump puzzle python quartz queen query queue quick quiet quote rabbit race radar radio
rain ranch random range raven raw ray reader recipe record red region release remote render repair reply report request rescue
reserve reset result retro review ribbon rice ride ring river road robin robot rocket room root rose round route router row royal
rubber ruby rule runner rural saddle safe sail salad sales salt sample sand satin sauce scale scan scene schema school science score
scout screen script search season seat secret section sector seed select senior sensor series server service session setup shadow
shape share sheet shell shield ship shirt shop shore short signal silver simple site sketch sky slate sleep slice slide small smoke
snack snow soap socket soft solar solid song sound soup source south space spark special speed sphere spice spider spirit spoon sport
spring sprite square stable stack staff stage stamp star start state static station stats status steam steel stem step stock stone
store storm story stream street string studio style sugar suite summary summer sun support surface survey swan sweet switch symbol
sync system table tablet tag tail talent tank target task taxi team temp temple tennis tent term test text theme theory thread ticket
tiger timber time timer title toast todo token tomato tool topic torch total tower town toy track trade trail train transfer travel
tree trend trial tribe trip truck trust tulip tunnel turbo turtle twin type umbrella unit update upload urban user utils valley value
vector velvet vendor vendors version video view village vine violet vision visit vital voice volume voyage wagon walnut walrus wave
weather web week wheat wheel whale white widget willow wind window wine wing winter wire wolf wood worker world yard year yellow young
zebra zone""".split()
# Words of other walks of life, whose spelling is unlike that of the words above.
EVERYDAY_WORDS = """abroad accent accident actress aerial ambulance ancient ankle anniversary apartment apology applause appointment apron aquarium architect
arithmetic armchair artist assignment astronomy athlete attic aunt bakery balcony bandage bargain baseball basement bathroom battery beauty bedroom beginner
belief bicycle biology birthday biscuit blanket blizzard blossom bookshelf borrow bottleneck boulder bracelet breakfast breath brochure brother bruise bubble
bulletin butcher butterfly cabbage cactus calculator calcium candidate carpet cathedral ceiling celebration census century ceremony certificate challenge
chaos charity cheerful cheese chemistry children chimney chocolate choir cinema citizen classroom climate clinic clothes coconut colleague college comedy
committee compliance conclusion conference confidence conscience consultant contest contractor cooking copyright corridor costume cottage cousin crossword
cucumber cupboard curriculum curtain dairy daughter deadline debt decision delivery democracy dentist department deposit dessert dictionary diet dinner
diploma disaster discount discovery disease distance divorce doctor document dolphin donation doubt dough drawing drought dwarf dyeing earnings earring
economy education elbow election elephant embassy emergency employee encounter energy engagement english envelope equipment essay ethics europe evening
evidence exam exercise exhibition expense experiment explorer eyebrow faculty failure faith fashion father fault favorite festival fever fiction
fingerprint fireplace fitness flavour flour forecast fortune fraction fragile freelance freight fridge funeral furniture gallery garage garlic
gasoline genius geography geometry ghost gift giraffe girlfriend glacier glossary goodbye gossip government graduate grammar grandma gratitude grocery growth
guilty gymnasium haircut handbook handshake happiness headache hedgehog height heritage highway history homework honeymoon horror hospital household
housing humidity hurricane hygiene hypothesis identity illness imagine immigration inception income infant inflation ingredient injury innovation
inquiry insight inspection insurance interview inventory investment invitation jealous jewelry jigsaw journey judgement juggling justice karaoke keynote
kidney kingdom kneecap knife knowledge laboratory language laptop laughter laundry lawyer leather lecture leisure length leopard lighthouse lightning lipstick
literature lizard luggage lullaby luxury magazine maintenance makeup management marathon marriage mathematics mayor meadow measurement mechanic medicine
membership mercury metabolism midnight military miracle mischief mistake mixture moisture mortgage mosquito mountain movement mushroom musician mustache
mythology nature necklace negotiation neighbour nephew nickname nightmare nutrition oatmeal obituary occasion octopus offer omelette onboarding opera
opinion orchestra organic ostrich outcome outfit outlook overview oyster pancake parliament passenger passport patient pavement payroll peanut
pedestrian pension performance perfume permission personal petition pharmacy philosophy photography physics picnic pigeon pillow pitch planning plumber poetry
poison politics portfolio portrait postcard potato poverty practice pregnancy presentation prize procedure promise pronoun proposal psychology publication
punishment puppet purchase puzzle pyramid quality quarrel quarter questionnaire quilt quota quotation racing railway rainbow raspberry reading reality receipt
reception recital recruit refund refugee rehearsal relative religion reminder renovation rental republic research reservation residence restaurant resume
retirement reunion revenue reward rhyme rhythm rival robbery romance routine rumour salary sandwich sausage saxophone scarf schedule scholarship
sculpture seafood seatbelt secretary semester seminar shampoo shoes shopping shoulder shower sibling signature sister sketchbook skill skyscraper
slogan smile smoothie society soccer sociology soldier solution souvenir spaghetti speech spelling spinach sponsor squirrel stadium stamina statement statue
stomach strategy strawberry strength stress strike student subscription suburb success suitcase sunrise surgery survivor suspect sweater swimming
syllabus sympathy symphony syndrome tailor talk tariff tattoo taxes teacher technique teenager telephone temperature tenant terrace thanks theatre therapy thesis
thought thriller thunder tongue toothpaste tournament tourist tradition tragedy training translation transport treasure treatment
triangle trophy trouble trousers tuition turkey umpire uncle uniform university upgrade utility vacation vaccine vampire vegetable vehicle
vendetta verdict victory vinegar violence virus visitor vitamin vocabulary volcano volunteer voucher waiter wallet wardrobe warranty waterfall wealth website
wedding weekend weight whisper wholesale wildlife wisdom witness woman workout workshop wrestling wrinkle writing yacht yoga yoghurt youth zodiac""".split()
# What people call the columns of a table and the keys of an object.
FIELDS = """name id age email title status type price count url tags date amount total quantity city country department salary score rating category year month product
customer user users items data results description author address phone active enabled created_at updated_at first_name last_name username role level message host port
path language size width height weight color brand region state gender birthday revenue profit cost discount stock order_id user_id customer_id product_id employee team
grade points time timestamp duration language population area currency balance invoice payment method verified""".split()
PREFIXES, SUFFIXES = "re un pre over sub inter non out mis dis up".split(), "s es ing ed er ers or ist ation ment ness ly al ity able ful less ship hood ism ive ory ward wise y".split()
COMMON_DIRS = """src lib docs test tests build dist bin assets images logs data config scripts public static vendor node_modules
target examples tools include app server client backend frontend packages modules templates views models migrations fixtures media
uploads downloads Documents Downloads Pictures Desktop Music tmp cache backup backups archive notes reports""".split()
ABSOLUTE = """/var/log /etc /tmp /usr/local /opt /home /var/www /srv /usr/share /var/lib /mnt/data /etc/nginx /usr/bin /var/tmp
/var/cache /usr/lib /mnt/backup /opt/app /srv/www /var/log/nginx""".split()
LANGUAGES = [("rust", "rs"), ("python", "py"), ("javascript", "js"), ("typescript", "ts"), ("java", "java"), ("ruby", "rb"),
             ("go", "go"), ("markdown", "md"), ("text", "txt"), ("log", "log"), ("json", "json"), ("yaml", "yaml"), ("html", "html"),
             ("css", "css"), ("shell", "sh"), ("csv", "csv"), ("xml", "xml"), ("perl", "pl"), ("php", "php"), ("pdf", "pdf"),
             ("toml", "toml"), ("sql", "sql"), ("kotlin", "kt"), ("swift", "swift"), ("haskell", "hs"), ("lua", "lua"),
             ("scala", "scala"), ("zip", "zip"), ("c", "c"), ("cpp", "cpp"), ("header", "h")]
EXTENSIONS = """rs py js ts java rb go md txt log json yaml yml html css sh csv xml pl php pdf toml sql kt swift hs lua c cpp h hpp
cc jpg jpeg png gif svg bmp webp mp3 mp4 wav flac ogg mkv avi mov zip tar gz bz2 xz 7z rar conf cfg ini env bak tmp old orig swp doc
docx xls xlsx ppt odt tex bib ipynb jsx tsx vue scss less dart ex erl clj scala r jl m mm cs fs vb asm o so a lock diff patch map pem
key crt iso img deb rpm apk jar war class wasm proto graphql tsv parquet db sqlite dat bin pyc rst""".split()
COMMON_EXTENSIONS = "txt md log py rs js json csv html css sh yaml yml toml pdf jpg png conf xml sql c cpp ts zip".split()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()
TENS = {30: "thirty", 40: "forty", 50: "fifty", 100: "a hundred"}
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
NAMES = """alice bob carol dave erin frank grace heidi ivan judy mallory nina oscar peggy rupert sybil trent victor walter root admin deploy
www-data postgres nginx ubuntu jenkins git backup ftp maria john kim lena omar priya chen sofia lucas emma noah anna tom peter paul mike sam sara sarah julia jane max ben eva jan lisa nick david guest tester support ops
mallika yuki ahmed fatima ivanov lee raj diego pierre ingrid""".split()
SERVICES = """nginx apache2 mysql postgresql redis docker ssh sshd cron mongodb rabbitmq haproxy grafana prometheus jenkins memcached
bluetooth NetworkManager ufw fail2ban postfix dovecot cups mariadb tomcat php-fpm php8.2-fpm caddy traefik elasticsearch kibana vsftpd smbd samba chronyd
systemd-resolved systemd-timesyncd firewalld libvirtd containerd kubelet etcd consul vault minio openvpn wireguard avahi-daemon zabbix-agent node_exporter gitlab-runner influxdb""".split()
PROCESSES = """firefox chrome node python python3 java nginx redis-server postgres mysqld code vim slack spotify docker dockerd sshd
gunicorn celery ruby php-fpm webpack vlc gimp steam zoom teams discord thunderbird libreoffice obs blender rsync tar make cargo rustc gcc dropbox nautilus
gnome-shell Xorg pulseaudio tmux bash zsh emacs nvim chromium signal-desktop telegram-desktop apache2 mongod postfix kworker""".split()
PACKAGES = "curl vim git htop tmux nginx jq ripgrep python3-pip build-essential ffmpeg tree wget nodejs golang imagemagick sqlite3 zsh firefox gimp vlc python3 gcc make cmake docker.io postgresql mysql-server redis apache2 php ruby openssh-server net-tools unzip zip neovim emacs fish fzf bat ncdu nmap wireshark blender inkscape ansible maven rsync cowsay neofetch screen iotop iftop mtr traceroute whois lynx tcpdump".split()
VARIABLES = "PATH HOME EDITOR LANG DEBUG NODE_ENV API_KEY DATABASE_URL PORT LOG_LEVEL JAVA_HOME GOPATH PYTHONPATH TERM SHELL".split()
VERBS = "fix add remove update improve refactor rename document test simplify handle support drop move clean up".split()
CONSONANTS, VOWELS = "bcdfghjklmnprstvwxz", "aeiou"
HELD = 10  # one open value in ten is held out


def pseudo(rng):
    """An invented lower-case word of two or three syllables."""
    word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3)))
    return word + (rng.choice(CONSONANTS) if rng.random() < 0.4 else "")


# Words of commands and requests, which are names as well.
COMMAND_WORDS = """list find sort copy move delete remove count show print make test run start stop open read write size date time head tail cut tree tar zip
file folder directory name line word column user group port docker git log commit branch push pull cat grep echo kill top sed awk curl ssh join split merge diff patch
touch link mount watch history install update build clean check search replace rename create new old latest backup archive extract process service system network disk
memory server client python node cargo rust bash shell script command help info version status main total number text data config key value user job task today
yesterday week month year hour minute second all-files my-file new-folder temp hidden empty big small last first""".split()


def letters(rng):
    """Letters and digits without sense: x7k2, qzpt, A9."""
    pool = rng.choice(["abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnopqrstuvwxyz0123456789", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"])
    return rng.choice("abcdefghijklmnopqrstuvwxyz") + "".join(rng.choice(pool) for _ in range(rng.randint(1, 9)))


def blend(rng):
    """The beginning of one word and the end of another: spelled like English, and met nowhere."""
    a, b = (rng.choice(WORDS if rng.random() < 0.5 else EVERYDAY_WORDS) for _ in range(2))
    return a[:rng.randint(2, min(6, len(a)))] + b[-rng.randint(2, min(6, len(b))):]


def derived(rng):
    """A word with another beginning or end: remaps, gardening, undocked."""
    w = rng.choice(WORDS if rng.random() < 0.6 else EVERYDAY_WORDS)
    if rng.random() < 0.25:
        w = rng.choice(PREFIXES) + w
        if rng.random() < 0.6:
            return w
    end = rng.choice(SUFFIXES)
    return (w[:-1] if w[-1] in "ey" and end[0] in VOWELS else w) + end


# What people call a file that a command wrote: words of requests as well.
RESULTS = """sorted merged combined joined cleaned clean filtered numbered reversed shuffled unique deduped renamed updated changed fixed converted copied moved split counted
uppercase lowercase upper lower output input result results out log errors stdout stderr dump listing names words lines numbers files folders users values fields entries
records matches hits total totals counts sizes dates times ids urls links emails addresses hosts ips ports packages notes todos tasks items orders prices scores grades
students customers contacts members guests photos pictures songs movies recipes expenses invoices reports temperatures measurements samples temps sales everything
nothing other another both all this that mine yours here there new old first second last previous next""".split()


def plural(w):
    if w.endswith(("s", "x", "ch", "sh")):
        return w + "es"
    return w[:-1] + "ies" if w[-1] == "y" and w[-2:-1] not in ("a", "e", "o", "u") else w + "s"


def word(rng):
    r = rng.random()
    if r < 0.05:
        return rng.choice(RESULTS)
    if r < 0.50:
        w = rng.choice(WORDS if r < 0.33 else EVERYDAY_WORDS)
        return plural(w) if rng.random() < 0.35 else w
    if r < 0.54:
        return plural(rng.choice(COMMAND_WORDS))
    if r < 0.66:
        return blend(rng)
    if r < 0.75:
        return derived(rng)
    return pseudo(rng) if r < 0.84 else rng.choice(COMMAND_WORDS) if r < 0.92 else letters(rng)


def stem(rng):
    """A lower-case name without an extension: report, sales-2023, user_index, v2data."""
    r = rng.random()
    if r < 0.45:
        return word(rng)
    if r < 0.65:
        return word(rng) + rng.choice("-_") + word(rng)
    if r < 0.80:
        return word(rng) + rng.choice(["", "-", "_"]) + str(rng.randint(1, 99 if rng.random() < 0.7 else 2030))
    if r < 0.88:
        return word(rng) + rng.choice(WORDS).capitalize()
    if r < 0.92:
        return word(rng).capitalize()
    if r < 0.96:  # long ones: final_report-v2, IMG_2041
        parts = [word(rng) for _ in range(rng.randint(2, 3))] + [rng.choice(["v2", "final", str(rng.randint(1, 2030)), f"{rng.randint(1, 12):02d}", "new", "old", "copy"])]
        return rng.choice("-_").join(parts) if rng.random() < 0.8 else rng.choice(["IMG", "DSC", "scan", "VID", "Screenshot"]) + rng.choice("_-") + str(rng.randint(1, 9999))
    return letters(rng)


def identifier(rng):
    """A word as one meets it in source code or logs."""
    r = rng.random()
    if r < 0.08:
        return rng.choice(FIELDS)
    if r < 0.35:
        return word(rng)
    if r < 0.37:
        return letters(rng)
    if r < 0.50:
        return word(rng).upper()
    if r < 0.62:
        return word(rng) + "_" + word(rng)
    if r < 0.74:
        return word(rng) + rng.choice(WORDS).capitalize()
    if r < 0.82:
        return word(rng).capitalize() + (word(rng).capitalize() if rng.random() < 0.5 else "")
    if r < 0.88:
        return rng.choice(["TODO", "FIXME", "ERROR", "WARN", "error", "warning", "main", "foo", "bar", "localhost", "null", "import",
                           "timeout", "failed", "password", "404", "500", "HACK", "debug", "INFO", "exception", "panic", "deprecated"])
    if r < 0.94:
        return word(rng) + str(rng.randint(0, 999))
    return word(rng).upper() + "_" + word(rng).upper()


def filename(rng):
    r = rng.random()
    if r < 0.04:
        return rng.choice(["Makefile", "Dockerfile", "README", "LICENSE", ".bashrc", ".env", ".gitignore", "hosts", "Cargo.toml", "README.md", "package.json",
                           "docker-compose.yml", "requirements.txt", "main.py", "index.html", "notes.txt", "todo.md", ".zshrc", "~/.bashrc", "~/.ssh/config", "/etc/hosts", "/etc/fstab", "/etc/passwd"])
    name = stem(rng) + "." + (rng.choice(EXTENSIONS) if rng.random() < 0.5 else rng.choice(COMMON_EXTENSIONS))
    if 0.04 <= r < 0.06:
        return stem(rng) + "." + rng.choice(["log.1", "tar.gz", "sql.gz", "conf.d", "min.js", "test.ts", "log.2.gz", "d.ts", f"{rng.randint(2015, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}.log"])
    if r > 0.97:
        return stem(rng)
    if r < 0.16:
        return dirname(rng) + "/" + name
    return name


def simple_dir(rng):
    return rng.choice(COMMON_DIRS) if rng.random() < 0.35 else stem(rng)


def dirname(rng):
    r = rng.random()
    if r < 0.68:
        return simple_dir(rng)
    if r < 0.81:
        return simple_dir(rng) + "/" + simple_dir(rng)
    if r < 0.84:
        return simple_dir(rng) + "/" + simple_dir(rng) + "/" + simple_dir(rng)
    if r < 0.92:
        return rng.choice(ABSOLUTE) if rng.random() < 0.5 else rng.choice(ABSOLUTE) + "/" + simple_dir(rng)
    return rng.choice(["~/", "../", "./"]) + simple_dir(rng)


def is_held(value):
    """True when an open value belongs to the held-out side."""
    return bucket(value, HELD) == 0


PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=~-]+")


def shell(value):
    """Text from a request as one shell word: bare where that is safe, else in double quotes."""
    return value if PLAIN.fullmatch(value) else f'"{value}"'


QUOTES = ["{}"] * 12 + ["'{}'", '"{}"', "`{}`"]
PATTERN_QUOTES = ["{}"] * 5 + ["'{}'"] * 3 + ['"{}"'] * 3 + ["`{}`"]


def open_value(ctx, make, quotes=QUOTES, quote=shell):
    """Draw a value of the context's side (training or held-out); return (request text, command text)."""
    rng = ctx.rng
    if ctx.tiny:  # a few values only, so that equal requests meet (generate.py --check)
        value = rng.choice(TINY.get(make, ("foo", "bar", "baz")))
        return value, quote(value)
    value = make(rng)
    while is_held(value) != ctx.held_slots:
        value = make(rng)
    forms = quotes if " " not in value else ["'{}'", '"{}"', '"{}"']
    return OPEN + rng.choice(forms).format(value) + CLOSE, quote(value)


def number(ctx, low, high, words=True):
    """A number, as digits or (small ones) as a word; only digits above 20 are ever held out."""
    rng = ctx.rng
    if ctx.tiny:
        n = str(low + rng.choice((1, 3)))
        return n, n
    if ctx.held_slots:
        picks = [n for n in range(max(low, 21), high + 1) if is_held(str(n))]
        if picks:
            n = rng.choice(picks)
            return OPEN + str(n) + CLOSE, str(n)
    top = high if low > 30 or rng.random() < 0.3 else min(high, 30)
    n = rng.choice([5, 10, 10, 20, 3, 50, 100]) if rng.random() < 0.25 else rng.randint(low, top)
    n = min(max(n, low), high)
    if words and rng.random() < 0.35 and (n <= 20 or n in TENS):
        return (NUMBERS[n] if n <= 20 else TENS[n]), str(n)
    while n > 20 and is_held(str(n)):
        n = rng.randint(low, high)
    return OPEN + str(n) + CLOSE, str(n)


def fenced(text, value=None):
    return OPEN + text + CLOSE, text if value is None else value


def phrase(rng):
    """A pattern to search for: mostly one word, at times a phrase."""
    if rng.random() < 0.14:
        return " ".join(word(rng) for _ in range(rng.randint(2, 3)))
    return identifier(rng)


def message(rng):
    """A commit message."""
    return " ".join([rng.choice(VERBS), rng.choice(["the", ""]), word(rng), rng.choice(["", word(rng)])]).replace("  ", " ").strip()


def host(rng):
    r = rng.random()
    if r < 0.3:
        return stem(rng).lower().replace("_", "-") + "." + rng.choice(["com", "org", "net", "io", "dev", "local", "internal"])
    if r < 0.5:
        return ".".join(str(rng.randint(1, 254)) for _ in range(4))
    if r < 0.75:
        return rng.choice(["web", "db", "app", "node", "server", "prod", "staging", "build", "mail", "cache"]) + str(rng.randint(1, 30))
    return rng.choice(["web", "db", "api", "git", "files", "www"]) + "." + word(rng) + "." + rng.choice(["com", "org", "net", "io"])


def url(rng):
    base = rng.choice(["https://", "https://", "http://"]) + host(rng)
    r = rng.random()
    if r > 0.9:
        return repository(rng)
    if r > 0.79:  # with a port, or with a path and no scheme, as people write them
        path = word(rng) + ("/" + word(rng) if rng.random() < 0.5 else "")
        if r > 0.85:
            return rng.choice(["http://", "http://", ""]) + rng.choice(["localhost", "localhost", dotted(rng), host(rng)]) + f":{rng.choice(KNOWN_PORTS)}/" + path
        return host(rng) + "/" + path
    return base + ("" if r < 0.2 else "/" + (filename(rng).lstrip("/~.") if r < 0.6 else word(rng) + "/" + word(rng)))


def query_url(rng):
    """An address with a question in it: https://api.shop.com/items?page=2&sort=price."""
    scheme = rng.choice(["https://", "https://", "http://", ""])
    return scheme + host(rng) + "/" + word(rng) + f"?{word(rng)}={word(rng) if rng.random() < 0.5 else rng.randint(1, 500)}" + (f"&{word(rng)}={rng.randint(1, 99)}" if rng.random() < 0.3 else "")


def json_body(rng):
    """A JSON object as one types it: {"name": "bob", "age": 31}."""
    pairs = {json_key(rng): rng.choice([f'"{word(rng)}"', f'"{word(rng)}"', str(rng.randint(0, 999)), rng.choice(["true", "false", "null"])]) for _ in range(rng.choice([1, 1, 2, 2, 3]))}
    colon, comma = rng.choice([(": ", ", "), (": ", ", "), (":", ",")])
    return "{" + comma.join(f'"{k}"{colon}{v}' for k, v in pairs.items()) + "}"


def form_body(rng):
    """Form data as one types it: user=bob&age=31."""
    return "&".join(f"{k}={word(rng) if rng.random() < 0.6 else rng.randint(0, 999)}" for k in dict.fromkeys(json_key(rng) for _ in range(rng.choice([1, 2, 2, 3]))))


def typed(make):
    """Text that a request has bare or in single quotes, and a command inside its own."""
    def draw(ctx):
        text, value = open_value(ctx, make, quotes=["{}"], quote=bare)
        return fenced(ctx.rng.choice(["{}", "{}", "'{}'", "`{}`"]).format(value), value)
    return draw


def repository(rng):
    """The address of a git repository."""
    name = stem(rng) if rng.random() < 0.7 else word(rng) + "-" + word(rng)
    where = rng.choice(["https://github.com/", "https://github.com/", "git@github.com:", "https://gitlab.com/", "https://" + host(rng) + "/", "git@" + host(rng) + ":"])
    return where + word(rng) + "/" + name + rng.choice([".git", ".git", ""])


def web_file(*extensions):
    """The address of a file with one of these extensions."""
    return lambda rng: rng.choice(["https://", "https://", "http://"]) + host(rng) + "/" + (word(rng) + "/" if rng.random() < 0.6 else "") + stem(rng) + "." + rng.choice(extensions)


def branch(rng):
    r = rng.random()
    if r < 0.2:
        return rng.choice(["main", "master", "develop", "dev", "staging", "release", "production"])
    if r < 0.6:
        return rng.choice(["feature", "fix", "bugfix", "hotfix", "chore", "release"]) + "/" + word(rng) + rng.choice(["", "-" + word(rng)])
    return word(rng) + "-" + word(rng) if r < 0.85 else word(rng)


def tag(rng):
    return ("v" if rng.random() < 0.8 else "") + ".".join(str(rng.randint(0, 12)) for _ in range(3 if rng.random() < 0.8 else 2))


def user(rng):
    return rng.choice(NAMES) if rng.random() < 0.6 else word(rng)


def ext_adjective(ctx):
    rng = ctx.rng
    if rng.random() < 0.45:
        name, ext = rng.choice(LANGUAGES)
        return name, ext
    ext = rng.choice(EXTENSIONS)
    return fenced(rng.choice(["{}", ".{}", "*.{}", "{}"]).format(ext), ext)


def ext_dotted(ctx):
    ext = ctx.rng.choice(EXTENSIONS)
    return fenced(ctx.rng.choice([".{}", ".{}", "{}"]).format(ext), ext)


def size(ctx):
    n = ctx.rng.choice([1, 2, 5, 10, 20, 50, 100, 200, 500]) if ctx.rng.random() < 0.5 else ctx.rng.randint(1, 999)
    n = int(number(ctx, 21, 999, words=False)[1]) if ctx.held_slots else n
    names, unit = ctx.rng.choice([(["MB", " MB", "M", " megabytes", "mb", " megs", " mb"], "M"), (["GB", " GB", "G", " gigabytes", "gb", " gigs"], "G"),
                                  (["KB", " KB", "K", " kilobytes", "kb", " kB"], "k")])
    return fenced(f"{n}{ctx.rng.choice(names)}", f"{n}{unit}")


def age(ctx):
    """An age in days."""
    rng = ctx.rng
    r = rng.random()
    if r < 0.6 or ctx.held_slots:
        text, n = number(ctx, 2, 365)
        return f"{text} days", n
    if r < 0.75:
        return rng.choice([("week", "7"), ("day", "1"), ("month", "30"), ("year", "365")])
    k = rng.randint(2, 6)
    text = NUMBERS[k] if rng.random() < 0.5 else str(k)
    return rng.choice([(f"{text} weeks", str(7 * k)), (f"{text} months", str(30 * k))])


def age_article(ctx):
    text, n = age(ctx)
    return (("a " + text) if text in ("week", "day", "month", "year") else text), n


def minutes(ctx):
    rng = ctx.rng
    if rng.random() < 0.6 or ctx.held_slots:
        text, n = number(ctx, 2, 90)
        return f"{text} {rng.choice(['minutes', 'minutes', 'mins'])}", n
    k = rng.randint(1, 12)
    if k == 1:
        return "hour", "60"
    return f"{NUMBERS[k] if rng.random() < 0.4 else k} hours", str(60 * k)


def hours(ctx):
    """A time in minutes, as people say it, hours first: "hour", "90 minutes", "2h", "two and a half hours"."""
    rng = ctx.rng
    r = rng.random()
    if ctx.held_slots or r < 0.35:
        text, n = number(ctx, 2, 72)
        if n == "24":
            n, text = "48", "48"
        return f"{text} {rng.choice(['hours', 'hours', 'hours', 'hrs'])}", str(60 * int(n))
    if r < 0.47:
        return "hour", "60"
    if r < 0.55:
        return rng.choice([("half hour", "30"), ("quarter of an hour", "15"), ("hour and a half", "90"), ("half day", "720"), ("quarter hour", "15")])
    if r < 0.65:
        n = rng.choice([2, 3, 4, 5, 6, 8, 10, 12, 36, 48])
        return rng.choice([fenced(f"{n}h", str(60 * n)), fenced(f"{n} h", str(60 * n)), fenced(f"{n}hrs", str(60 * n))])
    if r < 0.70:
        n = rng.randint(1, 5)
        return rng.choice([fenced(f"{n}.5 hours", str(60 * n + 30)), (f"{NUMBERS[n]} and a half hours" if n > 1 else "one and a half hours", str(60 * n + 30))])
    if r < 0.76:
        n = rng.choice([5, 10, 15, 20, 30, 45, 90])
        return rng.choice([fenced(f"{n}m", str(n)), fenced(f"{n} min", str(n)), fenced(f"{n}min", str(n))])
    text, n = number(ctx, 2, 120)
    return f"{text} {rng.choice(['minutes', 'minutes', 'mins', 'min'])}", n


def hours_article(ctx):
    text, n = hours(ctx)
    return {"hour": "an hour", "hour and a half": "an hour and a half", "half hour": "half an hour", "quarter of an hour": "a quarter of an hour", "half day": "half a day", "quarter hour": "a quarter hour"}.get(text, text), n


def device(parts):
    """A disk, or a part of one: sdb1, /dev/nvme0n1p2."""
    def draw(ctx):
        name = ctx.rng.choice(["sda", "sdb", "sdc", "sdd", "nvme0n1", "vda", "mmcblk0"])
        if parts:
            name += ("p" if name[-1].isdigit() else "") + str(ctx.rng.randint(1, 5))
        return fenced(ctx.rng.choice(["/dev/{}", "/dev/{}", "{}"]).format(name), "/dev/" + name)
    return draw


LONG = [("half year", "180"), ("fortnight", "14"), ("quarter", "90"), ("decade", "3650")]


def days(ctx):
    """An age in days, as people say it: "two years", "fortnight", "90d", "10 weeks"."""
    rng = ctx.rng
    r = rng.random()
    if ctx.held_slots or r < 0.45:
        return age(ctx)
    if r < 0.57:
        return rng.choice(LONG)
    if r < 0.72:
        n = rng.randint(2, 10)
        return f"{NUMBERS[n] if rng.random() < 0.5 else n} years", str(365 * n)
    if r < 0.80:
        n = rng.choice([3, 7, 10, 14, 30, 60, 90, 180])
        return fenced(rng.choice([f"{n}d", f"{n} d"]), str(n))
    n = rng.randint(2, 20)
    name, k = rng.choice([("weeks", 7), ("months", 30), ("wks", 7)])
    return f"{NUMBERS[n] if rng.random() < 0.5 else n} {name}", str(k * n)


def days_article(ctx):
    text, n = days(ctx)
    return {"half year": "half a year"}.get(text, "a " + text if " " not in text and text[0] not in "\x010123456789" else text), n


def any_size(ctx):
    """A size as people say it: "a gigabyte", "half a gig", "1.5 GB", "20 MiB", "three megs"."""
    rng = ctx.rng
    r = rng.random()
    if ctx.held_slots or r < 0.55:
        return size(ctx)
    if r < 0.70:
        return rng.choice([("a gigabyte", "1G"), ("a gig", "1G"), ("one gig", "1G"), ("one GB", "1G"), ("a megabyte", "1M"), ("a meg", "1M"), ("one megabyte", "1M"), ("a kilobyte", "1k"), ("one kilobyte", "1k"), ("half a gig", "512M"),
                           ("half a gigabyte", "512M"), ("a hundred megabytes", "100M"), ("a hundred megs", "100M"), ("a terabyte", "1024G"), ("a hundred MB", "100M")])
    if r < 0.78:
        n, k = rng.choice([("1.5", 1536), ("2.5", 2560), ("0.5", 512), ("3.5", 3584)])
        return rng.choice([fenced(f"{n} GB", f"{k}M"), fenced(f"{n}GB", f"{k}M"), fenced(f"{n}G", f"{k}M"), fenced(f"{n} MB", f"{k}k"), fenced(f"{n}M", f"{k}k")])
    if r < 0.88:
        n = rng.randint(2, 20)
        name, unit = rng.choice([("megabytes", "M"), ("megs", "M"), ("gigabytes", "G"), ("gigs", "G"), ("kilobytes", "k")])
        return f"{NUMBERS[n]} {name}", f"{n}{unit}"
    n = rng.randint(1, 900)
    name, unit = rng.choice([("MiB", "M"), (" MiB", "M"), ("GiB", "G"), ("KiB", "k"), (" KiB", "k"), (" Mb", "M"), (" Gb", "G"), (" kbytes", "k"), (" MByte", "M"), (" meg", "M")])
    return fenced(f"{n}{name}", f"{n}{unit}")


def column(ctx):
    n = ctx.rng.randint(1, 10 if ctx.rng.random() < 0.8 else 20)
    if n <= 10 and ctx.rng.random() < 0.6:
        return ORDINALS[n - 1] + " column" if ctx.rng.random() < 0.6 else ORDINALS[n - 1] + " field", str(n)
    return f"{ctx.rng.choice(['column', 'field', 'column number'])} {OPEN}{n}{CLOSE}", str(n)


DELIMITERS = [("commas", ","), ("a comma", ","), ("colons", ":"), ("a colon", ":"), ("semicolons", "';'"), ("a semicolon", "';'"),
              ("pipes", "'|'"), ("a pipe", "'|'"), ("dashes", "-"), ("slashes", "/"), ("spaces", "' '")]


def location(ctx):
    """A place: nothing (here), a word for here, or a preposition and a directory. Sets the slot `dir`."""
    rng = ctx.rng
    r = rng.random()
    if not ctx.held_slots:
        if r < 0.33:
            return "", "."
        if r < 0.43:
            return rng.choice(["here", "in this directory", "in the current directory", "in this folder", "in the current folder",
                               "under the current directory", "in the working directory", "below here"]), "."
        if r < 0.47:
            return rng.choice(["in my home directory", "under my home directory", "in my home folder", "in ~", "under ~"]), "~"
        if r < 0.49:
            return rng.choice(["in the parent directory", "in the parent folder"]), ".."
    text, value = open_value(ctx, dirname)
    form = rng.choice(["{}", "{}", "{}", "{}", "the {} directory", "the {} folder", "the directory {}", "the folder {}", "my {} folder", "{}/"])
    if form == "{}/" and text[1] in "'\"`":
        form = "{}"
    return rng.choice(["in", "in", "under", "inside", "within", "below", "under"]) + " " + form.format(text), value


def directory(ctx):
    text, value = open_value(ctx, dirname)
    form = ctx.rng.choice(["{}"] * 6 + ["the {} directory", "the {} folder", "the directory {}", "the folder {}"])
    return form.format(text), value


def pick(values):
    return lambda ctx: ctx.rng.choice(values)


def opened(make, **kw):
    return lambda ctx: open_value(ctx, make, **kw)


def ranged(low, high, words=True):
    return lambda ctx: number(ctx, low, high, words)


def day(rng):
    return f"{rng.randint(1995, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def integer(rng):
    return str(rng.randint(3, 99999))


def seconds(rng):
    """A moment as seconds since 1970."""
    return str(rng.randint(900_000_000, 1_900_000_000) if rng.random() < 0.7 else rng.randint(8, 19) * 10 ** 8 + rng.choice([0, rng.randint(0, 99) * 10 ** 6, rng.randint(0, 9) * 10 ** 7]))


def date(ctx):
    return open_value(ctx, day, quotes=["{}"])


def slashed(rng):
    """A date as 05/03/2024: month, day, year."""
    return f"{rng.randint(1, 12):02d}/{rng.randint(1, 28):02d}/{rng.randint(1995, 2035)}"


def decimal(rng):
    """A number with a point: 0.5, 2.75, 49.9, 1249.99."""
    whole = rng.choice([0, rng.randint(0, 9), rng.randint(0, 99), rng.randint(0, 99), rng.randint(100, 2000)])
    return f"{whole}.{rng.choice([5, 25, 75, 99, 95]) if rng.random() < 0.4 else rng.randint(1, 9) if rng.random() < 0.6 else rng.randint(11, 99)}"


def mode(ctx):
    return fenced(ctx.rng.choice(["755", "644", "600", "700", "777", "640", "664", "775", "400", "444", "750", "660", "444", "500", "555"]))


def pod(rng):
    """The name of a pod: api-7d9f8b6c5-x2k9q, web-0, mailer."""
    r = rng.random()
    letters = "bcdfghjklmnpqrstvwxz2456789"
    if r < 0.5:
        return deployment(rng) + "-" + "".join(rng.choice(letters) for _ in range(rng.randint(5, 10))) + "-" + "".join(rng.choice(letters) for _ in range(5))
    return deployment(rng) + (f"-{rng.randint(0, 9)}" if r < 0.8 else "")


def deployment(rng):
    return word(rng) + (rng.choice(["", "", "-api", "-web", "-worker", "-" + word(rng)]))


# What people call a machine of their own, in no need of a domain.
BARE_HOSTS = """server myserver raspberrypi nas homeserver vps pi prod production staging backup desktop laptop workstation gateway router devbox testbox buildbox cluster
bastion jumpbox database webserver mailserver fileserver mediaserver macbook thinkpad box cloud remote host dev gpu01 node1 hpc login01 zeus apollo titan pluto""".split()
REMOTE_DIRS = """/var/www /var/www/html /srv/www /srv/http /opt /opt/app /tmp /var/log /var/log/nginx /etc /etc/nginx /etc/nginx/sites-available /home/{u} /home/{u}/{w} /srv/{w} /data /data/{w}
/backup /backups /backups/{w} /mnt/{w} /opt/{w} /opt/{w}/{v} /usr/local/{w} /var/lib/{w} /var/www/{w} /root /root/{w} ~/{w} ~/{w} ~/{w}/{v} ~/projects ~/backups ~/uploads ~/public_html ~/www
/home/{u}/public_html /export/{w} /scratch/{u} /scratch/{w} /media/{w} /var/backups""".split()
REMOTE_FILES = """app.log error.log access.log nginx.conf backup.tar.gz backup.sql dump.sql dump.sql.gz db.sqlite3 config.yml config.json settings.py index.html .env .bashrc .vimrc results.csv data.csv
syslog auth.log authorized_keys id_ed25519.pub docker-compose.yml crontab.txt report.pdf notes.txt site.zip release.zip archive.tar.gz image.iso video.mp4 photo.jpg app.jar""".split()


def remote_dir(rng):
    """A folder as people name it on another machine: /var/www/html, ~/projects, /srv/site."""
    return rng.choice(REMOTE_DIRS).format(u=user(rng), w=stem(rng), v=stem(rng))


def remote_file(rng):
    """A file as people name it on another machine, with its folder: /var/log/nginx/error.log, ~/dump.sql."""
    name = rng.choice(REMOTE_FILES) if rng.random() < 0.35 else stem(rng) + "." + rng.choice(EXTENSIONS if rng.random() < 0.4 else COMMON_EXTENSIONS)
    return (rng.choice(["~", "~", remote_dir(rng)]) if rng.random() < 0.3 else remote_dir(rng)) + "/" + name


def target(rng):
    """user@host."""
    return user(rng) + "@" + (host(rng) if rng.random() < 0.75 else rng.choice(BARE_HOSTS) if rng.random() < 0.7 else word(rng))


def key_file(rng):
    """A private key, where people keep it: ~/.ssh/id_ed25519, aws.pem, keys/deploy."""
    name = rng.choice(["id_rsa", "id_ed25519", "id_ecdsa", "mykey", "aws", "ec2", "deploy", "server", "github", "work"]) if rng.random() < 0.4 else word(rng) + rng.choice(["", "_rsa", "_key", "-key", "_ed25519"])
    return rng.choice(["~/.ssh/", "~/.ssh/", "~/.ssh/", "", "", "keys/", "~/", "~/Downloads/", "../", "/root/.ssh/"]) + name + rng.choice(["", "", ".pem", ".pem", ".key"])


def machine(rng):
    """A host, or what one calls it at home: raspberrypi, nas, mybox."""
    r = rng.random()
    return host(rng) if r < 0.45 else rng.choice(BARE_HOSTS) if r < 0.8 else word(rng)


def spot(rng):
    """A file or folder elsewhere: user@host:path."""
    if rng.random() < 0.3:
        return (target(rng) if rng.random() < 0.85 else host(rng)) + ":" + (remote_dir(rng) if rng.random() < 0.55 else remote_file(rng))
    where = rng.choice(["/srv/", "/var/www/", "/home/", "/opt/", "/tmp/", "/data/", "/backup/", "~/", ""])
    return (target(rng) if rng.random() < 0.85 else host(rng)) + ":" + where + (simple_dir(rng) if rng.random() < 0.6 else stem(rng) + "." + rng.choice(EXTENSIONS))


def spot_said(ctx):
    """A spot; a folder is at times named with a slash at its end, which the command writes in its own way."""
    text, value = open_value(ctx, spot, quotes=["{}"])
    if not ctx.tiny and "." not in value.rsplit("/", 1)[-1].rsplit(":", 1)[-1] and value[-1] not in ":/" and ctx.rng.random() < 0.2:
        text = text[:-1] + "/" + CLOSE
    return text, value


# The ports that people name.
KNOWN_PORTS = [22, 22, 80, 80, 443, 443, 21, 25, 53, 110, 143, 222, 587, 993, 2222, 2222, 2200, 2022, 3000, 3000, 3306, 5000, 5432, 6379, 8000, 8000, 8080, 8080, 8443, 8888, 9000, 9090, 9200, 27017]


def port(ctx):
    """A port: one in three is one that people know."""
    if not ctx.tiny and ctx.rng.random() < 0.35:
        return fenced(str(ctx.rng.choice([n for n in KNOWN_PORTS if is_held(str(n)) == ctx.held_slots])))
    return number(ctx, 1024, 65535, words=False)


def absolute(rng):
    """A path from the root."""
    return rng.choice(ABSOLUTE + ["/srv/app", "/home/" + user(rng), "/usr/local/bin", "/opt/" + word(rng)]) + "/" + (
        stem(rng) if rng.random() < 0.4 else stem(rng) + "." + rng.choice(["sh", "py", "sh", "conf"]))


def dotted(rng):
    return ".".join(str(rng.randint(1, 254)) for _ in range(4))


def ending(*extensions):
    """A name with one of these extensions, at times in a folder."""
    return lambda rng: (simple_dir(rng) + "/" if rng.random() < 0.1 else "") + stem(rng) + "." + rng.choice(extensions)


def json_key(rng):
    r = rng.random()
    if r < 0.42:
        return rng.choice(FIELDS) if r < 0.32 else rng.choice(["name", "id", "age", "email", "title", "version", "status", "type", "price", "count", "url", "tags"])
    if r < 0.72:
        return word(rng)
    return word(rng) + ("_" + word(rng) if r < 0.88 else rng.choice(WORDS).capitalize())


def label(rng):
    return rng.choice(["app", "tier", "env", "role", "component", word(rng)]) + "=" + word(rng)


def clock(ctx):
    """A time of day, as the two first fields of a crontab line."""
    rng = ctx.rng
    r = rng.random()
    if r < 0.1:
        return rng.choice([("midnight", "0 0"), ("noon", "0 12")])
    hour, minute = rng.randint(0, 23), rng.choice([0, 0, 15, 30, 45, rng.randint(0, 59)])
    if r < 0.35 and 0 < hour:
        suffix = rng.choice([" am", "am"]) if hour < 12 else rng.choice([" pm", "pm"])
        return fenced(f"{(hour - 1) % 12 + 1}{suffix}", f"0 {hour}")
    return fenced(rng.choice([f"{hour}:{minute:02d}", f"{hour:02d}:{minute:02d}"]), f"{minute} {hour}")


def hhmm(ctx):
    return fenced(f"{ctx.rng.randint(0, 23):02d}:{ctx.rng.randint(0, 59):02d}")


def span(ctx):
    """A place in a film: 00:01:30."""
    return fenced(f"{ctx.rng.randint(0, 2):02d}:{ctx.rng.randint(0, 59):02d}:{ctx.rng.randint(0, 59):02d}")


def choice_of(*values):
    return lambda ctx: fenced(str(ctx.rng.choice(values)))


def mostly(values, draw):
    """Two times in three one of the usual values, else what `draw(rng)` makes."""
    return lambda ctx: fenced(str(ctx.rng.choice(values) if ctx.rng.random() < 0.66 else draw(ctx.rng)))


def nonsense(rng):
    """A word that is none: consonants and vowels in turn."""
    return "".join(rng.choice("bcdfghjklmnprstvwzbldrst") + rng.choice(["a", "e", "i", "o", "u", "oo", "ee", "y"]) for _ in range(rng.randint(1, 3))) + rng.choice(
        ["", "x", "rk", "b", "ng", "zz", "l", "mp"])


def keys(rng):
    """Fingers on a keyboard."""
    row = rng.choice(["asdfghjkl", "qwertyuiop", "zxcvbnm", "1234567890", "asdfjkl;", "abcdefghijklmnopqrstuvwxyz0123456789"])
    return "".join(rng.choice(row) for _ in range(rng.randint(4, 14))) if rng.random() < 0.8 else rng.choice("abcdefghjkzx") * rng.randint(4, 16)


ZONES = """Europe/Berlin Europe/London Europe/Paris Europe/Madrid Europe/Rome Europe/Moscow Asia/Tokyo Asia/Shanghai Asia/Kolkata Asia/Dubai
Asia/Singapore America/New_York America/Los_Angeles America/Chicago America/Sao_Paulo America/Toronto Africa/Cairo Africa/Lagos
Australia/Sydney Pacific/Auckland UTC""".split()
WEEKDAYS = [("monday", "1"), ("tuesday", "2"), ("wednesday", "3"), ("thursday", "4"), ("friday", "5"), ("saturday", "6"), ("sunday", "0")]
NAMESPACES = "default kube-system monitoring staging production prod dev test logging ingress-nginx cert-manager".split()
CRATES = "serde tokio rand clap regex anyhow thiserror rayon reqwest hyper axum itertools chrono uuid log tracing bytes".split()
PYTHON_PACKAGES = "requests flask django numpy pandas scipy matplotlib pytest black ruff mypy fastapi httpx rich click pillow".split()
NPM_PACKAGES = "react express lodash typescript eslint prettier vite webpack axios jest next vue svelte zod dayjs nodemon".split()


def often(values):
    """Mostly one of the well-known values, else a word."""
    return lambda rng: rng.choice(values) if rng.random() < 0.6 else word(rng)


# Commands that other commands run: watch, time, alias, sudo, at.
INNER = """df -h|free -m|free -h|ls -la|ls -l|ls -lh|ls|uptime|date|who|w|git status|git pull|git fetch|git log --oneline|git diff --stat|docker ps|docker ps -a|docker stats --no-stream|kubectl get pods|kubectl get nodes|
ps aux|du -sh|du -sh *|make|make test|make install|make clean|npm test|npm start|npm run build|npm install|cargo build|cargo build --release|cargo test|cargo run|sensors|nvidia-smi|ss -tlnp|ip a|ip addr|vmstat|iostat|pytest|pytest -x|
apt update|apt upgrade|dmesg|systemctl --failed|lsblk|mount|ls -ltr|ls -1|git stash list|tail /var/log/syslog|cat /proc/loadavg|netstat -an|top|htop|go build|go test ./...|yarn build|mvn package|terraform plan""".replace("\n", "").split("|")


def inner(rng):
    """A command as people write it into a sentence, options and all."""
    r = rng.random()
    if r < 0.40:
        return rng.choice(INNER)
    if r < 0.72:
        script = rng.choice(["./{}.sh", "./{}.sh", "bash {}.sh", "sh {}.sh", "python3 {}.py", "python {}.py", "node {}.js", "perl {}.pl", "./{}", "~/{}.sh", "/opt/{}.sh", "/usr/local/bin/{}"]).format(stem(rng))
        return script + "".join(" " + rng.choice([word(rng), str(rng.randint(0, 999)), "--" + word(rng), "-" + rng.choice("abcdefnrvx"), stem(rng) + "." + rng.choice(COMMON_EXTENSIONS)])
                                for _ in range(rng.choice([0, 0, 1, 1, 2])))
    tool = rng.choice("ls du df ps free cat wc tail head grep git docker kubectl npm cargo make rsync tar curl ping sort find stat lsof ip ss journalctl systemctl".split())
    options = rng.choice(["", " -" + "".join(rng.sample("abcdefhilmnprstuvx", rng.randint(1, 3))), " -" + rng.choice("nclfk") + " " + str(rng.randint(1, 60)), " --" + word(rng)])
    return tool + options + rng.choice(["", " " + stem(rng) + "." + rng.choice(COMMON_EXTENSIONS), " " + simple_dir(rng), " " + word(rng)])


def command(ctx):
    """A command to be run by another, with or without quotes around it."""
    if ctx.tiny:
        return fenced("ls -l")
    value = inner(ctx.rng)
    while is_held(value) != ctx.held_slots:
        value = inner(ctx.rng)
    return fenced(ctx.rng.choice(["{}"] * 6 + ["'{}'", '"{}"', '"{}"', "`{}`"]).format(value), value)


def spaced(rng):
    """A file name with spaces: "my old plan.txt"."""
    words = [rng.choice(["my", "the", "old", "new", "final", "copy of", "notes for", "second"])] * (rng.random() < 0.4) + [word(rng) for _ in range(rng.randint(2, 3) - (rng.random() < 0.4))]
    if len(words) < 2:
        words.append(word(rng))
    name = " ".join(w.capitalize() if rng.random() < 0.1 else w for w in words)
    return name + ("." + rng.choice(COMMON_EXTENSIONS) if rng.random() < 0.85 else "")


def bare(value):
    return value


def several(quote):
    """Two or three words: in quotes, or bare with capitals, as the names of places and people are (New York, Anna Maria Bell)."""
    def draw(ctx):
        rng = ctx.rng
        if ctx.tiny:
            return fenced("New York", quote("New York"))
        while True:
            words = [rng.choice(WORDS if rng.random() < 0.5 else EVERYDAY_WORDS) for _ in range(2 if rng.random() < 0.75 else 3)]
            capitals = rng.random() < 0.6
            value = " ".join(w.capitalize() if capitals else w for w in words)
            if is_held(value) == ctx.held_slots:
                break
        return fenced(rng.choice(["{}", "{}", '"{}"', "'{}'"] if capitals else ['"{}"', '"{}"', "'{}'"]).format(value), quote(value))
    return draw


TAR_URL, ZIP_URL = web_file("tar.gz", "tar.gz", "tgz"), web_file("zip")
CSV, JSON, SCRIPT = ending("csv"), ending("json"), ending("py")
VIDEO = ending(*["mp4", "mkv", "mov", "avi", "webm"] * 3, "flv", "wmv", "m4v", "mpg", "3gp")
AUDIO = ending(*["mp3", "wav", "flac", "ogg", "m4a"] * 3, "aac", "opus", "wma")
PICTURE = ending(*["png", "jpg", "jpeg", "webp", "gif", "bmp", "tiff"] * 3, "tif", "heic", "ppm")
TINY = {TAR_URL: ("https://example.com/a.tar.gz",), ZIP_URL: ("https://example.com/b.zip",), CSV: ("t.csv", "u.csv", "v.csv"), JSON: ("j.json", "k.json", "l.json"), SCRIPT: ("s.py", "t.py"), VIDEO: ("a.mp4", "b.mkv", "c.mov"),
        AUDIO: ("a.mp3", "b.wav", "c.ogg"), PICTURE: ("a.png", "b.jpg", "c.gif"), target: ("bob@web1", "ann@db"), remote_file: ("/srv/a.txt", "~/b.csv"), remote_dir: ("/srv/x", "~/docs"), machine: ("nas", "web1"), key_file: ("~/.ssh/a", "b.pem"), json_body: ('{"a": 1}', '{"b": "x"}'), form_body: ("a=1&b=2", "c=3"), query_url: ("https://example.com/x?a=1",), spot: ("bob@web1:/srv/x", "ann@db:y.txt"),
        filename: ("a.txt", "b.csv", "c.log"), simple_dir: ("docs", "src"), dirname: ("docs", "src", "lib"), host: ("web.example.com",),
        url: ("https://example.com/x",), repository: ("https://example.com/a/r.git", "git@example.com:a/s"), tag: ("v1.2.0",), branch: ("main", "dev"),
        day: ("2024-05-01", "2025-12-24", "2026-02-03"), integer: ("4711", "815", "31337"), decimal: ("0.5", "2.75", "49.9"), seconds: ("1700000000", "1234567890"),
        spaced: ("my plan.txt", "old notes.md"), dotted: ("10.0.0.1", "192.168.1.9"), slashed: ("05/01/2024", "12/24/2025")}


KINDS = {
    "in": location, "dir": directory, "ext": ext_adjective, "dotext": ext_dotted, "size": size, "age": age, "agea": age_article,
    "mins": minutes, "col": column, "delim": pick(DELIMITERS), "date": date, "mdate": opened(slashed, quotes=["{}"]), "dec": opened(decimal, quotes=["{}"]), "mode": mode,
    "file": opened(filename), "name": opened(simple_dir), "stem": opened(stem), "path": opened(dirname),
    "pat": opened(phrase, quotes=PATTERN_QUOTES), "word": opened(identifier, quotes=PATTERN_QUOTES),
    "rep": opened(identifier, quotes=PATTERN_QUOTES, quote=bare), "text": opened(phrase, quotes=["'{}'", '"{}"'], quote=bare),
    "n": ranged(2, 200), "small": ranged(2, 20), "line": ranged(2, 2000, words=False), "secs": ranged(2, 60),
    "port": port, "pid": ranged(100, 99999, words=False),
    "host": opened(host), "url": opened(url), "qurl": opened(query_url), "jbody": typed(json_body), "fbody": typed(form_body), "user": opened(user), "group": opened(lambda r: r.choice(["staff", "wheel", "sudo", "docker", "users", "dev", "www-data", "admin", "audio"]) if r.random() < 0.5 else word(r)),
    "branch": opened(branch), "tag": opened(tag), "remote": opened(lambda r: r.choice(["origin", "upstream", "fork", "backup"]) if r.random() < 0.6 else word(r)),
    "commit": opened(lambda r: "".join(r.choice("0123456789abcdef") for _ in range(r.choice([7, 7, 8, 10])))),
    "msg": opened(message, quotes=["'{}'", '"{}"', '"{}"'], quote=bare),
    "svc": opened(lambda r: r.choice(SERVICES) if r.random() < 0.6 else word(r)),
    "proc": opened(lambda r: r.choice(PROCESSES) if r.random() < 0.6 else word(r)),
    "pkg": opened(lambda r: r.choice(PACKAGES) if r.random() < 0.6 else word(r)),
    "var": opened(lambda r: r.choice(VARIABLES) if r.random() < 0.4 else word(r).upper() + ("_" + word(r).upper() if r.random() < 0.4 else ""), quotes=["{}"]),
    "image": opened(lambda r: r.choice(["nginx", "ubuntu", "postgres", "redis", "alpine", "python", "node", "debian", word(r)]) + (":" + str(r.randint(1, 22)) + r.choice(["", ".04", "-alpine"]) if r.random() < 0.4 else "")),
    "ctr": opened(lambda r: word(r) + r.choice(["", "-1", "_db", "-web"])),
    "pod": opened(pod, quotes=["{}"]), "dep": opened(deployment), "ns": opened(often(NAMESPACES)), "label": opened(label, quotes=["{}"]),
    "email": opened(lambda r: word(r) + "@" + host(r), quotes=["{}"]), "abs": opened(absolute),
    "target": opened(target, quotes=["{}"]), "spot": spot_said, "rfile": opened(remote_file), "rdir": opened(remote_dir), "mach": opened(machine, quotes=["{}"]), "key": opened(key_file), "ip": opened(dotted, quotes=["{}"]),
    "iface": choice_of("eth0", "eth1", "wlan0", "enp3s0", "wlp2s0", "docker0", "br0", "tun0", "lo"),
    "zone": choice_of(*ZONES), "weekday": pick(WEEKDAYS), "clock": clock, "hhmm": hhmm, "span": span,
    "dom": choice_of(*range(1, 29)), "cronmin": choice_of(2, 5, 10, 15, 20, 30), "year": choice_of(*range(1990, 2040)),
    "epoch": opened(seconds, quotes=["{}"]),
    "hex": opened(lambda r: f"{r.randint(16, 65535):x}", quotes=["{}"]),
    "b64": opened(lambda r: base64.b64encode(word(r).encode()).decode(), quotes=["{}"]),
    "jkey": opened(json_key), "csv": opened(CSV), "json": opened(JSON), "script": opened(SCRIPT),
    "leaf": opened(lambda r: stem(r) + "." + r.choice(EXTENSIONS)),
    "video": opened(VIDEO), "audio": opened(AUDIO),
    "pic": opened(PICTURE), "pext": choice_of("png", "jpg", "jpeg", "webp", "gif", "bmp"),
    "vext": choice_of(*["mp4", "mkv", "mov", "avi", "webm"] * 3, "flv", "wmv", "m4v", "mpg", "3gp"), "dim": mostly("640x480 800x600 1024x768 1280x720 1920x1080 300x300 64x64 256x256 512x512 100x100 200x150".split(), lambda r: f"{r.randint(2, 240) * 10}x{r.randint(2, 240) * 10}"),
    "w": mostly((64, 100, 150, 200, 300, 320, 480, 600, 640, 800, 1000, 1200, 1280, 1600, 1920), lambda r: r.choice([r.randint(2, 300) * 10, r.randint(16, 3000)])), "pct": mostly(range(5, 100, 5), lambda r: r.randint(1, 99)),
    "deg": mostly((45, 90, 180, 270), lambda r: r.randint(1, 359)), "crf": choice_of(*range(16, 33)),
    "ver": opened(lambda r: f"{r.randint(0, 12)}.{r.randint(0, 30)}" + (f".{r.randint(0, 20)}" if r.random() < 0.7 else ""), quotes=["{}"]),
    "rustver": choice_of("stable", "nightly", "beta", "1.80.0", "1.85.0", "1.91.0"),
    "crate": opened(often(CRATES)), "pypkg": opened(often(PYTHON_PACKAGES)), "npmpkg": opened(often(NPM_PACKAGES)),
    "repo": opened(repository, quotes=["{}"]), "tarurl": opened(TAR_URL, quotes=["{}"]), "zipurl": opened(ZIP_URL, quotes=["{}"]),
    "shurl": opened(web_file("sh"), quotes=["{}"]), "pyurl": opened(web_file("py"), quotes=["{}"]), "deburl": opened(web_file("deb"), quotes=["{}"]),
    "fileurl": opened(web_file(*COMMON_EXTENSIONS, "zip", "tar.gz", "iso", "deb"), quotes=["{}"]), "shfile": opened(lambda r: stem(r) + ".sh"),
    "nonsense": opened(nonsense, quotes=["{}"]), "keys": opened(keys, quotes=["{}"]), "number": opened(integer, quotes=["{}"]),
    "hrs": hours, "hrsa": hours_article, "days": days, "daysa": days_article, "anysize": any_size, "bytes": ranged(2, 9999, words=False), "upto": ranged(2, 90, words=False), "disk": device(False), "part": device(True),
    "cmd": command, "spaced": opened(spaced), "cn": ranged(1, 9, words=False), "times": ranged(2, 30),
    "words": several(bare), "wordsq": several(shell),
}
