// Convolutions and the gated delta rule, along each sequence of a step.

enum { MOST_TAPS = 16, CONV_TILE = 32 };

// A thread for a channel and CONV_TILE rows of a run. Outputs read inputs directly, so tiles do not wait for each other; the first tile of
// a run alone reads the old state and writes the new.
DEVICE void conv(const Call &c, bool silu) {
    using A = conv_op::A; using O = conv_op::O;
    u32 ch = INDEX, dim = c.a[A::dim], channels = c.a[A::heads] * dim, kernel = c.a[A::kernel];
    if (ch >= channels) return;
    u32 h = ch / dim, i = ch % dim;
    const Operand &x = c.o[O::x], &weight = c.o[O::weight], &state = c.o[O::state], &out = c.o[O::out];
    u32 tile = blockIdx.y, runs = c.step.head[0], q = 0;
    Run run;
    for (; q < runs; q++) {
        run = c.step.runs[q];
        u32 tiles = (run.rows + CONV_TILE - 1) / CONV_TILE;
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (q == runs) return;
    u32 begin = tile * CONV_TILE, end = begin + CONV_TILE < run.rows ? begin + CONV_TILE : run.rows;
    float w[MOST_TAPS], taps[MOST_TAPS];
    const float *old = (const float *)(state.at + run.from) + ch;
#pragma unroll
    for (u32 t = 0; t < MOST_TAPS; t++) {
        w[t] = t < kernel ? get(weight, ch, 0, t) : 0.0f;
        // Tap t of the row before `begin`, shifted once below: rows begin - kernel + 1 + t.
        float v = 0.0f;
        if (t + 1 < kernel) v = begin + t + 1 < kernel ? old[t * state.row] : at<float>(x, run.first + begin + t + 1 - kernel, h)[i];
        taps[t] = v;
    }
    for (u32 r = begin; r < end; r++) {
        float in = at<float>(x, run.first + r, h)[i], acc = 0.0f;
#pragma unroll
        for (u32 t = 0; t < MOST_TAPS; t++)
            if (t < kernel) acc = fmaf(w[t], t + 1 < kernel ? taps[t] : in, acc);
        at<float>(out, run.first + r, 0)[ch] = silu ? silu_(acc) : acc;
#pragma unroll
        for (u32 t = 0; t + 1 < MOST_TAPS; t++)
            if (t + 1 < kernel) taps[t] = t + 2 < kernel ? taps[t + 1] : in;
        if (begin == 0 && run.stride) {
            float *now = (float *)(state.at + run.to + r * run.stride) + ch;
            for (u32 t = 0; t + 1 < kernel; t++) now[t * state.row] = taps[t];
        }
    }
    if (begin == 0 && !run.stride) {
        // The state after the run's last row: its last inputs, and before them old ones.
        float *now = (float *)(state.at + run.to) + ch;
        if (end < run.rows) {
            for (u32 t = 0; t + 1 < kernel; t++) now[t * state.row] = at<float>(x, run.first + run.rows + t + 1 - kernel, h)[i];
        } else {
#pragma unroll
            for (u32 t = 0; t + 1 < MOST_TAPS; t++)
                if (t + 1 < kernel) now[t * state.row] = taps[t];
        }
    }
}

extern "C" __global__ void conv_plain(const Call c) {
    wait_for_earlier();
    conv(c, false);
}

extern "C" __global__ void conv_silu(const Call c) {
    wait_for_earlier();
    conv(c, true);
}

// ln(1 + x) in f64 with the steps of the CPU's: 1 + x as 2^k times a number near 1, its logarithm by a polynomial in f / (2 + f), and
// the error of 1 + x put back.
DEVICE double log1p_(double x) {
    u64 bits = (u64)__double_as_longlong(x);
    u32 hx = (u32)(bits >> 32);
    double f = x, c = 0.0;
    int k = 1;
    if (hx < 0x3fda827a || hx >> 31) {
        // What is asked for is never negative.
        if (hx >= 0xbff00000) return __longlong_as_double(0x7ff8000000000000ll);
        if (hx << 1 < 0x3ca00000u << 1) return x;
        if (hx <= 0xbfd2bec4) k = 0;
    } else if (hx >= 0x7ff00000) {
        return x;
    }
    if (k > 0) {
        double u = 1.0 + x;
        u64 ub = (u64)__double_as_longlong(u);
        u32 hu = (u32)(ub >> 32) + (0x3ff00000 - 0x3fe6a09e);
        k = (int)(hu >> 20) - 0x3ff;
        c = k < 54 ? (k >= 2 ? 1.0 - (u - x) : x - (u - 1.0)) / u : 0.0;
        hu = (hu & 0x000fffff) + 0x3fe6a09e;
        f = __longlong_as_double((long long)((u64)hu << 32 | (ub & 0xffffffff))) - 1.0;
    }
    double hfsq = 0.5 * f * f, s = f / (2.0 + f), z = s * s, w = z * z;
    double t1 = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    double t2 = z * (6.666666666666735130e-01 +
                     w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    double r = t2 + t1, dk = (double)k;
    return s * (hfsq + r) + (dk * 1.90821492927058770002e-10 + c) - hfsq + f + dk * 6.93147180369123816490e-01;
}

DEVICE float softplus(float x) { return x > 20.0f ? x : (float)log1p_((double)exp_(x)); }

extern "C" __global__ void gdn_gates(const Call c) {
    using A = gdn_gates_op::A; using O = gdn_gates_op::O;
    wait_for_earlier();
    u32 n = INDEX, r = blockIdx.y, dim = c.a[A::dim];
    if (n >= c.a[A::heads] * dim) return;
    u32 h = n / dim, i = n % dim;
    float a = at<float>(c.o[O::a], r, h)[i], b = at<float>(c.o[O::b], r, h)[i];
    float a_log = get(c.o[O::a_log], 0, 0, n), dt = get(c.o[O::dt_bias], 0, 0, n);
    at<float>(c.o[O::decay], r, 0)[n] = exp_(-(exp_(a_log) * softplus(a + dt)));
    at<float>(c.o[O::beta], r, 0)[n] = sigmoid_(b);
}

struct Scan {
    Operand q, k, v, decay, beta, state, out;
    u32 k_heads, v_heads, k_dim, v_dim, tiled;
};

DEVICE Scan scan_of(const Call &c) {
    using A = gdn_scan_op::A; using O = gdn_scan_op::O;
    Scan s = {c.o[O::q], c.o[O::k], c.o[O::v], c.o[O::decay], c.o[O::beta], c.o[O::state], c.o[O::out], (u32)c.a[A::k_heads], (u32)c.a[A::v_heads], (u32)c.a[A::k_dim], (u32)c.a[A::v_dim], (u32)c.a[A::tiled]};
    return s;
}

DEVICE u32 key_head(const Scan &s, u32 v) {
    if (s.tiled) return v % s.k_heads;
    u32 per = s.v_heads / s.k_heads, h = v / (per ? per : 1);
    return h < s.k_heads ? h : s.k_heads - 1;
}

// A thread for a column of a head's state, which it alone reads and writes; blockIdx.z is the run.
extern "C" __global__ void gdn_scan(const Call c) {
    wait_for_earlier();
    Scan s = scan_of(c);
    u32 head = blockIdx.y, j = INDEX;
    if (blockIdx.z >= c.step.head[0] || j >= s.v_dim) return;
    Run run = c.step.runs[blockIdx.z];
    u32 kh = key_head(s, head);
    for (u32 t = 0; t < run.rows; t++) {
        u64 from = t == 0 ? run.from : run.to + (t - 1) * run.stride, to = run.to + t * run.stride;
        const float *old = (const float *)(s.state.at + from) + head * s.state.row + j;
        float *now = (float *)(s.state.at + to) + head * s.state.row + j;
        u32 row = run.first + t;
        const float *q = at<float>(s.q, row, kh), *k = at<float>(s.k, row, kh);
        float decay = at<float>(s.decay, row, 0)[head], beta = at<float>(s.beta, row, 0)[head], r = 0.0f, out = 0.0f;
        for (u32 i = 0; i < s.k_dim; i++) r = fmaf(decay * old[(u64)i * s.state.head], k[i], r);
        float d = beta * (at<float>(s.v, row, head)[j] - r);
        for (u32 i = 0; i < s.k_dim; i++) {
            float x = fmaf(k[i], d, decay * old[(u64)i * s.state.head]);
            now[(u64)i * s.state.head] = x;
            out = fmaf(x, q[i], out);
        }
        at<float>(s.out, row, head)[j] = out;
    }
}

// The same with 128 rows of state, held in registers from row to row. A sum over them is a chain of 128; that of what a row gives is made
// beside that of what the next one recalls. Rows' operands come four rows ahead.
struct __align__(16) Scanned {
    float q[128], k[128], v[64], decay, beta;
};

extern "C" __global__ void __launch_bounds__(64) gdn_scan_128(const Call c) {
    __shared__ __align__(16) Scanned rows[8];
    wait_for_earlier();
    Scan s = scan_of(c);
    u32 head = blockIdx.y, j = INDEX;
    if (blockIdx.z >= c.step.head[0]) return;
    Run run = c.step.runs[blockIdx.z];
    u32 kh = key_head(s, head), lane = j < s.v_dim ? j : s.v_dim - 1;
    auto ask = [&](u32 t) {
        if (t < run.rows) {
            Scanned &to = rows[t % 8];
            u32 row = run.first + t;
            const float *q = at<float>(s.q, row, kh), *k = at<float>(s.k, row, kh);
            for (u32 i = threadIdx.x; i < 128; i += 64) {
                copy_ahead<4>((u32)__cvta_generic_to_shared(to.q + i), q + i);
                copy_ahead<4>((u32)__cvta_generic_to_shared(to.k + i), k + i);
            }
            copy_ahead<4>((u32)__cvta_generic_to_shared(to.v + threadIdx.x), at<float>(s.v, row, head) + lane);
            if (threadIdx.x == 0) copy_ahead<4>((u32)__cvta_generic_to_shared(&to.decay), at<float>(s.decay, row, 0) + head);
            if (threadIdx.x == 1) copy_ahead<4>((u32)__cvta_generic_to_shared(&to.beta), at<float>(s.beta, row, 0) + head);
        }
        copies_end();
    };
    for (u32 t = 0; t < 4; t++) ask(t);
    const float *old = (const float *)(s.state.at + run.from) + head * s.state.row + lane;
    float state[128], r = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 128; i++) state[i] = old[(u64)i * s.state.head];
    copies_wait<3>();
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < 128; i++) {
        if (i % 16 == 0) asm volatile("" ::: "memory");
        state[i] = rows[0].decay * state[i];
        r = fmaf(state[i], rows[0].k[i], r);
    }
    for (u32 t = 0; t < run.rows; t++) {
        // This row's and the next one's.
        copies_wait<2>();
        __syncthreads();
        ask(t + 4);
        const Scanned &now = rows[t % 8], &next = rows[(t + 1) % 8];
        float d = now.beta * (now.v[threadIdx.x] - r), out = 0.0f;
        bool last = t + 1 == run.rows, kept = last || run.stride;
        r = 0.0f;
        if (kept) {
#pragma unroll
            for (u32 i = 0; i < 128; i++) {
                // Operands are not asked for long before they are wanted: there are no registers for them.
                if (i % 16 == 0) asm volatile("" ::: "memory");
                state[i] = fmaf(now.k[i], d, state[i]);
                out = fmaf(state[i], now.q[i], out);
            }
            if (j < s.v_dim) {
                float *to = (float *)(s.state.at + run.to + t * run.stride) + head * s.state.row + j;
#pragma unroll
                for (u32 i = 0; i < 128; i++) to[(u64)i * s.state.head] = state[i];
            }
            if (!last)
#pragma unroll
                for (u32 i = 0; i < 128; i++) {
                    if (i % 16 == 0) asm volatile("" ::: "memory");
                    state[i] = next.decay * state[i];
                    r = fmaf(state[i], next.k[i], r);
                }
        } else {
#pragma unroll
            for (u32 i = 0; i < 128; i++) {
                if (i % 16 == 0) asm volatile("" ::: "memory");
                state[i] = fmaf(now.k[i], d, state[i]);
                out = fmaf(state[i], now.q[i], out);
                state[i] = next.decay * state[i];
                r = fmaf(state[i], next.k[i], r);
            }
        }
        if (j < s.v_dim) at<float>(s.out, run.first + t, head)[j] = out;
    }
}
