"""One GPU kernel for training, in Triton: the inverse of many small unit triangular matrices.

What always holds: float32 throughout; the same result as torch.linalg.solve_triangular up to rounding. `choose` times both on
the card at hand and takes the faster, or PyTorch's where Triton does not run.
"""

import time

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

SIZE, BLOCK = 64, 16


def solved(a):
    """(I + A)^-1 by PyTorch."""
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    return torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False, unitriangular=True).contiguous()


if triton:
    @triton.jit
    def diagonal(source, at, k: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
        """The inverse of diagonal block k: row i is e_i minus row i of A times the rows above."""
        r = tl.arange(0, B)
        t = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
        for i in range(1, B):
            a = tl.load(source + at + (k * B + i) * N + k * B + r)
            a = tl.where(r < i, a, 0.0)
            t = tl.where(r[:, None] == i, t - tl.sum(a[:, None] * t, 0)[None, :], t)
        return t

    @triton.jit
    def block(source, at, i: tl.constexpr, j: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
        r = tl.arange(0, B)
        return tl.load(source + at + (i * B + r)[:, None] * N + j * B + r[None, :])

    @triton.jit
    def put(result, at, i: tl.constexpr, j: tl.constexpr, value, N: tl.constexpr, B: tl.constexpr):
        r = tl.arange(0, B)
        tl.store(result + at + (i * B + r)[:, None] * N + j * B + r[None, :], value)

    @triton.jit
    def times(a, b):
        return tl.dot(a, b, input_precision="ieee")

    @triton.jit
    def inverse(source, result, N: tl.constexpr, B: tl.constexpr):
        """One matrix of four by four blocks: the diagonal ones by substitution, those below from them."""
        at = tl.program_id(0).to(tl.int64) * N * N
        t00, t11 = diagonal(source, at, 0, N, B), diagonal(source, at, 1, N, B)
        t22, t33 = diagonal(source, at, 2, N, B), diagonal(source, at, 3, N, B)
        a10, a20, a30 = block(source, at, 1, 0, N, B), block(source, at, 2, 0, N, B), block(source, at, 3, 0, N, B)
        a21, a31, a32 = block(source, at, 2, 1, N, B), block(source, at, 3, 1, N, B), block(source, at, 3, 2, N, B)
        t10 = -times(t11, times(a10, t00))
        t21 = -times(t22, times(a21, t11))
        t32 = -times(t33, times(a32, t22))
        t20 = -times(t22, times(a20, t00) + times(a21, t10))
        t31 = -times(t33, times(a31, t11) + times(a32, t21))
        t30 = -times(t33, times(a30, t00) + times(a31, t10) + times(a32, t20))
        zero = tl.zeros((B, B), tl.float32)
        put(result, at, 0, 0, t00, N, B)
        put(result, at, 1, 1, t11, N, B)
        put(result, at, 2, 2, t22, N, B)
        put(result, at, 3, 3, t33, N, B)
        put(result, at, 1, 0, t10, N, B)
        put(result, at, 2, 1, t21, N, B)
        put(result, at, 3, 2, t32, N, B)
        put(result, at, 2, 0, t20, N, B)
        put(result, at, 3, 1, t31, N, B)
        put(result, at, 3, 0, t30, N, B)
        put(result, at, 0, 1, zero, N, B)
        put(result, at, 0, 2, zero, N, B)
        put(result, at, 0, 3, zero, N, B)
        put(result, at, 1, 2, zero, N, B)
        put(result, at, 1, 3, zero, N, B)
        put(result, at, 2, 3, zero, N, B)


def blockwise(a):
    """(I + A)^-1 for strictly lower triangular float32 matrices A, (..., SIZE, SIZE)."""
    a = a.contiguous()
    out = torch.empty_like(a)
    inverse[(a.numel() // (SIZE * SIZE),)](a, out, SIZE, BLOCK, num_warps=1)
    return out


unit_inverse = solved   # until `choose`


def choose(matrices=6144):
    """Take the faster of the two that is right; say which."""
    global unit_inverse
    a = (torch.rand(matrices, SIZE, SIZE, device="cuda") * 0.5).tril(-1)
    wanted, taken = solved(a), {}
    try:
        for f in (solved, blockwise):
            found = f(a)
            error = ((found - wanted).abs().max() / wanted.abs().max()).item()
            torch.cuda.synchronize()
            start = time.time()
            for _ in range(10):
                f(a)
            torch.cuda.synchronize()
            if error < 1e-5:
                taken[f] = (time.time() - start) / 10
    except Exception as e:  # an old card, no compiler: training works without
        print(f"the kernel does not run here: {type(e).__name__}: {e}", flush=True)
    if taken:
        unit_inverse = min(taken, key=taken.get)
    return ", ".join(f"{f.__name__} {1e3 * t:.2f} ms" for f, t in taken.items())
