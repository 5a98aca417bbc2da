// One row at a time, one short kernel a role: what a decode step does most is done by these, so that few instructions are fetched and
// issued for it. Sizes are known to the compiler, types are the usual ones.
//
// The arithmetic is that of linear.cu and attention.cu, which do the rest: other widths, other rows, other shapes. What no earlier kernel
// of the step makes is asked for before the wait: weights, norms, and of attention where its row is, keys and values, which earlier
// steps wrote, or kernels before the last one at the latest.

enum { ROW_GROUP = 64, ROW_WARPS = 8, ROW_THREADS = 256 };

// A product of one row with weights of four bits in groups of 64, whose parameters are BF16.
struct RowProduct {
    u64 w, s, b;
    // Values; the weight of their norm, BF16; the result; what is added to it.
    u64 x, y, out, add;
    // What is added to the values before their norm, and where the sum and the normalised row go; 0 where not.
    u64 x2, sum, normed;
    // State that the next kernel reads, from the version on that the first of these runs reads, and its bytes; 0 where not.
    u64 ahead, runs;
    // Bytes from a row of codes, and of parameters, to the next.
    u32 w_row, s_row;
    u32 outputs, eps, offset, ahead_bytes;
};

DEVICE float brain(u32 bits) { return __uint_as_float(bits << 16); }

// The code of an activation times the inverse of its scale, in the lowest byte: rounded as rintf does, by a sum whose last place is one. A NaN
// takes code 0, and so does what a group of zeros has, which is multiplied with infinity.
DEVICE u32 row_code(float q) {
    q = q == q ? q : 0.0f;
    return __float_as_uint(fminf(fmaxf(q, -127.0f), 127.0f) + 12582912.0f);
}

// Where a row of weights is: codes, scales, biases.
struct RowAt {
    const u8 *w, *s, *b;
};

// What a lane has asked for of OUT rows of weights, as it is stored: its 32 codes of each 1,024, and sixteen bytes of all rows' parameters.
template <int BITS, int OUT, int CHUNKS> struct RowWeights {
    uint4 raw[OUT][CHUNKS][BITS / 4];
    uint4 params[(4 * CHUNKS * OUT + 31) / 32];
};

// Sixteen bytes are eight groups' scales, or biases: PIECES of a row.
#define PIECES (2 * CHUNKS)

// Asks for rows; `at` says where row o is.
template <int BITS, int OUT, int CHUNKS, class At> DEVICE void row_ask(RowWeights<BITS, OUT, CHUNKS> &a, At at) {
    u32 lane = threadIdx.x & 31;
#pragma unroll
    for (u32 o = 0; o < OUT; o++) {
        const uint4 *codes = (const uint4 *)at(o).w + lane * (BITS / 4);
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++)
#pragma unroll
            for (u32 i = 0; i < BITS / 4; i++) a.raw[o][c][i] = codes[c * 32 * (BITS / 4) + i];
    }
    // A piece a lane, or two.
#pragma unroll
    for (u32 i = 0; i * 32 < 2 * PIECES * OUT; i++) {
        u32 piece = i * 32 + lane;
        if (piece < 2 * PIECES * OUT) {
            RowAt row = at(piece / (2 * PIECES));
            a.params[i] = *((const uint4 *)(piece / PIECES % 2 ? row.b : row.s) + piece % PIECES);
        }
    }
}

// The dot of 32 codes with as many of a staged row.
template <int BITS> DEVICE int row_dot(const uint4 *raw, const uint4 &a, const uint4 &e) {
    u32 q[8];
    if (BITS == 4) {
        unpack_q4(raw[0].x, q);
        unpack_q4(raw[0].y, q + 2);
        unpack_q4(raw[0].z, q + 4);
        unpack_q4(raw[0].w, q + 6);
    } else {
        q[0] = raw[0].x, q[1] = raw[0].y, q[2] = raw[0].z, q[3] = raw[0].w;
        q[4] = raw[BITS / 4 - 1].x, q[5] = raw[BITS / 4 - 1].y, q[6] = raw[BITS / 4 - 1].z, q[7] = raw[BITS / 4 - 1].w;
    }
    int low = dot_u8(q[3], a.w, dot_u8(q[2], a.z, dot_u8(q[1], a.y, dot_u8(q[0], a.x, 0))));
    int high = dot_u8(q[7], e.w, dot_u8(q[6], e.z, dot_u8(q[5], e.y, dot_u8(q[4], e.x, 0))));
    return low + high;
}

// Where a staged row lies in shared memory: its codes, and scales and sums of its groups.
struct RowStaged {
    i8 *codes;
    float *scales, *sums;
};

// A place for a row of 1,024 * CHUNKS values in groups of GROUP; `rest` is what lies behind it.
template <int CHUNKS, int GROUP = ROW_GROUP> DEVICE RowStaged row_staged(float4 *&rest) {
    constexpr u32 GROUPS = 1024 * CHUNKS / GROUP;
    RowStaged to;
    to.codes = (i8 *)shared;
    to.scales = (float *)(shared + 1024 * CHUNKS);
    to.sums = to.scales + GROUPS;
    rest = (float4 *)(to.sums + GROUPS);
    return to;
}

// What the folds of outputs take, in shared memory: of each the dots of its groups, then its scales and biases. Sixteen bytes are over, so that
// eight outputs are read without two in one bank.
template <int GROUPS> struct RowFolds {
    static constexpr u32 DOTS = GROUPS + 4, PARAMS = GROUPS / 4 + 1;
    float *dots;
    uint4 *params;
};

// Room for so many outputs' folds.
template <int GROUPS> DEVICE RowFolds<GROUPS> row_folds(float4 *room, u32 outputs) {
    RowFolds<GROUPS> to;
    to.dots = (float *)room;
    to.params = (uint4 *)(to.dots + outputs * RowFolds<GROUPS>::DOTS);
    return to;
}

// Leaves what the folds take of OUT rows of weights, from output `first` of the block on.
template <int BITS, int OUT, int CHUNKS>
DEVICE void row_dots(const RowWeights<BITS, OUT, CHUNKS> &w, const RowStaged &x, const RowFolds<16 * CHUNKS> &to, u32 first) {
    typedef RowFolds<16 * CHUNKS> Folds;
    u32 lane = threadIdx.x & 31;
    int d[OUT][CHUNKS];
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) {
        u32 u = c * 32 + lane;
        uint4 a = ((const uint4 *)x.codes)[2 * u], e = ((const uint4 *)x.codes)[2 * u + 1];
#pragma unroll
        for (u32 o = 0; o < OUT; o++) d[o][c] = row_dot<BITS>(w.raw[o][c], a, e);
    }
#pragma unroll
    for (u32 o = 0; o < OUT; o++)
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) d[o][c] += __shfl_xor_sync(FULL, d[o][c], 1);
#pragma unroll
    for (u32 i = 0; i * 32 < 2 * PIECES * OUT; i++) {
        u32 piece = i * 32 + lane;
        if (piece < 2 * PIECES * OUT) to.params[(first + piece / (2 * PIECES)) * Folds::PARAMS + piece % (2 * PIECES)] = w.params[i];
    }
    // Both lanes of a group have the same.
    if (lane & 1) return;
#pragma unroll
    for (u32 o = 0; o < OUT; o++)
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) to.dots[(first + o) * Folds::DOTS + c * 16 + lane / 2] = (float)d[o][c];
}

DEVICE float row_fold_two(float acc, u32 s, u32 b, float2 d, float2 scale, float2 sum) {
    acc = fmaf(brain(b), sum.x, fmaf(brain(s) * scale.x, d.x, acc));
    return fmaf(brain(b >> 16), sum.y, fmaf(brain(s >> 16) * scale.y, d.y, acc));
}

// Folds the groups of an output in order; `scales` and `sums` are the row's.
template <int GROUPS> DEVICE float row_fold(const RowFolds<GROUPS> &from, u32 output, const float *scales, const float *sums) {
    typedef RowFolds<GROUPS> Folds;
    const float4 *dots = (const float4 *)(from.dots + output * Folds::DOTS), *scale = (const float4 *)scales, *sum = (const float4 *)sums;
    const uint4 *params = from.params + output * Folds::PARAMS;
    float acc = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < GROUPS / 8; i++) {
        uint4 s = params[i], b = params[GROUPS / 8 + i];
        float4 d = dots[2 * i], e = dots[2 * i + 1], q = scale[2 * i], r = scale[2 * i + 1], m = sum[2 * i], n = sum[2 * i + 1];
        acc = row_fold_two(acc, s.x, b.x, make_float2(d.x, d.y), make_float2(q.x, q.y), make_float2(m.x, m.y));
        acc = row_fold_two(acc, s.y, b.y, make_float2(d.z, d.w), make_float2(q.z, q.w), make_float2(m.z, m.w));
        acc = row_fold_two(acc, s.z, b.z, make_float2(e.x, e.y), make_float2(r.x, r.y), make_float2(n.x, n.y));
        acc = row_fold_two(acc, s.w, b.w, make_float2(e.z, e.w), make_float2(r.z, r.w), make_float2(n.z, n.w));
    }
    return acc;
}

// The int8 form of N groups, of each of which LANES lanes have four values. The first group's four go to `codes`, those of the next `step` bytes
// on; its scale and sum to `scales` and `sums`, the next's `places` on.
template <int N, int LANES = ROW_GROUP / 4> DEVICE void row_codes(const float4 *v, i8 *codes, u32 step, float *scales, float *sums, u32 places) {
    static_assert(N <= LANES, "a group a lane");
    u32 lane = threadIdx.x & 31;
    // fmaxf ignores a NaN. Values past the largest float take the code of that, as the largest does itself.
    float largest[N];
#pragma unroll
    for (u32 c = 0; c < N; c++) {
        float m = fmaxf(fmaxf(fmaxf(fabsf(v[c].x), fabsf(v[c].y)), fmaxf(fabsf(v[c].z), fabsf(v[c].w))), 0.0f);
        largest[c] = fminf(m, __uint_as_float(0x7f7fffffu));
    }
#pragma unroll
    for (u32 d = LANES / 2; d; d >>= 1)
#pragma unroll
        for (u32 c = 0; c < N; c++) largest[c] = fmaxf(largest[c], __shfl_xor_sync(FULL, largest[c], d));
    int total[N];
#pragma unroll
    for (u32 c = 0; c < N; c++) {
        float inverse = 127.0f / largest[c];
        u32 a = row_code(v[c].x * inverse), b = row_code(v[c].y * inverse), e = row_code(v[c].z * inverse), f = row_code(v[c].w * inverse);
        u32 four = prmt(prmt(a, b, 0x0040), prmt(e, f, 0x0040), 0x5410);
        *(u32 *)(codes + c * step) = four;
        total[c] = dot_s8(four, 0x01010101, 0);
    }
#pragma unroll
    for (u32 d = LANES / 2; d; d >>= 1)
#pragma unroll
        for (u32 c = 0; c < N; c++) total[c] += __shfl_xor_sync(FULL, total[c], d);
    // A lane divides for one of the groups.
    float top = largest[N - 1];
    int sum = total[N - 1];
#pragma unroll
    for (int c = N - 2; c >= 0; c--) {
        top = lane % LANES <= c ? largest[c] : top;
        sum = lane % LANES <= c ? total[c] : sum;
    }
    if (lane % LANES < N) {
        float scale = top / 127.0f;
        scales[lane % LANES * places] = scale;
        sums[lane % LANES * places] = scale * (float)sum;
    }
}

// The first of a thread's four values of each 128 a warp.
DEVICE u32 row_first() { return threadIdx.x / 16 * ROW_GROUP + threadIdx.x % 16 * 4; }

// A thread's factors of a norm, as they are stored: BF16 or, in sixteen bytes, F32.
template <int CHUNKS> DEVICE void row_factors(const RowProduct &p, uint2 *factors) {
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) factors[c] = *(const uint2 *)((const u16 *)p.y + row_first() + c * 1024);
}
template <int CHUNKS> DEVICE void row_factors(const RowProduct &p, float4 *factors) {
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) factors[c] = *(const float4 *)((const float *)p.y + row_first() + c * 1024);
}
// Four values of a norm.
DEVICE float4 row_normed(float4 v, float inv, float offset, uint2 by) {
    u32 low = by.x, high = by.y;
    return make_float4((v.x * inv) * (offset + brain(low)), (v.y * inv) * (offset + brain(low >> 16)), (v.z * inv) * (offset + brain(high)),
                       (v.w * inv) * (offset + brain(high >> 16)));
}
DEVICE float4 row_normed(float4 v, float inv, float offset, float4 by) {
    return make_float4((v.x * inv) * (offset + by.x), (v.y * inv) * (offset + by.y), (v.z * inv) * (offset + by.z), (v.w * inv) * (offset + by.w));
}

// Stages the row of a product: sum, norm, int8 form. The block that leads leaves the sum and the normalised row where they are wanted; `held`
// has room for a row.
template <int CHUNKS, bool NORM, int WARPS = ROW_WARPS, int GROUP = ROW_GROUP, class Factor>
DEVICE void row_stage(const RowProduct &p, const Factor *factors, const RowStaged &to, float *held, bool leads) {
    constexpr u32 SPAN = WARPS * 128, TURNS = 1024 * CHUNKS / SPAN;
    static_assert(!NORM || WARPS == ROW_WARPS, "factors of 1,024 at a time");
    u32 lane = threadIdx.x & 31, first = row_first();
    const float *x = (const float *)p.x;
    float4 v[TURNS];
#pragma unroll
    for (u32 c = 0; c < TURNS; c++) v[c] = *(const float4 *)(x + first + c * SPAN);
    if (NORM && p.x2) {
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            float4 other = *(const float4 *)((const float *)p.x2 + first + c * 1024);
            v[c] = make_float4(v[c].x + other.x, v[c].y + other.y, v[c].z + other.z, v[c].w + other.w);
            if (p.sum && leads) *(float4 *)((float *)p.sum + first + c * 1024) = v[c];
        }
    }
    if (NORM) {
        // A lane's elements in order. Of 1,024 every warp asks for them by itself; a longer row passes through shared memory, from where one warp reads
        // it, since three blocks of eight that all did would take longer for that than for anything else.
        __shared__ float inverse;
        float acc = 0.0f, all[32];
        if (CHUNKS > 1) {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) *(float4 *)(held + first + c * 1024) = v[c];
            __syncthreads();
        }
        if (CHUNKS == 1 || threadIdx.x < 32) {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                const float *from = (CHUNKS > 1 ? held : x) + c * 1024 + lane;
#pragma unroll
                for (u32 t = 0; t < 32; t++) all[t] = from[t * 32];
                if (CHUNKS == 1 && p.x2) {
#pragma unroll
                    for (u32 t = 0; t < 32; t++) all[t] = all[t] + ((const float *)p.x2)[t * 32 + lane];
                }
#pragma unroll
                for (u32 t = 0; t < 32; t++) acc = fmaf(all[t], all[t], acc);
            }
            acc = rms_inverse(acc, 1024 * CHUNKS, __uint_as_float(p.eps));
        }
        if (CHUNKS > 1) {
            if (threadIdx.x == 0) inverse = acc;
            __syncthreads();
        }
        float inv = CHUNKS > 1 ? inverse : acc, offset = __uint_as_float(p.offset);
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            v[c] = row_normed(v[c], inv, offset, factors[c]);
            if (p.normed && leads) *(float4 *)((float *)p.normed + first + c * 1024) = v[c];
        }
    }
    u32 group = threadIdx.x / (GROUP / 4);
    row_codes<TURNS, GROUP / 4>(v, to.codes + first, SPAN, to.scales + group, to.sums + group, SPAN / GROUP);
}

// How the weights of a product are read: their groups, what a lane asks for, what is left for the folds (`room` becomes what lies behind what is
// needed all the time), and a fold. These are affine ones of four bits; shorts.cu has those in blocks.
struct RowAffine {
    enum { GROUP = ROW_GROUP };
    typedef uint2 Factor;
    template <int OUT, int CHUNKS> using Asked = RowWeights<4, OUT, CHUNKS>;
    template <int OUT, int CHUNKS> using Folds = RowFolds<16 * CHUNKS>;

    template <int OUT, int CHUNKS, int WARPS> METHOD RowFolds<16 * CHUNKS> folds(float4 *&room, u32 outputs) const {
        return row_folds<16 * CHUNKS>(room, outputs);
    }
    template <int OUT, int CHUNKS, class At>
    METHOD void ask(RowWeights<4, OUT, CHUNKS> &to, const RowFolds<16 * CHUNKS> &, At at) const {
        row_ask(to, at);
    }
    template <int OUT, int CHUNKS>
    METHOD void dots(const RowWeights<4, OUT, CHUNKS> &from, const RowStaged &x, const RowFolds<16 * CHUNKS> &to, u32 first) const {
        row_dots(from, x, to, first);
    }
    template <int OUT, int CHUNKS> METHOD float fold(const RowFolds<16 * CHUNKS> &from, u32 output, const RowStaged &x) const {
        return row_fold(from, output, x.scales, x.sums);
    }
    // Where a row's third plane is, which is as the second, and whether outputs are pairs where the compiler does not know.
    METHOD u64 third(u32, u64 second) const { return second; }
    METHOD bool are_pairs() const { return false; }
};

// OUT outputs a warp of 1,024 * CHUNKS inputs, by block `block` of `blocks`. With PAIRS outputs are pairs (o, o + outputs / 2) of which
// silu(first) * second is kept; with LOOP a block goes on to further outputs. A block's outputs are all there.
//
// Shared memory: [inputs] codes, [groups] scales, sums, then what the folds of WARPS * OUT outputs take, twice with LOOP; in its place the row
// itself before.
enum { NO_PAIRS = 0, ALL_PAIRS = 1, TOLD_PAIRS = 2 };
template <int OUT, int CHUNKS, bool NORM, int PAIRS, bool LOOP, int WARPS = ROW_WARPS, class Weights>
DEVICE void row_product(const RowProduct &p, const Weights &kind, u32 block, u32 blocks) {
    constexpr u32 OUTS = WARPS * OUT;
    float4 *room;
    RowStaged x = row_staged<CHUNKS, Weights::GROUP>(room);
    auto folds = kind.template folds<OUT, CHUNKS, WARPS>(room, LOOP ? 2 * OUTS : OUTS);
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 first_out = block * OUTS, step = blocks * OUTS;
    bool pairs = PAIRS == TOLD_PAIRS ? kind.are_pairs() : PAIRS == ALL_PAIRS;
    typename Weights::template Asked<OUT, CHUNKS> weights;
    auto ask = [&](u32 first) {
        kind.template ask<OUT, CHUNKS>(weights, folds, [&](u32 o) {
            u32 row = pairs ? (o & 1) * (p.outputs / 2) + (first + o) / 2 : first + o;
            // Cast before anything is added, so that the compiler sees memory of the device.
            u64 params = (u64)row * p.s_row;
            return RowAt{(const u8 *)p.w + (u64)row * p.w_row, (const u8 *)p.s + params, (const u8 *)p.b + kind.third(row, params)};
        });
    };
    ask(first_out + warp * OUT);
    typename Weights::Factor factors[CHUNKS];
    if (NORM) row_factors<CHUNKS>(p, factors);
    u64 ahead = NORM && !LOOP && p.ahead ? p.ahead + ((const Run *)p.runs)->from : 0;
    wait_for_earlier();
    float added = !PAIRS && !LOOP && p.add && threadIdx.x < OUTS ? ((const float *)p.add)[first_out + threadIdx.x] : 0.0f;
    row_stage<CHUNKS, NORM, WARPS, Weights::GROUP>(p, factors, x, (float *)room, blockIdx.x == 0);
    u32 line = (blockIdx.x * 32 * WARPS + threadIdx.x) * 128;
    if (ahead && line < p.ahead_bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(ahead + line));
    __syncthreads();
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        u32 mine = LOOP ? turn % 2 * OUTS : 0;
        kind.template dots<OUT, CHUNKS>(weights, x, folds, mine + warp * OUT);
        u32 now = first_out;
        first_out += step;
        if (LOOP && first_out < p.outputs) ask(first_out + warp * OUT);
        __syncthreads();
        // A lane folds an output: the first warps, or with LOOP one warp after the other, while the rest go on.
        u32 t = LOOP ? lane : threadIdx.x;
        if (LOOP ? warp == turn % WARPS : warp * 32 < OUTS) {
            float acc = kind.template fold<OUT, CHUNKS>(folds, mine + (t < OUTS ? t : 0), x);
            if (pairs) {
                float second = __shfl_xor_sync(FULL, acc, 1);
                if (t < OUTS && !(t & 1)) ((float *)p.out)[(now + t) / 2] = silu_(acc) * second;
            } else if (t < OUTS) {
                ((float *)p.out)[now + t] = !LOOP && p.add ? added + acc : acc;
            }
        }
        if (!LOOP || first_out >= p.outputs) break;
    }
}

#define ROW_PRODUCT(name, out, chunks, norm, pairs, loop, blocks)                                                               \
    extern "C" __global__ void __launch_bounds__(256, blocks) name(const RowProduct p) {                                        \
        row_product<out, chunks, norm, pairs, loop>(p, RowAffine(), blockIdx.x, gridDim.x);                                     \
    }
ROW_PRODUCT(row_norm_1, 4, 1, true, NO_PAIRS, false, 3)
// So few registers that 96 outputs a multiprocessor are computed at once.
ROW_PRODUCT(row_norm_2, 4, 2, true, NO_PAIRS, false, 3)
ROW_PRODUCT(row_pairs_1, 8, 1, true, ALL_PAIRS, false, 1)
ROW_PRODUCT(row_pairs_2, 2, 2, true, ALL_PAIRS, false, 3)
ROW_PRODUCT(row_plain_1, 2, 1, false, NO_PAIRS, false, 1)
ROW_PRODUCT(row_plain_2, 1, 2, false, NO_PAIRS, false, 1)
ROW_PRODUCT(row_plain_3, 1, 3, false, NO_PAIRS, false, 1)
// A block for each multiprocessor, which leaves room for one of the delta rule before it and of the router after it, so that these spread evenly.
extern "C" __global__ void __launch_bounds__(512, 2) row_plain_4(const RowProduct p) {
    row_product<1, 4, false, NO_PAIRS, false, 16>(p, RowAffine(), blockIdx.x, gridDim.x);
}
ROW_PRODUCT(row_head_1, 4, 1, true, NO_PAIRS, true, 3)
ROW_PRODUCT(row_head_2, 4, 2, true, NO_PAIRS, true, 3)

// A head's norm and rotation of its first 2 * TURNED elements by one warp; lane l has elements l, l + 32 and so on.
template <int DIM, int TURNED> DEVICE void row_head(float *x, const HeadNorm &norm, const float *factors, const float *co, const float *si) {
    constexpr u32 N = DIM / 32;
    if (norm.at) {
        float acc = 0.0f;
#pragma unroll
        for (u32 k = 0; k < N; k++) acc = fmaf(x[k], x[k], acc);
        float inv = rms_inverse(acc, DIM, __uint_as_float(norm.eps));
#pragma unroll
        for (u32 k = 0; k < N; k++) x[k] = (x[k] * inv) * factors[k];
    }
#pragma unroll
    for (u32 k = 0; k < TURNED / 32; k++) {
        float a = x[k], b = x[k + TURNED / 32];
        x[k] = fmaf(a, co[k], -(b * si[k]));
        x[k + TURNED / 32] = fmaf(b, co[k], a * si[k]);
    }
}

// Scores of a block for G heads from `h` on: a lane takes a position, and has all of its accumulators. `second` is the head after the first,
// or the first again.
template <int DIM, int G> DEVICE void row_scores(const Attend &p, const u16 *keys_held, const float *q, float *scores, u32 h, u32 second) {
    u32 j = threadIdx.x;
    const uint4 *key = (const uint4 *)(keys_held + j * DIM);
    const float4 *one = (const float4 *)(q + h * DIM), *two = (const float4 *)(q + second * DIM);
    float a[G][32];
#pragma unroll
    for (u32 g = 0; g < G; g++)
#pragma unroll
        for (u32 i = 0; i < 32; i++) a[g][i] = 0.0f;
#pragma unroll 1
    for (u32 l = 0; l < DIM / 32; l++) {
        Eight<2> e[4];
#pragma unroll
        for (u32 c = 0; c < 4; c++) e[c].raw[0] = key[(4 * l + c) ^ (j & 7)];
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            float k[8];
            widen_eight<2>(k, e[c]);
#pragma unroll
            for (u32 g = 0; g < G; g++) {
                const float4 *from = (g ? two : one) + 8 * l + 2 * c;
                float4 x = from[0], y = from[1];
                float *sum = a[g] + 8 * c;
                sum[0] = fmaf(x.x, k[0], sum[0]);
                sum[1] = fmaf(x.y, k[1], sum[1]);
                sum[2] = fmaf(x.z, k[2], sum[2]);
                sum[3] = fmaf(x.w, k[3], sum[3]);
                sum[4] = fmaf(y.x, k[4], sum[4]);
                sum[5] = fmaf(y.y, k[5], sum[5]);
                sum[6] = fmaf(y.z, k[6], sum[6]);
                sum[7] = fmaf(y.w, k[7], sum[7]);
            }
        }
    }
#pragma unroll
    for (u32 g = 0; g < G; g++) {
#pragma unroll
        for (u32 i = 0; i < 16; i++) a[g][i] += a[g][i + 16];
#pragma unroll
        for (u32 i = 0; i < 8; i++) a[g][i] += a[g][i + 8];
        float low = (a[g][0] + a[g][4]) + (a[g][2] + a[g][6]), high = (a[g][1] + a[g][5]) + (a[g][3] + a[g][7]);
        scores[(g ? second : h) * BLOCK + j] = (low + high) * __uint_as_float(p.scale);
    }
}

// Sums of values for two neighbouring elements, in order of positions: those of `from` .. `to` that lie in [start, end), whose values are at
// `value`. Sixteen positions are on their way while sixteen are summed; past the ends something lies there, which is not taken.
template <int DIM> DEVICE float2 row_sums(float2 sum, const u32 *value, const float *w, u32 from, u32 to, u32 start, u32 end) {
    u32 j = from > start ? from / 16 * 16 : start, stop = to < end ? to : end;
    u32 raw[16], next[16];
    const u32 *v = value + (j - start) * (DIM / 2);
    if (j < stop)
#pragma unroll
        for (u32 t = 0; t < 16; t++) raw[t] = v[t * (DIM / 2)];
#pragma unroll 1
    for (; j < stop; j += 16) {
        v += 16 * (DIM / 2);
        if (j + 16 < stop)
#pragma unroll
            for (u32 t = 0; t < 16; t++) next[t] = v[t * (DIM / 2)];
        const float4 *x = (const float4 *)(w + j);
        float4 weight[4];
#pragma unroll
        for (u32 t = 0; t < 4; t++) weight[t] = x[t];
        if (j >= from && j + 16 <= stop) {
#pragma unroll
            for (u32 t = 0; t < 16; t++) {
                float4 q = weight[t / 4];
                float one = t % 4 == 0 ? q.x : t % 4 == 1 ? q.y : t % 4 == 2 ? q.z : q.w;
                sum = make_float2(fmaf(one, half_to_float((u16)raw[t]), sum.x), fmaf(one, half_to_float((u16)(raw[t] >> 16)), sum.y));
            }
        } else {
#pragma unroll
            for (u32 t = 0; t < 16; t++) {
                float4 q = weight[t / 4];
                float one = t % 4 == 0 ? q.x : t % 4 == 1 ? q.y : t % 4 == 2 ? q.z : q.w;
                float low = half_to_float((u16)raw[t]), high = half_to_float((u16)(raw[t] >> 16));
                if (j + t >= from && j + t < stop) sum = make_float2(fmaf(one, low, sum.x), fmaf(one, high, sum.y));
            }
        }
#pragma unroll
        for (u32 t = 0; t < 16; t++) raw[t] = next[t];
    }
    return sum;
}

// Two neighbouring elements of a head's result, and if FORM their int8 form, of a group of which a warp has all.
template <bool FORM> DEVICE void put_two(const Attend &p, u32 row, u32 h, u32 i, float x, float y) {
    if (p.gate.at) {
        const float *gate = at<float>(p.gate, row, h);
        x = sigmoid_(gate[i]) * x;
        y = sigmoid_(gate[i + 1]) * y;
    }
    float *out = at<float>(p.out, row, h);
    out[i] = x;
    out[i + 1] = y;
    if (!FORM || !p.codes) return;
    float m = fminf(warp_max(fmaxf(fmaxf(fabsf(x), fabsf(y)), 0.0f)), __uint_as_float(0x7f7fffffu)), inverse = 127.0f / m;
    u32 two = prmt(row_code(x * inverse), row_code(y * inverse), 0x0040);
    int sum = warp_sum(dot_s8(two & 0xffff, 0x01010101, 0));
    u64 n = (u64)h * p.dim + i;
    ((u16 *)p.codes)[((u64)row * p.codes_row + n) / 2] = (u16)two;
    if (threadIdx.x % 32) return;
    float scale = m / 127.0f;
    u64 group = (u64)row * p.scales_row + n / ROW_GROUP;
    ((float *)p.scales)[group] = scale;
    ((float *)p.sums)[group] = scale * (float)sum;
}

// Attention of one row that makes its queries, new key and value: heads of DIM elements, of which the first 2 * TURNED are rotated, caches in
// F16. The new key and value take their place among the others in shared memory, where a block of 256 lies whole. Sixteen bytes c of key j lie at
// c ^ (j & 7), so that eight keys are read without two in one bank.
//
// A kernel of few registers, so that there is room for it beside the one before, and its keys and values are there when that one ends. With
// LATE the second half of a block's values takes the place of its keys once the scores are there, so that two of these fit on a
// multiprocessor: for more blocks than there are multiprocessors.
//
// Without MAKES there may be several rows, whose queries are made and whose keys and values are in the caches.
//
// Shared memory: [256][DIM] keys, [256][DIM] or with LATE [128][DIM] values, [HEADS][256] scores, the same of weights, [HEADS][DIM] queries.
template <int DIM, int TURNED, bool MAKES, bool LATE> DEVICE void attention_row(const Attend &p) {
    __shared__ float block_max[HEADS], block_sum[HEADS], max_so_far[HEADS];
    __shared__ u32 last;
    __shared__ __align__(16) u16 fresh[DIM];
    constexpr u32 N = DIM / 32, PER = DIM / 8, HALF = LATE ? BLOCK / 2 : BLOCK;
    u16 *keys_held = (u16 *)shared, *values_held = keys_held + BLOCK * DIM, *late_held = keys_held;
    float *scores = (float *)(values_held + HALF * DIM), *w = scores + HEADS * BLOCK, *q = w + HEADS * BLOCK;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = MAKES ? 0 : blockIdx.z;
    u32 h0 = blockIdx.x * p.per_block, group = p.heads / p.kv_heads, kvh = h0 / group, n = p.per_block;
    Row at_row = p.step.rows[row];
    u64 keys = p.k.at + at_row.cache + kvh * (u64)p.k.head * 2, values = p.v.at + at_row.cache + kvh * (u64)p.v.head * 2;
    u32 pos = at_row.pos, first = first_seen(p, pos);
    u32 first_block = first / BLOCK, blocks = pos / BLOCK + 1 - first_block, b = blockIdx.y;
    bool alone = blocks == 1, makes = MAKES && (blocks - 1) % gridDim.y == b;
    if (b >= blocks) return;
    // The first position that is in no cache before the wait.
    u32 known = MAKES ? pos : p.step.runs[at_row.run].pos;
    // A word of each line of the parameter that is needed after the wait: who asks for it there waits for it there.
    asm volatile("" ::"l"(p.v.row), "r"(p.scale), "l"(p.new_k.at), "l"(p.q_norm.at), "r"(p.holds_values));
    u32 start = 0, from = 0, to = 0;
    // Keys and the first half of values, or the second half, of the positions `since` .. `until` of the caches.
    auto hold = [&](u32 since, u32 until, bool late) {
        // A thread takes the same sixteen bytes of every STEP-th position.
        constexpr u32 STEP = ROW_THREADS / PER;
        u32 j = threadIdx.x / PER, c = threadIdx.x % PER;
        if (late) j += HALF;
        u32 k_to = (u32)__cvta_generic_to_shared(keys_held + j * DIM + (c ^ (j & 7)) * 8);
        u32 v_to = (u32)__cvta_generic_to_shared((late ? late_held - HALF * DIM : values_held) + j * DIM + c * 8);
        u64 k_from = keys + ((u64)(start + j) * p.k.row + c * 8) * 2, v_from = values + ((u64)(start + j) * p.v.row + c * 8) * 2;
        u64 k_step = p.k.row * (2 * STEP), v_step = p.v.row * (2 * STEP);
#pragma unroll 4
        for (; j < until; j += STEP) {
            if (j >= since) {
                if (!late) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(k_to), "l"(k_from));
                if (late || j < HALF) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(v_to), "l"(v_from));
            }
            k_to += STEP * DIM * 2;
            v_to += STEP * DIM * 2;
            k_from += k_step;
            v_from += v_step;
        }
    };
    auto begin = [&]() {
        start = (first_block + b) * BLOCK;
        from = first > start ? first - start : 0;
        to = pos + 1 - start < BLOCK ? pos + 1 - start : BLOCK;
    };
    begin();
    // What the caches hold of the block now.
    u32 there = known <= start ? 0 : known - start < to ? known - start : to;
    hold(0, there, false);
    // The late half is on its way to the second cache: it is read once the scores are there.
    if (LATE && there > HALF) {
        constexpr u32 LINES = DIM / 64;
        for (u32 i = threadIdx.x; i < (there - HALF) * LINES; i += ROW_THREADS)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(values + (u64)(start + HALF + i / LINES) * p.v.row * 2 + i % LINES * 128));
    }
    bool is_query = MAKES && warp < n, is_key = warp == HEADS && makes;
    float x[N], y[N], co[TURNED / 32], si[TURNED / 32], factors[N];
    if (is_query || is_key) {
        const HeadNorm &norm = is_query ? p.q_norm : p.k_norm;
        if (norm.at) {
            u32 raw[N];
#pragma unroll
            for (u32 k = 0; k < N; k++) raw[k] = parameter((const u8 *)norm.at, norm.dtype, lane + 32 * k);
#pragma unroll
            for (u32 k = 0; k < N; k++) factors[k] = __uint_as_float(norm.offset) + number(raw[k], norm.dtype);
        }
    }
    wait_for_earlier();
    if (is_query || is_key) {
        const float *from_x = is_query ? at<float>(p.q, 0, h0 + warp) : at<float>(p.new_k, 0, kvh), *table = (const float *)p.table;
#pragma unroll
        for (u32 k = 0; k < N; k++) {
            x[k] = from_x[lane + 32 * k];
            y[k] = is_key ? at<float>(p.new_v, 0, kvh)[lane + 32 * k] : 0.0f;
        }
#pragma unroll
        for (u32 k = 0; k < TURNED / 32; k++) {
            co[k] = table[lane + 32 * k];
            si[k] = table[TURNED + lane + 32 * k];
        }
        row_head<DIM, TURNED>(x, is_query ? p.q_norm : p.k_norm, factors, co, si);
        if (is_query) {
#pragma unroll
            for (u32 k = 0; k < N; k++) q[warp * DIM + lane + 32 * k] = x[k];
        } else {
            u32 j = pos % BLOCK;
#pragma unroll
            for (u32 k = 0; k < N; k++) {
                u32 i = lane + 32 * k;
                u16 key = float_to_half(x[k]), value = float_to_half(y[k]);
                // With a block before it the last one is held later, from the caches.
                if (b + gridDim.y >= blocks) {
                    keys_held[j * DIM + ((i / 8) ^ (j & 7)) * 8 + i % 8] = key;
                    if (j < HALF) values_held[j * DIM + i] = value;
                    else fresh[i] = value;
                }
                if (h0 % group == 0 || b + gridDim.y < blocks) {
                    ((u16 *)keys)[(u64)pos * p.k.row + i] = key;
                    ((u16 *)values)[(u64)pos * p.v.row + i] = value;
                }
            }
        }
    }
    if (!MAKES) {
        if (there < to) hold(there, to, false);
        for (u32 i = threadIdx.x; i < n * DIM; i += ROW_THREADS) q[i] = at<float>(p.q, row, h0 + i / DIM)[i % DIM];
        there = to;
    }
    u32 part = DIM + 2;
    for (; b < blocks; b += gridDim.y) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (n == 1) {
            if (warp * 32 < to) row_scores<DIM, 1>(p, keys_held, q, scores, 0, 0);
        } else if (warp * 32 < to) {
            // Two heads at a time; of an odd number the last twice.
#pragma unroll 1
            for (u32 h = 0; h < n; h += 2) row_scores<DIM, 2>(p, keys_held, q, scores, h, h + 1 < n ? h + 1 : h);
        }
        __syncthreads();
        // The keys are done with.
        if (LATE && to > HALF) {
            hold(0, there, true);
            if (MAKES && there < to && threadIdx.x < PER)
                *(uint4 *)(late_held + (to - 1 - HALF) * DIM + threadIdx.x * 8) = ((const uint4 *)fresh)[threadIdx.x];
        }
        // Every warp finds the maximum, and computes an eighth of the weights.
#pragma unroll 1
        for (u32 h = 0; h < n; h++) {
            const float *own = scores + h * BLOCK;
            float m = __int_as_float(0xff800000);
#pragma unroll
            for (u32 t = 0; t < 8; t++) {
                u32 j = lane + 32 * t;
                float s = own[j];
                if (j >= from && j < to) m = fmaxf(m, s);
            }
            m = warp_max(m);
            u32 j = threadIdx.x;
            w[h * BLOCK + j] = j >= from && j < to ? exp_(own[j] - m) : 0.0f;
            if (threadIdx.x == 0) block_max[h] = m;
        }
        __syncthreads();
        if (warp >= 8 - n) {
            u32 h = 7 - warp;
            float l = 0.0f;
#pragma unroll
            for (u32 t = 0; t < 8; t++) l += w[h * BLOCK + lane + 32 * t];
            l = fold(l);
            if (lane == 0) block_sum[h] = l;
        }
        // A thread takes two neighbours of a head.
        u32 h = threadIdx.x / (DIM / 2), i = threadIdx.x % (DIM / 2) * 2;
        float2 sum = make_float2(0.0f, 0.0f);
        if (h < n) sum = row_sums<DIM>(sum, (const u32 *)values_held + i / 2, w + h * BLOCK, from, to, 0, HALF);
        if (LATE) asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (LATE && h < n && to > HALF) sum = row_sums<DIM>(sum, (const u32 *)late_held + i / 2, w + h * BLOCK, from, to, HALF, BLOCK);
        if (h < n) {
            if (alone) {
                put_two<!MAKES>(p, row, h0 + h, i, sum.x / block_sum[h], sum.y / block_sum[h]);
            } else {
                float *to_part = (float *)p.parts + ((u64)(row * p.heads + h0 + h) * p.most_blocks + b) * part;
                *(float2 *)(to_part + 2 + i) = sum;
                if (i == 0) *(float2 *)to_part = make_float2(block_max[h], block_sum[h]);
            }
        }
        if (alone) return;
        if (b + gridDim.y < blocks) {
            __syncthreads();
            b += gridDim.y;
            begin();
            b -= gridDim.y;
            hold(0, to, false);
            there = to;
        }
    }
    // The counter starts over by itself once all have come.
    __syncthreads();
    u32 come = blocks < gridDim.y ? blocks : gridDim.y;
    if (threadIdx.x == 0) {
        // What all threads of the block have written before the barrier is seen with this.
        __threadfence();
        last = atomicInc((u32 *)p.counters + row * gridDim.x + blockIdx.x, come - 1) == come - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    const volatile float *all = (const float *)p.parts + (u64)(row * p.heads + h0) * p.most_blocks * part;
    // What a block's merge multiplies with: the largest so far is the same in any order, so lanes find it together. 32 blocks at a time
    // take the place of scores: the two factors, and what the sum is moved on by.
    u32 u = threadIdx.x, h = u / (DIM / 2), i = u % (DIM / 2) * 2;
    bool has = u < n * (DIM / 2);
    u64 own = (u64)(const float *)(all + (u64)(has ? h : 0) * p.most_blocks * part + 2 + i);
    float a = 0.0f, c = 0.0f, total = 0.0f;
#pragma unroll 1
    for (u32 c0 = 0; c0 < blocks; c0 += 32) {
        u32 many = blocks - c0 < 32 ? blocks - c0 : 32;
        // All 32 parts are on their way while it is found out what they are multiplied with.
        float2 parts[32];
#pragma unroll
        for (u32 t = 0; t < 32; t++)
            if (has && t < many)
                asm volatile("ld.volatile.global.v2.f32 {%0, %1}, [%2];"
                             : "=f"(parts[t].x), "=f"(parts[t].y)
                             : "l"(own + (u64)(c0 + t) * part * 4));
        __syncthreads();
        if (warp < n) {
            const volatile float *x = all + (u64)(warp * p.most_blocks + c0 + lane) * part;
            float m = lane < many ? x[0] : __int_as_float(0xff800000), l = lane < many ? x[1] : 0.0f, top = m;
            float was = c0 ? max_so_far[warp] : __int_as_float(0xff800000);
#pragma unroll
            for (u32 d = 1; d < 32; d <<= 1) {
                float other = __shfl_up_sync(FULL, top, d);
                if (lane >= d) top = fmaxf(other, top);
            }
            top = fmaxf(was, top);
            float before = __shfl_up_sync(FULL, top, 1);
            if (lane == 0) before = was;
            float old = exp_(before - top), now = exp_(m - top);
            // Of the first block nothing is multiplied.
            ((float4 *)(scores + warp * BLOCK))[lane] = make_float4(old, now, c0 + lane ? l * now : l, 0.0f);
            if (lane == many - 1) max_so_far[warp] = top;
        }
        __syncthreads();
        if (has) {
#pragma unroll
            for (u32 t = 0; t < 32; t++) {
                if (t >= many) break;
                float4 s = ((const float4 *)(scores + h * BLOCK))[t];
                bool begins = c0 + t == 0;
                total = begins ? s.z : fmaf(total, s.x, s.z);
                a = begins ? parts[t].x : fmaf(a, s.x, parts[t].x * s.y);
                c = begins ? parts[t].y : fmaf(c, s.x, parts[t].y * s.y);
            }
        }
    }
    if (has) put_two<!MAKES>(p, row, h0 + h, i, a / total, c / total);
}

#define ATTENTION_ROW(name, dim, turned, makes, late, blocks)                                                                   \
    extern "C" __global__ void __launch_bounds__(256, blocks) name(const Attend p) { attention_row<dim, turned, makes, late>(p); }
ATTENTION_ROW(attention_row_64, 64, 32, true, false, 2)
ATTENTION_ROW(attention_row_128, 128, 64, true, false, 2)
ATTENTION_ROW(attention_late_64, 64, 32, true, true, 2)
ATTENTION_ROW(attention_late_128, 128, 64, true, true, 2)
// Heads of which a quarter is rotated. There is no room for all values beside the keys, and a thread's two neighbours are of one of two heads.
ATTENTION_ROW(attention_late_256, 256, 32, true, true, 1)
ATTENTION_ROW(attention_rows_64, 64, 32, false, false, 2)
ATTENTION_ROW(attention_rows_128, 128, 64, false, false, 2)
ATTENTION_ROW(attention_rows_late_64, 64, 32, false, true, 2)
ATTENTION_ROW(attention_rows_late_128, 128, 64, false, true, 2)
