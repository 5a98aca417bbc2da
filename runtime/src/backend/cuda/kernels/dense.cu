// Products in f32: a warp an output, its lanes the 32 accumulators of the contract's lane dot, for DENSE_ROWS rows at a time.

enum { DENSE_ROWS = 8 };

struct DenseAt {
    const u8 *w, *s, *b;
    const float *x;
    float *out;
    u64 x_row, out_row;
    u32 rows;
};

DEVICE void dense_dot(const DenseAt &p, u64 format, u32 inputs) {
    u32 lane = threadIdx.x & 31, padded = (inputs + 31) / 32 * 32;
    float acc[DENSE_ROWS];
#pragma unroll
    for (int r = 0; r < DENSE_ROWS; r++) acc[r] = 0.0f;
#pragma unroll 4
    for (u32 i = lane; i < padded; i += 32) {
        // Past the end both factors are +0, which makes a plain zero of a negative one.
        bool in = i < inputs;
        float w = in ? weight_at(format, p.w, p.s, p.b, i) : 0.0f;
#pragma unroll
        for (int r = 0; r < DENSE_ROWS; r++)
            if (r < p.rows) acc[r] = fmaf(in ? p.x[r * p.x_row + i] : 0.0f, w, acc[r]);
    }
#pragma unroll
    for (int r = 0; r < DENSE_ROWS; r++) {
        if (r >= p.rows) break;
        float d = fold(acc[r]);
        if (lane == 0) p.out[r * p.out_row] = d;
    }
}

extern "C" __global__ void linear_dense(const Call c) {
    using A = linear_dense_op::A; using O = linear_dense_op::O;
    wait_for_earlier();
    u32 o = WARP, rows = c.a[A::rows], r = blockIdx.y * DENSE_ROWS;
    if (o >= c.a[A::outputs]) return;
    DenseAt p;
    p.w = plane_row(c.o[O::weight], o);
    p.s = plane_row(c.o[O::weight + 1], o);
    p.b = plane_row(c.o[O::weight + 2], o);
    p.x = at<float>(c.o[O::x], r, 0);
    p.out = at<float>(c.o[O::out], r, 0) + o;
    p.x_row = c.o[O::x].row;
    p.out_row = c.o[O::out].row;
    p.rows = rows - r < DENSE_ROWS ? rows - r : DENSE_ROWS;
    dense_dot(p, c.a[A::format], c.a[A::inputs]);
}

// Output o of expert e.
DEVICE const u8 *expert_row(const Operand &p, u64 e, u64 o) {
    if (!p.at) return 0;
    u32 size = p.dtype == F16 || p.dtype == BF16 ? 2 : p.dtype == I8 || p.dtype == U8 ? 1 : 4;
    return (const u8 *)p.at + (e * p.row + o * p.head) * size;
}

// The expert in whose part of the order place j lies, and the slot there.
DEVICE u32 expert_of(const u32 *starts, u32 experts, u32 j) {
    u32 lo = 0, hi = experts;
    while (hi - lo > 1) {
        u32 mid = (lo + hi) / 2;
        if (starts[mid] <= j) lo = mid;
        else hi = mid;
    }
    return lo;
}

extern "C" __global__ void expert_linear_dense(const Call c) {
    using A = expert_linear_dense_op::A; using O = expert_linear_dense_op::O;
    wait_for_earlier();
    u32 o = WARP, k = c.a[A::k], slots = c.a[A::rows] * k, j = blockIdx.z * gridDim.y + blockIdx.y;
    if (o >= c.a[A::outputs] || j >= slots) return;
    u32 e = expert_of((const u32 *)c.o[O::starts].at, c.a[A::experts], j), s = ((const u32 *)c.o[O::order].at)[j];
    s = s < slots ? s : slots - 1;
    u32 r = s / k, slot = s % k, from = slot < c.a[A::x_slots] ? slot : c.a[A::x_slots] - 1;
    DenseAt p;
    p.w = expert_row(c.o[O::weight], e, o);
    p.s = expert_row(c.o[O::weight + 1], e, o);
    p.b = expert_row(c.o[O::weight + 2], e, o);
    p.x = at<float>(c.o[O::x], r, from);
    p.out = at<float>(c.o[O::out], r, slot) + o;
    p.x_row = p.out_row = 0;
    p.rows = 1;
    dense_dot(p, c.a[A::format], c.a[A::inputs]);
}

// A score as a number of the same order, a NaN below all others, equals equal; never 0.
DEVICE u32 score_order(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return !(x == x) ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A warp for a row: an expert's rank is the number of experts that are better, or as good and before it. No more is ranked than what is as
// large as the k-th largest of the lanes' largest scores: k lanes have one that is.
// Shared memory: orders and places of what is ranked, [experts] each, and the k best.
extern "C" __global__ void __launch_bounds__(32) top_k(const Call c) {
    using A = top_k_op::A; using O = top_k_op::O;
    wait_for_earlier();
    u32 r = blockIdx.x, lane = threadIdx.x, experts = c.a[A::experts], k = c.a[A::k];
    u32 *orders = (u32 *)shared, *places = orders + experts;
    float *best = (float *)(places + experts);
    const float *probs = at<float>(c.o[O::probs], r, 0);
    u32 most = 0, above = 0, least = 0, count = 0;
    for (u32 e = lane; e < experts; e += 32) {
        u32 x = score_order(probs[e]);
        most = x > most ? x : most;
    }
    for (u32 j = 0; j < 32; j++) {
        u32 other = __shfl_sync(FULL, most, j);
        above += other > most || other == most && j < lane ? 1 : 0;
    }
    // Exactly one lane has each number of lanes above it.
    if (k <= 32)
        for (u32 j = 0; j < 32; j++) {
            u32 x = __shfl_sync(FULL, most, j);
            if (__shfl_sync(FULL, above, j) == k - 1) least = x;
        }
    for (u32 from = 0; from < experts; from += 32) {
        u32 e = from + lane, x = e < experts ? score_order(probs[e]) : 0;
        bool takes = x && x >= least;
        u32 mask = __ballot_sync(FULL, takes);
        if (takes) {
            u32 n = count + __popc(mask & ((1u << lane) - 1));
            orders[n] = x;
            places[n] = e;
        }
        count += __popc(mask);
    }
    __syncwarp();
    for (u32 n = lane; n < count; n += 32) {
        u32 x = orders[n], rank = 0, e = places[n];
        for (u32 j = 0; j < count; j++) rank += orders[j] > x || orders[j] == x && j < n ? 1 : 0;
        if (rank < k) {
            ((u32 *)c.o[O::ids].at)[r * c.o[O::ids].row + rank] = e;
            best[rank] = probs[e];
        }
    }
    __syncwarp();
    float sum = 0.0f;
    if (c.a[A::renorm])
        for (u32 j = 0; j < k; j++) sum += best[j];
    for (u32 j = lane; j < k; j += 32) at<float>(c.o[O::weights], r, 0)[j] = c.a[A::renorm] ? best[j] / sum : best[j];
}

// One block, whose warps have a part of the slots each: they count their experts' slots, then put theirs in order, 32 at a time, behind
// those of the warps before them.
extern "C" __global__ void expert_sort(const Call c) {
    using A = expert_sort_op::A; using O = expert_sort_op::O;
    wait_for_earlier();
    u32 k = c.a[A::k], slots = c.a[A::rows] * k, experts = c.a[A::experts];
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 *counts = (u32 *)shared, *mine = counts + experts + 1 + warp * experts;
    u32 *order = (u32 *)c.o[O::order].at, *starts = (u32 *)c.o[O::starts].at;
    const u32 *ids = (const u32 *)c.o[O::ids].at;
    u32 part = (slots + warps - 1) / warps, from = warp * part, to = from + part < slots ? from + part : slots;
    auto expert = [&](u32 s) {
        u32 id = ids[s / k * c.o[O::ids].row + s % k];
        return id < experts ? id : experts - 1;
    };
    for (u32 e = lane; e < experts; e += 32) mine[e] = 0;
    __syncwarp();
    for (u32 s = from + lane; s < to; s += 32) atomicAdd(mine + expert(s), 1u);
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 n = 0;
        for (u32 w = 0; w < warps; w++) {
            u32 *of = counts + experts + 1 + w * experts + e, own = *of;
            *of = n;
            n += own;
        }
        counts[e] = n;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 before = 0;
        for (u32 e = 0; e < experts; e++) {
            u32 n = counts[e];
            counts[e] = before;
            before += n;
        }
        counts[experts] = before;
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e <= experts; e += blockDim.x) starts[e] = counts[e];
    for (u32 first = from; first < to; first += 32) {
        u32 s = first + lane, id = s < to ? expert(s) : experts, before = 0, same = 0;
        for (u32 l = 0; l < 32; l++) {
            u32 other = __shfl_sync(0xffffffff, id, l);
            same += other == id ? 1 : 0;
            before += other == id && l < lane ? 1 : 0;
        }
        u32 at = s < to ? counts[id] + mine[id] + before : 0;
        __syncwarp();
        if (s < to) {
            order[at] = s;
            if (before + 1 == same) mine[id] += same;
        }
        __syncwarp();
    }
}
