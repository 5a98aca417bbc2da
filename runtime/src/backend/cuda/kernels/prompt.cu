// Attention of many rows: 64 queries a block of threads, which are as many rows as have all query heads of one KV head.
//
// Per block of 256 positions: scores (all of them, since weights need their maximum), weights, sums of values, then the merge with what
// came before, which stands in the result. Keys and values pass through shared memory in f32, 64 keys or 32 values at a time, and meet all
// queries there. A score has 32 accumulators that are folded by halves; a thread computes four by four scores one accumulator after the
// other, in the order in which the fold wants them, so that it holds five of each at most. Even accumulators come first, for all keys of a
// block, then odd ones, so that half of the queries and of a chunk of keys lie in shared memory at a time.

enum { QUERIES = 64, KEYS = 64, VALUES = 32 };

// Elements i0 .. i0 + 8 of a cache's row, as they are stored.
struct Raw {
    uint4 a, b;
};

DEVICE Raw load_eight(const u8 *row, u32 dtype, u32 i0, u32 dim) {
    Raw r;
    r.a = r.b = make_uint4(0, 0, 0, 0);
    if (i0 >= dim) return r;
    if (dtype == F16) {
        r.a = *(const uint4 *)(row + i0 * 2);
    } else {
        r.a = *(const uint4 *)(row + i0 * 4);
        r.b = *(const uint4 *)(row + i0 * 4 + 16);
    }
    return r;
}

// Of each of the four pairs of elements the first or the second.
DEVICE void one_of_pairs(const Raw &r, u32 dtype, u32 second, float *to) {
    if (dtype == F16) {
        u32 shift = second * 16;
        to[0] = half_to_float((u16)(r.a.x >> shift));
        to[1] = half_to_float((u16)(r.a.y >> shift));
        to[2] = half_to_float((u16)(r.a.z >> shift));
        to[3] = half_to_float((u16)(r.a.w >> shift));
    } else {
        to[0] = __uint_as_float(second ? r.a.y : r.a.x);
        to[1] = __uint_as_float(second ? r.a.w : r.a.z);
        to[2] = __uint_as_float(second ? r.b.y : r.b.x);
        to[3] = __uint_as_float(second ? r.b.w : r.b.z);
    }
}

// Bits of idx in the opposite order.
DEVICE constexpr u32 reversed(u32 idx, u32 bits) {
    u32 r = 0;
    for (u32 i = 0; i < bits; i++) r |= (idx >> i & 1) << (bits - 1 - i);
    return r;
}

// Sums of four by four scores over the accumulators of one class: 32 / (2 * PARTS) of them, DIM / 32 elements each. `q` and `k` point to
// a thread's four of each; rows of `q` are PARTS apart.
template <int DIM, int PARTS> DEVICE void class_sums(const float *q, const float *k, float (&sum)[16]) {
    constexpr u32 LANES = 16 / PARTS, BITS = PARTS == 1 ? 4 : 3;
    float held[BITS][16];
#pragma unroll
    for (u32 idx = 0; idx < LANES; idx++) {
        u32 m = reversed(idx, BITS);
#pragma unroll
        for (u32 e = 0; e < 16; e++) sum[e] = 0.0f;
#pragma unroll
        for (u32 t = 0; t < DIM / 32; t++) {
            float4 a = *(const float4 *)(q + (m + LANES * t) * PARTS * QUERIES), b = *(const float4 *)(k + (m + LANES * t) * KEYS);
            float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (u32 e = 0; e < 16; e++) sum[e] = fmaf(x[e & 3], y[e >> 2], sum[e]);
        }
#pragma unroll
        for (u32 level = 0; level < BITS; level++) {
            // So many sums of neighbours in the order of the fold are complete.
            bool complete = (idx & ((2u << level) - 1)) == (2u << level) - 1;
            bool first = (idx & ((2u << level) - 1)) == (1u << level) - 1;
#pragma unroll
            for (u32 e = 0; e < 16; e++) {
                if (complete) sum[e] = held[level][e] + sum[e];
                else if (first) held[level][e] = sum[e];
            }
        }
    }
}

// Shared memory: [256][QUERIES] scores, then weights; [DIM / 2][QUERIES] half of the queries; a part of keys or values; and of each query
// maximum and sum so far, and what old and new are scaled with.
template <int DIM> DEVICE void attention_tile(const Attend &p) {
    constexpr u32 PARTS = DIM > 128 ? 2 : 1, WIDE = DIM > 128 ? 128 : DIM, PART_ROWS = DIM / 2 / PARTS;
    constexpr u32 CHUNK = PART_ROWS * KEYS > VALUES * WIDE ? PART_ROWS * KEYS : VALUES * WIDE;
    float *scores = (float *)shared, *half_q = scores + BLOCK * QUERIES, *chunk = half_q + DIM / 2 * QUERIES;
    float *max_so_far = chunk + CHUNK, *sum_so_far = max_so_far + QUERIES, *old_scale = sum_so_far + QUERIES, *new_scale = old_scale + QUERIES;
    u32 t = threadIdx.x, warp = t >> 5, lane = t & 31, group = p.heads / p.kv_heads, per_tile = QUERIES / group, kvh = blockIdx.x;
    wait_for_earlier();
    // The longest first.
    u32 tile = gridDim.y - 1 - blockIdx.y;
    Run run;
    if (!run_of_tile(p.step, per_tile, tile, run)) return;
    u32 first = tile * per_tile, rows = run.rows - first < per_tile ? run.rows - first : per_tile, queries = rows * group;
    u32 pos0 = run.pos + first, row0 = run.first + first;
    u64 size = p.k.dtype == F16 ? 2 : 4;
    const u8 *keys = (const u8 *)p.k.at + run.cache + kvh * (u64)p.k.head * size, *values = (const u8 *)p.v.at + run.cache + kvh * (u64)p.v.head * size;
    u32 tile_from = first_seen(p, pos0), tile_to = pos0 + rows;
    // What all rows see.
    u32 all_from = first_seen(p, tile_to - 1), all_to = pos0 + 1;
    // A thread's query of the weights, its scores' queries and keys, its sums' queries and places.
    u32 own = t & 63, quarter = t >> 6, own_pos = pos0 + own / group;
    u32 own_from = first_seen(p, own_pos), own_to = own < queries ? own_pos + 1 : own_from;
    // Sixteen bytes a lane are read from shared memory in half the time where every lane has a neighbour, one or two away, that reads the same.
    u32 eighth = lane >> 1 & 7, fourth = (lane & 1) | lane >> 4 << 1;
    u32 s_q = (warp & 1) * 32 + eighth * 4, s_k = (warp >> 1) * 16 + fourth * 4;
    u32 v_q = (warp >> 1) * 16 + fourth * 4, v_d = (warp & 1) * 32 + eighth * 4;
    const float *q_row = at<float>(p.q, row0 + (own < queries ? own / group : 0), kvh * group + own % group);

    for (u32 b = tile_from / BLOCK; b * BLOCK < tile_to; b++) {
        u32 start = b * BLOCK, low = tile_from > start ? tile_from - start : 0, high = tile_to - start < BLOCK ? tile_to - start : BLOCK;
        u32 from = own_from > start ? own_from - start : 0, to = own_to > start ? own_to - start : 0;
        to = to < BLOCK ? to : BLOCK;
#pragma unroll 1
        for (u32 odd = 0; odd < 2; odd++) {
            __syncthreads();
            for (u32 s = quarter; s < DIM / 8; s += 4) {
                float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f), y = x;
                if (s * 8 < p.dim) {
                    x = ((const float4 *)q_row)[s * 2];
                    y = ((const float4 *)q_row)[s * 2 + 1];
                }
                float *into = half_q + s * 4 * QUERIES + own;
                into[0] = odd ? x.y : x.x;
                into[QUERIES] = odd ? x.w : x.z;
                into[2 * QUERIES] = odd ? y.y : y.x;
                into[3 * QUERIES] = odd ? y.w : y.z;
            }
#pragma unroll 1
            for (u32 j0 = low / KEYS * KEYS; j0 < high; j0 += KEYS) {
                float total[16];
#pragma unroll
                for (u32 part = 0; part < PARTS; part++) {
                    u32 j = j0 + own;
                    const u8 *key = keys + (start + (j < low ? low : j < high ? j : high - 1)) * p.k.row * size;
                    constexpr u32 SHARE = DIM / 32;
                    Raw raw[SHARE];
#pragma unroll
                    for (u32 i = 0; i < SHARE; i++) raw[i] = load_eight(key, p.k.dtype, (quarter * SHARE + i) * 8, p.dim);
                    __syncthreads();
#pragma unroll
                    for (u32 i = 0; i < SHARE; i++) {
                        float x[4];
                        one_of_pairs(raw[i], p.k.dtype, odd, x);
                        u32 s = quarter * SHARE + i;
#pragma unroll
                        for (u32 e = part; e < 4; e += PARTS) chunk[(s * (4 / PARTS) + e / PARTS) * KEYS + own] = x[e];
                    }
                    __syncthreads();
                    float sum[16];
                    class_sums<DIM, PARTS>(half_q + part * QUERIES + s_q, chunk + s_k, sum);
#pragma unroll
                    for (u32 e = 0; e < 16; e++) total[e] = part == 0 ? sum[e] : total[e] + sum[e];
                }
                float scale = __uint_as_float(p.scale);
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    float4 *to_score = (float4 *)(scores + (j0 + s_k + k) * QUERIES + s_q);
                    float4 x = make_float4(total[4 * k], total[4 * k + 1], total[4 * k + 2], total[4 * k + 3]);
                    if (odd) {
                        float4 even = *to_score;
                        x = make_float4((even.x + x.x) * scale, (even.y + x.y) * scale, (even.z + x.z) * scale, (even.w + x.w) * scale);
                    }
                    *to_score = x;
                }
            }
        }
        __syncthreads();
        // Weights: a thread takes every fourth lane of a query, so that what it holds folds as far as two and one apart.
        float *column = scores + own, m = __int_as_float(0xff800000);
        for (u32 j = quarter; j < BLOCK; j += 4)
            if (j >= from && j < to) m = fmaxf(m, column[j * QUERIES]);
        chunk[t] = m;
        __syncthreads();
        m = fmaxf(fmaxf(chunk[own], chunk[own + 64]), fmaxf(chunk[own + 128], chunk[own + 192]));
        float l[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            l[k] = 0.0f;
#pragma unroll 1
            for (u32 j = quarter + 4 * k; j < high; j += 32) {
                float x = j >= from && j < to ? exp_(column[j * QUERIES] - m) : 0.0f;
                column[j * QUERIES] = x;
                l[k] += x;
            }
        }
#pragma unroll
        for (u32 k = 0; k < 4; k++) l[k] += l[k + 4];
        chunk[256 + t] = (l[0] + l[2]) + (l[1] + l[3]);
        __syncthreads();
        if (quarter == 0 && from < to) {
            const float *x = chunk + 256 + own;
            float sum = (x[0] + x[128]) + (x[64] + x[192]);
            if (own_from / BLOCK == b) {
                max_so_far[own] = m;
                sum_so_far[own] = sum;
            } else {
                merge_block(m, sum, max_so_far[own], sum_so_far[own], old_scale[own], new_scale[own]);
            }
        }
#pragma unroll 1
        for (u32 d0 = 0; d0 < DIM; d0 += WIDE) {
            constexpr u32 N = WIDE / 64;
            float acc[4][N * 4];
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 e = 0; e < N * 4; e++) acc[i][e] = 0.0f;
            // What of the block a thread's queries see.
            u32 sees_from[4], sees_to[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 q = v_q + i, pos = pos0 + q / group, f = first_seen(p, pos);
                sees_from[i] = f > start ? f - start : 0;
                sees_to[i] = q < queries && pos + 1 > start ? pos + 1 - start : 0;
                if (sees_to[i] > BLOCK) sees_to[i] = BLOCK;
            }
#pragma unroll 1
            for (u32 j0 = low / VALUES * VALUES; j0 < high; j0 += VALUES) {
                constexpr u32 SHARE = VALUES * WIDE / 8 / 256;
                Raw raw[SHARE];
#pragma unroll
                for (u32 i = 0; i < SHARE; i++) {
                    u32 u = t + i * 256, j = j0 + u / (WIDE / 8);
                    const u8 *row = values + (start + (j < low ? low : j < high ? j : high - 1)) * p.v.row * size;
                    raw[i] = load_eight(row, p.v.dtype, d0 + u % (WIDE / 8) * 8, p.dim);
                }
                __syncthreads();
#pragma unroll
                for (u32 i = 0; i < SHARE; i++) {
                    float x[4], y[4];
                    one_of_pairs(raw[i], p.v.dtype, 0, x);
                    one_of_pairs(raw[i], p.v.dtype, 1, y);
                    // Half of the lanes begin with the second half, which lies in other banks.
                    float4 *into = (float4 *)(chunk + (t + i * 256) * 8), one = make_float4(x[0], y[0], x[1], y[1]);
                    float4 two = make_float4(x[2], y[2], x[3], y[3]);
                    bool turned = t >> 2 & 1;
                    into[turned] = turned ? two : one;
                    into[!turned] = turned ? one : two;
                }
                __syncthreads();
                const float *weight = scores + j0 * QUERIES + v_q, *value = chunk + v_d;
                // All rows see all of it, but at the ends.
                if (start + j0 >= all_from && start + j0 + VALUES <= all_to) {
#pragma unroll 8
                    for (u32 j = 0; j < VALUES; j++) {
                        float4 a = *(const float4 *)(weight + j * QUERIES);
                        float x[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                        for (u32 n = 0; n < N; n++) {
                            float4 v = *(const float4 *)(value + j * WIDE + n * 64);
#pragma unroll
                            for (u32 i = 0; i < 4; i++) {
                                acc[i][4 * n] = fmaf(x[i], v.x, acc[i][4 * n]);
                                acc[i][4 * n + 1] = fmaf(x[i], v.y, acc[i][4 * n + 1]);
                                acc[i][4 * n + 2] = fmaf(x[i], v.z, acc[i][4 * n + 2]);
                                acc[i][4 * n + 3] = fmaf(x[i], v.w, acc[i][4 * n + 3]);
                            }
                        }
                    }
                } else {
#pragma unroll 1
                    for (u32 j = 0; j < VALUES; j++) {
                        float4 a = *(const float4 *)(weight + j * QUERIES);
                        float x[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                        for (u32 i = 0; i < 4; i++) {
                            if (j0 + j < sees_from[i] || j0 + j >= sees_to[i]) continue;
#pragma unroll
                            for (u32 n = 0; n < N; n++) {
                                float4 v = *(const float4 *)(value + j * WIDE + n * 64);
                                acc[i][4 * n] = fmaf(x[i], v.x, acc[i][4 * n]);
                                acc[i][4 * n + 1] = fmaf(x[i], v.y, acc[i][4 * n + 1]);
                                acc[i][4 * n + 2] = fmaf(x[i], v.z, acc[i][4 * n + 2]);
                                acc[i][4 * n + 3] = fmaf(x[i], v.w, acc[i][4 * n + 3]);
                            }
                        }
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 q = v_q + i, pos = pos0 + q / group;
                if (sees_from[i] >= sees_to[i]) continue;
                bool merges = first_seen(p, pos) / BLOCK != b;
                bool ends = pos + 1 <= start + BLOCK;
                float c = old_scale[q], d = new_scale[q], sum = sum_so_far[q];
                float *out = at<float>(p.out, row0 + q / group, kvh * group + q % group) + d0 + v_d;
#pragma unroll
                for (u32 n = 0; n < N; n++) {
                    if (d0 + v_d + n * 64 >= p.dim) continue;
                    float4 *to_out = (float4 *)(out + n * 64);
                    float x[4] = {acc[i][4 * n], acc[i][4 * n + 1], acc[i][4 * n + 2], acc[i][4 * n + 3]};
                    if (merges) {
                        float4 old = *to_out;
                        x[0] = fmaf(old.x, c, x[0] * d);
                        x[1] = fmaf(old.y, c, x[1] * d);
                        x[2] = fmaf(old.z, c, x[2] * d);
                        x[3] = fmaf(old.w, c, x[3] * d);
                    }
                    *to_out = ends ? make_float4(x[0] / sum, x[1] / sum, x[2] / sum, x[3] / sum) : make_float4(x[0], x[1], x[2], x[3]);
                }
            }
        }
    }
}

#define ATTENTION_TILE(name, dim)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 2) name(const Attend p) { attention_tile<dim>(p); }
ATTENTION_TILE(attention_tile_64, 64)
ATTENTION_TILE(attention_tile_128, 128)
ATTENTION_TILE(attention_tile_256, 256)
