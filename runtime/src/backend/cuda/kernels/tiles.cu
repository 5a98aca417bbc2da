// Products with quantised weights for many rows, by tensor cores: 64 rows by 64 outputs a block of four warps, 64 codes at a time.
//
// The s32 sums of a group are exact, and are folded group after group as everywhere: fma(scale * xscale, dot), then fma(bias, xsum). With
// chosen experts a tile is 64 slots of one expert. Groups of 16 are not for these: a product of k32 spans two of them.

enum { TILE = 64, PITCH = 80 };

template <bool SIGNED> DEVICE void multiply(int *d, const u32 *a, const u32 *b) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <int KIND> DEVICE void tiles(const Linear &p) {
    __shared__ __align__(16) u8 xs_codes[2][TILE * PITCH], w_codes[2][TILE * PITCH];
    // Of the two groups that 64 codes may have: of rows scale and sum, of outputs scale and bias.
    __shared__ float row_scale[2][2][TILE], row_sum[2][2][TILE], out_scale[2][2][TILE], out_bias[2][2][TILE];
    __shared__ u32 slots[TILE], found[3];
    u32 t = threadIdx.x, warp = t >> 5, lane = t & 31, g = lane >> 2, quad = lane & 3;
    u32 kind = p.format & 255, bits = p.format >> 8 & 255, group = p.format >> 16 & 255, dtype = p.format >> 24 & 255;
    u32 units = p.inputs / 32, chunks = (units + 1) / 2, per = group == 32 ? 2 : 1;
    u32 o0 = blockIdx.x * TILE, tile = blockIdx.z * gridDim.y + blockIdx.y, row0 = tile * TILE, n = 0, expert = 0;
    wait_for_earlier();
    if (p.order) {
        n = find_tile<TILE>(p, tile, slots, found);
        if (n == 0) return;
        expert = found[0];
    } else {
        if (row0 >= p.rows) return;
        n = p.rows - row0 < TILE ? p.rows - row0 : TILE;
    }
    const u8 *w = (const u8 *)p.w + expert * p.w_expert, *s = (const u8 *)p.s + expert * p.s_expert;
    const u8 *b = (const u8 *)p.b + expert * p.b_expert;
    // A thread brings one unit of one output and one of one row.
    u32 own = t >> 1, half = t & 1;
    u64 out_row = o0 + own < p.outputs ? o0 + own : p.outputs - 1;
    u32 own_row = own < n ? own : 0, slot = 0, in_row = row0 + own_row;
    if (p.order) {
        slot = slots[own_row] % p.k;
        in_row = slots[own_row] / p.k;
        slot = slot < p.x_slots ? slot : p.x_slots - 1;
    }
    const i8 *x = (const i8 *)p.x + in_row * p.x_row + slot * p.x_slot;
    const float *x_scale = (const float *)p.xs + in_row * p.xs_row + slot * p.xs_slot;
    const float *x_sum = (const float *)p.xsum + in_row * p.xs_row + slot * p.xs_slot;
    const u8 *w_at = w + out_row * p.w_row, *s_at = s + out_row * p.s_row, *b_at = b + out_row * p.b_row;

    uint4 x_raw[2], w_raw;
    float xs_raw = 0.0f, xm_raw = 0.0f;
    u32 scale_raw = 0, bias_raw = 0;
    auto ask_chunk = [&](u32 c) {
        u32 u = 2 * c + half;
        if (u >= units) {
            x_raw[0] = x_raw[1] = w_raw = make_uint4(0, 0, 0, 0);
            return;
        }
        x_raw[0] = ((const uint4 *)(x + u * 32))[0];
        x_raw[1] = ((const uint4 *)(x + u * 32))[1];
        if (KIND != KIND_ANY) w_raw = *(const uint4 *)(w_at + u * 16);
        u32 at_group = u * 32 / group;
        // With one group for both units one thread of the two brings its parameters.
        if (per == 2 || half == 0) {
            xs_raw = x_scale[at_group];
            xm_raw = x_sum[at_group];
            scale_raw = KIND == KIND_E2M1 ? s_at[at_group] : parameter(s_at, dtype, at_group);
            if (KIND != KIND_E2M1) bias_raw = parameter(b_at, dtype, at_group);
        }
    };
    auto keep_chunk = [&](u32 c) {
        u32 u = 2 * c + half, buffer = c & 1, q[8];
        if (u < units) unpack<KIND>(w_raw, (const u32 *)w_at + u * bits, bits, q);
        else
            for (u32 i = 0; i < 8; i++) q[i] = 0;
        uint4 *to = (uint4 *)(w_codes[buffer] + own * PITCH + half * 32);
        to[0] = make_uint4(q[0], q[1], q[2], q[3]);
        to[1] = make_uint4(q[4], q[5], q[6], q[7]);
        to = (uint4 *)(xs_codes[buffer] + own * PITCH + half * 32);
        to[0] = x_raw[0];
        to[1] = x_raw[1];
        if (u < units && (per == 2 || half == 0)) {
            u32 i = per == 2 ? half : 0;
            row_scale[buffer][i][own] = xs_raw;
            row_sum[buffer][i][own] = xm_raw;
            out_scale[buffer][i][own] = KIND == KIND_E2M1 ? block_scale(scale_raw, kind) : number(scale_raw, dtype);
            out_bias[buffer][i][own] = KIND == KIND_E2M1 ? 0.0f : number(bias_raw, dtype);
        }
    };

    // A warp has 32 rows and 32 outputs: two by four products.
    u32 m0 = (warp & 1) * 32, n0 = (warp >> 1) * 32;
    float acc[2][4][4];
    int d[2][4][4];
#pragma unroll
    for (u32 i = 0; i < 2; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) acc[i][j][e] = 0.0f, d[i][j][e] = 0;
    ask_chunk(0);
    for (u32 c = 0; c < chunks; c++) {
        keep_chunk(c);
        __syncthreads();
        if (c + 1 < chunks) ask_chunk(c + 1);
        u32 buffer = c & 1;
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            if (2 * c + k < units) {
                u32 a[2][4], v[4][2];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u8 *from = xs_codes[buffer] + (m0 + i * 16 + g) * PITCH + k * 32 + quad * 4;
                    a[i][0] = *(const u32 *)from;
                    a[i][1] = *(const u32 *)(from + 8 * PITCH);
                    a[i][2] = *(const u32 *)(from + 16);
                    a[i][3] = *(const u32 *)(from + 8 * PITCH + 16);
                }
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u8 *from = w_codes[buffer] + (n0 + j * 8 + g) * PITCH + k * 32 + quad * 4;
                    v[j][0] = *(const u32 *)from;
                    v[j][1] = *(const u32 *)(from + 16);
                }
#pragma unroll
                for (u32 i = 0; i < 2; i++)
#pragma unroll
                    for (u32 j = 0; j < 4; j++) multiply<KIND == KIND_E2M1>(d[i][j], a[i], v[j]);
                // The last unit of a group.
                if ((2 * c + k + 1) * 32 % group == 0) {
                    u32 at_group = per == 2 ? k : 0;
#pragma unroll
                    for (u32 i = 0; i < 2; i++)
#pragma unroll
                        for (u32 j = 0; j < 4; j++)
#pragma unroll
                            for (u32 e = 0; e < 4; e++) {
                                u32 r = m0 + i * 16 + g + 8 * (e >> 1), o = n0 + j * 8 + quad * 2 + (e & 1);
                                float sx = out_scale[buffer][at_group][o] * row_scale[buffer][at_group][r];
                                acc[i][j][e] = fmaf(sx, (float)d[i][j][e], acc[i][j][e]);
                                if (KIND != KIND_E2M1) acc[i][j][e] = fmaf(out_bias[buffer][at_group][o], row_sum[buffer][at_group][r], acc[i][j][e]);
                                d[i][j][e] = 0;
                            }
                }
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                u32 r = m0 + i * 16 + g + 8 * (e >> 1), o = o0 + n0 + j * 8 + quad * 2 + (e & 1);
                if (r >= n || o >= p.outputs) continue;
                u64 to = p.order ? slots[r] / p.k * p.out_row + slots[r] % p.k * p.out_slot : (row0 + r) * p.out_row;
                ((float *)p.out)[to + o] = acc[i][j][e];
            }
}

#define TILES(name, kind)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(128) name(const Linear p) { tiles<kind>(p); }
TILES(tiles_q4, KIND_Q4)
TILES(tiles_e2m1, KIND_E2M1)
TILES(tiles_any, KIND_ANY)
