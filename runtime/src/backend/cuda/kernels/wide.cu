// Products of many rows with the usual weights (four bits in groups of 64, BF16 parameters): larger tiles than tiles.cu has, whose codes
// and parameters come two groups at a time into one of several stages of shared memory, while those before them are multiplied.
//
// Outputs are the rows of a product of tensor cores, rows its columns. Weights stay packed in shared memory: lane (g, quad) takes codes
// 16 * quad .. 16 * quad + 16 of a group, of rows as of outputs, so that it reads sixteen and eight bytes side by side and the sixteen
// are operands as they come; which place of the product a code takes does not matter as long as both agree.

// The dots of a group: two products, of which the first begins at nothing. Codes of four bits are the same bytes with and without a sign.
DEVICE void group_dots(int *d, const u32 *w, uint4 x) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x.x), "r"(x.y), "r"(0));
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(w[4]), "r"(w[5]), "r"(w[6]), "r"(w[7]), "r"(x.z), "r"(x.w));
}

// Bytes of a stage of `rows` by `outs`: codes of two groups, their scales and sums, codes and parameters of outputs. Between the two groups'
// codes there are 64 bytes, so that a row's share no banks.
DEVICE constexpr u32 wide_stage(u32 rows, u32 outs) { return rows * (128 + 16) + outs * (64 + 8) + 256; }

// A warp has 16 * MO outputs and 8 * NR rows; WO by WR warps a block.
template <int MO, int NR, int WO, int WR, int STAGES> DEVICE void wide(const Linear &p) {
    constexpr u32 ROWS = 8 * NR * WR, OUTS = 16 * MO * WO, T = 32 * WO * WR, STAGE = wide_stage(ROWS, OUTS);
    constexpr u32 X = 0, XH = ROWS * 64 + 64, W = X + 2 * XH, WH = OUTS * 32 + 64, XS = W + 2 * WH, WS = XS + ROWS * 16;
    __shared__ u32 slots[ROWS], found[3], code_from[ROWS], scale_from[ROWS];
    u32 t = threadIdx.x, warp = t >> 5, lane = t & 31, g = lane >> 2, quad = lane & 3;
    u32 o0 = blockIdx.x * OUTS, tile = blockIdx.z * gridDim.y + blockIdx.y, row0 = tile * ROWS, n, expert = 0;
    wait_for_earlier();
    if (p.order) {
        n = find_tile<ROWS>(p, tile, slots, found);
        if (n == 0) return;
        expert = found[0];
    } else {
        if (row0 >= p.rows) return;
        n = p.rows - row0 < ROWS ? p.rows - row0 : ROWS;
    }
    const u8 *w = (const u8 *)p.w + expert * p.w_expert, *s = (const u8 *)p.s + expert * p.s_expert;
    const u8 *b = (const u8 *)p.b + expert * p.b_expert;
    // Where a row's codes begin, or its scales; rows that are not there are computed as the first, and not kept.
    auto row_at = [&](u32 r, u32 row, u32 of_slot) {
        r = r < n ? r : 0;
        if (!p.order) return (row0 + r) * row;
        u32 slot = slots[r] % p.k;
        return slots[r] / p.k * row + (slot < p.x_slots ? slot : p.x_slots - 1) * of_slot;
    };
    auto out_at = [&](u32 o) { return o0 + o < p.outputs ? o0 + o : p.outputs - 1; };
    // In bytes; looked up, as registers are short.
    for (u32 r = t; r < ROWS; r += T) {
        code_from[r] = row_at(r, p.x_row, p.x_slot);
        scale_from[r] = row_at(r, p.xs_row, p.xs_slot) * 4;
    }
    __syncthreads();
    u32 base = (u32)__cvta_generic_to_shared(shared);
    constexpr u32 CODES = ROWS * 8 / T, PACKED = OUTS * 4 / T;
    static_assert(T * CODES == ROWS * 8 && T * PACKED == OUTS * 4 && OUTS * 2 % T == 0, "whole loads");
    auto bring = [&](u32 c) {
        u32 to = base + c % STAGES * STAGE;
#pragma unroll
        for (u32 i = 0; i < CODES; i++) {
            u32 u = t + i * T, row = u >> 3, h = u >> 2 & 1;
            copy_ahead<16>(to + X + h * XH + row * 64 + (u & 3) * 16, (const u8 *)p.x + (code_from[row] + (u & 7) * 16 + c * 128));
        }
#pragma unroll
        for (u32 i = 0; i < PACKED; i++) {
            u32 u = t + i * T, o = u >> 2, h = u >> 1 & 1;
            copy_ahead<16>(to + W + h * WH + o * 32 + (u & 1) * 16, w + (out_at(o) * (u32)p.w_row + (u & 3) * 16 + c * 64));
        }
#pragma unroll
        for (u32 i = 0; i < (ROWS * 2 + T - 1) / T; i++) {
            u32 u = t + i * T;
            if (ROWS * 2 % T && u >= ROWS * 2) break;
            copy_ahead<8>(to + XS + u * 8, (const u8 *)(u / ROWS ? p.xsum : p.xs) + (scale_from[u % ROWS] + c * 8));
        }
#pragma unroll
        for (u32 i = 0; i < OUTS * 2 / T; i++) {
            u32 u = t + i * T;
            copy_ahead<4>(to + WS + u * 4, (u / OUTS ? b : s) + (out_at(u % OUTS) * (u32)p.s_row + c * 4));
        }
    };
    u32 chunks = p.inputs / 128, m0 = warp % WO * 16 * MO, n0 = warp / WO * 8 * NR;
    float acc[MO][NR][4];
#pragma unroll
    for (u32 i = 0; i < MO; i++)
#pragma unroll
        for (u32 j = 0; j < NR; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) acc[i][j][e] = 0.0f;
#pragma unroll
    for (u32 c = 0; c < STAGES - 1; c++) {
        if (c < chunks) bring(c);
        copies_end();
    }
#pragma unroll 1
    for (u32 c = 0; c < chunks; c++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        if (c + STAGES - 1 < chunks) bring(c + STAGES - 1);
        copies_end();
        const u8 *stage = shared + c % STAGES * STAGE;
        u32 q[MO][2][8];
        // Of outputs g and g + 8 of each lot of 16: the parameters of both groups, the second's in the upper halves.
        u32 scales[MO][2], biases[MO][2];
#pragma unroll
        for (u32 i = 0; i < MO; i++) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                const u8 *from = stage + W + h * WH + (m0 + i * 16 + g) * 32 + quad * 8;
                uint2 one = *(const uint2 *)from, two = *(const uint2 *)(from + 256);
                u32 pair[2];
                unpack_q4(one.x, pair);
                q[i][h][0] = pair[0], q[i][h][2] = pair[1];
                unpack_q4(two.x, pair);
                q[i][h][1] = pair[0], q[i][h][3] = pair[1];
                unpack_q4(one.y, pair);
                q[i][h][4] = pair[0], q[i][h][6] = pair[1];
                unpack_q4(two.y, pair);
                q[i][h][5] = pair[0], q[i][h][7] = pair[1];
                const u32 *params = (const u32 *)(stage + WS) + m0 + i * 16 + g + 8 * h;
                scales[i][h] = params[0];
                biases[i][h] = params[OUTS];
            }
        }
        const u8 *x = stage + X + (n0 + g) * 64 + quad * 16;
        const float4 *row_scale = (const float4 *)(stage + XS) + n0 / 2 + quad, *row_sum = row_scale + ROWS / 2;
#pragma unroll
        for (u32 j = 0; j < NR; j++) {
            // Rows 2 * quad and the next, two groups of each.
            float4 rs = row_scale[j * 4], rm = row_sum[j * 4];
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                uint4 codes = *(const uint4 *)(x + h * XH + j * 512);
                float scale[2] = {h ? rs.y : rs.x, h ? rs.w : rs.z}, sum[2] = {h ? rm.y : rm.x, h ? rm.w : rm.z};
                int d[MO][4];
#pragma unroll
                for (u32 i = 0; i < MO; i++) group_dots(d[i], q[i][h], codes);
#pragma unroll
                for (u32 i = 0; i < MO; i++)
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        float os = __uint_as_float(h ? scales[i][e >> 1] & 0xffff0000 : scales[i][e >> 1] << 16);
                        float ob = __uint_as_float(h ? biases[i][e >> 1] & 0xffff0000 : biases[i][e >> 1] << 16);
                        acc[i][j][e] = fmaf(os * scale[e & 1], (float)d[i][e], acc[i][j][e]);
                        acc[i][j][e] = fmaf(ob, sum[e & 1], acc[i][j][e]);
                    }
            }
        }
    }
#pragma unroll
    for (u32 j = 0; j < NR; j++)
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            u32 r = n0 + j * 8 + quad * 2 + e;
            if (r >= n) continue;
            u64 to = p.order ? (u64)(slots[r] / p.k) * p.out_row + slots[r] % p.k * p.out_slot : (row0 + r) * p.out_row;
            float *out = (float *)p.out + to;
#pragma unroll
            for (u32 i = 0; i < MO; i++)
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    u32 o = o0 + m0 + i * 16 + g + 8 * half;
                    if (o < p.outputs) out[o] = acc[i][j][2 * half + e];
                }
        }
}

#define WIDE(name, mo, nr, wo, wr, stages, blocks)                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * wo * wr, blocks) name(const Linear p) { wide<mo, nr, wo, wr, stages>(p); }
WIDE(wide_128, 2, 8, 4, 2, 3, 2)
WIDE(wide_64, 2, 8, 4, 1, 4, 2)
WIDE(wide_32, 2, 4, 4, 1, 4, 4)
