// One row at a time, one short kernel a role: what a decode step does most is done by these, so that few instructions are fetched and
// issued for it. Sizes are known to the compiler, types are the usual ones.
//
// The arithmetic is that of linear.cu and attention.cu, which do the rest: other widths, other rows, other shapes. What no earlier kernel
// of the step makes is asked for before the wait: weights, norms, and of attention where its row is, keys and values, which earlier
// steps wrote, or kernels before the last one at the latest.

enum { ROW_GROUP = 64, ROW_WARPS = 8 };

// A product of one row with weights of four bits in groups of 64, whose parameters are BF16.
struct RowProduct {
    u64 w, s, b;
    // Values; the weight of their norm, BF16; the result; what is added to it.
    u64 x, y, out, add;
    // What is added to the values before their norm, and where the sum and the normalised row go; 0 where not.
    u64 x2, sum, normed;
    // Bytes from a row of codes, and of parameters, to the next.
    u32 w_row, s_row;
    u32 outputs, eps, offset, unused;
};

DEVICE float brain(u32 bits) { return __uint_as_float(bits << 16); }

// OUT outputs a warp of 1,024 * CHUNKS inputs. With PAIRS outputs are pairs (o, o + outputs / 2) of which silu(first) * second is kept;
// with LOOP a warp goes on to further outputs. A block's outputs are all there.
//
// Shared memory: [inputs] codes, [groups] scales, sums, then a warp's [OUT][groups + 1] of what a group's fold takes: the product of
// scales, the dot, bias and sum.
template <int OUT, int CHUNKS, bool NORM, bool PAIRS, bool LOOP> DEVICE void row_product(const RowProduct &p) {
    constexpr u32 GROUPS = 16 * CHUNKS, OWN = GROUPS / ROW_WARPS, PITCH = GROUPS + 1;
    i8 *codes = (i8 *)shared;
    float *scales = (float *)(shared + 1024 * CHUNKS), *sums = scales + GROUPS;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float4 *folds = (float4 *)(sums + GROUPS) + warp * OUT * PITCH;
    u32 o0 = (blockIdx.x * ROW_WARPS + warp) * OUT, step = gridDim.x * ROW_WARPS * OUT;
    uint4 raw[OUT][CHUNKS];
    u32 scale_raw[OUT][CHUNKS], bias_raw[OUT][CHUNKS];
    auto ask = [&](u32 first) {
#pragma unroll
        for (u32 o = 0; o < OUT; o++) {
            u32 row = PAIRS ? (o & 1) * (p.outputs / 2) + (first + o) / 2 : first + o;
            // Cast before anything is added, so that the compiler sees memory of the device.
            const uint4 *w = (const uint4 *)((const u8 *)p.w + (u64)row * p.w_row) + lane;
            u64 params = (u64)row * p.s_row + lane / 2 * 2;
            const u16 *s = (const u16 *)((const u8 *)p.s + params), *b = (const u16 *)((const u8 *)p.b + params);
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                raw[o][c] = w[c * 32];
                scale_raw[o][c] = s[c * 16];
                bias_raw[o][c] = b[c * 16];
            }
        }
    };
    ask(o0);
    // This warp's groups are warp, warp + 8 and so on; a lane has two neighbours of each.
    u32 first = warp * ROW_GROUP + 2 * lane, factors[OWN];
    if (NORM) {
#pragma unroll
        for (u32 k = 0; k < OWN; k++) factors[k] = ((const u32 *)p.y)[(first + k * ROW_WARPS * ROW_GROUP) / 2];
    }
    wait_for_earlier();
    const float *x = (const float *)p.x;
    float2 v[OWN];
#pragma unroll
    for (u32 k = 0; k < OWN; k++) v[k] = *(const float2 *)(x + first + k * ROW_WARPS * ROW_GROUP);
    if (NORM && p.x2) {
        const float *x2 = (const float *)p.x2 + first;
#pragma unroll
        for (u32 k = 0; k < OWN; k++) {
            float2 other = *(const float2 *)(x2 + k * ROW_WARPS * ROW_GROUP);
            v[k] = make_float2(v[k].x + other.x, v[k].y + other.y);
            if (p.sum && blockIdx.x == 0) *(float2 *)((float *)p.sum + first + k * ROW_WARPS * ROW_GROUP) = v[k];
        }
    }
    float added = !PAIRS && !LOOP && p.add && lane < OUT ? ((const float *)p.add)[o0 + lane] : 0.0f;
    if (NORM) {
        // Every warp for itself, which no barrier waits for.
        float acc = 0.0f, all[32 * CHUNKS];
#pragma unroll
        for (u32 t = 0; t < 32 * CHUNKS; t++) all[t] = x[t * 32 + lane];
        if (p.x2) {
#pragma unroll
            for (u32 t = 0; t < 32 * CHUNKS; t++) all[t] = all[t] + ((const float *)p.x2)[t * 32 + lane];
        }
#pragma unroll
        for (u32 t = 0; t < 32 * CHUNKS; t++) acc = fmaf(all[t], all[t], acc);
        float inv = rms_inverse(acc, 1024 * CHUNKS, __uint_as_float(p.eps)), offset = __uint_as_float(p.offset);
#pragma unroll
        for (u32 k = 0; k < OWN; k++) {
            v[k] = make_float2((v[k].x * inv) * (offset + brain(factors[k])), (v[k].y * inv) * (offset + brain(factors[k] >> 16)));
            if (p.normed && blockIdx.x == 0) *(float2 *)((float *)p.normed + first + k * ROW_WARPS * ROW_GROUP) = v[k];
        }
    }
    // A lane divides for one of the groups.
    float largest = 0.0f;
#pragma unroll
    for (u32 k = 0; k < OWN; k++) {
        v[k] = make_float2(finite(v[k].x), finite(v[k].y));
        // Magnitudes are ordered as their bits are; fmaxf ignores a NaN.
        float m = __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(fmaxf(fmaxf(fabsf(v[k].x), fabsf(v[k].y)), 0.0f))));
        if (lane == k) largest = m;
    }
    float inverse = 127.0f / largest, scale = largest / 127.0f;
    int sum = 0;
#pragma unroll
    for (u32 k = 0; k < OWN; k++) {
        float of_group = __shfl_sync(FULL, inverse, k);
        bool zero = __shfl_sync(FULL, largest, k) == 0.0f;
        int a = activation_code(v[k].x, of_group, zero), b = activation_code(v[k].y, of_group, zero);
        *(u16 *)(codes + first + k * ROW_WARPS * ROW_GROUP) = (u16)((a & 0xff) | b << 8);
        int all = __reduce_add_sync(FULL, a + b);
        if (lane == k) sum = all;
    }
    if (lane < OWN) {
        scales[warp + lane * ROW_WARPS] = scale;
        sums[warp + lane * ROW_WARPS] = scale * (float)sum;
    }
    __syncthreads();
#pragma unroll 1
    for (;;) {
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            u32 u = c * 32 + lane;
            uint4 a = ((const uint4 *)codes)[2 * u], e = ((const uint4 *)codes)[2 * u + 1];
            float xs = scales[u / 2], xm = sums[u / 2];
#pragma unroll
            for (u32 o = 0; o < OUT; o++) {
                u32 q[8];
                unpack_q4(raw[o][c].x, q);
                unpack_q4(raw[o][c].y, q + 2);
                unpack_q4(raw[o][c].z, q + 4);
                unpack_q4(raw[o][c].w, q + 6);
                int d = dot_u8(q[3], a.w, dot_u8(q[2], a.z, dot_u8(q[1], a.y, dot_u8(q[0], a.x, 0))));
                d = dot_u8(q[7], e.w, dot_u8(q[6], e.z, dot_u8(q[5], e.y, dot_u8(q[4], e.x, d))));
                d += __shfl_xor_sync(FULL, d, 1);
                // Both lanes of a group have the same.
                folds[o * PITCH + u / 2] = make_float4(brain(scale_raw[o][c]) * xs, (float)d, brain(bias_raw[o][c]), xm);
            }
        }
        u32 now = o0 + lane;
        if (LOOP && o0 + step < p.outputs) ask(o0 + step);
        __syncwarp();
        float acc = 0.0f;
        const float4 *fold = folds + (lane < OUT ? lane : 0) * PITCH;
#pragma unroll 16
        for (u32 g = 0; g < GROUPS; g++) acc = fmaf(fold[g].z, fold[g].w, fmaf(fold[g].x, fold[g].y, acc));
        if (PAIRS) {
            float second = __shfl_xor_sync(FULL, acc, 1);
            if (lane < OUT && !(lane & 1)) ((float *)p.out)[now / 2] = silu_(acc) * second;
        } else if (lane < OUT) {
            ((float *)p.out)[now] = !LOOP && p.add ? added + acc : acc;
        }
        if (!LOOP) break;
        o0 += step;
        if (o0 >= p.outputs) break;
        __syncwarp();
    }
}

#define ROW_PRODUCT(name, out, chunks, norm, pairs, loop)                                                                       \
    extern "C" __global__ void __launch_bounds__(256) name(const RowProduct p) { row_product<out, chunks, norm, pairs, loop>(p); }
ROW_PRODUCT(row_norm_1, 4, 1, true, false, false)
ROW_PRODUCT(row_norm_2, 4, 2, true, false, false)
ROW_PRODUCT(row_pairs_1, 8, 1, true, true, false)
ROW_PRODUCT(row_pairs_2, 2, 2, true, true, false)
ROW_PRODUCT(row_plain_1, 2, 1, false, false, false)
ROW_PRODUCT(row_plain_2, 1, 2, false, false, false)
ROW_PRODUCT(row_plain_3, 1, 3, false, false, false)
ROW_PRODUCT(row_head_1, 4, 1, true, false, true)
ROW_PRODUCT(row_head_2, 4, 2, true, false, true)

// A head's norm and rotation by one warp; lane l has elements l, l + 32 and so on.
template <int DIM> DEVICE void row_head(float *x, const HeadNorm &norm, const float *factors, const float *co, const float *si) {
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
    for (u32 k = 0; k < N / 2; k++) {
        float a = x[k], b = x[k + N / 2];
        x[k] = fmaf(a, co[k], -(b * si[k]));
        x[k + N / 2] = fmaf(b, co[k], a * si[k]);
    }
}

// Folds a lane's eight accumulators with those of the lanes 8, 16 and 24 away, which have the others of the 32: 16 apart is 16 lanes away, 8
// apart 8. Each lane goes on with half of them.
DEVICE float fold_quad(const float *a, u32 quarter) {
    bool high = quarter & 2, odd = quarter & 1;
    float t[4], u[2];
#pragma unroll
    for (u32 i = 0; i < 4; i++) t[i] = (high ? a[i + 4] : a[i]) + __shfl_xor_sync(FULL, high ? a[i] : a[i + 4], 16);
#pragma unroll
    for (u32 i = 0; i < 2; i++) u[i] = (odd ? t[i + 2] : t[i]) + __shfl_xor_sync(FULL, odd ? t[i] : t[i + 2], 8);
    float v = (high ? u[1] : u[0]) + __shfl_xor_sync(FULL, high ? u[0] : u[1], 16);
    v += __shfl_xor_sync(FULL, v, 8);
    return v + __shfl_xor_sync(FULL, v, 16);
}

// Attention of one row that makes its queries, new key and value: heads of DIM elements, all of them rotated, caches in F16. The new
// key and value take their place among the others in shared memory, where a block of 256 lies whole. Sixteen bytes c of key j lie at
// c ^ turn(j), so that eight keys are read without two in one bank. Eight lanes that follow each other read the same of a query, which
// takes shared memory half the time of any other order.
//
// Shared memory: [256][DIM] keys, the same of values, [HEADS][256] weights, [HEADS][DIM] queries, [HEADS][DIM] sums.
enum { ROW_THREADS = 512 };
template <int DIM> DEVICE void attention_row(const Attend &p) {
    __shared__ float block_max[HEADS], block_sum[HEADS], old_scale[HEADS], new_scale[HEADS], max_so_far[HEADS], sum_so_far[HEADS];
    __shared__ u32 last;
    constexpr u32 N = DIM / 32, PER = DIM / 8;
    u16 *keys_held = (u16 *)shared, *values_held = keys_held + BLOCK * DIM;
    float *w = (float *)(values_held + BLOCK * DIM), *q = w + HEADS * BLOCK, *sums = q + HEADS * DIM;
    auto turn = [](u32 j) { return j & 7; };
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 h0 = blockIdx.y * p.per_block, group = p.heads / p.kv_heads, kvh = h0 / group, n = p.per_block;
    Row at_row = p.step.rows[0];
    u64 keys = p.k.at + at_row.cache + kvh * (u64)p.k.head * 2, values = p.v.at + at_row.cache + kvh * (u64)p.v.head * 2;
    u32 pos = at_row.pos, first = p.window && pos + 1 > p.window ? pos + 1 - p.window : 0;
    u32 first_block = first / BLOCK, blocks = pos / BLOCK + 1 - first_block, b = blockIdx.x;
    bool alone = gridDim.x == 1 || blocks == 1, makes = (blocks - 1) % gridDim.x == b;
    if (b >= blocks) return;
    // A word of each line of the parameter that is needed after the wait: who asks for it there waits for it there.
    asm volatile("" ::"l"(p.v.row), "r"(p.scale), "l"(p.new_k.at), "l"(p.q_norm.at), "r"(p.holds_values));
    u32 start = 0, from = 0, to = 0;
    auto hold = [&](bool all) {
        start = (first_block + b) * BLOCK;
        from = first > start ? first - start : 0;
        to = pos + 1 - start < BLOCK ? pos + 1 - start : BLOCK;
        // At first the new position is in no cache yet.
        u32 many = all || pos - start >= to ? to : pos - start;
#pragma unroll 2
        for (u32 i = threadIdx.x; i < many * PER; i += ROW_THREADS) {
            u32 j = i / PER, c = i % PER;
            u32 k_to = (u32)__cvta_generic_to_shared(keys_held + j * DIM + (c ^ turn(j)) * 8), v_to = (u32)__cvta_generic_to_shared(values_held + i * 8);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(k_to), "l"(keys + ((u64)(start + j) * p.k.row + c * 8) * 2));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(v_to), "l"(values + ((u64)(start + j) * p.v.row + c * 8) * 2));
        }
    };
    hold(false);
    bool is_query = warp < n, is_key = warp == HEADS && makes;
    float x[N], y[N], co[N / 2], si[N / 2], factors[N];
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
        for (u32 k = 0; k < N / 2; k++) {
            co[k] = table[lane + 32 * k];
            si[k] = table[DIM / 2 + lane + 32 * k];
        }
        row_head<DIM>(x, is_query ? p.q_norm : p.k_norm, factors, co, si);
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
                if (b + gridDim.x >= blocks) {
                    keys_held[j * DIM + ((i / 8) ^ turn(j)) * 8 + i % 8] = key;
                    values_held[j * DIM + i] = value;
                }
                if (h0 % group == 0 || b + gridDim.x < blocks) {
                    ((u16 *)keys)[(u64)pos * p.k.row + i] = key;
                    ((u16 *)values)[(u64)pos * p.v.row + i] = value;
                }
            }
        }
    }
    u32 quarter = lane >> 3, part = DIM + 2;
    for (; b < blocks; b += gridDim.x) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
#pragma unroll 1
        for (u32 j0 = warp * 8; j0 < to; j0 += ROW_THREADS / 4) {
            u32 j = j0 + lane % 8;
            float k[N][8];
#pragma unroll
            for (u32 l = 0; l < N; l++) {
                Eight<2> e;
                e.raw[0] = *(const uint4 *)(keys_held + j * DIM + ((4 * l + quarter) ^ turn(j)) * 8);
                widen_eight<2>(k[l], e);
            }
            // Two heads at a time; of an odd number the last twice.
#pragma unroll 1
            for (u32 h = 0; h < n; h += 2) {
                float a[2][8];
                u32 second = h + 1 < n ? h + 1 : h;
#pragma unroll
                for (u32 i = 0; i < 8; i++) a[0][i] = a[1][i] = 0.0f;
#pragma unroll
                for (u32 l = 0; l < N; l++) {
#pragma unroll
                    for (u32 g = 0; g < 2; g++) {
                        const float4 *at_q = (const float4 *)(q + (g ? second : h) * DIM + 32 * l + 8 * quarter);
                        float4 c = at_q[0], d = at_q[1];
                        float *sum = a[g];
                        sum[0] = fmaf(c.x, k[l][0], sum[0]);
                        sum[1] = fmaf(c.y, k[l][1], sum[1]);
                        sum[2] = fmaf(c.z, k[l][2], sum[2]);
                        sum[3] = fmaf(c.w, k[l][3], sum[3]);
                        sum[4] = fmaf(d.x, k[l][4], sum[4]);
                        sum[5] = fmaf(d.y, k[l][5], sum[5]);
                        sum[6] = fmaf(d.z, k[l][6], sum[6]);
                        sum[7] = fmaf(d.w, k[l][7], sum[7]);
                    }
                }
                float s = fold_quad(a[0], quarter), t = fold_quad(a[1], quarter);
                if (quarter < 2) w[(quarter ? second : h) * BLOCK + j] = (quarter ? t : s) * __uint_as_float(p.scale);
            }
        }
        __syncthreads();
        if (warp < n) {
            float *own = w + warp * BLOCK, m = __int_as_float(0xff800000), l = 0.0f, s[8];
#pragma unroll
            for (u32 t = 0; t < 8; t++) {
                u32 j = lane + 32 * t;
                s[t] = own[j];
                if (j >= from && j < to) m = fmaxf(m, s[t]);
            }
            m = warp_max(m);
#pragma unroll
            for (u32 t = 0; t < 8; t++) {
                u32 j = lane + 32 * t;
                float e = j >= from && j < to ? exp_(s[t] - m) : 0.0f;
                own[j] = e;
                l += e;
            }
            l = fold(l);
            if (lane == 0) {
                block_max[warp] = m;
                block_sum[warp] = l;
                if (alone && b > 0) {
                    float was = max_so_far[warp], now = fmaxf(was, m), c = exp_(was - now), d = exp_(m - now);
                    old_scale[warp] = c;
                    new_scale[warp] = d;
                    max_so_far[warp] = now;
                    sum_so_far[warp] = fmaf(sum_so_far[warp], c, l * d);
                } else {
                    max_so_far[warp] = m;
                    sum_so_far[warp] = l;
                }
            }
        }
        __syncthreads();
        // A thread takes two neighbours of a head; sixteen values are on their way while sixteen are added.
        if (threadIdx.x < n * (DIM / 2)) {
            u32 u = threadIdx.x, h = u / (DIM / 2), i = u % (DIM / 2) * 2, j = from;
            const float *weight = w + h * BLOCK;
            const u32 *value = (const u32 *)values_held + u % (DIM / 2);
            float a = 0.0f, c = 0.0f;
            auto add = [&](float x, u32 v) {
                a = fmaf(x, half_to_float((u16)v), a);
                c = fmaf(x, half_to_float((u16)(v >> 16)), c);
            };
            for (; j < to && j % 4; j++) add(weight[j], value[j * (DIM / 2)]);
            constexpr u32 LOT = 16, PAIRS = DIM / 2;
            struct Lot {
                u32 v[LOT];
                float4 x[LOT / 4];
            } one, two;
            auto load = [&](Lot &lot, const u32 *from_v, const float *from_x) {
#pragma unroll
                for (u32 t = 0; t < LOT; t++) lot.v[t] = from_v[t * PAIRS];
#pragma unroll
                for (u32 t = 0; t < LOT / 4; t++) lot.x[t] = ((const float4 *)from_x)[t];
            };
            auto take = [&](const Lot &lot) {
#pragma unroll
                for (u32 t = 0; t < LOT / 4; t++) {
                    add(lot.x[t].x, lot.v[4 * t]);
                    add(lot.x[t].y, lot.v[4 * t + 1]);
                    add(lot.x[t].z, lot.v[4 * t + 2]);
                    add(lot.x[t].w, lot.v[4 * t + 3]);
                }
            };
            const u32 *at_v = value + j * PAIRS;
            const float *at_x = weight + j;
            // What is loaded past the last position lies in the block all the same, or is loaded again.
            u32 lots = j < to ? (to - j) / LOT : 0, t = 0;
            if (lots) load(one, at_v, at_x);
#pragma unroll 1
            for (; t + 2 <= lots; t += 2) {
                load(two, at_v + LOT * PAIRS, at_x + LOT);
                take(one);
                u32 next = t + 2 < lots ? 2 : 1;
                load(one, at_v + next * LOT * PAIRS, at_x + next * LOT);
                take(two);
                at_v += 2 * LOT * PAIRS;
                at_x += 2 * LOT;
            }
            if (t < lots) take(one);
            j += lots * LOT;
            at_v = value + j * PAIRS;
            at_x = weight + j;
#pragma unroll 4
            for (; j < to; j++) {
                add(*at_x++, *at_v);
                at_v += PAIRS;
            }
            if (!alone) {
                float *to_part = (float *)p.parts + ((u64)(h0 + h) * p.most_blocks + b) * part;
                *(float2 *)(to_part + 2 + i) = make_float2(a, c);
                if (i == 0) *(float2 *)to_part = make_float2(block_max[h], block_sum[h]);
            } else {
                float *sum = sums + 2 * u;
                sum[0] = b == 0 ? a : fmaf(sum[0], old_scale[h], a * new_scale[h]);
                sum[1] = b == 0 ? c : fmaf(sum[1], old_scale[h], c * new_scale[h]);
            }
        }
        __syncthreads();
        if (b + gridDim.x < blocks) {
            b += gridDim.x;
            hold(true);
            b -= gridDim.x;
        }
    }
    if (!alone) {
        // The counter starts over by itself once all have come.
        __threadfence();
        __syncthreads();
        u32 come = blocks < gridDim.x ? blocks : gridDim.x;
        if (threadIdx.x == 0) last = atomicInc((u32 *)p.counters + blockIdx.y, come - 1) == come - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        const volatile float *all = (const float *)p.parts + (u64)h0 * p.most_blocks * part;
        // What a block's merge multiplies with: the largest so far is the same in any order, so lanes find it together. 64 blocks at a time
        // take the place of weights, two numbers each.
        u32 u = threadIdx.x, h = u / (DIM / 2), i = u % (DIM / 2) * 2;
        bool has = u < n * (DIM / 2);
        const volatile float2 *own = (const volatile float2 *)(all + (u64)(has ? h : 0) * p.most_blocks * part + 2 + i);
        float a = 0.0f, c = 0.0f;
#pragma unroll 1
        for (u32 c0 = 0; c0 < blocks; c0 += 32) {
            u32 many = blocks - c0 < 32 ? blocks - c0 : 32;
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
                ((float2 *)(w + warp * BLOCK))[lane] = make_float2(old, now);
                w[warp * BLOCK + 64 + lane] = l * now;
                w[warp * BLOCK + 96 + lane] = l;
                if (lane == many - 1) max_so_far[warp] = top;
            }
            __syncthreads();
            if (threadIdx.x < n) {
                const float *x = w + threadIdx.x * BLOCK;
                float sum = c0 ? sum_so_far[threadIdx.x] : x[96];
                for (u32 t = c0 ? 0 : 1; t < many; t++) sum = fmaf(sum, x[2 * t], x[64 + t]);
                sum_so_far[threadIdx.x] = sum;
            }
            if (has) {
#pragma unroll 8
                for (u32 t = 0; t < many; t++) {
                    const volatile float2 *from_part = (const volatile float2 *)((const volatile float *)own + (u64)(c0 + t) * part);
                    float v0 = from_part->x, v1 = from_part->y;
                    float2 s = ((const float2 *)(w + h * BLOCK))[t];
                    bool begins = c0 + t == 0;
                    a = begins ? v0 : fmaf(a, s.x, v0 * s.y);
                    c = begins ? v1 : fmaf(c, s.x, v1 * s.y);
                }
            }
        }
        if (has) {
            sums[2 * u] = a;
            sums[2 * u + 1] = c;
        }
        __syncthreads();
    }
#pragma unroll 1
    for (u32 u = threadIdx.x; u < n * DIM; u += ROW_THREADS) put(p, 0, h0 + u / DIM, u % DIM, sums[u] / sum_so_far[u / DIM]);
}

#define ATTENTION_ROW(name, dim)                                                                                                \
    extern "C" __global__ void __launch_bounds__(512, 1) name(const Attend p) { attention_row<dim>(p); }
ATTENTION_ROW(attention_row_64, 64)
ATTENTION_ROW(attention_row_128, 128)
