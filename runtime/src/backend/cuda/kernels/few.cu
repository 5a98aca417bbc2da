// Two to sixteen rows at a time: decode steps of several sequences, or of several tokens of one.
//
// Weights are read once for all rows. Activations are quantised by a kernel of their own, a block a row; products multiply bytes by tensor
// cores, whose s32 sums of a group of 64 are exact, and fold the groups in order as linear.cu does: fma(scale * xscale, dot), then
// fma(bias, xsum). Sizes are known to the compiler, weights are four bits in groups of 64 with BF16 parameters.

enum { FEW_ROWS = 16 };

// Rows of values, perhaps summed and normalised, as int8 codes in groups of 64.
struct FewCodes {
    // Values, what is added to them, the weight of their norm (BF16), where the sum and the normalised rows go; 0 where not.
    u64 x, x2, y, sum, normed;
    u64 codes, scales, sums;
    // Elements from row to row.
    u32 x_row, x2_row, sum_row, normed_row, codes_row, scales_row;
    u32 eps, offset;
    u32 rows, unused;
};

// A block a row; without a norm rows are cut into blocks of 1,024 values. Shared memory, for rows of more: the row.
template <int CHUNKS, bool NORM> DEVICE void few_codes(const FewCodes &p) {
    u64 row = blockIdx.x, skip = NORM ? 0 : blockIdx.y * 1024;
    RowProduct r;
    r.x = p.x + (row * p.x_row + skip) * 4;
    r.y = p.y;
    r.x2 = p.x2 ? p.x2 + row * p.x2_row * 4 : 0;
    r.sum = p.sum ? p.sum + row * p.sum_row * 4 : 0;
    r.normed = p.normed ? p.normed + row * p.normed_row * 4 : 0;
    r.eps = p.eps;
    r.offset = p.offset;
    RowStaged to;
    to.codes = (i8 *)p.codes + (row * p.codes_row + skip);
    to.scales = (float *)p.scales + (row * p.scales_row + skip / ROW_GROUP);
    to.sums = (float *)p.sums + (row * p.scales_row + skip / ROW_GROUP);
    uint2 factors[CHUNKS];
    if (NORM) row_factors<CHUNKS>(r, factors);
    wait_for_earlier();
    row_stage<CHUNKS, NORM>(r, factors, to, (float *)shared, true);
}

#define FEW_CODES(name, chunks, norm)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) name(const FewCodes p) { few_codes<chunks, norm>(p); }
FEW_CODES(few_codes, 1, false)
FEW_CODES(few_norm_1, 1, true)
FEW_CODES(few_norm_2, 2, true)

// The same of the many rows of prompts, with a norm, 1,024 values each: a warp a row, which lies in its registers, so that nothing waits for
// other warps. (Of 2,048 values a block a row is quicker.)
extern "C" __global__ void __launch_bounds__(256) norm_codes_1(const FewCodes p) {
    constexpr u32 N = 32, GROUPS = N / 2;
    __shared__ float factors[1024];
    u32 t = threadIdx.x, lane = t & 31, row = blockIdx.x * 8 + (t >> 5);
    float offset = __uint_as_float(p.offset);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 two = ((const u32 *)p.y)[t + 256 * i];
        *(float2 *)(factors + 2 * (t + 256 * i)) = make_float2(offset + brain(two), offset + brain(two >> 16));
    }
    wait_for_earlier();
    __syncthreads();
    if (row >= p.rows) return;
    const float *x = (const float *)p.x + (u64)row * p.x_row + lane;
    float v[N], acc = 0.0f;
#pragma unroll
    for (u32 k = 0; k < N; k++) v[k] = x[32 * k];
    if (p.x2) {
        const float *other = (const float *)p.x2 + (u64)row * p.x2_row + lane;
#pragma unroll
        for (u32 k = 0; k < N; k++) v[k] = v[k] + other[32 * k];
        if (p.sum) {
            float *sum = (float *)p.sum + (u64)row * p.sum_row + lane;
#pragma unroll
            for (u32 k = 0; k < N; k++) sum[32 * k] = v[k];
        }
    }
#pragma unroll
    for (u32 k = 0; k < N; k++) acc = fmaf(v[k], v[k], acc);
    float inv = rms_inverse(acc, 32 * N, __uint_as_float(p.eps));
#pragma unroll
    for (u32 k = 0; k < N; k++) v[k] = (v[k] * inv) * factors[lane + 32 * k];
    if (p.normed) {
        float *normed = (float *)p.normed + (u64)row * p.normed_row + lane;
#pragma unroll
        for (u32 k = 0; k < N; k++) normed[32 * k] = v[k];
    }
    // A lane has two values of each group, and divides for one of them. Magnitudes are ordered as their bits are.
    float top = 0.0f;
#pragma unroll
    for (u32 c = 0; c < GROUPS; c++) {
        float m = fminf(fmaxf(fmaxf(fabsf(v[2 * c]), fabsf(v[2 * c + 1])), 0.0f), __uint_as_float(0x7f7fffffu));
        m = __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(m)));
        top = lane == c ? m : top;
    }
    float own = 127.0f / top;
    i8 *codes = (i8 *)p.codes + (u64)row * p.codes_row + lane;
    int sum = 0;
#pragma unroll
    for (u32 c = 0; c < GROUPS; c++) {
        float inverse = __shfl_sync(FULL, own, c);
        u32 two = prmt(row_code(v[2 * c] * inverse), row_code(v[2 * c + 1] * inverse), 0x0040) & 0xffff;
        codes[64 * c] = (i8)two;
        codes[64 * c + 32] = (i8)(two >> 8);
        int total = __reduce_add_sync(FULL, dot_s8(two, 0x01010101, 0));
        sum = lane == c ? total : sum;
    }
    if (lane < GROUPS) {
        float scale = top / 127.0f;
        ((float *)p.scales)[(u64)row * p.scales_row + lane] = scale;
        ((float *)p.sums)[(u64)row * p.scales_row + lane] = scale * (float)sum;
    }
}

// The int8 form of any values in groups of 64, eight of them a warp, where each head has as many times eight: `quantize` of sixteen bytes a lane.
extern "C" __global__ void quantize_64(const Call c) {
    using A = quantize_op::A; using O = quantize_op::O;
    wait_for_earlier();
    u32 heads = c.a[A::heads], parts = c.a[A::dim] / (8 * ROW_GROUP), u = WARP, lane = LANE;
    if (u >= c.a[A::rows] * heads * parts) return;
    u32 r = u / parts / heads, h = u / parts % heads, part = u % parts;
    u32 first = part * 8 * ROW_GROUP + lane / 16 * ROW_GROUP + lane % 16 * 4, group = part * 8 + lane / 16;
    const float4 *x = (const float4 *)(at<float>(c.o[O::x], r, h) + first);
    float4 v[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) v[n] = x[n * (2 * ROW_GROUP / 4)];
    row_codes<4>(v, at<i8>(c.o[O::codes], r, h) + first, 2 * ROW_GROUP, at<float>(c.o[O::scales], r, h) + group, at<float>(c.o[O::sums], r, h) + group, 2);
}

// What a gate lets through, as its int8 form in groups of 64.
struct Gated {
    // The gate and the other; the form, and elements from row to row and from head to head.
    Operand a, b;
    u64 codes, scales, sums;
    u64 codes_row, codes_head, scales_row, scales_head;
    // Whether the gate is a sigmoid, and no silu.
    u32 rows, heads, dim, sigmoid;
};

// silu_mul or sigmoid_mul of any rows and quantize of the result: eight groups a warp.
extern "C" __global__ void __launch_bounds__(256) gated_codes(const Gated p) {
    wait_for_earlier();
    u32 lane = LANE, groups = p.dim / ROW_GROUP, all = p.rows * p.heads * groups, first = WARP * 8;
    if (first >= all) return;
    float4 a[4], b[4];
    u64 codes[4], places[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        u32 u = first + 2 * n + lane / 16;
        u = u < all ? u : all - 1;
        u32 part = u % groups, h = u / groups % p.heads, r = u / groups / p.heads, i = part * ROW_GROUP + lane % 16 * 4;
        a[n] = *(const float4 *)(at<float>(p.a, r, h) + i);
        b[n] = *(const float4 *)(at<float>(p.b, r, h) + i);
        codes[n] = p.codes + (r * p.codes_row + h * p.codes_head + i);
        places[n] = r * p.scales_row + h * p.scales_head + part;
    }
    auto gated = [&](float x, float y) {
        float open = sigmoid_(x);
        return (p.sigmoid ? open : x * open) * y;
    };
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        // Past the end the last group is made again.
        float4 v = make_float4(gated(a[n].x, b[n].x), gated(a[n].y, b[n].y), gated(a[n].z, b[n].z), gated(a[n].w, b[n].w));
        row_codes<1>(&v, (i8 *)codes[n], 0, (float *)p.scales + places[n], (float *)p.sums + places[n], 0);
    }
}

// A product of few rows.
struct FewProduct {
    u64 w, s, b;
    u64 codes, scales, sums;
    // The result, and what is added to it, or 0.
    u64 out, add;
    // Bytes from a row of weights, and of parameters, to the next.
    u32 w_row, s_row;
    u32 outputs, rows;
    // Elements from row to row.
    u32 codes_row, scales_row, out_row, add_row;
};

// The dots of a group with eight outputs: lane (g, quad) = (lane / 4, lane % 4) has codes 16 * quad .. 16 * quad + 16 of output g and of rows
// g and g + 8. Which place of the product a code takes does not matter, as long as rows and outputs agree.
DEVICE int4 few_dots(uint2 w, uint4 x0, uint4 x1) {
    u32 q[4], a[4] = {x0.x, x1.x, x0.y, x1.y}, e[4] = {x0.z, x1.z, x0.w, x1.w};
    int d[4] = {0, 0, 0, 0};
    unpack_q4(w.x, q);
    unpack_q4(w.y, q + 2);
    multiply<false>(d, a, q);
    multiply<false>(d, e, q + 2);
    return make_int4(d[0], d[1], d[2], d[3]);
}

// T tiles of eight outputs a block of eight warps, which share a tile's 16 * CHUNKS groups. With PAIRS outputs are pairs
// (o, o + outputs / 2) of which silu(first) * second is kept.
//
// Shared memory: [T][groups][32] dots of four, [8 * T][groups + 1] scales and biases, [16][groups + 1] scales and sums of rows.
template <int T, int CHUNKS, bool PAIRS> DEVICE void few_product(const FewProduct &p) {
    constexpr u32 GROUPS = 16 * CHUNKS, PITCH = GROUPS + 1, OUTS = 8 * T, PER = GROUPS * T / 8, ASKED = PER < 8 ? PER : 8;
    constexpr u32 WORDS = OUTS * GROUPS / 2, EACH = (WORDS + 255) / 256;
    int4 *dots = (int4 *)shared;
    float2 *params = (float2 *)(dots + T * GROUPS * 32), *rows = params + OUTS * PITCH;
    u32 t = threadIdx.x, warp = t >> 5, lane = t & 31, g = lane >> 2, quad = lane & 3, tile = warp % T, g0 = warp / T * PER;
    u32 first = blockIdx.x * OUTS, n = p.rows;
    auto weight_row = [&](u32 c) { return (u64)(PAIRS ? (c & 1) * (p.outputs / 2) + (first + c) / 2 : first + c); };
    const uint2 *w = (const uint2 *)((const u8 *)p.w + weight_row(tile * 8 + g) * p.w_row + g0 * 32 + quad * 8);
    uint2 raw[PER];
#pragma unroll
    for (u32 i = 0; i < PER; i++) raw[i] = w[i * 4];
    u32 scale_raw[EACH], bias_raw[EACH];
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
        u32 u = t + e * 256;
        if (u >= WORDS) break;
        u64 at = weight_row(u / (GROUPS / 2)) * p.s_row + u % (GROUPS / 2) * 4;
        scale_raw[e] = *(const u32 *)((const u8 *)p.s + at);
        bias_raw[e] = *(const u32 *)((const u8 *)p.b + at);
    }
    wait_for_earlier();
    // Rows that are not there are computed as the first, and not kept.
    const i8 *codes = (const i8 *)p.codes + g0 * 64 + quad * 16;
    const uint4 *one = (const uint4 *)(codes + (u64)(g < n ? g : 0) * p.codes_row);
    const uint4 *two = (const uint4 *)(codes + (u64)(g + 8 < n ? g + 8 : 0) * p.codes_row);
    uint4 x0[ASKED], x1[ASKED];
#pragma unroll
    for (u32 i = 0; i < ASKED; i++) {
        x0[i] = one[i * 4];
        x1[i] = two[i * 4];
    }
    for (u32 u = t; u < n * GROUPS; u += 256) {
        u64 at = (u64)(u / GROUPS) * p.scales_row + u % GROUPS;
        rows[u / GROUPS * PITCH + u % GROUPS] = make_float2(((const float *)p.scales)[at], ((const float *)p.sums)[at]);
    }
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
        u32 u = t + e * 256;
        if (u >= WORDS) break;
        float2 *to = params + u / (GROUPS / 2) * PITCH + u % (GROUPS / 2) * 2;
        to[0] = make_float2(brain(scale_raw[e]), brain(bias_raw[e]));
        to[1] = make_float2(brain(scale_raw[e] >> 16), brain(bias_raw[e] >> 16));
    }
#pragma unroll
    for (u32 i = 0; i < PER; i += ASKED) {
#pragma unroll
        for (u32 k = 0; k < ASKED; k++) {
            if (i + k >= PER) break;
            dots[(tile * GROUPS + g0 + i + k) * 32 + lane] = few_dots(raw[i + k], x0[k], x1[k]);
            if (i + k + ASKED < PER) {
                x0[k] = one[(i + k + ASKED) * 4];
                x1[k] = two[(i + k + ASKED) * 4];
            }
        }
    }
    __syncthreads();
    // A thread folds an output of a row, where the product left it: two lanes beside each other have two outputs of one row.
#pragma unroll 1
    for (u32 e = t; e < T * 128; e += 256) {
        u32 in = e % 128, l = in / 4, row = l / 4 + 8 * (in >> 1 & 1), c = e / 128 * 8 + l % 4 * 2 + (in & 1);
        const int *dot = (const int *)(dots + e / 128 * GROUPS * 32) + in;
        const float2 *w_param = params + c * PITCH, *x_param = rows + (row < n ? row : 0) * PITCH;
        float acc = 0.0f;
#pragma unroll 16
        for (u32 k = 0; k < GROUPS; k++) {
            float2 a = w_param[k], b = x_param[k];
            acc = fmaf(a.y, b.y, fmaf(a.x * b.x, (float)dot[k * 128], acc));
        }
        if (PAIRS) {
            float second = __shfl_xor_sync(FULL, acc, 1);
            if (row < n && !(in & 1)) ((float *)p.out)[(u64)row * p.out_row + (first + c) / 2] = silu_(acc) * second;
        } else if (row < n) {
            if (p.add) acc = ((const float *)p.add)[(u64)row * p.add_row + first + c] + acc;
            ((float *)p.out)[(u64)row * p.out_row + first + c] = acc;
        }
    }
}

// The product of the LM head: a warp takes a tile of eight outputs after the other, and folds where the product leaves its sums.
//
// Shared memory: [16][inputs + 64] codes, [16][groups + 1] scales and sums of rows, and a warp's [8][17] scales and biases.
template <int CHUNKS> DEVICE void few_head(const FewProduct &p) {
    constexpr u32 INPUTS = 1024 * CHUNKS, GROUPS = 16 * CHUNKS, PITCH = GROUPS + 1;
    i8 *codes = (i8 *)shared;
    float2 *rows = (float2 *)(codes + FEW_ROWS * (INPUTS + 64)), *params = rows + FEW_ROWS * PITCH + (threadIdx.x >> 5) * 8 * 17;
    u32 t = threadIdx.x, lane = t & 31, g = lane >> 2, quad = lane & 3, n = p.rows;
    u32 tiles = p.outputs / 8, tile = blockIdx.x * 8 + (t >> 5), step = gridDim.x * 8;
    uint2 next[16], scale_next, bias_next;
    auto ask = [&](u32 of, u32 chunk) {
        u64 row = (u64)of * 8 + g;
        const uint2 *w = (const uint2 *)((const u8 *)p.w + row * p.w_row + chunk * 512 + quad * 8);
#pragma unroll
        for (u32 i = 0; i < 16; i++) next[i] = w[i * 4];
        scale_next = *(const uint2 *)((const u8 *)p.s + row * p.s_row + chunk * 32 + quad * 8);
        bias_next = *(const uint2 *)((const u8 *)p.b + row * p.s_row + chunk * 32 + quad * 8);
    };
    if (tile < tiles) ask(tile, 0);
    wait_for_earlier();
    for (u32 u = t; u < FEW_ROWS * (INPUTS / 16); u += 256) {
        u32 r = u / (INPUTS / 16), i = u % (INPUTS / 16);
        if (r < n) *(uint4 *)(codes + r * (INPUTS + 64) + i * 16) = ((const uint4 *)((const i8 *)p.codes + (u64)r * p.codes_row))[i];
    }
    for (u32 u = t; u < n * GROUPS; u += 256) {
        u64 at = (u64)(u / GROUPS) * p.scales_row + u % GROUPS;
        rows[u / GROUPS * PITCH + u % GROUPS] = make_float2(((const float *)p.scales)[at], ((const float *)p.sums)[at]);
    }
    __syncthreads();
    u32 r0 = g < n ? g : 0, r1 = g + 8 < n ? g + 8 : 0;
    const i8 *one = codes + r0 * (INPUTS + 64) + quad * 16, *two = codes + r1 * (INPUTS + 64) + quad * 16;
#pragma unroll 1
    for (; tile < tiles; tile += step) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (u32 c = 0; c < CHUNKS; c++) {
            uint2 raw[16];
#pragma unroll
            for (u32 i = 0; i < 16; i++) raw[i] = next[i];
            float2 *to = params + g * 17 + quad * 4;
            __syncwarp();
            to[0] = make_float2(brain(scale_next.x), brain(bias_next.x));
            to[1] = make_float2(brain(scale_next.x >> 16), brain(bias_next.x >> 16));
            to[2] = make_float2(brain(scale_next.y), brain(bias_next.y));
            to[3] = make_float2(brain(scale_next.y >> 16), brain(bias_next.y >> 16));
            __syncwarp();
            bool more = c + 1 < CHUNKS;
            if (more || tile + step < tiles) ask(more ? tile : tile + step, more ? c + 1 : 0);
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                u32 k = c * 16 + i;
                int4 d = few_dots(raw[i], *(const uint4 *)(one + k * 64), *(const uint4 *)(two + k * 64));
                float2 a = params[2 * quad * 17 + i], b = params[(2 * quad + 1) * 17 + i], x = rows[r0 * PITCH + k], y = rows[r1 * PITCH + k];
                acc[0] = fmaf(a.y, x.y, fmaf(a.x * x.x, (float)d.x, acc[0]));
                acc[1] = fmaf(b.y, x.y, fmaf(b.x * x.x, (float)d.y, acc[1]));
                acc[2] = fmaf(a.y, y.y, fmaf(a.x * y.x, (float)d.z, acc[2]));
                acc[3] = fmaf(b.y, y.y, fmaf(b.x * y.x, (float)d.w, acc[3]));
            }
        }
        float *out = (float *)p.out + tile * 8 + 2 * quad;
        if (g < n) *(float2 *)(out + (u64)g * p.out_row) = make_float2(acc[0], acc[1]);
        if (g + 8 < n) *(float2 *)(out + (u64)(g + 8) * p.out_row) = make_float2(acc[2], acc[3]);
    }
}

#define FEW_PRODUCT(name, tiles, chunks, pairs)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) name(const FewProduct p) { few_product<tiles, chunks, pairs>(p); }
FEW_PRODUCT(few_wide_1, 4, 1, false)
FEW_PRODUCT(few_wide_2, 4, 2, false)
FEW_PRODUCT(few_pairs_1, 4, 1, true)
FEW_PRODUCT(few_pairs_2, 4, 2, true)
FEW_PRODUCT(few_plain_1, 1, 1, false)
FEW_PRODUCT(few_plain_2, 1, 2, false)
FEW_PRODUCT(few_plain_3, 1, 3, false)
extern "C" __global__ void __launch_bounds__(256) few_head_1(const FewProduct p) { few_head<1>(p); }
extern "C" __global__ void __launch_bounds__(256) few_head_2(const FewProduct p) { few_head<2>(p); }

// Queries, new keys and new values of several rows: a warp makes a head of a row (norm, rotation), and writes queries to where attention
// reads them, keys and values to their caches.
extern "C" __global__ void __launch_bounds__(256) few_heads(const Attend p) {
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.y, unit = blockIdx.x * 8 + warp;
    wait_for_earlier();
    if (unit >= p.heads + p.kv_heads) return;
    float *x = (float *)shared + warp * p.dim;
    const float *table = (const float *)p.table + (u64)row * p.table_row;
    if (unit < p.heads) {
        make_head(x, at<float>(p.q, row, unit), p.dim, p.q_norm, table, p.half);
        for (u32 i = lane; i < p.dim; i += 32) at<float>(p.out, row, unit)[i] = x[i];
        return;
    }
    u32 h = unit - p.heads;
    Row at_row = p.step.rows[row];
    make_head(x, at<float>(p.new_k, row, h), p.dim, p.k_norm, table, p.half);
    u64 key = (u64)at_row.pos * p.k.row + (u64)h * p.k.head, value = (u64)at_row.pos * p.v.row + (u64)h * p.v.head;
    for (u32 i = lane; i < p.dim; i += 32) {
        float y = at<float>(p.new_v, row, h)[i];
        if (p.k.dtype == F16) ((u16 *)(p.k.at + at_row.cache))[key + i] = float_to_half(x[i]);
        else ((float *)(p.k.at + at_row.cache))[key + i] = x[i];
        if (p.v.dtype == F16) ((u16 *)(p.v.at + at_row.cache))[value + i] = float_to_half(y);
        else ((float *)(p.v.at + at_row.cache))[value + i] = y;
    }
}

// The same of heads of the usual sizes, over F16 caches. The table of rotations is of a kernel before the last.
template <int DIM, int TURNED> DEVICE void short_heads(const Attend &p) {
    constexpr u32 N = DIM / 32;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.y, unit = blockIdx.x * 8 + warp;
    bool query = unit < p.heads, there = unit < p.heads + p.kv_heads;
    u32 h = query ? unit : there ? unit - p.heads : 0;
    HeadNorm norm = query ? p.q_norm : p.k_norm;
    const float *table = (const float *)p.table + (u64)row * p.table_row;
    Row at_row = p.step.rows[row];
    float x[N], y[N], factors[N], co[TURNED / 32], si[TURNED / 32];
    if (norm.at) {
        u32 raw[N];
#pragma unroll
        for (u32 k = 0; k < N; k++) raw[k] = parameter((const u8 *)norm.at, norm.dtype, lane + 32 * k);
#pragma unroll
        for (u32 k = 0; k < N; k++) factors[k] = __uint_as_float(norm.offset) + number(raw[k], norm.dtype);
    }
#pragma unroll
    for (u32 k = 0; k < TURNED / 32; k++) {
        co[k] = table[lane + 32 * k];
        si[k] = table[TURNED + lane + 32 * k];
    }
    wait_for_earlier();
    if (!there) return;
    const float *from = query ? at<float>(p.q, row, h) : at<float>(p.new_k, row, h), *value = at<float>(p.new_v, row, query ? 0 : h);
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        x[k] = from[lane + 32 * k];
        y[k] = value[lane + 32 * k];
    }
    row_head<DIM, TURNED>(x, norm, factors, co, si);
    if (query) {
#pragma unroll
        for (u32 k = 0; k < N; k++) at<float>(p.out, row, h)[lane + 32 * k] = x[k];
        return;
    }
    u16 *keys = (u16 *)(p.k.at + at_row.cache) + ((u64)at_row.pos * p.k.row + (u64)h * p.k.head);
    u16 *values = (u16 *)(p.v.at + at_row.cache) + ((u64)at_row.pos * p.v.row + (u64)h * p.v.head);
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        keys[lane + 32 * k] = float_to_half(x[k]);
        values[lane + 32 * k] = float_to_half(y[k]);
    }
}

extern "C" __global__ void __launch_bounds__(256) few_heads_64(const Attend p) { short_heads<64, 32>(p); }
extern "C" __global__ void __launch_bounds__(256) few_heads_128(const Attend p) { short_heads<128, 64>(p); }
