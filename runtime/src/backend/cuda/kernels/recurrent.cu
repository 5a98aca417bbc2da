// Convolutions and the gated delta rule, along each sequence of a step.

enum { MOST_TAPS = 16, CONV_TILE = 32 };

// A thread for a channel and CONV_TILE rows of a run, of at most TAPS taps. Outputs read inputs directly, so tiles do not wait for each other; the first tile of
// a run alone reads the old state and writes the new.
template <u32 TAPS> DEVICE void conv(const Call &c, bool silu) {
    using A = conv_op::A; using O = conv_op::O;
    u32 ch = INDEX, dim = c.a[A::dim], channels = c.a[A::heads] * dim, kernel = c.a[A::kernel];
    if (ch >= channels) return;
    u32 h = ch / dim, i = ch % dim;
    const Operand &x = c.o[O::x], &weight = c.o[O::weight], &state = c.o[O::state], &out = c.o[O::out];
    u32 tile = blockIdx.y;
    Run run;
    if (!run_of_tile(c.step, CONV_TILE, tile, run)) return;
    u32 begin = tile * CONV_TILE, end = begin + CONV_TILE < run.rows ? begin + CONV_TILE : run.rows;
    float w[TAPS], taps[TAPS];
    const float *old = (const float *)(state.at + run.from) + ch;
#pragma unroll
    for (u32 t = 0; t < TAPS; t++) {
        w[t] = t < kernel ? get(weight, ch, 0, t) : 0.0f;
        // Tap t of the row before `begin`, shifted once below: rows begin - kernel + 1 + t.
        float v = 0.0f;
        if (t + 1 < kernel) v = begin + t + 1 < kernel ? old[t * state.row] : at<float>(x, run.first + begin + t + 1 - kernel, h)[i];
        taps[t] = v;
    }
    // Inputs of four rows are asked for together.
    constexpr u32 ASKED = 4;
    for (u32 r0 = begin; r0 < end; r0 += ASKED) {
        float in[ASKED];
#pragma unroll
        for (u32 n = 0; n < ASKED; n++) in[n] = at<float>(x, run.first + (r0 + n < end ? r0 + n : end - 1), h)[i];
#pragma unroll
        for (u32 n = 0; n < ASKED; n++) {
            u32 r = r0 + n;
            if (r >= end) break;
            float acc = 0.0f;
#pragma unroll
            for (u32 t = 0; t < TAPS; t++)
                if (t < kernel) acc = fmaf(w[t], t + 1 < kernel ? taps[t] : in[n], acc);
            at<float>(out, run.first + r, 0)[ch] = silu ? silu_(acc) : acc;
#pragma unroll
            for (u32 t = 0; t + 1 < TAPS; t++)
                if (t + 1 < kernel) taps[t] = t + 2 < kernel ? taps[t + 1] : in[n];
            if (begin == 0 && run.stride) {
                float *now = (float *)(state.at + run.to + r * run.stride) + ch;
#pragma unroll
                for (u32 t = 0; t + 1 < TAPS; t++)
                    if (t + 1 < kernel) now[t * state.row] = taps[t];
            }
        }
    }
    if (begin == 0 && !run.stride) {
        // The state after the run's last row: its last inputs, and before them old ones.
        float *now = (float *)(state.at + run.to) + ch;
        if (end < run.rows) {
            for (u32 t = 0; t + 1 < kernel; t++) now[t * state.row] = at<float>(x, run.first + run.rows + t + 1 - kernel, h)[i];
        } else {
#pragma unroll
            for (u32 t = 0; t + 1 < TAPS; t++)
                if (t + 1 < kernel) now[t * state.row] = taps[t];
        }
    }
}

#define CONV(name, taps, silu) \
    extern "C" __global__ void name(const Call c) { wait_for_earlier(); conv<taps>(c, silu); }
CONV(conv_plain, MOST_TAPS, false)
CONV(conv_silu, MOST_TAPS, true)
CONV(conv_plain_4, 4, false)
CONV(conv_silu_4, 4, true)

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

// The same with 128 rows of state: a block has 32 columns of a head and four warps. Each sum over the rows is a chain of 128, so the first
// warp does no more than what the next row waits for: it finds what is recalled, a lane a column, state in registers. The second and third, up
// to seven rows later, sum what rows give from a state of their own: a lane has two columns and a quarter of their rows, so that a key or
// query serves two sums, and the lanes with the next quarter are a row behind those before them, whose sums they go on with. The last warp
// brings operands to shared memory, two lots ahead.
enum { SCAN_COLUMNS = 32, SCAN_LOT = 4, SCAN_ROWS = 8 * SCAN_LOT, SCAN_PARTS = 4, SCAN_PART = 128 / SCAN_PARTS, SCAN_SLOTS = 8, SCAN_AHEAD = 5, SCAN_ASKED = 4 };

struct __align__(16) Scanned {
    float q[128], k[128], v[SCAN_COLUMNS], decay, beta, unused[2];
};

DEVICE void four_of(float *to, const float *from) {
    float4 x = *(const float4 *)from;
    to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w;
}

// What the warps of a block know.
struct ScanPart {
    Scan s;
    Run run;
    u32 head, kh, column0, lane;
    Scanned *rows;
    // What rows add to each column of the state, in units of their key.
    float (*given)[SCAN_COLUMNS];

    __device__ __forceinline__ const Scanned &row(u32 t) const { return rows[t % SCAN_ROWS]; }
    __device__ __forceinline__ u32 column(u32 n) const { return column0 + n < s.v_dim ? column0 + n : s.v_dim - 1; }
    // Lots of the warps that are a lot behind the first, the last quarter of whose lanes has three rows more to go.
    __device__ __forceinline__ u32 lots() const { return (run.rows + SCAN_PARTS - 1 + SCAN_LOT - 1) / SCAN_LOT; }
};

DEVICE void bring_scanned(const ScanPart &p, u32 lot) {
    for (u32 t = lot * SCAN_LOT; t < (lot + 1) * SCAN_LOT && t < p.run.rows; t++) {
        Scanned &to = p.rows[t % SCAN_ROWS];
        u32 row = p.run.first + t, lane = p.lane;
        auto bring = [&](float *to, const float *from) {
            u32 into = (u32)__cvta_generic_to_shared(to);
            if ((u64)from % 16 == 0) copy_ahead<16>(into + 16 * lane, from + 4 * lane);
            else for (u32 i = lane; i < 128; i += 32) copy_ahead<4>(into + 4 * i, from + i);
        };
        bring(to.q, at<float>(p.s.q, row, p.kh));
        bring(to.k, at<float>(p.s.k, row, p.kh));
        copy_ahead<4>((u32)__cvta_generic_to_shared(to.v + lane), at<float>(p.s.v, row, p.head) + p.column(lane));
        if (lane == 0) copy_ahead<4>((u32)__cvta_generic_to_shared(&to.decay), at<float>(p.s.decay, row, 0) + p.head);
        if (lane == 1) copy_ahead<4>((u32)__cvta_generic_to_shared(&to.beta), at<float>(p.s.beta, row, 0) + p.head);
    }
    copies_end();
    copies_wait<0>();
}

// What is recalled: a lane a column. Keys come four at a time, five fours of them ahead: this row's to add, the next one's to recall.
DEVICE void scan_recalls(const ScanPart &p) {
    float state[128], now_k[SCAN_SLOTS][4], next_k[SCAN_SLOTS][4], r = 0.0f;
    const float *from = (const float *)(p.s.state.at + p.run.from) + p.head * p.s.state.row + p.column(p.lane);
#pragma unroll
    for (u32 i = 0; i < 128; i++) state[i] = from[(u64)i * p.s.state.head];
    __syncthreads();
    float decay = p.row(0).decay, beta = p.row(0).beta, v = p.row(0).v[p.lane];
#pragma unroll
    for (u32 g = 0; g < 32; g++) {
        float k[4];
        four_of(k, p.row(0).k + 4 * g);
        asm volatile("" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            state[4 * g + i] = decay * state[4 * g + i];
            r = fmaf(state[4 * g + i], k[i], r);
        }
    }
#pragma unroll
    for (u32 g = 0; g < SCAN_AHEAD; g++) {
        four_of(now_k[g], p.row(0).k + 4 * g);
        four_of(next_k[g], p.row(1).k + 4 * g);
    }
    decay = p.row(1).decay;
    for (u32 lot = 0; lot <= p.lots(); lot++) {
        u32 end = (lot + 1) * SCAN_LOT < p.run.rows ? (lot + 1) * SCAN_LOT : p.run.rows - 1;
        for (u32 t = lot * SCAN_LOT; t < end; t++) {
            float d = beta * (v - r), by = decay;
            p.given[t % SCAN_ROWS][p.lane] = d;
            const Scanned &now = p.row(t), &next = p.row(t + 1), &after = p.row(t + 2);
            beta = next.beta;
            v = next.v[p.lane];
            decay = after.decay;
            r = 0.0f;
#pragma unroll
            for (u32 g = 0; g < 32; g++) {
                u32 ahead = g + SCAN_AHEAD, to = ahead % SCAN_SLOTS, at = g % SCAN_SLOTS;
                four_of(now_k[to], ahead < 32 ? now.k + 4 * ahead : next.k + 4 * (ahead - 32));
                four_of(next_k[to], ahead < 32 ? next.k + 4 * ahead : after.k + 4 * (ahead - 32));
                // Operands are not asked for long before they are wanted: there are no registers for them.
                asm volatile("" ::: "memory");
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    state[4 * g + i] = by * fmaf(now_k[at][i], d, state[4 * g + i]);
                    r = fmaf(state[4 * g + i], next_k[at][i], r);
                }
            }
        }
        // Nothing waits for what the last row leaves, which is all of a step of one row.
        if (end / SCAN_LOT == lot && end + 1 == p.run.rows) p.given[end % SCAN_ROWS][p.lane] = beta * (v - r);
        __syncthreads();
    }
}

// What rows give, and the state after the last of them or after each; `which` half of the columns.
DEVICE void scan_gives(const ScanPart &p, u32 which) {
    float x[SCAN_PART], y[SCAN_PART], k[SCAN_ASKED][4], q[SCAN_ASKED][4], first = 0.0f, second = 0.0f;
    u32 lanes = 32 / SCAN_PARTS, part = p.lane / lanes, pair = which * (SCAN_COLUMNS / 2) + p.lane % lanes * 2, column = p.column0 + pair;
    u64 step = p.s.state.head, base = p.head * (u64)p.s.state.row + part * SCAN_PART * step;
    const float *from = (const float *)(p.s.state.at + p.run.from) + base, *of_x = from + p.column(pair), *of_y = from + p.column(pair + 1);
#pragma unroll
    for (u32 i = 0; i < SCAN_PART; i++) {
        x[i] = of_x[i * step];
        y[i] = of_y[i * step];
    }
    __syncthreads();
    for (u32 lot = 0; lot <= p.lots(); lot++) {
        for (u32 n = 0; n < SCAN_LOT && lot > 0; n++) {
            u32 t = (lot - 1) * SCAN_LOT + n - part;
            if (t < p.run.rows) {
                const Scanned &now = p.row(t);
                const float *keys = now.k + part * SCAN_PART, *queries = now.q + part * SCAN_PART;
                float2 d = *(const float2 *)(p.given[t % SCAN_ROWS] + pair);
                float decay = now.decay;
#pragma unroll
                for (u32 g = 0; g + 1 < SCAN_ASKED; g++) {
                    four_of(k[g], keys + 4 * g);
                    four_of(q[g], queries + 4 * g);
                }
#pragma unroll
                for (u32 g = 0; g < SCAN_PART / 4; g++) {
                    u32 ahead = g + SCAN_ASKED - 1, to = ahead % SCAN_ASKED, at = g % SCAN_ASKED;
                    if (ahead < SCAN_PART / 4) {
                        four_of(k[to], keys + 4 * ahead);
                        four_of(q[to], queries + 4 * ahead);
                    }
                    asm volatile("" ::: "memory");
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        float &a = x[4 * g + i], &b = y[4 * g + i];
                        a = fmaf(k[at][i], d.x, decay * a);
                        b = fmaf(k[at][i], d.y, decay * b);
                        first = fmaf(a, q[at][i], first);
                        second = fmaf(b, q[at][i], second);
                    }
                }
                if (part == SCAN_PARTS - 1) {
                    float *out = at<float>(p.s.out, p.run.first + t, p.head) + column;
                    if (column < p.s.v_dim) out[0] = first;
                    if (column + 1 < p.s.v_dim) out[1] = second;
                }
                if (t + 1 == p.run.rows || p.run.stride) {
                    float *to = (float *)(p.s.state.at + p.run.to + t * p.run.stride) + base + column;
#pragma unroll
                    for (u32 i = 0; i < SCAN_PART; i++, to += step) {
                        if (column < p.s.v_dim) to[0] = x[i];
                        if (column + 1 < p.s.v_dim) to[1] = y[i];
                    }
                }
            }
            // The next quarter goes on with this one's sums.
            first = __shfl_up_sync(FULL, first, lanes);
            second = __shfl_up_sync(FULL, second, lanes);
            if (part == 0) first = second = 0.0f;
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(128, 1) gdn_scan_128(const Call c) {
    __shared__ __align__(16) Scanned rows[SCAN_ROWS];
    __shared__ __align__(16) float given[SCAN_ROWS][SCAN_COLUMNS];
    wait_for_earlier();
    if (blockIdx.z >= c.step.head[0]) return;
    Scan s = scan_of(c);
    ScanPart p = {s, c.step.runs[blockIdx.z], blockIdx.y, key_head(s, blockIdx.y), blockIdx.x * SCAN_COLUMNS, threadIdx.x & 31, rows, given};
    u32 warp = threadIdx.x >> 5;
    if (warp == 0) {
        scan_recalls(p);
    } else if (warp < 3) {
        scan_gives(p, warp - 1);
    } else {
        bring_scanned(p, 0);
        bring_scanned(p, 1);
        __syncthreads();
        for (u32 lot = 0; lot <= p.lots(); lot++) {
            bring_scanned(p, lot + 2);
            __syncthreads();
        }
    }
}
