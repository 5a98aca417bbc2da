#!/usr/bin/env python3
"""A second reader of loaves, written from FORMAT.md with the standard library alone.

usage: second_reader.py FILE...

Checks structure and every hash of each file and prints one JSON object per file: the artifact id, the root of every
section, the tensors, counts of the plan, and of every weight in a block format the SHA-256 of its numbers (f32, +0 for -0).
Any rule that does not hold is an error in one line, and exit code 1.
"""

import hashlib
import json
import math
import struct
import sys

LEAF = 1 << 22
KINDS = {1: "weights", 2: "plan", 3: "manifest", 4: "tokenizer", 5: "chat", 6: "golden", 7: "graphs",
         8: "tokenizer_source", 9: "hashes"}
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I8": 1, "U8": 1}


class Refused(Exception):
    """A rule of the format does not hold."""


def need(holds, what):
    if not holds:
        raise Refused(what)


def sha(data):
    return hashlib.sha256(data).digest()


def align(x, a):
    return (x + a - 1) // a * a


# The hash tree, FORMAT.md section 6: the recursive definition, word for word.

def root(leaves):
    if not leaves:
        return sha(b"")
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return sha(b"\x01" + root(leaves[:k]) + root(leaves[k:]))


def leaf_hashes(data):
    return [sha(b"\x00" + data[at:at + LEAF]) for at in range(0, len(data), LEAF)]


# The header, section 2.

def string(text):
    """A string as the canonical JSON spells it."""
    out = ['"']
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    for c in text:
        out.append(short.get(c) or ("\\u%04x" % ord(c) if ord(c) < 32 else c))
    return "".join(out) + '"'


def read_header(text):
    tensors = json.loads(text.decode("utf-8"), object_pairs_hook=list)
    need(tensors[:1] == [("__metadata__", [("format", "pt")])], "header: metadata")
    entries, canonical = [], ['{"__metadata__":{"format":"pt"}']
    for name, fields in tensors[1:]:
        need([k for k, _ in fields] == ["dtype", "shape", "data_offsets"], "header: keys of " + name)
        dtype, shape, (begin, end) = (v for _, v in fields)
        need(all(type(n) is int and n >= 0 for n in shape + [begin, end]), "header: numbers of " + name)
        size = SIZES[dtype]
        for n in shape:
            size *= n
        need(len(shape) <= 8 and end - begin == size, "header: length of " + name)
        entries.append((name, dtype, shape, begin, end))
        numbers = ",".join(map(str, shape))
        canonical.append('%s:{"dtype":"%s","shape":[%s],"data_offsets":[%d,%d]}' % (string(name), dtype, numbers, begin, end))
    need(len({e[0] for e in entries}) == len(entries) and 1 <= len(entries) <= 1 << 20, "header: names")
    body = ",".join(canonical).encode("utf-8") + b"}"
    need(body.ljust(align(8 + len(body), 16384) - 8, b" ") == text, "header: canonical form")
    return entries


# The head, section 3.

def read_head(head, file_len, n):
    need(head[:8] == b"loafhead", "head: magic")
    major, minor, length, required, _optional, total, json_len, data_len, count, leaf_log2 = \
        struct.unpack_from("<HHIQQQQQII", head, 8)
    need(major == 2, "head: version")
    need(sha(head[:2016]) == head[2016:], "head: artifact id")
    need(required == 0, "head: required features")
    need((length, leaf_log2) == (2048, 22) and count <= 16, "head: constants")
    need((total, json_len, data_len) == (file_len, n, file_len - 8 - n), "head: lengths")
    need(minor > 0 or not any(head[96 + 64 * count:2016]), "head: unused bytes")
    sections, end = [], 2048
    for i in range(count):
        kind, flags, offset, length, alignment, zero = struct.unpack_from("<IIQQII", head, 96 + 64 * i)
        at = "section %d: " % kind
        need(kind not in [s["kind"] for s in sections], at + "twice")
        need(kind in KINDS or flags & 1, at + "unknown and not optional")
        need(minor > 0 or (flags < 2 and zero == 0), at + "flags")
        need(alignment & (alignment - 1) == 0 and (16384 if kind == 1 else 64 if kind in KINDS else 1) <= alignment <= 16384,
             at + "alignment")
        need(offset == align(end, alignment), at + "offset")
        end = offset + length
        need(end <= data_len, at + "end")
        sections.append({"kind": kind, "offset": offset, "len": length, "root": head[128 + 64 * i:160 + 64 * i]})
    need(end == data_len, "head: end of the last section")
    need({1, 9} <= {s["kind"] for s in sections}, "head: weights and hashes")
    return sections


def agree(entries, sections, data):
    """Header and table name the same bytes, and padding is zero."""
    weights = next(s for s in sections if s["kind"] == 1)
    rest, cursor, pads, spans = [s for s in sections if s["kind"] != 1], 0, 0, []
    for i, (name, dtype, shape, begin, end) in enumerate(entries):
        need(begin == cursor and end <= len(data), "tensor %s: place" % name)
        cursor = end
        own = name.startswith("loaf.")
        need(not own or (dtype == "U8" and shape == [end - begin]), "tensor %s: type" % name)
        need((i == 0) == (name == "loaf.head"), "tensor %s: order" % name)
        if i == 0:
            need(end == 2048, "loaf.head: length")
        elif name.startswith("loaf.pad."):
            need(name == "loaf.pad.%d" % pads and 0 < end - begin < 16384, "tensor %s: padding" % name)
            need(not entries[i - 1][0].startswith("loaf.pad."), "tensor %s: touches another" % name)
            need(not any(data[begin:end]), "tensor %s: not zero" % name)
            pads += 1
        elif own:
            need(rest, "tensor %s: no such section" % name)
            section = rest.pop(0)
            need((begin, end - begin) == (section["offset"], section["len"]), "tensor %s: span" % name)
            need(name == "loaf." + KINDS.get(section["kind"], name[5:]), "tensor %s: name" % name)
        else:
            need(begin % 64 == 0 and end > begin, "tensor %s: span" % name)
            spans.append((begin, end))
    need(cursor == len(data) and not rest, "header: end")
    first, last = (spans[0][0], spans[-1][1]) if spans else (weights["offset"], weights["offset"])
    need((first, last) == (weights["offset"], weights["offset"] + weights["len"]), "weights: span")


def check_hashes(sections, data):
    leaves = []
    for s in sections:
        own = leaf_hashes(data[s["offset"]:s["offset"] + s["len"]])
        need(root(own) == s["root"], "section %d: root" % s["kind"])
        leaves += own if s["kind"] != 9 else []
    tree = next(s for s in sections if s["kind"] == 9)
    need(data[tree["offset"]:tree["offset"] + tree["len"]] == b"".join(leaves), "hashes: leaves")


# The plan: bincode 2, standard configuration.

class Bincode:
    """Variable-length integers, little-endian; sequences and strings after their length."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        need(self.at + n <= len(self.data), "plan: cut off")
        self.at += n
        return self.data[self.at - n:self.at]

    def u(self):
        first = self.take(1)[0]
        width = {251: 2, 252: 4, 253: 8}.get(first)
        need(width or first < 251, "plan: integer")
        return int.from_bytes(self.take(width), "little") if width else first

    def us(self, names):
        return {name: self.u() for name in names.split()}

    def list(self, item):
        return [item() for _ in range(self.u())]


def read_plan(data):
    b = Bincode(data)

    def state():
        name = b.take(b.u()).decode("utf-8")
        return {"name": name, **b.us("kind offset bytes heads row_bytes")}

    def template():
        return {**b.us("phase max_rows positions step"), "words": b.list(b.u)}

    plan = b.us("context vocab hidden weight_bytes cache_bytes recurrent_bytes arena_bytes")
    plan["io"] = b.us("ids select hidden logits bytes")
    plan["states"], plan["templates"] = b.list(state), b.list(template)
    need(b.at == len(data), "plan: trailing bytes")
    return plan


def snapshot(plan, position):
    """The ranges, as region, offset and length, that hold a sequence at a position."""
    ranges = []
    for s in plan["states"]:
        if s["kind"] == 1:
            ranges.append([1, s["offset"], s["bytes"]])
            continue
        for h in range(s["heads"]):
            start = s["offset"] + h * plan["context"] * s["row_bytes"]
            ranges.append([0, start, position * s["row_bytes"]])
    return ranges


def row_words(words):
    """Where the row counts stand: the first attribute of each record, which is `kind | operands << 8 |
    attributes << 16`, three words per operand, one per attribute. They are 0 in a template."""
    at, rows = 0, []
    while at < len(words):
        operands, attributes = words[at] >> 8 & 255, words[at] >> 16 & 255
        need(words[at] >> 24 == 0 and attributes > 0, "plan: record at word %d" % at)
        rows.append(at + 1 + 3 * operands)
        at += 1 + 3 * operands + attributes
    need(at == len(words), "plan: the last record is cut off")
    need(not any(words[i] for i in rows), "plan: a row count")
    return rows


# Experts, section 13: records that the manifest describes, and that operands of the plan must be planes of.

def planes_of(text, inputs):
    """The planes of a row of a format: name, type, elements."""
    floats = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
    blocks = {"mxfp4": (8, 32, 2 | 4 << 8 | 32 << 16 | 5 << 24), "nvfp4": (8, 16, 3 | 4 << 8 | 16 << 16 | 5 << 24),
              "mxfp8": (4, 32, 4 | 8 << 8 | 32 << 16 | 5 << 24)}
    if text in floats:
        return list(floats).index(text) << 24, [("weight", floats[text], inputs)]
    if text in blocks:
        codes, group, code = blocks[text]
        need(inputs % group == 0, "experts: groups of " + text)
        return code, [("weight", "U32", inputs // codes), ("scales", "U8", inputs // group)]
    width, params = text.split("/")
    bits, group = (int(n) for n in width.removeprefix("q").split("g"))
    need(inputs % group == 0 and text == "q%dg%d/%s" % (bits, group, params), "experts: format " + text)
    shared = inputs // group
    return (1 | bits << 8 | group << 16 | list(floats).index(params) << 24,
            [("weight", "U32", inputs * bits // 32), ("scales", floats[params], shared), ("biases", floats[params], shared)])


def read_experts(manifest, entries, data):
    """Every plane: name, type, shape, data offset of the first expert's, bytes from expert to expert; and its format."""
    tensors, planes = {e[0]: e for e in entries}, []
    for described in manifest.get("experts", []):
        name, experts, end, gaps, record = described["tensor"], described["experts"], 0, [], described["record_bytes"]
        need(name in tensors and tensors[name][1:3] == ("U8", [experts, record]), "experts %s: tensor" % name)
        first = tensors[name][3]
        for m in described["matrices"]:
            code, rows = planes_of(m["format"], m["inputs"])
            for i, (suffix, dtype, elements) in enumerate(rows):
                begin = align(end, 64)
                gaps.append((end, begin))
                end = begin + m["outputs"] * elements * SIZES[dtype]
                plane = m["name"] if i == 0 else m["name"].removesuffix("weight") + suffix
                planes.append(([plane, dtype, [experts, m["outputs"], elements], first + begin, record], code))
        gaps.append((end, align(end, 64)))
        need(align(end, 64) == record, "experts %s: record" % name)
        for at in range(first, first + experts * record, record):
            need(not any(any(data[at + a:at + b]) for a, b in gaps), "experts %s: padding" % name)
    return planes


EXPERT_OPS = {17: 3, 18: 5}  # expert_linear_dense, expert_linear_quant: where the planes of the weight stand among the operands


def check_expert_operands(plan, planes):
    by_offset = {p[0][3]: p for p in planes}
    for words in (t["words"] for t in plan["templates"]):
        at = 0
        while at < len(words):
            op, operands = words[at] & 255, words[at] >> 8 & 255
            attributes = words[at + 1 + 3 * operands:][:words[at] >> 16 & 255]
            for i in range(EXPERT_OPS[op], EXPERT_OPS[op] + 4) if op in EXPERT_OPS else ():
                head, offset, row_stride = words[at + 1 + 3 * i:at + 4 + 3 * i]
                if head & 255 == 0:
                    continue
                need(offset in by_offset, "experts: an operand at %d" % offset)
                (_, dtype, shape, _, record), code = by_offset[offset]
                size = SIZES[dtype]
                need((head >> 32, row_stride * size, code) == (shape[2], record, attributes[5])
                     and shape[:2] == [attributes[2], attributes[4]], "experts: strides of an operand at %d" % offset)
            at += 1 + 3 * operands + len(attributes)


# The tree over all concrete graphs, and the section that records it.

def words64(*values):
    return struct.pack("<%dQ" % len(values), *values)


def template_root(template):
    """Hashes every graph that is a leaf; returns how many there are, and the root over them."""
    words = template["words"]
    skeleton = sha(b"\x02" + words64(len(words), *words))
    leaves = []
    for p in range(0, template["positions"], template["step"]):
        n = min(template["max_rows"], template["positions"] - p)
        leaves.append(sha(b"\x00" + skeleton + words64(p, n)))
    return len(leaves), root(leaves)


def graphs_section(plan):
    """The section that the plan's graphs must have."""
    records = []
    for t in plan["templates"]:
        count, top = template_root(t)
        records.append(struct.pack("<IIIIQ", t["phase"], t["max_rows"], t["positions"], t["step"], count) + top)
    return words64(len(records)) + root([sha(b"\x00" + r) for r in records]) + b"".join(records)


# Block formats, section 13: name: bits, group, words of small integers, offset of these, offset of codes.

BLOCKS = {"q4_0": (4, 32, 0, 0, 8), "q5_0": (5, 32, 0, 0, 16), "q8_0": (8, 32, 0, 0, 128), "iq4_nl": (4, 32, 0, 0, 0),
          "q2_k": (2, 16, 4, 0, 0), "q3_k": (3, 16, 3, 32, 4), "q4_k": (4, 32, 3, 0, 0), "q5_k": (5, 32, 3, 0, 0),
          "q6_k": (6, 16, 4, 128, 32), "iq4_xs": (4, 32, 2, 32, 0), "tq2_0": (2, 128, 0, 0, 1),
          "nvfp4_scaled": (4, 16, 0, 0, 0)}
E2M1_DOUBLED = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
TABLE = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def block_format(planes):
    """The format that planes of these names, types and row lengths can only have, and its row's weights."""
    words = planes["weight"][1]
    scales, supers = planes.get("scales"), planes.get("supers")
    if "biases" in planes:
        return None
    for name, (bits, _, small, _, _) in BLOCKS.items():
        inputs, rest = divmod(words * 32, bits)
        d = ("F16", inputs // 256 * (2 if name in ("q2_k", "q4_k", "q5_k") else 1))
        if rest or inputs % (256 if small or name == "tq2_0" else 32):
            continue
        elif name == "nvfp4_scaled":
            fits = scales == ("U8", inputs // 16) and planes.get("factors") == ("F32", 1) and inputs % 64 == 0
        elif name == "iq4_nl":
            fits = planes.get("table_scales") == ("F16", inputs // 32)
        elif name == "tq2_0":
            fits = scales is None and supers == d
        elif small:
            fits = scales == ("U32", inputs // 256 * small) and supers == d
        else:
            fits = scales == ("F16", inputs // 32) and supers is None
        if fits:
            return name, inputs
    return None


def small_integers(name, b, j):
    if name in ("q4_k", "q5_k"):
        if j < 4:
            return b[j] & 63, b[4 + j] & 63
        return b[4 + j] & 15 | b[j - 4] >> 6 << 4, b[4 + j] >> 4 | b[j] >> 6 << 4
    if name == "q2_k":
        return b[j] & 15, b[j] >> 4
    if name == "q3_k":
        return b[j % 8] >> 4 * (j // 8) & 15 | (b[8 + j % 4] >> 2 * (j // 4) & 3) << 4, 0
    return b[j], 0


def scaled_row(inputs, codes, scales, factor):
    """The numbers of a row of `nvfp4_scaled`."""
    def single(x):
        try:
            return struct.unpack("<f", struct.pack("<f", x))[0]
        except OverflowError:
            return math.copysign(math.inf, x)

    factor, out = struct.unpack("<f", factor)[0], []
    for i in range(inputs):
        byte = scales[i // 16]
        exponent, mantissa = byte >> 3 & 15, byte & 7
        scale = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 512
        scale = single((-scale if byte & 128 else scale) / 2 * factor)
        out.append(scale * E2M1_DOUBLED[codes[i // 2] >> i % 2 * 4 & 15])
    return out


def block_row(name, inputs, codes, scales, supers):
    """The numbers of a row, from its bytes in each plane."""
    if name == "nvfp4_scaled":
        return scaled_row(inputs, codes, scales, supers)
    bits, group, small, small_offset, offset = BLOCKS[name]
    halves = lambda data: struct.unpack("<%de" % (len(data) // 2), data)
    stream, d, out = int.from_bytes(codes, "little"), halves(supers if small else scales), []
    for i in range(inputs):
        code, g = stream >> (i * bits) & ((1 << bits) - 1), i // group
        block, j = divmod(g, 256 // group)
        minimum = 0.0
        if small:
            s, m = small_integers(name, scales[4 * small * block:4 * small * (block + 1)], j)
            if name in ("q2_k", "q4_k", "q5_k"):
                scale, minimum = d[2 * block] * s, d[2 * block + 1] * m
            else:
                scale = d[block] * (s - small_offset)
        else:
            scale = d[block if name == "tq2_0" else g]
        value = TABLE[code] if name.startswith("iq4") else code - offset
        out.append(scale * value - minimum + 0.0)
    return out


def block_weights(entries, area):
    tensors = {e[0]: e[1:] for e in entries}
    out = {}
    for name in tensors:
        if not name.endswith(".weight"):
            continue
        planes = {}
        for plane in ("weight", "scales", "biases", "supers", "table_scales", "factors"):
            if name[:-6] + plane in tensors:
                planes[plane] = tensors[name[:-6] + plane]
        found = planes["weight"][0] == "U32" and block_format({k: (p[0], p[1][-1]) for k, p in planes.items()})
        if not found:
            continue
        digest, rows = hashlib.sha256(), 1
        for extent in planes["weight"][1][:-1]:
            rows *= extent
        parts = [area[p[2]:p[3]] for p in planes.values()] + [b""]
        for r in range(rows):
            row = [part[len(part) // rows * r:len(part) // rows * (r + 1)] for part in parts]
            digest.update(struct.pack("<%df" % found[1], *block_row(*found, *row[:3])))
        out[name] = [found[0], digest.hexdigest()]
    return out


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    need(len(data) >= 8, "file: too short")
    n = int.from_bytes(data[:8], "little")
    need(n <= 100_000_000 and (8 + n) % 16384 == 0 and len(data) >= 8 + n + 2048, "file: header length")
    area = data[8 + n:]
    sections = read_head(area[:2048], len(data), n)
    need(sha(data[:8 + n]) == area[64:96], "header: hash")
    entries = read_header(data[8:8 + n])
    agree(entries, sections, area)
    check_hashes(sections, area)
    out = {"id": area[2016:2048].hex(), "file_bytes": len(data)}
    out["sections"] = [[s["kind"], s["offset"], s["len"], s["root"].hex()] for s in sections]
    out["tensors"] = len([e for e in entries if not e[0].startswith("loaf.")])
    blocks = block_weights(entries, area)
    if blocks:
        out["blocks"] = blocks
    for s in sections:
        content = area[s["offset"]:s["offset"] + s["len"]]
        if s["kind"] == 2:
            plan = read_plan(content)  # before the graphs: sections stand in order of their kind
            numbers = "context vocab hidden weight_bytes cache_bytes recurrent_bytes arena_bytes".split()
            out["plan"] = {k: plan[k] for k in numbers}
            out["plan"]["states"] = [[s["name"], s["kind"], s["offset"], s["bytes"]] for s in plan["states"]]
            places = (1, plan["context"] // 2, plan["context"])
            out["plan"]["snapshots"] = [[p, snapshot(plan, p)] for p in places]
            out["plan"]["templates"] = [
                [t["phase"], t["max_rows"], t["positions"], len(row_words(t["words"])), len(t["words"])]
                for t in plan["templates"]]
        elif s["kind"] == 3:
            planes = read_experts(json.loads(content), entries, area)
            if planes:
                check_expert_operands(plan, planes)
                out["experts"] = [p for p, _ in planes]
        elif s["kind"] == 7:
            need(content == graphs_section(plan), "graphs: what the plan expands to")
            out["graphs_root"] = content[8:40].hex()
        elif s["kind"] == 6:
            out["golden_ids"] = sum(len(case["greedy"]) for case in json.loads(content)["cases"])
    return out


def main():
    for path in sys.argv[1:]:
        try:
            print(json.dumps(read(path)))
        except (Refused, OSError, ValueError, KeyError) as error:
            sys.exit("%s: %s" % (path, error))


if __name__ == "__main__":
    main()
