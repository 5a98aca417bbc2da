// What all kernels share: operands, steps, and the arithmetic of formats/src/op/mod.rs, bit for bit.
//
// Compiled without headers and without contraction (--fmad=false): every + - * / and sqrt below is one IEEE operation, and fmaf
// stands exactly where the contract says fma. A step is told where its rows belong in device memory, so a captured graph of it
// holds no position.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The codes of element types, as in formats/src/dtype.rs.
enum { F32 = 0, F16 = 1, BF16 = 2, U32 = 3, I8 = 4, U8 = 5 };
// The kinds of weight formats, the lowest byte of their codes.
enum { DENSE = 0, AFFINE = 1, MXFP4 = 2, NVFP4 = 3, MXFP8 = 4, BLOCKS = 5 };
// Numbers of block formats, the highest byte, as in formats/src/block.rs.
enum { Q4_0, Q5_0, Q8_0, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, TQ2_0, NVFP4_SCALED };

// One operand of a record, resolved: element (r, h, i) is at r * row + h * head + i.
struct Operand {
    u64 at;
    u64 row;
    u32 head;
    u32 dtype;
};

// Consecutive rows of one sequence, as the CPU's `Run`; offsets in bytes from the first slot's first version.
struct Run {
    u32 first, rows, pos, unused;
    u64 cache, from, to, stride;
};

// Where one row of a step belongs.
struct Row {
    u32 run, pos;
    u64 cache;
};

// A step's rows; `head[0]` is the number of runs.
struct Step {
    const u32 *head;
    const Run *runs;
    const Row *rows;
};

// One record: operands and attributes in record order.
struct Call {
    Operand o[12];
    u64 a[12];
    Step step;
};

#define DEVICE static __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define FULL 0xffffffffu

extern __shared__ __align__(16) u8 shared[];

// Before the first access to what an earlier kernel of the stream writes or still reads. Without the launch attribute it does nothing.
DEVICE void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The run that a tile of `per` rows is of, each run having tiles of its own; `tile` becomes its number within the run. False past the last.
DEVICE bool run_of_tile(const Step &step, u32 per, u32 &tile, Run &run) {
    u32 runs = step.head[0];
    for (u32 r = 0; r < runs; r++) {
        run = step.runs[r];
        u32 tiles = (run.rows + per - 1) / per;
        if (tile < tiles) return true;
        tile -= tiles;
    }
    return false;
}

DEVICE float real(u64 word) { return __uint_as_float((u32)word); }

template <class T> DEVICE T *at(const Operand &o, u64 r, u64 h) { return (T *)o.at + (r * o.row + h * o.head); }

DEVICE float half_to_float(u16 bits) {
    float x;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "h"(bits));
    return x;
}

DEVICE u16 float_to_half(float x) {
    u16 bits;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(bits) : "f"(x));
    return bits;
}

// Element i of float elements of any type, widened.
DEVICE float widen(const void *p, u32 dtype, u64 i) {
    if (dtype == BF16) return __uint_as_float((u32)((const u16 *)p)[i] << 16);
    if (dtype == F16) return half_to_float(((const u16 *)p)[i]);
    return ((const float *)p)[i];
}

DEVICE float get(const Operand &o, u64 r, u64 h, u64 i) { return widen((const void *)o.at, o.dtype, r * o.row + h * o.head + i); }

DEVICE float power_of_two(int n) { return __int_as_float((n + 127) << 23); }

// The contract's exp: see runtime/kernels/src/math.rs.
DEVICE float exp_(float x) {
    const float round = 12582912.0f;
    x = -104.0f > x ? -104.0f : x;
    x = 89.0f < x ? 89.0f : x;
    float shifted = fmaf(x, 1.44269504088896340736f, round);
    float n = shifted - round;
    float r = fmaf(n, -0.6933594f, x);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r * r, r) + 1.0f;
    int k = __float_as_int(shifted) - __float_as_int(round);
    int half = k >> 1;
    return p * power_of_two(half) * power_of_two(k - half);
}

DEVICE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }
DEVICE float silu_(float x) { return x * sigmoid_(x); }

// Folds a lane's accumulator with the others' in halves; every lane has the result (addition commutes, so the bits agree).
DEVICE float fold(float a) {
    a += __shfl_xor_sync(FULL, a, 16);
    a += __shfl_xor_sync(FULL, a, 8);
    a += __shfl_xor_sync(FULL, a, 4);
    a += __shfl_xor_sync(FULL, a, 2);
    a += __shfl_xor_sync(FULL, a, 1);
    return a;
}

DEVICE float warp_max(float m) {
    for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, d));
    return m;
}

DEVICE int warp_sum(int n) {
    for (int d = 16; d; d >>= 1) n += __shfl_xor_sync(FULL, n, d);
    return n;
}

// E4M3 and E8M0 as in formats/src/quant.rs.
DEVICE float e4m3(u32 b) {
    u32 e = b >> 3 & 15, m = b & 7;
    float x = e ? __uint_as_float((e + 120) << 23 | m << 20) : (float)m * 0.001953125f;
    return b & 0x80 ? -x : x;
}

DEVICE float e8m0(u32 b) { return b ? __uint_as_float(b << 23) : __uint_as_float(0x00400000u); }

// Twice the value of an E2M1 code.
DEVICE int e2m1_doubled(u32 c) {
    int m = (int)((c & 4 ? 0x0c080604u : 0x03020100u) >> (8 * (c & 3)) & 0xff);
    return c & 8 ? -m : m;
}

// Code i of a packed row.
DEVICE u32 code_at(const u32 *row, u32 bits, u64 i) {
    u64 p = i * bits;
    u32 lo = row[p >> 5], sh = (u32)p & 31;
    u32 v = lo >> sh;
    if (sh + bits > 32) v |= row[(p >> 5) + 1] << (32 - sh);
    return v & ((1u << bits) - 1);
}

// The scale of group g in the form the integer products multiply with.
DEVICE float scale_of(u32 kind, const void *row, u32 dtype, u64 g) {
    if (kind == AFFINE) return widen(row, dtype, g);
    u32 b = ((const u8 *)row)[g];
    if (kind == MXFP4) return e8m0(b) * 0.5f;
    if (kind == NVFP4) return e4m3(b) * 0.5f;
    return e8m0(b);
}

// Weight i of a row as a float.
DEVICE float weight_at(u64 format, const void *w, const void *s, const void *b, u64 i) {
    u32 kind = format & 255, bits = format >> 8 & 255, group = format >> 16 & 255, dtype = format >> 24 & 255;
    if (kind == DENSE) return widen(w, dtype, i);
    u64 g = i / group;
    if (kind == AFFINE) return fmaf(widen(s, dtype, g), (float)code_at((const u32 *)w, bits, i), widen(b, dtype, g));
    if (kind == MXFP8) return e4m3(((const u8 *)w)[i]) * e8m0(((const u8 *)s)[g]);
    return (float)e2m1_doubled(code_at((const u32 *)w, 4, i)) * scale_of(kind, s, 0, g);
}

// Block formats: weights of a group, and whether codes are indices into a table.
DEVICE u32 block_group(u32 block) { return block == Q2_K || block == Q3_K || block == Q6_K || block == NVFP4_SCALED ? 16 : block == TQ2_0 ? 128 : 32; }
DEVICE bool block_has_table(u32 block) { return block == IQ4_NL || block == IQ4_XS || block == NVFP4_SCALED; }

// What a code exceeds the integer by that it stands for.
DEVICE float block_offset(u32 block) {
    return block == Q4_0 ? 8.0f : block == Q5_0 ? 16.0f : block == Q8_0 ? 128.0f : block == Q3_K ? 4.0f : block == Q6_K ? 32.0f : block == TQ2_0 ? 1.0f : 0.0f;
}

// What the parameters of 32 weights of a block format are made of, as it is stored: bytes of small integers, or of scales, and factors.
struct Params {
    u32 a, b, c, d, m;
};

// Reads them, of unit u of a row, from the row's planes after the codes.
DEVICE void ask_params(Params &to, u32 block, const u8 *s, const u8 *supers, u32 u) {
    u32 of = u >> 3, j = u & 7;
    if (block <= IQ4_NL || block == TQ2_0) {
        to.d = ((const u16 *)s)[block == TQ2_0 ? of : u];
        return;
    }
    if (block == NVFP4_SCALED) {
        to.a = ((const u16 *)s)[u];
        to.d = *(const u32 *)supers;
        return;
    }
    if (block == Q4_K || block == Q5_K) {
        s += of * 12 + (j & 3);
        to.a = s[0], to.b = s[4], to.c = s[8];
    } else if (block == Q3_K) {
        const u16 *pair = (const u16 *)(s + of * 12);
        to.a = pair[j & 3], to.b = pair[4 + (j & 1)];
    } else if (block == IQ4_XS) to.a = s[of * 8 + j];
    else to.a = ((const u16 *)(s + of * 16))[j];
    const u16 *d = (const u16 *)supers;
    if (block == Q4_K || block == Q5_K || block == Q2_K) to.d = d[2 * of], to.m = d[2 * of + 1];
    else to.d = d[of];
}

// Scale and bias of the unit, or of each half of it; of a format with a table the bias means nothing.
DEVICE void params_of(const Params &from, u32 block, u32 u, float *scale, float *bias) {
    if (block == NVFP4_SCALED) {
        scale[0] = e4m3(from.a & 255) * 0.5f * __uint_as_float(from.d);
        scale[1] = e4m3(from.a >> 8) * 0.5f * __uint_as_float(from.d);
        return;
    }
    float d = half_to_float((u16)from.d);
    u32 j = u & 7;
    if (block == Q4_K || block == Q5_K) {
        u32 s = j < 4 ? from.a & 63 : (from.c & 15) | (from.a >> 6 << 4), m = j < 4 ? from.b & 63 : from.c >> 4 | (from.b >> 6 << 4);
        scale[0] = scale[1] = d * (float)s;
        bias[0] = bias[1] = -(half_to_float((u16)from.m) * (float)m);
        return;
    }
    if (block == Q2_K) {
        float dmin = half_to_float((u16)from.m);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            scale[i] = d * (float)(from.a >> 8 * i & 15);
            bias[i] = -(dmin * (float)(from.a >> (8 * i + 4) & 15));
        }
        return;
    }
    if (block == Q3_K) {
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            scale[i] = d * (float)((int)((from.a >> (8 * i + (j >> 2) * 4) & 15) | (from.b >> (8 * i + (j >> 1) * 2) & 3) << 4) - 32);
    } else if (block == Q6_K) {
        scale[0] = d * (float)((int)(from.a & 255) - 128);
        scale[1] = d * (float)((int)(from.a >> 8) - 128);
    } else scale[0] = scale[1] = block == IQ4_XS ? d * (float)((int)from.a - 32) : d;
    bias[0] = -(block_offset(block) * scale[0]);
    bias[1] = -(block_offset(block) * scale[1]);
}

// Weight i of a row in a block format.
DEVICE float block_weight_at(u64 format, const void *w, const void *s, const void *supers, u64 i) {
    u32 block = format >> 24, bits = format >> 8 & 255, u = i / 32, half = i / 16 & 1, code = code_at((const u32 *)w, bits, i);
    Params params;
    float scale[2], bias[2];
    ask_params(params, block, (const u8 *)s, (const u8 *)supers, u);
    params_of(params, block, u, scale, bias);
    float by = half ? scale[1] : scale[0], plus = half ? bias[1] : bias[0];
    if (!block_has_table(block)) return fmaf(by, (float)code, plus);
    if (block == NVFP4_SCALED) return by * (float)e2m1_doubled(code);
    u64 table = code & 8 ? 0x7159453526190d01u : 0xf6eaddcfbfad9881u;
    return by * (float)(i8)(table >> 8 * (code & 7));
}

// Row r of a plane of a weight, in bytes.
DEVICE const u8 *plane_row(const Operand &o, u64 r) {
    if (!o.at) return 0;
    u32 size = o.dtype == F16 || o.dtype == BF16 ? 2 : o.dtype == I8 || o.dtype == U8 ? 1 : 4;
    return (const u8 *)o.at + r * o.row * size;
}

// Copies to shared memory that go on by themselves.
template <int BYTES> DEVICE void copy_ahead(u32 to, const void *from) {
    if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }
