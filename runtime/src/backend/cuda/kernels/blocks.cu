// Products with weights in GGUF's block formats, by the arithmetic of affine ones: a group's scale and bias in f32 are made of what
// the planes hold (formats/src/block.rs), then everything is as in linear.cu and tiles.cu. One body for all formats: the usual ones
// are compiled for themselves, all others are told theirs by the launch. A lane's unit is 32 codes: a group, two of 16, or a part of one of 128.

enum { BLOCK_ANY = -1 };

// Words of a unit's codes, one a bit of a code, where the compiler knows the format.
template <int BLOCK> struct Codes {
    enum { WORDS = BLOCK == BLOCK_ANY ? 1 : BLOCK == Q8_0 ? 8 : BLOCK == Q6_K ? 6 : BLOCK == Q5_K ? 5 : 4 };
    u32 w[WORDS];
};

template <int BLOCK> DEVICE void ask_codes(Codes<BLOCK> &to, const u8 *row, u32 u) {
    constexpr int N = Codes<BLOCK>::WORDS;
    if (BLOCK == BLOCK_ANY) return;
    const u8 *from = row + u * (4 * N);
#pragma unroll
    for (int i = 0; i < N;) {
        if (N % 4 == 0) {
            uint4 v = *(const uint4 *)(from + 4 * i);
            to.w[i++] = v.x, to.w[i++] = v.y, to.w[i++] = v.z, to.w[i++] = v.w;
        } else if (N % 2 == 0) {
            uint2 v = *(const uint2 *)(from + 4 * i);
            to.w[i++] = v.x, to.w[i++] = v.y;
        } else {
            to.w[i] = *(const u32 *)(from + 4 * i);
            i++;
        }
    }
}

// Four codes of four bits, in the lower half of s, as bytes of the table's values.
DEVICE u32 unpack_table(u32 s) {
    u32 index = s & 0x7777, mask = prmt(0x0000ff00, 0, s >> 3 & 0x1111);
    return (prmt(0xbfad9881, 0xf6eaddcf, index) & ~mask) | (prmt(0x26190d01, 0x71594535, index) & mask);
}

// Four codes of a format with a table as bytes of its values.
DEVICE u32 unpack_values(u32 block, u32 s) { return block == NVFP4_SCALED ? unpack_e2m1(s) : unpack_table(s); }

// A unit's codes as 32 bytes, of a table its values; `row` is where the unit begins.
template <int BLOCK> DEVICE void unpack_block(const Codes<BLOCK> &from, const u32 *row, u32 block, u32 bits, u32 *out) {
    constexpr int N = Codes<BLOCK>::WORDS;
    if (BLOCK == BLOCK_ANY) {
        if (block_has_table(block)) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[2 * i] = unpack_values(block, row[i]);
                out[2 * i + 1] = unpack_values(block, row[i] >> 16);
            }
        } else if (bits == 8) {
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = row[i];
        } else unpack<KIND_ANY>(make_uint4(0, 0, 0, 0), row, bits, out);
    } else if (N == 8) {
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = from.w[i];
    } else if (N == 4) {
#pragma unroll
        for (int i = 0; i < N; i++) unpack_q4(from.w[i], out + 2 * i);
    } else {
        constexpr u32 mask = (1u << N) - 1;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int k = j * 4 * N >> 5, last = N - 1;
            u32 v = __funnelshift_r(from.w[k], from.w[k < last ? k + 1 : last], j * 4 * N & 31);
            out[j] = (v & mask) | (v << (8 - N) & mask << 8) | (v << 2 * (8 - N) & mask << 16) | (v << 3 * (8 - N) & mask << 24);
        }
    }
}

// A product of 16 codes.
DEVICE int dot_16(const u32 *w, const uint4 &x, bool table) {
    if (table) return dot_s8(w[3], x.w, dot_s8(w[2], x.z, dot_s8(w[1], x.y, dot_s8(w[0], x.x, 0))));
    return dot_u8(w[3], x.w, dot_u8(w[2], x.z, dot_u8(w[1], x.y, dot_u8(w[0], x.x, 0))));
}

template <int BLOCK, int OUT> struct AskedBlocks {
    Codes<BLOCK> codes[OUT];
    Params params[OUT];
};

template <int BLOCK, int OUT>
DEVICE void ask_blocks(AskedBlocks<BLOCK, OUT> &to, const Linear &p, const u8 *w, const u8 *s, const u8 *b, u32 o0, u32 chunk, u32 block) {
    u32 u = chunk * 32 + (threadIdx.x & 31);
    if (u * 32 >= p.inputs) return;
#pragma unroll
    for (int o = 0; o < OUT; o++) {
        u64 row = output_row(p, o0 + o);
        ask_codes(to.codes[o], w + row * p.w_row, u);
        ask_params(to.params[o], block, s + row * p.s_row, b + row * p.b_row, u);
    }
}

// Shared memory as `linear` has it.
template <int BLOCK, int R, int OUT> DEVICE void linear_blocks(const Linear &p) {
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    u32 block = BLOCK == BLOCK_ANY ? (u32)(p.format >> 24) : (u32)BLOCK, bits = p.format >> 8 & 255, group = block_group(block);
    bool table = block_has_table(block);
    u32 shift = group == 16 ? 4 : group == 32 ? 5 : 7, groups = p.inputs >> shift, chunks = (p.inputs + 1023) / 1024, pitch = (1024 >> shift) + 1;
    const u8 *w = (const u8 *)p.w, *s = (const u8 *)p.s, *b = (const u8 *)p.b;
    u32 o0 = (blockIdx.x * warps + warp) * OUT, step = gridDim.x * warps * OUT;
    u32 place = blockIdx.z * gridDim.y + blockIdx.y, row0 = place * R, slot = 0, in_slot = 0;
    AskedBlocks<BLOCK, OUT> next;
    bool chosen = p.order != 0;
    if (chosen) {
        wait_for_earlier();
        u32 expert;
        if (!chosen_slot(p, place, expert, slot)) return;
        w += expert * p.w_expert;
        s += expert * p.s_expert;
        b += expert * p.b_expert;
        row0 = slot / p.k;
        slot = slot % p.k;
        in_slot = slot < p.x_slots ? slot : p.x_slots - 1;
    }
    if (o0 < p.outputs) ask_blocks<BLOCK, OUT>(next, p, w, s, b, o0, 0, block);
    float *held = (float *)((float2 *)(shared + R * p.inputs + 8 * R * groups) + warps * OUT * R * pitch) + warps * OUT * pitch;
    if (p.stage == STAGE_NORM) stage_factors(p, held + p.inputs);
    if (!chosen) wait_for_earlier();
    if (!chosen && row0 >= p.rows) return;
    u32 n = chosen ? 1 : p.rows - row0 < R ? p.rows - row0 : R;
    Staged x;
    x.codes = (i8 *)shared;
    x.scale = (float *)(shared + R * p.inputs);
    x.sum = x.scale + R * groups;
    float2 *pairs = (float2 *)(x.sum + R * groups) + warp * OUT * R * pitch;
    float *biases = (float *)((float2 *)(x.sum + R * groups) + warps * OUT * R * pitch) + warp * OUT * pitch;
    stage<R>(p, x, held, row0, n, in_slot, group);
    __syncthreads();
    for (; o0 < p.outputs; o0 += step) {
        float acc = 0.0f;
        for (u32 c = 0; c < chunks; c++) {
            AskedBlocks<BLOCK, OUT> now = next;
            bool more = c + 1 < chunks;
            u32 o1 = more ? o0 : o0 + step;
            if (o1 < p.outputs) ask_blocks<BLOCK, OUT>(next, p, w, s, b, o1, more ? c + 1 : 0, block);
            u32 u = c * 32 + lane, g0 = c * 1024 >> shift, g = lane * 32 >> shift;
            // A group has one lane that puts it aside.
            bool inside = u * 32 < p.inputs, leads = inside && (group <= 32 || (lane & 3) == 0);
#pragma unroll
            for (int o = 0; o < OUT; o++) {
                u32 q[8];
                float scale[2], bias[2];
                if (inside) {
                    u64 row = output_row(p, o0 + o);
                    unpack_block(now.codes[o], (const u32 *)(w + row * p.w_row) + u * bits, block, bits, q);
                    params_of(now.params[o], block, u, scale, bias);
                    if (leads && !table) {
                        biases[o * pitch + g] = bias[0];
                        if (group == 16) biases[o * pitch + g + 1] = bias[1];
                    }
                }
#pragma unroll 1
                for (int r = 0; r < R; r++) {
                    int d0 = 0, d1 = 0;
                    if (inside && r < n) {
                        const uint4 *v = (const uint4 *)(x.codes + r * p.inputs + u * 32);
                        d0 = dot_16(q, v[0], table);
                        d1 = dot_16(q + 4, v[1], table);
                    }
                    float2 *pair = pairs + (o * R + r) * pitch + g;
                    const float *x_scale = x.scale + r * groups + g0 + g;
                    if (group == 16) {
                        if (inside && r < n) {
                            pair[0] = make_float2(scale[0] * x_scale[0], (float)d0);
                            pair[1] = make_float2(scale[1] * x_scale[1], (float)d1);
                        }
                        continue;
                    }
                    int d = d0 + d1;
                    if (group == 128) {
                        d += __shfl_xor_sync(FULL, d, 1);
                        d += __shfl_xor_sync(FULL, d, 2);
                    }
                    if (leads && r < n) pair[0] = make_float2(scale[0] * x_scale[0], (float)d);
                }
            }
            __syncwarp();
            if (lane < OUT * R) {
                u32 o = lane / R, r = lane % R, many = groups - g0 < pitch - 1 ? groups - g0 : pitch - 1;
                const float2 *pair = pairs + lane * pitch;
                const float *bias = biases + o * pitch, *sum = x.sum + r * groups + g0;
                if (r < n) {
                    if (!table) {
#pragma unroll 4
                        for (u32 g = 0; g < many; g++) acc = fmaf(bias[g], sum[g], fmaf(pair[g].x, pair[g].y, acc));
                    } else {
#pragma unroll 4
                        for (u32 g = 0; g < many; g++) acc = fmaf(pair[g].x, pair[g].y, acc);
                    }
                }
            }
            __syncwarp();
        }
        u32 o = o0 + lane / R, r = lane % R;
        if (p.flags & PAIRS) {
            float other = __shfl_xor_sync(FULL, acc, R);
            if (o & 1) continue;
            acc = silu_(acc) * other;
            if (lane < OUT * R && r < n && o < p.outputs) ((float *)p.out)[(row0 + r) * p.out_row + slot * p.out_slot + o / 2] = acc;
            continue;
        }
        if (lane < OUT * R && r < n && o < p.outputs) {
            if (p.add) acc = ((const float *)p.add)[(row0 + r) * p.add_row + o] + acc;
            ((float *)p.out)[(row0 + r) * p.out_row + slot * p.out_slot + o] = acc;
        }
    }
}

// d = a b with 16 codes of sixteen rows and eight outputs.
template <bool SIGNED> DEVICE void multiply_16(int *d, const u32 *a, u32 b) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b), "r"(0));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b), "r"(0));
}

// As `tiles`; groups of 16 have products of their own.
template <int BLOCK> DEVICE void tiles_blocks(const Linear &p) {
    __shared__ __align__(16) u8 xs_codes[2][TILE * PITCH], w_codes[2][TILE * PITCH];
    // Of the up to four groups that 64 codes have: of rows scale and sum, of outputs scale and bias.
    constexpr int MOST = BLOCK == BLOCK_ANY || BLOCK == Q6_K ? 4 : 2;
    __shared__ float row_scale[2][MOST][TILE], row_sum[2][MOST][TILE], out_scale[2][MOST][TILE], out_bias[2][MOST][TILE];
    __shared__ u32 slots[TILE], found[3];
    u32 t = threadIdx.x, warp = t >> 5, lane = t & 31, g = lane >> 2, quad = lane & 3;
    u32 block = BLOCK == BLOCK_ANY ? (u32)(p.format >> 24) : (u32)BLOCK, bits = p.format >> 8 & 255, group = block_group(block);
    bool table = block_has_table(block);
    u32 units = p.inputs / 32, chunks = (units + 1) / 2;
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
    const u8 *w_at = (const u8 *)p.w + expert * p.w_expert + out_row * p.w_row, *s_at = (const u8 *)p.s + expert * p.s_expert + out_row * p.s_row;
    const u8 *b_at = (const u8 *)p.b + expert * p.b_expert + out_row * p.b_row;

    uint4 x_raw[2];
    Codes<BLOCK> w_raw;
    Params params;
    float xs_raw[2], xm_raw[2];
    auto ask_chunk = [&](u32 c) {
        u32 u = 2 * c + half;
        if (u >= units) return;
        x_raw[0] = ((const uint4 *)(x + u * 32))[0];
        x_raw[1] = ((const uint4 *)(x + u * 32))[1];
        ask_codes(w_raw, w_at, u);
        ask_params(params, block, s_at, b_at, u);
        u32 at_group = u * 32 / group;
        xs_raw[0] = x_scale[at_group];
        xm_raw[0] = x_sum[at_group];
        if (group == 16) {
            xs_raw[1] = x_scale[at_group + 1];
            xm_raw[1] = x_sum[at_group + 1];
        }
    };
    auto keep_chunk = [&](u32 c) {
        u32 u = 2 * c + half, buffer = c & 1, q[8];
        if (u >= units) return;
        unpack_block(w_raw, (const u32 *)w_at + u * bits, block, bits, q);
        uint4 *to = (uint4 *)(w_codes[buffer] + own * PITCH + half * 32);
        to[0] = make_uint4(q[0], q[1], q[2], q[3]);
        to[1] = make_uint4(q[4], q[5], q[6], q[7]);
        to = (uint4 *)(xs_codes[buffer] + own * PITCH + half * 32);
        to[0] = x_raw[0];
        to[1] = x_raw[1];
        // Both units of a group of 128 bring the same.
        if (group == 128 && half) return;
        float scale[2], bias[2];
        params_of(params, block, u, scale, bias);
        u32 many = group == 16 ? 2 : 1;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (i >= many) break;
            row_scale[buffer][half * many + i][own] = xs_raw[i];
            row_sum[buffer][half * many + i][own] = xm_raw[i];
            out_scale[buffer][half * many + i][own] = scale[i];
            out_bias[buffer][half * many + i][own] = bias[i];
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
    auto fold_group = [&](u32 buffer, u32 at_group) {
#pragma unroll
        for (u32 i = 0; i < 2; i++)
#pragma unroll
            for (u32 j = 0; j < 4; j++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    u32 r = m0 + i * 16 + g + 8 * (e >> 1), o = n0 + j * 8 + quad * 2 + (e & 1);
                    float sx = out_scale[buffer][at_group][o] * row_scale[buffer][at_group][r];
                    acc[i][j][e] = fmaf(sx, (float)d[i][j][e], acc[i][j][e]);
                    if (!table) acc[i][j][e] = fmaf(out_bias[buffer][at_group][o], row_sum[buffer][at_group][r], acc[i][j][e]);
                    d[i][j][e] = 0;
                }
    };
    ask_chunk(0);
    for (u32 c = 0; c < chunks; c++) {
        keep_chunk(c);
        __syncthreads();
        if (c + 1 < chunks) ask_chunk(c + 1);
        u32 buffer = c & 1;
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            if (2 * c + k >= units) break;
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
            if (group == 16) {
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
#pragma unroll
                    for (u32 i = 0; i < 2; i++)
#pragma unroll
                        for (u32 j = 0; j < 4; j++) {
                            if (table) multiply_16<true>(d[i][j], a[i] + 2 * h, v[j][h]);
                            else multiply_16<false>(d[i][j], a[i] + 2 * h, v[j][h]);
                        }
                    fold_group(buffer, (2 * k + h) % MOST);
                }
                continue;
            }
#pragma unroll
            for (u32 i = 0; i < 2; i++)
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    if (table) multiply<true>(d[i][j], a[i], v[j]);
                    else multiply<false>(d[i][j], a[i], v[j]);
                }
            // The last unit of a group.
            if (group == 32) fold_group(buffer, k);
            else if ((2 * c + k & 3) == 3) fold_group(buffer, 0);
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

#define BLOCKS_OF(name, block)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) linear_##name##_1x4(const Linear p) { linear_blocks<block, 1, 4>(p); }       \
    extern "C" __global__ void __launch_bounds__(256) linear_##name##_8x4(const Linear p) { linear_blocks<block, 8, 4>(p); }       \
    extern "C" __global__ void __launch_bounds__(128) tiles_##name(const Linear p) { tiles_blocks<block>(p); }
BLOCKS_OF(block, BLOCK_ANY)
BLOCKS_OF(q4_0, Q4_0)
BLOCKS_OF(q8_0, Q8_0)
BLOCKS_OF(q4_k, Q4_K)
BLOCKS_OF(q5_k, Q5_K)
BLOCKS_OF(q6_k, Q6_K)
