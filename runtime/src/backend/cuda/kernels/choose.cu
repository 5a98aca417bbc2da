// The choice of the next token where the logits are: the best of them, the lower id of equals; a NaN is never it. It becomes the next
// step's token, and that step's place is one further, so that a step can be submitted before the host knows what it is of. Of several rows, one
// after the other in blockIdx.y, tokens are only told.

enum { CHOICE_BLOCKS = 64, CHOICE_THREADS = 512, CHOICE_ROOM = 8 * CHOICE_BLOCKS + 8, NO_TOKEN = 0xffffffffu };

struct Choose {
    // Of the first row to choose by.
    u64 logits;
    // The step that follows: its head (runs, then the tokens that may be chosen), run, row and id. Without a run no step follows.
    u64 head, run, row, id;
    // The best of each block, and a counter, 0 before and after; a row's lie CHOICE_ROOM bytes after those of the one before.
    u64 parts, counter;
    // The token, or NO_TOKEN if no logit is a number above minus infinity: four places of 16 bytes, turn by turn by positions, or a word a row.
    u64 results;
    u32 vocab, unused;
};

struct Best {
    float logit;
    u32 id;
};

DEVICE Best better(Best a, Best b) { return b.logit > a.logit || (b.logit == a.logit && b.id < a.id) ? b : a; }

DEVICE Best best_of_warp(Best a) {
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        Best b;
        b.logit = __shfl_xor_sync(FULL, a.logit, d);
        b.id = __shfl_xor_sync(FULL, a.id, d);
        a = better(a, b);
    }
    return a;
}

// The best of the first `known` logits, that `logit` gives; true for the one thread that has it: of whichever block comes last.
template <class Logit> DEVICE bool best_of_blocks(const Choose &p, u32 known, Logit logit, Best &best) {
    __shared__ Best of_warps[CHOICE_THREADS / 32];
    __shared__ u32 last;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, of = blockIdx.y;
    best.logit = __int_as_float(0xff800000);
    best.id = NO_TOKEN;
#pragma unroll 4
    for (u32 i = blockIdx.x * CHOICE_THREADS + threadIdx.x; i < known; i += CHOICE_BLOCKS * CHOICE_THREADS) {
        float x = logit(i);
        if (x > best.logit) {
            best.logit = x;
            best.id = i;
        }
    }
    best = best_of_warp(best);
    if (lane == 0) of_warps[warp] = best;
    __syncthreads();
    if (warp > 0) return false;
    best = best_of_warp(of_warps[lane % (CHOICE_THREADS / 32)]);
    u64 room = p.parts + of * CHOICE_ROOM;
    volatile float *logit_of = (volatile float *)room;
    volatile u32 *id_of = (volatile u32 *)room + CHOICE_BLOCKS;
    if (lane == 0) {
        logit_of[blockIdx.x] = best.logit;
        id_of[blockIdx.x] = best.id;
        __threadfence();
        last = atomicInc((u32 *)(p.counter + of * CHOICE_ROOM), CHOICE_BLOCKS - 1) == CHOICE_BLOCKS - 1;
    }
    __syncwarp();
    if (!last) return false;
    __threadfence();
    best.logit = __int_as_float(0xff800000);
    best.id = NO_TOKEN;
#pragma unroll
    for (u32 i = 0; i < CHOICE_BLOCKS; i += 32) {
        Best other;
        other.logit = logit_of[i + lane];
        other.id = id_of[i + lane];
        best = better(best, other);
    }
    best = best_of_warp(best);
    return lane == 0;
}

// Tells a row's token, and makes it the next step's, if one follows.
DEVICE void go_on_with(const Choose &p, u32 of, u32 token) {
    if (!p.run) {
        ((u32 *)p.results)[of] = token;
        return;
    }
    Run *run = (Run *)p.run;
    u32 pos = run->pos + 1;
    u64 from = run->from;
    run->pos = pos;
    run->from = run->to;
    run->to = from;
    ((Row *)p.row)->pos = pos;
    *(u32 *)p.id = token == NO_TOKEN ? 0 : token;
    ((u32 *)p.results)[4 * (pos & 3)] = token;
}

extern "C" __global__ void __launch_bounds__(512) choose(const Choose p) {
    wait_for_earlier();
    const float *logits = (const float *)p.logits + (u64)blockIdx.y * p.vocab;
    Best best;
    if (best_of_blocks(p, ((const u32 *)p.head)[1], [&](u32 i) { return logits[i]; }, best)) go_on_with(p, blockIdx.y, best.id);
}
