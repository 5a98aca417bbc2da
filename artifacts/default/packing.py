"""From pairs to token rows: framing, packing many short sequences into rows, and seeded background producers.

What always holds: a sequence is `<|user|> request <|assistant|> command <|end|>`, never cut (the other way round, if it is to be
learned in reverse: `<|assistant|> command <|user|> request <|end|>`); labels stand on the second part and the end alone; rows depend
on (seed, worker number, batch number, share of reversed pairs) only, and are consumed in one fixed order.
"""

import os
import random
from multiprocessing import get_context

import numpy as np

ROW = 256
IGNORE = -100


class Framing:
    """Token ids of requests, commands and the frame around them."""

    def __init__(self, folder):
        from tokenizers import Tokenizer
        self.tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.pad, self.user, self.assistant, self.end = (self.tok.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"))

    def prompt(self, request):
        return [self.user] + self.tok.encode(request.strip(), add_special_tokens=False).ids + [self.assistant]

    def pairs(self, pairs, reverse=False):
        """[(request, command)] -> [(ids, length of the prompt)]; with `reverse` the command is the prompt."""
        texts = [t for pair in pairs for t in pair]
        ids = [e.ids for e in self.tok.encode_batch(texts, add_special_tokens=False)]
        if reverse:
            return [([self.assistant] + b + [self.user] + a + [self.end], len(b) + 2) for a, b in zip(ids[::2], ids[1::2])]
        return [([self.user] + a + [self.assistant] + b + [self.end], len(a) + 2) for a, b in zip(ids[::2], ids[1::2])]


def pack(sequences, rows, pad):
    """First-fit packing: returns ids, labels, seg, position as int arrays (rows, ROW), the owners (row, start, length) of what
    was placed in order, and the sequences that found no place."""
    ids = np.full((rows, ROW), pad, np.int16)
    labels = np.full((rows, ROW), IGNORE, np.int16)
    seg = np.full((rows, ROW), 1000, np.int16)
    position = np.zeros((rows, ROW), np.int16)
    used, count = [0] * rows, [0] * rows
    first, placed, left = 0, [], []
    for s in sequences:
        tokens, prompt = s
        n = len(tokens)
        for row in range(first, rows):
            if used[row] + n <= ROW:
                break
        else:
            left.append(s)
            continue
        at = used[row]
        ids[row, at:at + n] = tokens
        labels[row, at + prompt - 1:at + n - 1] = tokens[prompt:]
        seg[row, at:at + n] = count[row]
        position[row, at:at + n] = np.arange(n)
        used[row] += n
        count[row] += 1
        placed.append((row, at, n))
        while first < rows and used[first] > ROW - 16:
            first += 1
    return ids, labels, seg, position, placed, left


def directions(ids, placed, framing):
    """Where in rows the sequences stand that go from command to request: (rows, ROW), 1 there and 0 elsewhere."""
    out = np.zeros_like(ids)
    for row, at, n in placed:
        out[row, at:at + n] = ids[row, at] == framing.assistant
    return out


def framed(framing, pairs, share, rng):
    """As `Framing.pairs`, a pair the other way round with the chance `share`; in the order of the pairs."""
    back = [share > 0 and rng.random() < share for _ in pairs]
    out = {way: iter(framing.pairs([p for p, b in zip(pairs, back) if b == way], way)) for way in (False, True)}
    return [next(out[b]) for b in back]


def produce(folder, seed, worker, rows, share, queue):
    """One background producer: endless batches of fresh training pairs, `share` of them reversed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import generate
    framing = Framing(folder)
    rng, coin = random.Random(f"train-{seed}-{worker}"), random.Random(f"both-{seed}-{worker}")
    pending, batch = [], 0
    while True:
        size = rows * 6
        fresh = framed(framing, [generate.sample(rng)[:2] for _ in range(max(0, size - len(pending)))], share, coin)
        todo = pending + [s for s in fresh if len(s[0]) <= ROW]
        *arrays, placed, pending = pack(todo, rows, framing.pad)
        while sum(len(s[0]) for s in pending) == 0 and len(placed) == len(todo):  # not full yet
            more = [s for s in framed(framing, [generate.sample(rng)[:2] for _ in range(rows)], share, coin) if len(s[0]) <= ROW]
            todo += more
            *arrays, placed, pending = pack(todo, rows, framing.pad)
        queue.put(np.stack([*arrays, directions(arrays[0], placed, framing)]))
        batch += 1


class Batches:
    """Batches of `workers` producers, numbered from `offset` on, taken in turn so that the order is fixed.

    A batch is ids, labels, seg and position as `pack` makes them, and `directions`: int16 (5, rows, ROW).
    """

    def __init__(self, folder, seed, workers, rows, depth=6, offset=0, share=0.0):
        context = get_context("spawn")
        self.queues = [context.Queue(depth) for _ in range(workers)]
        self.processes = [context.Process(target=produce, args=(folder, seed, offset + i, rows, share, q), daemon=True) for i, q in enumerate(self.queues)]
        for p in self.processes:
            p.start()
        self.turn = 0

    def next(self):
        batch = self.queues[self.turn % len(self.queues)].get()
        self.turn += 1
        return batch

    def stop(self):
        for p in self.processes:
            p.terminate()
