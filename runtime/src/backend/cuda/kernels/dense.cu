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
    wait_for_earlier();
    u32 o = WARP, rows = c.a[0], r = blockIdx.y * DENSE_ROWS;
    if (o >= c.a[2]) return;
    DenseAt p;
    p.w = plane_row(c.o[1], o);
    p.s = plane_row(c.o[2], o);
    p.b = plane_row(c.o[3], o);
    p.x = at<float>(c.o[0], r, 0);
    p.out = at<float>(c.o[5], r, 0) + o;
    p.x_row = c.o[0].row;
    p.out_row = c.o[5].row;
    p.rows = rows - r < DENSE_ROWS ? rows - r : DENSE_ROWS;
    dense_dot(p, c.a[3], c.a[1]);
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
    wait_for_earlier();
    u32 o = WARP, k = c.a[1], slots = c.a[0] * k, j = blockIdx.z * gridDim.y + blockIdx.y;
    if (o >= c.a[4] || j >= slots) return;
    u32 e = expert_of((const u32 *)c.o[2].at, c.a[2], j), s = ((const u32 *)c.o[1].at)[j];
    s = s < slots ? s : slots - 1;
    u32 r = s / k, slot = s % k, from = slot < c.a[6] ? slot : c.a[6] - 1;
    DenseAt p;
    p.w = expert_row(c.o[3], e, o);
    p.s = expert_row(c.o[4], e, o);
    p.b = expert_row(c.o[5], e, o);
    p.x = at<float>(c.o[0], r, from);
    p.out = at<float>(c.o[7], r, slot) + o;
    p.x_row = p.out_row = 0;
    p.rows = 1;
    dense_dot(p, c.a[5], c.a[3]);
}

// A block for a row: an expert's rank is the number of experts that are better, or as good and before it.
extern "C" __global__ void top_k(const Call c) {
    wait_for_earlier();
    u32 r = blockIdx.x, experts = c.a[1], k = c.a[2];
    float *p = (float *)shared, *best = p + experts;
    const float *probs = at<float>(c.o[0], r, 0);
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) p[e] = probs[e];
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) {
        float x = p[e];
        bool nan = !(x == x);
        u32 rank = 0;
        for (u32 j = 0; j < experts; j++) {
            float y = p[j];
            bool other = !(y == y);
            bool before = nan != other ? nan : nan || x == y ? j < e : y > x;
            rank += before ? 1 : 0;
        }
        if (rank < k) {
            ((u32 *)c.o[1].at)[r * c.o[1].row + rank] = e;
            best[rank] = x;
        }
    }
    __syncthreads();
    float sum = 0.0f;
    if (c.a[3])
        for (u32 j = 0; j < k; j++) sum += best[j];
    for (u32 j = threadIdx.x; j < k; j += blockDim.x) at<float>(c.o[2], r, 0)[j] = c.a[3] ? best[j] / sum : best[j];
}

// One block: a thread an expert counts its slots, then puts them in order.
extern "C" __global__ void expert_sort(const Call c) {
    wait_for_earlier();
    u32 k = c.a[1], slots = c.a[0] * k, experts = c.a[2];
    u32 *counts = (u32 *)shared, *order = (u32 *)c.o[1].at, *starts = (u32 *)c.o[2].at;
    const u32 *ids = (const u32 *)c.o[0].at;
    for (u32 e = threadIdx.x; e <= experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (u32 s = threadIdx.x; s < slots; s += blockDim.x) {
        u32 id = ids[s / k * c.o[0].row + s % k];
        atomicAdd(counts + (id < experts ? id : experts - 1), 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 before = 0;
        for (u32 e = 0; e <= experts; e++) {
            u32 n = counts[e];
            counts[e] = before;
            starts[e] = before;
            before += n;
        }
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 j = counts[e], end = counts[e + 1];
        for (u32 s = 0; s < slots && j < end; s++) {
            u32 id = ids[s / k * c.o[0].row + s % k];
            if ((id < experts ? id : experts - 1) == e) order[j++] = s;
        }
    }
}
