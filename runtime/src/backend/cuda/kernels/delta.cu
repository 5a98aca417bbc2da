// The gated delta rule of one row in one kernel: convolutions with silu, unit norms, gates, the rule, norm and gate, of heads of 128 elements,
// four taps and BF16 weights. A block takes a value head, a thread a column of its state, which is in registers before the wait, as are taps.

enum { DELTA_DIM = 128, DELTA_TAPS = 4 };

// A convolution's channels that are queries, keys or values: channel c is element c % dim of head c / dim of its input.
struct DeltaPart {
    u64 x, w, state;
    // The first channel, and elements from a head of the input, and a tap of the state, to the next.
    u32 first, dim, x_head, tap;
};

struct DeltaRow {
    DeltaPart q, k, v;
    // What the gates are made from, the gate of the result, its norm's weight, the result: (0, h, i).
    Operand a, b, a_log, dt, z, norm, out;
    u64 state, runs;
    // A counter for each key head, 0 before and after.
    u64 counters;
    // Elements from a head of the state, whose rows are side by side, to the next.
    u64 state_head;
    // Elements of a head of `a` and `b`, of `z`, and of `out`.
    u32 gate_dim, z_dim, out_dim;
    u32 k_heads, v_heads, tiled, q_eps, q_scale, k_eps, k_scale, norm_eps, norm_offset;
};

// A channel of a convolution: where its input is, its weights, and what came before.
struct Channel {
    const float *x;
    uint2 w;
    float taps[DELTA_TAPS - 1];
};

DEVICE Channel channel_of(const DeltaPart &p, const Run &run, u32 head, u32 i) {
    Channel c;
    u32 n = p.first + head * DELTA_DIM + i;
    c.x = (const float *)p.x + (n / p.dim * p.x_head + n % p.dim);
    c.w = ((const uint2 *)p.w)[n];
    const float *old = (const float *)(p.state + run.from) + n;
#pragma unroll
    for (u32 t = 0; t + 1 < DELTA_TAPS; t++) c.taps[t] = old[t * p.tap];
    return c;
}

DEVICE float convolved(const Channel &c, float x) {
    float acc = fmaf(brain(c.w.x), c.taps[0], 0.0f);
    acc = fmaf(brain(c.w.x >> 16), c.taps[1], acc);
    acc = fmaf(brain(c.w.y), c.taps[2], acc);
    return silu_(fmaf(brain(c.w.y >> 16), x, acc));
}

DEVICE void keep_taps(const DeltaPart &p, const Run &run, u32 head, u32 i, const Channel &c, float x) {
    float *now = (float *)(p.state + run.to) + (p.first + head * DELTA_DIM + i);
    now[0] = c.taps[1];
    now[p.tap] = c.taps[2];
    now[2 * p.tap] = x;
}

// Element n of heads of `dim` elements each.
DEVICE float element(const Operand &o, u32 dim, u32 n) { return get(o, 0, n / dim, n % dim); }

DEVICE float squares_of_head(const float *x, u32 lane) {
    float acc = 0.0f;
#pragma unroll
    for (u32 i = 0; i < DELTA_DIM / 32; i++) acc = fmaf(x[lane + 32 * i], x[lane + 32 * i], acc);
    return fold(acc);
}

// A warp on each part of a multiprocessor: with a fifth the product after it would find no room beside it.
extern "C" __global__ void __launch_bounds__(128) delta_row_128(const DeltaRow p) {
    __shared__ __align__(16) float q[DELTA_DIM], k[DELTA_DIM], result[DELTA_DIM];
    __shared__ float gates[2];
    __shared__ u32 is_last;
    u32 head = blockIdx.x, j = threadIdx.x, warp = j >> 5, lane = j & 31, per = p.v_heads / p.k_heads;
    u32 kh = p.tiled ? head % p.k_heads : head / per;
    Run run = ((const Run *)p.runs)[0];
    float state[DELTA_DIM];
    Channel cq, ck, cv;
    const float *old = (const float *)(p.state + run.from) + head * p.state_head + j;
#pragma unroll
    for (u32 i = 0; i < DELTA_DIM; i++) state[i] = old[i * DELTA_DIM];
    cq = channel_of(p.q, run, kh, j);
    ck = channel_of(p.k, run, kh, j);
    cv = channel_of(p.v, run, head, j);
    float factor = real(p.norm_offset) + get(p.norm, 0, 0, j), a_log = get(p.a_log, 0, 0, head), dt = get(p.dt, 0, 0, head);
    wait_for_earlier();
    float xq = *cq.x, xk = *ck.x, xv = *cv.x, open = element(p.z, p.z_dim, head * DELTA_DIM + j);
    // The warps that make no norms make the gates.
    float gate = warp < 2 ? 0.0f : element(warp == 2 ? p.a : p.b, p.gate_dim, head);
    q[j] = convolved(cq, xq);
    k[j] = convolved(ck, xk);
    float v = convolved(cv, xv);
    keep_taps(p.v, run, head, j, cv, xv);
    __syncthreads();
    if (warp < 2) {
        float *x = warp ? k : q;
        float inv = 1.0f / sqrtf(squares_of_head(x, lane) + real(warp ? p.k_eps : p.q_eps)), scale = real(warp ? p.k_scale : p.q_scale);
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < DELTA_DIM / 32; i++) x[lane + 32 * i] = (x[lane + 32 * i] * inv) * scale;
    } else if (j == 64) {
        gates[0] = exp_(-(exp_(a_log) * softplus(gate + dt)));
    } else if (j == 96) {
        gates[1] = sigmoid_(gate);
        // Whoever is the last to have read the taps of queries and keys writes the new ones, which may take the place of the old.
        __threadfence();
        is_last = atomicInc((u32 *)p.counters + kh, per - 1) == per - 1;
    }
    __syncthreads();
    if (is_last) {
        keep_taps(p.q, run, kh, j, cq, xq);
        keep_taps(p.k, run, kh, j, ck, xk);
    }
    float decay = gates[0], beta = gates[1], r = 0.0f, out = 0.0f;
#pragma unroll
    for (u32 i = 0; i < DELTA_DIM; i += 4) {
        float4 key = *(const float4 *)(k + i);
#pragma unroll
        for (u32 t = 0; t < 4; t++) state[i + t] = decay * state[i + t];
        r = fmaf(state[i], key.x, r);
        r = fmaf(state[i + 1], key.y, r);
        r = fmaf(state[i + 2], key.z, r);
        r = fmaf(state[i + 3], key.w, r);
    }
    float d = beta * (v - r);
    float *now = (float *)(p.state + run.to) + head * p.state_head + j;
#pragma unroll
    for (u32 i = 0; i < DELTA_DIM; i += 4) {
        float4 key = *(const float4 *)(k + i), query = *(const float4 *)(q + i);
        state[i] = fmaf(key.x, d, state[i]);
        state[i + 1] = fmaf(key.y, d, state[i + 1]);
        state[i + 2] = fmaf(key.z, d, state[i + 2]);
        state[i + 3] = fmaf(key.w, d, state[i + 3]);
        out = fmaf(state[i], query.x, out);
        out = fmaf(state[i + 1], query.y, out);
        out = fmaf(state[i + 2], query.z, out);
        out = fmaf(state[i + 3], query.w, out);
#pragma unroll
        for (u32 t = 0; t < 4; t++) now[(i + t) * DELTA_DIM] = state[i + t];
    }
    result[j] = out;
    __syncthreads();
    float inv = 1.0f / sqrtf(squares_of_head(result, lane) / (float)DELTA_DIM + real(p.norm_eps));
    u32 n = head * DELTA_DIM + j;
    at<float>(p.out, 0, n / p.out_dim)[n % p.out_dim] = silu_(open) * ((result[j] * inv) * factor);
}
