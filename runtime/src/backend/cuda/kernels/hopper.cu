// Products of many rows with the usual weights (four bits in groups of 64, BF16 parameters) on Hopper: 256 outputs by 128 rows a block,
// by wgmma on bytes.
//
// Outputs are the rows of a product of tensor cores, as in wide.cu. A warpgroup has 128 of them: their codes are operands in registers,
// unpacked once a group for all 128 rows; the rows' codes are read by the tensor cores themselves from shared memory, where a row's two
// groups are 128 bytes, swizzled. Products are of 32 rows, and there are two sets of sums: while one is folded in the contract's order,
// the next product makes the other. A warpgroup of its own brings operands, stages ahead, and lets the two others have its registers.
// Barriers in shared memory say which stages are there, and which are free; nothing else makes the two wait for each other.
//
// The compiler lets products go on beside other instructions only if no register of theirs is touched from their begin to a wait for
// all of them, so every product is waited for before the next one begins.
//
// Of a gate and what it lets through a block has 128 outputs each, a warpgroup 64 and 64, so that both of a pair are one thread's. It leaves the
// int8 form of silu(gate) * up, a group of 64 at a time, and neither product.
//
// Other cards have kernels of these names that do nothing, and are never asked to run them.

// Products whose first halves are a gate: `product` is the gate's and has its outputs alone.
struct Pairs {
    Linear product;
    // The planes of what is multiplied with the gate; rows and experts are as far apart as the gate's.
    u64 w, s, b;
    // Where the int8 form goes, and elements from row to row and from slot to slot.
    u64 codes, scales, sums;
    u64 codes_row, codes_slot, scales_row, scales_slot;
};

#if __CUDA_ARCH__ >= 900
enum { HOPPER_ROWS = 128, HOPPER_OUTS = 256, HOPPER_STAGES = 4, HOPPER_STEP = 32 };

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// What others copied to shared memory is seen by the tensor cores, too.
DEVICE void copies_seen() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps what is computed before it from being computed after it.
template <int N> DEVICE void pin(u32 *v) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(v[i])::"memory");
}

// A barrier in shared memory: so many arrive in each phase of it.
DEVICE void mark_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
DEVICE void mark_arrive(u32 at) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(at) : "memory");
}
// Arrives once the thread's copies so far are there.
DEVICE void mark_copies(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }
DEVICE void mark_wait(u32 at, u32 parity) {
    u32 done;
    do
        asm volatile("{ .reg .pred is; mbarrier.try_wait.parity.shared::cta.b64 is, [%1], %2; selp.u32 %0, 1, 0, is; }"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
    while (!done);
}

// Half a group of 64 outputs and 32 rows; the first half begins at nothing.
template <bool MORE> DEVICE void multiply_rows(int *d, const u32 *a, u64 rows) {
    asm volatile("{ .reg .pred more; setp.ne.b32 more, %21, 0; wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, more; }"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]),
                   "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "n"((int)MORE));
}

// Four codes, in the lower half of v, as bytes in order.
DEVICE u32 unpack_four(u32 v) { return prmt(v, v >> 4, 0x5140) & 0x0f0f0f0f; }

DEVICE const Linear &product_of(const Linear &p) { return p; }
DEVICE const Linear &product_of(const Pairs &p) { return p.product; }

// The int8 form of N groups of 64, of which sixteen lanes have four values each: a lane's codes of each, and of group lane % 16 scale and sum.
template <int N> DEVICE void codes_of_groups(const float4 *v, u32 *four, float &scale, float &sum) {
    float largest[N];
    int total[N];
    u32 lane = threadIdx.x & 15;
#pragma unroll
    for (u32 c = 0; c < N; c++) {
        float m = fmaxf(fmaxf(fmaxf(fabsf(v[c].x), fabsf(v[c].y)), fmaxf(fabsf(v[c].z), fabsf(v[c].w))), 0.0f);
        largest[c] = fminf(m, __uint_as_float(0x7f7fffffu));
    }
#pragma unroll
    for (u32 d = 8; d; d >>= 1)
#pragma unroll
        for (u32 c = 0; c < N; c++) largest[c] = fmaxf(largest[c], __shfl_xor_sync(FULL, largest[c], d));
#pragma unroll
    for (u32 c = 0; c < N; c++) {
        float inverse = 127.0f / largest[c];
        u32 a = row_code(v[c].x * inverse), b = row_code(v[c].y * inverse), e = row_code(v[c].z * inverse), f = row_code(v[c].w * inverse);
        four[c] = prmt(prmt(a, b, 0x0040), prmt(e, f, 0x0040), 0x5410);
        total[c] = dot_s8(four[c], 0x01010101, 0);
    }
#pragma unroll
    for (u32 d = 8; d; d >>= 1)
#pragma unroll
        for (u32 c = 0; c < N; c++) total[c] += __shfl_xor_sync(FULL, total[c], d);
    float top = largest[0];
    int all = total[0];
#pragma unroll
    for (u32 c = 1; c < N; c++) {
        top = lane == c ? largest[c] : top;
        all = lane == c ? total[c] : all;
    }
    scale = top / 127.0f;
    sum = scale * (float)all;
}
#endif

template <bool PAIRS, class Params> DEVICE void hopper_tile(const Params &params) {
#if __CUDA_ARCH__ >= 900
    const Linear &p = product_of(params);
    constexpr u32 ROWS = HOPPER_ROWS, OUTS = HOPPER_OUTS, STAGES = HOPPER_STAGES, STEP = HOPPER_STEP, STEPS = ROWS / STEP;
    // A stage: codes of two groups of rows, and of outputs (sixteen bytes between two rows, so that a product's share no banks); of each
    // group scales and sums of rows, two of these and two of those side by side; scales and biases of outputs, of both groups.
    constexpr u32 X = 0, W = X + ROWS * 128, XS = W + OUTS * 80, WS = XS + ROWS * 16, STAGE = WS + OUTS * 8;
    static_assert(STAGE % 1024 == 0, "eight rows of 128 bytes are what is swizzled");
    __shared__ u32 slots[ROWS], found[3];
    __shared__ u64 out_from[ROWS], marks[2 * STAGES], planes[PAIRS ? 6 : 3];
    u32 t = threadIdx.x, lane = t & 31, g = lane >> 2, quad = lane & 3, warp = t >> 5 & 3;
    u32 group = __shfl_sync(FULL, t >> 7, 0);
    u32 o0 = blockIdx.x * (PAIRS ? OUTS / 2 : OUTS), tile = blockIdx.z * gridDim.y + blockIdx.y, row0 = tile * ROWS, n, expert = 0;
    u32 full = (u32)__cvta_generic_to_shared(marks), empty = full + 8 * STAGES;
    if (t == 0) {
#pragma unroll
        for (u32 i = 0; i < STAGES; i++) {
            // All threads that copy, and all that read.
            mark_init(full + 8 * i, 128);
            mark_init(empty + 8 * i, 256);
        }
    }
    wait_for_earlier();
    if (p.order) {
        n = find_tile<ROWS>(p, tile, slots, found);
        if (n == 0) return;
        expert = found[0];
    } else {
        if (row0 >= p.rows) return;
        n = p.rows - row0 < ROWS ? p.rows - row0 : ROWS;
    }
    u32 own = (u32)__cvta_generic_to_shared(shared), base = (own + 1023) & ~1023u, chunks = p.inputs / 128;
    const u8 *stages = shared + (base - own);
    u32 *code_from = (u32 *)(stages + STAGES * STAGE), *scale_from = code_from + ROWS;
    // Of pairs: where scales of the result go, and 64 rows of a warpgroup's results, so far apart that a warp's share no banks.
    constexpr u32 PITCH = 68;
    u64 *sums_from = (u64 *)(scale_from + ROWS);
    float *held = (float *)(sums_from + ROWS) + group * 64 * PITCH;
    // Where a row's codes, scales and results begin, the first two in bytes; rows that are not there are computed as the first, and not kept.
    if (t < ROWS) {
        u32 in = t < n ? t : 0, row = row0 + in, slot = 0, from = 0;
        if (p.order) {
            row = slots[in] / p.k;
            slot = slots[in] % p.k;
            from = slot < p.x_slots ? slot : p.x_slots - 1;
        }
        code_from[t] = row * (u32)p.x_row + from * (u32)p.x_slot;
        scale_from[t] = (row * (u32)p.xs_row + from * (u32)p.xs_slot) * 4;
        if constexpr (PAIRS) {
            out_from[t] = row * params.codes_row + slot * params.codes_slot;
            sums_from[t] = row * params.scales_row + slot * params.scales_slot;
        } else {
            out_from[t] = row * p.out_row + slot * p.out_slot;
        }
    }
    if (t == 0) {
        planes[0] = p.w + expert * p.w_expert + o0 * p.w_row;
        planes[1] = p.s + expert * p.s_expert + o0 * p.s_row;
        planes[2] = p.b + expert * p.b_expert + o0 * p.s_row;
        if constexpr (PAIRS) {
            planes[3] = params.w + expert * p.w_expert + o0 * p.w_row;
            planes[4] = params.s + expert * p.s_expert + o0 * p.s_row;
            planes[5] = params.b + expert * p.b_expert + o0 * p.s_row;
        }
    }
    __syncthreads();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        t &= 127;
        u32 last = p.outputs - 1 - o0;
        u32 x_to = X + (t >> 3) * 128 + ((t & 7) ^ (t >> 3 & 7)) * 16, w_to = W + (t >> 2) * 80 + (t & 3) * 16;
        u32 xs_to = XS + (t >> 1) * 16 + (t & 1) * 4;
#pragma unroll 1
        for (u32 c = 0; c < chunks; c++) {
            u32 at = c % STAGES, to = base + at * STAGE;
            if (c >= STAGES) mark_wait(empty + 8 * at, (c / STAGES - 1) & 1);
#pragma unroll
            for (u32 i = 0; i < ROWS / 16; i++) {
                u32 from = code_from[(t >> 3) + 16 * i] + c * 128 + (t & 7) * 16;
                copy_ahead<16>(to + x_to + i * 2048, (const u8 *)p.x + from);
            }
#pragma unroll
            for (u32 i = 0; i < OUTS / 32; i++) {
                // Of pairs 64 of the gate lie before 64 of the other.
                u32 o = (t >> 2) + (PAIRS ? i / 4 * 64 + i % 2 * 32 : 32 * i);
                u32 from = (o < last ? o : last) * (u32)p.w_row + c * 64 + (t & 3) * 16;
                copy_ahead<16>(to + w_to + i * 32 * 80, (const u8 *)planes[PAIRS ? i / 2 % 2 * 3 : 0] + from);
            }
            u32 from = scale_from[t] + c * 8;
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                copy_ahead<4>(to + xs_to + h * ROWS * 8, (const u8 *)p.xs + (from + h * 4));
                copy_ahead<4>(to + xs_to + h * ROWS * 8 + 8, (const u8 *)p.xsum + (from + h * 4));
            }
#pragma unroll
            for (u32 i = 0; i < OUTS / 128; i++) {
                u32 o = t + i * 128, of = PAIRS ? i * 64 + t % 64 : o, row = (of < last ? of : last) * (u32)p.s_row + c * 4;
                u32 which = PAIRS ? t / 64 * 3 : 0;
                copy_ahead<4>(to + WS + o * 4, (const u8 *)planes[which + 1] + row);
                copy_ahead<4>(to + WS + OUTS * 4 + o * 4, (const u8 *)planes[which + 2] + row);
            }
            mark_copies(full + 8 * at);
        }
        // Nothing is on its way when these end.
        copies_end();
        copies_wait<0>();
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    u32 m0 = group * 128 + warp * 16 + g;
    // A descriptor of rows: 128 bytes swizzled, 1,024 bytes from eight to the next eight, and where they begin.
    u64 rows_at = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | ((base + X) & 0x3ffff) >> 4;
    float acc[STEPS][2][STEP / 2], scale[2][2], bias[2][2];
    int d[2][2][STEP / 2] = {};
    u32 q[2][8];
#pragma unroll
    for (u32 i = 0; i < STEPS; i++)
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 e = 0; e < STEP / 2; e++) acc[i][m][e] = 0.0f;
    // A group's codes of outputs g and g + 8 of sixteen, of each 64: four of every sixteen, as the rows' lie in their 64 bytes.
    auto take = [&](const u8 *stage, u32 h) {
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 k = 0; k < 8; k++)
                q[m][k] = unpack_four(*(const u16 *)(stage + W + (m0 + m * 64 + (k & 1) * 8) * 80 + h * 32 + (k >> 1) * 8 + quad * 2));
#pragma unroll
        for (u32 m = 0; m < 2; m++) pin<8>(q[m]);
    };
    auto issue = [&](u64 at, int sums[2][STEP / 2]) {
        products_begin();
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            multiply_rows<false>(sums[m], q[m], at);
            multiply_rows<true>(sums[m], q[m] + 4, at + 2);
        }
        products_end();
    };
    // Scales and sums of rows 2 * quad and the next, of the eight rows j; those of a step's first eight are asked for a step before.
    auto rows_of = [&](u32 from, u32 h, u32 j) { return ((const float4 *)(stages + from + XS + h * ROWS * 8))[j * 4 + quad]; };
    mark_wait(full, 0);
    copies_seen();
    take(stages, 0);
    issue(rows_at, d[0]);
    float4 first = rows_of(0, 0, 0);
    u32 stage = 0, at = 0, parity = 0;
#pragma unroll 1
    for (u32 i = 0; i < 2 * chunks; i++) {
        u32 h = i & 1, from = stage, free = empty + 8 * at;
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const u8 *from = stages + stage + WS + (m0 + m * 64 + k * 8) * 4 + h * 2;
                scale[m][k] = __uint_as_float((u32)*(const u16 *)from << 16);
                bias[m][k] = __uint_as_float((u32)*(const u16 *)(from + OUTS * 4) << 16);
            }
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            float4 later;
            products_wait();
#pragma unroll
            for (u32 m = 0; m < 2; m++) pin<STEP / 2>((u32 *)d[step & 1][m]);
            if (step + 1 < STEPS) {
                issue(rows_at + (stage + h * 64 + (step + 1) * STEP * 128 >> 4), d[(step + 1) & 1]);
                later = rows_of(stage, h, (step + 1) * STEP / 8);
            } else {
                // The next group. Past the last one this multiplies whatever is there, and nobody keeps what comes of it.
                if (h) {
                    at = at + 1 == STAGES ? 0 : at + 1;
                    parity ^= at == 0;
                    stage = at * STAGE;
                    if (i + 1 < 2 * chunks) mark_wait(full + 8 * at, parity);
                    copies_seen();
                }
                take(stages + stage, h ^ 1);
                issue(rows_at + (stage + (h ^ 1) * 64 >> 4), d[0]);
                later = rows_of(stage, h ^ 1, 0);
            }
            if (step * STEP < n) {
#pragma unroll
                for (u32 j = 0; j < STEP / 8; j++) {
                    float4 r = j ? rows_of(from, h, step * STEP / 8 + j) : first;
#pragma unroll
                    for (u32 m = 0; m < 2; m++)
#pragma unroll
                        for (u32 e = 0; e < 4; e++) {
                            float &a = acc[step][m][j * 4 + e];
                            a = fmaf(scale[m][e >> 1] * (e & 1 ? r.y : r.x), (float)d[step & 1][m][j * 4 + e], a);
                            a = fmaf(bias[m][e >> 1], e & 1 ? r.w : r.z, a);
                        }
                }
            }
            first = later;
        }
        if (h) {
            __syncwarp();
            mark_arrive(free);
        }
    }
    products_wait();
    if constexpr (PAIRS) {
        auto together = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
        u32 o = o0 + group * 64, in = t & 127, eighth = in / 16, unit = in % 16;
        // 64 rows at a time.
#pragma unroll
        for (u32 part = 0; part < 2; part++) {
            if (part) together();
#pragma unroll
            for (u32 s = 0; s < STEPS / 2; s++) {
                u32 step = part * (STEPS / 2) + s;
                if (step * STEP >= n) break;
#pragma unroll
                for (u32 j = 0; j < STEP / 8; j++)
#pragma unroll
                    for (u32 e = 0; e < 4; e++)
                        held[(s * STEP + j * 8 + quad * 2 + (e & 1)) * PITCH + warp * 16 + g + 8 * (e >> 1)] =
                            silu_(acc[step][0][j * 4 + e]) * acc[step][1][j * 4 + e];
            }
            together();
            // Sixteen lanes a row, which is every eighth of a thread's.
            float4 v[8];
            u32 four[8];
            float unit_scale, unit_sum;
#pragma unroll
            for (u32 c = 0; c < 8; c++) v[c] = *(const float4 *)(held + (c * 8 + eighth) * PITCH + unit * 4);
            codes_of_groups<8>(v, four, unit_scale, unit_sum);
            if (o >= p.outputs) continue;
#pragma unroll
            for (u32 c = 0; c < 8; c++) {
                u32 r = part * 64 + c * 8 + eighth;
                if (r < n) *(u32 *)((u8 *)params.codes + (out_from[r] + o + unit * 4)) = four[c];
            }
            u32 r = part * 64 + unit * 8 + eighth;
            if (unit < 8 && r < n) {
                ((float *)params.scales)[sums_from[r] + o / 64] = unit_scale;
                ((float *)params.sums)[sums_from[r] + o / 64] = unit_sum;
            }
        }
    } else {
#pragma unroll
        for (u32 step = 0; step < STEPS; step++)
#pragma unroll
            for (u32 j = 0; j < STEP / 8; j++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    u32 r = step * STEP + j * 8 + quad * 2 + e;
                    if (r < n) {
                        float *out = (float *)p.out + out_from[r];
#pragma unroll
                        for (u32 m = 0; m < 2; m++)
#pragma unroll
                            for (u32 half = 0; half < 2; half++) {
                                u32 o = o0 + m0 + m * 64 + 8 * half;
                                if (o < p.outputs) out[o] = acc[step][m][j * 4 + 2 * half + e];
                            }
                    }
                }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(384, 1) hopper_128(const Linear p) { hopper_tile<false>(p); }
extern "C" __global__ void __launch_bounds__(384, 1) hopper_pairs_128(const Pairs p) { hopper_tile<true>(p); }
