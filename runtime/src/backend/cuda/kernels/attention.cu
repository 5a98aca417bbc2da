// Attention of one row at a time: blocks of 256 positions, merged in order.
//
// A block of threads takes a row and up to HEADS query heads that share keys and values, and every gridDim.x-th block of positions.
// With one thread block a row the results of position blocks are merged as they come; with more they are put aside, and whichever
// thread block is done last merges them, in order.
//
// Where a step has one row, the steps before may be made here too: norms of the heads, rotation, the row of the caches, and after it
// the gate. Every block that sees the new position makes its key and value itself; one of them writes them down.

enum { HEADS = 4, BLOCK = 256 };

// The norm of heads: its weight, or 0.
struct HeadNorm {
    u64 at;
    u32 dtype, eps, offset, unused;
};

struct Attend {
    Operand q, k, v, out;
    u32 rows, heads, kv_heads, dim;
    u32 scale, window, per_block;
    // Whether queries, new keys and values are made here.
    u32 makes;
    Step step;
    // Room for the results of blocks, [rows][heads][blocks][dim + 2], and a counter a row and group of heads, 0 before and after.
    u64 parts, counters;
    u32 most_blocks, half;
    // What the new key and value are made from, the norms, the rotation, and the gate (or 0).
    Operand new_k, new_v, gate;
    HeadNorm q_norm, k_norm;
    u64 table;
    // Whether a block's values fit into shared memory, and elements from a row's rotation to the next.
    u32 holds_values, table_row;
    // Of attention of several rows: where the result's int8 form in groups of 64 goes, or 0, and elements from row to row.
    u64 codes, scales, sums;
    u32 codes_row, scales_row;
};

// The first position that a row at `pos` sees.
DEVICE u32 first_seen(const Attend &p, u32 pos) { return p.window && pos + 1 > p.window ? pos + 1 - p.window : 0; }

// Takes a block's maximum and sum to those so far; gives what sums of values are then multiplied with, old and new.
DEVICE void merge_block(float m, float l, float &max_so_far, float &sum_so_far, float &old_scale, float &new_scale) {
    float was = max_so_far, now = fmaxf(was, m), c = exp_(was - now), d = exp_(m - now);
    old_scale = c;
    new_scale = d;
    max_so_far = now;
    sum_so_far = fmaf(sum_so_far, c, l * d);
}

// A head as the products of its layer leave it: normalised, rotated. One warp.
DEVICE void make_head(float *to, const float *x, u32 dim, const HeadNorm &norm, const float *table, u32 half) {
    u32 lane = threadIdx.x & 31;
    float inv = 0.0f, acc = 0.0f, offset = __uint_as_float(norm.offset);
    if (norm.at) {
#pragma unroll 4
        for (u32 i = lane; i < dim; i += 32) acc = fmaf(x[i], x[i], acc);
        inv = rms_inverse(acc, dim, __uint_as_float(norm.eps));
    }
    for (u32 i = lane; i < dim; i += 32) to[i] = norm.at ? (x[i] * inv) * (offset + widen((const void *)norm.at, norm.dtype, i)) : x[i];
    __syncwarp();
    for (u32 i = lane; i < half; i += 32) {
        float a = to[i], b = to[i + half], co = table[i], si = table[half + i];
        to[i] = fmaf(a, co, -(b * si));
        to[i + half] = fmaf(b, co, a * si);
    }
    __syncwarp();
}

// A cache's element as it will be read.
DEVICE float cached(float x, u32 dtype) { return dtype == F16 ? half_to_float(float_to_half(x)) : x; }

// Eight elements of a cache, f16 (SIZE 2) or f32.
template <int SIZE> struct Eight {
    uint4 raw[SIZE / 2];
};

template <int SIZE> DEVICE void widen_eight(float *to, const Eight<SIZE> &e) {
#pragma unroll
    for (u32 i = 0; i < SIZE / 2; i++) {
        u32 w[4] = {e.raw[i].x, e.raw[i].y, e.raw[i].z, e.raw[i].w};
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (SIZE == 2) {
                to[2 * j] = half_to_float((u16)w[j]);
                to[2 * j + 1] = half_to_float((u16)(w[j] >> 16));
            } else {
                to[4 * i + j] = __uint_as_float(w[j]);
            }
        }
    }
}

// Scores of eight positions a warp, four lanes each: lane q of them has accumulators 8q .. 8q + 8. dim is a multiple of 32.
template <int SIZE> DEVICE void scores_of_eight(const Attend &p, const float *q, u64 key, u32 n, float *s) {
    u32 quarter = threadIdx.x & 3;
    float acc[HEADS][8];
#pragma unroll
    for (u32 h = 0; h < HEADS; h++)
#pragma unroll
        for (u32 i = 0; i < 8; i++) acc[h][i] = 0.0f;
    for (u32 t0 = 0; t0 < p.dim; t0 += 128) {
        // Four loads at a time.
        Eight<SIZE> raw[4];
#pragma unroll
        for (u32 l = 0; l < 4; l++)
#pragma unroll
            for (u32 i = 0; i < SIZE / 2; i++)
                if (t0 + 32 * l < p.dim) raw[l].raw[i] = ((const uint4 *)(key + (t0 + 32 * l + 8 * quarter) * SIZE))[i];
#pragma unroll
      for (u32 l = 0; l < 4; l++) {
        if (t0 + 32 * l >= p.dim) break;
        float k[8];
        u32 i0 = t0 + 32 * l + 8 * quarter;
        widen_eight<SIZE>(k, raw[l]);
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            if (h >= n) break;
            float4 a = *(const float4 *)(q + h * p.dim + i0), b = *(const float4 *)(q + h * p.dim + i0 + 4);
            acc[h][0] = fmaf(a.x, k[0], acc[h][0]);
            acc[h][1] = fmaf(a.y, k[1], acc[h][1]);
            acc[h][2] = fmaf(a.z, k[2], acc[h][2]);
            acc[h][3] = fmaf(a.w, k[3], acc[h][3]);
            acc[h][4] = fmaf(b.x, k[4], acc[h][4]);
            acc[h][5] = fmaf(b.y, k[5], acc[h][5]);
            acc[h][6] = fmaf(b.z, k[6], acc[h][6]);
            acc[h][7] = fmaf(b.w, k[7], acc[h][7]);
        }
      }
    }
#pragma unroll
    for (u32 h = 0; h < HEADS; h++) {
        if (h >= n) break;
        float *a = acc[h];
        // Folded by halves: 16 apart is two lanes away, 8 apart one, the rest are a lane's own.
#pragma unroll
        for (u32 i = 0; i < 8; i++) a[i] += __shfl_xor_sync(FULL, a[i], 2);
#pragma unroll
        for (u32 i = 0; i < 8; i++) a[i] += __shfl_xor_sync(FULL, a[i], 1);
#pragma unroll
        for (u32 i = 0; i < 4; i++) a[i] += a[i + 4];
        s[h] = ((a[0] + a[2]) + (a[1] + a[3])) * __uint_as_float(p.scale);
    }
}

// Score of one position for `n` heads: a lane an accumulator.
DEVICE void scores(const Attend &p, const float *q, u64 key, const float *new_k, u32 n, float *s) {
    u32 lane = threadIdx.x & 31, padded = (p.dim + 31) / 32 * 32;
    float acc[HEADS];
#pragma unroll
    for (u32 h = 0; h < HEADS; h++) acc[h] = 0.0f;
    for (u32 i = lane; i < padded; i += 32) {
        float k = i >= p.dim ? 0.0f : key ? widen((const void *)key, p.k.dtype, i) : new_k[i];
#pragma unroll
        for (u32 h = 0; h < HEADS; h++)
            if (h < n) acc[h] = fmaf(i < p.dim ? q[h * padded + i] : 0.0f, k, acc[h]);
    }
#pragma unroll
    for (u32 h = 0; h < HEADS; h++) s[h] = h < n ? fold(acc[h]) * __uint_as_float(p.scale) : 0.0f;
}

// A result, gated if there is a gate.
DEVICE void put(const Attend &p, u32 row, u32 h, u32 i, float x) {
    if (p.gate.at) x = sigmoid_(at<float>(p.gate, row, h)[i]) * x;
    at<float>(p.out, row, h)[i] = x;
}

// Shared memory: [HEADS][padded dim] queries, [HEADS][256] weights, [HEADS][dim] sums so far, the new key and value, and, where they fit,
// a block's values as they are cached.
extern "C" __global__ void __launch_bounds__(256) attention(const Attend p) {
    __shared__ float block_max[HEADS], block_sum[HEADS], old_scale[HEADS], new_scale[HEADS], max_so_far[HEADS], sum_so_far[HEADS];
    __shared__ u32 last;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, padded = (p.dim + 31) / 32 * 32;
    u32 row = blockIdx.z, h0 = blockIdx.y * p.per_block, group = p.heads / p.kv_heads, kvh = h0 / group, n = p.per_block;
    wait_for_earlier();
    Row at_row = p.step.rows[row];
    float *q = (float *)shared, *w = q + HEADS * padded, *sums = w + HEADS * BLOCK, *new_k = sums + HEADS * p.dim, *new_v = new_k + p.dim;
    u8 *held = (u8 *)(new_v + p.dim);
    u64 size = p.k.dtype == F16 ? 2 : 4;
    u64 keys = p.k.at + at_row.cache + kvh * (u64)p.k.head * size, values = p.v.at + at_row.cache + kvh * (u64)p.v.head * size;
    u32 pos = at_row.pos, first = first_seen(p, pos);
    u32 first_block = first / BLOCK, blocks = pos / BLOCK + 1 - first_block;
    bool alone = gridDim.x == 1 || blocks == 1, makes = p.makes && (blocks - 1) % gridDim.x == blockIdx.x;
    if (alone && blockIdx.x > 0) return;
    u64 part = p.dim + 2;
    if (p.makes) {
        const float *table = (const float *)p.table;
        if (warp < n) make_head(q + warp * padded, at<float>(p.q, row, h0 + warp), p.dim, p.q_norm, table, p.half);
        if (makes && warp == 4) {
            make_head(new_k, at<float>(p.new_k, row, kvh), p.dim, p.k_norm, table, p.half);
            for (u32 i = lane; i < p.dim; i += 32) {
                float x = cached(new_k[i], p.k.dtype), y = cached(at<float>(p.new_v, row, kvh)[i], p.v.dtype);
                new_k[i] = x;
                new_v[i] = y;
                if (h0 % group == 0) {
                    u64 k_at = keys + ((u64)pos * p.k.row + i) * size, v_at = values + ((u64)pos * p.v.row + i) * size;
                    if (p.k.dtype == F16) {
                        *(u16 *)k_at = float_to_half(x);
                        *(u16 *)v_at = float_to_half(y);
                    } else {
                        *(float *)k_at = x;
                        *(float *)v_at = y;
                    }
                }
            }
        }
    } else {
        for (u32 i = threadIdx.x; i < n * padded; i += blockDim.x) {
            u32 h = i / padded, d = i % padded;
            q[i] = d < p.dim ? at<float>(p.q, row, h0 + h)[d] : 0.0f;
        }
    }
    __syncthreads();
    for (u32 b = blockIdx.x; b < blocks; b += gridDim.x) {
        u32 start = (first_block + b) * BLOCK, from = first > start ? first : start, to = pos + 1 < start + BLOCK ? pos + 1 : start + BLOCK;
        // Values are on their way while scores are computed.
        if (p.holds_values) {
            u32 per = p.dim * size / 16, many = (to - from) * per;
            for (u32 i = threadIdx.x; i < many; i += blockDim.x) {
                u32 j = from + i / per, part16 = i % per;
                u32 into = (u32)__cvta_generic_to_shared(held + (u64)(j - start) * p.dim * size + part16 * 16);
                if (!(makes && j == pos))
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(into), "l"(values + j * p.v.row * size + part16 * 16));
            }
            asm volatile("cp.async.commit_group;" ::);
        }
        if (p.dim % 32 == 0) {
            for (u32 j0 = warp * 8; j0 < BLOCK; j0 += 64) {
                u32 j = j0 + lane / 4;
                if (start + j0 >= to || start + j0 + 8 <= from) {
                    for (u32 h = 0; h < n; h++)
                        if (lane < 8) w[h * BLOCK + j0 + lane] = 0.0f;
                    continue;
                }
                bool seen = start + j >= from && start + j < to;
                float s[HEADS];
                u64 key = keys + (seen && !(makes && start + j == pos) ? start + j : from) * p.k.row * size;
                if (size == 2) scores_of_eight<2>(p, q, key, n, s);
                else scores_of_eight<4>(p, q, key, n, s);
                if (lane % 4 == 0)
#pragma unroll
                    for (u32 h = 0; h < HEADS; h++)
                        if (h < n) w[h * BLOCK + j] = seen ? s[h] : 0.0f;
            }
            if (makes && pos >= from && pos < to) {
                // The new key, which is in no cache yet.
                __syncthreads();
                if (warp < n) {
                    float acc = 0.0f;
                    for (u32 i = lane; i < p.dim; i += 32) acc = fmaf(q[warp * padded + i], new_k[i], acc);
                    acc = fold(acc) * __uint_as_float(p.scale);
                    if (lane == 0) w[warp * BLOCK + pos - start] = acc;
                }
            }
        } else for (u32 j = warp; j < BLOCK; j += 8) {
            float s[HEADS];
            bool seen = start + j >= from && start + j < to;
            if (seen) scores(p, q, makes && start + j == pos ? 0 : keys + (start + j) * p.k.row * size, new_k, n, s);
            if (lane == 0)
#pragma unroll
                for (u32 h = 0; h < HEADS; h++)
                    if (h < n) w[h * BLOCK + j] = seen ? s[h] : 0.0f;
        }
        __syncthreads();
        if (warp < n) {
            float m = __int_as_float(0xff800000);
            for (u32 j = lane; j < BLOCK; j += 32)
                if (start + j >= from && start + j < to) m = fmaxf(m, w[warp * BLOCK + j]);
            m = warp_max(m);
            float l = 0.0f;
            for (u32 j = lane; j < BLOCK; j += 32) {
                bool seen = start + j >= from && start + j < to;
                float x = seen ? exp_(w[warp * BLOCK + j] - m) : 0.0f;
                w[warp * BLOCK + j] = x;
                l += x;
            }
            l = fold(l);
            if (lane == 0) {
                block_max[warp] = m;
                block_sum[warp] = l;
                if (alone && b > 0) {
                    merge_block(m, l, max_so_far[warp], sum_so_far[warp], old_scale[warp], new_scale[warp]);
                } else {
                    max_so_far[warp] = m;
                    sum_so_far[warp] = l;
                }
            }
        }
        if (p.holds_values) asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        for (u32 u = threadIdx.x; u < n * p.dim; u += blockDim.x) {
            u32 h = u / p.dim, i = u % p.dim, end = makes && to == pos + 1 ? pos : to;
            const float *x = w + h * BLOCK;
            float acc = 0.0f;
            if (p.holds_values && p.v.dtype == F16) {
                const u16 *v = (const u16 *)held + i;
#pragma unroll 8
                for (u32 j = from; j < end; j++) acc = fmaf(x[j - start], half_to_float(v[(j - start) * p.dim]), acc);
            } else if (p.holds_values) {
                const float *v = (const float *)held + i;
#pragma unroll 8
                for (u32 j = from; j < end; j++) acc = fmaf(x[j - start], v[(j - start) * p.dim], acc);
            } else {
#pragma unroll 8
                for (u32 j = from; j < end; j++) acc = fmaf(x[j - start], widen((const void *)values, p.v.dtype, j * p.v.row + i), acc);
            }
            if (end < to) acc = fmaf(x[pos - start], new_v[i], acc);
            if (!alone) {
                float *to_part = (float *)p.parts + ((u64)(row * p.heads + h0 + h) * p.most_blocks + b) * part;
                to_part[2 + i] = acc;
                if (i == 0) {
                    to_part[0] = block_max[h];
                    to_part[1] = block_sum[h];
                }
            } else {
                sums[u] = b == 0 ? acc : fmaf(sums[u], old_scale[h], acc * new_scale[h]);
            }
        }
        __syncthreads();
    }
    if (alone) {
        for (u32 u = threadIdx.x; u < n * p.dim; u += blockDim.x) put(p, row, h0 + u / p.dim, u % p.dim, sums[u] / sum_so_far[u / p.dim]);
        return;
    }
    // The counter starts over by itself once all have come.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc((u32 *)p.counters + row * gridDim.y + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (u32 u = threadIdx.x; u < n * p.dim; u += blockDim.x) {
        u32 h = u / p.dim, i = u % p.dim;
        const volatile float *from_part = (const float *)p.parts + (u64)(row * p.heads + h0 + h) * p.most_blocks * part;
        float big_m = from_part[0], big_l = from_part[1], a = from_part[2 + i];
        for (u32 b = 1; b < blocks; b++) {
            const volatile float *x = from_part + b * part;
            float m = x[0], now = fmaxf(big_m, m), c = exp_(big_m - now), d = exp_(m - now);
            big_l = fmaf(big_l, c, x[1] * d);
            a = fmaf(a, c, x[2 + i] * d);
            big_m = now;
        }
        put(p, row, h0 + h, i, a / big_l);
    }
}
