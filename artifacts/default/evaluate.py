#!/usr/bin/env python3
"""Measure the default model: exact match per held-out split, `bash -n`, effect in a temporary tree, confidence.

    python3 evaluate.py --checkpoint checkpoint [--bits 8] [--activations 8] [--limit 2000]
    python3 evaluate.py --loaf ../../target/release/loaf --model default.loaf [--limit 300]
    python3 evaluate.py --checkpoint checkpoint --bits 6 --channel 3000 [--reader reverse] [--kept channel.json]

The first form runs the checkpoint with PyTorch (float32, or weights quantised and dequantised as a baker would); the
second asks the `loaf` program, one request per call. Both print a markdown row per split and a JSON line. The third measures what
several commands for a request, and the request after each of them, tell (channel.py).

What always holds: requests come from the generator with a fixed seed; nothing generated is executed except a
whitelisted set of harmless pipelines, inside a temporary directory, without network.
"""

import argparse
import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile

import generate

HERE = os.path.dirname(os.path.abspath(__file__))
SEED = "evaluation-2024"
MAX_NEW = 160
NAMES = ("slots", "phrasings", "patterns", "combinations")


@functools.lru_cache(None)
def pairs_of(split, count):
    """The fixed sample of a split (the same prefix whatever the count)."""
    rng = random.Random(f"{SEED}-{split}")
    return [generate.sample(rng, split)[:2] for _ in range(count)]


# ---- PyTorch ------------------------------------------------------------------------------------------------------------

def scored(net, framing, sequences, autocast=True, rows=64):
    """Teacher-forced: [(all tokens behind the prompt are the argmax, their log-probabilities)] of [(ids, length of the prompt)].

    A sequence longer than a row of training is taken for hopeless: -20 a token.
    """
    import torch
    from packing import IGNORE, ROW, pack
    device = net.embed_tokens.weight.device
    todo = [(i, s) for i, s in enumerate(sequences) if len(s[0]) <= ROW]
    result = [(False, [-20.0] * (len(ids) - prompt)) for ids, prompt in sequences]
    while todo:
        chunk = todo[:rows * 8]
        ids, labels, seg, position, placed, left = pack([s for _, s in chunk], rows, framing.pad)
        lost = {id(s) for s in left}
        inside = [i for i, s in chunk if id(s) not in lost]
        todo = [x for x in chunk if id(x[1]) in lost] + todo[rows * 8:]
        t = [torch.from_numpy(x).long().to(device) for x in (ids, labels, seg, position)]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), torch.autocast(device.type, torch.bfloat16, enabled=autocast and device.type == "cuda"):
            logits = net(t[0], t[2], t[3])[0].float()
        logp = torch.log_softmax(logits, -1)
        wanted = t[1] != IGNORE
        right = ((logits.argmax(-1) == t[1]) | ~wanted).cpu().numpy()
        score = logp.gather(-1, t[1].clamp(min=0)[..., None])[..., 0].cpu().numpy()
        wanted = wanted.cpu().numpy()
        for i, (row, at, n) in zip(inside, placed):
            here = wanted[row, at:at + n]
            result[i] = (bool(right[row, at:at + n].all()), score[row, at:at + n][here].tolist())
    return result


def forced(net, framing, pairs, autocast=True, rows=64):
    """Teacher-forced check of every pair: [(all command tokens are the argmax, mean log-probability)].

    Greedy decoding reproduces the reference exactly when every argmax along it is right, so one pass decides a match.
    """
    return [(right, sum(logp) / len(logp)) for right, logp in scored(net, framing, framing.pairs(pairs), autocast, rows)]


def greedy(net, framing, requests, details=False):
    """Greedy decoding with the recurrent path: [(text, mean log-probability)]; with `details` also the log-probability of every
    token and by how much it is ahead of the next best."""
    import torch
    import model as M
    device = net.embed_tokens.weight.device
    batch = 2048 if device.type == "cuda" else 64
    out = [None] * len(requests)
    order = sorted(range(len(requests)), key=lambda i: len(framing.prompt(requests[i])))
    for lo in range(0, len(order), batch):
        group = order[lo:lo + batch]
        prompts = [framing.prompt(requests[i]) for i in group]
        produced, scores, ahead, done = [[] for _ in group], [[] for _ in group], [[] for _ in group], [False] * len(group)
        decoder, step = M.Decoder(net, len(group)), 0
        tokens = torch.tensor([p[0] for p in prompts], device=device)
        while not all(done) and step < max(map(len, prompts)) + MAX_NEW:
            logp = torch.log_softmax(decoder.step(tokens).float(), -1)
            (best, second), index = logp.topk(2, -1)[0].unbind(-1), logp.argmax(-1)
            best, gap, index = best.tolist(), (best - second).tolist(), index.tolist()
            step += 1
            following = []
            for j, p in enumerate(prompts):
                if step < len(p):
                    following.append(p[step])
                    continue
                if not done[j]:
                    scores[j].append(best[j])
                    ahead[j].append(gap[j])
                    if index[j] == framing.end or len(produced[j]) >= MAX_NEW:
                        done[j] = True
                    else:
                        produced[j].append(index[j])
                following.append(index[j])
            tokens = torch.tensor(following, device=device)
        for j, i in enumerate(group):
            out[i] = (framing.tok.decode(produced[j]), sum(scores[j]) / len(scores[j])) + ((scores[j], ahead[j]) if details else ())
    return out


def brief(net, framing, count, autocast=True, back=False):
    """One line of exact-match rates for the training log; with `back` also the loss of a request's token after the command."""
    parts = []
    for split in ("train",) + NAMES:
        r = forced(net, framing, pairs_of(split, count), autocast)
        parts.append(f"{split} {100 * sum(x[0] for x in r) / len(r):.2f}%")
    if back:
        tokens = [x for _, logp in scored(net, framing, framing.pairs(pairs_of("patterns", count), True), autocast) for x in logp]
        parts.append(f"requests of patterns {-sum(tokens) / len(tokens):.4f} a token")
    return ", ".join(parts)


def misses(net, framing, count):
    """Requests that come out wrong, with what came out."""
    out = {}
    for split in NAMES:
        pairs = pairs_of(split, count)
        wrong = [p for p, r in zip(pairs, forced(net, framing, pairs, False)) if not r[0]]
        got = greedy(net, framing, [p[0] for p in wrong])
        out[split] = [{"request": a, "wanted": b, "got": g[0], "score": round(g[1], 4)} for (a, b), g in zip(wrong, got)]
    return out


def variants(request):
    """The same request said a little differently."""
    bare = request.rstrip(" .?!")
    return [request, "please " + bare[:1].lower() + bare[1:], bare if bare != request else request + ".", bare + ", thanks"]


def detail(net, framing, count, splits):
    """Every answer with its log-probabilities, for the request and its variants: material to choose when an answer is unsure."""
    out = []
    for split in splits:
        pairs = [(r, None) for r in generate.out_of_domain()] if split == "ood" else pairs_of(split, count)
        asked = [variants(a) for a, _ in pairs]
        got = greedy(net, framing, [v for vs in asked for v in vs], True)
        for n, (request, wanted) in enumerate(pairs):
            four = got[4 * n:4 * n + 4]
            out.append({"split": split, "request": request, "wanted": wanted, "got": [g[0] for g in four], "mean": [round(g[1], 7) for g in four],
                        "logp": [round(x, 6) for x in four[0][2]], "ahead": [round(x, 3) for x in four[0][3]]})
    return out


def int8_activations(bits=8, group=64):
    """Round the inputs of every linear to int8 per row and group, as the integer kernels of a CPU do."""
    import torch
    from torch.nn import functional as F
    plain = F.linear

    def linear(x, w, b=None):
        if w.shape[-1] % group == 0:
            g = x.reshape(*x.shape[:-1], -1, group)
            scale = g.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
            x = (torch.round(g / scale) * scale).reshape(x.shape)
        return plain(x, w, b)

    F.linear = linear


# ---- the loaf program ---------------------------------------------------------------------------------------------------

def ask_loaf(binary, model, requests):
    """One `loaf run` per request: [(text, mean log-probability or None)]."""
    out = []
    for n, request in enumerate(requests):
        command = [binary, "run"] + (["-m", model] if model else []) + ["--greedy", "--json", request]
        r = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if r.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: exit {r.returncode}: {r.stderr.strip()}")
        answer = json.loads(r.stdout)
        out.append((answer["text"].strip("\n"), answer.get("mean_logprob")))
        if n % 50 == 49:
            print(f"  {n + 1}/{len(requests)}", file=sys.stderr)
    return out


# ---- what a command does ------------------------------------------------------------------------------------------------

def parses(command):
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode == 0


READERS = set("""cat tac rev head tail sort uniq wc cut tr grep awk sed nl fold fmt column paste comm join cmp diff find ls basename dirname
strings od base64 md5sum sha1sum sha256sum seq echo expand stat du file shuf realpath readlink tree""".split())
WRITERS = set("cp mv mkdir touch ln rmdir gzip gunzip chmod tar zip unzip split truncate rm".split())
UNSAFE = re.compile(r"sudo|ssh|curl|wget|[`]|\$\(|/dev/|--files0|https?:|~|(^|[ '\"=])/(?![^/ ]*/[gp]?[I]?['\"])|\.\.|rm -r|-exec rm|xargs|tail -f|less|xclip|sleep|shuf|sort -R|stat|atime|-mtime|-mmin|-newer|-user|-group|ls -l|%T@|du |kill")


def runnable(command):
    """True for pipelines of harmless tools on relative paths: they may run in a temporary tree."""
    unquoted = re.sub(r"'[^']*'", "", command)
    if UNSAFE.search(command) or "system(" in command or re.search(r";|(?<!&)&(?!&)", unquoted):
        return False
    started = re.findall(r"(?:-exec\s+|<\(\s*)(\S+)", command)  # programs that find or a process substitution would start
    if any(w not in READERS | WRITERS for w in started):
        return False
    for part in re.split(r"\s(?:\||&&)\s", command):
        if part.split()[0] not in READERS | WRITERS:
            return False
    return True


LINE_WORDS = "alpha error beta foo bar warning delta 17 42 timeout main TODO".split()


def plant(folder, command, rng):
    """Make a tree in which the command has something to work on: every path it names, and a few files more."""
    words = [w.strip("'\"") for w in re.split(r"[\s:()<>]+", command)]
    named = [w for w in words if re.fullmatch(r"[\w.+-]+(/[\w.+-]+)*/?", w) and not w.startswith("-") and w not in READERS | WRITERS and w != "."]
    text = [w for w in re.findall(r"[A-Za-z0-9_]{3,}", command)]

    def fill(path, lines):
        if os.path.isdir(path) or os.path.dirname(path) and os.path.isfile(os.path.dirname(path)):
            return
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w") as f:
            for _ in range(lines):
                f.write(" ".join(rng.choice(LINE_WORDS + text) + rng.choice(["", ",", ":", "\t"]) for _ in range(rng.randint(0, 8))) + "\n")

    suffixes = re.findall(r"\*\.([A-Za-z0-9]+)", command) + ["txt", "py"]
    for w in named:
        path = os.path.join(folder, w.rstrip("/"))
        if re.search(r"\.[A-Za-z0-9]+$", w):
            if not (w.endswith((".tar.gz", ".zip", ".tar", ".gz"))):
                fill(path, rng.randint(3, 40))
        elif not os.path.exists(path) and "mkdir" not in command:
            if command.startswith(("find", "ls", "du", "tree", "grep -r", "tar", "zip", "cp", "mv")):
                os.makedirs(path, exist_ok=True)
    roots = [folder] + [os.path.join(folder, d) for d in sorted(set(named)) if os.path.isdir(os.path.join(folder, d.rstrip("/")))]
    for root in roots:
        for n in range(4):
            fill(os.path.join(root, rng.choice(["", "sub/", "sub/deep/"]) + rng.choice(text + ["one"]) + f"{n}." + rng.choice(suffixes)), rng.randint(0, 30))
        fill(os.path.join(root, ".hidden.txt"), 3)


def snapshot(folder):
    out = {}
    for base, dirs, files in os.walk(folder):
        dirs.sort()
        for name in sorted(files) + dirs:
            path = os.path.join(base, name)
            key = os.path.relpath(path, folder)
            if os.path.islink(path):
                out[key] = "-> " + os.readlink(path)
            elif os.path.isdir(path):
                out[key] = "dir"
            else:
                data = open(path, "rb").read() if not name.endswith((".gz", ".zip", ".tar")) else b"archive"
                out[key] = (oct(os.stat(path).st_mode), data)
    return out


def effect(command, seed):
    """Run in a fresh tree; what it printed and what the tree looks like after."""
    with tempfile.TemporaryDirectory() as folder:
        plant(folder, seed, random.Random(seed))
        try:
            r = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, timeout=10, stdin=subprocess.DEVNULL,
                               env={"PATH": "/usr/bin:/bin", "HOME": folder, "LC_ALL": "C"})
        except subprocess.TimeoutExpired:
            return None
        if r.returncode == 127:
            return None
        return r.returncode, r.stdout, snapshot(folder)


def execution(pairs, answers, limit):
    """Same effect as the reference, over runnable references: (same, tried)."""
    same = tried = 0
    for (request, wanted), (got, _) in zip(pairs, answers):
        if tried >= limit:
            break
        if not runnable(wanted):
            continue
        reference = effect(wanted, wanted)
        if reference is None or effect(wanted, wanted) != reference:  # tool missing or not deterministic
            continue
        tried += 1
        same += got == wanted or (runnable(got) and effect(got, wanted) == reference)
    return same, tried


def marked(answer):
    """The mean log-probability of an answer; below all others if the answer is that the model does not know."""
    return -math.inf if answer[0] == generate.REFUSAL else answer[1]


def threshold(inside, outside):
    """The mean log-probability that best tells requests of the domain from others: (threshold, flagged outside, flagged inside)."""
    best = (-math.inf, 0.0, 0.0, 0.0)
    for t in sorted(inside + outside):
        caught, wrong = sum(x < t for x in outside) / len(outside), sum(x < t for x in inside) / len(inside)
        if caught - wrong > best[0]:
            best = (caught - wrong, t, caught, wrong)
    return best[1:]


def channel_answers(net, reader, framing, pairs):
    """Material of the noisy channel for (request, command, task's command): per request the commands, the greedy one's number, and what
    log-probabilities they have (channel.Answers)."""
    import channel
    requests = [p[0] for p in pairs]
    first, found = greedy(net, framing, requests, True), channel.beams(net, framing, requests)
    out = []
    for (text, _, logp, _), some in zip(first, found):
        texts, forth, lengths = [framing.tok.decode(list(ids)) for ids, _ in some], [sum(s) for _, s in some], [len(s) for _, s in some]
        if text not in texts:
            texts, forth, lengths = texts + [text], forth + [sum(logp)], lengths + [len(logp)]
        out.append({"texts": texts, "forth": forth, "lengths": lengths, "greedy": texts.index(text)})
    back = scored(reader, framing, framing.pairs([(p[0], t) for p, o in zip(pairs, out) for t in o["texts"]], True), False)
    for p, o in zip(pairs, out):
        mine, back = back[:len(o["texts"])], back[len(o["texts"]):]
        o.update(request=p[0], wanted=p[1], task=p[2], back=[sum(x[1]) for x in mine], asked=len(mine[0][1]))
    return out


def channel_report(args):
    import channel
    if args.kept and os.path.exists(args.kept):
        with open(args.kept) as f:
            kept = json.load(f)[:args.channel]
    else:
        import torch
        import model as M
        from packing import Framing
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = False
        net, reader = (M.load_checkpoint(folder).to(device) for folder in (args.checkpoint, args.reader or args.checkpoint))
        if args.bits:
            M.quantise_(net, args.bits)
            M.quantise_(reader, args.bits)
        pairs = generate.held_out(random.Random(f"{SEED}-fresh"), args.channel)
        with torch.no_grad():
            kept = channel_answers(net, reader, Framing(args.checkpoint), pairs)
        if args.kept:
            with open(args.kept, "w") as f:
                json.dump(kept, f)
    answers = [channel.Answers(*(k[x] for x in ("texts", "forth", "lengths", "back", "asked"))) for k in kept]
    return channel.measure(answers, [k["greedy"] for k in kept], [k["wanted"] for k in kept], [k["task"] for k in kept], generate.REFUSAL)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", help="Hugging Face folder, run with PyTorch")
    p.add_argument("--bits", type=int, help="quantise the weights (affine, groups of 64) before measuring")
    p.add_argument("--activations", type=int, help="also round activations to this many bits per group of 64")
    p.add_argument("--transformers", action="store_true", help="check logits against transformers first")
    p.add_argument("--loaf", help="the loaf program")
    p.add_argument("--model", help="loaf file for --loaf (default: the built-in loaf)")
    p.add_argument("--limit", type=int, default=1000, help="requests per split")
    p.add_argument("--execute", type=int, default=200, help="at most this many executions per split")
    p.add_argument("--label", help="name of the configuration in the table")
    p.add_argument("--misses", help="write wrong answers to this JSON file")
    p.add_argument("--details", help="write all answers with their log-probabilities to this JSON file, and measure nothing")
    p.add_argument("--splits", default=",".join(NAMES + ("outside", "ood")), help="what --details asks")
    p.add_argument("--channel", type=int, metavar="COUNT", help="measure the noisy channel on so many held-out requests of fresh_* patterns, and nothing else")
    p.add_argument("--reader", help="with --channel: the checkpoint that reads requests after commands (default: the same, trained with --both)")
    p.add_argument("--kept", help="with --channel: write commands and log-probabilities to this JSON file, or report from it if it is there")
    args = p.parse_args()
    if args.channel:
        print(channel_report(args))
        return
    if not args.checkpoint and not args.loaf:
        p.error("give --checkpoint or --loaf")

    if args.checkpoint:
        import torch
        import model as M
        from packing import Framing
        device = "cuda" if torch.cuda.is_available() else "cpu"
        framing = Framing(args.checkpoint)
        net = M.load_checkpoint(args.checkpoint).to(device)
        if args.transformers:
            compare_with_transformers(args.checkpoint, net, framing)
        if args.bits:
            M.quantise_(net, args.bits)
        if args.activations:
            int8_activations(args.activations)
        if args.details:
            with open(args.details, "w") as f, torch.no_grad():
                json.dump(detail(net, framing, args.limit, args.splits.split(",")), f)
            return
        label = args.label or (f"q{args.bits}" if args.bits else "float32") + (f", int{args.activations} activations" if args.activations else "")

        def answer(requests):
            return greedy(net, framing, requests)
    else:
        label = args.label or os.path.basename(args.model or "built-in loaf")

        def answer(requests):
            return ask_loaf(args.loaf, args.model, requests)

    rows, summary, inside, wrong = [], {"label": label, "limit": args.limit}, [], {}
    for split in NAMES:
        pairs = pairs_of(split, args.limit)
        answers = answer([a for a, _ in pairs])
        hits = [g[0] == b for (_, b), g in zip(pairs, answers)]
        parsed = sum(parses(g[0]) for g in answers)
        same, tried = execution(pairs, answers, args.execute)
        wrong[split] = [{"request": a, "wanted": b, "got": g[0], "score": g[1]} for (a, b), g, h in zip(pairs, answers, hits) if not h]
        inside += [(marked(g), h) for g, h in zip(answers, hits) if g[1] is not None]
        n = len(pairs)
        rows.append(f"| {label} | {split} | {100 * sum(hits) / n:.1f} % of {n} | {100 * parsed / n:.1f} % | {same} of {tried} |")
        summary[split] = {"exact": sum(hits), "of": n, "parses": parsed, "same_effect": same, "executed": tried}
    held_out = answer([a for a, _ in pairs_of("outside", args.limit)])
    summary["refused"] = {"outside": sum(g[0] == generate.REFUSAL for g in held_out), "of": len(held_out)}
    print("| configuration | held-out split | exact match | parsed by `bash -n` | same effect when run |\n|---|---|---|---|---|")
    print("\n".join(rows))
    if inside:
        outside = [marked(g) for g in answer(generate.out_of_domain())]
        t, caught, flagged = threshold([s for s, _ in inside], outside)
        bad, good = [s for s, h in inside if not h], [s for s, h in inside if h]
        summary["unsure"] = {"threshold": round(t, 4), "out_of_domain_flagged": round(caught, 4), "in_domain_flagged": round(flagged, 4),
                             "wrong_flagged": round(sum(s < t for s in bad) / max(1, len(bad)), 4), "right_flagged": round(sum(s < t for s in good) / max(1, len(good)), 4)}
        print(f"\nUnsure below a mean log-probability of {t:.4f}: {100 * caught:.1f} % of out-of-domain requests, {100 * flagged:.1f} % of in-domain ones "
              f"({100 * summary['unsure']['right_flagged']:.1f} % of the right answers, {100 * summary['unsure']['wrong_flagged']:.1f} % of the wrong ones).")
    print(f"\nOf {len(held_out)} held-out requests outside the domain, {summary['refused']['outside']} get the answer {generate.REFUSAL!r}.")
    print("\n" + json.dumps(summary))
    if args.misses:
        with open(args.misses, "w") as f:
            json.dump(wrong, f, indent=1)


def compare_with_transformers(folder, net, framing):
    """Largest difference of logits between this code and transformers' Qwen3NextForCausalLM."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tok = AutoTokenizer.from_pretrained(folder)
    import model as M
    worst = 0.0
    for request, command in pairs_of("slots", 8):
        ids = framing.prompt(request)
        rendered = tok.apply_chat_template([{"role": "user", "content": request}], add_generation_prompt=True, return_dict=False)
        if list(rendered) != ids:
            raise SystemExit(f"chat template gives {rendered}, training used {ids}")
        ids = ids + framing.tok.encode(command, add_special_tokens=False).ids
        decoder = M.Decoder(net.cpu(), 1)
        mine = torch.stack([decoder.step(torch.tensor([i])) for i in ids], 1)
        with torch.no_grad():
            worst = max(worst, (theirs(torch.tensor([ids])).logits - mine).abs().max().item())
    print(f"largest difference of logits to transformers over 8 requests: {worst:.2e}\n")


if __name__ == "__main__":
    main()
