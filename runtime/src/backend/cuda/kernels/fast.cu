// Attention of many rows by tensor cores, for --fast: its results are near the contract's, and not its bits. docs/cuda.md says how near.
//
// 128 queries a block of threads, which are as many rows as have all query heads of one KV head. Queries are rounded to F16, as keys and
// values are in their caches; scores and sums are f32, weights are rounded to F16 before they meet values. Softmax goes along: a query's
// maximum and sum are scaled as larger scores come. 64 positions at a time pass through shared memory, two chunks deep; a row of it is
// DIM elements, whose sixteen bytes lie at places that change with the row, so that eight rows' never share banks.

enum { FAST_QUERIES = 128, FAST_KEYS = 64 };

// Four matrices of 8 by 8 halves, of which each lane names a row.
DEVICE void load_matrices(u32 *d, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(from)
                 : "memory");
}

DEVICE void load_turned(u32 *d, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(from)
                 : "memory");
}

DEVICE void multiply_halves(float *d, const u32 *a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as halves, the first in the lower bits.
DEVICE u32 halves(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What a half holds at most: a query that is larger is cut.
DEVICE float within_half(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

// Sixteen bytes from global to shared memory, or zeros.
DEVICE void copy_or_zero(u32 to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// A warp has 16 * MI queries. Shared memory: queries, two chunks of keys, two of values.
template <int DIM, int MI> DEVICE void fast_attention(const Attend &p) {
    constexpr u32 T = FAST_QUERIES / (16 * MI) * 32, ROW = DIM * 2, PIECES = DIM / 8, CHUNK = FAST_KEYS * ROW;
    u32 t = threadIdx.x, warp = t >> 5, lane = t & 31, g = lane >> 2, quad = lane & 3;
    u32 group = p.heads / p.kv_heads, per_tile = FAST_QUERIES / group, kvh = blockIdx.x;
    wait_for_earlier();
    // The longest first.
    u32 tile = gridDim.y - 1 - blockIdx.y;
    Run run;
    if (!run_of_tile(p.step, per_tile, tile, run)) return;
    u32 first = tile * per_tile, rows = run.rows - first < per_tile ? run.rows - first : per_tile, queries = rows * group;
    u32 pos0 = run.pos + first, row0 = run.first + first;
    const u16 *keys = (const u16 *)((const u8 *)p.k.at + run.cache) + kvh * (u64)p.k.head;
    const u16 *values = (const u16 *)((const u8 *)p.v.at + run.cache) + kvh * (u64)p.v.head;
    u32 from = first_seen(p, pos0) / FAST_KEYS * FAST_KEYS, to = pos0 + rows;
    // What all rows see.
    u32 all_from = first_seen(p, to - 1), all_to = pos0 + 1;
    u32 base = (u32)__cvta_generic_to_shared(shared), key_base = base + FAST_QUERIES * ROW, value_base = key_base + 2 * CHUNK;
    // Where sixteen bytes of a row lie.
    auto place = [](u32 row, u32 piece) { return row * ROW + (piece ^ (row & 7)) * 16; };
    auto bring = [&](u32 start, u32 which, const u16 *cache, u64 stride, u32 into) {
#pragma unroll
        for (u32 u = t; u < FAST_KEYS * PIECES; u += T) {
            u32 j = u / PIECES, piece = u % PIECES, pos = start + j;
            bool there = pos < to && piece * 8 < p.dim;
            copy_or_zero(into + which * CHUNK + place(j, piece), cache + (there ? pos * stride + piece * 8 : 0), there);
        }
    };
    bring(from, 0, keys, p.k.row, key_base);
    copies_end();
    bring(from, 0, values, p.v.row, value_base);
    copies_end();
    for (u32 u = t; u < FAST_QUERIES * PIECES; u += T) {
        u32 q = u / PIECES, piece = u % PIECES;
        uint4 put = make_uint4(0, 0, 0, 0);
        if (q < queries && piece * 8 < p.dim) {
            const float4 *x = (const float4 *)(at<float>(p.q, row0 + q / group, kvh * group + q % group) + piece * 8);
            float4 a = x[0], b = x[1];
            put = make_uint4(halves(within_half(a.x), within_half(a.y)), halves(within_half(a.z), within_half(a.w)),
                             halves(within_half(b.x), within_half(b.y)), halves(within_half(b.z), within_half(b.w)));
        }
        *(uint4 *)(shared + place(q, piece)) = put;
    }
    u32 m0 = warp * 16 * MI;
    // A lane's queries: g and g + 8 of each lot of 16.
    u32 sees_from[MI][2], sees_to[MI][2];
    float largest[MI][2], sum[MI][2], acc[MI][DIM / 8][4];
#pragma unroll
    for (u32 i = 0; i < MI; i++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 q = m0 + i * 16 + h * 8 + g, pos = pos0 + q / group;
            sees_from[i][h] = first_seen(p, pos);
            sees_to[i][h] = q < queries ? pos + 1 : 0;
            largest[i][h] = __int_as_float(0xff800000);
            sum[i][h] = 0.0f;
        }
#pragma unroll
    for (u32 i = 0; i < MI; i++)
#pragma unroll
        for (u32 j = 0; j < DIM / 8; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) acc[i][j][e] = 0.0f;
    // Scores are multiplied so that powers of two are what is wanted.
    float scale = __uint_as_float(p.scale) * 1.44269504088896340736f;
    // Rows of matrices that a lane names: of queries and of values' positions 16 by two pieces, of keys two pieces by 16.
    u32 a_row = lane & 15, a_piece = lane >> 4, k_row = (lane & 7) + (lane >> 4) * 8, k_piece = lane >> 3 & 1;
    u32 which = 0;
#pragma unroll 1
    for (u32 start = from; start < to; start += FAST_KEYS, which ^= 1) {
        // This chunk's keys are there, its values may not be.
        copies_wait<1>();
        __syncthreads();
        bool more = start + FAST_KEYS < to;
        if (more) bring(start + FAST_KEYS, which ^ 1, keys, p.k.row, key_base);
        copies_end();
        float s[MI][8][4];
#pragma unroll
        for (u32 i = 0; i < MI; i++)
#pragma unroll
            for (u32 j = 0; j < 8; j++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) s[i][j][e] = 0.0f;
        u32 chunk = key_base + which * CHUNK;
#pragma unroll
        for (u32 d = 0; d < DIM / 16; d++) {
            u32 a[MI][4];
#pragma unroll
            for (u32 i = 0; i < MI; i++) load_matrices(a[i], base + place(m0 + i * 16 + a_row, d * 2 + a_piece));
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 b[4];
                load_matrices(b, chunk + place(j * 16 + k_row, d * 2 + k_piece));
#pragma unroll
                for (u32 i = 0; i < MI; i++) {
                    multiply_halves(s[i][2 * j], a[i], b[0], b[1]);
                    multiply_halves(s[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
        if (start < all_from || start + FAST_KEYS > all_to) {
#pragma unroll
            for (u32 i = 0; i < MI; i++)
#pragma unroll
                for (u32 j = 0; j < 8; j++)
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        u32 pos = start + j * 8 + quad * 2 + (e & 1);
                        if (pos < sees_from[i][e >> 1] || pos >= sees_to[i][e >> 1]) s[i][j][e] = __int_as_float(0xff800000);
                    }
        }
#pragma unroll
        for (u32 i = 0; i < MI; i++)
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                float m = largest[i][h];
#pragma unroll
                for (u32 j = 0; j < 8; j++) m = fmaxf(m, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
                m = fmaxf(m, __shfl_xor_sync(FULL, m, 1));
                m = fmaxf(m, __shfl_xor_sync(FULL, m, 2));
                // Of a query that has seen nothing yet nothing is to be scaled.
                float shift = m == __int_as_float(0xff800000) ? 0.0f : m * scale, was = power(fmaf(largest[i][h], scale, -shift)), l = 0.0f;
                largest[i][h] = m;
#pragma unroll
                for (u32 j = 0; j < 8; j++)
#pragma unroll
                    for (u32 e = 2 * h; e < 2 * h + 2; e++) {
                        s[i][j][e] = power(fmaf(s[i][j][e], scale, -shift));
                        l += s[i][j][e];
                    }
                sum[i][h] = fmaf(sum[i][h], was, l);
#pragma unroll
                for (u32 j = 0; j < DIM / 8; j++) {
                    acc[i][j][2 * h] *= was;
                    acc[i][j][2 * h + 1] *= was;
                }
            }
        // Weights as they are multiplied: what is a result there is an operand here.
        u32 w[MI][4][4];
#pragma unroll
        for (u32 i = 0; i < MI; i++)
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                w[i][k][0] = halves(s[i][2 * k][0], s[i][2 * k][1]);
                w[i][k][1] = halves(s[i][2 * k][2], s[i][2 * k][3]);
                w[i][k][2] = halves(s[i][2 * k + 1][0], s[i][2 * k + 1][1]);
                w[i][k][3] = halves(s[i][2 * k + 1][2], s[i][2 * k + 1][3]);
            }
        // The values, but not the next keys.
        copies_wait<1>();
        __syncthreads();
        if (more) bring(start + FAST_KEYS, which ^ 1, values, p.v.row, value_base);
        copies_end();
        chunk = value_base + which * CHUNK;
#pragma unroll
        for (u32 k = 0; k < 4; k++)
#pragma unroll
            for (u32 j = 0; j < DIM / 16; j++) {
                u32 b[4];
                load_turned(b, chunk + place(k * 16 + a_row, j * 2 + a_piece));
#pragma unroll
                for (u32 i = 0; i < MI; i++) {
                    multiply_halves(acc[i][2 * j], w[i][k], b[0], b[1]);
                    multiply_halves(acc[i][2 * j + 1], w[i][k], b[2], b[3]);
                }
            }
    }
#pragma unroll
    for (u32 i = 0; i < MI; i++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float l = sum[i][h];
            l += __shfl_xor_sync(FULL, l, 1);
            l += __shfl_xor_sync(FULL, l, 2);
            u32 q = m0 + i * 16 + h * 8 + g;
            if (q >= queries) continue;
            float *out = at<float>(p.out, row0 + q / group, kvh * group + q % group) + quad * 2;
#pragma unroll
            for (u32 j = 0; j < DIM / 8; j++)
                if (j * 8 < p.dim) *(float2 *)(out + j * 8) = make_float2(acc[i][j][2 * h] / l, acc[i][j][2 * h + 1] / l);
        }
}

#define FAST_ATTENTION(name, dim, mi, blocks)                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024 / (4 * mi), blocks) name(const Attend p) { fast_attention<dim, mi>(p); }
FAST_ATTENTION(fast_attention_64, 64, 2, 2)
FAST_ATTENTION(fast_attention_128, 128, 2, 2)
FAST_ATTENTION(fast_attention_256, 256, 1, 1)
