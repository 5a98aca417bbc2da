"""The noisy channel: several commands for a request, and how well the request follows from each of them.

    python3 channel.py --self-test       checks what is here, and how both directions are framed and trained; needs PyTorch

A model that has learned both directions (`train.py --both`) first says the likeliest commands of a request (`beams`), then how likely
the request is after each of them (`scored`, with the frame the other way round). `evaluate.py --channel` draws what `measure` needs.

What always holds: what is chosen or fitted on some commands is reported on others; intervals draw whole commands again.
What it does not do: run a command.
"""

import argparse
import math
import random

import compare

WIDTH = 8                                # commands for a request
LAMBDAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)  # weights of log p(request|command) that are tried
SILENT = 0.04                            # wrong answers without a mark, of all


# ---- PyTorch ------------------------------------------------------------------------------------------------------------

def beams(net, framing, requests, width=WIDTH, most=160, rows=None):
    """For every request its likeliest commands, best first: [(ids without the end, log-probability of every token, the end's last)].

    The likeliest by the sum; no length counts for more than another. A search ends when `width` commands have ended and none that
    goes on is likelier than the last of them: log-probabilities only fall.
    """
    import torch
    import model as M
    device = net.embed_tokens.weight.device
    rows = rows or (8192 if device.type == "cuda" else 256)
    prompts = [framing.prompt(r) for r in requests]
    out = [None] * len(requests)
    by_length = {}
    for i, p in enumerate(prompts):
        by_length.setdefault(len(p), []).append(i)
    for group in by_length.values():
        for lo in range(0, len(group), max(1, rows // width)):
            some = group[lo:lo + max(1, rows // width)]
            for i, found in zip(some, _search(net, M, torch, framing.end, [prompts[i] for i in some], width, most)):
                out[i] = found
    return out


def _search(net, M, torch, end, prompts, width, most):
    """The beam search of `beams` for prompts of one length."""
    device, count = net.embed_tokens.weight.device, len(prompts)
    decoder = M.Decoder(net, count)
    for column in torch.tensor(prompts, device=device).T:
        logits = decoder.step(column)
    alive = [[((), ())] for _ in prompts]      # what goes on: (ids, log-probabilities)
    ended = [[] for _ in prompts]
    owners = list(range(count))                # the prompt of every row
    for step in range(most):
        logp = torch.log_softmax(logits.float(), -1)
        sums = torch.tensor([sum(scores) for i in dict.fromkeys(owners) for _, scores in alive[i]], device=device)
        best, index = logp.topk(min(width + 1, logp.shape[-1]), -1)   # one of them may be the end
        total, best, index = (best + sums[:, None]).tolist(), best.tolist(), index.tolist()
        came, tokens, row, following = [], [], 0, []
        for i in dict.fromkeys(owners):
            options = []
            for ids, scores in alive[i]:
                options += [(total[row][k], row, ids, scores, index[row][k], best[row][k]) for k in range(len(best[row]))]
                row += 1
            options.sort(key=lambda o: -o[0])
            alive[i] = []
            for whole, at, ids, scores, token, score in options[:2 * width]:
                if len(ended[i]) >= width and whole <= sorted((sum(s) for _, s in ended[i]), reverse=True)[width - 1]:
                    break
                if token == end or step == most - 1:
                    ended[i].append((ids if token == end else ids + (token,), scores + (score,)))
                elif len(alive[i]) < width:
                    alive[i].append((ids + (token,), scores + (score,)))
                    came.append(at)
                    tokens.append(token)
                    following.append(i)
        if not came:
            break
        order = torch.tensor(came, device=device)
        for state in decoder.state:
            for k in range(len(state)):
                state[k] = state[k].index_select(0, order)
        owners = following
        logits = decoder.step(torch.tensor(tokens, device=device))
    return [sorted(found, key=lambda f: -sum(f[1]))[:width] for found in ended]


# ---- statistics ---------------------------------------------------------------------------------------------------------

def log_sum(values):
    """The logarithm of the sum of what these are the logarithms of; minus infinity of none."""
    top = max(values, default=-math.inf)
    return top if math.isinf(top) else top + math.log(sum(math.exp(v - top) for v in values))


def marked_right(confidence, right, silent=SILENT):
    """False alarms: the part of the right answers that are marked where `silent` of all answers are wrong and not marked."""
    allowed, wrong, quiet = silent * len(right), 0, 0
    for i in sorted(range(len(right)), key=lambda i: (-confidence[i], right[i])):  # of equal ones the wrong first
        if not right[i]:
            wrong += 1
            if wrong > allowed:
                break
        else:
            quiet += 1
    return 1 - quiet / max(1, sum(right))


def area(confidence, right):
    """The chance that a right answer has more confidence than a wrong one."""
    import numpy as np
    c, r = np.asarray(confidence, float), np.asarray(right, bool)
    values, where, counts = np.unique(c, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[where]
    good = int(r.sum())
    return float((rank[r].sum() - good * (good + 1) / 2) / max(1, good * (len(r) - good)))


def halves(commands):
    """False or True for every command of a task: the same for the same one."""
    from grammar import bucket
    return [bucket("half" + c, 2) == 1 for c in commands]


def _fit(x, y):
    """Logistic regression by Newton's steps, features scaled first, a little pulled to zero: (what predicts, the loss reached)."""
    import numpy as np
    mean, scale = x.mean(0), x.std(0) + 1e-9
    z = np.c_[np.ones(len(y)), (x - mean) / scale]
    w, ridge = np.zeros(z.shape[1]), np.diag([0.0] + [1.0] * x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(z @ w, -30, 30)))
        hessian = (z * (p * (1 - p))[:, None]).T @ z + ridge + 1e-9 * np.eye(len(w))
        step = np.linalg.solve(hessian, z.T @ (p - y) + ridge @ w)
        w -= step
        if np.abs(step).max() < 1e-8:
            break
    p = np.clip(1 / (1 + np.exp(-np.clip(z @ w, -30, 30))), 1e-9, 1 - 1e-9)
    return (lambda x: np.c_[np.ones(len(x)), (x - mean) / scale] @ w), float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())


def fitted(options, right, half):
    """A confidence for every answer, of a logistic regression over its features, fitted on the other half.

    `options` are sets of features, each a row for every answer; the one that fits best on the other half is taken.
    """
    import numpy as np
    options, y, h = [np.asarray(o, float) for o in options], np.asarray(right, float), np.asarray(half, bool)
    out = np.zeros(len(y))
    for side in (False, True):
        fits = [_fit(x[h != side], y[h != side]) for x in options]
        best = min(range(len(options)), key=lambda k: fits[k][1])
        out[h == side] = fits[best][0](options[best][h == side])
    return out.tolist()


def interval(statistic, commands, draws=1000, seed=1):
    """The 90 % interval of `statistic(indices)`, commands drawn again."""
    import numpy as np
    of = {}
    for i, c in enumerate(commands):
        of.setdefault(c, []).append(i)
    groups, rng = list(of.values()), np.random.default_rng(seed)
    values = sorted(statistic([i for g in rng.integers(len(groups), size=len(groups)) for i in groups[g]]) for _ in range(draws))
    return values[int(0.05 * draws)], values[int(0.95 * draws) - 1]


class Answers:
    """The commands of a request: texts, their log-probabilities, and those of the request after each (and how many tokens that is)."""

    def __init__(self, texts, forth, lengths, back, asked):
        self.texts, self.forth, self.lengths, self.back, self.asked = texts, forth, lengths, back, asked
        forms = [compare.form(t) for t in texts]
        self.group = [forms.index(f) for f in forms]   # those that say the same have one number

    def whole(self, weight):
        return [f + weight * b for f, b in zip(self.forth, self.back)]

    def best(self, weight):
        """The number of the command with the largest log p(command) + weight * log p(request)."""
        whole = self.whole(weight)
        return max(range(len(whole)), key=lambda k: whole[k])

    def odds(self, at, weight):
        """The logarithm of the odds of what command `at` says against all else that is among the commands, within 30."""
        whole = self.whole(weight)
        mine = log_sum([w for w, g in zip(whole, self.group) if g == self.group[at]])
        return max(-30.0, min(30.0, mine - log_sum([w for w, g in zip(whole, self.group) if g != self.group[at]])))

    def lead(self, at):
        """By how much the request is likelier after command `at` than after any that says something else, within 30."""
        return max(-30.0, min(30.0, self.back[at] - max((b for b, g in zip(self.back, self.group) if g != self.group[at]), default=-math.inf)))

    def mean(self, at):
        """The mean log-probability of command `at`, its end included."""
        return self.forth[at] / self.lengths[at]


def stretched(mean):
    """A mean log-probability on a scale on which a step is a factor."""
    return -math.log(1e-5 - mean)


def features(answers, at, weight):
    """What a confidence in answer `at` may be made of, by name, for one request."""
    a = answers
    return {"mean": stretched(a.mean(at)), "back": a.back[at] / a.asked, "lead": a.lead(at), "odds": a.odds(at, weight)}


USED = (  # what is tried beside the mean: its name, the features, the weights of log p(request) in the odds
    ("log p(request) alone, a token", ("back",), (0.0,)),
    ("its lead over that of the commands that say something else", ("lead",), (0.0,)),
    ("the mean and log p(request) a token", ("mean", "back"), (0.0,)),
    ("the mean and that lead", ("mean", "lead"), (0.0,)),
    ("the mean and the odds of the answer among the beams, without the channel", ("mean", "odds"), (0.0,)),
    ("the mean and those odds with it", ("mean", "odds"), LAMBDAS[1:]),
    ("the mean and all of these", ("mean", "back", "lead", "odds"), LAMBDAS[1:]),
)


def table(answers, at, right, half, commands, refused, draws=1000):
    """Rows of (confidence, area, false alarms at SILENT, the difference to the mean's, its interval) for the answers `at`.

    A refusal is marked whatever its confidence.
    """
    def closed(confidence):
        return [-math.inf if r else c for c, r in zip(confidence, refused)]

    plain = closed([a.mean(k) for a, k in zip(answers, at)])
    rows = [("the mean log-probability alone", area(plain, right), marked_right(plain, right), 0.0, None)]
    for name, names, weights in USED:
        options = [[[features(a, k, w)[n] for n in names] for a, k in zip(answers, at)] for w in weights]
        c = closed(fitted(options, right, half))

        def more(chosen):
            r = [right[i] for i in chosen]
            return marked_right([c[i] for i in chosen], r) - marked_right([plain[i] for i in chosen], r)

        rows.append((name, area(c, right), marked_right(c, right), more(range(len(right))), interval(more, commands, draws)))
    return rows


def measure(answers, greedy, wanted, commands, refusal, draws=1000):
    """The report of `evaluate.py --channel`, as text.

    answers: the commands of every request, the greedy one among them; greedy: its number; wanted: the right command; commands: the
    task's command of every request, by which halves and intervals are made.
    """
    half, n = halves(commands), len(answers)
    forms = [compare.form(w) for w in wanted]
    good = [[compare.form(t) == f for t in a.texts] for a, f in zip(answers, forms)]
    first = [g[k] for g, k in zip(good, greedy)]
    lost = [g for g, ok in zip(good, first) if not ok]
    out = [f"{n} requests of {len(set(commands))} commands; where the greedy answer is wrong ({len(lost)}), the right one is among the four likeliest for "
           f"{sum(any(g[:4]) for g in lost)}, among all for {sum(any(g) for g in lost)}.", ""]

    def line(name, at):
        right = [g[k] for g, k in zip(good, at)]
        low, high = interval(lambda some: sum(right[i] - first[i] for i in some) / len(some), commands, draws)
        return f"| {name} | {100 * sum(right) / n:.1f} % | {100 * low:+.1f} to {100 * high:+.1f} |"

    picks = {w: [a.best(w) for a in answers] for w in LAMBDAS}
    weight = {}
    for side in (False, True):  # the smaller weight of equals
        weight[side] = max(LAMBDAS, key=lambda w: (sum(g[k] for g, k, h in zip(good, picks[w], half) if h != side), -w))
    reranked = [picks[weight[h]][i] for i, h in enumerate(half)]
    out += ["| answer | right | difference to greedy, points |", "|---|---|---|", line("greedy", greedy), line("the best beam", picks[0.0])]
    out += [line(f"log p(command) + {w} log p(request), a weight for all", picks[w]) for w in LAMBDAS[1:]]
    out += [line(f"with the weight found on the other half ({weight[False]}, {weight[True]})", reranked), ""]
    for name, at in (("the greedy answer", greedy), ("the answer weighed by the channel", reranked)):
        right = [g[k] for g, k in zip(good, at)]
        out += [f"| confidence in {name} | area | false alarms at {100 * SILENT:.0f} % silent | difference to the mean, points |", "|---|---|---|---|"]
        for label, a, marks, more, span in table(answers, at, right, half, commands, [x.texts[k] == refusal for x, k in zip(answers, at)], draws):
            out.append(f"| {label} | {a:.3f} | {100 * marks:.1f} % | " + (f"{100 * more:+.1f} ({100 * span[0]:+.1f} to {100 * span[1]:+.1f}) |" if span else "|"))
        out.append("")
    return "\n".join(out)


# ---- checks of its own ---------------------------------------------------------------------------------------------------

def _statistics():
    assert abs(log_sum([math.log(0.25), math.log(0.5)]) - math.log(0.75)) < 1e-12 and log_sum([]) == -math.inf
    # Four of five are right; 20 % silent allow the one that is wrong, 0 % mark all that is not above it.
    right, confidence = [True, True, False, True, True], [0.9, 0.8, 0.7, 0.6, 0.5]
    assert [marked_right(confidence, right, s) for s in (0.0, 0.2)] == [0.5, 0.0]
    assert marked_right([0.0] * 5, right, 0.0) == 1.0, "an answer as sure as a wrong one is marked with it"
    rng = random.Random(1)
    c, r = [rng.randrange(9) for _ in range(200)], [rng.random() < 0.7 for _ in range(200)]
    pairs = [(a > b) + (a == b) / 2 for a, x in zip(c, r) if x for b, y in zip(c, r) if not y]
    assert abs(area(c, r) - sum(pairs) / len(pairs)) < 1e-12
    # What is fitted on one half tells on the other; what means nothing is not preferred.
    commands = [f"do {i // 3}" for i in range(3000)]
    half, right = halves(commands), [rng.random() < 0.8 for _ in commands]
    assert all(half[i] == half[i - i % 3] for i in range(3000)) and 1200 < sum(half) < 1800
    tells, noise = [[x + rng.gauss(0, 1)] for x in right], [[rng.gauss(0, 1)] for _ in right]
    found = area(fitted([noise, tells], right, half), right)
    assert abs(found - area([t[0] for t in tells], right)) < 0.01 and abs(area(fitted([noise], right, half), right) - 0.5) < 0.05, found
    low, high = interval(lambda some: sum(right[i] for i in some) / len(some), commands, 200)
    assert low < sum(right) / len(right) < high < low + 0.05


def _answers():
    # Two say the same: together they are likelier than the first, and the channel turns it round.
    a = Answers(["ls -l -a x", "rm x", "ls -la x"], [math.log(0.3), math.log(0.4), math.log(0.2)], [5, 3, 4], [-9.0, -12.0, -9.5], 6)
    assert a.group[0] == a.group[2] != a.group[1]
    assert a.best(0.0) == 1 and a.best(0.3) == 0
    assert abs(a.odds(0, 0.0) - math.log(0.5 / 0.4)) < 1e-9 and a.odds(0, 0.3) > a.odds(0, 0.0) and a.odds(1, 0.0) == -a.odds(0, 0.0)
    assert (a.lead(0), a.lead(1)) == (3.0, -3.0) and Answers(["ls"], [-0.1], [2], [-3.0], 2).odds(0, 0.5) == 30.0


def _frames(folder):
    import numpy as np
    from packing import IGNORE, Framing, directions, framed, pack
    framing = Framing(folder)
    pairs = [("show the files", "ls"), ("remove notes.txt", "rm notes.txt"), ("who am I", "whoami")] * 20
    forth, back = framing.pairs(pairs), framing.pairs(pairs, True)
    assert framed(framing, pairs, 0.0, random.Random(1)) == forth and framed(framing, pairs, 1.0, random.Random(1)) == back
    mixed = framed(framing, pairs, 0.4, random.Random(1))
    assert all(m in (f, b) for m, f, b in zip(mixed, forth, back)) and 12 < sum(m == b for m, b in zip(mixed, back)) < 36
    for (ids, prompt), (other, length) in zip(forth, back):
        assert other[0] == framing.assistant and other[length - 1] == framing.user and other[-1] == ids[-1] == framing.end
        assert ids[1:prompt - 1] == other[length:-1] and ids[prompt:-1] == other[1:length - 1]
    ids, labels, seg, position, placed, left = pack(mixed, 8, framing.pad)
    assert not left
    way = directions(ids, placed, framing)
    for (tokens, prompt), (row, at, n) in zip(mixed, placed):
        assert (way[row, at:at + n] == (tokens in [b for b, _ in back])).all() and (labels[row, at:at + n] != IGNORE).sum() == n - prompt
    assert way[seg == 1000].sum() == 0 and 0 < way.sum() < np.prod(way.shape)


def _models(folder):
    import torch
    import torch.nn.functional as F
    import model as M
    from packing import Framing
    framing = Framing(folder)
    torch.manual_seed(1)
    logits, labels, back = torch.randn(2, 8, 11), torch.randint(0, 11, (2, 8)), torch.tensor([[0] * 8, [1] * 8])
    labels[:, :3] = -100
    each = [F.cross_entropy(logits[b, 3:], labels[b, 3:]) for b in (0, 1)]
    assert torch.allclose(M.directed(logits, labels, back), torch.stack(each)) and M.directed(logits, labels, back * 0)[1] == 0
    # A beam search wide enough is exact: all commands of at most two tokens out of six, by brute force.
    net = M.Model({"vocab_size": 6, **M.SMALL}).eval()
    with torch.no_grad():
        net.embed_tokens.weight *= 20
        prompt, end = [1, 2, 3], 0

        def after(ids):
            decoder = M.Decoder(net, 1)
            return torch.log_softmax([decoder.step(torch.tensor([i])) for i in prompt + ids][-1][0], -1).tolist()

        every = {(): (after([])[end],)}
        for a in range(1, 6):
            every[a,] = (after([])[a], after([a])[end])
            every.update({(a, b): (after([])[a], after([a])[b], after([a, b])[end]) for b in range(1, 6)})
        wanted = sorted(every.items(), key=lambda e: -sum(e[1]))
        class Frame:
            def prompt(self, request):
                return prompt
        Frame.end = end
        found = [f for f in beams(net, Frame(), ["", ""], 150, 4)[1] if len(f[0]) < 3]
        assert [f[0] for f in found[:12]] == [w[0] for w in wanted[:12]], (found[:12], wanted[:12])
        worst = max(abs(x - y) for f, w in zip(found[:12], wanted) for x, y in zip(f[1], w[1]))
        assert worst < 1e-4, worst
    # What a request has after a command is the same packed and token by token.
    import evaluate
    net = M.load_checkpoint(folder)
    pairs = [("show the files", "ls"), ("remove notes.txt", "rm notes.txt")]
    with torch.no_grad():
        for way in (False, True):
            for (ids, length), (_, logp) in zip(framing.pairs(pairs, way), evaluate.scored(net, framing, framing.pairs(pairs, way), rows=2)):
                decoder = M.Decoder(net, 1)
                steps = [torch.log_softmax(decoder.step(torch.tensor([i]))[0], -1) for i in ids[:-1]]
                assert max(abs(steps[k - 1][ids[k]].item() - logp[k - length]) for k in range(length, len(ids))) < 1e-3


def _training(folder):
    """A small model learns some pairs by heart, in both directions at once."""
    import torch
    import model as M
    from packing import Framing, directions, framed, pack
    framing = Framing(folder)
    pairs = [(f"{say} {name}", f"{do} {name}") for say, do in (("show", "cat"), ("remove", "rm"), ("count the lines of", "wc -l")) for name in ("notes.txt", "a.log", "src/main.rs")]
    some = framed(framing, pairs * 4, 0.5, random.Random(2))
    *arrays, placed, left = pack(some, 4, framing.pad)
    ids, labels, seg, position, back = (torch.from_numpy(x).long() for x in (*arrays, directions(arrays[0], placed, framing)))
    torch.manual_seed(3)
    net = M.Model({**M.SMALL, "hidden_size": 64, "num_hidden_layers": 4, "shared_expert_intermediate_size": 64})
    optimiser, seen = torch.optim.AdamW(net.parameters(), lr=4e-3), []
    for _ in range(40):
        h, balance = net.hidden(ids, seg, position)
        losses = M.directed(torch.nn.functional.linear(h, net.embed_tokens.weight), labels, back)
        (losses[0] + 0.2 * losses[1] + 0.001 * balance).backward()
        optimiser.step()
        optimiser.zero_grad()
        seen.append(losses.tolist())
    print("forth and back:", *(f"{a:.2f} {b:.2f};" for a, b in seen[::8] + seen[-1:]))
    assert seen[-1][0] < 0.3 * seen[0][0] and seen[-1][1] < 0.3 * seen[0][1], seen


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--self-test", action="store_true")
    p.add_argument("--data", default="checkpoint", help="folder with the tokenizer and a model")
    args = p.parse_args()
    if not args.self_test:
        p.error("evaluate.py --channel measures; here is --self-test")
    for check in (_statistics, _answers):
        check()
    for check in (_frames, _models, _training):
        check(args.data)
    print("channel.py: statistics, answers, frames, models and training are as they should be")


if __name__ == "__main__":
    main()
