// Products with quantised weights for one to a few rows: exact integer dots by dp4a, groups folded in order.
//
// A warp takes OUT outputs and R rows. A lane's unit is 32 consecutive codes; the dots of a chunk of 1,024 codes go to shared memory,
// where one lane an output and row folds them: fma(scale * xscale, dot), then fma(bias, xsum), group after group, as the contract
// says. Activations are staged in shared memory by every block: copied, or made there from the values they come from, which saves
// the steps in between (the arithmetic is theirs). Weights of the first chunk are asked for before the wait for earlier kernels.

enum { KIND_Q4 = 0, KIND_E2M1 = 1, KIND_ANY = 2 };

DEVICE int dot_u8(u32 w, u32 x, int acc) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(w), "r"(x), "r"(acc));
    return d;
}

DEVICE int dot_s8(u32 w, u32 x, int acc) {
    int d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(w), "r"(x), "r"(acc));
    return d;
}

// Eight codes of four bits as bytes in order.
DEVICE void unpack_q4(u32 w, u32 *out) {
    u32 lo = w & 0x0f0f0f0f, hi = w >> 4 & 0x0f0f0f0f;
    out[0] = prmt(lo, hi, 0x5140);
    out[1] = prmt(lo, hi, 0x7362);
}

// Four E2M1 codes, in the lower half of s, as bytes of twice their values.
DEVICE u32 unpack_e2m1(u32 s) {
    u32 index = s & 0x7777, sign = s >> 3 & 0x1111;
    u32 mask = prmt(0x0000ff00, 0, sign);
    return (prmt(0x03020100, 0x0c080604, index) & ~mask) | (prmt(0xfdfeff00, 0xf4f8fafc, index) & mask);
}

// The unit at `row` (bits words) as 32 bytes.
template <int KIND> DEVICE void unpack(const uint4 &raw, const u32 *row, u32 bits, u32 *out) {
    if (KIND == KIND_Q4) {
        unpack_q4(raw.x, out);
        unpack_q4(raw.y, out + 2);
        unpack_q4(raw.z, out + 4);
        unpack_q4(raw.w, out + 6);
    } else if (KIND == KIND_E2M1) {
        u32 w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[2 * i] = unpack_e2m1(w[i]);
            out[2 * i + 1] = unpack_e2m1(w[i] >> 16);
        }
    } else {
        u32 mask = (1u << bits) - 1;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 p = j * 4 * bits, k = p >> 5, sh = p & 31;
            u64 both = row[k];
            if (sh + 4 * bits > 32) both |= (u64)row[k + 1] << 32;
            u32 v = (u32)(both >> sh);
            out[j] = (v & mask) | (v >> bits & mask) << 8 | (v >> 2 * bits & mask) << 16 | (v >> 3 * bits & mask) << 24;
        }
    }
}

// Bits of a parameter, and the number they are.
DEVICE u32 parameter(const u8 *row, u32 dtype, u32 g) { return dtype == F32 ? ((const u32 *)row)[g] : ((const u16 *)row)[g]; }
DEVICE float number(u32 bits, u32 dtype) {
    return dtype == BF16 ? __uint_as_float(bits << 16) : dtype == F16 ? half_to_float((u16)bits) : __uint_as_float(bits);
}
DEVICE float block_scale(u32 bits, u32 kind) { return (kind == NVFP4 ? e4m3(bits) : e8m0(bits)) * 0.5f; }

// Where the activations of a block lie in shared memory.
struct Staged {
    i8 *codes;    // [R][inputs]
    float *scale; // [R][groups]
    float *sum;   // [R][groups]
};

// One value that is to be quantised; `x` and `y` are one row's.
DEVICE float staged_value(const Linear &p, const float *x, const float *y, float inv, u32 i) {
    float v = x[i];
    if (p.stage == STAGE_NORM) v = (v * inv) * y[i];
    return finite(v);
}

// The factors of a norm, which nothing earlier makes.
DEVICE void stage_factors(const Linear &p, float *y) {
    float offset = __uint_as_float(p.offset);
    for (u32 base = threadIdx.x; base < p.inputs; base += 4 * blockDim.x) {
        u32 raw[4];
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            u32 i = base + t * blockDim.x;
            raw[t] = i < p.inputs ? parameter((const u8 *)p.y, p.y_dtype, i) : 0;
        }
#pragma unroll
        for (u32 t = 0; t < 4; t++)
            if (base + t * blockDim.x < p.inputs) y[base + t * blockDim.x] = offset + number(raw[t], p.y_dtype);
    }
}

// Quantises the groups of n rows; `x` and `y` are the first row's. Short on purpose: a kernel runs this once, so every instruction is
// fetched for it.
template <int R>
DEVICE void stage_groups(const Linear &p, const Staged &to, const float *x, u64 x_row, const float *y, u32 n, float inv, u32 group) {
    u32 groups = p.inputs / group, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
#pragma unroll 1
    for (u32 u = warp; u < n * groups; u += warps) {
        u32 r = R == 1 ? 0 : u / groups, g = R == 1 ? u : u % groups, largest = 0;
        const float *from = x + r * x_row;
#pragma unroll 1
        for (u32 i = lane; i < group; i += 32) {
            float v = staged_value(p, from, y, inv, g * group + i);
            // Magnitudes are ordered as their bits are; a NaN is ignored.
            u32 bits = v == v ? __float_as_uint(fabsf(v)) : 0;
            largest = largest > bits ? largest : bits;
        }
        float m = __uint_as_float(__reduce_max_sync(FULL, largest)), inverse = 127.0f / m;
        int sum = 0;
#pragma unroll 1
        for (u32 i = lane; i < group; i += 32) {
            int q = activation_code(staged_value(p, from, y, inv, g * group + i), inverse, m == 0.0f);
            to.codes[r * p.inputs + g * group + i] = (i8)q;
            sum += q;
        }
        sum = __reduce_add_sync(FULL, sum);
        if (lane == 0) {
            float scale = m / 127.0f;
            to.scale[u] = scale;
            to.sum[u] = scale * (float)sum;
        }
    }
}

// Reads one row, all threads at a time, and with a norm finds what it multiplies with.
DEVICE void stage_held(const Linear &p, float *held, const float *x, float &inv) {
    __shared__ float inverse_root;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    bool leads = blockIdx.x == 0 && blockIdx.y == 0;
    for (u32 base = threadIdx.x; base < p.inputs; base += 4 * blockDim.x) {
        float v[4], w[4];
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            u32 i = base + t * blockDim.x;
            v[t] = i < p.inputs ? x[i] : 0.0f;
            if (p.x2) w[t] = i < p.inputs ? ((const float *)p.x2)[i] : 0.0f;
        }
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            u32 i = base + t * blockDim.x;
            if (i >= p.inputs) break;
            if (p.x2) {
                v[t] = v[t] + w[t];
                if (p.sum && leads) ((float *)p.sum)[i] = v[t];
            }
            held[i] = v[t];
        }
    }
    __syncthreads();
    if (p.stage == STAGE_NORM) {
        if (warp == 0) {
            float acc = 0.0f;
#pragma unroll 4
            for (u32 i = lane; i < p.inputs; i += 32) acc = fmaf(held[i], held[i], acc);
            inv = rms_inverse(acc, p.inputs, __uint_as_float(p.eps));
            if (lane == 0) inverse_root = inv;
        }
        __syncthreads();
        inv = inverse_root;
        if (p.normed && leads)
            for (u32 i = threadIdx.x; i < p.inputs; i += blockDim.x) ((float *)p.normed)[i] = (held[i] * inv) * held[p.inputs + i];
    }
}

// Fills `to` for rows row0 .. row0 + n; `slot` is the slot that is read. `held` has room for a row and its norm's factors.
template <int R> DEVICE void stage(const Linear &p, const Staged &to, float *held, u32 row0, u32 n, u32 slot, u32 group) {
    u32 groups = p.inputs / group;
    if (p.stage == STAGE_CODES) {
        u32 words = p.inputs / 4;
        for (u32 r = 0; r < n; r++) {
            const u32 *from = (const u32 *)((const i8 *)p.x + (row0 + r) * p.x_row + slot * p.x_slot);
            const float *s = (const float *)p.xs + (row0 + r) * p.xs_row + slot * p.xs_slot;
            const float *m = (const float *)p.xsum + (row0 + r) * p.xs_row + slot * p.xs_slot;
            for (u32 i = threadIdx.x; i < words; i += blockDim.x) ((u32 *)(to.codes + r * p.inputs))[i] = from[i];
            for (u32 i = threadIdx.x; i < groups; i += blockDim.x) {
                to.scale[r * groups + i] = s[i];
                to.sum[r * groups + i] = m[i];
            }
        }
        return;
    }
    const float *x = (const float *)p.x + row0 * p.x_row + slot * p.x_slot;
    u64 x_row = p.x_row;
    float inv = 0.0f;
    if (p.flags & HELD) {
        stage_held(p, held, x, inv);
        x = held;
        x_row = 0;
    }
    stage_groups<R>(p, to, x, x_row, held + p.inputs, n, inv, group);
}
// Weights of one chunk that a lane has asked for, as they are stored: whoever converted them here would wait for each.
template <int OUT> struct Asked {
    uint4 raw[OUT];
    u32 scale[OUT], second[OUT], bias[OUT];
};


// The weight's row of a place among the outputs; past the last, the last.
DEVICE u64 output_row(const Linear &p, u32 o) {
    o = o < p.outputs ? o : p.outputs - 1;
    return p.flags & PAIRS ? o / 2 + (o & 1) * (p.outputs / 2) : o;
}

// The slot at this place of the order, and the expert whose part it lies in; false past the last.
DEVICE bool chosen_slot(const Linear &p, u32 place, u32 &expert, u32 &slot) {
    const u32 *starts = (const u32 *)p.starts;
    u32 slots = p.rows * p.k, lo = 0, hi = p.experts;
    if (place >= slots) return false;
    while (hi - lo > 1) {
        u32 mid = (lo + hi) / 2;
        if (starts[mid] <= place) lo = mid;
        else hi = mid;
    }
    expert = lo;
    slot = ((const u32 *)p.order)[place];
    slot = slot < slots ? slot : slots - 1;
    return true;
}

template <int KIND, int OUT>
DEVICE void ask(Asked<OUT> &a, const Linear &p, const u8 *w, const u8 *s, const u8 *b, u32 o0, u32 chunk, u32 kind, u32 group,
                u32 dtype) {
    u32 u = chunk * 32 + (threadIdx.x & 31);
    if (u * 32 >= p.inputs) return;
    u32 g = u * 32 >> (31 - __clz(group));
#pragma unroll
    for (int o = 0; o < OUT; o++) {
        u64 row = output_row(p, o0 + o);
        if (KIND != KIND_ANY) a.raw[o] = *(const uint4 *)(w + row * p.w_row + u * 16);
        if (KIND == KIND_E2M1) {
            a.scale[o] = (s + row * p.s_row)[g];
            if (kind == NVFP4) a.second[o] = (s + row * p.s_row)[g + 1];
        } else {
            a.scale[o] = parameter(s + row * p.s_row, dtype, g);
            a.bias[o] = parameter(b + row * p.b_row, dtype, g);
        }
    }
}

// Shared memory: [R][inputs] codes, [R][groups] scales, [R][groups] sums, then a warp's [OUT * R][chunk groups + 1] pairs of scale
// and dot, [OUT][chunk groups + 1] biases, and [2][inputs] values that are held.
template <int KIND, int R, int OUT> DEVICE void linear(const Linear &p) {
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    u32 kind = p.format & 255, bits = p.format >> 8 & 255, group = p.format >> 16 & 255, dtype = p.format >> 24 & 255;
    u32 shift = 31 - __clz(group), groups = p.inputs >> shift, chunks = (p.inputs + 1023) / 1024, pitch = (1024 >> shift) + 1;
    const u8 *w = (const u8 *)p.w, *s = (const u8 *)p.s, *b = (const u8 *)p.b;
    u32 o0 = (blockIdx.x * warps + warp) * OUT, step = gridDim.x * warps * OUT;
    u32 place = blockIdx.z * gridDim.y + blockIdx.y, row0 = place * R, slot = 0, in_slot = 0;
    Asked<OUT> next;
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
    if (o0 < p.outputs) ask<KIND, OUT>(next, p, w, s, b, o0, 0, kind, group, dtype);
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
            Asked<OUT> now = next;
            bool more = c + 1 < chunks;
            u32 o1 = more ? o0 : o0 + step;
            if (o1 < p.outputs) ask<KIND, OUT>(next, p, w, s, b, o1, more ? c + 1 : 0, kind, group, dtype);
            u32 u = c * 32 + lane, g0 = c * 1024 >> shift;
            bool inside = u * 32 < p.inputs;
#pragma unroll
            for (int o = 0; o < OUT; o++) {
                u32 q[8];
                if (inside) {
                    u64 row = output_row(p, o0 + o);
                    unpack<KIND>(now.raw[o], (const u32 *)(w + row * p.w_row) + u * bits, bits, q);
                }
#pragma unroll 1
                for (int r = 0; r < R; r++) {
                    int d0 = 0, d1 = 0;
                    if (inside && r < n) {
                        const uint4 *v = (const uint4 *)(x.codes + r * p.inputs + u * 32);
                        uint4 a = v[0], e = v[1];
                        if (KIND == KIND_E2M1) {
                            d0 = dot_s8(q[3], a.w, dot_s8(q[2], a.z, dot_s8(q[1], a.y, dot_s8(q[0], a.x, 0))));
                            d1 = dot_s8(q[7], e.w, dot_s8(q[6], e.z, dot_s8(q[5], e.y, dot_s8(q[4], e.x, 0))));
                        } else {
                            d0 = dot_u8(q[3], a.w, dot_u8(q[2], a.z, dot_u8(q[1], a.y, dot_u8(q[0], a.x, 0))));
                            d1 = dot_u8(q[7], e.w, dot_u8(q[6], e.z, dot_u8(q[5], e.y, dot_u8(q[4], e.x, 0))));
                        }
                    }
                    float2 *pair = pairs + (o * R + r) * pitch;
                    if (KIND == KIND_E2M1 && group == 16) {
                        if (inside && r < n) {
                            u32 g = 2 * lane;
                            pair[g] = make_float2(block_scale(now.scale[o], kind) * x.scale[r * groups + g0 + g], (float)d0);
                            pair[g + 1] = make_float2(block_scale(now.second[o], kind) * x.scale[r * groups + g0 + g + 1], (float)d1);
                        }
                        continue;
                    }
                    int d = d0 + d1;
                    if (group >= 64) d += __shfl_xor_sync(FULL, d, 1);
                    if (group == 128) d += __shfl_xor_sync(FULL, d, 2);
                    u32 g = lane * 32 >> shift;
                    if (inside && r < n && (lane * 32 & (group - 1)) == 0) {
                        float scale = KIND == KIND_E2M1 ? block_scale(now.scale[o], kind) : number(now.scale[o], dtype);
                        pair[g] = make_float2(scale * x.scale[r * groups + g0 + g], (float)d);
                        if (KIND != KIND_E2M1 && r == 0) biases[o * pitch + g] = number(now.bias[o], dtype);
                    }
                }
            }
            __syncwarp();
            if (lane < OUT * R) {
                u32 o = lane / R, r = lane % R, many = groups - g0 < pitch - 1 ? groups - g0 : pitch - 1;
                const float2 *pair = pairs + lane * pitch;
                const float *bias = biases + o * pitch, *sum = x.sum + r * groups + g0;
                if (r < n) {
                    if (KIND != KIND_E2M1) {
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
        if (OUT > 1 && (p.flags & PAIRS)) {
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

#define LINEAR(name, kind, r, out)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) name(const Linear p) { linear<kind, r, out>(p); }
LINEAR(linear_q4_1x1, KIND_Q4, 1, 1)
LINEAR(linear_q4_1x4, KIND_Q4, 1, 4)
LINEAR(linear_q4_8x4, KIND_Q4, 8, 4)
LINEAR(linear_e2m1_1x4, KIND_E2M1, 1, 4)
LINEAR(linear_e2m1_8x4, KIND_E2M1, 8, 4)
LINEAR(linear_any_1x4, KIND_ANY, 1, 4)
LINEAR(linear_any_8x4, KIND_ANY, 8, 4)
