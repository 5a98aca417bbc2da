#!/usr/bin/env python3
"""Train the default model on endless fresh pairs of the generator, on one GPU or, started by torchrun, on several.

    python3 train.py --data checkpoint --out checkpoint --minutes 9
    torchrun --nproc-per-node 2 train.py --data checkpoint --init checkpoint --out checkpoint --minutes 9

Several GPUs average their gradients; each has its own producers, so that two see twice the tokens in the same time.

What always holds: seeded data in a fixed order; the learning rate warms up, then falls linearly to zero over `--steps` or
`--minutes`, whichever is nearer; a checkpoint in the Hugging Face layout is written every `--save` steps and at the end. With
`--then` both rise and fall once more, which spares a second start and its compiling.
What it does not do: look at held-out data, except to report.
"""

import argparse
import json
import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import evaluate
import kernels
import model as M
from packing import IGNORE, Batches, Framing


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", default="checkpoint", help="folder with tokenizer.json")
    p.add_argument("--out", default="checkpoint")
    p.add_argument("--init", help="checkpoint folder to continue from")
    p.add_argument("--small", action="store_true", help="without --init: start with the smaller size, to grow later")
    p.add_argument("--grow", action="store_true", help="the checkpoint of --init is of the smaller size: grow it first")
    p.add_argument("--dropout", type=float, default=0.0, help="dropout of layer outputs; falls linearly to zero")
    p.add_argument("--dropout-end", type=float, default=0.7, help="the part of the training at whose end it is zero")
    p.add_argument("--steps", type=int, default=100_000)
    p.add_argument("--minutes", type=float, default=9.0, help="time for the whole run, from the first step on")
    p.add_argument("--then", metavar="MINUTES:RATE:OUT", help="a second part behind it, in the same run: its time, its learning rate, where it is saved; no dropout")
    p.add_argument("--rows", type=int, default=192)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--warmup", type=int, default=300)
    p.add_argument("--decay", type=float, default=0.05, help="weight decay of matrices")
    p.add_argument("--workers", type=int, help="producers of each GPU (default: a core less than it has of its own)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--save", type=int, default=2000)
    p.add_argument("--report", type=int, default=100)
    p.add_argument("--validate", type=int, default=2000)
    p.add_argument("--final", type=int, default=2000, help="pairs per split in the last report")
    p.add_argument("--misses", action="store_true", help="write the wrong answers of the last report to misses.json")
    p.add_argument("--reverse", action="store_true", help="learn the request from the command (README, \"Unsure\") and nothing else; no last report")
    p.add_argument("--both", type=float, default=0.0, metavar="SHARE", help="learn both directions: this part of the pairs goes from the command to the request")
    p.add_argument("--back", type=float, default=0.2, metavar="WEIGHT", help="with --both: the weight of their loss, a mean over tokens as the other, beside it")
    p.add_argument("--no-compile", action="store_true")
    args = p.parse_args()
    if not 0 <= args.both < 1 or args.back < 0 or (args.reverse and args.both):
        p.error("--both is a part below 1, --back no less than 0, and --reverse stands alone")
    share = 1.0 if args.reverse else args.both

    began = time.time()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.workers = args.workers or max(1, (os.cpu_count() or 2) // world - 1)
    batches = Batches(args.data, args.seed, args.workers, args.rows, offset=rank * args.workers, share=share)
    torch.manual_seed(args.seed + 1000 * rank)  # what is dropped differs from GPU to GPU
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    chosen_kernel = kernels.choose() if device == "cuda" else ""
    framing = Framing(args.data)
    net = M.load_checkpoint(args.init) if args.init else M.Model({"vocab_size": framing.tok.get_vocab_size(), **(M.SMALL if args.small else {})})
    if args.grow:
        net = M.grown(net)
    net = net.to(device).train()
    keep = torch.ones((), device=device) if args.dropout else None
    parameters = list(net.parameters())
    matrices = [w for n, w in net.named_parameters() if w.dim() >= 2 and "embed" not in n and "conv1d" not in n]
    chosen = {id(w) for w in matrices}
    others = [w for w in net.parameters() if id(w) not in chosen]
    optimiser = torch.optim.AdamW([{"params": matrices, "weight_decay": args.decay}, {"params": others, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.97), eps=1e-10, fused=device == "cuda")
    if not args.no_compile:
        for layer in net.layers:
            layer.compile(dynamic=False)

    def loss_of(ids, labels, seg, position, back):
        """What falls, the loss of each direction (request to command, command to request), the balance of the experts."""
        with torch.autocast(device, torch.bfloat16):
            h, balance = net.hidden(ids, seg, position, keep)
            logits = F.linear(h, net.embed_tokens.weight)
        if not args.both:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
            return loss, torch.stack([loss.detach(), torch.zeros_like(loss)]), balance
        losses = M.directed(logits, labels, back)
        return losses[0] + args.back * losses[1], losses.detach(), balance

    def take():
        batch = torch.from_numpy(batches.next())
        batch = batch.pin_memory().to(device, non_blocking=True) if device == "cuda" else batch
        return [t.long() for t in batch]

    def average_gradients():
        """Leave the mean over all GPUs in every gradient."""
        flat = torch.cat([w.grad.reshape(-1) for w in parameters])
        dist.all_reduce(flat)
        flat /= world
        for w, part in zip(parameters, flat.split([w.numel() for w in parameters])):
            w.grad.copy_(part.view_as(w))

    def save(folder, dtype=torch.bfloat16):
        M.save_checkpoint(net, folder, framing.end, framing.pad, dtype)
        for f in ("tokenizer.json", "tokenizer_config.json"):
            if os.path.abspath(args.data) != os.path.abspath(folder):
                shutil.copy(os.path.join(args.data, f), folder)

    os.makedirs(args.out, exist_ok=True)
    log = open(os.path.join(args.out, "train.log") if rank == 0 else os.devnull, "a")

    def say(text):
        if rank:
            return
        print(text, flush=True)
        print(text, file=log, flush=True)

    if world > 1:  # the same start for all
        for w in parameters:
            dist.broadcast(w.data, 0)
    say(f"{sum(w.numel() for w in parameters)} parameters, {world} device(s), setup {time.time() - began:.1f} s; inverses: {chosen_kernel}")
    parts = [(args.minutes, args.lr, args.warmup, args.dropout, args.out)]
    if args.then:
        minutes, rate, folder = args.then.split(":", 2)
        parts.append((float(minutes), float(rate), 60, 0.0, folder))
    start, window, window_start = None, torch.zeros(2, device=device), 0
    step, before, elapsed = 0, 0, 0.0        # steps in all, those of the parts before
    while parts:
        minutes, lr, warmup, dropout, folder = parts[0]
        batch = take()
        if step == 3:  # compiled by now
            start, mark = time.time(), time.time()
            say(f"three steps after {start - began:.1f} s")
        if start and step % 10 == 3:
            elapsed = (time.time() - start) / 60
            if world > 1:  # one clock for all, so that all stop at the same step
                clock = torch.tensor([elapsed], device=device)
                dist.broadcast(clock, 0)
                elapsed = clock.item()
        progress = max((step - before) / args.steps, elapsed / minutes)
        if progress >= 1:
            parts.pop(0)
            if rank == 0:
                save(folder)
            say(f"done after {step - before} steps, {(step - before) * args.rows * 256 * world / 1e6:.0f} M tokens, {(time.time() - began) / 60:.2f} min")
            before, elapsed, start = step, 0.0, time.time()
            continue
        rate = lr * min(1.0, (step - before + 1) / warmup) * (1 - progress)
        for group in optimiser.param_groups:
            group["lr"] = rate
        if args.dropout:
            keep.fill_(1 - dropout * max(0.0, 1 - progress / args.dropout_end))
        loss, losses, balance = loss_of(*batch)
        (loss + net.config["router_aux_loss_coef"] * balance).backward()
        if world > 1:
            average_gradients()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        window += losses
        step += 1
        if step % args.report == 0:
            now = time.time()
            tokens = (step - window_start) * args.rows * 256 * world
            forth, back = (window / (step - window_start)).tolist()
            say(f"step {step} {100 * progress:.1f}% loss {forth:.5f} {f'back {back:.5f} ' if args.both else ''}norm {norm.item():.3f} balance {balance.item():.3f} "
                f"rate {rate:.2e} {tokens / (now - (mark if start else began)):.0f} tok/s waiting {sum(q.empty() for q in batches.queues)}/{args.workers}")
            window.zero_()
            window_start, mark = step, now
        if step % args.save == 0 and rank == 0:
            save(folder)
        if step % args.validate == 0 and rank == 0:
            net.eval()
            say(f"step {step} " + evaluate.brief(net, framing, 500, back=args.both > 0))
            net.train()
            mark = time.time()
    batches.stop()
    if world > 1:
        dist.destroy_process_group()
    if rank or args.reverse:
        return
    net.eval()
    say("float32 (bf16 products) " + evaluate.brief(net, framing, args.final, back=args.both > 0))
    reloaded = M.load_checkpoint(folder).to(device)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    for label, bits in (("saved checkpoint, float32", None), ("q6", 6), ("q4", 4)):
        if bits:
            reloaded = M.quantise_(M.load_checkpoint(folder).to(device), bits)
        say(label + " " + evaluate.brief(reloaded, framing, args.final, autocast=False, back=args.both > 0))
    if args.misses:
        with open(os.path.join(args.out, "misses.json"), "w") as f:
            json.dump(evaluate.misses(M.load_checkpoint(folder).to(device), framing, args.final), f, indent=1)


if __name__ == "__main__":
    main()
