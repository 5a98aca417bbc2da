#!/usr/bin/env python3
"""Train the tokenizer: a byte-level BPE of Qwen3's shape (NFC, Split, ByteLevel) on the generator's own text.

    python3 tokens.py --out checkpoint

Merges are learned in two stages. First inside words alone, so that a name is cut the same way after a space, a
quote or a slash: the model copies names from the request into the command, and a copy is then token by token.
Then whole frequent words take their leading space or dash ("Ġshow", "-type"), which shortens the fixed text.

What always holds: the file is an ordinary tokenizer.json; ids are 256 bytes, merges in order, then special tokens.
"""

import argparse
import json
import os
import random
import re
from collections import Counter

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import generate

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
ASCII_SPLIT = re.compile(SPLIT.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9").replace("[^\\r\\nA-Za-z0-9]?A-Za-z+", "[^\\r\\nA-Za-z0-9]?[A-Za-z]+")
                         .replace("|0-9|", "|[0-9]|"))
SPECIALS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = ("{%- for message in messages -%}{%- if loop.last -%}<|user|>{{ message['content'] | trim }}{%- endif -%}{%- endfor -%}"
                 "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}")
PAIRS = 60_000
JOINED = 330     # merges of the second stage


def byte_symbols():
    """GPT-2's map from bytes to printable characters."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    out, extra = {}, 0
    for b in range(256):
        if b in keep:
            out[b] = chr(b)
        else:
            out[b] = chr(256 + extra)
            extra += 1
    return out


def build(vocab_size):
    rng = random.Random("tokenizer")
    words, spaced = Counter(), Counter()
    for _ in range(PAIRS):
        request, command, _ = generate.sample(rng)
        for text in (request, command):
            for piece in ASCII_SPLIT.findall(text):
                core = piece[1:] if len(piece) > 1 and not piece[0].isalnum() and piece[1].isalpha() else piece.lstrip(" ")
                if core:
                    words[core] += 1
                if core and core != piece and piece[0] in " -" and len(core) == len(piece) - 1:
                    spaced[piece[0], core] += 1
    symbols = byte_symbols()
    core_size = vocab_size - len(SPECIALS) - JOINED
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=core_size, initial_alphabet=list(symbols.values()), show_progress=False)
    bpe.train_from_iterator((" ".join([w] * n) for w, n in sorted(words.items())), trainer)
    learned = json.loads(bpe.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learned["merges"]]
    known = {a + b for a, b in merges} | set(symbols.values())
    for (lead, core), _ in sorted(spaced.items(), key=lambda x: (-x[1], x[0])):
        if core in known and len(merges) < core_size - 256 + JOINED:
            symbol = "Ġ" if lead == " " else lead
            if symbol + core not in known:
                merges.append((symbol, core))
                known.add(symbol + core)
    vocab = {}
    for token in list(symbols.values()) + [a + b for a, b in merges]:
        vocab.setdefault(token, len(vocab))
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tok


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="checkpoint")
    p.add_argument("--vocab", type=int, default=2048)
    args = p.parse_args()
    os.makedirs(args.out, exist_ok=True)
    tok = build(args.vocab)
    tok.save(os.path.join(args.out, "tokenizer.json"))
    with open(os.path.join(args.out, "tokenizer_config.json"), "w") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, "eos_token": "<|end|>", "pad_token": "<|endoftext|>", "bos_token": None,
                   "add_bos_token": False, "add_prefix_space": False, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
                   "added_tokens_decoder": {str(tok.token_to_id(s)): {"content": s, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True} for s in SPECIALS}},
                  f, indent=2, ensure_ascii=False)
        f.write("\n")
    rng = random.Random(5)
    pairs = [generate.sample(rng)[:2] for _ in range(2000)]
    lengths = sorted(len(tok.encode(a).ids) + len(tok.encode(b).ids) + 3 for a, b in pairs)
    for a, b in pairs[:6]:
        print(tok.encode(a).tokens, tok.encode(b).tokens)
    print(f"vocabulary {tok.get_vocab_size()}; tokens of a pair: mean {sum(lengths) / len(lengths):.1f}, median {lengths[1000]}, 99% {lengths[1980]}, max {lengths[-1]}")


if __name__ == "__main__":
    main()
